"""A chat model that puts the best candidate first: SkillRouter's protocol (appendix C).

The default prompt is our own; a file may hold that of the paper. Candidates are untrusted
(llm/untrusted.py), and an answer can only move one of them to the front. A candidate that praises
itself may still win. Screening finds skills that give orders to the reader (rule router_order).
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from skilltrain.distributed import made_by_first_rank
from skilltrain.llm import (
    LLM,
    AnswerError,
    LLMConfig,
    Outcome,
    Questions,
    ask_all,
    estimate_cost,
)
from skilltrain.llm.query_prompts import (
    UNTRUSTED,
    Ask,
    Prompt,
    PromptExample,
    PromptFileConfig,
)
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill, untrusted_text
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.rankers import RankerConfig
from skilltrain.terminal import say

_BEST = f"""You choose skills for an AI agent. A skill is a set of instructions that the agent \
reads before it works on a task. You get one task and a numbered list of candidate skills, and say \
which one candidate would do most to get this task solved.
{UNTRUSTED}
Compare what the candidates enable an agent to do; a name that sounds right is not enough.
Reply with the number of that candidate in digits, and with nothing else."""
_WHICH_ONE = (
    "Which one of the candidates 1 to {count} serves the task best? Reply with its number only."
)
_NUMBER = re.compile(
    r"(?:(?:the )?(?:best |most relevant )?(?:answer|skill|candidate|number|option)(?: is)?:?\s*"
    r"(?:number |no\. ?)?)?"
    r"[#\[(]?\s*(\d{1,9})\s*[\])]?\s*[.。]?",
    re.I,
)


def read_choice(ask: Ask, answer: str) -> str:
    """Return the id of the skill whose number an answer names. Raises AnswerError if it names none.

    `3`, `[3]`, `3.`, `**3**`, `Skill 3` and `The best candidate is: 3` name one; `3 or 4`, `not 3`
    and `3.5` do not.
    """
    # Models often put the number in quotes or in Markdown marks.
    match = _NUMBER.fullmatch(answer.strip(" \t\r\n*_`\"'“”"))
    if match is None or not 1 <= int(match[1]) <= len(ask.choices):
        raise AnswerError("no_number", f"it was not one number from 1 to {len(ask.choices)}")
    return ask.choices[int(match[1]) - 1].skill_id


class AskingConfig(PromptFileConfig, RankerConfig):
    """A ranker that asks a chat model."""

    is_remote = True
    asks_chat_model = True
    can_be_leg = False
    can_be_expanded = False
    can_be_interleaved = False

    @property
    def server(self) -> LLMConfig:
        return self.llm

    def asks(self, queries: Sequence[Query], skills: Sequence[Skill]) -> Questions[Ask, Any]:
        """Return the first questions of `rank`. The cost is estimated from them."""
        raise NotImplementedError

    def dry_run(self, queries: Sequence[Query], skills: Sequence[Skill]) -> dict[str, Any]:
        return estimate_cost(self.asks(queries, skills))


def ask_on_first_rank(questions: Questions[Ask, Any]) -> Outcome[Ask, Any]:
    """Ask a chat model on the first rank of a launched run, and return its answers on all ranks.

    If no request can succeed, every item is dropped with the reason "down".
    """
    return made_by_first_rank(lambda: ask_all(questions, drop_if_down=True))


_EXAMPLE_SKILL = {"name": "(name)", "description": "(description)", "body": "(body)"}


class ChoosingConfig(AskingConfig):
    """A chat model that chooses among the candidates of the ranker before it."""

    description_chars: int = Field(default=500, ge=0, description="how much of a description")
    body_chars: int | None = Field(
        default=2000, ge=0, description="how much of a body; null: it sees no body"
    )
    keep: int
    default_prompt: ClassVar[Prompt]
    min_candidates: ClassVar[int]  # with fewer there is nothing to ask
    only_orders = True
    gives_scores = False
    prompt_examples = (
        PromptExample(
            values={"query": "(query)", "skills": [_EXAMPLE_SKILL]},
            required={"query": "(query)", "skills": "(name)"},
        ),
    )

    @property
    def num_read(self) -> int:
        return self.keep

    def asks(self, queries: Sequence[Query], skills: Sequence[Skill]) -> Questions[Ask, Any]:
        """Return the first questions. They show random skills, as the candidates are not known.

        Only the length of these questions matters, because the cost is estimated from them.

        Args:
            queries: Queries to ask about.
            skills: The pool.
        """
        rng = random.Random(0)
        num_candidates = min(self.keep, len(skills))
        # With too few candidates there is nothing to choose, so nothing is asked.
        if num_candidates < self.min_candidates:
            queries = ()
        items = [self.make_ask(query, rng.sample(skills, num_candidates)) for query in queries]
        return self.questions(LLM(self.llm), items)

    def questions(self, llm: LLM, asks: Sequence[Ask]) -> Questions[Ask, Any]:
        """Return the questions of the prompt, from its file if there is one."""
        return self.questions_with(llm, asks, self.default_prompt, self.prompt)

    def prompt_values(self, ask: Ask) -> Mapping[str, Any]:
        """Return the query and its candidates, each with name, description and body."""
        skills = []
        for skill in ask.choices:
            description = untrusted_line(skill.description, self.description_chars)
            # Without `body_chars` the model sees no body.
            body = untrusted_text(skill.body, self.body_chars or 0)
            name = untrusted_line(skill.name)
            skills.append({"name": name, "description": description, "body": body})
        return {"query": untrusted_text(ask.query.text, self.query_chars), "skills": skills}

    def make_ask(self, query: Query, skills: Sequence[Skill], skill_id: str = "") -> Ask:
        """Return what the model sees of a query and its candidates.

        Args:
            query: The query.
            skills: The candidates. The model sees their texts, cut to the limits of the settings.
            skill_id: The candidate that is judged alone. Empty: the model chooses among all.
        """
        texts = [
            untrusted_skill(skill, self.description_chars, self.body_chars) for skill in skills
        ]
        # Pairs of title and text: ("candidate 1", "Name: ...").
        candidates = tuple((f"candidate {number}", text) for number, text in enumerate(texts, 1))
        return Ask(query, candidates, tuple(skills), skill_id)


class SelectConfig(ChoosingConfig):
    """A chat model that puts one of the candidates first."""

    kind: Literal["select"] = "select"
    keep: int = Field(
        default=20, ge=1, description="candidates that it sees; the others stay behind these"
    )
    default_prompt = Prompt(_BEST, _WHICH_ONE, read_choice, 4, "choosing")
    min_candidates = 2

    def open(self, opened: dict[str, Any]) -> "Select":
        return Select(self, {})


@dataclass
class Chooser:
    """A chat model over a pool.

    Attributes:
        config: Settings, of a subclass of `ChoosingConfig`.
        skills: The pool.
        counts: Queries asked, faults and cost of the last call of `rank`.
    """

    config: Any
    skills: Mapping[str, Skill]
    counts: dict[str, Any] = field(default_factory=dict)

    def over(self, skills: Mapping[str, Skill]) -> Self:
        return replace(self, skills=skills, counts={})

    def ask_model(
        self, llm: LLM, queries: Sequence[Query], candidates: Rankings, keep: int
    ) -> Outcome[Ask, Any]:
        """Ask the chat model about the first `keep` candidates of each query.

        Queries with too few candidates are not asked about.

        Args:
            llm: The chat model.
            queries: Queries to ask about.
            candidates: Ranking of the previous ranker by query id.
            keep: Number of candidates that the model sees.

        Returns:
            The usable answers. A warning says how many queries have no usable answer.
        """
        config = self.config
        asks = []  # one for each query with enough candidates
        for query in queries:
            skills = [self.skills[skill_id] for skill_id, _ in candidates[query.query_id][:keep]]
            if len(skills) >= config.min_candidates:
                asks.append(config.make_ask(query, skills))

        questions = config.questions(llm, asks)
        if asks:
            estimate_cost(questions)  # prints the cost
        # If the server is down, no query gets an answer, and a warning says so.
        outcome = ask_on_first_rank(questions)
        self.counts = outcome.counts()
        num_unusable = len(outcome.dropped)
        if num_unusable:
            reasons = self.counts["unusable"].items()
            details = ", ".join(f"{count} {reason}" for reason, count in reasons)
            share = f"{num_unusable} of {len(asks)}"
            say(f"{questions.description}: no usable answer for {share}: {details}")
        return outcome


class Select(Chooser):
    """A chat model that puts one of the candidates first."""

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Put the chosen candidate first. The score of a skill is minus its rank.

        If the model is down, or an answer is not usable, the order stays, with a warning.

        Args:
            queries: Queries with distinct ids.
            candidates: Ranking of the previous ranker by query id.
            keep: Number of candidates that the model sees.
        """
        assert candidates is not None, "a chat model needs candidates"
        outcome = self.ask_model(LLM(self.config.llm), queries, candidates, keep)
        # Id of the chosen skill by query id, for queries with a usable answer.
        chosen_ids = {item.query_id: skill_id for item, skill_id in outcome.values}
        rankings = {}
        for query in queries:
            query_id = query.query_id
            skill_ids = [skill_id for skill_id, _ in candidates[query_id]]
            if query_id in chosen_ids:
                # The chosen skill is now in the list twice, and its first place counts.
                skill_ids.insert(0, chosen_ids[query_id])
            ranked = enumerate(dict.fromkeys(skill_ids), 1)  # each skill once
            rankings[query_id] = [(skill_id, -float(rank)) for rank, skill_id in ranked]
        return rankings
