"""Checks of query texts: usable answers of a chat model, variety of a set, names of skills.

A query that names its skill, or a program that the skill runs, teaches a model to match names
instead of needs (SkillRouter, section 4.1).
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
    """Return the query in a chat model's answer, without labels and quotes.

    Args:
        answer: Answer of the chat model.
        earlier_texts: Casefolded queries of earlier answers, to which this query is added.
        max_words: Number of words that the query may have.
        skills: Skills that the query must not name.

    Raises:
        AnswerError: The answer is a refusal, is empty or too long, names a skill, or repeats a
            query.
    """
    # Put the answer on one line, without backticks around it and without a label, such as "Query:".
    text = _LABEL.sub("", " ".join(answer.strip().strip("`").split()))
    # Remove one pair of quotes around the whole text.
    if len(text) > 1 and text[0] + text[-1] in ('""', "“”", "「」", "''"):
        text = text[1:-1].strip()

    length = num_words(text)
    # Each check has a short code, which later becomes the filter in a row of DROPPED.
    if _REFUSAL.match(text):
        raise AnswerError("refused", "the model declined to answer")
    if not length:
        raise AnswerError("empty", "there was no text in the answer")
    if length > max_words:
        raise AnswerError("too_long", f"it had {length} words, more than {max_words}", value=length)
    if any(names_skill(text, skill.name) for skill in skills):
        raise AnswerError("name_leak", "it named the capability")
    if text.casefold() in earlier_texts:
        raise AnswerError("duplicate", "the same text was written before")
    earlier_texts.add(text.casefold())
    return text


def query_profile(texts: Sequence[str]) -> dict[str, float]:
    """Measure the length and the variety of queries.

    Args:
        texts: Texts of the queries.

    Returns:
        Measures by name, empty if there are no queries:

        - `median_words`, `p90_words`: median and 90th percentile of words per query.
        - `distinct_texts`: share of distinct texts.
        - `distinct_openings`: share of distinct first three words.
        - `distinct_words`, `distinct_trigrams`: shares of distinct words and word trigrams
          (distinct-1 and distinct-3 of Li et al., arXiv 1510.03055).
    """
    if not texts:
        return {}

    # Larger sets repeat more words. To compare sets, words are counted in a sample of fixed size.
    words: list[str] = []
    trigrams: list[tuple[str, ...]] = []
    for text in sorted(texts, key=stable_number)[:_MAX_COUNTED_QUERIES]:
        query_words = words_of(text)
        words += query_words
        # A trigram is three words in a row. A query of one or two words has no trigram.
        trigrams += zip(query_words, query_words[1:], query_words[2:], strict=False)

    items_by_name: dict[str, Sequence[object]] = {
        "texts": texts,
        "openings": [tuple(words_of(text)[:3]) for text in texts],
        "words": words,
        "trigrams": trigrams,
    }
    median, p90 = np.quantile([num_words(text) for text in texts], (0.5, 0.9)).tolist()
    profile = {"median_words": median, "p90_words": p90}
    for name, items in items_by_name.items():
        # A set without items has the share 0. `max` avoids a division by 0.
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

    Case and separators do not matter: `web-scraper` is named by "Web Scraper", "web_scraper",
    "WebScraper" and "webscraper", but not by "webscrapers" or "scrape the web". Single words count
    too, even common ones.

    Args:
        query: Text of the query.
        name: Name of the skill.
    """
    joined_name = "".join(words_of(name))
    if not joined_name:  # the name has only signs
        return bool(name.strip()) and name.strip() in query

    # Compare texts without separators. The name must start and end where words do.
    words = words_of(query)
    joined_query = "".join(words)
    # Positions in `joined_query` where a word starts. The last position is the end of the text.
    boundaries = list(accumulate(map(len, words), initial=0))
    return any(
        joined_query.startswith(joined_name, start) and start + len(joined_name) in boundaries
        for start in boundaries
    )


def without_name(text: str, name: str, mark: str = "") -> str:
    """Replace the words that spell `name` in a text by a mark, and put the text on one line.

    Case and separators do not matter. Other Unicode forms of the letters, such as full-width
    letters, are not found.

    For example, "Use PDF_tools now" without the name "pdf tools" and with the mark "X" becomes "Use
    X now".

    Args:
        text: Text to change.
        name: Name of a skill.
        mark: Text that replaces the name. An empty mark only removes the name.
    """
    words = words_of(name)
    if not words:  # the name has only signs, which are not searched
        return text

    # Separators may stand between the words, or between the letters of a single word.
    units = list(words[0]) if len(words) == 1 else words
    pattern = r"[\W_]*".join(map(re.escape, units))

    # No letter or digit may touch a Latin word. CJK characters may touch it, because each CJK
    # character is a word of its own.
    letter_or_digit = r"[^\W_" + CJK + "]"  # without CJK characters
    start = rf"(?<!{letter_or_digit})" if _IS_LATIN.match(words[0]) else ""
    end = rf"(?!{letter_or_digit})" if _IS_LATIN.match(words[-1]) else ""
    return one_line(re.sub(f"{start}(?i:{pattern}){end}", f" {mark} ", text))
