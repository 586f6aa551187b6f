"""The command `skilltrain inspect`: one HTML page about training lists."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from skilltrain.data.query_texts import names_program, names_skill
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.page import html_page
from skilltrain.files import write_text
from skilltrain.records import POSITIVE, Dropped, Skill
from skilltrain.runs import RUN_FILE, record_of
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
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
NUM_PER_CHECK = 20  # lists shown of each check, besides the sample
NUM_PER_FILTER = 50  # dropped candidates shown of each filter
_INPUTS = ("lists", "rankings", "queries", "pool", "clusters")  # settings that name earlier runs

# What each check means stands in the page's template.
POSITIVE_CHECKS: Mapping[str, Callable[[str, Skill], bool]] = {
    "leak": lambda text, skill: names_skill(text, skill.name),
    "program_leak": lambda text, skill: names_program(text, skill.body),
    "other_language": lambda text, skill: (
        bool(skill.lang) and language_of(text[:4000]) not in (None, skill.lang)
    ),
    "short_positive": lambda text, skill: len(skill.body) < SHORT_BODY,
}
"""Check → whether it points at a positive of a list, given the query's text."""
NEGATIVE_CHECKS: Mapping[str, Callable[[Skill], Any]] = {
    "same_name": lambda skill: name_key(skill.name),
    "same_description": lambda skill: skill.description.strip().casefold(),
    "same_body": lambda skill: skill.body.strip(),
}
"""Check → what a negative must not share with a positive of its list."""


class Run(NamedTuple):
    """A run on the way to the lists."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]


class Trail(NamedTuple):
    """The runs from the lists in `folder` back to the pool, what they read by setting, and what was not found."""

    folder: Path
    runs: list[Run]
    inputs: dict[str, list[Path]]
    missing: list[str]


def inspect_lists(
    lists: Path, out: Path | None, pool: Path | None, max_lists: int
) -> dict[str, Any]:
    """Write a page about the lists in a folder, and return its counts.

    Args:
        lists: Folder of a stage that writes LISTS.
        out: File to write; None for `lists`.html beside the folder.
        pool: Pool to use in the place of the one that the record of the lists names.
        max_lists: Number of lists to show. Of more lists a sample is shown.

    Raises:
        SkilltrainError: If `lists` holds no lists, `pool` no pool, or `out` is in the folder `lists`.
    """
    folder = lists.resolve() if lists.is_dir() else lists.resolve().parent
    file = folder.with_name(f"{folder.name}.html") if out is None else out
    for path, spec in ((lists, LISTS), (pool, SKILLS)):
        if path is not None and not table_path(path, spec).is_file():
            fix = f"give a folder with {spec.name}.parquet"
            raise SkilltrainError(f"holds no {spec.name}", where=path, fix=fix)
    if folder in file.resolve().parents:
        what = "lies in the folder of the lists, which a page would change"
        raise SkilltrainError(what, where=file, fix="set --out")

    trail = follow_runs(folder)
    values = page_values(_read_rows([lists], LISTS), trail, pool, max_lists)
    write_text(file, html_page("lists", **values, trail=trail, short_body=SHORT_BODY))
    return {
        "page": str(file),
        "num_lists": values["num_lists"],
        "num_lists_shown": len(values["shown"]),
        "num_drops_shown": len(values["shown_drops"]),
        "worth_a_look": {check: len(queries) for check, queries in values["findings"].items()},
        "missing": trail.missing,
    }


def follow_runs(folder: Path) -> Trail:
    """Follow the records of runs from the lists in `folder` back to the pool.

    A pool or queries that no stage wrote have no record, which is no fault.
    """
    trail = Trail(folder, [], {name: [] for name in _INPUTS}, [])
    if not record_of(folder):
        trail.missing.append(f"{folder}: no record of its run ({RUN_FILE})")
    waiting = [folder]
    for current in waiting:
        record = record_of(current)
        if not record or any(run.folder == current for run in trail.runs):
            continue
        recipe = record["recipe"]
        trail.runs.append(Run(recipe["stage"], current, recipe))
        for name in _INPUTS:
            if not isinstance(recipe.get(name), str):
                continue
            path = Path(recipe[name]).expanduser()
            if not path.exists():
                path = folder.parent / path.name  # runs that moved together lie beside the lists
            if path.exists():
                path = path.resolve()
                trail.inputs[name].append(path)
                waiting.append(path if path.is_dir() else path.parent)
            elif name in ("lists", "rankings"):
                trail.missing.append(f"{name} of stage {recipe['stage']}: {recipe[name]}")
    return trail


def _read_rows(paths: Iterable[Path | None], spec: TableSpec) -> list[dict[str, Any]]:
    """Return the rows of the tables of a kind that are in `paths`."""
    files = [table_path(path, spec) for path in paths if path is not None]
    tables = [read_table(file, spec).to_pylist() for file in files if file.is_file()]
    return list(itertools.chain(*tables))


def page_values(
    rows: Sequence[Mapping[str, Any]], trail: Trail, pool: Path | None, max_lists: int
) -> dict[str, Any]:
    """Return what the page shows, by the names that its template uses."""
    pools = trail.inputs["pool"][:1] if pool is None else [pool]
    skills = {row["skill_id"]: Skill(**row) for row in _read_rows(pools, SKILLS)}
    queries = _read_rows([*trail.inputs["queries"], trail.folder], QUERIES)
    texts = {row["query_id"]: row["text"] for row in queries}
    clustered = _read_rows([*pools, *trail.inputs["clusters"]], CLUSTERS)
    clusters = {row["skill_id"]: row["cluster"] for row in clustered}
    if not skills:
        trail.missing.append("pool: texts of skills are missing (give --pool)")
    if not texts:
        trail.missing.append("queries: lists are shown without their query's text")

    ranked = [run for run in trail.runs if table_path(run.folder, RANKINGS).is_file()]
    mined = [run for run in ranked if "rankings" not in run.recipe]
    drops: dict[tuple[str, str], list[Dropped]] = {}
    for run in reversed(trail.runs):
        for row in _read_rows([run.folder], DROPPED):
            drops.setdefault((run.stage, row["filter"]), []).append(Dropped(**row))
    filtered = {name: drops[stage, name] for stage, name in drops if stage == "filter"}
    shown_drops: list[Dropped] = []
    for name, of_filter in filtered.items():
        pairs = {
            (drop.query_id, drop.skill_id): drop for drop in of_filter
        }  # sources may share one
        sample = _sample(list(pairs.values()), NUM_PER_FILTER, name)
        shown_drops += sorted(sample, key=lambda drop: drop.value or 0.0)  # close calls first

    findings: dict[str, dict[str, set[str]]] = {}
    chosen: Counter[str] = Counter()
    for row in rows:
        query_id = row["query_id"]
        for check, skill_ids in check_list(row, texts.get(query_id, ""), skills, clusters).items():
            findings.setdefault(check, {})[query_id] = skill_ids
        judged = zip(row["sources"], row["verdicts"], strict=True)
        chosen.update(source for source, verdict in judged if verdict not in POSITIVE)
    shown = set(_sample([row["query_id"] for row in rows], max_lists, "lists"))
    for check, broken in findings.items():
        shown.update(_sample(list(broken), NUM_PER_CHECK, check))
    return {
        "num_pool": len(skills) or None,
        "num_lists": len(rows),
        "mined": _count_by_source(mined),
        "kept": _count_by_source(ranked),
        "dropped": Counter(drop.source for drop in itertools.chain(*filtered.values())),
        "chosen": chosen,
        "quotas": next((r.recipe["quotas"] for r in trail.runs if r.recipe.get("quotas")), {}),
        "drops": drops,
        "findings": findings,
        "skills": skills,
        "texts": texts,
        "positives": {row["query_id"]: row["skill_ids"][0] for row in rows},
        "shown": [row for row in rows if row["query_id"] in shown],
        "shown_drops": shown_drops,
    }


def _count_by_source(runs: Sequence[Run]) -> Counter[str] | None:
    """Count candidates of the nearest run by source. Of millions of rows only this column is read."""
    if not runs:
        return None
    table = pq.read_table(table_path(runs[0].folder, RANKINGS), columns=["stage"])
    counts = table.column("stage").value_counts().to_pylist()
    return Counter({row["values"]: row["counts"] for row in counts})


def _sample(items: Sequence[Any], count: int, seed: str) -> list[Any]:
    return random.Random(seed).sample(items, min(count, len(items)))


def check_list(
    row: Mapping[str, Any],
    text: str,
    skills: Mapping[str, Skill],
    clusters: Mapping[str, int],
) -> dict[str, set[str]]:
    """Check what training assumes of a list, and return the ids of the skills that break it by check."""
    judged = zip(row["skill_ids"], row["verdicts"], strict=True)
    known = [(skills[key], verdict in POSITIVE) for key, verdict in judged if key in skills]
    positives = [skill for skill, is_positive in known if is_positive]
    negatives = [skill for skill, is_positive in known if not is_positive]
    findings: dict[str, set[str]] = {}
    for check, is_odd in POSITIVE_CHECKS.items():
        findings[check] = {skill.skill_id for skill in positives if is_odd(text, skill)}
    keys = {**NEGATIVE_CHECKS, "cluster": lambda skill: clusters.get(skill.skill_id)}
    for check, key in keys.items():
        shared = {key(skill) for skill in positives} - {None, ""}
        findings[check] = {skill.skill_id for skill in negatives if key(skill) in shared}
    return {check: skill_ids for check, skill_ids in findings.items() if skill_ids}
