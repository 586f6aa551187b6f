"""The Python API and `skilltrain fit`, on a small library and a tiny model: each name of `skilltrain` at work."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import skilltrain
from faults import raises
from small_library import QUERIES, contents, forget_ranks, succeeds
from small_library import skilltrain as skilltrain_command

SKILL = {"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}


@pytest.fixture(scope="module")
def router(library, tmp_path_factory):
    """Of a router that `fit` made with the library's own queries: its folder, and what it answered.

    A first process was killed on the way; what it had finished comes last, before and after the second one.
    """
    out, queries = tmp_path_factory.mktemp("fit") / "router", library / "queries" / "all.jsonl"
    line = [
        sys.executable,
        "-m",
        "skilltrain",
        "fit",
        library / "skills",
        "--out",
        out,
        "--queries",
        queries,
        "max_tokens=32",
    ]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (out / "mined").is_dir() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    kept = contents(out / "mined")
    found = skilltrain.fit(library / "skills", out, queries=[queries], max_tokens=32)
    forget_ranks()
    return out, found, (kept, contents(out / "mined"))


def test_every_name_is_there_and_importing_it_does_not_import_torch():
    assert [name for name in skilltrain.__all__ if getattr(skilltrain, name) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        skilltrain.nothing  # noqa: B018

    code = "import skilltrain, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pool_is_read_from_whatever_holds_skills(library, tmp_path):
    pandas = pytest.importorskip("pandas")
    from_rows = skilltrain.read_pool([SKILL])

    assert (from_rows[0].skill_id, from_rows[0].lang) == ("pdf-merge", "en")
    assert skilltrain.read_pool(pandas.DataFrame([SKILL | {"category": float("nan")}])) == from_rows

    (tmp_path / "skills.jsonl").write_text(json.dumps(SKILL))

    assert skilltrain.read_pool(tmp_path / "skills.jsonl")[0].body == SKILL["body"]
    assert len(skilltrain.read_pool(library / "skills")) == 20
    with raises("invalid-row"):
        skilltrain.read_pool([{"name": "x"}])


def test_the_stages_as_functions(library, tmp_path, model_folders):
    pool, model = tmp_path / "pool", str(model_folders["bert"])

    assert (
        skilltrain.run({"stage": "pool", "sources": library / "skills", "out": pool})["num_skills"]
        == 20
    )

    rows = [{"query": text, "skill_ids": list(skill_ids)} for _, text, skill_ids in QUERIES]
    lists = skilltrain.build_lists(
        pool, rows, tmp_path / "data", quotas={"semantic": 2, "random": 1}
    )

    assert lists == tmp_path / "data" / "encoder_lists"
    assert (lists / "lists.parquet").is_file()

    recipe = {
        "stage": "train_encoder",
        "model": {"source": model, "max_tokens": 32},
        "data": {"pool": pool, "lists": lists},
        "training": {"batch_size": 8},
    }
    trained = skilltrain.train(recipe, f"out={tmp_path}/encoder")
    forget_ranks()
    systems = [{"name": "trained", "rankers": [{"kind": "dense", "source": trained}]}]
    found = skilltrain.evaluate(
        {
            "stage": "evaluate",
            "benchmark": tmp_path / "data" / "queries",
            "pool": pool,
            "systems": systems,
        },
        f"out={tmp_path}/report",
    )

    assert found["systems"][0]["metrics"]["Hit@1"]["n"] == len(rows)

    skilltrain.export_model(trained, tmp_path / "model")

    assert (tmp_path / "model" / "model.safetensors").is_file()
    with raises("wrong-stage"):
        skilltrain.train({"stage": "pool", "sources": "x"}, "out=y")


def test_one_request_and_many(library, router):
    skills = skilltrain.read_pool(library / "skills")
    best = skilltrain.route("merge these pdf files", skills, "[{kind: lexical}]", k=1).skills[0]

    assert best.skill_id == "documents/pdf-merge"
    assert best.path is None

    found = skilltrain.route(
        "merge these pdf files", library / "skills", [{"kind": "lexical"}], k=1
    ).skills[0]

    assert found == replace(best, path=library / "skills" / "documents" / "pdf-merge" / "SKILL.md")

    opened = skilltrain.Router.load(router[0])

    assert len(opened.route("merge these pdf files", k=3).skills) == 3


# fit ----------------------------------------------------------------------------------------------


def test_a_killed_fit_goes_on_to_a_router_and_the_recipes_of_it(router):
    out, found, (kept, still_there) = router

    assert found["num_skills"] == 20
    assert found["num_lists"] > 0
    assert still_there == kept != {}

    recipes = sorted((out / "recipes").iterdir())

    assert [file.stem for file in recipes] == [
        "1_pool",
        "2_queries",
        "3_mined",
        "4_filtered",
        "5_encoder_lists",
        "6_encoder",
        "8_index",
    ]

    before = contents(out)
    answered = succeeds("train", out / "recipes" / "6_encoder.yaml").err

    assert "already holds this run" in answered
    assert contents(out) == before

    record = json.loads((out / "index-1" / "index.json").read_text())

    assert record["pool"] == "./pool"
    assert record["rankers"][0]["of"][1]["source"] == "./encoder"
    assert (
        succeeds("route", "merge these pdf files", "--router", out, "--top", 2).out.count("\n") == 6
    )


def test_fit_removes_leftovers_of_a_killed_run(tmp_path):
    leftover = tmp_path / "router" / "recipes" / ".4_filtered.yaml.x.partial"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("half a recipe")

    with raises("not-found"):
        skilltrain.fit(tmp_path / "no_skills", tmp_path / "router")

    assert not leftover.exists()


def test_fit_without_queries_makes_its_own_and_its_dry_run_writes_nothing(library, tmp_path):
    command = ("fit", library / "skills", "--out", tmp_path / "router", "max_tokens=32")
    plan = json.loads(succeeds(*command, "--dry-run").out)["steps"]

    assert [*plan] == [
        "pool",
        "queries",
        "mined",
        "filtered",
        "encoder_lists",
        "encoder",
        "report",
        "index",
    ]
    assert {step["state"] for step in plan.values()} == {"to run"}
    assert not (tmp_path / "router").exists()

    made = succeeds(*command, "--json")

    assert "passages of the skills' own texts: they favour BM25" in " ".join(made.err.split())

    found = json.loads(made.out)

    assert {"bm25", "base encoder", "trained encoder", "router"} == found["Hit@1"].keys()
    assert (tmp_path / "router" / "report" / "report.html").is_file()

    missing = skilltrain_command("fit", tmp_path / "none", "--out", tmp_path / "x", "--dry-run")

    assert "no such file or folder" in missing.error_line
