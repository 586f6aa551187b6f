"""Pages and Markdown from the templates beside this file.

Skill names, queries and bodies are untrusted. Every text that a template prints is escaped, with the characters that
nobody sees written out; a page is one file that asks for nothing, and its own policy admits only its one script and
its one style sheet, each named by its hash.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skilltrain.evaluation.bootstrap import compact
from skilltrain.report import numbers
from skilltrain.texts import one_line, visible

_FORMATS: tuple[Callable[..., str], ...] = (
    compact, numbers.counted, numbers.duration, numbers.number, numbers.p_equals, numbers.p_value, numbers.percent,
    numbers.feature_reading, numbers.reading, numbers.share, numbers.signed, numbers.signed_interval,
)  # fmt: skip


def html_page(template: str, scripts: tuple[str, ...], **values: Any) -> str:
    """A whole page: the template, the style sheet that all pages share, and the scripts as one."""
    style = _asset("page.css")
    script = "\n".join(_asset(name) for name in ("page.js", *scripts))
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    policy += f"; style-src {_hash(style)}; script-src {_hash(script)}"
    made = _environment(markdown=False).get_template(template)
    return made.render(values, policy=policy, style=Markup(style), script=Markup(script))


def markdown(template: str, **values: Any) -> str:
    """A Markdown document; texts are one line without markup, formatted numbers stay as they are."""
    return _environment(markdown=True).get_template(template).render(values)


def plain(text: str) -> str:
    """`text` as one line of Markdown without markup, which begins no list, quotation or heading either."""
    text = one_line(visible(text)).replace("&", "&amp;").replace("<", "&lt;")
    text = "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
    return re.sub(r"^(\d*)([-+>=~.)])", r"\1\\\2", text)


def lead(text: str, length: int) -> str:
    """The beginning of a text on one line."""
    return one_line(text[: 2 * length])[:length] + ("…" if len(text) > length else "")


@cache
def _environment(markdown: bool) -> Environment:
    shown = plain if markdown else visible
    made = Environment(
        loader=PackageLoader("skilltrain.report"),
        autoescape=not markdown,
        finalize=lambda value: shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    made.filters |= {"lead": lead, "zip": zip}
    for form in _FORMATS:
        made.filters[form.__name__] = _trusted(form) if markdown else form
    return made


def _trusted(form: Callable[..., str]) -> Callable[..., Markup]:
    return lambda *values: Markup(form(*values))


def _asset(name: str) -> str:
    return files("skilltrain.report").joinpath("templates", name).read_text("utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
