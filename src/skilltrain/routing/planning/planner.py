"""Plans for compound tasks: decompose, retrieve, compose; with a chat model, again with hints (SkillWeaver, section 4).

Skill-Aware Decomposition gives what was found for the steps back to the model. A round is a set of steps, the hints
found for them, and how much these are the hints of the round before (Jaccard). The paper stops above .6, which its own
rounds (.32, .47, .52) never reach: there, the number of rounds is what stops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.screening import Flag
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.llm import LLM, open_llm
from skilltrain.llm.ask import ask_until, cost_of
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Dropped, Query, Ranking, Skill
from skilltrain.retrieval.select import Ask
from skilltrain.routing.planning.compose import ComposeConfig, Plan, Round, compose
from skilltrain.routing.planning.decompose import (
    DirectConfig,
    ModelConfig,
    ReactConfig,
    StepsConfig,
    planning_questions,
)
from skilltrain.routing.planning.rules import Draft, RulesConfig, WholeConfig, draft_by_rules
from skilltrain.routing.router import Router
from skilltrain.texts import one_line

Find = Callable[[Sequence[str], int], list[Ranking]]
"""(texts, how many) → the skills that are found for each text."""
Drafts = tuple[dict[str, Draft], list[Dropped]]
"""(query_id → its steps, why other tasks have none)."""


class HintsConfig(Config):
    """Hints for a chat model that writes steps; other decomposers take none."""

    count: int = Field(default=15, ge=1, description="skills named to the model (H)")
    rounds: int = Field(default=1, ge=0, description="how often it plans anew at most (T); 0: without hints")
    stop_above: float = Field(default=0.6, ge=0, le=1, description="Jaccard of two rounds' hints that ends it (tau)")
    show: Literal["names", "described"] = Field(default="names", description="what the model sees of a hint")
    description_chars: int = Field(default=140, ge=1, description="how much of a description, where it is shown")


class PlannerConfig(Config):
    """One way to plan."""

    name: str = Field(default="plan", min_length=1, description="what tables call it")
    decomposer: Annotated[
        RulesConfig | WholeConfig | StepsConfig | DirectConfig | ReactConfig, Field(discriminator="kind")
    ] = Field(default=RulesConfig(), description="what cuts a task into steps")
    hints: HintsConfig = Field(default=HintsConfig(), description="what is found goes back to the model (kind llm)")
    compose: ComposeConfig = Field(default=ComposeConfig(), description="how a skill is chosen for each step")


@dataclass(frozen=True)
class Planner:
    """Plans over the pool `skills`, in which `find` finds.

    `known` are a benchmark's tasks by query_id, of which a planner may be told gold skills and the number of steps.
    `lenient`: where the model cannot be asked at all, rules plan and a note says so; else that is an error.
    """

    config: PlannerConfig
    skills: Mapping[str, Skill]
    find: Find
    known: Mapping[str, Task] = field(default_factory=dict)
    lenient: bool = False

    def plan(self, tasks: Sequence[Query]) -> list[Plan]:
        """One plan for each task, in order; where a model's answers are of no use, by rules, with a note."""
        decomposer = self.config.decomposer
        rounds: dict[str, tuple[Round, ...]] = {}
        notes: dict[str, str] = {}
        if isinstance(decomposer, ModelConfig):
            try:
                rounds, notes = self._asked(decomposer, tasks)
            except SkilltrainError as error:
                if not self.lenient:
                    raise
                notes = {task.query_id: f"the model cannot be asked: {error}" for task in tasks}
        for task in tasks:
            if task.query_id not in rounds:
                rounds[task.query_id] = (Round(_drafted(decomposer, task.text)),)
        found = find_each(self.find, [rounds[task.query_id][-1] for task in tasks], self.config.compose.candidates)
        plans: list[Plan] = []
        for task, rankings in zip(tasks, found, strict=True):
            own, note = rounds[task.query_id], notes.get(task.query_id)
            steps = compose(task.text, own[-1].draft, rankings, self.skills, self.config.compose)
            told = (f"planned by rules, for {note}",) if note else ()
            plans.append(Plan(task, steps, own, "rules" if told else decomposer.kind, told))
        return plans

    def _asked(
        self, config: ModelConfig, tasks: Sequence[Query]
    ) -> tuple[dict[str, tuple[Round, ...]], dict[str, str]]:
        """(query_id → the rounds of those tasks that the model has steps for, why others have none)."""
        llm = open_llm(config.llm)  # once, for it keeps to one budget
        if isinstance(config, StepsConfig):
            drafts, dropped = self._written(config, llm, tasks, {})
        elif isinstance(config, ReactConfig):
            drafts, dropped = self._searched(config, llm, tasks)
        else:
            drafts, dropped = self._chosen(config, llm, tasks)
        notes = {task.query_id: "the model looked for nothing" for task in tasks if task.query_id not in drafts}
        notes |= {fault.query_id: f"no answer of the model was usable: {fault.reason}" for fault in dropped}
        if isinstance(config, StepsConfig) and self.config.hints.rounds:
            return self._refined(config, llm, tasks, drafts), notes
        return {query_id: (Round(draft),) for query_id, draft in drafts.items()}, notes

    def _refined(
        self, config: StepsConfig, llm: LLM, tasks: Sequence[Query], first: Mapping[str, Draft]
    ) -> dict[str, tuple[Round, ...]]:
        """query_id → every round, the last one to be used; a task for which the model fails keeps the steps it has."""
        settings = self.config.hints
        rounds = {query_id: [Round(draft)] for query_id, draft in first.items()}
        active = [task for task in tasks if task.query_id in first]
        for number in range(settings.rounds + 1):
            going: dict[str, tuple[str, ...]] = {}
            found = find_each(self.find, [rounds[task.query_id][-1] for task in active], settings.count)
            for task, rankings in zip(active, found, strict=True):
                own = rounds[task.query_id]
                # Every step's first skill comes before any step's second.
                by_rank = [row[place][0] for place in range(settings.count) for row in rankings if place < len(row)]
                hints = tuple(dict.fromkeys(by_rank))[: settings.count]
                before = {*own[-2].hints} if number else set[str]()
                alike = len({*hints} & before) / len({*hints} | before) if number else None
                own[-1] = replace(own[-1], hints=hints, jaccard=alike)
                if hints and (alike is None or alike <= settings.stop_above):
                    going[task.query_id] = hints
            if number == settings.rounds or not going:
                break
            drafts, _ = self._written(config, llm, [task for task in active if task.query_id in going], going)
            active = [task for task in active if task.query_id in drafts]
            for task in active:
                rounds[task.query_id].append(Round(drafts[task.query_id]))
        return {query_id: tuple(own) for query_id, own in rounds.items()}

    def _written(
        self, config: StepsConfig, llm: LLM, tasks: Sequence[Query], hints: Mapping[str, Sequence[str]]
    ) -> Drafts:
        """The steps that the model writes, with `hints` (query_id → skill ids) where there are some."""
        asks: list[Ask] = []
        for task in tasks:
            own = hints.get(task.query_id)
            parts = (("skills that exist and may help", self._hint(own)),) if own else ()
            num = len(self.known[task.query_id].steps) if config.true_count and task.query_id in self.known else 0
            asks.append(Ask(task, parts, order=f"Write exactly {num} steps." if num else ""))
        asked = ask_until(planning_questions(config, llm, asks))
        return {ask.query_id: draft for ask, draft in asked.values}, asked.dropped

    def _hint(self, skill_ids: Sequence[str]) -> str:
        """What the model sees of hints."""
        if self.config.hints.show == "names":
            return ", ".join(untrusted_line(self.skills[skill_id].name) for skill_id in skill_ids)
        return self._described(skill_ids, self.config.hints.description_chars)

    def _described(self, skill_ids: Sequence[str], max_chars: int = 140) -> str:
        skills = [self.skills[skill_id] for skill_id in skill_ids]
        return "\n".join(f"{untrusted_line(s.name)}: {untrusted_line(s.description, max_chars)}" for s in skills)

    def _chosen(self, config: DirectConfig, llm: LLM, tasks: Sequence[Query]) -> Drafts:
        """The skills that LLM-Direct chooses from a list, in order of id: no place tells the gold ones among them."""
        asks: list[Ask] = []
        for task, ranking in zip(tasks, self.find([task.text for task in tasks], config.shown), strict=True):
            known = self.known.get(task.query_id)
            both = dict.fromkeys([*sorted(known.relevance.gold if known else ()), *(one for one, _ in ranking)])
            skills = tuple(self.skills[skill_id] for skill_id in sorted([*both][: config.shown]))
            lines = "\n".join(f"{number}. {untrusted_line(skill.name)}" for number, skill in enumerate(skills, 1))
            asks.append(Ask(task, (("skills that exist and may help", lines),), choices=skills))
        asked = ask_until(planning_questions(config, llm, asks))
        return {ask.query_id: draft for ask, draft in asked.values}, asked.dropped

    def _searched(self, config: ReactConfig, llm: LLM, tasks: Sequence[Query]) -> Drafts:
        """What ReAct searches for, one step a search."""
        searches: dict[str, tuple[str, ...]] = {}
        faults: list[Dropped] = []
        asks = [Ask(task) for task in tasks]
        for _ in range(config.max_steps):
            asked = ask_until(planning_questions(config, llm, asks))
            faults += [fault for fault in asked.dropped if fault.query_id not in searches]
            going, asks = [(ask, search) for ask, search in asked.values if search], list[Ask]()
            if not going:
                break
            rankings = self.find([search for _, search in going], config.shown)
            for (ask, search), ranking in zip(going, rankings, strict=True):
                searches[ask.query_id] = (*searches.get(ask.query_id, ()), search)
                turn = f"search: {untrusted_line(search)}\n{self._described([one for one, _ in ranking])}"
                asks.append(replace(ask, parts=(*ask.parts, ("so far", turn.strip()))))
        return {query_id: Draft(texts) for query_id, texts in searches.items()}, faults


def _drafted(decomposer: RulesConfig | WholeConfig | ModelConfig, task: str) -> Draft:
    """The steps of a task without a model; by rules, where the model that was to plan gave none."""
    if isinstance(decomposer, WholeConfig):
        return Draft((one_line(task),))
    return draft_by_rules(task, (decomposer if isinstance(decomposer, RulesConfig) else RulesConfig()).max_steps)


def find_each(find: Find, rounds: Sequence[Round], keep: int) -> list[list[Ranking]]:
    """What is found for every step of every round, asked for at once."""
    texts = [text for one in rounds for text in one.draft.texts]
    found = iter(find(texts, keep) if texts else ())
    return [[next(found) for _ in one.draft.texts] for one in rounds]


def plan_cost(config: PlannerConfig, tasks: Sequence[Query]) -> dict[str, Any]:
    """About what the first request for each task will take, said in one line too; asks nobody. {} without a model."""
    model = config.decomposer
    if not isinstance(model, ModelConfig):
        return {}
    asks = [Ask(task) for task in tasks]
    return cost_of(planning_questions(model, open_llm(model.llm), asks))


def plan_task(config: PlannerConfig, text: str, router: Router) -> tuple[Plan, dict[str, tuple[Flag, ...]]]:
    """(the plan for one task, what the safety screening found in the skills that are chosen).

    Where the chat model cannot be asked, rules plan, and a note says so. A step that the router's calibration finds no
    skill for has none. Raises SkilltrainError for an empty task.
    """
    if not text.strip():
        raise SkilltrainError("the task is empty")
    flags: dict[str, tuple[Flag, ...]] = {}

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        answers = [router.route(one, keep) for one in texts]
        flags.update({routed.skill_id: routed.flags for answer in answers for routed in answer.skills if routed.flags})
        return [[(one.skill_id, one.score) for one in answer.skills if answer.fits] for answer in answers]

    task = Query("task", text, kind="multi", origin="", split="")
    (plan,) = Planner(config, router.skills, find, lenient=True).plan([task])
    return plan, {step.skill_id: flags[step.skill_id] for step in plan.steps if step.skill_id in flags}
