"""Queries for a pool, written by any OpenAI-compatible server (vLLM, Ollama, OpenAI), with the cost said beforehand.

python data_pipelines/queries_from_server.py POOL OUT MODEL [BASE_URL] [key=value …]

    runs/pool runs/queries qwen3:4b http://localhost:11434/v1                              # Ollama, no key
    runs/pool runs/queries gpt-4o-mini llm.mode=batch llm.budget.max_dollars=20            # OpenAI's Batch API
    runs/pool runs/queries gpt-4o-mini llm.requests_per_minute=500 max_skills=2000         # OpenAI, live

The key of OpenAI is read from OPENAI_API_KEY. The estimate is shown first; nothing is asked before you agree. A run
that stops, for whatever reason, goes on where it was: give the same line again.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.config import Config, apply_overrides
from skilltrain.data.synthesize import plan_synthesize
from skilltrain.errors import SkilltrainError
from skilltrain.recipe import run_pipeline
from skilltrain.stages import parse_recipe, run_recipe


class Pipeline(Config):
    """What this pipeline can be told."""

    pool: Path
    out: Path
    model: str
    base_url: str = "https://api.openai.com/v1"
    settings: list[str] = Field(default=[], description="further settings of stage synthesize, key=value")


def run(pipeline: Pipeline) -> dict[str, Any]:
    """The estimate, a question, the queries."""
    llm = {"kind": "openai", "model": pipeline.model, "base_url": pipeline.base_url, "concurrency": 32}
    values: dict[str, Any] = {"stage": "synthesize", "pool": pipeline.pool, "llm": llm, "out": pipeline.out}
    config = parse_recipe(apply_overrides(values, pipeline.settings), __file__)
    print(plan_synthesize(config))
    if input("Go ahead? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SkilltrainError("nothing was asked")
    return run_recipe(config, resume=None)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
