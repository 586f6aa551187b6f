"""Every stage by its command, from SKILL.md files to a routed answer: twice the same, and never done twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from skilltrain.tables import DROPPED, JUDGEMENTS, LISTS, QUERIES, RANKINGS, SKILLS, read_table
from small_library import (
    contents,
    encoder_recipe,
    list_stages,
    reranker_recipe,
    skilltrain,
    succeeds,
    trained,
    training_stages,
    write_recipe,
)

SYSTEMS = ["bm25", "base encoder", "trained encoder", "trained encoder + reranker"]


def evaluation(
    runs: Path, model: Path, encoder: str = "encoder", reranker: str = "reranker"
) -> tuple[str, ...]:
    """The command that compares four systems on the held-out queries."""
    trained = f"{{kind: dense, source: {runs}/{encoder}}}"
    recipe = f"""
stage: evaluate
pool: {runs}/pool
benchmark: {runs}/queries
split: test
systems:
- {{name: bm25, rankers: [{{kind: lexical}}]}}
- {{name: base encoder, rankers: [{{kind: dense, source: {model}}}]}}
- {{name: trained encoder, rankers: [{trained}]}}
- {{name: trained encoder + reranker, rankers: [{trained}, {{kind: rerank, source: {runs}/{reranker}, keep: 8}}]}}
out: {runs}/report_{encoder}
"""
    return "evaluate", str(write_recipe(runs / "recipes" / f"evaluate_{encoder}.yaml", recipe))


@pytest.fixture(scope="module")
def done(runs, model_folders):
    """(the folder of all runs, the commands that made it, what they said)."""
    model = model_folders["bert"]
    _, stages, outcomes = trained(runs.parent, model)
    last = evaluation(runs, model)
    return runs, [*stages, last], [*outcomes, succeeds(*last)]


def metrics_of(folder: Path) -> dict[str, dict[str, Any]]:
    systems = json.loads((folder / "metrics.json").read_text())["systems"]
    return {system["name"]: system["metrics"] for system in systems}


def test_every_stage_leaves_its_tables_and_says_where_and_what_is_next(done, model_folders):
    runs, stages, outcomes = done
    tables = {
        "pool": [SKILLS, DROPPED],
        "queries": [QUERIES, JUDGEMENTS, DROPPED],
        "mined": [RANKINGS, DROPPED],
        "filtered": [RANKINGS, DROPPED],
        "encoder_lists": [LISTS, QUERIES, JUDGEMENTS, DROPPED],
        "candidates": [RANKINGS],
        "candidates_filtered": [RANKINGS, DROPPED],
        "reranker_lists": [LISTS, QUERIES, JUDGEMENTS, DROPPED],
        "report_encoder": [RANKINGS],
    }

    rows = {
        (name, spec.name): read_table(runs / name, spec).num_rows
        for name in tables
        for spec in tables[name]
    }

    assert rows["pool", "skills"] == 20
    assert rows["queries", "queries"] == 16
    assert rows["queries", "judgements"] == 18
    assert (
        rows["encoder_lists", "lists"] == rows["reranker_lists", "lists"] == 12
    )  # the train split
    assert rows["candidates", "rankings"] == 12 * 12
    assert (
        rows["candidates_filtered", "rankings"] + rows["candidates_filtered", "dropped"] == 12 * 12
    )
    assert (
        rows["report_encoder", "rankings"] == 5 * 4 * 20
    )  # four systems, and what stands before the reranker

    for (command, *_), outcome in zip(stages, outcomes, strict=True):
        found, *then = outcome.out.splitlines()
        folder = Path(found.partition(": ")[0])

        assert folder.is_dir() and folder.parent == runs and "?" not in outcome.out, command
        assert [line.split()[:2] for line in then] == (
            [] if command == "evaluate" else [["next:", "skilltrain"]]
        )
    pool, queries, mined = (outcome.out.splitlines() for outcome in outcomes[:3])

    assert pool[0] == f"{runs}/pool: 20 skills in 4 categories; left out: none; flagged: 0"
    assert queries[0] == f"{runs}/queries: 16 queries (test 4, train 12); left out: none"
    assert mined[1] == (
        f"next: skilltrain filter pool={runs}/pool queries={runs}/queries rankings={runs}/mined "
        f"encoder.source={model_folders['bert']} out={runs}/filtered"
    )
    assert not [path for path in runs.rglob("*") if "partial" in path.name]


def test_both_trainings_changed_every_matrix_and_logged_every_step(done, model_folders):
    runs, _, _ = done
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (model_folders["bert"], runs / "encoder")
    )

    assert after.keys() == {name for name in before if not name.startswith("pooler.")}
    # The gradient never reaches the rows of unused positions and tokens, but it reaches every matrix.
    assert [
        name for name, value in after.items() if value.ndim > 1 and value.equal(before[name])
    ] == []
    assert len((runs / "encoder" / "train_log.jsonl").read_text().splitlines()) == 6
    assert len((runs / "reranker" / "train_log.jsonl").read_text().splitlines()) == 3

    lists = read_table(runs / "reranker_lists", LISTS).to_pylist()

    assert {source for row in lists for source in row["sources"]} <= {"trained", "gold"}
    assert all(len(row["skill_ids"]) == 8 and "required" in row["verdicts"] for row in lists)


def test_metrics_are_those_of_all_systems(done):
    runs, _, _ = done
    metrics = metrics_of(runs / "report_encoder")

    assert list(metrics) == SYSTEMS
    for of_system in metrics.values():
        assert set(of_system) == {
            "Hit@1",
            "MRR@10",
            "nDCG@10",
            "Recall@10",
            "Recall@20",
            "Recall@50",
            "FC@10",
        }
        assert {value["n"] for value in of_system.values()} == {4}
        assert of_system["Recall@20"]["mean"] == 1  # the pool has 20 skills
    assert (
        metrics["bm25"]["Hit@1"]["mean"] >= 0.75
    )  # the queries share rare words with their skills


def test_route_answers_in_json(done):
    runs, _, _ = done
    task, models = (
        "cut the laughter out of the audio",
        ("--encoder", runs / "encoder", "--reranker", runs / "reranker"),
    )

    found = json.loads(
        succeeds("route", task, "--pool", runs / "pool", *models, "--top", 3, "--json").out
    )

    assert found["task"] == task
    assert [skill["rank"] for skill in found["skills"]] == [1, 2, 3]

    scores = [skill["score"] for skill in found["skills"]]

    assert scores == sorted(scores, reverse=True)

    pool = {skill["skill_id"]: skill for skill in read_table(runs / "pool", SKILLS).to_pylist()}
    for skill in found["skills"]:
        shown = pool[skill["skill_id"]]
        assert (skill["name"], skill["description"]) == (shown["name"], shown["description"])


def test_a_dry_run_touches_nothing_and_a_second_call_does_nothing_and_says_so(done):
    runs, stages, outcomes = done
    before = contents(runs)
    one_of_each = {stage[0]: (stage, first) for stage, first in zip(stages, outcomes, strict=True)}
    for stage, first in one_of_each.values():
        assert f"out: {runs}/" in succeeds(*stage, "--dry-run").err

        again = succeeds(*stage)

        assert "already holds this run; nothing to do" in again.err, stage
        assert again.out == first.out

    plan = json.loads(succeeds("train", runs / "recipes" / "encoder.yaml", "--dry-run").out)[
        "dry_run"
    ]

    assert plan["num_steps"] == 6
    assert plan["num_lists"] == 12

    missing = skilltrain(
        "train", runs / "recipes" / "encoder.yaml", "--dry-run", "data.lists=nowhere"
    )

    assert missing.error_line.startswith("error: nowhere: no such file or folder")
    assert contents(runs) == before


def test_another_folder_gets_the_same_bytes(done, model_folders, tmp_path):
    runs, _, _ = done
    model, library = model_folders["bert"], runs.parent / "library"
    for stage in (
        *list_stages(tmp_path, library, model),
        *training_stages(tmp_path, model),
        evaluation(tmp_path, model),
    ):
        succeeds(*stage)
    texts = ("metrics.json", "per_query.jsonl", "report.html", "report.md", "skilltrain.json")
    paths = [
        path
        for path in tmp_path.rglob("*")
        if path.suffix in (".parquet", ".safetensors") or path.name in texts
    ]

    names = [
        path.relative_to(tmp_path) for path in paths if "vectors" not in path.parts
    ]  # a cache's have any name

    assert len(names) > 20
    assert [
        str(name) for name in names if (runs / name).read_bytes() != (tmp_path / name).read_bytes()
    ] == []


def test_qwen3_by_last_token_and_by_yes_or_no(done, model_folders):
    runs, _, _ = done
    encoder = encoder_recipe(runs, model_folders["qwen3"])
    reranker = reranker_recipe(runs, model_folders["qwen3_reranker"], max_tokens=320)
    for name, recipe in (("qwen3_encoder", encoder), ("qwen3_reranker", reranker)):
        file = write_recipe(runs / "recipes" / f"{name}.yaml", recipe)
        succeeds("train", file, f"out={runs}/{name}")
        settings = json.loads((runs / name / "skilltrain.json").read_text())["settings"]

        assert settings.get("pooling") == ("last_token" if name == "qwen3_encoder" else None)
        assert settings["template"].get("form") == ("yes_no" if name == "qwen3_reranker" else None)
    succeeds(*evaluation(runs, model_folders["qwen3"], "qwen3_encoder", "qwen3_reranker"))

    metrics = metrics_of(runs / "report_qwen3_encoder")

    assert list(metrics) == SYSTEMS
    assert metrics["bm25"] == metrics_of(runs / "report_encoder")["bm25"]


OWN_LOSS = """
from skilltrain.losses import Loss


class Hinge(Loss):
    name: str
    margin: float = 1.0

    def __call__(self, batch):
        wanted = batch.gains * 2 - 1
        return (self.margin - wanted * batch.filled(0.0)).clamp(min=0).masked_fill(~batch.valid, 0).sum()
"""


def test_a_loss_of_another_package_trains_and_is_exported(done, tmp_path, monkeypatch):
    runs, _, _ = done
    (tmp_path / "our_losses.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    loss = "loss={name: our_losses:Hinge, margin: 0.5}"
    succeeds("train", runs / "recipes" / "encoder.yaml", loss, f"out={tmp_path}/encoder")

    succeeds("export", tmp_path / "encoder", "--out", tmp_path / "model")

    assert (
        "  name: our_losses:Hinge\n  margin: 0.5\n"
        in (tmp_path / "model" / "README.md").read_text()
    )
