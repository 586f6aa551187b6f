"""Skill bodies as sets of word trigrams: of one text, and of a whole pool in memory-mapped files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt64

from skilltrain.texts import words_of
from skilltrain.workers import WorkersConfig, map_blocks

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
BODY_BLOCK = 256  # bodies that a worker reads at once
_PART = 2**22  # trigrams that a worker counts at once

Trigrams = UInt64[np.ndarray, " trigram"]
Positions = Int64[np.ndarray, " position"]


class WordHashes(dict[str, int]):
    """word → 64-bit hash, the same in every process; each word is hashed once."""

    def __missing__(self, word: str) -> int:
        digest = blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
        value = self[word] = int.from_bytes(digest, "little")
        return value


def word_trigrams(text: str, hashes: WordHashes) -> Trigrams:
    """The sorted distinct word trigrams of `text`, as 64-bit hashes.

    SkillRouter (section 4.2) says "trigram" and not of what. Words, because character trigrams of a language are
    few and shared by all long texts in it (two unrelated 10,000-character bodies already reach a third), which
    would make the threshold depend on length; words also survive a change of layout. Text is NFKC-normalised and
    lower-cased, everything but letters and digits separates words. A text of one or two words is one "trigram".
    Among 10^8 trigrams of a pool a collision is possible, within two bodies it is not in practice (10^-11).
    """
    words = words_of(text)
    numbers = np.fromiter(map(hashes.__getitem__, words), dtype=np.uint64, count=len(words))
    width = min(3, len(numbers))
    if not width:
        return numbers
    mixed = np.zeros(len(numbers) - width + 1, dtype=np.uint64)
    for offset in range(width):
        # Multiplying by odd constants modulo 2^64 tells the order of the words apart; the shift spreads high bits.
        part = (numbers[offset : offset + len(mixed)] + np.uint64(offset)) * _MIX[offset]
        mixed = (mixed ^ (part ^ (part >> np.uint64(29)))) * _MIX[0]
    mixed.sort()
    return mixed[np.concatenate([[True], mixed[1:] != mixed[:-1]])]


def jaccard(left: Trigrams, right: Trigrams) -> float:
    """Shared over all trigrams of two sets, between 0 and 1; 0 where one is empty, for nothing shows a likeness."""
    if not len(left) or not len(right):
        return 0.0
    both = np.concatenate([left, right])
    both.sort()
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared)


def _store_bodies(blocks: Iterable[pa.Table], file: Path) -> int:
    """Write blocks of bodies where workers can map them; the number of blocks."""
    schema, num_blocks = pa.schema([pa.field("body", pa.large_string())]), 0
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for table in blocks:
            for batch in table.select(["body"]).cast(schema).combine_chunks().to_batches(BODY_BLOCK):
                writer.write_batch(batch)
                num_blocks += 1
    return num_blocks


@lru_cache(maxsize=2)
def _bodies(file: Path) -> pa.RecordBatchFileReader:
    return pa.ipc.open_file(pa.memory_map(str(file)))


@dataclass(frozen=True)
class TrigramSets:
    """The trigram sets of a pool, one after the other in two memory-mapped files; a position is a row of the pool."""

    folder: Path
    trigrams: Trigrams
    starts: Positions

    @classmethod
    def open(cls, folder: Path) -> "TrigramSets":
        """The sets that were written into `folder`."""
        starts = np.load(folder / "starts.npy", mmap_mode="r")
        # An empty file cannot be mapped.
        flat = np.memmap(folder / "trigrams.bin", np.uint64, "r") if starts[-1] else np.zeros(0, np.uint64)
        return cls(folder, flat, starts)

    @classmethod
    def read(cls, blocks: Iterable[pa.Table], folder: Path, workers: WorkersConfig) -> "TrigramSets":
        """The sets of the column `body` of `blocks`, read by `workers` and kept in `folder`."""
        folder.mkdir(parents=True)
        num_blocks = _store_bodies(blocks, folder / "bodies.arrow")
        read = partial(_read_block, folder / "bodies.arrow")
        sets = cls._write(map_blocks(read, range(num_blocks), workers, "reading bodies"), folder)
        (folder / "bodies.arrow").unlink()
        return sets

    @classmethod
    def _write(cls, blocks: Iterator[tuple[Positions, Trigrams]], folder: Path) -> "TrigramSets":
        """Sizes and trigrams of many sets, as they come, in the files of `folder`."""
        sizes = [np.zeros(1, dtype=np.int64)]
        with (folder / "trigrams.bin").open("wb") as file:
            for counts, flat in blocks:
                sizes.append(counts)
                file.write(flat.tobytes())
        np.save(folder / "starts.npy", np.cumsum(np.concatenate(sizes)))
        return cls.open(folder)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, position: int) -> Trigrams:
        """The sorted distinct trigrams of one skill."""
        return self.trigrams[self.starts[position] : self.starts[position + 1]]

    @property
    def sizes(self) -> Positions:
        """The number of trigrams of each skill."""
        return np.diff(self.starts)

    def without_templates(
        self, names: Positions, max_names: int, folder: Path, workers: WorkersConfig
    ) -> "TrigramSets":
        """These sets without the trigrams that stand under more than `max_names` different names.

        Many skills are filled into one template ("Automate … tasks via Rube MCP"): they share most of their trigrams
        and not their function. Copies of one skill share as much, but under one name, or under few. So a trigram is
        counted by the distinct `names` (a number a skill) of the skills that hold it.
        """
        folder.mkdir(parents=True)
        num_parts = -(-len(self.trigrams) // _PART)
        np.save(folder / "names.npy", names - names.min(initial=0))  # numbers from 0, which counting relies on
        count = partial(_template_places, self.folder, folder / "names.npy", num_parts, max_names)
        keep = np.ones(len(self.trigrams), dtype=bool)
        for places in map_blocks(count, range(num_parts), workers, "counting trigrams"):
            keep[places] = False
        return self._write((self._kept(start, keep) for start in range(0, len(self), BODY_BLOCK)), folder)

    def _kept(self, start: int, keep: np.ndarray) -> tuple[Positions, Trigrams]:
        """Sizes and trigrams of a block of sets after leaving out what is not to be kept."""
        bounds = self.starts[start : start + BODY_BLOCK + 1]
        block = keep[bounds[0] : bounds[-1]]
        kept_before = np.concatenate([[0], np.cumsum(block)])
        return np.diff(kept_before[bounds - bounds[0]]), self.trigrams[bounds[0] : bounds[-1]][block]


def _read_block(bodies: Path, block: int) -> tuple[Positions, Trigrams]:
    """Sizes and trigrams of one block of bodies."""
    hashes = WordHashes()
    texts = _bodies(bodies).get_batch(block).column("body")
    sets = [word_trigrams(text.as_py(), hashes) for text in texts]
    return np.array([len(one) for one in sets], dtype=np.int64), np.concatenate(sets)


def _template_places(folder: Path, names_file: Path, num_parts: int, max_names: int, part: int) -> Positions:
    """Where, among all trigrams, those of one part of the hash range stand that have more than `max_names` names."""
    sets, names = TrigramSets.open(folder), np.load(names_file, mmap_mode="r")
    width = 2**64 // num_parts + 1
    low, high = part * width, min((part + 1) * width, 2**64) - 1
    places = np.flatnonzero((sets.trigrams >= np.uint64(low)) & (sets.trigrams <= np.uint64(high)))
    order = np.argsort(sets.trigrams[places], kind="stable")
    places, found = places[order], sets.trigrams[places][order]
    first = np.flatnonzero(np.concatenate([[True], found[1:] != found[:-1]])) if len(found) else places
    sizes = np.diff(np.append(first, len(found)))
    # Only a trigram of many skills can have many names; of these few the names are counted.
    group = np.repeat(np.arange(len(first)), sizes)
    often = np.repeat(sizes > max_names, sizes)
    places, group = places[often], group[often]
    named = names[np.searchsorted(sets.starts, places, side="right") - 1]
    base = int(names.max(initial=0)) + 1
    num_names = np.bincount(np.unique(group * base + named) // base, minlength=len(first))
    return places[num_names[group] > max_names]
