"""Stage `filter`: takes false negatives out of mined candidates, and says of each why. Its layers: layers.py."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.filter.facts import Candidates, FilterPool
from skilltrain.data.filter.layers import CosineLayer, FilterLayer, JaccardLayer, Layer, NameLayer
from skilltrain.data.trigrams import Positions
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Skill, Verdict
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    read_table,
    rows_by_query,
    skills_from_table,
    texts_of,
    verdicts_by_query,
    write_table,
)
from skilltrain.terminal import track
from skilltrain.workers import WorkersConfig


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


def run_filter(config: FilterConfig, out: Path) -> dict[str, Any]:
    """Counts of what stayed and what went, by layer and by source; writes RANKINGS and DROPPED.

    A candidate judged irrelevant or rejected stays whatever it resembles: a judgement outranks a likeness. Of the
    others, each is dropped by the first layer that finds a ground.
    """
    rankings = read_table(config.rankings, RANKINGS)
    skills = skills_from_table(read_table(config.pool, SKILLS))
    ranked = RankedQueries(rankings, skills, verdicts_by_query(read_table(config.queries, JUDGEMENTS)), config.pool)
    pool = FilterPool(
        skills, ranked.in_use(), _texts(config.queries, list(ranked.rows)), frozenset(ranked.sources), config.encoder,
        config.clusters, config.workers,
    )  # fmt: skip
    against = find_false_negatives(pool, ranked, config.layers)
    if config.judged_positives == "drop":
        against |= ranked.judged_positives()
    dropped = [against[row] for row in sorted(against)]
    kept = np.ones(rankings.num_rows, dtype=bool)
    kept[list(against)] = False
    write_table(rankings.filter(pa.array(kept)), RANKINGS, out)
    write_table([drop.row() for drop in dropped], DROPPED, out)
    return _summary(Counter(ranked.sources), dropped, config.layers)


class RankedQueries:
    """A RANKINGS table by query, in order of id, with what is judged of its skills."""

    def __init__(
        self, rankings: pa.Table, skills: Sequence[Skill], verdicts: Mapping[str, Mapping[str, Verdict]], where: object
    ) -> None:
        """Raises SkilltrainError for a ranked skill outside the pool, which `where` names."""
        self._position = {skill.skill_id: place for place, skill in enumerate(skills)}
        self._verdicts = verdicts
        self.rows = rows_by_query(rankings)
        self.skill_ids = texts_of(rankings.column("skill_id"))
        self.sources = texts_of(rankings.column("stage"))
        self._ranks, self._scores = (rankings.column(name).to_numpy() for name in ("rank", "score"))
        if unknown := set(self.skill_ids) - self._position.keys():
            what = f"{len(unknown)} ranked skill(s) are not in this pool, '{min(unknown)}' among them"
            raise SkilltrainError(what, where=where, fix="give the pool that was mined")

    def in_use(self) -> Positions:
        """The skills that are candidates or golds, in the order of the pool."""
        golds = {place for query_id in self.rows for place in self._golds(query_id).tolist()}
        ranked = {self._position[skill_id] for skill_id in set(self.skill_ids)}
        return np.array(sorted(golds | ranked), dtype=np.int64)

    def judged_positives(self) -> dict[int, Dropped]:
        """Row → why it goes, where a judge called the skill a positive of the query."""
        found: dict[int, Dropped] = {}
        for query_id, rows in self.rows.items():
            judged = self._verdicts.get(query_id, {})
            for row in rows.tolist():
                skill_id = self.skill_ids[row]
                if (verdict := judged.get(skill_id)) in POSITIVE:
                    why = f"judged {verdict} for this query"
                    found[row] = Dropped(query_id, skill_id, "judged", why, source=self.sources[row])
        return found

    def candidates(self) -> Iterator[tuple[str, Positions, Candidates]]:
        """Each query's id, its rows without a verdict, and what they hold: what a judge has seen is not for layers."""
        for number, (query_id, rows) in enumerate(self.rows.items()):
            judged = self._verdicts.get(query_id, {})
            golds = self._golds(query_id)
            open_ = np.array([self.skill_ids[row] not in judged for row in rows.tolist()], dtype=bool)
            of_golds = [row for row in rows[~open_].tolist() if judged[self.skill_ids[row]] in POSITIVE]
            rows = rows[open_]
            yield (
                query_id,
                rows,
                Candidates(
                    query=number,
                    golds=golds,
                    skills=np.array([self._position[self.skill_ids[row]] for row in rows.tolist()], dtype=np.int64),
                    ranks=self._ranks[rows].astype(np.int64),
                    scores=self._scores[rows],
                    sources=[self.sources[row] for row in rows.tolist()],
                    weakest_golds=self._weakest(of_golds),
                ),
            )

    def _golds(self, query_id: str) -> Positions:
        """The places of a query's gold skills in the pool, in order of id."""
        judged = sorted(self._verdicts.get(query_id, {}).items())
        known = [self._position[s] for s, verdict in judged if verdict in POSITIVE and s in self._position]
        return np.array(known, dtype=np.int64)

    def _weakest(self, rows: Sequence[int]) -> dict[str, tuple[int, float]]:
        """source → the gold skill with the lowest of its scores, and the score; the first of equal ones."""
        weakest: dict[str, tuple[int, float]] = {}
        for row in rows:
            gold, score = self._position[self.skill_ids[row]], float(self._scores[row])
            if self.sources[row] not in weakest or score < weakest[self.sources[row]][1]:
                weakest[self.sources[row]] = gold, score
        return weakest


def find_false_negatives(pool: FilterPool, ranked: RankedQueries, layers: Sequence[FilterLayer]) -> dict[int, Dropped]:
    """Row of the rankings → what speaks against it; a layer sees only what the layers before it kept."""
    found: dict[int, Dropped] = {}
    for query_id, rows, candidates in track(ranked.candidates(), "filtering", len(ranked.rows)):
        for layer in layers:
            against = layer.check(pool, candidates)
            drop = ~np.isnan(against.values)
            for place in np.flatnonzero(drop).tolist():
                row, value, gold = int(rows[place]), float(against.values[place]), int(against.golds[place])
                gold_id = pool.skills[gold].skill_id if gold >= 0 else None
                found[row] = Dropped(
                    query_id, ranked.skill_ids[row], layer.name, layer.explain(value), value, ranked.sources[row],
                    gold_id,
                )  # fmt: skip
            if drop.any():
                rows, candidates = rows[~drop], candidates.only(~drop)
    return found


def _texts(folder: Path, query_ids: Sequence[str]) -> list[str]:
    """The texts of ranked queries. Raises SkilltrainError for one that is not in the QUERIES table."""
    queries = read_table(folder, QUERIES)
    texts = dict(zip(queries.column("query_id").to_pylist(), queries.column("text").to_pylist(), strict=True))
    if missing := [query_id for query_id in query_ids if query_id not in texts]:
        what = f"{len(missing)} ranked querie(s) are not here, '{missing[0]}' among them"
        raise SkilltrainError(what, where=folder, fix="give the queries that were mined for")
    return [texts[query_id] for query_id in query_ids]


def _summary(candidates: Counter[str], dropped: Sequence[Dropped], layers: Sequence[FilterLayer]) -> dict[str, Any]:
    """Counts by layer, by source, and by both; `candidates` counts all of them by source."""
    names = ["judged", *(layer.name for layer in layers)]
    both = Counter((drop.filter, drop.source) for drop in dropped)
    by_both = {name: {source: both[name, source] for source in sorted(candidates)} for name in names}
    gone = Counter(drop.source for drop in dropped)
    return {
        "num_candidates": candidates.total(),
        "num_kept": candidates.total() - len(dropped),
        "num_dropped": len(dropped),
        "dropped_by_layer": {name: sum(by_source.values()) for name, by_source in by_both.items()},
        "dropped_by_source": {source: gone[source] for source in sorted(candidates) if gone[source]},
        "dropped_by_layer_and_source": {
            name: {source: count for source, count in by_source.items() if count}
            for name, by_source in by_both.items()
            if any(by_source.values())
        },
        "kept_by_source": {s: count - gone[s] for s, count in sorted(candidates.items()) if count > gone[s]},
    }
