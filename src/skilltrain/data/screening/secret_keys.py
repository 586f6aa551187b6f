"""Keys that look real: the right prefix and length, no placeholder's words, as mixed as random letters are."""

import math
import re
from collections import Counter
from itertools import groupby, pairwise

from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.reading import Reading, Spans
from skilltrain.data.screening.unfold import from_base64

_START = "(?<![A-Za-z0-9_-])"  # of a word
_KEY = re.compile(expand(f"{_START}(?:<KEY>)"))
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]{2,9} ){0,2}PRIVATE KEY-----(?:\s|\\n){0,4}(?P<key>[A-Za-z0-9+/=\s\\]{64,4000})"
)
_WEB_TOKEN = re.compile(
    _START + r"eyJ[\w-]{10,300}\.(?P<claims>eyJ[\w-]{10,2000})\.[\w-]{20,700}(?![\w-])"
)
_PLACEHOLDER = re.compile(expand("<PLACEHOLDER>"), re.IGNORECASE)
_KNOWN_CLAIMS = re.compile(
    rb"1234567890|\"role\"\s{0,4}:\s{0,4}\"anon\"|john|example|test|demo|\bfoo|user_?id\W{1,4}1\b|alice|bob",
    re.IGNORECASE,
)
_EXPIRY = re.compile(rb'"exp"\s{0,4}:\s{0,4}(\d{1,12})')
_LONG_AGO = 1_735_689_600  # 2025-01-01; not today: the same text is to have the same flags tomorrow
_LEAST_BITS = (
    3.0  # a letter; random keys of 16 to 40 letters have 3.4 to 5, words and patterns less
)
_SHOWN = 8
_ADDRESS = re.compile(
    r"(?:postgres(?:ql)?|mysql|mariadb|mongodb(?:\+srv)?|rediss?|amqps?|mssql|clickhouse)(?:\+\w{1,12})?://[\w.%-]{0,40}:"
    r"(?P<password>[^\s@/:\"'`<>{}$\[\]]{8,64})@(?P<host>[\w-]{1,60}(?:\.[\w-]{1,60}){1,6})"
)
_LOCAL = re.compile(
    r"(?:^|\.)(?:local|localhost|internal|docker|example)(?:\.|$)|^127\.|example|^host\.|^your"
)


def secrets(reading: Reading) -> Spans:
    """Places in the text as written: keys know upper and lower case."""
    return secrets_in(reading.text)


def secrets_in(text: str) -> Spans:
    """Where keys, tokens and addresses of databases with a password stand that are no placeholders."""
    for found in _KEY.finditer(text):
        if _looks_random(found[0]):
            yield found.span()
    for found in _PRIVATE_KEY.finditer(text):
        if _bits_a_letter(found["key"][:400]) > 4 and not _PLACEHOLDER.search(found["key"][:200]):
            yield found.span()
    for found in _WEB_TOKEN.finditer(text):
        if not _is_sample_token(found["claims"]):
            yield found.span()
    for found in _ADDRESS.finditer(text):
        if _looks_random(found["password"]) and not _LOCAL.search(found["host"].lower()):
            yield found.span()


def _looks_random(key: str) -> bool:
    parts = re.split(r"[_:/.-]", key)
    longest = max(parts, key=len)
    if _PLACEHOLDER.search(key) or _has_staircase(key) or len(longest) < 12:
        return False
    if not any(letter.isdigit() for letter in longest + parts[-1]) and not key.startswith("hf_"):
        return False  # a name in words, such as sk-my-own-very-long-model-name
    return _bits_a_letter(longest) >= _LEAST_BITS


def _has_staircase(key: str) -> bool:
    """Whether five letters in a row follow each other, up or down: abcde, 98765."""
    steps = (ord(second) - ord(first) for first, second in pairwise(key))
    return any(abs(step) == 1 and len([*same]) >= 4 for step, same in groupby(steps))


def _bits_a_letter(text: str) -> float:
    """Shannon entropy of the letters of `text`, in bits."""
    counts = Counter(text)
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())


def _is_sample_token(claims: str) -> bool:
    """Whether a JSON Web Token's claims are no claims at all, those of a textbook, or expired long ago."""
    try:
        decoded = from_base64(claims)
    except ValueError:
        return True
    if not decoded.rstrip().endswith(b"}") or _KNOWN_CLAIMS.search(decoded):
        return True
    expires = _EXPIRY.search(decoded)
    return expires is not None and int(expires[1]) < _LONG_AGO


def show_beginning(span: str) -> str:
    """The first letters of a secret: a report that names it must not spread it."""
    return f"{span[:_SHOWN]}… ({len(span)} characters)"
