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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measuring import say
from mine_speed_data import encode_base, write_case

WORKER = Path(__file__).with_name("mine_speed_worker.py")
MODES = {
    "st": "sentence-transformers, torch",
    "st-faiss": "sentence-transformers, faiss",
    "ours-semantic": "skilltrain, semantic",
    "ours": "skilltrain, four sources + filter",
    "clusters": "skilltrain, near-duplicate clusters",
}


@dataclass(frozen=True)
class Measurement:
    """One mode at one size; `result` is None where the process ended before its work was done."""

    mode: str
    num_skills: int
    num_queries: int
    peak_bytes: int
    result: dict[str, Any] | None

    @property
    def size(self) -> str:
        """As the tables' heads have it."""
        return f"{self.num_skills:,} x {self.num_queries:,}"

    @property
    def seconds(self) -> float:
        """Of mining and of filtering."""
        return (
            self.result["mine_seconds"] + self.result["filter_seconds"]
            if self.result
            else float("nan")
        )

    @property
    def gigabytes(self) -> float:
        """The most memory that was in use."""
        return self.peak_bytes / 1e9


def measure(mode: str, folder: Path, threads: int) -> tuple[int, dict | None]:
    """(peak bytes, what the worker found) of one run: the peaks of the processes that run at one time, added up.

    A process's peak counts pages that it shares with others, and peaks come at different times: the sum is more than
    was ever in use.
    """
    environment = os.environ | {
        name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    environment |= {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(WORKER), mode, str(folder), str(threads)]
    peak = 0
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, env=environment) as process,
    ):
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


def report(measured: Sequence[Measurement]) -> str:
    """Two Markdown tables, seconds and memory at every size, with growth exponents over sizes that grow together."""
    sizes = list(
        dict.fromkeys(one.size for one in sorted(measured, key=lambda one: one.num_skills))
    )
    lines: list[str] = []
    columns: tuple[tuple[str, Callable[[Measurement], float], str], ...] = (
        ("seconds (skills x queries)", lambda one: one.seconds, ".1f"),
        ("peak memory, GB", lambda one: one.gigabytes, ".2f"),
    )
    for title, value, form in columns:
        lines += [
            f"| {title} | {' | '.join(sizes)} | grows as |",
            f"|---|{'---:|' * (len(sizes) + 1)}",
        ]
        for mode, name in MODES.items():
            row = {one.size: one for one in measured if one.mode == mode}
            if row:
                cells = [_cell(row[size], value, form) if size in row else "" for size in sizes]
                lines.append(
                    f"| {name} | {' | '.join(cells)} | {_growth([*row.values()], value)} |"
                )
        lines.append("")
    return "\n".join([*lines, *_remarks(measured)])


def _cell(one: Measurement, value: Callable[[Measurement], float], form: str) -> str:
    return f"{value(one):{form}}{'' if one.result else ' (died)'}"


def _growth(row: Sequence[Measurement], value: Callable[[Measurement], float]) -> str:
    """n^e by least squares in logarithms, over sizes with the most common number of queries a skill."""
    done = [one for one in row if one.result]
    ratios = [round(one.num_queries / one.num_skills, 2) for one in done]
    alike = [
        one for one, own in zip(done, ratios, strict=True) if own == max(ratios, key=ratios.count)
    ]
    if len(alike) < 2:
        return ""
    logs = np.log([[one.num_skills, value(one)] for one in alike])
    return f"n^{np.polyfit(logs[:, 0], logs[:, 1], 1)[0]:.2f}"


def _remarks(measured: Sequence[Measurement]) -> list[str]:
    """Return the share of candidates that both sides have in common, one line per measurement."""
    lines: list[str] = []
    exact = {
        one.size: one.result["nearest"]
        for one in measured
        if one.mode == "ours-semantic" and one.result
    }
    for one in (one for one in measured if one.result):
        found, name = one.result or {}, f"- {MODES[one.mode]}, {one.size}"
        if one.mode.startswith("st") and (ours := exact.get(one.size)):
            both = [
                query for query in found["nearest"] if query in ours and found["nearest"][query]
            ]
            shares = [
                len({*found["nearest"][q]} & {*ours[q]}) / len(found["nearest"][q]) for q in both
            ]
            lines.append(
                f"{name}: {np.mean(shares):.4f} of its candidates are ours (n = {len(shares)} queries)"
            )
    return lines


def main(arguments: Sequence[str]) -> None:
    """Measure; with --json every measurement is kept as soon as it is made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", type=Path, required=True, help="SKILLS table")
    parser.add_argument(
        "--queries",
        type=Path,
        required=True,
        help="folder with QUERIES and JUDGEMENTS of this pool",
    )
    parser.add_argument("--split", default="train", help="queries of this split")
    parser.add_argument("--encoder", required=True, help="encoder that makes the vectors")
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder that keeps vectors for the next time"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[10_000, 20_000, 40_000, 80_000], help="skills"
    )
    parser.add_argument(
        "--queries-a-skill", type=float, default=0.475, help="queries grow with the pool by this"
    )
    parser.add_argument("--as-is", action="store_true", help="mine the pool as it is, too")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the peer, worker processes of ours"
    )
    parser.add_argument(
        "--only", nargs="+", choices=MODES, default=[*MODES], metavar="MODE", help=", ".join(MODES)
    )
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    given = parser.parse_args(arguments)
    base = encode_base(given.pool, given.queries, given.split, given.encoder, given.cache)
    sizes = [(len(base.skills), len(base.queries))] if given.as_is else []
    sizes += [(size, round(size * given.queries_a_skill)) for size in given.sizes]
    measured: list[Measurement] = []
    for num_skills, num_queries in sizes:
        with tempfile.TemporaryDirectory(prefix="mine-speed-") as folder:
            write_case(base, num_skills, num_queries, Path(folder))
            for mode in given.only:
                one = Measurement(
                    mode, num_skills, num_queries, *measure(mode, Path(folder), given.threads)
                )
                say(
                    f"{one.size} {MODES[mode]}: {_cell(one, lambda one: one.seconds, '.1f')} s, {one.gigabytes:.2f} GB"
                )
                measured.append(one)
                if given.json:
                    given.json.write_text(
                        json.dumps([asdict(m) for m in measured], indent=1), encoding="utf-8"
                    )
    print(report(measured), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
