"""Is an answer a query? Its text, or the reason why it is turned down."""

import re
from dataclasses import dataclass

from skilltrain.data.synthesis.name_leak import names_skill
from skilltrain.data.synthesis.skill_phrases import num_words
from skilltrain.llm import Answer, CompletionError

# Faults that another answer would have again: asking for one is useless, or not to be paid for.
LASTING = ("failed", "expired", "budget")

_REFUSAL = re.compile(
    r"(?:i['’]?m sorry|sorry,? (?:but )?i|i (?:can ?not|can['’]t|am unable to|won['’]t) (?:assist|help with"
    r"|comply|fulfil|write|create|generate|provide)"
    r"|as an ai\b|很?抱歉|对不起|我(?:无法|不能)(?:协助|提供|帮助|生成|满足))", re.I)  # fmt: skip
_LABEL = re.compile(r"^(?:(?:user )?(?:request|query|task)(?: \d+)?|请求|用户请求)\s*[:：]\s*", re.I)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an answer is no query: a DROPPED row in the making."""

    filter: str
    reason: str
    value: float | None = None


def check_answer(answer: Answer, name: str, max_words: int, exempt: frozenset[str]) -> str | Fault:
    """The answer's text as a query for the skill of this name, or why it is none."""
    if isinstance(answer, CompletionError):
        return Fault(answer.kind, answer.reason)
    text = _LABEL.sub("", " ".join(answer.text.strip().strip("`").split()))
    if len(text) > 1 and text[0] + text[-1] in ('""', "“”", "「」", "''"):
        text = text[1:-1].strip()
    length = num_words(text)
    if answer.finish_reason == "refusal" or _REFUSAL.match(text):
        return Fault("refused", "the model declined to write it")
    if not length:
        return Fault("empty", "there was no text in it")
    if answer.finish_reason == "length":
        return Fault("truncated", "it was cut off at the longest answer allowed", length)
    if length > max_words:
        return Fault("too_long", f"it had {length} words, more than {max_words}", length)
    if names_skill(text, name, exempt):
        return Fault("name_leak", "it named the capability")
    return text
