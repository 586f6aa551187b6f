#!/usr/bin/env python
"""Time and memory of mining hard negatives, beside sentence-transformers' mine_hard_negatives on the same vectors.

python benchmarks/mine_speed.py --pool DIR --queries DIR --encoder SOURCE --cache DIR [--sizes N ...] [--only MODE ...]

The pool (SKILLS) and its queries (QUERIES, JUDGEMENTS) are real tables; `--encoder` makes their vectors before anything
is timed. At every size both sides mine the 50 nearest skills of every query; skilltrain then mines from four sources
and filters, and finds near-duplicate clusters. Every measurement has a process of its own, alone: on an idle machine.
Progress goes to stderr, Markdown tables to stdout. Needs Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
from mine_speed_data import Base, encode_base, write_case
from mine_speed_report import NAMES, Measurement, report
from mine_speed_worker import MODES

WORKER = Path(__file__).with_name("mine_speed_worker.py")


def measure(mode: str, folder: Path, threads: int) -> tuple[int, dict | None]:
    """(peak bytes, what the worker found) of one run: the peaks of the processes that run at one time, added up.

    A process's peak counts pages that it shares with others, and peaks come at different times: the sum is more than
    was ever in use.
    """
    environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(WORKER), mode, str(folder), str(threads)]
    peak = 0
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output, env=environment) as process:
        while process.poll() is None:
            peak = max(peak, sum(_peak(child) for child in _tree(process.pid)))
            time.sleep(0.1)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        return peak, None
    result = json.loads(lines[-1])
    return max(peak, result["own_peak_bytes"]), result


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def _peak(pid: int) -> int:
    """The most that the process ever had in memory, by the kernel's own count; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def run(base: Base, sizes: Sequence[tuple[int, int]], modes: Sequence[str], threads: int) -> Iterator[Measurement]:
    """Every mode at every (number of skills, number of queries), one after the other."""
    for num_skills, num_queries in sizes:
        with tempfile.TemporaryDirectory(prefix="mine-speed-") as folder:
            write_case(base, num_skills, num_queries, Path(folder))
            for mode in modes:
                started = time.monotonic()
                peak, result = measure(mode, Path(folder), threads)
                wall = time.monotonic() - started
                took = f"{result['mine_seconds']:.1f} + {result['filter_seconds']:.1f} s" if result else "died"
                say(
                    f"{num_skills:,} x {num_queries:,} {NAMES[mode]}: {took}, {peak / 1e9:.2f} GB ({wall:.0f} s in all)"
                )
                yield Measurement(mode, num_skills, num_queries, peak, result)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=Path, required=True, help="SKILLS table")
    parser.add_argument("--queries", type=Path, required=True, help="folder with QUERIES and JUDGEMENTS of this pool")
    parser.add_argument("--split", default="train", help="queries of this split")
    parser.add_argument("--encoder", required=True, help="encoder that makes the vectors")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps vectors for the next time")
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 20_000, 40_000, 80_000], help="skills")
    parser.add_argument("--queries-a-skill", type=float, default=0.475, help="queries grow with the pool by this")
    parser.add_argument("--as-is", action="store_true", help="mine the pool as it is, too")
    parser.add_argument("--threads", type=int, default=2, help="threads of the peer, worker processes of ours")
    parser.add_argument("--only", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure; print the tables anew after every size, so that a run that is cut short has shown what it has."""
    given = parse(arguments)
    base = encode_base(given.pool, given.queries, given.split, given.encoder, given.cache)
    sizes = [(size, round(size * given.queries_a_skill)) for size in given.sizes]
    sizes = ([(len(base.skills), len(base.queries))] if given.as_is else []) + sizes
    measured: list[Measurement] = []
    for one in run(base, sizes, given.only, given.threads):
        measured.append(one)
        if given.json:
            given.json.write_text(json.dumps([asdict(m) for m in measured], indent=1), encoding="utf-8")
    print(report(measured), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
