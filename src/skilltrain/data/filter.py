"""Stage `filter`: takes false negatives out of mined candidates, and says of each why. Its layers: filter_layers.py."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data import counted
from skilltrain.data.filter_layers import (
    CANDIDATE,
    Candidates,
    CosineLayer,
    FilterPool,
    JaccardLayer,
    Layer,
    NameLayer,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Skill, Verdict
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.tables import (
    QUERIES,
    RANKINGS,
    read_skills,
    read_table,
    read_verdicts,
    rows_by_query,
    texts_of,
    write_dropped,
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
            raise ValueError("a layer appears twice in 'layers'")
        encoding = [layer.name for layer in self.layers if layer.name == "cosine"]
        encoding += [layer.name for layer in self.layers if layer.name == "ceiling" and layer.scores == "encoder"]
        if encoding and self.encoder is None:
            what = f"the layer '{encoding[0]}' needs the section 'encoder'"
            raise ValueError(f"{what} (or leave the layer out of 'layers')")
        if "cluster" in names and self.clusters is None:
            raise ValueError("the layer 'cluster' needs 'clusters', the output of the stage clusters")
        return self


def run_filter(config: FilterConfig, out: Path) -> dict[str, Any]:
    """Counts of what stayed and what went; writes RANKINGS and DROPPED.

    A candidate judged irrelevant or rejected stays whatever it resembles: a judgement outranks a likeness. Of the
    others, each is dropped by the first layer that finds a ground.
    """
    rankings = read_table(config.rankings, RANKINGS)
    skills = read_skills(config.pool)
    verdicts = read_verdicts(config.queries)
    candidates = dict(open_candidates(rankings, skills, verdicts, config.pool))
    texts = _texts(config.queries, list(candidates))
    pool = FilterPool(skills, list(candidates.values()), texts, config.encoder, config.clusters, config.workers)
    against = find_false_negatives(pool, candidates, config.layers)
    if config.judged_positives == "drop":
        against |= _judged_positives(rankings, verdicts)
    kept = np.ones(rankings.num_rows, dtype=bool)
    kept[list(against)] = False
    left = rankings.filter(pa.array(kept))
    write_table(left, RANKINGS, out)
    write_dropped((against[row] for row in sorted(against)), out)
    by_layer = Counter(drop.filter for drop in against.values())
    return {
        "num_candidates": rankings.num_rows, "num_kept": left.num_rows, "num_dropped": len(against),
        "dropped_by_layer": {name: by_layer[name] for name in ("judged", *(layer.name for layer in config.layers))},
        "kept_by_source": counted(left.column("stage").to_pylist()),
    }  # fmt: skip


def open_candidates(
    rankings: pa.Table, skills: Sequence[Skill], verdicts: Mapping[str, Mapping[str, Verdict]], where: object
) -> Iterator[tuple[str, Candidates]]:
    """Yield each query's id, in order, with its candidates without a verdict: what a judge has seen is not for layers.

    Raises SkilltrainError for a ranked skill outside the pool, which `where` names.
    """
    position = {skill.skill_id: place for place, skill in enumerate(skills)}
    skill_ids = texts_of(rankings.column("skill_id"))
    if unknown := set(skill_ids) - position.keys():
        what = f"{len(unknown)} ranked skill(s) are not in this pool, '{min(unknown)}' among them"
        raise SkilltrainError(what, where=where, fix="give the pool that was mined")
    ranked = np.empty(rankings.num_rows, dtype=CANDIDATE)
    ranked["row"], ranked["source"] = np.arange(len(ranked)), texts_of(rankings.column("stage"))
    ranked["skill"] = [position[skill_id] for skill_id in skill_ids]
    ranked["rank"], ranked["score"] = (rankings.column(name).to_numpy() for name in ("rank", "score"))
    for number, (query_id, rows) in enumerate(rows_by_query(rankings).items()):
        judged = {position[s]: verdict for s, verdict in sorted(verdicts.get(query_id, {}).items()) if s in position}
        golds = np.array([place for place, verdict in judged.items() if verdict in POSITIVE], dtype=np.int64)
        own = ranked[rows]
        is_judged, is_gold = (np.isin(own["skill"], places) for places in (list(judged), golds))
        yield query_id, Candidates(number, golds, own[~is_judged], own[is_gold])


def find_false_negatives(
    pool: FilterPool, candidates: Mapping[str, Candidates], layers: Sequence[Layer]
) -> dict[int, Dropped]:
    """Row of the rankings → what speaks against it; a layer sees only what the layers before it kept."""
    found: dict[int, Dropped] = {}
    for query_id, one in track(candidates.items(), "filtering", len(candidates)):
        for layer in layers:
            values, golds = np.full(len(one.left), np.nan), np.full(len(one.left), -1)
            for gold, found_against in layer.check(pool, one):
                new = np.isnan(values) & ~np.isnan(found_against)
                values[new], golds[new] = found_against[new], gold
            drop = ~np.isnan(values)
            for candidate, value, gold in zip(one.left[drop], values[drop].tolist(), golds[drop].tolist(), strict=True):
                found[int(candidate["row"])] = Dropped(
                    query_id, pool.skills[candidate["skill"]].skill_id, layer.name, layer.explain(value), value,
                    candidate["source"], pool.skills[gold].skill_id if gold >= 0 else None,
                )  # fmt: skip
            one = replace(one, left=one.left[~drop])
    return found


def _judged_positives(rankings: pa.Table, verdicts: Mapping[str, Mapping[str, Verdict]]) -> dict[int, Dropped]:
    """Row → why it goes, where a judge called the skill a positive of the query."""
    found: dict[int, Dropped] = {}
    rows = zip(*(texts_of(rankings.column(name)) for name in ("query_id", "skill_id", "stage")), strict=True)
    for row, (query_id, skill_id, source) in enumerate(rows):
        if (verdict := verdicts.get(query_id, {}).get(skill_id)) in POSITIVE:
            found[row] = Dropped(query_id, skill_id, "judged", f"judged {verdict} for this query", source=source)
    return found


def _texts(folder: Path, query_ids: Sequence[str]) -> list[str]:
    """The texts of ranked queries. Raises SkilltrainError for one that is not in the QUERIES table."""
    texts = {row["query_id"]: row["text"] for row in read_table(folder, QUERIES).to_pylist()}
    if missing := [query_id for query_id in query_ids if query_id not in texts]:
        what = f"{len(missing)} ranked queries are not here, '{missing[0]}' among them"
        raise SkilltrainError(what, where=folder, fix="give the queries that were mined for")
    return [texts[query_id] for query_id in query_ids]
