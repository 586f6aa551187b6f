"""Stage `mine`: candidates for a query's hard negatives, from four sources (SkillRouter, section 4.2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int64
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.draws import PoolGroups, Positions, draw
from skilltrain.data.near_duplicates import name_numbers
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Query, Skill, Verdict
from skilltrain.retrieval.dense import EncoderSource, encode_queries, encode_skills, open_encoder
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import Found, build_index, cosines, nearest, recall
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    RANKINGS,
    SKILLS,
    read_table,
    select_queries,
    skills_from_table,
    verdicts_by_query,
    write_table,
)
from skilltrain.terminal import track

SOURCES: tuple[str, ...] = ("semantic", "lexical", "taxonomy", "random")
EXACT = "Flat"
RECALL_SAMPLE = 200  # queries by which an approximate index is measured

Ranked = tuple[Positions, Float32[np.ndarray, " candidate"]]
"""Positions in the pool and their scores, best first."""
BySource = tuple[Ranked, Ranked, Ranked, Ranked]
"""One query's candidates from each of SOURCES."""


class MineConfig(Config):
    """Mine candidates for negatives: nearest by encoder and by BM25, of the same category, at random."""

    stage: Literal["mine"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    encoder: EncoderSource = Field(description="encoder of the semantic source; SkillRouter takes the base model")
    split: str | None = Field(default="train", description="mine for the queries of this split only; null for all")
    sources: tuple[Literal["semantic", "lexical", "taxonomy", "random"], ...] = Field(
        default=("semantic", "lexical", "taxonomy", "random"),
        min_length=1,
        description="where candidates are taken from; leave one out to switch it off",
    )
    depth: int = Field(default=50, ge=0, description="semantic and lexical candidates a query, each")
    index: str = Field(
        default=EXACT,
        description="faiss index that finds the nearest: Flat looks at all skills; HNSW32 efSearch=256 or "
        "IVF1024,Flat nprobe=64 at a part, and the summary tells what they miss",
    )
    num_taxonomy: int = Field(
        default=8, ge=0, description="candidates of a positive's category; more than will be used"
    )
    num_random: int = Field(default=4, ge=0, description="candidates of other categories; more than will be used")
    seed: int = Field(default=0, description="seed of the taxonomy and random draws, and of the index")
    out: Path = Field(description="folder to write: RANKINGS of four sources, DROPPED queries")

    def amount(self, source: str) -> int:
        """How many candidates a query gets from `source`; 0 where it is switched off."""
        amounts = dict(zip(SOURCES, (self.depth, self.depth, self.num_taxonomy, self.num_random), strict=True))
        return amounts[source] if source in self.sources else 0


def run_mine(config: MineConfig, out: Path) -> dict[str, Any]:
    """Counts of candidates by source; writes RANKINGS (stage = source; its own ranks and scores) and DROPPED.

    Scores are cosines (BM25 for `lexical`). A query's judged positives are never candidates. A query whose
    positives are all outside the pool is dropped, for neither filter nor list could be made for it.
    """
    skills = _read_pool(config.pool)
    position = {skill.skill_id: place for place, skill in enumerate(skills)}
    queries = select_queries(config.queries, config.split)
    verdicts = verdicts_by_query(read_table(config.queries, JUDGEMENTS))
    known = {query.query_id: _positions(position, verdicts.get(query.query_id, {})) for query in queries}
    asked = [query for query in queries if len(known[query.query_id])]
    lost = [_lost(query, verdicts.get(query.query_id, {})) for query in queries if not len(known[query.query_id])]
    if not asked:
        what = f"no query of {config.queries} has a positive in the pool"
        raise SkilltrainError(what, where=config.pool, fix="give the queries' pool")
    ranked, index = mine(config, skills, asked, [known[query.query_id] for query in asked])
    sizes = np.array([[len(positions) for positions, _ in by_source] for by_source in ranked])
    write_table(_table(ranked, sizes, [query.query_id for query in asked], list(position)), RANKINGS, out)
    write_table([drop.row() for drop in lost], DROPPED, out)
    return {
        "num_queries": len(asked),
        "num_queries_dropped": len(lost),
        "num_skills": len(skills),
        "num_candidates": dict(zip(SOURCES, sizes.sum(axis=0).tolist(), strict=True)),
        "num_queries_without": dict(zip(SOURCES, (sizes == 0).sum(axis=0).tolist(), strict=True)),
        "index": index,
    }


def mine(
    config: MineConfig, skills: Sequence[Skill], queries: Sequence[Query], positives: Sequence[Positions]
) -> tuple[list[BySource], dict[str, Any]]:
    """(the candidates of each query, what is to be told of the index); those of a query depend on no other query."""
    query_vectors, vectors = _encode(config.encoder, queries, skills)
    num_searched = config.depth + max(map(len, positives))  # positives are left out of what is found
    near, index = _search_vectors(config, query_vectors, vectors, num_searched)
    worded = _search_texts(config, queries, skills, num_searched)
    groups = PoolGroups(
        _numbered([(skill.category or "").strip() for skill in skills]),
        name_numbers([skill.name for skill in skills]),
    )
    ranked: list[BySource] = []
    for row, query in enumerate(track(queries, "drawing candidates", len(queries))):
        taxonomy, random = _draw(config, groups, positives[row], query.query_id)
        ranked.append((
            _others((near[0][row], near[1][row]), positives[row], config.depth),
            _others((worded[0][row], worded[1][row]), positives[row], config.depth),
            _by_cosine(taxonomy, query_vectors[row], vectors),
            _by_cosine(random, query_vectors[row], vectors),
        ))  # fmt: skip
    return ranked, index


def _read_pool(path: Path) -> list[Skill]:
    """The skills in order of skill_id. Raises SkilltrainError where there are none."""
    skills = skills_from_table(read_table(path, SKILLS))
    if not skills:
        raise SkilltrainError("the pool holds no skill to mine", where=path)
    return sorted(skills, key=lambda skill: skill.skill_id)


def _positions(position: Mapping[str, int], judged: Mapping[str, Verdict]) -> Positions:
    """Where in the pool the positives of one query stand, ascending."""
    known = [position[s] for s, verdict in judged.items() if verdict in POSITIVE and s in position]
    return np.array(sorted(known), dtype=np.int64)


def _encode(source: EncoderSource, queries: Sequence[Query], skills: Sequence[Skill]) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of queries and of skills; the encoder's memory is free again afterwards."""
    encoder = open_encoder(source)
    return encode_queries(encoder, [query.text for query in queries]), encode_skills(encoder, skills)


def _search_vectors(
    config: MineConfig, queries: np.ndarray, pool: np.ndarray, num_searched: int
) -> tuple[Found, dict[str, Any]]:
    """The nearest skills of each query; the index and, if it may miss skills, its recall at `depth`."""
    told: dict[str, Any] = {"kind": config.index}
    if not config.amount("semantic"):
        return _nothing_found(len(queries)), told
    if config.index == EXACT:
        return nearest(queries, pool, num_searched), told
    rows = np.unique(np.linspace(0, len(queries) - 1, RECALL_SAMPLE).astype(np.int64))
    index = build_index(config.index, pool, config.seed)
    found, sampled = nearest(queries, pool, num_searched, index), nearest(queries[rows], pool, config.depth, index)
    share = recall(sampled[0], nearest(queries[rows], pool, config.depth)[0])
    return found, told | {f"recall@{config.depth}": round(share, 4), "num_queries_sampled": len(rows)}


def _search_texts(config: MineConfig, queries: Sequence[Query], skills: Sequence[Skill], num_searched: int) -> Found:
    """The best skills of each query by BM25; the score of a skill that shares no term with it is NaN."""
    if not config.amount("lexical"):
        return _nothing_found(len(queries))
    index = BM25Index([bm25_text(skill) for skill in skills])
    positions, scores = index.search([query.text for query in queries], num_searched)
    return positions, np.where(scores > 0, scores, np.float32(np.nan))


def _nothing_found(num_queries: int) -> Found:
    return np.empty((num_queries, 0), np.int64), np.empty((num_queries, 0), np.float32)


def _numbered(values: Sequence[str]) -> Positions:
    """A number for each value, equal ones alike; -1 for an empty one."""
    numbers = {"": -1}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _draw(config: MineConfig, groups: PoolGroups, positives: Positions, query_id: str) -> tuple[Positions, Positions]:
    """What is drawn for `taxonomy` and for `random`; the same for the same seed."""
    key = f"{config.seed}/{query_id}"
    taxonomy = draw(groups.alike(positives), config.amount("taxonomy"), f"{key}/taxonomy")
    return taxonomy, draw(groups.elsewhere(positives), config.amount("random"), f"{key}/random")


def _others(found: Ranked, positives: Positions, depth: int) -> Ranked:
    """The `depth` best that have a score and are no positive."""
    positions, scores = found
    other = ~np.isin(positions, positives) & ~np.isnan(scores)
    return positions[other][:depth], scores[other][:depth]


def _by_cosine(drawn: Positions, query: Float32[np.ndarray, " dim"], pool: Float32[np.ndarray, "skill dim"]) -> Ranked:
    """What was drawn, nearest first, so that ranks follow scores in every source."""
    scores = cosines(query[None], pool, np.zeros(len(drawn), np.int64), drawn)
    order = np.lexsort((drawn, -scores))
    return drawn[order], scores[order]


def _table(
    ranked: Sequence[BySource], sizes: Int64[np.ndarray, "query source"], query_ids: list[str], skill_ids: list[str]
) -> pa.Table:
    """RANKINGS of all queries, query by query and source by source."""
    counts = sizes.ravel()
    pairs = np.repeat(np.arange(len(counts)), counts)  # of a query and a source
    ranks = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    positions, scores = (np.concatenate([one[part] for by_source in ranked for one in by_source]) for part in (0, 1))
    columns = [
        pa.array(query_ids).take(pa.array(pairs // len(SOURCES))),
        pa.array(skill_ids).take(pa.array(positions)),
        pa.array(ranks, pa.int32()),
        pa.array(scores, pa.float64()),
        pa.array(SOURCES).take(pa.array(pairs % len(SOURCES))),
    ]
    return pa.Table.from_arrays(columns, schema=RANKINGS.schema)


def _lost(query: Query, judged: Mapping[str, Verdict]) -> Dropped:
    """Why a query is dropped; one of its positives, if it has any, stands in the row."""
    golds = [skill_id for skill_id, verdict in judged.items() if verdict in POSITIVE]
    reason = "no skill is judged a positive of this query"
    if golds:
        reason = f"none of its {len(golds)} positive skill(s) is in the pool"
    return Dropped(query.query_id, min(golds, default=""), "no_positive", reason)
