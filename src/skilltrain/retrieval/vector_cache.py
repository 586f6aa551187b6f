"""Vectors kept on disk by content, so that a text is encoded once per model."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json

KEY_BYTES = 16


@dataclass
class VectorCache:
    """Append-only files MODEL.keys and MODEL.vectors; a torn tail (kill -9, full disk) is ignored and overwritten.

    Several processes may share a cache: each appends under a lock, after what the others have added.
    """

    stem: Path
    dim: int = 0
    rows: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, model_identity: str) -> "VectorCache":
        """The cache of one model in `folder`, created if it is not there."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SkilltrainError(f"cannot make the vector cache: {error.strerror}", where=folder) from error
        cache = cls(folder / model_identity)
        header = cache._file("json")
        if header.is_file():
            cache.dim = read_json(header)["dim"]
            cache._load_keys()
        return cache

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Float32[np.ndarray, "dim"]]:
        """key → vector for those of `keys` that are here."""
        found = [key for key in dict.fromkeys(keys) if key in self.rows]
        if not found:
            return {}
        vectors = np.memmap(self._file("vectors"), dtype=np.float32, mode="r", shape=(len(self.rows), self.dim))
        return {key: np.array(vectors[self.rows[key]]) for key in found}

    def add(self, keys: Sequence[bytes], vectors: Float32[np.ndarray, "key dim"]) -> None:
        """Keep `vectors`; they are in the files when this returns. `keys` are distinct; known ones are left out.

        Vectors are written first: a key stands only for a whole vector.
        """
        try:
            with self._locked():
                if not self._file("json").is_file():
                    write_json(self._file("json"), {"dim": int(vectors.shape[1])})
                self.dim = int(vectors.shape[1])
                self._load_keys()
                count, new = len(self.rows), [i for i, key in enumerate(keys) if key not in self.rows]
                data = np.ascontiguousarray(vectors[new], np.float32).tobytes()
                _write_at(self._file("vectors"), count * self.dim * 4, data)
                _write_at(self._file("keys"), count * KEY_BYTES, b"".join(keys[i] for i in new))
        except OSError as error:
            raise SkilltrainError(f"cannot write the vector cache: {error.strerror}", where=self.stem) from error
        self.rows |= {keys[i]: count + position for position, i in enumerate(new)}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._file("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the process dies
            yield

    def _load_keys(self) -> None:
        keys, vectors = self._file("keys"), self._file("vectors")
        if not keys.is_file() or not vectors.is_file():
            return
        whole = min(keys.stat().st_size // KEY_BYTES, vectors.stat().st_size // (4 * self.dim))
        data = keys.read_bytes()[: whole * KEY_BYTES]
        self.rows = {data[i * KEY_BYTES : (i + 1) * KEY_BYTES]: i for i in range(whole)}

    def _file(self, suffix: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{suffix}")


def _write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)
        file.flush()
