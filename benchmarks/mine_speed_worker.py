"""One measurement in a process of its own: python mine_speed_worker.py MODE FOLDER THREADS prints its result as JSON.

FOLDER is what `write_case` wrote. Imports and the reading of vectors are not timed: both sides have them.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import JUDGEMENTS, QUERIES, RANKINGS, SKILLS, read_table

DEPTH = 50
NUM_COMPARED = 100  # queries whose candidates are told, so that both sides can be compared
OUR_MODES = ("ours", "ours-semantic")


class KnownVectors:
    """Stands for an encoder, so that its work is not timed; knows skills by id and queries by text."""

    def __init__(self, folder: Path) -> None:
        self.skills, self.queries = (
            np.load(folder / name, mmap_mode="r") for name in ("skills.npy", "queries.npy")
        )
        ids = read_table(folder / "pool", SKILLS).column("skill_id").to_pylist()
        texts = read_table(folder / "queries", QUERIES).column("text").to_pylist()
        self.skill_rows = {skill_id: row for row, skill_id in enumerate(ids)}
        self.query_rows = {text: row for row, text in enumerate(texts)}

    def encode_chunks(self, skills: list[Skill]) -> ChunkVectors:
        return ChunkVectors.one_each(
            self.skills[[self.skill_rows[skill.skill_id] for skill in skills]]
        )

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        return self.queries[[self.query_rows[text] for text in texts]]


def measure_ours(mode: str, folder: Path, threads: int) -> dict[str, Any]:
    """Run the stage `mine` and, with all sources, the stage `filter`, from tables to tables."""
    from skilltrain.data import filter_layers, mine
    from skilltrain.data.filter import Filter

    vectors = KnownVectors(folder)
    for module in (mine, filter_layers):
        module.open_encoder = lambda source: vectors
    paths = {"pool": folder / "pool", "queries": folder / "queries"}
    settings = {"stage": "mine", "depth": DEPTH, "encoder": {"source": "known"}}
    settings |= {} if mode == "ours" else {"sources": ["semantic"]}
    with tempfile.TemporaryDirectory(prefix="mine-speed-") as out:
        config = mine.Mine.model_validate(settings | paths | {"out": out})
        started = time.perf_counter()
        summary = config.run(Path(out))
        result = {
            "mine_seconds": time.perf_counter() - started,
            "summary": summary,
            "filter_seconds": 0.0,
        }
        result["nearest"] = _nearest_of_table(Path(out))
        if mode == "ours":
            filtered = Path(out) / "filtered"
            filtered.mkdir()
            settings = {
                "stage": "filter",
                "encoder": {"source": "known"},
                "rankings": out,
                "out": filtered,
            }
            settings["workers"] = {"num": threads}
            started = time.perf_counter()
            result["filter_summary"] = Filter.model_validate(settings | paths).run(filtered)
            result["filter_seconds"] = time.perf_counter() - started
    return result


def _nearest_of_table(folder: Path) -> dict[str, list[str]]:
    rows = read_table(folder, RANKINGS).to_pydict()
    found: dict[str, list[str]] = {}
    for query_id, skill_id, stage in zip(
        rows["query_id"], rows["skill_id"], rows["stage"], strict=True
    ):
        if len(found) == NUM_COMPARED and query_id not in found:
            break
        if stage == "semantic":
            found.setdefault(query_id, []).append(skill_id)
    return found


def measure_clusters(folder: Path, threads: int) -> dict[str, Any]:
    """Run the stage `clusters` over the pool."""
    from skilltrain.data.near_duplicates import Clusters

    settings = {"stage": "clusters", "pool": folder / "pool", "workers": {"num": threads}}
    with tempfile.TemporaryDirectory(prefix="mine-speed-") as out:
        config = Clusters.model_validate(settings | {"out": out})
        started = time.perf_counter()
        summary = config.run(Path(out))
        seconds = time.perf_counter() - started
    return {"mine_seconds": seconds, "filter_seconds": 0.0, "nearest": {}, "found": summary}


class PeerModel:
    """What mine_hard_negatives asks of a SentenceTransformer; its texts are our ids, the smallest there can be."""

    def __init__(self, folder: Path) -> None:
        import torch

        vectors = KnownVectors(folder)
        query_ids = read_table(folder / "queries", QUERIES).column("query_id").to_pylist()
        self.device, self._skills, self._queries = (
            torch.device("cpu"),
            vectors.skills,
            vectors.queries,
        )
        self._skill_rows = vectors.skill_rows
        self._query_rows = {query_id: row for row, query_id in enumerate(query_ids)}

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        return self._skills[[self._skill_rows[text] for text in texts]]

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        return self._queries[[self._query_rows[text] for text in texts]]

    def get_embedding_dimension(self) -> int:
        return self._skills.shape[1]

    def similarity(self, left: Any, right: Any) -> Any:
        from sentence_transformers.util import dot_score

        return dot_score(left, right)

    def similarity_pairwise(self, left: Any, right: Any) -> Any:
        from sentence_transformers.util import pairwise_dot_score

        return pairwise_dot_score(left, right)


def measure_peer(mode: str, folder: Path, threads: int) -> dict[str, Any]:
    """sentence-transformers' mine_hard_negatives: the 50 nearest that are no positives, with scores, in memory."""
    import torch
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    torch.set_num_threads(threads)
    judged = read_table(folder / "queries", JUDGEMENTS).to_pydict()
    pairs = Dataset.from_dict({"query": judged["query_id"], "skill": judged["skill_id"]})
    corpus, model = (
        read_table(folder / "pool", SKILLS).column("skill_id").to_pylist(),
        PeerModel(folder),
    )
    started = time.perf_counter()
    mined = mine_hard_negatives(
        pairs,
        model,  # pyright: ignore[reportArgumentType]
        corpus=corpus,
        range_max=DEPTH,
        num_negatives=DEPTH,
        output_format="labeled-list",
        output_scores=True,
        use_faiss=mode == "st-faiss",
        verbose=False,
    )
    seconds = time.perf_counter() - started
    nearest: dict[str, list[str]] = {}
    first = np.argsort(np.array(mined["query"]))[:NUM_COMPARED]  # our table is in this order
    for row in mined.select(first):
        nearest[row["query"]] = row["skill"][1:]
    return {
        "mine_seconds": seconds,
        "filter_seconds": 0.0,
        "nearest": nearest,
        "num_rows": len(mined),
    }


def _peak_bytes() -> int:
    """The most memory that this process had; ru_maxrss would count what its parent had when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(mode: str, folder: Path, threads: int) -> None:
    """Measure and print."""
    if mode == "clusters":
        result = measure_clusters(folder, threads)
    else:
        result = (
            measure_ours(mode, folder, threads)
            if mode in OUR_MODES
            else measure_peer(mode, folder, threads)
        )
    result["own_peak_bytes"] = _peak_bytes()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
