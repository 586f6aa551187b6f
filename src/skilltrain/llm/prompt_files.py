"""Prompts: maps with the texts `system` and `user`, which are Jinja2 templates.

Notes:
    - Templates run in a sandbox, because the folder of a router may come from a stranger, and its
      settings may name a prompt.
    - Untrusted texts are values of a template, and Jinja2 never renders a value as a template.
    - A template shows values under conditions and in loops, without arithmetic, calls and variables
      of its own. So a value stays as long as it is, and the prompt has a largest length.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skilltrain.errors import SkilltrainError

_MAX_CHARS = 1_000_000  # of a message; more than the context of today's chat models
# Parts of a template that cannot make a value longer: names of classes of jinja2.nodes.
_ALLOWED_PARTS = frozenset(
    "Template Output TemplateData If For Name Const Getattr Getitem Slice CondExpr Filter Test "
    "Compare Operand And Or Not".split()
)
_ALLOWED_FILTERS = frozenset({"named", "trim", "lower", "upper", "length", "first", "last"})
_LANGUAGES = {"en": "English", "zh": "Chinese"}
_LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]{2,8}){0,2}")


def language_phrase(lang: str | None, text: str) -> str:
    """Return how a prompt names the language of a skill, such as "English".

    Args:
        lang: Field of the skill. It is untrusted, so it is used only if it is a language code.
        text: What is written in this language, such as "the material". Without a usable code, the
            result is "the language of the material".
    """
    if lang is None or not _LANGUAGE_CODE.fullmatch(lang):
        return f"the language of {text}"
    return _LANGUAGES.get(lang, f"the language with the code {lang}")


@cache
def _template(text: str) -> jinja2.Template:
    """Return the Jinja2 template in a text. A placeholder without a value is an error."""
    # The sandbox keeps a template of a stranger from running code.
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    # With this filter, a template writes a language in words: `{{ lang | named("the material") }}`
    # becomes "English" for the code `en`.
    environment.filters["named"] = language_phrase
    tree = environment.parse(text)
    # Refuse parts of the syntax that could use much memory or time, such as calls.
    _check_parts(tree)
    return environment.from_string(tree)


def _check_parts(tree: nodes.Template) -> None:
    """Raise TemplateSyntaxError if a parsed template could use much memory or time."""
    for node in tree.find_all(nodes.Node):
        part = type(node).__name__
        is_allowed = part in _ALLOWED_PARTS
        if isinstance(node, nodes.Filter):
            part = f"the filter {node.name}"
            is_allowed = node.name in _ALLOWED_FILTERS
        # Loops inside loops take a time that grows with each level.
        if isinstance(node, nodes.For) and node.find(nodes.For):
            part = "a loop inside a loop"
            is_allowed = False
        if not is_allowed:
            raise jinja2.TemplateSyntaxError(f"{part} is not allowed in a prompt", node.lineno)


def _render(text: str, values: Mapping[str, Any]) -> str:
    """Render a template. Raises SkilltrainError if the message gets too long."""
    parts = []
    num_chars = 0
    # `generate` yields the message piece by piece, so a long message is never in memory as a whole.
    for part in _template(text).generate(values):
        num_chars += len(part)
        if num_chars > _MAX_CHARS:
            problem = f"a message of the prompt has more than {_MAX_CHARS:,} characters"
            fix = "shorten the template, or lower query_chars, description_chars or body_chars"
            raise SkilltrainError("invalid-recipe", problem, fix=fix)
        parts.append(part)
    return "".join(parts)


def render_messages(texts: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[str, str]:
    """Render the system message and the user message of a prompt.

    For example, `Write a query for {{ name }}` becomes `Write a query for pdf-forms`.

    Args:
        texts: The prompt: two templates, under the keys `system` and `user`.
        values: Value of each placeholder by its name.

    Raises:
        SkilltrainError: A message is too long.
    """
    return _render(texts["system"], values), _render(texts["user"], values)


def check_prompt(
    texts: Mapping[str, Any],
    values: Mapping[str, Any],
    required: Mapping[str, str],
    where: str | Path,
) -> None:
    """Check that a prompt uses no unknown placeholder, and all that it needs.

    The check renders the prompt with example values, and looks for them in the messages.

    Args:
        texts: The prompt: two templates, under the keys `system` and `user`.
        values: An example value for each placeholder that a prompt may use.
        required: For each placeholder that the prompt must use, a text of its example value.
        where: The prompt, for the error.

    Raises:
        SkilltrainError: The prompt lacks a text, cannot be rendered or lacks a placeholder.
    """
    if not all(isinstance(texts.get(key), str) for key in ("system", "user")):
        problem = "a prompt has the keys system and user, each with a text"
        raise SkilltrainError("invalid-recipe", problem, where=where)
    fault = _placeholder_fault(texts, values, required)
    if fault:
        fix = f"the placeholders are {', '.join(values)}"
        raise SkilltrainError("invalid-recipe", f"the prompt {fault}", where=where, fix=fix)


def _placeholder_fault(
    texts: Mapping[str, Any], values: Mapping[str, Any], required: Mapping[str, str]
) -> str:
    """Return what is wrong with the placeholders of a prompt, or an empty text.

    Args:
        texts: The prompt: two templates, under the keys `system` and `user`.
        values: An example value for each placeholder that a prompt may use.
        required: For each placeholder that the prompt must use, a text that the messages contain if
            the prompt uses the placeholder. The text is a part of the example value.
    """
    # A wrong syntax or an unknown placeholder raises TemplateError. Other errors come from
    # expressions, such as {{ count[0] }}.
    try:
        messages = "\n".join(render_messages(texts, values))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return f"cannot be rendered: {error}"
    except SkilltrainError as error:
        return f"cannot be rendered: {error.problem}"
    # A placeholder was used if its example value is in the messages.
    for placeholder, text in required.items():
        if text not in messages:
            return f"does not use the placeholder {placeholder}"
    return ""
