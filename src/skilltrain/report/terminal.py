"""The report as a table for the terminal."""

from rich.table import Table
from rich.text import Text

from skilltrain.evaluation.slices import ALL, SliceMeans
from skilltrain.evaluation.statistics.bootstrap import Interval, compact
from skilltrain.report.evaluation import Report
from skilltrain.texts import printable

WIDE = 105  # columns from which on systems are rows; below, they are columns, as many as fit, block by block
NAME, CELL = 11, 17  # widths of the first column and of a mean with its interval


def terminal_table(report: Report, width: int) -> Table:
    """The means over all queries and over each kind, for a terminal of `width` columns.

    Systems are rows and measures columns where there is room, else measures are rows: names and intervals are never
    cut. The best mean stands out, the caption is the headline.
    """
    table = Table(
        title=Text(f"{printable(report.title())}, 95% bootstrap intervals"),
        title_justify="left",
        caption=Text(printable(report.headline())),
        caption_justify="left",
        pad_edge=False,
    )
    if len(report.systems) > 1 and width >= WIDE:
        _systems_as_rows(table, report)
    else:
        _measures_as_rows(table, report, max(1, (width - NAME) // CELL))
    return table


def _measures_as_rows(table: Table, report: Report, num_columns: int) -> None:
    """Blocks of as many systems as fit, section by section; of a single system its sections side by side."""
    rows = [[(part, name) for name in report.systems] for part in report.sections]
    if len(report.systems) == 1:
        rows = [[pair for row in rows for pair in row]]
    blocks = [row[start : start + num_columns] for row in rows for start in range(0, len(row), num_columns)]
    table.show_header = False
    table.add_column(no_wrap=True)
    for _ in range(max(map(len, blocks))):
        table.add_column(justify="right", overflow="fold", max_width=CELL - 3)
    for block in blocks:
        heads = [Text(f"{printable(name)}\n{_count(part)}", style="bold") for part, name in block]
        table.add_row("", *heads, end_section=True)
        for measure in report.measures:
            cells = [_cell(part, name, measure) for part, name in block]
            table.add_row(measure, *cells, end_section=measure == report.measures[-1])


def _systems_as_rows(table: Table, report: Report) -> None:
    table.add_column("system", overflow="fold", max_width=28)
    for name in report.measures:
        table.add_column(name.replace("Recall@", "R@").replace("Precision@", "P@"), justify="right", no_wrap=True)
    for part in report.sections:
        table.add_section()
        partial = [f"{name}: n = {held}" for name, held in part.partial().items()]
        table.add_row(Text("\n".join([_count(part), *partial]), style="italic dim"))
        for system in report.systems:
            table.add_row(Text(printable(system)), *(_cell(part, system, name, False) for name in report.measures))


def _count(part: SliceMeans) -> str:
    return f"{'all' if part.label == ALL else part.value}, n = {len(part.query_ids)}"


def _cell(part: SliceMeans, system: str, measure: str, with_count: bool = True) -> Text:
    value: Interval | None = part.means[system].get(measure)
    if value is None:
        return Text("–", style="dim")
    count = f"\nn = {value.n}" if with_count and value.n < len(part.query_ids) else ""
    mean = Text(compact(value.mean, 3), style="bold" if system in part.best(measure) else "")
    return mean.append(f"\n{value.bounds()}{count}", style="not bold dim")
