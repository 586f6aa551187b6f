"""A router on disk: all that a request needs, ready to be memory-mapped, in a folder that readers and one writer share.

The folder holds one generation, `index-N`, and a pointer to it, `router.json`. A writer (see `indexing`) makes the next
generation beside, then moves the pointer in one step and removes the one before. A reader that has opened a generation
keeps it: its files stay mapped after they are removed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import feather

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import inside, read_json
from skilltrain.models.loading import model_fingerprint
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.late import TokenVectors
from skilltrain.retrieval.lexical import BM25Index
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.retrieval.rankers import RankerConfig, key_of, parts_of
from skilltrain.routing.answer import Calibration

Part = BM25Index | ChunkVectors | TokenVectors
_PARTS: dict[str, type[Part]] = {
    "lexical": BM25Index, "dense": ChunkVectors, "api": ChunkVectors, "late": TokenVectors,
}  # fmt: skip
POINTER, RECORD, SKILLS_FILE = "router.json", "index.json", "skills.arrow"
NAME = re.compile(r"\.?index-(\d{1,9})(?:\.partial)?")
"""Of a generation, and of what becomes one."""
AGAIN = "run skilltrain index again"
_TRIES = 20  # a writer may remove a generation while it is opened, but hardly so often


class IndexRecord(Config):
    """What a generation says of itself. `models` has a fingerprint for each source of the rankers, `files` sizes."""

    pool: str
    rankers: list[dict[str, Any]]
    models: dict[str, str]
    calibration: Calibration | None
    num_skills: int
    files: dict[str, int]
    skilltrain: str

    def system(self, router: Path) -> SystemConfig:
        """What ranks, where the router lies in the folder `router`."""
        rankers = with_paths(self.rankers, partial(_placed, router))
        return validate(SystemConfig, {"name": "router", "rankers": rankers}, router)


class StoredSkills(Mapping[str, Skill]):
    """The skills of a table by id, in its order; a skill is made when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._rows = {skill_id: row for row, skill_id in enumerate(table.column("skill_id").to_pylist())}

    def __getitem__(self, skill_id: str) -> Skill:
        return Skill(**self._table.slice(self._rows[skill_id], 1).to_pylist()[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True)
class Index:
    """A generation, opened. `keys` tell the skills apart by content; `parts` is what each ranker holds of the pool, by
    `key_of`, memory-mapped.
    """

    folder: Path
    record: IndexRecord
    system: SystemConfig
    skills: Mapping[str, Skill]
    keys: np.ndarray
    parts: Mapping[str, Part]

    @classmethod
    def open(cls, router: Path) -> "Index":
        """The generation that the folder `router` points to. Raises SkilltrainError where it is not whole."""
        for _ in range(_TRIES):
            folder = generation(router)
            try:
                return _open(folder)
            except (SkilltrainError, OSError, ValueError, pa.ArrowException) as error:
                if generation(router) != folder:
                    continue  # a writer has removed it meanwhile
                if isinstance(error, SkilltrainError):
                    raise
                what = f"is half-written or damaged: {reason_of(error)}"
                raise SkilltrainError(what, where=folder, fix=AGAIN) from error
        raise SkilltrainError("changes faster than it can be opened", where=router)

    @property
    def pool(self) -> Path:
        """Where the skills were read from."""
        return Path(_placed(self.folder.parent, self.record.pool))

    def check_models(self) -> None:
        """Raise SkilltrainError where a model is not the one that the index was made with."""
        for source, known in self.record.models.items():
            if model_fingerprint(_placed(self.folder.parent, source)) != known:
                raise SkilltrainError(f"is of another model: {source} has changed", where=self.folder, fix=AGAIN)


def generation(router: Path) -> Path:
    """The folder of the generation that is in use. Raises SkilltrainError where there is no router."""
    if not (router / POINTER).is_file():
        fix = "make one with skilltrain fit or skilltrain index"
        raise SkilltrainError("holds no router", where=router, fix=fix)
    pointer = read_json(router / POINTER)
    name = pointer.get("index") if isinstance(pointer, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SkilltrainError("names no index", where=router / POINTER, fix=AGAIN)
    return router / name


def _open(folder: Path) -> Index:
    """The generation in a folder. Raises OSError, ValueError or Arrow's errors where it is not whole."""
    if not (folder / RECORD).is_file():
        raise OSError(f"it lacks {RECORD}")
    record = validate(IndexRecord, read_json(folder / RECORD), folder / RECORD)
    for name, size in record.files.items():
        file = inside(folder, name, folder / RECORD)
        if not file.is_file() or file.stat().st_size != size:
            raise OSError(f"{name} is not there, or not of {size} bytes")
    system = record.system(folder.parent)
    skills = StoredSkills(feather.read_table(folder / SKILLS_FILE, memory_map=True))
    keys = np.load(folder / "keys.npy", mmap_mode="r")
    parts: dict[str, Part] = {}
    for (key, config), name in kept_parts(system).items():
        parts[key] = _PARTS[config.kind].load(folder / name)
    if {len(skills), len(keys), *(part.num_skills for part in parts.values())} != {record.num_skills}:
        raise ValueError("its parts are of different pools")
    return Index(folder, record, system, skills, keys, parts)


def kept_parts(system: SystemConfig) -> dict[tuple[str, RankerConfig], str]:
    """(key, ranker) → folder, of each ranker that holds something of the pool."""
    parts = {key_of(part): part for part in parts_of(system.rankers) if part.kind in _PARTS}
    return {pair: f"part-{number}" for number, pair in enumerate(parts.items(), 1)}


def with_paths(value: Any, change: Callable[[str], str]) -> Any:
    """Settings of rankers with the paths in them changed."""
    if isinstance(value, list):
        return [with_paths(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: change(item) if key in ("source", "cache") and isinstance(item, str) else with_paths(item, change)
        for key, item in value.items()
    }


def _placed(router: Path, name: str) -> str:
    """The inverse of `_stored`. Raises SkilltrainError for a path that leaves the router's folder."""
    return str(inside(router, name[2:], router)) if name.startswith("./") else name
