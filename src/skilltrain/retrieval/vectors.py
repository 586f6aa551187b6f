"""A cache of vectors on disk, so that each text is encoded once per model by any process."""

import hashlib
import uuid
import zipfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
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
EncodedTexts = Iterator[tuple[Positions, Vectors]]
"""Positions of some texts and their vectors, then those of the next texts."""
_shared_vectors: ContextVar[dict[Hashable, Vectors]] = ContextVar("vectors of queries by key")


@dataclass(frozen=True)
class VectorCache:
    """The vectors of one model, by the content of the texts.

    The folder has many files. Each is written once and never changed, so all processes and machines
    that share the folder may add files at once. A file that a killed process did not finish is
    never read. A damaged file is skipped with a warning.
    """

    folder: Path

    def make(self) -> None:
        """Make the folder. Call it before anything is encoded or paid for."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot make the vector cache: {error.strerror}"
            raise SkilltrainError("cannot-write", problem, where=self.folder) from error

    def read(self, keys: np.ndarray) -> tuple[Bool[np.ndarray, " key"], Vectors]:
        """Read the vectors of distinct keys.

        Args:
            keys: [key] Keys of texts, from `text_keys`.

        Returns:
            Whether the cache holds each key, and the vector of each key. Vectors of keys that the
            cache lacks are undefined.
        """
        is_cached = np.zeros(len(keys), dtype=bool)
        vectors = np.empty((len(keys), 0), dtype=np.float32)
        if not len(keys):
            return is_cached, vectors
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path) as file:
                    # For each row of the file, the position of its key in `keys`, or -1.
                    positions = positions_in(keys, file["keys"])
                    # Rows of the file whose keys are wanted. Their vectors alone are kept.
                    needed_rows = np.flatnonzero(positions >= 0)
                    if not vectors.size:  # the first file tells the length of the vectors
                        vectors = np.empty((len(keys), file["dim"]), dtype=np.float32)
                    if len(needed_rows):
                        needed_positions = positions[needed_rows]
                        vectors[needed_positions] = file["vectors"][needed_rows]
                        is_cached[needed_positions] = True
            except FileNotFoundError:
                continue  # another process has merged it
            except _DAMAGED:
                problem = "is damaged and not used (delete it); its texts are encoded again"
                say(f"warning: {path} {problem}")
        return is_cached, vectors

    def missing(self, keys: np.ndarray) -> Positions:
        """Return the positions of the distinct `keys` that have no vector."""
        is_cached, _ = self.read(keys)
        return np.flatnonzero(~is_cached)

    def add(self, keys: np.ndarray, vectors: Vectors) -> None:
        """Write `vectors` to disk, and merge small files if there are many.

        Args:
            keys: [text] Keys of texts, from `text_keys`.
            vectors: [text, dim] Vector of each text.

        Raises:
            SkilltrainError: The vectors cannot be written.
        """
        if not len(keys):
            return
        self._write(keys, vectors)
        # A merge may fail (full disk, damaged file, another process). The next call tries again.
        with suppress(SkilltrainError, *_DAMAGED):
            paths = sorted(self.folder.glob("*.npz"))
            # Each call adds a file. Many small files would make `read` slow.
            small = [path for path in paths if path.stat().st_size < _SMALL_BYTES]
            if len(small) >= _MAX_SMALL_FILES:
                self._merge(small)

    def _merge(self, paths: Sequence[Path]) -> None:
        """Write the vectors of several files into one new file, and delete the old files.

        Args:
            paths: Files of the cache. Each holds keys (hashes of texts) and a vector for each key.
        """
        keys: list[np.ndarray] = []
        vectors: list[np.ndarray] = []  # for each file: [key, dim]
        for path in paths:
            with np.load(path) as file:
                keys.append(file["keys"])
                vectors.append(file["vectors"])
        self._write(np.concatenate(keys), np.concatenate(vectors))
        # Delete the old files only now, so that no vector is lost if the process is stopped.
        # Another process may have deleted a file already.
        for path in paths:
            path.unlink(missing_ok=True)

    def _write(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        """Write vectors into a new file.

        Args:
            keys: [text] Key of each text.
            vectors: [text, dim] Vector of each text.
        """
        path = self.folder / f"{uuid.uuid4().hex}.npz"
        try:
            # The file gets its name when it is complete. `dim` tells the length of the vectors
            # without loading them.
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
    encode: Callable[[list[str]], EncodedTexts],
) -> Vectors:
    """Return the vector of each text, from the cache or from `encode`.

    Args:
        texts: The texts. Equal texts are encoded once.
        max_tokens: Number of tokens to which `encode` cuts texts.
        cache: Cache to read, and to which vectors are added as soon as they are encoded; None for
            no cache.
        encode: Encodes distinct texts. Long ones come first, so that memory peaks at the start.

    Raises:
        SkilltrainError: New vectors have another length than those in the cache.
    """
    # Equal texts have equal keys. Number the distinct keys: text i has the key of number
    # `row_of_text[i]`, which will be the row of its vector.
    all_keys = text_keys(texts, max_tokens)
    keys, first_positions, row_of_text = np.unique(all_keys, return_index=True, return_inverse=True)
    is_cached = np.zeros(len(keys), dtype=bool)
    vectors = np.empty((len(keys), 0), dtype=np.float32)  # [distinct key, dim]
    if cache:
        is_cached, vectors = cache.read(keys)
    if is_cached.all():
        return vectors[row_of_text]

    # Encode the texts of the other rows, long ones first.
    missing_rows = np.flatnonzero(~is_cached)
    missing_texts = [texts[int(position)] for position in first_positions[missing_rows]]
    order = longest_first(missing_texts)
    missing_rows = missing_rows[order]
    missing_texts = [missing_texts[int(position)] for position in order]
    if cache:
        cache.make()
    # `encode` yields the vectors of some texts at a time, with their positions in `missing_texts`.
    for positions, encoded in encode(missing_texts):
        dim = encoded.shape[1]
        is_dim_known = vectors.shape[1] > 0
        if not is_dim_known:  # these are the first vectors, and the cache had none
            vectors = np.empty((len(keys), dim), dtype=np.float32)
        if dim != vectors.shape[1]:
            problem = f"the model gives vectors of {dim} numbers, not {vectors.shape[1]}"
            fix = "it has changed: name another cache folder"
            where = cache.folder if cache else None
            raise SkilltrainError("changed-model", problem, where=where, fix=fix)
        rows = missing_rows[positions]
        if cache:
            cache.add(keys[rows], encoded)
        vectors[rows] = encoded
    return vectors[row_of_text]


@contextmanager
def shared_encoding() -> Iterator[None]:
    """Let the rankers that run in this block share the vectors of queries.

    The vectors are dropped at the end of the outermost block. So the next run encodes its queries
    again, and its time can be measured. Threads do not share vectors.
    """
    # The outermost block begins with an empty dict, and the blocks inside it use the same dict.
    token = _shared_vectors.set(_shared_vectors.get({}))
    try:
        yield
    finally:
        _shared_vectors.reset(token)


def encode_once(key: Hashable, encode: Callable[[], Vectors]) -> Vectors:
    """Return the vectors of a key.

    In a block of `shared_encoding`, `encode` is called only once for each key. Outside a block, it
    is called every time.

    Args:
        key: The texts, and everything else that decides their vectors.
        encode: Encodes the texts of the key.
    """
    vectors_by_key = _shared_vectors.get({})  # outside a block, a new dict that is not kept
    if key not in vectors_by_key:
        vectors_by_key[key] = encode()
    return vectors_by_key[key]


def text_keys(texts: Iterable[str], max_tokens: int) -> np.ndarray:
    """Return a key of each text, [text], made from its content and its token limit.

    Texts that are cut at different limits have different vectors, and so different keys.
    """
    contents = (f"{max_tokens} {text}".encode(errors="replace") for text in texts)
    digests = [hashlib.sha256(content).digest()[: KEY.itemsize] for content in contents]
    return np.frombuffer(b"".join(digests), KEY)


def positions_in(keys: np.ndarray, searched: np.ndarray) -> Positions:
    """Return the position in `keys` of each key of `searched`, or -1 if `keys` lacks it."""
    order = np.argsort(keys, kind="stable")
    # Find in the sorted keys the place where each searched key would be inserted.
    insertions = np.searchsorted(keys, searched, sorter=order)
    # The place may be behind the last key. Then the last key is compared, and differs.
    positions = order[np.minimum(insertions, len(keys) - 1)]
    return np.where(keys[positions] == searched, positions, -1)


def longest_first(texts: Sequence[str]) -> Int64[np.ndarray, " text"]:
    """Return the positions of the texts in the order in which they are encoded."""
    return np.argsort([-len(text) for text in texts], kind="stable")
