"""HTML pages and Markdown documents from templates, and the formats and axes that they use.

Skill names, queries and bodies are untrusted. Every text that a template prints is escaped, and its
invisible characters are written out. A page is one file that requests nothing. Its security policy
admits only its own script and style sheet, by their hashes.
"""

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skilltrain.metrics.bootstrap import Interval, compact
from skilltrain.metrics.comparison import ALPHA
from skilltrain.texts import one_line, visible

_TEMPLATES = files("skilltrain.evaluation") / "templates"


def html_page(name: str, /, **values: Any) -> str:
    """Render the template `name` as a page that contains the shared style sheet and script."""
    style = (_TEMPLATES / "page.css").read_text("utf-8")
    script = (_TEMPLATES / "page.js").read_text("utf-8")
    # This Content-Security-Policy forbids everything except the page's own style, script and
    # images.
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    policy += f"; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}"
    template = _environment(markdown=False).get_template(f"{name}.html.j2")
    return template.render(values, policy=policy, style=Markup(style), script=Markup(script))


def markdown(name: str, /, **values: Any) -> str:
    """Render the template `name` as Markdown. Texts are escaped, formatted numbers are not."""
    return _environment(markdown=True).get_template(f"{name}.md.j2").render(values)


def _csp_hash(content: str) -> str:
    """Return the hash of a script or style sheet, as a Content-Security-Policy names it."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def cell(value: object) -> str:
    """Format a value of any type for a table. Floats get four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@cache
def _environment(markdown: bool) -> Environment:
    """Return the Jinja environment for Markdown documents or for HTML pages.

    Args:
        markdown: Whether the documents are Markdown; otherwise they are HTML pages.
    """
    # Jinja itself escapes HTML. `visible` only replaces characters that nobody can see.
    escape = escape_markdown if markdown else visible

    def finalize(value: Any) -> Any:
        """Escape a text that a template prints. Markup was escaped before."""
        is_plain_text = isinstance(value, str) and not isinstance(value, Markup)
        return escape(value) if is_plain_text else value

    # StrictUndefined makes a missing variable an error. `finalize` is called for each printed
    # value.
    environment = Environment(
        loader=PackageLoader("skilltrain.evaluation"),
        autoescape=not markdown,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": cell, "shorten": shorten, "median": median, "zip": zip}
    for function in _FORMATS:
        # Markdown needs no escapes in formatted numbers: `-0.5` would become `\-0.5`.
        environment.filters[function.__name__] = _as_markup(function) if markdown else function
    return environment


def _as_markup(function: Callable[..., str]) -> Callable[..., Markup]:
    """Return a function whose results are not escaped."""
    return lambda *values: Markup(function(*values))


# Texts ---------------------------------------------------------------------------------------


def escape_markdown(text: str) -> str:
    """Return `text` on one line, without anything that Markdown or HTML would interpret."""
    text = one_line(visible(text)).replace("&", "&amp;").replace("<", "&lt;")
    text = "".join(f"\\{char}" if char in "\\`*_[]|#" else char for char in text)
    # A list item, quotation or heading begins with one of these, or with a number before it.
    return re.sub(r"^(\d*)([-+>=~.)])", r"\1\\\2", text)


def shorten(text: str, length: int) -> str:
    """Return the first `length` characters of a text, on one line."""
    start = one_line(text[: 2 * length])[:length]
    return f"{start}…" if len(text) > length else start


# Formats, which are also filters of the templates --------------------------------------------


def tick_label(value: float) -> str:
    """Format the number at a tick of an axis of shares: 0, .25, 1."""
    return f"{value:.0f}" if value in (0, 1) else compact(value, 2)


def percent(part: float, whole: float) -> str:
    """Format a share: `1.7%`, `<0.1%`, `0%`."""
    value = 100 * part / whole if whole else 0.0
    if 0 < value < 0.1:
        return "<0.1%"
    num_decimals = 1 if value < 10 and value != round(value) else 0
    return f"{value:.{num_decimals}f}%"


def p_value(p: float) -> str:
    """Format a p-value with four decimals: `.0321`. Smaller ones are `<.0001`."""
    if p >= 0.99995:  # rounds to 1
        return "1"
    return "<.0001" if p < 0.0001 else compact(p, 4)


def p_equals(p: float) -> str:
    """Format a p-value in a sentence: `p = .0321`, `p < .0001`."""
    value = p_value(p)
    return f"p < {value[1:]}" if value.startswith("<") else f"p = {value}"


def signed(value: float) -> str:
    """Format a difference with its sign: `+.173`. A 0 has no sign."""
    text = compact(value, 3)
    is_zero = not text.strip("0.")
    return text if text.startswith("-") or is_zero else f"+{text}"


def signed_interval(value: Interval) -> str:
    """Format a difference with its interval: `+.173 [.08, .27]`."""
    return f"{signed(value.mean)} {value.bounds()}"


def feature_reading(feature: Mapping[str, Any]) -> str:
    """Say whether gold skills have more or less of a feature than other skills.

    Args:
        feature: Row of the analysis `structure`: `effect` is the probability that a gold skill has
            more of the feature than another skill, and `p` the p-value.
    """
    if feature["p"] >= ALPHA or feature["effect"] == 0.5:
        return "not told apart"
    return "more" if feature["effect"] > 0.5 else "less"


def number(value: float) -> str:
    """Format a count, length or rate with three significant digits or more: `1,240`, `12.5`."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else compact(value, 2)


def duration(seconds: float) -> str:
    """Format a duration with three significant digits: `.42 ms`, `85.0 ms`, `1.30 s`."""
    is_short = seconds < 1
    value = 1000 * seconds if is_short else seconds
    unit = "ms" if is_short else "s"
    if value >= 99.95:  # rounds to 100
        return f"{value:,.0f} {unit}"
    num_decimals = 1 if value >= 9.995 else 2  # 9.995 rounds to 10.0
    return f"{compact(value, num_decimals)} {unit}"


def counted(num: int, noun: str) -> str:
    """Format a count with its noun: `1 query`, `3 queries`, `2 systems`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"


_FORMATS: tuple[Callable[..., str], ...] = (
    compact,
    counted,
    duration,
    feature_reading,
    number,
    p_equals,
    p_value,
    percent,
    signed,
    signed_interval,
    tick_label,
)


# Axes of plots -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An axis of a plot, from the first tick to the last, with a number at each tick."""

    ticks: tuple[float, ...]
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value in percent of the axis, limited to its ends."""
        low = self.ticks[0]
        high = self.ticks[-1]
        # Values outside of the axis are drawn at its ends.
        value = min(max(value, low), high)
        if self.logarithmic:
            return 100 * math.log(value / low) / math.log(high / low)
        return 100 * (value - low) / (high - low)


SHARES = Axis((0, 0.25, 0.5, 0.75, 1))
_MARGINS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # on either side of the middle of an axis
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)  # between the ticks of an axis
_MAX_STEPS = 6
_TOLERANCE = 1e-9  # of comparisons, because 0.1 has no exact float


def ends_of(values: Iterable[Interval]) -> list[float]:
    """Return the lower and upper ends of intervals as one list."""
    ends = []
    for value in values:
        ends += [value.low, value.high]
    return ends


def axis_around(middle: float, values: Sequence[float]) -> Axis:
    """Return the smallest axis with `middle` at its centre that contains all values.

    The axis reaches at most 1 to either side. Values beyond it are drawn at its ends.

    Args:
        middle: Value at the centre of the axis.
        values: Values to plot, at least one.
    """
    distance = max(abs(value - middle) for value in values)
    # Take the smallest margin with room for all values. If there is none, take the largest margin.
    large_enough = [margin for margin in _MARGINS if distance <= margin + _TOLERANCE]
    margin = large_enough[0] if large_enough else _MARGINS[-1]
    return Axis((round(middle - margin, 2), middle, round(middle + margin, 2)))


def axis_over(values: Sequence[float], logarithmic: bool = False) -> Axis:
    """Return an axis with a few round numbers as ticks that contains all values.

    For example, the values 0.12 and 0.47 have the ticks 0.1, 0.2, 0.3, 0.4 and 0.5. The ticks of a
    logarithmic axis are powers of ten.

    Args:
        values: Values to plot, at least one. Values of a logarithmic axis are above 0.
        logarithmic: Whether the axis is logarithmic.
    """
    low = min(values)
    high = max(values)
    if logarithmic:
        # The first and the last tick as powers of ten.
        first = math.floor(math.log10(low))
        last = max(first + 1, math.ceil(math.log10(high)))  # an axis has at least two ticks
        return Axis(tuple(10.0**power for power in range(first, last + 1)), logarithmic)

    # Take the smallest step that needs at most _MAX_STEPS steps. If there is none, take the largest
    # step, and draw more of them.
    large_enough = [step for step in _STEPS if step * _MAX_STEPS >= high - low]
    step = large_enough[0] if large_enough else _STEPS[-1]

    # The first and the last tick as multiples of the step. Without the tolerance, a rounding error
    # in a value that is on a tick would add another tick.
    first = math.floor(low / step + _TOLERANCE)
    last = max(first + 1, math.ceil(high / step - _TOLERANCE))
    # Round, because 3 * 0.1 is 0.30000000000000004.
    return Axis(tuple(round(n * step, 9) for n in range(first, last + 1)))
