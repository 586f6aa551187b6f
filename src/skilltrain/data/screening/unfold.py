"""A program as it reads when nothing in it is hidden: texts decoded and put together, variables and names resolved.

The one place for all languages: each step undoes one way of writing a text, however they spell it. What a step does not
understand stays. Repeats, rounds and what variables add are bounded, so time is linear.
"""

import base64
import codecs
import re
from array import array
from collections.abc import Callable
from functools import partial
from itertools import groupby, takewhile
from operator import eq
from urllib.parse import unquote

from skilltrain.data.screening.fragments import expand, load_rules_file

_LONGEST = 600  # letters of what a variable holds
Values = dict[str, str]
Step = Callable[[re.Match[str], Values], str | None]


def unfold(text: str) -> tuple[str, array | None]:
    """(the program unfolded, where its letters stand in `text`, or None for the same places)."""
    plain, origins, values = text, None, {}
    left = max(20_000, len(text))  # letters that variables may still add

    def shown(step: Step, found: re.Match[str]) -> str | None:
        nonlocal left
        if (instead := step(found, values)) is None or instead == found[0]:
            return None
        left -= max(0, len(instead) - len(found[0]))
        return instead if left > 0 else None

    for found in _ASSIGNMENT.finditer(text):
        _variable(found, values)
    for _ in range(3):  # a text may be hidden in another
        before = plain
        for regex, step in _STEPS:
            plain, origins = rewrite(plain, origins, regex, partial(shown, step))
        if plain == before:
            break
    return plain, origins


def rewrite(
    plain: str,
    origins: array | None,
    regex: re.Pattern[str],
    shown: Callable[[re.Match[str]], str | None],
) -> tuple[str, array | None]:
    """`plain` with what `shown` says in place of each match (None: as it is), and where its letters stand."""
    old = range(len(plain)) if origins is None else origins
    parts: list[str] = []
    new, done = array("l"), 0
    for found in regex.finditer(plain):
        if (instead := shown(found)) is None:
            continue
        same = min(_num_same(found[0], instead), len(found[0]) - 1)
        start, end, instead = found.start() + same, found.end(), instead[same:]
        same = min(
            _num_same(plain[start:end][::-1], instead[::-1]), end - start - 1, len(instead) - 1
        )
        if same > 0:
            end, instead = end - same, instead[:-same]
        parts += (plain[done:start], instead)
        new.extend(old[done:start])
        new.extend(
            old[start + (end - start - 1) * at // max(1, len(instead) - 1)]
            for at in range(len(instead))
        )
        done = end
    if not parts:
        return plain, origins
    new.extend(old[done:])
    return "".join([*parts, plain[done:]]), new


def _num_same(left: str, right: str) -> int:
    """How many first letters two texts share."""
    return sum(takewhile(bool, map(eq, left, right)))


def _quote(text: str | None) -> str | None:
    """`text` as a literal, if it is one line of letters that can be read."""
    if text is None or not text.isprintable() or not text:
        return None
    return f"'{text}'" if '"' in text else f'"{text}"'


def _inner(literal: str) -> str:
    return literal.lstrip("bBrRuUfF")[1:-1]


def _inners(literals: str | None) -> list[str]:
    return [_inner(found[0]) for found in _EACH_TEXT.finditer(literals or "")]


_TELLING = re.compile(rf"[./]\w|{expand('<TORN>')}", re.I)
_EACH_TEXT, _EACH_NUMBER = (re.compile(expand(name), re.I) for name in ("<TEXT>", "<NUMBER>"))
_ASSIGNMENT, _USE, _OPERAND = (
    re.compile(expand(name), re.I) for name in ("<ASSIGN>", "<USES>", "<TEXT>|<OPERAND>")
)
_EACH_PART = re.compile(expand(r"<TEXT>|\$?[\w.]{1,40}(?:\{\w{1,12}\})?"), re.I)


def _escapes(found: re.Match[str], _: Values) -> str | None:
    codes = re.findall(r"\\(?:x|u00|u\{)([0-9a-f]{1,4})|\\([01][0-7]{2})", found[0], re.I)
    shown = "".join(chr(int(digits or octal, 16 if digits else 8)) for digits, octal in codes)
    return shown if shown.isprintable() and not {*shown} & {*"\"'\\"} else None


def _codes(found: re.Match[str], _: Values) -> str | None:
    numbers = [_number(one[0]) for one in _EACH_NUMBER.finditer(found[0])]
    shown = "".join(map(chr, numbers)) if all(9 <= number < 127 for number in numbers) else ""
    alike = found["call"] or re.search(r"[a-z]{4}|[a-z]{2}[./]|/\w", shown, re.I)
    literal = _quote(re.sub(r"\s", " ", shown)) if alike else None
    return literal if found["call"] or literal is None else f"{found[0][0]}{literal}{found[0][-1]}"


def _number(written: str) -> int:
    [(first, sign, second)] = re.findall(r"^(\w+)\s?([-+^]?)\s?(\w*)$", written)
    left, right = (
        int(one or "0", 16 if one[:2].lower() == "0x" else 10) for one in (first, second)
    )
    return left ^ right if sign == "^" else left - right if sign == "-" else left + right


def _decoded(found: re.Match[str], _: Values) -> str | None:
    """A call that decodes a literal, or a shell's pipe that does; what nothing names is base64."""
    if found["piped"]:
        shown = _decode(found["piped"].strip("\"' "), found["how"])
    else:
        literal = found["of"] or found["own"]
        shown = _decode(_inner(literal), found[0].replace(literal, ""))
    return _quote(shown) if shown and _TELLING.search(shown) else None


def from_base64(literal: str) -> bytes:
    """What is encoded, in either alphabet, padded or not. Raises ValueError."""
    return base64.urlsafe_b64decode(literal + "=" * (-len(literal) % 4))


def _decode(literal: str, how: str) -> str | None:
    deleted, how = how.strip("\"' ")[-1:], how.lower()
    try:
        if "rot" in how or re.search("a-z|n-z", how):
            return codecs.encode(literal, "rot13")
        if how.startswith("tr -d"):
            return literal.replace(deleted, "")
        if re.search(r"\brev", how) or "strrev" in how:
            return literal[::-1]
        if "unquote" in how or "uri" in how or "urldecode" in how:
            return unquote(literal)
        if re.search("hex|xxd|h\\*", how):
            content = bytes.fromhex(re.sub(r"\s", "", literal))
        elif "32" in how:
            content = base64.b32decode(literal)
        elif "85" in how:
            content = base64.b85decode(literal)
        else:
            content = from_base64(literal)
        return content.replace(b"\0", b"").decode()
    except ValueError:
        return None


def _replaced(found: re.Match[str], _: Values) -> str | None:
    if found["php"]:
        old, new, text = _inners(found[0])
    else:
        text, old, new = [_inner(found["where"]), *_inners(found["by"]), ""][:3]
    return _quote(text.replace(old, new)) if old else None


def _cut(found: re.Match[str], _: Values) -> str | None:
    text = _inner(found["of"])
    if found["slice"]:
        parts = [int(part) if part.strip() else None for part in found["slice"].split(":")]
        return _quote(text[slice(*parts)]) if parts[-1] != 0 else None
    return _quote(text[::-1])


def _joined(found: re.Match[str], _: Values) -> str | None:
    texts = found["list"] or found["args"] or found["last"]
    glue = next(
        (_inner(found[name]) for name in ("glue", "before", "between", "after") if found[name]), ""
    )
    return (
        _quote(glue.join(found["words"].split() if found["words"] else _inners(texts)))
        if len(glue) < 5
        else None
    )


def _formatted(found: re.Match[str], _: Values) -> str | None:
    """ "{1}{0}" -f 'a','b'; '%s%s' % ('a', 'b'); "{}{}".format('a', 'b'); printf '%d.%d' 0x7f 1."""
    values = _inners(found["args"]) or [
        str(_number(one)) for one in re.findall(r"0x[0-9a-f]{2}|\d{1,3}", found["args"], re.I)
    ]
    ordered = iter(values)

    def filled(one: re.Match[str]) -> str:
        value = values[int(one[1])] if one[1] and int(one[1]) < len(values) else next(ordered, "?")
        return (
            chr(int(value)) if one[0] == "%c" and value.isdecimal() and int(value) < 127 else value
        )

    shown = re.sub(r"\{(\d?)\}|%[sdc]", filled, _inner(found["form"]))
    return _quote(shown) if shown != _inner(found["form"]) else None


def _chained(found: re.Match[str], values: Values) -> str | None:
    """Literals and variables with a plus between, as far as they are known."""
    operands = [one[0] for one in _OPERAND.finditer(found[0])]
    texts = [
        _inner(one) if one[-1] in "\"'" else values.get(one.lower().lstrip("$")) for one in operands
    ]
    shown: list[str] = []
    for is_known, places in groupby(range(len(texts)), lambda place: texts[place] is not None):
        if is_known:
            shown.append(_quote("".join(texts[place] or "" for place in places)) or '""')
        else:
            shown += (operands[place] for place in places)
    return " + ".join(shown) if len(shown) < len(operands) else None


def _variable(found: re.Match[str], values: Values) -> str | None:
    """What a variable holds, where it is used; an assignment is read as it comes."""
    if not found["name"]:
        return _used(found, values)
    name, written = found["name"].lower(), found["value"] or found["bare"]
    shown = _USE.sub(lambda use: _used(use, values) or use[0], written)
    value = _inner(shown) if found["value"] else shown
    if is_known := 0 < len(value) <= _LONGEST and "$" not in value:
        values[name] = value
    else:
        values.pop(name, None)
    literal = _quote(value) if found["bare"] and is_known else None
    return found[0].removesuffix(written) + (literal or shown) if "$" in written else None


def _used(found: re.Match[str], values: Values) -> str | None:
    name = next(
        (found[one] for one in ("braced", "plain", "ruby", "format", "batch") if found[one]), ""
    ).lower()
    value = values.get(name)
    if name.startswith("ifs") and found[0][0] == "$":
        return " "
    if value is None:
        return found["default"]
    if found["first"] is not None:
        return value[int(found["first"]) :][: int(found["length"])]
    if found["old"]:
        return value.replace(found["old"], found["new"], -1 if found["all"] else 1)
    return value


def _listed(found: re.Match[str], _: Values) -> str:
    """A command as a list, as a shell would read it."""
    parts = (one[0] for one in _EACH_PART.finditer(found["list"]))
    texts = [_inner(part) if part[-1] in "\"'`" else f"${part.lstrip('$')}" for part in parts]
    opening = found[0][: found.start("list") - found.start()].rstrip().rstrip("[")
    return f'{opening}"{" ".join(texts)}"'


def _word(found: re.Match[str], _: Values) -> str:
    """A word that quotes tear apart: cu""rl, c'u'rl."""
    return found["inside"] or found["last"] or ""


def _accessed(found: re.Match[str], values: Values) -> str | None:
    """What is looked up by its name, as it is usually written."""
    of, name = next(
        (found[f"of{i}"] or "", found[f"name{i}"]) for i in range(1, 6) if found[f"name{i}"]
    )
    of = "" if found["name4"] else of
    name = (
        _inner(name)
        if name[-1] in "\"'"
        else values.get(name.lower(), "")
        if found["name1"]
        else name
    )
    return f"{of}.{name}".lstrip(".") if re.fullmatch(r"[\w.:/-]{1,40}", name) else None


_STEP_OF: dict[str, Step] = {
    "escapes": _escapes,
    "codes": _codes,
    "decoded": _decoded,
    "cut": _cut,
    "replaced": _replaced,
    "joined": _joined,
    "formatted": _formatted,
    "listed": _listed,
    "chained": _chained,
    "word": _word,
    "variable": _variable,
    "accessed": _accessed,
}
_STEPS = [
    (re.compile(expand(regex), re.I), _STEP_OF[name])
    for name, regex in load_rules_file()["steps"].items()
]
