"""Does a query name its skill, or a program that it runs? Such a query teaches a model to match names, not needs
(SkillRouter, section 4.1).
"""

import re
from itertools import accumulate

from skilltrain.texts import CJK, words_of

_IS_LATIN = re.compile(rf"[^{CJK}]")


_SHELL = re.compile(r"^```(?:bash|sh|shell|zsh|console)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)
_PROGRAM = re.compile(r"^[ \t]{0,8}(?:[$>] )?(?:sudo )?([a-z][\w-]{1,40})(?= (?![=(])|$)", re.MULTILINE)
# Words of the shell and of code that is written by it, and programs that tell nothing of what a skill is for.
_ANYBODYS = frozenset(
    words_of(
        """alias apt awk bash break brew bun case cat cd chmod chown class cmd command conda const continue cp curl cut
        data date def deno diff do done echo elif else env esac eval exec exit export false fi find for from
        function git go grep head if import in install jq kill less let ln local ls make mkdir mv node npm npx
        open pip pip3 pipx pnpm printf process ps pwd python python3 read return rm run sed set sh sleep sort
        source ssh sudo tail tar tee test then time touch trap true uniq unset until uv uvx var wait wc wget
        which while with xargs yarn zip"""
    )
)


def programs_of(body: str) -> frozenset[str]:
    """The programs that the shell blocks of a skill's body start, but for those that every other skill starts too."""
    found = (program for block in _SHELL.findall(body) for program in _PROGRAM.findall(block))
    return frozenset(found) - _ANYBODYS


def names_program(query: str, body: str) -> bool:
    """Whether `query` has the name of a program of the skill as a word: "with ffmpeg" tells which skill is wanted."""
    return any(names_skill(query, program) for program in programs_of(body))


def names_skill(query: str, name: str) -> bool:
    """Whether whole consecutive words of `query` spell `name`, whatever the case and the separators.

    `web-scraper` is named by "Web Scraper", "web_scraper", "WebScraper" and "webscraper", but not by
    "webscrapers" or "scrape the web"; `pdf` is named by "a PDF", not by "pdfs". Single-word names count like any
    other, common or not.
    """
    spelled = "".join(words_of(name))
    if not spelled:
        return bool(name.strip()) and name.strip() in query
    words = words_of(query)
    starts = list(accumulate(map(len, words), initial=0))
    text = "".join(words)
    return any(text.startswith(spelled, start) and start + len(spelled) in starts for start in starts)


def without_name(text: str, name: str) -> str:
    """`text` without the words that spell `name`, as `names_skill` finds them in plain letters."""
    parts = words_of(name)
    if not parts:
        return text
    spelled = r"[\W_]*".join(map(re.escape, "".join(parts) if len(parts) == 1 else parts))
    before = rf"(?<![^\W_{CJK}])" if _IS_LATIN.match(parts[0]) else ""
    after = rf"(?![^\W_{CJK}])" if _IS_LATIN.match(parts[-1]) else ""
    return " ".join(re.sub(f"{before}(?i:{spelled}){after}", " ", text).split())
