"""Requests in imperative form, made from clauses that say what a skill does or when it is used.

"Use when the user wants to merge PDF files" and "This skill merges PDF files" both become "Merge
PDF files". The words and patterns are in requests.yaml. Texts in other languages than English and
Chinese make no request.

Notes:
- In a text about use, "Creating slides" is a task, while it may be a heading elsewhere. After "Use
  when", other forms than -ing are nouns: "tests fail".
- A list of imperatives is one request, if it is short.
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from skilltrain.data.query_texts import names_skill, without_name
from skilltrain.texts import num_words, one_line

MIN_WORDS = 4  # of a request
MAX_WORDS = 30
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
    """Return a pattern on one line, with each `<NAME>` replaced by the words of this name."""
    one_line_regex = "".join(regex.splitlines())
    return re.sub("<([A-Z_]+)>", lambda match: _fragment(match[1]), one_line_regex)


@cache
def _fragment(name: str) -> str:
    """Return a fragment of patterns, or a pattern that matches all forms of a list of verbs."""
    if name == "NAME":
        return _NAME
    if name in _rules()["fragments"]:
        return f"(?:{_expand(_rules()['fragments'][name])})"
    verbs = [_forms_pattern(verb) for verb in _rules()["words"][name].split()]
    return f"(?:{'|'.join(verbs)})"


def _forms_pattern(verb: str) -> str:
    """Return a pattern of the base form, the third person and the -ing form of an English verb.

    Before "ing", the last letter may be doubled ("running").
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
    stem = form.removesuffix("ing")
    candidates = [form, form.removesuffix("s"), form.removesuffix("es")]
    candidates += [form.removesuffix("ies") + "y", stem, stem + "e", stem[:-1]]
    return next(candidate for candidate in candidates if candidate in _verbs())


def passages_of(text: str, name: str, is_about_use: bool = False) -> Iterator[Passage]:
    """Yield the parts of a skill's text that make a request, each with its request.

    Args:
        name: Name of the skill.
        is_about_use: Whether all sentences say when the skill is used.
    """
    for sentence in sentences_of(text):
        if pattern("trigger_list").match(sentence):
            continue
        expects_gerund = is_about_use or pattern("about_use").match(sentence) is not None
        for part in pattern("part_end").split(sentence):
            clauses = [part]
            if not _is_one_request(part, name, expects_gerund):
                clauses = pattern("clause_end").split(part)[::2]  # without the separators
            for clause in clauses:
                request = _request_of(clause, name, expects_gerund)
                if MIN_WORDS <= num_words(request) <= MAX_WORDS:
                    yield Passage(clause, request)


def _is_one_request(part: str, name: str, expects_gerund: bool) -> bool:
    """Return whether a part is one request: "Read the log of a run and list its faults"."""
    request = _request_of(part, name, expects_gerund)
    first_word = request.partition(" ")[0]
    is_imperative = first_word != "" and part.lstrip(" -*•").startswith(first_word)
    return is_imperative and num_words(request) <= MAX_WORDS


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

    Orders to the agent and requirements do not count ("Always search tools first").
    """
    if pattern("order").search(clause):
        return False
    text = _without_lead(clause, name)
    return any(pattern(head).match(text) for head in ("head", "chinese_head"))


def _request_of(clause: str, name: str, expects_gerund: bool) -> str:
    """Turn a clause into a request that does not name its skill. Empty: it makes none."""
    text = _as_imperative(_without_lead(clause, name), expects_gerund)
    for regex, replacement in _replacements("changes"):
        text = regex.sub(replacement, text)

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
    Elsewhere a mark replaces it.
    """
    text = one_line(clause)
    for regex, replacement in _replacements("markup"):
        text = regex.sub(replacement, text)
    if names_skill(text, name):
        text = pattern("name_phrase").sub("", without_name(text, name, _NAME))
    for lead in _patterns("leads"):
        text = lead.sub("", text)
    return text


def _as_imperative(text: str, expects_gerund: bool) -> str:
    """Put the verbs of a clause into base form. Empty: the clause does not start with a verb.

    Args:
        expects_gerund: Whether a verb that is not in base form must have the -ing form.
    """
    if pattern("chinese_head").match(text):
        return text
    head = pattern("head").match(text)
    if head is None or not pattern("certain_verb").match(text):
        return ""
    verb = (head[1] or head[2]).lower()
    base_form = _base_form(verb)
    if verb == base_form:
        return text
    ending = "ing" if expects_gerund else "s"
    if not verb.endswith(ending):
        return ""

    def in_base_form(match: re.Match[str]) -> str:
        conjunction = match[1]
        form = match[2].lower()
        return conjunction + _base_form(form) if form.endswith(ending) else match[0]

    return base_form + pattern("coordinated_verb").sub(in_base_form, text[len(verb) :])
