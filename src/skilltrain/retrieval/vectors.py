"""Vectors kept on disk by content, so that a text is encoded once a model, by whatever process comes first."""

import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float32

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path, locked
from skilltrain.terminal import say

KEY = np.dtype("S16")
_SMALL, _MANY = 512, 64  # so many files with fewer vectors than this are joined into one
_DAMAGED = (pa.ArrowException, OSError, ValueError)


@dataclass(frozen=True)
class VectorCache:
    """The vectors of one model: parquet files {key, vector} in a folder, each written whole, then never changed.

    So any number of processes, on any number of machines that share the folder, add to it at once, and what one of
    them was killed over is not there. A damaged file is not there either, with a warning.
    """

    folder: Path
    dim: int

    @classmethod
    def open(cls, folder: Path, model_identity: str, dim: int) -> "VectorCache":
        """The cache of one model in `folder`, whose vectors have `dim` numbers; made if it is not there."""
        folder = folder.expanduser()
        try:
            (folder / model_identity).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not folder.is_dir():  # one that is there, but not ours to write to, can still be read
                raise SkilltrainError(f"cannot make the vector cache: {error.strerror}", where=folder) from error
        cache = cls(folder / model_identity, dim)
        cache._join_small_files()
        return cache

    def read(self, keys: np.ndarray) -> tuple[Bool[np.ndarray, " key"], Float32[np.ndarray, "key dim"]]:
        """(which of the distinct `keys` have a vector here, the vectors; zeros where there is none)."""
        found, vectors = np.zeros(len(keys), dtype=bool), np.zeros((len(keys), self.dim), dtype=np.float32)
        order = np.argsort(keys, kind="stable")
        for path in self._paths() if len(keys) else ():
            try:
                positions, some = self._read_file(path, keys, order)
            except FileNotFoundError:
                continue  # another process has joined it with others
            except _DAMAGED:
                say(f"warning: {path} is damaged and not used (delete it); its texts are encoded again")
                continue
            found[positions], vectors[positions] = True, some
        return found, vectors

    def add(self, keys: np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> None:
        """Keep `vectors`; they are in a file when this returns. Raises SkilltrainError if they cannot be written."""
        if len(keys):
            self._write(_table(np.asarray(keys, dtype=KEY), vectors))

    def _read_file(self, path: Path, keys: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions among `keys` that the file holds, their vectors); `order` sorts `keys`."""
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            held = _values(file, "key", KEY)
            place = order[np.minimum(np.searchsorted(keys, held, sorter=order), len(keys) - 1)]
            rows = np.flatnonzero(keys[place] == held)
            if not len(rows):
                return place[rows], np.empty((0, self.dim), np.float32)
            return place[rows], _values(file, "vector", np.dtype(np.float32)).reshape(len(held), self.dim)[rows]

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


def _table(keys: np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> pa.Table:
    """The columns `key` and `vector`, which share their memory with the arrays."""
    flat = np.ascontiguousarray(vectors, dtype=np.float32)
    key = pa.Array.from_buffers(pa.binary(KEY.itemsize), len(keys), [None, pa.py_buffer(keys.tobytes())])
    return pa.table({"key": key, "vector": pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])})


def _values(file: pq.ParquetFile, column: str, kind: np.dtype) -> np.ndarray:
    """The numbers or keys of a column, one after the other."""
    array = file.read([column]).column(column).combine_chunks()
    array = array if isinstance(array, pa.Array) else array.chunk(0)
    values = array.flatten() if kind != KEY else array
    return np.frombuffer(values.buffers()[1], kind)[values.offset :][: len(values)]
