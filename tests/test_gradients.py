"""Gradients by kind of candidate: by hand, and as a command over real lists."""

import json
from pathlib import Path

import pytest
import torch

from skilltrain.papers.r3.loss_gradients import mean_of, score_statistics, vector_statistics
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, read_table, write_table
from small_library import skilltrain, succeeds, write_recipe


def rows_by_part(rows):
    """Return the numbers of each place and part that has any."""
    return {key: figures.tolist() for key, figures in rows if len(figures)}


def test_slopes_by_hand():
    # A softmax over three scores of 0 gives 1/3 to each: the positive has the slope -2/3.
    slopes = torch.tensor([[-2 / 3, 1 / 3, 1 / 3, 0.0]], dtype=torch.float64)

    rows = rows_by_part(score_statistics(slopes, [["required", "rejected", "in-batch", ""]]))

    assert rows["scores", "rejected"] == [pytest.approx((1 / 3, 1 / 4, 1, 1 / 9, 1 / 3))]
    assert rows["scores", "required"] == [pytest.approx((2 / 3, 1 / 2, 1, 4 / 9, -2 / 3))]
    assert len(rows) == 3


# A unit vector along x and its gradient: only the y direction turns the vector.
ALONG_X = torch.tensor([[1.0, 0.0]])
WHOLE = torch.tensor([[9.0, 1.0]])


def test_gradients_at_vectors_by_hand():
    # Rejections push by 3, and an in-batch negative takes 2 of that back.
    gradients = {"rejected": torch.tensor([[9.0, 3.0]]), "in-batch": torch.tensor([[0.0, -2.0]])}

    rows = rows_by_part(vector_statistics("queries", gradients, WHOLE, ALONG_X))

    assert rows == {
        ("queries", "rejected"): [pytest.approx((3, 3 / 5, 1, 3, 0))],
        ("queries", "in-batch"): [pytest.approx((2, 2 / 5, -1, -2, 0))],
    }


def test_rest_of_gradient_is_other_directions():
    rows = rows_by_part(vector_statistics("queries", {}, WHOLE, ALONG_X))

    assert [*rows] == [("queries", "other directions")]


def test_survival_is_of_all_rows_together():
    # 1/3 of a row of norm 3 survives, and a row of norm .1 is reversed: 3 - .1 of 9 + .01.
    rows = torch.tensor([[3.0, 0.6, 1.0, 3.0, 0.0], [0.1, 0.1, -1.0, -0.1, 0.0]])

    mean = mean_of("queries", "rejected", rows)

    assert mean.survival == pytest.approx(2.9 / 9.01)
    assert mean.norm == pytest.approx(1.55)
    assert mean.num == 2


@pytest.fixture
def with_rejections(runs: Path, tmp_path: Path):
    """A folder with the small library's lists, in which each last candidate is rejected."""
    for name, folder in (("encoder", "encoder_lists"), ("reranker", "reranker_lists")):
        rows = read_table(runs / folder, LISTS).to_pylist()
        for row in rows:
            verdicts = row["verdicts"]
            last = max(i for i, verdict in enumerate(verdicts) if verdict == "irrelevant")
            verdicts[last] = "rejected"
        write_table(rows, LISTS, tmp_path / name)
        for spec in (QUERIES, JUDGEMENTS):
            write_table(read_table(runs / folder, spec), spec, tmp_path / name)
    return tmp_path


def recipe(folder: Path, stage: str, runs: Path, model: Path, loss: str) -> Path:
    """Write the recipe that trains on these lists."""
    text = f"""
stage: {stage}
model: {{source: {model}, max_tokens: 48, query_max_tokens: 24}}
data:
  pool: {runs}/pool
  lists: {folder}/{stage.removeprefix("train_")}
  gains: {{required: 1, useful: 0.5, irrelevant: 0, rejected: -1}}
loss: {loss}
training: {{batch_size: 4, accumulation: 1, token_budget: 512}}
out: {folder}/out
"""
    return write_recipe(folder / f"{stage}.yaml", text)


SYMMETRIC = (
    "{name: infonce, directions: [query_to_skill, skill_to_query], partition: per_direction}"
)


def parts_of(folder: Path) -> dict[tuple[str, str], dict]:
    """Return the saved rows by place and part."""
    rows = json.loads((folder / "gradients.json").read_text())["parts"]
    return {(row["at"], row["part"]): row for row in rows}


@pytest.fixture
def encoder_recipe(with_rejections: Path, runs: Path, model_folders) -> Path:
    return recipe(with_rejections, "train_encoder", runs, model_folders["bert"], SYMMETRIC)


def test_command_measures_encoder(encoder_recipe: Path):
    out = encoder_recipe.parent / "out"

    outcome = succeeds("r3", "gradients", encoder_recipe, "--batches", "2")

    message = "of the rejections' gradient survive 1.00 at the scores"
    assert outcome.out.startswith(f"{out}/gradients.html: {message}")
    rows = parts_of(out)
    verdicts = {"required", "rejected", "irrelevant", "in-batch"}
    assert {part for at, part in rows if at == "scores"} >= verdicts
    assert {part for at, part in rows if at == "skills"} >= {*verdicts, "other directions"}
    assert rows["scores", "rejected"]["slope"] > 0 > rows["scores", "required"]["slope"]
    for at in ("scores", "queries"):
        rows_at = [row for row in rows.values() if row["at"] == at]
        total_share = sum(row["share"] * row["num"] for row in rows_at)
        assert total_share == pytest.approx(max(row["num"] for row in rows_at), rel=1e-6)


def test_command_writes_report(encoder_recipe: Path):
    out = encoder_recipe.parent / "out"

    succeeds("r3", "gradients", encoder_recipe, "--batches", "2")

    markdown = (out / "gradients.md").read_text()
    assert "## Gradient at the query vectors" in markdown
    assert "| rejected |" in markdown
    page = (out / "gradients.html").read_text()
    assert "Gradient at the skill vectors" in page
    assert page.count("<rect") >= 10
    assert "exists already" in skilltrain("r3", "gradients", encoder_recipe).error_line


def test_command_measures_reranker(with_rejections: Path, runs: Path, model_folders):
    model = model_folders["bert_reranker"]
    file = recipe(with_rejections, "train_reranker", runs, model, "{name: ranknet}")

    succeeds("r3", "gradients", file, "--batches", "1")

    rows = parts_of(with_rejections / "out")
    assert {at for at, _ in rows} == {"scores"}
    required, irrelevant, rejected = (
        rows["scores", part]["slope"] for part in ("required", "irrelevant", "rejected")
    )
    assert required < irrelevant < rejected
    assert rejected > 0


def test_lists_without_rejections_are_refused(encoder_recipe: Path, runs: Path):
    outcome = skilltrain("r3", "gradients", encoder_recipe, f"data.lists={runs}/encoder_lists")

    message = "data.lists: no list holds a rejected skill (make lists with quotas={judged: 4}"
    assert message in outcome.error_line


def test_nested_loss_is_refused(encoder_recipe: Path):
    loss = "loss={name: matryoshka, dims: [16]}"

    outcome = skilltrain("r3", "gradients", encoder_recipe, loss)

    assert "loss: gradients are taken apart for a plain loss" in outcome.error_line


def test_push_share_needs_gains_of_rejections(encoder_recipe: Path):
    loss = "loss={name: infonce, push_share: 0.5}"
    gains = "data.gains={required: 1, useful: 0.5, irrelevant: 0, rejected: 0}"

    outcome = skilltrain("r3", "gradients", encoder_recipe, loss, gains)

    message = "loss.push_share needs data.gains that put rejected below irrelevant"
    assert message in outcome.error_line
