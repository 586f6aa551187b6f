"""`skilltrain inspect`: one HTML page on training lists that needs nothing else.

All texts of skills and queries are untrusted. What Python writes is escaped; what the script shows comes from a JSON
element that cannot end early, and reaches the page as text only. The page's own policy admits its one script and its
one style sheet, each named by its hash, and no request to anywhere.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from skilltrain.data.inspection import sections
from skilltrain.data.inspection.checks import Check, run_checks
from skilltrain.data.inspection.counts import Flow, flow
from skilltrain.data.inspection.excerpts import Shown, choose
from skilltrain.data.inspection.material import Material, read_material
from skilltrain.data.inspection.plots import text
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text

_PARTS = (
    ("checks", "Worth a look"), ("sources", "Flow"), ("ranks", "Ranks"), ("lengths", "Lengths"),
    ("shares", "Categories"), ("hubs", "Recurring"), ("flags", "Flags"), ("drops", "Drops"), ("lists", "Lists"),
)  # fmt: skip


def inspect_lists(lists: Path, out: Path | None, pool: Path | None, max_lists: int) -> dict[str, Any]:
    """Write the page of the folder `lists` to `out` (beside the folder: `lists.html`) and return what it shows.

    `pool` stands in for the pool that the lists' record names; of more than `max_lists` lists a sample is shown.
    Raises SkilltrainError where `lists` holds no lists, or `out` lies in a folder that a training reads.
    """
    material = read_material(lists, pool)
    folder = material.trail.lists
    file = folder.with_name(f"{folder.name}.html") if out is None else out
    if folder in file.resolve().parents:
        raise SkilltrainError("lies in the folder of the lists, which a page would change", where=file, fix="set --out")
    checks, way = run_checks(material), flow(material)
    shown = choose(material, checks, max_lists)
    content = page(material, checks, way, shown)
    write_text(file, content)
    return {
        "page": str(file),
        "megabytes": round(len(content.encode()) / 1e6, 1),
        "num_lists": len(material.query_ids),
        "num_lists_shown": shown.lists,
        "num_dropped_pairs_shown": sum(count for count, _ in shown.pairs.values()),
        "worth_a_look": {check.key: len(check.lists) for check in checks if len(check.lists)},
        "missing": material.trail.missing,
    }


def page(material: Material, checks: Sequence[Check], way: Flow, shown: Shown) -> str:
    """The whole page."""
    style, script = (files("skilltrain.data.inspection").joinpath(f"page.{kind}").read_text("utf-8") for kind in _KINDS)
    policy = f"{_POLICY}; style-src {_hash(style)}; script-src {_hash(script)}"
    name = text(material.trail.lists.name)
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title in _PARTS if key != "shares" or material.num_pool)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{name}: training lists</title>\n<style>{style}</style>\n</head>\n'
        "<body>\n"
        f'<header><p class="kicker">Training lists</p><h1>{name}</h1>{_trail(material)}</header>\n'
        f'<nav aria-label="Parts of the page">{links}</nav>\n<main>\n{sections.overview(material, way)}\n'
        f"{_missing(material)}\n{sections.check_list(checks, len(material.query_ids), way)}\n"
        f"{sections.flow_table(material, way)}\n{sections.sources(material, way)}\n{sections.length_plots(material)}\n"
        f"{sections.share_plots(material)}\n{sections.hub_table(material, way)}\n{sections.flag_table(material)}\n"
        f"{_drops(shown)}\n{_browser(material, checks, shown)}\n{_notes()}\n</main>\n"
        f'<script type="application/json" id="data">{shown.json}</script>\n<script>{script}</script>\n</body>\n'
        "</html>\n"
    )


_KINDS = ("css", "js")
_POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _trail(material: Material) -> str:
    """The runs that led here, first to last, each with its folder."""
    trail = material.trail
    steps = [("pool", trail.pool), ("queries", trail.queries), *((s.stage, s.folder) for s in reversed(trail.steps))]
    shown = "".join(f"<li>{text(stage)} <code>{text(path)}</code></li>" for stage, path in steps if path is not None)
    return (
        f'<details class="trail"><summary>Made by {len(trail.steps)} runs</summary><ol>{shown}</ol></details>'
        if shown
        else ""
    )


def _missing(material: Material) -> str:
    if not material.trail.missing:
        return ""
    lines = "".join(f"<li>{text(line)}</li>" for line in material.trail.missing)
    return f'<aside class="missing"><h2>Not found</h2><ul>{lines}</ul></aside>'


def _drops(shown: Shown) -> str:
    """The shell that the script fills with dropped pairs, two texts side by side."""
    if not shown.pairs:
        return '<section id="drops"><h2>What filters dropped</h2><p>Nothing, as far as the trail goes.</p></section>'
    total = sum(count for count, _ in shown.pairs.values())
    choices = f'<label><input type="radio" name="layer" value="" checked><span>all <i>{total:,}</i></span></label>'
    for layer, (count, every) in shown.pairs.items():
        said = f"{count:,}" if count == every else f"{count:,} of {every:,}"
        button = f'<input type="radio" name="layer" value="{text(layer)}">'
        choices += f"<label>{button}<span>{text(layer)} <i>{said}</i></span></label>"
    return (
        '<section id="drops"><h2>What filters dropped</h2><p>A dropped candidate beside the gold skill that it was '
        "held against: is it a false negative, or did the filter take a good negative? Words in word trigrams that "
        "both "
        "bodies hold are <mark>marked</mark>. Of many pairs a sample, drawn by seed, is shown, low values first.</p>"
        f'<div class="controls" hidden><fieldset><legend>Layer</legend>{choices}</fieldset>'
        '<label class="search">Search <input type="search" id="drop-search" autocomplete="off"></label></div>'
        '<p class="found" role="status" id="drop-found"></p><div id="drop-rows"></div>'
        '<div class="pages" id="drop-pages"></div><noscript><p>Needs JavaScript.</p></noscript></section>'
    )


def _browser(material: Material, checks: Sequence[Check], shown: Shown) -> str:
    """The shell that the script fills with queries and their lists."""
    every = len(material.query_ids)
    said = f"All {every:,} lists."
    if shown.lists < every:
        more = shown.lists - shown.sampled
        others = f", and {more:,} more that a check points at" if more else ""
        said = f"{shown.sampled:,} of {every:,} lists, drawn by seed{others} (more with --max-lists)."
        said += " Counts above are of all."
    options = "".join(
        f'<option value="{check.key}">{text(check.title)}</option>' for check in checks if len(check.lists)
    )
    choice = f'<label>Show <select id="list-check"><option value="">all lists</option>{options}</select></label>'
    return (
        f'<section id="lists"><h2>Queries and their lists</h2><p>{said} Search looks into queries, names, '
        "descriptions, categories and the beginning of bodies; <kbd>/</kbd> goes to the box.</p>"
        '<div class="controls" hidden>'
        f'<label class="search">Search <input type="search" id="list-search" autocomplete="off"></label>{choice}</div>'
        '<p class="found" role="status" id="list-found"></p><div id="list-rows"></div>'
        '<div class="pages" id="list-pages"></div><noscript><p>Needs JavaScript.</p></noscript></section>'
    )


def _notes() -> str:
    return (
        "<footer><h2>How to read this</h2><p>A list is a query with its positives and negatives, as a trainer reads "
        "it. Sources are where a negative was mined; layers are the filter’s grounds for taking a candidate for a "
        "false "
        "negative. Characters that nobody sees, bidirectional orders among them, are written out like "
        "[U+202E]. Skills are untrusted text: read them, do not follow them.</p></footer>"
    )
