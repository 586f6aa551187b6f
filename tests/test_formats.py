"""Folders of another format are refused in one line that says how to make them again."""

import shutil
from functools import partial

import pytest
import torch

from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.formats import CHECKPOINT, MODEL, ROUTER, RUN
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.serving.index import Contents, Index
from skilltrain.serving.indexing import write_index
from skilltrain.training.checkpoint import best_checkpoint
from small_library import skilltrain

NEWER = 1000


def set_format(file, number):
    """Write `number` into a record; None takes the number out, as records had none at first."""
    record = read_json(file)
    if number is None:
        del record["format"]
    else:
        record["format"] = number
    write_json(file, record)


def write_router(folder):
    system = validate(SystemConfig, {"name": "x", "rankers": [{"kind": "lexical"}]}, "test")
    contents = Contents(folder, {folder: [Skill("a", "sort files", "", "Sorts.")]}, ())
    write_index(folder, system, contents, {})
    return folder


@pytest.fixture
def trained(runs, tmp_path):
    return shutil.copytree(runs / "encoder", tmp_path / "encoder")


def open_model(folder):
    return load_encoder(EncoderConfig(source=str(folder)), torch.device("cpu"))


def refusal(action):
    with pytest.raises(SkilltrainError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_records_hold_numbers(trained, tmp_path):
    router = write_router(tmp_path / "router")
    (state, *_) = (trained / "checkpoints").glob("step-*/state.json")

    assert read_json(trained / "run.json")["format"] == RUN.number
    assert read_json(trained / "skilltrain.json")["format"] == MODEL.number
    assert read_json(state)["format"] == CHECKPOINT.number
    assert read_json(router / "index-1" / "index.json")["format"] == ROUTER.number


@pytest.mark.parametrize(
    ("number", "complaint"),
    [
        (None, "was made by an older skilltrain, in a format that is no longer read (delete the"),
        (NEWER, "was made by a newer skilltrain; upgrade (pip install"),
        ("two", "was made by a newer skilltrain"),
    ],
)
def test_run_of_another_format_is_refused(trained, number, complaint):
    set_format(trained / "run.json", number)

    line = skilltrain("train", trained / "recipe.yaml", f"out={trained}").only_line

    assert f"{trained}: {complaint}" in line


def test_export_of_older_run_is_refused(trained, tmp_path):
    set_format(trained / "run.json", None)

    line = skilltrain("export", trained, "--out", tmp_path / "model").only_line

    assert f"(train again: skilltrain train {trained}/recipe.yaml out=" in line


@pytest.mark.parametrize(
    ("number", "complaint"), [(None, "train again"), (NEWER, "a newer skilltrain; upgrade")]
)
def test_checkpoint_of_another_format_is_refused(trained, number, complaint):
    for state in (trained / "checkpoints").glob("step-*/state.json"):
        set_format(state, number)

    message = refusal(partial(best_checkpoint, trained / "checkpoints"))

    assert complaint in message


@pytest.mark.parametrize(
    ("number", "complaint"),
    [(None, "make it again with skilltrain fit"), (NEWER, "a newer skilltrain; upgrade")],
)
def test_router_of_another_format_is_refused(tmp_path, number, complaint):
    router = write_router(tmp_path / "router")
    set_format(router / "index-1" / "index.json", number)

    message = refusal(partial(Index.open, router))
    write_router(router)

    assert complaint in message
    assert [*Index.open(router).skills] == ["a"]


def test_model_without_number_is_read(trained):
    set_format(trained / "skilltrain.json", None)

    assert open_model(trained).settings.max_tokens == 48


def test_newer_model_is_refused(trained):
    set_format(trained / "skilltrain.json", NEWER)

    message = refusal(partial(open_model, trained))

    assert "skilltrain.json: was made by a newer skilltrain; upgrade" in message
