"""Makes the pools that mine_speed.py mines: a part of a real pool, or the pool and copies of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skilltrain.records import POSITIVE, Query, Skill
from skilltrain.tables import (
    JUDGEMENTS,
    QUERIES,
    SKILLS,
    read_queries,
    read_skills,
    read_verdicts,
    write_table,
)

DRIFT = 0.3  # length of the noise in a copy's vector; its cosine with the original is about 0.96


@dataclass(frozen=True)
class EncodedPool:
    """A real pool and its queries, with their vectors.

    Attributes:
        skills: Skills of the pool.
        skill_vectors: Unit vector of each skill.
        queries: Queries with at least one positive in the pool.
        query_vectors: Unit vector of each query.
        positives: Ids of the positive skills, by query id.
    """

    skills: Sequence[Skill]
    skill_vectors: np.ndarray
    queries: Sequence[Query]
    query_vectors: np.ndarray
    positives: dict[str, list[str]]


def encode_pool(pool: Path, folder: Path, split: str, source: str, cache: Path) -> EncodedPool:
    """Read and encode a pool, and the queries of a split that have a positive in the pool.

    Args:
        pool: SKILLS table.
        folder: Folder with the QUERIES and JUDGEMENTS tables.
        split: Split of the queries.
        source: Encoder.
        cache: Folder of vectors. Texts whose vectors it holds are not encoded again.
    """
    from skilltrain.retrieval.dense import EncoderSource, open_encoder

    skills = read_skills(pool)
    pool_ids = {skill.skill_id for skill in skills}
    positives: dict[str, list[str]] = {}
    for query_id, verdicts in read_verdicts(folder).items():
        skill_ids = [skill_id for skill_id, verdict in verdicts.items() if verdict in POSITIVE]
        positives[query_id] = sorted(pool_ids.intersection(skill_ids))

    queries = [query for query in read_queries(folder) if query.split == split]
    queries = [query for query in queries if positives.get(query.query_id)]
    encoder = open_encoder(EncoderSource(source=source, cache=cache))
    query_vectors = encoder.encode_queries([query.text for query in queries])
    return EncodedPool(skills, encoder.encode_skills(skills), queries, query_vectors, positives)


def write_case(base: EncodedPool, num_skills: int, num_queries: int, folder: Path) -> None:
    """Write pool/, queries/, skills.npy and queries.npy with so many skills and queries.

    If there are not enough real skills or queries, edited copies follow them. The same sizes give
    the same files.
    """
    rng = np.random.default_rng(0)
    text_rng = random.Random(0)

    # All positives come first, because every query needs them.
    positive_ids: set[str] = set()
    for query in base.queries:
        positive_ids.update(base.positives[query.query_id])
    is_positive = np.array([skill.skill_id in positive_ids for skill in base.skills])
    if num_skills < is_positive.sum():
        raise SystemExit(
            f"mine_speed: {is_positive.sum()} skills are positives; ask for more than {num_skills}"
        )
    other_rows = rng.permutation(np.flatnonzero(~is_positive))
    order = np.concatenate([np.flatnonzero(is_positive), other_rows])

    # Copy number 0 is the original.
    copies, positions = np.divmod(np.arange(num_skills), len(order))
    rows = order[positions]
    skills = [
        _copy_skill(base.skills[row], copy, text_rng)
        for row, copy in zip(rows, copies, strict=True)
    ]
    write_table(skills, SKILLS, folder / "pool")
    np.save(folder / "skills.npy", _drift_copies(base.skill_vectors[rows], copies, rng))

    copies, rows = np.divmod(np.arange(num_queries), len(base.queries))
    queries: list[Query] = []
    judgements: list[dict[str, str]] = []
    for row, copy in zip(rows, copies, strict=True):
        original = base.queries[row]
        query = _copy_query(original, copy, text_rng)
        queries.append(query)
        for skill_id in base.positives[original.query_id]:
            judgement = {"query_id": query.query_id, "skill_id": skill_id}
            judgements.append(judgement | {"verdict": "required", "judge": "benchmark"})
    write_table(queries, QUERIES, folder / "queries")
    write_table(judgements, JUDGEMENTS, folder / "queries")
    np.save(folder / "queries.npy", _drift_copies(base.query_vectors[rows], copies, rng))


def _copy_skill(skill: Skill, copy: int, rng: random.Random) -> Skill:
    """Copy a skill and reorder a third of its body's lines. Copy 0 is the skill itself."""
    if copy == 0:
        return skill
    lines = skill.body.split("\n")
    positions = rng.sample(range(len(lines)), len(lines) // 3)
    for position, target in zip(positions, sorted(positions), strict=True):
        line = lines[position]
        lines[position] = lines[target]
        lines[target] = line
    return replace(
        skill,
        skill_id=f"{skill.skill_id} copy {copy}",
        name=f"{skill.name}-{copy}",
        body="\n".join(lines),
    )


def _copy_query(query: Query, copy: int, rng: random.Random) -> Query:
    """Copy a query and reorder its words. Copy 0 is the query itself."""
    if copy == 0:
        return query
    words = query.text.split()
    rng.shuffle(words)
    return replace(query, query_id=f"{query.query_id} copy {copy}", text=" ".join(words))


def _drift_copies(vectors: np.ndarray, copies: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add noise of length DRIFT to the vectors of copies, and normalize all vectors.

    Args:
        vectors: Vectors [text, dim]. They are not changed.
        copies: Copy number of each text.
        rng: Source of the noise.
    """
    drifted = vectors.astype(np.float32)
    is_copy = copies > 0
    noise = rng.normal(size=drifted[is_copy].shape).astype(np.float32)
    drifted[is_copy] += DRIFT * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    return drifted / np.linalg.norm(drifted, axis=1, keepdims=True)
