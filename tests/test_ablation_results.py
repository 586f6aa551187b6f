"""The tables of an ablation: numbers worked by hand from values written where its evaluations would stand."""

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from skilltrain.ablation.plan import Plan
from skilltrain.ablation.results import collect_results
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.comparison import holm
from test_ablation_grid import plan_of

VARIANTS = {"clean": {}, "raw *new*": {"lists.rankings": "{mine}"}}
QUERIES = "abcdefgh"


def write_values(plan: Plan, hits: Mapping[tuple[str, int], str], name: str = "evaluate") -> None:
    """Write Hit@1 as digits, one a query; MRR@10 is half of it, and not defined for the last query."""
    for cell in plan.cells:
        if (values := hits.get((cell.variant, cell.seed))) is not None:
            folder = cell.evaluations[name]
            folder.mkdir(parents=True, exist_ok=True)
            rows = [
                {"system": "encoder", "query_id": query_id, "slice": "single", "Hit@1": int(value)}
                | {"MRR@10": None if query_id == QUERIES[-1] else int(value) / 2}
                for query_id, value in zip(QUERIES, values, strict=False)
            ]
            (folder / "per_query.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def two_seeds(folder: Path, **changes: Any) -> Plan:
    """Clean scores 2 and 4 of 8, the other variant all."""
    plan = plan_of(folder, variants=VARIANTS, **changes)
    hits = {("clean", 1): "11000000", ("clean", 2): "11110000"}
    write_values(plan, hits | dict.fromkeys([("raw *new*", 1), ("raw *new*", 2)], "11111111"))
    return plan


def test_a_query_is_averaged_over_seeds_before_queries_are(tmp_path):
    (table,) = collect_results(two_seeds(tmp_path), {}).tables
    clean, raw = table.variants
    assert (table.evaluation, table.split, table.num_queries) == ("evaluate", "test", 8)
    assert clean.metrics["Hit@1"].mean == 3 / 8 and clean.metrics["Hit@1"].n == 8
    assert clean.metrics["MRR@10"].mean == pytest.approx(3 / 7 / 2) and clean.metrics["MRR@10"].n == 7
    assert clean.seed_means == {1: {"Hit@1": 0.25, "MRR@10": 1 / 7}, 2: {"Hit@1": 0.5, "MRR@10": 2 / 7}}
    assert clean.seed_sd["Hit@1"] == pytest.approx(0.25 / sqrt(2))  # the deviation of two values
    assert raw.metrics["Hit@1"].mean == raw.metrics["Hit@1"].low == 1 and raw.seed_sd["Hit@1"] == 0
    hit, mrr = table.differences
    assert (hit.system, hit.baseline, hit.measure) == ("raw *new*", "clean", "Hit@1")
    assert hit.difference.mean == 5 / 8 and hit.difference.n == 8
    assert mrr.difference.mean == pytest.approx((1 - 3 / 7) / 2) and mrr.difference.n == 7
    # Six queries differ, all for the better: the signed ranks fall so with a chance of 2 in 2^6.
    assert hit.wilcoxon_p == pytest.approx(2 / 2**6)
    assert hit.mcnemar_p is None, "means over seeds are neither right nor wrong"


def test_one_seed_is_tested_by_mcnemar_too(tmp_path):
    plan = plan_of(tmp_path, variants=VARIANTS, seeds=[1])
    write_values(plan, {("clean", 1): "11000000", ("raw *new*", 1): "01111111"})
    (table,) = collect_results(plan, {}).tables
    assert table.differences[0].mcnemar_p == pytest.approx(2 * (1 + 7) / 2**7)  # 6 fixed, 1 broken
    assert table.variants[0].seed_sd["Hit@1"] is None


def test_holm_corrects_over_all_tables(tmp_path):
    values = plan_of(tmp_path).grid.model_dump(mode="json")["steps"]
    values["tasks"] = values["evaluate"] | {"split": "train"}
    plan = two_seeds(tmp_path, steps=values)
    hits = {("clean", 1): "10101010", ("clean", 2): "01010101"}
    write_values(plan, hits | dict.fromkeys([("raw *new*", 1), ("raw *new*", 2)], "11110000"), "tasks")
    results = collect_results(plan, {})
    assert [table.evaluation for table in results.tables] == ["evaluate", "tasks"] and results.num_tests == 4
    found = [c for table in results.tables for c in table.differences]
    assert [c.p_holm for c in found] == holm([c.p for c in found])
    verdicts = [[row["verdict"] for row in table["differences"]] for table in results.to_json()["tables"]]
    assert verdicts == [["above", "above"], ["not told apart", "not told apart"]]


def test_what_failed_is_left_out_and_named(tmp_path):
    plan = two_seeds(tmp_path)
    results = collect_results(plan, {("raw *new*", 2): "step train: out of memory"})
    raw = results.to_json()["tables"][0]["variants"][1]
    assert list(raw["seed_means"]) == [1] and raw["seed_sd"] == {"Hit@1": None, "MRR@10": None}
    assert [cell["error"] for cell in results.to_json()["cells"]] == [None, None, None, "step train: out of memory"]
    without = collect_results(plan, {("clean", 1): "x", ("clean", 2): "x"})
    assert [scores.variant for scores in without.tables[0].variants] == ["raw *new*"]
    assert not without.tables[0].differences and "x" in without.markdown()
    nothing = collect_results(plan, {(cell.variant, cell.seed): "x" for cell in plan.cells})
    assert nothing.tables == () and "## Cells" in nothing.markdown()


def test_the_tables_name_variants_verdicts_and_recipes(tmp_path):
    results = collect_results(two_seeds(tmp_path), {})
    text = results.markdown()
    assert "| raw \\*new\\* | 2 | 1.000 [1.00, 1.00] ± .000 |" in text
    assert "| raw \\*new\\* | Hit@1 | +.625 [.31, .88] | " in text and text.count("▲ above") == 2
    assert "(n = 8)" in text and "over all 2 comparisons" in text and "Claim: Filtering helps." in text
    for cell in results.plan.cells:
        assert str(cell.evaluations["evaluate"] / "recipe.yaml").replace("_", "\\_") in text


def test_the_page_holds_the_tables_and_asks_for_nothing(tmp_path):
    results = collect_results(two_seeds(tmp_path), {("clean", 2): "<b>out of memory</b>"})
    page = results.page()
    assert page.count('<td class="word above">above</td>') == 2 and "over all 2 comparisons" in page
    assert "<b>1.000</b><small>[1.00, 1.00] ± .000</small>" in page
    assert "&lt;b&gt;out of memory" in page and "src=" not in page
    nothing = collect_results(results.plan, {(cell.variant, cell.seed): "x" for cell in results.plan.cells})
    assert "Paired differences" not in nothing.page()


def test_a_variant_without_the_seed_is_one_training_beside_others(tmp_path):
    untrained = {"evaluate.systems.0.rankers.0.source": "some/model"}
    plan = plan_of(tmp_path, variants={"clean": {}, "untrained": untrained})
    write_values(plan, {("clean", 1): "11000000", ("clean", 2): "11110000", ("untrained", 1): "11100000"})
    (table,) = collect_results(plan, {}).tables
    assert [len(scores.seed_means) for scores in table.variants] == [2, 1]
    assert table.variants[1].seed_sd["Hit@1"] is None and table.differences[0].difference.mean == 0


def test_other_queries_are_not_compared(tmp_path):
    plan = plan_of(tmp_path, seeds=[1])
    write_values(plan, {("clean", 1): "11110000", ("raw", 1): "1111"})
    with pytest.raises(SkilltrainError, match="runs over different query sets compared: 4 queries stand on one side"):
        collect_results(plan, {})
