"""Skills that lie in a file and are read one by one, so that a pool need not fit into memory."""

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from io import RawIOBase
from pathlib import Path
from typing import overload

import numpy as np
from jaxtyping import Int64

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, read_batches, read_columns, skills_from_table

SKILL_BLOCK = 256  # skills in memory at once while all of them pass through
_TEXTS = tuple(field.name for field in fields(Skill))[1:]

Spans = Int64[np.ndarray, "skill 2"]
"""Where each skill begins in a file, and its length, in bytes."""


class StoredSkills(Sequence[Skill]):
    """Skills in an order of their own, each read from a file when it is asked for.

    In memory are the ids and 16 bytes a skill. A file that is deleted serves on until this object is gone.
    """

    def __init__(self, file: Path, skill_ids: Sequence[str], spans: Spans) -> None:
        self.file, self.skill_ids, self.spans = file, skill_ids, spans
        self._opened = file.open("rb")

    @classmethod
    def write(cls, skills: Iterable[Skill], file: Path) -> "StoredSkills":
        """Write `skills` to `file` as they come. Raises SkilltrainError where the disk does not take them."""
        skill_ids, sizes = list[str](), array("q")
        with file.open("wb", buffering=0) as opened:
            for skill in skills:
                text = json.dumps([getattr(skill, name) for name in _TEXTS], ensure_ascii=False)
                data = text.encode("utf-8", "surrogatepass")
                try:
                    _write(data, opened)
                except OSError as error:
                    what = f"cannot keep the skills while they are read: {error.strerror}"
                    raise SkilltrainError(what, where=file.parent) from error
                skill_ids.append(skill.skill_id)
                sizes.append(len(data))
        ends = np.cumsum(np.array(sizes, dtype=np.int64))
        return cls(file, skill_ids, np.stack([ends - sizes, sizes], axis=1, dtype=np.int64))

    @classmethod
    def of_table(cls, pool: Path, folder: Path) -> "StoredSkills":
        """The skills of a SKILLS table, in its order, from a file in `folder`."""
        read_columns(pool, SKILLS, ["skill_id"])  # no id stands twice
        return cls.write(skills_of_table(pool), folder / "skills.jsonl")

    def select(self, places: Sequence[int], skill_ids: Sequence[str] | None = None) -> "StoredSkills":
        """The skills at `places`, in this order, under `skill_ids` or their own."""
        ids = [self.skill_ids[place] for place in places] if skill_ids is None else skill_ids
        return StoredSkills(self.file, ids, self.spans[np.asarray(places, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.skill_ids)

    @overload
    def __getitem__(self, place: int) -> Skill: ...
    @overload
    def __getitem__(self, place: slice) -> list[Skill]: ...
    def __getitem__(self, place: int | slice) -> Skill | list[Skill]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        return _read(self._opened.fileno(), self.spans[place], self.skill_ids[place])

    @property
    def num_blocks(self) -> int:
        """How many `blocks` there are."""
        return -(-len(self) // SKILL_BLOCK)

    def blocks(self) -> Iterator[list[Skill]]:
        """Yield all skills in order, `SKILL_BLOCK` at a time."""
        return (self[start : start + SKILL_BLOCK] for start in range(0, len(self), SKILL_BLOCK))

    def span_blocks(self) -> list[Spans]:
        """The places of the same blocks in the file, for workers to `read_stored`."""
        return [self.spans[start : start + SKILL_BLOCK] for start in range(0, len(self), SKILL_BLOCK)]


def skills_of_table(pool: Path) -> Iterator[Skill]:
    """Yield the skills of a SKILLS table in its order, with few in memory at once."""
    for rows in read_batches(pool, SKILLS, SKILLS.schema.names, SKILL_BLOCK):
        yield from skills_from_table(rows)


def _write(data: bytes, opened: RawIOBase) -> None:
    """Write all of `data`; a nearly full disk takes a part before it refuses the rest."""
    rest = memoryview(data)
    while rest:
        rest = rest[opened.write(rest) :]


def read_stored(file: Path, spans: Spans) -> Iterator[Skill]:
    """Yield skills of a file of `StoredSkills`, without their ids: for a worker, to which few bytes are sent."""
    with file.open("rb") as opened:
        for span in spans:
            yield _read(opened.fileno(), span, "")


def _read(opened: int, span: Int64[np.ndarray, "2"], skill_id: str) -> Skill:
    start, size = span.tolist()
    return Skill(skill_id, *json.loads(os.pread(opened, size, start).decode("utf-8", "surrogatepass")))
