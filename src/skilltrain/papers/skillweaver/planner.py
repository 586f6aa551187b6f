"""Plans for compound tasks: decompose, retrieve, compose (SkillWeaver, section 4).

In Skill-Aware Decomposition, the model sees the skills that were retrieved for its steps (hints)
and plans again. A round holds the steps, the hints, and the Jaccard similarity of the hints to
those of the previous round. The paper stops above 0.6. Its own rounds (0.32, 0.47, 0.52) never
reach that, so that the number of rounds decides.

Notes:
    - If no answer of a model is usable for a task, rules plan it. A task without a first round has
      no usable answer, or ReAct ended without a search.
    - One `LLM` counts the budget of all requests of a planner.
    - LLM-Direct sees the gold skills and the skills nearest to the task. They are sorted by id, so
      that their order does not show which ones are gold. The gold skills survive the cut.
    - A skill that LLM-Direct chose is the only candidate of its step, with score 1.
    - ReAct stops by itself, with an empty search, or after MAX_STEPS searches. Each search is a
      step, and each request shows the results of all earlier searches of the task.
    - Of the hints, the first skill of every step comes before the second skill of any step.
    - The report compares the hints of all rounds, so the last round gets its hints, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from typing import Annotated, Any, Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.llm import LLM, Outcome, ask_all
from skilltrain.llm.query_prompts import Ask
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.papers.skillweaver.compose import NUM_CANDIDATES, ComposeConfig, Plan, compose
from skilltrain.papers.skillweaver.decompose import (
    DirectConfig,
    ModelConfig,
    ReactConfig,
    StepsConfig,
)
from skilltrain.papers.skillweaver.rules import MAX_STEPS, Round, steps_by_rules
from skilltrain.records import Query, Ranking, Skill
from skilltrain.texts import one_line

Find = Callable[[Sequence[str], int], list[Ranking]]
"""Retrieve a number of skills for each text."""
AskAll = Callable[[Sequence[Ask]], Outcome[Ask, Any]]
"""Send requests to the chat model, and read the answers."""
RoundsByQuery = dict[str, list[Round]]
"""Rounds of each task, in order, by query id."""
_DESCRIPTION_CHARS = 140  # of a description that the model sees
_NUM_RESULTS = 5  # skills that the model sees after each search of ReAct
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
        default=1, ge=0, description="largest number of times it plans again (T); 0: without hints"
    )
    stop_above: float = Field(
        default=0.6,
        ge=0,
        le=1,
        description="planning ends when the hints of two rounds are more similar than this "
        "(Jaccard, tau)",
    )
    show: Literal["names", "described", "categories"] = Field(
        default="names",
        description="show the names of the skills, also their descriptions, or, as a control, only "
        "their categories",
    )


class PlannerConfig(Config):
    """One way to plan."""

    name: str = Field(default="plan", min_length=1, description="name in tables")
    decomposer: Annotated[
        RulesConfig | WholeConfig | StepsConfig | DirectConfig | ReactConfig,
        Field(discriminator="kind"),
    ] = Field(default=RulesConfig(), description="how a task is split into steps")
    hints: HintsConfig = Field(
        default=HintsConfig(),
        description="skills that are shown to the model before it plans again (kind llm)",
    )
    compose: ComposeConfig = Field(
        default=ComposeConfig(), description="how a skill is chosen for each step"
    )


@dataclass(frozen=True)
class Planner:
    """Plans tasks over a pool.

    Attributes:
        config: How to plan.
        skills: The pool.
        find: Retrieves skills of the pool.
        golds: Gold skills by query id, if known. LLM-Direct always sees them.
        lenient: Let rules plan, with a note, if the chat model is down. Otherwise that is an error.
    """

    config: PlannerConfig
    skills: Mapping[str, Skill]
    find: Find
    golds: Mapping[str, Collection[str]] = field(default_factory=dict)
    lenient: bool = False

    def plan(self, tasks: Sequence[Query]) -> list[Plan]:
        """Return a plan for each task. Rules plan a task if the model fails.

        A task is split into steps, skills are retrieved for each step, and one skill is chosen for
        each step.
        """
        rounds, failures = self._decompose(tasks)
        # Only the steps of the last round go into the plan.
        last_rounds = [rounds[task.query_id][-1] for task in tasks]
        retrieved = find_each(self.find, [last.texts for last in last_rounds], NUM_CANDIDATES)
        plans = []
        for task, last, retrieved_rankings in zip(tasks, last_rounds, retrieved, strict=True):
            rankings = retrieved_rankings
            # LLM-Direct has chosen a skill for each step. It is the only candidate, with score 1.
            if last.chosen:
                rankings = [[(skill_id, 1.0)] for skill_id in last.chosen]
            alpha = self.config.compose.alpha
            steps = compose(task.text, last.texts, rankings, self.skills, alpha)
            made_by = self.config.decomposer.kind
            notes = ()
            # No answer of the model was usable for this task.
            if task.query_id in failures:
                made_by = "rules"
                notes = (f"planned by rules, for {failures[task.query_id]}",)
            plans.append(Plan(task, steps, tuple(rounds[task.query_id]), made_by, notes))
        return plans

    def _decompose(self, tasks: Sequence[Query]) -> tuple[RoundsByQuery, dict[str, str]]:
        """Split each task into steps, in one round or several.

        A round holds the steps that one answer of a model gives, or that rules find. Only a model
        with hints plans a task in several rounds.

        Returns:
            Rounds by query id; reason by query id, for tasks that a model failed to plan.
        """
        decomposer = self.config.decomposer
        rounds = {}
        failures = {}
        if isinstance(decomposer, ModelConfig):
            rounds, failures = self._decompose_by_model(decomposer, tasks)
        for task in tasks:
            if isinstance(decomposer, WholeConfig):
                rounds[task.query_id] = [Round((one_line(task.text),))]
            # Without a model, rules plan all tasks, and else the tasks that the model failed.
            elif task.query_id not in rounds:
                rounds[task.query_id] = [Round(steps_by_rules(task.text))]
        return rounds, failures

    def _decompose_by_model(
        self, config: ModelConfig, tasks: Sequence[Query]
    ) -> tuple[RoundsByQuery, dict[str, str]]:
        """Ask the model to split each task into steps.

        Returns:
            Rounds by query id; failure reason by query id, for tasks without a round.
        """
        llm = LLM(config.llm)  # one for all requests, because it counts the budget

        def ask_model(requests: Sequence[Ask]) -> Outcome[Ask, Any]:
            return ask_all(config.questions(llm, requests), drop_if_down=self.lenient)

        if isinstance(config, ReactConfig):
            outcome = self._search(ask_model, tasks)
        elif isinstance(config, DirectConfig):
            outcome = ask_model(self._requests_with_choices(config, tasks))
        else:
            outcome = ask_model([Ask(task) for task in tasks])
        # Each usable answer is the first round of a task. Hints lead to further rounds.
        rounds = {request.query_id: [first_round] for request, first_round in outcome.values}
        if isinstance(config, StepsConfig) and self.config.hints.rounds:
            planned_tasks = [request.query for request, _ in outcome.values]
            self._refine(ask_model, planned_tasks, rounds)  # appends to `rounds`

        # A task has no round if its answer was dropped, or if ReAct ended without a search.
        failures = {}
        for task in tasks:
            if task.query_id not in rounds:
                failures[task.query_id] = "the model looked for nothing"
        for row in outcome.dropped:
            if row.query_id in failures:
                failures[row.query_id] = f"no answer of the model was usable: {row.reason}"
        return rounds, failures

    def _refine(self, ask_model: AskAll, tasks: Sequence[Query], rounds: RoundsByQuery) -> None:
        """Let the model plan again with hints, and append the new rounds to `rounds`.

        Hints are skills that were retrieved for the steps of the last round. A task for which the
        model fails keeps its earlier steps.

        Args:
            ask_model: Sends requests to the model.
            tasks: Tasks that have a first round.
            rounds: Rounds by query id.
        """
        remaining_tasks = tasks  # tasks whose last round has no hints yet
        for _ in range(self.config.hints.rounds):
            self._add_hints(remaining_tasks, rounds)
            requests = self._hint_requests(remaining_tasks, rounds)
            if not requests:
                return
            outcome = ask_model(requests)
            remaining_tasks = [request.query for request, _ in outcome.values]
            for request, next_round in outcome.values:
                rounds[request.query_id].append(next_round)
        # The report compares the hints of all rounds, so the last round gets its hints, too.
        self._add_hints(remaining_tasks, rounds)

    def _add_hints(self, tasks: Sequence[Query], rounds: RoundsByQuery) -> None:
        """Retrieve hints for the steps of each task's last round, and store them in that round.

        The best skill of every step comes first, then the second best, and so on.

        Args:
            tasks: The tasks.
            rounds: Rounds by query id. The last round of each task is replaced.
        """
        max_hints = self.config.hints.count
        texts = [rounds[task.query_id][-1].texts for task in tasks]
        retrieved = find_each(self.find, texts, max_hints)
        for task, rankings in zip(tasks, retrieved, strict=True):
            # The first skill of every step, then the second skills, and so on. Short rankings are
            # padded with None.
            candidates_by_rank = chain.from_iterable(zip_longest(*rankings))
            hint_ids = dict.fromkeys(pair[0] for pair in candidates_by_rank if pair)
            hints = tuple(hint_ids)[:max_hints]
            # Compare the hints with the previous round's hints. The first round has no similarity.
            task_rounds = rounds[task.query_id]
            jaccard = None
            if len(task_rounds) > 1:
                previous_hints = set(task_rounds[-2].hints)
                num_common = len(previous_hints.intersection(hints))
                jaccard = num_common / len(previous_hints.union(hints))
            task_rounds[-1] = replace(task_rounds[-1], hints=hints, jaccard=jaccard)

    def _hint_requests(self, tasks: Sequence[Query], rounds: RoundsByQuery) -> list[Ask]:
        """Return a request to plan again for each task whose last round brought new hints.

        A task whose hints hardly change is finished: the model would see nearly the same hints.

        Args:
            tasks: Tasks whose last round has hints.
            rounds: Rounds by query id.
        """
        settings = self.config.hints
        requests = []
        for task in tasks:
            last_round = rounds[task.query_id][-1]
            similarity = last_round.jaccard  # None in the first round
            is_stable = similarity is not None and similarity > settings.stop_above
            if last_round.hints and not is_stable:
                lines = self._describe(last_round.hints, settings.show)
                requests.append(Ask(task, titled_texts=((_MAY_HELP, lines),)))
        return requests

    def _requests_with_choices(self, config: DirectConfig, tasks: Sequence[Query]) -> list[Ask]:
        """Return a request for each task, with the skills that the model may choose.

        They are the gold skills (that the task needs), if known, and the skills nearest to the
        task. All are sorted by id, so that their order does not show which ones are gold.

        Args:
            config: Settings of LLM-Direct, a model that chooses a skill for each step.
            tasks: Tasks to plan.
        """
        requests = []
        rankings = self.find([task.text for task in tasks], config.shown)
        for task, ranking in zip(tasks, rankings, strict=True):
            # The gold skills come first, so that the cut to `shown` skills keeps them.
            skill_ids = sorted(self.golds.get(task.query_id, ()))
            skill_ids += [skill_id for skill_id, _ in ranking]
            distinct_ids = list(dict.fromkeys(skill_ids))[: config.shown]
            skills = [self.skills[skill_id] for skill_id in sorted(distinct_ids)]
            lines = [
                f"{number}. {untrusted_line(skill.name)}" for number, skill in enumerate(skills, 1)
            ]
            titled_texts = ((_MAY_HELP, "\n".join(lines)),)
            requests.append(Ask(task, titled_texts, choices=tuple(skills)))
        return requests

    def _search(self, ask_model: AskAll, tasks: Sequence[Query]) -> Outcome[Ask, Round]:
        """Let the model search for skills, one search after the other, as in ReAct.

        The model sees the results of its earlier searches of a task. Each search is a step of the
        plan. The model stops by itself, or after MAX_STEPS searches.

        Args:
            ask_model: Sends requests to the model.
            tasks: Tasks to plan.

        Returns:
            A round for each task with a search, without tokens and cost.
        """
        searches = {task.query_id: [] for task in tasks}
        dropped = []
        requests = [Ask(task) for task in tasks]
        for _ in range(MAX_STEPS):
            outcome = ask_model(requests)
            dropped += outcome.dropped
            # An empty search means that the model is done with the task.
            turns = [(request, search) for request, search in outcome.values if search]
            if not turns:
                break
            rankings = self.find([search for _, search in turns], _NUM_RESULTS)
            requests = []
            for (request, search), ranking in zip(turns, rankings, strict=True):
                searches[request.query_id].append(search)
                lines = self._describe([skill_id for skill_id, _ in ranking], "described")
                # The next request for the task also holds the results of this search.
                titled_results = ("so far", f"search: {search}\n{lines}".strip())
                titled_texts = (*request.titled_texts, titled_results)
                requests.append(replace(request, titled_texts=titled_texts))

        rounds = []
        for task in tasks:
            texts = tuple(searches[task.query_id])
            if texts:
                rounds.append((Ask(task), Round(texts)))
        return Outcome(rounds, dropped, used={})  # nobody reads the tokens and cost

    def _describe(self, skill_ids: Sequence[str], show: str) -> str:
        """Return what the model sees of skills (see `HintsConfig.show`).

        Names or categories are on one line. Each name with a description has its own line.

        Args:
            skill_ids: Ids of the skills.
            show: `names`, `categories`, or `described` for names with descriptions.
        """
        skills = [self.skills[skill_id] for skill_id in skill_ids]
        if show == "categories":
            categories = dict.fromkeys(skill.category for skill in skills if skill.category)
            return ", ".join(map(untrusted_line, categories))
        if show == "names":
            return ", ".join(untrusted_line(skill.name) for skill in skills)
        lines = []
        for skill in skills:
            description = untrusted_line(skill.description, _DESCRIPTION_CHARS)
            lines.append(f"{untrusted_line(skill.name)}: {description}")
        return "\n".join(lines)


def find_each(find: Find, tasks: Sequence[Sequence[str]], keep: int) -> list[list[Ranking]]:
    """Retrieve skills for the steps of all tasks in one call.

    Args:
        find: Retrieves skills for texts.
        tasks: Steps of each task in words.
        keep: Number of skills for each step.

    Returns:
        For each task, the ranking of each step.
    """
    # Retrieve for the steps of all tasks together. Then take the rankings of each task in turn.
    texts = list(chain.from_iterable(tasks))
    rankings = iter(find(texts, keep) if texts else ())
    return [list(islice(rankings, len(steps))) for steps in tasks]
