"""Vectors kept on disk by content, so that a text is encoded once a model, by whatever process comes first."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.vector_block import KEY, Block, read_block, write_block
from skilltrain.terminal import say

_SMALL, _MANY = 512, 64  # so many files with fewer vectors than this are joined into one
_AT_ONCE = 1 << 24  # bytes of vectors read from a file at a time
_LEFTOVER_SECONDS = 24 * 3600


class VectorCache:
    """The vectors of one model: files FOLDER/MODEL/NAME.vectors, each written whole, then renamed, then never changed.

    So there is nothing to lock: any number of processes, on any number of machines that share the folder, add to it at
    once, and what one of them was killed over is not there. Every vector has a checksum: a damaged one is not there
    either.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self.folder, self.dim = folder, dim
        self._blocks: list[Block] = []
        # Sorted keys with (block, row) of each; every part is more than twice as long as the next, so they are few.
        self._parts: list[tuple[np.ndarray, Int64[np.ndarray, "key 2"]]] = []

    @classmethod
    def open(cls, folder: Path, model_identity: str, dim: int) -> "VectorCache":
        """The cache of one model in `folder`, whose vectors have `dim` numbers; made if it is not there."""
        cache = cls(folder / model_identity, dim)
        try:
            cache.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not folder.is_dir():  # one that is there, but not ours to write to, can still be read
                raise SkilltrainError(f"cannot make the vector cache: {error.strerror}", where=folder) from error
        cache._remove_leftovers()
        cache.refresh()
        return cache

    def refresh(self) -> None:
        """Take notice of what other processes have added."""
        known = {block.path for block in self._blocks}
        for path in sorted(self.folder.glob("*.vectors")):
            if path not in known and (block := read_block(path, self.dim)) is not None:
                self._take(block)

    def places(self, keys: Sequence[bytes] | np.ndarray) -> Int64[np.ndarray, "key 2"]:
        """For each key where its vector is, for `read`; -1, -1 for those that are not here."""
        wanted = np.asarray(keys, dtype=KEY)
        found = np.full((len(wanted), 2), -1, dtype=np.int64)
        for known, places in self._parts:
            row = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            here = known[row] == wanted
            found[here] = places[row[here]]
        return found

    def read(
        self, places: Int64[np.ndarray, "vector 2"]
    ) -> Iterator[tuple[Int64[np.ndarray, " found"], Float32[np.ndarray, "found dim"]]]:
        """Yield (positions in `places`, their vectors), some at a time, of those that are there and whole.

        What is damaged is taken out of the cache after that.
        """
        blocks, damaged = self._blocks, []
        for number in np.unique(places[:, 0]):
            block, here = blocks[int(number)], np.flatnonzero(places[:, 0] == number)
            for start in range(0, len(here), at_once := max(1, _AT_ONCE // (4 * self.dim))):
                some = here[start : start + at_once]
                vectors, whole = block.read(places[some, 1])
                yield some[whole], vectors[whole]
                damaged += [] if whole.all() else [block]
        if damaged:
            self._take_out({block.path for block in damaged})

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Float32[np.ndarray, " dim"]]:
        """key → vector for those of `keys` that are here."""
        places = self.places(keys)
        known = np.flatnonzero(places[:, 0] >= 0)
        parts = self.read(places[known])
        return {keys[int(known[n])]: vector for some, vectors in parts for n, vector in zip(some, vectors, strict=True)}

    def add(self, keys: Sequence[bytes] | np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> None:
        """Keep `vectors`; they are in a file when this returns. Raises SkilltrainError if they cannot be written."""
        if not len(keys):
            return
        self._write(np.asarray(keys, dtype=KEY), vectors)
        small = [block.path for block in self._blocks if len(block.keys) < _SMALL]
        if len(small) >= _MANY:
            self._rewrite(set(small))

    def _remove_leftovers(self) -> None:
        """Delete files that processes were killed over, once nobody can be writing them any more."""
        for path in self.folder.glob(".*.partial"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                    path.unlink()

    def _write(self, keys: np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> None:
        try:
            self._take(write_block(self.folder / f"{uuid.uuid4().hex}.vectors", keys, vectors))
        except SkilltrainError as error:
            fix = "what was written before is kept, and is not encoded again"
            raise SkilltrainError(f"vectors: {error.what}", where=self.folder, fix=fix) from error

    def _take(self, block: Block) -> None:
        """Make a block's keys known."""
        order = np.argsort(block.keys, kind="stable")
        rows = np.stack([np.full(len(order), len(self._blocks)), order], axis=1)
        self._blocks.append(block)
        self._parts += [(block.keys[order], rows)] if len(order) else []
        while len(self._parts) > 1 and len(self._parts[-2][0]) <= 2 * len(self._parts[-1][0]):
            (keys, places), (more_keys, more_places) = self._parts[-2:]
            keys, first = np.unique(np.concatenate([keys, more_keys]), return_index=True)
            self._parts[-2:] = [(keys, np.concatenate([places, more_places])[first])]

    def _rewrite(self, paths: set[Path]) -> None:
        """One block for what is whole in several; they go when it is there, and no reader ever misses a vector."""
        if not (blocks := [block for block in self._blocks if block.path in paths]):
            return
        read = [block.read(np.arange(len(block.keys))) for block in blocks]
        keys = np.concatenate([block.keys[whole] for block, (_, whole) in zip(blocks, read, strict=True)])
        keys, first = np.unique(keys, return_index=True)
        vectors = np.concatenate([vectors[whole] for vectors, whole in read])[first]
        if len(keys):
            self._write(keys, vectors)
        for block in blocks:
            block.path.unlink(missing_ok=True)
        self._forget(paths)

    def _forget(self, paths: set[Path]) -> None:
        kept, self._blocks, self._parts = [block for block in self._blocks if block.path not in paths], [], []
        for block in kept:
            self._take(block)

    def _take_out(self, paths: set[Path]) -> None:
        """Write blocks anew without their damaged vectors; where that cannot be, use nothing of them."""
        gone = {path for path in paths if not path.exists()}  # another process has joined them with others
        for path in paths - gone:
            say(f"warning: {path}: vectors in it are damaged and encoded again")
        try:
            self._rewrite(paths - gone)
        except (SkilltrainError, OSError):
            self._forget(paths)
        self._forget(gone)
        self.refresh()
