#!/usr/bin/env python
"""Compare training speed and memory of skilltrain and sentence-transformers.

python benchmarks/train_speed.py --data DIR [--threads 2] [--rounds N] [--only CASE] [--json OUT]

DIR holds pool/*.parquet (skill_id, name, description, body), queries/train.jsonl (query_id, query,
skill_ids) and, for the Qwen3 cases, qwen3-tokenizer/tokenizer.json. Both libraries train the same
weights on the same lists with the same loss and number of threads. Each mode runs alone in its own
process, so use an idle machine. The first step is a warm-up. After it, the losses of all modes must
agree to 1e-5. Progress goes to stderr, Markdown tables go to stdout.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from measuring import format_ratio, new_parser, new_process, process_environment, say
from train_speed_cases import (
    CASES,
    Case,
    OurMode,
    PeerMode,
    TrainingData,
    fill_batches,
    mine_lists,
    read_data,
    write_model,
)
from train_speed_modes import StepReport, train

TOLERANCE = 1e-5


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case.

    Attributes:
        case: The case.
        steps: Reports of the timed steps, by name of the mode.
        largest_difference: Largest relative difference of the modes' losses at any step.
    """

    case: Case
    steps: dict[str, list[StepReport]]
    largest_difference: float


def run_case(case: Case, folder: Path, data: TrainingData, threads: int) -> CaseResult:
    """Train a case in each of its modes, one after the other.

    Exit if the losses of the first step differ.

    Args:
        case: Case to train.
        folder: Folder with the tokenizer of Qwen3.
        data: Lists of all steps, the warm-up included.
        threads: Threads of each process.
    """
    reports: dict[str, list[StepReport]] = {}
    comparable_losses: list[list[float]] = []  # one row per mode, one column per step
    differences = np.zeros(1)  # relative difference of the losses at each step
    with tempfile.TemporaryDirectory(prefix="train-speed-") as model_folder:
        model = Path(model_folder) / "model"
        # Another process writes the model, so that this one stays small.
        with new_process() as process:
            process.submit(write_model, case, folder, model).result()

        for mode in case.modes:
            with new_process() as process:
                steps = process.submit(train, case, mode, model, data, threads).result()
            reports[mode.name] = steps
            for number, step in enumerate(steps):
                times = f"{step.seconds:.2f} s ({step.cpu_seconds:.2f} s of CPU time)"
                say(f"  round {number}: {times}, loss {step.loss:.6f}, {mode.name}")

            has_dropout = isinstance(mode, PeerMode) and mode.as_shipped
            if not has_dropout:
                comparable_losses.append([step.loss for step in steps])
                losses = np.array(comparable_losses)
                differences = np.ptp(losses, axis=0) / np.abs(losses).max(axis=0)
                if differences[0] > TOLERANCE:
                    sys.exit(
                        f"train_speed: losses at equal weights differ by {differences[0]:.1e}: "
                        f"{losses[:, 0]}"
                    )
    timed_steps = {name: steps[1:] for name, steps in reports.items()}
    return CaseResult(case, timed_steps, float(differences.max()))


def format_table(result: CaseResult) -> str:
    """Format a heading, one sentence about the run, and a table with one row per mode."""
    case = result.case
    ours = next(mode.name for mode in case.modes if isinstance(mode, OurMode))
    our_steps = result.steps[ours]
    our_seconds = [step.seconds for step in our_steps]
    our_flops = [step.useful_flops for step in our_steps]
    gemm_flops = []
    for steps in result.steps.values():
        gemm_flops += [step.gemm_flops for step in steps]
    gemm_peak = np.median(gemm_flops)

    # A reranker scores each list separately, so its time is given per list.
    unit = "step" if case.kind == "encoder" else "list"
    units_per_step = 1 if case.kind == "encoder" else case.batch
    lines = [
        f"### {case.title}",
        "",
        f"{case.batch} lists of 1 + {case.negatives} a step; "
        f"{np.median(our_flops) / 1e12:.2f} TFLOP of useful work a step; "
        f"GEMM peak {gemm_peak / 1e9:.0f} GFLOP/s; "
        f"losses differ by at most {result.largest_difference:.1e}.",
        "",
        f"| | s a {unit} | time against ours [95%], n | peak MB | memory against ours | padding "
        "| of GEMM peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, steps in result.steps.items():
        seconds = [step.seconds for step in steps]
        last = steps[-1]
        memory_ratio = last.peak_bytes / our_steps[-1].peak_bytes
        flops_rate = np.median(np.divide(our_flops, seconds))
        lines.append(
            f"| {mode} | {np.median(seconds) / units_per_step:.2f} "
            f"| {format_ratio(our_seconds, seconds)} | {last.peak_bytes / 1e6:.0f} "
            f"| {memory_ratio:.2f} | {last.padding:.1%} | {flops_rate / gemm_peak:.0%} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> None:
    """Run the cases, and print the table of each case when it is done."""
    parser = new_parser(__doc__, [case.name for case in CASES], "CASE")
    folders = "folder with pool/, queries/ and qwen3-tokenizer/"
    parser.add_argument("--data", type=Path, required=True, help=folders)
    parser.add_argument("--rounds", type=int, help="timed steps; default: those of the case")
    parser.add_argument("--batch", type=int, help="lists per step; default: those of the case")
    options = parser.parse_args(arguments)
    os.environ |= process_environment(options.threads)
    skills, queries = read_data(options.data)
    results = []
    for case in CASES:
        if case.name not in options.only:
            continue
        start_time = time.monotonic()
        rounds = options.rounds or case.rounds
        say(f"{case.name}: {rounds} rounds")
        case = replace(case, batch=options.batch or case.batch)
        lists = mine_lists(skills, queries, case.negatives)
        data = fill_batches(skills, lists, case.batch, rounds + 1)
        result = run_case(case, options.data.resolve(), data, options.threads)
        print(format_table(result), flush=True)
        say(f"{case.name}: {time.monotonic() - start_time:.0f} s")

        results.append(asdict(result))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
