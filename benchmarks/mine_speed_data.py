"""What mine_speed mines: a real pool with its vectors, cut down to a size or grown to it with edited copies."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skilltrain.records import Query, Skill
from skilltrain.tables import (
    JUDGEMENTS,
    QUERIES,
    SKILLS,
    read_queries,
    read_skills,
    read_table,
    verdicts_by_query,
    write_table,
)

DRIFT = 0.3  # length of the step by which a copy's vector leaves the original's: their cosine is about 0.96
POSITIVE = ("required", "useful")


@dataclass(frozen=True)
class Base:
    """The real pool and its queries; vectors of unit norm, a row each."""

    skills: Sequence[Skill]
    skill_vectors: np.ndarray
    queries: Sequence[Query]
    query_vectors: np.ndarray
    positives: dict[str, list[str]]


def encode_base(pool: Path, queries: Path, split: str, source: str, cache: Path) -> Base:
    """The pool and the queries of `split` that have a positive in it, encoded; what `cache` holds is not again."""
    from skilltrain.retrieval.dense import EncoderSource, open_encoder

    skills = read_skills(pool)
    known = {skill.skill_id for skill in skills}
    verdicts = verdicts_by_query(read_table(queries, JUDGEMENTS))
    positives = {
        query_id: sorted(s for s, verdict in judged.items() if verdict in POSITIVE and s in known)
        for query_id, judged in verdicts.items()
    }
    asked = [q for q in read_queries(queries) if q.split == split]
    asked = [q for q in asked if positives.get(q.query_id)]
    encoder = open_encoder(EncoderSource(source=source, cache=cache))
    vectors = encoder.encode_queries([query.text for query in asked])
    return Base(skills, encoder.encode_skills(skills), asked, vectors, positives)


def write_case(base: Base, num_skills: int, num_queries: int, folder: Path) -> None:
    """Write pool/, queries/, skills.npy and queries.npy of these sizes; the same for the same sizes.

    Skills beyond the real ones are copies with some lines of the body in another order, queries beyond the real ones
    hold the words of one in another order; the vectors of both drift a little.
    """
    chosen, choice = np.random.default_rng(0), random.Random(0)
    golds = {skill_id for query in base.queries for skill_id in base.positives[query.query_id]}
    is_gold = np.array([skill.skill_id in golds for skill in base.skills])
    order = np.concatenate([np.flatnonzero(is_gold), chosen.permutation(np.flatnonzero(~is_gold))])
    if num_skills < is_gold.sum():
        raise SystemExit(
            f"mine_speed: {is_gold.sum()} skills are positives; ask for more than {num_skills}"
        )
    places = [(int(order[n % len(order)]), n // len(order)) for n in range(num_skills)]
    write_table(
        [_skill_copy(base.skills[place], copy, choice) for place, copy in places],
        SKILLS,
        folder / "pool",
    )
    np.save(folder / "skills.npy", _drifted(base.skill_vectors, places, chosen))
    asked = [(n % len(base.queries), n // len(base.queries)) for n in range(num_queries)]
    queries = [_query_copy(base.queries[place], copy, choice) for place, copy in asked]
    judged = [
        {
            "query_id": query.query_id,
            "skill_id": skill_id,
            "verdict": "required",
            "judge": "benchmark",
        }
        for query, (place, _) in zip(queries, asked, strict=True)
        for skill_id in base.positives[base.queries[place].query_id]
    ]
    write_table(queries, QUERIES, folder / "queries")
    write_table(judged, JUDGEMENTS, folder / "queries")
    np.save(folder / "queries.npy", _drifted(base.query_vectors, asked, chosen))


def _skill_copy(skill: Skill, copy: int, choice: random.Random) -> Skill:
    if not copy:
        return skill
    lines = skill.body.split("\n")
    moved = choice.sample(range(len(lines)), len(lines) // 3)
    for here, there in zip(moved, sorted(moved), strict=True):
        lines[here], lines[there] = lines[there], lines[here]
    return replace(
        skill,
        skill_id=f"{skill.skill_id} copy {copy}",
        name=f"{skill.name}-{copy}",
        body="\n".join(lines),
    )


def _query_copy(query: Query, copy: int, choice: random.Random) -> Query:
    if not copy:
        return query
    words = query.text.split()
    choice.shuffle(words)
    return replace(query, query_id=f"{query.query_id} copy {copy}", text=" ".join(words))


def _drifted(
    vectors: np.ndarray, places: Sequence[tuple[int, int]], chosen: np.random.Generator
) -> np.ndarray:
    result = vectors[[place for place, _ in places]].astype(np.float32)
    copies = np.array([copy > 0 for _, copy in places])
    steps = chosen.normal(size=(int(copies.sum()), vectors.shape[1])).astype(np.float32)
    result[copies] += DRIFT * steps / np.linalg.norm(steps, axis=1, keepdims=True)
    return result / np.linalg.norm(result, axis=1, keepdims=True)
