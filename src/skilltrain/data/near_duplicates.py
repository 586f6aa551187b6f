"""Stage `clusters`: finds near-duplicate skills of a pool by the word trigrams of their bodies."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import numpy as np
from jaxtyping import Int64, UInt64
from pydantic import Field

from skilltrain.config import InputPath
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.stage import Stage, Summary
from skilltrain.tables import CLUSTERS, read_skills, read_table, write_table
from skilltrain.terminal import track
from skilltrain.texts import name_key, words_of
from skilltrain.workers import WorkersConfig, map_blocks

if TYPE_CHECKING:
    from datasketch import LeanMinHash

MAX_PERMUTATIONS = 100
MIN_RECALL = 0.99
SAME_NAME_OVERLAP = 0.3  # Jaccard index from which a skill of the same name is a copy
_BLOCK = 512  # bodies or skills that a worker reads at once
# Odd constants: multiplying by one modulo 2^64 loses no bit.
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_ONE_WORKER = WorkersConfig(num=1)

MaxNames = Annotated[int | None, Field(ge=1)]
MAX_NAMES_DESCRIPTION = (
    "trigrams under more skill names than this belong to a template and are left out; "
    "null: none is left out"
)
Trigrams = UInt64[np.ndarray, " trigram"]
Positions = Int64[np.ndarray, " position"]


@cache
def _word_hash(word: str) -> int:
    """Return a 64-bit hash that is the same in every process."""
    return int.from_bytes(
        blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little"
    )


def word_trigrams(text: str) -> Trigrams:
    """Return the sorted distinct word trigrams of `text` as 64-bit hashes.

    A text of one or two words is one "trigram". SkillRouter (section 4.2) does not say whether its
    trigrams are of words or characters. All long texts of one language share their few character
    trigrams: a third of them in two unrelated bodies of 10,000 characters. Words also stay the same
    when the layout changes.
    """
    words = words_of(text)
    numbers = np.fromiter(map(_word_hash, words), dtype=np.uint64, count=len(words))
    width = min(3, len(numbers))
    if not width:
        return numbers
    # Hash all trigrams at once: one array operation per word, not one hash per trigram.
    hashes = np.zeros(len(numbers) - width + 1, dtype=np.uint64)
    for offset in range(width):
        # Each place has its own constant, so the order of the words counts. The shift spreads the
        # high bits; the last product makes one word's bits depend on those of the words before.
        part = (numbers[offset : offset + len(hashes)] + np.uint64(offset)) * _MIX[offset]
        hashes = (hashes ^ (part ^ (part >> np.uint64(29)))) * _MIX[0]
    return _distinct(np.sort(hashes))


def _distinct(ordered: np.ndarray) -> np.ndarray:
    """Return the distinct values of a sorted array, much faster than `np.unique` for millions."""
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]


def _find_repeated(values: np.ndarray, times: int) -> tuple[Positions, Positions]:
    """Find the values that occur more than `times` times.

    Returns:
        Their positions, equal values together; and for each position a number of its value, from 0.
    """
    order = np.argsort(values, kind="stable")  # the fastest for sets that are sorted already
    ordered = values[order]
    is_boundary = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    counts = np.diff(np.flatnonzero(is_boundary))  # occurrences of each distinct value
    is_repeated = counts > times
    positions = order[np.flatnonzero(np.repeat(is_repeated, counts))]
    return positions, np.repeat(np.arange(np.count_nonzero(is_repeated)), counts[is_repeated])


def jaccard(left: Trigrams, right: Trigrams) -> float:
    """Return the Jaccard index of two sets, 0 if one is empty."""
    both = np.sort(np.concatenate([left, right]))
    num_shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return num_shared / (len(both) - num_shared) if num_shared else 0.0


def number_values(values: Iterable[str]) -> Positions:
    """Return a number from 1 for each value, the same for equal values; -1 for an empty one."""
    numbers = {"": -1}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


@dataclass(frozen=True)
class TrigramSets:
    """The trigram sets of a pool, one after the other in one array.

    Set i is `trigrams[starts[i] : starts[i + 1]]`.
    """

    trigrams: Trigrams
    starts: Int64[np.ndarray, " boundary"]

    @classmethod
    def of(cls, bodies: Sequence[str], workers: WorkersConfig) -> "TrigramSets":
        """Return the trigram sets of `bodies`, computed by `workers`."""
        blocks = [bodies[start : start + _BLOCK] for start in range(0, len(bodies), _BLOCK)]
        sizes = [np.zeros(1, dtype=np.int64)]
        trigrams = [np.zeros(0, dtype=np.uint64)]
        for block_sizes, block_trigrams in map_blocks(
            _read_block, blocks, workers, "reading bodies"
        ):
            sizes.append(block_sizes)
            trigrams.append(block_trigrams)
        return cls(np.concatenate(trigrams), np.cumsum(np.concatenate(sizes)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, position: int) -> Trigrams:
        """Return the sorted distinct trigrams of the skill at `position` in the pool."""
        return self.trigrams[self.starts[position] : self.starts[position + 1]]

    @property
    def sizes(self) -> Positions:
        """The number of trigrams of each skill."""
        return np.diff(self.starts)

    def without_templates(self, names: Positions, max_names: int) -> "TrigramSets":
        """Return these sets without trigrams that occur under more than `max_names` names.

        Many skills are made from one template ("Automate … tasks via Rube MCP"): they share most
        of their trigrams but not their function. Copies of one skill share as many, but have one
        name or few. So the distinct names of the skills with a trigram are counted.

        Args:
            names: A number for the name of each skill, -1 for a skill without one.
            max_names: Trigrams under more names than this are removed.
        """
        # Only a trigram of many skills can have many names.
        positions, numbers = _find_repeated(self.trigrams, max_names)
        if not len(positions):
            return self

        # Count the distinct pairs of trigram and name. Names start at -1, so that 1 is added.
        owner_names = np.repeat(names, self.sizes)[positions] + 1
        num_names = names.max() + 2
        pairs = np.sort(numbers * num_names + owner_names, kind="stable")
        is_template = np.bincount(_distinct(pairs) // num_names) > max_names

        is_removed = np.zeros(len(self.trigrams), dtype=bool)
        is_removed[positions] = is_template[numbers]
        num_removed_before = np.searchsorted(np.flatnonzero(is_removed), self.starts)
        return TrigramSets(self.trigrams[~is_removed], self.starts - num_removed_before)


def _read_block(bodies: Sequence[str]) -> tuple[Positions, Trigrams]:
    """Return the sizes of the trigram sets of `bodies`, and the sets one after the other."""
    sets = [word_trigrams(body) for body in bodies]
    sizes = np.array([len(trigrams) for trigrams in sets], dtype=np.int64)
    return sizes, np.concatenate(sets)


def trigram_sets(
    skills: Sequence[Skill], max_names: int | None, workers: WorkersConfig
) -> TrigramSets:
    """Return the sets of the skills' bodies, without templates if `max_names` is set."""
    sets = TrigramSets.of([skill.body for skill in skills], workers)
    if max_names is None:
        return sets
    return sets.without_templates(
        number_values(name_key(skill.name) for skill in skills), max_names
    )


class Clusters(Stage):
    """Find clusters of near-duplicate skills."""

    example = "pool=runs/pool out=runs/clusters"
    result = "{num_skills_in_clusters} of {num_skills} skills lie in {num_clusters} clusters"

    stage: Literal["clusters"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    threshold: float = Field(
        default=0.6, gt=0, le=1, description="Jaccard index of body trigrams that links skills"
    )
    max_names: MaxNames = Field(default=5, description=MAX_NAMES_DESCRIPTION)
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: CLUSTERS, one row per skill")

    def run(self, out: Path) -> Summary:
        """Write CLUSTERS and return counts.

        The counts are of clusters of at least two skills: their number, their skills, and the
        sizes of the five largest clusters by their first skill id.
        """
        skills = read_skills(self.pool)
        clusters = near_duplicate_clusters(skills, self.threshold, self.max_names, self.workers)
        rows = [
            {"skill_id": skill_id, "cluster": cluster} for skill_id, cluster in clusters.items()
        ]
        write_table(rows, CLUSTERS, out)
        sizes = Counter(clusters.values())
        # The first id of a cluster comes last here, and replaces the others.
        first_ids = {cluster: skill_id for skill_id, cluster in reversed(clusters.items())}
        shared_sizes = [size for size in sizes.values() if size > 1]
        return {
            "num_skills": len(skills),
            "num_clusters": len(shared_sizes),
            "num_skills_in_clusters": sum(shared_sizes),
            "largest": {
                first_ids[cluster]: size for cluster, size in sizes.most_common(5) if size > 1
            },
        }


def read_clusters(path: Path, skill_ids: Iterable[str]) -> dict[str, int]:
    """Read a CLUSTERS table: the number of the cluster by skill id.

    Raises:
        SkilltrainError: One of `skill_ids` is in no cluster.
    """
    clusters = {row["skill_id"]: row["cluster"] for row in read_table(path, CLUSTERS).to_pylist()}
    if missing := [skill_id for skill_id in skill_ids if skill_id not in clusters]:
        problem = (
            f"{len(missing)} skill(s) of the pool are in no cluster, '{min(missing)}' among them"
        )
        raise SkilltrainError(
            "missing-clusters", problem, where=path, fix="make the clusters of this pool"
        )
    return clusters


def copies_of(
    skill_ids: Iterable[str], skills: Mapping[str, Skill], clusters: Path
) -> dict[str, list[str]]:
    """Return the other skills of a pool that do the same job, for those `skill_ids` that have any.

    Two skills are copies if they are in one cluster, or if they have the same `name_key` and the
    Jaccard index of their plain body trigrams is at least .3. Later versions and translations share
    a skill's name and commands but less than .6 of its trigrams.

    Raises:
        SkilltrainError: A skill is in no cluster of the table `clusters`.
    """
    known_ids = sorted({skill_id for skill_id in skill_ids if skill_id in skills})
    cluster_of = read_clusters(clusters, known_ids)
    ids_by_cluster: defaultdict[int | None, list[str]] = defaultdict(list)
    ids_by_name: defaultdict[str, list[str]] = defaultdict(list)
    for skill_id, skill in skills.items():
        ids_by_cluster[cluster_of.get(skill_id)].append(skill_id)
        ids_by_name[name_key(skill.name)].append(skill_id)

    trigrams = cache(lambda skill_id: word_trigrams(skills[skill_id].body))
    copies_by_id: dict[str, list[str]] = {}
    for skill_id in known_ids:
        copies = set(ids_by_cluster[cluster_of[skill_id]])
        name = name_key(skills[skill_id].name)
        for other_id in ids_by_name[name]:
            if name and jaccard(trigrams(skill_id), trigrams(other_id)) >= SAME_NAME_OVERLAP:
                copies.add(other_id)
        copies.discard(skill_id)
        if copies:
            copies_by_id[skill_id] = sorted(copies)
    return copies_by_id


def near_duplicate_clusters(
    skills: Sequence[Skill],
    threshold: float,
    max_names: int | None = None,
    workers: WorkersConfig = _ONE_WORKER,
) -> dict[str, int]:
    """Return the cluster of each skill, in order of id.

    Two skills are in one cluster if a chain of pairs with a body trigram Jaccard of at least
    `threshold` links them. Clusters are numbered in the order of their lowest skill_id.
    """
    sets = trigram_sets(skills, max_names, workers)
    lowest_positions = link_near_duplicates(sets, threshold, workers)
    skill_ids = [skill.skill_id for skill in skills]
    numbers: dict[int, int] = {}  # cluster number by the lowest position in the cluster
    clusters: dict[str, int] = {}
    for skill_id, lowest in sorted(zip(skill_ids, lowest_positions, strict=True)):
        clusters[skill_id] = numbers.setdefault(lowest, len(numbers))
    return clusters


def link_near_duplicates(sets: TrigramSets, threshold: float, workers: WorkersConfig) -> list[int]:
    """Return for each skill the lowest position in its cluster.

    MinHash (Broder 1997) and banding propose at least 99% of the pairs at the threshold, and more
    above it. The exact Jaccard index confirms them. Pairs that are linked already are not
    compared.
    """
    from datasketch import MinHashLSH
    from scipy.cluster.hierarchy import DisjointSet

    bands, rows = bands_and_rows(threshold)
    blocks: list[list[Trigrams]] = []
    for start in range(0, len(sets), _BLOCK):
        blocks.append([sets[i] for i in range(start, min(start + _BLOCK, len(sets)))])
    sketch_block = partial(_sketch_block, bands * rows)
    sketches = chain.from_iterable(map_blocks(sketch_block, blocks, workers, "sketching"))
    lsh = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    linked = DisjointSet(range(len(sets)))
    sizes = sets.sizes
    for position, sketch in enumerate(track(sketches, "comparing", len(sets))):
        if not sizes[position]:
            continue  # the sketch of an empty set says nothing
        for other in cast("list[int]", lsh.query(sketch)):
            if linked.connected(position, other):
                continue
            if jaccard(sets[position], sets[other]) >= threshold:
                linked.merge(position, other)
        lsh.insert(position, sketch)
    # The first position that is met in a cluster is its lowest.
    lowest: dict[int, int] = {}
    return [lowest.setdefault(linked[position], position) for position in range(len(sets))]


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return the LSH layout with the fewest false proposals that finds 99% of pairs at `threshold`.

    A pair with Jaccard index s is proposed with probability 1 - (1 - s^rows)^bands (Leskovec et
    al., Mining of Massive Datasets, section 3.4.2). More rows propose fewer pairs, and need more
    bands.
    """
    for rows in range(MAX_PERMUTATIONS // 2, 1, -1):
        log_missed_by_band = np.log1p(-(threshold**rows)) if threshold < 1 else -np.inf
        bands = max(2, int(np.ceil(np.log(1 - MIN_RECALL) / log_missed_by_band)))
        if bands * rows <= MAX_PERMUTATIONS:
            return bands, rows
    return MAX_PERMUTATIONS, 1


def _sketch_block(num_permutations: int, sets: Sequence[Trigrams]) -> list["LeanMinHash"]:
    """Return the MinHash sketch of each set. The upper 32 bits of trigrams serve as its hashes."""
    from datasketch import LeanMinHash, MinHash

    empty = MinHash(num_permutations, seed=1, hashfunc=int, scheme="affine32")
    sketches: list[LeanMinHash] = []
    for trigrams in sets:
        sketch = empty.copy()
        sketch.update_batch((trigrams >> np.uint64(32)).tolist())
        sketches.append(LeanMinHash(sketch))
    return sketches
