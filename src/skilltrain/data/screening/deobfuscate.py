"""Deobfuscate programs: decode and join literals, and resolve variables and names.

Each step undoes one way of hiding a text, in all programming languages at once. A step does not
change what it does not understand. Repetitions in regular expressions, rounds and added text are
bounded, so that the time stays linear in the length of the program.

Notes:
    - All values are read before the first step, because a function may use a variable above its
      assignment.
    - A change covers at least one character of the old text, whose position the new text gets.
    - Decoded escapes with a quotation mark or a backslash are kept, because they could end the
      literal around them.
    - A slice whose last bound is zero is kept: a step of zero is an error, and a stop of zero
      leaves no text.
"""

import base64
import codecs
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from os.path import commonprefix
from typing import NamedTuple
from urllib.parse import unquote

from skilltrain.data.screening.fragments import expand, load_rules_file

Values = dict[str, str]
"""Value of each assigned variable by its name in lower case."""

Step = Callable[[re.Match[str], Values], str | None]
"""Returns what replaces a match, or None to keep it."""

_NUM_ROUNDS = 3  # one hidden text may contain another
_GROWTH_OF_SHORT_PROGRAM = 20_000  # characters that the steps may add
_MAX_VALUE_CHARS = 600  # of a variable
_MAX_SEPARATOR_CHARS = 4  # between joined literals
_MAX_ASCII = 127


class MappedText(NamedTuple):
    """A rewritten text.

    Attributes:
        text: The text.
        offsets: `offsets[i]` is the position of `text[i]` in the original. None: the same.
    """

    text: str
    offsets: array | None


class Change(NamedTuple):
    """A span of a text, and the text that replaces it."""

    start: int
    end: int
    new_text: str


@dataclass
class StepRunner:
    """Applies steps to matches, until the steps have added too many characters.

    Attributes:
        values: Value of each known variable by its name.
        remaining_growth: Number of characters that the steps may still add.
    """

    values: Values
    remaining_growth: int

    def apply(self, step: Step, match: re.Match[str]) -> str | None:
        """Return the text that a step puts in place of a match, or None to keep the match."""
        replacement = step(match, self.values)
        if replacement is None or replacement == match[0]:
            return None
        num_added = len(replacement) - len(match[0])
        self.remaining_growth -= max(0, num_added)
        return replacement if self.remaining_growth > 0 else None


def deobfuscate(program: str) -> MappedText:
    """Write out the hidden texts of a program.

    Returns:
        The new program, with the position in the old program of each character.
    """
    values: Values = {}
    for assignment in _ASSIGNMENT.finditer(program):
        _remember_assignment(assignment, values)

    runner = StepRunner(values, max(_GROWTH_OF_SHORT_PROGRAM, len(program)))
    mapped = MappedText(program, None)
    for _ in range(_NUM_ROUNDS):
        old_text = mapped.text
        for regex, step in _STEPS:
            mapped = replace_matches(mapped, regex, partial(runner.apply, step))
        if mapped.text == old_text:
            break
    return mapped


def replace_matches(
    mapped: MappedText,
    regex: re.Pattern[str],
    replace: Callable[[re.Match[str]], str | None],
) -> MappedText:
    """Replace the matches of `regex`, and keep the original position of each character.

    Args:
        mapped: The text to change.
        regex: What to replace.
        replace: Returns the replacement of a match, or None to keep the match.
    """
    changes = []
    for match in regex.finditer(mapped.text):
        replacement = replace(match)
        if replacement is not None:
            changes.append(_change_of(match, replacement))
    return _apply_changes(mapped, changes) if changes else mapped


def _apply_changes(mapped: MappedText, changes: Sequence[Change]) -> MappedText:
    """Apply changes to a text. New characters get positions spread over the old span."""
    text = mapped.text
    old_offsets = range(len(text)) if mapped.offsets is None else mapped.offsets
    pieces = []
    offsets = array("l")
    copied_end = 0
    for start, end, new_text in changes:
        pieces += [text[copied_end:start], new_text]
        offsets.extend(old_offsets[copied_end:start])
        offsets.extend(_spread(old_offsets[start:end], len(new_text)))
        copied_end = end

    pieces.append(text[copied_end:])
    offsets.extend(old_offsets[copied_end:])
    return MappedText("".join(pieces), offsets)


def _change_of(match: re.Match[str], replacement: str) -> Change:
    """Return the change to a match, without the prefix and suffix that both texts share.

    The change covers at least one character of the match.
    """
    old = match[0]
    prefix_chars = min(_num_common_chars(old, replacement), len(old) - 1)
    old = old[prefix_chars:]
    new = replacement[prefix_chars:]

    max_suffix_chars = max(0, min(len(old), len(new)) - 1)
    suffix_chars = min(_num_common_chars(old[::-1], new[::-1]), max_suffix_chars)
    new_end = len(new) - suffix_chars
    return Change(match.start() + prefix_chars, match.end() - suffix_chars, new[:new_end])


def _num_common_chars(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    return len(commonprefix([first, second]))  # noqa: RUF071  characters, no paths


def _spread(offsets: Sequence[int], num: int) -> list[int]:
    """Return `num` offsets, evenly spaced from the first to the last. Offsets may repeat."""
    last = len(offsets) - 1
    num_steps = max(1, num - 1)
    return [offsets[last * index // num_steps] for index in range(num)]


def decode_base64(literal: str) -> bytes:
    """Decode base64 in the standard or the URL-safe alphabet, with or without padding.

    Raises:
        ValueError: The literal cannot be base64.
    """
    padding = "=" * (-len(literal) % 4)
    return base64.urlsafe_b64decode(literal + padding)


# Literals -------------------------------------------------------------------------------------

_LITERAL = re.compile(expand("<STRING>"), re.I)
_NUMBER = re.compile(expand("<NUMBER>"), re.I)

_ASSIGNMENT = re.compile(expand("<ASSIGNMENT>"), re.I)
_VARIABLE_USE = re.compile(expand("<VARIABLE_USE>"), re.I)
# `${braced}`, `$plain`, `#{ruby}`, `{format}` and `%batch%`
_VARIABLE_GROUPS = ("braced", "plain", "ruby", "format", "batch")
_OPERAND = re.compile(expand("<STRING>|<OPERAND>"), re.I)
_ARGUMENT = re.compile(expand(r"<STRING>|\$?[\w.]{1,40}(?:\{\w{1,12}\})?"), re.I)
_QUOTES = ('"', "'")


def _quote(text: str | None) -> str | None:
    """Return `text` as a literal, or None if it is empty, unprintable or of several lines."""
    if not text or not text.isprintable():
        return None
    return f"'{text}'" if '"' in text else f'"{text}"'


def _unquote(literal: str) -> str:
    """Return the text of a literal: without its prefix (`b`, `r`, `u`, `f`) and quotes."""
    return literal.lstrip("bBrRuUfF")[1:-1]


def _literal_texts(code: str | None) -> list[str]:
    """Return the texts of all literals in a piece of code."""
    return [_unquote(literal) for literal in _LITERAL.findall(code or "")]


def _evaluate(number: str) -> int:
    """Return the value of a number, or of two joined by `+`, `-` or `^`: 0x41, 70-5, 64^1."""
    first_digits, operator, second_digits = re.findall(r"^(\w+)\s?([-+^]?)\s?(\w*)$", number)[0]
    first = _parse_integer(first_digits)
    if not operator:
        return first
    second = _parse_integer(second_digits)
    if operator == "^":
        return first ^ second
    return first - second if operator == "-" else first + second


def _parse_integer(digits: str) -> int:
    """Return the value of decimal digits, or of hexadecimal digits after `0x`."""
    base = 16 if digits.lower().startswith("0x") else 10
    return int(digits, base)


# Steps ----------------------------------------------------------------------------------------

_ESCAPE = re.compile(r"\\(?:x|u00|u\{)([0-9a-f]{1,4})|\\([01][0-7]{2})", re.I)
_SUSPICIOUS_DECODED = re.compile(rf"[./]\w|{expand('<DANGEROUS_WORD>')}", re.I)
_WORD_OR_PATH = re.compile(r"[a-z]{4}|[a-z]{2}[./]|/\w", re.I)
_PLACEHOLDER = re.compile(r"\{(\d?)\}|%[sdc]")
_NAME_PATH = re.compile(r"[\w.:/-]{1,40}")
# Code that names a decoder, in lower case. Only rot13 needs ranges of letters.
_ROT13_CODE = re.compile("rot|a-z|n-z")  # `str_rot13(`, `tr a-z n-za-m`
_REVERSE_CODE = re.compile(r"\brev|strrev")  # `rev`, `reversed(`, `strrev(`
_URL_CODE = re.compile("unquote|uri|urldecode")  # `decodeURIComponent(`
_HEX_CODE = re.compile(r"hex|xxd|h\*")  # `fromhex(`, `xxd -r -p`, `pack("H*",`
# Groups of the syntaxes `[list1].join(separator1)`, `[list1] -join separator2`,
# `%w[words].join(separator3)`, `separator4.join([list2])` and `implode('', [list3])`
_SEPARATOR_GROUPS = ("separator1", "separator2", "separator3", "separator4")
_LIST_GROUPS = ("list1", "list2", "list3")
# Numbers in the groups `ownerN` and `nameN` of lookups by name: 1 `getattr(owner, name)`,
# 2 `owner["name"](`, 3 `window["name"]` and the like, 4 `__import__("name")`, 5 `owner.send(:name)`
_LOOKUP_FORMS = range(1, 6)
_GETATTR_FORM = 1
_IMPORT_FORM = 4


def _decode_escapes(match: re.Match[str], _: Values) -> str | None:
    """Decode hexadecimal and octal escapes: `\\x63\\165` is `cu`. None keeps the match."""
    codes = [
        int(hexadecimal, 16) if hexadecimal else int(octal, 8)
        for hexadecimal, octal in _ESCAPE.findall(match[0])
    ]
    decoded = "".join(map(chr, codes))
    could_end_literal = re.search(r"[\"'\\]", decoded)
    if could_end_literal or not decoded.isprintable():
        return None
    return decoded


def _decode_character_codes(match: re.Match[str], _: Values) -> str | None:
    """Decode character codes: `chr(46)` is `"."`, `[99, 117, 114, 108]` is `["curl"]`.

    Returns:
        The new text; None if the codes are no text, or a list without a word or path.
    """
    codes = [_evaluate(number) for number in _NUMBER.findall(match[0])]
    is_text = all(ord("\t") <= code < _MAX_ASCII for code in codes)
    if not is_text:
        return None
    decoded = "".join(map(chr, codes))
    literal = _quote(re.sub(r"\s", " ", decoded))
    if literal is None or match["call"]:
        return literal
    if not _WORD_OR_PATH.search(decoded):
        return None
    opening_bracket = match[0][0]
    closing_bracket = match[0][-1]
    return f"{opening_bracket}{literal}{closing_bracket}"


def _decode_call(match: re.Match[str], _: Values) -> str | None:
    """Decode the literal in a call or in a pipe: `atob('Y3VybA==')`, `echo lruc | rev`.

    Returns:
        The decoded text as a literal; None to keep the match, for example if the text is harmless.
    """
    if match["piped"]:
        decoded = _decode(match["piped"].strip("\"' "), match["decoder"])
    else:
        literal = match["literal"] or match["receiver"]
        code_around = match[0].replace(literal, "")
        decoded = _decode(_unquote(literal), code_around)
    is_suspicious = decoded and _SUSPICIOUS_DECODED.search(decoded)
    return _quote(decoded) if is_suspicious else None


def _decode(literal: str, code_around: str) -> str | None:
    """Decode a literal with the decoder that the code around it names.

    Args:
        literal: The encoded text.
        code_around: The call or command that decodes the literal.

    Returns:
        The decoded text; None if the literal cannot be decoded.
    """
    code = code_around.lower()
    if _ROT13_CODE.search(code):
        return codecs.encode(literal, "rot13")  # its own inverse
    if code.startswith("tr -d"):
        deleted_character = code_around.strip("\"' ")[-1:]
        return literal.replace(deleted_character, "")
    if _REVERSE_CODE.search(code):
        return literal[::-1]
    if _URL_CODE.search(code):
        return unquote(literal)
    try:
        return _decode_bytes(literal, code).replace(b"\0", b"").decode()
    except ValueError:
        return None


def _decode_bytes(literal: str, code: str) -> bytes:
    """Decode a literal with the decoder named in `code`, or as base64 if none is named."""
    if _HEX_CODE.search(code):
        return bytes.fromhex(re.sub(r"\s", "", literal))
    if "32" in code:  # `b32decode(`
        return base64.b32decode(literal)
    if "85" in code:  # `b85decode(`
        return base64.b85decode(literal)
    return decode_base64(literal)


def _apply_replace(match: re.Match[str], _: Values) -> str | None:
    """Apply a replacement: `'cXuXrl'.replace('X', '')` is `"curl"`."""
    if match["php"]:
        old, new, text = _literal_texts(match[0])  # str_replace(old, new, text)
    else:
        text = _unquote(match["text"])
        old, *rest = _literal_texts(match["replacement"])
        new = rest[0] if rest else ""
    return _quote(text.replace(old, new)) if old else None


def _apply_slice(match: re.Match[str], _: Values) -> str | None:
    """Apply a slice or a reversal: `"lruc"[::-1]` is `"curl"`."""
    text = _unquote(match["literal"])
    if not match["slice"]:
        return _quote(text[::-1])
    bounds = [int(bound) if bound.strip() else None for bound in match["slice"].split(":")]
    if bounds[-1] == 0:
        return None  # an error or no text
    return _quote(text[slice(*bounds)])


def _join_literals(match: re.Match[str], _: Values) -> str | None:
    """Join the texts of a list: `['cu', 'rl'].join('')` is `"curl"`.

    Return None to keep the match, if the separator is long.
    """
    separator = _unquote(_first_group(match, *_SEPARATOR_GROUPS))
    if len(separator) > _MAX_SEPARATOR_CHARS:
        return None
    if match["words"]:
        texts = match["words"].split()
    else:
        texts = _literal_texts(_first_group(match, *_LIST_GROUPS))
    return _quote(separator.join(texts))


def _first_group(match: re.Match[str], *names: str) -> str:
    """Return the first of the named groups that is not empty, or an empty string."""
    return next(filter(None, match.group(*names)), "")


def _fill_template(match: re.Match[str], _: Values) -> str | None:
    """Fill a template: `"{1}{0}" -f 'a','b'`, `'%s%s' % ('a', 'b')`, `printf '%d.%d' 0x7f 1`."""
    template = _unquote(match["template"])
    values = _template_values(match["args"])
    next_values = iter(values)

    def fill(placeholder: re.Match[str]) -> str:
        """Return the value of a placeholder: with an index the value there, else the next one."""
        index = placeholder[1]
        has_value = index and int(index) < len(values)
        value = values[int(index)] if has_value else next(next_values, "?")
        if placeholder[0] == "%c" and value.isdecimal() and int(value) < _MAX_ASCII:
            return chr(int(value))
        return value

    filled = _PLACEHOLDER.sub(fill, template)
    return _quote(filled) if filled != template else None


def _template_values(arguments: str) -> list[str]:
    """Return the texts of literals in a list of arguments, or else its numbers as texts."""
    numbers = re.findall(r"0x[0-9a-f]{2}|\d{1,3}", arguments, re.I)
    return _literal_texts(arguments) or [str(_parse_integer(number)) for number in numbers]


def _concatenate(match: re.Match[str], values: Values) -> str | None:
    """Concatenate literals and known variables: `"cu" + x + "l"`. Unknown variables stay.

    Args:
        match: Operands with operators between them.
        values: Value of each known variable by its name.

    Returns:
        The concatenation; None if nothing was joined.
    """
    operands = _OPERAND.findall(match[0])

    def has_value(operand: str) -> bool:
        return _value_of(operand, values) is not None

    pieces = []
    for have_values, neighbours in groupby(operands, has_value):
        if have_values:
            text = "".join(_value_of(operand, values) or "" for operand in neighbours)
            pieces.append(_quote(text) or '""')
        else:
            pieces += neighbours
    return " + ".join(pieces) if len(pieces) < len(operands) else None


def _value_of(operand: str, values: Values) -> str | None:
    """Return the text of a literal or of a variable, or None for an unknown variable."""
    if operand.endswith(_QUOTES):
        return _unquote(operand)
    return values.get(operand.lower().lstrip("$"))


def _remember_or_resolve(match: re.Match[str], values: Values) -> str | None:
    """Remember the value of an assignment, or replace the use of a variable by its value.

    Args:
        match: Match of the step `variables`: an assignment, which has a group `name`, or a use.
        values: Value of each known variable by its name. An assignment changes it.
    """
    if match["name"]:
        return _remember_assignment(match, values)
    return _resolve_variable(match, values)


def _remember_assignment(match: re.Match[str], values: Values) -> str | None:
    """Remember the value of an assignment in `values`, and replace the variables in it.

    Returns:
        The assignment with each variable replaced by its value; None if it uses no variable.
    """
    name = match["name"].lower()
    is_quoted = match["bare"] is None
    old_code = match["value"] if is_quoted else match["bare"]
    new_code = _VARIABLE_USE.sub(lambda use: _resolve_variable(use, values) or use[0], old_code)
    value = _unquote(new_code) if is_quoted else new_code
    is_known = 0 < len(value) <= _MAX_VALUE_CHARS and "$" not in value
    if is_known:
        values[name] = value
    else:
        values.pop(name, None)

    if "$" not in old_code:
        return None
    if is_known and not is_quoted:
        new_code = _quote(value) or value
    return match[0].removesuffix(old_code) + new_code


def _resolve_variable(use: re.Match[str], values: Values) -> str | None:
    """Return the value of a variable where it is used, or None if the value is unknown.

    Args:
        use: Match of `_VARIABLE_USE`.
        values: Value of each known variable by its name.
    """
    name = _first_group(use, *_VARIABLE_GROUPS).lower()
    if name.startswith("ifs") and use[0].startswith("$"):
        return " "  # a shell's field separator
    value = values.get(name)
    if value is None:
        return use["default"]  # `${x:-DEFAULT}`

    if use["first"] is not None:  # `${x:FIRST:LENGTH}`
        first = int(use["first"])
        end = first + int(use["length"])
        return value[first:end]
    if use["old"]:  # `${x/OLD/NEW}`
        max_replacements = -1 if use["all"] else 1
        return value.replace(use["old"], use["new"], max_replacements)
    return value


def _join_arguments(match: re.Match[str], _: Values) -> str:
    """Write a list of arguments as one command line: `run(['curl', url])` is `run("curl $url")`."""
    words = []
    for argument in _ARGUMENT.findall(match["list"]):
        is_literal = argument.endswith((*_QUOTES, "`"))
        words.append(_unquote(argument) if is_literal else "$" + argument.lstrip("$"))
    command_line = " ".join(words)
    call = match.string[match.start() : match.start("list")].rstrip().rstrip("[")
    return f'{call}"{command_line}"'


def _remove_inner_quotes(match: re.Match[str], _: Values) -> str:
    """Remove quotes within a word: `cu""rl`, `c'u'rl`."""
    return _first_group(match, "inside", "last")


def _resolve_attribute(match: re.Match[str], values: Values) -> str | None:
    """Write a lookup by name as an attribute: `getattr(os, "system")` is `os.system`.

    Returns:
        The attribute; None if the name is unknown or no name.
    """
    form = next(number for number in _LOOKUP_FORMS if match[f"name{number}"])
    name = match[f"name{form}"]
    if name.endswith(_QUOTES):
        name = _unquote(name)
    elif form == _GETATTR_FORM:
        name = values.get(name.lower(), "")
    if not _NAME_PATH.fullmatch(name):
        return None

    owner = match[f"owner{form}"] or ""
    if form == _IMPORT_FORM:
        owner = ""  # the module itself
    return f"{owner}.{name}".lstrip(".")


# They run in the order of rules.yaml.
_STEPS_BY_NAME: dict[str, Step] = {
    "escapes": _decode_escapes,
    "character_codes": _decode_character_codes,
    "decode_calls": _decode_call,
    "slices": _apply_slice,
    "replacements": _apply_replace,
    "joins": _join_literals,
    "templates": _fill_template,
    "argument_lists": _join_arguments,
    "concatenations": _concatenate,
    "inner_quotes": _remove_inner_quotes,
    "variables": _remember_or_resolve,
    "attributes": _resolve_attribute,
}
_STEPS = [
    (re.compile(expand(regex), re.I), _STEPS_BY_NAME[name])
    for name, regex in load_rules_file()["steps"].items()
]
