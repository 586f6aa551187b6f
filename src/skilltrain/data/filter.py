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
    RANKINGS,
    read_queries,
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
        description="layers in order: name, jaccard, cosine, cluster, ceiling, rank_window",
    )
    judged_positives: Literal["drop", "keep"] = Field(
        default="drop", description="a query's own positives: keep them for a reranker's lists, which hold their ranks"
    )
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: RANKINGS kept, DROPPED")

    @model_validator(mode="after")
    def _consistent(self) -> "FilterConfig":
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError("a layer appears twice in 'layers'")
        for name in names:
            if name in ("cosine", "ceiling") and self.encoder is None:
                raise ValueError(f"the layer '{name}' needs the section 'encoder' (or leave the layer out of 'layers')")
        if "cluster" in names and self.clusters is None:
            raise ValueError("the layer 'cluster' needs 'clusters', the output of the stage clusters")
        return self


def run_filter(config: FilterConfig, out: Path) -> dict[str, Any]:
    """Counts of what stayed and what went; writes RANKINGS and DROPPED.

    A candidate judged irrelevant or rejected stays whatever it resembles: a judgement outranks a likeness. Of the
    others, each is dropped by the first layer that finds a ground.
    """
    rankings = read_table(config.rankings, RANKINGS)
    skills, verdicts = read_skills(config.pool), read_verdicts(config.queries)
    candidates = dict(open_candidates(rankings, skills, verdicts, config.pool))
    texts = _texts(config.queries, list(candidates))
    pool = FilterPool(skills, list(candidates.values()), texts, config.encoder, config.clusters, config.workers)
    against = find_false_negatives(pool, candidates, config.layers)
    for query_id, one in candidates.items() if config.judged_positives == "drop" else ():
        for gold in one.ranked_golds:
            skill_id = skills[gold["skill"]].skill_id
            reason = f"judged {verdicts[query_id][skill_id]} for this query"
            against[int(gold["row"])] = Dropped(query_id, skill_id, "judged", reason, source=gold["source"])
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
    ranked["skill"], ranked["rank"] = [position[skill_id] for skill_id in skill_ids], rankings.column("rank").to_numpy()
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
                    query_id, pool.skills[candidate["skill"]].skill_id, layer.name,
                    layer.reason.format(value=value, layer=layer), value,
                    candidate["source"], pool.skills[gold].skill_id if gold >= 0 else None,
                )  # fmt: skip
            one = replace(one, left=one.left[~drop])
    return found


def _texts(folder: Path, query_ids: Sequence[str]) -> list[str]:
    """The texts of ranked queries. Raises SkilltrainError for one that is not in the QUERIES table."""
    texts = {query.query_id: query.text for query in read_queries(folder)}
    if missing := [query_id for query_id in query_ids if query_id not in texts]:
        what = f"{len(missing)} ranked queries are not here, '{missing[0]}' among them"
        raise SkilltrainError(what, where=folder, fix="give the queries that were mined for")
    return [texts[query_id] for query_id in query_ids]
