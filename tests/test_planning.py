"""Planning splits a task into steps, chooses a skill for each and is scored against gold plans."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import jsonl, write, write_ours, write_pool
from faults import raises
from llm_server import LLMServer, Reply, chat, llm_server
from skilltrain.config import load_recipe, validate
from skilltrain.data.pool.read import read_pool
from skilltrain.llm import AnswerError
from skilltrain.llm.query_prompts import Ask
from skilltrain.metrics.benchmarks.benchmark import GoldStep, Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.measures import Relevance
from skilltrain.papers.skillweaver.compose import (
    Plan,
    Step,
    compose,
    plan_json,
    plan_lines,
    plan_mermaid,
)
from skilltrain.papers.skillweaver.decompose import read_steps
from skilltrain.papers.skillweaver.plan_measures import measure_names, plan_values
from skilltrain.papers.skillweaver.planner import Planner, PlannerConfig
from skilltrain.papers.skillweaver.rules import Round, dependencies, steps_by_rules
from skilltrain.records import Query, Ranking, Skill
from skilltrain.tables import DROPPED, PLANS, QUERIES, read_table, write_table
from small_library import skilltrain, succeeds
from test_benchmarks import live, mcp_task


def tool(skill_id: str, description: str = "", category: str | None = None) -> Skill:
    """Make a skill without a body."""
    return Skill(skill_id, f"{skill_id}-tool", description, "", category)


def query(text: str, query_id: str = "q") -> Query:
    """Make a query that needs several skills."""
    return Query(query_id, text, "multi", "test", "test")


@pytest.mark.parametrize(
    ("task", "steps"),
    [
        (
            "Download the dataset, transform it, and create visual reports",
            ["Download the dataset", "transform it", "create visual reports"],
        ),
        ("First fetch the prices and then notify my team.", ["fetch the prices", "notify my team"]),
        (
            "Before sending the report, translate it into French",
            ["translate it into French", "sending the report"],
        ),
        ("Plot the sales after cleaning the table", ["cleaning the table", "Plot the sales"]),
        (
            "1. Scrape the page\n2. Store it in a database\n- Notify me",
            ["Scrape the page", "Store it in a database", "Notify me"],
        ),
        (
            "I am new here. Could you find a hotel? Save it to a.csv; thanks.",
            ["find a hotel", "Save it to a.csv"],
        ),
        (
            "从网站下载最新论文，总结要点，然后翻译成英文并发送邮件给团队",
            ["从网站下载最新论文", "总结要点", "翻译成英文", "发送邮件给团队"],
        ),
        ("Find salt and pepper mills", ["Find salt and pepper mills"]),
        ("good morning", ["good morning"]),
        ("", [""]),
        (
            ". ".join(f"Find item {number}" for number in range(50)),
            [f"Find item {number}" for number in range(20)],
        ),
    ],
)
def test_rules_split_task_into_steps(task: str, steps: list[str]):
    assert list(steps_by_rules(task)) == steps


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        ('["fetch it", "send it"]', ("fetch it", "send it")),
        ('Sure!\n```json\n["fetch it"]\n```', ("fetch it",)),
        ('The steps: ["fetch it"]. Shall I begin?', ("fetch it",)),
    ],
)
def test_usable_answer_gives_steps(answer: str, steps: tuple[str, ...]):
    assert read_steps(Ask(query("a task")), answer) == Round(steps)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1. fetch it 2. send it", "not a JSON list of strings"),
        ('["fetch it", ', "not a JSON list of strings"),
        ("[" * 100_000 + "]", "not a JSON list of strings"),
        ('["fetch it", 3]', "not a JSON list of strings"),
        ('[{"step": "a"}]', "not a JSON list of strings"),
        ("[]", "0 steps, not 1 to 20"),
        ('["fetch it", " "]', "a text of the array is empty"),
        (json.dumps(["step"] * 50), "50 steps, not 1 to 20"),
    ],
)
def test_unusable_answer_gives_reason(answer: str, reason: str):
    with pytest.raises((AnswerError, ValueError)) as error:
        read_steps(Ask(query("a task")), answer)

    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("task", "texts", "after"),
    [
        ("", ["download the data", "clean it", "draw a chart"], [(), (0,), (1,)]),
        (
            "find hotels and find trains; then compare prices",
            ["find hotels", "find trains", "compare prices"],
            [(), (), (0, 1)],
        ),
        ("find hotels and then find trains", ["find hotels", "find trains"], [(), (0,)]),
        (
            "查找北京到上海的高铁票，同时推荐酒店，最后生成行程报告",
            ["查找北京到上海的高铁票", "推荐酒店", "生成行程报告"],
            [(), (), (0, 1)],
        ),
        ("", ["draw a chart of the sales", "get the news", "email the chart"], [(), (), (0, 1)]),
        ("", ["only this"], [()]),
    ],
)
def test_step_depends_on_its_inputs(task: str, texts: list[str], after: list[tuple[int, ...]]):
    assert list(dependencies(task, texts)) == after


def test_level_holds_independent_steps():
    steps = tuple(Step("x", after, (), None) for after in ((), (), (0, 1), (0,), (2, 0)))
    assert Plan(query("x"), steps, (), "rules").levels == [[0, 1], [2, 3], [4]]


CSV = tool("csv", "Exports rows as csv.", "data")
PLOT = tool("plot", "Reads csv rows.", "data")
MAIL = tool("mail", "Delivers letters.", "office")
SKILLS = {skill.skill_id: skill for skill in (CSV, PLOT, MAIL)}
NO_HINTS = {"rounds": 0}
DOWN = LLMServer("http://127.0.0.1:9/v1")  # nothing listens there


def test_alpha_weighs_similarity_against_compatibility():
    rankings: list[Ranking] = [[("csv", 9.0)], [("mail", 8.0), ("plot", 4.0)]]

    def chosen_skills(alpha: float) -> list[str | None]:
        steps = compose("x", ("get rows", "show rows"), rankings, SKILLS, alpha)
        return [step.skill_id for step in steps]

    # Compatibility of csv and plot is 8/9: they share the category (1), plot takes only csv (1),
    # and they share 2 of 3 words of {tool, exports, rows} and {plot, tool, reads, rows}.
    # Compatibility of csv and mail is 1/9: they share the word tool.
    # Score of mail: alpha * 1 + (1 - alpha) * 1/9. Score of plot: (1 - alpha) * 8/9.
    # They are equal at alpha = 7/16.
    assert chosen_skills(1.0) == ["csv", "mail"]
    assert chosen_skills(7 / 16 + 0.001) == ["csv", "mail"]
    assert chosen_skills(7 / 16 - 0.001) == ["csv", "plot"]


def test_step_without_fitting_skill_is_empty():
    rankings: list[Ranking] = [[("csv", 0.0), ("mail", 0.0)], [("csv", 0.2)], []]

    steps = compose("x", ("zzz", "get rows", "send it"), rankings, SKILLS, alpha=0.5)

    assert [step.skill_id for step in steps] == [None, "csv", None]


def _find(texts: Sequence[str], keep: int) -> list[Ranking]:
    """Return the skills whose ids occur in each text, the first one best."""
    rankings: list[Ranking] = []
    for text in texts:
        words = enumerate(text.split(), 1)
        rankings.append([(word, 1 / n) for n, word in words if word in SKILLS][:keep])
    return rankings


def _plan(
    *answers: str,
    text: str = "save csv, then send mail",
    lenient: bool = False,
    hints: dict[str, Any] = NO_HINTS,
    **decomposer: Any,
) -> tuple[Plan, list[str]]:
    """Plan one task with a model that gives these answers; without answers the model is down.

    Returns:
        The plan, and the prompt of each request.
    """
    with llm_server() as server:
        server.script = [Reply(answer) for answer in answers]
        llm = chat(server if answers else DOWN)
        decomposer = {"kind": "llm", "llm": llm, "max_retries": 1, **decomposer}
        config = validate(PlannerConfig, {"decomposer": decomposer, "hints": hints}, "test")
        planner = Planner(config, SKILLS, _find, {"q": {"mail"}}, lenient)

        (plan,) = planner.plan([query(text)])

        assert server.script == []
        return plan, [request["messages"][1]["content"] for request in server.requests]


@pytest.mark.parametrize(
    ("hints", "answers", "rounds"),
    [
        # Hints: the first skill of every step, then the second ones. 2/3 is above stop_above.
        (
            {"rounds": 2},
            ['["csv plot", "mail plot"]', '["csv mail"]'],
            [("csv mail plot", None), ("csv mail", 2 / 3)],
        ),
        (
            {"rounds": 2, "stop_above": 0.8, "count": 2},
            ['["csv plot", "mail"]', '["csv"]', '["x"]'],
            [("csv mail", None), ("csv", 1 / 2), ("", 0.0)],
        ),
        ({"rounds": 1}, ['["x"]'], [("", None)]),
        ({"rounds": 1}, ['["csv"]', "no list", "no list"], [("csv", None)]),
    ],
    ids=["alike", "all rounds", "no hints", "no usable answer"],
)
def test_plan_records_hints_of_every_round(
    hints: dict[str, Any], answers: list[str], rounds: list[tuple[str, float | None]]
):
    plan, _ = _plan(*answers, hints=hints)

    assert [(" ".join(round_.hints), round_.jaccard) for round_ in plan.rounds] == rounds
    assert (plan.made_by, plan.notes) == ("llm", ())


def test_prompt_shows_hints_of_last_round():
    answers = "no list", '["csv"]', '["csv", "mail"]'

    plan, prompts = _plan(*answers, hints={"rounds": 1})

    assert "save csv, then send mail" in prompts[0]
    assert "not a JSON list" in prompts[1]
    assert "-tool" not in prompts[1]
    assert "skills that exist and may help\ncsv-tool\n" in prompts[2]
    assert [step.skill_id for step in plan.steps] == ["csv", "mail"]


def test_prompt_shows_descriptions_of_hints():
    _, prompts = _plan('["csv"]', '["csv"]', hints={"show": "described"})

    assert "may help\ncsv-tool: Exports rows as csv.\n" in prompts[-1]


def test_prompt_may_show_only_categories():
    answers = '["csv plot", "mail"]', '["csv"]'

    _, prompts = _plan(*answers, hints={"show": "categories"})

    assert "may help\ndata, office\n" in prompts[-1]


STEPS_PROMPT = """system: Cut.
user: "{% if hint_list %}Use {{ hint_list }}. {% endif %}Do {{ query }}"
"""


def test_prompt_file_replaces_messages(tmp_path):
    (tmp_path / "f.yaml").write_text(STEPS_PROMPT)
    answers = '["csv", "mail"]', '["csv", "mail"]'
    settings = {"prompt": str(tmp_path / "f.yaml"), "query_chars": 8}

    plan, prompts = _plan(*answers, hints={"rounds": 1}, **settings)

    assert prompts == ["Do save csv", "Use csv-tool, mail-tool. Do save csv"]
    assert [step.skill_id for step in plan.steps] == ["csv", "mail"]


def test_rules_plan_without_usable_answer():
    plan, _ = _plan("no list", '["a", {}]')

    assert [step.text for step in plan.steps] == ["save csv", "send mail"]
    assert plan.made_by == "rules"
    assert "no answer of the model was usable" in plan.notes[0]


def test_unreachable_model_ends_evaluation():
    with raises("server-unreachable"):
        _plan()


def test_lenient_planner_survives_unreachable_model():
    plan, _ = _plan(lenient=True)

    assert len(plan.steps) == 2
    assert "usable: no server answers" in plan.notes[0]


def test_direct_planner_chooses_by_number():
    plan, prompts = _plan("[9]", "[2, 1]", text="save as csv", kind="direct", shown=2)

    assert "1. csv-tool\n2. mail-tool" in prompts[0], "the gold skill mail is listed"
    assert [step.skill_id for step in plan.steps] == ["mail", "csv"]
    assert [step.text for step in plan.steps] == ["mail-tool", "csv-tool"]


def test_react_searches_until_it_is_done():
    answers = '{"thought": "t", "search": "a csv"}', '{"search": "mail"}', '{"done": true}'

    plan, prompts = _plan(*answers, kind="react")

    assert "so far\nsearch: a csv\ncsv-tool: Exports rows as csv." in prompts[1]
    assert [step.text for step in plan.steps] == ["a csv", "mail"]


def test_react_without_search_is_noted():
    plan, _ = _plan('{"done": true}', kind="react")

    assert "looked for nothing" in plan.notes[0]


HOSTILE_TEXT = 'find "rows"]; <b>x</b>'


@pytest.fixture
def hostile_plan() -> Plan:
    """A plan of two steps. No skill fits the second one."""
    texts = HOSTILE_TEXT, "send it"
    steps = compose("x", texts, [[("csv", 1.0)], []], SKILLS, alpha=0.5)
    return Plan(query("a task"), steps, (Round(texts),), "rules")


def test_plan_is_shown_as_lines(hostile_plan: Plan):
    assert plan_lines(hostile_plan, {}) == [
        "2 steps in 2 levels, made by rules",
        "level 1",
        f"  1. {HOSTILE_TEXT}",
        "     → csv-tool  (csv)",
        "level 2",
        "  2. send it  (after 1)",
        "     → no skill fits",
    ]


def test_plan_is_shown_as_json(hostile_plan: Plan):
    record = plan_json(hostile_plan)

    assert record["levels"] == [[1], [2]]
    assert record["steps"][1]["depends_on"] == [1]
    assert record["steps"][0]["candidates"] == [{"skill_id": "csv", "score": 1.0}]


def test_mermaid_chart_escapes_text(hostile_plan: Plan):
    lines = plan_mermaid(hostile_plan).splitlines()

    assert lines[1] == '    s1["1. find #34;rows#34;#93;#59; #60;b#62;x#60;/b#62;<br/>csv-tool"]'
    assert lines[3] == "    s1 --> s2"


PLAN_COMMAND = ("skillweaver", "plan")
PDF_TASK = "merge the pdf files and then translate the text"


def test_command_plans_without_model(library):
    out = succeeds(*PLAN_COMMAND, PDF_TASK, "--pool", library / "skills").out

    assert "2 steps in 2 levels" in out
    assert "documents/pdf-merge" in out


def test_command_prints_plan_as_json(library):
    command = *PLAN_COMMAND, PDF_TASK, "--pool", library / "skills"

    plan = json.loads(succeeds(*command, "--json", "compose.alpha=1").out)

    skill_ids = [step["skill_id"] for step in plan["steps"]]
    assert skill_ids == ["documents/pdf-merge", "media/translate-text"]


def test_command_prints_plan_as_mermaid(library):
    command = *PLAN_COMMAND, PDF_TASK, "--pool", library / "skills"

    assert succeeds(*command, "--mermaid").out.startswith("flowchart TD")


def test_command_names_steps_without_skill(library):
    out = succeeds(*PLAN_COMMAND, "合并文件，然后翻译", "--pool", library / "skills").out

    assert out.count("no skill fits") == 2


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        ("", (), "the task is empty"),
        ("x", ("hints.H=3",), "unknown key 'hints.H'"),
        ("x", ("compose.min_score=1",), "removed: calibrate a router"),
        ("x", ("--llm", "{kind: parrot}"), "must be 'openai', found 'parrot'"),
    ],
)
def test_command_refuses_wrong_arguments(
    library, task: str, setting: tuple[str, ...], message: str
):
    line = skilltrain(*PLAN_COMMAND, task, "--pool", library / "skills", *setting).error_line

    assert message in line


# Scores of plans --------------------------------------------------------------

LETTER_SKILLS = {
    name: Skill(name, name, "", "", name[0].upper()) for name in ("a1", "a2", "b1", "b2", "c1")
}


def task(
    *steps: tuple[str, str], gold: str = "", alternatives: dict[str, str] | None = None
) -> Task:
    """Make a task from the text and gold skill of each step.

    Args:
        gold: Ids of the gold skills, separated by spaces. By default those of the steps.
        alternatives: Gold skill of each skill that may replace it.
    """
    gold_ids = frozenset(gold.split() or [skill_id for _, skill_id in steps])
    relevance = Relevance(gold_ids, dict.fromkeys(gold_ids, 1.0), alternatives or {})
    gold_steps = tuple(GoldStep(*step) for step in steps)
    return Task(query("x"), relevance, steps=gold_steps)


def values(
    task: Task, rankings: list[str], choices: str, oracle_rankings: list[str]
) -> dict[str, float]:
    """Score a plan. Rankings and choices are ids, separated by spaces. `-` is no choice."""
    return plan_values(
        task,
        [ranking.split() for ranking in rankings],
        [None if choice == "-" else choice for choice in choices.split()],
        [ranking.split() for ranking in oracle_rankings],
        LETTER_SKILLS,
        dict.fromkeys(LETTER_SKILLS, 10),
    )


def test_measures_by_hand():
    gold_task = task(("do a", "a1"), ("do b", "b1"), ("do c", "c1"))
    measured = values(gold_task, ["a2 a1", "b2 b1"], "a2 b1", ["a1", "b2", "b2"])
    expected = {
        "steps": 2,
        "DA": 0,
        "DA±1": 1,
        "R@1": 0,
        "R@5": 2 / 3,
        "CatR@1": 2 / 3,
        "CatR@10": 2 / 3,
        "Chain exact": 0,
        "Chain category (share)": 2 / 3,
        "Chain category (all)": 0,
        "Skill R@1": 0,
        "Skill R@5": 2 / 3,
        "Chosen": 1 / 3,
        "Oracle R@1": 1 / 3,
        "Oracle CatR@1": 2 / 3,
        "Step R@1": 2 / 3,
        "Step R@5": 1,
        "Oracle Skill R@10": 1 / 3,
        "Context saved": 1 - 20 / 50,
        "Lost in composition": 1 / 3,
        "Lost in decomposition": 0,
        "Lost in retrieval": 1 / 3,
    }

    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    assert set(measured) == set(measure_names())


TWO_STEPS = task(("do a", "a1"), ("do b", "b1"))


@pytest.mark.parametrize(
    ("rankings", "choices", "oracle_rankings", "expected"),
    [
        (
            ["a1", "b1"],
            "a1 b1",
            ["a1", "b1"],
            {"DA": 1, "Chain exact": 1, "Chain category (all)": 1, "Chosen": 1},
        ),
        (
            ["b1", "a1"],
            "b1 a1",
            ["a1", "b1"],
            {"Chain exact": 0, "R@1": 0, "Chosen": 1, "Skill R@1": 1},
        ),
        (
            ["a1", "b1", "c1"],
            "a1 b1 -",
            ["a1", "b1"],
            {"Chain category (share)": 1, "Chain category (all)": 0, "DA±1": 1},
        ),
        (
            ["c1"],
            "c1",
            ["a1", "c1"],
            {"Lost in decomposition": 0.5, "Lost in retrieval": 0.5, "Lost in composition": 0},
        ),
    ],
    ids=["exact", "swapped", "longer", "missed"],
)
def test_chain_measures(
    rankings: list[str], choices: str, oracle_rankings: list[str], expected: dict[str, float]
):
    measured = values(TWO_STEPS, rankings, choices, oracle_rankings)

    assert {name: measured[name] for name in expected} == expected


def test_steps_without_gold_skills_have_no_step_measures():
    gold_task = task(("do it", ""), gold="a1 b1", alternatives={"a2": "a1"})

    measured = values(gold_task, ["a2", "c1"], "a2 c1", ["b1"])

    assert not {"R@1", "CatR@1", "Chain exact", "Oracle R@1"} & measured.keys()
    assert measured["Skill R@1"] == 0.5
    assert measured["DA"] == 0
    assert measured["Lost in decomposition"] == 0.5


def test_task_without_steps_has_no_depth_measure():
    assert "DA" not in values(task(gold="a1"), ["a1"], "a1", [])


POOL = [
    Skill("pdf", "pdf-merge", "merge pdf pages", "Joins pdf pages.", "documents"),
    Skill("text", "pdf-words", "extract words of a pdf", "Reads words.", "documents"),
    Skill("chart", "chart-maker", "draw a chart of numbers", "Draws.", "pictures"),
    Skill("mail", "mailer", "deliver letters by mail", "Delivers.", "office"),
]
CHAINS = {
    "q1": ("Extract the words of the pdf and then draw a chart of numbers.", ["text", "chart"]),
    "q2": ("Draw a chart of numbers, and deliver it by mail.", ["chart", "mail"]),
    "q3": ("Merge the pdf pages with a chart of numbers", ["pdf", "chart"]),
}


@pytest.fixture
def bench(tmp_path) -> Path:
    """A folder with CHAINS as the benchmark `bench` and POOL as `pool`."""
    descriptions = {skill.skill_id: skill.description for skill in POOL}
    queries = []
    verdicts = {}
    step_rows = []
    for query_id, (text, skill_ids) in CHAINS.items():
        queries.append((query_id, text, "test"))
        verdicts[query_id] = dict.fromkeys(skill_ids, "required")
        for skill_id in skill_ids:
            row = {
                "query_id": query_id,
                "step_id": str(len(step_rows)),
                "text": descriptions[skill_id],
                "depends_on": [],
                "skill_id": skill_id,
            }
            step_rows.append(row)

    folder = write_ours(tmp_path / "bench", queries, verdicts)
    write_table(step_rows, PLANS, folder)
    write_pool(tmp_path / "pool", POOL)
    return tmp_path


def arguments(root: Path, *settings: str) -> list[str]:
    """Return the command that scores plans of the benchmark in `root`."""
    return [
        "skillweaver",
        "plans",
        f"benchmark={root / 'bench'}",
        f"pool={root / 'pool'}",
        "system.name=bm25",
        "system.rankers=[{kind: lexical}]",
        *settings,
        f"out={root / 'out'}",
    ]


def run(root: Path, *settings: str) -> dict[str, Any]:
    """Score the plans and return the metrics."""
    succeeds(*arguments(root, *settings))
    return json.loads((root / "out" / "metrics.json").read_text())


def test_stage_compares_planners(bench: Path):
    planners = "planners=[{name: first}, {name: one step, decomposer: {kind: whole}}]"

    metrics = run(bench, planners, "compare=[DA, CatR@1]")

    # Means of each planner over all tasks.
    means = metrics["planners"]["first"][0]["means"]
    assert means["DA"]["mean"] == pytest.approx(2 / 3)
    assert means["Oracle R@1"]["mean"] == 1.0
    assert means["CatR@1"]["mean"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert metrics["planners"]["one step"][0]["means"]["DA"]["mean"] == 0

    # Slices.
    slices = {(row["label"], row["value"]): row["n"] for row in metrics["planners"]["first"]}
    assert slices["steps planned", "as many as gold"] == 2
    assert slices["category", "office"] == 1

    # Comparisons with the first planner.
    depth, category = metrics["comparisons"]
    assert depth["system"] == "one step"
    assert depth["difference"]["mean"] == pytest.approx(-2 / 3)
    assert (depth["num_better"], depth["num_worse"]) == (0, 2)
    assert category["baseline"] == "first"

    # Report and plans.
    report = (bench / "out" / "report.md").read_text()
    assert "| DA | .667 [.00, 1.00] | .000 [.00, .00] |" in report
    assert "| one step | first | DA |" in report
    lines = (bench / "out" / "plans.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["steps"]) for line in lines] == [2, 2, 1, 1, 1, 1]


def test_stage_reports_rounds_groups_and_latency(bench: Path, server: LLMServer):
    # First, each task is one step. With hints, the task about mail has two.
    def answer(request: dict[str, Any]) -> Reply:
        task, _, hints = request["messages"][1]["content"].partition("may help")
        if not hints or "mail" not in task:
            return Reply('["extract words of a pdf"]')
        return Reply('["draw a chart of numbers", "deliver letters by mail"]')

    server.otherwise = answer
    model = {"kind": "llm", "llm": chat(server)}
    vanilla = {"name": "vanilla", "decomposer": model, "hints": {"rounds": 0}}
    aware = {"name": "aware", "decomposer": model, "hints": {"rounds": 1}}

    metrics = run(bench, f"planners={json.dumps([vanilla, aware])}", "num_timed=2")

    assert metrics["groups"] == [
        {"planner": "aware", "group": "both wrong", "n": 2, "first CatR@1": 0.5, "CatR@1": 0.5},
        {"planner": "aware", "group": "fixed", "n": 1, "first CatR@1": 0.0, "CatR@1": 1.0},
    ]
    recalls = [row["CatR@1"] for row in metrics["rounds"]["aware"]]
    assert recalls == pytest.approx([1 / 3, 2 / 3])
    assert metrics["latencies"]["vanilla"]["n"] == 2
    assert len(server.requests) == 3 + 6 + 2 + 4
    report = (bench / "out" / "report.md").read_text()
    assert "| aware | fixed | 1 | .000 | 1.000 |" in report
    assert "| vanilla | 2 | " in report


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("{{ task }}", "'task' is undefined (the placeholders are query, hint_list)"),
        ("{{ query }}", "does not use the placeholder hint_list"),
        ("{{ hint_list }}", "does not use the placeholder query"),
        ("{% if hint_list %}{{ hint_list }} {{ query }}{% endif %}", "the placeholder query"),
    ],
)
def test_faulty_prompt_file_is_refused(bench: Path, user: str, message: str):
    (bench / "f.yaml").write_text(f'system: Cut.\nuser: "{user}"\n')
    model = {"kind": "llm", "llm": chat(DOWN), "prompt": str(bench / "f.yaml")}
    planners = json.dumps([{"name": "model", "decomposer": model}])

    line = skilltrain(*arguments(bench, f"planners={planners}")).error_line

    assert message in line


def test_dry_run_counts_requests(bench: Path):
    llm = json.dumps(chat(DOWN))
    planners = f"planners=[{{name: rules}}, {{name: model, decomposer: {{kind: llm, llm: {llm}}}}}]"

    plan = json.loads(succeeds(*arguments(bench, planners), "--dry-run").out)["dry_run"]

    assert (plan["num_tasks"], plan["num_skills"]) == (3, 4)
    assert plan["asked"].keys() == {"model"}
    assert plan["asked"]["model"]["num_requests"] == 3


def test_held_out_skill_keeps_its_category(bench: Path):
    write_pool(bench / "away", POOL[:1])

    metrics = run(bench, f"held_out={bench / 'away'}")

    means = metrics["planners"]["rules"][0]["means"]
    assert means["Oracle R@1"]["mean"] == pytest.approx((1 + 1 + 0.5) / 3)
    # The other skill of the category is ranked first instead.
    assert means["Oracle CatR@1"]["mean"] == 1.0


def test_benchmark_category_is_used_without_gold_skills(tmp_path):
    """Each task of LiveMCPBench has a category."""
    tasks = [
        mcp_task(tool, tool, steps=[f"{tool} it"], category=f"to {tool}")
        for tool in ("write", "fetch")
    ]
    write(tmp_path / "bench", live(*tasks))

    slices = run(tmp_path, "pool=null")["planners"]["rules"]

    categories = [row["value"] for row in slices if row["label"] == "category"]
    assert categories == ["to fetch", "to write"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("planners=[{name: a}, {name: a}]", "two planners have the same name"),
        ("compare=[Hit@1]", "unknown measure 'Hit@1'; measures are DA, "),
        (
            "planners=[{name: a, compose: {alpha: 2}}]",
            "planners.0.compose.alpha: must be less than or equal to 1",
        ),
        ("split=dev", "dev"),
    ],
)
def test_wrong_setting_is_refused(bench: Path, setting: str, message: str):
    assert message in skilltrain(*arguments(bench, setting)).error_line


def test_gold_skill_outside_pool_is_refused(bench: Path):
    write_pool(bench / "pool", POOL[1:])

    line = skilltrain(*arguments(bench)).error_line

    assert "gold skill 'pdf' of query 'q3' is not among the 3 skills" in line


def test_plan_of_unknown_query_is_refused(bench: Path):
    row = {"query_id": "q9", "step_id": "1", "text": "t", "depends_on": []}
    write_table([row], PLANS, bench / "bench")

    line = skilltrain(*arguments(bench)).error_line

    assert "1 judged or planned queries are not in queries.parquet, first 'q9'" in line


def test_chat_model_without_settings_is_refused(bench: Path):
    line = skilltrain(*PLAN_COMMAND, "x", "--pool", bench / "pool", "--llm", "5").error_line

    assert "--llm: must be a map of settings, found 5" in line


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"depends_on": ["9"]}, "a step depends on '9', which is no step"),
        ({"depends_on": ["1"]}, "steps depend on each other: 1 on 1"),
        ({"skill_id": "nope"}, "skill 'nope' of a step is not in the pool"),
    ],
)
def test_impossible_plan_is_refused(bench: Path, changed: dict[str, Any], message: str):
    row = {"query_id": "q1", "step_id": "1", "text": "t", "depends_on": []}
    write_table([row | changed], PLANS, bench / "bench")

    assert message in skilltrain(*arguments(bench)).error_line


def test_benchmark_without_plans_is_refused(bench: Path):
    (bench / "bench" / "plans.parquet").unlink()

    assert "its tasks have no steps" in skilltrain(*arguments(bench)).error_line


def test_ablate_sweeps_alpha(bench: Path):
    grid = {
        "ablation": "alpha",
        "claim": "Compatibility helps.",
        "baseline": "similarity",
        "seeds": [1],
        "compare": ["Chosen"],
        "out": str(bench / "grid"),
        "variants": {"similarity": None, "compatibility": {"plan.planners.0.compose.alpha": 0.0}},
        "steps": {
            "plan": {
                "stage": "plans",
                "benchmark": str(bench / "bench"),
                "pool": str(bench / "pool"),
                "system": {"name": "bm25", "rankers": [{"kind": "lexical"}]},
                "planners": [{"name": "rules", "compose": {"alpha": 1.0}}],
            }
        },
    }
    (bench / "grid.yaml").write_text(json.dumps(grid))

    succeeds("ablate", bench / "grid.yaml")

    (table,) = json.loads((bench / "grid" / "ablation.json").read_text())["tables"]
    assert [variant["variant"] for variant in table["variants"]] == ["similarity", "compatibility"]
    assert table["differences"][0]["measure"] == "Chosen"
    assert table["num_queries"] == 3


def test_row_without_body_is_tool(tmp_path):
    rows = [
        {"id": "x/one", "name": "one", "description": "Finds shares.", "category": "Finance"},
        {"id": "y/one", "name": "one", "description": "Finds songs."},
        {"id": "z/one", "name": "one", "description": "finds  songs."},
        {"id": "bare", "name": "bare"},
        {"id": "empty", "name": "e", "description": "d", "body": " "},
    ]
    (tmp_path / "servers.jsonl").write_text(jsonl(*rows))

    succeeds("pool", f"sources={tmp_path / 'servers.jsonl'}", f"out={tmp_path / 'pool'}")

    skills = read_pool(tmp_path / "pool")
    assert [skill.skill_id for skill in skills] == ["empty", "x/one", "y/one"]
    assert {skill.body for skill in skills} == {""}
    assert [skill.category for skill in skills] == [None, "Finance", None]
    assert len(read_pool(tmp_path / "servers.jsonl")) == 4  # duplicates are not dropped here


CATEGORIES_YAML = """
tables:
  from: [Databases]
  steps:
    - ["rows", read the rows, look at the rows, what rows are there]
    - ["rows", ask db-0 for rows, x, x]
pictures:
  from: [Art]
  words: "\\\\bpainter\\\\b"
  steps:
    - ["painting", show a painting, present a canvas, let me see it]
rare:
  from: [Rare]
  steps:
    - ["rare", do a rare thing, x, x]
"""


@pytest.fixture
def pipeline(monkeypatch) -> Any:
    """The module of the pipeline that builds CompSkillBench."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "data_pipelines")
    return importlib.import_module("compskillbench")


def server(name: str, description: str, category: str) -> dict[str, str]:
    """Make a row of a list of servers."""
    return {"name": name, "description": description, "category": category}


SERVERS = [
    *(server(f"db-{n}", f"Serves rows of store {n}.", "Databases") for n in range(4)),
    *(server(f"art{n}", "Shows a painting.", "Art") for n in range(3)),
    server("DB_1", "Serves rows once more.", "Databases"),
    server("short", "Too short.", "Databases"),
    server("badge", "[![x](https://a.b/c.svg)](https://a.b) https://a.b/x y", "Art"),
    server("odd", "A category that nobody mapped.", "Odd"),
    server("hand", "A painter of rows, by its words.", "Databases"),
    server("rare", "A rare thing that stands alone.", "Rare"),
]


def test_compskillbench_is_rebuilt_from_a_list(pipeline: Any, tmp_path):
    (tmp_path / "servers.jsonl").write_text(jsonl(*SERVERS))
    (tmp_path / "groups.yaml").write_text(CATEGORIES_YAML)
    settings = {
        "servers": tmp_path / "servers.jsonl",
        "out": tmp_path / "out",
        "categories": tmp_path / "groups.yaml",
        "sizes": {2: 6},
        "held_out": ["pictures"],
        "min_skills": 3,
    }

    counts = pipeline.run(pipeline.Pipeline.model_validate(settings))

    assert counts == {
        "skills": 9,
        "dropped": 4,
        "tasks": 6,
        "transfer_category": {"tasks": 6, "held out": 4},
        "transfer_skill": {"tasks": counts["transfer_skill"]["tasks"], "held out": 2},
    }
    skills = {skill.skill_id: skill for skill in read_pool(tmp_path / "out" / "pool")}
    assert skills["hand"].category == "pictures"
    assert skills["hand"].body == ""
    assert "short" not in skills

    # Every style has the same chains, and every chain has one skill of each category.
    chains_by_style = {}
    for style in ("template", "paraphrase", "human"):
        chains_by_style[style] = chains = []
        for task in load_benchmark(tmp_path / "out" / style).tasks:
            chain = [step.skill_id for step in task.steps]
            chains.append(chain)
            assert {skills[skill_id].category for skill_id in chain} == {"tables", "pictures"}
            for step in task.steps:
                assert step.text.lower() in task.query.text.lower()
                assert "db-0" not in step.text or step.skill_id != "db-0"
    assert chains_by_style["template"] == chains_by_style["paraphrase"] == chains_by_style["human"]


def test_compskillbench_reads_markdown_lists(pipeline: Any, tmp_path):
    listed = "## 🗄 Databases\n\nText.\n- [a/b](https://x.y): Serves rows.\n- no entry\n"
    (tmp_path / "db.md").write_text(listed)

    (row,) = pipeline.read_servers(tmp_path)

    assert (row["name"], row["description"]) == ("a/b", "Serves rows.")
    assert row["category"] == "Databases"


def test_compskillbench_refuses_empty_folder(pipeline: Any, tmp_path):
    with raises("unknown-format"):
        list(pipeline.read_servers(tmp_path))


# Other words for the same tasks -----------------------------------------------


def test_agreement_compares_two_wordings(bench: Path):
    planners = "planners=[{name: rules}, {name: whole, decomposer: {kind: whole}}]"
    run(bench, planners)
    (bench / "out").rename(bench / "first")
    queries = [(query_id, "Merge pdf pages, then draw a chart.", "test") for query_id in CHAINS]
    write_table(
        [Query(*query[:2], "multi", "paraphrase", query[2]) for query in queries],
        QUERIES,
        bench / "bench",
    )
    run(bench, planners)
    command = ("skillweaver", "agreement", bench / "first", bench / "out")

    rules, whole = json.loads(succeeds(*command, "--json").out)

    # Rules cut q1 and q2 rightly in the first words, and all three in the other words.
    assert (rules["agreement"]["mean"], rules["agreement"]["n"]) == (pytest.approx(2 / 3), 3)
    assert (rules["DA"], rules["DA, other words"]) == (0.6667, 1.0)
    assert whole["agreement"]["mean"] == 1.0
    assert "CatR@1" in succeeds(*command).err


def test_agreement_needs_shared_planner(bench: Path):
    run(bench, "planners=[{name: a}]")
    (bench / "out").rename(bench / "first")
    run(bench, "planners=[{name: b}]")

    outcome = skilltrain("skillweaver", "agreement", bench / "first", bench / "out")

    assert "has no planner with a task of the other run" in outcome.error_line


@pytest.fixture
def rebuild(pipeline: Any, tmp_path) -> Any:
    """Return a function that rebuilds the benchmark of SERVERS in a folder, with a sheet or not."""
    (tmp_path / "servers.jsonl").write_text(jsonl(*SERVERS))
    (tmp_path / "groups.yaml").write_text(CATEGORIES_YAML)

    def run_with(out: str, sheet: Path | None = None) -> dict[str, Any]:
        settings = {
            "servers": tmp_path / "servers.jsonl",
            "out": tmp_path / out,
            "categories": tmp_path / "groups.yaml",
            "sizes": {2: 3},
            "min_skills": 3,
            "sheet": sheet,
        }
        return pipeline.run(pipeline.Pipeline.model_validate(settings))

    return run_with


def fill_sheet(file: Path, requests: list[str]) -> Path:
    """Write requests into the empty column of a sheet."""
    header, *rows = file.read_text(encoding="utf-8-sig").splitlines()
    pairs = zip(rows, requests, strict=True)
    file.write_text("\n".join([header, *(f'{row}"{request}"' for row, request in pairs)]))
    return file


def test_filled_sheet_becomes_benchmark(rebuild: Any, tmp_path):
    rebuild("first")
    tasks = load_benchmark(tmp_path / "first" / "template").tasks
    named = read_pool(tmp_path / "first" / "pool")
    name = next(skill.name for skill in named if skill.skill_id == tasks[1].steps[0].skill_id)
    sheet = fill_sheet(tmp_path / "first" / "sheet.csv", ["Rows, please.", f"use {name}", ""])

    counts = rebuild("second", sheet)

    assert counts["people"] == 1
    (human,) = load_benchmark(tmp_path / "second" / "people").tasks
    assert human.query.text == "Rows, please."
    assert human.steps == tasks[0].steps
    (row,) = read_table(tmp_path / "second" / "people", DROPPED).to_pylist()
    assert (row["query_id"], row["reason"]) == ("comp-002", f"names the skill {name}")


def test_empty_sheet_gives_no_tasks(rebuild: Any, tmp_path):
    rebuild("first")
    sheet = fill_sheet(tmp_path / "first" / "sheet.csv", ["", "", ""])

    counts = rebuild("second", sheet)

    assert counts["people"] == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a,b\n1,2\n", "wrong-columns"),
        ("query_id,steps,request\nq9,s,do it\n", "unknown-query"),
    ],
)
def test_faulty_sheet_is_refused(rebuild: Any, tmp_path, text: str, code: str):
    (tmp_path / "s.csv").write_text(text)

    with raises(code):
        rebuild("out", tmp_path / "s.csv")


# The recipes ------------------------------------------------------------------

RECIPES = Path(__file__).parents[1] / "recipes"


def answer_any_prompt(request: dict[str, Any]) -> Reply:
    """Answer as a model that follows the prompt of each decomposer."""
    system = request["messages"][0]["content"]
    if "array of the numbers" in system:
        return Reply("[1]")
    is_react = '"search"' in system
    return Reply('{"done": true}' if is_react else '["extract words of a pdf", "draw a chart"]')


@pytest.mark.parametrize(
    ("name", "num_planners"), [("skillweaver", 7), ("paper/skillweaver_sweeps", 8)]
)
def test_recipe_runs_with_any_server(bench: Path, server: LLMServer, name: str, num_planners: int):
    server.otherwise = answer_any_prompt
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    for planner in recipe["planners"]:
        if "decomposer" in planner:
            sampling = planner["decomposer"]["llm"]
            assert (sampling["temperature"], sampling["top_p"]) == (0.1, 0.9)
            planner["decomposer"] = planner["decomposer"] | {"llm": chat(server, bench / "cache")}
    planners = json.dumps(recipe["planners"])

    metrics = run(bench, f"planners={planners}", f"compare={json.dumps(recipe['compare'])}")

    assert len(metrics["planners"]) == num_planners
