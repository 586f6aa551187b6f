"""What may stand in an archive from a stranger: limits, names, and the reason where something may not."""

import re
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Literal

from pydantic import Field

from skilltrain.config import Config

MAX_PATH_BYTES, MAX_NAME_BYTES, MAX_DEPTH = 1024, 255, 32
RATIO_FREE_BYTES = 2**20  # a small file may be as compressible as it likes
_DRIVE = re.compile(r"[A-Za-z]:")
_ONLY_DOTS = re.compile(r"[. ]{2,}")
# Look-alikes of the slash that NFKC leaves alone, and the marks that turn the direction of what is shown.
_SLASHES = frozenset("\u2044\u2215\u29f8\u29f9")
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class Refused:
    """Something in a registry that did not become a skill, and why."""

    skill_id: str
    filter: str
    reason: str
    value: float | None = None


class ArchiveLimits(Config):
    """How much an archive may unpack to; beyond it is refused whole."""

    max_unpacked_bytes: int = Field(default=200_000_000, ge=1, description="bytes that an archive may unpack to")
    max_file_bytes: int = Field(default=50_000_000, ge=1, description="a larger file in an archive is left out")
    max_files: int = Field(default=10_000, ge=1, description="files and folders in an archive")
    max_ratio: float = Field(
        default=200.0, gt=1, description="unpacked bytes for a packed one, where it is more than 1 MiB that is unpacked"
    )


class ArchiveError(Exception):
    """An archive of which nothing is kept; `filter`, `reason` and `value` go into DROPPED."""

    def __init__(self, filter: str, reason: str, value: float | None = None) -> None:
        self.filter, self.reason, self.value = filter, reason, value
        super().__init__(f"{filter}: {reason}")


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of an archive. `num_bytes` is what it declares, and `open` never gives more."""

    name: str
    kind: Literal["file", "folder", "link", "special_file"]
    num_bytes: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]


def check_totals(num_files: int, num_bytes: int, num_packed: int, limits: ArchiveLimits) -> None:
    """Raises ArchiveError where an archive of `num_packed` bytes holds, or declares to hold, too much."""
    if num_files > limits.max_files:
        raise ArchiveError("bomb", f"holds more than {limits.max_files:,} files", float(num_files))
    if num_bytes > limits.max_unpacked_bytes:
        reason = f"unpacks to more than {limits.max_unpacked_bytes:,} bytes"
        raise ArchiveError("bomb", reason, float(num_bytes))
    if num_bytes > RATIO_FREE_BYTES and num_bytes > limits.max_ratio * num_packed:
        reason = f"unpacks to more than {limits.max_ratio:g} times its {num_packed:,} bytes"
        raise ArchiveError("bomb", reason, num_bytes / max(1, num_packed))


def path_parts(name: str) -> tuple[str, ...]:
    """The folders and the file that a member's name leads through; empty for the archive's own root.

    Raises ArchiveError for a name that leads out of a folder on any system, or that is not what it looks like.
    """
    if fault := _name_fault(name):
        raise ArchiveError("unsafe_name", f"holds the name {name[:120]!a}, which {fault}")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def path_key(parts: tuple[str, ...]) -> str:
    """A path that is equal for names which some file system takes for the same: case and Unicode form do not count."""
    return unicodedata.normalize("NFKC", "/".join(parts)).casefold()


def _name_fault(name: str) -> str:
    """What is wrong with a name, as the end of a sentence; empty if nothing is."""
    plain = unicodedata.normalize("NFKC", name)
    parts = plain.split("/")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        return "holds a control character or is no text"
    if _DIRECTIONS & set(name):
        return "turns the direction of its letters"
    if "\\" in plain:
        return "holds a backslash"
    if plain.startswith("/"):
        return "is an absolute path"
    if _DRIVE.match(plain):
        return "starts with a drive letter"
    if plain.count("/") != name.count("/") or _SLASHES & set(name):
        return "holds a look-alike of a slash"
    if any(_ONLY_DOTS.fullmatch(part) for part in parts):
        return "leads to a folder above"
    too_long = any(len(part.encode()) > MAX_NAME_BYTES for part in name.split("/"))
    if too_long or len(name.encode()) > MAX_PATH_BYTES or len(parts) > MAX_DEPTH:
        return "is too long or too deep"
    return ""
