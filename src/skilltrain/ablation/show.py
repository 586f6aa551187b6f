"""The tables of an ablation for people: Markdown, and the differences in the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from skilltrain.ablation.results import Results, ResultTable, VariantScores
from skilltrain.evaluation.statistics.bootstrap import LEVEL, RESAMPLES, compact
from skilltrain.evaluation.statistics.comparison import Comparison
from skilltrain.report.numbers import ALPHA, counted, p_value, reading, signed_interval
from skilltrain.report.page import plain
from skilltrain.runs import RECIPE_FILE

_FIGURES = tuple("0123456789.+-<–*")  # what a cell of a column of numbers begins with
_MARK = {"above": "▲ above", "below": "▼ below", "not told apart": "not told apart"}


def markdown(results: Results) -> str:
    """The ablation as Markdown; names are escaped."""
    grid = results.plan.grid
    lines = [f"# {plain(grid.ablation)}", "", f"Claim: {plain(grid.claim)}", ""]
    lines += [
        f"A value is a query's mean over the seeds; in brackets the {LEVEL:.0%} bootstrap interval over queries "
        f"({RESAMPLES:,} draws), which speaks of other queries, not of other trainings: ± is the standard deviation "
        "of the seeds' means, and *seeds above* counts the seeds with which the variant is above. Differences are "
        f"paired, to the baseline *{plain(grid.baseline)}*; above and below are said where the bootstrap's p is under "
        f"{ALPHA:.2g} after Holm's correction over all {counted(results.num_tests, 'comparison')} of this file. "
        "Wilcoxon's p (and, for one seed, McNemar's) stand beside, uncorrected.",
    ]
    for table in results.tables:
        lines += _table(table)
    return "\n".join([*lines, *_cells(results)]) + "\n"


def _table(table: ResultTable) -> list[str]:
    split = f", split {table.split}" if table.split else ""
    title = f"{table.evaluation}: {table.benchmark}{split} (n = {table.num_queries:,})"
    rows = [
        [plain(scores.variant), str(len(scores.seed_means)), *(_score(scores, name) for name in table.measures)]
        for scores in table.scores
    ]
    lines = ["", f"## {plain(title)}", "", *table_lines(["variant", "seeds", *table.measures], rows)]
    if table.comparisons:
        rows = [_difference(c, table) for c in table.comparisons]
        head = [
            "variant",
            "measure",
            "difference",
            "seeds above",
            "p",
            "p, Holm",
            "p, Wilcoxon",
            "p, McNemar",
            "verdict",
        ]
        lines += ["", *table_lines(head, rows)]
    return lines


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; columns of numbers are set to the right."""
    columns = zip(*rows, strict=True)
    rule = ["---:" if all(cell.startswith(_FIGURES) for cell in column) else "---" for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _score(scores: VariantScores, measure: str) -> str:
    if measure not in scores.means:
        return "–"
    spread = scores.seed_spread(measure)
    return f"{scores.means[measure]}{'' if spread is None else f' ± {compact(spread, 3)}'}"


def _difference(c: Comparison, table: ResultTable) -> list[str]:
    by_seed = table.seed_differences(c).values()
    above = f"{sum(value > 0 for value in by_seed)} of {len(by_seed)}"
    values = [p_value(c.p), p_value(c.p_holm), p_value(c.wilcoxon_p), p_value(c.mcnemar_p)]
    return [plain(c.system), c.measure, signed_interval(c.difference), above, *values, _MARK[reading(c)]]


def _cells(results: Results) -> list[str]:
    """Where each cell's recipes stand: those of its evaluations, which name the folders of all before."""
    rows = []
    for cell in results.plan.cells:
        error = results.failed.get((cell.variant, cell.seed), "done")
        recipes = "<br>".join(plain(str(folder / RECIPE_FILE)) for folder in cell.evaluations.values())
        rows.append([plain(cell.variant), str(cell.seed), plain(error), recipes])
    intro = (
        "`skilltrain STAGE RECIPE out=FOLDER` (of a training: `skilltrain train RECIPE out=FOLDER`) runs a step again; "
        "a recipe names the folders that it reads."
    )
    return [
        "",
        "## Cells",
        "",
        intro,
        "",
        *table_lines(["variant", "seed", "outcome", "recipe of the evaluation"], rows),
    ]


def terminal_tables(results: Results) -> list[Table]:
    """One table an evaluation: what is compared, and how it differs from the baseline."""
    return [_terminal_table(results, table) for table in results.tables]


def _terminal_table(results: Results, table: ResultTable) -> Table:
    grid = results.plan.grid
    title = f"{grid.ablation}, {table.evaluation}, n = {table.num_queries}; differences to {grid.baseline}"
    shown = Table(title=Text(title), title_justify="left", pad_edge=False)
    shown.add_column("variant", overflow="fold", max_width=32)
    shown.add_column("seeds", justify="right")
    for measure in grid.compare:
        shown.add_column(measure, justify="right", no_wrap=True)
        shown.add_column("difference", justify="right")
    for scores in table.scores:
        cells = [Text(scores.variant), Text(str(len(scores.seed_means)))]
        for measure in grid.compare:
            found = [c for c in table.comparisons if (c.system, c.measure) == (scores.variant, measure)]
            cells += [Text(_score(scores, measure)), _terminal_difference(found)]
        shown.add_row(*cells)
    return shown


def _terminal_difference(found: Sequence[Comparison]) -> Text:
    if not found:
        return Text("")
    word = reading(found[0])
    style = "" if word == "not told apart" else "bold"
    return Text(f"{signed_interval(found[0].difference)}\n{word}", style=style)
