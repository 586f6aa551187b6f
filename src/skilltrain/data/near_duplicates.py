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

from skilltrain.config import PoolPath
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
_TRIGRAM_FACTOR = _WORD_FACTORS[0]  # any odd number will do
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

    SkillRouter (section 4.2) does not say whether its trigrams are of words or of characters. This
    function takes words for two reasons. Character trigrams do not tell long texts apart: two
    unrelated bodies of 10,000 characters share a third of them. And words stay the same when the
    layout of a text changes.
    """
    words = words_of(text)
    word_hashes = np.fromiter(map(_word_hash, words), dtype=np.uint64, count=len(words))
    width = min(3, len(words))
    if not width:
        return word_hashes  # an empty array, because the text has no words

    # Hash all trigrams at once, and add one word of each trigram per iteration.
    num_trigrams = len(words) - width + 1
    hashes = np.zeros(num_trigrams, dtype=np.uint64)  # [trigram]
    for offset in range(width):
        # Change the hash of a word by its place in the trigram, so that the order of words counts.
        words_at_offset = word_hashes[offset : offset + num_trigrams]  # [trigram]
        mixed = (words_at_offset + np.uint64(offset)) * _WORD_FACTORS[offset]
        mixed ^= mixed >> np.uint64(29)  # spreads the high bits

        # Combine the word with the words before it, as the hash function FNV-1a does.
        hashes = (hashes ^ mixed) * _TRIGRAM_FACTOR
    return _distinct(np.sort(hashes))


def _distinct(ordered: np.ndarray) -> np.ndarray:
    """Return the distinct values of a sorted array, much faster than `np.unique` for millions."""
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]


def _find_repeated(values: np.ndarray, times: int) -> tuple[Positions, Positions]:
    """Find the values that occur more than `times` times.

    The positions of equal values form a group. The groups are numbered from 0. For example, the
    values [7, 3, 7, 5, 3, 7] with `times` 1 give the positions [1, 4, 0, 2, 5], which are those of
    3, then of 7, and the groups [0, 0, 1, 1, 1].

    Args:
        values: The values, in any order.
        times: Number of occurrences that is not reported yet.

    Returns:
        The positions of these values in `values`, group by group.
        The group number at each of these positions.
    """
    # Sort, so that equal values are neighbours. `values` often consists of sorted pieces, and the
    # stable sort is the fastest for them.
    order = np.argsort(values, kind="stable")  # [value]
    ordered = values[order]  # [value]

    # Equal values are runs of the ordered array. A run starts where a value differs from the value
    # before it. The last True marks the end of the last run.
    is_boundary = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    lengths = np.diff(np.flatnonzero(is_boundary))  # [run]
    is_repeated = lengths > times  # [run]

    # Keep the positions in the long runs. Each long run is a group.
    is_in_group = np.repeat(is_repeated, lengths)  # [value], in the order of `ordered`
    positions = order[np.flatnonzero(is_in_group)]  # [value in a group]
    group_sizes = lengths[is_repeated]  # [group]
    groups = np.repeat(np.arange(len(group_sizes)), group_sizes)  # [value in a group]
    return positions, groups


def jaccard(first: Trigrams, second: Trigrams) -> float:
    """Return the Jaccard index of two sets, 0 if one is empty.

    The index is the number of shared trigrams, divided by the number of trigrams in either set.
    """
    both = np.sort(np.concatenate([first, second]))  # a shared trigram is there twice
    num_shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return num_shared / (len(both) - num_shared) if num_shared else 0.0


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
        sets = [np.empty(0, dtype=np.uint64)]  # an empty set, which makes the starts begin with 0
        for block_sets in map_blocks(_read_block, blocks, workers, "reading bodies"):
            sets += block_sets
        starts = np.cumsum([len(trigrams) for trigrams in sets])  # [set and end]
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

        Many skills are made from one template ("Automate … tasks via Rube MCP"): they share most
        of their trigrams but not their function. Copies of one skill share as many trigrams, but
        they have one name or few. So the names of the skills with a trigram are counted.

        Args:
            names: A number for the name of each skill, -1 for a skill without one.
            max_names: A trigram of more names than this belongs to a template.
        """
        # A trigram of few skills has few names. So look only at trigrams of many skills; each
        # distinct trigram is a group.
        positions, groups = _find_repeated(self.trigrams, max_names)
        if not len(positions):
            return self

        # Find the distinct pairs of a group and the name of a skill. One number stands for a pair:
        # `group * base + name`, with names counted from 0 instead of -1.
        names_of_trigrams = np.repeat(names, self.sizes)[positions] + 1
        base = names.max() + 2  # one more than the largest name
        pairs = groups * base + names_of_trigrams
        distinct_pairs = _distinct(np.sort(pairs, kind="stable"))

        # Count the names of each group.
        groups_of_pairs = distinct_pairs // base
        num_names_of_group = np.bincount(groups_of_pairs)
        is_template = num_names_of_group > max_names  # [group]

        # Remove the templates. Each set then starts earlier by the number of trigrams that are
        # removed before it.
        is_removed = np.zeros(len(self.trigrams), dtype=bool)
        is_removed[positions] = is_template[groups]
        num_removed_before = np.searchsorted(np.flatnonzero(is_removed), self.starts)
        return TrigramSets(self.trigrams[~is_removed], self.starts - num_removed_before)


def _read_block(bodies: Sequence[str]) -> list[Trigrams]:
    return [word_trigrams(body) for body in bodies]


def trigram_sets(
    skills: Sequence[Skill], max_names: int | None, workers: WorkersConfig
) -> TrigramSets:
    """Return the trigram sets of the skills' bodies.

    Args:
        skills: The pool.
        max_names: A trigram under more skill names than this belongs to a template and is left
            out. None: no trigram is left out.
        workers: Processes that compute the sets.
    """
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
    pool: PoolPath
    threshold: float = Field(
        default=0.6, gt=0, le=1, description="Jaccard index of body trigrams that links skills"
    )
    max_names: MaxNames = Field(default=5, description=MAX_NAMES_DESCRIPTION)
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who computes")
    out: Path = Field(description="folder to write: CLUSTERS, one row per skill")

    def run(self, out: Path) -> Summary:
        """Write CLUSTERS and return counts.

        Only clusters of at least two skills are counted. `largest` maps the lowest skill id of a
        cluster to the cluster's size, for the five largest clusters.
        """
        skills = read_skills(self.pool)
        # The number of the cluster by skill id, in order of skill id.
        clusters = near_duplicate_clusters(skills, self.threshold, self.max_names, self.workers)
        rows = [
            {"skill_id": skill_id, "cluster": cluster} for skill_id, cluster in clusters.items()
        ]
        write_table(rows, CLUSTERS, out)

        # Find the lowest skill id of each cluster. The first id that is met is the lowest.
        lowest_ids: dict[int, str] = {}  # by cluster
        for skill_id, cluster in clusters.items():
            lowest_ids.setdefault(cluster, skill_id)
        sizes = Counter(clusters.values())  # number of skills by cluster
        shared_sizes = [size for size in sizes.values() if size > 1]
        return {
            "num_skills": len(skills),
            "num_clusters": len(shared_sizes),
            "num_skills_in_clusters": sum(shared_sizes),
            "largest": {
                lowest_ids[cluster]: size for cluster, size in sizes.most_common(5) if size > 1
            },
        }


def read_clusters(path: Path, skill_ids: Iterable[str]) -> dict[str, int]:
    """Read a CLUSTERS table. Returns the number of the cluster by skill id, for all its skills.

    Args:
        path: File or folder of the table.
        skill_ids: Ids of skills that must be in the table.

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

    Two skills are copies in two cases: they are in one cluster of near-duplicates, or they have the
    same `name_key` and share some trigrams (a Jaccard index of at least `SAME_NAME_OVERLAP`). The
    second case finds later versions and translations. They keep the name and the commands of a
    skill, but differ too much for one cluster.

    Args:
        skill_ids: Ids of the skills whose copies are looked for. Ids outside the pool are ignored.
        skills: The pool by skill id.
        clusters: CLUSTERS table of the pool.

    Returns:
        Ids of the copies by skill id, for the skills that have copies.

    Raises:
        SkilltrainError: A skill is in no cluster of the table `clusters`.
    """
    # Group the skills of the pool by cluster and by name.
    known_ids = sorted({skill_id for skill_id in skill_ids if skill_id in skills})
    cluster_of = read_clusters(clusters, known_ids)
    ids_by_cluster: defaultdict[int | None, list[str]] = defaultdict(list)
    ids_by_name: defaultdict[str, list[str]] = defaultdict(list)
    for skill_id, skill in skills.items():
        # Only the known ids must have a cluster. Other skills may be in none.
        ids_by_cluster[cluster_of.get(skill_id)].append(skill_id)
        ids_by_name[name_key(skill.name)].append(skill_id)

    # Find the copies of each skill.
    trigrams_of = cache(lambda skill_id: word_trigrams(skills[skill_id].body))  # each only once
    copies_by_id: dict[str, list[str]] = {}
    for skill_id in known_ids:
        copies = set(ids_by_cluster[cluster_of[skill_id]])
        name = name_key(skills[skill_id].name)
        # Skills without a name are no namesakes of each other.
        namesakes = ids_by_name[name] if name else []
        for other_id in namesakes:
            overlap = jaccard(trigrams_of(skill_id), trigrams_of(other_id))
            if overlap >= SAME_NAME_OVERLAP:
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
    """Find the clusters of near-duplicate skills.

    Two skills are near-duplicates if the Jaccard index of their body trigrams is at least
    `threshold`. Near-duplicates are in one cluster, and so are skills that a chain of
    near-duplicates links.

    Args:
        skills: The pool.
        threshold: Jaccard index from which two skills are near-duplicates.
        max_names: A trigram under more skill names than this belongs to a template and does not
            count. None: all trigrams count.
        workers: Processes that compute.

    Returns:
        Number of the cluster by skill id, in order of skill id. Clusters are numbered from 0 in the
        order of their lowest skill id.
    """
    # Skills of one cluster have the same lowest position, so the position identifies the cluster.
    sets = trigram_sets(skills, max_names, workers)
    lowest_positions = link_near_duplicates(sets, threshold, workers)  # of each skill's cluster

    # Number the clusters in order of skill id.
    skill_ids = [skill.skill_id for skill in skills]
    numbers: dict[int, int] = {}  # number of a cluster by its lowest position
    clusters: dict[str, int] = {}
    for skill_id, lowest in sorted(zip(skill_ids, lowest_positions, strict=True)):
        if lowest not in numbers:
            numbers[lowest] = len(numbers)
        clusters[skill_id] = numbers[lowest]
    return clusters


def link_near_duplicates(sets: TrigramSets, threshold: float, workers: WorkersConfig) -> list[int]:
    """Return for each skill the lowest position in its cluster.

    MinHash (Broder 1997) with banding proposes pairs of sets. If a pair's Jaccard index is the
    threshold, the pair is proposed with a probability of at least 99%. Above it, the probability is
    higher. The exact Jaccard index then decides whether the pair is linked. A pair whose sets are
    already in one cluster is not compared.

    Args:
        sets: Trigram set of each skill.
        threshold: Jaccard index from which two sets are linked.
        workers: Processes that compute the sketches.
    """
    from datasketch import MinHashLSH
    from scipy.cluster.hierarchy import DisjointSet

    # Sketch the sets. A sketch has one hash for each row of each band.
    bands, rows = bands_and_rows(threshold)
    all_sets = [sets[position] for position in range(len(sets))]
    blocks = [all_sets[start : start + _BLOCK] for start in range(0, len(sets), _BLOCK)]
    sketch_block = partial(_sketch_block, bands * rows)
    sketches = chain.from_iterable(map_blocks(sketch_block, blocks, workers, "sketching"))

    # Compare each set with the earlier sets that LSH (locality-sensitive hashing) proposes. LSH
    # proposes two sets if all rows of at least one band are equal.
    lsh = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    linked = DisjointSet(range(len(sets)))
    for position, sketch in enumerate(track(sketches, "comparing", len(sets))):
        if not len(sets[position]):
            continue  # all empty sets have the same sketch
        for other in cast("list[int]", lsh.query(sketch)):
            if linked.connected(position, other):
                continue
            if jaccard(sets[position], sets[other]) >= threshold:
                linked.merge(position, other)
        lsh.insert(position, sketch)

    # Positions ascend, so the first position in a cluster is the lowest.
    roots = [linked[position] for position in range(len(sets))]  # each stands for a cluster
    lowest_by_root: dict[int, int] = {}
    for position, root in enumerate(roots):
        lowest_by_root.setdefault(root, position)
    return [lowest_by_root[root] for root in roots]


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Choose the number of LSH bands, and of rows in a band, for a threshold.

    A pair with Jaccard index s is proposed with probability 1 - (1 - s^rows)^bands (Leskovec et
    al., Mining of Massive Datasets, section 3.4.2). Bands with more rows propose fewer pairs, but
    more bands are needed then. This is the layout with the most rows that proposes 99% of the pairs
    at the threshold and has at most `MAX_PERMUTATIONS` rows in all.

    Returns:
        Number of bands, and number of rows in a band.
    """
    # There are at least two bands, so a band has at most half of the rows.
    for rows in range(MAX_PERMUTATIONS // 2, 1, -1):
        # A band misses a pair at the threshold with probability 1 - threshold^rows. Take the
        # smallest number of bands that together miss at most 1 - MIN_RECALL of these pairs.
        log_missed_by_band = np.log1p(-(threshold**rows)) if threshold < 1 else -np.inf
        bands = max(2, int(np.ceil(np.log(1 - MIN_RECALL) / log_missed_by_band)))
        if bands * rows <= MAX_PERMUTATIONS:
            return bands, rows
    # No layout with several rows finds enough pairs. Bands of one row propose the most pairs.
    return MAX_PERMUTATIONS, 1


def _sketch_block(num_permutations: int, sets: Sequence[Trigrams]) -> list["LeanMinHash"]:
    """Return the MinHash sketch of each trigram set.

    Two sketches show how similar two sets are, without the sets.

    Args:
        num_permutations: Number of hash functions, which is the length of a sketch.
        sets: For each text, the 64-bit hashes of its distinct trigrams.
    """
    from datasketch import LeanMinHash, MinHash

    # MinHash hashes each value with `hashfunc`. Our trigrams are hashes already, and the function
    # `int` leaves them as they are. Sketches can be compared only if they have the same seed.
    empty = MinHash(num_permutations, seed=1, hashfunc=int, scheme="affine32")
    sketches: list[LeanMinHash] = []
    for trigrams in sets:
        # Copying an empty sketch is faster than making its hash functions again.
        sketch = empty.copy()
        upper_bits = trigrams >> np.uint64(32)  # MinHash needs hashes of 32 bits
        sketch.update_batch(upper_bits.tolist())
        # LeanMinHash holds only the values of the sketch, and takes less memory.
        sketches.append(LeanMinHash(sketch))
    return sketches
