#!/usr/bin/env python
"""Training speed and memory of skilltrain beside sentence-transformers: same weights, lists, loss and threads.

python benchmarks/train_speed.py --data DIR [--threads 2] [--rounds N] [--only CASE ...] [--sweep] [--json OUT]

DIR holds pool/*.parquet (skill_id, name, description, body), queries/train.jsonl (query_id, query, skill_ids) and, for
the Qwen3 cases, qwen3-tokenizer/tokenizer.json. Every mode runs in a process of its own and alone: on an idle machine.
Its first step is a warm-up, in which the losses must agree to 1e-5. Progress goes to stderr, Markdown tables to stdout.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train_speed_cases import CASES, Case
from train_speed_data import NUM_SKILLS, Material, MinedList, material, mine, read_data, write_material, write_model
from train_speed_report import CaseResult, table
from train_speed_worker import StepReport, Work, measure_gemm, run

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    data: Path
    threads: int
    rounds: int | None
    batch: int | None
    sweep: bool
    repeats: bool


class Worker:
    """The parent's end of the conversation with a process."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, far), daemon=True)
        self.process.start()
        far.close()

    def ask(self) -> Any:
        """Have it take its next step; its report."""
        self.pipe.send(True)
        return self.answer()

    def answer(self) -> Any:
        """What it says next; the program ends if it has ended."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            sys.exit(f"train_speed: a worker ended with status {self.process.exitcode}")

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


@contextmanager
def workers(work: Work) -> Iterator[tuple[Worker, Worker]]:
    """(the process that trains, one that measures the GEMM peak), both loaded; they end with the block."""
    started = [Worker(run, work), Worker(measure_gemm, work.threads)]
    try:
        for worker in started:
            worker.answer()
        yield started[0], started[1]
    finally:
        for worker in started:
            worker.stop()


def run_case(case: Case, works: Sequence[Work], what: Material, options: Options) -> CaseResult:
    """Each mode alone on the machine, in `what`'s batches: one to warm up, the others timed.

    After each mode's first step all losses must agree. Where skills repeat, sentence-transformers counts a repeated
    skill twice and skilltrain does not: then losses may differ and are not checked.
    """
    reports: dict[str, list[StepReport]] = {}
    gemm_flops: list[float] = []
    for work in works:
        name = work.mode.name
        reports[name] = []
        with workers(work) as (worker, gemm):
            for number in range(len(what.lists) // case.batch):
                gemm_flops.append(gemm.ask())
                report: StepReport = worker.ask()
                times = f"{report.seconds:.2f} s ({report.cpu_seconds:.2f} s of CPU time)"
                say(f"  round {number}: {times}, loss {report.loss:.6f}, {name}")
                reports[name].append(report)
                if number == 0 and not options.repeats:
                    _assert_same(_losses(works, reports, 0))
    differences = [_difference(_losses(works, reports, number)) for number in range(len(what.lists) // case.batch)]
    timed = {name: steps[1:] for name, steps in reports.items()}
    return CaseResult(
        case, [work.mode for work in works], timed, gemm_flops, max(differences), _repeated_share(case, what)
    )


def _losses(works: Sequence[Work], reports: dict[str, list[StepReport]], number: int) -> dict[str, float]:
    """The losses of step `number` that can be compared, of the modes that have come so far."""
    names = [work.mode.name for work in works if work.mode.same_loss and work.mode.name in reports]
    return {name: reports[name][number].loss for name in names if len(reports[name]) > number}


def _difference(losses: dict[str, float]) -> float:
    return (max(losses.values()) - min(losses.values())) / max(map(abs, losses.values())) if losses else 0.0


def _assert_same(losses: dict[str, float]) -> None:
    if (difference := _difference(losses)) > TOLERANCE:
        listed = "\n".join(f"  {loss:.8f} {name}" for name, loss in losses.items())
        sys.exit(f"train_speed: losses at equal weights differ by {difference:.1e}:\n{listed}")


def _repeated_share(case: Case, what: Material) -> float:
    batches = [what.lists[i : i + case.batch] for i in range(0, len(what.lists), case.batch)]
    named = [[skill_id for one in batch for skill_id in one.skill_ids] for batch in batches]
    return 1 - sum(len(set(ids)) for ids in named) / sum(map(len, named))


def prepare(case: Case, options: Options, folder: Path, what: Material) -> list[Work]:
    """Model and lists of a case in `folder`, and what each of its processes is to do."""
    write_material(what, folder / "material.json")
    # In a process of its own, so that this one stays small.
    writer = multiprocessing.get_context("spawn").Process(
        target=write_model, args=(case, options.data, folder / "model")
    )
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit(f"train_speed: cannot make the model of {case.name}")
    modes = case.sweep if options.sweep else case.modes
    return [Work(case, mode, folder / "material.json", folder / "model", options.threads) for mode in modes]


def measure(options: Options, cases: Sequence[Case]) -> Iterator[CaseResult]:
    """The result of each case, one after the other."""
    skills, queries = read_data(options.data, NUM_SKILLS)
    mined: dict[int, list[MinedList]] = {}
    for case in cases:
        started, rounds = time.monotonic(), options.rounds or case.rounds
        say(f"{case.name}: {rounds} rounds")
        case = replace(case, batch=options.batch or case.batch)
        if case.negatives not in mined:
            mined[case.negatives] = mine(skills, queries, case.negatives)
        what = material(skills, mined[case.negatives], case, rounds + 1, options.repeats)
        with tempfile.TemporaryDirectory(prefix="train-speed-") as folder:
            works = prepare(case, options, Path(folder), what)
            yield run_case(case, works, what, options)
        say(f"{case.name}: {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> tuple[Options, list[Case], Path | None]:
    """(options, cases to run, where to write JSON)."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with pool/, queries/ and qwen3-tokenizer/")
    parser.add_argument("--threads", type=int, default=2, help="threads of every process")
    parser.add_argument("--rounds", type=int, help="timed rounds of every case, instead of its own number")
    parser.add_argument("--batch", type=int, help="lists a step, instead of the case's own number")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--sweep", action="store_true", help="run the sweep that the modes were chosen by instead")
    parser.add_argument("--repeats", action="store_true", help="lists as mined: skills repeat, losses go unchecked")
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    given = parser.parse_args(arguments)
    options = Options(given.data.resolve(), given.threads, given.rounds, given.batch, given.sweep, given.repeats)
    return options, [case for case in CASES if case.name in given.only], given.json


def main(arguments: Sequence[str]) -> None:
    """Run the cases; print a table for each as soon as it is done."""
    options, cases, file = parse(arguments)
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    results = []
    for result in measure(options, cases):
        print(table(result), flush=True)
        results.append(asdict(result))
        if file:
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
