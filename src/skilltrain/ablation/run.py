"""The command `skilltrain ablate`: a grid of variants and seeds, run to its end however often it is stopped."""

import gc
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

from skilltrain.ablation.plan import Plan, StepRun, make_plan
from skilltrain.ablation.results import collect_results
from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.files import write_json, write_text
from skilltrain.runs import CHECKPOINTS
from skilltrain.stages import run_recipe
from skilltrain.terminal import progress, say


def plan_ablation(file: Path, overrides: list[str]) -> dict[str, Any]:
    """What `run_ablation` would do, for `--dry-run`; nothing is written. Raises SkilltrainError as it does."""
    plan = make_plan(file, overrides)
    for cell in plan.cells:
        say(f"{cell}: {' → '.join(f'{run.folder.name} ({run.state()})' for run in cell.runs)}")
    missing = {run.folder for cell in plan.cells for run in cell.missing()}
    return {"num_cells": len(plan.cells), "num_runs": len(plan.runs), "num_runs_missing": len(missing)}


def run_ablation(file: Path, overrides: list[str]) -> dict[str, Any]:
    """Run all cells of the grid in `file`, and write ablation.json, ablation.md and ablation.html.

    Finished runs are left as they are; a training that was stopped goes on from its newest checkpoint. A cell that
    fails is noted and the others go on; SkilltrainError is raised at the end, when the tables are written. It is
    raised before any work for a fault in the file.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SkilltrainError("an ablation runs in one process", where=file, fix="leave accelerate launch out")
    plan = make_plan(file, overrides)
    failed, out = _run_cells(plan), plan.grid.out
    results = collect_results(plan, failed)
    write_json(out / "ablation.json", results.to_json())
    write_text(out / "ablation.md", results.markdown())
    write_text(out / "ablation.html", results.page())
    say(results.markdown())
    if failed:
        (variant, seed), error = next(iter(failed.items()))
        what = f"{len(failed)} of {len(plan.cells)} cells failed, first {variant}, seed {seed}: {error}"
        raise SkilltrainError(what, where=file, fix="the same command tries them again")
    return {"out": str(out), "num_cells": len(plan.cells)}


def _run_cells(plan: Plan) -> dict[tuple[str, int], str]:
    """Run what is missing; (variant, seed) → why it failed, for the cells that did. A failed run is tried once."""
    errors: dict[Path, str] = {}
    failed: dict[tuple[str, int], str] = {}
    with progress("cells", len(plan.cells)) as show:
        for number, cell in enumerate(plan.cells, 1):
            for run in cell.missing():
                if run.folder not in errors:
                    errors[run.folder] = _run_step(run)
                if errors[run.folder]:
                    failed[cell.variant, cell.seed] = errors[run.folder]
                    say(f"cell ({cell}) failed: {errors[run.folder]}")
                    break
            show(number, f"cell ({cell})")
    return failed


def _run_step(run: StepRun) -> str:
    """Run a step to its end, a training from its newest checkpoint; the one-line error if it fails."""
    say(f"{run.step}: {run.folder}")
    state = run.state()
    try:
        if state == "to run":
            shutil.rmtree(run.folder, ignore_errors=True)  # a training that was killed before it had a record
        run_recipe(run.config, resume=state == "begun")
    except StoppedError as error:
        fix = "run the same command to go on"
        raise StoppedError(error.what, where=run.folder, fix=fix, number=error.number) from error
    except Exception as error:
        if not isinstance(error, SkilltrainError):
            say(traceback.format_exc())
        first = (str(error).splitlines() or [""])[0]
        return f"step {run.step}: {first if isinstance(error, SkilltrainError) else f'{type(error).__name__}: {first}'}"
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
