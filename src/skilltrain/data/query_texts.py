"""Texts of queries: which answers of a model are one, how varied a set of them is, and whether one names its skill.

A query that names its skill, or a program that it runs, teaches a model to match names, not needs (SkillRouter,
section 4.1).
"""

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from skilltrain.data.sampling import stable_number
from skilltrain.llm import AnswerError
from skilltrain.records import Skill
from skilltrain.texts import CJK, num_words, words_of

MAX_TERSE_WORDS = 20
_SAMPLE = (
    1000  # queries over which words are counted: shares of distinct words fall with a set's size
)
_REFUSAL = re.compile(
    r"(?:i['’]?m sorry|sorry,? (?:but )?i|i (?:can ?not|can['’]t|am unable to|won['’]t) (?:assist|help with"
    r"|comply|fulfil|write|create|generate|provide)"
    r"|as an ai\b|很?抱歉|对不起|我(?:无法|不能)(?:协助|提供|帮助|生成|满足))",
    re.I,
)
_LABEL = re.compile(
    r"^(?:(?:user )?(?:request|query|task)(?: \d+)?|请求|用户请求)\s*[:：]\s*", re.I
)
_IS_LATIN = re.compile(rf"[^{CJK}]")
_SHELL = re.compile(
    r"^```(?:bash|sh|shell|zsh|console)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE
)
_PROGRAM = re.compile(
    r"^[ \t]{0,8}(?:[$>] )?(?:sudo )?([a-z][\w-]{1,40})(?= (?![=(])|$)", re.MULTILINE
)
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


def fit_query(answer: str, seen: set[str], most: int, skills: Iterable[Skill]) -> str:
    """The query in an answer, which `seen` then holds. AnswerError: it is none, too long, leaks a name or is seen."""
    text = _LABEL.sub("", " ".join(answer.strip().strip("`").split()))
    if len(text) > 1 and text[0] + text[-1] in ('""', "“”", "「」", "''"):
        text = text[1:-1].strip()
    length = num_words(text)
    if _REFUSAL.match(text):
        raise AnswerError("refused", "the model declined to answer")
    if not length:
        raise AnswerError("empty", "there was no text in the answer")
    if length > most:
        raise AnswerError("too_long", f"it had {length} words, more than {most}", length)
    if any(names_skill(text, skill.name) for skill in skills):
        raise AnswerError("name_leak", "it named the capability")
    if text.casefold() in seen:
        raise AnswerError("duplicate", "the same text was written before")
    seen.add(text.casefold())
    return text


def query_profile(texts: Sequence[str]) -> dict[str, float]:
    """Words of a query (median, 90th percentile) and shares of what is distinct; nothing for no query.

    Words and runs of three (distinct-1 and -3 of Li et al., arXiv 1510.03055) are of 1,000 queries at most, so that
    sets of different size compare.
    """
    if not texts:
        return {}
    words = [words_of(text) for text in sorted(texts, key=stable_number)[:_SAMPLE]]
    distinct = {
        "texts": texts,
        "openings": [tuple(words_of(text)[:3]) for text in texts],
        "words": [word for of_query in words for word in of_query],
        "trigrams": [
            run
            for of_query in words
            for run in zip(of_query, of_query[1:], of_query[2:], strict=False)
        ],
    }
    median, ninth = np.quantile([num_words(text) for text in texts], (0.5, 0.9)).tolist()
    shares = {
        f"distinct_{name}": round(len({*found}) / max(1, len(found)), 4)
        for name, found in distinct.items()
    }
    return {"median_words": median, "p90_words": ninth, **shares}


def programs_of(body: str) -> frozenset[str]:
    """The programs that the shell blocks of a skill's body start, but for those that every other skill starts too."""
    found = (program for block in _SHELL.findall(body) for program in _PROGRAM.findall(block))
    return frozenset(found) - _ANYBODYS


def names_program(query: str, body: str) -> bool:
    """Whether `query` has the name of a program of the skill as a word: "with ffmpeg" tells which skill is wanted."""
    return any(names_skill(query, program) for program in programs_of(body))


def names_skill(query: str, name: str) -> bool:
    """Whether whole consecutive words of `query` spell `name`, whatever the case and the separators.

    `web-scraper` is named by "Web Scraper", "web_scraper", "WebScraper" and "webscraper", but not by "webscrapers" or
    "scrape the web". Single-word names count like any other, common or not.
    """
    spelled = "".join(words_of(name))
    if not spelled:
        return bool(name.strip()) and name.strip() in query
    words = words_of(query)
    starts = list(accumulate(map(len, words), initial=0))
    text = "".join(words)
    return any(
        text.startswith(spelled, start) and start + len(spelled) in starts for start in starts
    )


def without_name(text: str, name: str) -> str:
    """`text` without the words that spell `name`, as `names_skill` finds them in plain letters."""
    parts = words_of(name)
    if not parts:
        return text
    spelled = r"[\W_]*".join(map(re.escape, "".join(parts) if len(parts) == 1 else parts))
    before = rf"(?<![^\W_{CJK}])" if _IS_LATIN.match(parts[0]) else ""
    after = rf"(?![^\W_{CJK}])" if _IS_LATIN.match(parts[-1]) else ""
    return " ".join(re.sub(f"{before}(?i:{spelled}){after}", " ", text).split())
