"""Vectors kept on disk by content, so that any process encodes each text once per model."""

import hashlib
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path
from skilltrain.terminal import say

KEY = np.dtype("S16")
_SMALL_BYTES = 2**20  # files below this size are merged
_MAX_SMALL_FILES = 64
_DAMAGED = (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile)

Positions = Int64[np.ndarray, " some"]
Vectors = Float32[np.ndarray, "text dim"]
Parts = Iterator[tuple[Positions, Vectors]]
"""Positions of texts and their vectors, part by part."""


@dataclass(frozen=True)
class VectorCache:
    """The vectors of one model in a folder of files, each written whole and never changed.

    Any number of processes, on all machines that share the folder, may add to it at once. Half
    written files of a killed process are never read. A damaged file is skipped with a warning.
    """

    folder: Path

    def make(self) -> None:
        """Make the folder, before anything is encoded or paid for."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot make the vector cache: {error.strerror}"
            raise SkilltrainError("cannot-write", problem, where=self.folder) from error

    def read(self, keys: np.ndarray) -> tuple[Bool[np.ndarray, " key"], Vectors]:
        """Return which of the distinct `keys` the cache holds, and a vector for each key.

        Vectors of keys that it does not hold are undefined.
        """
        is_known = np.zeros(len(keys), dtype=bool)
        vectors = np.empty((len(keys), 0), dtype=np.float32)
        for path in self._paths() if len(keys) else ():
            try:
                with np.load(path) as file:
                    positions = positions_in(keys, file["keys"])
                    rows = np.flatnonzero(positions >= 0)
                    vectors = vectors if vectors.size else np.empty((len(keys), file["dim"]), "f4")
                    if len(rows):
                        vectors[positions[rows]] = file["vectors"][rows]
                        is_known[positions[rows]] = True
            except FileNotFoundError:
                continue  # another process has merged it
            except _DAMAGED:
                problem = "is damaged and not used (delete it); its texts are encoded again"
                say(f"warning: {path} {problem}")
        return is_known, vectors

    def missing(self, keys: np.ndarray) -> Positions:
        """Return the positions of the distinct `keys` that have no vector."""
        return np.flatnonzero(~self.read(keys)[0])

    def add(self, keys: np.ndarray, vectors: Vectors) -> None:
        """Write `vectors` to disk. Raises SkilltrainError if that fails."""
        if not len(keys):
            return
        self._write(keys, vectors)
        # A merge may fail (full disk, damaged file, another process): a later one will do.
        with suppress(SkilltrainError, *_DAMAGED):
            small = [path for path in self._paths() if path.stat().st_size < _SMALL_BYTES]
            if len(small) >= _MAX_SMALL_FILES:
                self._merge(small)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.npz"))

    def _merge(self, paths: Sequence[Path]) -> None:
        keys: list[np.ndarray] = []
        vectors: list[np.ndarray] = []
        for path in paths:
            with np.load(path) as file:
                keys.append(file["keys"])
                vectors.append(file["vectors"])
        self._write(np.concatenate(keys), np.concatenate(vectors))
        for path in paths:
            path.unlink(missing_ok=True)

    def _write(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        path = self.folder / f"{uuid.uuid4().hex}.npz"
        try:
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                np.savez(file, keys=keys, vectors=vectors, dim=vectors.shape[1])
        except SkilltrainError as error:
            fix = "what was written before is kept, and is not encoded again"
            raise SkilltrainError(
                error.code, f"vectors: {error.problem}", where=self.folder, fix=fix
            ) from error


def cached_vectors(
    texts: Sequence[str],
    max_tokens: int,
    cache: VectorCache | None,
    encode: Callable[[list[str]], Parts],
) -> Vectors:
    """Return the vector of each text, cut to `max_tokens`, from the cache or from `encode`.

    Args:
        encode: Takes distinct texts, long ones first so that memory peaks at the start. What it
            yields is kept in the cache at once.

    Raises:
        SkilltrainError: New vectors have another length than those in the cache.
    """
    keys = text_keys(texts, max_tokens)
    distinct, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    is_known = np.zeros(len(distinct), dtype=bool)
    vectors = np.empty((len(distinct), 0), dtype=np.float32)
    if cache:
        is_known, vectors = cache.read(distinct)

    missing = np.flatnonzero(~is_known)
    missing = missing[longest_first([texts[int(n)] for n in firsts[missing]])]
    new = [texts[int(n)] for n in firsts[missing]]
    if cache and new:
        cache.make()
    for part, encoded in encode(new) if new else ():
        dim = encoded.shape[1]
        if not vectors.size:
            vectors = np.empty((len(distinct), dim), dtype=np.float32)
        if dim != vectors.shape[1]:
            problem = f"the model gives vectors of {dim} numbers, not {vectors.shape[1]}"
            fix = "it has changed: name another cache folder"
            raise SkilltrainError("changed-model", problem, where=cache and cache.folder, fix=fix)
        if cache:
            cache.add(distinct[missing[part]], encoded)
        vectors[missing[part]] = encoded
    return vectors[inverse]


def text_keys(texts: Iterable[str], max_tokens: int) -> np.ndarray:
    """Return a key of each text's content and its token limit."""
    digests: list[bytes] = []
    for text in texts:
        digest = hashlib.sha256(f"{max_tokens} {text}".encode("utf-8", "replace")).digest()
        digests.append(digest[: KEY.itemsize])
    return np.frombuffer(b"".join(digests), KEY)


def positions_in(keys: np.ndarray, wanted: np.ndarray) -> Positions:
    """Return the position of each of `wanted` in `keys`, or -1 if `keys` lacks it."""
    order = np.argsort(keys, kind="stable")
    insertions = np.searchsorted(keys, wanted, sorter=order)
    positions = order[np.minimum(insertions, len(keys) - 1)]
    return np.where(keys[positions] == wanted, positions, -1)


def longest_first(texts: Sequence[str]) -> Int64[np.ndarray, " text"]:
    """Return the positions of the texts in the order in which they are encoded."""
    return np.argsort([-len(text) for text in texts], kind="stable")
