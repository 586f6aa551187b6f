"""Pages and Markdown from the templates beside this file, and how they put numbers into words and plots.

Skill names, queries and bodies are untrusted. Every text that a template prints is escaped, with the characters that
nobody sees written out; a page is one file that asks for nothing, and its own policy admits only its one script and
its one style sheet, each named by its hash.
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
    """Return a whole page: the template `name` with the style sheet and the script that all pages share."""
    style = (_TEMPLATES / "page.css").read_text("utf-8")
    script = (_TEMPLATES / "page.js").read_text("utf-8")
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    policy += f"; style-src {_hash(style)}; script-src {_hash(script)}"
    made = _environment(markdown=False).get_template(f"{name}.html.j2")
    return made.render(values, policy=policy, style=Markup(style), script=Markup(script))


def markdown(name: str, /, **values: Any) -> str:
    """The Markdown document `name`; texts are one line without markup, formatted numbers stay as they are."""
    return _environment(markdown=True).get_template(f"{name}.md.j2").render(values)


def plain(text: str) -> str:
    """`text` as one line of Markdown without markup, which begins no list, quotation or heading either."""
    text = one_line(visible(text)).replace("&", "&amp;").replace("<", "&lt;")
    text = "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
    return re.sub(r"^(\d*)([-+>=~.)])", r"\1\\\2", text)


def lead(text: str, length: int) -> str:
    """The beginning of a text on one line."""
    return one_line(text[: 2 * length])[:length] + ("…" if len(text) > length else "")


def cell(value: object) -> str:
    """A value of any type in a table: numbers in four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@cache
def _environment(markdown: bool) -> Environment:
    shown = plain if markdown else visible
    made = Environment(
        loader=PackageLoader("skilltrain.evaluation"),
        autoescape=not markdown,
        finalize=lambda value: (
            shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"cell": cell, "lead": lead, "median": median, "zip": zip}
    made.filters |= {form.__name__: _trusted(form) if markdown else form for form in _FORMATS}
    return made


def _trusted(form: Callable[..., str]) -> Callable[..., Markup]:
    return lambda *values: Markup(form(*values))


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def share(value: float) -> str:
    """The number at a tick of an axis of shares: 0, .25, 1."""
    return f"{value:.0f}" if value in (0, 1) else compact(value, 2)


def percent(part: float, whole: float) -> str:
    """A share in words: `1.7%`, `<0.1%`, `0%`."""
    found = 100 * part / whole if whole else 0.0
    if 0 < found < 0.1:
        return "<0.1%"
    return f"{found:.1f}%" if found < 10 and found != round(found) else f"{found:.0f}%"


def p_value(p: float) -> str:
    """A p like `.0321`, `<.0001` where it is smaller, 1 where it rounds to it."""
    if p >= 0.99995:
        return "1"
    return "<.0001" if p < 0.0001 else compact(p, 4)


def p_equals(p: float) -> str:
    """A p in a sentence: `p = .0321`, `p < .0001`."""
    value = p_value(p)
    return f"p < {value[1:]}" if value.startswith("<") else f"p = {value}"


def signed(value: float) -> str:
    """A difference with its sign, like `+.173`; 0 has none."""
    text = compact(value, 3)
    return text if text.startswith("-") or not text.strip("0.") else f"+{text}"


def signed_interval(value: Interval) -> str:
    """A difference with its interval, like `+.173 [.08, .27]`."""
    return f"{signed(value.mean)} {value.bounds()}"


def feature_reading(feature: Mapping[str, Any]) -> str:
    """What the test of a row of `structure` allows to say of gold skills: more, less or not told apart."""
    if feature["p"] >= ALPHA or feature["effect"] == 0.5:
        return "not told apart"
    return "more" if feature["effect"] > 0.5 else "less"


def number(value: float) -> str:
    """A count, length or rate in three significant digits or more: `1,240`, `12.5`, `.04`."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else compact(value, 2)


def duration(seconds: float) -> str:
    """A time of waiting in three significant digits: `.42 ms`, `85.0 ms`, `1.30 s`."""
    value, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return (
        f"{value:,.0f} {unit}"
        if value >= 99.95
        else f"{compact(value, 1 if value >= 9.995 else 2)} {unit}"
    )


def counted(num: int, noun: str) -> str:
    """A count with its noun: `1 query`, `3 queries`, `2 systems`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"


_FORMATS = (compact, counted, duration, number, p_equals, p_value, percent, feature_reading, share)
_FORMATS += (signed, signed_interval)


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers laid over 100 percent of a plot's width, and the round numbers that mark it."""

    ticks: tuple[float, ...]
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value stands, in percent; values beyond the ends stand at the ends."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)


def axis_of(ticks: Sequence[float], logarithmic: bool = False) -> Axis:
    """The axis from the first tick to the last."""
    return Axis(tuple(ticks), ticks[0], ticks[-1], logarithmic)


SHARES = axis_of((0, 0.25, 0.5, 0.75, 1))


def ends_of(values: Iterable[Interval]) -> list[float]:
    """The ends of intervals, for the axis that holds them."""
    return [end for value in values for end in (value.low, value.high)]


def axis_around(middle: float, values: Sequence[float]) -> Axis:
    """The axis with `middle` in its middle, as wide as the values ask for, up to 1 on either side."""
    largest = max(abs(value - middle) for value in values)
    limit = next(
        limit
        for limit in (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
        if largest <= limit + 1e-9 or limit == 1
    )
    return axis_of((round(middle - limit, 2), middle, round(middle + limit, 2)))


def axis_over(values: Sequence[float], logarithmic: bool = False) -> Axis:
    """Return the axis of a few round numbers that holds all values; powers of ten, if it is logarithmic."""
    low, high = min(values), max(values)
    if logarithmic:
        first = math.floor(math.log10(low))
        last = max(first + 1, math.ceil(math.log10(high)))
        return axis_of([10.0**power for power in range(first, last + 1)], logarithmic)
    step = next((size for size in (0.01, 0.02, 0.05, 0.1) if size * 6 >= high - low), 0.2)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return axis_of([round(n * step, 9) for n in range(first, last + 1)])
