"""How long a query waits, and what the waiting buys: latency against quality, and each stage's times."""

from collections import Counter

from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.evaluation.report.contents import Report
from skilltrain.evaluation.report.marks import (
    NUM_COLORS,
    Axis,
    axes,
    axis_of_shares,
    axis_of_times,
    share,
    stretched,
    swatch,
    table,
    text,
)
from skilltrain.evaluation.report.numbers import duration, number
from skilltrain.evaluation.statistics.bootstrap import Interval, compact

TOTAL = "total"  # the stage that is a system's whole time


def speed(report: Report) -> str:
    """The section, or nothing where no time was taken."""
    if not report.analysis.latencies:
        return ""
    return (
        '<section id="speed">\n<h2>Latency and quality</h2>\n<p>Queries asked one by one on the machine of this '
        "evaluation; half of them wait longer than p50, one in twenty longer than p95.</p>\n"
        f"{_plot(report)}\n{_stages(report)}\n</section>"
    )


def _plot(report: Report) -> str:
    measure = report.chief_measure
    totals = {row.system: row for row in report.analysis.latencies if row.stage == TOTAL and row.p50 > 0}
    points = [
        (position, name, totals[name], rows["all"][measure])
        for position, (name, rows) in enumerate(report.summaries.items())
        if name in totals and measure in rows["all"]
    ]
    if not points:
        return ""
    across = axis_of_times([1000 * row.p50 for _, _, row, _ in points])
    up = axis_of_shares([end for *_, value in points for end in (value.low, value.high)])
    marks = "".join(_point(position, row, value, across, up) for position, _, row, value in points)
    legend = "".join(
        f'<li><i class="disc c{position % NUM_COLORS}">{position + 1}</i><span>{text(name)} '
        f"<b>{duration(row.p50)}</b>, <b>{compact(value.mean, 3)}</b></span></li>"
        for position, name, row, value in points
    )
    grid = axes(
        [(across.place(tick), _tick(tick)) for tick in across.ticks],
        [(up.place(tick), share(tick)) for tick in up.ticks],
    )
    front = _front([(across.place(1000 * row.p50), up.place(value.mean)) for _, _, row, value in points])
    return (
        f'<figure class="curve trade"><figcaption>{measure} against waiting time <small>p50 of a query, logarithmic; '
        "dashed: no system is both faster and better</small></figcaption>"
        f'<ul class="legend">{legend}</ul><svg class="axes" role="img" aria-label="{measure} against waiting time; '
        f'the legend has both numbers">{grid}{stretched(front)}{marks}</svg></figure>'
    )


def _point(position: int, row: StageLatency, value: Interval, across: Axis, up: Axis) -> str:
    x, low, y, high = across.place(1000 * row.p50), up.place(value.low), up.place(value.mean), up.place(value.high)
    return (
        f'<g class="c{position % NUM_COLORS}"><title>{text(row.system)}: {duration(row.p50)}, {value}</title>'
        f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="{100 - low:.2f}%" y2="{100 - high:.2f}%"/>'
        f'<circle cx="{x:.2f}%" cy="{100 - y:.2f}%" r="9.5"/>'
        f'<text class="inside" x="{x:.2f}%" y="{100 - y:.2f}%" dy="4">{position + 1}</text></g>'
    )


def _front(places: list[tuple[float, float]]) -> str:
    """Steps through the points that no other point beats in both; `places` are percent from left and bottom."""
    steps, best = [], -1.0
    for x, y in sorted(places, key=lambda place: (place[0], -place[1])):
        if y > best:
            steps += [f"{x:.2f},{100 - best:.2f}"] * bool(steps) + [f"{x:.2f},{100 - y:.2f}"]
            best = y
    return f'<polyline class="front" points="{" ".join(steps)} 100,{100 - best:.2f}"/>'


def _tick(milliseconds: float) -> str:
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds:g} ms"


def _stages(report: Report) -> str:
    colors = {name: position for position, name in enumerate(report.summaries)}
    rows, groups = [], Counter(row.system for row in report.analysis.latencies)
    named = set[str]()
    for row in sorted(report.analysis.latencies, key=lambda row: list(groups).index(row.system)):
        whole = ' class="whole"' if row.stage == TOTAL else ""
        dot = swatch(colors[row.system]) if row.system in colors else ""
        head = f'<th scope="rowgroup" rowspan="{groups[row.system]}">{dot}{text(row.system)}</th>'
        rows.append(
            f'<tr{whole}>{"" if row.system in named else head}<td class="word">{text(row.stage)}</td>'
            f"<td><b>{duration(row.p50)}</b></td><td>{duration(row.p95)}</td><td>{number(row.qps)}</td>"
            f"<td>{row.num:,}</td></tr>\n"
        )
        named.add(row.system)
    head = ("System", "Stage", "p50", "p95", "Queries/s", "Queries timed")
    return table("Latency by stage", "stages", "", head, rows)
