"""An ablation's file: what it means, what cells have in common, and every fault named before any work."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from skilltrain.ablation.grid import fill, places_in
from skilltrain.ablation.plan import Plan, make_plan
from skilltrain.ablation.run import plan_ablation
from skilltrain.config import apply_overrides
from skilltrain.errors import SkilltrainError
from small_library import contents, write_library

ROOT = Path(__file__).parents[1]
GRIDS = sorted(file for file in (ROOT / "recipes" / "ablations").glob("*.yaml") if file.stem != "chain")


def grid(folder: Path) -> dict[str, Any]:
    """Mining, a filter that one variant goes without, training by seed, and an evaluation; nothing of it has run."""
    library = folder / "library"
    if not library.exists():
        write_library(library)
    return {
        "ablation": "filter",
        "claim": "Filtering helps.",
        "baseline": "clean",
        "steps": {
            "pool": {"stage": "pool", "sources": str(library / "skills")},
            "queries": {"stage": "queries", "files": str(library / "queries" / "*.jsonl"), "pool": "{pool}"},
            "mine": {"stage": "mine", "pool": "{pool}", "queries": "{queries}", "encoder": {"source": "some/model"}},
            "filter": {
                "stage": "filter", "pool": "{pool}", "queries": "{queries}", "rankings": "{mine}",
                "encoder": {"source": "some/model"}, "layers": [{"name": "name"}, {"name": "jaccard"}],
            },
            "lists": {
                "stage": "lists", "pool": "{pool}", "queries": "{queries}", "rankings": "{filter}",
                "quotas": {"semantic": 2, "lexical": 1},
            },
            "train": {
                "stage": "train_encoder", "model": {"source": "some/model"},
                "data": {"pool": "{pool}", "lists": "{lists}"}, "training": {"seed": "{seed}"},
            },
            "evaluate": {
                "stage": "evaluate", "pool": "{pool}", "benchmark": "{queries}", "split": "test",
                "systems": [{"name": "encoder", "rankers": [{"kind": "dense", "source": "{train}"}]}],
            },
        },
        "variants": {"clean": {}, "raw": {"lists.rankings": "{mine}"}},
        "seeds": [1, 2],
        "out": str(folder / "out"),
    }  # fmt: skip


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


def test_cells_share_what_they_have_in_common(tmp_path):
    plan = plan_of(tmp_path)
    assert steps_of(plan) == {"pool": 1, "queries": 1, "mine": 1, "filter": 1, "lists": 2, "train": 4, "evaluate": 4}
    assert [str(cell) for cell in plan.cells] == ["clean, seed 1", "raw, seed 1", "clean, seed 2", "raw, seed 2"]
    clean, raw, *_ = plan.cells
    assert [run.step for run in clean.runs] == ["pool", "queries", "mine", "filter", "lists", "train", "evaluate"]
    assert [run.step for run in raw.runs] == ["pool", "queries", "mine", "lists", "train", "evaluate"]
    train = next(run for run in raw.runs if run.step == "train")
    assert train.config.training.seed == 1 and train.config.out == train.folder
    lists = next(run for run in raw.runs if run.step == "lists")
    assert train.config.data.lists == lists.folder and lists.config.rankings.name.startswith("mine-")


def test_a_change_of_any_setting_or_input_makes_another_run(tmp_path):
    def folders(*overrides: str, **changes: Any) -> set[str]:
        return {folder.name for folder in plan_of(tmp_path, *overrides, **changes).runs}

    before = folders()
    assert folders("claim=another") == before
    assert folders("steps.filter.workers.num=2") == before, "who computes is no part of a result"
    assert folders("steps.train.training.save_every=7") == before
    assert {name.split("-")[0] for name in before - folders("steps.train.training.epochs=2")} == {"train", "evaluate"}
    file = tmp_path / "library" / "queries" / "all.jsonl"
    file.write_text(file.read_text().replace("my video", "my film"))
    changed = before - folders()
    assert {name.split("-")[0] for name in before - changed} == {"pool"}


def test_a_variant_may_change_an_item_or_a_section(tmp_path):
    sharper = {"filter.layers.1.above": 0.4, "lists.quotas": {"random": 1}}
    plan = plan_of(tmp_path, "seeds=[5]", variants={"clean": None, "sharper": sharper})
    configs = {run.step: run.config for run in plan.cells[1].runs}
    assert [layer.above for layer in configs["filter"].layers[1:]] == [0.4]
    assert configs["lists"].quotas == {"random": 1} and steps_of(plan)["lists"] == 2


def test_a_variant_without_the_seed_has_one_cell(tmp_path):
    base = {"evaluate.systems.0.rankers.0.source": "some/model"}
    plan = plan_of(tmp_path, variants={"clean": {}, "untrained": base})
    assert [str(cell) for cell in plan.cells] == ["clean, seed 1", "untrained, seed 1", "clean, seed 2"]


def test_grids_that_name_one_folder_share_runs(tmp_path):
    first = plan_of(tmp_path, f"runs={tmp_path}/runs")
    second = plan_of(tmp_path, f"runs={tmp_path}/runs", f"out={tmp_path}/other", "seeds=[2, 3]")
    assert {run.step for folder, run in first.runs.items() if folder in second.runs} == set(steps_of(first))
    assert all(folder.parent == tmp_path / "runs" for folder in first.runs)


def test_texts_are_filled():
    places = {"mine": "runs/mine-1", "seed": 7}
    filled = fill({"a": ["{mine}/x", "{seed}", "s{seed}"], "b": [1, None, True]}, places.__getitem__)
    assert filled == {"a": ["runs/mine-1/x", 7, "s7"], "b": [1, None, True]}
    assert fill("{{mine}} of {mine}", places.__getitem__) == "{mine} of runs/mine-1"
    assert places_in({"a": "{mine}{seed}", "b": "{{c}}"}, {*places}) == {"mine", "seed"}


# Dry run -------------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(tmp_path, capsys):
    file = write_grid(tmp_path, grid(tmp_path))
    before = contents(tmp_path)
    found = plan_ablation(file, [])
    assert contents(tmp_path) == before
    assert (found["num_cells"], found["num_runs"], found["num_runs_missing"]) == (4, 14, 14)
    said = capsys.readouterr().err
    assert re.search(r"raw, seed 2: pool-\w{12} \(to run\) → .* → train-\w{12} \(to run\) → evaluate-", said)


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
    "steps.lists.quota={}": "step 'lists' of variant 'clean': unknown key 'quota', did you mean 'quotas'?",
    "steps.evaluate.stage=lists": "has no step of stage evaluate",
    "steps.pool.sources=nowhere": "step 'pool' of variant 'clean': nowhere: no such file or folder",
    "variants.raw={'fliter.layers': []}": "variant 'raw', fliter.layers: is no 'step.key'; steps: pool, queries",
    "variants.raw={filter: 3}": "variant 'raw', filter: is no 'step.key'",
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
    if key.startswith(("variants.", "steps.a/b")):  # keys that hold dots are beyond the command line
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
    (folder / "chain.yaml").write_text(yaml.safe_dump(values.pop("steps") | {"spare": {"stage": "pool"}}))
    return write_grid(folder, values | {"chain": "chain.yaml", "steps": steps})


def test_a_chain_gives_the_steps_that_the_grid_would(tmp_path):
    whole, file = plan_of(tmp_path), with_chain(tmp_path)
    assert make_plan(file, []).runs.keys() == whole.runs.keys()
    values = yaml.safe_load(file.read_text())
    del values["steps"]
    assert make_plan(write_grid(tmp_path, values), []).runs.keys() == whole.runs.keys()


def test_steps_are_laid_over_the_chain_key_by_key(tmp_path):
    changed = make_plan(with_chain(tmp_path, train={"training": {"batch_size": 4}}), ["steps.lists.quotas={random: 3}"])
    trained = next(run.config for run in changed.runs.values() if run.step == "train")
    assert (trained.training.batch_size, trained.training.seed, trained.model.source) == (4, 1, "some/model")
    lists = next(run.config for run in changed.runs.values() if run.step == "lists")
    assert lists.quotas == {"random": 3}  # an override is the whole value


def test_faults_of_a_chain_are_named(tmp_path):
    own = {"mein": {"stage": "pool", "sources": "x"}}
    with pytest.raises(SkilltrainError, match="step 'mein': leads to no evaluation in any variant"):
        make_plan(with_chain(tmp_path, **own), [])
    with pytest.raises(SkilltrainError, match=r"none\.yaml: cannot read the recipe: No such file"):
        make_plan(with_chain(tmp_path), ["chain=none.yaml"])
    with pytest.raises(SkilltrainError, match="chain: must be a path"):
        make_plan(with_chain(tmp_path), ["chain=[1]"])


def test_what_changes_below_the_runs_folder_makes_other_runs(tmp_path):
    """A pool of one's own may stand where the runs do; only the grid's own runs go without a fingerprint."""
    values = grid(tmp_path)
    (folder := tmp_path / "out" / "steps" / "pool").mkdir(parents=True)
    values["steps"]["pool"]["sources"] = str(folder)
    (folder / "a.jsonl").write_text('{"name": "a", "body": "one"}')
    before = make_plan(write_grid(tmp_path, values), []).runs.keys()
    (folder / "a.jsonl").write_text('{"name": "a", "body": "two"}')
    assert not before & make_plan(write_grid(tmp_path, values), []).runs.keys()


# The grids that ship -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", GRIDS, ids=lambda file: file.stem)
def test_a_grid_that_ships_can_be_planned(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = make_plan(file, [])
    assert plan.grid.runs_folder == Path("runs/ablations/steps") and plan.grid.out == Path("runs/ablations") / file.stem
    assert len({cell.variant for cell in plan.cells}) == len(plan.grid.variants)
    assert len(plan.runs) < sum(len(cell.runs) for cell in plan.cells)


def test_grids_share_the_runs_of_their_baselines(monkeypatch):
    monkeypatch.chdir(ROOT)
    plans = {file.stem: make_plan(file, []) for file in GRIDS}
    assert {*plans} == {"candidates_k", "filter", "inputs", "listwise_pointwise", "random_negatives"}
    trained = {
        name: {folder for folder, run in plan.runs.items() if run.config.stage == "train_encoder"}
        for name, plan in plans.items()
    }
    assert trained["filter"] & trained["random_negatives"] and trained["filter"] & trained["inputs"]
    assert trained["candidates_k"] == trained["listwise_pointwise"] <= trained["filter"]
