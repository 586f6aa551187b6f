"""Stage `mine`: candidates for a query's hard negatives, from four sources (SkillRouter, section 4.2)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int64
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.filters import POSITIVE
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill, Verdict, name_key
from skilltrain.retrieval.dense import EncoderSource, encode_queries, encode_skills, nearest, open_encoder
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    queries_from_table,
    read_table,
    skills_from_table,
    verdicts_by_query,
    write_table,
)
from skilltrain.terminal import track

SOURCES = ("semantic", "lexical", "taxonomy", "random")
QUERY_BLOCK = 1024

Ranked = tuple[Int64[np.ndarray, " candidate"], Float32[np.ndarray, " candidate"]]
"""Skills (positions in the pool) and their scores, best first."""
RankedBlock = tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]


class MineConfig(Config):
    """Mine candidates for negatives: nearest by encoder and by BM25, of the same category, at random."""

    stage: Literal["mine"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    encoder: EncoderSource = Field(description="encoder of the semantic source; SkillRouter takes the base model")
    split: str | None = Field(default="train", description="mine for the queries of this split only; null for all")
    depth: int = Field(default=50, ge=0, description="semantic and lexical candidates a query, each")
    num_taxonomy: int = Field(
        default=8, ge=0, description="candidates of a positive's category; more than will be used"
    )
    num_random: int = Field(default=4, ge=0, description="candidates of other categories; more than will be used")
    seed: int = Field(default=0, description="seed of the taxonomy and random draws")
    out: Path = Field(description="folder to write: RANKINGS of four sources, DROPPED queries")


@dataclass(frozen=True)
class MiningPool:
    """A pool in order of skill_id with what mining looks up; positions below are positions in `skills`."""

    skills: Sequence[Skill]
    position: dict[str, int]
    categories: Int64[np.ndarray, " skill"]
    names: Int64[np.ndarray, " skill"]

    @classmethod
    def build(cls, skills: Iterable[Skill]) -> "MiningPool":
        """The pool of `skills`; a category of -1 says that the skill has none."""
        ordered = sorted(skills, key=lambda skill: skill.skill_id)
        if not ordered:
            raise SkilltrainError("the pool holds no skill to mine")
        category, name = {"": -1}, dict[str, int]()
        return cls(
            skills=ordered,
            position={skill.skill_id: place for place, skill in enumerate(ordered)},
            categories=np.array(
                [category.setdefault(s.category, len(category)) if s.category else -1 for s in ordered]
            ),
            names=np.array([name.setdefault(name_key(s.name), len(name)) for s in ordered]),
        )

    def taxonomy(self, positives: Int64[np.ndarray, " positive"]) -> Bool[np.ndarray, " skill"]:
        """Which skills share a category with one of `positives` and a name with none."""
        return np.isin(self.categories, self._known(positives)) & ~np.isin(self.names, self.names[positives])

    def elsewhere(self, positives: Int64[np.ndarray, " positive"]) -> Bool[np.ndarray, " skill"]:
        """Which skills share no category with `positives`; skills without a category are among them."""
        away = ~np.isin(self.categories, self._known(positives))
        away[positives] = False
        return away

    def _known(self, positives: Int64[np.ndarray, " positive"]) -> Int64[np.ndarray, " category"]:
        categories = self.categories[positives]
        return categories[categories >= 0]


@dataclass(frozen=True)
class Mined:
    """One query's candidates from one source."""

    query_id: str
    source: str
    ranked: Ranked


def run_mine(config: MineConfig, out: Path) -> dict[str, Any]:
    """Counts of candidates by source; writes RANKINGS (stage = source; its own ranks and scores) and DROPPED.

    Scores are cosines (BM25 for `lexical`). A query's judged positives are never candidates. A query whose
    positives are all outside the pool is dropped, for neither filter nor list could be made for it.
    """
    pool = MiningPool.build(skills_from_table(read_table(config.pool, SKILLS)))
    queries = select_queries(config.queries, config.split)
    verdicts = verdicts_by_query(read_table(config.queries, JUDGEMENTS))
    positives = {query.query_id: _positions(pool, verdicts.get(query.query_id, {})) for query in queries}
    lost = [query for query in queries if not len(positives[query.query_id])]
    queries = [query for query in queries if len(positives[query.query_id])]
    if not queries:
        raise SkilltrainError(
            f"no query of {config.queries} has a positive in the pool", where=config.pool, fix="give the queries' pool"
        )
    encoder = open_encoder(config.encoder)
    query_vectors = encode_queries(encoder, [query.text for query in queries])
    skill_vectors = encode_skills(encoder, pool.skills)
    mined = mine(pool, [(query, positives[query.query_id]) for query in queries], query_vectors, skill_vectors, config)
    counts: Counter[str] = Counter()
    table = pa.concat_tables([RANKINGS.schema.empty_table(), *_tables(mined, pool, counts)])
    write_table(table, RANKINGS, out)
    write_table([_lost(query, verdicts.get(query.query_id, {})) for query in lost], DROPPED, out)
    return {
        "num_queries": len(queries),
        "num_queries_dropped": len(lost),
        "num_skills": len(pool.skills),
        "num_candidates": {source: counts[source] for source in SOURCES},
        "num_queries_without": {source: len(queries) - counts[f"queries with {source}"] for source in SOURCES},
    }


def mine(
    pool: MiningPool,
    queries: Sequence[tuple[Query, Int64[np.ndarray, " positive"]]],
    query_vectors: Float32[np.ndarray, "query dim"],
    skill_vectors: Float32[np.ndarray, "skill dim"],
    config: MineConfig,
) -> Iterator[Mined]:
    """Yield the candidates of each (query, positions of its positives), query by query and source by source.

    Vectors have unit norm. Scores are computed block by block and only the best kept, so 38,000 queries over 80,000
    skills need the two matrices of vectors and about 60 MB beside.
    """
    deepest = config.depth + max(len(positives) for _, positives in queries)
    near = _search_dense(query_vectors, skill_vectors, deepest) if config.depth else None
    words = _search_lexical(pool.skills, [query for query, _ in queries], deepest) if config.depth else None
    for row, (query, positives) in enumerate(track(queries, "drawing", len(queries))):
        for source, found in (("semantic", near), ("lexical", words)):
            if found:
                ranked = _others(found[0][row], found[1][row], positives, config.depth)
                yield Mined(query.query_id, source, ranked)
        draws = (
            ("taxonomy", pool.taxonomy(positives), config.num_taxonomy),
            ("random", pool.elsewhere(positives), config.num_random),
        )
        for source, allowed, count in draws:
            drawn = draw(np.flatnonzero(allowed), count, f"{config.seed}/{query.query_id}/{source}")
            yield Mined(query.query_id, source, _by_cosine(drawn, query_vectors[row], skill_vectors))


def _search_dense(
    query_vectors: Float32[np.ndarray, "query dim"], skill_vectors: Float32[np.ndarray, "skill dim"], k: int
) -> RankedBlock:
    blocks = range(0, len(query_vectors), QUERY_BLOCK)
    found = [
        nearest(query_vectors[start : start + QUERY_BLOCK], skill_vectors, k)
        for start in track(blocks, "semantic search", len(blocks))
    ]
    return np.concatenate([block[0] for block in found]), np.concatenate([block[1] for block in found])


def _search_lexical(skills: Sequence[Skill], queries: Sequence[Query], k: int) -> RankedBlock:
    """BM25's best, with NaN for what shares no term with the query."""
    indices, scores = BM25Index.build([bm25_text(skill) for skill in skills]).search([q.text for q in queries], k)
    return indices, np.where(scores > 0, scores, np.float32(np.nan))


def select_queries(folder: Path, split: str | None) -> list[Query]:
    """The queries of `split` (all for None) in order of id. Raises SkilltrainError where there are none."""
    queries = queries_from_table(read_table(folder, QUERIES))
    chosen = [query for query in queries if split in (None, query.split)]
    if not chosen:
        splits = ", ".join(sorted({query.split for query in queries})) or "none, the table is empty"
        raise SkilltrainError(f"no query of split '{split}' (splits here: {splits})", where=folder, fix="set split")
    return sorted(chosen, key=lambda query: query.query_id)


def draw(allowed: Int64[np.ndarray, " skill"], count: int, key: str) -> Int64[np.ndarray, " candidate"]:
    """`count` of `allowed` (all where there are fewer), uniformly without repetition; the same for the same `key`."""
    generator = np.random.default_rng(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
    return generator.choice(allowed, size=min(count, len(allowed)), replace=False)


def _others(
    skills: Int64[np.ndarray, " k"], scores: Float32[np.ndarray, " k"], positives: np.ndarray, depth: int
) -> Ranked:
    """The `depth` best that have a score and are no positive."""
    other = ~np.isin(skills, positives) & ~np.isnan(scores)
    return skills[other][:depth], scores[other][:depth]


def _by_cosine(
    drawn: Int64[np.ndarray, " candidate"],
    query: Float32[np.ndarray, " dim"],
    skill_vectors: Float32[np.ndarray, "skill dim"],
) -> Ranked:
    """What was drawn, nearest first, so that ranks follow scores in every source."""
    scores = skill_vectors[drawn] @ query
    order = np.lexsort((drawn, -scores))
    return drawn[order], scores[order]


def _positions(pool: MiningPool, judged: dict[str, Verdict]) -> Int64[np.ndarray, " positive"]:
    known = [s for s, verdict in judged.items() if verdict in POSITIVE and s in pool.position]
    return np.array(sorted(pool.position[skill_id] for skill_id in known), dtype=np.int64)


def _tables(mined: Iterable[Mined], pool: MiningPool, counts: Counter[str]) -> Iterator[pa.Table]:
    """RANKINGS tables of many queries each; adds to `counts` what they hold, by source."""
    skill_ids = pa.array([skill.skill_id for skill in pool.skills])
    waiting: list[Mined] = []
    for item in mined:
        counts[item.source] += len(item.ranked[0])
        counts[f"queries with {item.source}"] += bool(len(item.ranked[0]))
        waiting.append(item)
        if len(waiting) == len(SOURCES) * QUERY_BLOCK:
            yield _table(waiting, skill_ids)
            waiting = []
    if waiting:
        yield _table(waiting, skill_ids)


def _table(items: Sequence[Mined], skill_ids: pa.Array) -> pa.Table:
    sizes = [len(item.ranked[0]) for item in items]
    repeat = pa.array(np.repeat(np.arange(len(items)), sizes))
    ranks = np.concatenate([np.arange(1, size + 1) for size in sizes])
    columns = [
        pa.array([item.query_id for item in items]).take(repeat),
        skill_ids.take(pa.array(np.concatenate([item.ranked[0] for item in items]))),
        pa.array(ranks, pa.int32()),
        pa.array(np.concatenate([item.ranked[1] for item in items]), pa.float64()),
        pa.array([item.source for item in items]).take(repeat),
    ]
    return pa.Table.from_arrays(columns, schema=RANKINGS.schema)


def _lost(query: Query, judged: dict[str, Verdict]) -> dict[str, Any]:
    golds = [skill_id for skill_id, verdict in judged.items() if verdict in POSITIVE]
    reason = "no skill is judged a positive of this query"
    if golds:
        reason = f"none of its {len(golds)} positive skill(s) is in the pool"
    skill_id = min(golds) if golds else ""
    return {"query_id": query.query_id, "skill_id": skill_id, "filter": "no_positive", "value": None, "reason": reason}
