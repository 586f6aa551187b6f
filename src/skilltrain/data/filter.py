"""Stage `filter`: takes false negatives out of mined candidates, and says of each why. Its layers: filter_layers.py."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.filter_layers import (
    PAIR,
    CosineLayer,
    FilterPool,
    JaccardLayer,
    Layer,
    NameLayer,
    Pairs,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Skill, Verdict, counted
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.tables import (
    DROPPED,
    RANKINGS,
    check_ranked,
    read_queries,
    read_skills,
    read_table,
    read_verdicts,
    rows_by_query,
    texts_of,
    write_table,
)
from skilltrain.workers import WorkersConfig


class FilterConfig(Config):
    """Take false negatives out of mined candidates."""

    stage: Literal["filter"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    rankings: InputPath = Field(
        description="RANKINGS to filter: mined, or the trained encoder's candidates"
    )
    encoder: EncoderSource | None = Field(
        default=None, description="encoder of the layers 'cosine' and 'ceiling'"
    )
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS of the pool, for the layer 'cluster'"
    )
    layers: tuple[Layer, ...] = Field(
        default=(NameLayer(), JaccardLayer(), CosineLayer()),
        description="layers in order: name, jaccard, cosine, cluster, ceiling, rank_window",
    )
    judged_positives: Literal["drop", "keep"] = Field(
        default="drop",
        description="a query's own positives: keep them for a reranker's lists, which hold their ranks",
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
                raise ValueError(
                    f"the layer '{name}' needs the section 'encoder' (or leave the layer out of 'layers')"
                )
        if "cluster" in names and self.clusters is None:
            raise ValueError(
                "the layer 'cluster' needs 'clusters', the output of the stage clusters"
            )
        return self


def run_filter(config: FilterConfig, out: Path) -> dict[str, Any]:
    """Counts of what stayed and what went; writes RANKINGS and DROPPED.

    A candidate judged irrelevant or rejected stays whatever it resembles: a judgement outranks a likeness. Of the
    others, each is dropped by the first layer that finds a ground.
    """
    rankings = read_table(config.rankings, RANKINGS)
    skills, verdicts = read_skills(config.pool), read_verdicts(config.queries)
    check_ranked(rankings, {skill.skill_id for skill in skills}, config.pool)
    pairs, judged = open_pairs(rankings, skills, verdicts)
    texts = {query.query_id: query.text for query in read_queries(config.queries)}
    query_ids = sorted(set(texts_of(rankings.column("query_id"))))
    if missing := [query_id for query_id in query_ids if query_id not in texts]:
        what = f"{len(missing)} ranked queries are not here, '{missing[0]}' among them"
        raise SkilltrainError(
            what, where=config.queries, fix="give the queries that were mined for"
        )
    query_texts = [texts[query_id] for query_id in query_ids]
    sources = texts_of(rankings.column("stage"))
    pool = FilterPool(
        skills, pairs, sources, query_texts, config.encoder, config.clusters, config.workers
    )
    against = find_false_negatives(pool, query_ids, config.layers)
    against |= judged if config.judged_positives == "drop" else {}
    kept = np.ones(rankings.num_rows, dtype=bool)
    kept[list(against)] = False
    left = rankings.filter(pa.array(kept))
    write_table(left, RANKINGS, out)
    write_table((against[row] for row in sorted(against)), DROPPED, out)
    by_layer = Counter(drop.filter for drop in against.values())
    return {
        "num_candidates": rankings.num_rows,
        "num_kept": left.num_rows,
        "num_dropped": len(against),
        "dropped_by_layer": {
            name: by_layer[name] for name in ("judged", *(layer.name for layer in config.layers))
        },
        "kept_by_source": counted(left.column("stage").to_pylist()),
    }


def open_pairs(
    rankings: pa.Table, skills: Sequence[Skill], verdicts: Mapping[str, Mapping[str, Verdict]]
) -> tuple[Pairs, dict[int, Dropped]]:
    """(each candidate that no judge has seen with each gold skill of its query, row → judged positives).

    The gold skills of a query stand in order of id.
    """
    position = {skill.skill_id: place for place, skill in enumerate(skills)}
    skill_ids = texts_of(rankings.column("skill_id"))
    ranked, positives = np.zeros(rankings.num_rows, dtype=PAIR), dict[int, Dropped]()
    ranked["row"], sources = np.arange(len(ranked)), texts_of(rankings.column("stage"))
    ranked["skill"], ranked["rank"] = (
        [position[skill_id] for skill_id in skill_ids],
        rankings.column("rank").to_numpy(),
    )
    rows, golds = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number, (query_id, of_query) in enumerate(rows_by_query(rankings).items()):
        ranked["query"][of_query] = number
        judged = {
            position[s]: verdict
            for s, verdict in sorted(verdicts.get(query_id, {}).items())
            if s in position
        }
        of_golds = [place for place, verdict in judged.items() if verdict in POSITIVE]
        left = of_query[~np.isin(ranked["skill"][of_query], list(judged))]
        rows.append(np.repeat(left, max(1, len(of_golds))))
        golds.append(np.tile(of_golds or [-1], len(left)))
        for row in of_query[np.isin(ranked["skill"][of_query], of_golds)].tolist():
            reason = f"judged {judged[position[skill_ids[row]]]} for this query"
            positives[row] = Dropped(
                query_id, skill_ids[row], "judged", reason, source=sources[row]
            )
    pairs = ranked[np.concatenate(rows)]
    pairs["gold"] = np.concatenate(golds)
    return pairs, positives


def find_false_negatives(
    pool: FilterPool, query_ids: Sequence[str], layers: Sequence[Layer]
) -> dict[int, Dropped]:
    """Row of the rankings → what speaks against it; a layer sees only what the layers before it kept."""
    found: dict[int, Dropped] = {}
    left = pool.pairs
    for layer in layers:
        of_rank = layer.name == "rank_window"  # the others compare with a gold skill
        pairs = left if of_rank else left[left["gold"] >= 0]
        values = layer.check(pool, pairs)
        hits = np.flatnonzero(~np.isnan(values))
        hits = hits[
            np.unique(pairs["row"][hits], return_index=True)[1]
        ]  # the first gold skill counts
        for pair, value in zip(pairs[hits], values[hits].tolist(), strict=True):
            found[int(pair["row"])] = Dropped(
                query_ids[int(pair["query"])],
                pool.skills[pair["skill"]].skill_id,
                layer.name,
                layer.reason.format(value=value, layer=layer),
                value,
                pool.sources[int(pair["row"])],
                None if of_rank else pool.skills[pair["gold"]].skill_id,
            )
        left = left[~np.isin(left["row"], pairs["row"][hits])]
    return found
