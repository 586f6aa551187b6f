#!/usr/bin/env python
"""Draw two small pools of community skills, and print the tables of small_pools.sh.

python benchmarks/small_pools.py draw DATA OUT
python benchmarks/small_pools.py table OUT1 OUT2 ...

DATA holds pool/*.parquet and queries/. `draw` writes for each pool its skills, all requests, the
requests for every second skill (for `fit --queries`), and the requests for the other skills. A
skill has one long request or one written like a benchmark task, and a terse request.

`table` reads folders that small_pools.sh wrote. The name of a folder is the name of the pool. The
last rows count the requests of all pools together. p is from the exact sign test, uncorrected.
"""

import json
import math
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from skilltrain.metrics.bootstrap import compact, intervals
from skilltrain.metrics.comparison import sign_test
from skilltrain.tables import read_queries

SEED = 1
KINDS = {"llm": "long", "llm-long": "long", "llm-task": "task"}
"""Kind of a request by its origin in DATA. Requests of other origins are left out."""
# Number of skills with a task request and with a long request. No skill is in both pools.
POOLS = {"community500": (200, 300), "community1000": (400, 600)}

BM25 = "bm25"
UNTRAINED = "untrained router"
# Half or full weight of late interaction; the other weights are those of BM25 and the encoder.
HALF = "trained router, 1 : .5 : .5"
FULL = "trained router, 1 : .5 : 1"
SYSTEMS = (BM25, UNTRAINED, HALF, FULL)
PAIRS = ((UNTRAINED, BM25), (HALF, BM25), (FULL, BM25), (FULL, HALF))
"""Each system with its baseline."""


def read_rows(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Read the rows of JSON Lines files."""
    rows = []
    for name in names:
        text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
        rows += [json.loads(line) for line in text.splitlines()]
    return rows


def write_rows(rows: Iterable[Mapping[str, Any]], file: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


def draw_pools(data: Path, out: Path) -> None:
    """Draw the skills of both pools, and write them with their requests into `out`.

    Args:
        data: Folder with `pool` and `queries`.
        out: Folder to write four files for each pool to; see the text at the top of the file.
    """
    out.mkdir(parents=True, exist_ok=True)
    skills_by_id = {row["skill_id"]: row for row in pq.read_table(data / "pool").to_pylist()}
    # The first request of a skill is long or a task, and the second is terse.
    terse_rows = read_rows(data / "queries", "terse_train", "terse_train_more")
    terse_by_id = {row["skill_ids"][0]: {**row, "origin": "terse"} for row in terse_rows}
    requests_by_id = {}
    for row in read_rows(data / "queries", "train", "train_more"):
        skill_id = row["skill_ids"][0]
        if row["origin"] in KINDS:
            first = {**row, "origin": KINDS[row["origin"]]}
            requests_by_id[skill_id] = (first, terse_by_id[skill_id])

    rng = random.Random(SEED)
    ids_by_kind: dict[str, list[str]] = {}
    for kind in ("task", "long"):
        ids = sorted(name for name, rows in requests_by_id.items() if rows[0]["origin"] == kind)
        rng.shuffle(ids)
        ids_by_kind[kind] = ids
    for pool, (num_tasks, num_long) in POOLS.items():
        # Removing the ids from both lists keeps the pools apart.
        tasks = [ids_by_kind["task"].pop(0) for _ in range(num_tasks)]
        long = [ids_by_kind["long"].pop(0) for _ in range(num_long)]
        training_ids = {*tasks[::2], *long[::2]}
        requests = [row for skill_id in tasks + long for row in requests_by_id[skill_id]]
        given = [row for row in requests if row["skill_ids"][0] in training_ids]
        held_out = [row for row in requests if row["skill_ids"][0] not in training_ids]
        write_rows([skills_by_id[skill_id] for skill_id in tasks + long], out / f"{pool}.jsonl")
        write_rows(requests, out / f"{pool}_all.jsonl")
        write_rows(given, out / f"{pool}_given.jsonl")
        write_rows(held_out, out / f"{pool}_held_out.jsonl")


def read_hits(out: Path) -> dict[str, NDArray[np.float64]]:
    """Return Hit@1 of one pool by kind of request: [query, system].

    A system that the report lacks has NaN.
    """
    hits_by_query: dict[str, dict[str, float]] = {}
    for row in read_rows(out / "report", "per_query"):
        hits_by_query.setdefault(row["query_id"], {})[row["system"]] = row["Hit@1"]

    rows_by_kind: dict[str, list[list[float]]] = {}
    for query in read_queries(out / "requests"):
        hits = hits_by_query[query.query_id]
        row = [hits.get(system, math.nan) for system in SYSTEMS]
        rows_by_kind.setdefault(query.origin, []).append(row)
    return {kind: np.array(rows) for kind, rows in rows_by_kind.items()}


def describe_difference(differences: NDArray[np.float64]) -> str:
    """Format the mean of paired differences, with interval, better and worse requests, n and p.

    Requests with NaN are left out: the report of their pool lacks one of the systems.
    """
    differences = differences[~np.isnan(differences)]
    if not len(differences):
        return ""
    (mean,) = intervals(differences[:, None])
    # Three decimals, because the goal is an interval above -.02.
    bounds = f"[{compact(mean.low, 3)}, {compact(mean.high, 3)}]"
    num_better = int((differences > 0).sum())
    num_worse = int((differences < 0).sum())
    p = sign_test(differences)
    p_text = f"p = {compact(p, 4)}" if p >= 0.0001 else "p < .0001"
    return f"{compact(mean.mean, 3)} {bounds}, {num_better} to {num_worse} of {mean.n}, {p_text}"


def print_row(pool: str, kind: str, hits: NDArray[np.float64]) -> None:
    """Print the row of one kind of request.

    Args:
        pool: Name of the pool.
        kind: Kind of the requests.
        hits: Hit@1: [query, system].
    """
    cells = [f"{pool}, {kind}", str(len(hits))]
    for column in hits.T:
        cells.append("" if np.isnan(column).any() else str(intervals(column[:, None])[0]))
    for system, baseline in PAIRS:
        differences = hits[:, SYSTEMS.index(system)] - hits[:, SYSTEMS.index(baseline)]
        cells.append(describe_difference(differences))
    print(f"| {' | '.join(cells)} |")


def print_table(folders: Iterable[Path]) -> None:
    """Print one row for each pool and kind of request, and for each kind over all pools."""
    columns = ["requests", "n", *SYSTEMS]
    columns += [f"{system} minus {baseline}" for system, baseline in PAIRS]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    hits_of_all_pools: dict[str, list[NDArray[np.float64]]] = {}
    for folder in folders:
        hits_by_kind = read_hits(folder)
        hits_by_kind["all"] = np.concatenate([*hits_by_kind.values()])
        for kind, hits in hits_by_kind.items():
            print_row(folder.name, kind, hits)
            hits_of_all_pools.setdefault(kind, []).append(hits)
    for kind, parts in hits_of_all_pools.items():
        print_row("all pools", kind, np.concatenate(parts))


def main() -> None:
    """Run a command. See the text at the top of the file."""
    match sys.argv[1:]:
        case ["draw", data, out]:
            draw_pools(Path(data), Path(out))
        case ["table", *folders]:
            print_table(map(Path, folders))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
