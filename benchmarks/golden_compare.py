"""Compare two captures of golden_capture.sh: python benchmarks/golden_compare.py OUT1 OUT2

Tables must have equal texts and counts, and scores within 1e-5. Losses must be equal to 1e-6 at the first step and to
1e-4 at the last. Prints one line per file and exits with 1 if any differs.
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
    """Return the largest difference of numbers in two values; infinity if anything else differs."""
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
        pairs = zip(first, second, strict=True)
        return max((largest_difference(*pair) for pair in pairs), default=0.0)
    return 0.0 if first == second else math.inf


def compare_tables(first: Path, second: Path) -> bool:
    """Print and return whether two parquet tables are equal in the columns that both have."""
    tables = pq.read_table(first), pq.read_table(second)
    columns = [name for name in tables[0].column_names if name in tables[1].column_names]
    rows, other_rows = (table.select(columns).to_pylist() for table in tables)
    difference = largest_difference(rows, other_rows)
    only_once = {*tables[0].column_names} ^ {*tables[1].column_names}
    print(f"  largest difference {difference:.1e}; columns of one table: {sorted(only_once)}")
    return difference <= SCORE_TOLERANCE


def compare_logs(first: Path, second: Path) -> bool:
    """Print and return whether two training logs have the same losses."""
    losses, others = read_losses(first), read_losses(second)
    if len(losses) != len(others):
        print(f"  {len(losses)} steps and {len(others)} steps")
        return False
    at_first = abs(losses[0] - others[0])
    at_last = abs(losses[-1] - others[-1])
    print(f"  loss of the first step differs by {at_first:.1e}, of the last by {at_last:.1e}")
    return at_first <= FIRST_LOSS_TOLERANCE and at_last <= LAST_LOSS_TOLERANCE


def read_losses(log: Path) -> list[float]:
    """Return the loss of each step."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main(first: Path, second: Path) -> None:
    """Compare all tables and training logs below two captures."""
    num_different = 0
    for pattern, compare in (("*.parquet", compare_tables), ("train_log.jsonl", compare_logs)):
        names = {
            file.relative_to(out / "runs")
            for out in (first, second)
            for file in (out / "runs").rglob(pattern)
        }
        for name in sorted(names):
            print(name)
            files = first / "runs" / name, second / "runs" / name
            if not all(file.is_file() for file in files):
                print("  is in one capture alone")
                num_different += 1
            elif not compare(*files):
                num_different += 1
    print(f"{num_different} files differ")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
