"""What a second system fixed and broke: a flow of queries from right and wrong to right and wrong, and their texts."""

from collections.abc import Sequence

from skilltrain.evaluation.analysis.outcomes import Outcomes
from skilltrain.evaluation.report.contents import Report, ReportTexts
from skilltrain.evaluation.report.marks import lead, stretched, text
from skilltrain.evaluation.report.numbers import counted, p_equals
from skilltrain.evaluation.results import SystemResult

NUM_CASES = 100  # fixed (and broken) queries listed of a pair of systems
NUM_CHARS = 320  # of a query's text
_HEIGHT, _GAP, _LINE = 208, 34, 18  # pixels: the flow, between right and wrong, between two labels


def flows(report: Report, texts: ReportTexts | None) -> str:
    """The section, or nothing where no pair of systems was looked at."""
    if not report.analysis.outcomes:
        return ""
    figures = "\n".join(_figure(report, texts, outcome) for outcome in report.analysis.outcomes)
    return (
        '<section id="flows">\n<h2>Fixed and broken</h2>\n<p>How many queries the second system turned from wrong to '
        "right, and at what price. McNemar’s exact test asks whether fixed and broken could be equally likely; its p "
        f'is not corrected here.</p>\n<div class="wide">{figures}</div>\n</section>'
    )


def _figure(report: Report, texts: ReportTexts | None, outcome: Outcomes) -> str:
    fixed, broken = len(outcome.fixed), len(outcome.broken)
    total = len(outcome.both) + fixed + broken + len(outcome.neither)
    said = f"{fixed} fixed, {broken} broken of {counted(total, 'query')}; McNemar’s {p_equals(outcome.p)}"
    results = {result.name: result for result in report.results}
    pair = [results[name] for name in (outcome.baseline, outcome.system)]
    lists = "".join(
        _cases(pair, texts, word, ids) for word, ids in (("fixed", outcome.fixed), ("broken", outcome.broken)) if ids
    )
    return (
        f"<figure><figcaption>{text(outcome.measure)} <small>{said}</small></figcaption>"
        f'<p class="ends"><span>{text(outcome.baseline)}</span><span>{text(outcome.system)}</span></p>'
        f"{_flow(outcome, said)}{lists}</figure>"
    )


def _flow(outcome: Outcomes, said: str) -> str:
    """Four ribbons, as thick as the queries they carry, between the right and the wrong of both systems."""
    both, fixed, broken, neither = (len(ids) for ids in (outcome.both, outcome.fixed, outcome.broken, outcome.neither))
    unit = (_HEIGHT - _GAP) / max(1, both + fixed + broken + neither)
    wrong_left, wrong_right = (both + broken) * unit + _GAP, (both + fixed) * unit + _GAP
    ribbons = [  # class, label, count, top on the left, top on the right
        ("both", "right in both", both, 0.0, 0.0),
        ("fixed", "fixed", fixed, wrong_left, both * unit),
        ("broken", "broken", broken, both * unit, wrong_right),
        ("neither", "wrong in both", neither, wrong_left + fixed * unit, wrong_right + broken * unit),
    ]
    bands = "".join(
        f'<path class="{kind}" d="{_band(left, right, count * unit)}"><title>{label}: {count}</title></path>'
        for kind, label, count, left, right in sorted(ribbons, key=lambda ribbon: ribbon[0] in ("fixed", "broken"))
        if count
    )
    bars = _bars(0, (both + broken) * unit, wrong_left) + _bars(100, (both + fixed) * unit, wrong_right)
    shown = [(label, count, right + count * unit / 2) for _, label, count, _, right in ribbons if count]
    labels = "".join(
        f'<text class="end" x="100%" dx="-14" y="{y:.1f}" dy="4">{label} <tspan>{count}</tspan></text>'
        for (label, count, _), y in zip(shown, _spread([y for *_, y in shown]), strict=True)
    )
    for label, count, top in (("right", both + broken, 0.0), ("wrong", fixed + neither, wrong_left)):
        y = top + count * unit / 2
        labels += f'<text class="start" x="0" dx="14" y="{y:.1f}" dy="4">{label} <tspan>{count}</tspan></text>'
    return (
        f'<svg class="flow" role="img" aria-label="{text(outcome.baseline)} to {text(outcome.system)}, '
        f'{text(outcome.measure)}: {said}; {both} right in both, {neither} wrong in both" width="100%" '
        f'height="{_HEIGHT}">{stretched(bands, _HEIGHT)}{bars}{labels}</svg>'
    )


def _band(left: float, right: float, height: float) -> str:
    return (
        f"M0,{left:.2f} C45,{left:.2f} 55,{right:.2f} 100,{right:.2f} v{height:.2f} "
        f"C55,{right + height:.2f} 45,{left + height:.2f} 0,{left + height:.2f} Z"
    )


def _bars(x: int, right: float, wrong: float) -> str:
    """The right and the wrong of one system: `right` is where the first ends, `wrong` where the second begins."""
    shift = -8 if x == 0 else 0
    return "".join(
        f'<rect class="{kind}" x="{x}%" transform="translate({shift})" y="{top:.2f}" width="8" '
        f'height="{max(bottom - top, 1):.2f}" rx="1.5"/>'
        for kind, top, bottom in (("right", 0.0, right), ("wrong", wrong, float(_HEIGHT)))
    )


def _spread(places: Sequence[float]) -> list[float]:
    """The places of labels from top to bottom, moved apart by at least a line, none beyond the plot."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + _LINE) if moved else max(place, 0.0))
    lowest = float(_HEIGHT)
    for n in reversed(range(len(moved))):
        moved[n] = min(moved[n], lowest)
        lowest = moved[n] - _LINE
    return moved


def _cases(pair: Sequence[SystemResult], texts: ReportTexts | None, word: str, query_ids: Sequence[str]) -> str:
    shown = query_ids[:NUM_CASES]
    rest = f"<p>and {len(query_ids) - len(shown):,} more</p>" if len(shown) < len(query_ids) else ""
    items = "".join(_case(pair, texts, query_id) for query_id in shown)
    return (
        f'<details class="cases"><summary>{counted(len(query_ids), "query")} {word}</summary><ul>{items}</ul>'
        f"{rest}</details>"
    )


def _case(pair: Sequence[SystemResult], texts: ReportTexts | None, query_id: str) -> str:
    before, after = (_first(result, texts, query_id) for result in pair)
    words = f'<p dir="auto">{lead(texts.queries[query_id], NUM_CHARS)}</p>' if texts else ""
    return f'<li><b>{text(query_id)}</b>{words}<p class="under">{before} <i>→</i> {after}</p></li>'


def _first(result: SystemResult, texts: ReportTexts | None, query_id: str) -> str:
    """What stands on top, and where the first gold skill stands."""
    ranking = result.rankings.get(query_id, ())
    if not ranking:
        return "nothing"
    top = text(texts.name(ranking[0]) if texts else ranking[0])
    if texts is None:
        return f"<bdi>{top}</bdi>"
    rank = texts.first_rank(result, query_id)
    where = "gold" if rank == 1 else f"gold at {rank}" if rank else "gold not found"
    return f"<bdi>{top}</bdi> ({where})"
