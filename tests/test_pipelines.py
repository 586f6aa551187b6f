"""The programs of data_pipelines/: the stages they run, and how they refuse bad arguments."""

import importlib.util
from pathlib import Path

import pytest

from skilltrain.recipe import run_pipeline
from small_library import write_recipe

FOLDER = Path(__file__).parents[1] / "data_pipelines"


def program(name):
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
        ("tiny_qwen3", ["OUT", "--tokenizer", "none"], "No such file or directory"),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(name, arguments, fault, tmp_path, capsys):
    module, recipe = (
        program(name),
        write_recipe(tmp_path / "recipe.yaml", "stage: pool\nsources: x\nout: y"),
    )
    places = {"RECIPE": str(recipe), "OUT": str(tmp_path / "out")}
    given = [str(places.get(argument, argument)) for argument in arguments]
    with pytest.raises(SystemExit) as leaving:
        run_pipeline(module.Pipeline, module.run, module.__doc__, given)
    said = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and said[-1].startswith("error: ") and fault in said[-1], said
    run_pipeline(module.Pipeline, module.run, module.__doc__, [])
    assert capsys.readouterr().out == f"{module.__doc__}\n"


def test_skillrouters_pipeline_and_its_variant_of_the_paper(tmp_path, monkeypatch):
    module, configs = program("skillrouter"), []
    monkeypatch.setattr(module, "run_stage", lambda config, resume: configs.append(config))
    settings = {"skills": tmp_path, "out": tmp_path / "out", "trained": tmp_path / "trained"}
    module.run(module.Pipeline(**settings))
    assert [config.max_skills for config in configs if config.stage == "synthesize"] == [None]
    base = [config.encoder for config in configs if getattr(config, "encoder", None) is not None]
    assert len(base) == 4  # pool, mine, filter, and the filter of the reranker's candidates
    assert {(encoder.max_tokens, encoder.query_max_tokens) for encoder in base} == {(2048, 2048)}

    configs.clear()
    module.run(module.Pipeline(**settings, variant="paper", depth=20))
    by_out = {config.out.name: config for config in configs}
    asked = by_out["queries"]
    assert (asked.prompt, asked.max_skills, asked.num_words, asked.dev_share) == (
        "skillrouter",
        37_979,
        160,
        0,
    )
    assert by_out["mined"].lexical_among == "semantic" and by_out["mined"].depth == 50
    for name in ("filtered", "candidates_filtered"):
        assert [getattr(layer, "above", None) for layer in by_out[name].layers] == [None, 0.6, 0.92]
        assert by_out[name].layers[1].max_names is None
    lists, raw, ranked = (
        by_out[name] for name in ("encoder_lists", "encoder_lists_raw", "reranker_lists")
    )
    assert (lists.best_of, lists.rankings, raw.rankings) == (
        ("lexical",),
        by_out["filtered"].out,
        by_out["mined"].out,
    )
    assert raw.quotas == lists.quotas == {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}
    assert (ranked.absent_gold, ranked.list_size, by_out["candidates"].depth) == ("drop", 20, 20)
