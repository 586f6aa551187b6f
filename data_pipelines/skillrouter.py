r"""Make the training lists of SkillRouter (sections 4.2 and 4.3).

recipes/sr_emb_*.yaml and recipes/sr_rank_*.yaml train on them.

Lists for the encoder, before it is trained:
    python data_pipelines/skillrouter.py SKILLS runs/full
Lists for the reranker, with the trained encoder:
    python data_pipelines/skillrouter.py SKILLS runs/full runs/full/sr_emb_0.6b
Lists for recipes/paper/*.yaml:
    python data_pipelines/skillrouter.py SKILLS runs/paper variant=paper
The same with the prompt of table 2, which you copy into a YAML file (docs/papers/skillrouter.md):
    python data_pipelines/skillrouter.py SKILLS runs/paper variant=paper prompt=table_2.yaml
Another model that writes queries, and other quotas:
    python data_pipelines/skillrouter.py SKILLS runs/other \
        llm='{kind: openai, model: gpt-4o}' quotas='{semantic: 6, lexical: 4}'

SKILLS is a folder of SKILL.md files, JSON Lines or parquet. GPT-4o-mini writes the queries, with
the key in OPENAI_API_KEY. `skilltrain synthesize --help` shows how to use another server, a local
model, or no model. Every setting of `Pipeline` below is an option.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.recipe import run_pipeline
from skilltrain.runs import run_stage
from skilltrain.stage import parse_recipe

INSTRUCTION = (
    "Given a task description, retrieve the most relevant skill document that would help an agent "
    "complete the task"
)
_PAPER_FILTER: dict[str, Any] = {
    "layers": [
        {"name": "name"},
        # (4.2) All trigrams count. Ours leaves out those of templates.
        {"name": "jaccard", "max_names": None},
        {"name": "cosine"},
    ]
}
# Settings in which the paper differs from our defaults, by the folder that a stage writes.
PAPER: dict[str, dict[str, Any]] = {
    "pool": {"drop_duplicates": False},  # (2.1) Ours drops skills with equal texts.
    "queries": {
        "prompt": "skillrouter",  # our words for table 2; ours: seven styles
        "max_skills": 37_979,  # (4.2) drawn by category; ours: one query for every skill
        "dev_share": 0,  # none are held out; ours: 5% of the skills
    },
    # (4.2) BM25 ranks the same top 50. Ours: the whole pool.
    "mined": {"lexical_among": "semantic"},
    "filtered": _PAPER_FILTER,
    # The best 3 of the top 50 by BM25. A random sample of the same 50 would be semantic negatives.
    "encoder_lists": {"best_of": ["lexical"]},
    # (4.3) 32,283 of 37,979 lists are left. Ours: the gold skill is added to the list.
    "reranker_lists": {"absent_gold": "drop"},
    "candidates_filtered": _PAPER_FILTER,  # (4.3) the same filter
}


class Pipeline(Config):
    """Settings of this pipeline."""

    skills: Path
    out: Path
    trained: Path | None = Field(
        default=None, description="the trained encoder, for the reranker's lists"
    )
    base: str = Field(
        default="Qwen/Qwen3-Embedding-0.6B", description="encoder that mines and filters"
    )
    llm: dict[str, Any] = Field(
        default={"kind": "openai", "model": "gpt-4o-mini"}, description="who writes queries"
    )
    prompt: str | None = Field(
        default=None, description="named prompt or YAML file for the queries; null: the variant's"
    )
    template: dict[str, Any] | None = Field(
        default={"instruction": INSTRUCTION}, description="what the base sees"
    )
    max_tokens: int | None = Field(
        default=2048, description="token limit of the base's texts, as in the recipes"
    )
    variant: Literal["ours", "paper"] = Field(
        default="ours", description="our defaults, or the paper's (PAPER above)"
    )
    depth: int = Field(
        default=50,
        description="candidates filtered before the cut to 20; 20: cut first, then filter",
    )
    quotas: dict[str, int] = Field(
        default={"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1},
        description="negatives in a list of the encoder, by source",
    )


def encoder_recipes(pipeline: Pipeline, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recipes that make the pool, the queries and the encoder's lists."""
    out = pipeline.out
    inputs = {"pool": out / "pool", "queries": out / "queries"}
    lists = {"stage": "lists", **inputs, "quotas": pipeline.quotas}
    recipes = [
        {
            "stage": "pool",
            "sources": pipeline.skills,
            "categories": "taxonomy",
            "encoder": base,
            "out": out / "pool",
        },
        {
            "stage": "synthesize",
            "pool": out / "pool",
            "llm": pipeline.llm,
            "out": out / "queries",
        },
        {"stage": "mine", **inputs, "encoder": base, "out": out / "mined"},
        {
            "stage": "filter",
            **inputs,
            "rankings": out / "mined",
            "encoder": base,
            "out": out / "filtered",
        },
        {**lists, "rankings": out / "filtered", "out": out / "encoder_lists"},
    ]
    if pipeline.variant == "paper":
        # Lists without the filter, for the ablation (5.4.1).
        raw = {"rankings": out / "mined", "out": out / "encoder_lists_raw"}
        recipes.append(lists | PAPER["encoder_lists"] | raw)
    return recipes


def reranker_recipes(pipeline: Pipeline, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recipes that make the reranker's lists of 20 from the trained encoder."""
    out = pipeline.out
    inputs = {"pool": out / "pool", "queries": out / "queries"}
    encoder = {"kind": "dense", "source": str(pipeline.trained), "cache": out / "vectors"}
    return [
        {
            "stage": "candidates",
            **inputs,
            "system": {"name": "trained encoder", "rankers": [encoder]},
            "depth": pipeline.depth,
            "out": out / "candidates",
        },
        {
            "stage": "filter",
            **inputs,
            "rankings": out / "candidates",
            "encoder": base,
            "judged_positives": "keep",
            "out": out / "candidates_filtered",
        },
        {
            "stage": "lists",
            **inputs,
            "rankings": out / "candidates_filtered",
            "list_size": 20,
            "out": out / "reranker_lists",
        },
    ]


def run(pipeline: Pipeline) -> None:
    """Make the encoder's lists, and with a trained encoder also the reranker's."""
    base = {
        "source": pipeline.base,
        "template": pipeline.template,
        "max_tokens": pipeline.max_tokens,
        "query_max_tokens": pipeline.max_tokens,
        "cache": pipeline.out / "vectors",
    }
    recipes = encoder_recipes(pipeline, base)
    if pipeline.trained is not None:
        recipes += reranker_recipes(pipeline, base)
    for recipe in recipes:
        if pipeline.variant == "paper":
            recipe |= PAPER.get(recipe["out"].name, {})
        if recipe["stage"] == "synthesize" and pipeline.prompt is not None:
            recipe["prompt"] = pipeline.prompt
        summary = run_stage(parse_recipe(recipe, __file__), resume=False)
        print(recipe["stage"], summary)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
