"""Plans are scored against gold steps and skills, by hand; the benchmark is rebuilt from a list of servers."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark_folders import jsonl, write_ours, write_pool
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import GoldStep, Task
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.comparison import wilcoxon
from skilltrain.evaluation.metrics import Relevance
from skilltrain.evaluation.plan_measures import measure_names, plan_values
from skilltrain.records import Query, Skill
from skilltrain.tables import PLANS, write_table
from small_library import skilltrain, succeeds

SKILLS = {one: Skill(one, one, "", "", one[0].upper()) for one in ("a1", "a2", "b1", "b2", "c1")}


def task(*steps: tuple[str, str], gold: str = "", alternatives: dict[str, str] | None = None) -> Task:
    ids = frozenset(gold.split() or [skill_id for _, skill_id in steps])
    relevance = Relevance(ids, dict.fromkeys(ids, 1.0), alternatives or {})
    return Task(Query("q", "x", "multi", "t", "test"), relevance, steps=tuple(GoldStep(*step) for step in steps))


def values(asked: Task, found: list[str], chosen: str, oracle: list[str]) -> dict[str, float]:
    """Rankings and choices in words; `-` is no choice."""
    picked = [None if one == "-" else one for one in chosen.split()]
    split = [own.split() for own in found], picked, [own.split() for own in oracle]
    return plan_values(asked, *split, SKILLS, dict.fromkeys(SKILLS, 10))


def test_measures_by_hand() -> None:
    asked = task(("do a", "a1"), ("do b", "b1"), ("do c", "c1"))
    found = values(asked, ["a2 a1", "b2 b1"], "a2 b1", ["a1", "b2", "b2"])
    expected = {
        "steps": 2, "DA": 0, "DA±1": 1, "R@1": 0, "R@5": 2 / 3, "CatR@1": 2 / 3, "CatR@10": 2 / 3,
        "Chain exact": 0, "Chain category (share)": 2 / 3, "Chain category (all)": 0,
        "Skill R@1": 0, "Skill R@5": 2 / 3, "Chosen": 1 / 3, "Oracle R@1": 1 / 3, "Oracle CatR@1": 2 / 3,
        "Step R@1": 2 / 3, "Step R@5": 1, "Oracle Skill R@10": 1 / 3, "Context saved": 1 - 20 / 50,
        "Lost in composition": 1 / 3, "Lost in decomposition": 0, "Lost in retrieval": 1 / 3,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {*found} == {*measure_names()}


def test_a_chain_is_exact_only_in_its_order_and_of_its_length() -> None:
    asked = task(("do a", "a1"), ("do b", "b1"))
    right = values(asked, ["a1", "b1"], "a1 b1", ["a1", "b1"])
    assert [right[name] for name in ("DA", "Chain exact", "Chain category (all)", "Chosen")] == [1, 1, 1, 1]
    swapped = values(asked, ["b1", "a1"], "b1 a1", ["a1", "b1"])
    assert [swapped[name] for name in ("Chain exact", "R@1", "Chosen", "Skill R@1")] == [0, 0, 1, 1]
    longer = values(asked, ["a1", "b1", "c1"], "a1 b1 -", ["a1", "b1"])
    assert [longer[name] for name in ("Chain category (share)", "Chain category (all)", "DA±1")] == [1, 0, 1]
    missed = values(asked, ["c1"], "c1", ["a1", "c1"])
    assert [missed[f"Lost in {name}"] for name in ("decomposition", "retrieval", "composition")] == [0.5, 0.5, 0]


def test_without_a_skill_for_each_step_nothing_is_measured_by_place() -> None:
    found = values(task(("do it", ""), gold="a1 b1", alternatives={"a2": "a1"}), ["a2", "c1"], "a2 c1", ["b1"])
    assert not {"R@1", "CatR@1", "Chain exact", "Oracle R@1"} & found.keys()
    assert (found["Skill R@1"], found["DA"], found["Lost in decomposition"]) == (0.5, 0, 0.5)
    assert "DA" not in values(task(gold="a1"), ["a1"], "a1", [])


def test_wilcoxon_of_one_side_by_hand() -> None:
    three = np.array([1.0, 1, 1, 0])
    assert wilcoxon(three, above=True) == 1 / 8 and wilcoxon(-three, above=True) == 1.0
    assert wilcoxon(three) == 2 / 8
    many = np.concatenate([np.ones(160), -np.ones(80)])
    assert wilcoxon(many, above=True) == pytest.approx(wilcoxon(many) / 2)


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
    folder = write_ours(tmp_path / "bench", [(one, text, "test") for one, (text, _) in CHAINS.items()], verdicts)
    words = {skill.skill_id: skill.description for skill in POOL}
    steps = [(one, skill_id) for one, (_, ids) in CHAINS.items() for skill_id in ids]
    rows = [{"query_id": one, "step_id": str(number), "text": words[skill_id], "depends_on": [], "skill_id": skill_id}
            for number, (one, skill_id) in enumerate(steps)]  # fmt: skip
    write_table(rows, PLANS, folder)
    write_pool(tmp_path / "pool", POOL)
    return tmp_path


def arguments(root: Path, *settings: str) -> list[str]:
    bm25 = ["system.name=bm25", "system.rankers=[{kind: lexical}]"]
    return ["plans", f"benchmark={root / 'bench'}", f"pool={root / 'pool'}", *bm25, *settings, f"out={root / 'out'}"]


def run(root: Path, *settings: str) -> dict[str, Any]:
    succeeds(*arguments(root, *settings))
    return json.loads((root / "out" / "metrics.json").read_text())


def test_the_stage_scores_ways_to_plan_side_by_side(bench: Path) -> None:
    planners = "planners=[{name: first}, {name: one step, decomposer: {kind: rules, max_steps: 1}}]"
    found = run(bench, planners, "compare=[DA, CatR@1]")
    every = found["planners"]["first"][0]["means"]
    assert (every["DA"]["mean"], every["Oracle R@1"]["mean"]) == (pytest.approx(2 / 3), 1.0)
    assert every["CatR@1"]["mean"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert found["planners"]["one step"][0]["means"]["DA"]["mean"] == 0
    slices = {(one["label"], one["value"]): one["n"] for one in found["planners"]["first"]}
    assert slices["steps planned", "as many as gold"] == 2 and slices["category", "office"] == 1
    da, cat = found["comparisons"]
    assert (da["system"], da["difference"]["mean"]) == ("one step", pytest.approx(-2 / 3))
    assert da["wilcoxon_p_above"] == 1.0 and cat["baseline"] == "first"
    report = (bench / "out" / "report.md").read_text()
    assert "| DA | .667 [.00, 1.00] | .000 [.00, .00] |" in report and "| one step | first | DA |" in report
    plans = [json.loads(line) for line in (bench / "out" / "plans.jsonl").read_text().splitlines()]
    assert [len(plan["steps"]) for plan in plans] == [2, 2, 1, 1, 1, 1]


def test_what_is_held_out_is_not_found_and_still_has_its_category(bench: Path) -> None:
    write_pool(bench / "away", POOL[:1])
    every = run(bench, f"held_out={bench / 'away'}")["planners"]["rules"][0]["means"]
    assert every["Oracle R@1"]["mean"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert every["Oracle CatR@1"]["mean"] == 1.0  # the other skill of documents is found in its place


def test_what_cannot_be_scored_is_refused(bench: Path) -> None:
    for setting, fault in {
        "planners=[{name: a}, {name: a}]": "two planners have the same name",
        "compare=[Hit@1]": "unknown measure 'Hit@1'; measures are DA, ",
        "planners=[{name: a, compose: {alpha: 2}}]": "planners.0.compose.alpha: must be less than or equal to 1",
        "split=dev": "dev",
    }.items():
        assert fault in skilltrain(*arguments(bench, setting)).error_line
    write_pool(bench / "pool", POOL[1:])
    assert "gold skill 'pdf' of query 'q3' is not among the 3 skills" in skilltrain(*arguments(bench)).error_line
    write_table([{"query_id": "q9", "step_id": "1", "text": "t", "depends_on": []}], PLANS, bench / "bench")
    assert "a step is of query 'q9', which is not in queries" in skilltrain(*arguments(bench)).error_line
    (bench / "bench" / "plans.parquet").unlink()
    assert "its tasks have no steps" in skilltrain(*arguments(bench)).error_line


def test_alpha_is_swept_by_ablate(bench: Path) -> None:
    grid = {
        "ablation": "alpha", "claim": "Compatibility helps.", "baseline": "similarity", "seeds": [1],
        "compare": ["Chosen"], "out": str(bench / "grid"),
        "variants": {"similarity": None, "compatibility": {"plan.planners.0.compose.alpha": 0.0}},
        "steps": {"plan": {
            "stage": "plans", "benchmark": str(bench / "bench"), "pool": str(bench / "pool"),
            "system": {"name": "bm25", "rankers": [{"kind": "lexical"}]},
            "planners": [{"name": "rules", "compose": {"alpha": 1.0}}],
        }},
    }  # fmt: skip
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
        {"id": "bare", "name": "bare"}, {"id": "empty", "name": "e", "description": "d", "body": " "},
    ]  # fmt: skip
    (tmp_path / "servers.jsonl").write_text(jsonl(*rows))
    succeeds("pool", f"sources={tmp_path / 'servers.jsonl'}", f"out={tmp_path / 'pool'}")
    skills = read_pool(tmp_path / "pool")
    assert [(one.skill_id, one.body, one.category) for one in skills] == [("x/one", "", "Finance"), ("y/one", "", None)]
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


def test_compskillbench_is_rebuilt_from_a_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "data_pipelines")
    pipeline: Any = importlib.import_module("compskillbench")
    rows = [{"name": f"db-{n}", "description": f"Serves rows of store {n}.", "category": "Databases"} for n in range(4)]
    rows += [{"name": f"art{n}", "description": "Shows a painting.", "category": "Art"} for n in range(3)]
    rows += [
        {"name": "DB_1", "description": "Serves rows once more.", "category": "Databases"},
        {"name": "short", "description": "Too short.", "category": "Databases"},
        {"name": "badge", "description": "[![x](https://a.b/c.svg)](https://a.b) https://a.b/x y", "category": "Art"},
        {"name": "odd", "description": "A category that nobody mapped.", "category": "Odd"},
        {"name": "hand", "description": "A painter of rows, by its words.", "category": "Databases"},
        {"name": "rare", "description": "A rare thing that stands alone.", "category": "Rare"},
    ]  # fmt: skip
    (tmp_path / "servers.jsonl").write_text(jsonl(*rows))
    (tmp_path / "groups.yaml").write_text(CATEGORIES_YAML)
    values = {"servers": tmp_path / "servers.jsonl", "out": tmp_path / "out", "categories": tmp_path / "groups.yaml",
              "sizes": {2: 6}, "held_out": ["pictures"], "min_skills": 3}  # fmt: skip
    counts = pipeline.run(pipeline.Pipeline.model_validate(values))
    assert counts == {
        "skills": 9, "dropped": 4, "tasks": 6, "transfer_category": {"tasks": 6, "held out": 4},
        "transfer_skill": {"tasks": counts["transfer_skill"]["tasks"], "held out": 2},
    }  # fmt: skip
    skills = {skill.skill_id: skill for skill in read_pool(tmp_path / "out" / "pool")}
    assert skills["hand"].category == "pictures" and not skills["hand"].body and "short" not in skills
    chains = []
    for style in ("template", "paraphrase", "human"):
        tasks = load_benchmark(tmp_path / "out" / style).tasks
        chains.append([[step.skill_id for step in one.steps] for one in tasks])
        assert all(step.text.lower() in one.query.text.lower() for one in tasks for step in one.steps)
        assert not any("db-0" in step.text and step.skill_id == "db-0" for one in tasks for step in one.steps)
    assert chains[0] == chains[1] == chains[2]
    assert all({skills[one].category for one in chain} == {"tables", "pictures"} for chain in chains[0])
    (tmp_path / "lists").mkdir()
    listed = "## 🗄 Databases\n\nText.\n- [a/b](https://x.y): Serves rows.\n- no entry\n"
    (tmp_path / "lists" / "db.md").write_text(listed)
    (row,) = pipeline.rows_of_source(tmp_path / "lists")
    assert (row["name"], row["description"], row["category"]) == ("a/b", "Serves rows.", "Databases")
    with pytest.raises(SkilltrainError, match="neither a JSON Lines file nor a folder of Markdown lists"):
        list(pipeline.rows_of_source(tmp_path))
