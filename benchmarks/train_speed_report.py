"""Ratios of paired rounds with their intervals, and the Markdown table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from train_speed_cases import Case, Mode, OurMode
from train_speed_worker import StepReport

RESAMPLES, SEED = 10_000, 0


@dataclass(frozen=True)
class CaseResult:
    """What was measured of a case: per mode its rounds in order (no warm-up), and the GEMM rate of each round."""

    case: Case
    modes: Sequence[Mode]
    rounds: dict[str, list[StepReport]]
    gemm_flops: list[float]
    largest_difference: float
    repeated_share: float


def ratio(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """(median of other/ours over the pairs, 95% interval by bootstrap over pairs)."""
    ratios = np.asarray(other) / np.asarray(ours)
    drawn = np.random.default_rng(SEED).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def table(result: CaseResult) -> str:
    """A heading, one sentence on the run, and a row for each mode."""
    case, gemm = result.case, float(np.median(result.gemm_flops))
    ours = next(mode for mode in result.modes if isinstance(mode, OurMode)).name
    base = result.rounds[ours]
    per = "step" if case.kind == "encoder" else "list"
    queries = 1 if case.kind == "encoder" else case.batch
    flops = float(np.median([step.useful_flops for step in base]))
    lines = [
        f"### {case.title}",
        "",
        f"{case.batch} lists of 1 + {case.negatives} a step, {result.repeated_share:.1%} of their skills repeats; "
        f"{flops / 1e12:.2f} TFLOP of useful work a step; GEMM peak {gemm / 1e9:.0f} GFLOP/s; "
        f"losses differ by at most {result.largest_difference:.1e}.",
        "",
        f"| | s a {per} | time against ours [95%], n | peak MB | memory against ours | padding | of GEMM peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, steps in result.rounds.items():
        seconds = [step.seconds for step in steps]
        middle, low, high = ratio([step.seconds for step in base], seconds)
        memory = steps[-1].peak_bytes / base[-1].peak_bytes
        rate = np.median([own.useful_flops / step.seconds for own, step in zip(base, steps, strict=True)]) / gemm
        lines.append(
            f"| {mode} | {np.median(seconds) / queries:.2f} | {middle:.2f} [{low:.2f}, {high:.2f}], {len(steps)} "
            f"| {steps[-1].peak_bytes / 1e6:.0f} | {memory:.2f} | {steps[-1].padding:.1%} | {rate:.0%} |"
        )
    return "\n".join([*lines, ""])
