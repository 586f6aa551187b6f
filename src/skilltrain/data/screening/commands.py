"""Commands that hide what they run, take it from nowhere, or carry secrets away.

A command that is only named ("blocks `base64 -d | bash`") has nothing to decode: it is no finding. All repeats in the
patterns are bounded, and windows around finds are of fixed size or do not overlap: time is linear in the text.
"""

import ipaddress
import re

from skilltrain.data.screening.reading import Reading, Rule, Spans, is_quoted

_SHELL = (
    r"(?:sudo\s{1,3}(?:-\w{1,3}\s{1,3}){0,2})?(?:/usr)?(?:/local)?(?:/bin/)?(?:env\s{1,3})?"
    r"(?:(?:bash|zsh|dash|ksh|fish|sh|pwsh|powershell|iex|invoke-expression)\b"
    r"|(?:python[23]?|perl|ruby|node|php|osascript)(?=\s{0,3}-?\s{0,3}(?:$|[\n\"'`);&|<>])))"
)  # an interpreter that is given a program of its own (python -m json.tool) reads data, not orders
_PIPE = r"\s{0,4}\\?\|\s{0,4}"
_DECODER = (
    r"(?:base(?:64|32)\s{1,3}(?:-\w{0,3}d\w{0,2}\b|--decode\b)|openssl\s{1,3}(?:enc\s{1,3})?-?(?:base64|a)\b"
    r"|xxd\s{1,3}-[^\n|]{0,12}r\b|uudecode\b|rev(?<=\srev)(?=\s{0,3}\\?\|))"
)
_DECODED_TO_SHELL = re.compile(
    rf"{_DECODER}(?P<rest>[^\n|;&]{{0,160}}(?:\|(?!\s{{0,4}}{_SHELL})[^\n|;&]{{0,80}}){{0,3}}{_PIPE}{_SHELL})?",
    re.ASCII,
)
_SUBSTITUTION = re.compile(
    r"\b(?:eval\(?|exec\(?|source|(?:ba|z|da|k)?sh)\s{0,3}(?:-\w{1,3}\s{1,3}){0,2}[\"'<\s]{0,4}(?:\$\(|`|<\()",
    re.ASCII,
)
_PAYLOAD = re.compile(r"[a-z0-9+/=]{16}|\$[\w{]|\b(?:curl|wget|cat|tail|head|dd|xxd)\s", re.ASCII)
_OPERAND = re.compile(r"\s{0,3}<{0,3}\s{0,3}[\"'$]?[\w./~{-]{0,80}[\w}]")
_INTO_FILE = re.compile(r"\s{0,3}>")
_COMMAND_START = re.compile(r"[`\n;(]|&&|\|\|")
_DECODE_CALL = re.compile(
    r"(?:b(?:64|32)decode|base64_decode|decode64|frombase64string|atob|buffer\.from|unhexlify|fromhex)\s{0,2}\("
    r"\s{0,2}[bru]{0,2}[\"'`][a-z0-9+/=_-]{16}"
)  # a literal: what is decoded stands right here
_RUNS_CALL = re.compile(
    r"(?:\b(?:exec|eval|system|popen|run|call|check_output|compile|function|iex|invoke-expression|assert|passthru"
    r"|shell_exec|spawn|execsync)\b\s{0,2}[(\s])",
    re.ASCII,
)
_THEN_RUN = re.compile(rf"[^\n]{{0,40}}{_PIPE}(?:iex|invoke-expression)\b")
_WINDOWS = re.compile(
    r"(?:powershell|pwsh)(?:\.exe)?\b[^\n]{0,120}?\s-e(?:nc\w{0,12}|c)?\s{1,3}[\"']?[a-z0-9+/=]{16,4000}+(?!\.\.|…)",
    re.ASCII,
)  # a report on malware shortens what it cites
_HEX = re.compile(
    rf"(?:printf|echo\s{{1,3}}-\w{{0,2}}e\w{{0,2}})\s{{1,3}}[\"'](?:\\x[0-9a-f]{{2}}){{6,2000}}+[\"']?{_PIPE}{_SHELL}"
)
_LONGEST_PAYLOAD = 6_000


def _find_encoded(reading: Reading, field: str) -> Spans:
    plain = reading.plain
    done = 0
    for found in _DECODED_TO_SHELL.finditer(plain):
        begin = max(done, plain.rfind("\n", done, found.start()) + 1, found.start() - _LONGEST_PAYLOAD)
        before = plain[begin : found.start()]
        done = found.end()
        substituted = _SUBSTITUTION.search(before)
        if found["rest"] is None and (substituted is None or _INTO_FILE.match(plain, done)):
            continue
        rest = plain[found.start() : found.end()]
        piped_in = before.rstrip(" \\").endswith("|")
        source = before.rstrip(" \\|") if piped_in else ""
        at = _last_command(source, substituted) if piped_in else 0
        if piped_in and _PAYLOAD.search(source, at):
            yield reading.place(begin + at, found.end())
        elif not piped_in and _has_operand(rest if found["rest"] else plain[found.start() : found.end() + 100]):
            yield reading.place(begin + substituted.start() if substituted else found.start(), found.end())
    for found in _DECODE_CALL.finditer(plain):
        runs = _RUNS_CALL.search(reading.line_before(found.start(), 120))
        if runs:
            start = found.start() - len(reading.line_before(found.start(), 120)) + runs.start()
            yield reading.place(start, found.end())
        elif _THEN_RUN.match(plain, plain.find(")", found.end(), found.end() + _LONGEST_PAYLOAD) + 1 or found.end()):
            yield reading.place(found.start(), found.end())
    for pattern in (_WINDOWS, _HEX):
        for found in pattern.finditer(plain):
            yield reading.place(found.start(), found.end())


def _last_command(source: str, substituted: re.Match[str] | None) -> int:
    """Where in `source` the command begins whose output is decoded."""
    if substituted is not None:
        return substituted.start()
    ends = [found.end() for found in _COMMAND_START.finditer(source)]
    start = ends[-1] if ends else 0
    return start + len(source[start:]) - len(source[start:].lstrip(" >$*-"))


def _has_operand(command: str) -> bool:
    """Whether a decoder reads a file or a here-string, and so has something to decode."""
    _, _, rest = command.partition(" ")
    flag, _, rest = rest.lstrip().partition(" ")
    return flag.startswith("-") and _OPERAND.match(rest.split("|")[0]) is not None


ENCODED_COMMAND = Rule(
    "encoded_command",
    "decodes a text and runs it at once, so that nobody sees what runs",
    ("base64", "base32", "xxd", "uudecode", "| rev", "|rev", "b64decode", "b32decode", "decode64", "atob",
     "buffer.from", "unhexlify", "fromhex", "openssl", "powershell", "pwsh", "\\x"),
    _find_encoded,
)  # fmt: skip

_IP = r"\d{1,3}(?:\.\d{1,3}){3}"
_AFTER_HOST = r"(?![\w-]|\.\w)"
_ADDRESS = re.compile(
    rf"(?:https?|ftp|wss?)://(?:[^\s/@\"'<>]{{1,64}}@)?(?:(?P<url>{_IP})|\[(?P<v6>[0-9a-f:]{{2,39}})\]"
    rf"|(?P<number>0x[0-9a-f]{{8}}|\d{{8,10}})){_AFTER_HOST}[^\s\"'`<>)\]]{{0,80}}"
    rf"|/dev/(?:tcp|udp)/(?P<device>{_IP})(?:/\d{{1,5}})?"
    rf"|(?:curl|wget|ncat|nc(?<![a-z]nc)|telnet|irm|iwr)\s(?:[^\n|;&]{{0,80}}?\s)?[\"'`]?(?P<bare>{_IP})"
    rf"(?=[:/\s\"'`]){_AFTER_HOST}",
    re.ASCII,
)
_EXAMPLES = ("1.2.3.4", "4.3.2.1", "5.6.7.8", "11.22.33.44", "12.34.56.78", "123.45.67.89", "1.0.0.1", "8.8.4.4")


def _is_outside(host: str) -> bool:
    """Whether an address is a public one; not private, local, reserved for examples, a known resolver's or the like."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    alike = address.version == 4 and len(set(host.split("."))) == 1  # 8.8.8.8, 123.123.123.123
    return address.is_global and not address.is_multicast and host not in _EXAMPLES and not alike


def _find_address(reading: Reading, field: str) -> Spans:
    for found in _ADDRESS.finditer(reading.plain):
        if number := found["number"]:
            value = int(number, 0) if number.startswith("0x") or not number.startswith("0") else -1
            outside = 0 <= value < 2**32 and _is_outside(str(ipaddress.IPv4Address(value)))
        else:
            outside = _is_outside(found["url"] or found["v6"] or found["device"] or found["bare"])
        if outside:
            yield reading.place(found.start(), found.start() + len(found[0].rstrip(".,;:")))


BARE_ADDRESS = Rule(
    "bare_address",
    "talks to a server by its bare IP address: no name says whose it is",
    ("://", "/dev/tcp", "/dev/udp", "curl", "wget", "nc ", "ncat", "telnet", "irm ", "iwr "),
    _find_address,
)

_PASTE_URL = re.compile(
    r"(?:glot\.io/snippets|rentry\.(?:co|org)|pastebin\.com|paste\.ee|hastebin\.com|ghostbin\.\w{2,4}"
    r"|dpaste\.(?:com|org)|ix\.io|sprunge\.us|paste\.rs|termbin\.com|0x0\.st|transfer\.sh|bpa\.st|controlc\.com"
    r"|justpaste\.it|telegra\.ph|privatebin\.net|hackmd\.io|paste\.gg|pastes\.io|snippet\.host|anonfiles\.com|gofile\.io"
    r"|gist\.githubusercontent\.com)/[\w~%./?=&-]{3,120}",
    re.ASCII,
)
_SCHEME = re.compile(r"(?:https?://)?(?:www\.)?$")
_RUN_IT = re.compile(
    r"\b(?:execute|run|paste|install(?:ation)?|terminal|powershell|command|script)\b|执行|运行|终端|安装|复制|粘贴"
)
_PIPED = re.compile(rf"[^\n|]{{0,40}}{_PIPE}{_SHELL}|[\"')]{{0,3}}\s{{0,2}}\)?\s{{0,3}}\|\s{{0,3}}{_SHELL}")
_SUBSTITUTED = re.compile(r"(?:\beval|\bsource|\bsh|\bbash|\biex)\b[^\n|;]{0,60}$")


def _find_paste(reading: Reading, field: str) -> Spans:
    plain = reading.plain
    for found in _PASTE_URL.finditer(plain):
        before = reading.line_before(found.start(), 120)
        scheme = _SCHEME.search(before)
        before = before[: scheme.start()] if scheme else before
        if before[-1:].isalnum() or before[-1:] in ("-", ".", "_"):
            continue  # the end of another name: add_transfer.sh/x, spatix.io/x
        runs = _PIPED.match(plain, found.end()) or _SUBSTITUTED.search(before)
        told = "gist." not in found[0] and _is_visit(before) and _RUN_IT.search(plain[found.end() : found.end() + 120])
        if runs or told:
            yield reading.place(found.start() - (len(scheme[0]) if scheme else 0), found.end())


def _is_visit(before: str) -> bool:
    """Whether the words before a link send somebody to it."""
    return bool(re.search(r"\b(?:visit|open|go to|copy|get|from|see)\b|访问|打开|复制|前往|\]\($|\($|\[", before))


PASTE_SITE = Rule(
    "paste_site",
    "has a command from a paste site run: anyone can put it there and change it, unseen",
    ("glot.io", "rentry.", "paste", "hastebin", "ghostbin", "ix.io", "sprunge", "termbin", "0x0.st", "transfer.sh",
     "bpa.st", "controlc", "telegra.ph", "privatebin", "hackmd.io", "snippet.host", "anonfiles", "gofile", "gist."),
    _find_paste,
)  # fmt: skip

_SECRET_FILE = (
    r"(?:\.ssh/|id_rsa|id_ed25519|\.aws/credentials|\.netrc|\.git-credentials|\.gnupg/|\.npmrc|\.kube/config"
    r"|\.docker/config|\.openclaw/(?:credentials|\.env|openclaw\.json)|login\.keychain|/etc/shadow|/etc/passwd"
    r"|(?<![\w)])\.env\b|wallet\.dat)"
)
_SEND = r"(?:curl|wget|ncat|nc|invoke-restmethod|invoke-webrequest|irm|iwr|requests\.post|fetch)"
_TAKEN = re.compile(
    rf"\$\((?:env|printenv)\b[^)\n]{{0,40}}\)|\$\((?:cat|base64|tar)\s[^)\n]{{0,40}}{_SECRET_FILE}[^)\n]{{0,40}}\)"
    rf"|@(?<=[=\s\"'(]@)[\"']?[~/$\w{{}}.-]{{0,40}}{_SECRET_FILE}[\w.-]{{0,20}}"
    r"|json\.dumps\(dict\(os\.environ\)\)|json\.stringify\(process\.env\)",
    re.ASCII,
)
_PIPED_OUT = re.compile(rf"\|\s{{0,3}}{_SEND}\b[^\n|;&]{{0,120}}", re.ASCII)
_POURED = re.compile(
    rf"(?:(?<![\w.-])(?:env|printenv)|\b(?:cat|tar|base64|gpg)\s[^\n|;&]{{0,60}}{_SECRET_FILE}[^\n|;&]{{0,40}})"
    r"(?:\s{0,2}\|[^\n|;&]{0,60}){0,2}\s{0,3}$",
    re.ASCII,
)
_KEYS = (
    r"(?:api[ -]?keys|credentials|passwords|secrets|(?:access |auth )?tokens|private keys|ssh keys|seed phrases"
    r"|env(?:ironment)? variables)"
)
_SENT = re.compile(
    rf"(?:send|post|upload|transmit|forward|submit|leak|exfiltrate|output|share|print)\s(?:\w{{1,12}}\s){{0,2}}(?:all|every|any)\s"
    rf"(?:[\w'’]{{1,14}}\s){{0,3}}{_KEYS}[^.\n]{{0,100}}\bto\s(?:https?://|the\s|this\s|our\s|my\s)",
    re.ASCII,
)
_IS_SENT = re.compile(
    r"be (?:sent|posted|uploaded|transmitted|forwarded|submitted) to (?:https?://[\w.-]{1,80}|the\s|this\s|our\s)",
    re.ASCII,
)
_MUST_KEYS = re.compile(rf"{_KEYS}\b[^.\n]{{0,40}}\b(?:should|must|shall|need to|has to|have to|are to) $", re.ASCII)
_STAND_IN_HOST = re.compile(
    r"https?://(?:[\w-]{1,40}\.){0,3}(?:evil|attacker|malicious|example|bad|hacker|target|localhost|your[\w-]{1,30})"
    r"(?:[.:/\"'\s-]|$)|https?://(?:\.\.|…|[<{$\[])"
)


def _find_exfiltration(reading: Reading, field: str) -> Spans:
    for found in _TAKEN.finditer(reading.plain):
        before = reading.line_before(found.start(), 240)
        sender = re.search(rf"\b{_SEND}\b", before)
        line = before + reading.plain[found.end() : found.end() + 160].partition("\n")[0]
        if sender and "://" in line and not _STAND_IN_HOST.search(line):
            yield reading.place(found.start() - len(before) + sender.start(), found.end())
    for found in _PIPED_OUT.finditer(reading.plain):
        before = reading.line_before(found.start(), 240)
        poured = _POURED.search(before)
        if poured and not _STAND_IN_HOST.search(found[0]):
            yield reading.place(found.start() - len(before) + poured.start(), found.end())
    for found in _SENT.finditer(reading.plain):
        if not is_quoted(reading, found.start()):
            yield reading.place(found.start(), found.end())
    for found in _IS_SENT.finditer(reading.plain):
        before = reading.line_before(found.start(), 120)
        keys = _MUST_KEYS.search(before)
        start = found.start() - len(before) + keys.start() if keys else found.start()
        if keys and not is_quoted(reading, start):
            yield reading.place(start, found.end())


EXFILTRATION = Rule(
    "exfiltration",
    "sends environment variables, keys or credential files to somebody else's server",
    ("env", ".ssh", "id_rsa", "id_ed25519", ".aws", ".netrc", ".git-credentials", ".gnupg", ".npmrc", ".kube", "/etc/",
     "wallet.dat", "keychain", "send", "sent", "post", "upload", "transmit", "forward", "submit", "leak",
     "output", "share", "print"),
    _find_exfiltration,
)  # fmt: skip
