"""Tasks become steps, steps find skills, skills are chosen and put in order; and such plans are scored against gold."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import jsonl, write, write_ours, write_pool
from faults import raises
from llm_server import LLMServer, Reply, chat, llm_server
from skilltrain.config import validate
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
from skilltrain.tables import PLANS, write_table
from small_library import skilltrain, succeeds
from test_benchmarks import live, mcp_task


def tool(skill_id: str, description: str = "", category: str | None = None) -> Skill:
    return Skill(skill_id, f"{skill_id}-tool", description, "", category)


def query(text: str, query_id: str = "q") -> Query:
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
def test_rules_cut_a_task_at_words_of_order_and_before_verbs(task: str, steps: list[str]) -> None:
    assert list(steps_by_rules(task)) == steps


NO_TEXTS = (
    "1. fetch it 2. send it",
    '["fetch it", ',
    "[" * 100_000 + "]",
    '["fetch it", 3]',
    '[{"step": "a"}]',
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ('["fetch it", "send it"]', Round(("fetch it", "send it"))),
        ('Sure!\n```json\n["fetch it"]\n```', Round(("fetch it",))),
        ('The steps: ["fetch it"]. Shall I begin?', Round(("fetch it",))),
        *((text, "not a JSON list of strings") for text in NO_TEXTS),
        ("[]", "0 steps, not 1 to 20"),
        ('["fetch it", " "]', "a text of the array is empty"),
        (json.dumps([f"step {number}" for number in range(50)]), "50 steps, not 1 to 20"),
    ],
)
def test_an_answer_is_steps_or_says_why_it_is_none(answer: str, outcome: Round | str) -> None:
    try:
        assert read_steps(Ask(query("a task")), answer) == outcome
    except (AnswerError, ValueError) as error:
        assert isinstance(outcome, str) and outcome in str(error)


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
def test_a_step_waits_for_what_it_works_on(
    task: str, texts: list[str], after: list[tuple[int, ...]]
) -> None:
    assert list(dependencies(task, texts)) == after


def test_levels_hold_what_can_be_done_at_once() -> None:
    steps = tuple(Step("x", after, (), None) for after in ((), (), (0, 1), (0,), (2, 0)))
    assert Plan(query("x"), steps, (), "rules").levels == [[0, 1], [2, 3], [4]]


CSV = tool("csv", "Exports rows as csv.", "data")
PLOT = tool("plot", "Reads csv rows.", "data")
MAIL = tool("mail", "Delivers letters.", "office")
SKILLS = {skill.skill_id: skill for skill in (CSV, PLOT, MAIL)}


def test_alpha_weighs_similarity_against_compatibility_with_earlier_steps() -> None:
    found: list[Ranking] = [[("csv", 9.0)], [("mail", 8.0), ("plot", 4.0)]]

    def chosen(alpha: float) -> list[str | None]:
        steps = compose("x", ("get rows", "show rows"), found, SKILLS, alpha)
        return [step.skill_id for step in steps]

    # csv and plot: categories 1; of {tool, exports, rows} and {plot, tool, reads, rows} 2 of 3 words; csv is all that
    # plot takes. csv and mail: the word tool, 1 of 3. So mail: alpha x 1 + (1 - alpha) x 1/9; plot: (1 - alpha) x 8/9.
    assert chosen(1.0) == chosen(7 / 16 + 0.001) == ["csv", "mail"] and chosen(7 / 16 - 0.001) == [
        "csv",
        "plot",
    ]


def test_step_without_fitting_skill_is_empty() -> None:
    rankings: list[Ranking] = [[("csv", 0.0), ("mail", 0.0)], [("csv", 0.2)], []]

    steps = compose("x", ("zzz", "get rows", "send it"), rankings, SKILLS, alpha=0.5)

    assert [step.skill_id for step in steps] == [None, "csv", None]


def _find(texts: Sequence[str], keep: int) -> list[Ranking]:
    """The skills that a text names by their ids, the first best."""
    return [
        [(word, 1 / n) for n, word in enumerate(text.split(), 1) if word in SKILLS][:keep]
        for text in texts
    ]


def _plan(
    *answers: str, text: str = "save csv, then send mail", lenient: bool = False, **decomposer: Any
) -> tuple[Plan, list[str]]:
    """(one task as it is planned by a model that gives these answers, what the model saw each time)."""
    hints = decomposer.pop("hints", {"rounds": 0})
    with llm_server() as server:
        server.script = [Reply(answer) for answer in answers]
        llm = chat(
            server if answers else LLMServer("http://127.0.0.1:9/v1")
        )  # nothing listens there
        values = {
            "decomposer": {"kind": "llm", "llm": llm, "max_retries": 1, **decomposer},
            "hints": hints,
        }
        config = validate(PlannerConfig, values, "test")
        planner = Planner(config, SKILLS, _find, {"q": {"mail"}}, lenient)
        (plan,) = planner.plan([query(text)])
        assert server.script == []
        return plan, [request["messages"][1]["content"] for request in server.requests]


@pytest.mark.parametrize(
    ("hints", "answers", "rounds"),
    [
        # Every step's first skill comes before any step's second; 2/3 is above .6.
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
def test_every_round_is_kept_with_its_hints_and_how_much_they_changed(
    hints: dict[str, Any], answers: list[str], rounds: list[tuple[str, float | None]]
) -> None:
    plan, _ = _plan(*answers, hints=hints)
    assert [(" ".join(one.hints), one.jaccard) for one in plan.rounds] == rounds
    assert (plan.made_by, plan.notes) == ("llm", ())


def test_a_model_writes_steps_and_sees_hints_in_the_next_round() -> None:
    plan, (first, again, hinted) = _plan(
        "no list", '["csv"]', '["csv", "mail"]', hints={"rounds": 1}
    )
    assert (
        "save csv, then send mail" in first and "not a JSON list" in again and "-tool" not in again
    )
    assert "skills that exist and may help\ncsv-tool\n" in hinted
    assert [step.skill_id for step in plan.steps] == ["csv", "mail"]
    _, prompts = _plan('["csv"]', '["csv"]', hints={"show": "described"})
    assert "may help\ncsv-tool: Exports rows as csv.\n" in prompts[-1]


def test_without_a_usable_answer_rules_plan_and_a_note_says_so() -> None:
    plan, _ = _plan("no list", '["a", {}]')
    assert [step.text for step in plan.steps] == ["save csv", "send mail"]
    assert plan.made_by == "rules" and "no answer of the model was usable" in plan.notes[0]


def test_a_model_that_is_down_ends_an_evaluation_and_not_a_users_plan() -> None:
    with raises("server-unreachable"):
        _plan()
    plan, _ = _plan(lenient=True)
    assert len(plan.steps) == 2 and "usable: no server answers" in plan.notes[0]


def test_llm_direct_chooses_by_number_from_a_list_that_holds_the_gold_skills() -> None:
    plan, prompts = _plan("[9]", "[2, 1]", text="save as csv", kind="direct", shown=2)
    assert "1. csv-tool\n2. mail-tool" in prompts[0]
    assert [(step.skill_id, step.text) for step in plan.steps] == [
        ("mail", "mail-tool"),
        ("csv", "csv-tool"),
    ]


def test_react_searches_until_it_is_done() -> None:
    answers = '{"thought": "t", "search": "a csv"}', '{"search": "mail"}', '{"done": true}'
    plan, prompts = _plan(*answers, kind="react")
    assert "so far\nsearch: a csv\ncsv-tool: Exports rows as csv." in prompts[1]
    assert [step.text for step in plan.steps] == ["a csv", "mail"]
    assert "looked for nothing" in _plan('{"done": true}', kind="react")[0].notes[0]


def test_a_plan_is_shown_as_lines_json_and_mermaid() -> None:
    text = 'find "rows"]; <b>x</b>'
    rounds = (Round((text, "send it")),)
    found: list[Ranking] = [[("csv", 1.0)], []]
    plan = Plan(
        query("a task"),
        compose("x", rounds[0].texts, found, SKILLS, alpha=0.5),
        rounds,
        "rules",
    )
    assert plan_lines(plan, {}) == [
        "2 steps in 2 levels, made by rules",
        "level 1",
        f"  1. {text}",
        "     → csv-tool  (csv)",
        "level 2",
        "  2. send it  (after 1)",
        "     → no skill fits",
    ]
    shown = plan_json(plan)
    assert shown["levels"] == [[1], [2]] and shown["steps"][1]["depends_on"] == [1]
    assert shown["steps"][0]["candidates"] == [{"skill_id": "csv", "score": 1.0}]
    chart = plan_mermaid(plan).splitlines()
    assert chart[1] == '    s1["1. find #34;rows#34;#93;#59; #60;b#62;x#60;/b#62;<br/>csv-tool"]'
    assert chart[3] == "    s1 --> s2"


def test_the_command_plans_without_a_model(library: Path) -> None:
    task, pool = "merge the pdf files and then translate the text", library / "skills"
    out = succeeds("skillweaver", "plan", task, "--pool", pool).out
    assert "2 steps in 2 levels" in out and "documents/pdf-merge" in out
    plan = json.loads(
        succeeds("skillweaver", "plan", task, "--pool", pool, "--json", "compose.alpha=1").out
    )
    assert [step["skill_id"] for step in plan["steps"]] == [
        "documents/pdf-merge",
        "media/translate-text",
    ]
    assert succeeds("skillweaver", "plan", task, "--pool", pool, "--mermaid").out.startswith(
        "flowchart TD"
    )
    assert (
        succeeds("skillweaver", "plan", "合并文件，然后翻译", "--pool", pool).out.count(
            "no skill fits"
        )
        == 2
    )
    for line, fault in {
        ("", "--pool", pool): "the task is empty",
        ("x", "--pool", pool, "hints.H=3"): "unknown key 'hints.H'",
        ("x", "--pool", pool, "compose.min_score=1"): "removed: calibrate a router",
        ("x", "--pool", pool, "--llm", "{kind: parrot}"): "must be 'openai', found 'parrot'",
    }.items():
        assert fault in skilltrain("skillweaver", "plan", *line).error_line


# Plans are scored ----------------------------------------------------------------------------------------------------

ABC = {one: Skill(one, one, "", "", one[0].upper()) for one in ("a1", "a2", "b1", "b2", "c1")}


def task(
    *steps: tuple[str, str], gold: str = "", alternatives: dict[str, str] | None = None
) -> Task:
    ids = frozenset(gold.split() or [skill_id for _, skill_id in steps])
    relevance = Relevance(ids, dict.fromkeys(ids, 1.0), alternatives or {})
    return Task(
        Query("q", "x", "multi", "t", "test"),
        relevance,
        steps=tuple(GoldStep(*step) for step in steps),
    )


def values(asked: Task, found: list[str], chosen: str, oracle: list[str]) -> dict[str, float]:
    """Rankings and choices in words; `-` is no choice."""
    picked = [None if one == "-" else one for one in chosen.split()]
    split = [own.split() for own in found], picked, [own.split() for own in oracle]
    return plan_values(asked, *split, ABC, dict.fromkeys(ABC, 10))


def test_measures_by_hand() -> None:
    asked = task(("do a", "a1"), ("do b", "b1"), ("do c", "c1"))
    found = values(asked, ["a2 a1", "b2 b1"], "a2 b1", ["a1", "b2", "b2"])
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
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {*found} == {*measure_names()}


def test_a_chain_is_exact_only_in_its_order_and_of_its_length() -> None:
    asked = task(("do a", "a1"), ("do b", "b1"))
    right = values(asked, ["a1", "b1"], "a1 b1", ["a1", "b1"])
    assert [right[name] for name in ("DA", "Chain exact", "Chain category (all)", "Chosen")] == [
        1,
        1,
        1,
        1,
    ]
    swapped = values(asked, ["b1", "a1"], "b1 a1", ["a1", "b1"])
    assert [swapped[name] for name in ("Chain exact", "R@1", "Chosen", "Skill R@1")] == [0, 0, 1, 1]
    longer = values(asked, ["a1", "b1", "c1"], "a1 b1 -", ["a1", "b1"])
    assert [
        longer[name] for name in ("Chain category (share)", "Chain category (all)", "DA±1")
    ] == [1, 0, 1]
    missed = values(asked, ["c1"], "c1", ["a1", "c1"])
    assert [
        missed[f"Lost in {name}"] for name in ("decomposition", "retrieval", "composition")
    ] == [0.5, 0.5, 0]


def test_without_a_skill_for_each_step_nothing_is_measured_by_place() -> None:
    found = values(
        task(("do it", ""), gold="a1 b1", alternatives={"a2": "a1"}), ["a2", "c1"], "a2 c1", ["b1"]
    )
    assert not {"R@1", "CatR@1", "Chain exact", "Oracle R@1"} & found.keys()
    assert (found["Skill R@1"], found["DA"], found["Lost in decomposition"]) == (0.5, 0, 0.5)
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
def bench(tmp_path: Path) -> Path:
    """A folder with CHAINS as the benchmark `bench` and POOL as `pool`."""
    verdicts = {one: dict.fromkeys(ids, "required") for one, (_, ids) in CHAINS.items()}
    folder = write_ours(
        tmp_path / "bench", [(one, text, "test") for one, (text, _) in CHAINS.items()], verdicts
    )
    words = {skill.skill_id: skill.description for skill in POOL}
    steps = [(one, skill_id) for one, (_, ids) in CHAINS.items() for skill_id in ids]
    rows = [
        {
            "query_id": one,
            "step_id": str(number),
            "text": words[skill_id],
            "depends_on": [],
            "skill_id": skill_id,
        }
        for number, (one, skill_id) in enumerate(steps)
    ]
    write_table(rows, PLANS, folder)
    write_pool(tmp_path / "pool", POOL)
    return tmp_path


def arguments(root: Path, *settings: str) -> list[str]:
    bm25 = ["system.name=bm25", "system.rankers=[{kind: lexical}]"]
    return [
        "skillweaver",
        "plans",
        f"benchmark={root / 'bench'}",
        f"pool={root / 'pool'}",
        *bm25,
        *settings,
        f"out={root / 'out'}",
    ]


def run(root: Path, *settings: str) -> dict[str, Any]:
    succeeds(*arguments(root, *settings))
    return json.loads((root / "out" / "metrics.json").read_text())


def test_the_stage_scores_ways_to_plan_side_by_side(bench: Path) -> None:
    planners = "planners=[{name: first}, {name: one step, decomposer: {kind: whole}}]"
    found = run(bench, planners, "compare=[DA, CatR@1]")
    every = found["planners"]["first"][0]["means"]
    assert (every["DA"]["mean"], every["Oracle R@1"]["mean"]) == (pytest.approx(2 / 3), 1.0)
    assert every["CatR@1"]["mean"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert found["planners"]["one step"][0]["means"]["DA"]["mean"] == 0
    slices = {(one["label"], one["value"]): one["n"] for one in found["planners"]["first"]}
    assert slices["steps planned", "as many as gold"] == 2 and slices["category", "office"] == 1
    da, cat = found["comparisons"]
    assert (da["system"], da["difference"]["mean"]) == ("one step", pytest.approx(-2 / 3))
    assert (da["num_better"], da["num_worse"], cat["baseline"]) == (0, 2, "first")
    report = (bench / "out" / "report.md").read_text()
    assert (
        "| DA | .667 [.00, 1.00] | .000 [.00, .00] |" in report
        and "| one step | first | DA |" in report
    )
    plans = [json.loads(line) for line in (bench / "out" / "plans.jsonl").read_text().splitlines()]
    assert [len(plan["steps"]) for plan in plans] == [2, 2, 1, 1, 1, 1]


def test_a_dry_run_says_what_the_models_take_first(bench: Path) -> None:
    llm = json.dumps(chat(LLMServer("http://127.0.0.1:9/v1")))  # nothing listens there
    planners = f"planners=[{{name: rules}}, {{name: model, decomposer: {{kind: llm, llm: {llm}}}}}]"
    plan = json.loads(succeeds(*arguments(bench, planners), "--dry-run").out)["dry_run"]
    assert (plan["num_tasks"], plan["num_skills"]) == (3, 4)
    assert plan["asked"].keys() == {"model"} and plan["asked"]["model"]["num_requests"] == 3


def test_what_is_held_out_is_not_found_and_still_has_its_category(bench: Path) -> None:
    write_pool(bench / "away", POOL[:1])
    every = run(bench, f"held_out={bench / 'away'}")["planners"]["rules"][0]["means"]
    assert every["Oracle R@1"]["mean"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert (
        every["Oracle CatR@1"]["mean"] == 1.0
    )  # the other skill of documents is found in its place


def test_a_benchmarks_own_category_stays_where_no_step_names_a_skill(tmp_path: Path) -> None:
    """LiveMCPBench's tasks have a category each."""
    tasks = [
        mcp_task(tool, tool, steps=[f"{tool} it"], category=f"to {tool}")
        for tool in ("write", "fetch")
    ]
    write(tmp_path / "bench", live(*tasks))
    own = run(tmp_path, "pool=null")["planners"]["rules"]
    assert [one["value"] for one in own if one["label"] == "category"] == ["to fetch", "to write"]


def test_what_cannot_be_scored_is_refused(bench: Path) -> None:
    for setting, fault in {
        "planners=[{name: a}, {name: a}]": "two planners have the same name",
        "compare=[Hit@1]": "unknown measure 'Hit@1'; measures are DA, ",
        "planners=[{name: a, compose: {alpha: 2}}]": "planners.0.compose.alpha: must be less than or equal to 1",
        "split=dev": "dev",
    }.items():
        assert fault in skilltrain(*arguments(bench, setting)).error_line
    write_pool(bench / "pool", POOL[1:])
    assert (
        "gold skill 'pdf' of query 'q3' is not among the 3 skills"
        in skilltrain(*arguments(bench)).error_line
    )
    write_table(
        [{"query_id": "q9", "step_id": "1", "text": "t", "depends_on": []}], PLANS, bench / "bench"
    )
    assert (
        "1 judged or planned queries are not in queries.parquet, first 'q9'"
        in skilltrain(*arguments(bench)).error_line
    )
    (bench / "bench" / "plans.parquet").unlink()
    assert "its tasks have no steps" in skilltrain(*arguments(bench)).error_line


def test_alpha_is_swept_by_ablate(bench: Path) -> None:
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
    assert [one["variant"] for one in table["variants"]] == ["similarity", "compatibility"]
    assert table["differences"][0]["measure"] == "Chosen" and table["num_queries"] == 3


def test_a_row_without_a_body_column_is_a_tool(tmp_path: Path) -> None:
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
    assert [(one.skill_id, one.body, one.category) for one in skills] == [
        ("x/one", "", "Finance"),
        ("y/one", "", None),
    ]
    assert len(read_pool(tmp_path / "servers.jsonl")) == 3  # equal ones are kept there


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


def test_compskillbench_is_rebuilt_from_a_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "data_pipelines")
    pipeline: Any = importlib.import_module("compskillbench")
    rows = [
        {"name": f"db-{n}", "description": f"Serves rows of store {n}.", "category": "Databases"}
        for n in range(4)
    ]
    rows += [
        {"name": f"art{n}", "description": "Shows a painting.", "category": "Art"} for n in range(3)
    ]
    rows += [
        {"name": "DB_1", "description": "Serves rows once more.", "category": "Databases"},
        {"name": "short", "description": "Too short.", "category": "Databases"},
        {
            "name": "badge",
            "description": "[![x](https://a.b/c.svg)](https://a.b) https://a.b/x y",
            "category": "Art",
        },
        {"name": "odd", "description": "A category that nobody mapped.", "category": "Odd"},
        {
            "name": "hand",
            "description": "A painter of rows, by its words.",
            "category": "Databases",
        },
        {"name": "rare", "description": "A rare thing that stands alone.", "category": "Rare"},
    ]
    (tmp_path / "servers.jsonl").write_text(jsonl(*rows))
    (tmp_path / "groups.yaml").write_text(CATEGORIES_YAML)
    values = {
        "servers": tmp_path / "servers.jsonl",
        "out": tmp_path / "out",
        "categories": tmp_path / "groups.yaml",
        "sizes": {2: 6},
        "held_out": ["pictures"],
        "min_skills": 3,
    }
    counts = pipeline.run(pipeline.Pipeline.model_validate(values))
    assert counts == {
        "skills": 9,
        "dropped": 4,
        "tasks": 6,
        "transfer_category": {"tasks": 6, "held out": 4},
        "transfer_skill": {"tasks": counts["transfer_skill"]["tasks"], "held out": 2},
    }
    skills = {skill.skill_id: skill for skill in read_pool(tmp_path / "out" / "pool")}
    assert (
        skills["hand"].category == "pictures" and not skills["hand"].body and "short" not in skills
    )
    chains = []
    for style in ("template", "paraphrase", "human"):
        tasks = load_benchmark(tmp_path / "out" / style).tasks
        chains.append([[step.skill_id for step in one.steps] for one in tasks])
        assert all(
            step.text.lower() in one.query.text.lower() for one in tasks for step in one.steps
        )
        assert not any(
            "db-0" in step.text and step.skill_id == "db-0" for one in tasks for step in one.steps
        )
    assert chains[0] == chains[1] == chains[2]
    assert all(
        {skills[one].category for one in chain} == {"tables", "pictures"} for chain in chains[0]
    )
    (tmp_path / "lists").mkdir()
    listed = "## 🗄 Databases\n\nText.\n- [a/b](https://x.y): Serves rows.\n- no entry\n"
    (tmp_path / "lists" / "db.md").write_text(listed)
    (row,) = pipeline.read_servers(tmp_path / "lists")
    assert (row["name"], row["description"], row["category"]) == (
        "a/b",
        "Serves rows.",
        "Databases",
    )
    with raises("unknown-format"):
        list(pipeline.read_servers(tmp_path))
