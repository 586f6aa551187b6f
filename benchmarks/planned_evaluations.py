"""Plan the hours of the papers' evaluations on one H100 by arithmetic. Nothing is evaluated.

Usage: python benchmarks/planned_evaluations.py

The hours are floating-point operations over a speed. PyTorch counts the operations of networks that
have the true shapes, but no weights. The speeds are those behind the goals of planned_memory.py. An
operation of evaluation thus takes as long as a planned operation of training. A Markdown table goes
to stdout.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from planned_memory import (
    GOALS,
    PROMPT_TOKENS,
    RECIPES,
    SHAPES,
    SHARED_SHAPE,
    SKILL_TOKENS,
)
from torch.utils.flop_counter import FlopCounterMode

from skilltrain.config import load_recipe

# Number of skills in the pool, and number of rankings to rerank (all tasks of all tiers).
SIZES = {"skillrouter": (79_141, 150), "skillflow": (35_866, 87), "r3": (2_050, 5_696)}
# Key of SIZES for each recipe.
BENCHMARK_OF_RECIPE = {
    "paper/table_1_inputs": "skillrouter",
    "paper/table_4_encoders": "skillrouter",
    "paper/table_5_pipelines": "skillrouter",
    "paper/table_5_nd": "skillrouter",
    "paper/table_5_judges": "skillrouter",
    "paper/table_12_candidates": "skillrouter",
    "skillflow": "skillflow",
    "paper/skillflow_table_8": "skillflow",
    "paper/skillflow_table_9": "skillflow",
    "paper/skillflow_table_10": "skillflow",
    "paper/skillflow_table_11": "skillflow",
    "paper/skillflow_figure_3": "skillflow",
    "paper/skillflow_interleaved": "skillflow",
    "paper/r3_skill": "r3",
}
# Mean tokens of a skill by the limit of its body in characters: measured on 1,000 skills of
# `pool` in inputs.yaml with Qwen3's tokenizer.
TOKENS_BY_BODY_CHARS = {0: 50, 2_000: 530, 4_000: 620, 8_000: 1_230, 32_000: 1_500, 64_000: 1_500}
# Tokens of a reranker's prompt: its instructions and the query. SkillRouter's tasks have about 340.
# SkillFlow's reranker reads a short query that a chat model wrote.
TASK_TOKENS = {"skillrouter": 450, "skillflow": 50, "r3": 150}
BERT_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 8194,
}
# Shapes of BERT by a part of the model's name. bge-m3 has the shape of a large BERT.
BERT_SHAPES: dict[str, dict[str, int]] = {
    "large": BERT_LARGE,
    "m3": BERT_LARGE,
    "base": {},  # the defaults of BertConfig
    "MiniLM": {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
    },
}
# Forward passes that one step of training costs. Without an adapter: the pass, its repetition, and
# two for both gradients. With LoRA, the frozen weights need no gradient.
NUM_PASSES = {"0.6B": 4, "8B": 3}
SECONDS_PER_HOUR = 3600


@cache
def forward_operations(source: str, num_tokens: int) -> int:
    """Return the floating-point operations of one text in a forward pass.

    Args:
        source: Name of the model.
        num_tokens: Tokens of the text.
    """
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    shape = next((shape for part, shape in BERT_SHAPES.items() if part in source), None)
    with torch.device("meta"):
        if shape is not None:
            network: Any = BertModel(BertConfig(**shape))
        else:
            network = Qwen3Model(Qwen3Config(**SHARED_SHAPE, **SHAPES[goal_size(source)]))
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            network(torch.zeros(1, num_tokens, dtype=torch.long))
    return counter.get_total_flops()


def goal_size(source: str) -> str:
    """Return the size, 0.6B or 8B, whose training goal applies to a model."""
    return "8B" if "8b" in source.lower() else "0.6B"


@cache
def speed(stage: str, size: str) -> float:
    """Return the operations per second behind the goal of a training stage."""
    num_tokens = SKILL_TOKENS + (PROMPT_TOKENS if stage == "train_reranker" else 0)
    per_token = forward_operations(f"Qwen3-{size}", num_tokens) / num_tokens
    return GOALS[stage, size] * NUM_PASSES[size] * per_token


def skill_tokens(ranker: dict[str, Any], default_chars: int) -> int:
    """Return the mean tokens of a skill.

    Args:
        ranker: Settings of the ranker in a recipe.
        default_chars: Longest body, if the recipe does not say it.
    """
    template = ranker.get("template", {})
    # The recipes of the trained rerankers have limits in tokens, which cut few skills.
    if ranker["source"].startswith("runs/paper/sr_rank"):
        default_chars = 32_000
    body_chars = 8_000 if template == "skillrouter_released" else default_chars
    if isinstance(template, dict):
        skill = template.get("skill", {})
        body_chars = skill.get("body_chars", default_chars)
        if skill.get("fields") == "description":
            body_chars = 0
    if ranker.get("fields") == "nd":
        body_chars = 0
    # A length that is not listed counts as the model's limit in tokens, as in planned_memory.py.
    # R3's texts, for example, are not cut by characters.
    limit = ranker.get("max_tokens", 512 if "large" in ranker["source"] else 4096)
    return min(TOKENS_BY_BODY_CHARS.get(body_chars, limit), limit)


def models_of(system: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield the rankers of a system that run a model.

    Yields:
        The rankers before, as a text; the ranker; and the number of queries for each task.
    """
    rankers_before = ""
    for ranker in system["rankers"]:
        members = ranker["of"] if isinstance(ranker.get("of"), list) else [ranker.get("of", ranker)]
        for member in members:
            if member["kind"] in ("dense", "rerank"):
                yield rankers_before, member, ranker.get("count", 1)
        rankers_before += repr(ranker)


def plan_hours(name: str, benchmark: str) -> tuple[float, float]:
    """Return the planned hours of a recipe: for encoding skills, and for reranking.

    Every text and every pair counts once, as in `evaluate`. With `num_timed`, pairs count twice,
    because `evaluate` scores them again to measure latency.
    """
    num_skills, num_rankings = SIZES[benchmark]
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    is_timed = "num_timed" in recipe.get("analysis", {}) and benchmark == "skillrouter"

    # Systems share vectors of skills, and scores of the same pairs. The largest `keep` counts.
    encoding: dict[str, float] = {}
    reranking: dict[str, float] = {}
    for system in recipe["systems"]:
        for rankers_before, ranker, count in models_of(system):
            source = ranker["source"]
            settings = {**ranker, "keep": None, "cache": None}
            if ranker["kind"] == "dense":
                operations = forward_operations(source, skill_tokens(ranker, 2_500))
                seconds = num_skills * operations / speed("train_encoder", goal_size(source))
                encoding[repr(settings)] = seconds
                continue
            # A pair is cut to the model's limit.
            num_tokens = TASK_TOKENS[benchmark] + skill_tokens(ranker, 2_000)
            num_tokens = min(num_tokens, ranker.get("max_tokens", 4096))
            operations = forward_operations(source, num_tokens)
            num_pairs = num_rankings * count * ranker["keep"] * (2 if is_timed else 1)
            seconds = num_pairs * operations / speed("train_reranker", goal_size(source))
            key = f"{rankers_before} {settings} {count}"
            reranking[key] = max(seconds, reranking.get(key, 0))
    return sum(encoding.values()) / SECONDS_PER_HOUR, sum(reranking.values()) / SECONDS_PER_HOUR


def format_hours(hours: float) -> str:
    """Return hours with one decimal, or `<0.1`."""
    return "<0.1" if 0 < hours < 0.1 else f"{hours:.1f}"


def main() -> None:
    """Print the table."""
    print("| recipe | hours to encode skills | hours to rerank | planned hours |")
    print("|---|---:|---:|---:|")
    for name, benchmark in BENCHMARK_OF_RECIPE.items():
        encoding, reranking = plan_hours(name, benchmark)
        hours = [format_hours(value) for value in (encoding, reranking, encoding + reranking)]
        print(f"| `{name}` | {' | '.join(hours)} |", flush=True)


if __name__ == "__main__":
    main()
