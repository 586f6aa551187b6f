"""Lures: a command that decodes what it runs, a server without a name, a paste site, a locked archive, a program from
nowhere.

A command that is only named ("blocks `base64 -d | bash`") has nothing to decode: it is no finding.
"""

import codecs
import ipaddress
import re
import zlib
from collections.abc import Iterator

from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.reading import Reading, Spans
from skilltrain.data.screening.unfold import from_base64

_DECODED_TO_SHELL = re.compile(
    expand(
        r"<DECODER>(?P<rest>[^\n|;&]{0,160}(?:\|(?!\s{0,4}<SHELL>)[^\n|;&]{0,80}){0,3}<PIPE><SHELL>)?"
    ),
    re.ASCII,
)
_SUBSTITUTION = re.compile(
    r"\b(?:eval\(?|exec\(?|source|(?:ba|z|da|k)?sh)\s{0,3}(?:-\w{1,3}\s{1,3}){0,2}[\"'<\s]{0,4}(?:\$\(|`|<\()",
    re.ASCII,
)
_PAYLOAD = re.compile(expand("<PAYLOAD>"), re.ASCII)
_OPERAND = re.compile(r"\s{0,3}<{0,3}\s{0,3}[\"'$]?[\w./~{-]{0,80}[\w}]")
_COMMAND_START = re.compile(r"[`\n;(]|&&|\|\|")
_LONGEST_PAYLOAD = 6_000


def piped_through_decoder(reading: Reading) -> Spans:
    """Commands whose decoded output goes to a shell, from where the payload comes from."""
    plain, done = reading.plain, 0
    for found in _DECODED_TO_SHELL.finditer(plain):
        begin = max(
            done, plain.rfind("\n", done, found.start()) + 1, found.start() - _LONGEST_PAYLOAD
        )
        before = plain[begin : found.start()]
        done = found.end()
        substituted = _SUBSTITUTION.search(before)
        if found["rest"] is None and (
            substituted is None or re.match(r"\s{0,3}>", plain[done : done + 4])
        ):
            continue
        rest = plain[found.start() : found.end() + (0 if found["rest"] else 100)]
        source = before.rstrip(" \\|")
        if not before.rstrip(" \\").endswith("|"):
            if _has_operand(rest) and not reading.is_sample(*found.span()):
                yield begin + substituted.start() if substituted else found.start(), found.end()
        else:
            ends = [one.end() for one in _COMMAND_START.finditer(source)]
            at = substituted.start() if substituted else ends[-1] if ends else 0
            at += 0 if substituted else len(source[at:]) - len(source[at:].lstrip(" >$*-"))
            if _PAYLOAD.search(source, at) and not reading.is_sample(begin + at, found.end()):
                yield begin + at, found.end()


_LITERAL = re.compile(expand("<BLOB>"))
_COMMAND = re.compile(expand("<COMMAND>"))
_TURNED = re.compile(r"\[::-1\]|\breverse(?:d)?\(|\|\s{0,3}rev\b|strrev|\[array\]::reverse")
_SHIFTED = re.compile(r"rot_?13|n-za-m")


def encoded_commands(reading: Reading) -> Spans:
    """Literals of a program that hold commands once they are decoded; places in the text as written."""
    text = reading.text
    for found in _LITERAL.finditer(text):
        if any(_COMMAND.search(decoded) for decoded in _decoded(found[0], found.lastgroup or "")):
            yield found.span()
    if _SHIFTED.search(reading.plain):
        yield from (one.span() for one in _COMMAND.finditer(codecs.encode(text, "rot13")))
    if _TURNED.search(reading.plain):
        yield from (
            (len(text) - one.end(), len(text) - one.start())
            for one in _COMMAND.finditer(text[::-1])
        )


def _decoded(literal: str, kind: str, depth: int = 3) -> Iterator[str]:
    """What a literal may stand for: its bytes, unpacked, and what these hold in the same way."""
    try:
        if kind == "numbers":
            content = bytes(map(int, re.findall(r"\d{2,3}", literal)))
        elif kind == "hex":
            content = bytes.fromhex(re.sub(r"\\x|0x|[\s,]", "", literal))
        else:
            content = from_base64(literal)
        if content[:1] == b"\x78" or content[:2] == b"\x1f\x8b":
            content = zlib.decompressobj(47).decompress(content, 65_536)
    except (ValueError, zlib.error):
        return
    decoded = content.replace(b"\0", b"").decode("latin-1")
    yield decoded
    if depth and (inner := _LITERAL.match(decoded)):
        yield from _decoded(inner[0], inner.lastgroup or "", depth - 1)


_TORN = re.compile(expand("<TORN>"))
_NAMED = re.compile(
    r"[\s\"'`]{0,3}[$#%]?[({]?[\w.]{0,40}[)}%]?[\"'`]{0,3}$"
)  # a variable that holds the word as it is


def torn_words(reading: Reading) -> Spans:
    """Words of power that a program puts together from pieces: honest ones write them out."""
    for found in _TORN.finditer(reading.plain) if reading.origins is not None else ():
        start, end = reading.place(*found.span())
        near = reading.text[max(0, start - 40) : end + 40].lower()
        is_named = found[0] in near or _NAMED.match(reading.text, start, end)
        if not is_named and not reading.is_warned_of(*found.span()):
            yield found.span()


def _has_operand(command: str) -> bool:
    """Whether a decoder reads a file or a here-string, and so has something to decode."""
    flag, _, rest = command.partition(" ")[2].lstrip().partition(" ")
    return flag.startswith("-") and _OPERAND.match(rest.split("|")[0]) is not None


_ADDRESS = re.compile(expand("<ADDRESS>"), re.ASCII)
_EXAMPLES = (
    "1.2.3.4",
    "4.3.2.1",
    "5.6.7.8",
    "11.22.33.44",
    "12.34.56.78",
    "123.45.67.89",
    "1.0.0.1",
    "8.8.4.4",
)
_DEMOS = ("20.102.90.50:2017/wiki17",)  # the index that DSPy's own manual shows


def _is_outside(host: str) -> bool:
    """Whether an address is a public one; not private, local, reserved for examples, a known resolver's or the like."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    alike = address.version == 4 and len(set(host.split("."))) == 1  # 8.8.8.8, 123.123.123.123
    return address.is_global and not address.is_multicast and host not in _EXAMPLES and not alike


def outside_addresses(reading: Reading) -> Spans:
    for found in _ADDRESS.finditer(reading.plain):
        host = found["url"] or found["v6"] or found["device"] or found["bare"]
        if (number := found["number"]) and (number.startswith("0x") or not number.startswith("0")):
            host = str(ipaddress.IPv4Address(int(number, 0))) if int(number, 0) < 2**32 else ""
        is_known = any(demo in found[0] for demo in _DEMOS) or reading.is_sample(*found.span())
        if host and _is_outside(host) and not is_known:
            yield found.start(), found.start() + len(found[0].rstrip(".,;:"))


_PASTE_URL = re.compile(expand(r"(?<![\w.-])(?:https?://)?(?:www\.)?<PASTE_URL>"), re.ASCII)
_RUN_IT = re.compile(expand("<RUN_IT>"))
_PIPED = re.compile(
    expand(r"[^\n|]{0,40}<PIPE><SHELL>|[\"')]{0,3}\s{0,2}\)?\s{0,3}\|\s{0,3}<SHELL>")
)
_SUBSTITUTED = re.compile(r"(?:\beval|\bsource|\bsh|\bbash|\biex)\b[^\n|;]{0,60}$")
_VISIT = re.compile(r"\b(?:visit|open|go to|copy|get|from|see)\b|访问|打开|复制|前往|\]\($|\($|\[")


def paste_links(reading: Reading) -> Spans:
    for found in _PASTE_URL.finditer(reading.plain):
        before = reading.line_before(found.start(), 120)
        after = reading.plain[found.end() : found.end() + 120]
        runs = _PIPED.match(after) or _SUBSTITUTED.search(before)
        if runs or ("gist." not in found[0] and _VISIT.search(before) and _RUN_IT.search(after)):
            yield found.span()


_NEEDED = re.compile(expand("<NEEDED>"), re.ASCII)
_BEFORE_USE = re.compile(expand("<BEFORE_USE>"))
_LINK = re.compile(
    r"https?://(?P<host>[\w-]{1,63}(?:\.[\w-]{1,63}){1,5})(?P<path>/[^\s)\]`\"'<>]{0,200})?"
)
_TO_FETCH = re.compile(
    r"\b(?:download|setup here|install (?:it )?from|visit|get it (?:here|from|at))|下载|访问"
)
_PROGRAM_FILE = re.compile(
    r"/releases/[^\s]{1,160}\.(?:zip|exe|msi|dmg|pkg|rar|7z)\b|\.(?:exe|msi|dmg|pkg|scr|bat)$"
)
_KNOWN_HOST = re.compile(rf"(?:^|\.){expand('<KNOWN_HOST>')}$")


def outside_programs(reading: Reading) -> Spans:
    plain, done = reading.plain, 0
    for found in _NEEDED.finditer(plain):
        if found.start() < done:
            continue
        near, rest = (
            plain[max(0, found.start() - 60) : found.end() + 60],
            plain[found.end() : found.end() + 300],
        )
        link = next((link for link in _LINK.finditer(rest) if _is_from_nowhere(link)), None)
        if (
            link
            and _TO_FETCH.search(rest[: link.end() + 80])
            and _BEFORE_USE.search(near + rest[link.end() :])
        ):
            done = found.end() + link.end()
            yield found.start(), done


def _is_from_nowhere(link: re.Match[str]) -> bool:
    """Whether a link leads to a program that nobody vouches for: its own page, or a release file of a code host."""
    if link["host"] in ("github.com", "www.github.com"):
        return bool(_PROGRAM_FILE.search(link["path"] or ""))
    return not _KNOWN_HOST.search(link["host"])
