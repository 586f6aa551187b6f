"""One file of the vector cache: keys, checksums and vectors, written once."""

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt32

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path
from skilltrain.terminal import say

KEY = np.dtype("S16")
_MAGIC = b"sktvec01"
_HEAD = struct.Struct("<8sIII")  # magic, numbers a vector, vectors, CRC-32 of the keys and checksums that follow
_A_ROW = KEY.itemsize + 4
_ALIGN = 64


@dataclass(frozen=True)
class Block:
    """Whose vectors a file holds, where they begin, and a checksum of each."""

    path: Path
    dim: int
    offset: int
    keys: np.ndarray
    checks: UInt32[np.ndarray, " vector"]

    def read(self, rows: Int64[np.ndarray, " row"]) -> tuple[Float32[np.ndarray, "row dim"], Bool[np.ndarray, " row"]]:
        """(the vectors of `rows`, which of them are whole); none is where the file is gone."""
        try:
            shape = (len(self.keys), self.dim)
            vectors = np.asarray(np.memmap(self.path, np.float32, "r", self.offset, shape)[rows])
        except (OSError, ValueError):  # gone, or cut since
            return np.zeros((len(rows), self.dim), dtype=np.float32), np.zeros(len(rows), dtype=bool)
        return vectors, _checks(vectors) == self.checks[rows]


def write_block(path: Path, keys: np.ndarray, vectors: Float32[np.ndarray, "key dim"]) -> Block:
    """Write a block; the file is there whole when this returns or, with an error, not at all."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    checks = _checks(vectors)
    table = keys.tobytes() + checks.tobytes()
    head = _HEAD.pack(_MAGIC, vectors.shape[1], len(vectors), zlib.crc32(table))
    offset = _offset(len(vectors))
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write((head + table).ljust(offset, b"\0"))
        file.write(vectors.data)
    return Block(path, vectors.shape[1], offset, keys, checks)


def read_block(path: Path, dim: int) -> Block | None:
    """The block in a file, or what is left of one that was cut; None, and a warning, where its head is damaged.

    None alone where the file is gone: another process has joined it with others.
    """
    try:
        with path.open("rb") as file:
            size, head = path.stat().st_size, file.read(_HEAD.size)
            magic, found_dim, num, crc = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
            table = file.read(num * _A_ROW) if magic == _MAGIC and num * _A_ROW < size else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SkilltrainError(f"cannot read the vector cache: {error.strerror}", where=path) from error
    if found_dim != dim or not table or zlib.crc32(table) != crc:
        say(f"warning: {path} is damaged and not used; its texts are encoded again")
        return None
    left = max(0, min(num, (size - _offset(num)) // (4 * dim)))
    keys, checks = np.frombuffer(table, KEY, num), np.frombuffer(table, np.uint32, num, num * KEY.itemsize)
    return Block(path, dim, _offset(num), keys[:left], checks[:left])


def _offset(num: int) -> int:
    """Where the vectors begin."""
    return -(-(_HEAD.size + num * _A_ROW) // _ALIGN) * _ALIGN


def _checks(vectors: Float32[np.ndarray, "row dim"]) -> UInt32[np.ndarray, " row"]:
    return np.fromiter((zlib.crc32(vector) for vector in vectors), np.uint32, len(vectors))
