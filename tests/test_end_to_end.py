"""Every stage by its command, from SKILL.md files to a routed answer, and twice the same."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from skilltrain.metrics.measures import DEFAULT_MEASURES
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    TableSpec,
    read_table,
)
from small_library import (
    Outcome,
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
    """Return the command that compares four systems on the held-out queries."""
    dense = f"{{kind: dense, source: {runs}/{encoder}}}"
    rerank = f"{{kind: rerank, source: {runs}/{reranker}, keep: 8}}"
    recipe = f"""
stage: evaluate
pool: {runs}/pool
benchmark: {runs}/queries
split: test
systems:
- {{name: bm25, rankers: [{{kind: lexical}}]}}
- {{name: base encoder, rankers: [{{kind: dense, source: {model}}}]}}
- {{name: trained encoder, rankers: [{dense}]}}
- {{name: trained encoder + reranker, rankers: [{dense}, {rerank}]}}
out: {runs}/report_{encoder}
"""
    return "evaluate", str(write_recipe(runs / "recipes" / f"evaluate_{encoder}.yaml", recipe))


class Done(NamedTuple):
    """The folder of all runs, and each command with its outcome."""

    runs: Path
    stages: list[tuple[str, ...]]
    outcomes: list[Outcome]


@pytest.fixture(scope="module")
def done(runs, model_folders):
    model = model_folders["bert"]
    _, stages, outcomes = trained(runs.parent, model)
    command = evaluation(runs, model)
    return Done(runs, [*stages, command], [*outcomes, succeeds(*command)])


def metrics_of(folder: Path) -> dict[str, dict[str, Any]]:
    systems = json.loads((folder / "metrics.json").read_text())["systems"]
    return {system["name"]: system["metrics"] for system in systems}


def num_rows(folder: Path, *specs: TableSpec) -> list[int]:
    return [read_table(folder, spec).num_rows for spec in specs]


def test_every_stage_writes_its_tables(done):
    runs = done.runs
    lists = (LISTS, QUERIES, JUDGEMENTS, DROPPED)

    assert num_rows(runs / "pool", SKILLS, DROPPED) == [20, 0]
    assert num_rows(runs / "queries", QUERIES, JUDGEMENTS, DROPPED) == [16, 18, 0]
    assert num_rows(runs / "mined", RANKINGS, DROPPED)[0] > 0
    assert num_rows(runs / "filtered", RANKINGS, DROPPED)[0] > 0
    # The train split has 12 queries.
    assert num_rows(runs / "encoder_lists", *lists)[0] == 12
    assert num_rows(runs / "reranker_lists", *lists)[0] == 12
    assert num_rows(runs / "candidates", RANKINGS) == [12 * 12]
    assert sum(num_rows(runs / "candidates_filtered", RANKINGS, DROPPED)) == 12 * 12
    # Four systems, and the encoder before the reranker. BM25 ranks only skills that match a query.
    (num_ranked,) = num_rows(runs / "report_encoder", RANKINGS)
    assert 4 * 4 * 20 < num_ranked < 5 * 4 * 20
    assert not [path for path in runs.rglob("*") if "partial" in path.name]


def test_every_stage_says_where_it_wrote(done):
    for (command, *_), outcome in zip(done.stages, done.outcomes, strict=True):
        first_line, *lines = outcome.out.splitlines()
        folder = Path(first_line.partition(": ")[0])

        assert folder.is_dir(), command
        assert folder.parent == done.runs, command
        assert "?" not in outcome.out, command
        # The evaluation is the last stage.
        next_lines = [] if command == "evaluate" else [["next:", "skilltrain"]]
        assert [line.split()[:2] for line in lines] == next_lines


def test_stages_summarize_their_tables(done):
    pool, queries = (outcome.out.splitlines()[0] for outcome in done.outcomes[:2])

    folder = done.runs
    assert pool == f"{folder}/pool: 20 skills in 4 categories; left out: none; flagged: 0"
    assert queries == f"{folder}/queries: 16 queries (test 4, train 12); left out: none"


def test_mine_suggests_filter(done, model_folders):
    runs = done.runs
    line = done.outcomes[2].out.splitlines()[1]

    assert line == (
        f"next: skilltrain filter pool={runs}/pool queries={runs}/queries rankings={runs}/mined "
        f"encoder.source={model_folders['bert']} out={runs}/filtered"
    )


def test_training_changes_every_matrix(done, model_folders):
    base = load_file(model_folders["bert"] / "model.safetensors")

    weights = load_file(done.runs / "encoder" / "model.safetensors")

    assert weights.keys() == {name for name in base if not name.startswith("pooler.")}
    # The gradient misses rows of unused positions and tokens, but it reaches every matrix.
    matrices = [name for name, value in weights.items() if value.ndim > 1]
    assert [name for name in matrices if weights[name].equal(base[name])] == []


@pytest.mark.parametrize(("model", "num_steps"), [("encoder", 6), ("reranker", 3)])
def test_training_logs_every_step(done, model, num_steps):
    log = (done.runs / model / "train_log.jsonl").read_text()

    assert log.count("\n") == num_steps


def test_reranker_lists_hold_retrieved_candidates(done):
    lists = read_table(done.runs / "reranker_lists", LISTS).to_pylist()

    for row in lists:
        assert len(row["skill_ids"]) == 8
        assert set(row["sources"]) <= {"trained", "gold"}
        assert "required" in row["verdicts"]


def test_every_system_has_all_metrics(done):
    metrics = metrics_of(done.runs / "report_encoder")

    assert list(metrics) == SYSTEMS
    for metrics_of_system in metrics.values():
        assert set(metrics_of_system) == set(DEFAULT_MEASURES)
        assert {value["n"] for value in metrics_of_system.values()} == {4}
        assert metrics_of_system["Recall@20"]["mean"] == 1  # the pool has 20 skills
    # The queries share rare words with their skills.
    assert metrics["bm25"]["Hit@1"]["mean"] >= 0.75


def test_route_answers_in_json(done):
    runs = done.runs
    task = "cut the laughter out of the audio"
    models = ("--encoder", runs / "encoder", "--reranker", runs / "reranker")
    pool = {row["skill_id"]: row for row in read_table(runs / "pool", SKILLS).to_pylist()}

    outcome = succeeds("route", task, "--pool", runs / "pool", *models, "--top", 3, "--json")

    answer = json.loads(outcome.out)
    assert answer["task"] == task
    assert [skill["rank"] for skill in answer["skills"]] == [1, 2, 3]
    scores = [skill["score"] for skill in answer["skills"]]
    assert scores == sorted(scores, reverse=True)
    for skill in answer["skills"]:
        expected = pool[skill["skill_id"]]
        assert skill["name"] == expected["name"]
        assert skill["description"] == expected["description"]


@pytest.fixture
def unchanged_runs(done):
    """All runs, which the test must not change."""
    files = contents(done.runs)
    yield done
    assert contents(done.runs) == files


def test_second_run_does_nothing(unchanged_runs):
    runs, stages, outcomes = unchanged_runs
    position_by_command = {stage[0]: position for position, stage in enumerate(stages)}
    for position in position_by_command.values():
        stage = stages[position]
        assert f"out: {runs}/" in succeeds(*stage, "--dry-run").err

        second = succeeds(*stage)

        assert "already holds this run; nothing to do" in second.err, stage
        assert second.out == outcomes[position].out


def test_dry_run_of_training_counts_steps(unchanged_runs):
    recipe = unchanged_runs.runs / "recipes" / "encoder.yaml"

    plan = json.loads(succeeds("train", recipe, "--dry-run").out)["dry_run"]

    assert plan["num_steps"] == 6
    assert plan["num_lists"] == 12


def test_dry_run_of_training_needs_lists(unchanged_runs):
    recipe = unchanged_runs.runs / "recipes" / "encoder.yaml"

    outcome = skilltrain("train", recipe, "--dry-run", "data.lists=nowhere")

    assert outcome.error_line.startswith("error: nowhere: no such file or folder")


def test_other_folder_gets_same_bytes(done, model_folders, tmp_path):
    model = model_folders["bert"]
    for stage in (
        *list_stages(tmp_path, done.runs.parent / "library", model),
        *training_stages(tmp_path, model),
        evaluation(tmp_path, model),
    ):
        succeeds(*stage)

    texts = ("metrics.json", "per_query.jsonl", "report.html", "report.md", "skilltrain.json")
    names = [
        path.relative_to(tmp_path)
        for path in tmp_path.rglob("*")
        if path.suffix in (".parquet", ".safetensors") or path.name in texts
    ]
    # The files of a cache have any name.
    names = [name for name in names if "vectors" not in name.parts]
    assert len(names) > 20
    for name in names:
        assert (done.runs / name).read_bytes() == (tmp_path / name).read_bytes(), name


@pytest.fixture(scope="module")
def qwen3_settings(done, model_folders):
    """The settings of a trained Qwen3 encoder and of a trained Qwen3 reranker."""
    runs = done.runs
    recipes = {
        "qwen3_encoder": encoder_recipe(runs, model_folders["qwen3"]),
        "qwen3_reranker": reranker_recipe(runs, model_folders["qwen3_reranker"], max_tokens=320),
    }
    settings = []
    for name, recipe in recipes.items():
        file = write_recipe(runs / "recipes" / f"{name}.yaml", recipe)
        succeeds("train", file, f"out={runs}/{name}")
        settings.append(json.loads((runs / name / "skilltrain.json").read_text())["settings"])
    return settings


def test_qwen3_encoder_pools_last_token(qwen3_settings):
    encoder, _ = qwen3_settings

    assert encoder["pooling"] == "last_token"
    assert "form" not in encoder["template"]


def test_qwen3_reranker_answers_yes_or_no(qwen3_settings):
    _, reranker = qwen3_settings

    assert "pooling" not in reranker
    assert reranker["template"]["form"] == "yes_no"


def test_qwen3_models_are_evaluated(qwen3_settings, done, model_folders):
    succeeds(*evaluation(done.runs, model_folders["qwen3"], "qwen3_encoder", "qwen3_reranker"))

    metrics = metrics_of(done.runs / "report_qwen3_encoder")
    assert list(metrics) == SYSTEMS
    assert metrics["bm25"] == metrics_of(done.runs / "report_encoder")["bm25"]


OWN_LOSS = """
from skilltrain.losses import Loss


class Hinge(Loss):
    name: str
    margin: float = 1.0

    def __call__(self, batch):
        signs = batch.gains * 2 - 1
        losses = (self.margin - signs * batch.filled(0.0)).clamp(min=0)
        return losses.masked_fill(~batch.valid, 0).sum()
"""


def test_loss_of_other_package_is_exported(done, tmp_path, monkeypatch):
    (tmp_path / "our_losses.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = done.runs / "recipes" / "encoder.yaml"
    loss = "loss={name: our_losses:Hinge, margin: 0.5}"
    succeeds("train", recipe, loss, f"out={tmp_path}/encoder")

    succeeds("export", tmp_path / "encoder", "--out", tmp_path / "model")

    card = (tmp_path / "model" / "README.md").read_text()
    assert "  name: our_losses:Hinge\n  margin: 0.5\n" in card
