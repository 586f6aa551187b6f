"""Stage `index`: a router in a folder, made of a pool and rankers; run again, it takes up what has changed."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pyarrow import feather
from pydantic import Field

from skilltrain.config import Config, InputPath, validate
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked, read_json, staged_folder, write_json
from skilltrain.models.loading import model_fingerprint
from skilltrain.records import Skill
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.expand import ExpandConfig
from skilltrain.retrieval.late import LateConfig, TokenVectors
from skilltrain.retrieval.lexical import BM25Index, LexicalConfig
from skilltrain.retrieval.rankers import FuseConfig, RankerConfig, key_of, parts_of
from skilltrain.retrieval.vectors import text_keys
from skilltrain.routing.answer import Calibration
from skilltrain.routing.index import (
    NAME,
    POINTER,
    RECORD,
    SKILLS_FILE,
    Index,
    IndexRecord,
    generation,
    kept_parts,
    with_paths,
)
from skilltrain.tables import SKILLS, rows_of, table_from_rows
from skilltrain.version import __version__

CALIBRATION_FILE = "calibration.json"


class IndexConfig(Config):
    """Make a router, or bring one up to date: only skills that are new or changed are encoded."""

    stage: Literal["index"]
    pool: InputPath | None = Field(
        default=None, description="SKILLS table, or whatever the stage pool reads; null: the router's own, read again"
    )
    rankers: tuple[RankerConfig, ...] | None = Field(
        default=None, min_length=1, description="what ranks, as in a system; null: as the router has them"
    )
    calibration: InputPath | None = Field(
        default=None, description="folder of the stage calibrate; null: as the router has it"
    )
    out: Path = Field(description="folder of the router; whatever else lies in it is left alone")


def run_index(config: IndexConfig, out: Path) -> dict[str, Any]:
    """Write the router's next generation; the counts of skills that are new, changed and gone.

    Raises SkilltrainError for a pool or rankers that neither the settings nor the router name, for rankers that cannot
    answer a new task, and for a calibration of other rankers or models.
    """
    _, system, pool, skills = _wanted(config)
    calibration = None
    if config.calibration is not None:
        file = config.calibration / CALIBRATION_FILE if config.calibration.is_dir() else config.calibration
        calibration = validate(Calibration, read_json(file), file)
    return write_index(out, system, skills, {}, pool, calibration)


def plan_index(config: IndexConfig) -> dict[str, Any]:
    """The counts of skills that are new, changed and gone (`--dry-run`)."""
    before, _, _, skills = _wanted(config)
    return changes_of(before, skills)[0]


def _wanted(config: IndexConfig) -> tuple[Index | None, SystemConfig, Path, list[Skill]]:
    """(the index before, what ranks, the pool and its skills)."""
    try:
        before = Index.open(config.out)
    except SkilltrainError as error:
        if config.pool is None or config.rankers is None:
            raise SkilltrainError(error.what, where=error.where, fix="give pool=… and rankers=…") from error
        before = None
    if config.rankers is not None:
        rankers = tuple(_with_cache(ranker, config.out / "vectors") for ranker in config.rankers)
        system = SystemConfig(name="router", rankers=rankers)
    else:
        assert before is not None
        system = before.system
    check_rankers(system)
    pool = config.pool or (before.pool if before else Path())
    return before, system, pool, read_pool(pool)


def check_rankers(system: SystemConfig) -> None:
    """Raise SkilltrainError for rankers that cannot answer a new task, and as `check_systems` does."""
    if any(part.kind == "saved" for part in parts_of(system.rankers)):
        raise SkilltrainError("rankings that were made before answer no new task", where="rankers, kind saved")
    check_systems([system])


def _with_cache(ranker: RankerConfig, cache: Path) -> Any:
    """`ranker` whose encoders keep their vectors, those in `cache` that have no cache yet."""
    if isinstance(ranker, FuseConfig):
        return ranker.model_copy(update={"of": tuple(_with_cache(leg, cache) for leg in ranker.of)})
    if isinstance(ranker, ExpandConfig):
        return ranker.model_copy(update={"of": _with_cache(ranker.of, cache)})
    return ranker.model_copy(update={"cache": ranker.cache or cache}) if isinstance(ranker, DenseConfig) else ranker


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
        try:
            before = Index.open(router)
        except SkilltrainError:
            before = None
        name = f"index-{1 + max((int(number) for _, number in _generations(router)), default=0)}"
        _sweep(router)
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
        with staged_folder(router / name) as staged:
            old = before if before and before.record.models == record.models else None
            _write_parts(staged, record.system(router), skills, keys, models, old)
            np.save(staged / "keys.npy", keys)
            table = table_from_rows(rows_of(skills), SKILLS)
            feather.write_feather(table, staged / SKILLS_FILE, compression="uncompressed")
            files = {str(file.relative_to(staged)): file.stat().st_size for file in staged.rglob("*.*")}
            write_json(staged / RECORD, record.model_copy(update={"files": files}).model_dump(mode="json"))
        write_json(router / POINTER, {"index": name})
        _sweep(router)
    return counts


def _generations(router: Path) -> list[tuple[Path, str]]:
    """(folder, number) of each generation, and of what becomes or became one."""
    return [(folder, found[1]) for folder in router.iterdir() if (found := NAME.fullmatch(folder.name))]


def _sweep(router: Path) -> None:
    """Remove generations that are no longer or not yet in use; what the system still holds open goes next time."""
    with suppress(SkilltrainError):
        used = generation(router)
        for folder, _ in _generations(router):
            if folder != used:
                shutil.rmtree(folder, ignore_errors=True)
        for lock in router.glob(".index-*.lock"):  # of writers that were killed
            lock.unlink(missing_ok=True)


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
    kept = old.keys() & new.keys()
    num_changed = sum(old[skill_id] != new[skill_id] for skill_id in kept)
    counts = {"num_skills": len(new), "num_new": len(new) - len(kept), "num_changed": num_changed}
    return counts | {"num_gone": len(old) - len(kept)}, keys


def _record(
    router: Path, system: SystemConfig, num_skills: int, pool: Path, calibration: Calibration | None
) -> IndexRecord:
    """What the next generation says of itself, but for its files; with the calibration if that applies."""
    stored = partial(_stored, router)
    rankers: list[dict[str, Any]] = []
    for ranker in system.rankers:
        weights = {"weights": list(ranker.leg_weights())} if isinstance(ranker, FuseConfig) else {}
        rankers.append(with_paths(ranker.model_dump(mode="json"), stored) | weights)
    sources = {source for part in parts_of(system.rankers) if (source := getattr(part, "source", None))}
    models = {stored(source): model_fingerprint(source) for source in sorted(sources)}
    applies = calibration is not None and calibration.system == rankers and calibration.models == models
    return IndexRecord(
        pool=stored(str(pool)), rankers=rankers, models=models, calibration=calibration if applies else None,
        num_skills=num_skills, files={}, skilltrain=__version__,
    )  # fmt: skip


def _write_parts(
    folder: Path, system: SystemConfig, skills: Sequence[Skill], keys: np.ndarray, models: dict[str, Any],
    before: Index | None,
) -> None:  # fmt: skip
    """What rankers hold of the pool, each in a folder of its own; what `before` holds of skills is taken from there."""
    places = {key: place for place, key in enumerate(before.keys.tolist())} if before else {}
    at = [places.get(key, -1) for key in keys.tolist()]
    for (key, config), name in kept_parts(system).items():
        (folder / name).mkdir()
        old = before.parts.get(key) if before else None
        if isinstance(config, LexicalConfig):
            config.index(skills, old if isinstance(old, BM25Index) else None).save(folder / name)
            continue
        model = open_model(config, models)
        if isinstance(config, LateConfig):
            model.save_tokens(folder / name, skills, old if isinstance(old, TokenVectors) else None, at)
        else:
            model.skills(skills).save(folder / name)


def open_model(config: Any, models: dict[str, Any]) -> Any:
    """What a ranker needs for any pool; `models` keeps it by `key_of`, and an encoder for all that need the same."""
    key = key_of(config)
    if key not in models:
        if isinstance(config, LateConfig):
            models[key] = config.open((), models)
        elif isinstance(config, DenseConfig):
            models[key] = config.encoders(models)
        else:
            models[key] = config.encoders() if isinstance(config, ApiConfig) else config.open(())
    return models[key]


def _stored(router: Path, name: str) -> str:
    """A path below the router's folder as `./…`, so that it may be moved; another folder as a whole path."""
    path, root = Path(name).expanduser().resolve(), router.resolve()
    if path.is_relative_to(root) and path.exists():
        return f"./{path.relative_to(root)}"
    return str(path) if path.exists() else name
