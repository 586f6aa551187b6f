"""`skilltrain fit`: an untrained router first, then a trained one if it is better."""

import contextlib
import io
import json
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skilltrain
from faults import raises
from processes import start_apart
from skilltrain.cli import main
from skilltrain.records import Query
from skilltrain.serving import calibrate
from skilltrain.serving import fit as fit_module
from skilltrain.serving.fit import IN_USE, FitConfig, RouterComparison, compare_routers
from skilltrain.serving.index import Index
from skilltrain.serving.router import Router
from skilltrain.tables import write_queries
from small_library import contents, forget_ranks, succeeds
from small_library import skilltrain as skilltrain_command

# The router without training, a fixture of the module, is calibrated with all general requests.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_general_requests")]
TASK = "merge these pdf files"


@pytest.fixture(scope="module")
def skills(library, tmp_path_factory):
    """Return a folder of 21 skills, which are enough to train an encoder."""
    folder = tmp_path_factory.mktemp("skills") / "skills"
    shutil.copytree(library / "skills", folder)
    (folder / "extra").mkdir()
    text = "---\nname: extra\ndescription: water the plants\n---\nFill the can with water.\n"
    (folder / "extra" / "SKILL.md").write_text(text)
    return folder


@pytest.fixture(scope="module")
def queries(library, tmp_path_factory):
    """Return the queries of the library, six of them of split dev, and none of split test."""
    text = (library / "queries" / "all.jsonl").read_text()
    text = text.replace('"split": "train"', '"split": "dev"', 2)
    file = tmp_path_factory.mktemp("queries") / "queries.jsonl"
    file.write_text(text.replace('"split": "test"', '"split": "dev"'))
    return file


@dataclass(frozen=True)
class Fitted:
    """A finished `fit`. A first process was killed after the stage `mined`.

    `mined_first` and `mined_last` are the files of that stage before and after the second process.
    """

    out: Path
    summary: dict[str, Any]
    mined_first: dict[Path, tuple[int, int]]
    mined_last: dict[Path, tuple[int, int]]


def run_command(general_requests: Path, *arguments: object) -> None:
    """Run a command in a process of its own, which calibrates with these general requests."""
    calibrate.GENERAL_REQUESTS = general_requests
    main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def fitted(queries, skills, general_requests, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "router"
    command = ["fit", skills, "max_tokens=32", "--out", out, "--queries", queries]
    call = partial(run_command, general_requests, *command)
    process = start_apart(call, tmp_path_factory.mktemp("output"), {})
    while not (out / "mined").is_dir() and process.is_alive():
        time.sleep(0.05)
    process.kill()
    process.join()
    mined = contents(out / "mined")

    summary = skilltrain.fit(skills, out, queries=[queries], max_tokens=32)
    forget_ranks()
    return Fitted(out, summary, mined, contents(out / "mined"))


@pytest.fixture(scope="module")
def untrained(skills, tmp_path_factory):
    """Return the folder of a router without training, the summary and the messages."""
    out = tmp_path_factory.mktemp("untrained") / "router"
    with contextlib.redirect_stderr(io.StringIO()) as messages:
        summary = skilltrain.fit(skills, out, train=False)
    return out, summary, messages.getvalue()


def test_router_without_training_answers(untrained):
    out, *_ = untrained

    answer = Router.load(out).route(TASK, k=1)

    assert answer.skills[0].skill_id == "documents/pdf-merge"


def test_fit_without_training_trains_nothing(untrained):
    out, summary, _ = untrained

    assert summary == {"out": str(out), "num_skills": 21, "trained": False}
    assert not (out / "encoder").exists()


def test_router_without_training_is_calibrated(untrained):
    out, *_ = untrained
    router = Router.load(out)

    assert router.route(TASK).fits
    for request in ("thanks, continue", "not json", "hello", "谢谢"):
        assert not router.route(request).fits


def test_report_of_fit_prints_no_groups(skills, tmp_path):
    report = fit_module.recipes_of(FitConfig(skills=skills, out=tmp_path))["report"]

    assert not report["print_groups"]


def test_second_fit_keeps_the_calibration(untrained, skills):
    out, *_ = untrained
    calibration = Index.open(out).record.calibration

    skilltrain.fit(skills, out, train=False)

    assert calibration is not None
    assert Index.open(out).record.calibration == calibration


def test_interrupted_calibration_is_made_again(untrained, skills):
    """A calibration that the router has not taken in yet must not stop the next `fit`."""
    out, *_ = untrained
    (file,) = out.glob("index-*/index.json")
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"calibration": None}))

    skilltrain.fit(skills, out, train=False)

    assert Index.open(out).record.calibration is not None


def test_one_skill_gets_a_router_without_calibration(tmp_path, capsys):
    folder = tmp_path / "skills" / "extra"
    folder.mkdir(parents=True)
    text = "---\nname: extra\ndescription: water the plants on a balcony\n---\nPour.\n"
    (folder / "SKILL.md").write_text(text)

    skilltrain.fit(tmp_path / "skills", tmp_path / "router", train=False)

    assert "is not calibrated" in " ".join(capsys.readouterr().err.split())
    assert Router.load(tmp_path / "router").route("water the plants").fits


def test_steps_are_printed_by_name(untrained):
    *_, messages = untrained

    assert "step pool: pool" in messages
    assert "step untrained: index" in messages


def test_killed_fit_continues(fitted):
    assert fitted.summary["num_skills"] == 21
    assert fitted.summary["num_lists"] > 0
    assert fitted.mined_first
    assert fitted.mined_last == fitted.mined_first


def test_fit_compares_both_routers(fitted):
    assert {"untrained router", "router"} <= fitted.summary["Hit@1"].keys()
    assert fitted.summary["num_queries"] > 0


def test_fit_writes_recipes(fitted):
    names = {file.stem.partition("_")[2] for file in (fitted.out / "recipes").iterdir()}

    steps = {"pool", "untrained", "queries", "mined", "filtered", "encoder_lists", "encoder"}
    assert steps | {"report", "calibration"} <= names


def test_recipe_of_fit_runs_again(fitted):
    (recipe,) = (fitted.out / "recipes").glob("*_encoder.yaml")
    files = contents(fitted.out)

    outcome = succeeds("train", recipe)

    assert "already holds this run" in outcome.err
    assert contents(fitted.out) == files


def test_index_of_fit_has_relative_paths(fitted):
    (folder,) = fitted.out.glob("index-*")
    record = json.loads((folder / "index.json").read_text())

    assert record["pool"] == "./pool"


def test_command_routes_with_the_router(fitted):
    outcome = succeeds("route", TASK, "--router", fitted.out, "--top", 2)

    assert outcome.out.count("\n") == 6


def test_second_fit_keeps_the_router_while_it_works(fitted, skills, queries, monkeypatch):
    """A router in use must not lose its trained encoder while `fit` runs again."""
    steps = []
    run_stage = fit_module.run_stage

    def spy(stage, resume):
        steps.append(stage.stage)
        return run_stage(stage, resume)

    monkeypatch.setattr(fit_module, "run_stage", spy)

    skilltrain.fit(skills, fitted.out, queries=[queries], max_tokens=32)

    first_index = steps.index("index")
    assert first_index > steps.index("evaluate")


@pytest.mark.parametrize(
    ("num_queries", "difference", "p", "is_better"),
    [
        (199, 0.1, 0.04, True),
        (199, 0.1, 0.06, False),
        (199, -0.1, 0.01, False),
        (200, 0.0, 1.0, True),
        (200, -0.01, 0.9, False),
    ],
)
def test_trained_router_must_be_better(num_queries, difference, p, is_better):
    comparison = RouterComparison({}, num_queries, difference, p)

    assert comparison.is_better == is_better


def test_router_in_use_stays_without_a_significant_difference():
    for p, is_better in [(0.04, True), (0.06, False)]:
        comparison = RouterComparison({}, 300, 0.1, p, baseline=IN_USE)

        assert comparison.is_better == is_better


def test_router_in_use_comes_first(fitted, skills, tmp_path):
    out = tmp_path / "next"

    skilltrain.fit(skills, out, in_use=fitted.out, train=False)

    assert Router.load(out).identity == Router.load(fitted.out).identity


def test_report_compares_with_the_router_in_use(fitted, skills, tmp_path):
    config = FitConfig(skills=skills, out=tmp_path, in_use=fitted.out)

    systems = fit_module.recipes_of(config)["report"]["systems"]

    # A report compares a system with the system before it.
    names = [system["name"] for system in systems]
    assert names[-3:] == ["untrained router", "router in use", "router"]
    assert len(systems[-2]["rankers"]) == len(Index.open(fitted.out).system.rankers)


def test_comparison_with_the_router_in_use_is_read(tmp_path):
    hits = {"untrained router": 0.2, "router in use": 0.5, "router": 0.6}
    metrics = {
        "systems": [
            {"name": name, "metrics": {"Hit@1": {"mean": hit}}} for name, hit in hits.items()
        ],
        "differences": [
            {
                "system": "router",
                "baseline": baseline,
                "measure": "Hit@1",
                "difference": {"n": 300, "mean": mean},
                "p": 0.2,
            }
            for baseline, mean in [("untrained router", 0.4), ("router in use", 0.1)]
        ],
    }
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))

    comparison = compare_routers(tmp_path)

    assert (comparison.difference, comparison.is_better) == (0.1, False)
    assert "router in use 0.500, trained router 0.600" in str(comparison)


def test_report_without_both_routers_is_refused(tmp_path):
    (tmp_path / "metrics.json").write_text('{"systems": [], "differences": []}')

    with raises("not-comparable"):
        compare_routers(tmp_path)


@pytest.mark.parametrize("is_better", [True, False])
def test_better_router_is_published(fitted, skills, queries, monkeypatch, is_better):
    difference = 0.1 if is_better else -0.1
    hits = {"untrained router": 0.5, "router": 0.5 + difference}
    comparison = RouterComparison(hits, 300, difference, 0.01)
    monkeypatch.setattr(fit_module, "compare_routers", lambda report: comparison)

    summary = skilltrain.fit(skills, fitted.out, queries=[queries], max_tokens=32)

    rankers = Index.open(fitted.out).system.rankers
    assert summary["trained"] == is_better
    assert (len(rankers) == 2) == is_better  # only the trained router has late interaction


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    leftover = tmp_path / "router" / "recipes" / ".4_filtered.yaml.x.partial"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("half a recipe")

    with raises("not-found"):
        skilltrain.fit(tmp_path / "no_skills", tmp_path / "router")

    assert not leftover.exists()


@pytest.fixture
def command(skills, tmp_path):
    return ("fit", skills, "--out", tmp_path / "router", "max_tokens=32")


def test_dry_run_writes_nothing(command, tmp_path):
    steps = json.loads(succeeds(*command, "--dry-run").out)["steps"]

    assert [*steps][:3] == ["pool", "untrained", "queries"]
    assert {step["state"] for step in steps.values()} == {"to run"}
    assert not (tmp_path / "router").exists()


@pytest.mark.parametrize(("num_dev", "is_enough"), [(5, False), (6, True)])
def test_comparison_needs_six_held_out_queries(tmp_path, capsys, num_dev, is_enough):
    splits = ["train", *["dev"] * num_dev]
    queries = [Query(str(i), "text", "single", "", split) for i, split in enumerate(splits)]
    write_queries(queries, [], [], tmp_path / "queries")
    runner = fit_module._StepRunner(FitConfig(skills=tmp_path, out=tmp_path))

    assert fit_module._has_enough_queries(runner) == is_enough
    assert ("5 queries are of split dev" in capsys.readouterr().err) != is_enough


@pytest.fixture
def one_query_is_enough(monkeypatch):
    """Train with one held-out query, because the sample skills give few."""
    monkeypatch.setattr(fit_module, "_MIN_QUERIES", {"train": 1, "dev": 1})


@pytest.mark.usefixtures("one_query_is_enough")
def test_fit_without_queries_makes_its_own(skills, tmp_path):
    folder = tmp_path / "skills"
    shutil.copytree(skills, folder)
    for number, file in enumerate(sorted(folder.rglob("SKILL.md"))):
        usage = f'## When to use\n- "Can you do job {number} of my office list?"\n'
        file.write_text(f"{file.read_text()}\n{usage}")

    outcome = succeeds("fit", folder, "--out", tmp_path / "router", "max_tokens=32", "--json")

    messages = " ".join(outcome.err.split())
    assert "passages of the skills' own texts: they favour BM25" in messages
    systems = json.loads(outcome.out)["Hit@1"].keys()
    expected = {"bm25", "base encoder", "trained encoder", "untrained router", "router"}
    assert systems == expected
    assert (tmp_path / "router" / "report" / "report.html").is_file()


def test_skills_without_requests_get_an_untrained_router(tmp_path, capsys):
    for number in range(21):
        folder = tmp_path / "skills" / f"habilidad-{number}"
        folder.mkdir(parents=True)
        text = f"---\ndescription: Investigar dominios {number} con mapeo\n---\nLeer {number}.\n"
        (folder / "SKILL.md").write_text(text)

    summary = skilltrain.fit(tmp_path / "skills", tmp_path / "router")

    assert not summary["trained"]
    assert "no encoder is trained" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("split", "missing"), [("dev", "train"), ("train", "dev")])
def test_few_queries_get_an_untrained_router(
    skills, model_folders, tmp_path, capsys, split, missing
):
    base = str(model_folders["bert"])
    file = tmp_path / "mine.jsonl"
    rows = [
        {"query": "water the plants", "skill_ids": ["extra"], "split": split},
        {"query": "merge pdf files", "skill_ids": ["documents/pdf-merge"], "split": split},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    summary = skilltrain.fit(skills, tmp_path / "router", queries=[file], base=base)

    assert not summary["trained"]
    message = f"0 queries are of split {missing}, and "
    assert message in " ".join(capsys.readouterr().err.split())
    calibration = Index.open(tmp_path / "router").record.calibration
    assert calibration is not None
    assert calibration.num_queries == 2


@pytest.mark.parametrize("train", [True, False])
def test_other_queries_are_refused_first(untrained, queries, skills, capsys, train):
    out, *_ = untrained

    with raises("other-run") as caught:
        skilltrain.fit(skills, out, queries=[queries], train=train)

    assert str(caught.value) == (
        f"{out}: step queries: the output folder holds another run: stage differs "
        "(choose another --out)"
    )
    assert "step" not in capsys.readouterr().err


def test_dry_run_names_the_changed_setting(untrained, skills):
    out, *_ = untrained

    outcome = skilltrain_command("fit", skills, "seed=5", "--no-train", "--out", out, "--dry-run")

    assert "step queries: the output folder holds another run: seed diff" in outcome.only_line


def test_dry_run_needs_the_base_encoder(command):
    outcome = skilltrain_command(*command, "base=nowhere", "--dry-run")

    assert "nowhere: no such model" in outcome.only_line


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize("name", [".", "sub"])
def test_output_inside_the_skills_is_refused_first(skills, name, options):
    before = contents(skills)

    outcome = skilltrain_command("fit", skills, "--out", skills / name, *options)

    assert f"is inside {skills}, from which the command reads" in outcome.only_line
    assert contents(skills) == before


def test_dry_run_needs_skills(tmp_path):
    outcome = skilltrain_command("fit", tmp_path / "none", "--out", tmp_path / "x", "--dry-run")

    assert "no such file or folder" in outcome.error_line


def test_queries_without_split_are_partly_held_out(skills, tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"query": f"water plants {i}", "skill_ids": ["extra"]} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    recipes = fit_module.recipes_of(FitConfig(skills=skills, out=tmp_path, queries=(file,)))

    assert recipes["queries"]["dev_share"] == 0.2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"query": ["no", "text"], "skill_ids": ["extra"]}\n', "invalid-setting"),
        ('{"query": "water plants", "skill_id": "extra"}\n', "invalid-row"),
        ('{"query": null, "skill_ids": ["extra"]}\n', "nothing-left"),
        ('{"query": "water plants", "skill_ids": []}\n', "nothing-left"),
        ("", "nothing-left"),
    ],
)
def test_query_files_are_checked_first(skills, tmp_path, text, code):
    file = tmp_path / "mine.jsonl"
    file.write_text(text)

    with raises(code):
        skilltrain.fit(skills, tmp_path / "router", queries=[file])

    assert not (tmp_path / "router").exists()


def test_empty_list_of_queries_is_refused(skills, tmp_path):
    with raises("invalid-setting"):
        skilltrain.fit(skills, tmp_path / "router", queries=[])

    assert not (tmp_path / "router").exists()


def test_missing_query_file_is_refused_first(skills, tmp_path):
    with raises("not-found"):
        skilltrain.fit(skills, tmp_path / "router", queries=[tmp_path / "none.jsonl"])

    assert not (tmp_path / "router").exists()


@pytest.mark.usefixtures("one_query_is_enough")
def test_fit_without_lists_keeps_untrained_router(skills, model_folders, tmp_path, capsys):
    """The requests from the few texts are so alike that the filter leaves no negatives."""
    out = tmp_path / "router"

    summary = skilltrain.fit(skills, out, base=str(model_folders["bert"]))
    forget_ranks()

    assert not summary["trained"]
    assert "the router works without one" in capsys.readouterr().err
    assert Router.load(out).route(TASK).skills
