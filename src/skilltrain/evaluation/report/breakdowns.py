"""Means by the length of the gold skills' descriptions, and what agents could gain from each system's rankings."""

from collections.abc import Sequence

from skilltrain.evaluation.analysis.pass_rates import PassRate
from skilltrain.evaluation.analysis.quartiles import Quartile
from skilltrain.evaluation.report.contents import Report
from skilltrain.evaluation.report.marks import (
    LINE,
    NUM_COLORS,
    ROW,
    Axis,
    Row,
    axis_of_shares,
    interval_plot,
    ruler,
    swatch,
    table,
    text,
)
from skilltrain.evaluation.report.numbers import number
from skilltrain.evaluation.statistics.bootstrap import LEVEL, compact

MIDDLE = "Recall@10"  # the estimate that a pass rate's dot stands for


def quartiles(report: Report) -> str:
    """Interval plots of the quartiles, one figure a system; nothing where they were not computed."""
    if not (found := report.analysis.quartiles):
        return ""
    measures = dict.fromkeys(quartile.measure for quartile in found)
    figures = "".join(
        interval_plot(system, _rows(found, measure, system, position), measure)
        for measure in measures
        for position, system in enumerate(report.summaries)
        if _rows(found, measure, system, position)
    )
    return (
        '<section id="lengths">\n<h2>By length of description</h2>\n<p>All queries in four parts by the mean length of '
        "their gold skills’ descriptions, in characters. A "
        "system that lives on descriptions falls where they are short.</p>\n"
        f'<div class="plots narrow">{figures}</div>\n</section>'
    )


def _rows(found: Sequence[Quartile], measure: str, system: str, color: int) -> list[Row]:
    return [
        Row(quartile_name(quartile, quartile.means[system].n), quartile.means[system], color)
        for quartile in found
        if quartile.measure == measure and system in quartile.means
    ]


def quartile_name(quartile: Quartile, num: int) -> str:
    """Its lengths and how many queries it holds, like `24–80, n = 19`."""
    return f"{number(quartile.shortest)}–{number(quartile.longest)}, n = {num}"


def pass_rates(report: Report) -> str:
    """One figure an agent: from no skills to gold skills, and where each system's rankings lie between."""
    if not (rates := report.analysis.pass_rates):
        return ""
    ends = [end for rate in rates for end in (rate.without_skills, rate.with_gold)]
    axis = axis_of_shares([*ends, *(value.mean for rate in rates for value in rate.estimates.values())])
    figures = "".join(_agent(report, agent, axis) for agent in dict.fromkeys(rate.agent for rate in rates))
    return (
        '<section id="agents">\n<h2>Estimated pass rates of agents</h2>\n<p>Pass rate without skills + coverage × '
        "(with gold skills − without). The grey track runs from the one to the other. The bar runs "
        "from the lowest to the highest estimate by coverage measure, the dot is the one by Recall@10. These are "
        "estimates, not runs.</p>\n"
        f'<div class="plots agents">{figures}</div>\n{_pass_rate_table(report)}\n</section>'
    )


def _agent(report: Report, agent: str, axis: Axis) -> str:
    rates = [rate for rate in report.analysis.pass_rates if rate.agent == agent]
    colors = {name: position for position, name in enumerate(report.summaries)}
    height = ROW * len(rates)
    marks = ruler(axis, len(rates))
    names, said = "", []
    for position, rate in enumerate(rates):
        means = [value.mean for value in rate.estimates.values()]
        middle = rate.estimates[MIDDLE].mean if MIDDLE in rate.estimates else sum(means) / len(means)
        marks += _range(rate, (min(means), middle, max(means)), axis, colors.get(rate.system, position), position)
        names += f"<li><span>{text(rate.system)}</span> <b>{compact(middle, 3)}</b></li>"
        said.append(f"{text(rate.system)} {compact(min(means), 3)} to {compact(max(means), 3)}")
    ends = f"{compact(rates[0].without_skills, 3)} without skills, {compact(rates[0].with_gold, 3)} with gold skills"
    return (
        f'<figure><figcaption>{text(agent)} <small>{ends}</small></figcaption><ul aria-hidden="true">{names}</ul>'
        f'<svg role="img" aria-label="{text(agent)}, {ends}: {"; ".join(said)}" width="100%" height="{height + 20}">'
        f"{marks}</svg></figure>"
    )


def _range(rate: PassRate, estimates: tuple[float, float, float], axis: Axis, color: int, position: int) -> str:
    y = ROW * position + LINE
    start, end = axis.place(rate.without_skills), axis.place(rate.with_gold)
    low, middle, high = (axis.place(value) for value in estimates)
    return (
        f'<line class="track" x1="{start:.2f}%" x2="{end:.2f}%" y1="{y}" y2="{y}"/><g class="c{color % NUM_COLORS}">'
        f'<line class="range" x1="{low:.2f}%" x2="{high:.2f}%" y1="{y}" y2="{y}"/>'
        f'<circle cx="{middle:.2f}%" cy="{y}" r="4.5"/></g>'
    )


def _pass_rate_table(report: Report) -> str:
    rates = report.analysis.pass_rates
    measures = dict.fromkeys(measure for rate in rates for measure in rate.estimates)
    colors = {name: position for position, name in enumerate(report.summaries)}
    rows = []
    for rate in rates:
        found = (rate.estimates.get(measure) for measure in measures)
        cells = "".join(
            f"<td><b>{compact(value.mean, 3)}</b><small>{value.bounds()}</small></td>" if value else "<td>–</td>"
            for value in found
        )
        rows.append(
            f'<tr><th scope="row">{swatch(colors.get(rate.system, 0))}{text(rate.system)}</th>'
            f'<td class="word">{text(rate.agent)}</td>{cells}</tr>\n'
        )
    head = ["System", "Agent", *(f"by {text(measure)}" for measure in measures)]
    inner = table("Estimated pass rates", "rates", f"Estimates with {LEVEL:.0%} intervals of the coverage", head, rows)
    return f'<details class="numbers"><summary>The same as a table</summary>{inner}</details>'
