"""Checks of query texts: usable answers of a chat model, variety of a set, names of skills.

A query that names its skill, or a program that the skill runs, teaches a model to match names
instead of needs (SkillRouter, section 4.1).

Measures of a set of queries:

- `median_words`, `p90_words`: median and 90th percentile of words per query.
- `distinct_texts`: share of distinct texts.
- `distinct_openings`: share of distinct first three words.
- `distinct_words`, `distinct_trigrams`: shares of distinct words and word trigrams (distinct-1 and
  distinct-3 of Li et al., arXiv 1510.03055).

Notes:
- Larger sets repeat more words. To compare sets, words and trigrams are counted in a sample of
  fixed size.
- Single words can name a skill too, even common ones.
- Separators may stand between the words of a name, or between the letters of a single word.
- Other Unicode forms of the letters of a name, such as full-width letters, are not found.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from skilltrain.data.sampling import stable_number
from skilltrain.llm import AnswerError
from skilltrain.records import Skill
from skilltrain.texts import CJK, num_words, one_line, words_of

MAX_TERSE_WORDS = 20
# Queries over which words and trigrams are counted
_MAX_COUNTED_QUERIES = 1000
_REFUSAL = re.compile(
    r"(?:i['’]?m sorry|sorry,? (?:but )?i"
    r"|i (?:can ?not|can['’]t|am unable to|won['’]t) "
    r"(?:assist|help with|comply|fulfil|write|create|generate|provide)"
    r"|as an ai\b|很?抱歉|对不起|我(?:无法|不能)(?:协助|提供|帮助|生成|满足))",
    re.I,
)
# "User request 2:" in front of a query
_LABEL = re.compile(
    r"^(?:(?:user )?(?:request|query|task)(?: \d+)?|请求|用户请求)\s*[:：]\s*", re.I
)
_IS_LATIN = re.compile(rf"[^{CJK}]")
# No letter or digit may touch a Latin word, except CJK: each CJK character is a word of its own.
_LETTER_OR_DIGIT = r"[^\W_" + CJK + "]"
_NO_LETTER_BEFORE = rf"(?<!{_LETTER_OR_DIGIT})"
_NO_LETTER_AFTER = rf"(?!{_LETTER_OR_DIGIT})"
# The content of a Markdown code block of shell commands
_SHELL = re.compile(
    r"^```(?:bash|sh|shell|zsh|console)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE
)
# The first word of a line, after a prompt or sudo, but not of an assignment or a call
_PROGRAM = re.compile(
    r"^[ \t]{0,8}(?:[$>] )?(?:sudo )?([a-z][\w-]{1,40})(?= (?![=(])|$)", re.MULTILINE
)
# Shell keywords, first words of inline code, and programs that do not tell skills apart
_COMMON_PROGRAMS = frozenset(
    words_of(
        """alias apt awk bash break brew bun case cat cd chmod chown class cmd command conda const
        continue cp curl cut data date def deno diff do done echo elif else env esac eval exec
        exit export false fi find for from function git go grep head if import in install jq
        kill less let ln local ls make mkdir mv node npm npx open pip pip3 pipx pnpm printf
        process ps pwd python python3 read return rm run sed set sh sleep sort source ssh sudo
        tail tar tee test then time touch trap true uniq unset until uv uvx var wait wc wget
        which while with xargs yarn zip"""
    )
)


def usable_query(
    answer: str, earlier_texts: set[str], max_words: int, skills: Iterable[Skill]
) -> str:
    """Return the query in a chat model's answer, or raise AnswerError if it is unusable.

    Args:
        earlier_texts: Casefolded queries, to which this function adds the query.
        skills: Skills that the query must not name.
    """
    text = _LABEL.sub("", " ".join(answer.strip().strip("`").split()))
    if len(text) > 1 and text[0] + text[-1] in ('""', "“”", "「」", "''"):
        text = text[1:-1].strip()
    length = num_words(text)
    if _REFUSAL.match(text):
        raise AnswerError("refused", "the model declined to answer")
    if not length:
        raise AnswerError("empty", "there was no text in the answer")
    if length > max_words:
        raise AnswerError("too_long", f"it had {length} words, more than {max_words}", length)
    if any(names_skill(text, skill.name) for skill in skills):
        raise AnswerError("name_leak", "it named the capability")
    if text.casefold() in earlier_texts:
        raise AnswerError("duplicate", "the same text was written before")
    earlier_texts.add(text.casefold())
    return text


def query_profile(texts: Sequence[str]) -> dict[str, float]:
    """Measure the length and the variety of queries.

    Returns:
        Numbers of words per query, and shares of distinct items, by name. Empty without queries.
    """
    if not texts:
        return {}
    words: list[str] = []
    trigrams: list[tuple[str, ...]] = []
    sample = sorted(texts, key=stable_number)[:_MAX_COUNTED_QUERIES]
    for text in sample:
        query_words = words_of(text)
        words += query_words
        trigrams += zip(query_words, query_words[1:], query_words[2:], strict=False)

    items_by_name = {
        "texts": texts,
        "openings": [tuple(words_of(text)[:3]) for text in texts],
        "words": words,
        "trigrams": trigrams,
    }
    median, p90 = np.quantile([num_words(text) for text in texts], (0.5, 0.9)).tolist()
    profile = {"median_words": median, "p90_words": p90}
    for name, items in items_by_name.items():
        profile[f"distinct_{name}"] = round(len(set(items)) / max(1, len(items)), 4)
    return profile


def programs_of(body: str) -> frozenset[str]:
    """Return the programs that the shell blocks of a skill's body start, except common ones."""
    commands = "\n".join(_SHELL.findall(body))
    return frozenset(_PROGRAM.findall(commands)) - _COMMON_PROGRAMS


def names_program(query: str, body: str) -> bool:
    """Return whether `query` names a program that the skill starts, as in "with ffmpeg".

    Args:
        query: Text of the query.
        body: Body of the skill.
    """
    return any(names_skill(query, program) for program in programs_of(body))


def names_skill(query: str, name: str) -> bool:
    """Return whether whole consecutive words of `query` spell `name`.

    Case and separators do not matter: `web-scraper` is named by "Web Scraper" and "webscraper", but
    not by "webscrapers".
    """
    joined_name = "".join(words_of(name))
    if not joined_name:  # only signs
        return bool(name.strip()) and name.strip() in query
    words = words_of(query)
    joined_query = "".join(words)
    word_ends = list(accumulate(map(len, words), initial=0))  # with the start of the query
    for start in word_ends:
        end = start + len(joined_name)
        if joined_query.startswith(joined_name, start) and end in word_ends:
            return True
    return False


def without_name(text: str, name: str, mark: str = "") -> str:
    """Replace the words that spell `name` in a text by a mark, and put the text on one line.

    Case and separators do not matter.
    """
    words = words_of(name)
    if not words:
        return text
    units = list(words[0]) if len(words) == 1 else words  # letters of one word
    pattern = r"[\W_]*".join(map(re.escape, units))
    start = _NO_LETTER_BEFORE if _IS_LATIN.match(words[0]) else ""
    end = _NO_LETTER_AFTER if _IS_LATIN.match(words[-1]) else ""
    return one_line(re.sub(f"{start}(?i:{pattern}){end}", f" {mark} ", text))
