#!/usr/bin/env python
"""Training speed and memory of skilltrain beside sentence-transformers: same weights, lists, loss and threads.

python benchmarks/train_speed.py --data DIR [--threads 2] [--rounds N] [--only CASE ...] [--json OUT]

DIR holds pool/*.parquet (skill_id, name, description, body), queries/train.jsonl (query_id, query, skill_ids) and, for
the Qwen3 cases, qwen3-tokenizer/tokenizer.json. Every mode runs in a process of its own and alone: on an idle machine.
Its first step is a warm-up, in which the losses must agree to 1e-5. Progress goes to stderr, Markdown tables to stdout.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from measuring import own_process, ratio, say, set_environment
from train_speed_cases import CASES, Case, Material, OurMode, material, mine, read_data, write_model
from train_speed_modes import StepReport, train

TOLERANCE = 1e-5


@dataclass(frozen=True)
class CaseResult:
    """What was measured of a case: per mode its steps in order (no warm-up), and how far losses differ."""

    case: Case
    steps: dict[str, list[StepReport]]
    largest_difference: float


def run_case(case: Case, data: Path, what: Material, threads: int) -> CaseResult:
    """Each mode alone on the machine, in the same batches: one to warm up, the others timed.

    After each mode's first step all losses that can be compared must agree.
    """
    reports: dict[str, list[StepReport]] = {}
    differences = np.zeros(1)
    comparable = [
        mode.name for mode in case.modes if isinstance(mode, OurMode) or not mode.as_shipped
    ]
    with tempfile.TemporaryDirectory(prefix="train-speed-") as folder:
        model = Path(folder) / "model"
        with own_process() as writer:  # so that this one stays small
            writer.submit(write_model, case, data, model).result()
        for mode in case.modes:
            with own_process() as process:
                reports[mode.name] = process.submit(
                    train, case, mode, model, what, threads
                ).result()
            for number, one in enumerate(reports[mode.name]):
                times = f"{one.seconds:.2f} s ({one.cpu_seconds:.2f} s of CPU time)"
                say(f"  round {number}: {times}, loss {one.loss:.6f}, {mode.name}")
            losses = np.array(
                [
                    [one.loss for one in steps]
                    for name, steps in reports.items()
                    if name in comparable
                ]
            )
            if len(losses):
                differences = np.ptp(losses, axis=0) / np.abs(losses).max(axis=0)
            if differences[0] > TOLERANCE:
                sys.exit(
                    f"train_speed: losses at equal weights differ by {differences[0]:.1e}: {losses[:, 0]}"
                )
    return CaseResult(
        case, {name: steps[1:] for name, steps in reports.items()}, float(differences.max())
    )


def table(result: CaseResult) -> str:
    """A heading, one sentence on the run, and a row for each mode."""
    case = result.case
    gemm = float(np.median([one.gemm_flops for steps in result.steps.values() for one in steps]))
    base = result.steps[next(mode.name for mode in case.modes if isinstance(mode, OurMode))]
    per, queries = ("step", 1) if case.kind == "encoder" else ("list", case.batch)
    flops = float(np.median([step.useful_flops for step in base]))
    lines = [
        f"### {case.title}",
        "",
        f"{case.batch} lists of 1 + {case.negatives} a step; {flops / 1e12:.2f} TFLOP of useful work a step; GEMM peak "
        f"{gemm / 1e9:.0f} GFLOP/s; losses differ by at most {result.largest_difference:.1e}.",
        "",
        f"| | s a {per} | time against ours [95%], n | peak MB | memory against ours | padding | of GEMM peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, steps in result.steps.items():
        seconds = [step.seconds for step in steps]
        memory = steps[-1].peak_bytes / base[-1].peak_bytes
        rate = (
            np.median(
                [own.useful_flops / step.seconds for own, step in zip(base, steps, strict=True)]
            )
            / gemm
        )
        lines.append(
            f"| {mode} | {np.median(seconds) / queries:.2f} | {ratio([step.seconds for step in base], seconds)} "
            f"| {steps[-1].peak_bytes / 1e6:.0f} | {memory:.2f} | {steps[-1].padding:.1%} | {rate:.0%} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> None:
    """Run the cases; print a table for each as soon as it is done."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with pool/, queries/ and qwen3-tokenizer/"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of every process")
    parser.add_argument(
        "--rounds", type=int, help="timed rounds of every case, instead of its own number"
    )
    parser.add_argument("--batch", type=int, help="lists a step, instead of the case's own number")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names)
    )
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    given = parser.parse_args(arguments)
    set_environment(given.threads)
    skills, queries = read_data(given.data)
    results = []
    for case in (case for case in CASES if case.name in given.only):
        started, rounds = time.monotonic(), given.rounds or case.rounds
        say(f"{case.name}: {rounds} rounds")
        case = replace(case, batch=given.batch or case.batch)
        what = material(skills, mine(skills, queries, case.negatives), case.batch, rounds + 1)
        result = run_case(case, given.data.resolve(), what, given.threads)
        print(table(result), flush=True)
        say(f"{case.name}: {time.monotonic() - started:.0f} s")
        results.append(asdict(result))
        if given.json:
            given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
