"""The programs of data_pipelines/ that train: who was trained on what, by the tables that they leave."""

import importlib.util
from pathlib import Path

import pytest

from skilltrain.config import validate
from skilltrain.recipe import run_pipeline
from skilltrain.retrieval.rankers import FuseConfig
from skilltrain.tables import JUDGEMENTS, LISTS, RANKINGS, read_table
from small_library import contents, encoder_recipe, forget_ranks, write_recipe

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


def golds_of(folder):
    return {
        row["skill_id"]
        for row in read_table(folder, JUDGEMENTS).to_pylist()
        if row["verdict"] == "required"
    }


def test_cross_fitting_ranks_each_fold_by_an_encoder_that_has_not_seen_it(runs, recipe, tmp_path):
    out = tmp_path / "out"
    module = program("cross_fit")
    pipeline = module.Pipeline(recipe=recipe, out=out, folds=2)
    summaries = module.run(pipeline)
    forget_ranks()
    whole, ranked = column(runs / "encoder_lists", LISTS, "query_id"), set()
    for part in (out / "fold1", out / "fold2"):
        trained, held = (
            column(part / "lists", LISTS, "query_id"),
            column(part / "ranked", RANKINGS, "query_id"),
        )
        assert held and not held & trained and held | trained == whole and not ranked & held
        assert golds_of(part / "held") and not golds_of(part / "held") & golds_of(part / "lists")
        ranked |= held
    assert ranked == whole
    assert {name: len(one["weights"]) for name, one in summaries.items()} == {
        "weights_find": 2,
        "weights_order": 3,
    }
    legs = [{"kind": "lexical"}, {"kind": "dense", "source": "x"}, {"kind": "late", "source": "x"}]
    fused = validate(
        FuseConfig, {"kind": "fuse", "of": legs, "weights": str(out / "weights_order")}, "test"
    )
    assert sum(fused.leg_weights()) > 0
    before = contents(out)
    assert module.run(pipeline) == summaries  # all is there already
    assert contents(out).keys() == before.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("cross_fit", ["RECIPE", "OUT"], "must train an encoder on one folder of lists"),
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
