"""An ablation: what its file plans and refuses, the tables of written values, and a grid that runs, stops and fails."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from skilltrain.ablation import run as ablation_run
from skilltrain.ablation.grid import Plan, fill, make_plan
from skilltrain.ablation.run import collect_results, plan_ablation, run_ablation
from skilltrain.config import apply_overrides
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.comparison import holm
from skilltrain.files import read_json, write_json
from small_library import contents, succeeds, write_library

ROOT = Path(__file__).parents[1]
GRIDS = sorted(
    file for file in (ROOT / "recipes" / "ablations").glob("*.yaml") if file.stem != "chain"
)


def grid(folder: Path, library: Path | None = None) -> dict[str, Any]:
    """Mining, a filter that one variant goes without, training by seed, and an evaluation; nothing of it has run."""
    if library is None and not (library := folder / "library").exists():
        write_library(library)
    return {
        "ablation": "filter",
        "claim": "Filtering helps.",
        "baseline": "clean",
        "steps": {
            "pool": {"stage": "pool", "sources": str(library / "skills")},
            "queries": {
                "stage": "queries",
                "files": str(library / "queries" / "*.jsonl"),
                "pool": "{pool}",
            },
            "mine": {
                "stage": "mine",
                "pool": "{pool}",
                "queries": "{queries}",
                "encoder": {"source": "some/model"},
            },
            "filter": {
                "stage": "filter",
                "pool": "{pool}",
                "queries": "{queries}",
                "rankings": "{mine}",
                "encoder": {"source": "some/model"},
                "layers": [{"name": "name"}, {"name": "jaccard"}],
            },
            "lists": {
                "stage": "lists",
                "pool": "{pool}",
                "queries": "{queries}",
                "rankings": "{filter}",
                "quotas": {"semantic": 2, "lexical": 1},
            },
            "train": {
                "stage": "train_encoder",
                "model": {"source": "some/model"},
                "data": {"pool": "{pool}", "lists": "{lists}"},
                "training": {"seed": "{seed}"},
            },
            "evaluate": {
                "stage": "evaluate",
                "pool": "{pool}",
                "benchmark": "{queries}",
                "split": "test",
                "systems": [
                    {"name": "encoder", "rankers": [{"kind": "dense", "source": "{train}"}]}
                ],
            },
        },
        "variants": {"clean": {}, "raw": {"lists.rankings": "{mine}"}},
        "seeds": [1, 2],
        "out": str(folder / "out"),
    }


def plan_of(folder: Path, *overrides: str, **changes: Any) -> Plan:
    return make_plan(write_grid(folder, grid(folder) | changes), overrides)


def write_grid(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return file


def steps_of(plan: Plan) -> dict[str, int]:
    """Step → how many runs of it there are."""
    names = [run.step for run in plan.runs.values()]
    return {name: names.count(name) for name in names}


# What a grid means ---------------------------------------------------------------------------------------------------


def test_cells_share_what_they_have_in_common(tmp_path, capsys):
    file = write_grid(tmp_path, grid(tmp_path))
    before, plan = contents(tmp_path), make_plan(file, [])
    assert steps_of(plan) == {
        "pool": 1,
        "queries": 1,
        "mine": 1,
        "filter": 1,
        "lists": 2,
        "train": 4,
        "evaluate": 4,
    }
    assert [str(cell) for cell in plan.cells] == [
        "clean, seed 1",
        "raw, seed 1",
        "clean, seed 2",
        "raw, seed 2",
    ]
    clean, raw, *_ = plan.cells
    assert [run.step for run in clean.runs] == [
        "pool",
        "queries",
        "mine",
        "filter",
        "lists",
        "train",
        "evaluate",
    ]
    *_, lists, train, _ = raw.runs
    assert [run.step for run in raw.runs] == [
        "pool",
        "queries",
        "mine",
        "lists",
        "train",
        "evaluate",
    ]
    assert train.config.training.seed == 1 and train.config.out == train.folder
    assert train.config.data.lists == lists.folder and lists.config.rankings.name.startswith(
        "mine-"
    )
    assert plan_ablation(file, []) == {"num_cells": 4, "num_runs": 14, "num_runs_missing": 14}
    said = capsys.readouterr().err
    assert re.search(
        r"raw, seed 2: pool-\w{12} \(to run\) → .* → train-\w{12} \(to run\) → evaluate-", said
    )
    assert contents(tmp_path) == before


def test_a_change_of_any_setting_or_input_makes_another_run(tmp_path):
    def folders(*overrides: str) -> set[str]:
        return {folder.name for folder in plan_of(tmp_path, *overrides).runs}

    before = folders()
    for override in (
        "claim=another",
        "steps.filter.workers.num=2",
        "steps.train.training.save_every=7",
    ):
        assert folders(override) == before, "who computes is no part of a result"
    assert {name.split("-")[0] for name in before - folders("steps.train.training.epochs=2")} == {
        "train",
        "evaluate",
    }
    file = tmp_path / "library" / "queries" / "all.jsonl"
    file.write_text(file.read_text().replace("my video", "my film"))
    assert {name.split("-")[0] for name in before & folders()} == {"pool"}
    # A pool of one's own may stand where the runs do: only the grid's own runs go without a fingerprint.
    (own := tmp_path / "out" / "steps" / "pool").mkdir(parents=True)
    (own / "a.jsonl").write_text('{"name": "a", "body": "one"}')
    before = folders(f"steps.pool.sources={own}")
    (own / "a.jsonl").write_text('{"name": "a", "body": "two"}')
    assert not before & folders(f"steps.pool.sources={own}")


def test_what_a_variant_changes(tmp_path):
    sharper = {"filter.layers.1.above": 0.4, "lists.quotas": {"random": 1}}
    plan = plan_of(tmp_path, "seeds=[5]", variants={"clean": None, "sharper": sharper})
    configs = {run.step: run.config for run in plan.cells[1].runs}
    assert [layer.above for layer in configs["filter"].layers[1:]] == [0.4]
    assert configs["lists"].quotas == {"random": 1} and steps_of(plan)["lists"] == 2
    untrained = {"evaluate.systems.0.rankers.0.source": "some/model"}  # which does not use the seed
    plan = plan_of(tmp_path, variants={"clean": {}, "untrained": untrained})
    assert [str(cell) for cell in plan.cells] == [
        "clean, seed 1",
        "untrained, seed 1",
        "clean, seed 2",
    ]


def test_texts_are_filled():
    filled = fill(
        {"a": ["{mine}/x", "s{seed}"], "b": [1, None], "c": "{{d}}"},
        {"mine": "m-1", "seed": 7}.__getitem__,
    )
    assert filled == {"a": ["m-1/x", "s7"], "b": [1, None], "c": "{d}"}


# Faults --------------------------------------------------------------------------------------------------------------

FAULTS = {
    "baseline=cleen": "baseline: no variant is called 'cleen'; variants: clean, raw",
    "compare=[Hit@3]": "step 'evaluate' of variant 'clean': measures: Hit@3, which `compare` names, is missing",
    "steps.lists.rankings='{fliter}'": "step 'lists' of variant 'clean': '{fliter}' is no step; steps: evaluate, fil",
    "steps.lists.rankings={filter: }": "step 'lists' of variant 'clean': rankings: must be a path, found {'fil",
    "steps.pool.sources='{train}'": "steps go in a circle: ",
    "steps.a/b={stage: pool}": "steps: 'a/b' cannot name a step",
    "steps.spare={stage: pool, sources: x}": "step 'spare': leads to no evaluation in any variant",
    "steps.lists.out=x": "step 'lists' of variant 'clean': names its own folder (leave out out; the ablation gives it)",
    "steps.evaluate.stage=lists": "has no step of stage evaluate",
    "steps.pool.sources=nowhere": "step 'pool' of variant 'clean': nowhere: no such file or folder",
    "variants.raw={'fliter.layers': []}": "variant 'raw', fliter.layers: is no 'step.key'; steps: pool, queries",
    "variants.raw={'filter.layers.2.name': x}": "'2' is no item of a list of 2, counted from 0",
    "variants.raw={'mine.pool.x': 1}": "variant 'raw', mine.pool.x: 'pool' is a value, not a section",
    "variants.raw={'lists.seeed': 1}": "step 'lists' of variant 'raw': unknown key 'seeed', did you mean 'seed'?",
    "variants.raw={'evaluate.split': train}": "step 'evaluate' of variant 'raw': other queries or measures than in "
    "variant 'clean' cannot be compared (make a step of its own for each set of queries)",
    "variants.raw={'evaluate.systems': []}": "an evaluation of an ablation has one system, found 0",
}


@pytest.mark.parametrize("override", FAULTS)
def test_a_fault_is_named_before_any_work(override, tmp_path):
    key, _, text = override.partition("=")
    if key.startswith(
        ("variants.", "steps.a/b")
    ):  # keys that hold dots are beyond the command line
        values = grid(tmp_path)
        section, name = key.split(".", 1)
        values[section][name] = yaml.safe_load(text)
        file = write_grid(tmp_path, values)
    else:
        file = write_grid(tmp_path, apply_overrides(grid(tmp_path), [override]))
    before = contents(tmp_path)
    with pytest.raises(SkilltrainError) as raised:
        make_plan(file, [])
    assert FAULTS[override] in str(raised.value)
    assert str(raised.value).startswith(f"{file}: ") and "\n" not in str(raised.value)
    assert contents(tmp_path) == before


# A chain that grids share --------------------------------------------------------------------------------------------


def with_chain(folder: Path, **steps: Any) -> Path:
    """The grid with its steps in a chain beside it, and `steps` of its own."""
    values = grid(folder)
    (folder / "chain.yaml").write_text(
        yaml.safe_dump(values.pop("steps") | {"spare": {"stage": "pool"}})
    )
    return write_grid(folder, values | {"chain": "chain.yaml", "steps": steps})


def test_steps_are_laid_over_a_chain_key_by_key(tmp_path):
    whole, file = plan_of(tmp_path), with_chain(tmp_path)
    assert make_plan(file, []).runs.keys() == whole.runs.keys()
    changed = make_plan(
        with_chain(tmp_path, train={"training": {"batch_size": 4}}),
        ["steps.lists.quotas={random: 3}"],
    )
    configs = {run.step: run.config for run in changed.runs.values()}
    trained = configs["train"]
    assert (trained.training.batch_size, trained.training.seed > 0, trained.model.source) == (
        4,
        True,
        "some/model",
    )
    assert configs["lists"].quotas == {"random": 3}  # an override is the whole value


def test_faults_of_a_chain_are_named(tmp_path):
    own = {"mein": {"stage": "pool", "sources": "x"}}
    with pytest.raises(SkilltrainError, match="step 'mein': leads to no evaluation in any variant"):
        make_plan(with_chain(tmp_path, **own), [])
    with pytest.raises(SkilltrainError, match=r"none\.yaml: cannot read the recipe: No such file"):
        make_plan(with_chain(tmp_path), ["chain=none.yaml"])
    with pytest.raises(SkilltrainError, match="chain: must be a path"):
        make_plan(with_chain(tmp_path), ["chain=[1]"])


def test_the_grids_that_ship_can_be_planned_and_share_the_runs_of_their_baselines(monkeypatch):
    monkeypatch.chdir(ROOT)
    plans = {file.stem: make_plan(file, []) for file in GRIDS}
    assert {*plans} == {
        "candidates_k",
        "filter",
        "inputs",
        "listwise_pointwise",
        "random_negatives",
    }
    trained = {}
    for name, plan in plans.items():
        assert (plan.grid.runs_folder, plan.grid.out) == (
            Path("runs/ablations/steps"),
            Path("runs/ablations") / name,
        )
        assert {cell.variant for cell in plan.cells} == {*plan.grid.variants}
        trained[name] = {
            folder for folder, run in plan.runs.items() if run.config.stage == "train_encoder"
        }
    assert trained["filter"] & trained["random_negatives"] and trained["filter"] & trained["inputs"]
    assert trained["candidates_k"] == trained["listwise_pointwise"] <= trained["filter"]


# Tables of values that are written where evaluations would stand -----------------------------------------------------

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
    clean, raw = table["variants"]
    assert (table["evaluation"], table["split"], table["num_queries"]) == ("evaluate", "test", 8)
    assert clean["metrics"]["Hit@1"].mean == 3 / 8 and clean["metrics"]["Hit@1"].n == 8
    assert (
        clean["metrics"]["MRR@10"].mean == pytest.approx(3 / 7 / 2)
        and clean["metrics"]["MRR@10"].n == 7
    )
    assert clean["seed_means"] == {
        1: {"Hit@1": 0.25, "MRR@10": 1 / 7},
        2: {"Hit@1": 0.5, "MRR@10": 2 / 7},
    }
    assert clean["seed_sd"]["Hit@1"] == pytest.approx(0.25 / sqrt(2))  # the deviation of two values
    assert (
        raw["metrics"]["Hit@1"].mean == raw["metrics"]["Hit@1"].low == 1
        and raw["seed_sd"]["Hit@1"] == 0
    )
    hit, mrr = table["differences"]
    assert (hit.system, hit.baseline, hit.measure) == ("raw *new*", "clean", "Hit@1")
    assert hit.difference.mean == 5 / 8 and hit.difference.n == 8
    assert mrr.difference.mean == pytest.approx((1 - 3 / 7) / 2) and mrr.difference.n == 7
    # Six queries differ, all for the better: the signed ranks fall so with a chance of 2 in 2^6.
    assert hit.wilcoxon_p == pytest.approx(2 / 2**6)
    assert hit.mcnemar_p is None, "means over seeds are neither right nor wrong"


def test_one_seed_is_tested_by_mcnemar_too_and_a_variant_without_it_is_one_training(tmp_path):
    plan = plan_of(tmp_path, variants=VARIANTS, seeds=[1])
    write_values(plan, {("clean", 1): "11000000", ("raw *new*", 1): "01111111"})
    (table,) = collect_results(plan, {}).tables
    assert table["differences"][0].mcnemar_p == pytest.approx(
        2 * (1 + 7) / 2**7
    )  # 6 fixed, 1 broken
    assert table["variants"][0]["seed_sd"]["Hit@1"] is None
    untrained = {"evaluate.systems.0.rankers.0.source": "some/model"}
    plan = plan_of(tmp_path, variants={"clean": {}, "untrained": untrained})
    write_values(
        plan, {("clean", 1): "11000000", ("clean", 2): "11110000", ("untrained", 1): "11100000"}
    )
    (table,) = collect_results(plan, {}).tables
    assert [len(scores["seed_means"]) for scores in table["variants"]] == [2, 1]
    assert (
        table["variants"][1]["seed_sd"]["Hit@1"] is None
        and table["differences"][0].difference.mean == 0
    )


def test_holm_corrects_over_all_tables(tmp_path):
    values = plan_of(tmp_path).grid.model_dump(mode="json")["steps"]
    values["tasks"] = values["evaluate"] | {"split": "train"}
    plan = two_seeds(tmp_path, steps=values)
    hits = {("clean", 1): "10101010", ("clean", 2): "01010101"}
    write_values(
        plan, hits | dict.fromkeys([("raw *new*", 1), ("raw *new*", 2)], "11110000"), "tasks"
    )
    results = collect_results(plan, {})
    assert [table["evaluation"] for table in results.tables] == [
        "evaluate",
        "tasks",
    ] and results.num_tests == 4
    found = [c for table in results.tables for c in table["differences"]]
    assert [c.p_holm for c in found] == holm([c.p for c in found])
    verdicts = [
        [row["verdict"] for row in table["differences"]] for table in results.to_json()["tables"]
    ]
    assert verdicts == [["above", "above"], ["not told apart", "not told apart"]]


def test_what_failed_is_left_out_and_named(tmp_path):
    plan = two_seeds(tmp_path)
    results = collect_results(plan, {("raw *new*", 2): "step train: out of memory"})
    raw = results.to_json()["tables"][0]["variants"][1]
    assert list(raw["seed_means"]) == ["1"] and raw["seed_sd"] == {"Hit@1": None, "MRR@10": None}
    assert [cell["error"] for cell in results.to_json()["cells"]] == [
        None,
        None,
        None,
        "step train: out of memory",
    ]
    without = collect_results(plan, {("clean", 1): "x", ("clean", 2): "x"})
    assert [scores["variant"] for scores in without.tables[0]["variants"]] == ["raw *new*"]
    assert not without.tables[0]["differences"] and "x" in without.markdown()
    nothing = collect_results(plan, {(cell.variant, cell.seed): "x" for cell in plan.cells})
    assert nothing.tables == [] and "## Cells" in nothing.markdown()


def test_the_tables_and_the_page_name_variants_verdicts_and_recipes(tmp_path):
    results = collect_results(two_seeds(tmp_path), {("clean", 2): "<b>out of memory</b>"})
    text, page = results.markdown(), results.page()
    assert (
        "| raw \\*new\\* | 2 | 1.000 [1.00, 1.00] ± .000 |" in text and text.count("▲ above") == 2
    )
    assert (
        "| raw \\*new\\* | Hit@1 | +.750 [" in text
        and "(n = 8)" in text
        and "Claim: Filtering helps." in text
    )
    for cell in results.plan.cells:
        assert str(cell.evaluations["evaluate"] / "recipe.yaml").replace("_", "\\_") in text
    assert page.count('<td class="word above">above</td>') == 2 and "over all 2 comparisons" in page
    assert "<b>1.000</b><small>[1.00, 1.00] ± .000</small>" in page
    assert "&lt;b&gt;out of memory" in page and "src=" not in page


# As it runs ----------------------------------------------------------------------------------------------------------


def lexical_grid(folder: Path, library: Path) -> dict[str, Any]:
    """BM25 with and without the body: three runs that are shared or not, no model."""
    values = grid(folder, library)
    bm25 = {"name": "bm25", "rankers": [{"kind": "lexical", "fields": "full"}]}
    steps = {name: values["steps"][name] for name in ("pool", "queries", "evaluate")}
    steps["evaluate"] |= {"systems": [bm25], "split": None}
    nd = {"evaluate.systems.0.rankers.0.fields": "nd"}
    return values | {
        "steps": steps,
        "variants": {"full": {}, "nd": nd},
        "baseline": "full",
        "seeds": [1],
    }


def trained_grid(folder: Path, library: Path, model: Path, **changes: Any) -> Path:
    """The grid above with a tiny encoder: a training has three steps."""
    values = grid(folder, library) | changes
    steps = values["steps"]
    for step in ("mine", "filter"):
        steps[step]["encoder"]["source"] = str(model)
    steps["mine"]["depth"] = 8
    steps["lists"]["quotas"] = {"semantic": 3, "random": 0}
    steps["train"]["model"] = {"source": str(model), "max_tokens": 48, "query_max_tokens": 48}
    steps["train"]["training"] |= {
        "batch_size": 4,
        "accumulation": 1,
        "learning_rate": 1e-3,
        "token_budget": 512,
    }
    return write_grid(folder, values)


def folders_of(out: Path) -> Counter[str]:
    """Step → how many folders of it stand in an ablation's steps."""
    return Counter(path.name.rpartition("-")[0] for path in (out / "steps").iterdir())


@pytest.fixture(scope="module")
def done(library, tmp_path_factory, model_folders):
    """(grid file, out folder, what the command answered)."""
    folder = tmp_path_factory.mktemp("ablation")
    file = trained_grid(folder, library, model_folders["bert"])
    return file, folder / "out", run_ablation(file, [])


def test_shared_steps_run_once_and_the_tables_hold_every_variant_seed_and_recipe(done):
    file, out, answer = done
    once = dict.fromkeys(("pool", "queries", "mine", "filter"), 1)
    assert folders_of(out) == {**once, "lists": 2, "train": 4, "evaluate": 4}
    assert answer["num_cells"] == 4 and plan_ablation(file, [])["num_runs_missing"] == 0
    assert not list(out.glob("steps/train-*/checkpoints")), (
        "checkpoints are three times the model's size"
    )
    found = read_json(out / "ablation.json")
    (table,) = found["tables"]
    assert table["num_queries"] == 4 and [row["variant"] for row in table["variants"]] == [
        "clean",
        "raw",
    ]
    assert all(set(row["seed_means"]) == {"1", "2"} for row in table["variants"])
    assert [row["measure"] for row in table["differences"]] == ["Hit@1", "MRR@10"]
    for cell in found["cells"]:
        assert cell["error"] is None and list(cell["recipes"])[-1] == "evaluate"
        assert all(Path(recipe).is_file() for recipe in cell["recipes"].values())
    assert "## evaluate: " in (out / "ablation.md").read_text()
    assert "<h2>evaluate: " in (out / "ablation.html").read_text()


def test_a_cell_is_reproduced_by_its_recipes(done, tmp_path):
    _, out, _ = done
    recipes = {
        step: Path(file)
        for step, file in read_json(out / "ablation.json")["cells"][-1]["recipes"].items()
    }
    before = contents(out)
    assert "already holds this run" in succeeds("train", recipes["train"]).err
    succeeds("train", recipes["train"], f"out={tmp_path}/train")
    weights, again = (
        load_file(folder / "model.safetensors")
        for folder in (recipes["train"].parent, tmp_path / "train")
    )
    assert all(weights[name].equal(again[name]) for name in weights)
    succeeds("evaluate", recipes["evaluate"], f"out={tmp_path}/evaluate")
    values = [
        folder / "per_query.jsonl" for folder in (recipes["evaluate"].parent, tmp_path / "evaluate")
    ]
    assert values[0].read_bytes() == values[1].read_bytes()
    assert contents(out) == before


def test_what_is_lost_is_made_again_and_the_rest_left_alone(done):
    file, out, answer = done
    table = (out / "ablation.json").read_bytes()
    plan = make_plan(file, [])
    clean, raw = plan.cells[0], plan.cells[1]
    lists = next(run.folder for run in clean.runs if run.step == "lists")
    trained = next(run.folder for run in raw.runs if run.step == "train")
    for lost in (lists, clean.evaluations["evaluate"], raw.evaluations["evaluate"]):
        shutil.rmtree(lost)
    write_json(
        trained / "run.json", read_json(trained / "run.json") | {"finished": False}
    )  # as kill -9 leaves it
    (trained / "model.safetensors").unlink()
    assert plan_ablation(file, [])["num_runs_missing"] == 3, (
        "nobody needs the lists: their training is done"
    )
    changing = (clean.evaluations["evaluate"], raw.evaluations["evaluate"], trained)
    kept = [path for path in (out / "steps").iterdir() if path not in changing]
    before = contents(*kept)
    assert run_ablation(file, []) == answer
    assert contents(*kept) == before and not lists.exists()
    assert (out / "ablation.json").read_bytes() == table


def test_a_training_that_is_interrupted_goes_on(done, tmp_path, library, model_folders):
    _, finished, _ = done
    base = {"evaluate.systems.0.rankers.0.source": str(model_folders["bert"])}
    file = trained_grid(
        tmp_path, library, model_folders["bert"], variants={"clean": {}, "base": base}, seeds=[1]
    )
    training = "steps.train.training"  # 12 steps, a checkpoint after each
    settings = [f"runs={finished}/steps", f"{training}.epochs=4", f"{training}.save_every=1"]
    before = {*finished.glob("steps/train-*")}

    def interrupt() -> None:
        while not list(finished.glob("steps/train-*/checkpoints/step-2")):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    watching = threading.Thread(target=interrupt, daemon=True)
    watching.start()
    with pytest.raises(
        SkilltrainError, match=r"interrupted after step \d+ of 12.*run the same command to go on"
    ):
        run_ablation(file, settings)
    watching.join()
    (trained,) = {*finished.glob("steps/train-*")} - before
    assert (
        not read_json(trained / "run.json")["finished"]
        and not (tmp_path / "out" / "ablation.json").exists()
    )
    run_ablation(file, settings)
    assert read_json(trained / "run.json")["finished"]
    logged = [
        json.loads(line)["step"] for line in (trained / "train_log.jsonl").read_text().splitlines()
    ]
    assert logged == list(range(1, 13)), "no step was lost or done from the start again"
    assert folders_of(finished)["train"] == len(before) + 1


def test_a_failed_cell_is_noted_and_the_others_go_on(tmp_path, library):
    values = lexical_grid(tmp_path, library)
    missing = {
        "evaluate.systems.0.rankers.0": {"kind": "dense", "source": str(tmp_path / "no_model")}
    }
    file = write_grid(
        tmp_path,
        values | {"variants": {"full": {}, "gone": missing, "nd": values["variants"]["nd"]}},
    )
    for _ in range(2):  # the same command tries it again
        with pytest.raises(SkilltrainError) as raised:
            run_ablation(file, [])
        assert f"{file}: 1 of 3 cells failed, first gone, seed 1: step evaluate: " in str(
            raised.value
        )
        assert "no_model" in str(raised.value) and "\n" not in str(raised.value)
        found = read_json(tmp_path / "out" / "ablation.json")
        assert [row["variant"] for row in found["tables"][0]["variants"]] == ["full", "nd"]
        assert "no_model" in found["cells"][1]["error"] and found["cells"][0]["error"] is None
    assert folders_of(tmp_path / "out") == {"pool": 1, "queries": 1, "evaluate": 2}


def test_a_fault_of_ours_shows_its_traceback_and_is_tried_once(
    tmp_path, library, monkeypatch, capsys
):
    tried = []

    def broken(config: Any, resume: bool) -> None:
        tried.append(config.out)
        raise ValueError("no such axis\nsecond line")

    monkeypatch.setattr(ablation_run, "run_recipe", broken)
    with pytest.raises(
        SkilltrainError,
        match=r"2 of 2 cells failed.*step pool: ValueError: no such axis \(the same",
    ):
        run_ablation(write_grid(tmp_path, lexical_grid(tmp_path, library)), [])
    said = capsys.readouterr().err
    assert "second line" in said and "Traceback" in said
    assert len(tried) == 1, "what a cell failed at is not tried for the next"


def test_ranks_are_refused(tmp_path, library, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SkilltrainError, match="an ablation runs in one process"):
        run_ablation(write_grid(tmp_path, lexical_grid(tmp_path, library)), [])
    assert not (tmp_path / "out").exists()
