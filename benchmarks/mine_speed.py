#!/usr/bin/env python
"""Compare time and memory of mining hard negatives with skilltrain and sentence-transformers.

python benchmarks/mine_speed.py --pool DIR --queries DIR --encoder SOURCE --cache DIR [--only MODE]

The pool (SKILLS) and its queries (QUERIES, JUDGEMENTS) are real tables. Their vectors are made
before anything is timed. At each size both libraries mine the 50 nearest skills of every query.
skilltrain also mines from four sources with its filter, and finds near-duplicate clusters. Each
measurement runs alone in its own process, so use an idle machine. Progress goes to stderr, Markdown
tables go to stdout. Needs Linux.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measuring import new_parser, peak_bytes, process_environment, say
from mine_speed_data import encode_pool, write_case

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
    """One mode at one size.

    Attributes:
        mode: Key of MODES.
        num_skills: Skills of the pool.
        num_queries: Queries.
        peak_bytes: Peak memory.
        result: Result of the worker; None if the worker died.
    """

    mode: str
    num_skills: int
    num_queries: int
    peak_bytes: int
    result: dict[str, Any] | None

    @property
    def size(self) -> str:
        """Numbers of skills and queries, as in the heads of the tables."""
        return f"{self.num_skills:,} x {self.num_queries:,}"

    @property
    def seconds(self) -> float:
        """Time of mining and filtering; NaN if the worker died."""
        if self.result is None:
            return float("nan")
        return self.result["mine_seconds"] + self.result["filter_seconds"]

    @property
    def gigabytes(self) -> float:
        """Peak memory in GB."""
        return self.peak_bytes / 1e9


def measure(mode: str, folder: Path, threads: int) -> tuple[int, dict | None]:
    """Run the worker in one mode, and add up the peak memory of its processes.

    The sum is more than was ever in use: processes share pages, and their peaks come at different
    times.

    Args:
        mode: Key of MODES.
        folder: Folder that `write_case` wrote.
        threads: Number of threads.

    Returns:
        Peak memory in bytes; result of the worker, or None if the worker died.
    """
    environment = os.environ | process_environment(threads)
    command = [sys.executable, str(WORKER), mode, str(folder), str(threads)]
    peak = 0
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, env=environment) as process,
    ):
        while process.poll() is None:
            peak = max(peak, sum(map(peak_bytes, _process_tree(process.pid))))
            time.sleep(0.1)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode != 0:
        return peak, None
    result = json.loads(lines[-1])
    return max(peak, result["own_peak_bytes"]), result


def _process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all processes that it started."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:  # it has ended
        return [pid]
    return [pid, *(child.pid for child in children)]


def format_report(measurements: Sequence[Measurement]) -> str:
    """Format a table of seconds and one of memory, and how far the candidates agree."""
    lines = _format_table(measurements, "seconds (skills x queries)", "seconds", ".1f")
    lines += _format_table(measurements, "peak memory, GB", "gigabytes", ".2f")
    return "\n".join(lines + _format_overlaps(measurements))


def _format_table(
    measurements: Sequence[Measurement], title: str, attribute: str, number_format: str
) -> list[str]:
    """Return the lines of a table with one row per mode and one column per size.

    Args:
        measurements: All measurements.
        title: Head of the first column.
        attribute: Attribute of a measurement that is shown.
        number_format: Format of its values.
    """
    by_size = sorted(measurements, key=lambda measurement: measurement.num_skills)
    sizes = list(dict.fromkeys(measurement.size for measurement in by_size))
    lines = [
        f"| {title} | {' | '.join(sizes)} | grows as |",
        f"|---|{'---:|' * (len(sizes) + 1)}",
    ]
    for mode, name in MODES.items():
        row = {item.size: item for item in measurements if item.mode == mode}
        if row:
            cells = dict.fromkeys(sizes, "")
            for size, measurement in row.items():
                cells[size] = _format_value(measurement, attribute, number_format)
            growth = _format_growth([*row.values()], attribute)
            lines.append(f"| {name} | {' | '.join(cells.values())} | {growth} |")
    return [*lines, ""]


def _format_value(measurement: Measurement, attribute: str, number_format: str) -> str:
    """Format an attribute of a measurement, and say if the worker died."""
    value = format(getattr(measurement, attribute), number_format)
    return value if measurement.result else f"{value} (died)"


def _format_growth(row: Sequence[Measurement], attribute: str) -> str:
    """Fit an attribute to n^e, where n is the number of skills, and format the result.

    Only sizes with the most common number of queries per skill count. If there are fewer than two,
    the result is empty.
    """
    finished = [measurement for measurement in row if measurement.result]
    ratios = [round(item.num_queries / item.num_skills, 2) for item in finished]
    common_ratio = max(ratios, key=ratios.count, default=None)
    points: list[tuple[int, float]] = []
    for measurement, ratio in zip(finished, ratios, strict=True):
        if ratio == common_ratio:
            points.append((measurement.num_skills, getattr(measurement, attribute)))
    if len(points) < 2:
        return ""
    log_sizes, log_values = np.log(points).T
    exponent = np.polyfit(log_sizes, log_values, 1)[0]
    return f"n^{exponent:.2f}"


def _format_overlaps(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line per measurement of sentence-transformers: how many candidates are also ours."""
    ours_by_size: dict[str, dict[str, list[str]]] = {}
    for measurement in measurements:
        if measurement.mode == "ours-semantic" and measurement.result:
            ours_by_size[measurement.size] = measurement.result["nearest"]

    lines: list[str] = []
    for measurement in measurements:
        is_peer = measurement.mode.startswith("st")
        ours = ours_by_size.get(measurement.size)
        if is_peer and ours and measurement.result:
            shares = _candidate_overlaps(measurement.result["nearest"], ours)
            lines.append(
                f"- {MODES[measurement.mode]}, {measurement.size}: {np.mean(shares):.4f} "
                f"of its candidates are ours (n = {len(shares)} queries)"
            )
    return lines


def _candidate_overlaps(theirs: dict[str, list[str]], ours: dict[str, list[str]]) -> list[float]:
    """Return the share of their candidates that we have too, for each query of both libraries.

    Args:
        theirs: Skill ids by query id, of sentence-transformers.
        ours: Skill ids by query id, of skilltrain.
    """
    shares: list[float] = []
    for query_id, skill_ids in theirs.items():
        if skill_ids and query_id in ours:
            shared_ids = set(skill_ids).intersection(ours[query_id])
            shares.append(len(shared_ids) / len(skill_ids))
    return shares


def parse_options(arguments: Sequence[str]) -> Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, [*MODES], "MODE")
    add = parser.add_argument
    add("--pool", type=Path, required=True, help="SKILLS table")
    add("--queries", type=Path, required=True, help="folder with QUERIES and JUDGEMENTS")
    add("--split", default="train", help="split of the queries")
    add("--encoder", required=True, help="encoder that makes the vectors")
    add("--cache", type=Path, required=True, help="folder that keeps vectors between runs")
    sizes = [10_000, 20_000, 40_000, 80_000]
    add("--sizes", type=int, nargs="*", default=sizes, help="numbers of skills")
    add("--queries-a-skill", type=float, default=0.475, help="number of queries per skill")
    add("--as-is", action="store_true", help="also mine the whole pool without copies")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure all modes at all sizes. With --json, each measurement is written when it is made."""
    options = parse_options(arguments)
    base = encode_pool(options.pool, options.queries, options.split, options.encoder, options.cache)
    sizes = [(size, round(size * options.queries_a_skill)) for size in options.sizes]
    if options.as_is:
        sizes.insert(0, (len(base.skills), len(base.queries)))

    measurements: list[Measurement] = []
    for num_skills, num_queries in sizes:
        with tempfile.TemporaryDirectory(prefix="mine-speed-") as name:
            folder = Path(name)
            write_case(base, num_skills, num_queries, folder)
            for mode in options.only:
                peak, result = measure(mode, folder, options.threads)
                measurement = Measurement(mode, num_skills, num_queries, peak, result)
                seconds = _format_value(measurement, "seconds", ".1f")
                say(
                    f"{measurement.size} {MODES[mode]}: {seconds} s, {measurement.gigabytes:.2f} GB"
                )
                measurements.append(measurement)
                if options.json:
                    rows = [asdict(measurement) for measurement in measurements]
                    options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(format_report(measurements), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
