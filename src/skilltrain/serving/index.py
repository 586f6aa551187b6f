"""The folder of a router, which any number of readers and one writer share.

- `index-N` is a generation: all files that a request needs. The pointer `router.json` names the
  generation in use.
- The writer (see `indexing`) makes the next generation, replaces the pointer in one step, and then
  removes the previous generation.
- A reader loads a generation into memory, except token vectors, which it reads from an open file.
  `Index.is_current` tells whether a writer has replaced it. Nothing is memory-mapped: a process
  crashes when a file that it has mapped is cut.
- `local.json` has the absolute paths. All other files name them by its keys, so the folder can be
  shared without it.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import feather
from pydantic import Field

from skilltrain.config import Config, validate
from skilltrain.data.screening.findings import read_findings
from skilltrain.data.screening.rules import Flag
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import (
    FileStamp,
    cache_folder,
    file_stamps,
    fingerprint,
    path_inside,
    read_json,
    read_local,
)
from skilltrain.formats import ROUTER as ROUTER_FORMAT
from skilltrain.models.loading import model_fingerprint
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.rankers import RankerConfig, flatten_rankers, name_rankers
from skilltrain.serving.answer import Calibration
from skilltrain.terminal import say
from skilltrain.texts import printable
from skilltrain.version import __version__

POINTER = "router.json"
RECORD = "index.json"
SKILLS_FILE = "skills.arrow"
KEYS_FILE = "keys.npy"
DOWNLOADS = "routers"  # name of the user's cache of routers from the Hub
MAX_HASHED_BYTES = 256 * 2**20  # larger files hold token vectors, and hashing them takes seconds
# The folder of a generation with its number, finished (index-3) or not (.index-3.partial).
_GENERATION_NAME = re.compile(r"\.?index-(\d{1,9})(?:\.partial)?")
_RUN_AGAIN = "run skilltrain index again"
_MAKE_AGAIN = "make it again with skilltrain fit, or skilltrain index pool=… rankers=… out=…"
LOCAL_PREFIX = "local:"  # prefix of the keys of local.json
_MODEL_PATHS = ("source", "cache")  # settings of rankers: a model, and a folder for its vectors
_PROMPT_PATHS = ("prompt", "specificity_prompt")  # settings of rankers: files of prompts
_PATH_SETTINGS = (*_MODEL_PATHS, *_PROMPT_PATHS)
AllowedServers = Annotated[
    tuple[str, ...], Field(description="servers that the router's rankers may send texts to")
]


class Contents(NamedTuple):
    """Skills of a router.

    Attributes:
        pool: Pool as it was set.
        skills: Skills by the folder or file that they were read from.
        watched: Folders that `serve` watches.
    """

    pool: Path
    skills: Mapping[Path, Sequence[Skill]]
    watched: Collection[Path]

    def all_skills(self) -> list[Skill]:
        """Return the skills of all sources."""
        return list(chain.from_iterable(self.skills.values()))


class IndexRecord(Config):
    """Description of a generation, in its file `index.json`.

    Attributes:
        sources: Number of skills by the folder or file that they were read from. The skills are
            stored in this order.
        models: Fingerprint of each model by its source.
        files: Size in bytes of each file of the generation.
        digests: Fingerprint of each file up to `MAX_HASHED_BYTES`. Earlier versions wrote none.
    """

    pool: str
    sources: dict[str, int]
    watched: list[str]
    rankers: list[dict[str, Any]]
    models: dict[str, str]
    calibration: Calibration | None
    files: dict[str, int]
    digests: dict[str, str] = Field(default_factory=dict)
    format: int = ROUTER_FORMAT.number
    skilltrain: str

    @classmethod
    def create(
        cls,
        router: Path,
        local_paths: dict[str, str],
        system: SystemConfig,
        contents: Contents,
        calibration: Calibration | None,
    ) -> "IndexRecord":
        """Return the record of the next generation, in which `files` is still empty.

        Args:
            router: Folder of the router.
            local_paths: Content of `local.json`. The method adds paths outside the router's folder.
            system: Rankers of the router.
            contents: Skills of the router.
            calibration: Calibration for the record. It is left out if it does not apply.
        """
        # A function that turns a path into its form in the record. It may add to `local_paths`.
        stored_path = partial(_to_stored_path, router, local_paths)
        # Store all values, so that new defaults do not change the router.
        rankers = []
        for ranker in system.rankers:
            settings = ranker.with_default_values().model_dump(mode="json")
            # Make `cache` absolute: `stored_path` takes a relative path that does not exist yet for
            # the name of a model.
            settings = _change_paths(settings, _absolute_path, keys=("cache",))
            rankers.append(_change_paths(settings, stored_path))
        # Rankers without a model, such as BM25, have the source None.
        sources = {ranker.model_source for ranker in flatten_rankers(system.rankers)}
        models = {}
        for source in sorted(filter(None, sources)):
            models[stored_path(source)] = model_fingerprint(source)
        if calibration and not _applies(calibration, system, rankers, models):
            calibration = None

        pool = stored_path(str(contents.pool))
        # The skills are stored source after source, so their numbers tell the source of each skill.
        num_skills_by_source: dict[str, int] = {}
        watched: list[str] = []
        for path, skills in contents.skills.items():
            num_skills_by_source[stored_path(str(path))] = len(skills)
            if path in contents.watched:
                watched.append(stored_path(str(path)))

        return cls(
            pool=pool,
            sources=num_skills_by_source,
            watched=watched,
            rankers=rankers,
            models=models,
            calibration=calibration,
            files={},
            skilltrain=__version__,
        )

    @property
    def identity(self) -> str:
        """Hash of the rankers and of their models. It depends neither on paths nor on skills."""
        # A path differs between machines, so the fingerprint of the model takes its place. The
        # folder of a cache changes no ranking.
        rankers = _change_paths(self.rankers, lambda path: self.models.get(path, ""), _MODEL_PATHS)
        return hashlib.sha256(json.dumps(rankers, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def prompt_files(self) -> list[str]:
        """Files of the rankers' prompts, as the record stores their paths."""
        return _paths_in(self.rankers, _PROMPT_PATHS)

    def system(self, router: Path) -> SystemConfig:
        """Return the rankers, with the paths that they have in the folder `router`."""
        rankers = _change_paths(self.rankers, partial(from_stored_path, router))
        return validate(SystemConfig, {"name": "router", "rankers": rankers}, router)


class StoredSkills(Mapping[str, Skill]):
    """Skills of a table by id, in the order of its rows. A skill is made when it is read."""

    def __init__(self, table: pa.Table, roots: Sequence[Path | None]) -> None:
        """Keep the table.

        Args:
            table: SKILLS table.
            roots: Folder or file that each skill was read from; None if unknown.
        """
        self._table = table
        self._roots = roots
        self._rows = {
            skill_id: row for row, skill_id in enumerate(table.column("skill_id").to_pylist())
        }

    def __getitem__(self, skill_id: str) -> Skill:
        row = self._rows[skill_id]
        return Skill(**self._table.slice(row, 1).to_pylist()[0], root=self._roots[row])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, eq=False)
class RouterState:
    """Rankers and skills that a router answers with.

    Attributes:
        system: Rankers.
        skills: Skills by id.
        findings: Findings of a chat model by skill id.
    """

    system: SystemConfig
    skills: Mapping[str, Skill]
    findings: Mapping[str, Flag]


@dataclass(frozen=True, eq=False)
class Index(RouterState):
    """Generation of a router, loaded.

    Attributes:
        sources: Folders or files that the skills were read from, in the order of the skills.
        pool: Pool that the router was made from.
        folder: Folder of the generation.
        record: Its record.
        keys: Key of each skill's content, [skill].
        stored_parts: Data that each ranker stores about the pool, by the ranker's `key`.
        stamp: State of the files when they were read.
    """

    sources: Sequence[Path]
    pool: Path
    folder: Path
    record: IndexRecord
    keys: np.ndarray
    stored_parts: Mapping[str, Any]
    stamp: set[FileStamp]

    @classmethod
    def open(cls, router: Path) -> "Index":
        """Load the current generation of the folder `router`.

        Raises:
            SkilltrainError: There is no router, or its files are incomplete or damaged.
        """
        # A writer may remove this generation while it is read.
        while True:
            folder = current_generation(router)
            try:
                return _load_generation(folder)
            except Exception as error:  # a damaged file can cause any exception
                # If a writer has replaced the generation meanwhile, try the new one.
                if current_generation(router) == folder:
                    raise _damage(folder, error) from error

    def contents(self, skills: Iterable[Skill]) -> Contents:
        """Group the skills for an update of the router by the folder or file they come from.

        The router itself is not changed. The index knows the source of a skill by its id. A skill
        that the index does not have is assigned to the first source.

        Args:
            skills: All skills that the router is to have after the update.

        Raises:
            SkilltrainError: The router was downloaded from the Hub.
        """
        router = self.folder.parent
        # An update would change the cached download, and the next user of the same revision would
        # get the changed router.
        if router.parent == cache_folder(DOWNLOADS):
            problem = "is a downloaded router, which is not changed"
            fix = "copy the folder, and use the copy"
            raise SkilltrainError("conflicting-settings", problem, where=router, fix=fix)
        # The skills of the index are in the order of the sources, and the record has the number of
        # skills of each source. So each source takes its number of ids from a single iterator.
        source_by_id: dict[str, Path] = {}
        skill_ids = iter(self.skills)
        for source, num_skills in zip(self.sources, self.record.sources.values(), strict=True):
            for skill_id in islice(skill_ids, num_skills):
                source_by_id[skill_id] = source

        skills_by_source: dict[Path, list[Skill]] = {source: [] for source in self.sources}
        for skill in skills:
            source = source_by_id.get(skill.skill_id, self.sources[0])
            skills_by_source[source].append(skill)
        return Contents(self.pool, skills_by_source, self.watched)

    @property
    def watched(self) -> list[Path]:
        """Folders that `serve` watches."""
        return [Path(from_stored_path(self.folder.parent, name)) for name in self.record.watched]

    def is_current(self) -> bool:
        """Return whether the router still uses this generation, and no file of it has changed."""
        folder = current_generation(self.folder.parent)
        return folder == self.folder and file_stamps(folder) == self.stamp

    def check_models(self) -> None:
        """Raise SkilltrainError if a model has changed since the index was made."""
        for stored_path, old_fingerprint in self.record.models.items():
            # The record stores paths in a form that does not depend on this machine.
            source = from_stored_path(self.folder.parent, stored_path)
            if model_fingerprint(source) != old_fingerprint:
                problem = f"is of another model: {source} has changed"
                raise SkilltrainError("changed-model", problem, where=self.folder, fix=_RUN_AGAIN)


def check_servers(system: SystemConfig, allowed: Collection[str] | None, where: Path) -> None:
    """Check that a router's rankers may send texts to their servers. No ranker is opened.

    The folder of a router may come from a stranger, and name any server.

    Args:
        system: Rankers of the router.
        allowed: URLs of allowed servers; None allows all.
        where: Location that errors name.

    Raises:
        SkilltrainError: A server is not allowed, or the environment variable of its key does not
            end in `_API_KEY`.
    """
    for ranker in flatten_rankers(system.rankers):
        server = ranker.server
        if server is None:
            continue  # the ranker sends no texts to a server
        url = server.base_url
        # An allowed URL may end in a slash.
        is_allowed = allowed is None or url in allowed or f"{url}/" in allowed
        if not is_allowed:
            problem = f"this router sends texts to {url}"
            fix = f"if you trust it: --allow-server {url}, or allow_servers=[{url}] of a stage"
            raise SkilltrainError("untrusted-server", problem, where=where, fix=fix)
        # Otherwise a router could send any secret of the environment to its server.
        if not server.api_key_env.endswith("_API_KEY"):
            problem = f"this router reads the environment variable {server.api_key_env}"
            fix = "only names that end in _API_KEY are read"
            raise SkilltrainError("untrusted-server", problem, where=where, fix=fix)


def current_generation(router: Path) -> Path:
    """Return the folder of the generation in use. Raises SkilltrainError if there is no router."""
    if not (router / POINTER).is_file():
        fix = "make one with skilltrain fit or skilltrain index"
        raise SkilltrainError("no-router", "holds no router", where=router, fix=fix)
    # The pointer's key `index` has the name of the generation's folder, such as `index-3`.
    pointer = read_json(router / POINTER)
    name = str(pointer.get("index")) if isinstance(pointer, dict) else ""
    # The name becomes part of a path, so only names of generations are accepted.
    if not _GENERATION_NAME.fullmatch(name):
        where = router / POINTER
        raise SkilltrainError("damaged-router", "names no generation", where=where, fix=_RUN_AGAIN)
    return router / name


def next_generation(router: Path) -> Path:
    """Return the folder of the next generation. Its number is above those of all others."""
    numbers = _generation_numbers(router).values()
    return router / f"index-{max(numbers, default=0) + 1}"


def remove_old_generations(router: Path) -> None:
    """Remove generations that are not in use. One that is still open may stay until next time."""
    with suppress(SkilltrainError):  # no generation is in use yet
        # This includes unfinished generations of writers that were killed.
        for folder in _generation_numbers(router).keys() - {current_generation(router)}:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in router.glob(".index-*.lock"):  # of writers that were killed
            lock.unlink(missing_ok=True)


def _generation_numbers(router: Path) -> dict[Path, int]:
    """Return the number of each generation by its folder, including unfinished ones.

    For example, the folders `index-3` and `.index-4.partial` have the numbers 3 and 4.

    Args:
        router: Folder of the router, which may hold other files too.
    """
    numbers: dict[Path, int] = {}
    for folder in router.iterdir():
        match = _GENERATION_NAME.fullmatch(folder.name)
        if match:
            numbers[folder] = int(match[1])
    return numbers


def _load_generation(folder: Path) -> Index:
    """Load a generation of a router, and check that it is complete.

    Args:
        folder: Folder of the generation, such as `index-3` in the router's folder.
    """
    if not (folder / RECORD).is_file():
        raise OSError(f"it lacks {RECORD}")
    # Stamps tell later whether a file has changed. Take them before the files are read.
    stamp = file_stamps(folder)
    record = _read_record(folder)
    _check_files(folder, record)

    router = folder.parent
    if router.parent == cache_folder(DOWNLOADS):
        _check_paths(record, folder)
    system = record.system(router)
    # The record may have been edited, so it is checked here too.
    if record.calibration and not _has_calibrated_rankers(system, record.calibration):
        raise ValueError("its calibration is of other rankers")
    sources = [Path(from_stored_path(router, name)) for name in record.sources]
    # The table is not memory-mapped: a process crashes if another truncates a mapped file.
    table = feather.read_table(folder / SKILLS_FILE, memory_map=False)
    skills = StoredSkills(table, _roots_of_skills(record, sources))
    keys = np.load(folder / KEYS_FILE)  # [skill], a hash of each skill's content
    # A part is the data that a ranker stores about the pool, such as vectors. `name` is the folder
    # of the part, `ranker.stored_part` is its class, and `ranker.key` identifies the ranker.
    stored_parts: dict[str, Any] = {}
    for name, ranker in storing_rankers(system).items():
        stored_parts[ranker.key] = ranker.stored_part.load(folder / name)

    # The record and all files must have the same number of skills.
    num_skills = sum(record.sources.values())
    counts = {num_skills, len(skills), len(keys)}
    for part in stored_parts.values():
        counts.add(part.num_skills)
    if len(counts) > 1:
        raise ValueError("its parts are of different pools")

    pool = Path(from_stored_path(router, record.pool))
    findings = read_findings(folder)
    return Index(system, skills, findings, sources, pool, folder, record, keys, stored_parts, stamp)


def _read_record(folder: Path) -> IndexRecord:
    """Read the record of a generation. A calibration of an old format is left out."""
    record_file = folder / RECORD
    values = read_json(record_file)
    ROUTER_FORMAT.check(values, folder, _MAKE_AGAIN)
    # A calibration without a format has features with other values.
    calibration = values.get("calibration")
    if isinstance(calibration, dict) and "format" not in calibration:
        say(f"{folder.parent}: calibrate this router again; its calibration is too old to be used")
        values["calibration"] = None
    return validate(IndexRecord, values, record_file)


def _check_files(folder: Path, record: IndexRecord) -> None:
    """Raise OSError if a file of a generation is missing or has changed.

    Args:
        folder: Folder of the generation.
        record: Its record, with the size of each file and the fingerprint of most.
    """
    for name, size in record.files.items():
        # The record may come from a stranger, so its names must not lead out of the folder.
        file = path_inside(folder, name, folder / RECORD)
        if not file.is_file() or file.stat().st_size != size:
            raise OSError(f"{name} is not there, or not of {size} bytes")
        # Large files have no fingerprint, because hashing them takes seconds.
        if name in record.digests and fingerprint(file) != record.digests[name]:
            raise OSError(f"the content of {name} has changed")


def _check_paths(record: IndexRecord, folder: Path) -> None:
    """Raise SkilltrainError if a router from the Hub names files outside its folder.

    Args:
        record: Record of the router's generation. A stranger may have written the record.
        folder: Folder of the generation, for the error.
    """
    paths = [record.pool, *record.sources, *record.watched, *record.models]
    paths += _paths_in(record.rankers, _PATH_SETTINGS)
    for path in paths:
        # Paths of Windows have either separator, so this class reads the paths of all systems. The
        # anchor is the start of an absolute path, such as `/` or `C:`.
        parsed = PureWindowsPath(path)
        if parsed.anchor or path.startswith("~") or ".." in parsed.parts:
            problem = f"this router names a path of your machine: {printable(path, 100)}"
            fix = "do not use this router"
            raise SkilltrainError("path-outside-folder", problem, where=folder, fix=fix)


def _roots_of_skills(record: IndexRecord, sources: Sequence[Path]) -> list[Path | None]:
    """Return for each skill the folder whose files may be read; None if it is not trusted.

    A shared router could name any folder of this machine. So an absolute path in the record is not
    trusted. Paths in `local.json`, which is not shared, and in the router's folder are trusted.

    Args:
        record: Record of the generation. It has the number of skills of each source.
        sources: Path of each source, in the order of the record.
    """
    roots: list[Path | None] = []
    for source, (name, num_skills) in zip(sources, record.sources.items(), strict=True):
        # A name with this prefix is a key of `local.json`, which holds the path itself.
        is_local_key = name.startswith(LOCAL_PREFIX)
        is_in_router = name.startswith("./")
        root = source if is_local_key or is_in_router else None
        roots += [root] * num_skills
    return roots


def _applies(
    calibration: Calibration,
    system: SystemConfig,
    rankers: list[dict[str, Any]],
    models: dict[str, str],
) -> bool:
    """Return whether a calibration was made for a router's rankers and models.

    Args:
        calibration: The calibration.
        system: Rankers of the router.
        rankers: Settings of these rankers, as a record holds them.
        models: Fingerprint of each model by its source.
    """
    has_same_rankers = calibration.system == rankers
    has_same_models = calibration.models == models
    # The calibration is read from a file that may have been edited, so its names are checked too.
    return has_same_rankers and has_same_models and _has_calibrated_rankers(system, calibration)


def _has_calibrated_rankers(system: SystemConfig, calibration: Calibration) -> bool:
    """Return whether a system has all rankers whose scores a calibration uses.

    Args:
        system: Rankers of the router.
        calibration: A calibration. It names the rankers whose top scores it needs.
    """
    names = name_rankers(system.rankers)
    # A ranker that only fuses others has no scores of its own in a trace.
    scoring = [ranker for ranker in flatten_rankers(system.rankers) if not ranker.components]
    known_names = {names[ranker.key] for ranker in scoring}
    return known_names.issuperset(calibration.calibrator.rankers)


def _damage(folder: Path, error: Exception) -> SkilltrainError:
    """Return the error for a generation that cannot be loaded, with a fix.

    Args:
        folder: Folder of the generation.
        error: The error while it was loaded. A SkilltrainError keeps its code and its place.
    """
    if isinstance(error, SkilltrainError):
        fix = error.fix or _RUN_AGAIN
        return SkilltrainError(error.code, error.problem, where=error.where, fix=fix)
    problem = f"is half-written or damaged: {reason_of(error)}"
    return SkilltrainError("damaged-router", problem, where=folder, fix=_RUN_AGAIN)


def storing_rankers(system: SystemConfig) -> dict[str, RankerConfig]:
    """Return the rankers that store data about the pool, by the name of their data's folder."""
    # Rankers with the same key share their data, so each key is kept once.
    rankers = {
        ranker.key: ranker for ranker in flatten_rankers(system.rankers) if ranker.stored_part
    }
    return {f"part-{number}": ranker for number, ranker in enumerate(rankers.values(), 1)}


def _paths_in(rankers: list[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return the paths that settings of rankers hold under some keys."""
    paths: list[str] = []

    def collect(path: str) -> str:
        paths.append(path)
        return path

    _change_paths(rankers, collect, keys)
    return paths


def _change_paths(
    value: Any, change: Callable[[str], str], keys: Sequence[str] = _PATH_SETTINGS
) -> Any:
    """Return settings of rankers in which `change` has replaced every path.

    Args:
        value: Settings, or a part of them: a dict, a list, or a single value.
        change: Returns the new form of a path.
        keys: Names of the settings that are changed.
    """
    if isinstance(value, list):
        return [_change_paths(item, change, keys) for item in value]
    if not isinstance(value, dict):
        return value

    changed: dict[str, Any] = {}
    for key, item in value.items():
        # Only some settings of rankers may be paths. All other values are searched for dicts.
        is_path = key in keys and isinstance(item, str)
        changed[key] = change(item) if is_path else _change_paths(item, change, keys)
    return changed


def _absolute_path(name: str) -> str:
    """Return a path with its home folder and the current folder written out."""
    return str(Path(name).expanduser().absolute())


def _to_stored_path(router: Path, local_paths: dict[str, str], name: str) -> str:
    """Return a path as an index stores it, so that the router's folder can be moved.

    A path in the router's folder becomes `./…`. Any other path gets a key `local:NAME-HASH`. The
    path is added to `local_paths` under this key, and the key is returned. A name that is no
    existing path, such as `package:NAME`, is returned as it is. An absolute path need not exist.

    Args:
        router: Folder of the router.
        local_paths: Content of `local.json`, the absolute path by key.
        name: A path, or the name of a model.
    """
    path = Path(name).expanduser()
    if not path.is_absolute() and not path.exists():
        return name
    path = path.resolve()
    root = router.resolve()
    if path.is_relative_to(root):
        return f"./{path.relative_to(root).as_posix()}"

    # The hash tells paths with the same last part apart.
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    key = f"{LOCAL_PREFIX}{path.name}-{digest}"
    local_paths[key] = str(path)
    return key


def from_stored_path(router: Path, stored_path: str) -> str:
    """Return the path that `_to_stored_path` stored.

    A stored path has one of three forms:

    - `local:NAME-HASH` is a key of `local.json`, which holds the absolute path.
    - `./PATH` is relative to the router's folder.
    - Anything else, such as the name of a model, is returned as it is.

    Args:
        router: Folder of the router.
        stored_path: Path in one of these forms.

    Raises:
        SkilltrainError: A path `./PATH` leads out of the router's folder.
    """
    if stored_path.startswith(LOCAL_PREFIX):
        # A key that `local.json` lacks is read as the name of a file in the router's folder.
        stored_path = read_local(router).get(stored_path, f"./{stored_path}")
    if not stored_path.startswith("./"):
        return stored_path
    return str(path_inside(router.resolve(), stored_path.removeprefix("./"), router))
