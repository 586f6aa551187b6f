"""Stage `index`: a router in a folder, made of a pool and rankers; run again, it takes up what has changed."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath, validate
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.expand import ExpandConfig
from skilltrain.retrieval.rankers import FuseConfig, RankerConfig, parts_of
from skilltrain.routing.confidence import CALIBRATION_FILE, Calibration
from skilltrain.routing.index import POINTER, Index, changes_of, write_index


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
        folder = config.calibration
        file = folder / CALIBRATION_FILE if folder.is_dir() else folder
        calibration = validate(Calibration, read_json(file), file)
    return write_index(out, system, skills, {}, pool, calibration)


def plan_index(config: IndexConfig) -> dict[str, Any]:
    """The counts of skills that are new, changed and gone (`--dry-run`)."""
    before, _, _, skills = _wanted(config)
    return changes_of(before, skills)[0]


def _wanted(config: IndexConfig) -> tuple[Index | None, SystemConfig, Path, list[Skill]]:
    """(the index before, what ranks, the pool and its skills)."""
    is_whole = config.pool is not None and config.rankers is not None
    before = None
    if not is_whole or (config.out / POINTER).is_file():
        try:
            before = Index.open(config.out)
        except SkilltrainError as error:
            if not is_whole:
                raise SkilltrainError(error.what, where=error.where, fix="give pool=… and rankers=…") from error
    if config.rankers is not None:
        rankers = [_with_cache(ranker, config.out / "vectors") for ranker in config.rankers]
        system = SystemConfig(name="router", rankers=tuple(rankers))
    else:
        assert before is not None
        system = before.system
    if any(part.kind == "saved" for part in parts_of(system.rankers)):
        raise SkilltrainError("rankings that were made before answer no new task", where="rankers, kind saved")
    check_systems([system])
    pool = config.pool or (before.pool if before else Path())
    return before, system, pool, read_pool(pool)


def _with_cache(ranker: RankerConfig, cache: Path) -> Any:
    """`ranker` whose encoders keep their vectors, those in `cache` that have no cache yet."""
    if isinstance(ranker, FuseConfig):
        return ranker.model_copy(update={"of": tuple(_with_cache(leg, cache) for leg in ranker.of)})
    if isinstance(ranker, ExpandConfig):
        return ranker.model_copy(update={"of": _with_cache(ranker.of, cache)})
    return ranker.model_copy(update={"cache": ranker.cache or cache}) if isinstance(ranker, DenseConfig) else ranker
