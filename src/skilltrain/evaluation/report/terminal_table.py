"""The report as a table for the terminal."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from skilltrain.evaluation.report.contents import Report
from skilltrain.evaluation.report.marks import visible
from skilltrain.evaluation.statistics.bootstrap import Interval, compact


def terminal_table(report: Report) -> Table:
    """Systems as rows and measures as columns, one block a section; of a single system, measures as rows.

    The best mean of a column stands out, the caption is the headline. In 120 columns there is room for seven measures
    of several systems, with the interval below its mean, and for any number of one.
    """
    table = Table(
        title=Text(f"{visible(report.benchmark)}, 95% bootstrap intervals"),
        title_justify="left",
        caption=Text(visible(report.headline())),
        caption_justify="left",
        pad_edge=False,
    )
    fill = _fill_with_systems if len(report.summaries) > 1 else _fill_with_measures
    fill(table, report)
    return table


def _fill_with_measures(table: Table, report: Report) -> None:
    (rows,) = report.summaries.values()
    table.add_column("measure")
    for section, count in report.sections().items():
        table.add_column(f"{section}, n = {count}", justify="right", no_wrap=True)
    for name in report.measures:
        cells = (_line(rows[section].get(name), report.partial(section)) for section in report.sections())
        table.add_row(name, *cells)


def _line(value: Interval | None, partial: Mapping[str, int]) -> Text:
    if value is None:
        return Text("–", style="dim")
    count = f", n = {value.n}" if value.n in partial.values() else ""
    return Text(compact(value.mean, 3)).append(f" {value.bounds()}{count}", style="dim")


def _fill_with_systems(table: Table, report: Report) -> None:
    table.add_column("system", overflow="fold", max_width=28)
    for name in report.measures:
        table.add_column(name.replace("Recall@", "R@").replace("Precision@", "P@"), justify="right", no_wrap=True)
    for section, count in report.sections().items():
        table.add_section()
        lines = [f"{section}, n = {count}"]
        lines += [f"{name}: n = {held}" for name, held in report.partial(section).items()]
        table.add_row(Text("\n".join(lines), style="italic dim"))
        for system, rows in report.summaries.items():
            row = rows[section]
            cells = (
                _cell(row[name], report.is_best(section, system, name)) if name in row else Text("–", style="dim")
                for name in report.measures
            )
            table.add_row(Text(visible(system)), *cells)


def _cell(value: Interval, best: bool) -> Text:
    mean = Text(compact(value.mean, 3), style="bold" if best else "")
    return mean.append(f"\n{value.bounds()}", style="not bold dim")
