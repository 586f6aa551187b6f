"""`skilltrain inspect`: one HTML page on training lists that needs nothing else."""

from collections import Counter
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text
from skilltrain.report import counts
from skilltrain.report.checks import NUM_SHARED, SHORT_BODY, run_checks
from skilltrain.report.counts import Flow
from skilltrain.report.excerpts import choose
from skilltrain.report.material import Material, read_material
from skilltrain.report.page import html_page
from skilltrain.report.plots import HistogramFigure, histogram_figure
from skilltrain.tables import DROPPED

NUM_FLAGGED = 50  # flagged skills listed; those in lists first


def inspect_lists(lists: Path, out: Path | None, pool: Path | None, max_lists: int) -> dict[str, Any]:
    """Write the page of the folder `lists` to `out` (beside the folder: `lists.html`) and return what it shows.

    `pool` stands in for the pool that the lists' record names; of more than `max_lists` lists a sample is shown.
    Raises SkilltrainError where `lists` holds no lists, or `out` lies in a folder that a training reads.
    """
    material = read_material(lists, pool)
    folder = material.trail.lists
    file = folder.with_name(f"{folder.name}.html") if out is None else out
    if folder in file.resolve().parents:
        raise SkilltrainError("lies in the folder of the lists, which a page would change", where=file, fix="set --out")
    checks, way = run_checks(material), counts.flow(material)
    found = [check for check in checks if len(check.lists)]
    shown = choose(material, found, max_lists)
    content = html_page(
        "lists.html.j2",
        ("lists.js",),
        material=material,
        name=folder.name,
        found=found,
        passed=checks[len(found) :],
        limits={"names": NUM_SHARED, "chars": SHORT_BODY},
        flow=way,
        lost={source: lost for source in way.sources if (lost := way.unaccounted(source))},
        other_drops=_other_drops(material),
        sources=_sources(material, way),
        positives=counts.ranks(material, None),
        ranks=_figure({"found at rank": counts.ranks(material, None)}),
        words=_figure({"all queries": counts.query_words(material)}),
        bodies=_figure(counts.body_lengths(material)),
        shares=_shares(material),
        hubs=counts.hubs(material),
        flags=_flags(material),
        shown=shown,
    )
    write_text(file, content)
    return {
        "page": str(file),
        "megabytes": round(len(content.encode()) / 1e6, 1),
        "num_lists": len(material.query_ids),
        "num_lists_shown": shown.num_lists,
        "num_dropped_pairs_shown": sum(count for count, _ in shown.pairs.values()),
        "worth_a_look": {check.key: len(check.lists) for check in found},
        "missing": material.trail.missing,
    }


def _figure(groups: dict[str, Any]) -> HistogramFigure | None:
    return histogram_figure(groups) if any(len(values) for values in groups.values()) else None


def _other_drops(material: Material) -> list[dict[str, Any]]:
    """What other stages than filters dropped (queries, lists, skills), by stage and filter, with an example."""
    found: list[dict[str, Any]] = []
    for step in reversed(material.trail.steps):
        table = None if step.filters else material.trail.read(step.folder, DROPPED)
        rows = [] if table is None else table.to_pylist()
        for name, count in sorted(Counter(row["filter"] for row in rows).items()):
            row = next(row for row in rows if row["filter"] == name)
            what = " ".join(filter(None, (row["query_id"], row["skill_id"])))
            found.append({"stage": step.stage, "filter": name, "count": count, "example": f"{what}: {row['reason']}"})
    return found


def _sources(material: Material, way: Flow) -> list[dict[str, Any]]:
    """Of each source with negatives: how many a list holds, its quota, the lists below it, and the ranks."""
    quotas, found = counts.quotas_of(material), list[dict[str, Any]]()
    for source in way.sources:
        if not way.chosen[source]:
            continue
        per_list, quota = counts.per_list(material, source), quotas.get(source)
        found.append({
            "name": source,
            "mean": way.chosen[source] / len(material.query_ids),
            "quota": quota,
            "below": 0 if quota is None else sum(n for number, n in per_list.items() if number < quota),
            "per_list": list(per_list.items()),
            "figure": _figure({"rank": counts.ranks(material, source)}),
        })  # fmt: skip
    return found


def _shares(material: Material) -> dict[str, counts.Shares]:
    if material.num_pool is None:
        return {}
    return {
        "Categories": counts.shares(material, lambda skill: skill.category),
        "Languages": counts.shares(material, lambda skill: skill.lang),
        "Collections": counts.shares(material, lambda skill: skill.source),
    }


def _flags(material: Material) -> dict[str, Any] | None:
    """The findings, those of skills in lists first, and how many flagged skills are in lists."""
    if material.flags is None:
        return None
    wanted, serves = material.num_lists(positive=True).tolist(), material.num_lists(positive=False).tolist()
    rows: list[dict[str, Any]] = []
    for row in material.flags:
        place = material.position.get(row["skill_id"])
        used = (0, 0) if place is None else (wanted[place], serves[place])
        rows.append(row | {"wanted": used[0], "serves": used[1]})
    rows.sort(key=lambda row: (-row["wanted"], -row["serves"]))
    skills = {row["skill_id"]: row for row in rows}.values()
    return {
        "rows": rows[:NUM_FLAGGED],
        "num_rows": len(rows),
        "num_skills": len(skills),
        "num_positive": sum(row["wanted"] > 0 for row in skills),
        "num_negative": sum(row["serves"] > 0 for row in skills),
    }
