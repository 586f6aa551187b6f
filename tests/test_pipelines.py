"""The programs of data_pipelines/ that train: who was trained on what, by the tables that they leave."""

import importlib.util
from pathlib import Path

import pytest

from skilltrain.config import load_recipe
from skilltrain.recipe import run_pipeline
from skilltrain.runs import RECIPE_FILE
from skilltrain.tables import JUDGEMENTS, LISTS, RANKINGS, read_table
from small_library import encoder_recipe, forget_ranks, write_recipe

FOLDER = Path(__file__).parents[1] / "data_pipelines"


@pytest.fixture
def recipe(runs, model_folders, tmp_path):
    """A recipe that trains an encoder on the small library's lists, with late interaction."""
    text = (
        encoder_recipe(runs, model_folders["bert"])
        + "late_interaction: {weight: 1.0, temperature: 0.05}"
    )
    return write_recipe(tmp_path / "recipe.yaml", text.replace("epochs: 2", "epochs: 1"))


def program(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def column(folder, spec, name):
    return set(read_table(folder, spec).column(name).to_pylist())


def test_an_encoder_in_stages_goes_on_from_the_stage_before(
    runs, recipe, model_folders, tmp_path, monkeypatch
):
    module, out, base = program("encoder_in_stages"), tmp_path / "out", str(model_folders["bert"])
    run, filtered_by = module._run, list[str]()

    def run_filtering_by_name(values):  # an untrained encoder finds all texts alike
        if values["stage"] == "filter":
            filtered_by.append(values["encoder"]["source"])
            values = values | {"layers": [{"name": "name"}]}
        run(values)

    monkeypatch.setattr(module, "_run", run_filtering_by_name)
    settings = ["training.learning_rate=1e-4"]
    encoders = module.run(module.Pipeline(recipe=recipe, out=out, free_pairs=20, settings=settings))
    forget_ranks()
    assert encoders == [out / "free_pairs" / "encoder", out / "queries", out / "round1" / "encoder"]
    recipes = [load_recipe(encoder / RECIPE_FILE) for encoder in encoders]
    assert [recipe["model"]["source"] for recipe in recipes] == [
        base,
        str(encoders[0]),
        str(encoders[1]),
    ]
    assert {recipe["training"]["learning_rate"] for recipe in recipes} == {
        1e-4
    } and filtered_by == [base, base]
    pairs, asked = out / "free_pairs" / "pairs", runs / "encoder_lists"
    assert column(out / "free_pairs" / "encoder_lists", LISTS, "query_id") <= column(
        pairs, JUDGEMENTS, "query_id"
    )
    assert column(out / "round1" / "encoder_lists", LISTS, "query_id") <= column(
        asked, LISTS, "query_id"
    )
    wrong = read_table(out / "round1" / "mined", RANKINGS)
    assert set(wrong.column("stage").to_pylist()) == {"semantic", "lexical"}
    assert max(wrong.column("rank").to_pylist()) <= module.WRONG_TOP


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        (
            "encoder_in_stages",
            ["RECIPE", "OUT", "rounds=1", "sources=y"],
            "must train an encoder on one folder of",
        ),
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
    monkeypatch.setattr(module, "run_recipe", lambda config, resume: configs.append(config))
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
