"""Stage `mine`: candidates for a query's hard negatives, from four sources (SkillRouter, section 4.2)."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.mining.block import (
    CATEGORIES,
    INDEX,
    LEXICAL,
    NAMES,
    QUERY_VECTORS,
    SKILL_VECTORS,
    SOURCES,
    Amounts,
    MinedBlock,
    QueryBlock,
    mine_block,
    open_material,
)
from skilltrain.data.mining.draws import Positions
from skilltrain.data.mining.pool import MiningPool
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Query, Verdict
from skilltrain.retrieval.dense import EncoderSource, encode_queries, encode_skills, open_encoder
from skilltrain.retrieval.nearest import ExactIndex, IndexConfig, build_index, nearest, recall
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    RANKINGS,
    read_table,
    select_queries,
    table_writer,
    verdicts_by_query,
    write_table,
)
from skilltrain.workers import WorkersConfig, map_blocks

# Queries that a worker mines at once; the result does not depend on it. faiss multiplies matrices, which is eight times
# as fast as vector by vector, only from 128,000 numbers on.
QUERY_BLOCK = 1024
RECALL_SAMPLE = 200  # queries by which an approximate index is measured

Positives = dict[str, Positions]
"""query_id → positions of its positives in the pool."""


class MineConfig(Config):
    """Mine candidates for negatives: nearest by encoder and by BM25, of the same category, at random."""

    stage: Literal["mine"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    encoder: EncoderSource = Field(description="encoder of the semantic source; SkillRouter takes the base model")
    split: str | None = Field(default="train", description="mine for the queries of this split only; null for all")
    sources: tuple[Literal["semantic", "lexical", "taxonomy", "random"], ...] = Field(
        default=("semantic", "lexical", "taxonomy", "random"),
        description="where candidates are taken from; leave one out to switch it off",
    )
    depth: int = Field(default=50, ge=0, description="semantic and lexical candidates a query, each")
    index: IndexConfig = Field(
        default=ExactIndex(),
        description="how the nearest are found: kind exact, hnsw or ivf; the summary tells what the latter two miss",
    )
    num_taxonomy: int = Field(
        default=8, ge=0, description="candidates of a positive's category; more than will be used"
    )
    num_random: int = Field(default=4, ge=0, description="candidates of other categories; more than will be used")
    seed: int = Field(default=0, description="seed of the taxonomy and random draws, and of the index")
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who mines; the result does not depend on it")
    out: Path = Field(description="folder to write: RANKINGS of four sources, DROPPED queries")


def run_mine(config: MineConfig, out: Path) -> dict[str, Any]:
    """Counts of candidates by source; writes RANKINGS (stage = source; its own ranks and scores) and DROPPED.

    Scores are cosines (BM25 for `lexical`). A query's judged positives are never candidates. A query whose
    positives are all outside the pool is dropped, for neither filter nor list could be made for it. Neither texts nor
    vectors nor the ranking of a large pool need fit into memory: they lie in a folder in `out` while the stage runs.
    """
    pool = MiningPool.read(config.pool)
    queries = select_queries(config.queries, config.split)
    verdicts = verdicts_by_query(read_table(config.queries, JUDGEMENTS))
    positives = {query.query_id: _positions(pool, verdicts.get(query.query_id, {})) for query in queries}
    asked = [query for query in queries if len(positives[query.query_id])]
    lost = [query for query in queries if not len(positives[query.query_id])]
    if not asked:
        what = f"no query of {config.queries} has a positive in the pool"
        raise SkilltrainError(what, where=config.pool, fix="give the queries' pool")
    with _scratch(out) as scratch:
        _encode(config.encoder, pool, asked, scratch)
        mined = mine(config, pool, asked, positives, scratch)
        found = _write(mined, pool.skill_ids, out)
        index = _index_quality(config, scratch)
    write_table([_lost(query, verdicts.get(query.query_id, {})) for query in lost], DROPPED, out)
    return {
        "num_queries": len(asked),
        "num_queries_dropped": len(lost),
        "num_skills": len(pool.rows),
        "num_candidates": {source: found.num_candidates[source] for source in SOURCES},
        "num_queries_without": {source: len(asked) - found.num_queries[source] for source in SOURCES},
        "index": index,
    }


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder in `out` for what workers share, gone when the block ends."""
    try:
        with tempfile.TemporaryDirectory(prefix=".scratch-", dir=out) as folder:
            yield Path(folder)
    except OSError as error:
        raise SkilltrainError(f"cannot write: {error.strerror or error}", where=out) from error
    finally:
        open_material.cache_clear()


def _encode(source: EncoderSource, pool: MiningPool, queries: Sequence[Query], scratch: Path) -> None:
    """Write both matrices of unit vectors; the encoder's memory is free again afterwards."""
    encoder = open_encoder(source)
    np.save(scratch / QUERY_VECTORS, encode_queries(encoder, [query.text for query in queries]))
    pool.write_vectors(lambda skills: encode_skills(encoder, skills), scratch / SKILL_VECTORS)


def mine(
    config: MineConfig, pool: MiningPool, queries: Sequence[Query], positives: Positives, scratch: Path
) -> Iterator[tuple[QueryBlock, MinedBlock]]:
    """Yield the candidates of `queries`, block by block; `scratch` holds the vectors of both, a row each, unit norm."""
    np.save(scratch / CATEGORIES, pool.groups.categories)
    np.save(scratch / NAMES, pool.groups.names)
    term_ids = [np.empty(0, np.int32)] * len(queries)
    amounts = _amounts(config, max(map(len, positives.values())))
    if amounts.semantic:
        build_index(config.index, np.load(scratch / SKILL_VECTORS, mmap_mode="r"), config.seed, scratch / INDEX)
    if amounts.lexical:
        lexical = pool.lexical_index(scratch, config.workers)
        term_ids = [lexical.term_ids(query.text) for query in queries]
        lexical.save(scratch / LEXICAL)
        del lexical
    blocks = [
        QueryBlock(
            start,
            tuple(query.query_id for query in queries[start : start + QUERY_BLOCK]),
            tuple(positives[query.query_id] for query in queries[start : start + QUERY_BLOCK]),
            tuple(term_ids[start : start + QUERY_BLOCK]),
        )
        for start in range(0, len(queries), QUERY_BLOCK)
    ]
    work = partial(mine_block, folder=scratch, index=config.index, amounts=amounts)
    yield from zip(blocks, map_blocks(work, blocks, config.workers, "mining"), strict=True)


def _amounts(config: MineConfig, max_positives: int) -> Amounts:
    wanted = (config.depth, config.depth, config.num_taxonomy, config.num_random)
    semantic, lexical, taxonomy, random = (
        amount if source in config.sources else 0 for source, amount in zip(SOURCES, wanted, strict=True)
    )
    return Amounts(semantic, lexical, taxonomy, random, max_positives, config.seed)


@dataclass
class Found:
    """Counts by source."""

    num_candidates: dict[str, int]
    num_queries: dict[str, int]


def _write(mined: Iterable[tuple[QueryBlock, MinedBlock]], skill_ids: pa.Array, out: Path) -> Found:
    """Write RANKINGS as they come; what they hold."""
    num_candidates, num_queries = np.zeros(len(SOURCES), np.int64), np.zeros(len(SOURCES), np.int64)
    with table_writer(RANKINGS, out, whole="query_id") as append:
        for block, found in mined:
            append(_table(block.query_ids, found, skill_ids))
            num_candidates += found.sizes.sum(axis=0)
            num_queries += (found.sizes > 0).sum(axis=0)
    return Found(*(dict(zip(SOURCES, counts.tolist(), strict=True)) for counts in (num_candidates, num_queries)))


def _table(query_ids: Sequence[str], found: MinedBlock, skill_ids: pa.Array) -> pa.Table:
    sizes = found.sizes.ravel()
    pairs = np.repeat(np.arange(len(sizes)), sizes)  # of a query and a source
    ranks = np.arange(len(pairs)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
    columns = [
        pa.array(query_ids).take(pa.array(pairs // len(SOURCES))),
        skill_ids.take(pa.array(found.positions)),
        pa.array(ranks, pa.int32()),
        pa.array(found.scores, pa.float64()),
        pa.array(SOURCES).take(pa.array(pairs % len(SOURCES))),
    ]
    return pa.Table.from_arrays(columns, schema=RANKINGS.schema)


def _index_quality(config: MineConfig, scratch: Path) -> dict[str, Any]:
    """The kind of index and, if it may miss skills, its recall at `depth` over queries spread evenly."""
    if isinstance(config.index, ExactIndex) or not config.depth or "semantic" not in config.sources:
        return {"kind": config.index.kind}
    material = open_material(scratch, config.index)  # pyright: ignore[reportArgumentType]  frozen: hashable
    rows = np.unique(np.linspace(0, len(material.queries) - 1, RECALL_SAMPLE).astype(np.int64))
    found, _ = material.searcher.search(material.queries[rows], config.depth)
    exact, _ = nearest(material.queries[rows], material.searcher.pool, config.depth)
    share = round(recall(found, exact), 4)
    return {"kind": config.index.kind, f"recall@{config.depth}": share, "num_queries_sampled": len(rows)}


def _positions(pool: MiningPool, judged: dict[str, Verdict]) -> Positions:
    known = [s for s, verdict in judged.items() if verdict in POSITIVE and s in pool.position]
    return np.array(sorted(pool.position[skill_id] for skill_id in known), dtype=np.int64)


def _lost(query: Query, judged: dict[str, Verdict]) -> dict[str, Any]:
    golds = [skill_id for skill_id, verdict in judged.items() if verdict in POSITIVE]
    reason = "no skill is judged a positive of this query"
    if golds:
        reason = f"none of its {len(golds)} positive skill(s) is in the pool"
    skill_id = min(golds) if golds else ""
    return {"query_id": query.query_id, "skill_id": skill_id, "filter": "no_positive", "value": None, "reason": reason}
