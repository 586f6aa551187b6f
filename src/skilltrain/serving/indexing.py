"""Stage `index`: a router in a folder, made of a pool and rankers; run again, it takes up what has changed."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pyarrow import feather
from pydantic import Field

from skilltrain.config import InputPath, validate
from skilltrain.data.pool.read import merge_sources, read_by_source, read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.files import LOCAL_FILE, locked, read_json, read_local, staged_folder, write_json
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.rankers import AnyRanker, RankerConfig, parts_of
from skilltrain.retrieval.vectors import text_keys
from skilltrain.serving.answer import Calibration
from skilltrain.serving.index import (
    KEYS_FILE,
    POINTER,
    RECORD,
    SKILLS_FILE,
    AllowedServers,
    Contents,
    Index,
    IndexRecord,
    check_servers,
    kept_parts,
    sweep,
)
from skilltrain.stage import Stage, Summary
from skilltrain.tables import SKILLS, table_from_rows
from skilltrain.terminal import say

CALIBRATION_FILE = "calibration.json"


class BuildIndex(Stage):
    """Make a router of a pool and rankers, or update one: only changed skills are encoded.

    With the router's own pool, the folders that `serve` watched for it are read again too.
    """

    example = (
        "pool=runs/pool 'rankers=[{kind: fuse, of: [{kind: lexical}, {kind: dense, source: "
        "runs/encoder}], weights: [1, .5]}]' out=runs/router && skilltrain index "
        "out=runs/router  # reads the pool again"
    )
    result = "{num_skills} skills: {num_new} new, {num_changed} changed, {num_gone} gone"
    next_command = "route --router {out} 'a task in plain words'"
    in_place = True

    stage: Literal["index"]
    pool: InputPath | None = Field(
        default=None, description="whatever the stage pool reads; null: the router's own"
    )
    rankers: tuple[AnyRanker, ...] | None = Field(
        None, min_length=1, description="null: as the router has them"
    )
    calibration: InputPath | None = Field(
        default=None, description="folder of the stage calibrate; null: as it has it"
    )
    allow_servers: AllowedServers = ()
    out: Path = Field(description="folder of the router; whatever else lies in it is left alone")

    def run(self, out: Path) -> Summary:
        """Write the router's next generation; return counts of new, changed and gone skills.

        Raises:
            SkilltrainError: Neither the settings nor the router name a pool or rankers, a ranker
                cannot answer a new task, or the calibration is of other rankers or models.
        """
        system, contents = _wanted(self)
        calibration = None
        if self.calibration is not None:
            file = self.calibration / CALIBRATION_FILE
            calibration = validate(Calibration, read_json(file), file)
        return write_index(out, system, contents, {}, calibration)

    def dry_run(self) -> Summary:
        """Count the skills that are new, changed and gone."""
        return _changes(_before(self.out), [*chain(*_wanted(self)[1].skills.values())])[0]


def _wanted(config: BuildIndex) -> tuple[SystemConfig, Contents]:
    """(what ranks, the skills): those of the router where the settings do not say."""
    before: Index | None = None
    pool = config.pool
    rankers = config.rankers
    try:
        before = Index.open(config.out)
        pool = pool or before.pool
        rankers = rankers or before.system.rankers
    except SkilltrainError as error:
        if pool is None or rankers is None:
            fix = "give pool=… and rankers=…"
            raise SkilltrainError(error.code, error.what, where=error.where, fix=fix) from error
    system = SystemConfig(name="router", rankers=rankers)
    check_servers(system, None if config.rankers else config.allow_servers, config.out)
    check_rankers(system)
    skills = read_by_source(pool)
    watched = before.contents(()).watched if before and before.pool == pool.resolve() else []
    for folder in watched:
        skills.setdefault(folder, [])
    return system, read_watched(Contents(pool, skills, watched), watched)


def read_watched(contents: Contents, folders: Collection[Path]) -> Contents:
    """Return `contents` with the skills that watched folders hold now; their categories are those by id in `contents`.

    A folder that is gone is not read: it may come back. An id that two sources use for different skills becomes another
    one in the second. Raises SkilltrainError for a folder that is new in `contents` and shares skills with a source not
    in `folders`: removed from the folder, they would stay in the router.
    """
    known: dict[str, tuple[Path, Skill]] = {}
    for source, group in contents.skills.items():
        known |= {skill.skill_id: (source, skill) for skill in group}
    skills = dict(contents.skills)
    for folder in folders:
        if not folder.is_dir():
            say(f"{folder}: this watched folder is gone")
            continue
        group = list[Skill]()
        with suppress(SkilltrainError):  # it holds no skill
            group = read_pool(folder)
        shared = {source for source in contents.skills if folder.is_relative_to(source)}
        for number, skill in enumerate(group):
            source, before = known.get(skill.skill_id, (folder, skill))
            shared.add(source)
            group[number] = replace(skill, category=skill.category or before.category)
        if folder not in contents.skills and (unwatched := shared - {*folders}):
            what = f"has skills of {min(unwatched)}, which is not watched"
            fix = f"watch both; if it has moved, first run skilltrain index pool={folder} out=…"
            raise SkilltrainError("unwatched-folder", what, where=folder, fix=fix)
        skills[folder] = group
    if len(skills) > 1:
        merged, _ = merge_sources([*skills.values()], drop_duplicates=False)
        skills = dict(zip(skills, merged, strict=True))
    return contents._replace(skills=skills, watched={*contents.watched, *folders})


def _before(router: Path) -> Index | None:
    """The router as it is, if it is whole."""
    try:
        return Index.open(router)
    except SkilltrainError:
        return None


def check_rankers(system: SystemConfig) -> None:
    """Raise SkilltrainError for rankers that cannot answer a new task, and as `check_systems` does."""
    if not all(part.answers_new_queries for part in parts_of(system.rankers)):
        raise SkilltrainError(
            "conflicting-settings",
            "rankings that were made before answer no new task",
            where="rankers, kind saved",
        )
    check_systems([system])


def write_index(
    router: Path,
    system: SystemConfig,
    contents: Contents,
    models: dict[str, Any],
    calibration: Calibration | None = None,
    before: Index | None = None,
) -> dict[str, int]:
    """Make the folder `router` answer with other skills from now on; how many of them are new, changed and gone.

    `models` holds the encoders that are open, by `key`. Only new texts are encoded, and read for BM25. Without
    another calibration the router keeps its own where that still applies. Nothing is written where nothing changes.
    Raises SkilltrainError for an empty pool, for a calibration of other rankers or models, where another process
    writes, and where one has written since `before` was opened.
    """
    with locked(router):
        router.mkdir(parents=True, exist_ok=True)
        if before is None:
            before = _before(router)
        elif not before.is_current():
            raise SkilltrainError(
                "folder-in-use", "another process has written meanwhile", where=router
            )
        folder = sweep(router)
        skills = [*chain(*contents.skills.values())]
        counts, keys = _changes(before, skills)
        known = calibration or (before and before.record.calibration)
        paths = read_local(router)
        record = IndexRecord.of(router, paths, system, contents, known)
        if calibration and record.calibration is None:
            what = "the calibration is of other rankers or models"
            raise SkilltrainError(
                "changed-model", what, where=router, fix="run skilltrain calibrate on this router"
            )
        if paths != read_local(router):
            write_json(router / LOCAL_FILE, paths)
        if (
            before
            and before.record.model_copy(update={"files": {}}) == record
            and np.array_equal(before.keys, keys)
        ):
            return counts
        with staged_folder(folder) as staged:
            old = before if before and before.record.models == record.models else None
            position_of = {key: place for place, key in enumerate(old.keys.tolist())} if old else {}
            positions = [position_of.get(key, -1) for key in keys.tolist()]
            for name, config in kept_parts(record.system(router)).items():
                stored = old.parts.get(config.key) if old else None
                (staged / name).mkdir()
                model = open_model(config, models, router)
                model.save_part(staged / name, skills, stored, positions)
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
        raise SkilltrainError("empty-pool", "the pool is empty")
    keys = text_keys([repr(skill) for skill in skills], 0)
    old = dict(zip(before.skills, before.keys.tolist(), strict=True)) if before else {}
    new = dict(zip((skill.skill_id for skill in skills), keys.tolist(), strict=True))
    if len(new) < len(skills):
        raise SkilltrainError(
            "repeated-id", f"{len(skills)} skills have {len(new)} different ids", where="pool"
        )
    changed = [skill_id for skill_id in old.keys() & new.keys() if old[skill_id] != new[skill_id]]
    gone = {"num_changed": len(changed), "num_gone": len(old.keys() - new.keys())}
    return {"num_skills": len(new), "num_new": len(new.keys() - old.keys()), **gone}, keys


def open_model(config: RankerConfig, models: dict[str, Any], router: Path | None) -> Any:
    """Return what a ranker needs for any pool. `models` keeps it by `key`, and encoders by what they need.

    An encoder without a cache of its own keeps its vectors in the folder `router`, if there is one.
    """
    key = config.key
    if key not in models:
        models[key] = config.in_router(router).open(models)
    return models[key]
