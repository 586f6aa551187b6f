"""Vectors kept on disk by content, so that a text is encoded once per model, by whatever process comes first."""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path, locked
from skilltrain.terminal import say

KEY = np.dtype("S16")
_SMALL, _MANY = 512, 64  # so many files with fewer vectors than this are joined into one
_DAMAGED = (pa.ArrowException, OSError, ValueError)

Positions = Int64[np.ndarray, " some"]
Part = tuple[Positions, Float32[np.ndarray, "some dim"]]
"""Positions in what was asked for, and the vectors there."""
Parts = Iterator[Part]
"""Part by part as they are found or made."""


@dataclass(frozen=True)
class VectorCache:
    """The vectors of one model: parquet files {key, vector} in a folder, each written whole, then never changed.

    So any number of processes, on any number of machines that share the folder, add to it at once, and what one of
    them was killed over is not there. A damaged file is not there either, with a warning.
    """

    folder: Path

    @classmethod
    def open(cls, folder: Path, model_identity: str) -> "VectorCache":
        """The cache of one model in `folder`; made if it is not there."""
        folder = folder.expanduser()
        try:
            (folder / model_identity).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not folder.is_dir():  # one that is there, but not ours to write to, can still be read
                raise SkilltrainError(f"cannot make the vector cache: {error.strerror}", where=folder) from error
        cache = cls(folder / model_identity)
        cache._join_small_files()
        return cache

    def dim(self) -> int | None:
        """The length of the vectors here; None where there is none."""
        for path in self._paths():
            with suppress(*_DAMAGED):
                return pq.read_schema(path).field("vector").type.list_size
        return None

    def read(self, keys: np.ndarray) -> Parts:
        """Yield (positions among the distinct `keys`, their vectors) of what each file has of them."""
        for path in self._paths() if len(keys) else ():
            try:
                part = _read_file(path, keys)
            except FileNotFoundError:
                continue  # another process has joined it with others
            except _DAMAGED:
                say(f"warning: {path} is damaged and not used (delete it); its texts are encoded again")
                continue
            yield part

    def missing(self, keys: np.ndarray) -> Positions:
        """Positions of those of the distinct `keys` that have no vector here."""
        return _others(len(keys), self.read(keys))

    def add(self, keys: np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> None:
        """Keep `vectors`; they are in a file when this returns. Raises SkilltrainError if they cannot be written."""
        if len(keys):
            content = pa.py_buffer(np.asarray(keys, dtype=KEY).tobytes())
            column = pa.Array.from_buffers(pa.binary(KEY.itemsize), len(keys), [None, content])
            flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
            lists = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
            self._write(pa.table({"key": column, "vector": lists}))

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    def _write(self, table: pa.Table) -> None:
        try:
            with atomic_path(self.folder / f"{uuid.uuid4().hex}.parquet") as temporary:
                pq.write_table(table, temporary, compression="none", use_dictionary=False, write_page_checksum=True)
        except SkilltrainError as error:
            fix = "what was written before is kept, and is not encoded again"
            raise SkilltrainError(f"vectors: {error.what}", where=self.folder, fix=fix) from error

    def _join_small_files(self) -> None:
        """One file for many small ones, which go when it is there; whoever still reads one of these encodes anew."""
        small: list[Path] = []
        for path in self._paths():
            with suppress(*_DAMAGED):
                small += [path] if pq.read_metadata(path).num_rows < _SMALL else []
        if len(small) < _MANY:
            return
        with suppress(SkilltrainError, *_DAMAGED), locked(self.folder / ".joining"):  # else another process is at it
            self._write(pa.concat_tables([pq.read_table(path, page_checksum_verification=True) for path in small]))
            for path in small:
                path.unlink()


def _read_file(path: Path, keys: np.ndarray) -> Part:
    """(positions among `keys` of what the file holds of them, the vectors)."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        places = places_in(keys, np.array(file.read(["key"]).column("key").to_pylist(), dtype=KEY))
        rows = np.flatnonzero(places >= 0)
        dim = file.schema_arrow.field("vector").type.list_size
        if not len(rows):
            return rows, np.empty((0, dim), np.float32)
        chunks = [chunk.flatten().to_numpy() for chunk in file.read(["vector"]).column("vector").chunks]
    return places[rows], np.concatenate(chunks).reshape(len(places), dim)[rows]


def _others(num: int, parts: Iterable[Part]) -> Positions:
    """The positions up to `num` that are in none of `parts`."""
    is_missing = np.ones(num, dtype=bool)
    for positions, _ in parts:
        is_missing[positions] = False
    return np.flatnonzero(is_missing)


@dataclass(frozen=True)
class OrderedTexts:
    """Distinct texts to encode, longest first: memory peaks at the start, and texts of like length stand together.

    `keys` are as `text_keys` gives them; `positions` say where each text stands among all that were given.
    """

    texts: Sequence[str]
    keys: np.ndarray
    positions: Int64[np.ndarray, " text"]
    max_tokens: int
    description: str


def cached_vectors(
    texts: Sequence[str],
    max_tokens: int,
    description: str,
    cache: VectorCache | None,
    encode: Callable[[OrderedTexts], Parts],
) -> Float32[np.ndarray, "text dim"]:
    """The vector of each text, cut to `max_tokens`: from the cache, else from `encode`, and then kept in the cache.

    Each distinct text is encoded once, in the order of `OrderedTexts`.
    """
    keys, lengths = text_keys(texts, max_tokens)
    distinct, first, which = np.unique(keys, return_index=True, return_inverse=True)
    parts = [*cache.read(distinct)] if cache else []
    missing = _others(len(distinct), parts)
    missing = missing[longest_first(lengths[first[missing]])]
    places = first[missing]
    work = OrderedTexts([texts[int(place)] for place in places], distinct[missing], places, max_tokens, description)
    for part, vectors in encode(work) if len(missing) else ():
        if cache:
            cache.add(work.keys[part], vectors)
        parts.append((missing[part], vectors))
    if not parts:
        return np.empty((0, 0), dtype=np.float32)
    rows = np.empty(len(distinct), dtype=np.int64)
    found = np.concatenate([positions for positions, _ in parts])
    rows[found] = np.arange(len(found))
    return np.concatenate([vectors for _, vectors in parts])[rows[which]]


def text_keys(texts: Sequence[str], max_tokens: int) -> tuple[np.ndarray, Int64[np.ndarray, " text"]]:
    """(a key of each text's content and its token limit, its characters)."""
    digests = [hashlib.sha256(f"{max_tokens} {text}".encode("utf-8", "replace")).digest() for text in texts]
    keys = b"".join(digest[: KEY.itemsize] for digest in digests)
    return np.frombuffer(keys, KEY), np.array([len(text) for text in texts], dtype=np.int64)


def places_in(keys: np.ndarray, wanted: np.ndarray) -> Positions:
    """Where each of `wanted` stands among `keys`; -1 where it does not."""
    order = np.argsort(keys, kind="stable")
    places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[places] == wanted, places, -1)


def longest_first(lengths: Int64[np.ndarray, " text"]) -> Int64[np.ndarray, " text"]:
    """Positions in the order of encoding."""
    return np.argsort(-lengths, kind="stable")
