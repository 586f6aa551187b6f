"""Makes one measurement of mine_speed.py in its own process, and prints the result as JSON.

python mine_speed_worker.py MODE FOLDER THREADS

FOLDER holds what `write_case` wrote. Imports and the reading of vectors are not timed, because both
libraries need them.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import peak_bytes

from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import JUDGEMENTS, QUERIES, RANKINGS, SKILLS, read_table

DEPTH = 50  # candidates per query
NUM_COMPARED = 100  # queries whose candidates are in the result, to compare the libraries


class SavedVectors:
    """An encoder that looks up saved vectors, so that encoding is not timed.

    Attributes:
        skills: Vectors of the skills.
        queries: Vectors of the queries.
        skill_rows: Row by skill id.
        query_rows: Row by text of the query, or by another column of the QUERIES table.
    """

    def __init__(self, folder: Path, query_column: str = "text") -> None:
        """Read what `write_case` wrote into a folder.

        Args:
            folder: Folder with vectors and tables.
            query_column: Column of the QUERIES table by which queries are looked up.
        """
        self.skills = np.load(folder / "skills.npy", mmap_mode="r")
        self.queries = np.load(folder / "queries.npy", mmap_mode="r")
        skill_ids = read_table(folder / "pool", SKILLS).column("skill_id").to_pylist()
        queries = read_table(folder / "queries", QUERIES).column(query_column).to_pylist()
        self.skill_rows = {skill_id: row for row, skill_id in enumerate(skill_ids)}
        self.query_rows = {query: row for row, query in enumerate(queries)}

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """Return the vectors of skills, one chunk each."""
        rows = [self.skill_rows[skill.skill_id] for skill in skills]
        return ChunkVectors.one_each(self.skills[rows])

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries."""
        return self.queries[[self.query_rows[query] for query in queries]]


class PeerModel(SavedVectors):
    """The part of a SentenceTransformer that mine_hard_negatives uses.

    Its texts are ids of skills and queries, so that they take little memory.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from sentence_transformers.util import dot_score, pairwise_dot_score

        super().__init__(folder, "query_id")
        self.device = torch.device("cpu")
        self.similarity = dot_score
        self.similarity_pairwise = pairwise_dot_score

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        """Return the vectors of skills by id."""
        return self.skills[[self.skill_rows[text] for text in texts]]

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        """Return the vectors of queries by id."""
        return self.encode_queries(texts)

    def get_embedding_dimension(self) -> int:
        """Return the width of the vectors."""
        return self.skills.shape[1]


def measure_ours(mode: str, folder: Path, threads: int) -> dict[str, Any]:
    """Run skilltrain's stage `mine`, and in the mode "ours" also its stage `filter`.

    The mode "ours" mines from all four sources, "ours-semantic" only from the vectors.
    """
    from skilltrain.data import filter_layers, mine
    from skilltrain.data.filter import Filter

    vectors = SavedVectors(folder)
    modules: tuple[Any, ...] = (mine, filter_layers)
    for module in modules:
        module.open_encoder = lambda source: vectors
    inputs = {
        "pool": folder / "pool",
        "queries": folder / "queries",
        "encoder": {"source": "known"},
    }
    with tempfile.TemporaryDirectory(prefix="mine-speed-") as out:
        mined = Path(out)
        settings = inputs | {"stage": "mine", "depth": DEPTH}
        if mode == "ours-semantic":
            settings["sources"] = ["semantic"]
        mine_seconds, summary = _time_stage(mine.Mine, settings, mined)
        result = {"mine_seconds": mine_seconds, "summary": summary, "filter_seconds": 0.0}
        result["nearest"] = _semantic_candidates(mined)

        if mode == "ours":
            filtered = mined / "filtered"
            filtered.mkdir()
            settings = inputs | {"stage": "filter", "rankings": mined, "workers": {"num": threads}}
            filter_seconds, summary = _time_stage(Filter, settings, filtered)
            result |= {"filter_summary": summary, "filter_seconds": filter_seconds}
    return result


def _time_stage(stage: Any, settings: dict[str, Any], out: Path) -> tuple[float, Any]:
    """Run a stage of skilltrain. Return the seconds it takes, and its summary."""
    config = stage.model_validate(settings | {"out": out})
    start_time = time.perf_counter()
    summary = config.run(out)
    return time.perf_counter() - start_time, summary


def _semantic_candidates(mined: Path) -> dict[str, list[str]]:
    """Return the skill ids that the source `semantic` found, for the first NUM_COMPARED queries."""
    rows = read_table(mined, RANKINGS).to_pydict()
    candidates: dict[str, list[str]] = {}
    for query_id, skill_id, stage in zip(
        rows["query_id"], rows["skill_id"], rows["stage"], strict=True
    ):
        if query_id not in candidates and len(candidates) == NUM_COMPARED:
            break
        if stage == "semantic":
            candidates.setdefault(query_id, []).append(skill_id)
    return candidates


def measure_clusters(folder: Path, threads: int) -> dict[str, Any]:
    """Run skilltrain's stage `clusters` on the pool."""
    from skilltrain.data.near_duplicates import Clusters

    settings = {"stage": "clusters", "pool": folder / "pool", "workers": {"num": threads}}
    with tempfile.TemporaryDirectory(prefix="mine-speed-") as out:
        seconds, summary = _time_stage(Clusters, settings, Path(out))
    return {"mine_seconds": seconds, "filter_seconds": 0.0, "nearest": {}, "found": summary}


def measure_peer(mode: str, folder: Path, threads: int) -> dict[str, Any]:
    """Run mine_hard_negatives of sentence-transformers, with or without faiss.

    For each query it finds the DEPTH nearest skills that are no positives, with scores.
    """
    import torch
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    torch.set_num_threads(threads)
    judgements = read_table(folder / "queries", JUDGEMENTS).to_pydict()
    pairs = Dataset.from_dict({"query": judgements["query_id"], "skill": judgements["skill_id"]})
    corpus = read_table(folder / "pool", SKILLS).column("skill_id").to_pylist()
    model: Any = PeerModel(folder)
    start_time = time.perf_counter()
    mined: Any = mine_hard_negatives(
        pairs,
        model,
        corpus=corpus,
        range_max=DEPTH,
        num_negatives=DEPTH,
        output_format="labeled-list",
        output_scores=True,
        use_faiss=mode == "st-faiss",
        verbose=False,
    )
    seconds = time.perf_counter() - start_time

    # The first queries in order of id are also the first ones of skilltrain's table.
    first_rows = np.argsort(np.array(mined["query"]))[:NUM_COMPARED]
    nearest: dict[str, list[str]] = {}
    for row in mined.select(first_rows):
        nearest[row["query"]] = row["skill"][1:]  # without the positive
    return {
        "mine_seconds": seconds,
        "filter_seconds": 0.0,
        "nearest": nearest,
        "num_rows": len(mined),
    }


def main(mode: str, folder: Path, threads: int) -> None:
    """Measure one mode of mine_speed.py, and print the result."""
    if mode == "clusters":
        result = measure_clusters(folder, threads)
    elif mode.startswith("ours"):
        result = measure_ours(mode, folder, threads)
    else:
        result = measure_peer(mode, folder, threads)
    result["own_peak_bytes"] = peak_bytes()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
