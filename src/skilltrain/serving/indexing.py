"""Stage `index`: write a pool and rankers as a router into a folder, or update the router there.

Notes:
    - An existing router that cannot be opened matters only if its settings are needed.
    - Rankers that are given in the settings may use any server. Rankers that are taken from an
      existing router may come from somebody else, so their servers must be allowed.
    - A watched folder that is gone keeps its skills, because it may come back.
    - A folder that is newly watched must not have skills that the router already has from an
      unwatched source. This happens when the folder has moved. Such skills would have two sources,
      and a skill that is removed from the folder would stay in the router.
    - Replacing the pointer makes a new generation the one in use. Generations of writers that were
      killed are removed before and after.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pyarrow import feather
from pydantic import Field

from skilltrain.config import InputPath, validate
from skilltrain.data.pool.read import merge_sources, read_by_source, read_pool
from skilltrain.data.screening import write_flags
from skilltrain.data.screening.findings import inherited_findings, move_findings
from skilltrain.data.screening.rules import Flag
from skilltrain.errors import SkilltrainError
from skilltrain.files import (
    LOCAL_FILE,
    fingerprint,
    locked,
    read_json,
    read_local,
    remove_leftovers,
    staged_folder,
    write_json,
)
from skilltrain.formats import CALIBRATION as CALIBRATION_FORMAT
from skilltrain.models.loading import ModelConfig
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.rankers import AnyRanker, RankerConfig, flatten_rankers
from skilltrain.retrieval.vectors import text_keys
from skilltrain.serving.answer import Calibration
from skilltrain.serving.index import (
    KEYS_FILE,
    MAX_HASHED_BYTES,
    POINTER,
    RECORD,
    SKILLS_FILE,
    AllowedServers,
    Contents,
    Index,
    IndexRecord,
    check_servers,
    next_generation,
    remove_old_generations,
    storing_rankers,
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
        default=None, description="whatever the stage pool reads; null: the router's own pool"
    )
    rankers: tuple[AnyRanker, ...] | None = Field(
        None,
        min_length=1,
        description="rankers of a system, such as [{kind: lexical}]; null: those of the router",
    )
    calibration: InputPath | None = Field(
        default=None, description="folder of the stage calibrate; null: the router's own, if any"
    )
    allow_servers: AllowedServers = ()
    out: Path = Field(description="folder of the router; other files in it are left alone")

    def run(self, out: Path) -> Summary:
        """Write the router's next generation; return counts of new, changed and gone skills.

        Raises:
            SkilltrainError: The pool or the rankers are neither given nor in a router at `out`, a
                ranker cannot be in a router, or the calibration is of other rankers or models.
        """
        system, contents = _read_settings(self)
        calibration = None
        if self.calibration is not None:
            calibration = _read_calibration(self.calibration / CALIBRATION_FILE)
        # No model is open yet, so `models` is empty.
        return write_index(out, system, contents, models={}, calibration=calibration)

    def dry_run(self) -> Summary:
        """Count the skills that are new, changed and gone."""
        _, contents = _read_settings(self)
        skills = contents.all_skills()
        return _count_changes(_open_or_none(self.out), skills, _content_keys(skills))


def _read_calibration(file: Path) -> Calibration:
    """Read the calibration that the stage `calibrate` wrote."""
    values = read_json(file)
    CALIBRATION_FORMAT.check(values, file, "run skilltrain calibrate again")
    return validate(Calibration, values, file)


def _read_settings(config: BuildIndex) -> tuple[SystemConfig, Contents]:
    """Return the rankers and the skills for the next generation of a router.

    If `pool` or `rankers` is null, it is taken from the router in the folder `out`.
    """
    index = _open_old_router(config)
    system = _read_system(config, index)
    return system, _read_contents(config, index)


def _open_old_router(config: BuildIndex) -> Index | None:
    """Open the router in the folder `out`. Return None if it is not needed and cannot be opened."""
    try:
        return Index.open(config.out)
    except SkilltrainError as error:
        # With both settings given, nothing of the old router is needed.
        if config.pool is not None and config.rankers is not None:
            return None
        fix = "give pool=… and rankers=…"
        raise SkilltrainError(error.code, error.problem, where=error.where, fix=fix) from error


def _read_system(config: BuildIndex, index: Index | None) -> SystemConfig:
    """Return the rankers of the settings, or else of the router. Check them and their servers.

    Rankers of the settings may use any server. Rankers of an existing router may come from somebody
    else, so their servers must be allowed.

    Args:
        config: Settings of the stage.
        index: The router in the folder `out`, if there is one.
    """
    rankers = config.rankers
    allowed_servers = None  # None allows all servers
    if rankers is None:
        assert index is not None  # `_open_old_router` has checked it
        rankers = index.system.rankers
        allowed_servers = config.allow_servers
    system = validate(SystemConfig, {"name": "router", "rankers": rankers}, config.out)
    check_servers(system, allowed_servers, config.out)
    check_rankers(system)
    return system


def _read_contents(config: BuildIndex, index: Index | None) -> Contents:
    """Read the pool, and the watched folders of the router if it is its own pool.

    Skills without a category keep the category that they have in the router.
    """
    pool = config.pool
    if pool is None:
        assert index is not None
        pool = index.pool
    old_categories = {id_: skill.category for id_, skill in index.skills.items()} if index else {}
    skills = {
        source: [_keep_category(skill, old_categories) for skill in source_skills]
        for source, source_skills in read_by_source(pool).items()
    }
    watched = index.watched if index and index.pool == pool.resolve() else []
    for folder in watched:
        skills.setdefault(folder, [])  # `read_watched` replaces the empty list
    return read_watched(Contents(pool, skills, watched), folders=watched)


def read_watched(contents: Contents, folders: Collection[Path]) -> Contents:
    """Return `contents` with the current skills of watched folders.

    A folder that is gone keeps its skills, because it may come back. A skill without a category
    keeps the category that `contents` has for its id. If two sources use an id for different
    skills, the skill of the second source gets another id.

    Args:
        contents: Skills of the router by source: the folder or file that they were read from.
        folders: Watched folders to read, which may be new to the router.

    Raises:
        SkilltrainError: A new folder has skills of an unwatched source.
    """
    old_categories = {skill.skill_id: skill.category for skill in contents.all_skills()}
    skills_by_source = dict(contents.skills)
    for folder in folders:
        if not folder.is_dir():
            say(f"{folder}: this watched folder is gone")
            continue
        skills = _read_folder(folder)
        # Only a folder that was not watched before can repeat skills of another source.
        if folder not in contents.skills:
            _check_new_folder(folder, skills, contents, folders)
        skills_by_source[folder] = [_keep_category(skill, old_categories) for skill in skills]

    if len(skills_by_source) > 1:
        # Several sources may use the same id. Copies with the same id are dropped.
        unique, _ = merge_sources(list(skills_by_source.values()), drop_duplicates=False)
        skills_by_source = dict(zip(skills_by_source, unique, strict=True))
    return contents._replace(skills=skills_by_source, watched={*contents.watched, *folders})


def _read_folder(folder: Path) -> list[Skill]:
    """Read the skills of a folder, which may have none."""
    try:
        return read_pool(folder)
    except SkilltrainError:
        return []


def _keep_category(skill: Skill, old_categories: Mapping[str, str | None]) -> Skill:
    """Return a skill with the old category of its id, if it has no category."""
    if skill.category or skill.skill_id not in old_categories:
        return skill
    return replace(skill, category=old_categories[skill.skill_id])


def _check_new_folder(
    folder: Path, skills: Sequence[Skill], contents: Contents, watched: Collection[Path]
) -> None:
    """Raise SkilltrainError if a folder to watch has skills of an unwatched source.

    This happens when a folder has moved. Its skills would have two sources, and a skill that is
    removed from the folder would stay in the router.

    Args:
        folder: Folder to watch, which is new to the router.
        skills: Skills of the folder.
        contents: Skills of the router by source.
        watched: All folders to watch.
    """
    skill_ids = {skill.skill_id for skill in skills}
    for source in sorted(contents.skills.keys() - set(watched)):
        # A source that contains the folder has its skills too.
        has_same_id = any(skill.skill_id in skill_ids for skill in contents.skills[source])
        if has_same_id or folder.is_relative_to(source):
            problem = f"has skills of {source}, which is not watched"
            fix = f"watch both; if it has moved, first run skilltrain index pool={folder} out=…"
            raise SkilltrainError("unwatched-folder", problem, where=folder, fix=fix)


def _open_or_none(router: Path) -> Index | None:
    """Open a router. Return None if there is none, or if it is damaged."""
    try:
        return Index.open(router)
    except SkilltrainError:
        return None


def check_rankers(system: SystemConfig) -> None:
    """Check that rankers can run, and can be in a router. Raises SkilltrainError if not.

    Args:
        system: Rankers of a router.
    """
    for part in flatten_rankers(system.rankers):
        if not part.can_be_in_router:
            problem = f"a router cannot contain the ranker {part.kind}, which is for experiments"
            fix = "use another ranker; skilltrain evaluate takes this one"
            raise SkilltrainError("conflicting-settings", problem, where="rankers", fix=fix)
        # The folder of a router may come from a stranger, so it must not bring code.
        if isinstance(part, ModelConfig) and part.trust_remote_code:
            problem = "a router runs no code that a model brings"
            fix = "use another model"
            raise SkilltrainError("remote-code", problem, where=part.source, fix=fix)
    check_systems([system])


def write_index(
    router: Path,
    system: SystemConfig,
    contents: Contents,
    models: dict[str, Any],
    calibration: Calibration | None = None,
    previous: Index | None = None,
) -> dict[str, int]:
    """Write the next generation of a router. If nothing has changed, nothing is written.

    Args:
        router: Folder of the router.
        system: Rankers of the router.
        contents: Skills of the router. Only new or changed skills are encoded.
        models: Open models by the ranker's `key`. Further ones are added.
        calibration: Calibration to add. None keeps the old one, if it still applies.
        previous: Generation to change; None for the one in the folder.

    Returns:
        Counts of all, new, changed and gone skills.

    Raises:
        SkilltrainError: The pool is empty, an id repeats, `calibration` does not apply, or another
            process writes.
    """
    remove_leftovers(router)
    with locked(router):
        router.mkdir(parents=True, exist_ok=True)
        previous = _current_index(router, previous)
        folder = next_generation(router)
        remove_old_generations(router)  # those of writers that were killed

        skills = contents.all_skills()
        content_keys = _content_keys(skills)
        counts = _count_changes(previous, skills, content_keys)
        record = _create_record(router, system, contents, calibration, previous)
        findings = _findings_of(contents, previous)
        if previous and _is_unchanged(previous, record, content_keys, findings):
            return counts

        _write_generation(folder, record, skills, content_keys, models, previous, findings)
        # Replacing the pointer makes the new generation the one in use.
        write_json(router / POINTER, {"index": folder.name})
        remove_old_generations(router)
    return counts


def _create_record(
    router: Path,
    system: SystemConfig,
    contents: Contents,
    calibration: Calibration | None,
    previous: Index | None,
) -> IndexRecord:
    """Create the record of the next generation, and add the paths that it needs to `local.json`.

    Args:
        router: Folder of the router.
        system: Rankers of the router.
        contents: Skills of the router.
        calibration: Calibration to add. None keeps the old one.
        previous: Previous generation, if there is one.
    """
    old_calibration = previous.record.calibration if previous else None
    used_calibration = calibration or old_calibration
    local_paths = read_local(router)
    record = IndexRecord.create(router, local_paths, system, contents, used_calibration)
    # The record leaves out a calibration that does not apply. A new one must apply.
    if calibration is not None and record.calibration is None:
        problem = "the calibration is of other rankers or models"
        fix = "run skilltrain calibrate on this router"
        raise SkilltrainError("changed-model", problem, where=router, fix=fix)

    has_new_paths = local_paths != read_local(router)
    if has_new_paths:
        write_json(router / LOCAL_FILE, local_paths)
    return record


def _is_unchanged(
    previous: Index,
    record: IndexRecord,
    content_keys: np.ndarray,
    findings: Mapping[str, Flag],
) -> bool:
    """Return whether the next generation has the skills and the record of the previous one.

    Args:
        previous: Previous generation.
        record: Record of the next generation, still without files.
        content_keys: Key of each skill's content in the next generation, [skill].
        findings: Findings of a chat model in the next generation, by skill id.
    """
    if previous.findings != findings or not np.array_equal(previous.keys, content_keys):
        return False
    # The next record has no files yet, so leave them out of the comparison.
    old_record_without_files = previous.record.model_copy(update={"files": {}, "digests": {}})
    return old_record_without_files == record


def _findings_of(contents: Contents, previous: Index | None) -> Mapping[str, Flag]:
    """Return the findings of a chat model about the skills of a router, by skill id.

    Args:
        contents: Skills of the router, and the path of the pool whose findings they inherit.
        previous: Previous generation. If the pool is gone, its findings are kept.
    """
    skills = contents.all_skills()
    if previous and not contents.pool.exists():
        return move_findings(previous.findings, previous.skills.values(), skills)
    return inherited_findings(skills, [contents.pool])


def _current_index(router: Path, previous: Index | None) -> Index | None:
    """Return `previous`, or the generation in the folder if it is None.

    Args:
        router: Folder of the router.
        previous: Generation that the caller has opened, if any.

    Raises:
        SkilltrainError: Another process has written since `previous` was opened.
    """
    if previous is None:
        return _open_or_none(router)
    if not previous.is_current():
        problem = "another process has written meanwhile"
        raise SkilltrainError("folder-in-use", problem, where=router)
    return previous


def _write_generation(
    folder: Path,
    record: IndexRecord,
    skills: Sequence[Skill],
    content_keys: np.ndarray,
    models: dict[str, Any],
    previous: Index | None,
    findings: Mapping[str, Flag],
) -> None:
    """Write the files of a generation. Data of unchanged skills is copied from `previous`.

    Args:
        folder: Folder of the generation.
        record: Its record, without `files` and `digests`.
        skills: Skills of the router.
        content_keys: Key of each skill's content, [skill].
        models: Open models by the ranker's `key`. Further ones are added.
        previous: Previous generation, if there is one.
        findings: Findings of a chat model by skill id.
    """
    if previous and previous.record.models != record.models:
        previous = None  # its data is of other models
    old_parts = previous.stored_parts if previous else {}
    # Position of each skill in the old data; -1 if the skill is new or changed.
    old_positions = _find_unchanged(previous, content_keys)

    router = folder.parent
    with staged_folder(folder) as staged:
        # Each ranker stores its data about the pool in a folder of its own: `part-1`, `part-2`.
        for part_name, ranker in storing_rankers(record.system(router)).items():
            part_folder = staged / part_name
            part_folder.mkdir()
            model = open_model(ranker, models, router)
            model.save_part(part_folder, skills, old_parts.get(ranker.key), old_positions)

        np.save(staged / KEYS_FILE, content_keys)
        if findings:
            # A router runs the rules for every answer. It asks no chat model, so its findings are
            # stored.
            write_flags({skill_id: [flag] for skill_id, flag in findings.items()}, staged)
        table = table_from_rows(skills, SKILLS)
        feather.write_feather(table, staged / SKILLS_FILE, compression="uncompressed")
        record_with_files = _add_files(record, staged)
        write_json(staged / RECORD, record_with_files.model_dump(mode="json"))


def _find_unchanged(previous: Index | None, content_keys: np.ndarray) -> list[int]:
    """Return the position of each skill in the previous generation; -1 if it is new or changed.

    Args:
        previous: Previous generation, if its data can be used.
        content_keys: Key of each skill's content in the next generation, [skill].
    """
    old_keys = previous.keys.tolist() if previous else []
    position_by_key = {key: position for position, key in enumerate(old_keys)}
    return [position_by_key.get(key, -1) for key in content_keys.tolist()]


def _add_files(record: IndexRecord, folder: Path) -> IndexRecord:
    """Return a record with the sizes and fingerprints of all files in a folder."""
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    for file in folder.rglob("*.*"):  # only files have a dot in their names
        name = file.relative_to(folder).as_posix()
        sizes[name] = file.stat().st_size
        # Larger files are checked only by their sizes, because hashing takes seconds.
        if sizes[name] <= MAX_HASHED_BYTES:
            digests[name] = fingerprint(file)
    return record.model_copy(update={"files": sizes, "digests": digests})


def _content_keys(skills: Sequence[Skill]) -> np.ndarray:
    """Return a key of each skill's content, [skill].

    Raises:
        SkilltrainError: There is no skill, or an id repeats.
    """
    if not skills:
        raise SkilltrainError("empty-pool", "the pool is empty")
    num_ids = len({skill.skill_id for skill in skills})
    if num_ids < len(skills):
        problem = f"{len(skills)} skills have {num_ids} different ids"
        raise SkilltrainError("repeated-id", problem, where="pool")
    # `repr` has all fields of a skill, so each change gives another key. No token limit applies, so
    # it is 0.
    return text_keys([repr(skill) for skill in skills], 0)


def _count_changes(
    previous: Index | None, skills: Sequence[Skill], keys: np.ndarray
) -> dict[str, int]:
    """Count the skills, and those that are new, changed and gone.

    Args:
        previous: Previous generation; None if all skills are new.
        skills: Skills of the router.
        keys: Key of each skill's content, [skill].
    """
    # Key of each skill's content by the id of the skill, before and after.
    old_keys: dict[str, int] = {}
    if previous:
        old_keys = dict(zip(previous.skills, previous.keys.tolist(), strict=True))
    new_keys = dict(zip([skill.skill_id for skill in skills], keys.tolist(), strict=True))
    common_ids = old_keys.keys() & new_keys.keys()
    return {
        "num_skills": len(new_keys),
        "num_new": len(new_keys) - len(common_ids),
        "num_changed": sum(old_keys[skill_id] != new_keys[skill_id] for skill_id in common_ids),
        "num_gone": len(old_keys) - len(common_ids),
    }


def open_model(config: RankerConfig, models: dict[str, Any], router: Path | None) -> Any:
    """Return the model of a ranker, which serves any pool. It is opened if `models` lacks it.

    Args:
        config: The ranker.
        models: Open models by the rankers' `key`. Rankers also share encoders through it.
        router: Folder for the vectors of an encoder without a cache of its own, if there is one.
    """
    key = config.key
    if key not in models:
        models[key] = config.in_router(router).open(models)
    return models[key]
