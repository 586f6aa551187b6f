"""The command `skilltrain ablate`: a grid of variants and seeds, run to its end however often it is stopped."""

import gc
import os
import shutil
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skilltrain.ablation.plan import Cell, Plan, StepRun, make_plan
from skilltrain.ablation.results import collect_results, markdown, terminal_table, verdicts
from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.files import write_json, write_text
from skilltrain.runs import CHECKPOINTS
from skilltrain.stages import run_recipe
from skilltrain.terminal import console, progress, say

JSON_FILE, MARKDOWN_FILE = "ablation.json", "ablation.md"


def plan_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What `run_ablation` would do, for `--dry-run`; nothing is written. Raises SkilltrainError as it does."""
    plan = make_plan(file, overrides)
    for cell in plan.cells:
        states = [f"{run.folder.name} ({run.state()})" for run in plan.chain(cell)]
        say(f"{cell}: {' → '.join(states)}")
    missing = {run.folder for cell in plan.cells for run in plan.chain(cell, only_missing=True)}
    cells = [
        {"variant": cell.variant, "seed": cell.seed, "runs": [run.folder.name for run in plan.chain(cell)]}
        for cell in plan.cells
    ]
    counts = {"num_cells": len(plan.cells), "num_runs": len(plan.runs), "num_runs_missing": len(missing)}
    return counts | {"cells": cells}


def run_ablation(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run all cells of the grid in `file`, write ablation.json and ablation.md, and return the verdicts.

    Finished runs are left as they are; a training that was stopped goes on from its newest checkpoint. A cell that
    fails is noted and the others go on; SkilltrainError is raised at the end, when the tables are written. It is
    raised before any work for a fault in the file.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SkilltrainError("an ablation runs in one process", where=file, fix="leave accelerate launch out")
    plan = make_plan(file, overrides)
    failed = run_cells(plan)
    results = collect_results(plan, failed)
    write_json(plan.grid.out / JSON_FILE, results.to_json())
    write_text(plan.grid.out / MARKDOWN_FILE, markdown(results))
    for table in results.tables:
        console.print(terminal_table(plan.grid, table))
    if failed:
        (variant, seed), error = next(iter(failed.items()))
        what = f"{len(failed)} of {len(plan.cells)} cells failed, first {variant}, seed {seed}: {error}"
        fix = f"the same command tries them again; the others stand in {plan.grid.out / MARKDOWN_FILE}"
        raise SkilltrainError(what, where=file, fix=fix)
    return {"out": str(plan.grid.out), "num_cells": len(plan.cells), "verdicts": verdicts(results)}


def run_cells(plan: Plan) -> dict[tuple[str, int], str]:
    """Run what is missing; (variant, seed) → why it failed, for the cells that did. A failed run is tried once."""
    failed_runs: dict[Path, str] = {}
    failed_cells: dict[tuple[str, int], str] = {}
    missing = {run.folder for cell in plan.cells for run in plan.chain(cell, only_missing=True)}
    num_runs = len(plan.runs)
    with progress("runs", num_runs, num_runs - len(missing)) as show:
        for cell in plan.cells:
            error = _run_cell(plan, cell, failed_runs)
            if error:
                failed_cells[cell.variant, cell.seed] = error
                say(f"cell ({cell}) failed: {error}")
            show(sum(run.state() == "done" for run in plan.runs.values()), f"cell ({cell})")
    return failed_cells


def _run_cell(plan: Plan, cell: Cell, failed_runs: dict[Path, str]) -> str:
    """Run what the cell lacks; the one-line error of the step that fails."""
    for run in plan.chain(cell, only_missing=True):
        error = failed_runs.get(run.folder) or _run_step(run, plan.grid.out / "errors")
        if error:
            failed_runs[run.folder] = error
            return error
    return ""


def _run_step(run: StepRun, notes: Path) -> str:
    """Run a step to its end, a training from its newest checkpoint; the one-line error if it fails.

    The traceback of an unexpected error goes to a file in `notes`.
    """
    say(f"{run.step}: {run.folder}")
    state = run.state()
    try:
        if state == "to run":
            shutil.rmtree(run.folder, ignore_errors=True)  # a training that was killed before it had a record
        run_recipe(run.config, resume=state == "begun")
    except StoppedError as error:
        raise StoppedError(error.what, where=run.folder, fix="run the same command to go on") from error
    except SkilltrainError as error:
        return f"step {run.step}: {error}"
    except Exception as error:
        file = notes / f"{run.folder.name}.txt"
        write_text(file, traceback.format_exc())
        first = (str(error).splitlines() or [""])[0]
        return f"step {run.step}: {type(error).__name__}: {first} (see {file})"
    finally:
        _forget()
    shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)  # three times the model's size
    return ""


def _forget() -> None:
    """Give memory back, and let the next training of this process set accelerate up anew."""
    import torch
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
