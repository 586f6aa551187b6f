"""Plan the memory and the hours of every training recipe by arithmetic. Nothing is trained.

Usage: python benchmarks/planned_memory.py

The networks have the true shapes of Qwen3 0.6B and 8B, but no weights. The memory is that of
`skilltrain train`: weights, gradients, AdamW's state, and the activations of a whole batch. CUDA
itself takes about 1 GiB more. The hours are tokens of an epoch over the goals of tokens per second,
which were not reached yet. A Markdown table goes to stdout.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from skilltrain.config import load_recipe, validate
from skilltrain.models.activations import layer_bytes
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.micro_batches import micro_batches
from skilltrain.stage import load_stage
from skilltrain.training.loop import GIB
from skilltrain.training.memory import activation_bytes, held_bytes
from skilltrain.training.optimizers import AdamW
from skilltrain.training.steps import StepSettings

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = (
    "sr_emb_0.6b",
    "sr_emb_8b",
    "sr_emb_8b_full",
    "qlora_24gb",
    "r3_emb_0.6b",
    "sr_rank_0.6b",
    "sr_rank_0.6b_pointwise",
    "sr_rank_8b",
    "sr_rank_8b_full",
    "r3_rank_0.6b",
)
# GPUs that share a model, and the memory of each, as the recipe's header says. Shared models need
# more than the plan: gathered layers, gathered gradients, and whole weights while they are loaded.
SHARED = {"sr_emb_8b_full": (4, 80), "sr_rank_8b_full": (4, 80), "qlora_24gb": (4, 24)}
CARDS = (16, 24, 32, 48, 80, 141)  # GiB of the cards for one GPU
USABLE_SHARE = 0.9  # of a card, as in training/memory.py
# Qwen3 has the same number of key heads and the same width of a head in both sizes.
SHARED_SHAPE = {"vocab_size": 151_669, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
NF4_BYTES = 0.516  # of a weight in 4 bits, with its share of the scales
# Tokens of a text. R3 does not cut its texts by characters, so they have the limit of the recipe.
SKILL_TOKENS = 700
QUERY_TOKENS = 100
PROMPT_TOKENS = 300  # of a reranker: its instructions and the query
SKILLS_PER_LIST = {"train_encoder": 11, "train_reranker": 20}
LISTS_PER_EPOCH = {"train_encoder": 37_979, "train_reranker": 32_283}  # of the paper's data
# Goals on one H100, in tokens per second, by stage and size. There is none for a whole 8B model.
GOALS = {
    ("train_encoder", "0.6B"): 60_000,
    ("train_reranker", "0.6B"): 25_000,
    ("train_encoder", "8B"): 6_500,
    ("train_reranker", "8B"): 6_500,
}


@dataclass(frozen=True)
class Plan:
    """The plan of one recipe.

    Attributes:
        name: Name of the recipe.
        num_gpus: GPUs that share the model and the batch.
        gib: Memory of each GPU.
        two_pass_gib: The same with `training.two_pass`. None for a reranker.
        hours: Hours of an epoch. None without a goal or without a known number of lists.
    """

    name: str
    num_gpus: int
    gib: float
    two_pass_gib: float | None
    hours: float | None


def load_config(name: str) -> Any:
    """Return the settings of a recipe."""
    path = RECIPES / f"{name}.yaml"
    values = load_recipe(path)
    return validate(load_stage(values["stage"]), values, path)


@cache
def network_of(stage: str, size: str, adapter: Any) -> Any:
    """Return a network without weights, and the adapter's matrices if there is one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

    network_class: Any = Qwen3Model if stage == "train_encoder" else Qwen3ForCausalLM
    dtype = torch.bfloat16 if adapter else torch.float32  # frozen weights are in bfloat16
    with torch.device("meta"):
        network = network_class(Qwen3Config(**SHARED_SHAPE, **SHAPES[size])).to(dtype)
        if adapter:
            # The frozen weights of a quantised network are counted in `state_bytes`.
            add_adapter(network, adapter.model_copy(update={"quantize": "none"}))
    return network


@cache
def cached_layer_bytes(stage: str, size: str, adapter: Any) -> float:
    """Return the bytes that a layer keeps per token."""
    return layer_bytes(network_of(stage, size, adapter), torch.bfloat16)


def state_bytes(network: Any, adapter: AdapterConfig | None) -> float:
    """Return the bytes of weights, gradients and AdamW's state."""
    total = held_bytes(network, AdamW())
    if adapter and adapter.quantize == "nf4":
        for module in network.modules():
            weight = getattr(module, "weight", None)
            is_linear = isinstance(module, torch.nn.Linear)
            if is_linear and weight is not None and not weight.requires_grad:
                total -= weight.numel() * (weight.element_size() - NF4_BYTES)
    return total


def text_lengths(config: Any) -> tuple[list[int], int]:
    """Return the lengths of the texts of a batch, and of the prompt that they share."""
    num_skills = SKILLS_PER_LIST[config.stage]
    is_cut = config.model.template.skill.body_chars < 10_000
    if config.stage == "train_encoder":
        limit = config.model.max_tokens
        skill, query = (SKILL_TOKENS, QUERY_TOKENS) if is_cut else (limit, QUERY_TOKENS)
        batch_size = config.training.batch_size
        return [skill] * (num_skills * batch_size) + [query] * batch_size, 0
    length = PROMPT_TOKENS + SKILL_TOKENS if is_cut else config.model.max_tokens
    return [length] * num_skills, PROMPT_TOKENS


def plan_recipe(name: str) -> Plan:
    """Return the plan of a recipe."""
    config = load_config(name)
    size = "8B" if "8B" in config.model.source else "0.6B"
    network = network_of(config.stage, size, config.adapter)
    num_gpus, _ = SHARED.get(name, (1, 0))

    # Cut the texts into micro-batches without padding.
    lengths, num_shared = text_lengths(config)
    budget = config.training.token_budget
    tokens = []
    for group in micro_batches(lengths, budget, num_shared):
        tokens.append(num_shared + sum(lengths[position] - num_shared for position in group))

    # Add the state and the activations. Several GPUs share the state, and an encoder's batch. For a
    # reranker, each GPU has a list of its own.
    num_sharing = num_gpus if config.stage == "train_encoder" else 1
    settings = StepSettings(budget, recompute=bool(config.training.recompute))
    step: Any = SimpleNamespace(
        model=SimpleNamespace(network=network), padded_tokens=lambda _: tokens, settings=settings
    )
    bytes_per_token = cached_layer_bytes(config.stage, size, config.adapter)
    state = state_bytes(network, config.adapter) / num_gpus
    gib = (state + activation_bytes(step, [], bytes_per_token) / num_sharing) / GIB
    two_pass_gib = None
    if config.stage == "train_encoder":
        step.settings = replace(settings, two_pass=True)
        two_pass_gib = (state + activation_bytes(step, [], bytes_per_token)) / GIB

    hours = None
    has_goal = config.adapter is not None or size == "0.6B"
    if has_goal and num_gpus == 1 and name.startswith("sr_"):
        num_batches = LISTS_PER_EPOCH[config.stage] / config.training.batch_size
        hours = num_batches * sum(tokens) / GOALS[config.stage, size] / 3600
    return Plan(name, num_gpus, gib, two_pass_gib, hours)


def format_row(plan: Plan) -> str:
    """Return the row of a recipe in the table."""
    smallest_card = next(card for card in CARDS if plan.gib <= USABLE_SHARE * card)
    _, card = SHARED.get(plan.name, (1, smallest_card))
    two_pass = "" if plan.two_pass_gib is None else f"{plan.two_pass_gib:.1f}"
    hours = "" if plan.hours is None else f"{plan.hours:.1f}"
    return (
        f"| `{plan.name}` | {plan.gib:.1f} | {two_pass} | {plan.num_gpus} x {card} GB | {hours} |"
    )


def main() -> None:
    """Print the table."""
    print("| recipe | planned GiB a GPU | with `two_pass` | cards | planned hours |")
    print("|---|---:|---:|---|---:|")
    for name in NAMES:
        print(format_row(plan_recipe(name)), flush=True)


if __name__ == "__main__":
    main()
