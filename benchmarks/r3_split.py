"""Split judged groups into training and test groups that share no skill.

python benchmarks/r3_split.py DATA OUT

DATA holds pool/*.parquet and r3/judgements.jsonl. Also prints which difference between two systems
the test groups can show.
"""

import json
import math
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.data.sampling import split_groups
from skilltrain.files import read_jsonl, staged_folder

NUM_OTHERS = 4_000  # skills of the pool that are in no group
TEST_SHARE = 0.3


def skills_of(group: dict) -> list[str]:
    """Return the ids of all skills of a group."""
    rejected_ids = [rejection["skill_id"] for rejection in group["rejected"]]
    return [*group["required"], *rejected_ids, *group["irrelevant"]]


def smallest_difference(num_queries: int, share_differing: float) -> float:
    """Return the difference of two shares that a paired test finds in 80 of 100 samples.

    Args:
        num_queries: Number of queries.
        share_differing: Share of the queries on which the two systems differ.
    """
    return (1.96 + 0.84) * math.sqrt(share_differing / num_queries)


def write_rows(rows: Iterable[dict], file: Path) -> None:
    """Write rows as JSON Lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(data: Path, out: Path) -> None:
    """Write train.jsonl, test.jsonl, without/train.jsonl (without rejections) and pool/."""
    groups = [group for _, group in read_jsonl(data / "r3" / "judgements.jsonl")]
    skill_ids = {group["group_id"]: skills_of(group) for group in groups}
    split = split_groups(skill_ids, TEST_SHARE, seed=0)
    test = [group for group in groups if split[group["group_id"]] == "dev"]
    train = [group for group in groups if split[group["group_id"]] == "train"]
    # These rows are no groups: some have one skill, which cannot be compared with others.
    without_rejections = [
        {"query_id": group["group_id"], "query": group["query"], "skill_ids": group["required"]}
        for group in train
    ]

    files = sorted((data / "pool").glob("*.parquet"))
    table = pa.concat_tables(pq.read_table(file) for file in files)
    pool_ids = table.column("skill_id").to_pylist()
    judged_ids = set().union(*skill_ids.values())
    other_ids = sorted(set(pool_ids) - judged_ids)
    selected_ids = judged_ids.union(random.Random(0).sample(other_ids, NUM_OTHERS))
    pool = table.filter([skill_id in selected_ids for skill_id in pool_ids])

    with staged_folder(out) as folder:
        (folder / "without").mkdir()
        (folder / "pool").mkdir()
        write_rows(train, folder / "train.jsonl")
        write_rows(test, folder / "test.jsonl")
        write_rows(without_rejections, folder / "without" / "train.jsonl")
        pq.write_table(pool, folder / "pool" / "part-0.parquet")
    print(
        f"{len(train)} groups to train on, {len(test)} to test on, {len(selected_ids)} skills; "
        "no skill is on both sides"
    )
    for share in (0.1, 0.2, 0.3):
        difference = smallest_difference(len(test), share)
        print(
            f"two systems that differ on {share:.0%} of {len(test)} queries: "
            f"a difference from {difference:.3f} on shows"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
