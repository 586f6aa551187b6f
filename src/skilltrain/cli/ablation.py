"""The command `ablate`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from skilltrain.cli.app import DryRun, app, show


@app.command()
def ablate(
    grid: Annotated[Path, typer.Argument(help="a file of recipes/ablations, or one like it")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings of the grid")] = None,
    only_plan: DryRun = False,
) -> None:
    """Run every cell of a grid of variants and seeds, and compare the variants, with 95% intervals.

    Steps that cells share run once; run again, what is finished is left as it is, and what was killed goes on.

    Example: skilltrain ablate recipes/ablations/filter.yaml seeds='[1, 2, 3]'
    """
    from skilltrain.ablation.run import plan_ablation, run_ablation

    with redirect_stdout(sys.stderr):
        found = (plan_ablation if only_plan else run_ablation)(grid, overrides or [])
    show(found)
