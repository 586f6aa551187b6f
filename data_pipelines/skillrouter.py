"""The training lists of SkillRouter (sections 4.2 and 4.3): what recipes/sr_emb_*.yaml and sr_rank_*.yaml train on.

python data_pipelines/skillrouter.py SKILLS runs/full                            # before the encoder is trained
python data_pipelines/skillrouter.py SKILLS runs/full runs/full/sr_emb_0.6b      # after: lists for the reranker
python data_pipelines/skillrouter.py SKILLS runs/paper variant=paper             # for recipes/paper/*.yaml
python data_pipelines/skillrouter.py SKILLS runs/other llm='{kind: openai, model: gpt-4o}' quotas='{semantic: 6, lexical: 4}'

SKILLS is a folder of SKILL.md files, JSON Lines or parquet. The queries are written by GPT-4o-mini, key in
OPENAI_API_KEY: look at `skilltrain synthesize --help` for another server, a local model, or none. Every setting of
`Pipeline` below is an option: llm, base, quotas, …
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.recipe import run_pipeline
from skilltrain.runs import run_stage
from skilltrain.stage import parse_recipe

INSTRUCTION = "Given a task description, retrieve the most relevant skill document that would help an agent complete the task"


# What the paper does otherwise than our defaults: folder → settings of the stage that writes it.
PAPER: dict[str, dict[str, Any]] = {
    "queries": {
        "prompt": "skillrouter",  # (table 2) ours: seven styles
        "max_skills": 37_979,  # (4.2) drawn by category; ours: one query for every skill
        "dev_share": 0,  # none are held back; ours: 5% of the skills
    },
    "mined": {
        "lexical_among": "semantic"
    },  # (4.2) BM25 on the same top 50; ours: on the whole pool
    "filtered": {
        "layers": [
            {"name": "name"},
            {
                "name": "jaccard",
                "max_names": None,
            },  # (4.2) all trigrams; ours: without those of templates
            {"name": "cosine"},
        ]
    },
    "encoder_lists": {
        "best_of": ["lexical"]
    },  # the best 3 of 50 by BM25; a draw from the same 50 would be semantic
    "reranker_lists": {
        "absent_gold": "drop"
    },  # (4.3) 32,283 of 37,979 lists are left; ours: gold is put in
}
PAPER["candidates_filtered"] = PAPER["filtered"]  # (4.3) the same filter


class Pipeline(Config):
    """What this pipeline can be told."""

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
        default={"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}
    )


def run(pipeline: Pipeline) -> None:
    """Pool, queries, negatives and the encoder's lists; with a trained encoder also its candidates in lists of 20."""
    out, pool = pipeline.out, pipeline.out / "pool"
    limits = {"max_tokens": pipeline.max_tokens, "query_max_tokens": pipeline.max_tokens}
    base = {
        "source": pipeline.base,
        "template": pipeline.template,
        **limits,
        "cache": out / "vectors",
    }
    inputs = {"pool": pool, "queries": out / "queries"}
    quotas, keep = {"quotas": pipeline.quotas}, {"judged_positives": "keep"}
    candidates, filtered = out / "candidates", out / "candidates_filtered"
    before: list[dict[str, Any]] = [
        {
            "stage": "pool",
            "sources": pipeline.skills,
            "categories": "taxonomy",
            "encoder": base,
            "out": pool,
        },
        {"stage": "synthesize", "pool": pool, "llm": pipeline.llm, "out": out / "queries"},
        {"stage": "mine", **inputs, "encoder": base, "out": out / "mined"},
        {
            "stage": "filter",
            **inputs,
            "rankings": out / "mined",
            "encoder": base,
            "out": out / "filtered",
        },
        {
            "stage": "lists",
            **inputs,
            "rankings": out / "filtered",
            **quotas,
            "out": out / "encoder_lists",
        },
    ]
    encoder = {"kind": "dense", "source": str(pipeline.trained), "cache": out / "vectors"}
    system = {"name": "trained encoder", "rankers": [encoder]}
    after: list[dict[str, Any]] = [
        {
            "stage": "candidates",
            **inputs,
            "system": system,
            "depth": pipeline.depth,
            "out": candidates,
        },
        {
            "stage": "filter",
            **inputs,
            "rankings": candidates,
            "encoder": base,
            **keep,
            "out": filtered,
        },
        {
            "stage": "lists",
            **inputs,
            "rankings": filtered,
            "list_size": 20,
            "out": out / "reranker_lists",
        },
    ]
    paper = PAPER if pipeline.variant == "paper" else {}
    if paper:  # without the filter, for the ablation (5.4.1)
        raw = {"rankings": out / "mined", "out": out / "encoder_lists_raw"}
        before.append(before[-1] | PAPER["encoder_lists"] | raw)
    for values in before + (after if pipeline.trained else []):
        recipe = values | paper.get(values["out"].name, {})
        print(recipe["stage"], run_stage(parse_recipe(recipe, __file__), resume=False))


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
