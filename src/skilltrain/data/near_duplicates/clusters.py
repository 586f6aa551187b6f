"""Stage `clusters`: which skills of a pool are copies of one another."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.near_duplicates.linking import link_near_duplicates, number_clusters
from skilltrain.data.near_duplicates.trigrams import BODY_BLOCK, TrigramSets
from skilltrain.tables import CLUSTERS, SKILLS, read_batches, read_columns, write_table
from skilltrain.texts import name_key
from skilltrain.workers import WorkersConfig


class ClustersConfig(Config):
    """Find the near-duplicate clusters of a pool, for the filter layer 'cluster' and the in-batch mask."""

    stage: Literal["clusters"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    threshold: float = Field(
        default=0.6, gt=0, le=1, description="Jaccard index of body trigrams that links two skills"
    )
    max_names: int | None = Field(
        default=5,
        ge=1,
        description="leave out trigrams that stand under more than so many different skill names, for they are a "
        "template's and not a skill's; null: plain trigrams",
    )
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: CLUSTERS, a row a skill")


def run_clusters(config: ClustersConfig, out: Path) -> dict[str, Any]:
    """Counts of clusters of two and more skills, and the largest; writes CLUSTERS.

    Bodies and trigrams stay on disk: in memory are ids, names and 0.6 KB a skill, a byte a trigram of the pool, and
    what is likely to be a pair.
    """
    pool = read_columns(config.pool, SKILLS, ["skill_id", "name"])
    skill_ids, names = pool.column("skill_id").to_pylist(), name_numbers(pool.column("name").to_pylist())
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=out) as scratch:
        bodies = read_batches(config.pool, SKILLS, ["body"], BODY_BLOCK)
        sets = TrigramSets.read(bodies, Path(scratch) / "trigrams", config.workers)
        if config.max_names is not None:
            sets = sets.without_templates(names, config.max_names, Path(scratch) / "distinct", config.workers)
        num_empty = int(np.count_nonzero(sets.sizes == 0))
        clusters = number_clusters(skill_ids, link_near_duplicates(sets, config.threshold, config.workers))
    rows = [{"skill_id": skill_id, "cluster": cluster} for skill_id, cluster in clusters.items()]
    write_table(rows, CLUSTERS, out)
    return {"num_skills": len(rows), "num_without_trigrams": num_empty, **_summary(clusters)}


def name_numbers(names: list[str]) -> np.ndarray:
    """A number a skill, equal for names that `name_key` takes for one; -1 for a name of separators only."""
    numbers: dict[str, int] = {"": -1}
    return np.array([numbers.setdefault(name_key(name), len(numbers)) for name in names], dtype=np.int64)


def _summary(clusters: dict[str, int]) -> dict[str, Any]:
    """What is said of clusters of two and more: sizes as ranges, the largest by its lowest skill_id."""
    sizes = Counter(clusters.values())
    copies = [size for size in sizes.values() if size > 1]
    first: dict[int, str] = {}
    for skill_id, cluster in clusters.items():
        first.setdefault(cluster, skill_id)
    ranges = {"2": (2, 2), "3 to 5": (3, 5), "6 to 20": (6, 20), "21 to 100": (21, 100), "more": (101, len(clusters))}
    largest = sizes.most_common()[:5]
    return {
        "num_clusters": len(copies),
        "num_skills_in_clusters": sum(copies),
        "clusters_by_size": {name: sum(low <= size <= high for size in copies) for name, (low, high) in ranges.items()},
        "largest": {first[cluster]: size for cluster, size in largest if size > 1},
    }
