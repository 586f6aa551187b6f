"""How a stage runs: its record, its folder, and when it does not run at all."""

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
    return parse_recipe(
        {"stage": "pool", "sources": str(library / "skills"), "out": str(out), **settings}, "test"
    )


# Recipes ----------------------------------------------------------------------


def test_a_recipe_runs_only_as_the_program_and_with_overrides(runs, tmp_path, model_folders):
    run("__mp_main__", "no such file")  # what a spawned worker calls itself
    recipe = write_recipe(tmp_path / "r.yaml", encoder_recipe(runs, model_folders["bert"]))
    runpy.run_path(str(recipe), run_name="anything")
    assert list(tmp_path.iterdir()) == [recipe]
    run("__main__", str(recipe), ["training.epochs=1", f"out={tmp_path}/out"])
    forget_ranks()
    found = record_of(tmp_path / "out")
    assert (
        found["finished"]
        and found["recipe"]["training"]["epochs"] == 1
        and found["summary"]["num_steps"] == 3
    )


@pytest.fixture(scope="module")
def any_stage():
    """The schema of a recipe of any stage."""
    return schema_of([*STAGES])


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_can_run_and_has_settings_with_descriptions_and_a_schema(name, any_stage):
    stage = load_stage(name)
    assert inspect.getdoc(stage).splitlines()[0] == STAGES[name][1]
    assert stage.example and stage.run not in (Stage.run, TrainingStage.run)
    waiting, bare, seen = [stage], list[str](), set[type]()
    while waiting:
        section = waiting.pop()
        seen.add(section)
        for key, field in section.model_fields.items():
            is_tag = (
                get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
            )
            bare += [f"{section.__name__}.{key}"] if not (is_tag or field.description) else []
            waiting += [inner for inner in sections_of(field) if inner not in seen]
    assert bare == []
    schema = json.loads(json.dumps(schema_of([name])))
    assert schema["properties"].keys() == {"recipe", *stage.model_fields} >= {"stage", "out"}
    assert schema["additionalProperties"] is False
    assert "out" in schema["required"] and "recipe" not in schema["required"]
    assert schema["$defs"].items() <= any_stage["$defs"].items()


# The record -------------------------------------------------------------------


def test_the_record_holds_settings_inputs_and_summary(runs):
    found = record_of(runs / "filtered")
    assert found["format"] == RUN.number and found["finished"] is True
    assert (
        found["summary"]["num_candidates"]
        == found["summary"]["num_kept"] + found["summary"]["num_dropped"]
    )
    places = {"pool": runs / "pool", "queries": runs / "queries", "rankings": runs / "mined"}
    places["encoder.source"] = Path(found["recipe"]["encoder"]["source"])
    assert found["inputs"] == {key: input_fingerprint(path) for key, path in places.items()}


@pytest.mark.parametrize(("name", "command"), [("mined", "mine"), ("encoder", "train")])
def test_the_resolved_recipe_gives_the_same_again(runs, tmp_path, name, command):
    resolved = runs / name / "recipe.yaml"
    assert "nothing to do" in succeeds(command, resolved).err
    succeeds(command, resolved, f"out={tmp_path}/out")
    made = [
        path
        for path in (runs / name).iterdir()
        if path.suffix in (".parquet", ".safetensors", ".json")
    ]
    changed = {
        path.name
        for path in made
        if path.read_bytes() != (tmp_path / "out" / path.name).read_bytes()
    }
    assert changed <= {"run.json"} and made  # which says how long it took
    again = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert again | {"out": str(runs / name)} == yaml.safe_load(resolved.read_text())


# The folder -------------------------------------------------------------------


def test_an_empty_folder_is_taken_its_parents_are_made_and_what_a_kill_left_is_made_anew(
    library, tmp_path
):
    (tmp_path / "empty").mkdir()
    (tmp_path / ".empty.partial").mkdir()
    (tmp_path / ".empty.partial" / "skills.parquet").write_text("half")
    for out in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert run_stage(pool_config(library, out))["num_skills"] == 20
        assert sorted(path.name for path in out.iterdir()) == [
            "dropped.parquet",
            "flags.parquet",
            "local.json",
            "recipe.yaml",
            "run.json",
            "skills.parquet",
        ]
        assert (out / "skills.parquet").stat().st_size > 100
    assert not (tmp_path / ".empty.partial").exists()


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_without_a_name_is_refused(library, tmp_path, monkeypatch, out):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with raises("invalid-output-name"):
        run_stage(pool_config(library, out))


@pytest.mark.parametrize(
    "fault",
    [SkilltrainError("invalid-row", "bad"), KeyboardInterrupt("bad"), ValueError("bad")],
    ids=repr,
)
def test_a_stage_that_fails_leaves_no_output(library, tmp_path, monkeypatch, fault):
    def half(config, out):
        (out / "half.parquet").write_text("")
        raise fault

    monkeypatch.setattr(skill_pool.Pool, "run", half)
    before = contents(tmp_path)
    with pytest.raises(type(fault), match="bad"):
        run_stage(pool_config(library, tmp_path / "out"))
    assert contents(tmp_path) == before


def test_what_a_kill_left_of_a_training_does_not_block_the_next_one(runs, tmp_path, model_folders):
    recipe = write_recipe(tmp_path / "r.yaml", encoder_recipe(runs, model_folders["bert"]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".recipe.yaml.x7.partial").write_text("half")
    succeeds("train", recipe, "training.epochs=1", f"out={tmp_path}/out")
    (tmp_path / "out" / ".run.json.x7.partial").write_text("half")
    assert (
        "nothing to do" in succeeds("train", recipe, "training.epochs=1", f"out={tmp_path}/out").err
    )
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_a_full_disk_leaves_no_training_behind(runs, tmp_path, model_folders, monkeypatch):
    """safetensors tells of a full disk by an error of its own."""

    def full(tensors, file, metadata=None):
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: No space left on device")

    recipe = write_recipe(tmp_path / "r.yaml", encoder_recipe(runs, model_folders["bert"]))
    monkeypatch.setattr("skilltrain.training.checkpoint.save_file", full)
    line = skilltrain("train", recipe, f"out={tmp_path}/out").error_line
    assert "cannot save a checkpoint: Error while serializing: No space left on device" in line
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_two_runs_do_not_write_one_folder(library, tmp_path, monkeypatch):
    def at_once(config, out):
        with raises("folder-in-use"):
            run_stage(config)
        return whole(config, out)

    whole = skill_pool.Pool.run
    monkeypatch.setattr(skill_pool.Pool, "run", at_once)
    run_stage(pool_config(library, tmp_path / "out"))
    assert (tmp_path / "out" / "skills.parquet").is_file() and not (
        tmp_path / ".out.partial"
    ).exists()


def test_changed_settings_and_changed_inputs_are_another_run(library, tmp_path):
    out, library = tmp_path / "out", shutil.copytree(library, tmp_path / "library")
    run_stage(pool_config(library, out))
    before = contents(out)
    with raises("other-run"):
        run_stage(pool_config(library, out, drop_duplicates=False))
    (library / "skills" / "data" / "csv-repair" / "SKILL.md").write_text(
        "# Another\nAnother body.\n"
    )
    with raises("other-run"):
        run_stage(pool_config(library, out))
    assert contents(out) == before


def test_a_changed_model_is_another_run_and_its_checkpoints_are_no_part_of_it(runs, tmp_path):
    """A model trained anew in the same place must not pass for the one that ranked."""
    shutil.copytree(runs / "encoder", tmp_path / "encoder")
    command = (
        "candidates",
        f"pool={runs}/pool",
        f"queries={runs}/queries",
        "system.name=e",
        f"system.rankers=[{{kind: dense, source: {tmp_path}/encoder}}]",
        f"out={tmp_path}/out",
    )
    succeeds(*command)
    shutil.rmtree(tmp_path / "encoder" / "checkpoints")
    assert "nothing to do" in succeeds(*command).err
    shutil.rmtree(tmp_path / "encoder")
    shutil.copytree(runs / "reranker", tmp_path / "encoder")
    line = skilltrain(*command).only_line
    assert "holds another run: the content of system.rankers.0.source differs" in line


def test_what_no_update_depends_on_may_change_in_a_run(runs):
    recipe, before = runs / "recipes" / "encoder.yaml", contents(runs)
    free = {"save_every": 7, "keep_checkpoints": 9, "stop_grad_norm": 50, "trackers": "[]"}
    assert set(free) == set(FREE_TO_CHANGE)
    changes = [f"training.{key}={value}" for key, value in free.items()]
    assert "nothing to do" in succeeds("train", recipe, *changes).err
    for change in (
        "training.token_budget=100",
        "training.recompute=true",
        "loss.temperature=0.1",
        "data.max_lists=3",
    ):
        line = skilltrain("train", recipe, change).only_line
        assert f"holds another run: {change.partition('=')[0]} differs" in line
    assert contents(runs) == before


# Several processes ------------------------------------------------------------


def test_a_second_rank_leaves_records_to_the_first(runs, library, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with raises("one-process"):
        run_stage(pool_config(library, tmp_path / "out"))
    assert (
        succeeds("train", runs / "recipes" / "encoder.yaml", f"out={tmp_path}/out", "--dry-run").out
        == ""
    )
    assert not (tmp_path / "out").exists()
    # Where the first finds the run finished it returns at once: the second must not wait for it in a training.
    before = contents(runs)
    config = parse_recipe(load_recipe(runs / "recipes" / "encoder.yaml"), "here")
    assert run_stage(config) == record_of(runs / "encoder")["summary"]
    assert contents(runs) == before
