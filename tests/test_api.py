"""The Python API and `skilltrain fit`, on a small library and a tiny model."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import skilltrain
from faults import raises
from small_library import QUERIES, contents, forget_ranks, succeeds
from small_library import skilltrain as skilltrain_command

SKILL = {"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}


@dataclass(frozen=True)
class FittedRouter:
    """A router that `fit` made from the queries of the library.

    A first process was killed after the stage `mined`. `mined_first` and `mined_last` are the files
    of that stage before and after the second process.
    """

    out: Path
    summary: dict[str, Any]
    mined_first: dict[Path, tuple[int, int]]
    mined_last: dict[Path, tuple[int, int]]


@pytest.fixture(scope="module")
def router(library, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "router"
    queries = library / "queries" / "all.jsonl"
    command = [sys.executable, "-m", "skilltrain", "fit", library / "skills", "max_tokens=32"]
    process = subprocess.Popen(
        [*command, "--out", out, "--queries", queries],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while not (out / "mined").is_dir() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    mined = contents(out / "mined")

    summary = skilltrain.fit(library / "skills", out, queries=[queries], max_tokens=32)
    forget_ranks()
    return FittedRouter(out, summary, mined, contents(out / "mined"))


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
    assert skill.path is None
    path = folder / "documents" / "pdf-merge" / "SKILL.md"
    assert skill_of_folder == replace(skill, path=path)


def test_loaded_router_routes(router):
    loaded = skilltrain.Router.load(router.out)

    assert len(loaded.route("merge these pdf files", k=3).skills) == 3


# fit ----------------------------------------------------------------------------------------------


def test_killed_fit_continues(router):
    assert router.summary["num_skills"] == 20
    assert router.summary["num_lists"] > 0
    assert router.mined_first
    assert router.mined_last == router.mined_first


def test_fit_writes_recipes(router):
    recipes = sorted((router.out / "recipes").iterdir())

    assert [file.stem for file in recipes] == [
        "1_pool",
        "2_queries",
        "3_mined",
        "4_filtered",
        "5_encoder_lists",
        "6_encoder",
        "8_index",
    ]


def test_recipe_of_fit_runs_again(router):
    files = contents(router.out)

    outcome = succeeds("train", router.out / "recipes" / "6_encoder.yaml")

    assert "already holds this run" in outcome.err
    assert contents(router.out) == files


def test_fitted_index_has_relative_paths(router):
    record = json.loads((router.out / "index-1" / "index.json").read_text())

    assert record["pool"] == "./pool"
    assert record["rankers"][0]["of"][1]["source"] == "./encoder"


def test_command_routes_with_fitted_router(router):
    outcome = succeeds("route", "merge these pdf files", "--router", router.out, "--top", 2)

    assert outcome.out.count("\n") == 6


def test_fit_removes_leftovers_of_killed_run(tmp_path):
    leftover = tmp_path / "router" / "recipes" / ".4_filtered.yaml.x.partial"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("half a recipe")

    with raises("not-found"):
        skilltrain.fit(tmp_path / "no_skills", tmp_path / "router")

    assert not leftover.exists()


@pytest.fixture
def fit_without_queries(library, tmp_path):
    return ("fit", library / "skills", "--out", tmp_path / "router", "max_tokens=32")


def test_dry_run_of_fit_writes_nothing(fit_without_queries, tmp_path):
    steps = json.loads(succeeds(*fit_without_queries, "--dry-run").out)["steps"]

    assert [*steps] == [
        "pool",
        "queries",
        "mined",
        "filtered",
        "encoder_lists",
        "encoder",
        "report",
        "index",
    ]
    assert {step["state"] for step in steps.values()} == {"to run"}
    assert not (tmp_path / "router").exists()


def test_fit_without_queries_makes_its_own(fit_without_queries, tmp_path):
    outcome = succeeds(*fit_without_queries, "--json")

    messages = " ".join(outcome.err.split())
    assert "passages of the skills' own texts: they favour BM25" in messages
    systems = json.loads(outcome.out)["Hit@1"].keys()
    assert systems == {"bm25", "base encoder", "trained encoder", "router"}
    assert (tmp_path / "router" / "report" / "report.html").is_file()


def test_dry_run_of_fit_needs_skills(tmp_path):
    outcome = skilltrain_command("fit", tmp_path / "none", "--out", tmp_path / "x", "--dry-run")

    assert "no such file or folder" in outcome.error_line
