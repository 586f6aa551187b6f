"""Stage `decontaminate`: takes out of training data what a benchmark asks, and says of each query why it went."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.contamination.grounds import (
    GROUNDS,
    TRAIN,
    BenchmarkPaths,
    ContaminationLimits,
    Gold,
    HeldOut,
    SkillIndex,
    TrainingQuery,
    contaminations,
    open_benchmarks,
    query_index,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Skill, Verdict
from skilltrain.retrieval.dense import EncoderSource, encode_skills, open_encoder
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    SKILLS,
    read_table,
    skills_from_table,
    table_path,
    verdicts_by_query,
    write_table,
)
from skilltrain.terminal import say, track

POOL_COPIES = "pool_copies.parquet"


class DecontaminateConfig(Config):
    """Drop training queries (and their lists) that a benchmark asks, or whose positives are its gold skills."""

    stage: Literal["decontaminate"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(
        description="folder with the QUERIES and JUDGEMENTS tables; where it holds LISTS, they are cleaned too"
    )
    benchmarks: BenchmarkPaths = Field(
        min_length=1, description="folders of benchmarks; their queries of split train do not count"
    )
    split: str | None = Field(
        default=TRAIN, description="clean the queries of this split, keep the others as they are; null: clean all"
    )
    limits: ContaminationLimits = Field(default=ContaminationLimits(), description="what counts as contaminated")
    clusters: InputPath | None = Field(
        default=None,
        description="CLUSTERS of the pool (stage clusters): a positive in one cluster with a gold skill contaminates; "
        "null: not compared",
    )
    encoder: EncoderSource | None = Field(
        default=None, description="compares positives with gold skills by cosine too; null: by text alone"
    )
    cosine: float = Field(default=0.92, gt=0, le=1, description="cosine from which a positive contaminates")
    out: Path = Field(description="folder to write: QUERIES, JUDGEMENTS (LISTS), DROPPED, pool_copies.parquet")


def run_decontaminate(config: DecontaminateConfig, out: Path) -> dict[str, Any]:
    """Counts by ground and benchmark; writes the clean tables, DROPPED, and the pool's copies of gold skills.

    A query goes with a row for each benchmark and ground that holds for it, so grounds can be weighed against one
    another; the counts by ground therefore add up to more than the queries dropped. Copies of gold skills stay in the
    pool, for it is the benchmark that must know them: where a copy is ranked before the gold skill, the answer is
    right and counts as wrong. They are listed in pool_copies.parquet, a table of the form of DROPPED, the value being
    the Jaccard index of the bodies.
    """
    queries, judgements = read_table(config.queries, QUERIES), read_table(config.queries, JUDGEMENTS)
    training = _training_queries(queries, judgements, config)
    benchmarks = open_benchmarks(config.benchmarks, config.pool, _needs_golds(config))
    positives = {skill_id for query in training for skill_id in query.positives}
    by_skill, copies = _compare_pool(positives, benchmarks, config)
    tasks = query_index(benchmarks, config.limits)
    against = [contaminations(query, tasks, by_skill) for query in track(training, "comparing queries", len(training))]
    found = [one for of_query in against for one in of_query]
    dropped = {one.query_id for one in found}
    if len(dropped) == len(training):
        what = f"no query is left of {len(training)}; the first: {found[0].reason}"
        raise SkilltrainError(what, where=config.queries, fix="hold out other benchmarks, or set limits")
    num_lists = _write_kept(queries, judgements, dropped, config.queries, out)
    write_table([one.row() for one in found], DROPPED, out)
    write_table([replace(one, filter="pool_copy").row() for one in copies], DROPPED, out / POOL_COPIES)
    return {
        "num_queries": len(training),
        "num_kept": len(training) - len(dropped),
        "num_dropped": len(dropped),
        "num_of_other_splits": queries.num_rows - len(training),
        **num_lists,
        **_count_queries(found, benchmarks),
        "pool_copies": {one.name: _count_copies([c for c in copies if c.source == one.name]) for one in benchmarks},
    }


def _needs_golds(config: DecontaminateConfig) -> bool:
    return config.limits.compares_skills or config.clusters is not None or config.encoder is not None


def _training_queries(queries: pa.Table, judgements: pa.Table, config: DecontaminateConfig) -> list[TrainingQuery]:
    """The queries to clean. Raises SkilltrainError where there are none."""
    verdicts = verdicts_by_query(judgements)
    rows = [row for row in queries.to_pylist() if config.split in (None, row["split"])]
    if not rows:
        splits = ", ".join(sorted(set(queries.column("split").to_pylist()))) or "none, the table is empty"
        what = f"no query of split '{config.split}'" if queries.num_rows else "no query"
        raise SkilltrainError(f"{what} to clean (splits here: {splits})", where=config.queries, fix="set split")
    return [TrainingQuery(row["query_id"], row["text"], _positives(verdicts.get(row["query_id"], {}))) for row in rows]


def _positives(verdicts: Mapping[str, Verdict]) -> tuple[str, ...]:
    return tuple(sorted(skill_id for skill_id, verdict in verdicts.items() if verdict in POSITIVE))


def _compare_pool(
    positives: Collection[str], benchmarks: Sequence[HeldOut], config: DecontaminateConfig
) -> tuple[dict[str, list[Dropped]], list[Dropped]]:
    """(the matches of each positive, the pool's copies of gold skills), without the gold skills themselves."""
    golds = [gold for benchmark in benchmarks for gold in benchmark.golds]
    index = SkillIndex(golds, config.limits)
    skills = skills_from_table(read_table(config.pool, SKILLS))
    matches = [match for skill in track(skills, "comparing skills", len(skills)) for match in index.matches(skill)]
    copies = [match for match in matches if match.filter == "jaccard" and match.other_id != match.skill_id]
    known = [skill for skill in skills if skill.skill_id in positives]
    if positives and not known:
        fix = "give the pool that the queries were made for"
        raise SkilltrainError("holds no positive of the queries", where=config.pool, fix=fix)
    if len(known) < len(positives):
        say(f"warning: {len(positives) - len(known):,} of {len(positives):,} positives are not in {config.pool}, "
            "so they were compared with no gold skill")  # fmt: skip
    if config.clusters is not None:
        matches += _same_cluster(known, golds, config.clusters)
    if config.encoder is not None:
        matches += _close_vectors(known, golds, config.encoder, config.cosine)
    by_skill: dict[str, list[Dropped]] = {}
    for match in matches:
        by_skill.setdefault(match.skill_id, []).append(match)
    return by_skill, copies


def _same_cluster(skills: Sequence[Skill], golds: Sequence[Gold], clusters: Path) -> Iterator[Dropped]:
    """Yield a match where a chain of near-duplicates links a skill to a gold skill of the pool."""
    table = read_table(clusters, CLUSTERS)
    cluster_of = dict(zip(table.column("skill_id").to_pylist(), table.column("cluster").to_pylist(), strict=True))
    if unknown := [skill.skill_id for skill in skills if skill.skill_id not in cluster_of]:
        what = f"holds no cluster of skill '{unknown[0]}' (of {len(unknown)} skills)"
        raise SkilltrainError(what, where=clusters, fix="make the clusters of this pool")
    for skill in skills:
        for gold in golds:
            own, other = skill.skill_id, gold.skill.skill_id
            if own != other and cluster_of.get(other) == cluster_of[own]:
                yield gold.against(skill, "cluster", 1.0, f"in one cluster with {gold}")


def _close_vectors(
    skills: Sequence[Skill], golds: Sequence[Gold], source: EncoderSource, limit: float
) -> Iterator[Dropped]:
    """Yield a match where a skill's vector is all but a gold skill's."""
    encoder = open_encoder(source)
    gold_vectors = encode_skills(encoder, [gold.skill for gold in golds])
    cosines = encode_skills(encoder, skills) @ gold_vectors.T
    for at, gold_at in np.argwhere(cosines >= limit).tolist():
        gold, value = golds[gold_at], float(cosines[at, gold_at])
        yield gold.against(skills[at], "cosine", value, f"cosine {value:.3f} to {gold}")


def _write_kept(
    queries: pa.Table, judgements: pa.Table, dropped: Collection[str], source: Path, out: Path
) -> dict[str, int]:
    """Write the tables without what belongs to the queries `dropped`; counts of lists, where `source` holds some."""
    write_table(_without(queries, dropped), QUERIES, out)
    write_table(_without(judgements, dropped), JUDGEMENTS, out)
    if not table_path(source, LISTS).is_file():
        return {}
    lists = read_table(source, LISTS)
    kept = _without(lists, dropped)
    write_table(kept, LISTS, out)
    return {"num_lists_kept": kept.num_rows, "num_lists_dropped": lists.num_rows - kept.num_rows}


def _without(table: pa.Table, query_ids: Collection[str]) -> pa.Table:
    gone = [query_id in query_ids for query_id in table.column("query_id").to_pylist()]
    return table.filter(pa.array([not one for one in gone], pa.bool_()))


def _count_queries(found: Sequence[Dropped], benchmarks: Sequence[HeldOut]) -> dict[str, dict[str, int]]:
    """How many queries each ground, and each benchmark, holds against."""
    grounds = Counter(ground for _, ground in {(one.query_id, one.filter) for one in found})
    named = Counter(name for _, name in {(one.query_id, one.source) for one in found})
    return {
        "dropped_by_ground": {ground: grounds[ground] for ground in GROUNDS},
        "dropped_by_benchmark": {one.name: named[one.name] for one in benchmarks},
    }


def _count_copies(copies: Sequence[Dropped]) -> dict[str, int]:
    """Skills of the pool that are copies of one benchmark's gold skills, word for word or nearly, and of how many."""
    verbatim = {copy.skill_id for copy in copies if copy.value == 1}
    return {
        "num_verbatim": len(verbatim),
        "num_near": len({copy.skill_id for copy in copies} - verbatim),
        "num_gold_skills_copied": len({copy.other_id for copy in copies}),
    }
