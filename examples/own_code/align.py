"""Distillation of vectors: a loss that compares vectors with those of a teacher, and their file.

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
        _, column = batch.is_positive.nonzero(as_tuple=True)  # [positive]
        vectors = torch.cat([batch.vectors.queries, batch.vectors.skills[column]])  # [row, dim]
        keys = [f"query {query_id}" for query_id in batch.vectors.query_ids]
        keys += [f"skill {batch.vectors.skill_ids[position]}" for position in column.tolist()]
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
        file: The .npz file.
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
