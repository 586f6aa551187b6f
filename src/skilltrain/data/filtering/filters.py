"""Stage `filter`: takes false negatives out of mined candidates, and says of each why. Its layers: filter_layers.py."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64, Int64
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.filtering.layers import CosineLayer, FilterLayer, JaccardLayer, Layer, NameLayer
from skilltrain.data.filtering.pool import FilterPool, PoolMaker
from skilltrain.data.filtering.ranked_queries import RankedQueries, texts_of
from skilltrain.data.near_duplicates.trigrams import Positions
from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    read_columns,
    read_table,
    verdicts_by_query,
    write_table,
)
from skilltrain.workers import WorkersConfig, map_blocks

_BLOCK = 128  # queries that a worker filters at once


class FilterConfig(Config):
    """Take false negatives out of mined candidates."""

    stage: Literal["filter"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    rankings: InputPath = Field(description="RANKINGS to filter: mined, or the trained encoder's candidates")
    encoder: EncoderSource | None = Field(default=None, description="encoder of the layers 'cosine' and 'ceiling'")
    clusters: InputPath | None = Field(default=None, description="CLUSTERS of the pool, for the layer 'cluster'")
    layers: tuple[Layer, ...] = Field(
        default=(NameLayer(), JaccardLayer(), CosineLayer()),
        description="layers in order (name, jaccard, cosine, cluster, ceiling, rank_window); leave one out to "
        "switch it off",
    )
    judged_positives: Literal["drop", "keep"] = Field(
        default="drop",
        description="what to do with a query's own positives; keep them in a reranker's candidates, so that "
        "its lists know at which rank they were found",
    )
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: RANKINGS kept, DROPPED")

    @model_validator(mode="after")
    def _consistent(self) -> "FilterConfig":
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError("a layer stands twice in 'layers'")
        encoding = [layer.name for layer in self.layers if layer.name == "cosine"]
        encoding += [layer.name for layer in self.layers if layer.name == "ceiling" and layer.scores == "encoder"]
        if encoding and self.encoder is None:
            what = f"the layer '{encoding[0]}' needs the section 'encoder'"
            raise ValueError(f"{what} (or leave the layer out of 'layers')")
        if "cluster" in names and self.clusters is None:
            raise ValueError("the layer 'cluster' needs 'clusters', the output of the stage clusters")
        return self


@dataclass(frozen=True)
class Findings:
    """Rows of a RANKINGS table to drop, in row order, and what speaks against each."""

    rows: Int64[np.ndarray, " finding"]
    layers: Int64[np.ndarray, " finding"]
    values: Float64[np.ndarray, " finding"]
    golds: Int64[np.ndarray, " finding"]

    @classmethod
    def join(cls, parts: Sequence["Findings"]) -> "Findings":
        """All `parts` as one."""
        names, kinds = ("rows", "layers", "values", "golds"), (np.int64, np.int64, np.float64, np.int64)
        columns = [
            np.concatenate([np.zeros(0, kind), *(getattr(part, name) for part in parts)])
            for name, kind in zip(names, kinds, strict=True)
        ]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))


def run_filter(config: FilterConfig, out: Path) -> dict[str, Any]:
    """Counts of what stayed and what went, by layer and by source; writes RANKINGS and DROPPED.

    A candidate judged irrelevant or rejected stays whatever it resembles: a judgement outranks a likeness. Of the
    others, each is dropped by the first layer that finds a ground. The result is the same for any number of workers.
    """
    rankings = read_table(config.rankings, RANKINGS)
    skills = read_columns(config.pool, SKILLS, ["skill_id", "name"])
    skill_ids = skills.column("skill_id").to_pylist()
    verdicts = verdicts_by_query(read_table(config.queries, JUDGEMENTS))
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=out) as scratch:
        ranked = RankedQueries.write(rankings, verdicts, (skill_ids, config.pool), Path(scratch))
        _prepare(config, skills, ranked, Path(scratch))
        findings = find_false_negatives(Path(scratch), len(ranked.query_ids), config.layers, config.workers)
    judged = ranked.judged_positives() if config.judged_positives == "drop" else (np.zeros(0, dtype=np.int64), [])
    kept = np.ones(rankings.num_rows, dtype=bool)
    kept[findings.rows], kept[judged[0]] = False, False
    dropped = _dropped_table(rankings, judged, findings, config.layers, skill_ids)
    write_table(rankings.filter(pa.array(kept)), RANKINGS, out)
    write_table(dropped, DROPPED, out)
    return _summary(rankings.column("stage"), kept, dropped.column("filter"), config.layers)


def _prepare(config: FilterConfig, skills: pa.Table, ranked: RankedQueries, folder: Path) -> None:
    """Write what the layers ask for."""
    texts: list[str] = []
    if any(layer.name == "ceiling" for layer in config.layers):
        texts = _texts(config.queries, ranked.query_ids)
    maker = PoolMaker(
        folder, config.pool, skills, ranked.in_use(), texts, ranked.source_names, config.encoder, config.clusters,
        config.workers,
    )  # fmt: skip
    for layer in config.layers:
        layer.prepare(maker)


def find_false_negatives(
    folder: Path, num_queries: int, layers: Sequence[FilterLayer], workers: WorkersConfig
) -> Findings:
    """What `layers` hold against the candidates of `RankedQueries` in `folder`, where their preparations are too."""
    blocks = [range(start, min(start + _BLOCK, num_queries)) for start in range(0, num_queries, _BLOCK)]
    find = partial(_filter_block, folder, tuple(layers))
    return Findings.join(list(map_blocks(find, blocks, workers, "filtering")))


@lru_cache(maxsize=1)
def _pool(folder: Path) -> FilterPool:
    return FilterPool(folder)


def _filter_block(folder: Path, layers: tuple[FilterLayer, ...], queries: range) -> Findings:
    """Findings among the candidates of some queries; a layer sees only what the layers before it kept."""
    pool, parts = _pool(folder), []
    for rows, candidates in RankedQueries.open(folder).candidates(queries):
        for number, layer in enumerate(layers):
            against = layer.check(pool, candidates)
            drop = ~np.isnan(against.values)
            if drop.any():
                numbers = np.full(int(drop.sum()), number)
                parts.append(Findings(rows[drop], numbers, against.values[drop], against.golds[drop]))
                rows, candidates = rows[~drop], candidates.only(~drop)
    return Findings.join(parts)


def _dropped_table(
    rankings: pa.Table,
    judged: tuple[Positions, list[str]],
    findings: Findings,
    layers: Sequence[FilterLayer],
    skill_ids: list[str],
) -> pa.Table:
    """DROPPED rows in the order of `rankings`; `other_id` is the gold skill that speaks against the candidate."""
    explained = [f"judged {verdict} for this query" for verdict in judged[1]]
    others: list[str | None] = [None] * len(judged[1])
    for number, value, gold in zip(
        findings.layers.tolist(), findings.values.tolist(), findings.golds.tolist(), strict=True
    ):
        explained.append(layers[number].explain(value))
        others.append(skill_ids[gold] if gold >= 0 else None)
    rows = np.concatenate([judged[0], findings.rows])
    order = np.argsort(rows, kind="stable")
    taken = rankings.select(["query_id", "skill_id", "stage"]).take(pa.array(rows[order]))
    filters = ["judged"] * len(judged[1]) + [layers[number].name for number in findings.layers.tolist()]
    values = [None] * len(judged[1]) + findings.values.tolist()
    columns = {
        "query_id": taken.column("query_id"), "skill_id": taken.column("skill_id"),
        "filter": pa.array([filters[place] for place in order.tolist()], pa.string()),
        "value": pa.array([values[place] for place in order.tolist()], pa.float64()),
        "reason": pa.array([explained[place] for place in order.tolist()], pa.string()),
        "source": taken.column("stage"),
        "other_id": pa.array([others[place] for place in order.tolist()], pa.string()),
    }  # fmt: skip
    return pa.table(columns, schema=DROPPED.schema)


def _texts(folder: Path, query_ids: Sequence[str]) -> list[str]:
    """The texts of ranked queries. Raises SkilltrainError for one that is not in the QUERIES table."""
    queries = read_columns(folder, QUERIES, ["query_id", "text"])
    texts = dict(zip(queries.column("query_id").to_pylist(), queries.column("text").to_pylist(), strict=True))
    if missing := [query_id for query_id in query_ids if query_id not in texts]:
        what = f"{len(missing)} ranked querie(s) have no text here, '{missing[0]}' among them"
        raise SkilltrainError(what, where=folder, fix="give the queries that were mined for")
    return [texts[query_id] for query_id in query_ids]


def _summary(
    stages: pa.ChunkedArray, kept: Bool[np.ndarray, " row"], filters: pa.ChunkedArray, layers: Sequence[FilterLayer]
) -> dict[str, Any]:
    """Counts by layer, by source, and by both; `filters` are those of the rows not kept, in order."""
    sources = texts_of(stages)
    gone = [source for source, stays in zip(sources, kept.tolist(), strict=True) if not stays]
    both = Counter(zip(filters.to_pylist(), gone, strict=True))
    names = ["judged", *(layer.name for layer in layers)]
    by_both = {name: {source: both[name, source] for source in sorted(set(sources))} for name in names}
    kept_by_source = Counter(sources)
    kept_by_source.subtract(gone)
    return {
        "num_candidates": len(sources),
        "num_kept": int(kept.sum()),
        "num_dropped": len(gone),
        "dropped_by_layer": {name: sum(by_source.values()) for name, by_source in by_both.items()},
        "dropped_by_source": dict(sorted(Counter(gone).items())),
        "dropped_by_layer_and_source": {
            name: {source: count for source, count in by_source.items() if count}
            for name, by_source in by_both.items()
            if any(by_source.values())
        },
        "kept_by_source": dict(sorted((source, count) for source, count in kept_by_source.items() if count)),
    }
