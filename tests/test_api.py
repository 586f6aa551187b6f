"""The Python API and `skilltrain fit`, on a small library and a tiny model."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import skilltrain
from faults import raises
from small_library import QUERIES, forget_ranks

SKILL = {"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}


@pytest.fixture(scope="module")
def router(library, tmp_path_factory):
    """Return the folder of a router that `fit` made without training."""
    out = tmp_path_factory.mktemp("fit") / "router"
    skilltrain.fit(library / "skills", out, train=False)
    return out


def test_api_has_every_name():
    assert [name for name in skilltrain.__all__ if getattr(skilltrain, name) is None] == []


def test_unknown_name_is_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        skilltrain.nothing  # noqa: B018


def test_import_does_not_import_torch():
    code = "import skilltrain, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pool_is_read_from_rows():
    (skill,) = skilltrain.read_pool([SKILL])

    assert skill.skill_id == "pdf-merge"
    assert skill.lang == "en"


def test_pool_is_read_from_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([SKILL | {"category": float("nan")}])

    assert skilltrain.read_pool(frame) == skilltrain.read_pool([SKILL])


def test_pool_is_read_from_file(tmp_path):
    (tmp_path / "skills.jsonl").write_text(json.dumps(SKILL))

    assert skilltrain.read_pool(tmp_path / "skills.jsonl")[0].body == SKILL["body"]


def test_pool_is_read_from_folder(library):
    assert len(skilltrain.read_pool(library / "skills")) == 20


def test_pool_refuses_invalid_row():
    with raises("invalid-row"):
        skilltrain.read_pool([{"name": "x"}])


@pytest.fixture(scope="module")
def workspace(library, tmp_path_factory):
    """A folder with the library's pool, and with lists that `build_lists` made for its queries."""
    folder = tmp_path_factory.mktemp("workspace")
    summary = skilltrain.run(
        {"stage": "pool", "sources": library / "skills", "out": folder / "pool"}
    )
    assert summary["num_skills"] == 20

    rows = [{"query": text, "skill_ids": skill_ids} for _, text, skill_ids in QUERIES]
    quotas = {"semantic": 2, "random": 1}
    lists = skilltrain.build_lists(folder / "pool", rows, folder / "data", quotas=quotas)
    assert lists == folder / "data" / "encoder_lists"
    return folder


@pytest.fixture(scope="module")
def encoder(workspace, model_folders):
    """An encoder that `train` trained on these lists."""
    recipe = {
        "stage": "train_encoder",
        "model": {"source": str(model_folders["bert"]), "max_tokens": 32},
        "data": {"pool": workspace / "pool", "lists": workspace / "data" / "encoder_lists"},
        "training": {"batch_size": 8},
    }
    folder = skilltrain.train(recipe, f"out={workspace}/encoder")
    forget_ranks()
    return folder


def test_build_lists_writes_table(workspace):
    assert (workspace / "data" / "encoder_lists" / "lists.parquet").is_file()


def test_evaluate_scores_trained_encoder(workspace, encoder):
    ranker = {"kind": "dense", "source": encoder}
    recipe = {
        "stage": "evaluate",
        "benchmark": workspace / "data" / "queries",
        "pool": workspace / "pool",
        "systems": [{"name": "trained", "rankers": [ranker]}],
    }

    summary = skilltrain.evaluate(recipe, f"out={workspace}/report")

    assert summary["systems"][0]["metrics"]["Hit@1"]["n"] == len(QUERIES)


def test_export_model_writes_weights(encoder, tmp_path):
    skilltrain.export_model(encoder, tmp_path / "model")

    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_train_refuses_other_stage():
    with raises("wrong-stage"):
        skilltrain.train({"stage": "pool", "sources": "x"}, "out=y")


def test_route_takes_skills_or_folder(library):
    folder = library / "skills"
    request = "merge these pdf files"

    (skill,) = skilltrain.route(
        request, skilltrain.read_pool(folder), "[{kind: lexical}]", k=1
    ).skills
    (skill_of_folder,) = skilltrain.route(request, folder, [{"kind": "lexical"}], k=1).skills

    assert skill.skill_id == "documents/pdf-merge"
    assert skill.path == skill_of_folder.path
    path = folder / "documents" / "pdf-merge" / "SKILL.md"
    assert skill_of_folder == replace(skill, path=path)


def test_loaded_router_routes(router):
    loaded = skilltrain.Router.load(router)

    assert len(loaded.route("merge these pdf files", k=3).skills) == 3
