"""Stage `index`: a router in a folder, made of a pool and rankers; run again, it takes up what has changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pyarrow import feather
from pydantic import Field

from skilltrain.config import Config, InputPath, validate
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked, read_json, staged_folder, write_json
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.late import LateConfig
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.retrieval.rankers import RankerConfig, key_of, parts_of
from skilltrain.retrieval.vectors import text_keys
from skilltrain.routing.answer import Calibration
from skilltrain.routing.index import (
    KEYS_FILE,
    POINTER,
    RECORD,
    SKILLS_FILE,
    Index,
    IndexRecord,
    kept_parts,
    sweep,
)
from skilltrain.tables import SKILLS, table_from_rows

CALIBRATION_FILE = "calibration.json"


class IndexConfig(Config):
    """Make a router, or bring one up to date: only skills that are new or changed are encoded."""

    stage: Literal["index"]
    pool: InputPath | None = Field(
        default=None, description="whatever the stage pool reads; null: the router's own"
    )
    rankers: tuple[RankerConfig, ...] | None = Field(
        None, min_length=1, description="null: as the router has them"
    )
    calibration: InputPath | None = Field(
        default=None, description="folder of the stage calibrate; null: as it has it"
    )
    out: Path = Field(description="folder of the router; whatever else lies in it is left alone")


def run_index(config: IndexConfig, out: Path) -> dict[str, Any]:
    """Write the router's next generation; the counts of skills that are new, changed and gone.

    Raises SkilltrainError for a pool or rankers that neither the settings nor the router name, for rankers that cannot
    answer a new task, and for a calibration of other rankers or models.
    """
    system, pool, skills = _wanted(config)
    calibration = None
    if config.calibration is not None:
        file = config.calibration / CALIBRATION_FILE
        calibration = validate(Calibration, read_json(file), file)
    return write_index(out, system, skills, {}, pool, calibration)


def plan_index(config: IndexConfig) -> dict[str, Any]:
    """The counts of skills that are new, changed and gone (`--dry-run`)."""
    return _changes(_before(config.out), _wanted(config)[-1])[0]


def _wanted(config: IndexConfig) -> tuple[SystemConfig, Path, list[Skill]]:
    """(what ranks, the pool and its skills): those of the router where the settings do not say."""
    pool, rankers = config.pool, config.rankers
    if pool is None or rankers is None:
        try:
            before = Index.open(config.out)
        except SkilltrainError as error:
            raise SkilltrainError(
                error.what, where=error.where, fix="give pool=… and rankers=…"
            ) from error
        pool, rankers = pool or before.pool, rankers or before.system.rankers
    system = SystemConfig(name="router", rankers=rankers)
    check_rankers(system)
    return system, pool, read_pool(pool)


def _before(router: Path) -> Index | None:
    """The router as it is, if it is whole."""
    try:
        return Index.open(router)
    except SkilltrainError:
        return None


def check_rankers(system: SystemConfig) -> None:
    """Raise SkilltrainError for rankers that cannot answer a new task, and as `check_systems` does."""
    if any(part.kind == "saved" for part in parts_of(system.rankers)):
        raise SkilltrainError(
            "rankings that were made before answer no new task", where="rankers, kind saved"
        )
    check_systems([system])


def write_index(
    router: Path,
    system: SystemConfig,
    skills: Sequence[Skill],
    models: dict[str, Any],
    pool: Path,
    calibration: Calibration | None = None,
) -> dict[str, int]:
    """Make the folder `router` answer with `skills` from now on; how many of them are new, changed and gone.

    `models` holds the encoders that are open, by `key_of`. Only new texts are encoded, and read for BM25. Without
    another calibration the router keeps its own where that still applies. Nothing is written where nothing changes.
    Raises SkilltrainError for an empty pool, for a calibration of other rankers or models, and where another process
    writes.
    """
    with locked(router):
        router.mkdir(parents=True, exist_ok=True)
        before, folder = _before(router), sweep(router)
        counts, keys = _changes(before, skills)
        known = calibration or (before and before.record.calibration)
        record = IndexRecord.of(router, system, len(skills), pool, known)
        if calibration and record.calibration is None:
            what = "the calibration is of other rankers or models"
            raise SkilltrainError(what, where=router, fix="run skilltrain calibrate on this router")
        if (
            before
            and before.record.model_copy(update={"files": {}}) == record
            and np.array_equal(before.keys, keys)
        ):
            return counts
        with staged_folder(folder) as staged:
            old = before if before and before.record.models == record.models else None
            places = {key: place for place, key in enumerate(old.keys.tolist())} if old else {}
            for name, config in kept_parts(record.system(router)).items():
                part, kept = staged / name, old.parts.get(key_of(config)) if old else None
                part.mkdir()
                if isinstance(config, LexicalConfig):
                    config.index(skills, kept).save(part)
                elif isinstance(config, LateConfig):
                    at = [places.get(key, -1) for key in keys.tolist()]
                    open_model(config, models, router).save_tokens(part, skills, kept, at)
                else:
                    open_model(config, models, router).encode_chunks(skills).save(part)
            np.save(staged / KEYS_FILE, keys)
            table = table_from_rows(skills, SKILLS)
            feather.write_feather(table, staged / SKILLS_FILE, compression="uncompressed")
            files = {
                str(file.relative_to(staged)): file.stat().st_size for file in staged.rglob("*.*")
            }
            write_json(
                staged / RECORD, record.model_copy(update={"files": files}).model_dump(mode="json")
            )
        write_json(router / POINTER, {"index": folder.name})
        sweep(router)
    return counts


def _changes(before: Index | None, skills: Sequence[Skill]) -> tuple[dict[str, int], np.ndarray]:
    """(how many skills are new, changed and gone, a key of each skill's content)."""
    if not skills:
        raise SkilltrainError("the pool is empty")
    keys = text_keys([repr(skill) for skill in skills], 0)
    old = dict(zip(before.skills, before.keys.tolist(), strict=True)) if before else {}
    new = dict(zip((skill.skill_id for skill in skills), keys.tolist(), strict=True))
    if len(new) < len(skills):
        raise SkilltrainError(f"{len(skills)} skills have {len(new)} different ids", where="pool")
    changed = [skill_id for skill_id in old.keys() & new.keys() if old[skill_id] != new[skill_id]]
    gone = {"num_changed": len(changed), "num_gone": len(old.keys() - new.keys())}
    return {"num_skills": len(new), "num_new": len(new.keys() - old.keys()), **gone}, keys


def open_model(config: Any, models: dict[str, Any], router: Path | None) -> Any:
    """What a ranker needs for any pool; `models` keeps it by `key_of`, and an encoder for all that need the same.

    An encoder without a cache of its own keeps its vectors in the folder `router`, where there is one.
    """
    key = key_of(config)
    if key not in models:
        if isinstance(config, DenseConfig):
            config = config.model_copy(
                update={"cache": config.cache or (router and router / "vectors")}
            )
        models[key] = (
            config.open(models) if isinstance(config, DenseConfig | LateConfig) else config.open()
        )
    return models[key]
