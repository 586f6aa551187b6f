"""Gradients taken apart: two dimensions worked by hand, and the command over real lists."""

import json
from pathlib import Path

import pytest
import torch

from skilltrain.papers.r3.loss_gradients import at_scores, at_vectors, mean_of
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, read_table, write_table
from small_library import skilltrain, succeeds, write_recipe


def rows_by_part(rows):
    return {key: figures.tolist() for key, figures in rows if len(figures)}


def test_slopes_by_hand():
    """Softmax over three scores of 0: a third each, so the positive has -2/3 and the two negatives 1/3."""
    slopes = torch.tensor([[-2 / 3, 1 / 3, 1 / 3, 0.0]], dtype=torch.float64)
    rows = rows_by_part(at_scores(slopes, [["required", "rejected", "in-batch", ""]]))

    assert rows["scores", "rejected"] == [pytest.approx((1 / 3, 1 / 4, 1, 1 / 9, 1 / 3))]
    assert rows["scores", "required"] == [pytest.approx((2 / 3, 1 / 2, 1, 4 / 9, -2 / 3))]
    assert len(rows) == 3


def test_parts_at_vectors_by_hand():
    """A unit vector along x: only y turns it. Rejections push by 3, an in-batch negative takes 2 of that back."""
    parts = {"rejected": torch.tensor([[9.0, 3.0]]), "in-batch": torch.tensor([[0.0, -2.0]])}
    whole, along_x = torch.tensor([[9.0, 1.0]]), torch.tensor([[1.0, 0.0]])

    rows = rows_by_part(at_vectors("queries", parts, whole, along_x))

    assert rows["queries", "rejected"] == [pytest.approx((3, 3 / 5, 1, 3, 0))]
    assert rows["queries", "in-batch"] == [pytest.approx((2, 2 / 5, -1, -2, 0))]
    assert len(rows) == 2, "the parts add up to the whole, and no other direction is left"
    assert [*rows_by_part(at_vectors("queries", {}, whole, along_x))] == [
        ("queries", "other directions")
    ]


def test_survival_is_that_of_all_rows_together():
    """A row of norm 3 of which 1/3 survives, and one of norm 0.1 that is reversed tenfold: 3 - 0.1 of 9 + 0.01."""
    part = mean_of(
        "queries",
        "rejected",
        torch.tensor([[3.0, 0.6, 1.0, 3.0, 0.0], [0.1, 0.1, -1.0, -0.1, 0.0]]),
    )
    assert part.survival == pytest.approx(2.9 / 9.01)
    assert part.norm == pytest.approx(1.55)
    assert part.num == 2


@pytest.fixture
def with_rejections(runs: Path, tmp_path: Path):
    """The small library's lists, in which each query's last candidate is rejected; and the recipe of an encoder."""
    for name, folder in (("encoder", "encoder_lists"), ("reranker", "reranker_lists")):
        rows = read_table(runs / folder, LISTS).to_pylist()
        for row in rows:
            last = max(at for at, verdict in enumerate(row["verdicts"]) if verdict == "irrelevant")
            row["verdicts"][last] = "rejected"
        write_table(rows, LISTS, tmp_path / name)
        for spec in (QUERIES, JUDGEMENTS):
            write_table(read_table(runs / folder, spec), spec, tmp_path / name)
    return tmp_path


def recipe(folder: Path, stage: str, runs: Path, model: Path, loss: str) -> Path:
    lists = folder / stage.removeprefix("train_")
    text = f"stage: {stage}\nmodel: {{source: {model}, max_tokens: 48, query_max_tokens: 24}}\n"
    gains = "{required: 1, useful: 0.5, irrelevant: 0, rejected: -1}"
    text += f"data: {{pool: {runs}/pool, lists: {lists}, gains: {gains}}}\n"
    text += f"loss: {loss}\ntraining: {{batch_size: 4, accumulation: 1, token_budget: 512}}\nout: {folder}/out\n"
    return write_recipe(folder / f"{stage}.yaml", text)


SYMMETRIC = (
    "{name: infonce, directions: [query_to_skill, skill_to_query], partition: per_direction}"
)


def parts_of(folder: Path) -> dict[tuple[str, str], dict]:
    found = json.loads((folder / "gradients.json").read_text())
    return {(row["at"], row["part"]): row for row in found["parts"]}


def test_the_command_measures_an_encoder(with_rejections: Path, runs: Path, model_folders):
    folder = with_rejections
    file = recipe(folder, "train_encoder", runs, model_folders["bert"], SYMMETRIC)

    outcome = succeeds("r3", "gradients", file, "--batches", "2")

    assert outcome.out.startswith(
        f"{folder}/out/gradients.html: of the rejections' gradient survive 1.00 at the scores"
    )

    parts = parts_of(folder / "out")
    ends = {"required", "rejected", "irrelevant", "in-batch"}

    assert {part for at, part in parts if at == "scores"} >= ends
    assert {part for at, part in parts if at == "skills"} >= {*ends, "other directions"}
    assert parts["scores", "rejected"]["slope"] > 0 > parts["scores", "required"]["slope"]

    for at in ("scores", "queries"):
        own = [row for (place, _), row in parts.items() if place == at]
        total = sum(row["share"] * row["num"] for row in own)

        assert total == pytest.approx(max(row["num"] for row in own), rel=1e-6), (
            "a row's shares sum to 1"
        )
    markdown, page = (
        (folder / "out" / "gradients.md").read_text(),
        (folder / "out" / "gradients.html").read_text(),
    )

    assert "## At the queries" in markdown
    assert "| rejected |" in markdown
    assert "At the skills" in page
    assert page.count("<rect") >= 10
    assert "exists already" in skilltrain("r3", "gradients", file).error_line


def test_the_command_measures_a_reranker(with_rejections: Path, runs: Path, model_folders):
    file = recipe(
        with_rejections, "train_reranker", runs, model_folders["bert_reranker"], "{name: ranknet}"
    )
    succeeds("r3", "gradients", file, "--batches", "1")

    parts = parts_of(with_rejections / "out")

    assert {at for at, _ in parts} == {"scores"}

    slopes = {
        part: parts["scores", part]["slope"] for part in ("required", "irrelevant", "rejected")
    }

    assert slopes["required"] < slopes["irrelevant"] < slopes["rejected"]
    assert slopes["rejected"] > 0


def test_lists_without_rejections_and_other_losses_are_refused(
    with_rejections: Path, runs: Path, model_folders
):
    file = recipe(with_rejections, "train_encoder", runs, model_folders["bert"], SYMMETRIC)
    gains = "data.gains={required: 1, useful: 0.5, irrelevant: 0, rejected: 0}"

    for settings, said in (
        (
            [f"data.lists={runs}/encoder_lists"],
            "data.lists: no list holds a rejected skill (give a quota judged)",
        ),
        (
            ["loss={name: matryoshka, dims: [16]}"],
            "loss: gradients are taken apart for a plain loss",
        ),
        (
            ["loss={name: infonce, push_share: 0.5}", gains],
            "loss.push_share needs data.gains that put rejected below irrelevant",
        ),
    ):
        assert said in skilltrain("r3", "gradients", file, *settings).error_line
