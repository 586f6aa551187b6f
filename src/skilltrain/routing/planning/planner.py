"""Plans for compound tasks: decompose, retrieve, compose (SkillWeaver)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.screening import Flag
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, cost_of, open_llm
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Query, Ranking, Skill
from skilltrain.routing.planning.compose import ComposeConfig, Plan, compose
from skilltrain.routing.planning.decompose import (
    STEPS,
    DecomposerConfig,
    DirectConfig,
    Drafts,
    ReactConfig,
    StepsConfig,
    asks_of,
    draft_by_model,
    draft_by_searching,
    questions_of,
)
from skilltrain.routing.planning.hints import Find, HintsConfig, Round, described, hint_lines, refine
from skilltrain.routing.planning.rules import RulesConfig, WholeConfig, draft_by_rules, draft_without_model
from skilltrain.routing.router import Router

MAX_STEPS = RulesConfig().max_steps


class PlannerConfig(Config):
    """One way to plan."""

    name: str = Field(default="plan", min_length=1, description="what tables call it")
    decomposer: DecomposerConfig = Field(default=RulesConfig(), description="what cuts a task into steps")
    hints: HintsConfig = Field(default=HintsConfig(), description="what is found goes back to the model (kind llm)")
    compose: ComposeConfig = Field(default=ComposeConfig(), description="how a skill is chosen for each step")


@dataclass(frozen=True)
class Known:
    """What a benchmark knows of tasks and may tell a planner: query_id → number of steps, and → gold skills."""

    counts: Mapping[str, int] = field(default_factory=dict)
    gold: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Planner:
    """Plans over the pool `skills`, in which `find` finds.

    `lenient`: where the model cannot be asked at all, rules plan and a note says so; else that is an error.
    """

    config: PlannerConfig
    skills: Mapping[str, Skill]
    find: Find
    known: Known = Known()
    lenient: bool = False

    def plan(self, tasks: Sequence[Query]) -> list[Plan]:
        """One plan for each task, in order; where a model's answers are of no use, by rules, with a note."""
        notes: dict[str, str] = {}
        try:
            rounds = self._rounds(tasks, notes)
        except SkilltrainError as error:
            if not self.lenient or isinstance(self.config.decomposer, RulesConfig | WholeConfig):
                raise
            rounds = {}
            notes = {task.query_id: f"planned by rules, for the model cannot be asked: {error}" for task in tasks}
        by_rules = {task.query_id: draft_by_rules(task.text, MAX_STEPS) for task in tasks}
        rounds = {query_id: rounds.get(query_id, (Round(draft),)) for query_id, draft in by_rules.items()}
        texts = [text for own in rounds.values() for text in own[-1].draft.texts]
        found = iter(self.find(texts, self.config.compose.candidates))
        plans: list[Plan] = []
        for task in tasks:
            own = rounds[task.query_id]
            rankings = [next(found) for _ in own[-1].draft.texts]
            steps = compose(task, own, rankings, self.skills, self.config.compose)
            told = (notes[task.query_id],) if task.query_id in notes else ()
            plans.append(Plan(task, steps, own, "rules" if told else self.config.decomposer.kind, told))
        return plans

    def _rounds(self, tasks: Sequence[Query], notes: dict[str, str]) -> dict[str, tuple[Round, ...]]:
        """query_id → the rounds of those tasks that the decomposer has steps for; `notes` say why others have none."""
        decomposer, hints = self.config.decomposer, self.config.hints
        if isinstance(decomposer, RulesConfig | WholeConfig):
            drafts, dropped = {task.query_id: draft_without_model(decomposer, task.text) for task in tasks}, []
        elif isinstance(decomposer, StepsConfig):
            drafts, dropped = self._written(decomposer, tasks, {})
        elif isinstance(decomposer, ReactConfig):
            look = partial(self._look, decomposer.shown)
            drafts, dropped = draft_by_searching(decomposer, self._llm, asks_of(tasks, {}, {}), look)
        else:
            lists = self._lists(decomposer, tasks)
            names = {one: [untrusted_line(self.skills[i].name) for i in ids] for one, ids in lists.items()}
            shown = {one: [f"{place}. {name}" for place, name in enumerate(own, 1)] for one, own in names.items()}
            drafts, dropped = draft_by_model(decomposer, self._llm, asks_of(tasks, shown, {}), lists)
        for fault in dropped:
            notes[fault.query_id] = f"planned by rules, for no answer of the model was usable: {fault.reason}"
        for task in tasks:
            if task.query_id not in drafts:
                notes.setdefault(task.query_id, "planned by rules, for the model looked for nothing")
        if isinstance(decomposer, StepsConfig) and hints.rounds:
            return refine(
                hints, tasks, drafts, lambda some, known: self._written(decomposer, some, known)[0], self.find
            )
        return {query_id: (Round(draft),) for query_id, draft in drafts.items()}

    @cached_property
    def _llm(self) -> LLM:
        """The model, opened once, for it keeps to one budget."""
        assert not isinstance(self.config.decomposer, RulesConfig | WholeConfig), "rules ask no model"
        return open_llm(self.config.decomposer.llm)

    def _written(self, decomposer: StepsConfig, tasks: Sequence[Query], hints: Mapping[str, Sequence[str]]) -> Drafts:
        """The model's steps, with `hints` (query_id → skill ids) where there are some."""
        shown = {one: hint_lines(self.config.hints, ids, self.skills) for one, ids in hints.items()}
        counts = self.known.counts if decomposer.true_count else {}
        return draft_by_model(decomposer, self._llm, asks_of(tasks, shown, counts), {})

    def _look(self, shown: int, searches: Sequence[str]) -> list[list[str]]:
        """What each search of ReAct finds, in lines."""
        found = self.find(searches, shown) if searches else []
        return [[described(self.skills[skill_id], 140) for skill_id, _ in ranking] for ranking in found]

    def _lists(self, decomposer: DirectConfig, tasks: Sequence[Query]) -> dict[str, list[str]]:
        """query_id → the skills that LLM-Direct chooses from, gold ones among them, in order of id: no place tells."""
        lists: dict[str, list[str]] = {}
        for task, ranking in zip(tasks, self.find([task.text for task in tasks], decomposer.shown), strict=True):
            both = dict.fromkeys([*self.known.gold.get(task.query_id, ()), *(skill_id for skill_id, _ in ranking)])
            lists[task.query_id] = sorted([*both][: decomposer.shown])
        return lists


def plan_cost(config: PlannerConfig, tasks: Sequence[Query]) -> dict[str, Any]:
    """About what the first request for each task will take, said in one line too; asks nobody. {} without a model."""
    decomposer = config.decomposer
    if isinstance(decomposer, RulesConfig | WholeConfig):
        return {}
    llm = open_llm(decomposer.llm)
    return cost_of(questions_of(decomposer, llm, asks_of(tasks, {}, {}), STEPS, lambda ask, answer: answer))


def task_query(text: str) -> Query:
    """One task of a user. Raises SkilltrainError for an empty one."""
    if not text.strip():
        raise SkilltrainError("the task is empty")
    return Query("task", text, kind="multi", origin="", split="")


def plan_task(config: PlannerConfig, text: str, router: Router) -> tuple[Plan, dict[str, tuple[Flag, ...]]]:
    """(the plan for one task, what the safety screening found in the skills that are chosen).

    Where the chat model cannot be asked, rules plan, and a note says so. A step that the router's calibration finds no
    skill for has none.
    """
    flags: dict[str, tuple[Flag, ...]] = {}

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        answers = [router.route(one, keep) for one in texts]
        flags.update({routed.skill_id: routed.flags for answer in answers for routed in answer.skills if routed.flags})
        return [[(one.skill_id, one.score) for one in answer.skills if answer.fits] for answer in answers]

    (plan,) = Planner(config, router.skills, find, lenient=True).plan([task_query(text)])
    return plan, {step.skill_id: flags[step.skill_id] for step in plan.steps if step.skill_id in flags}
