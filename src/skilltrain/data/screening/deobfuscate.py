"""Deobfuscate programs: decode and join literals, and resolve variables and names.

Each step undoes one way of hiding a text, in all programming languages at once. A step does not
change what it does not understand. Repetitions in regular expressions, rounds and added text are
bounded, so that the time stays linear in the length of the program.
"""

import base64
import codecs
import re
from array import array
from collections.abc import Callable, Sequence
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


def deobfuscate(program: str) -> MappedText:
    """Write out the hidden texts of a program.

    For example, `a = "cu" + "rl"` becomes `a = "curl"`.

    Args:
        program: Code in any programming language.

    Returns:
        The new program, with the position in the old program of each character.
    """
    values: Values = {}
    remaining_growth = max(_GROWTH_OF_SHORT_PROGRAM, len(program))  # characters

    def apply(step: Step, match: re.Match[str]) -> str | None:
        """Return the replacement of a match by a step, or None once the program grew too much."""
        nonlocal remaining_growth
        replacement = step(match, values)
        if replacement is None or replacement == match[0]:
            return None
        remaining_growth -= max(0, len(replacement) - len(match[0]))
        return replacement if remaining_growth > 0 else None

    # Fill `values`. A variable may be used above its assignment, for example in a function.
    for assignment in _ASSIGNMENT.finditer(program):
        # The code that this returns is not needed here.
        _remember_assignment(assignment, values)

    # Run all steps until a round changes nothing.
    mapped = MappedText(program, None)
    for _ in range(_NUM_ROUNDS):
        old_text = mapped.text
        # A step may write out a text that another step can decode in the next round.
        for regex, step in _STEPS:
            mapped = replace_matches(mapped, regex, partial(apply, step))
        if mapped.text == old_text:
            break
    return mapped


def replace_matches(
    mapped: MappedText,
    regex: re.Pattern[str],
    replace: Callable[[re.Match[str]], str | None],
) -> MappedText:
    """Replace the matches of `regex`, and keep the original position of each character.

    A prefix or suffix that a match and its replacement have in common keeps its positions. The
    other new characters get positions that are spread evenly over the replaced text.

    Args:
        mapped: The text to change.
        regex: What to replace.
        replace: Returns the replacement of a match, or None to keep the match.
    """
    text = mapped.text
    # Without offsets, each character is at its original position.
    old_offsets = range(len(text)) if mapped.offsets is None else mapped.offsets
    pieces = []
    offsets = array("l")
    copied_end = 0  # the text before this position is in `pieces`
    for match in regex.finditer(text):
        replacement = replace(match)
        if replacement is None:
            continue
        start, end, new_text = _changed_part(match, replacement)

        # Copy the text up to the match, then add the new text.
        pieces += [text[copied_end:start], new_text]
        offsets.extend(old_offsets[copied_end:start])
        offsets.extend(_spread(old_offsets[start:end], len(new_text)))
        copied_end = end

    if not pieces:
        return mapped  # nothing was replaced
    pieces.append(text[copied_end:])
    offsets.extend(old_offsets[copied_end:])
    return MappedText("".join(pieces), offsets)


def _changed_part(match: re.Match[str], replacement: str) -> tuple[int, int, str]:
    """Return the part of a match that its replacement changes.

    The common prefix and the common suffix of the match and its replacement do not change. The
    changed part has at least one character of the match: the new text gets its position.

    For example, if `abXc` is replaced by `abYc`, the changed part is the `X`, and its new text is
    `Y`.

    Args:
        match: A match of a regular expression.
        replacement: Text that replaces the match.

    Returns:
        Start and end of the changed part in the searched text; the new text of the part.
    """
    # Cut off the common prefix.
    old = match[0]
    prefix_chars = min(_num_common_chars(old, replacement), len(old) - 1)
    old = old[prefix_chars:]
    new = replacement[prefix_chars:]

    # Cut off the common suffix. The first characters of `old` and `new` are never part of it.
    suffix_chars = 0
    if new:
        common_chars = _num_common_chars(old[::-1], new[::-1])
        suffix_chars = min(common_chars, len(old) - 1, len(new) - 1)
    new_end = len(new) - suffix_chars
    return match.start() + prefix_chars, match.end() - suffix_chars, new[:new_end]


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
    """Return the value of a number, or of two joined by `+`, `-` or `^`: 0x41, 70-5, 64^1.

    Args:
        number: Code of a number, such as `0x41` or `70-5`.
    """
    # The digits of a number, and perhaps an operator and more digits.
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


def _decode_escapes(match: re.Match[str], _: Values) -> str | None:
    """Decode hexadecimal and octal escapes: `\\x63\\165` is `cu`. None keeps the match.

    Args:
        match: One escape, or several in a row.
    """
    codes = [
        int(hexadecimal, 16) if hexadecimal else int(octal, 8)
        for hexadecimal, octal in _ESCAPE.findall(match[0])
    ]
    decoded = "".join(map(chr, codes))
    if not decoded.isprintable() or any(char in "\"'\\" for char in decoded):
        return None  # a quotation mark could end the literal that the escapes are in
    return decoded


def _decode_character_codes(match: re.Match[str], _: Values) -> str | None:
    """Decode character codes: `chr(46)` is `"."`, `[99, 117, 114, 108]` is `["curl"]`.

    Args:
        match: A call, such as `chr(46)`, which has the group `call`; or a list of numbers.

    Returns:
        The new text. None keeps the match: the codes are no printable text, or a list of numbers
        has no word and no path in it.
    """
    codes = [_evaluate(number) for number in _NUMBER.findall(match[0])]
    # Text is ASCII from the tab on. So tabs and line ends belong to it.
    is_text = all(ord("\t") <= code < _MAX_ASCII for code in codes)
    if not is_text:
        return None
    decoded = "".join(map(chr, codes))
    # A literal is on one line, so tabs and line ends become spaces.
    literal = _quote(re.sub(r"\s", " ", decoded))
    if literal is None:
        return None
    if match["call"]:
        return literal

    # The match is a list of numbers. Most lists are data, so decode a list only if it spells a word
    # or a path. The new text has the same brackets.
    if not _WORD_OR_PATH.search(decoded):
        return None
    opening_bracket = match[0][0]
    closing_bracket = match[0][-1]
    return f"{opening_bracket}{literal}{closing_bracket}"


def _decode_call(match: re.Match[str], _: Values) -> str | None:
    """Decode the literal in a call or in a pipe: `atob('Y3VybA==')`, `echo lruc | rev`.

    Args:
        match: A pipe, which has the groups `piped` (text) and `decoder` (command); or a call. The
            literal of a call is its argument (`literal`), or a method is called on it (`receiver`).

    Returns:
        The decoded text as a literal; None to keep the match, for example if the text is harmless.
    """
    if match["piped"]:
        decoded = _decode(match["piped"].strip("\"' "), match["decoder"])
    else:
        literal = match["literal"] or match["receiver"]
        # The rest of the call names the decoder, such as `atob(`.
        code_around = match[0].replace(literal, "")
        decoded = _decode(_unquote(literal), code_around)
    # Most decoded texts are harmless data. Only a path or a dangerous word is written out.
    is_suspicious = decoded and _SUSPICIOUS_DECODED.search(decoded)
    return _quote(decoded) if is_suspicious else None


def _decode(literal: str, code_around: str) -> str | None:
    """Decode a literal with the decoder that the code around it names.

    The literal "6c73" in the code `bytes.fromhex("6c73")` becomes "ls".

    Args:
        literal: The encoded text.
        code_around: The call or command that decodes the literal. If this code names no decoder,
            the literal is read as base64.

    Returns:
        The decoded text; None if the literal cannot be decoded.
    """
    code = code_around.lower()
    try:
        # First the decoders that return a text.
        # rot13: `str_rot13(`, `tr a-z n-za-m`. No other decoder names ranges of letters.
        is_rot13 = "rot" in code or re.search("a-z|n-z", code)
        if is_rot13:
            return codecs.encode(literal, "rot13")  # rot13 is its own inverse
        if code.startswith("tr -d"):  # `tr -d 'X'` deletes each X
            command = code_around.strip("\"' ")
            deleted_character = command[-1:]  # the X before the closing quote
            return literal.replace(deleted_character, "")
        # Reversed text. `\b` keeps "prev" from matching.
        if re.search(r"\brev", code) or "strrev" in code:  # `rev`, `reversed(`, `strrev(`
            return literal[::-1]
        if "unquote" in code or "uri" in code or "urldecode" in code:  # `decodeURIComponent(`
            return unquote(literal)

        # Then the decoders that return bytes.
        if re.search(r"hex|xxd|h\*", code):  # `fromhex(`, `xxd -r -p`, `pack("H*",`
            content = bytes.fromhex(re.sub(r"\s", "", literal))
        elif "32" in code:  # `b32decode(`
            content = base64.b32decode(literal)
        elif "85" in code:  # `b85decode(`
            content = base64.b85decode(literal)
        else:
            content = decode_base64(literal)
        # UTF-16 text, as PowerShell uses, has a NUL byte after each ASCII character.
        return content.replace(b"\0", b"").decode()
    except ValueError:  # the errors of all decoders are of this class
        return None


def _apply_replace(match: re.Match[str], _: Values) -> str | None:
    """Apply a replacement: `'cXuXrl'.replace('X', '')` is `"curl"`."""
    if match["php"]:
        old, new, text = _literal_texts(match[0])  # str_replace(old, new, text)
    else:
        text = _unquote(match["text"])
        # Without a new text, the old text is deleted.
        old, *rest = _literal_texts(match["replacement"])
        new = rest[0] if rest else ""
    return _quote(text.replace(old, new)) if old else None


def _apply_slice(match: re.Match[str], _: Values) -> str | None:
    """Apply a slice or a reversal: `"lruc"[::-1]` is `"curl"`."""
    text = _unquote(match["literal"])
    if not match["slice"]:
        return _quote(text[::-1])
    # Start, stop and step. An empty one is None.
    bounds = [int(bound) if bound.strip() else None for bound in match["slice"].split(":")]
    if bounds[-1] == 0:
        return None  # a step of zero is an error, and a stop of zero leaves no text
    return _quote(text[slice(*bounds)])


def _join_literals(match: re.Match[str], _: Values) -> str | None:
    """Join the texts of a list: `['cu', 'rl'].join('')` is `"curl"`.

    Return None to keep the match, if the separator is long.
    """
    # Each syntax has its own groups: `[list1].join(separator1)`, `[list1] -join separator2`,
    # `%w[words].join(separator3)`, `separator4.join([list2])`, `implode('', [list3])`.
    separator = _first_group(match, "separator1", "separator2", "separator3", "separator4")
    separator = _unquote(separator) if separator else ""
    # Joined by a long separator, the texts are probably not pieces of one word.
    if len(separator) > _MAX_SEPARATOR_CHARS:
        return None
    if match["words"]:
        texts = match["words"].split()  # words without quotes
    else:
        texts = _literal_texts(_first_group(match, "list1", "list2", "list3"))
    return _quote(separator.join(texts))


def _first_group(match: re.Match[str], *names: str) -> str:
    """Return the first of the named groups that is not empty, or an empty string."""
    return next(filter(None, match.group(*names)), "")


def _fill_template(match: re.Match[str], _: Values) -> str | None:
    """Fill a template: `"{1}{0}" -f 'a','b'`, `'%s%s' % ('a', 'b')`, `printf '%d.%d' 0x7f 1`.

    Args:
        match: The groups are `template` (a literal with placeholders) and `args` (literals or
            numbers).
    """
    template = _unquote(match["template"])
    values = _literal_texts(match["args"])
    if not values:
        # The arguments are not literals, so they are bytes in decimal or hexadecimal digits.
        numbers = re.findall(r"0x[0-9a-f]{2}|\d{1,3}", match["args"], re.I)
        values = [str(_parse_integer(number)) for number in numbers]
    next_values = iter(values)

    def fill(placeholder: re.Match[str]) -> str:
        """Return the value of a placeholder: with an index the value there, else the next one."""
        index = placeholder[1]
        if index and int(index) < len(values):
            value = values[int(index)]
        else:
            # A question mark stands for a missing value.
            value = next(next_values, "?")
        # The placeholder `%c` prints the character with this code.
        if placeholder[0] == "%c" and value.isdecimal() and int(value) < _MAX_ASCII:
            return chr(int(value))
        return value

    filled = _PLACEHOLDER.sub(fill, template)
    return _quote(filled) if filled != template else None


def _concatenate(match: re.Match[str], values: Values) -> str | None:
    """Concatenate literals and known variables: `"cu" + x + "l"`. Unknown variables stay.

    Args:
        match: Operands with operators between them.
        values: Value of each known variable by its name.

    Returns:
        The concatenation, or None if no two operands could be joined.
    """
    operands: list[str] = _OPERAND.findall(match[0])

    def has_value(operand: str) -> bool:
        return _value_of(operand, values) is not None

    # Neighbours that have a value become one literal.
    pieces = []
    for have_values, group in groupby(operands, has_value):
        if have_values:
            text = "".join(_value_of(operand, values) or "" for operand in group)
            literal = _quote(text)
            # None is for an empty or unprintable text. Both become the empty literal `""`.
            pieces.append('""' if literal is None else literal)
        else:
            pieces += group
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

    Args:
        match: Match of `_ASSIGNMENT`. The right side is in the group `value` with quotes, or in the
            group `bare` without quotes: `x="curl"`, `x=curl`.
        values: Value of each known variable by its name. This function changes it.

    Returns:
        The assignment with each variable replaced by its value; None if it uses no variable.
    """
    name = match["name"].lower()
    is_quoted = match["bare"] is None
    old_code = match["value"] if is_quoted else match["bare"]  # right side of the assignment

    # Replace the variables in the right side. Unknown variables stay.
    new_code = _VARIABLE_USE.sub(lambda use: _resolve_variable(use, values) or use[0], old_code)
    value = _unquote(new_code) if is_quoted else new_code

    # Remember a known value. An unknown value replaces the old value, so forget that.
    is_known = 0 < len(value) <= _MAX_VALUE_CHARS and "$" not in value
    if is_known:
        values[name] = value
    else:
        values.pop(name, None)

    # Write the assignment again. A bare known value gets quotes. A quoted one has them already.
    if "$" not in old_code:
        return None  # it uses no variable
    if is_known and not is_quoted:
        new_code = _quote(value) or new_code  # an unprintable text cannot be quoted
    left_side = match[0].removesuffix(old_code)
    return left_side + new_code


def _resolve_variable(use: re.Match[str], values: Values) -> str | None:
    """Return the value of a variable where it is used, or None if the value is unknown.

    The operations of a shell are applied: `${x:FIRST:LENGTH}` is a part of the value,
    `${x/OLD/NEW}` and `${x//OLD/NEW}` replace a text in it, and `${x:-DEFAULT}` has a default.

    Args:
        use: Match of `_VARIABLE_USE`.
        values: Value of each known variable by its name.
    """
    # The groups stand for `${braced}`, `$plain`, `#{ruby}`, `{format}` and `%batch%`.
    name = _first_group(use, "braced", "plain", "ruby", "format", "batch").lower()
    if name.startswith("ifs") and use[0].startswith("$"):
        return " "  # the field separator of a shell, used in place of a space
    value = values.get(name)
    if value is None:
        return use["default"]  # None without a default

    # `${x:FIRST:LENGTH}`
    if use["first"] is not None:
        first = int(use["first"])
        end = first + int(use["length"])
        return value[first:end]
    # `${x//OLD/NEW}` replaces all, and `${x/OLD/NEW}` only the first OLD.
    if use["old"]:
        max_replacements = -1 if use["all"] else 1
        return value.replace(use["old"], use["new"], max_replacements)
    return value


def _join_arguments(match: re.Match[str], _: Values) -> str:
    """Write a list of arguments as one command line: `run(['curl', url])` is `run("curl $url")`.

    Args:
        match: A call of a function that runs programs. The group `list` holds its arguments.
    """
    words = []
    for argument in _ARGUMENT.findall(match["list"]):
        is_literal = argument.endswith((*_QUOTES, "`"))
        # Literals lose their quotes. Variables get a `$`, as in a shell.
        words.append(_unquote(argument) if is_literal else "$" + argument.lstrip("$"))
    command_line = " ".join(words)
    # Keep the code before the list: the function's name and the opening bracket of the call.
    call = match.string[match.start() : match.start("list")].rstrip().rstrip("[")
    return f'{call}"{command_line}"'


def _remove_inner_quotes(match: re.Match[str], _: Values) -> str:
    """Remove quotes within a word: `cu""rl`, `c'u'rl`."""
    return _first_group(match, "inside", "last")


def _resolve_attribute(match: re.Match[str], values: Values) -> str | None:
    """Write a lookup by name as an attribute: `getattr(os, "system")` is `os.system`.

    Return None to keep the match, if the name is in an unknown variable or cannot be a name.
    """
    # Each form of lookup has its own groups:
    # 1. `getattr(owner1, name1)`
    # 2. `owner2["name2"](`
    # 3. `owner3["name3"]`, where the owner is `window` or the like
    # 4. `owner4("name4")`, where the owner is `__import__` or the like
    # 5. `owner5.send(:name5)`
    form = next(number for number in range(1, 6) if match[f"name{number}"])
    name = match[f"name{form}"]
    is_getattr = form == 1
    is_import = form == 4
    owner = match[f"owner{form}"] or ""
    if is_import:
        owner = ""  # `__import__("os")` is the module itself

    # A literal ends in a quotation mark. Before the first one there may be a prefix: `b"system"`.
    if name.endswith(_QUOTES):
        name = _unquote(name)
    elif is_getattr:
        name = values.get(name.lower(), "")  # getattr(os, variable)
    if not _NAME_PATH.fullmatch(name):
        return None
    attribute = f"{owner}.{name}"
    return attribute.lstrip(".")  # without an owner, it begins with the dot


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
