"""The report as a table for the terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from skilltrain.evaluation.bootstrap import compact
from skilltrain.evaluation.slices import ALL, KIND, LENGTH, SliceMeans, shown
from skilltrain.report.evaluation import Report
from skilltrain.texts import printable

NAME, CELL = 11, 21  # widths of the first column and of a mean with its interval


def terminal_table(report: Report, width: int) -> Group:
    """The means over all queries, each kind, and terse and long ones, for a terminal of `width` columns.

    Measures are rows; systems are columns, as many as fit, block by block, so that names and intervals are never cut.
    The best mean stands out; below are the headline and what else must be known.
    """
    table = Table(pad_edge=False, show_header=False)
    title = Text(f"{printable(report.title())}, 95% bootstrap intervals", style="italic")
    caption = Text("\n".join(map(printable, (report.headline(), *report.about.notes))))
    parts = [part for part in shown(report.slices) if part.label in (ALL, KIND, LENGTH)]
    columns = [[(part, name) for name in report.systems] for part in parts]
    if len(report.systems) == 1:
        columns = [[pair for row in columns for pair in row]]  # a single system's parts stand side by side
    num = max(1, (width - NAME) // CELL)
    blocks = [row[start : start + num] for row in columns for start in range(0, len(row), num)]
    table.add_column(no_wrap=True)
    for _ in range(max(map(len, blocks))):
        table.add_column(justify="right", overflow="fold", max_width=CELL - 3)
    for block in blocks:
        heads = [f"{printable(name)}\n{part.value}, n = {len(part.query_ids)}" for part, name in block]
        table.add_row("", *(Text(head, style="bold") for head in heads), end_section=True)
        for measure in report.measures:
            cells = [_cell(part, name, measure) for part, name in block]
            table.add_row(measure.replace(" ", "\n"), *cells, end_section=measure == report.measures[-1])
    return Group(title, table, caption)


def _cell(part: SliceMeans, system: str, measure: str) -> Text:
    value = part.means[system].get(measure)
    if value is None:
        return Text("–", style="dim")
    count = f"\nn = {value.n}" if value.n < len(part.query_ids) else ""
    mean = Text(compact(value.mean, 3), style="bold" if system in part.best(measure) else "")
    return mean.append(f" {value.bounds()}{count}", style="not bold dim")
