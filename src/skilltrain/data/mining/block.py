"""The candidates of a block of queries, found by whichever process it is given to from files that all of them share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32, Int64

from skilltrain.data.mining.draws import PoolGroups, Positions, draw
from skilltrain.retrieval.lexical import SavedBM25
from skilltrain.retrieval.nearest import ExactIndex, IndexConfig, Searcher, cosines

SOURCES: tuple[str, ...] = ("semantic", "lexical", "taxonomy", "random")
SKILL_VECTORS, QUERY_VECTORS, INDEX, LEXICAL, CATEGORIES, NAMES = (
    "skills.npy", "queries.npy", "skills.index", "bm25", "categories.npy", "names.npy",
)  # fmt: skip

Ranked = tuple[Positions, Float32[np.ndarray, " candidate"]]
"""Skills (positions in the pool) and their scores, best first."""


@dataclass(frozen=True)
class Amounts:
    """How much is mined from each source; `max_positives` more are searched, for positives are left out."""

    semantic: int
    lexical: int
    taxonomy: int
    random: int
    max_positives: int
    seed: int


@dataclass(frozen=True)
class QueryBlock:
    """Queries that are mined together: those whose vectors stand from `start` on."""

    start: int
    query_ids: tuple[str, ...]
    positives: tuple[Positions, ...]
    term_ids: tuple[Int32[np.ndarray, " term"], ...]


@dataclass(frozen=True)
class MinedBlock:
    """The candidates of a block, query by query and source by source; the rows of each number `sizes`."""

    sizes: Int64[np.ndarray, "query source"]
    positions: Int64[np.ndarray, " candidate"]
    scores: Float32[np.ndarray, " candidate"]


@dataclass(frozen=True)
class Material:
    """What a run's folder holds, memory-mapped; no lexical index where none was made."""

    queries: Float32[np.ndarray, "query dim"]
    searcher: Searcher
    lexical: SavedBM25 | None
    groups: PoolGroups


@lru_cache(maxsize=1)
def open_material(folder: Path, index: IndexConfig) -> Material:
    """The material of one run; a process opens it once. `open_material.cache_clear()` lets go of it."""
    skills, queries = (np.asarray(np.load(folder / name, mmap_mode="r")) for name in (SKILL_VECTORS, QUERY_VECTORS))
    return Material(
        queries,
        Searcher.open(index if (folder / INDEX).is_file() else ExactIndex(), skills, folder / INDEX),
        SavedBM25.open(folder / LEXICAL) if (folder / LEXICAL).is_dir() else None,
        PoolGroups.build(np.load(folder / CATEGORIES), np.load(folder / NAMES)),
    )


def mine_block(block: QueryBlock, folder: Path, index: IndexConfig, amounts: Amounts) -> MinedBlock:
    """The candidates of a block; those of a query do not depend on the queries beside it."""
    material = open_material(folder, index)  # pyright: ignore[reportArgumentType]  frozen: hashable
    ranked = [ranked for sources in _by_query(block, material, amounts) for ranked in sources]
    return MinedBlock(
        np.array([len(positions) for positions, _ in ranked]).reshape(-1, len(SOURCES)),
        np.concatenate([positions for positions, _ in ranked]),
        np.concatenate([scores for _, scores in ranked]),
    )


def _by_query(block: QueryBlock, material: Material, amounts: Amounts) -> Iterator[Sequence[Ranked]]:
    """Yield the candidates of each query from the four sources, in the order of SOURCES."""
    vectors = material.queries[block.start : block.start + len(block.query_ids)]
    nothing = np.empty((len(vectors), 0), np.int64), np.empty((len(vectors), 0), np.float32)
    near = worded = nothing
    if amounts.semantic:
        near = material.searcher.search(vectors, amounts.semantic + amounts.max_positives)
    if material.lexical:
        texts, scores = material.lexical.search(block.term_ids, amounts.lexical + amounts.max_positives)
        worded = texts, np.where(scores > 0, scores, np.float32(np.nan))  # a score of 0: no term is shared
    for row, (query_id, positives) in enumerate(zip(block.query_ids, block.positives, strict=True)):
        drawn = _draw(material.groups, positives, amounts, f"{amounts.seed}/{query_id}")
        yield (
            _others(near[0][row], near[1][row], positives, amounts.semantic),
            _others(worded[0][row], worded[1][row], positives, amounts.lexical),
            *(_by_cosine(skills, vectors[row], material.searcher.pool) for skills in drawn),
        )


def _draw(groups: PoolGroups, positives: Positions, amounts: Amounts, key: str) -> tuple[Positions, Positions]:
    alike = groups.alike(positives)
    taxonomy = alike[draw(len(alike), amounts.taxonomy, f"{key}/taxonomy")]
    return taxonomy, groups.draw_elsewhere(positives, amounts.random, f"{key}/random")


def _others(
    skills: Int64[np.ndarray, " k"], scores: Float32[np.ndarray, " k"], positives: Positions, depth: int
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
    scores = cosines(query[None], skill_vectors, np.zeros(len(drawn), np.int64), drawn)
    order = np.lexsort((drawn, -scores))
    return drawn[order], scores[order]
