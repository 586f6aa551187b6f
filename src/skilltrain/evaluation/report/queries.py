"""The queries themselves: those that every system misses and those on which systems differ, with texts."""

from collections.abc import Iterable, Sequence

from skilltrain.evaluation.report.contents import Report, ReportTexts
from skilltrain.evaluation.report.marks import lead, swatch, text

NUM_TOP = 5  # names shown of each ranking
NUM_QUERIES = 500  # queries listed in each of the two lists; a larger page is slow to search
NUM_CHARS = 2_000  # of a query's text


def queries(report: Report, texts: ReportTexts | None) -> str:
    """Both lists under one search box; without texts there is no telling what was missed, and one list."""
    missed = _missed(report, texts) if texts else []
    known = set(missed)
    spread = {query_id: _spread(report, query_id) for query_id in report.slices if query_id not in known}
    differing = sorted((query_id for query_id in spread if spread[query_id]), key=lambda q: (-spread[q], q))
    several = len(report.results) > 1
    lists = _list(
        report, texts, missed,
        "Failures: no system puts a gold skill first" if several else "Failures: no gold skill comes first",
        "the hardest first", "failures",
    ) + _list(
        report, texts, differing,
        "Queries where the systems differ" if several else "Queries with something else missed",
        "the largest differences first" if several else "the worst first", "differing",
    )  # fmt: skip
    legend = " A number is the rank of the first gold skill, none if the ranking ends before it." if texts else ""
    return (
        '<section class="queries" id="queries">\n<h2>Queries and rankings</h2>\n'
        f"<p>Open a query for its text, its gold skills and what stood on top.{legend} Queries and names are untrusted "
        "text: read them, do not follow them.</p>\n"
        '<p class="search" hidden><label for="search">Search queries and skills</label>'
        '<input type="search" id="search" autocomplete="off"> <output id="found" for="search"></output></p>\n'
        f"{lists}</section>"
    )


def _missed(report: Report, texts: ReportTexts) -> list[str]:
    """The queries for which no ranking begins with a gold skill, those whose gold stands lowest first."""
    best = {query_id: [texts.first_rank(result, query_id) for result in report.results] for query_id in report.slices}
    failed = {query_id: [rank for rank in ranks if rank] for query_id, ranks in best.items() if 1 not in ranks}
    return sorted(failed, key=lambda q: (sum(1 / rank for rank in failed[q]), q))


def _spread(report: Report, query_id: str) -> float:
    """How far the systems lie apart, summed over measures; with one system, how far it is from perfect."""
    held = [result.per_query[query_id] for result in report.results]
    columns = [[values[name] for values in held] for name in report.measures if name in held[0]]
    if len(held) == 1:
        return sum(1 - column[0] for column in columns)
    return sum(max(column) - min(column) for column in columns)


def _list(report: Report, texts: ReportTexts | None, query_ids: Sequence[str], title: str, order: str, key: str) -> str:
    if not query_ids:
        return ""
    shown = query_ids[:NUM_QUERIES]
    count = f"{len(query_ids):,} of {len(report.slices):,} queries, {order}"
    if len(shown) < len(query_ids):
        count += f"; {len(shown):,} are listed"
    entries = "\n".join(_query(report, texts, query_id) for query_id in shown)
    return f'<h3 id="{key}">{title}</h3>\n<p>{count}.</p>\n<div class="list">{entries}</div>\n'


def _query(report: Report, texts: ReportTexts | None, query_id: str) -> str:
    words = texts.queries[query_id] if texts else ""
    rest = f" … ({len(words):,} characters in all)" if len(words) > NUM_CHARS else ""
    gold = texts.gold[query_id] if texts else frozenset[str]()
    badges = "".join(
        f'<span title="{text(result.name)}">{swatch(position)}{texts.first_rank(result, query_id) or "none"}</span>'
        for position, result in enumerate(report.results)
        if texts
    )
    columns = "".join(
        f"<div><h4>{swatch(position)}{text(result.name)}</h4>"
        f"<ol>{_top(result.rankings.get(query_id, ()), texts, query_id)}</ol></div>"
        for position, result in enumerate(report.results)
    )
    wanted = f'<div class="wanted"><h4>Gold</h4><ul>{_names(sorted(gold), gold, texts)}</ul></div>' if gold else ""
    return (
        f'<details class="query {report.slices[query_id]}"><summary><b>{text(query_id)}</b>'
        f'<span class="lead" dir="auto">{lead(words, 160)}</span><span class="ranks">{badges}</span></summary>\n'
        f'<p class="text" dir="auto">{text(words[:NUM_CHARS] + rest)}</p>'
        f'<div class="tops">{wanted}{columns}</div></details>'
    )


def _top(ranking: Sequence[str], texts: ReportTexts | None, query_id: str) -> str:
    return _names(ranking[:NUM_TOP], texts.found(query_id, ranking).gold if texts else frozenset(), texts)


def _names(skill_ids: Iterable[str], gold: frozenset[str], texts: ReportTexts | None) -> str:
    items = "".join(
        f'<li{" class=gold" if skill_id in gold else ""} title="{text(skill_id)}">'
        f"<bdi>{text(texts.name(skill_id) if texts else skill_id)}</bdi></li>"
        for skill_id in skill_ids
    )
    return items or '<li class="empty">nothing</li>'
