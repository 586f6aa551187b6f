"""The command `skilltrain inspect`: write one HTML page about training lists or queries."""

import itertools
import random
from collections import Counter, deque
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
    read_lists,
    read_queries,
    read_table,
    read_verdicts,
    table_path,
)
from skilltrain.texts import language_of, name_key

SHORT_BODY = 200  # characters; a shorter body hardly says what a skill does
NUM_PER_CHECK = 20  # lists shown of each check, besides the sample
NUM_PER_FILTER = 50  # dropped candidates shown of each filter
_MAX_LANGUAGE_CHARS = 4000  # of a query that are read to detect its language
_INPUTS = ("lists", "rankings", "queries", "pool", "clusters")  # settings that name earlier runs


def _is_in_other_language(text: str, skill: Skill) -> bool:
    """Return whether a query is in another language than a skill. Unknown languages agree."""
    if not skill.lang:
        return False
    language = language_of(text[:_MAX_LANGUAGE_CHARS])
    return language is not None and language != skill.lang


# The template of the page explains each check.
POSITIVE_CHECKS: Mapping[str, Callable[[str, Skill], bool]] = {
    "leak": lambda text, skill: names_skill(text, skill.name),
    "program_leak": lambda text, skill: names_program(text, skill.body),
    "other_language": _is_in_other_language,
    "short_positive": lambda text, skill: len(skill.body) < SHORT_BODY,
}
"""For each check, whether it reports a positive, given the text of its query."""
NEGATIVE_CHECKS: Mapping[str, Callable[[Skill], Any]] = {
    "same_name": lambda skill: name_key(skill.name),
    "same_description": lambda skill: skill.description.strip().casefold(),
    "same_body": lambda skill: skill.body.strip(),
}
"""For each check, the property that a negative must not share with a positive of its list."""


class Run(NamedTuple):
    """A run that led to the lists."""

    stage: str
    folder: Path
    recipe: Mapping[str, Any]


class Trail(NamedTuple):
    """The runs from the lists back to the pool.

    Attributes:
        folder: Folder of the lists.
        runs: Runs, the one that wrote the lists first.
        inputs: Paths that the runs read, by setting.
        missing: One line for each input or record that was not found.
    """

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
        out: File to write; None for a file beside the folder, with its name and the suffix .html.
        pool: Pool to use instead of the one that the record of the lists names.
        max_lists: Number of lists to show. If there are more lists, a sample is shown.

    Returns:
        Counts and other facts by name:

        - `page`: path of the page.
        - `num_lists`, `num_lists_shown`: numbers of all lists and of the lists on the page.
        - `num_drops_shown`: number of candidates on the page that the stage `filter` dropped.
        - `worth_a_look`: by check, the number of queries whose list failed it.
        - `missing`: a line for each input that was not found.

    Raises:
        SkilltrainError: `lists` holds no lists, `pool` no pool, or `out` is in the folder `lists`.
    """
    folder = lists.resolve() if lists.is_dir() else lists.resolve().parent
    _check_table(lists, LISTS)
    if pool is not None:
        _check_table(pool, SKILLS)
    page = _page_path(folder, out)

    # Find the runs that made the lists, and the inputs of these runs.
    trail = follow_runs(folder)
    values = page_values(read_lists(lists), trail, pool, max_lists)
    write_text(page, html_page("lists", **values, trail=trail, short_body=SHORT_BODY))
    return {
        "page": str(page),
        "num_lists": values["num_lists"],
        "num_lists_shown": len(values["shown"]),
        "num_drops_shown": len(values["shown_drops"]),
        "worth_a_look": {check: len(queries) for check, queries in values["findings"].items()},
        "missing": trail.missing,
    }


def inspect_queries(folder: Path, out: Path | None) -> dict[str, Any]:
    """Write a page about queries and their judged skills, and return its counts.

    Args:
        folder: Folder of a stage that writes QUERIES, JUDGEMENTS and DROPPED.
        out: File to write; None for a file beside the folder.

    Raises:
        SkilltrainError: `out` is in the folder.
    """
    page = _page_path(folder.resolve(), out)
    queries = read_queries(folder)
    drops = _read_rows([folder], DROPPED)
    verdicts = read_verdicts(folder)
    write_text(page, html_page("queries", queries=queries, verdicts=verdicts, drops=drops))
    return {"page": str(page), "num_queries": len(queries), "num_dropped": len(drops)}


def _page_path(folder: Path, out: Path | None) -> Path:
    """Return the file of a page: `out`, or a file beside the folder that the page is about.

    Args:
        folder: Folder of the lists or queries, as an absolute path without links.
        out: The file; None for a file beside the folder, such as `lists.html` for `lists`.

    Raises:
        SkilltrainError: The file is inside the folder.
    """
    page = out or folder.with_name(f"{folder.name}.html")
    # The folder is an input, so the page must not be written into it.
    if folder in page.resolve().parents:
        problem = "is inside the folder of the lists or queries, and would change this input"
        raise SkilltrainError("overwrites-input", problem, where=page, fix="set --out")
    return page


def _check_table(path: Path, spec: TableSpec) -> None:
    if not table_path(path, spec).is_file():
        fix = f"give a folder with {spec.name}.parquet"
        raise SkilltrainError("missing-table", f"holds no {spec.name}", where=path, fix=fix)


def follow_runs(folder: Path) -> Trail:
    """Follow the records of runs from training lists back to the pool.

    Each run writes the recipe of its stage to its folder. The recipe names the folders that the run
    read, which are outputs of earlier runs.

    Args:
        folder: Folder of the lists.

    Returns:
        The runs, newest first; the paths that they read; and a message for each missing record.
    """
    trail = Trail(folder, runs=[], inputs={name: [] for name in _INPUTS}, missing=[])
    if not record_of(folder):
        trail.missing.append(f"{folder}: no record of its run ({RUN_FILE})")

    # Visit the folders in the order in which they were found (breadth first). So a run comes before
    # the runs whose outputs it read.
    folders = deque([folder])
    while folders:
        current = folders.popleft()
        record = record_of(current)
        # Skip a folder without a record, and a run that was visited by another way.
        if not record or any(run.folder == current for run in trail.runs):
            continue
        recipe = record["recipe"]
        trail.runs.append(Run(str(recipe.get("stage")), current, recipe))

        # Find the inputs of this run. Their folders are visited later.
        for name in _INPUTS:
            if not isinstance(recipe.get(name), str):
                continue  # this stage does not have the setting
            path = Path(recipe[name]).expanduser()
            if not path.exists():
                # All runs may have been moved together. Then the input and the lists have the
                # same parent folder.
                path = folder.parent / path.name
            if path.exists():
                path = path.resolve()
                trail.inputs[name].append(path)
                # An input may be a file. The record of its run is in the file's folder.
                folders.append(path if path.is_dir() else path.parent)
            elif name in ("lists", "rankings"):
                # Only a stage writes these, so its record is missing. A pool or queries may come
                # from elsewhere.
                trail.missing.append(f"{name} of stage {recipe.get('stage')}: {recipe[name]}")
    return trail


def _read_rows(paths: Iterable[Path], spec: TableSpec) -> list[dict[str, Any]]:
    """Return the rows of all tables of one kind. Paths without such a table are skipped."""
    rows = []
    for path in paths:
        file = table_path(path, spec)
        if file.is_file():
            rows += read_table(file, spec).to_pylist()
    return rows


def page_values(
    rows: Sequence[Mapping[str, Any]], trail: Trail, pool: Path | None, max_lists: int
) -> dict[str, Any]:
    """Return the variables of the page's template.

    Args:
        rows: Rows of LISTS.
        trail: Runs that led to the lists. Missing texts are added to `trail.missing`.
        pool: Pool to use instead of the pool of the trail.
        max_lists: Number of lists in the sample.
    """
    # Texts of skills and queries. The first pool of the trail is the pool of the newest run.
    pools = trail.inputs["pool"][:1] if pool is None else [pool]
    skills = {row["skill_id"]: Skill(**row) for row in _read_rows(pools, SKILLS)}
    # The folder of the lists may also hold queries.
    queries = _read_rows([*trail.inputs["queries"], trail.folder], QUERIES)
    texts = {row["query_id"]: row["text"] for row in queries}
    _note_missing_texts(trail, has_skills=bool(skills), has_queries=bool(texts))

    # Runs that wrote candidates. The newest run comes first.
    ranking_runs = [run for run in trail.runs if table_path(run.folder, RANKINGS).is_file()]
    # Stages that make new candidates, such as `mine`, have no input `rankings`.
    mining_runs = [run for run in ranking_runs if "rankings" not in run.recipe]

    # Dropped rows by stage and filter. The stage `filter` drops candidates.
    drops = _read_drops(trail)
    filter_drops: dict[str, list[Dropped]] = {}  # by filter
    for (stage, filter_name), candidates in drops.items():
        if stage == "filter":
            filter_drops[filter_name] = candidates
    # Quotas say how many negatives a list gets from each source. The newest run with quotas counts.
    all_quotas = (run.recipe["quotas"] for run in trail.runs if run.recipe.get("quotas"))

    # Check every list.
    cluster_rows = _read_rows([*pools, *trail.inputs["clusters"]], CLUSTERS)
    clusters = {row["skill_id"]: row["cluster"] for row in cluster_rows}
    findings = _check_lists(rows, texts, skills, clusters)

    # Show a sample of all lists, and some lists of each check.
    sampled_ids = set(_sample([row["query_id"] for row in rows], max_lists, "lists"))
    for check, skill_ids_by_query in findings.items():
        sampled_ids.update(_sample(list(skill_ids_by_query), NUM_PER_CHECK, check))

    return {
        "num_pool": len(skills) or None,
        "num_lists": len(rows),
        "mined": _count_by_source(mining_runs),
        "kept": _count_by_source(ranking_runs),
        "dropped": Counter(drop.source for drop in itertools.chain(*filter_drops.values())),
        "chosen": _count_negatives(rows),
        "quotas": next(all_quotas, {}),
        "drops": drops,
        "findings": findings,
        "skills": skills,
        "texts": texts,
        "positives": _first_positives(rows),
        "shown": [row for row in rows if row["query_id"] in sampled_ids],
        "shown_drops": _sample_drops(filter_drops),
    }


def _note_missing_texts(trail: Trail, has_skills: bool, has_queries: bool) -> None:
    """Add the kinds of texts that were not found to `trail.missing`."""
    if not has_skills:
        trail.missing.append("pool: texts of skills are missing (give --pool)")
    if not has_queries:
        trail.missing.append("queries: lists are shown without their query's text")


def _read_drops(trail: Trail) -> dict[tuple[str, str], list[Dropped]]:
    """Return the dropped rows by stage and filter, beginning with the oldest run.

    Args:
        trail: Runs that led to the lists, the newest first.
    """
    drops = {}
    for run in reversed(trail.runs):
        for row in _read_rows([run.folder], DROPPED):
            drops.setdefault((run.stage, row["filter"]), []).append(Dropped(**row))
    return drops


def _sample_drops(drops_by_filter: Mapping[str, Sequence[Dropped]]) -> list[Dropped]:
    """Sample the dropped candidates of each filter, and sort them by value: close calls first.

    Args:
        drops_by_filter: Dropped candidates by the name of the filter.
    """
    sample = []
    for name, drops in drops_by_filter.items():
        # Several sources may have mined the same candidate.
        unique = {(drop.query_id, drop.skill_id): drop for drop in drops}
        # The name of the filter is the seed of the sample.
        filter_sample = _sample(list(unique.values()), NUM_PER_FILTER, name)
        sample += sorted(filter_sample, key=lambda drop: drop.value or 0.0)
    return sample


def _count_by_source(runs: Sequence[Run]) -> Counter[str] | None:
    """Count the candidates of the first run by source; None without a run.

    Only one column is read, because the table may have millions of rows.

    Args:
        runs: Runs that wrote RANKINGS, the newest first.
    """
    if not runs:
        return None
    # The column `stage` of RANKINGS names the source of a candidate.
    table = pq.read_table(table_path(runs[0].folder, RANKINGS), columns=["stage"])
    counts = table.column("stage").value_counts().to_pylist()
    return Counter({row["values"]: row["counts"] for row in counts})


def _count_negatives(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Count the negatives of all lists by source."""
    counts = Counter()
    for row in rows:
        for source, verdict in zip(row["sources"], row["verdicts"], strict=True):
            # POSITIVE holds the verdicts of skills that a query can use.
            if verdict not in POSITIVE:
                counts[source] += 1
    return counts


def _first_positives(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the id of the first positive of each list by query id.

    It need not be the first skill: a list for a reranker may begin with negatives.

    Args:
        rows: Rows of LISTS.
    """
    positives = {}
    for row in rows:
        for skill_id, verdict in zip(row["skill_ids"], row["verdicts"], strict=True):
            if verdict in POSITIVE:
                # `setdefault` keeps the first positive of the list.
                positives.setdefault(row["query_id"], skill_id)
    return positives


def _sample(items: Sequence[Any], count: int, seed: str) -> list[Any]:
    return random.Random(seed).sample(items, min(count, len(items)))


def _check_lists(
    rows: Iterable[Mapping[str, Any]],
    texts: Mapping[str, str],
    skills: Mapping[str, Skill],
    clusters: Mapping[str, int],
) -> dict[str, dict[str, set[str]]]:
    """Check all lists.

    Args:
        rows: Rows of LISTS.
        texts: Text of each query by its id. Empty: the queries are not known.
        skills: Skills of the pool by id.
        clusters: Number of the near-duplicate cluster by skill id.

    Returns:
        By check and query id, the ids of the skills that fail the check.
    """
    findings: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        query_id = row["query_id"]
        text = texts.get(query_id, "")
        for check, skill_ids in check_list(row, text, skills, clusters).items():
            findings.setdefault(check, {})[query_id] = skill_ids
        if texts and not text:
            # This check concerns the whole list, so it names no skill.
            findings.setdefault("no_query_text", {})[query_id] = set()
    return findings


def check_list(
    row: Mapping[str, Any],
    text: str,
    skills: Mapping[str, Skill],
    clusters: Mapping[str, int],
) -> dict[str, set[str]]:
    """Check for one list whether it meets the assumptions of training.

    Args:
        row: Row of LISTS.
        text: Text of the query.
        skills: Skills of the pool by id. Skills outside the pool are not checked.
        clusters: Number of the near-duplicate cluster by skill id.

    Returns:
        Ids of the skills that fail a check, by check.
    """
    positives = []
    negatives = []
    # A verdict says how well a skill serves the query. POSITIVE holds the good verdicts.
    for skill_id, verdict in zip(row["skill_ids"], row["verdicts"], strict=True):
        if skill_id not in skills:
            continue
        if verdict in POSITIVE:
            positives.append(skills[skill_id])
        else:
            negatives.append(skills[skill_id])

    findings: dict[str, set[str]] = {}
    for check, is_suspect in POSITIVE_CHECKS.items():
        # `is_suspect` returns True if the positive fails the check. For example, the query names
        # the skill.
        findings[check] = {skill.skill_id for skill in positives if is_suspect(text, skill)}

    # A negative must not share a property with a positive, such as its name or its cluster. Skills
    # that both lack a property do not share it.
    getters = dict(NEGATIVE_CHECKS)  # by check, the function that returns a skill's property
    getters["cluster"] = lambda skill: clusters.get(skill.skill_id)
    for check, get_property in getters.items():
        properties = {get_property(skill) for skill in positives}
        properties -= {None, ""}
        suspects = [skill for skill in negatives if get_property(skill) in properties]
        findings[check] = {skill.skill_id for skill in suspects}

    if skills:  # the pool is known
        findings["not_in_pool"] = set(row["skill_ids"]) - skills.keys()
    # Leave out the checks that no skill failed.
    return {check: skill_ids for check, skill_ids in findings.items() if skill_ids}
