"""The stage `encode`: on one process and on several, cut off and taken up again."""

import json
import os
import signal
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

NUM_SKILLS, NUM_DISTINCT, NUM_QUERIES = 60, 57, 5


def skills_of(num):
    """Skills of all lengths; the last three say what the first three say."""
    generator = np.random.default_rng(0)
    bodies = [" ".join(generator.choice(WORDS, size=3 + n % 40)) for n in range(num - 3)]
    texts = [(f"skill {n}", f"find {WORDS[n % 30]}", body) for n, body in enumerate(bodies)]
    return [Skill(f"id{n}", *text) for n, text in enumerate([*texts, *texts[:3]])]


SKILL_LIST = skills_of(NUM_SKILLS)
REQUESTS = ["deploy pods", "chart of a table", "merge review", "chart of a table", "query"]


@pytest.fixture
def place(tmp_path, model_folders):
    """A folder with pool, queries, and recipe.yaml that runs itself."""
    write_table(SKILL_LIST, SKILLS, tmp_path / "pool")
    queries = [Query(f"q{n}", text, "single", "test", "train") for n, text in enumerate(REQUESTS)]
    write_table(queries, QUERIES, tmp_path / "queries")
    recipe = f"""
stage: encode
pool: {tmp_path}/pool
queries: {tmp_path}/queries
encoder: {{source: {model_folders["bert"]}, precision: float32, token_budget: 64, cache: {tmp_path}/vectors}}
out: {tmp_path}/encoded
"""
    write_recipe(tmp_path / "recipe.yaml", recipe)
    return tmp_path


def encode(place, *arguments):
    """The stage's summary."""
    return json.loads(succeeds("encode", place / "recipe.yaml", "--json", *arguments).out)


def check_cache(place, model, monkeypatch):
    """Later stages find all vectors in the cache, and they are those of the model without one."""
    plain, encoder = (
        open_encoder(EncoderSource(source=str(model), precision="float32", cache=cache))
        for cache in (None, place / "vectors")
    )
    wanted = plain.encode_skills(SKILL_LIST), plain.encode_queries(REQUESTS)
    monkeypatch.setattr(encoder.model, "forward", None)
    for one, other in zip(
        (encoder.encode_skills(SKILL_LIST), encoder.encode_queries(REQUESTS)), wanted, strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_is_encoded_is_found_and_what_has_gone_encoded_again(
    place, model_folders, monkeypatch
):
    summary = encode(place)
    skills = {
        "num_skills": NUM_SKILLS,
        "num_skills_distinct": NUM_DISTINCT,
        "num_skills_encoded": NUM_DISTINCT,
    }

    counts = skills | {
        "num_queries": 5,
        "num_queries_distinct": 4,
        "num_queries_encoded": 4,
        "num_ranks": 1,
        "dim": 32,
    }

    assert counts.items() <= summary.items()
    assert 0 <= summary["padding"] < 0.1
    assert sorted(path.name for path in (place / "encoded").iterdir()) == [
        "recipe.yaml",
        "run.json",
    ]
    assert Path(summary["vectors"]).parent == place / "vectors"

    check_cache(place, model_folders["bert"], monkeypatch)
    again = encode(place)

    assert (again["num_skills_encoded"], again["num_queries_encoded"]) == (0, 0)

    for file in Path(again["vectors"]).glob("*.npz"):
        file.write_bytes(file.read_bytes()[:-4])  # then the file is not there
    again = encode(place)

    assert (again["num_skills_encoded"], again["num_queries_encoded"]) == (NUM_DISTINCT, 4)
    for number, change in enumerate(
        [f"encoder.source={model_folders['qwen3']}", "encoder.max_tokens=16"]
    ):
        assert (
            encode(place, change, f"out={place}/other{number}")["num_skills_encoded"]
            == NUM_DISTINCT
        )
    assert len([path for path in (place / "vectors").iterdir() if path.is_dir()]) == 3

    write_table([], SKILLS, place / "pool")
    summary = encode(place, "queries=null", f"out={place}/empty")

    assert summary["num_skills"] == summary["num_skills_encoded"] == summary["num_tokens"] == 0
    assert "num_queries" not in summary


def test_bad_input_is_one_line(place):
    recipe = place / "recipe.yaml"

    assert (
        "encoder.cache is missing" in skilltrain("encode", recipe, "encoder.cache=null").only_line
    )

    (place / "file").write_text("x")

    assert (
        "cannot make the vector cache: "
        in skilltrain("encode", recipe, f"encoder.cache={place}/file").error_line
    )
    assert "no skills table here" in skilltrain("encode", recipe, f"pool={place}").error_line
    assert "is a recipe of stage encode" in skilltrain("train", recipe).only_line
    assert not (place / "encoded").exists()


def test_vectors_that_are_no_numbers_are_never_kept(place, model_folders, monkeypatch):
    load = dense.load_encoder

    def broken(config, device):
        model = load(config, device)
        with torch.no_grad():
            words = model.backbone.get_parameter("embeddings.word_embeddings.weight")
            words[model.text_tokenizer.ids(["pods"])[0]] = np.nan
        return model

    monkeypatch.setattr(dense, "load_encoder", broken)
    line = skilltrain("encode", place / "recipe.yaml").error_line

    assert "vectors that are no numbers" in line
    assert str(model_folders["bert"]) in line
    assert not list((place / "vectors").rglob("*.npz"))
    assert not (place / "encoded").exists()


# Several processes --------------------------------------------------------------------------------

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks on the CPU, where there is no GPU"
)


def encode_and_die(rank: int, num_files: int, recipe: Path) -> None:
    """The stage, whose process `rank` kills itself once it has written so many files; blocks are of eight texts."""
    add, written = VectorCache.add, []

    def adding(self, keys, vectors):
        add(self, keys, vectors)
        written.append(keys)
        if int(os.environ.get("RANK", "0")) == rank and len(written) == num_files:
            os.kill(os.getpid(), signal.SIGKILL)

    dense._BLOCK, VectorCache.add = 8, adding
    main(["encode", str(recipe)])


def encode_unlike(recipe: Path) -> None:
    """The stage, with another model on the second rank."""
    main(["encode", str(recipe), *(["encoder.max_tokens=16"] if os.environ["RANK"] == "1" else [])])


def test_kill_9_loses_a_block_at_most(place, model_folders, monkeypatch):
    (killed,) = run_apart(partial(encode_and_die, 0, 3, place / "recipe.yaml"))

    assert killed.code == -signal.SIGKILL, killed
    assert not (place / "encoded").exists()
    assert encode(place)["num_skills_encoded"] == NUM_DISTINCT - 3 * 8

    check_cache(place, model_folders["bert"], monkeypatch)


@pytest.mark.slow
def test_a_recipe_is_launched_as_a_program(place):
    code, out, err = finished(
        program(f"accelerate launch --config_file {ROOT}/launch/cpu.yaml", place / "recipe.yaml")
    )

    assert code == 0, err
    assert out.startswith(f"{place}/encoded: vectors of ")
    assert "already" not in err
    assert encode(place)["num_skills_encoded"] == 0


@on_cpu
def test_a_rank_that_dies_ends_the_run_and_three_others_go_on(place, model_folders, monkeypatch):
    first, dead = run_ranks(2, partial(encode_and_die, 1, 2, place / "recipe.yaml"))

    assert dead.code == -signal.SIGKILL and first.code != 0 and not first.out, (first, dead)
    assert not (place / "encoded").exists()

    done = run_ranks(3, partial(main, ["encode", str(place / "recipe.yaml"), "--json"]))

    assert [rank.code for rank in done] == [0, 0, 0] and not done[1].out, done

    summary = json.loads(done[0].out)

    assert (
        0 < summary["num_skills_encoded"] <= NUM_DISTINCT - 16
    )  # but for two files of the one, and the other's
    assert summary["num_ranks"] == 3

    check_cache(place, model_folders["bert"], monkeypatch)


@on_cpu
def test_ranks_with_unlike_models_are_refused(place):
    first, second = run_ranks(2, partial(encode_unlike, place / "recipe.yaml"))

    assert first.code != 0
    assert second.code != 0
    assert not first.out + second.out

    problem = "rank 1 has other weights, another number format or other skills than the first"

    assert problem in " ".join(second.err.split())
    assert not list((place / "vectors").rglob("*.npz"))
