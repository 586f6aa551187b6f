"""Stage `decontaminate`: takes out of training data what a benchmark asks, and says of each query why it went."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.contamination import (
    GROUNDS,
    TRAIN,
    BenchmarkIndex,
    BenchmarkPaths,
    ContaminationLimits,
    open_benchmarks,
)
from skilltrain.data.near_duplicates import read_clusters
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Skill
from skilltrain.retrieval.dense import EncoderSource, encode_skills, open_encoder
from skilltrain.tables import (
    JUDGEMENTS,
    LISTS,
    QUERIES,
    read_skills,
    read_table,
    read_verdicts,
    select_queries,
    table_path,
    write_dropped,
    write_table,
)
from skilltrain.terminal import say, track


class DecontaminateConfig(Config):
    """Drop training queries (and their lists) that a benchmark asks, or whose positives are its gold skills."""

    stage: Literal["decontaminate"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with QUERIES and JUDGEMENTS, and LISTS to be cleaned with them")
    benchmarks: BenchmarkPaths = Field(min_length=1, description="folders of benchmarks; queries of split train aside")
    split: str | None = Field(default=TRAIN, description="clean the queries of this split alone; null: all")
    limits: ContaminationLimits = Field(default=ContaminationLimits(), description="what counts as contaminated")
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS of the pool: a positive in a gold skill's cluster contaminates"
    )
    encoder: EncoderSource | None = Field(default=None, description="compares positives with gold skills by cosine too")
    cosine: float = Field(default=0.92, gt=0, le=1, description="cosine from which a positive contaminates")
    out: Path = Field(description="folder to write: QUERIES, JUDGEMENTS (LISTS), DROPPED")


def run_decontaminate(config: DecontaminateConfig, out: Path) -> dict[str, Any]:
    """Counts by ground and benchmark; writes the clean tables and DROPPED.

    A query goes with a row for each benchmark and ground that holds for it, so grounds can be weighed against one
    another; the counts by ground therefore add up to more than the queries dropped. Copies of gold skills stay in the
    pool: `evaluate` counts them as gold where it is given the pool's clusters.
    """
    training = select_queries(config.queries, config.split)
    verdicts = read_verdicts(config.queries)
    positives = {
        query.query_id: sorted(one for one, verdict in verdicts.get(query.query_id, {}).items() if verdict in POSITIVE)
        for query in training
    }
    skills = _known(config.pool, {one for several in positives.values() for one in several})
    needs_golds = config.limits.compares_skills or config.clusters is not None or config.encoder is not None
    clusters = read_clusters(config.clusters, (skill.skill_id for skill in skills)) if config.clusters else None
    benchmarks = open_benchmarks(config.benchmarks, config.pool, needs_golds)
    index = BenchmarkIndex(benchmarks, config.limits, clusters)
    matches = {skill.skill_id: index.skill_matches(skill) for skill in track(skills, "comparing skills", len(skills))}
    if config.encoder is not None:
        encoder = open_encoder(config.encoder)
        gold_vectors = encode_skills(encoder, [gold.skill for gold in index.golds])
        cosines = encode_skills(encoder, skills) @ gold_vectors.T
        for at, gold_at in np.argwhere(cosines >= config.cosine).tolist():
            skill, gold, value = skills[at], index.golds[gold_at], float(cosines[at, gold_at])
            matches[skill.skill_id].append(gold.against(skill, "cosine", value, f"cosine {value:.3f} to {gold}"))
    found: list[Dropped] = []
    for query in track(training, "comparing queries", len(training)):
        of_skills = [match for one in positives[query.query_id] for match in matches.get(one, ())]
        found += index.contaminations(query.query_id, query.text, of_skills)
    dropped = {one.query_id for one in found}
    if len(dropped) == len(training):
        what = f"no query is left of {len(training)}; the first: {found[0].reason}"
        raise SkilltrainError(what, where=config.queries, fix="hold out other benchmarks, or set limits")
    counts = _write_kept(config.queries, dropped, out)
    write_dropped(found, out)
    return {
        "num_queries": len(training), "num_kept": len(training) - len(dropped), "num_dropped": len(dropped), **counts,
        "dropped_by_ground": {key: len({one.query_id for one in found if one.filter == key}) for key in GROUNDS},
        "dropped_by_benchmark": {
            held_out.name: len({one.query_id for one in found if one.source == held_out.name})
            for held_out in benchmarks
        },
    }  # fmt: skip


def _known(pool: Path, positives: Collection[str]) -> list[Skill]:
    """Those of `positives` that are in the pool. Raises SkilltrainError where none is."""
    known = [skill for skill in read_skills(pool) if skill.skill_id in positives]
    if positives and not known:
        fix = "give the pool that the queries were made for"
        raise SkilltrainError("holds no positive of the queries", where=pool, fix=fix)
    if len(known) < len(positives):
        say(f"warning: {len(positives) - len(known):,} of {len(positives):,} positives are not in {pool}, "
            "so they were compared with no gold skill")  # fmt: skip
    return known


def _write_kept(source: Path, dropped: Collection[str], out: Path) -> dict[str, int]:
    """Write the tables of `source` without what belongs to the queries `dropped`; counts of its lists, if any."""
    counts: dict[str, int] = {}
    for spec in (QUERIES, JUDGEMENTS, LISTS):
        if spec is LISTS and not table_path(source, LISTS).is_file():
            continue
        table = read_table(source, spec)
        kept = table.filter(pa.array([one not in dropped for one in table.column("query_id").to_pylist()], pa.bool_()))
        write_table(kept, spec, out)
        if spec is LISTS:
            counts = {"num_lists_kept": kept.num_rows, "num_lists_dropped": table.num_rows - kept.num_rows}
    return counts
