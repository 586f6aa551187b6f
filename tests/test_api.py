"""The Python API and `skilltrain fit`, on a small library and a tiny model."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import skilltrain
from faults import raises
from skilltrain.serving import calibrate
from small_library import QUERIES, forget_ranks

SKILL = {"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}


@pytest.fixture(scope="module")
def fitted(library, model_folders, general_requests, tmp_path_factory):
    """Return the summary of `fit` with too few skills for training, and its messages."""
    out = tmp_path_factory.mktemp("fit") / "router"
    with (
        contextlib.redirect_stderr(io.StringIO()) as messages,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(calibrate, "GENERAL_REQUESTS", general_requests)
        summary = skilltrain.fit(library / "skills", out, base=str(model_folders["bert"]))
    return summary, messages.getvalue()


def test_api_has_every_name():
    assert [name for name in skilltrain.__all__ if getattr(skilltrain, name) is None] == []


def test_dir_lists_public_names():
    assert dir(skilltrain) == sorted(skilltrain.__all__)


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


def test_pool_is_read_from_dataset():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([SKILL])

    assert skilltrain.read_pool(dataset) == skilltrain.read_pool([SKILL])


def test_pool_keeps_given_skills():
    skills = skilltrain.read_pool([SKILL | {"name": "b"}, SKILL | {"name": "a"}])[::-1]

    assert skilltrain.read_pool(iter(skills)) == skills


def test_pool_refuses_repeated_id():
    skills = skilltrain.read_pool([SKILL])

    with raises("repeated-id"):
        skilltrain.read_pool(skills * 2)


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


@pytest.mark.parametrize(
    "rankers",
    ["lexical", ["lexical"], {"kind": "lexical"}, [{"kind": "lexical"}], "[{kind: lexical}]"],
)
def test_router_takes_plain_rankers(rankers):
    router = skilltrain.Router([SKILL], rankers)

    assert router.route("merge").skills[0].name == "pdf-merge"


def test_repr_says_what_router_holds():
    router = skilltrain.Router([SKILL], ["lexical"])

    assert repr(router) == "Router(1 skills; rankers: lexical; not calibrated)"


def test_fit_takes_tables_in_memory(model_folders, tmp_path):
    pandas = pytest.importorskip("pandas")
    queries = pandas.DataFrame({"query": ["Join PDFs"], "skill_ids": [["pdf-merge"]]})
    base = str(model_folders["bert"])

    summary = skilltrain.fit([SKILL], tmp_path, queries, train=False, base=base)

    assert summary["num_skills"] == 1
    (row,) = (tmp_path / "queries.jsonl").read_text().splitlines()
    assert json.loads(row) == {"query": "Join PDFs", "skill_ids": ["pdf-merge"]}


def test_refused_fit_writes_nothing(tmp_path):
    with raises("unknown-setting"):
        skilltrain.fit([SKILL], tmp_path / "router", epoch=2)

    assert not (tmp_path / "router").exists()


def test_fit_takes_one_query_file(model_folders, tmp_path):
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"query": "Join PDFs", "skill_ids": ["pdf-merge"]}')
    base = str(model_folders["bert"])

    summary = skilltrain.fit([SKILL], tmp_path / "router", queries, train=False, base=base)

    assert summary["num_skills"] == 1


@pytest.mark.parametrize(
    ("code", "name", "arguments"),
    [
        ("invalid-setting", "read_pool", [None]),
        ("invalid-setting", "read_pool", [5]),
        ("invalid-setting", "read_pool", [[SKILL, None]]),
        ("invalid-row", "read_pool", [{"title": ["pdf-merge"]}]),
        ("empty-pool", "Router", [[], "lexical"]),
        ("unknown-choice", "Router", [[SKILL], "nothing"]),
        ("invalid-setting", "Router", [[SKILL], None]),
        ("invalid-setting", "Router", [[SKILL], [5]]),
        ("invalid-setting", "route", [None, [SKILL], "lexical"]),
        ("invalid-setting", "route", ["merge", [SKILL], "lexical", 0]),
        ("invalid-setting", "route", ["merge", [SKILL], "lexical", "3"]),
        ("invalid-setting", "fit", [5, "out"]),
        ("invalid-setting", "fit", [[SKILL], None]),
        ("invalid-setting", "run", [None]),
        ("invalid-override", "run", [{"stage": "pool"}, 5]),
        ("invalid-setting", "build_lists", ["pool", None, "out"]),
        ("invalid-setting", "export_model", [None, "out"]),
    ],
)
def test_wrong_argument_has_code(code, name, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = getattr(skilltrain, name)

    with raises(code):
        function(*arguments)


def test_load_refuses_no_path():
    wrong_folder: Any = None

    with raises("invalid-setting"):
        skilltrain.Router.load(wrong_folder)


def test_few_skills_get_an_untrained_router(fitted):
    summary, messages = fitted

    assert summary["num_skills"] == 20
    assert not summary["trained"]
    assert "20 skills are too few" in messages


def test_loaded_router_routes(fitted):
    summary, _ = fitted

    loaded = skilltrain.Router.load(summary["out"])

    assert len(loaded.route("merge these pdf files", k=3).skills) == 3
