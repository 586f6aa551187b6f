"""Find keys, tokens and passwords that look real, and leave placeholders and examples alone."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise

from skilltrain.data.screening.deobfuscate import decode_base64
from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.normalize import NormalizedText, Spans

_WORD_START = "(?<![A-Za-z0-9_-])"
_KEY = re.compile(expand(f"{_WORD_START}(?:<KEY>)"))
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]{2,9} ){0,2}PRIVATE KEY-----"
    r"(?:\s|\\n){0,4}(?P<key>[A-Za-z0-9+/=\s\\]{64,4000})"
)
_JSON_WEB_TOKEN = re.compile(
    _WORD_START + r"eyJ[\w-]{10,300}\.(?P<claims>eyJ[\w-]{10,2000})\.[\w-]{20,700}(?![\w-])"
)
_DATABASE_URL = re.compile(
    r"(?:postgres(?:ql)?|mysql|mariadb|mongodb(?:\+srv)?|rediss?|amqps?|mssql|clickhouse)"
    r"(?:\+\w{1,12})?://[\w.%-]{0,40}:"
    r"(?P<password>[^\s@/:\"'`<>{}$\[\]]{8,64})@(?P<host>[\w-]{1,60}(?:\.[\w-]{1,60}){1,6})"
)
# https://USER:PASSWORD@
_URL_PASSWORD = re.compile(r"https?://[^/\s:@\"']{1,100}:[^/\s@\"']{1,200}@")
_NAMED_KEY = re.compile(  # aws_secret_access_key = KEY, ?api_key=KEY, https://KEY@
    r"(?:(?:secret_access_key|api_?key|(?:access|auth)_token|[?&]token|password)\W{1,8}"
    r"|https?://(?=[\w-]{12,200}@))(?P<key>[\w/+.-]{12,200})",
    re.IGNORECASE,
)
_LOCAL_HOST = re.compile(
    r"(?:^|\.)(?:local|localhost|internal|docker|example)(?:\.|$)|^127\.|example|^host\.|^your"
)
_PLACEHOLDER = re.compile(expand("<PLACEHOLDER>"), re.IGNORECASE)
_EXAMPLE_CLAIMS = re.compile(  # claims of tokens in textbooks, and public tokens (role anon)
    rb"1234567890|\"role\"\s{0,4}:\s{0,4}\"anon\"|john|example|test|demo|\bfoo"
    rb"|user_?id\W{1,4}1\b|alice|bob",
    re.IGNORECASE,
)
_EXPIRY_CLAIM = re.compile(rb'"exp"\s{0,4}:\s{0,4}(\d{1,12})')

# 2025-01-01 in Unix time. A fixed date, so that a text has the same flags on every day.
_EXPIRED_BEFORE = 1_735_689_600
# Entropy per character. Random keys of 16 to 40 characters have 3.4 to 5 bits, words have less.
_MIN_KEY_BITS = 3.0
_MIN_PRIVATE_KEY_BITS = 4.0
_MIN_KEY_CHARS = 12
_MIN_SEQUENCE_STEPS = 4
_NUM_SHOWN_CHARS = 8


def find_secrets(text: NormalizedText) -> Spans:
    """Find secrets in the original text, because keys distinguish upper and lower case."""
    return secret_spans(text.original)


def secret_spans(text: str) -> Spans:
    """Yield the spans of keys, tokens and database URLs with a password that look real."""
    # Keys and tokens of known services, such as `hf_…` of Hugging Face.
    for match in _KEY.finditer(text):
        if looks_random(match[0]):
            yield match.span()

    # Private keys in PEM format. Only the first characters of a key are examined.
    for match in _PRIVATE_KEY.finditer(text):
        key = match["key"]
        is_random = _bits_per_character(key[:400]) > _MIN_PRIVATE_KEY_BITS
        if is_random and not _PLACEHOLDER.search(key[:200]):
            yield match.span()

    # JSON Web Tokens. Their claims say for whom a token is.
    for match in _JSON_WEB_TOKEN.finditer(text):
        if not _is_example_token(match["claims"]):
            yield match.span()

    # URLs of databases with a password. Local and example servers are harmless.
    for match in _DATABASE_URL.finditer(text):
        is_local = _LOCAL_HOST.search(match["host"].lower())
        if looks_random(match["password"]) and not is_local:
            yield match.span()


def likely_secrets(text: str) -> Iterator[str]:
    """Yield secrets as `secret_spans` finds them, passwords in URLs, and keys after a name."""
    for start, end in secret_spans(text):
        yield text[start:end]
    for match in _URL_PASSWORD.finditer(text):
        yield match[0]
    for match in _NAMED_KEY.finditer(text):
        if looks_random(match["key"]):
            yield match["key"]


def mask_secret(secret: str) -> str:
    """Return the first characters and the length of a secret, so that reports do not spread it."""
    return f"{secret[:_NUM_SHOWN_CHARS]}… ({len(secret)} characters)"


def looks_random(key: str) -> bool:
    """Return whether a key is neither a placeholder nor a name in words.

    Random keys are probably real secrets. `sk-your-api-key` is a placeholder, not a secret.

    Args:
        key: Text with the form of an API key, such as `sk-…` or `hf_…`.
    """
    # Keys have a prefix, such as `sk-`. The longest segment is the random part of a real key.
    segments = re.split(r"[_:/.-]", key)
    longest = max(segments, key=len)

    # "your-key", "abcde" and short keys are placeholders.
    if _PLACEHOLDER.search(key) or _has_sequence(key) or len(longest) < _MIN_KEY_CHARS:
        return False

    # A key without digits is a name in words, such as sk-my-own-very-long-model-name. Only digits
    # in the longest and in the last segment count, because others may be fixed, such as `api03`.
    has_digit = any(map(str.isdigit, longest)) or any(map(str.isdigit, segments[-1]))
    may_lack_digits = key.startswith("hf_")  # keys of Hugging Face may have only letters
    if not has_digit and not may_lack_digits:
        return False
    # A random key repeats few characters, so its entropy is higher than that of words.
    return _bits_per_character(longest) >= _MIN_KEY_BITS


def _has_sequence(key: str) -> bool:
    """Return whether five characters in a row count up or down: abcde, 98765."""
    steps = [ord(second) - ord(first) for first, second in pairwise(key)]
    run_lengths = [len(list(run)) for step, run in groupby(steps) if abs(step) == 1]
    return max(run_lengths, default=0) >= _MIN_SEQUENCE_STEPS


def _bits_per_character(text: str) -> float:
    """Return the Shannon entropy of the characters of `text`, in bits."""
    counts = Counter(text)
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())


def _is_example_token(claims: str) -> bool:
    """Return whether a JSON Web Token is malformed, from a textbook, or expired before 2025.

    Args:
        claims: Second part of the token in base64: JSON that says for whom the token is, and until
            when.
    """
    try:
        decoded = decode_base64(claims)
    except ValueError:
        return True
    # Textbooks use tokens of "John" or with the number 1234567890.
    if not decoded.rstrip().endswith(b"}") or _EXAMPLE_CLAIMS.search(decoded):
        return True
    # The claim `exp` is the time at which a token expires. A token without the claim never expires.
    expiry = _EXPIRY_CLAIM.search(decoded)
    return expiry is not None and int(expiry[1]) < _EXPIRED_BEFORE
