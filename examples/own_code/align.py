"""A distillation loss on vectors, and a program that writes the teacher's vectors.

After `make tiny`, this command writes the teacher's vectors:
    python examples/own_code/align.py SOURCE runs/tiny/pool runs/tiny/queries runs/tiny/teacher.npz
SOURCE is an encoder with as many dimensions as the trained one. align.yaml uses the loss.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import skilltrain
from skilltrain.losses import Loss, Needs
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.tables import read_skills


class Align(Loss):
    """1 - cosine of each query, and of each positive, with the teacher's vector of its id.

    Attributes:
        teacher: .npz file with a unit vector for each key "query ID" and "skill ID".
    """

    fits_reranker = False
    name: str
    teacher: Path

    @property
    def needs(self):
        return Needs(vectors=True)

    def __call__(self, batch):
        """Return the sum over queries and positives. `batch` is a ScoredBatch."""
        _, positive_columns = batch.is_positive.nonzero(as_tuple=True)  # [positive]
        positives = batch.vectors.skills[positive_columns]  # [positive, dim]
        vectors = torch.cat([batch.vectors.queries, positives])  # [row, dim]
        keys = [f"query {query_id}" for query_id in batch.vectors.query_ids]
        for column in positive_columns.tolist():
            keys.append(f"skill {batch.vectors.skill_ids[column]}")
        with np.load(self.teacher) as stored:
            targets = np.stack([stored[key] for key in keys])  # [row, dim]
        cosines = (vectors * torch.from_numpy(targets).to(vectors)).sum(1)  # [row]
        return (1 - cosines).sum()


def write_vectors(source: str, pool: Path, queries: Path, file: Path) -> None:
    """Write the teacher's vectors of all skills and queries.

    Args:
        source: Folder, Hub id or package of the teacher.
        pool: Folder of the pool.
        queries: Folder of the queries.
        file: The .npz file to write.
    """
    teacher = open_encoder(EncoderSource(source=source))
    skills = read_skills(pool)
    rows = skilltrain.read_table(queries, "queries").to_pylist()

    keys = [f"skill {skill.skill_id}" for skill in skills]
    keys += [f"query {row['query_id']}" for row in rows]
    query_vectors = teacher.encode_queries([row["text"] for row in rows])
    vectors = np.concatenate([teacher.encode_skills(skills), query_vectors])  # [key, dim]
    np.savez(file, **dict(zip(keys, vectors, strict=True)))


if __name__ == "__main__":
    source, pool, queries, file = sys.argv[1:]
    write_vectors(source, Path(pool), Path(queries), Path(file))
