"""A chat model that admits skills to a task, a few or none, by two filters (SkillFlow, section A.6).

Relevancy: is a candidate about what the task needs? All of a query's candidates are judged in one answer. Specificity:
does a relevant skill tell what the agent would not know by itself? Each is judged alone. The prompts are our own; for
candidates that try to steer the model see select.py: the worst that one can do is to be admitted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from pydantic import Field

from skilltrain.llm import LLM, Questions, Request, ask_while_up, cost_of, open_llm, read_list
from skilltrain.llm.untrusted import untrusted_text
from skilltrain.records import Dropped, Query, Rankings, Skill
from skilltrain.retrieval.select import UNTRUSTED, Choice, ShowConfig, random_choices, shown_request

RELEVANCY = f"""You decide which skills an AI agent is given for a task. A skill is a set of instructions that the \
agent reads before it works. You get one task and a numbered list of candidates, and say which of them are relevant: \
about the domain, the techniques, the files or the tools that this very task needs. Often only a few are, or none.
{UNTRUSTED}
Reply with a JSON list of the numbers of the relevant candidates, like [2, 5] or [], and with nothing else."""
WHICH = "Which of the candidates 1 to {count} are relevant to the task? Reply with a JSON list of numbers only."
SPECIFICITY = f"""You decide whether a skill is worth the attention of an AI agent that works on a task. A skill is a \
set of instructions that the agent reads before it works. You get the task and one candidate.
{UNTRUSTED}
Say INJECT if it holds knowledge of this domain that would spare the agent real search and trial: commands, formats, \
interfaces, limits, pitfalls, working code. Say REJECT if it holds general method, check lists, or what a capable \
model knows or sees from the task's own files. Reply with INJECT or REJECT, and with nothing else."""
WORTH = "Is candidate 1 worth it? Reply with INJECT or REJECT only."
AGAIN = " An earlier reply could not be used: nothing but what is asked for."
_VERDICT = re.compile(r"\W*(inject|reject)\W*", re.I)


class AdmitConfig(ShowConfig):
    """A chat model that admits the relevant candidates, and drops all others."""

    kind: Literal["admit"] = "admit"
    keep: int = Field(default=10, ge=1, description="candidates that it sees; the others are dropped")
    most: int = Field(default=5, ge=1, description="skills that it admits at most; it may admit none")
    specificity: bool = Field(default=False, description="a second filter: relevant skills that tell nothing new go")
    body_chars: int = Field(default=16_000, ge=0, description="how much of a body")

    def open(self, skills: Sequence[Skill]) -> "Admit":
        """The model ready to judge."""
        return Admit(self, {skill.skill_id: skill for skill in skills})

    def asks(self, queries: Sequence[Query], skills: Sequence[Skill]) -> Questions[Choice, Any]:
        """What the first filter asks, about random skills; the second asks once more for each relevant one."""
        return _questions(self, open_llm(self.llm), "relevancy", random_choices(self.keep, queries, skills))


@dataclass
class Admit:
    """A chat model at work. `counts` says how the last `rank` went: (accepted, seen) of each filter, faults, cost."""

    config: AdmitConfig
    skills: Mapping[str, Skill]
    counts: dict[str, Any] = field(default_factory=dict)

    def over(self, skills: Mapping[str, Skill]) -> "Admit":
        """The same model over another pool."""
        return replace(self, skills=skills, counts={})

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The admitted candidates of each query, in their order and with their scores.

        Where the model is down or gives no usable list, the first `most` candidates stand as they are; where it gives
        no verdict on a relevant skill, that is admitted.
        """
        assert candidates is not None, "a chat model needs candidates"
        seen = {query.query_id: candidates[query.query_id][:keep] for query in queries}
        shown = [tuple(self.skills[skill_id] for skill_id, _ in row) for row in seen.values()]
        choices = [Choice(query.query_id, query.text, row) for query, row in zip(queries, shown, strict=True) if row]
        first = _questions(self.config, open_llm(self.config.llm), "relevancy", choices)
        cost_of(first)
        relevant = ask_while_up(first)
        found = [(one, skill) for one, skills in relevant.values for skill in skills]
        alone = [Choice(one.query_id, one.text, (skill,), skill.skill_id) for one, skill in found]
        again = alone if self.config.specificity else []
        second = ask_while_up(_questions(self.config, first.llm, "specificity", again))
        refused = {(one.query_id, one.skill_id) for one, is_worth_it in second.values if not is_worth_it}
        admitted = {(one.query_id, one.skill_id) for one in alone} - refused
        judged = {one.query_id: len(one.shown) for one, _ in relevant.values}
        self.counts = relevant.counts() | second.used
        self.counts["accepted"] = {
            "relevancy": (len(alone), sum(judged.values())),
            "specificity": (len(second.values) - len(refused), len(second.values)),
        }
        rankings: Rankings = {}
        for query_id, row in seen.items():
            kept = [pair for pair in row if query_id not in judged or (query_id, pair[0]) in admitted]
            rankings[query_id] = kept[: self.config.most]
        return rankings


def _questions(config: AdmitConfig, llm: LLM, which: str, choices: Sequence[Choice]) -> Questions[Choice, Any]:
    check = read_relevant if which == "relevancy" else read_verdict
    return Questions(llm, choices, partial(_request, config, which), check, config.max_retries + 1, 12, which)


def _request(config: AdmitConfig, which: str, choice: Choice, attempt: int, fault: Dropped | None) -> Request:
    system, question = (RELEVANCY, WHICH) if which == "relevancy" else (SPECIFICITY, WORTH)
    question = (question + AGAIN if fault else question).format(count=len(choice.shown))
    return shown_request(config, choice, system, question, attempt)


def read_relevant(choice: Choice, answer: str) -> list[Skill] | Dropped:
    """The skills whose numbers an answer lists, in the order of the candidates; or why it is no such list."""
    numbers = read_list(answer)
    if numbers is None or any(type(one) is not int or not 1 <= one <= len(choice.shown) for one in numbers):
        reason = f"not a list of numbers from 1 to {len(choice.shown)}: {untrusted_text(answer, 80)!r}"
        return Dropped(choice.query_id, "", "no_list", reason)
    return [skill for number, skill in enumerate(choice.shown, 1) if number in numbers]


def read_verdict(choice: Choice, answer: str) -> bool | Dropped:
    """Whether an answer says INJECT; or why it says neither that nor REJECT."""
    if found := _VERDICT.fullmatch(answer):
        return found[1].lower() == "inject"
    reason = f"neither INJECT nor REJECT: {untrusted_text(answer, 80)!r}"
    return Dropped(choice.query_id, choice.skill_id, "no_verdict", reason)
