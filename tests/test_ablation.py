"""An ablation as it runs: steps that are shared run once, a run that was stopped goes on, a failure stops no other."""

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from skilltrain.ablation import run as ablation_run
from skilltrain.ablation.grid import make_plan
from skilltrain.ablation.run import plan_ablation, run_ablation
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from small_library import contents, succeeds
from test_ablation_grid import write_grid


def lexical_grid(folder: Path, library: Path) -> Path:
    """BM25 with and without the body: three runs that are shared or not, no model."""
    bm25 = {"name": "bm25", "rankers": [{"kind": "lexical", "fields": "full"}]}
    steps = {
        "pool": {"stage": "pool", "sources": str(library / "skills")},
        "queries": {"stage": "queries", "files": str(library / "queries" / "*.jsonl"), "pool": "{pool}"},
        "evaluate": {"stage": "evaluate", "pool": "{pool}", "benchmark": "{queries}", "systems": [bm25]},
    }
    variants = {"full": {}, "nd": {"evaluate.systems.0.rankers.0.fields": "nd"}}
    grid = {"ablation": "inputs", "claim": "The body decides.", "baseline": "full", "out": str(folder / "out")}
    return write_grid(folder, grid | {"steps": steps, "variants": variants})


def trained_grid(folder: Path, library: Path, model: Path) -> Path:
    """Two kinds of negatives for a tiny encoder, asked held-out queries and the training queries."""
    pool, queries = {"pool": "{pool}"}, {"queries": "{queries}"}
    values = yaml.safe_load(lexical_grid(folder, library).read_text())
    steps = values["steps"]
    steps["mine"] = {"stage": "mine", **pool, **queries, "encoder": {"source": str(model)}, "depth": 8}
    steps["lists"] = {"stage": "lists", **pool, **queries, "rankings": "{mine}", "quotas": {"semantic": 3, "random": 0}}
    steps["train"] = {
        "stage": "train_encoder",
        "model": {"source": str(model), "max_tokens": 48, "query_max_tokens": 48},
        "data": {**pool, "lists": "{lists}"},
        "training": {
            "batch_size": 4, "accumulation": 1, "learning_rate": 1e-3, "token_budget": 512, "save_every": 1,
            "seed": "{seed}",
        },
    }  # fmt: skip
    steps["evaluate"] |= {
        "systems": [{"name": "trained", "rankers": [{"kind": "dense", "source": "{train}"}]}], "split": "test"
    }  # fmt: skip
    steps["seen"] = steps["evaluate"] | {"split": "train"}
    values |= {"baseline": "hard", "seeds": [1, 2]}
    values["variants"] = {"hard": {}, "random": {"lists.quotas": {"random": 3}}}
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


def test_shared_steps_run_once(done):
    file, out, answer = done
    assert folders_of(out) == {"pool": 1, "queries": 1, "mine": 1, "lists": 2, "train": 4, "evaluate": 4, "seen": 4}
    assert answer["num_cells"] == 4
    assert not list(out.glob("steps/train-*/checkpoints")), "checkpoints are three times the model's size"
    found = plan_ablation(file, [])
    assert found["num_runs_missing"] == 0


def test_the_tables_hold_every_variant_seed_and_recipe(done):
    _, out, _ = done
    found = read_json(out / "ablation.json")
    held_out, seen = found["tables"]
    assert (held_out["num_queries"], seen["num_queries"]) == (4, 12)
    for table in (held_out, seen):
        assert [row["variant"] for row in table["variants"]] == ["hard", "random"]
        assert all(set(row["seed_means"]) == {"1", "2"} for row in table["variants"])
        assert [row["measure"] for row in table["differences"]] == ["Hit@1", "MRR@10"]
    for cell in found["cells"]:
        assert cell["error"] is None and list(cell["recipes"])[-1] in ("evaluate", "seen")
        assert all(Path(recipe).is_file() for recipe in cell["recipes"].values())
    assert "## seen: " in (out / "ablation.md").read_text() and "<h2>seen: " in (out / "ablation.html").read_text()


def test_a_cell_is_reproduced_by_its_recipes(done, tmp_path):
    _, out, _ = done
    recipes = {step: Path(file) for step, file in read_json(out / "ablation.json")["cells"][-1]["recipes"].items()}
    before = contents(out)
    assert "already holds this run" in succeeds("train", recipes["train"]).err
    succeeds("train", recipes["train"], f"out={tmp_path}/train")
    weights, again = (
        load_file(folder / "model.safetensors") for folder in (recipes["train"].parent, tmp_path / "train")
    )
    assert all(weights[name].equal(again[name]) for name in weights)
    succeeds("evaluate", recipes["evaluate"], f"out={tmp_path}/evaluate")
    values = [folder / "per_query.jsonl" for folder in (recipes["evaluate"].parent, tmp_path / "evaluate")]
    assert values[0].read_bytes() == values[1].read_bytes()
    assert contents(out) == before


def test_what_is_lost_is_made_again_and_the_rest_left_alone(done):
    file, out, answer = done
    table = (out / "ablation.json").read_bytes()
    plan = make_plan(file, [])
    hard, random = plan.cells[0], plan.cells[1]
    lists = next(run.folder for run in hard.runs if run.step == "lists")
    trained = next(run.folder for run in random.runs if run.step == "train")
    for lost in (lists, hard.evaluations["seen"], random.evaluations["evaluate"]):
        shutil.rmtree(lost)
    write_json(trained / "run.json", read_json(trained / "run.json") | {"finished": False})  # as kill -9 leaves it
    (trained / "model.safetensors").unlink()
    assert plan_ablation(file, [])["num_runs_missing"] == 3, "nobody needs the lists: their training is done"
    changing = (hard.evaluations["seen"], random.evaluations["evaluate"], trained)
    kept = [path for path in (out / "steps").iterdir() if path not in changing]
    before = contents(*kept)
    assert run_ablation(file, []) == answer
    assert contents(*kept) == before and not lists.exists()
    assert (out / "ablation.json").read_bytes() == table


def test_a_training_that_is_interrupted_goes_on(done, tmp_path, library, model_folders):
    _, finished, _ = done
    file = trained_grid(tmp_path, library, model_folders["bert"])
    settings = ["seeds=[1]", "steps.train.training.epochs=4"]  # 12 steps, a checkpoint after each

    def interrupt() -> None:
        while not list((tmp_path / "out" / "steps").glob("train-*/checkpoints/step-2")):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    watching = threading.Thread(target=interrupt, daemon=True)
    watching.start()
    with pytest.raises(SkilltrainError, match=r"interrupted after step \d+ of 12.*run the same command to go on"):
        run_ablation(file, settings)
    watching.join()
    (trained,) = (tmp_path / "out" / "steps").glob("train-*")
    assert not read_json(trained / "run.json")["finished"] and not (tmp_path / "out" / "ablation.json").exists()
    run_ablation(file, settings)
    assert read_json(trained / "run.json")["finished"] and folders_of(tmp_path / "out")["train"] == 2
    logged = [json.loads(line)["step"] for line in (trained / "train_log.jsonl").read_text().splitlines()]
    assert logged == list(range(1, 13)), "no step was lost or done from the start again"
    assert folders_of(finished)["train"] == 4


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_failed_cell_is_noted_and_the_others_go_on(tmp_path, library):
    file = lexical_grid(tmp_path, library)
    values = yaml.safe_load(file.read_text())
    missing = {"evaluate.systems.0.rankers.0": {"kind": "dense", "source": str(tmp_path / "no_model")}}
    values["variants"] = {"full": {}, "gone": missing, "nd": values["variants"]["nd"]}
    write_grid(tmp_path, values)
    for _ in range(2):  # the same command tries it again
        with pytest.raises(SkilltrainError) as raised:
            run_ablation(file, [])
        assert f"{file}: 1 of 3 cells failed, first gone, seed 1: step evaluate: " in str(raised.value)
        assert "no_model" in str(raised.value) and "\n" not in str(raised.value)
        found = read_json(tmp_path / "out" / "ablation.json")
        assert [row["variant"] for row in found["tables"][0]["variants"]] == ["full", "nd"]
        assert "no_model" in found["cells"][1]["error"] and found["cells"][0]["error"] is None
    assert folders_of(tmp_path / "out") == {"pool": 1, "queries": 1, "evaluate": 2}


def test_a_fault_of_ours_shows_its_traceback_and_is_tried_once(tmp_path, library, monkeypatch, capsys):
    tried = []

    def broken(config: Any, resume: bool) -> None:
        tried.append(config.out)
        raise ValueError("no such axis\nsecond line")

    monkeypatch.setattr(ablation_run, "run_recipe", broken)
    with pytest.raises(SkilltrainError, match=r"2 of 2 cells failed.*step pool: ValueError: no such axis \(the same"):
        run_ablation(lexical_grid(tmp_path, library), [])
    said = capsys.readouterr().err
    assert "second line" in said and "Traceback" in said
    assert len(tried) == 1, "what a cell failed at is not tried for the next"


def test_ranks_are_refused(tmp_path, library, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SkilltrainError, match="an ablation runs in one process"):
        run_ablation(lexical_grid(tmp_path, library), [])
    assert not (tmp_path / "out").exists()
