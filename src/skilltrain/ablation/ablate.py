"""The command `skilltrain ablate`: a grid of variants and seeds, run to its end however often it is stopped."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skilltrain.ablation.execute import run_cells
from skilltrain.ablation.plan import describe_plan, make_plan
from skilltrain.ablation.results import Results, collect_results
from skilltrain.ablation.show import markdown, terminal_tables
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json, write_text
from skilltrain.report.numbers import counted, reading
from skilltrain.terminal import console, say

JSON_FILE, MARKDOWN_FILE = "ablation.json", "ablation.md"


def plan_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What `run_ablation` would do, for `--dry-run`; nothing is written. Raises SkilltrainError as it does."""
    plan = make_plan(file, overrides)
    found = describe_plan(plan)
    for cell in plan.cells:
        states = [f"{run.folder.name} ({run.state()})" for run in plan.chain(cell)]
        say(f"{cell}: {' → '.join(states)}")
    say(
        f"{counted(found['num_cells'], 'cell')}, {counted(found['num_runs'], 'run')}, of which "
        f"{found['num_runs_shared']} serve several cells and {found['num_runs_missing']} are still to do"
    )
    return found


def run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run all cells of the grid in `file`, write ablation.json and ablation.md, and return the verdicts.

    Finished runs are left as they are; a training that was stopped goes on from its newest checkpoint. A cell that
    fails is noted and the others go on; then SkilltrainError is raised at the end, when the tables are written. It is
    raised before any work for a fault in the file.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        fix = "leave accelerate launch out; on several GPUs, start the same command once a GPU"
        raise SkilltrainError("an ablation runs in one process", where=file, fix=fix)
    plan = make_plan(file, overrides)
    failed = run_cells(plan)
    results = collect_results(plan, failed)
    write_json(plan.grid.out / JSON_FILE, results.to_json())
    write_text(plan.grid.out / MARKDOWN_FILE, markdown(results))
    for table in terminal_tables(results):
        console.print(table)
    if failed:
        (variant, seed), error = next(iter(failed.items()))
        what = f"{len(failed)} of {len(plan.cells)} cells failed, first {variant}, seed {seed}: {error}"
        fix = f"the same command tries them again; the others stand in {plan.grid.out / MARKDOWN_FILE}"
        raise SkilltrainError(what, where=file, fix=fix)
    return {"out": str(plan.grid.out), "num_cells": len(plan.cells), "verdicts": _verdicts(results)}


def _verdicts(results: Results) -> dict[str, dict[str, dict[str, str]]]:
    """Evaluation → variant → measure → its difference to the baseline, and what may be said of it."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for table in results.tables:
        rows = found.setdefault(table.evaluation, {})
        for c in table.comparisons:
            text = f"{c.difference.mean:+.4f} [{c.difference.low:.4f}, {c.difference.high:.4f}], {reading(c)}"
            rows.setdefault(c.system, {})[c.measure] = text
    return found
