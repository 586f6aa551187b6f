"""Which skills of a pool are copies of one another: MinHash sketches propose pairs, exact Jaccard confirms them."""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, UInt32

from skilltrain.data.near_duplicates.trigrams import Positions, Trigrams, TrigramSets, jaccard
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.workers import WorkersConfig, map_blocks

MAX_PERMUTATIONS = 160
MIN_RECALL = 0.99
_BLOCK = 4096  # skills or pairs that a worker takes at once
_CHUNK = 1024  # trigrams that are sketched at once: what fits into a processor's cache

Sketches = UInt32[np.ndarray, "skill permutation"]
Pairs = tuple[Int64[np.ndarray, " pair"], Int64[np.ndarray, " pair"]]


def near_duplicate_clusters(skills: Sequence[Skill], threshold: float) -> dict[str, int]:
    """skill_id → cluster, so that copies of a positive can be told from negatives.

    Two skills are in one cluster where a chain of pairs with a body trigram Jaccard of at least `threshold` links
    them. A skill without copies is a cluster of one. Clusters are numbered in the order of their lowest skill_id,
    so the answer does not depend on the order of `skills`.
    """
    workers = WorkersConfig(num=1)
    with tempfile.TemporaryDirectory(prefix="skilltrain-") as scratch:
        bodies = pa.table({"body": pa.array([skill.body for skill in skills], pa.large_string())})
        sets = TrigramSets.read([bodies], Path(scratch) / "trigrams", workers)
        roots = link_near_duplicates(sets, threshold, workers)
    return number_clusters([skill.skill_id for skill in skills], roots)


def number_clusters(skill_ids: Sequence[str], roots: Sequence[int]) -> dict[str, int]:
    """skill_id → cluster in order of id; skills of one root share a cluster, numbered by its lowest skill_id."""
    ordered = sorted(zip(skill_ids, roots, strict=True))
    numbers: dict[int, int] = {}
    return {skill_id: numbers.setdefault(root, len(numbers)) for skill_id, root in ordered}


def link_near_duplicates(sets: TrigramSets, threshold: float, workers: WorkersConfig) -> list[int]:
    """The root of each skill's cluster, as a position in `sets`; the same for any number of workers.

    MinHash (Broder 1997) and banding propose pairs and find at least 99% of those at the threshold, more above it;
    exact Jaccard confirms them. First each skill is held against one skill of each bucket it is in, which links most
    of every large cluster; of the other pairs only those of skills not yet linked are compared.
    """
    if not 0 < threshold <= 1:
        raise SkilltrainError(f"the near-duplicate threshold lies above 0 and at most at 1, found {threshold}")
    layout = bands_and_rows(threshold)
    sketches = _sketches(sets, layout, workers)
    parent, compared = list(range(len(sets))), np.zeros(0, dtype=np.int64)
    for propose in (_first_of_each_bucket, _all_of_each_bucket):
        roots = np.array([_root(parent, position) for position in range(len(parent))], dtype=np.int64)
        keys = np.zeros(0, dtype=np.int64)
        for buckets in _buckets(sketches, layout, np.flatnonzero(sets.sizes)):
            mixed = _mixed(*buckets, roots)
            pairs_of_band = propose(buckets[0][mixed], buckets[1][mixed])
            found = [_likely(pairs, sketches, roots, threshold) for pairs in pairs_of_band]
            keys = np.unique(np.concatenate([keys, *found]))
        keys = compared = np.setdiff1d(keys, compared, assume_unique=True)
        pairs = [np.divmod(keys[start : start + _BLOCK], len(sets)) for start in range(0, len(keys), _BLOCK)]
        confirm = partial(_confirm, sets.folder, threshold)
        for left, right in map_blocks(confirm, pairs, workers, "comparing"):
            _unite(parent, left, right)
    return [_root(parent, position) for position in range(len(parent))]


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """The LSH layout with the fewest false proposals that still finds 99% of the pairs at `threshold`.

    A pair of Jaccard s is proposed with probability 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive
    Datasets, section 3.4.2); more rows propose fewer pairs, and then more bands are needed.
    """
    for rows in range(MAX_PERMUTATIONS // 2, 1, -1):
        missed = np.log1p(-(threshold**rows)) if threshold < 1 else -np.inf
        bands = max(2, int(np.ceil(np.log(1 - MIN_RECALL) / missed)))
        if bands * rows <= MAX_PERMUTATIONS:
            return bands, rows
    return MAX_PERMUTATIONS, 1


def _sketches(sets: TrigramSets, layout: tuple[int, int], workers: WorkersConfig) -> Sketches:
    num = layout[0] * layout[1]
    blocks = map_blocks(partial(_sketch, sets.folder, num), range(0, len(sets), _BLOCK), workers, "sketching")
    return np.concatenate([np.zeros((0, num), dtype=np.uint32), *blocks])


def _sketch(folder: Path, num_permutations: int, start: int) -> Sketches:
    """MinHash sketches of a block of skills, under datasketch's permutations a·h + b modulo 2^32.

    Trigrams are hashes already, so their upper halves go in as they are. The sketch of an empty set says nothing.
    """
    from datasketch import MinHash

    sets = TrigramSets.open(folder)
    permutations = MinHash(num_perm=num_permutations, seed=1, scheme="affine32").permutations
    factors, shifts = np.array(permutations, dtype=np.uint32)[:, :, None]
    result = np.full((min(_BLOCK, len(sets) - start), num_permutations), 2**32 - 1, dtype=np.uint32)
    for row in range(len(result)):
        hashes = (sets[start + row] >> np.uint64(32)).astype(np.uint32)
        for place in range(0, len(hashes), _CHUNK):
            smallest = (factors * hashes[place : place + _CHUNK] + shifts).min(axis=1)
            result[row] = np.minimum(result[row], smallest)
    return result


def _buckets(sketches: Sketches, layout: tuple[int, int], filled: Positions) -> Iterator[tuple[Positions, Trigrams]]:
    """For each band: the skills of `filled` in the order of their buckets, and the buckets' numbers."""
    bands, rows = layout
    for band in range(bands):
        buckets = np.zeros(len(filled), dtype=np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            buckets = (buckets ^ sketches[filled, column]) * np.uint64(0x9E3779B97F4A7C15)
            buckets ^= buckets >> np.uint64(32)
        order = np.argsort(buckets, kind="stable")
        yield filled[order], buckets[order]


def _is_first(buckets: Trigrams) -> Bool[np.ndarray, " skill"]:
    """Where, in sorted `buckets`, another begins."""
    return np.concatenate([[True], buckets[1:] != buckets[:-1]])[: len(buckets)]


def _mixed(skills: Positions, buckets: Trigrams, roots: Positions) -> Bool[np.ndarray, " skill"]:
    """Which skills stand in a bucket of two roots and more; of others there is nothing to learn."""
    first = np.flatnonzero(_is_first(buckets))
    if not len(first):
        return np.zeros(0, dtype=bool)
    low, high = np.minimum.reduceat(roots[skills], first), np.maximum.reduceat(roots[skills], first)
    return np.repeat(low != high, np.diff(np.append(first, len(buckets))))


def _first_of_each_bucket(skills: Positions, buckets: Trigrams) -> Iterator[Pairs]:
    """Every skill of a bucket with the bucket's first."""
    is_first = _is_first(buckets)
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(buckets)), 0))
    yield skills[first[~is_first]], skills[~is_first]


def _all_of_each_bucket(skills: Positions, buckets: Trigrams) -> Iterator[Pairs]:
    """Every pair of every bucket, by the distance at which its skills stand: never more at once than skills."""
    places = np.arange(len(buckets))
    for distance in range(1, len(buckets)):
        places = places[places + distance < len(buckets)]
        places = places[buckets[places + distance] == buckets[places]]
        if not len(places):
            return
        yield skills[places], skills[places + distance]


def _likely(pairs: Pairs, sketches: Sketches, roots: Positions, threshold: float) -> Positions:
    """Sorted left · num_skills + right (left below right) of pairs not yet linked whose sketches agree often enough.

    Agreements are binomial: five standard deviations below the mean lose one pair in three million.
    """
    left, right = np.minimum(*pairs), np.maximum(*pairs)
    apart = roots[left] != roots[right]
    keys = np.unique(left[apart] * len(sketches) + right[apart])
    num = sketches.shape[1]
    enough = num * threshold - 5 * np.sqrt(num * threshold * (1 - threshold))
    likely = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _BLOCK):
        left, right = np.divmod(keys[start : start + _BLOCK], len(sketches))
        agreements = np.count_nonzero(sketches[left] == sketches[right], axis=1)
        likely[start : start + _BLOCK] = agreements >= enough
    return keys[likely]


def _confirm(folder: Path, threshold: float, pairs: Pairs) -> Pairs:
    """Those of `pairs` whose Jaccard reaches the threshold; sets of too unlike sizes are not compared."""
    sets, (left, right) = TrigramSets.open(folder), pairs
    small, large = np.sort(np.stack([sets.sizes[left], sets.sizes[right]]), axis=0)
    places = np.flatnonzero(small >= threshold * large)
    values = [jaccard(sets[left[place]], sets[right[place]]) for place in places]
    places = places[np.array(values) >= threshold]
    return left[places], right[places]


def _unite(parent: list[int], left: Positions, right: Positions) -> None:
    """Link pairs in union-find `parent`; a root is the lowest position of its cluster."""
    for one, other in zip(left.tolist(), right.tolist(), strict=True):
        here, there = _root(parent, one), _root(parent, other)
        parent[max(here, there)] = min(here, there)


def _root(parent: list[int], position: int) -> int:
    while parent[position] != position:
        parent[position] = parent[parent[position]]
        position = parent[position]
    return position
