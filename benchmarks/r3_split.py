"""Split judged groups so that no skill is on both sides, and say which effect so many of them could show at all."""

import json
import math
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.data.sampling import split_groups
from skilltrain.files import read_jsonl, staged_folder

NUM_OTHERS = 4_000  # skills of the pool beside those that are judged
TEST_SHARE = 0.3


def members(row: dict) -> list[str]:
    """The skills of a group."""
    return [*row["required"], *(one["skill_id"] for one in row["rejected"]), *row["irrelevant"]]


def smallest_difference(num_queries: int, share_differing: float) -> float:
    """The difference of two shares that a paired test finds in 80 of 100 samples, where so many queries differ."""
    return (1.96 + 0.84) * math.sqrt(share_differing / num_queries)


def main(data: Path, out: Path) -> None:
    """Write train.jsonl, test.jsonl, without/train.jsonl (no rejections) and pool/ into `out`."""
    rows = [row for _, row in read_jsonl(data / "r3" / "judgements.jsonl")]
    split = split_groups({row["group_id"]: members(row) for row in rows}, TEST_SHARE, seed=0)
    test = [row for row in rows if split[row["group_id"]] == "dev"]
    train = [row for row in rows if split[row["group_id"]] == "train"]
    table = pa.concat_tables(
        pq.read_table(file) for file in sorted((data / "pool").glob("*.parquet"))
    )
    judged = {skill_id for row in rows for skill_id in members(row)}
    ids = table.column("skill_id").to_pylist()
    others = random.Random(0).sample(sorted(set(ids) - judged), NUM_OTHERS)
    kept = judged | set(others)
    with staged_folder(out) as folder:
        for name, chosen in (("train", train), ("test", test)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
        (folder / "without").mkdir()
        bare = ({key: row[key] for key in ("group_id", "query", "required")} for row in train)
        (folder / "without" / "train.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in bare)
        )
        (folder / "pool").mkdir()
        pq.write_table(
            table.filter(pa.array([one in kept for one in ids])), folder / "pool" / "part-0.parquet"
        )
    print(
        f"{len(train)} groups to train on, {len(test)} to test on, {len(kept)} skills; no skill is on both sides"
    )
    for differing in (0.1, 0.2, 0.3):
        found = smallest_difference(len(test), differing)
        print(
            f"two systems that differ on {differing:.0%} of {len(test)} queries: a difference from {found:.3f} on shows"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
