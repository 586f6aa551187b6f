"""A router on disk: all that a request needs, ready to be memory-mapped, in a folder that readers and one writer share.

The folder holds one generation, `index-N`, and a pointer to it, `router.json`. A writer makes the next generation
beside, then moves the pointer in one step and removes the one before. A reader that has opened a generation keeps it:
its files stay mapped after they are removed. Whatever else lies in the folder (what `fit` made) is left alone.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from skilltrain import __version__
from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import inside, locked, read_json, staged_folder, write_json
from skilltrain.models.loading import model_fingerprint
from skilltrain.records import Skill
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.lexical import BM25Index, LexicalConfig
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.retrieval.rankers import FuseConfig, key_of, parts_of
from skilltrain.retrieval.vectors import text_keys
from skilltrain.routing.confidence import Calibration
from skilltrain.tables import SKILLS, rows_of, table_from_rows

Part = BM25Index | ChunkVectors
POINTER, RECORD = "router.json", "index.json"
_NAME = re.compile(r"\.?index-(\d{1,9})(?:\.partial)?")
_AGAIN = "run skilltrain index again"
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
            except SkilltrainError:
                if generation(router) == folder:  # else a writer has removed it meanwhile
                    raise
            except (OSError, ValueError, pa.ArrowException) as error:
                if generation(router) == folder:
                    what = f"is half-written or damaged: {reason_of(error)}"
                    raise SkilltrainError(what, where=folder, fix=_AGAIN) from error
        raise SkilltrainError("changes faster than it can be opened", where=router)

    @property
    def pool(self) -> Path:
        """Where the skills were read from."""
        return Path(_placed(self.folder.parent, self.record.pool))

    def check_models(self) -> None:
        """Raise SkilltrainError where a model is not the one that the index was made with."""
        for source, known in self.record.models.items():
            if model_fingerprint(_placed(self.folder.parent, source)) != known:
                raise SkilltrainError(f"is of another model: {source} has changed", where=self.folder, fix=_AGAIN)


def generation(router: Path) -> Path:
    """The folder of the generation that is in use. Raises SkilltrainError where there is no router."""
    if not (router / POINTER).is_file():
        fix = "make one with skilltrain fit or skilltrain index"
        raise SkilltrainError("holds no router", where=router, fix=fix)
    pointer = read_json(router / POINTER)
    name = pointer.get("index") if isinstance(pointer, dict) else None
    if not isinstance(name, str) or not _number(Path(name)) or "/" in name:
        raise SkilltrainError("names no index", where=router / POINTER, fix=_AGAIN)
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
    rankers = _with_paths(record.rankers, partial(_placed, folder.parent))
    system = validate(SystemConfig, {"name": "router", "rankers": rankers}, folder / RECORD)
    with pa.memory_map(str(folder / "skills.arrow")) as file:
        skills = StoredSkills(pa.ipc.open_file(file).read_all())
    keys = np.load(folder / "keys.npy", mmap_mode="r")
    parts: dict[str, Part] = {}
    for (key, config), name in _kept(system).items():
        is_lexical = isinstance(config, LexicalConfig)
        parts[key] = BM25Index.load(folder / name) if is_lexical else ChunkVectors.load(folder / name)
    if {len(skills), len(keys), *(part.num_skills for part in parts.values())} != {record.num_skills}:
        raise ValueError("its parts are of different pools")
    return Index(folder, record, system, skills, keys, parts)


def write_index(
    router: Path, system: SystemConfig, skills: Sequence[Skill], models: dict[str, Any], pool: Path,
    calibration: Calibration | None = None,
) -> dict[str, int]:  # fmt: skip
    """Make the folder `router` answer with `skills` from now on; how many of them are new, changed and gone.

    `models` holds the encoders that are open, by `key_of`. Only new texts are encoded, and read for BM25. A calibration
    that the router has is kept where it still applies. Nothing is written where nothing has changed. Raises
    SkilltrainError for an empty pool, for a calibration of other rankers or models, and where another process writes.
    """
    with locked(router):
        router.mkdir(parents=True, exist_ok=True)
        before = _readable(router)
        _remove_all_but(router, before.folder.name if before else "")
        counts, keys = changes_of(before, skills)
        for part in parts_of(system.rankers):
            if isinstance(part, DenseConfig) and part.cache:
                part.cache.expanduser().mkdir(parents=True, exist_ok=True)
        record = _record(router, system, len(skills), pool, calibration or (before and before.record.calibration))
        if calibration and record.calibration is None:
            what = "the calibration is of other rankers or models"
            raise SkilltrainError(what, where=router, fix="run skilltrain calibrate on this router")
        if before and before.record.model_copy(update={"files": {}}) == record and np.array_equal(before.keys, keys):
            return counts
        name = f"index-{1 + max(map(_number, router.iterdir()), default=0)}"
        with staged_folder(router / name) as staged:
            _write_parts(staged, system, skills, models, before)
            np.save(staged / "keys.npy", keys)
            table = table_from_rows(rows_of(skills), SKILLS)
            with pa.OSFile(str(staged / "skills.arrow"), "wb") as file, pa.ipc.new_file(file, SKILLS.schema) as writer:
                writer.write_table(table)
            files = {str(file.relative_to(staged)): file.stat().st_size for file in staged.rglob("*.*")}
            write_json(staged / RECORD, record.model_copy(update={"files": files}).model_dump(mode="json"))
        write_json(router / POINTER, {"index": name})
        _remove_all_but(router, name)
    return counts


def _number(folder: Path) -> int:
    """Of a generation or what becomes one; 0 for what else lies beside them."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else 0


def _readable(router: Path) -> Index | None:
    """The generation before, if it can be used."""
    try:
        return Index.open(router)
    except SkilltrainError:
        return None


def _remove_all_but(router: Path, name: str) -> None:
    """Remove generations that are no longer or not yet in use; what the system still holds open goes next time."""
    for folder in (*router.glob("index-*"), *router.glob(".index-*.partial")):
        is_ours = (router / POINTER).is_file() or (folder / RECORD).is_file()
        if folder.name != name and is_ours and _number(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _record(
    router: Path, system: SystemConfig, num_skills: int, pool: Path, calibration: Calibration | None
) -> IndexRecord:
    """What the next generation says of itself, but for its files; with the calibration if that applies."""
    stored = partial(_stored, router)
    rankers: list[dict[str, Any]] = []
    for ranker in system.rankers:
        weights = {"weights": list(ranker.leg_weights())} if isinstance(ranker, FuseConfig) else {}
        rankers.append(_with_paths(ranker.model_dump(mode="json"), stored) | weights)
    sources = {source for part in parts_of(system.rankers) if (source := getattr(part, "source", None))}
    models = {stored(source): model_fingerprint(source) for source in sorted(sources)}
    applies = calibration is not None and calibration.system == rankers and calibration.models == models
    return IndexRecord(
        pool=stored(str(pool)), rankers=rankers, models=models, calibration=calibration if applies else None,
        num_skills=num_skills, files={}, skilltrain=__version__,
    )  # fmt: skip


def changes_of(before: Index | None, skills: Sequence[Skill]) -> tuple[dict[str, int], np.ndarray]:
    """(how many skills are new, changed and gone, a key of each skill's content).

    Raises SkilltrainError for an empty pool and for an id that appears twice.
    """
    if not skills:
        raise SkilltrainError("the pool is empty")
    keys = text_keys([repr(skill) for skill in skills], 0)[0]
    old = {} if before is None else dict(zip(before.skills, before.keys.tolist(), strict=True))
    new = dict(zip((skill.skill_id for skill in skills), keys.tolist(), strict=True))
    if len(new) < len(skills):
        raise SkilltrainError(f"{len(skills)} skills have {len(new)} different ids", where="pool")
    num_kept = len(old.keys() & new.keys())
    num_changed = sum(old.get(skill_id, key) != key for skill_id, key in new.items())
    num_new, num_gone = len(new) - num_kept, len(old) - num_kept
    return {"num_skills": len(new), "num_new": num_new, "num_changed": num_changed, "num_gone": num_gone}, keys


def _write_parts(
    folder: Path, system: SystemConfig, skills: Sequence[Skill], models: dict[str, Any], before: Index | None
) -> None:
    """What rankers hold of the pool, each in a folder of its own."""
    for (key, config), name in _kept(system).items():
        (folder / name).mkdir()
        if isinstance(config, LexicalConfig):
            old = before.parts.get(key) if before else None
            config.open(skills, old if isinstance(old, BM25Index) else None).index.save(folder / name)
        else:
            if key not in models:
                models[key] = config.encoders()
            models[key].skills(skills).save(folder / name)


def _kept(system: SystemConfig) -> dict[tuple[str, LexicalConfig | DenseConfig | ApiConfig], str]:
    """(key, ranker) → folder, of each ranker that holds something of the pool."""
    parts = [part for part in parts_of(system.rankers) if isinstance(part, LexicalConfig | DenseConfig | ApiConfig)]
    return {pair: f"part-{number}" for number, pair in enumerate({key_of(part): part for part in parts}.items(), 1)}


def _with_paths(value: Any, change: Callable[[str], str]) -> Any:
    """Settings of rankers with the paths in them changed."""
    if isinstance(value, list):
        return [_with_paths(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: change(item) if key in ("source", "cache") and isinstance(item, str) else _with_paths(item, change)
        for key, item in value.items()
    }


def _stored(router: Path, name: str) -> str:
    """A path below the router's folder as `./…`, so that it may be moved; another folder as a whole path."""
    path, root = Path(name).expanduser().resolve(), router.resolve()
    if path.is_relative_to(root) and path.exists():
        return f"./{path.relative_to(root)}"
    return str(path) if path.exists() else name


def _placed(router: Path, name: str) -> str:
    """The inverse of `_stored`. Raises SkilltrainError for a path that leaves the router's folder."""
    return str(inside(router, name[2:], router)) if name.startswith("./") else name
