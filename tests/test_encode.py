"""The stage `encode`: on one process and on several, cut off and taken up again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from skilltrain.records import Query, Skill
from skilltrain.retrieval import dense
from skilltrain.retrieval.dense import EncoderSource, encode_queries, encode_skills, open_encoder
from skilltrain.retrieval.vectors import text_keys
from skilltrain.tables import QUERIES, SKILLS, rows_of, write_table
from small_library import skilltrain, succeeds, write_recipe
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
    write_table(rows_of(SKILL_LIST), SKILLS, tmp_path / "pool")
    queries = [Query(f"q{n}", text, "single", "test", "train") for n, text in enumerate(REQUESTS)]
    write_table(rows_of(queries), QUERIES, tmp_path / "queries")
    write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path, model_folders["bert"]))
    return tmp_path


def recipe_of(folder, model):
    return f"""
stage: encode
pool: {folder}/pool
queries: {folder}/queries
encoder: {{source: {model}, precision: float32, token_budget: 64, cache: {folder}/vectors}}
out: {folder}/encoded
"""


def finds(place, model, monkeypatch, name="vectors"):
    """(skill vectors, query vectors) from the cache, where all of them are: nothing is encoded."""
    encoder = open_encoder(EncoderSource(source=str(model), precision="float32", cache=place / name))
    with monkeypatch.context() as patched:
        patched.setattr(encoder.model, "forward", None)
        return encode_skills(encoder, SKILL_LIST), encode_queries(encoder, REQUESTS)


def plain(model):
    """(skill vectors, query vectors) without a cache, by the layers as transformers has them."""
    encoder = open_encoder(EncoderSource(source=str(model), precision="float32"))
    return encode_skills(encoder, SKILL_LIST), encode_queries(encoder, REQUESTS)


def same(found, wanted, tolerance=1e-6):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


def test_later_stages_find_the_vectors_of_a_pool_and_its_queries(place, model_folders, monkeypatch):
    summary = json.loads(succeeds("encode", place / "recipe.yaml", "--json").out)
    skills = {"num_skills": NUM_SKILLS, "num_skills_distinct": NUM_DISTINCT, "num_skills_encoded": NUM_DISTINCT}
    counts = skills | {"num_queries": 5, "num_queries_distinct": 4, "num_queries_encoded": 4, "num_ranks": 1, "dim": 32}
    assert counts.items() <= summary.items() and 0 <= summary["padding"] < 0.1
    assert sorted(path.name for path in (place / "encoded").iterdir()) == ["recipe.yaml", "run.json"]
    assert Path(summary["vectors"]).parent == place / "vectors"
    same(finds(place, model_folders["bert"], monkeypatch), plain(model_folders["bert"]))


def test_run_again_it_encodes_what_has_gone(place):
    succeeds("encode", place / "recipe.yaml")
    again = json.loads(succeeds("encode", place / "recipe.yaml", "--json").out)
    assert (again["num_skills_encoded"], again["num_queries_encoded"]) == (0, 0)
    for file in Path(again["vectors"]).glob("*.parquet"):
        file.write_bytes(file.read_bytes()[:-4])  # then the file is not there
    again = json.loads(succeeds("encode", place / "recipe.yaml", "--json").out)
    assert (again["num_skills_encoded"], again["num_queries_encoded"]) == (NUM_DISTINCT, 4)


def test_another_model_or_another_limit_shares_nothing(place, model_folders):
    succeeds("encode", place / "recipe.yaml")
    for number, change in enumerate([f"encoder.source={model_folders['qwen3']}", "encoder.max_tokens=16"]):
        outcome = succeeds("encode", place / "recipe.yaml", change, f"out={place}/other{number}", "--json")
        assert json.loads(outcome.out)["num_skills_encoded"] == NUM_DISTINCT
    assert len([path for path in (place / "vectors").iterdir() if path.is_dir()]) == 3


def test_an_empty_pool_is_encoded_at_once(place):
    write_table([], SKILLS, place / "pool")
    summary = json.loads(succeeds("encode", place / "recipe.yaml", "queries=null", "--json").out)
    assert summary["num_skills"] == summary["num_skills_encoded"] == summary["num_tokens"] == 0
    assert "num_queries" not in summary


def test_bad_input_is_one_line(place, model_folders):
    recipe = place / "recipe.yaml"
    assert "encoder.cache is missing" in skilltrain("encode", recipe, "encoder.cache=null").only_line
    (place / "file").write_text("x")
    assert "cannot make the vector cache" in skilltrain("encode", recipe, f"encoder.cache={place}/file").error_line
    assert "no skills table here" in skilltrain("encode", recipe, f"pool={place}").error_line
    assert "is a recipe of stage encode" in skilltrain("train", recipe).only_line
    assert not (place / "encoded").exists()
    assert "encoder.cache" in succeeds("encode", "--help").out


def test_vectors_that_are_no_numbers_are_never_kept(place, model_folders, monkeypatch):
    load = dense.load_encoder

    def broken(config, device):
        model = load(config, device)
        with torch.no_grad():
            model.backbone.embeddings.word_embeddings.weight[model.tokenizer.convert_tokens_to_ids("pods")] = np.nan
        return model

    monkeypatch.setattr(dense, "load_encoder", broken)
    line = skilltrain("encode", place / "recipe.yaml").error_line
    assert "vectors that are no numbers" in line and str(model_folders["bert"]) in line
    assert not list((place / "vectors").rglob("*.parquet")) and not (place / "encoded").exists()


# Several processes ---------------------------------------------------------------------------------------------------

LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0", "--num_processes")
# A process that kills itself once so many files are written; blocks are of eight texts.
DIES = """
import os, signal, sys
from skilltrain.cli import main
from skilltrain.retrieval import dense
from skilltrain.retrieval.vectors import VectorCache

rank, num_files = map(int, sys.argv[1:3])
dense._BLOCK, add, written = 8, VectorCache.add, []

def adding(self, keys, vectors):
    add(self, keys, vectors)
    written.append(keys)
    if int(os.environ.get("RANK", "0")) == rank and len(written) == num_files:
        os.kill(os.getpid(), signal.SIGKILL)

VectorCache.add = adding
main(["encode", *sys.argv[3:]])
"""
DIFFERS = """
import os, sys
from skilltrain.cli import main

main(["encode", sys.argv[1], *(["encoder.max_tokens=16"] if os.environ["RANK"] == "1" else [])])
"""


def run(*command):
    """(exit code, stdout, stderr) of a Python program that must end by itself."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_kill_9_loses_a_block_at_most(place, model_folders, monkeypatch):
    (place / "dies.py").write_text(DIES)
    code, _, err = run(place / "dies.py", 0, 3, place / "recipe.yaml")
    assert code == -signal.SIGKILL, err
    assert not (place / "encoded").exists()
    summary = json.loads(succeeds("encode", place / "recipe.yaml", "--json").out)
    assert summary["num_skills_encoded"] == NUM_DISTINCT - 3 * 8
    same(finds(place, model_folders["bert"], monkeypatch), plain(model_folders["bert"]))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on the CPU, where there is no GPU")
def test_a_rank_that_dies_ends_the_run_and_three_others_go_on(place, model_folders, monkeypatch):
    (place / "dies.py").write_text(DIES)
    code, out, err = run(*LAUNCH, 2, place / "dies.py", 1, 2, place / "recipe.yaml")
    assert code != 0 and not out, err
    assert not (place / "encoded").exists()
    encoder = open_encoder(EncoderSource(source=str(model_folders["bert"]), precision="float32"))
    kept = dense.VectorCache.open(place / "vectors", dense._identity(load_plain(model_folders["bert"])))
    texts = [encoder.model.settings.template.skill.render(skill) for skill in SKILL_LIST]
    lacking = len(kept.missing(np.unique(text_keys(texts, 256)[0])))
    assert 0 < lacking <= NUM_DISTINCT - 16  # two files of the one that died, and the other's
    code, out, err = run(*LAUNCH, 3, place / "recipe.yaml", "--json")  # the recipe itself
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["num_skills_encoded"], summary["num_ranks"]) == (lacking, 3)
    same(finds(place, model_folders["bert"], monkeypatch), plain(model_folders["bert"]))


def load_plain(folder):
    from skilltrain.models.encoder import EncoderConfig, load_encoder

    return load_encoder(EncoderConfig(source=str(folder)), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks on the CPU, where there is no GPU")
def test_ranks_with_unlike_models_are_refused(place):
    (place / "differs.py").write_text(DIFFERS)
    code, out, err = run(*LAUNCH, 2, place / "differs.py", place / "recipe.yaml")
    assert code != 0 and not out
    assert "rank 1 has other weights, another number format or other skills than the first" in " ".join(err.split())
    assert not list((place / "vectors").rglob("*.parquet"))
