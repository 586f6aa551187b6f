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
from skilltrain.llm import LLM, Outcome, ask_all
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Dropped, Query, Ranking, Skill
from skilltrain.retrieval.select import Ask, questions_of
from skilltrain.routing.planning.compose import ComposeConfig, Plan, compose
from skilltrain.routing.planning.decompose import (
    DirectConfig,
    ModelConfig,
    ReactConfig,
    StepsConfig,
)
from skilltrain.routing.planning.rules import MAX_STEPS, Round, steps_by_rules
from skilltrain.routing.router import Router
from skilltrain.texts import one_line

Find = Callable[[Sequence[str], int], list[Ranking]]
"""(texts, how many) → the skills that are found for each text."""
AskAll = Callable[[Sequence[Ask]], Outcome[Ask, Any]]
_DESCRIPTION_CHARS = 140
_MAY_HELP = "skills that exist and may help"


class RulesConfig(Config):
    """Steps by rules of English and Chinese; no model."""

    kind: Literal["rules"] = "rules"


class WholeConfig(Config):
    """The whole task as one step, to see what cutting it adds."""

    kind: Literal["whole"] = "whole"


class HintsConfig(Config):
    """Hints for a chat model that writes steps; other decomposers take none."""

    count: int = Field(default=15, ge=1, description="skills named to the model (H)")
    rounds: int = Field(
        default=1, ge=0, description="how often it plans anew at most (T); 0: without hints"
    )
    stop_above: float = Field(
        default=0.6, ge=0, le=1, description="Jaccard of two rounds' hints that ends it (tau)"
    )
    show: Literal["names", "described"] = Field(
        default="names", description="what the model sees of a hint"
    )


class PlannerConfig(Config):
    """One way to plan."""

    name: str = Field(default="plan", min_length=1, description="what tables call it")
    decomposer: Annotated[
        RulesConfig | WholeConfig | StepsConfig | DirectConfig | ReactConfig,
        Field(discriminator="kind"),
    ] = Field(default=RulesConfig(), description="what cuts a task into steps")
    hints: HintsConfig = Field(
        default=HintsConfig(), description="what is found goes back to the model (kind llm)"
    )
    compose: ComposeConfig = Field(
        default=ComposeConfig(), description="how a skill is chosen for each step"
    )


@dataclass(frozen=True)
class Planner:
    """Plans over the pool `skills`, in which `find` finds.

    `known` are a benchmark's tasks by query_id, of which a planner may be told gold skills and the number of steps.
    `lenient`: where the model is down, rules plan and a note says so; else that is an error.
    """

    config: PlannerConfig
    skills: Mapping[str, Skill]
    find: Find
    known: Mapping[str, Task] = field(default_factory=dict)
    lenient: bool = False

    def plan(self, tasks: Sequence[Query]) -> list[Plan]:
        """One plan for each task, in order; where a model's answers are of no use, by rules, with a note."""
        decomposer = self.config.decomposer
        rounds, faults = (
            self._asked(decomposer, tasks) if isinstance(decomposer, ModelConfig) else ({}, {})
        )
        for task in tasks:
            if task.query_id not in rounds:
                is_whole = isinstance(decomposer, WholeConfig)
                rounds[task.query_id] = [
                    Round((one_line(task.text),) if is_whole else steps_by_rules(task.text))
                ]
        texts = [rounds[task.query_id][-1].texts for task in tasks]
        plans: list[Plan] = []
        for task, rankings in zip(
            tasks, find_each(self.find, texts, self.config.compose.candidates), strict=True
        ):
            own, fault = tuple(rounds[task.query_id]), faults.get(task.query_id)
            rankings = [[(skill_id, 1.0)] for skill_id in own[-1].chosen] or rankings
            steps = compose(task.text, own[-1].texts, rankings, self.skills, self.config.compose)
            notes = (f"planned by rules, for {fault}",) if fault else ()
            plans.append(Plan(task, steps, own, "rules" if fault else decomposer.kind, notes))
        return plans

    def _asked(
        self, config: StepsConfig | DirectConfig | ReactConfig, tasks: Sequence[Query]
    ) -> tuple[dict[str, list[Round]], dict[str, str]]:
        """(query_id → the rounds of those tasks that the model has steps for, query_id → why others have none)."""
        llm = LLM(config.llm)  # once, for it keeps to one budget

        def ask(asks: Sequence[Ask]) -> Outcome[Ask, Any]:
            questions = questions_of(config, llm, config.prompt, asks)
            return ask_all(questions, drop_if_down=self.lenient)

        if isinstance(config, StepsConfig):
            asked = ask([self._steps(config, task) for task in tasks])
        elif isinstance(config, DirectConfig):
            asked = ask(self._choices(config, tasks))
        else:
            asked = self._searched(config, ask, tasks)
        rounds: dict[str, list[Round]] = {one.query_id: [found] for one, found in asked.values}
        if isinstance(config, StepsConfig) and self.config.hints.rounds:
            self._refine(config, ask, [one.query for one, _ in asked.values], rounds)
        why = {
            fault.query_id: f"no answer of the model was usable: {fault.reason}"
            for fault in asked.dropped
        }
        without = (task.query_id for task in tasks if task.query_id not in rounds)
        return rounds, {
            query_id: why.get(query_id, "the model looked for nothing") for query_id in without
        }

    def _refine(
        self,
        config: StepsConfig,
        ask: AskAll,
        active: Sequence[Query],
        rounds: dict[str, list[Round]],
    ) -> None:
        """Add to `rounds` all further ones; a task for which the model fails keeps the steps it has."""
        settings = self.config.hints
        for number in range(settings.rounds + 1):
            asks: list[Ask] = []
            found = find_each(
                self.find, [rounds[task.query_id][-1].texts for task in active], settings.count
            )
            for task, rankings in zip(active, found, strict=True):
                own = rounds[task.query_id]
                # Every step's first skill comes before any step's second.
                by_rank = [
                    row[place][0]
                    for place in range(settings.count)
                    for row in rankings
                    if place < len(row)
                ]
                hints = tuple(dict.fromkeys(by_rank))[: settings.count]
                before = {*own[-2].hints} if number else set[str]()
                alike = len({*hints} & before) / len({*hints} | before) if number else None
                own[-1] = replace(own[-1], hints=hints, jaccard=alike)
                if hints and (alike is None or alike <= settings.stop_above):
                    asks.append(self._steps(config, task, hints))
            if number == settings.rounds or not asks:
                break
            asked = ask(asks)
            active = [one.query for one, _ in asked.values]
            for one, again in asked.values:
                rounds[one.query_id].append(again)

    def _steps(self, config: StepsConfig, task: Query, hints: Sequence[str] = ()) -> Ask:
        """What the model sees that writes steps."""
        parts = (
            ((_MAY_HELP, self._told(hints, self.config.hints.show == "described")),)
            if hints
            else ()
        )
        num = (
            len(self.known[task.query_id].steps)
            if config.true_count and task.query_id in self.known
            else 0
        )
        return Ask(task, parts, order=f"Write exactly {num} steps." if num else "")

    def _choices(self, config: DirectConfig, tasks: Sequence[Query]) -> list[Ask]:
        """What LLM-Direct sees: a list of skills in order of id, so that no place tells the gold ones among them."""
        asks: list[Ask] = []
        for task, ranking in zip(
            tasks, self.find([task.text for task in tasks], config.shown), strict=True
        ):
            gold = self.known[task.query_id].relevance.gold if task.query_id in self.known else ()
            both = [*dict.fromkeys([*sorted(gold), *(skill_id for skill_id, _ in ranking)])]
            skills = tuple(self.skills[skill_id] for skill_id in sorted(both[: config.shown]))
            lines = "\n".join(
                f"{number}. {untrusted_line(skill.name)}" for number, skill in enumerate(skills, 1)
            )
            asks.append(Ask(task, ((_MAY_HELP, lines),), choices=skills))
        return asks

    def _searched(
        self, config: ReactConfig, ask: AskAll, tasks: Sequence[Query]
    ) -> Outcome[Ask, Any]:
        """What ReAct searches for, one step a search."""
        searches: dict[str, tuple[str, ...]] = {}
        faults: list[Dropped] = []
        asks = [Ask(task) for task in tasks]
        for _ in range(MAX_STEPS):
            asked = ask(asks)
            faults += asked.dropped
            going, asks = [(one, search) for one, search in asked.values if search], list[Ask]()
            if not going:
                break
            rankings = self.find([search for _, search in going], config.shown)
            for (one, search), ranking in zip(going, rankings, strict=True):
                searches[one.query_id] = (*searches.get(one.query_id, ()), search)
                turn = f"search: {untrusted_line(search)}\n{self._told([one for one, _ in ranking], described=True)}"
                asks.append(replace(one, parts=(*one.parts, ("so far", turn.strip()))))
        found = [
            (Ask(task), Round(searches[task.query_id]))
            for task in tasks
            if task.query_id in searches
        ]
        return Outcome(found, faults, {})

    def _told(self, skill_ids: Sequence[str], described: bool) -> str:
        """What the model reads of skills: their names, or a line each with the beginning of the description."""
        skills = [self.skills[skill_id] for skill_id in skill_ids]
        if not described:
            return ", ".join(untrusted_line(skill.name) for skill in skills)
        told = (
            f"{untrusted_line(s.name)}: {untrusted_line(s.description, _DESCRIPTION_CHARS)}"
            for s in skills
        )
        return "\n".join(told)


def find_each(find: Find, tasks: Sequence[Sequence[str]], keep: int) -> list[list[Ranking]]:
    """What is found for every step of every task, asked for at once."""
    texts = [text for steps in tasks for text in steps]
    found = iter(find(texts, keep) if texts else ())
    return [[next(found) for _ in steps] for steps in tasks]


def plan_task(
    config: PlannerConfig, text: str, router: Router
) -> tuple[Plan, dict[str, tuple[Flag, ...]]]:
    """(the plan for one task, what the safety screening found in the skills that are chosen).

    Where the chat model is down, rules plan, and a note says so. A step that the router's calibration finds no skill
    for has none. Raises SkilltrainError for an empty task.
    """
    if not text.strip():
        raise SkilltrainError("the task is empty")
    flags: dict[str, tuple[Flag, ...]] = {}

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        answers = [router.route(one, keep) for one in texts]
        flags.update(
            {
                routed.skill_id: routed.flags
                for answer in answers
                for routed in answer.skills
                if routed.flags
            }
        )
        return [
            [(one.skill_id, one.score) for one in answer.skills if answer.fits]
            for answer in answers
        ]

    task = Query("task", text, kind="multi", origin="", split="")
    (plan,) = Planner(config, router.skills, find, lenient=True).plan([task])
    return plan, {
        step.skill_id: flags[step.skill_id] for step in plan.steps if step.skill_id in flags
    }
