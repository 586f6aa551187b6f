"""Stage `clusters`: finds near-duplicate skills of a pool by the word trigrams of their bodies.

Two skills are copies if they are in one cluster, or if they have one name and share trigrams.

Notes:
- SkillRouter (section 4.2) does not say whether its trigrams are of words or of characters.
  Character trigrams do not tell long texts apart: two unrelated bodies of 10,000 characters share a
  third of them. Words also stay the same when the layout of a text changes.
- Skills made from one template ("Automate … tasks via Rube MCP") share most trigrams, but not their
  function. Copies of one skill share as many, but they have one name or few. So the names of a
  trigram are counted.
- Later versions and translations of a skill keep its name and commands, but differ too much for one
  cluster.
- MinHash (Broder 1997) with banding proposes pairs, and the exact Jaccard index decides.
- A pair with Jaccard index s is proposed with probability 1 - (1 - s^rows)^bands (Leskovec et al.,
  Mining of Massive Datasets, section 3.4.2). More rows propose fewer pairs, but need more bands.
- MinHash takes hashes of 32 bits. Trigrams are hashes already, so `int` is its hash function.
- The trigrams of a pool are sorted pieces, for which a stable sort is the fastest.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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

MAX_PERMUTATIONS = 100  # hashes in a MinHash sketch
MIN_RECALL = 0.99  # share of the pairs at the threshold that LSH proposes
SAME_NAME_OVERLAP = 0.3  # Jaccard index from which a skill of the same name is a copy
_BLOCK = 512  # bodies or trigram sets that a worker gets at once
# Factors of the first, second and third word of a trigram. They are odd, so that multiplying by one
# modulo 2^64 loses no bit.
_WORD_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64
)
_TRIGRAM_FACTOR = _WORD_FACTORS[0]  # any odd number will do; words are combined as in FNV-1a
_SHIFT = np.uint64(29)  # spreads the high bits of a hash
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

    A trigram is three consecutive words. A text of one or two words counts as one trigram.
    """
    words = words_of(text)
    word_hashes = np.fromiter(map(_word_hash, words), dtype=np.uint64, count=len(words))
    width = min(3, len(words))
    if not width:
        return word_hashes

    num_trigrams = len(words) - width + 1
    hashes = np.zeros(num_trigrams, dtype=np.uint64)  # [trigram]
    for offset in range(width):
        words_at_offset = word_hashes[offset : offset + num_trigrams]  # [trigram]
        hashes = _add_words(hashes, words_at_offset, offset)
    return _distinct(np.sort(hashes))


def _add_words(hashes: Trigrams, word_hashes: Trigrams, offset: int) -> Trigrams:
    """Add to the hash of each trigram the word at an offset. The order of words counts."""
    mixed = (word_hashes + np.uint64(offset)) * _WORD_FACTORS[offset]
    mixed ^= mixed >> _SHIFT
    return (hashes ^ mixed) * _TRIGRAM_FACTOR


def _distinct(ordered: np.ndarray) -> np.ndarray:
    """Return the distinct values of a sorted array, much faster than `np.unique` for millions."""
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]


def _find_repeated(values: np.ndarray, times: int) -> tuple[Positions, Positions]:
    """Find the values that occur more than `times` times. Equal values form a group.

    Returns:
        Positions in `values`, group by group.
        Number of the group at each of these positions, from 0.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_boundary = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    run_lengths = np.diff(np.flatnonzero(is_boundary))  # [run of equal values]
    is_group = run_lengths > times

    is_in_group = np.repeat(is_group, run_lengths)  # [value]
    positions = order[np.flatnonzero(is_in_group)]
    group_sizes = run_lengths[is_group]  # [group]
    groups = np.repeat(np.arange(len(group_sizes)), group_sizes)
    return positions, groups


def _count_names(groups: Positions, names: Positions) -> Positions:
    """Count the distinct names in each group.

    Args:
        groups: Number of the group, for each occurrence of a name.
        names: Number of the name, from -1.

    Returns:
        The number of names by number of the group.
    """
    base = names.max() + 2  # one more than the largest
    pairs = groups * base + names + 1
    distinct_pairs = _distinct(np.sort(pairs, kind="stable"))
    groups_of_pairs = distinct_pairs // base
    return np.bincount(groups_of_pairs)


def jaccard(first: Trigrams, second: Trigrams) -> float:
    """Return the Jaccard index of two sets, 0 if one is empty."""
    num_shared = len(np.intersect1d(first, second, assume_unique=True))
    return num_shared / (len(first) + len(second) - num_shared) if num_shared else 0.0


def number_values(values: Iterable[str]) -> Positions:
    """Return a number from 1 for each value, the same for equal values; -1 for an empty one."""
    numbers = {"": -1}  # a new value gets the length of this dict
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


@dataclass(frozen=True)
class TrigramSets:
    """The trigram sets of the skills in a pool, one after the other in one array.

    Set i is `trigrams[starts[i] : starts[i + 1]]`.
    """

    trigrams: Trigrams
    starts: Int64[np.ndarray, " boundary"]

    @classmethod
    def of(cls, bodies: Sequence[str], workers: WorkersConfig) -> "TrigramSets":
        """Return the trigram sets of `bodies`, computed by `workers`."""
        blocks = [bodies[start : start + _BLOCK] for start in range(0, len(bodies), _BLOCK)]
        sets = [np.empty(0, dtype=np.uint64)]  # makes the starts begin with 0
        for block_sets in map_blocks(_read_block, blocks, workers, "reading bodies"):
            sets += block_sets
        starts = np.cumsum([len(trigrams) for trigrams in sets])
        return cls(np.concatenate(sets), starts)

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
        """Return these sets without the trigrams that occur under more than `max_names` names.

        Args:
            names: A number for the name of each skill, -1 for a skill without a name.
        """
        positions, groups = _find_repeated(self.trigrams, max_names)
        if not len(positions):
            return self

        names_of_trigrams = np.repeat(names, self.sizes)  # [trigram]
        num_names = _count_names(groups, names_of_trigrams[positions])  # [group]
        is_template = num_names > max_names  # [group]

        is_removed = np.zeros(len(self.trigrams), dtype=bool)
        is_removed[positions] = is_template[groups]
        num_removed_before = np.searchsorted(np.flatnonzero(is_removed), self.starts)
        return TrigramSets(self.trigrams[~is_removed], self.starts - num_removed_before)


def _read_block(bodies: Sequence[str]) -> list[Trigrams]:
    return [word_trigrams(body) for body in bodies]


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
        """Write CLUSTERS and return counts of the clusters with at least two skills."""
        skills = read_skills(self.pool)
        clusters = near_duplicate_clusters(skills, self.threshold, self.max_names, self.workers)
        rows = [{"skill_id": skill_id, "cluster": number} for skill_id, number in clusters.items()]
        write_table(rows, CLUSTERS, out)

        lowest_ids: dict[int, str] = {}  # by cluster
        for skill_id, cluster in clusters.items():
            lowest_ids.setdefault(cluster, skill_id)
        sizes = Counter(clusters.values())
        largest = {lowest_ids[cluster]: size for cluster, size in sizes.most_common(5) if size > 1}
        shared_sizes = [size for size in sizes.values() if size > 1]
        return {
            "num_skills": len(skills),
            "num_clusters": len(shared_sizes),
            "num_skills_in_clusters": sum(shared_sizes),
            "largest": largest,
        }


def read_clusters(path: Path, skill_ids: Iterable[str]) -> dict[str, int]:
    """Read a CLUSTERS table. Returns the number of the cluster by skill id, for all its skills.

    Raises:
        SkilltrainError: One of `skill_ids` is in no cluster.
    """
    clusters = {row["skill_id"]: row["cluster"] for row in read_table(path, CLUSTERS).to_pylist()}
    missing = [skill_id for skill_id in skill_ids if skill_id not in clusters]
    if missing:
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
    """Find the copies of skills: other skills of the pool that do the same job.

    Args:
        skill_ids: Ids of skills. Ids outside the pool are ignored.
        clusters: CLUSTERS table of the pool.

    Returns:
        Ids of the copies by skill id.
    """
    known_ids = sorted({skill_id for skill_id in skill_ids if skill_id in skills})
    cluster_of = read_clusters(clusters, known_ids)
    ids_by_cluster: defaultdict[int | None, list[str]] = defaultdict(list)
    for skill_id in skills:
        ids_by_cluster[cluster_of.get(skill_id)].append(skill_id)

    namesakes = _similar_namesakes(known_ids, skills)
    copies_by_id: dict[str, list[str]] = {}
    for skill_id in known_ids:
        copies = {*ids_by_cluster[cluster_of[skill_id]], *namesakes[skill_id]}
        copies.discard(skill_id)
        if copies:
            copies_by_id[skill_id] = sorted(copies)
    return copies_by_id


def _similar_namesakes(
    skill_ids: Iterable[str], skills: Mapping[str, Skill]
) -> dict[str, list[str]]:
    """Find the skills with the same name and a similar body, by skill id."""
    ids_by_name: defaultdict[str, list[str]] = defaultdict(list)
    for skill_id, skill in skills.items():
        ids_by_name[name_key(skill.name)].append(skill_id)
    ids_by_name[""] = []  # no name, no namesakes

    trigrams_of = cache(lambda skill_id: word_trigrams(skills[skill_id].body))
    similar_ids: dict[str, list[str]] = {}
    for skill_id in skill_ids:
        similar_ids[skill_id] = [
            other_id
            for other_id in ids_by_name[name_key(skills[skill_id].name)]
            if jaccard(trigrams_of(skill_id), trigrams_of(other_id)) >= SAME_NAME_OVERLAP
        ]
    return similar_ids


def near_duplicate_clusters(
    skills: Sequence[Skill],
    threshold: float,
    max_names: int | None = None,
    workers: WorkersConfig = _ONE_WORKER,
) -> dict[str, int]:
    """Find the clusters of near-duplicate skills (see `link_near_duplicates`).

    Returns:
        Number of the cluster by skill id, in order of skill id. Clusters are numbered from 0 in the
        order of their lowest skill id.
    """
    sets = trigram_sets(skills, max_names, workers)
    lowest_positions = link_near_duplicates(sets, threshold, workers)
    skill_ids = [skill.skill_id for skill in skills]
    numbers: dict[int, int] = {}  # number of a cluster by lowest position
    clusters: dict[str, int] = {}
    for skill_id, lowest in sorted(zip(skill_ids, lowest_positions, strict=True)):
        clusters[skill_id] = numbers.setdefault(lowest, len(numbers))
    return clusters


def link_near_duplicates(sets: TrigramSets, threshold: float, workers: WorkersConfig) -> list[int]:
    """Return for each skill the lowest position in its cluster.

    Skills are in one cluster if a chain of pairs links them. The Jaccard index of a pair is at
    least the threshold.
    """
    from datasketch import MinHashLSH
    from scipy.cluster.hierarchy import DisjointSet

    bands, rows = bands_and_rows(threshold)
    sketches = _sketch_sets(sets, bands * rows, workers)
    lsh = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    linked = DisjointSet(range(len(sets)))
    for position, sketch in enumerate(track(sketches, "comparing", len(sets))):
        if not len(sets[position]):
            continue  # all empty sets have equal sketches
        for proposed in cast("list[int]", lsh.query(sketch)):
            is_linked = linked.connected(position, proposed)
            if not is_linked and jaccard(sets[position], sets[proposed]) >= threshold:
                linked.merge(position, proposed)
        lsh.insert(position, sketch)
    return _lowest_positions(linked.subsets())


def _lowest_positions(clusters: Iterable[Collection[int]]) -> list[int]:
    """Return the lowest position of each skill's cluster, by position of the skill."""
    lowest_by_position: dict[int, int] = {}
    for positions in clusters:
        lowest_by_position |= dict.fromkeys(positions, min(positions))
    return [lowest_by_position[position] for position in range(len(lowest_by_position))]


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Choose the number of LSH bands, and of rows in a band, for a threshold.

    The layout has the most rows in a band with which `MIN_RECALL` of the pairs at the threshold are
    proposed.
    """
    for rows in range(MAX_PERMUTATIONS // 2, 1, -1):
        log_missed_by_band = np.log1p(-(threshold**rows)) if threshold < 1 else -np.inf
        bands = max(2, int(np.ceil(np.log(1 - MIN_RECALL) / log_missed_by_band)))
        if bands * rows <= MAX_PERMUTATIONS:
            return bands, rows
    return MAX_PERMUTATIONS, 1


def _sketch_sets(
    sets: TrigramSets, num_permutations: int, workers: WorkersConfig
) -> Iterable["LeanMinHash"]:
    """Yield the MinHash sketch of each trigram set, computed by `workers`."""
    all_sets = [sets[position] for position in range(len(sets))]
    blocks = [all_sets[start : start + _BLOCK] for start in range(0, len(sets), _BLOCK)]
    sketch_block = partial(_sketch_block, num_permutations)
    return chain.from_iterable(map_blocks(sketch_block, blocks, workers, "sketching"))


def _sketch_block(num_permutations: int, sets: Sequence[Trigrams]) -> list["LeanMinHash"]:
    """Return the MinHash sketch of each trigram set."""
    from datasketch import LeanMinHash, MinHash

    empty = MinHash(num_permutations, seed=1, hashfunc=int, scheme="affine32")
    sketches: list[LeanMinHash] = []
    for trigrams in sets:
        sketch = empty.copy()
        upper_bits = trigrams >> np.uint64(32)
        sketch.update_batch(upper_bits.tolist())
        sketches.append(LeanMinHash(sketch))
    return sketches
