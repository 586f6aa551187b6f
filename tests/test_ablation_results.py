"""The tables of an ablation: numbers worked by hand from values written where its evaluations would stand."""

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from skilltrain.ablation.plan import Plan
from skilltrain.ablation.results import collect_results, markdown, mean_over_seeds, read_values, terminal_table
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.comparison import holm
from skilltrain.terminal import console
from test_ablation_grid import grid, plan_of

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
    clean, raw = table.scores
    assert (table.evaluation, table.split, table.num_queries) == ("evaluate", "test", 8)
    assert clean.means["Hit@1"].mean == 3 / 8 and clean.means["Hit@1"].n == 8
    assert clean.means["MRR@10"].mean == pytest.approx(3 / 7 / 2) and clean.means["MRR@10"].n == 7
    assert clean.seed_means == {1: {"Hit@1": 0.25, "MRR@10": 1 / 7}, 2: {"Hit@1": 0.5, "MRR@10": 2 / 7}}
    assert clean.seed_spread("Hit@1") == pytest.approx(0.25 / sqrt(2))  # the deviation of two values
    assert raw.means["Hit@1"].mean == raw.means["Hit@1"].low == 1 and raw.seed_spread("Hit@1") == 0
    hit, mrr = table.comparisons
    assert table.seed_differences(hit) == {1: 0.75, 2: 0.5}
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
    assert table.comparisons[0].mcnemar_p == pytest.approx(2 * (1 + 7) / 2**7)  # 6 fixed, 1 broken
    assert table.scores[0].seed_spread("Hit@1") is None


def test_holm_corrects_over_all_tables(tmp_path):
    values = plan_of(tmp_path).grid.model_dump(mode="json")["steps"]
    values["tasks"] = values["evaluate"] | {"split": "train"}
    plan = two_seeds(tmp_path, steps=values)
    hits = {("clean", 1): "10101010", ("clean", 2): "01010101"}
    write_values(plan, hits | dict.fromkeys([("raw *new*", 1), ("raw *new*", 2)], "11110000"), "tasks")
    results = collect_results(plan, {})
    assert [table.evaluation for table in results.tables] == ["evaluate", "tasks"] and results.num_tests == 4
    found = [c for table in results.tables for c in table.comparisons]
    assert [c.p_holm for c in found] == holm([c.p for c in found])
    verdicts = [[row["verdict"] for row in table["differences"]] for table in results.to_json()["tables"]]
    assert verdicts == [["above", "above"], ["not told apart", "not told apart"]]


def test_what_failed_is_left_out_and_named(tmp_path):
    plan = two_seeds(tmp_path)
    results = collect_results(plan, {("raw *new*", 2): "step train: out of memory"})
    raw = results.to_json()["tables"][0]["variants"][1]
    assert results.to_json()["tables"][0]["differences"][0]["seed_differences"] == {"1": 0.75}
    assert raw["seeds"] == [1] and raw["seed_sd"] == {"Hit@1": None, "MRR@10": None}
    assert [cell["error"] for cell in results.to_json()["cells"]] == [None, None, None, "step train: out of memory"]
    without = collect_results(plan, {("clean", 1): "x", ("clean", 2): "x"})
    assert [scores.variant for scores in without.tables[0].scores] == ["raw *new*"]
    assert not without.tables[0].comparisons and "x" in markdown(without)
    nothing = collect_results(plan, {(cell.variant, cell.seed): "x" for cell in plan.cells})
    assert nothing.tables == () and "## Cells" in markdown(nothing)


def test_the_tables_name_variants_verdicts_and_recipes(tmp_path):
    results = collect_results(two_seeds(tmp_path), {})
    text = markdown(results)
    assert "| raw \\*new\\* | 2 | 1.000 [1.00, 1.00] ± .000 |" in text
    assert "| raw \\*new\\* | Hit@1 | +.625 [.31, .88] | 2 of 2 | " in text and text.count("▲ above") == 2
    assert "(n = 8)" in text and "over all 2 comparisons" in text and "Claim: Filtering helps." in text
    for cell in results.plan.cells:
        assert str(cell.evaluations["evaluate"] / "recipe.yaml").replace("_", "\\_") in text
    table = terminal_table(results.plan.grid, results.tables[0])
    with console.capture() as shown:
        console.print(table)
    assert "+.625 [.31, .88]" in shown.get() and "raw *new*" in shown.get() and "above" in shown.get()


def test_a_variant_without_the_seed_stands_beside_every_seed(tmp_path):
    untrained = {"evaluate.systems.0.rankers.0.source": "some/model"}
    plan = plan_of(tmp_path, variants={"clean": {}, "untrained": untrained})
    write_values(plan, {("clean", 1): "11000000", ("clean", 2): "11110000", ("untrained", 1): "11100000"})
    (table,) = collect_results(plan, {}).tables
    assert table.seed_differences(table.comparisons[0]) == {1: 1 / 8, 2: -1 / 8}


def test_a_run_without_the_seed_is_one_training_beside_another_that_has_it(tmp_path):
    steps = grid(tmp_path)["steps"]
    plain = steps["evaluate"] | {"systems": [{"name": "bm25", "rankers": [{"kind": "lexical"}]}]}
    variants = {"clean": {}, "nd": {"plain.systems.0.rankers.0.fields": "nd", "lists.quotas": {"random": 2}}}
    plan = plan_of(tmp_path, steps=steps | {"plain": plain}, variants=variants)
    hits = dict.fromkeys([(variant, seed) for variant in variants for seed in (1, 2)], "11000000")
    write_values(plan, hits)
    write_values(plan, hits | {("nd", 1): "11110000", ("nd", 2): "11110000"}, "plain")
    tables = {table.evaluation: table for table in collect_results(plan, {}).tables}
    assert [len(scores.seed_means) for scores in tables["evaluate"].scores] == [2, 2]
    assert [len(scores.seed_means) for scores in tables["plain"].scores] == [1, 1]
    assert [scores.seed_spread("Hit@1") for scores in tables["plain"].scores] == [None, None]
    assert tables["plain"].seed_differences(tables["plain"].comparisons[0]) == {1: 1 / 4}


@pytest.mark.parametrize(("hits", "seeds"), [("1111", [1]), ("1111", [1, 2])])
def test_other_queries_are_not_compared(hits: str, seeds: Sequence[int], tmp_path):
    plan = plan_of(tmp_path, seeds=list(seeds))
    full = {(cell.variant, cell.seed): "11110000" for cell in plan.cells}
    write_values(plan, full | {("raw", seeds[-1]): hits})
    with pytest.raises(SkilltrainError, match="runs over different query sets compared: 4 queries stand on one side"):
        collect_results(plan, {})


def test_values_are_read_once_a_query(tmp_path):
    row = {"system": "encoder", "query_id": "a", "Hit@1": 1.0}
    (tmp_path / "per_query.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    with pytest.raises(SkilltrainError, match=r"per_query.jsonl, line 2: query 'a' stands twice"):
        read_values(tmp_path, ["Hit@1"])
    assert mean_over_seeds("x", {1: {"a": {"Hit@1": 1.0}}, 5: {"a": {"Hit@1": 0.0}}}) == {"a": {"Hit@1": 0.5}}
