"""A router on disk: all that a request needs, in a folder that readers and one writer share.

The folder holds one generation, `index-N`, and a pointer to it, `router.json`. A writer (see `indexing`) makes the next
generation beside, then moves the pointer in one step and removes the one before. A reader has what it opened in memory
(token vectors: an open file), and notices by `stamp` that another generation or router took its place. Nothing is
memory-mapped: if such a file is cut, the process ends. Absolute paths lie in `local.json` beside the pointer, and the
index has names for them, so the rest may be shared.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import feather
from pydantic import Field

from skilltrain.config import Config, validate
from skilltrain.data.pool.read import skill_folders
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import FileStamp, file_stamps, path_inside, read_json, read_local
from skilltrain.formats import ROUTER
from skilltrain.models.loading import model_fingerprint
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.rankers import RankerConfig, parts_of
from skilltrain.serving.answer import Calibration
from skilltrain.version import __version__

POINTER, RECORD, SKILLS_FILE, KEYS_FILE = "router.json", "index.json", "skills.arrow", "keys.npy"
_NAME = re.compile(r"\.?index-(\d{1,9})(?:\.partial)?")  # of a generation, and of what becomes one
_AGAIN = "run skilltrain index again"
_MAKE_AGAIN = "make it again with skilltrain fit, or skilltrain index pool=… rankers=… out=…"
_LOCAL = "local:"  # begins the name of a path outside the router's folder
AllowedServers = Annotated[
    tuple[str, ...], Field(description="servers that the router's rankers may send texts to")
]


class Contents(NamedTuple):
    """Skills of a router by the folder or file that they come from, and the folders that `serve` watches."""

    pool: Path
    skills: Mapping[Path, Sequence[Skill]]
    watched: Collection[Path]


class IndexRecord(Config):
    """What a generation says of itself. `models` has a fingerprint for each source of the rankers, `files` sizes.

    `sources` has the number of skills of each folder or file that they come from; the skills are in that order.
    """

    pool: str
    sources: dict[str, int]
    watched: list[str]
    rankers: list[dict[str, Any]]
    models: dict[str, str]
    calibration: Calibration | None
    files: dict[str, int]
    format: int = ROUTER.number
    skilltrain: str

    @classmethod
    def of(
        cls,
        router: Path,
        paths: dict[str, str],
        system: SystemConfig,
        contents: Contents,
        calibration: Calibration | None,
    ) -> "IndexRecord":
        """What the next generation says of itself, but for its files; with the calibration if that applies.

        `paths` gets the paths outside the router's folder by the names that the record has for them.
        """
        stored = partial(_stored, router, paths)
        rankers: list[dict[str, Any]] = []
        for ranker in system.rankers:
            rankers.append(_with_paths(ranker.written_out().model_dump(mode="json"), stored))
        parts = parts_of(system.rankers)
        sources = {part.model_source for part in parts if part.model_source}
        models = {stored(source): model_fingerprint(source) for source in sorted(sources)}
        if calibration and (calibration.system, calibration.models) != (rankers, models):
            calibration = None
        values = {
            "pool": stored(str(contents.pool)),
            "sources": {stored(str(path)): len(skills) for path, skills in contents.skills.items()},
            "watched": [stored(str(path)) for path in contents.skills if path in contents.watched],
            "rankers": rankers,
            "models": models,
            "calibration": calibration,
        }
        return cls(**values, files={}, skilltrain=__version__)

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


@dataclass(frozen=True, eq=False)
class Held:
    """What a router answers from: what ranks, the skills by id, and the folders that may hold their files."""

    system: SystemConfig
    skills: Mapping[str, Skill]
    folders: Sequence[Path]


@dataclass(frozen=True, eq=False)
class Index(Held):
    """A generation, opened: a key of each skill's content, and by `key` what each ranker holds of the pool."""

    pool: Path
    folder: Path
    record: IndexRecord
    keys: np.ndarray
    parts: Mapping[str, Any]
    stamp: set[FileStamp]

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
                code = "damaged-router"
                what, where = f"is half-written or damaged: {reason_of(error)}", folder
                if isinstance(error, SkilltrainError):
                    code, what, where = error.code, error.what, error.where
                fix = getattr(error, "fix", "") or _AGAIN
                raise SkilltrainError(code, what, where=where, fix=fix) from error

    def contents(self, skills: Iterable[Skill]) -> Contents:
        """Return skills by the sources that the index has for their ids; new ones are of the first source."""
        sources = self.folders[: len(self.record.sources)]
        repeated = map(repeat, sources, self.record.sources.values())
        source_of = dict(zip(self.skills, chain.from_iterable(repeated), strict=True))
        groups: dict[Path, list[Skill]] = {source: [] for source in sources}
        for skill in skills:
            groups[source_of.get(skill.skill_id, sources[0])].append(skill)
        watched = [Path(_placed(self.folder.parent, name)) for name in self.record.watched]
        return Contents(self.pool, groups, watched)

    def is_current(self) -> bool:
        """Whether the router's folder still holds this generation, in the very files that were opened."""
        folder = generation(self.folder.parent)
        return folder == self.folder and file_stamps(folder) == self.stamp

    def check_models(self) -> None:
        """Raise SkilltrainError where a model is not the one that the index was made with."""
        for name, known in self.record.models.items():
            source = _placed(self.folder.parent, name)
            if model_fingerprint(source) != known:
                raise SkilltrainError(
                    "changed-model",
                    f"is of another model: {source} has changed",
                    where=self.folder,
                    fix=_AGAIN,
                )


def check_servers(system: SystemConfig, allowed: Collection[str] | None, where: Path) -> None:
    """Check the servers that the rankers of a router would send texts to, before any ranker is opened.

    Raises SkilltrainError for a server that is not `allowed` (None: all are), and for a variable of its key that is not
    called `…_API_KEY`.
    """
    for part in parts_of(system.rankers):
        server = part.server
        if server is None:
            continue
        url, variable = server.base_url, server.api_key_env
        if allowed is not None and not {url, f"{url}/"} & {*allowed}:
            fix = f"if you trust it: --allow-server {url}, or allow_servers=[{url}] of a stage"
            raise SkilltrainError(
                "untrusted-server", f"this router sends texts to {url}", where=where, fix=fix
            )
        if not variable.endswith("_API_KEY"):
            what = f"this router reads the environment variable {variable}"
            raise SkilltrainError(
                "untrusted-server",
                what,
                where=where,
                fix="only names that end in _API_KEY are read",
            )


def generation(router: Path) -> Path:
    """The folder of the generation that is in use. Raises SkilltrainError where there is no router."""
    if not (router / POINTER).is_file():
        raise SkilltrainError(
            "no-router",
            "holds no router",
            where=router,
            fix="make one with skilltrain fit or skilltrain index",
        )
    pointer = read_json(router / POINTER)
    name = str(pointer.get("index")) if isinstance(pointer, dict) else ""
    if not _NAME.fullmatch(name):
        raise SkilltrainError(
            "damaged-router", "names no index", where=router / POINTER, fix=_AGAIN
        )
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
    stamp = file_stamps(folder)
    stored = read_json(folder / RECORD)
    ROUTER.check(stored, folder, _MAKE_AGAIN)
    record = validate(IndexRecord, stored, folder / RECORD)
    for name, size in record.files.items():
        file = path_inside(folder, name, folder / RECORD)
        if not file.is_file() or file.stat().st_size != size:
            raise OSError(f"{name} is not there, or not of {size} bytes")
    system = record.system(folder.parent)
    skills = StoredSkills(feather.read_table(folder / SKILLS_FILE, memory_map=False))
    keys = np.load(folder / KEYS_FILE)
    parts = {
        part.key: part.stored_part.load(folder / name) for name, part in kept_parts(system).items()
    }
    if {len(skills), len(keys), *(part.num_skills for part in parts.values())} != {
        sum(record.sources.values())
    }:
        raise ValueError("its parts are of different pools")
    pool, *sources = (Path(_placed(folder.parent, name)) for name in (record.pool, *record.sources))
    folders = [*sources, *skill_folders(pool)]
    return Index(system, skills, folders, pool, folder, record, keys, parts, stamp)


def kept_parts(system: SystemConfig) -> dict[str, RankerConfig]:
    """Folder → ranker, of each that holds something of the pool."""
    parts = {part.key: part for part in parts_of(system.rankers) if part.stored_part}
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


def _stored(router: Path, paths: dict[str, str], name: str) -> str:
    """A path below the router's folder as `./…`, so that it may be moved; another one as a name that `paths` gets."""
    given, root = Path(name).expanduser(), router.resolve()
    if not (given.is_absolute() or given.exists()):
        return name
    path = given.resolve()
    if path.is_relative_to(root):
        return f"./{path.relative_to(root)}"
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    stored = f"{_LOCAL}{path.name}-{digest}"
    paths[stored] = str(path)
    return stored


def _placed(router: Path, name: str) -> str:
    """The inverse of `_stored`; a name that this machine does not know is looked for in the router's folder.

    Raises SkilltrainError for a path that leaves the router's folder.
    """
    if name.startswith(_LOCAL):
        name = read_local(router).get(name, f"./{name}")
    return str(path_inside(router.resolve(), name[2:], router)) if name.startswith("./") else name
