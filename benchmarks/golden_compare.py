"""Compare two captures of golden_capture.sh.

python benchmarks/golden_compare.py OUT1 OUT2

The texts and counts of tables must be equal, and scores may differ by 1e-5. Losses may differ by
1e-6 at the first step and by 1e-4 at the last one. Prints the differences of each file, and exits
with 1 if a file differs too much.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

SCORE_TOLERANCE = 1e-5
FIRST_LOSS_TOLERANCE = 1e-6
LAST_LOSS_TOLERANCE = 1e-4


def largest_difference(first: Any, second: Any) -> float:
    """Return the largest difference of two numbers, or of the numbers in two lists or dicts.

    If the values differ in anything else, return infinity.
    """
    if isinstance(first, float) and isinstance(second, float):
        both_nan = math.isnan(first) and math.isnan(second)
        return 0.0 if both_nan else abs(first - second)
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return math.inf
        return max((largest_difference(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return math.inf
        return max(map(largest_difference, first, second), default=0.0)
    return 0.0 if first == second else math.inf


def compare_tables(first: Path, second: Path) -> bool:
    """Compare the columns that two parquet tables share, and print the largest difference.

    Returns:
        Whether the difference is within the tolerance.
    """
    first_table = pq.read_table(first)
    second_table = pq.read_table(second)
    first_names = first_table.column_names
    second_names = second_table.column_names
    shared_names = [name for name in first_names if name in second_names]
    difference = largest_difference(
        first_table.select(shared_names).to_pylist(), second_table.select(shared_names).to_pylist()
    )
    other_names = sorted(set(first_names).symmetric_difference(second_names))
    print(f"  largest difference {difference:.1e}; columns of one table: {other_names}")
    return difference <= SCORE_TOLERANCE


def compare_logs(first: Path, second: Path) -> bool:
    """Compare the losses of two training logs, and print the differences.

    Returns:
        Whether the differences are within the tolerances.
    """
    first_losses = read_losses(first)
    second_losses = read_losses(second)
    if len(first_losses) != len(second_losses):
        print(f"  {len(first_losses)} steps and {len(second_losses)} steps")
        return False
    at_first = abs(first_losses[0] - second_losses[0])
    at_last = abs(first_losses[-1] - second_losses[-1])
    print(f"  loss of the first step differs by {at_first:.1e}, of the last by {at_last:.1e}")
    return at_first <= FIRST_LOSS_TOLERANCE and at_last <= LAST_LOSS_TOLERANCE


def read_losses(log: Path) -> list[float]:
    """Return the loss of each step."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main(first: Path, second: Path) -> None:
    """Compare all tables and training logs of two captures."""
    first_runs = first / "runs"
    second_runs = second / "runs"
    num_different = 0
    for pattern, compare in (("*.parquet", compare_tables), ("train_log.jsonl", compare_logs)):
        names: set[Path] = set()
        for runs in (first_runs, second_runs):
            names.update(file.relative_to(runs) for file in runs.rglob(pattern))
        for name in sorted(names):
            print(name)
            first_file = first_runs / name
            second_file = second_runs / name
            if not first_file.is_file() or not second_file.is_file():
                print("  is in one capture alone")
                num_different += 1
            elif not compare(first_file, second_file):
                num_different += 1
    print(f"{num_different} files differ")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
