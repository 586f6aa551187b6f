"""The stage `encode`: on one process and on several, killed and continued."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from processes import run_apart, run_ranks
from skilltrain.cli import main
from skilltrain.records import Query, Skill
from skilltrain.retrieval import dense
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.retrieval.vectors import VectorCache
from skilltrain.tables import QUERIES, SKILLS, write_table
from small_library import skilltrain, succeeds, write_recipe
from test_cli import ROOT, finished, program
from tiny_models import WORDS

NUM_SKILLS = 60
NUM_DISTINCT = 57


def make_skills():
    """Return skills of all lengths; the last three have the texts of the first three."""
    rng = np.random.default_rng(0)
    skills = []
    for number in range(NUM_DISTINCT):
        body = " ".join(rng.choice(WORDS, size=3 + number % 40))
        skills.append(Skill(f"id{number}", f"skill {number}", f"find {WORDS[number % 30]}", body))
    return skills + [replace(skill, skill_id=f"copy of {skill.skill_id}") for skill in skills[:3]]


SKILLS_OF_POOL = make_skills()
REQUESTS = ["deploy pods", "chart of a table", "merge review", "chart of a table", "query"]


@pytest.fixture
def folder(tmp_path, model_folders):
    """A folder with a pool, queries, and a recipe that runs itself."""
    write_table(SKILLS_OF_POOL, SKILLS, tmp_path / "pool")
    queries = [
        Query(f"q{number}", text, "single", "test", "train") for number, text in enumerate(REQUESTS)
    ]
    write_table(queries, QUERIES, tmp_path / "queries")
    recipe = f"""
stage: encode
pool: {tmp_path}/pool
queries: {tmp_path}/queries
encoder:
  source: {model_folders["bert"]}
  precision: float32
  token_budget: 64
  cache: {tmp_path}/vectors
out: {tmp_path}/encoded
"""
    write_recipe(tmp_path / "recipe.yaml", recipe)
    return tmp_path


def encode(folder, *arguments):
    """Run the stage and return its summary."""
    return json.loads(succeeds("encode", folder / "recipe.yaml", "--json", *arguments).out)


def cached_bytes(cache: Path) -> list[bytes]:
    """Return the contents of a cache's files, which have random names, in sorted order."""
    return sorted(file.read_bytes() for file in cache.rglob("*.npz"))


def check_cache(folder, model, monkeypatch):
    """Check that the cache has the vectors of all texts, and that they equal the model's."""
    plain = open_encoder(EncoderSource(source=str(model), precision="float32"))
    skills = plain.encode_skills(SKILLS_OF_POOL)
    queries = plain.encode_queries(REQUESTS)

    cached = open_encoder(
        EncoderSource(source=str(model), precision="float32", cache=folder / "vectors")
    )
    monkeypatch.setattr(cached.model, "forward", None)

    np.testing.assert_allclose(cached.encode_skills(SKILLS_OF_POOL), skills, atol=1e-6)
    np.testing.assert_allclose(cached.encode_queries(REQUESTS), queries, atol=1e-6)


def test_encode_fills_cache(folder, model_folders, monkeypatch):
    encode(folder)

    check_cache(folder, model_folders["bert"], monkeypatch)


def test_summary_counts_encoded_texts(folder):
    summary = encode(folder)

    assert 0 <= summary.pop("padding") < 0.1
    assert Path(summary.pop("vectors")).parent == folder / "vectors"
    counts = {
        "num_skills": NUM_SKILLS,
        "num_skills_distinct": NUM_DISTINCT,
        "num_skills_encoded": NUM_DISTINCT,
        "num_queries": 5,
        "num_queries_distinct": 4,
        "num_queries_encoded": 4,
        "num_ranks": 1,
        "dim": 32,
    }
    assert counts.items() <= summary.items()
    files = {path.name for path in (folder / "encoded").iterdir()}
    assert files == {"recipe.yaml", "run.json"}


def test_cached_texts_are_not_encoded(folder):
    encode(folder)

    summary = encode(folder)

    assert summary["num_skills_encoded"] == 0
    assert summary["num_queries_encoded"] == 0


def test_broken_cache_is_encoded_again(folder):
    vectors = Path(encode(folder)["vectors"])
    for file in vectors.glob("*.npz"):
        file.write_bytes(file.read_bytes()[:-4])

    summary = encode(folder)

    assert summary["num_skills_encoded"] == NUM_DISTINCT
    assert summary["num_queries_encoded"] == 4


def test_model_or_limit_has_its_own_cache(folder, model_folders):
    encode(folder)

    other_model = encode(folder, f"encoder.source={model_folders['qwen3']}", f"out={folder}/model")
    other_limit = encode(folder, "encoder.max_tokens=16", f"out={folder}/limit")

    assert other_model["num_skills_encoded"] == NUM_DISTINCT
    assert other_limit["num_skills_encoded"] == NUM_DISTINCT
    assert len([path for path in (folder / "vectors").iterdir() if path.is_dir()]) == 3


def test_empty_pool_has_no_vectors(folder):
    write_table([], SKILLS, folder / "pool")

    summary = encode(folder, "queries=null")

    assert summary["num_skills"] == summary["num_skills_encoded"] == summary["num_tokens"] == 0
    assert "num_queries" not in summary


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("encoder.cache=null", "encoder.cache is missing"),
        ("encoder.cache={folder}/recipe.yaml", "cannot make the vector cache: "),
        ("pool={folder}", "no skills table here"),
    ],
)
def test_invalid_setting_is_refused(folder, setting, message):
    outcome = skilltrain("encode", folder / "recipe.yaml", setting.format(folder=folder))

    assert message in outcome.error_line
    assert not (folder / "encoded").exists()


def test_train_refuses_recipe_of_encode(folder):
    outcome = skilltrain("train", folder / "recipe.yaml")

    assert "is a recipe of stage encode" in outcome.only_line


def test_vectors_without_numbers_are_not_cached(folder, model_folders, monkeypatch):
    load = dense.load_encoder

    def broken(config, device):
        model = load(config, device)
        with torch.no_grad():
            words = model.backbone.get_parameter("embeddings.word_embeddings.weight")
            words[model.text_tokenizer.ids(["pods"])[0]] = np.nan
        return model

    monkeypatch.setattr(dense, "load_encoder", broken)

    line = skilltrain("encode", folder / "recipe.yaml").error_line

    assert "vectors that are no numbers" in line
    assert str(model_folders["bert"]) in line
    assert not list((folder / "vectors").rglob("*.npz"))
    assert not (folder / "encoded").exists()


# Several processes --------------------------------------------------------------------------------

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks on the CPU, where there is no GPU"
)


def encode_and_die(rank: int, num_files: int, recipe: Path) -> None:
    """Run the stage in blocks of eight texts; `rank` kills itself after it wrote `num_files`."""
    add = VectorCache.add
    written = []

    def add_and_die(self, keys, vectors):
        add(self, keys, vectors)
        written.append(keys)
        if int(os.environ.get("RANK", "0")) == rank and len(written) == num_files:
            os.kill(os.getpid(), signal.SIGKILL)

    dense._TEXTS_PER_BLOCK = 8
    VectorCache.add = add_and_die
    main(["encode", str(recipe)])


def encode_unlike(recipe: Path) -> None:
    """Run the stage with other settings of the model on the second rank."""
    settings = ["encoder.max_tokens=16"] if os.environ["RANK"] == "1" else []
    main(["encode", str(recipe), *settings])


def test_killed_run_keeps_finished_blocks(folder, model_folders, monkeypatch):
    (killed,) = run_apart(partial(encode_and_die, 0, 3, folder / "recipe.yaml"))
    assert killed.code == -signal.SIGKILL, killed
    assert not (folder / "encoded").exists()

    summary = encode(folder)

    assert summary["num_skills_encoded"] == NUM_DISTINCT - 3 * 8
    check_cache(folder, model_folders["bert"], monkeypatch)


@pytest.mark.slow
def test_launcher_runs_recipe(folder):
    launch = program(
        f"accelerate launch --config_file {ROOT}/launch/cpu.yaml", folder / "recipe.yaml"
    )

    code, out, err = finished(launch)

    assert code == 0, err
    assert out.startswith(f"{folder}/encoded: vectors of ")
    assert "already" not in err
    assert encode(folder)["num_skills_encoded"] == 0
    # The same recipe in this process writes the same vectors.
    encode(folder, f"encoder.cache={folder}/vectors_here", f"out={folder}/encoded_here")
    assert cached_bytes(folder / "vectors") == cached_bytes(folder / "vectors_here")


@on_cpu
def test_more_ranks_continue_killed_run(folder, model_folders, monkeypatch):
    first, killed = run_ranks(2, partial(encode_and_die, 1, 2, folder / "recipe.yaml"))
    assert killed.code == -signal.SIGKILL, killed
    assert first.code != 0, first
    assert not first.out, first
    assert not (folder / "encoded").exists()

    ranks = run_ranks(3, partial(main, ["encode", str(folder / "recipe.yaml"), "--json"]))

    assert [rank.code for rank in ranks] == [0, 0, 0], ranks
    assert not ranks[1].out, ranks
    summary = json.loads(ranks[0].out)
    assert summary["num_ranks"] == 3
    # The killed rank had written two files of eight texts, and the other rank perhaps some.
    assert 0 < summary["num_skills_encoded"] <= NUM_DISTINCT - 2 * 8
    check_cache(folder, model_folders["bert"], monkeypatch)


@on_cpu
def test_ranks_with_unlike_models_are_refused(folder):
    first, second = run_ranks(2, partial(encode_unlike, folder / "recipe.yaml"))

    assert first.code != 0
    assert second.code != 0
    assert not first.out + second.out
    problem = "rank 1 has other weights, another number format or other skills than the first"
    assert problem in " ".join(second.err.split())
    assert not list((folder / "vectors").rglob("*.npz"))
