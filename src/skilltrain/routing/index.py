"""A router on disk: all that a request needs, ready to be memory-mapped, in a folder that readers and one writer share.

The folder holds one generation, `index-N`, and a pointer to it, `router.json`. A writer (see `indexing`) makes the next
generation beside, then moves the pointer in one step and removes the one before. A reader that has opened a generation
keeps it: its files stay mapped after they are removed.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
from skilltrain.retrieval.rankers import FuseConfig, RankerConfig, key_of, parts_of
from skilltrain.routing.answer import Calibration
from skilltrain.version import __version__

_PARTS = {"lexical": BM25Index, "dense": ChunkVectors, "api": ChunkVectors, "late": TokenVectors}
POINTER, RECORD, SKILLS_FILE, KEYS_FILE = "router.json", "index.json", "skills.arrow", "keys.npy"
_NAME = re.compile(r"\.?index-(\d{1,9})(?:\.partial)?")  # of a generation, and of what becomes one
_AGAIN = "run skilltrain index again"


class IndexRecord(Config):
    """What a generation says of itself. `models` has a fingerprint for each source of the rankers, `files` sizes."""

    pool: str
    rankers: list[dict[str, Any]]
    models: dict[str, str]
    calibration: Calibration | None
    num_skills: int
    files: dict[str, int]
    skilltrain: str

    @classmethod
    def of(
        cls,
        router: Path,
        system: SystemConfig,
        num_skills: int,
        pool: Path,
        calibration: Calibration | None,
    ) -> "IndexRecord":
        """What the next generation says of itself, but for its files; with the calibration if that applies."""
        stored = partial(_stored, router)
        rankers: list[dict[str, Any]] = []
        for ranker in system.rankers:
            weights = (
                {"weights": list(ranker.leg_weights())} if isinstance(ranker, FuseConfig) else {}
            )
            rankers.append(_with_paths(ranker.model_dump(mode="json"), stored) | weights)
        sources = {
            source for part in parts_of(system.rankers) if (source := getattr(part, "source", None))
        }
        models = {stored(source): model_fingerprint(source) for source in sorted(sources)}
        if calibration and (calibration.system, calibration.models) != (rankers, models):
            calibration = None
        values = {
            "pool": stored(str(pool)),
            "rankers": rankers,
            "models": models,
            "calibration": calibration,
        }
        return cls(**values, num_skills=num_skills, files={}, skilltrain=__version__)

    def system(self, router: Path) -> SystemConfig:
        """What ranks, where the router lies in the folder `router`."""
        rankers = _with_paths(self.rankers, partial(_placed, router))
        return validate(SystemConfig, {"name": "router", "rankers": rankers}, router)


class StoredSkills(Mapping[str, Skill]):
    """The skills of a table by id, in its order; a skill is made when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._rows = {
            skill_id: row for row, skill_id in enumerate(table.column("skill_id").to_pylist())
        }

    def __getitem__(self, skill_id: str) -> Skill:
        return Skill(**self._table.slice(self._rows[skill_id], 1).to_pylist()[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True)
class Held:
    """What a router answers from: what ranks, the skills by id, and where these were read from."""

    system: SystemConfig
    skills: Mapping[str, Skill]
    pool: Path | None


@dataclass(frozen=True)
class Index(Held):
    """A generation, opened: a key of each skill's content, and by `key_of` what each ranker holds of the pool."""

    pool: Path
    folder: Path
    record: IndexRecord
    keys: np.ndarray
    parts: Mapping[str, Any]

    @classmethod
    def open(cls, router: Path) -> "Index":
        """The generation that the folder `router` points to, which must be whole.

        Raises SkilltrainError where it is not whole.
        """
        while True:
            folder = generation(router)
            try:
                return _open(folder)
            except (SkilltrainError, OSError, ValueError, pa.ArrowException) as error:
                if generation(router) != folder:
                    continue  # a writer has removed it meanwhile
                if isinstance(error, SkilltrainError):
                    raise
                what = f"is half-written or damaged: {reason_of(error)}"
                raise SkilltrainError(what, where=folder, fix=_AGAIN) from error

    def check_models(self) -> None:
        """Raise SkilltrainError where a model is not the one that the index was made with."""
        for source, known in self.record.models.items():
            if model_fingerprint(_placed(self.folder.parent, source)) != known:
                raise SkilltrainError(
                    f"is of another model: {source} has changed", where=self.folder, fix=_AGAIN
                )


def generation(router: Path) -> Path:
    """The folder of the generation that is in use. Raises SkilltrainError where there is no router."""
    if not (router / POINTER).is_file():
        raise SkilltrainError(
            "holds no router", where=router, fix="make one with skilltrain fit or skilltrain index"
        )
    pointer = read_json(router / POINTER)
    name = str(pointer.get("index")) if isinstance(pointer, dict) else ""
    if not _NAME.fullmatch(name):
        raise SkilltrainError("names no index", where=router / POINTER, fix=_AGAIN)
    return router / name


def sweep(router: Path) -> Path:
    """Remove generations that are not in use; the folder of the next one. What is still held open goes next time."""
    found = {
        folder: int(name[1])
        for folder in router.iterdir()
        if (name := _NAME.fullmatch(folder.name))
    }
    with suppress(SkilltrainError):
        for folder in found.keys() - {generation(router)}:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in router.glob(".index-*.lock"):  # of writers that were killed
            lock.unlink(missing_ok=True)
    return router / f"index-{1 + max(found.values(), default=0)}"


def _open(folder: Path) -> Index:
    if not (folder / RECORD).is_file():
        raise OSError(f"it lacks {RECORD}")
    record = validate(IndexRecord, read_json(folder / RECORD), folder / RECORD)
    for name, size in record.files.items():
        file = inside(folder, name, folder / RECORD)
        if not file.is_file() or file.stat().st_size != size:
            raise OSError(f"{name} is not there, or not of {size} bytes")
    system = record.system(folder.parent)
    skills = StoredSkills(feather.read_table(folder / SKILLS_FILE, memory_map=True))
    keys = np.load(folder / KEYS_FILE, mmap_mode="r")
    parts = {
        key_of(part): _PARTS[part.kind].load(folder / name)
        for name, part in kept_parts(system).items()
    }
    if {len(skills), len(keys), *(part.num_skills for part in parts.values())} != {
        record.num_skills
    }:
        raise ValueError("its parts are of different pools")
    return Index(
        system, skills, Path(_placed(folder.parent, record.pool)), folder, record, keys, parts
    )


def kept_parts(system: SystemConfig) -> dict[str, RankerConfig]:
    """Folder → ranker, of each that holds something of the pool."""
    parts = {key_of(part): part for part in parts_of(system.rankers) if part.kind in _PARTS}
    return {f"part-{number}": part for number, part in enumerate(parts.values(), 1)}


def _with_paths(value: Any, change: Callable[[str], str]) -> Any:
    """Settings of rankers with the paths in them changed."""
    if isinstance(value, list):
        return [_with_paths(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: change(item)
        if key in ("source", "cache") and isinstance(item, str)
        else _with_paths(item, change)
        for key, item in value.items()
    }


def _stored(router: Path, name: str) -> str:
    """A path below the router's folder as `./…`, so that it may be moved; another one as a whole path."""
    path, root = Path(name).expanduser().resolve(), router.resolve()
    if not path.exists():
        return name
    return f"./{path.relative_to(root)}" if path.is_relative_to(root) else str(path)


def _placed(router: Path, name: str) -> str:
    """The inverse of `_stored`. Raises SkilltrainError for a path that leaves the router's folder."""
    return str(inside(router, name[2:], router)) if name.startswith("./") else name
