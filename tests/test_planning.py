"""Tasks become steps, steps find skills, skills are chosen and put in order; what a model gets wrong costs no plan."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llm_server import LLMServer, Reply, chat, llm_server
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import GoldStep, Task
from skilltrain.evaluation.metrics import Relevance
from skilltrain.llm import AnswerError
from skilltrain.records import Query, Ranking, Skill
from skilltrain.retrieval.select import Ask
from skilltrain.routing.planning.compose import (
    ComposeConfig,
    Plan,
    Round,
    compose,
    plan_json,
    plan_lines,
    plan_mermaid,
)
from skilltrain.routing.planning.decompose import read_steps
from skilltrain.routing.planning.planner import Planner, PlannerConfig
from skilltrain.routing.planning.rules import Draft, dependencies, draft_by_rules, levels_of
from small_library import skilltrain, succeeds


def tool(skill_id: str, description: str = "", category: str | None = None) -> Skill:
    return Skill(skill_id, f"{skill_id}-tool", description, "", category)


def query(text: str, query_id: str = "q") -> Query:
    return Query(query_id, text, "multi", "test", "test")


@pytest.mark.parametrize(
    ("task", "steps"),
    [
        ("Download the dataset, transform it, and create visual reports",
         ["Download the dataset", "transform it", "create visual reports"]),
        ("First fetch the prices and then notify my team.", ["fetch the prices", "notify my team"]),
        ("Before sending the report, translate it into French", ["translate it into French", "sending the report"]),
        ("Plot the sales after cleaning the table", ["cleaning the table", "Plot the sales"]),
        ("1. Scrape the page\n2. Store it in a database\n- Notify me",
         ["Scrape the page", "Store it in a database", "Notify me"]),
        ("I am new here. Could you find a hotel? Save it to a.csv; thanks.", ["find a hotel", "Save it to a.csv"]),
        ("从网站下载最新论文，总结要点，然后翻译成英文并发送邮件给团队",
         ["从网站下载最新论文", "总结要点", "翻译成英文", "发送邮件给团队"]),
        ("Find salt and pepper mills", ["Find salt and pepper mills"]),
        ("good morning", ["good morning"]),
        ("", [""]),
        (". ".join(f"Find item {number}" for number in range(50)), [f"Find item {number}" for number in range(20)]),
    ],
)  # fmt: skip
def test_rules_cut_a_task_at_words_of_order_and_before_verbs(task: str, steps: list[str]) -> None:
    assert list(draft_by_rules(task, 20).texts) == steps


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ('["fetch it", "send it"]', Draft(("fetch it", "send it"))),
        ('Sure!\n```json\n["fetch it"]\n```', Draft(("fetch it",))),
        ('[{"step": "a"}, {"task": "b", "depends_on": [1, 9]}]', Draft(("a", "b"), ((), (0,)))),
        ("1. fetch it 2. send it", "no_json"),
        ('["fetch it", ', "no_json"),
        ("[" * 100_000 + "]", "no_json"),
        ("[]", "no_step"),
        ('["fetch it", 3]', "no_step"),
        (json.dumps([f"step {number}" for number in range(50)]), "too_many"),
        ('[{"step": "a", "depends_on": [2]}, {"step": "b", "depends_on": [1]}]', "cycle"),
    ],
)
def test_an_answer_is_steps_or_says_why_it_is_none(answer: str, outcome: Draft | str) -> None:
    try:
        assert read_steps(20, Ask(query("a task")), answer) == outcome
    except AnswerError as error:
        assert error.kind == outcome


@pytest.mark.parametrize(
    ("task", "texts", "after"),
    [
        ("", ["download the data", "clean it", "draw a chart"], [(), (0,), (1,)]),
        ("find hotels and find trains; then compare prices",
         ["find hotels", "find trains", "compare prices"], [(), (), (0, 1)]),
        ("find hotels and then find trains", ["find hotels", "find trains"], [(), (0,)]),
        ("查找北京到上海的高铁票，同时推荐酒店，最后生成行程报告",
         ["查找北京到上海的高铁票", "推荐酒店", "生成行程报告"], [(), (), (0, 1)]),
        ("", ["draw a chart of the sales", "get the news", "email the chart"], [(), (), (0, 1)]),
        ("", ["only this"], [()]),
    ],
)  # fmt: skip
def test_a_step_waits_for_what_it_works_on(task: str, texts: list[str], after: list[tuple[int, ...]]) -> None:
    assert list(dependencies(task, texts)) == after


def test_levels_hold_what_can_be_done_at_once_and_a_circle_is_refused() -> None:
    assert levels_of([(), (), (0, 1), (0,)]) == [[0, 1], [2, 3]]
    with pytest.raises(SkilltrainError, match=r"wait for each other: (1 → 2 → 1|2 → 1 → 2)"):
        levels_of([(1,), (0,)])


CSV = tool("csv", "Exports rows as csv.", "data")
PLOT = tool("plot", "Reads csv rows.", "data")
MAIL = tool("mail", "Delivers letters.", "office")
SKILLS = {skill.skill_id: skill for skill in (CSV, PLOT, MAIL)}


def test_alpha_weighs_similarity_against_compatibility_with_earlier_steps() -> None:
    found: list[Ranking] = [[("csv", 9.0)], [("mail", 8.0), ("plot", 4.0)]]

    def chosen(alpha: float) -> list[str | None]:
        steps = compose("x", Draft(("get rows", "show rows")), found, SKILLS, ComposeConfig(alpha=alpha))
        return [step.skill_id for step in steps]

    # csv and plot: categories 1; of {tool, exports, rows} and {plot, tool, reads, rows} 2 of 3 words; csv is all that
    # plot takes. csv and mail: the word tool, 1 of 3. So mail: alpha x 1 + (1 - alpha) x 1/9; plot: (1 - alpha) x 8/9.
    assert chosen(1.0) == chosen(7 / 16 + 0.001) == ["csv", "mail"] and chosen(7 / 16 - 0.001) == ["csv", "plot"]


def test_a_step_that_nothing_fits_has_no_skill() -> None:
    draft = Draft(("zzz", "get rows", "send it"))
    found: list[Ranking] = [[("csv", 0.0), ("mail", 0.0)], [("csv", 0.2)], [("mail", 0.6), ("csv", 0.1)]]
    steps = compose("x", draft, found, SKILLS, ComposeConfig(min_score=0.3))
    assert [(step.skill_id, len(step.candidates)) for step in steps] == [(None, 0), (None, 0), ("mail", 1)]


def _find(texts: Sequence[str], keep: int) -> list[Ranking]:
    """The skills that a text names by their ids, the first best."""
    return [[(word, 1 / n) for n, word in enumerate(text.split(), 1) if word in SKILLS][:keep] for text in texts]


def _plan(
    *answers: str, text: str = "save csv, then send mail", lenient: bool = False, **decomposer: Any
) -> tuple[Plan, list[str]]:
    """(one task as it is planned by a model that gives these answers, what the model saw each time)."""
    hints = decomposer.pop("hints", {"rounds": 0})
    with llm_server() as server:
        server.script = [Reply(answer) for answer in answers]
        llm = chat(server if answers else LLMServer("http://127.0.0.1:9/v1"))  # nothing listens there
        values = {"decomposer": {"kind": "llm", "llm": llm, "max_retries": 1, **decomposer}, "hints": hints}
        steps = GoldStep("one"), GoldStep("two")
        known = Task(query(text), Relevance(frozenset({"mail"}), {"mail": 1.0}), steps=steps)
        planner = Planner(validate(PlannerConfig, values, "test"), SKILLS, _find, {"q": known}, lenient)
        (plan,) = planner.plan([query(text)])
        assert server.script == []
        return plan, [request["messages"][1]["content"] for request in server.requests]


@pytest.mark.parametrize(
    ("hints", "answers", "rounds"),
    [
        # Every step's first skill comes before any step's second; 2/3 is above .6.
        ({"rounds": 2}, ['["csv plot", "mail plot"]', '["csv mail"]'], [("csv mail plot", None), ("csv mail", 2 / 3)]),
        ({"rounds": 2, "stop_above": 0.8, "count": 2}, ['["csv plot", "mail"]', '["csv"]', '["x"]'],
         [("csv mail", None), ("csv", 1 / 2), ("", 0.0)]),
        ({"rounds": 1}, ['["x"]'], [("", None)]),
        ({"rounds": 1}, ['["csv"]', "no list", "no list"], [("csv", None)]),
    ],
    ids=["alike", "all rounds", "no hints", "no usable answer"],
)  # fmt: skip
def test_every_round_is_kept_with_its_hints_and_how_much_they_changed(
    hints: dict[str, Any], answers: list[str], rounds: list[tuple[str, float | None]]
) -> None:
    plan, _ = _plan(*answers, hints=hints)
    assert [(" ".join(one.hints), one.jaccard) for one in plan.rounds] == rounds
    assert (plan.made_by, plan.notes) == ("llm", ())


def test_a_model_writes_steps_and_sees_hints_in_the_next_round() -> None:
    plan, (first, again, hinted) = _plan("no list", '["csv"]', '["csv", "mail"]', hints={"rounds": 1})
    assert "save csv, then send mail" in first and "holds no JSON array" in again and "-tool" not in again
    assert "skills that exist and may help\ncsv-tool\n" in hinted
    assert [step.skill_id for step in plan.steps] == ["csv", "mail"]
    _, prompts = _plan('["csv"]', '["csv"]', hints={"show": "described", "description_chars": 7})
    assert "may help\ncsv-tool: Exports\n" in prompts[-1]
    assert "Write exactly 2 steps." in _plan('["a"]', true_count=True)[1][0]


@pytest.mark.parametrize("answer", ["no list", json.dumps(["do it"] * 50), '["a", {}]'])
def test_without_a_usable_answer_rules_plan_and_a_note_says_so(answer: str) -> None:
    plan, _ = _plan(answer, answer)
    assert [step.text for step in plan.steps] == ["save csv", "send mail"]
    assert plan.made_by == "rules" and "no answer of the model was usable" in plan.notes[0]


def test_a_model_that_is_down_ends_an_evaluation_and_not_a_users_plan() -> None:
    with pytest.raises(SkilltrainError, match="no server answers"):
        _plan()
    plan, _ = _plan(lenient=True)
    assert len(plan.steps) == 2 and "the model cannot be asked" in plan.notes[0]


def test_llm_direct_chooses_by_number_from_a_list_that_holds_the_gold_skills() -> None:
    plan, prompts = _plan("[9]", "[2, 1]", text="save as csv", kind="direct", shown=2)
    assert "1. csv-tool\n2. mail-tool" in prompts[0]
    assert [(step.skill_id, step.text) for step in plan.steps] == [("mail", "mail-tool"), ("csv", "csv-tool")]


def test_react_searches_until_it_is_done() -> None:
    answers = '{"thought": "t", "search": "a csv"}', '{"search": "mail"}', '{"done": true}'
    plan, prompts = _plan(*answers, kind="react", shown=1)
    assert "so far\nsearch: a csv\ncsv-tool: Exports rows as csv." in prompts[1]
    assert [step.text for step in plan.steps] == ["a csv", "mail"]
    assert "looked for nothing" in _plan('{"done": true}', kind="react")[0].notes[0]


def test_a_plan_is_shown_as_lines_json_and_mermaid() -> None:
    text = 'find "rows"]; <b>x</b>'
    rounds = (Round(Draft((text, "send it"))),)
    found: list[Ranking] = [[("csv", 1.0)], []]
    plan = Plan(query("a task"), compose("x", rounds[0].draft, found, SKILLS, ComposeConfig()), rounds, "rules")
    assert plan_lines(plan, SKILLS, {}) == [
        "2 steps in 2 levels, made by rules", "level 1", f"  1. {text}", "     → csv-tool  (csv)",
        "level 2", "  2. send it  (after 1)", "     → no skill fits",
    ]  # fmt: skip
    shown = plan_json(plan, SKILLS)
    assert shown["levels"] == [[1], [2]] and shown["steps"][1]["depends_on"] == [1]
    assert shown["steps"][0]["candidates"] == [{"skill_id": "csv", "score": 1.0}]
    chart = plan_mermaid(plan, SKILLS).splitlines()
    assert chart[1] == '    s1["1. find #34;rows#34;#93;#59; #60;b#62;x#60;/b#62;<br/>csv-tool"]'
    assert chart[3] == "    s1 --> s2"


def test_the_command_plans_without_a_model(library: Path) -> None:
    task, pool = "merge the pdf files and then translate the text", library / "skills"
    out = succeeds("plan", task, "--pool", pool).out
    assert "2 steps in 2 levels" in out and "documents/pdf-merge" in out
    plan = json.loads(succeeds("plan", task, "--pool", pool, "--json", "compose.alpha=1").out)
    assert [step["skill_id"] for step in plan["steps"]] == ["documents/pdf-merge", "media/translate-text"]
    assert succeeds("plan", task, "--pool", pool, "--mermaid").out.startswith("flowchart TD")
    assert succeeds("plan", "合并文件，然后翻译", "--pool", pool).out.count("no skill fits") == 2
    for line, fault in {
        ("", "--pool", pool): "the task is empty",
        ("x",): "give either --router or --pool",
        ("x", "--pool", pool, "hints.H=3"): "unknown key 'hints.H'",
        ("x", "--pool", pool, "--llm", "{kind: parrot}"): "unknown choice 'parrot'",
    }.items():
        assert fault in skilltrain("plan", *line).error_line
