"""Lures: a program from nowhere that must be installed first, an archive whose password keeps scanners out."""

import re

from skilltrain.data.screening.reading import Reading, Rule, Spans, is_quoted

_WORD = r"(?:pass(?:word|wd|phrase|code)?|解压码|密码|口令)"
_VALUE = (
    r"(?:[*_\s]{0,4}(?:is\s{1,2})?:?[*_\s]{0,4}[`\"'“「][\w!@#$%.-]{1,32}|[*_\s]{0,4}[:=][*_\s]{0,4}[\w!@#$%.-]{1,32})"
)
_LOCKED = re.compile(
    rf"(?:extract|unzip|unrar|unpack|decompress|archive|\.zip\b|\.rar\b|\.7z\b|解压|提取|压缩包)"
    rf"[^\n|]{{0,60}}?(?<![a-z]){_WORD}{_VALUE}[`\"'”」]?"
    r"|extract\s{1,2}(?:it\s)?(?:using|with)\s{0,2}:\s{0,2}[`\"'“]?\w{1,32}"
    r"|(?:使用|用|输入)\s{0,2}(?:(?:密码|口令)\s{0,2}[`\"'“「]?[\w!@#$%.-]{1,32}[`\"'”」]?|`[\w!@#$%.-]{1,32}`)"
    r"\s{0,2}(?:命令)?(?:来|进行)?解压"
    rf"|{_WORD}{_VALUE}[`\"'”]?\s[^\n.]{{0,30}}?\b(?:to|for)\s"
    r"(?:extract|unzip|unpack|open(?:ing)? the archive|decompress)",
    re.ASCII,
)
_ARCHIVE = re.compile(r"\.(?:zip|rar|7z|exe|msi|dmg|pkg)\b|\barchive|\bexecutable|压缩|解压|可执行")
_FETCHED = re.compile(r"https?://|\bdownload|下载|releases/")
_OWN_ARCHIVE = re.compile(
    r"(?:zip|7z|rar|7za)\s{1,3}(?:-\w{1,3}\s{1,3}){0,3}-{1,2}p|zipfile|pyzipper|pwd\s{0,2}=|setpassword"
)


def _find_locked(reading: Reading, field: str) -> Spans:
    for found in _LOCKED.finditer(reading.plain):
        near = reading.around(found.start(), found.end(), 300)
        before_word = found[0][: max(found[0].rfind(word) for word in ("pass", "密码", "口令", "解压"))]
        cited = is_quoted(reading, found.start()) or before_word.count('"') % 2
        if _ARCHIVE.search(near) and _FETCHED.search(near) and not _OWN_ARCHIVE.search(found[0]) and not cited:
            yield reading.place(found.start(), found.end())


LOCKED_ARCHIVE = Rule(
    "locked_archive",
    "has a password-protected archive downloaded and unpacked: the password keeps virus scanners out",
    ("pass", "密码", "口令", "解压码", "extract", "解压", "提取"),
    _find_locked,
)

_PROGRAM = r"[^\n.!。|]{2,60}?"
_NEEDED = re.compile(
    rf"(?:must|has to|have to|needs? to) (?:first )?be installed\b|is required for (?:the|this) skill\b"
    rf"|requires?\s{_PROGRAM}\bto be installed\b|requires? the {_PROGRAM}\butility\b"
    r"|skill will not work without\b|(?:必须|需要)[^\n。]{0,30}安装|安装[^\n。]{2,40}才能",
    re.ASCII,
)
_BEFORE_USE = re.compile(
    r"before (?:using|running|starting)|for (?:the|this) skill|this skill|to function"
    r"|之前|本技能|(?:此|该)(?:技能|工具|功能)"
)
_LINK = re.compile(r"https?://(?P<host>[\w-]{1,63}(?:\.[\w-]{1,63}){1,5})(?P<path>/[^\s)\]`\"'<>]{0,200})?")
_TO_FETCH = re.compile(r"\b(?:download|setup here|install (?:it )?from|visit|get it (?:here|from))|下载|访问")
_SETUP_LINK = re.compile(
    r"(?:^|\n)[^\n]{0,24}\b(?:set-?up|install(?:ation|er)?|download)\b[^\n]{0,16}(?:->|→|=>|➜|➡)\s{0,3}https?://[\w.-]{3,100}"
)
_PROGRAM_FILE = re.compile(r"/releases/[^\s]{1,160}\.(?:zip|exe|msi|dmg|pkg|rar|7z)\b|\.(?:exe|msi|dmg|pkg|scr|bat)$")
# Where programs come from that others have looked at, or that are signed by who wrote them.
_KNOWN_HOST = re.compile(
    r"(?:^|\.)(?:python\.org|nodejs\.org|npmjs\.com|crates\.io|rubygems\.org|docker\.com|brew\.sh|astral\.sh|rustup\.rs"
    r"|go\.dev|golang\.org|anaconda\.com|conda\.io|microsoft\.com|apple\.com|google\.com|mozilla\.org|ubuntu\.com"
    r"|gnu\.org|apache\.org|java\.com|oracle\.com|jetbrains\.com|git-scm\.com|ffmpeg\.org|amazon\.com|aws\.com"
    r"|cloudflare\.com|openai\.com|anthropic\.com|claude\.(?:ai|com)|salesforce\.com|obsidian\.md|readthedocs\.io"
    r"|gitlab\.com|bitbucket\.org|sourceforge\.net|wikipedia\.org|youtube\.com)$"
)


def _find_program(reading: Reading, field: str) -> Spans:
    plain = reading.plain
    done = 0
    for found in _NEEDED.finditer(plain):
        if found.start() < done:
            continue
        near = reading.around(found.start(), found.end(), 60)
        rest = plain[found.end() : found.end() + 300]
        link = next((link for link in _LINK.finditer(rest) if _is_from_nowhere(link)), None)
        if link and _BEFORE_USE.search(near) and _TO_FETCH.search(rest[: link.end() + 80]):
            done = found.end() + link.end()
            yield reading.place(found.start(), done)
    for found in _SETUP_LINK.finditer(plain):
        start = found.start() + (plain[found.start()] == "\n")
        if (
            not _KNOWN_HOST.search(plain[found.start() : found.end()].rpartition("/")[2])
            and "github.com" not in found[0]
        ):
            yield reading.place(start, found.end())


def _is_from_nowhere(link: re.Match[str]) -> bool:
    """Whether a link leads to a program that nobody vouches for: its own page, or a release file of a code host."""
    if link["host"] in ("github.com", "www.github.com"):
        return bool(_PROGRAM_FILE.search(link["path"] or ""))
    return not _KNOWN_HOST.search(link["host"])


OUTSIDE_PROGRAM = Rule(
    "outside_program",
    "says that a program must be installed first, from a page that is no package index, code host or known maker's",
    ("installed", "is required for", "utility", "will not work without", "安装", "->", "→", "=>", "➜", "➡"),
    _find_program,
)
