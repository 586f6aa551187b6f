"""Requests in imperative form, made from clauses that say what a skill does or when it is used.

"Use when the user wants to merge PDF files" and "This skill merges PDF files" both become "Merge
PDF files". The words and patterns are in requests.yaml. Texts in other languages than English and
Chinese make no request.
"""

import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, Final, NamedTuple

import yaml

from skilltrain.data.query_texts import names_skill, without_name
from skilltrain.texts import num_words, one_line

MIN_WORDS = 4  # of a request
MAX_WORDS = 30
_NAME = "\ue000"  # stands for the name of the skill in a text
_RULES: Final[dict[str, Any]] = yaml.safe_load(
    (files("skilltrain.data") / "requests.yaml").read_text(encoding="utf-8")
)


class Passage(NamedTuple):
    """A part of a skill's text and the request that it makes."""

    text: str
    request: str


def _forms_of(verb: str) -> list[str]:
    """Return the base form, the third person and the -ing form of an English verb.

    The -ing form is returned in each spelling that it may have, such as "running" and "runing".
    """
    if re.search("[^aeiou]y$", verb):
        third_person = verb[:-1] + "ies"
    elif verb.endswith(("s", "x", "z", "ch", "sh")):
        third_person = verb + "es"
    else:
        third_person = verb + "s"
    stem = verb.removesuffix("e")
    return [verb, third_person, f"{verb}ing", f"{stem}ing", f"{stem}{stem[-1]}ing"]


# Base form by each form of a verb
_BASE_FORMS: dict[str, str] = {}
# Pattern by name
_FRAGMENTS = {"NAME": _NAME}


def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of requests.yaml, in which `<NAME>` stands for another pattern."""
    return re.compile(_expand(pattern), re.I)


def _expand(pattern: str) -> str:
    """Replace the names of fragments in a pattern by these fragments."""
    return re.sub("<([A-Z_]+)>", lambda match: _FRAGMENTS[match[1]], pattern)


for _name, _verbs in _RULES["words"].items():
    _forms = {form: verb for verb in _verbs.split() for form in _forms_of(verb)}
    _BASE_FORMS |= _forms
    _FRAGMENTS[_name] = "(?:" + "|".join(sorted(_forms, key=len, reverse=True)) + ")"
for _name, _pattern in _RULES["fragments"].items():
    _FRAGMENTS[_name] = f"(?:{_expand(_pattern)})"
PATTERNS: Final = {name: _compile(pattern) for name, pattern in _RULES["patterns"].items()}
_MARKUP = [(_compile(pattern), text) for pattern, text in _RULES["markup"]]
_USER_WORDS = [(_compile(pattern), text) for pattern, text in _RULES["user_words"]]
_LEADS = [_compile(pattern) for pattern in _RULES["leads"]]
_UNUSABLE = _compile("|".join(_RULES["unusable"]))


def passages_of(text: str, name: str, is_about_use: bool = False) -> Iterator[Passage]:
    """Yield the parts of a text that make a request, each with its request.

    Args:
        text: Text of a skill.
        name: Name of the skill, which the requests do not hold.
        is_about_use: Whether all sentences say when the skill is used. "Creating slides" is a task
            there, while it may be a heading elsewhere.
    """
    for sentence in sentences_of(text):
        if PATTERNS["trigger_list"].match(sentence):
            continue
        expects_gerund = is_about_use or PATTERNS["about_use"].match(sentence) is not None
        for part in PATTERNS["part_end"].split(sentence):
            request = _request_of(part, name, expects_gerund)
            first_word = request.partition(" ")[0]
            # A list of imperatives is one request: "List events and cancel meetings".
            is_imperative = first_word != "" and part.lstrip(" -*•").startswith(first_word)
            if is_imperative and num_words(request) <= MAX_WORDS:
                passages: Iterable[Passage] = [Passage(part, request)]
            else:
                passages = _clause_passages(part, name, expects_gerund)
            for passage in passages:
                if MIN_WORDS <= num_words(passage.request) <= MAX_WORDS:
                    yield passage


def _clause_passages(part: str, name: str, expects_gerund: bool) -> Iterator[Passage]:
    """Yield the requests of the clauses in a part of a sentence.

    A request that is too short is joined with the next one: "Upload files and search messages".
    """
    previous = Passage("", "")
    separator = ""
    # The odd pieces are the separators of the clauses.
    for number, piece in enumerate(PATTERNS["clause_end"].split(part)):
        if number % 2 == 1:
            separator = piece
            continue
        clause = Passage(piece, _request_of(piece, name, expects_gerund))
        if clause.request and previous.request and num_words(previous.request) < MIN_WORDS:
            conjunction = separator if separator[0] in "，、" else " and "
            second = clause.request[0].lower() + clause.request[1:]
            text = previous.text + separator + piece
            clause = Passage(text, previous.request + conjunction + second)
        if clause.request:
            yield clause
        previous = clause


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences and lines."""
    return PATTERNS["sentence_end"].split(text)


def clauses_of(text: str) -> list[str]:
    """Split a text into sentences, these into parts, and parts into clauses."""
    clauses: list[str] = []
    for sentence in sentences_of(text):
        for part in PATTERNS["part_end"].split(sentence):
            clauses += PATTERNS["clause_end"].split(part)[::2]  # without the separators
    return clauses


def says_task(clause: str, name: str) -> bool:
    """Return whether a clause of a skill starts with a verb and its object, after a lead.

    Orders to the agent and requirements do not count ("Always search tools first").
    """
    if PATTERNS["order"].search(clause):
        return False
    text = _without_lead(clause, name)
    return any(_as_imperative(text, is_about_use) for is_about_use in (True, False))


def _request_of(clause: str, name: str, expects_gerund: bool) -> str:
    """Turn a clause into a request that does not name its skill. Empty: it makes none."""
    text = _as_imperative(_without_lead(clause, name), expects_gerund)
    for pattern, replacement in _USER_WORDS:
        text = pattern.sub(replacement, text)

    words = text.split()
    num_capitals = sum(word[0].isupper() for word in words)
    is_title = num_capitals >= 0.75 * len(words)
    if is_title or _UNUSABLE.search(text) or names_skill(text, name):
        return ""
    return text[0].upper() + text[1:]


def _without_lead(clause: str, name: str) -> str:
    """Return a clause on one line, without markup, its lead, and the name of its skill.

    The name is removed with its preposition ("in Slack"), before a noun ("Slack messages") and as a
    subject ("Slack sends messages"). Elsewhere a mark replaces it.
    """
    text = one_line(clause)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    if names_skill(text, name):
        text = PATTERNS["name_phrase"].sub("", without_name(text, name, _NAME))
    for lead in _LEADS:
        text = lead.sub("", text)
    return PATTERNS["name_before_noun"].sub("", text)


def _as_imperative(text: str, expects_gerund: bool) -> str:
    """Put the verbs of a clause into base form. Empty: the clause does not start with a verb.

    Args:
        text: Clause, without its lead.
        expects_gerund: Whether a verb that is not in base form must have the -ing form. After "Use
            when", other forms are nouns: "tests fail".
    """
    if PATTERNS["chinese_head"].match(text):
        return text
    head = PATTERNS["head"].match(text)
    if head is None or not PATTERNS["certain_verb"].match(text):
        return ""
    verb = (head[1] or head[2]).lower()
    base_form = _BASE_FORMS[verb]
    if verb == base_form:
        return text
    ending = "ing" if expects_gerund else "s"
    if not verb.endswith(ending):
        return ""

    def in_base_form(match: re.Match[str]) -> str:
        """Return a conjunction and its verb, in base form if the first verb has the same form."""
        form = match[2].lower()
        return match[1] + _BASE_FORMS[form] if form.endswith(ending) else match[0]

    return base_form + PATTERNS["coordinated_verb"].sub(in_base_form, text[len(verb) :])
