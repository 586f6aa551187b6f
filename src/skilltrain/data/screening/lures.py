"""Find lures: instructions that make a person or an agent install something harmful.

Examples are a command that decodes what it runs, a server addressed by its IP address, a command
from a paste site, and a program from an unknown page. A command that is only mentioned ("blocks
`base64 -d | bash`") has nothing to decode, so it is not a lure.
"""

import codecs
import ipaddress
import re
import zlib
from collections.abc import Iterator

from skilltrain.data.screening.deobfuscate import decode_base64
from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.normalize import NormalizedText, Spans

# Commands that decode a payload and run it ----------------------------------------------------

# <NAME> stands for a fragment of rules.yaml (see `expand`).
# A decoder, and the pipe into a shell after it, if there is one.
_DECODER = re.compile(
    expand(
        r"<DECODER>(?P<pipe_to_shell>[^\n|;&]{0,160}"
        r"(?:\|(?!\s{0,4}<SHELL>)[^\n|;&]{0,80}){0,3}<PIPE><SHELL>)?"
    ),
    re.ASCII,
)
# A command that runs what a substitution prints: `bash -c "$(`, `eval $(`, `source <(`.
_RUN_SUBSTITUTION = re.compile(
    r"\b(?:eval\(?|exec\(?|source|(?:ba|z|da|k)?sh)\s{0,3}(?:-\w{1,3}\s{1,3}){0,2}"
    r"[\"'<\s]{0,4}(?:\$\(|`|<\()",
    re.ASCII,
)
_TO_FILE = re.compile(r"\s{0,3}>")
_PAYLOAD = re.compile(expand("<PAYLOAD>"), re.ASCII)
_OPERAND = re.compile(r"\s{0,3}<{0,3}\s{0,3}[\"'$]?[\w./~{-]{0,80}[\w}]")  # file or here-string
_COMMAND_START = re.compile(r"[`\n;(]|&&|\|\|")
_MAX_PAYLOAD_CHARS = 6_000
_MAX_OPERAND_CHARS = 100


def find_decoded_commands(text: NormalizedText) -> Spans:
    """Find shell commands that decode a payload and run the result.

    A span begins where the payload comes from: an `echo`, a download or a file.

    Args:
        text: A text of a skill.
    """
    normalized = text.normalized
    previous_end = 0
    for decoder in _DECODER.finditer(normalized):
        # The text before the decoder begins with its line, or after an earlier decoder in the line.
        # It is cut to _MAX_PAYLOAD_CHARS.
        line_start = normalized.rfind("\n", previous_end, decoder.start()) + 1
        text_start = max(previous_end, line_start, decoder.start() - _MAX_PAYLOAD_CHARS)
        text_before = normalized[text_start : decoder.start()]
        previous_end = decoder.end()

        # Another command may run the result: `eval $(base64 -d FILE)`.
        substitution = _RUN_SUBSTITUTION.search(text_before)
        if not _shell_runs_result(decoder, is_substituted=substitution is not None):
            continue

        # Find the start of the command in `text_before`, and whether the command has a payload.
        # The text from `sample_start` may be shown as an example of an attack.
        if text_before.rstrip(" \\").endswith("|"):  # `echo PAYLOAD | base64 -d`
            # The source is the text that the pipe feeds to the decoder.
            source = text_before.rstrip(" \\|")
            command_start = substitution.start() if substitution else _last_command_start(source)
            has_payload = _PAYLOAD.search(source, command_start)
            sample_start = text_start + command_start
        else:  # `base64 -d FILE`
            command_start = substitution.start() if substitution else len(text_before)
            has_payload = _has_operand(decoder)
            sample_start = decoder.start()
        if has_payload and not text.is_sample(sample_start, decoder.end()):
            yield text_start + command_start, decoder.end()


def _shell_runs_result(decoder: re.Match[str], is_substituted: bool) -> bool:
    """Return whether a shell runs what a decoder prints.

    Args:
        decoder: Match of `_DECODER`.
        is_substituted: Whether another command runs the output: `eval $(base64 -d FILE)`.
    """
    if decoder["pipe_to_shell"] is not None:  # `base64 -d FILE | sh`
        return True
    is_written_to_file = _TO_FILE.match(decoder.string, decoder.end(), decoder.end() + 4)
    return is_substituted and not is_written_to_file


def _last_command_start(line: str) -> int:
    """Return the start of a line's last command, after its prompt or list mark (`$ `, `- `)."""
    start = 0
    for separator in _COMMAND_START.finditer(line):
        start = separator.end()
    command = line[start:].lstrip(" >$*-")
    return len(line) - len(command)


def _has_operand(decoder: re.Match[str]) -> bool:
    """Return whether a decoder has a flag and then a file or a here-string: `base64 -d <<< x`."""
    end = decoder.end()
    if decoder["pipe_to_shell"] is None:
        end += _MAX_OPERAND_CHARS  # the match ends before the operand
    command = decoder.string[decoder.start() : end]
    arguments = command.partition(" ")[2].lstrip()
    flag, _, operand = arguments.partition(" ")
    return flag.startswith("-") and _OPERAND.match(operand.split("|")[0]) is not None


# Encoded literals of programs -----------------------------------------------------------------

_LITERAL = re.compile(expand("<ENCODED_LITERAL>"))
_COMMAND = re.compile(expand("<COMMAND>"))
_ORDER = re.compile(expand("(?i:<RISKY_ORDER>|<AN_ORDER>)"))
_REVERSAL = re.compile(r"\[::-1\]|\breverse(?:d)?\(|\|\s{0,3}rev\b|strrev|\[array\]::reverse")
_ROT13 = re.compile(r"rot_?13|n-za-m")

_ZLIB_START = b"\x78"
_GZIP_START = b"\x1f\x8b"
_ZLIB_OR_GZIP = 47  # `wbits` of zlib: 32 detects the format, 15 is the largest window
_MAX_DECOMPRESSED_BYTES = 65_536
_MAX_NESTED_LITERALS = 3


def find_encoded_literals(text: NormalizedText) -> Spans:
    """Find literals that decode to commands in a program, or to orders in a text for readers.

    Spans are in the original text. A text for readers may show an encoded attack as an example.
    """
    original = text.original
    is_program = text.kind == "program"
    # This pattern says what is harmful in a decoded text.
    pattern = _COMMAND if is_program else _ORDER
    for literal in _LITERAL.finditer(original):
        # A literal may hold another literal. There is a text for each of them.
        decoded_texts = _decode_literal(literal, max_nested=_MAX_NESTED_LITERALS)
        is_example = not is_program and text.is_sample(*literal.span())
        if not is_example and any(pattern.search(decoded) for decoded in decoded_texts):
            yield literal.span()

    # Rot13 keeps the position of each character, so its spans are those of the original.
    if _ROT13.search(text.normalized):
        for match in pattern.finditer(codecs.encode(original, "rot13")):
            yield match.span()

    # A reversal counts the positions from the end of the original.
    if _REVERSAL.search(text.normalized):
        for match in pattern.finditer(original[::-1]):
            yield len(original) - match.end(), len(original) - match.start()


def _decode_literal(literal: re.Match[str], max_nested: int) -> Iterator[str]:
    """Yield the text that an encoded literal decodes to.

    A literal is a list of decimal bytes, hex or base64. It may be compressed with zlib or gzip. If
    the decoded text begins with another encoded literal, then that is decoded too, and so on.

    Args:
        literal: Match of `_LITERAL`. Its group says the encoding.
        max_nested: How many literals to decode within this one.
    """
    try:
        if literal.lastgroup == "numbers":
            content = bytes(map(int, re.findall(r"\d{2,3}", literal[0])))
        elif literal.lastgroup == "hex":
            content = bytes.fromhex(re.sub(r"\\x|0x|[\s,]", "", literal[0]))
        else:
            content = decode_base64(literal[0])
        if content.startswith((_ZLIB_START, _GZIP_START)):
            decompressor = zlib.decompressobj(_ZLIB_OR_GZIP)
            content = decompressor.decompress(content, _MAX_DECOMPRESSED_BYTES)
    except (ValueError, zlib.error):
        return

    # UTF-16 text, as PowerShell uses, has a NUL byte after each ASCII character. Latin-1 gives
    # every byte a character, so it never fails.
    decoded = content.replace(b"\0", b"").decode("latin-1")
    yield decoded
    nested = _LITERAL.match(decoded) if max_nested else None
    if nested:
        yield from _decode_literal(nested, max_nested - 1)


# Words assembled from pieces ------------------------------------------------------------------

_ASSEMBLED_WORD = re.compile(expand("<DANGEROUS_WORD>"))
# Nothing but a variable that holds the whole word: `$cmd`, `${cmd}`, `%cmd%`.
_VARIABLE = re.compile(r"[\s\"'`]{0,3}[$#%]?[({]?[\w.]{0,40}[)}%]?[\"'`]{0,3}$")
_CONTEXT_CHARS = 40


def find_assembled_words(text: NormalizedText) -> Spans:
    """Find dangerous words, such as `eval`, that a program assembles from pieces.

    A harmless program has the word in its original text too. So a word that is only in the
    deobfuscated text was assembled. For example, `"ev" + "al"` is deobfuscated to `eval`.

    Args:
        text: A skill's text: the original, and the deobfuscated text as `normalized`.

    Yields:
        Start and end of each such word in `text.normalized`.
    """
    if text.offsets is None:
        return  # nothing was deobfuscated
    for match in _ASSEMBLED_WORD.finditer(text.normalized):
        # Take the original text around the position of the word.
        start, end = text.original_span(*match.span())
        context_start = max(0, start - _CONTEXT_CHARS)
        context = text.original[context_start : end + _CONTEXT_CHARS].lower()
        # A variable that holds the whole word, such as `$cmd`, is harmless: deobfuscation replaced
        # the variable by its value, but the program wrote the word in one piece.
        is_variable = _VARIABLE.match(text.original, start, end) is not None
        if match[0] in context or is_variable:
            continue
        # A warning around the word shows that the text only describes attacks, as a scanner does.
        if not text.has_warning(*match.span()):
            yield match.span()


# Servers addressed by IP address --------------------------------------------------------------

_ADDRESS = re.compile(expand("<ADDRESS>"), re.ASCII)
# Addresses that documentation uses, and a public resolver. They are routable, but harmless.
_EXAMPLE_ADDRESSES = (
    "1.2.3.4",
    "4.3.2.1",
    "5.6.7.8",
    "11.22.33.44",
    "12.34.56.78",
    "123.45.67.89",
    "1.0.0.1",
    "8.8.4.4",
)
_KNOWN_URLS = ("20.102.90.50:2017/wiki17",)  # an index in the manual of DSPy


def find_ip_addresses(text: NormalizedText) -> Spans:
    """Find public servers that are addressed by their IP address instead of a name."""
    for match in _ADDRESS.finditer(text.normalized):
        is_known = any(url in match[0] for url in _KNOWN_URLS)
        if _is_public(_host_of(match)) and not is_known and not text.is_sample(*match.span()):
            yield match.start(), match.start() + len(match[0].rstrip(".,;:"))


def _host_of(address: re.Match[str]) -> str:
    """Return the IP address of a match of `_ADDRESS`. It is empty if a number is no address."""
    number = address["number"]  # http://764940546 is http://45.152.17.2
    if number is None:
        hosts = address.group("url", "v6", "device", "bare")
        return next(host for host in hosts if host is not None)
    try:
        return str(ipaddress.IPv4Address(int(number, 0)))
    except ValueError:
        return ""  # an octal number, or one above 2**32


def _is_public(host: str) -> bool:
    """Return whether a host is a public IP address and not an example.

    Args:
        host: An IP address or the name of a host. A name is not public in this sense.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Documentation uses 8.8.8.8, 123.123.123.123 and others whose parts are equal.
    has_equal_parts = address.version == 4 and len(set(host.split("."))) == 1
    is_example = host in _EXAMPLE_ADDRESSES or has_equal_parts
    return address.is_global and not address.is_multicast and not is_example


# Commands from paste sites --------------------------------------------------------------------

_PASTE_URL = re.compile(expand(r"(?<![\w.-])(?:https?://)?(?:www\.)?<PASTE_URL>"), re.ASCII)
_RUN_INSTRUCTION = re.compile(expand("<RUN_INSTRUCTION>"))
_PIPE_TO_SHELL = re.compile(
    expand(r"[^\n|]{0,40}<PIPE><SHELL>|[\"')]{0,3}\s{0,2}\)?\s{0,3}\|\s{0,3}<SHELL>")
)
_SHELL_BEFORE = re.compile(r"(?:\beval|\bsource|\bsh|\bbash|\biex)\b[^\n|;]{0,60}$")
_VISIT_INSTRUCTION = re.compile(
    r"\b(?:visit|open|go to|copy|get|from|see)\b|访问|打开|复制|前往|\]\($|\($|\["
)


def find_paste_links(text: NormalizedText) -> Spans:
    """Find links to paste sites whose content is run by a shell, or by the reader."""
    for link in _PASTE_URL.finditer(text.normalized):
        # Look at the line before the link, and at the text after the link.
        text_before = text.line_before(link.start(), max_chars=120)
        text_after = text.normalized[link.end() : link.end() + 120]

        # The content is run by a shell, or the reader is asked to run it.
        is_run = _PIPE_TO_SHELL.match(text_after) or _SHELL_BEFORE.search(text_before)
        asks_to_visit = _VISIT_INSTRUCTION.search(text_before)
        asks_to_run = asks_to_visit and _RUN_INSTRUCTION.search(text_after)
        # Most gists are not commands, so an instruction does not suffice for them.
        if is_run or (asks_to_run and "gist." not in link[0]):
            yield link.span()


# Programs from unknown pages ------------------------------------------------------------------

_REQUIREMENT = re.compile(
    expand("<REQUIREMENT>"), re.ASCII
)  # "must be installed", "is required for"
_BEFORE_USE = re.compile(expand("<BEFORE_USE>"))
_URL = re.compile(
    r"https?://(?P<host>[\w-]{1,63}(?:\.[\w-]{1,63}){1,5})(?P<path>/[^\s)\]`\"'<>]{0,200})?"
)
_DOWNLOAD_INSTRUCTION = re.compile(
    r"\b(?:download|setup here|install (?:it )?from|visit|get it (?:here|from|at))|下载|访问"
)
_RELEASE_FILE = re.compile(
    r"/releases/[^\s]{1,160}\.(?:zip|exe|msi|dmg|pkg|rar|7z)\b|\.(?:exe|msi|dmg|pkg|scr|bat)$"
)
_MAX_URL_DISTANCE = 300  # characters from the requirement to the end of its URL
_REQUIREMENT_CONTEXT_CHARS = 60
_URL_CONTEXT_CHARS = 80
_KNOWN_HOST = re.compile(rf"(?:^|\.){expand('<KNOWN_HOST>')}$")


def find_external_programs(text: NormalizedText) -> Spans:
    """Find passages that tell the reader to install a program before they use the skill.

    The program comes from an unknown page.
    """
    normalized = text.normalized
    previous_end = 0
    for requirement in _REQUIREMENT.finditer(normalized):
        # Skip a requirement inside the previous finding.
        if requirement.start() < previous_end:
            continue

        # Find the first URL of an unknown page after the requirement. The positions of `url` are
        # in `text_after`.
        text_after = normalized[requirement.end() : requirement.end() + _MAX_URL_DISTANCE]
        url = next(filter(_is_unknown_source, _URL.finditer(text_after)), None)
        if url is None:
            continue

        # The text up to the URL, and a little after it, says to download something.
        download_end = url.end() + _URL_CONTEXT_CHARS
        is_download = _DOWNLOAD_INSTRUCTION.search(text_after[:download_end])

        # The text around the requirement, or the text after the URL, says to do so before use.
        context_start = max(0, requirement.start() - _REQUIREMENT_CONTEXT_CHARS)
        context_end = requirement.end() + _REQUIREMENT_CONTEXT_CHARS
        context = normalized[context_start:context_end] + text_after[url.end() :]
        if is_download and _BEFORE_USE.search(context):
            previous_end = requirement.end() + url.end()
            yield requirement.start(), previous_end


def _is_unknown_source(url: re.Match[str]) -> bool:
    """Return whether a URL is a page of an unknown host, or a program file on GitHub."""
    if url["host"] in ("github.com", "www.github.com"):
        return _RELEASE_FILE.search(url["path"] or "") is not None
    return not _KNOWN_HOST.search(url["host"])
