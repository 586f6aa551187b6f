"""Differences between systems on the same queries: a table with a plot of intervals around 0, and every test's p."""

from collections.abc import Sequence
from itertools import groupby

from skilltrain.evaluation.report.contents import Report
from skilltrain.evaluation.report.marks import share, swatch, table, text
from skilltrain.evaluation.report.numbers import ALPHA, p_value, reading, signed
from skilltrain.evaluation.statistics.bootstrap import LEVEL, RESAMPLES, compact
from skilltrain.evaluation.statistics.comparison import Comparison


def comparisons(report: Report) -> str:
    """The section, or nothing where there is one system."""
    if not report.comparisons:
        return ""
    limit = _limit(max(abs(end) for c in report.comparisons for end in (c.difference.low, c.difference.high)))
    ends = (
        f'<span class="ends"><span>{share(-limit)}</span><span>0</span><span>+{share(limit)}</span></span>'
        '<span class="unseen">interval as a plot</span>'
    )
    head = (
        "Systems", "Measure", "p, Holm <small>raw below</small>", "So it is", "Difference", ends,
        "p, Wilcoxon", "p, McNemar", "Cohen’s h",
    )  # fmt: skip
    colors = {name: position for position, name in enumerate(report.summaries)}
    pairs = [list(group) for _, group in groupby(report.comparisons, lambda c: (c.system, c.baseline))]
    rows = [_row(c, limit, _pair(group, colors) if c is group[0] else "") for group in pairs for c in group]
    return (
        '<section id="differences">\n<h2>Differences on the same queries</h2>\n'
        f"<p>The word follows the paired bootstrap’s p after Holm’s correction over the {len(report.comparisons)} "
        f"comparisons listed (below {compact(ALPHA, 2)}), not the interval, which is corrected for nothing.</p>\n"
        f"{table('Paired differences', 'differences', '', head, rows)}\n"
        f'<p class="under">{LEVEL:.0%} intervals, {RESAMPLES:,} draws of the queries. Wilcoxon’s signed-rank test and, '
        "for measures that are 0 or 1, McNemar’s exact test stand beside as checks, uncorrected. Cohen’s h is the "
        "size of the effect on a share (.2 small, .5 medium, .8 large).</p>\n</section>"
    )


def _limit(largest: float) -> float:
    return next(limit for limit in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0) if largest <= limit + 1e-9)


def _pair(group: Sequence[Comparison], colors: dict[str, int]) -> str:
    """The head of all rows of a pair of systems."""
    c = group[0]
    return (
        f'<th scope="rowgroup" rowspan="{len(group)}"><div>{swatch(colors[c.system])}{text(c.system)}</div>'
        f"<div><em>minus</em> {swatch(colors[c.baseline])}{text(c.baseline)}</div></th>"
    )


def _row(c: Comparison, limit: float, head: str) -> str:
    word = reading(c)
    effect = "–" if c.cohens_h is None else signed(c.cohens_h, 2)
    return (
        f"<tr>{head}<td>{c.measure}</td>"
        f"<td><b>{p_value(c.p_holm)}</b><small>{p_value(c.p)}</small></td>"
        f'<td class="word {word.replace(" ", "-")}">{word}</td>'
        f"<td><b>{signed(c.difference.mean)}</b><small>{c.difference.bounds()}</small></td>"
        f'<td class="plot">{_interval(c, limit)}</td>'
        f"<td>{p_value(c.wilcoxon_p)}</td><td>{p_value(c.mcnemar_p)}</td><td>{effect}</td></tr>\n"
    )


def _interval(c: Comparison, limit: float) -> str:
    low, mean, high = (50 + 50 * value / limit for value in (c.difference.low, c.difference.mean, c.difference.high))
    return (
        f'<svg aria-hidden="true" class="{reading(c).replace(" ", "-")}">'
        '<line class="zero" x1="50%" x2="50%" y1="0" y2="100%"/>'
        f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="50%" y2="50%"/>'
        f'<circle cx="{mean:.2f}%" cy="50%" r="4.5"/></svg>'
    )
