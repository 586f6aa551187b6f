"""A stage writes a record, owns its output folder and does not run twice."""

import inspect
import json
import runpy
import shutil
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from safetensors import SafetensorError

from faults import raises
from skilltrain.config import load_recipe, sections_of
from skilltrain.data.pool import skill_pool
from skilltrain.errors import SkilltrainError
from skilltrain.formats import RUN
from skilltrain.recipe import run
from skilltrain.runs import FREE_TO_CHANGE, input_fingerprint, record_of, run_stage
from skilltrain.stage import STAGES, Stage, TrainingStage, load_stage, parse_recipe, schema_of
from small_library import contents, encoder_recipe, forget_ranks, skilltrain, succeeds, write_recipe


def pool_config(library, out, **settings):
    """Return the settings of a pool of the library."""
    values = {"stage": "pool", "sources": str(library / "skills"), "out": str(out), **settings}
    return parse_recipe(values, "test")


# Recipes ----------------------------------------------------------------------


@pytest.fixture
def recipe(runs, tmp_path, model_folders):
    """A recipe that trains an encoder."""
    return write_recipe(tmp_path / "r.yaml", encoder_recipe(runs, model_folders["bert"]))


def test_imported_recipe_does_not_run(recipe, tmp_path):
    run("__mp_main__", "no such file")  # the module name in a spawned worker
    runpy.run_path(str(recipe), run_name="anything")

    assert list(tmp_path.iterdir()) == [recipe]


def test_recipe_runs_with_overrides(recipe, tmp_path):
    run("__main__", str(recipe), ["training.epochs=1", f"out={tmp_path}/out"])

    forget_ranks()
    record = record_of(tmp_path / "out")
    assert record["finished"]
    assert record["recipe"]["training"]["epochs"] == 1
    assert record["summary"]["num_steps"] == 3


@pytest.fixture(scope="module")
def any_stage():
    """The schema of a recipe of any stage."""
    return schema_of([*STAGES])


def sections_within(stage):
    """Return the stage and all sections of its settings."""
    sections = [stage]
    for section in sections:  # the list grows while it is read
        for field in section.model_fields.values():
            sections += [inner for inner in sections_of(field) if inner not in sections]
    return sections


@pytest.mark.parametrize("name", STAGES)
def test_stage_has_example_of_its_own(name):
    stage = load_stage(name)

    assert inspect.getdoc(stage).splitlines()[0] == STAGES[name][1]
    assert stage.example
    assert stage.run not in (Stage.run, TrainingStage.run)


@pytest.mark.parametrize("name", STAGES)
def test_every_setting_has_a_description(name):
    for section in sections_within(load_stage(name)):
        for key, field in section.model_fields.items():
            choices = get_args(field.annotation)
            is_tag = get_origin(field.annotation) is Literal and len(choices) == 1
            assert is_tag or field.description, f"{section.__name__}.{key}"


@pytest.mark.parametrize("name", STAGES)
def test_schema_holds_every_setting(name, any_stage):
    schema = json.loads(json.dumps(schema_of([name])))

    assert schema["properties"].keys() == {"recipe", *load_stage(name).model_fields}
    assert schema["properties"].keys() >= {"stage", "out"}
    assert schema["additionalProperties"] is False
    assert "out" in schema["required"]
    assert "recipe" not in schema["required"]
    assert schema["$defs"].items() <= any_stage["$defs"].items()


# The record -------------------------------------------------------------------


def test_record_holds_fingerprints_of_inputs(runs):
    record = record_of(runs / "filtered")

    assert record["format"] == RUN.number
    assert record["finished"] is True
    summary = record["summary"]
    assert summary["num_candidates"] == summary["num_kept"] + summary["num_dropped"]
    paths = {
        "pool": runs / "pool",
        "queries": runs / "queries",
        "rankings": runs / "mined",
        "encoder.source": Path(record["recipe"]["encoder"]["source"]),
    }
    assert record["inputs"] == {key: input_fingerprint(path) for key, path in paths.items()}


@pytest.mark.parametrize(("name", "command"), [("mined", "mine"), ("encoder", "train")])
def test_resolved_recipe_reproduces_output(runs, tmp_path, name, command):
    resolved = runs / name / "recipe.yaml"
    out = tmp_path / "out"
    assert "nothing to do" in succeeds(command, resolved).err

    succeeds(command, resolved, f"out={out}")

    suffixes = (".parquet", ".safetensors", ".json")
    files = [path for path in (runs / name).iterdir() if path.suffix in suffixes]
    assert files
    for file in files:
        if file.name != "run.json":  # it holds the duration
            assert file.read_bytes() == (out / file.name).read_bytes()
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert recipe | {"out": str(runs / name)} == yaml.safe_load(resolved.read_text())


# The folder -------------------------------------------------------------------


def test_stage_writes_into_empty_folder(library, tmp_path):
    out = tmp_path / "empty"
    out.mkdir()

    summary = run_stage(pool_config(library, out))

    assert summary["num_skills"] == 20
    assert sorted(path.name for path in out.iterdir()) == [
        "dropped.parquet",
        "flags.parquet",
        "local.json",
        "recipe.yaml",
        "run.json",
        "skills.parquet",
    ]


def test_stage_creates_parent_folders(library, tmp_path):
    out = tmp_path / "a" / "b" / "c"

    run_stage(pool_config(library, out))

    assert (out / "skills.parquet").stat().st_size > 100


def test_stage_replaces_output_of_killed_run(library, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "skills.parquet").write_text("half")

    run_stage(pool_config(library, tmp_path / "out"))

    assert (tmp_path / "out" / "skills.parquet").stat().st_size > 100
    assert not partial.exists()


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_folder_without_name_is_refused(library, tmp_path, monkeypatch, out):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    with raises("invalid-output-name"):
        run_stage(pool_config(library, out))


def test_router_folder_without_name_is_refused(library, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    line = skilltrain("index", f"pool={library}/skills", "rankers=[{kind: lexical}]", "out=..")

    assert "[invalid-output-name]" in line.error_line


@pytest.mark.parametrize(
    "fault",
    [SkilltrainError("invalid-row", "bad"), KeyboardInterrupt("bad"), ValueError("bad")],
    ids=repr,
)
def test_failed_stage_leaves_no_output(library, tmp_path, monkeypatch, fault):
    def fail(config, out):
        (out / "half.parquet").write_text("")
        raise fault

    monkeypatch.setattr(skill_pool.Pool, "run", fail)
    files = contents(tmp_path)

    with pytest.raises(type(fault), match="bad"):
        run_stage(pool_config(library, tmp_path / "out"))

    assert contents(tmp_path) == files


def test_partial_files_do_not_block_training(recipe, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    command = ("train", recipe, "training.epochs=1", f"out={out}")
    (out / ".recipe.yaml.x7.partial").write_text("half")

    succeeds(*command)

    (out / ".run.json.x7.partial").write_text("half")
    assert "nothing to do" in succeeds(*command).err
    assert not list(out.glob(".*.partial"))


def test_full_disk_leaves_no_output(recipe, tmp_path, monkeypatch):
    """safetensors has an error of its own for a full disk."""

    def fail(tensors, file, metadata=None):
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr("skilltrain.training.checkpoint.save_file", fail)

    line = skilltrain("train", recipe, f"out={tmp_path}/out").error_line

    assert "cannot save a checkpoint: Error while serializing: No space left on device" in line
    assert list(tmp_path.iterdir()) == [recipe]


def test_second_run_of_folder_is_refused(library, tmp_path, monkeypatch):
    run_pool = skill_pool.Pool.run

    def run_twice(config, out):
        with raises("folder-in-use"):
            run_stage(config)
        return run_pool(config, out)

    monkeypatch.setattr(skill_pool.Pool, "run", run_twice)

    run_stage(pool_config(library, tmp_path / "out"))

    assert (tmp_path / "out" / "skills.parquet").is_file()
    assert not (tmp_path / ".out.partial").exists()


def test_changed_settings_are_refused(library, tmp_path):
    out = tmp_path / "out"
    run_stage(pool_config(library, out))
    files = contents(out)

    with raises("other-run"):
        run_stage(pool_config(library, out, drop_duplicates=False))

    assert contents(out) == files


def test_changed_inputs_are_refused(library, tmp_path):
    out = tmp_path / "out"
    copied = shutil.copytree(library, tmp_path / "library")
    run_stage(pool_config(copied, out))
    files = contents(out)
    skill_file = copied / "skills" / "data" / "csv-repair" / "SKILL.md"
    skill_file.write_text("# Another\nAnother body.\n")

    with raises("other-run"):
        run_stage(pool_config(copied, out))

    assert contents(out) == files


def test_changed_model_is_refused(runs, tmp_path):
    """A model in the same folder must not pass for the one that ranked."""
    model = tmp_path / "encoder"
    shutil.copytree(runs / "encoder", model)
    command = (
        "candidates",
        f"pool={runs}/pool",
        f"queries={runs}/queries",
        "system.name=e",
        f"system.rankers=[{{kind: dense, source: {model}}}]",
        f"out={tmp_path}/out",
    )
    succeeds(*command)

    # Checkpoints are no part of a model.
    shutil.rmtree(model / "checkpoints")
    assert "nothing to do" in succeeds(*command).err

    shutil.rmtree(model)
    shutil.copytree(runs / "reranker", model)
    line = skilltrain(*command).only_line
    assert "holds another run: the content of system.rankers.0.source differs" in line


def test_free_settings_may_change(runs):
    """They have no influence on the trained parameters."""
    files = contents(runs)
    settings = {"save_every": 7, "keep_checkpoints": 9, "stop_grad_norm": 50, "trackers": "[]"}
    assert set(settings) == set(FREE_TO_CHANGE)
    changes = [f"training.{key}={value}" for key, value in settings.items()]

    messages = succeeds("train", runs / "recipes" / "encoder.yaml", *changes).err

    assert "nothing to do" in messages
    assert contents(runs) == files


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.token_budget", 100),
        ("training.recompute", "true"),
        ("loss.temperature", 0.1),
        ("data.max_lists", 3),
    ],
)
def test_other_settings_may_not_change(runs, key, value):
    files = contents(runs)

    line = skilltrain("train", runs / "recipes" / "encoder.yaml", f"{key}={value}").only_line

    assert f"holds another run: {key} differs" in line
    assert contents(runs) == files


# Several processes ------------------------------------------------------------


def test_second_rank_writes_nothing(runs, library, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    out = tmp_path / "out"
    command = ("train", runs / "recipes" / "encoder.yaml", f"out={out}", "--dry-run")

    with raises("one-process"):
        run_stage(pool_config(library, out))
    assert succeeds(*command).out == ""
    assert not out.exists()


def test_second_rank_returns_finished_run(runs, monkeypatch):
    """The first rank returns at once, so the second must not wait for it."""
    monkeypatch.setenv("RANK", "1")
    files = contents(runs)
    config = parse_recipe(load_recipe(runs / "recipes" / "encoder.yaml"), "here")

    assert run_stage(config) == record_of(runs / "encoder")["summary"]
    assert contents(runs) == files
