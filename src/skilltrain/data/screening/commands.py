"""Commands that decode what they run.

A command that is only named ("blocks `base64 -d | bash`") has nothing to decode: it is no finding.
"""

import re

from skilltrain.data.screening.reading import WARNING, Reading, Spans, expand

_DECODED_TO_SHELL = re.compile(
    expand(r"<DECODER>(?P<rest>[^\n|;&]{0,160}(?:\|(?!\s{0,4}<SHELL>)[^\n|;&]{0,80}){0,3}<PIPE><SHELL>)?"), re.ASCII
)
_SUBSTITUTION = re.compile(
    r"\b(?:eval\(?|exec\(?|source|(?:ba|z|da|k)?sh)\s{0,3}(?:-\w{1,3}\s{1,3}){0,2}[\"'<\s]{0,4}(?:\$\(|`|<\()", re.ASCII
)
_PAYLOAD = re.compile(
    r"[a-z0-9+/=]{16}|\$[\w{]|(?:echo|printf)\s[\"'][^\n]{6}|\b(?:curl|wget|cat|tail|head|dd|xxd)\s", re.ASCII
)
_OPERAND = re.compile(r"\s{0,3}<{0,3}\s{0,3}[\"'$]?[\w./~{-]{0,80}[\w}]")
_COMMAND_START = re.compile(r"[`\n;(]|&&|\|\|")
_LONGEST_PAYLOAD = 6_000


def piped_through_decoder(reading: Reading) -> Spans:
    """Commands whose decoded output goes to a shell, from where the payload comes from."""
    plain, done = reading.plain, 0
    for found in _DECODED_TO_SHELL.finditer(plain):
        begin = max(done, plain.rfind("\n", done, found.start()) + 1, found.start() - _LONGEST_PAYLOAD)
        before = plain[begin : found.start()]
        done = found.end()
        substituted = _SUBSTITUTION.search(before)
        if found["rest"] is None and (substituted is None or re.match(r"\s{0,3}>", plain[done : done + 4])):
            continue
        rest = plain[found.start() : found.end() + (0 if found["rest"] else 100)]
        source = before.rstrip(" \\|")
        if not before.rstrip(" \\").endswith("|"):
            if _has_operand(rest) and not is_lesson(reading, *found.span()):
                yield begin + substituted.start() if substituted else found.start(), found.end()
        else:
            ends = [one.end() for one in _COMMAND_START.finditer(source)]
            at = substituted.start() if substituted else ends[-1] if ends else 0
            at += 0 if substituted else len(source[at:]) - len(source[at:].lstrip(" >$*-"))
            if _PAYLOAD.search(source, at) and not is_lesson(reading, begin + at, found.end()):
                yield begin + at, found.end()


def is_lesson(reading: Reading, start: int, end: int) -> bool:
    """Whether a skill on security shows a command as an attack: the section up to the end of its line says so."""
    section = max(reading.plain.rfind("\n#", max(0, start - 600), start), start - 600, 0)
    line_end = reading.plain.find("\n", end, end + 120)
    until = line_end if line_end >= 0 else end + 120
    return reading.on_security() and bool(WARNING.search(reading.plain, section, until))


def _has_operand(command: str) -> bool:
    """Whether a decoder reads a file or a here-string, and so has something to decode."""
    flag, _, rest = command.partition(" ")[2].lstrip().partition(" ")
    return flag.startswith("-") and _OPERAND.match(rest.split("|")[0]) is not None
