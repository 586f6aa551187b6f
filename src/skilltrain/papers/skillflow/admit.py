"""A chat model that admits a few candidates, or none: SkillFlow's two filters (section A.6).

The filter "relevancy" judges all candidates in one answer. The filter "specificity" judges each
relevant candidate in an answer of its own. The prompts are our own, and a file may replace each of
them. Candidates are untrusted (llm/untrusted.py): an answer can only admit one of them.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import InputPath
from skilltrain.llm import LLM, AnswerError, Outcome, read_numbers
from skilltrain.llm.query_prompts import UNTRUSTED, Ask, Prompt
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.select import Chooser, ChoosingConfig, ask_on_first_rank

_RELEVANCY = f"""You decide which skills an AI agent is given for a task. A skill is a set of \
instructions that the agent reads before it works. You get one task and a numbered list of \
candidates, and say which of them are relevant: about the domain, the techniques, the files or the \
tools that this very task needs. Often only a few are, or none.
{UNTRUSTED}
Reply with a JSON list of the numbers of the relevant candidates, like [2, 5] or [], and with \
nothing else."""
_WHICH = (
    "Which of the candidates 1 to {count} are relevant to the task? "
    "Reply with a JSON list of numbers only."
)
_SPECIFICITY = f"""You decide whether a skill is worth the attention of an AI agent that works on \
a task. A skill is a set of instructions that the agent reads before it works. You get the task \
and one candidate.
{UNTRUSTED}
Say INJECT if it holds knowledge of this domain that would spare the agent real search and trial: \
commands, formats, interfaces, limits, pitfalls, working code. Say REJECT if it holds general \
method, check lists, or what a capable model knows or sees from the task's own files. Reply with \
INJECT or REJECT, and with nothing else."""
_IS_WORTH_IT = "Is candidate 1 worth it? Reply with INJECT or REJECT only."
_VERDICT = re.compile(r"\W*(inject|reject)\W*", re.I)  # with quotes or a full stop around it


def read_relevant(ask: Ask, answer: str) -> list[Skill]:
    """Return the skills whose numbers an answer lists. Raises AnswerError if it is no list."""
    numbers = read_numbers(answer, range(1, len(ask.choices) + 1))
    return [skill for number, skill in enumerate(ask.choices, 1) if number in numbers]


def read_verdict(ask: Ask, answer: str) -> bool:
    """Return whether an answer says INJECT. Raises AnswerError unless it says that or REJECT."""
    match = _VERDICT.fullmatch(answer)
    if match is None:
        raise AnswerError("no_verdict", "it was neither INJECT nor REJECT")
    return match[1].lower() == "inject"


class AdmitConfig(ChoosingConfig):
    """A chat model that admits the relevant candidates, and drops all others."""

    kind: Literal["admit"] = "admit"
    keep: int = Field(
        default=10, ge=1, description="number of candidates that it sees; the others are dropped"
    )
    most: int = Field(
        default=5, ge=1, description="largest number of skills that it admits; it may admit none"
    )
    specificity: bool = Field(
        default=False, description="a second filter drops relevant skills that tell nothing new"
    )
    specificity_prompt: InputPath | None = Field(
        default=None,
        description="YAML file with the prompt of this filter, which sees one skill; null: ours",
    )
    body_chars: int | None = Field(
        default=16_000, ge=0, description="characters of a body that it sees; null: it sees no body"
    )
    default_prompt = Prompt(_RELEVANCY, _WHICH, read_relevant, 12, "relevancy")
    min_candidates = 1

    def check(self) -> None:
        """Raise SkilltrainError if the chat model or the file of a prompt cannot be used."""
        super().check()
        self.read_prompt_file(self.specificity_prompt)

    def open(self, opened: dict[str, Any]) -> "Admit":
        return Admit(self, {})


_SPECIFICITY_PROMPT = Prompt(_SPECIFICITY, _IS_WORTH_IT, read_verdict, 12, "specificity")


class Admit(Chooser):
    """A chat model that admits candidates. `counts` also counts what each filter accepted."""

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the admitted candidates among the first `keep` of each query.

        The first filter, relevancy, judges all candidates of a query. The second, specificity,
        judges each relevant candidate. If the model is down, or the first answer for a query is not
        usable, the first candidates of the query are admitted, with a warning.
        """
        assert candidates is not None, "a chat model needs candidates"
        llm = LLM(self.config.llm)  # one for both filters, because it counts the budget
        relevancy = self.ask_model(llm, queries, candidates, keep)
        admitted_ids = self._filter_by_specificity(llm, relevancy)
        rankings = {}
        for query in queries:
            query_id = query.query_id
            ranking = candidates[query_id][:keep]
            # Without a usable answer for the query, its first candidates are admitted.
            if query_id in admitted_ids:
                allowed_ids = admitted_ids[query_id]
                ranking = [candidate for candidate in ranking if candidate[0] in allowed_ids]
            rankings[query_id] = ranking[: self.config.most]  # largest number of admitted skills
        return rankings

    def _filter_by_specificity(
        self, llm: LLM, relevancy: Outcome[Ask, list[Skill]]
    ) -> dict[str, set[str]]:
        """Ask the chat model about each relevant skill, and drop those that are not specific.

        A specific skill saves the agent from searching and from trial and error. Other skills hold
        only general methods.

        A relevant skill without a usable answer is admitted. `self.counts` gets two numbers for
        each filter: the skills that it accepted, and the skills that it judged.

        Args:
            llm: The chat model.
            relevancy: Answers of the first filter: each question with the skills that it found
                relevant. Queries without a usable answer are left out.

        Returns:
            Ids of the admitted skills by query id.
        """
        asks = []  # a question for each relevant skill
        admitted_ids = {}  # skill ids by query id; at first all relevant skills
        for item, skills in relevancy.values:
            for skill in skills:
                asks.append(self.config.make_ask(item.query, [skill], skill_id=skill.skill_id))
            admitted_ids[item.query_id] = {skill.skill_id for skill in skills}
        # Counts of the first filter, relevancy. `choices` holds the skills that it judged.
        num_relevant = len(asks)
        num_judged = sum(len(item.choices) for item, _ in relevancy.values)

        # If the settings leave this filter out, drop all questions. The filter's counts are then 0.
        if not self.config.specificity:
            asks = []
        file = self.config.specificity_prompt
        questions = self.config.questions_with(llm, asks, _SPECIFICITY_PROMPT, file)
        # If the server is down, questions have no answer, and the stage goes on.
        specificity = ask_on_first_rank(questions)
        for item, is_specific in specificity.values:
            # Skills without a usable answer are not among the values, so they stay admitted.
            if not is_specific:
                admitted_ids[item.query_id].remove(item.skill_id)

        # Count the accepted and the judged skills of each filter.
        num_specific = sum(is_specific for _, is_specific in specificity.values)
        # Both filters use `llm`, so its counts of tokens and dollars include the first filter.
        self.counts |= specificity.used
        self.counts["accepted"] = {
            "relevancy": (num_relevant, num_judged),
            "specificity": (num_specific, len(specificity.values)),
        }
        return admitted_ids
