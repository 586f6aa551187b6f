"""Requests in imperative form, made from clauses that say what a skill does or when it is used.

"Use when the user wants to merge PDF files" and "This skill merges PDF files" both become "Merge
PDF files". The words and patterns are in requests.yaml. Texts in other languages than English and
Chinese make no request.
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from skilltrain.data.query_texts import names_skill, without_name
from skilltrain.texts import num_words, one_line

MIN_WORDS = 3  # of a request
MAX_WORDS = 30
_MIN_CLAUSE_CHARS = 6  # of a clause that makes a request
_MAX_CLAUSE_CHARS = 1_000  # of a clause that makes a request
_NAME = "\ue000"  # stands for the name of the skill in a text


class Passage(NamedTuple):
    """A part of a skill's text and the request that it makes."""

    text: str
    request: str


@cache
def _rules() -> dict[str, Any]:
    """Return the sections of requests.yaml."""
    file = files("skilltrain.data") / "requests.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@cache
def pattern(name: str) -> re.Pattern[str]:
    """Return one of the patterns of requests.yaml."""
    return _compile(_rules()["patterns"][name])


@cache
def _patterns(section: str) -> list[re.Pattern[str]]:
    """Return the patterns of a section of requests.yaml."""
    return [_compile(regex) for regex in _rules()[section]]


@cache
def _replacements(section: str) -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of a section of requests.yaml, each with the text that replaces it."""
    return [(_compile(regex), replacement) for regex, replacement in _rules()[section]]


def _compile(regex: str) -> re.Pattern[str]:
    """Compile a pattern of requests.yaml."""
    return re.compile(_expand(regex), re.I)


def _expand(regex: str) -> str:
    """Return a pattern on one line, with each `<NAME>` replaced by the words of this name.

    Example: "<WEAK_VERB>s" becomes a pattern of all verbs in the list WEAK_VERB, and an "s".
    """
    one_line_regex = "".join(regex.splitlines())
    return re.sub("<([A-Z_]+)>", lambda match: _fragment(match[1]), one_line_regex)


@cache
def _fragment(name: str) -> str:
    """Return a fragment of patterns, or a pattern that matches all forms of a list of verbs.

    Args:
        name: Name of a fragment or of a list of words in requests.yaml.
    """
    # NAME is a sign that stands for the name of the skill.
    if name == "NAME":
        return _NAME
    # A fragment may contain names of other fragments and lists.
    if name in _rules()["fragments"]:
        return f"(?:{_expand(_rules()['fragments'][name])})"
    verbs = [_forms_pattern(verb) for verb in _rules()["words"][name].split()]
    return f"(?:{'|'.join(verbs)})"


def _forms_pattern(verb: str) -> str:
    """Return a pattern of the base form, the third person and the -ing form of an English verb.

    Before "ing", the last letter may be doubled ("running"). For example, "make" becomes
    "mak(?:es?|ing)", which matches "make", "makes" and "making".
    """
    if verb.endswith("e"):
        return f"{verb[:-1]}(?:es?|ing)"
    if re.search("[^aeiou]y$", verb):
        return f"{verb[:-1]}(?:y|ies|ying)"
    return f"{verb}(?:e?s|{verb[-1]}?ing)?"


@cache
def _verbs() -> frozenset[str]:
    """Return all verbs of requests.yaml, in base form."""
    return frozenset(" ".join(_rules()["words"].values()).split())


def _base_form(form: str) -> str:
    """Return the base form of an English verb: "make" for "make", "makes" and "making"."""
    # Try all ways to remove an ending, and return the first result that is a verb. "making" may
    # come from "mak" or "make", and "running" from "runn", "runne" or "run".
    stem = form.removesuffix("ing")
    candidates = [form, form.removesuffix("s"), form.removesuffix("es")]
    candidates += [form.removesuffix("ies") + "y", stem, stem + "e", stem[:-1]]
    return next(candidate for candidate in candidates if candidate in _verbs())


def passages_of(text: str, name: str, is_about_use: bool = False) -> Iterator[Passage]:
    """Yield the parts of a text that make a request, each with its request.

    The part "creating slides from a report" makes the request "Create slides from a report".

    Args:
        text: Text of a skill.
        name: Name of the skill. A request that contains the name is not yielded.
        is_about_use: Whether all sentences say when the skill is used. "Creating slides" is a task
            there, while it may be a heading elsewhere.
    """
    for sentence in sentences_of(text):
        # Skip a list of key words, such as "Triggers: slides, deck".
        if pattern("trigger_list").match(sentence):
            continue
        # A sentence that starts with "Use when", for example, is about use as well.
        expects_gerund = is_about_use or pattern("about_use").match(sentence) is not None
        # Parts end at semicolons, colons, dashes and list numbers, and at "or" before a verb.
        for part in pattern("part_end").split(sentence):
            request = _request_of(part, name, expects_gerund)
            first_word = request.partition(" ")[0]
            # Split the part into clauses at its verbs, but keep a part that is an imperative and
            # not too long. "Read the log of a run and list its faults" is one request.
            is_imperative = first_word != "" and part.lstrip(" -*•").startswith(first_word)
            clauses = [part]
            if not is_imperative or num_words(request) > MAX_WORDS:
                clauses = pattern("clause_end").split(part)[::2]  # every second item is a separator
            for clause in clauses:
                request = _request_of(clause, name, expects_gerund)
                if MIN_WORDS <= num_words(request) <= MAX_WORDS:
                    yield Passage(clause, request)


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences and lines."""
    return pattern("sentence_end").split(text)


def clauses_of(text: str) -> list[str]:
    """Split a text into sentences, these into parts, and parts into clauses."""
    clauses: list[str] = []
    for sentence in sentences_of(text):
        for part in pattern("part_end").split(sentence):
            clauses += pattern("clause_end").split(part)[::2]  # without the separators
    return clauses


def says_task(clause: str, name: str) -> bool:
    """Return whether a clause of a skill starts with a verb and its object, after a lead.

    A lead is a start such as "Use when you want to". Orders to the agent and requirements do not
    count ("Always search tools first").

    Args:
        clause: The clause.
        name: Name of the skill.
    """
    if pattern("order").search(clause):
        return False
    # `head` matches an English verb and the start of its object, `chinese_head` a Chinese verb.
    text = _without_lead(clause, name)
    return any(pattern(head).match(text) for head in ("head", "chinese_head"))


def _request_of(clause: str, name: str, expects_gerund: bool) -> str:
    """Turn a clause into a request that does not name its skill.

    Args:
        clause: A clause from the text of a skill.
        name: Name of the skill.
        expects_gerund: Whether a verb that is not in base form must have the -ing form.

    Returns:
        The request; an empty text if the clause makes none.
    """
    # No request is this short or long. Some patterns would take long for a very long text.
    if not _MIN_CLAUSE_CHARS <= len(clause) <= _MAX_CLAUSE_CHARS:
        return ""
    text = _as_imperative(_without_lead(clause, name), expects_gerund)
    for regex, replacement in _replacements("changes"):
        text = regex.sub(replacement, text)

    # A text whose words mostly begin with a capital is a title, such as "Build System". An empty
    # text counts as a title too, so no request is made of it.
    words = text.split()
    num_capitals = sum(word[0].isupper() for word in words)
    is_title = num_capitals >= 0.75 * len(words)
    is_unusable = any(sign.search(text) for sign in _patterns("unusable"))
    if is_title or is_unusable or names_skill(text, name):
        return ""
    return text[0].upper() + text[1:]


def _without_lead(clause: str, name: str) -> str:
    """Return a clause on one line, without markup, its lead, and the name of its skill.

    The name is removed with its preposition ("in Slack") and as a subject ("Slack sends messages").
    Elsewhere the sign `_NAME` replaces it. Example: "Use this skill to merge PDF files." becomes
    "merge PDF files".

    Args:
        clause: The clause.
        name: Name of the skill.
    """
    text = one_line(clause)
    for regex, replacement in _replacements("markup"):
        text = regex.sub(replacement, text)
    if names_skill(text, name):
        text = pattern("name_phrase").sub("", without_name(text, name, _NAME))
    # Leads are starts of clauses that are no part of the request, in the order of their removal.
    for lead in _patterns("leads"):
        text = lead.sub("", text)
    return text


def _as_imperative(text: str, expects_gerund: bool) -> str:
    """Put the verbs of a clause into base form.

    "Creating slides and adding charts" becomes "create slides and add charts".

    Args:
        text: Clause without words that lead to the verb, such as "Use when".
        expects_gerund: Whether a verb that is not in base form must have the -ing form. After "Use
            when", other forms are nouns: "tests fail".

    Returns:
        The clause with its verbs in base form; an empty text if it does not start with a verb.
    """
    # Chinese verbs have only one form.
    if pattern("chinese_head").match(text):
        return text
    # `head` matches a verb and the start of its object. `certain_verb` matches only words that are
    # not also common nouns.
    head = pattern("head").match(text)
    if head is None or not pattern("certain_verb").match(text):
        return ""
    verb = (head[1] or head[2]).lower()  # group 2: a phrasal verb
    base_form = _base_form(verb)
    if verb == base_form:
        return text  # the clause is an imperative already

    # The verb must have the form that the clause expects: "creating" or "creates".
    ending = "ing" if expects_gerund else "s"
    if not verb.endswith(ending):
        return ""

    def in_base_form(match: re.Match[str]) -> str:
        """Return a conjunction and its verb, in base form if the first verb has the same form."""
        form = match[2].lower()  # group 1: the conjunction; group 2: its verb
        return match[1] + _base_form(form) if form.endswith(ending) else match[0]

    # Change the first verb, then the verbs after a comma or a conjunction.
    return base_form + pattern("coordinated_verb").sub(in_base_form, text[len(verb) :])
