"""The page of a report about single skills: their requests, and the skills they are confused with.

A request counts for each of its gold skills. It is right if a gold skill is ranked first.
"""

from collections import Counter, defaultdict

from skilltrain.evaluation.page import html_page
from skilltrain.evaluation.report import Report
from skilltrain.metrics.comparison import SystemResult

_MAX_SKILLS = 500  # that the page lists for a system


def first_skills(report: Report, result: SystemResult) -> list[tuple[str, Counter[str]]]:
    """Count which skills are ranked first for the requests of each gold skill.

    A request is right if any of its gold skills is ranked first. A right request counts under each
    of its gold skills, and a request with an empty ranking under the key "". For example,
    ("pdf-merge", {"pdf-merge": 3, "pdf-split": 1}) is a skill with four requests. Three are right,
    and "pdf-split" is ranked first for the fourth request.

    Args:
        report: Report with the queries and their gold skills, which are the skills to find.
        result: Rankings of one system.

    Returns:
        Pairs of a gold skill and its counts, the skill with the most wrong requests first.
    """
    counts_by_skill: dict[str, Counter[str]] = defaultdict(Counter)
    for query_id in report.tasks:
        ranking = result.rankings.get(query_id, ())
        gold = report.relevance_for(query_id, ranking).gold
        first_id = ranking[0] if ranking else ""  # no skill has the empty id
        for skill_id in gold:
            # If the request is right, count the gold skill, even if another gold skill is first.
            counts_by_skill[skill_id][skill_id if first_id in gold else first_id] += 1

    def sort_key(item: tuple[str, Counter[str]]) -> tuple[int, str]:
        skill_id, counts = item
        num_wrong = counts.total() - counts[skill_id]
        return -num_wrong, skill_id  # the id decides between equal numbers

    return sorted(counts_by_skill.items(), key=sort_key)


def skill_page(report: Report) -> str:
    """Return the page as HTML, with a table for each system."""
    tables = {result.name: first_skills(report, result) for result in report.results}
    return html_page("skills", report=report, tables=tables, max_skills=_MAX_SKILLS)
