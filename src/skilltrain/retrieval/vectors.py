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
from skilltrain.files import atomic_path
from skilltrain.terminal import say

KEY = np.dtype("S16")
_SMALL, _MANY = 2**20, 64  # so many files of fewer bytes than this are joined into one
_DAMAGED = (pa.ArrowException, OSError, ValueError)

Positions = Int64[np.ndarray, " some"]
Parts = Iterator[tuple[Positions, Float32[np.ndarray, "some dim"]]]
"""Positions in what was asked for, and the vectors there: part by part as they are found or made."""


@dataclass(frozen=True)
class VectorCache:
    """The vectors of one model: parquet files {key, vector} in a folder, each written whole, then never changed.

    So any number of processes, on any number of machines that share the folder, add to it at once, and what one of
    them was killed over is not there. A damaged file is not there either, with a warning.
    """

    folder: Path

    def make(self) -> None:
        """Make the folder if it is not there, before anything is encoded, or paid, for it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SkilltrainError(
                f"cannot make the vector cache: {error.strerror}", where=self.folder
            ) from error

    def read(self, keys: np.ndarray) -> Parts:
        """Yield (positions among the distinct `keys`, their vectors) of what each file has of them."""
        for path in self._paths() if len(keys) else ():
            try:
                part = _read_file(path, keys)
            except FileNotFoundError:
                continue  # another process has joined it with others
            except _DAMAGED:
                say(
                    f"warning: {path} is damaged and not used (delete it); its texts are encoded again"
                )
                continue
            yield part

    def missing(self, keys: np.ndarray) -> Positions:
        return _others(len(keys), self.read(keys))

    def add(self, keys: np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> None:
        """Keep `vectors`; they are in a file when this returns. Raises SkilltrainError if they cannot be written."""
        if not len(keys):
            return
        content = pa.py_buffer(np.asarray(keys, dtype=KEY).tobytes())
        column = pa.Array.from_buffers(pa.binary(KEY.itemsize), len(keys), [None, content])
        flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
        self._write(
            pa.table(
                {"key": column, "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])}
            )
        )
        with suppress(
            SkilltrainError, *_DAMAGED
        ):  # whoever still reads a file that goes encodes its texts anew
            small = [path for path in self._paths() if path.stat().st_size < _SMALL]
            if len(small) >= _MANY:
                self._write(
                    pa.concat_tables(
                        [pq.read_table(one, page_checksum_verification=True) for one in small]
                    )
                )
                for path in small:
                    path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    def _write(self, table: pa.Table) -> None:
        try:
            with atomic_path(self.folder / f"{uuid.uuid4().hex}.parquet") as temporary:
                pq.write_table(
                    table,
                    temporary,
                    compression="none",
                    use_dictionary=False,
                    write_page_checksum=True,
                )
        except SkilltrainError as error:
            fix = "what was written before is kept, and is not encoded again"
            raise SkilltrainError(f"vectors: {error.what}", where=self.folder, fix=fix) from error


def _read_file(path: Path, keys: np.ndarray) -> tuple[Positions, Float32[np.ndarray, "some dim"]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        places = places_in(keys, np.array(file.read(["key"]).column("key").to_pylist(), dtype=KEY))
        rows = np.flatnonzero(places >= 0)
        dim = file.schema_arrow.field("vector").type.list_size
        if not len(rows):
            return rows, np.empty((0, dim), np.float32)
        chunks = [
            chunk.flatten().to_numpy() for chunk in file.read(["vector"]).column("vector").chunks
        ]
    return places[rows], np.concatenate(chunks).reshape(len(places), dim)[rows]


def _others(num: int, parts: Iterable[tuple[Positions, np.ndarray]]) -> Positions:
    is_missing = np.ones(num, dtype=bool)
    for positions, _ in parts:
        is_missing[positions] = False
    return np.flatnonzero(is_missing)


def cached_vectors(
    texts: Sequence[str],
    max_tokens: int,
    cache: VectorCache | None,
    encode: Callable[[list[str], Positions], Parts],
) -> Float32[np.ndarray, "text dim"]:
    """The vector of each text, cut to `max_tokens`: from the cache, else from `encode`, and then kept.

    `encode` gets distinct texts, longest first, so that memory peaks at the start, and their positions among all.
    Raises SkilltrainError for vectors of another length than those in the cache.
    """
    distinct, first, which = np.unique(
        text_keys(texts, max_tokens), return_index=True, return_inverse=True
    )
    parts = [*cache.read(distinct)] if cache else []
    missing = _others(len(distinct), parts)
    missing = missing[longest_first([texts[int(place)] for place in first[missing]])]
    new = [texts[int(place)] for place in first[missing]]
    if cache and new:
        cache.make()
    for part, vectors in encode(new, first[missing]) if new else ():
        if parts and vectors.shape[1] != parts[0][1].shape[1]:
            what = (
                f"the model gives vectors of {vectors.shape[1]} numbers, not {parts[0][1].shape[1]}"
            )
            raise SkilltrainError(
                what, where=cache and cache.folder, fix="it has changed: name another cache folder"
            )
        if cache:
            cache.add(distinct[missing[part]], vectors)
        parts.append((missing[part], vectors))
    if not parts:
        return np.empty((0, 0), dtype=np.float32)
    found = np.empty((len(distinct), parts[0][1].shape[1]), dtype=np.float32)
    for positions, vectors in parts:
        found[positions] = vectors
    return found[which]


def text_keys(texts: Sequence[str], max_tokens: int) -> np.ndarray:
    """A key of each text's content and its token limit."""
    digests = [
        hashlib.sha256(f"{max_tokens} {text}".encode("utf-8", "replace")).digest() for text in texts
    ]
    return np.frombuffer(b"".join(digest[: KEY.itemsize] for digest in digests), KEY)


def places_in(keys: np.ndarray, wanted: np.ndarray) -> Positions:
    """Where each of `wanted` stands among `keys`; -1 where it does not."""
    order = np.argsort(keys, kind="stable")
    places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[places] == wanted, places, -1)


def longest_first(texts: Sequence[str]) -> Int64[np.ndarray, " text"]:
    """Positions in the order of encoding."""
    return np.argsort([-len(text) for text in texts], kind="stable")
