#!/usr/bin/env python
"""Does routing help an agent? Compare the prompt with all skills with the router's best five.

python benchmarks/agent_choice.py ROUTER QUERIES OUT --model NAME [--base-url URL] [--near]

ROUTER is a router of `fit` or `index`, and QUERIES a folder of the stage `queries`. Draws 60
requests, and pools of 100 and 1,000 skills that hold their gold skills. The other skills are
random, or with --near those that the router ranks highest for the requests. For each pool an agent
chooses one skill twice: from the names and descriptions of all skills, and from those of the five
skills that the router returns. Prints a Markdown table with the share of right choices, and the
paired difference with its 95% interval. Writes the choices to OUT/choices.jsonl.

Without --model, nothing is asked. The prompts are written to OUT/prompts, one file for each pool
and condition, for a chat model that no server offers. Its choices come back with --answers, a file
of JSON lines with `condition`, `query_id` and `number`. The prompt of a file differs in one way:
the list of all skills stands in it once, before all requests.
"""

import json
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skilltrain.files import write_jsonl, write_text
from skilltrain.llm import LLM, LLMConfig, Questions, ask_all
from skilltrain.llm.query_prompts import UNTRUSTED, Ask
from skilltrain.llm.untrusted import framed, untrusted_line
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.comparison import SystemResult, compare
from skilltrain.metrics.measures import parse_measures, per_query
from skilltrain.records import Skill
from skilltrain.retrieval.select import read_choice
from skilltrain.serving.router import Router

DESCRIPTION = "Compare the prompt with all skills with the router's best five."
SEED = 0
NUM_REQUESTS = 60
POOL_SIZES = (100, 1000)
NUM_ROUTED = 5
MAX_NEIGHBOURS = 50  # of a request, to fill the pools with
MAX_DESCRIPTION_CHARS = 500
ALL, ROUTED = "all skills", "router"
SYSTEM = f"""You are an agent. Before you work on a request, you load the one skill that helps \
most. You get a numbered list of skills, and the request.
{UNTRUSTED}
Reply with the number of one skill in digits, and with nothing else."""


@dataclass(frozen=True)
class Condition:
    """What the agent sees in one pool.

    Attributes:
        name: Name of the condition, such as `100 skills, router`.
        asks: One question for each request, with the skills that the agent sees.
    """

    name: str
    asks: Sequence[Ask]


def list_skills(skills: Sequence[Skill]) -> str:
    """Return one numbered line with name and description for each skill."""
    lines: list[str] = []
    for number, skill in enumerate(skills, 1):
        description = untrusted_line(skill.description, MAX_DESCRIPTION_CHARS)
        lines.append(f"{number}. {untrusted_line(skill.name)}: {description}")
    return "\n".join(lines)


def messages(ask: Ask) -> tuple[str, str]:
    """Return the system message and the user message of a question."""
    texts = [("skills", list_skills(ask.choices)), ("request", ask.query.text)]
    mark, user = framed(texts, end="end")
    return SYSTEM.format(mark=mark), user


def draw_pool(router: Router, tasks: Sequence[Task], size: int, is_near: bool) -> list[Skill]:
    """Draw a pool that holds all gold skills of the tasks. The order of its skills is random.

    Args:
        router: Router over all skills.
        tasks: The requests with their gold skills.
        size: Number of skills in the pool.
        is_near: Fill the pool with the skills that the router ranks highest, instead of random
            ones.
    """
    rng = random.Random(SEED)
    gold_ids = sorted({skill_id for task in tasks for skill_id in task.relevance.gold})
    other_ids = rng.sample(list(router.skills), len(router.skills))
    if is_near:
        other_ids = [*ids_by_rank(router, tasks), *other_ids]
    # Gold skills come first, and each skill counts once.
    skill_ids = list(dict.fromkeys([*gold_ids, *other_ids]))[:size]
    rng.shuffle(skill_ids)
    return [router.skills[skill_id] for skill_id in skill_ids]


def ids_by_rank(router: Router, tasks: Sequence[Task]) -> list[str]:
    """Return the skills that the router finds: the first of every task, then the second, …"""
    ranked: list[tuple[int, str]] = []
    for task in tasks:
        answer = router.route(task.query.text, k=MAX_NEIGHBOURS)
        ranked += [(skill.rank, skill.skill_id) for skill in answer.skills]
    # The sort is stable, so skills of one rank keep the order of the tasks.
    return [skill_id for _, skill_id in sorted(ranked, key=lambda pair: pair[0])]


def conditions_of(router: Router, tasks: Sequence[Task], is_near: bool) -> Iterator[Condition]:
    """Yield for each pool the condition with all skills, and that with the router's skills."""
    for size in POOL_SIZES:
        pool = draw_pool(router, tasks, size, is_near)
        router_over_pool = router.with_skills(pool)
        routed: list[Ask] = []
        for task in tasks:
            answer = router_over_pool.route(task.query.text, k=NUM_ROUTED)
            skills = tuple(router.skills[skill.skill_id] for skill in answer.skills)
            routed.append(Ask(task.query, choices=skills))
        in_full = [Ask(task.query, choices=tuple(pool)) for task in tasks]
        yield Condition(f"{size} skills, {ALL}", in_full)
        yield Condition(f"{size} skills, {ROUTED}", routed)


def ask_model(condition: Condition, llm: LLM) -> dict[str, str]:
    """Let a chat model choose. Return the id of the chosen skill by query id."""
    questions = Questions(
        llm=llm,
        items=condition.asks,
        prompt=messages,
        seed=lambda _, attempt: SEED + attempt,
        read=read_choice,
        max_attempts=3,
        answer_tokens=4,
        description=condition.name,
    )
    return {ask.query_id: skill_id for ask, skill_id in ask_all(questions).values}


def read_answers(condition: Condition, answers: Path) -> dict[str, str]:
    """Read the choices of a condition from a file. Return the chosen skill's id by query id."""
    ask_by_id = {ask.query_id: ask for ask in condition.asks}
    chosen_ids: dict[str, str] = {}
    for line in answers.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["condition"] == condition.name:
            ask = ask_by_id[row["query_id"]]
            chosen_ids[ask.query_id] = read_choice(ask, str(row["number"]))
    return chosen_ids


def write_prompts(condition: Condition, folder: Path) -> None:
    """Write all prompts of a condition into one file, without the gold skills."""
    sections = [SYSTEM.partition("\n")[0]]
    if condition.name.endswith(ALL):
        sections.append(f"# Skills\n\n{list_skills(condition.asks[0].choices)}")
    for ask in condition.asks:
        section = f"# Request {ask.query_id}\n\n{ask.query.text}"
        if condition.name.endswith(ROUTED):
            section += f"\n\nSkills:\n{list_skills(ask.choices)}"
        sections.append(section)
    write_text(folder / f"{condition.name}.md", "\n\n".join(sections))


def score(
    condition: Condition, chosen_ids: Mapping[str, str], tasks: Sequence[Task]
) -> SystemResult:
    """Score the choices. A request without a usable answer counts as wrong."""
    rankings: dict[str, list[str]] = {}
    for ask in condition.asks:
        skill_id = chosen_ids.get(ask.query_id)
        rankings[ask.query_id] = [] if skill_id is None else [skill_id]
    relevance = {task.query.query_id: task.relevance for task in tasks}
    return SystemResult(
        condition.name, per_query(rankings, relevance, parse_measures(["Hit@1"])), rankings
    )


def print_table(results: Sequence[SystemResult], conditions: Sequence[Condition]) -> None:
    """Print a row for each condition, and the difference of the router to all skills."""
    pairs = [(f"{size} skills, {ALL}", f"{size} skills, {ROUTED}") for size in POOL_SIZES]
    differences = {row.system: row for row in compare(results, pairs, ["Hit@1"])}
    print("| condition | right | no usable answer | router minus all skills |\n|---|---:|---:|---|")
    for result, condition in zip(results, conditions, strict=True):
        right = sum(scores["Hit@1"] for scores in result.per_query.values())
        num_unusable = sum(not ranking for ranking in result.rankings.values())
        difference = differences.get(result.name)
        cell = ""
        if difference is not None:
            cell = (
                f"{difference.difference}; {difference.num_better} better, "
                f"{difference.num_worse} worse, p = {difference.p:.2g}"
            )
        print(
            f"| {condition.name} | {right:g} of {len(condition.asks)} | {num_unusable} | {cell} |"
        )


def parse_options() -> Namespace:
    """Read the options of the command line."""
    parser = ArgumentParser(description=DESCRIPTION)
    parser.add_argument("router", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="name of the chat model")
    parser.add_argument("--base-url", default="https://api.openai.com/v1", help="its server")
    parser.add_argument("--answers", type=Path, help="choices made from the files of prompts")
    parser.add_argument("--near", action="store_true", help="fill pools with similar skills")
    return parser.parse_args()


def main() -> None:
    """Ask the agent, or write its prompts, or score the answers of a file."""
    options = parse_options()
    router = Router.load(options.router)
    tasks = load_benchmark(options.queries).tasks
    tasks = random.Random(SEED).sample(list(tasks), NUM_REQUESTS)
    conditions = list(conditions_of(router, tasks, options.near))
    if not options.model and not options.answers:
        for condition in conditions:
            write_prompts(condition, options.out / "prompts")
        return

    choices: list[dict[str, str]] = []
    results: list[SystemResult] = []
    for condition in conditions:
        if options.answers:
            chosen_ids = read_answers(condition, options.answers)
        else:
            config = LLMConfig(model=options.model, base_url=options.base_url, temperature=0)
            chosen_ids = ask_model(condition, LLM(config))
        for query_id, skill_id in chosen_ids.items():
            row = {"condition": condition.name, "query_id": query_id, "skill_id": skill_id}
            choices.append(row)
        results.append(score(condition, chosen_ids, tasks))
    write_jsonl(options.out / "choices.jsonl", choices)
    print_table(results, conditions)


if __name__ == "__main__":
    main()
