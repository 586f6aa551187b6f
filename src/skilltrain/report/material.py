"""What the page on lists is made of, read once: the runs that made them, the lists' entries as aligned arrays, and the
entries that break an assumption of training.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Bool, Int64

from skilltrain.data.query_texts import names_program, names_skill
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Skill
from skilltrain.runs import RUN_FILE, record_of
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    FLAGS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    TableSpec,
    read_table,
    table_path,
)
from skilltrain.texts import language_of, name_key

SHORT_BODY = 200  # characters; too few to teach what a skill does
_INPUTS = (
    "lists",
    "rankings",
    "queries",
    "pool",
    "clusters",
)  # the settings by which a stage names runs before it

Entries = Bool[np.ndarray, " entry"]


class Run(NamedTuple):
    """A run on the way to the lists: its stage, its folder and its settings."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]

    def ranks(self, of_others: bool) -> bool:
        """Whether it wrote rankings: its own, or (`of_others`) what was left of those that its recipe names."""
        return (
            table_path(self.folder, RANKINGS).is_file() and ("rankings" in self.recipe) == of_others
        )


class Trail:
    """The runs from the lists back, nearest first, what they read (setting → paths), and what is missing of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Run] = []
        self.inputs: dict[str, list[Path]] = {name: [] for name in _INPUTS}
        self.missing: list[str] = []
        self._follow(folder)
        self.filters = [run for run in self.runs if run.ranks(of_others=True)]

    def _follow(self, folder: Path) -> None:
        """Add the run of `folder` and those before it; a pool or queries that no stage wrote have no record."""
        if any(run.folder == folder for run in self.runs):
            return
        if not (record := record_of(folder)):
            if folder not in (*self.inputs["queries"], *self.inputs["pool"]):
                self.missing.append(f"{folder}: no record of its run ({RUN_FILE})")
            return
        recipe = record["recipe"]
        self.runs.append(Run(recipe["stage"], folder, recipe))
        for name in (name for name in _INPUTS if isinstance(recipe.get(name), str)):
            written = Path(recipe[name]).expanduser()
            places = (
                written,
                self.folder.parent / written.name,
            )  # as written, or beside the lists: runs move
            if found := next((place.resolve() for place in places if place.exists()), None):
                self.inputs[name].append(found)
                self._follow(found if found.is_dir() else found.parent)
            elif name in ("lists", "rankings"):
                self.missing.append(f"{name} of stage {recipe['stage']}: {recipe[name]}")

    def first(self, name: str) -> Path | None:
        """What the nearest run read as `name`."""
        return next(iter(self.inputs[name]), None)


def rows_of(path: Path | None, spec: TableSpec) -> list[dict[str, Any]] | None:
    """The rows of a table; None where it is not there."""
    if path is None or not table_path(path, spec).is_file():
        return None
    return read_table(path, spec).to_pylist()


class Material:
    """Lists, entry by entry, with the `skills` in use; one that the pool lacks has empty texts and is not `known`.

    Of each entry: the place of its list (`in_list`), and of its `skill`, `source` and `verdict` in `skills`, `sources`
    and `verdicts`; its `rank`; the `score` of a teacher (NaN where none scored); whether it is `positive`. `texts` has
    the query of each list, empty where it was not found. What no run tells is None: `num_pool`, `mined` and `kept`
    (candidates by source), `flags`, `clusters` (of each skill, -1 for none).
    """

    def __init__(self, lists: Path, pool: Path | None) -> None:
        """Read them; say what is missing. Raises SkilltrainError where `lists` holds no lists or `pool` no skills."""
        if (rows := rows_of(lists, LISTS)) is None:
            what = "holds no lists" if lists.is_dir() else "no such folder"
            raise SkilltrainError(
                what, where=lists, fix="give the folder that `skilltrain lists` wrote"
            )
        if pool is not None and not table_path(pool, SKILLS).is_file():
            raise SkilltrainError(
                "holds no pool", where=pool, fix="give the folder that `skilltrain pool` wrote"
            )
        self.trail = trail = Trail(lists.resolve() if lists.is_dir() else lists.resolve().parent)
        pool = pool or trail.first("pool")
        mined = next((run for run in trail.runs if run.ranks(of_others=False)), None)
        self.mined, self.kept = (
            _by_source(mined),
            _by_source(trail.filters[0] if trail.filters else mined),
        )
        dropped = [rows_of(run.folder, DROPPED) or () for run in reversed(trail.filters)]
        self.drops = [Dropped(**row) for row in chain(*dropped)]
        self._read_skills(pool, {skill_id for row in rows for skill_id in row["skill_ids"]})
        self.query_ids = [row["query_id"] for row in rows]
        found = [rows_of(path, QUERIES) or () for path in (*trail.inputs["queries"], trail.folder)]
        self.query_texts = {
            row["query_id"]: row["text"] for row in chain(*found)
        }  # drops name queries without list
        if not self.query_texts:
            trail.missing.append("queries: lists are shown without their query's text")
        self.texts = [self.query_texts.get(query_id, "") for query_id in self.query_ids]
        self.flags = rows_of(pool.parent if pool and pool.is_file() else pool, FLAGS)
        self.clusters = None
        if (clustered := rows_of(trail.first("clusters") or pool, CLUSTERS)) is not None:
            clusters = {row["skill_id"]: row["cluster"] for row in clustered}
            self.clusters = np.array([clusters.get(skill.skill_id, -1) for skill in self.skills])
        self._read_entries(rows)

    def _read_skills(self, pool: Path | None, used: set[str]) -> None:
        """Those of the lists (`used`) and of the drops, the known ones first."""
        used |= {
            skill_id
            for drop in self.drops
            for skill_id in (drop.skill_id, drop.other_id)
            if skill_id
        }
        in_pool = rows_of(pool, SKILLS)
        if in_pool is None:
            self.trail.missing.append("pool: texts of skills are missing (give --pool)")
        known = [Skill(**row) for row in in_pool or () if row["skill_id"] in used]
        unknown = sorted(used - {skill.skill_id for skill in known})
        self.skills = [*known, *(Skill(skill_id, skill_id, "", "") for skill_id in unknown)]
        self.known = np.arange(len(self.skills)) < len(known)
        self.num_pool = None if in_pool is None else len(in_pool)
        self.position = {skill.skill_id: place for place, skill in enumerate(self.skills)}
        self.body_chars = np.array([len(skill.body) for skill in self.skills], dtype=np.int64)

    def _read_entries(self, rows: list[dict[str, Any]]) -> None:
        self.in_list = np.repeat(np.arange(len(rows)), [len(row["skill_ids"]) for row in rows])
        self.skill = np.array(
            [self.position[skill_id] for row in rows for skill_id in row["skill_ids"]], np.int64
        )
        self.sources, self.source = codes(value for row in rows for value in row["sources"])
        self.verdicts, self.verdict = codes(value for row in rows for value in row["verdicts"])
        self.rank = np.array([rank for row in rows for rank in row["ranks"]], dtype=np.int64)
        scores = (row["teacher_scores"] or [np.nan] * len(row["skill_ids"]) for row in rows)
        self.score = np.array([score for row in scores for score in row], dtype=np.float64)
        self.positive = np.array([name in POSITIVE for name in self.verdicts], dtype=bool)[
            self.verdict
        ]

    def num_lists(self, positive: bool) -> Int64[np.ndarray, " skill"]:
        """How often each skill is a positive, or a negative, of a list."""
        return np.bincount(self.skill[self.positive == positive], minlength=len(self.skills))

    def like_a_positive(self, numbers: Int64[np.ndarray, " skill"]) -> Entries:
        """Which entries are negatives whose skill has the number of a positive of their list; -1 equals nothing."""
        own = numbers[self.skill]
        key = self.in_list * (int(numbers.max(initial=0)) + 1) + own
        return ~self.positive & (own >= 0) & np.isin(key, key[self.positive & (own >= 0)])


def codes(values: Iterable[str | None]) -> tuple[list[str], Int64[np.ndarray, " value"]]:
    """(the distinct values, the place of each value among them); -1 for None and for the empty text."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(value, len(numbers)) if value else -1 for value in values]
    return list(numbers), np.array(found, dtype=np.int64)


def _by_source(run: Run | None) -> Counter[str] | None:
    """Candidates by source; of millions of rows only this column is read."""
    if run is None:
        return None
    column = pq.read_table(table_path(run.folder, RANKINGS), columns=["stage"]).column("stage")
    return Counter({row["values"]: row["counts"] for row in column.value_counts().to_pylist()})


def run_checks(m: Material) -> dict[str, Int64[np.ndarray, " found"]]:
    """Check → the places of the entries that it found; what each means stands in the page's template."""
    found: dict[str, Entries] = {}
    if m.num_pool is not None:
        known = m.known[m.skill]
        _, names = codes(name_key(skill.name) for skill in m.skills)
        _, bodies = codes(skill.body.strip() for skill in m.skills)
        _, descriptions = codes(skill.description.strip().casefold() for skill in m.skills)
        asked = [
            (n, m.texts[m.in_list[n]], m.skills[m.skill[n]])
            for n in np.flatnonzero(m.positive & known).tolist()
        ]
        places = np.arange(len(m.in_list))
        found["leak"] = np.isin(
            places, [n for n, text, skill in asked if names_skill(text, skill.name)]
        )
        found["program_leak"] = np.isin(
            places, [n for n, text, skill in asked if names_program(text, skill.body)]
        )
        found["same_name"] = m.like_a_positive(names) & known
        found["same_text"] = m.like_a_positive(bodies) | m.like_a_positive(descriptions)
        languages = [(n, language_of(text[:4000]), skill.lang) for n, text, skill in asked]
        found["other_language"] = np.isin(
            places, [n for n, one, other in languages if one and other and one != other]
        )
        found["short_positive"] = m.positive & known & (m.body_chars[m.skill] < SHORT_BODY)
    if m.clusters is not None:
        found["cluster"] = m.like_a_positive(m.clusters)
    return {key: np.flatnonzero(mask) for key, mask in found.items()}
