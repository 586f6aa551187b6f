"""How a stage runs: its record, its folder, and when it does not run at all."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from skilltrain import __version__
from skilltrain.config import load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.files import fingerprint
from skilltrain.recipe import STAGES, parse_recipe, run, run_recipe
from small_library import (
    contents,
    encoder_recipe,
    forget_ranks,
    skilltrain,
    succeeds,
    trained,
    write_library,
    write_recipe,
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, model_folders):
    return trained(tmp_path_factory.getbasetemp() / "trained", model_folders["bert"])


@pytest.fixture
def library(tmp_path):
    return write_library(tmp_path / "library")


def pool_config(library, out, **settings):
    return parse_recipe({"stage": "pool", "sources": str(library / "skills"), "out": str(out), **settings}, "test")


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


# Recipes that run themselves -----------------------------------------------------------------------------------------


def test_run_does_nothing_unless_the_file_is_the_program(tmp_path):
    run("__mp_main__", "no such file")  # what a spawned worker calls itself
    recipe = write_recipe(tmp_path / "r.yaml", "stage: nonsense")
    runpy.run_path(str(recipe), run_name="anything")
    assert list(tmp_path.iterdir()) == [recipe]


def test_run_trains_what_the_file_says_with_overrides(runs, tmp_path, model_folders):
    recipe = write_recipe(tmp_path / "r.yaml", encoder_recipe(runs, model_folders["bert"]))
    run("__main__", str(recipe), ["training.epochs=1", f"out={tmp_path}/out"])
    forget_ranks()
    found = record_of(tmp_path / "out")
    assert found["finished"] and found["recipe"]["training"]["epochs"] == 1 and found["summary"]["num_steps"] == 3


def test_a_recipe_is_read_with_its_overrides(runs):
    config = parse_recipe(load_recipe(runs / "recipes" / "encoder.yaml", ["training.seed=5"]), "here")
    assert config.stage == "train_encoder" and config.training.seed == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "test: missing key 'stage'; allowed: pool, queries, "),
        ({"stage": "trian"}, "test: stage: unknown stage 'trian'; allowed: pool, "),
        ({"stage": ["pool"]}, r"test: stage: unknown stage \['pool'\]; allowed"),
        ({"stage": "pool", "out": "x"}, "test: missing key 'sources'"),
    ],
)
def test_a_recipe_of_no_stage_is_refused(values, message):
    with pytest.raises(SkilltrainError, match=message):
        parse_recipe(values, "test")


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_settings_with_descriptions(name):
    config_class, function = STAGES[name].load()
    assert callable(function)
    bare = [key for key, field in config_class.model_fields.items() if key != "stage" and not field.description]
    assert bare == [] and {"stage", "out"} <= config_class.model_fields.keys()


# The record ----------------------------------------------------------------------------------------------------------


def test_the_record_holds_settings_inputs_and_summary(runs):
    found = record_of(runs / "filtered")
    assert found["skilltrain"] == __version__ and found["finished"] is True
    assert found["summary"]["num_candidates"] == found["summary"]["num_kept"] + found["summary"]["num_dropped"]
    places = {"pool": runs / "pool", "queries": runs / "queries", "rankings": runs / "mined"}
    places["encoder.source"] = Path(found["recipe"]["encoder"]["source"])
    assert found["inputs"] == {key: fingerprint(path) for key, path in places.items()}


def test_models_inside_lists_of_systems_are_inputs_too(runs, tmp_path):
    systems = f"[{{name: a, encoder: {{source: {runs}/encoder}}, reranker: {{source: {runs}/reranker}}}}]"
    succeeds("evaluate", f"systems={systems}", f"pool={runs}/pool", f"benchmark={runs}/queries", f"out={tmp_path}/out")
    found = record_of(tmp_path / "out")["inputs"]
    assert found["systems.0.encoder.source"] == fingerprint(runs / "encoder")
    assert found["systems.0.reranker.source"] == fingerprint(runs / "reranker")


def test_the_resolved_recipe_runs_to_the_same_tables(runs, tmp_path):
    for name, stage in (("pool", "pool"), ("mined", "mine"), ("lists", "lists")):
        resolved = runs / name / "recipe.yaml"
        assert load_recipe(resolved)["out"] == str(runs / name)
        assert "nothing to do" in succeeds(stage, resolved).err
        succeeds(stage, resolved, f"out={tmp_path}/{name}")
        for table in (runs / name).glob("*.parquet"):
            assert table.read_bytes() == (tmp_path / name / table.name).read_bytes()
        again = yaml.safe_load((tmp_path / name / "recipe.yaml").read_text())
        assert again | {"out": str(runs / name)} == yaml.safe_load(resolved.read_text())


def test_the_resolved_recipe_of_a_training_gives_the_same_model(runs, tmp_path):
    assert "nothing to do" in succeeds("train", runs / "encoder" / "recipe.yaml").err
    succeeds("train", runs / "encoder" / "recipe.yaml", f"out={tmp_path}/encoder")
    for name in ("model.safetensors", "skilltrain.json", "config.json", "tokenizer.json"):
        assert (runs / "encoder" / name).read_bytes() == (tmp_path / "encoder" / name).read_bytes()


# The folder ----------------------------------------------------------------------------------------------------------


def test_an_empty_folder_is_taken_and_its_parents_are_made(library, tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert run_recipe(pool_config(library, out), resume=False)["num_skills"] == 20
        assert sorted(path.name for path in out.iterdir()) == [
            "dropped.parquet", "recipe.yaml", "run.json", "skills.parquet",
        ]  # fmt: skip


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_without_a_name_is_refused(library, tmp_path, monkeypatch, out):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SkilltrainError, match="is no name for an output folder"):
        run_recipe(pool_config(library, out), resume=False)


@pytest.mark.parametrize("fault", [SkilltrainError("bad"), OSError("bad"), KeyboardInterrupt(), ValueError("bad")])
def test_a_stage_that_fails_leaves_no_output(library, tmp_path, monkeypatch, fault):
    def half(config, out):
        (out / "half.parquet").write_text("")
        raise fault

    monkeypatch.setattr("skilltrain.data.skill_pool.run_pool", half)
    before = contents(tmp_path)
    with pytest.raises(type(fault)):
        run_recipe(pool_config(library, tmp_path / "out"), resume=False)
    assert contents(tmp_path) == before


def test_what_a_kill_left_half_is_made_anew(library, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "skills.parquet").write_text("half")
    run_recipe(pool_config(library, tmp_path / "out"), resume=False)
    assert not (tmp_path / ".out.partial").exists() and (tmp_path / "out" / "skills.parquet").stat().st_size > 100


def test_changed_settings_and_changed_inputs_are_another_run(library, tmp_path):
    out = tmp_path / "out"
    run_recipe(pool_config(library, out), resume=False)
    before = contents(out)
    with pytest.raises(SkilltrainError, match=r"out: the output folder holds another run: max_body_chars differs"):
        run_recipe(pool_config(library, out, max_body_chars=50), resume=False)
    (library / "skills" / "data" / "csv-repair" / "SKILL.md").write_text("# Another\nAnother body.\n")
    with pytest.raises(SkilltrainError, match=r"holds another run: the content of sources\.0 differs"):
        run_recipe(pool_config(library, out), resume=False)
    assert contents(out) == before


def test_a_changed_model_is_another_run(runs, tmp_path):
    """A model trained anew in the same place must not pass for the one that ranked."""
    shutil.copytree(runs / "encoder", tmp_path / "encoder")
    command = ("candidates", f"pool={runs}/pool", f"queries={runs}/queries", "system.name=e",
               f"system.encoder.source={tmp_path}/encoder", f"out={tmp_path}/out")  # fmt: skip
    succeeds(*command)
    assert "nothing to do" in succeeds(*command).err
    shutil.rmtree(tmp_path / "encoder")
    shutil.copytree(runs / "reranker", tmp_path / "encoder")
    line = skilltrain(*command).only_line
    assert "holds another run: the content of system.encoder.source differs" in line


# Several processes ---------------------------------------------------------------------------------------------------


def test_a_second_rank_leaves_records_to_the_first(runs, library, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SkilltrainError, match="the stage pool runs in one process"):
        run_recipe(pool_config(library, tmp_path / "out"), resume=False)
    assert not (tmp_path / "out").exists()
    # Where the first finds the run finished it returns at once: the second must not wait for it in a training.
    before = contents(runs)
    config = parse_recipe(load_recipe(runs / "recipes" / "encoder.yaml"), "here")
    assert run_recipe(config, resume=False) == record_of(runs / "encoder")["summary"]
    assert contents(runs) == before
