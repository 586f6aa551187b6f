"""Ablations: what a grid plans and refuses, its tables, and runs that stop and fail."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from safetensors.torch import load_file

from benchmark_folders import jsonl
from faults import raises
from skilltrain.config import apply_overrides
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation import ablate
from skilltrain.evaluation.ablate import (
    AblationConfig,
    Cell,
    dry_run_ablation,
    make_results,
    read_grid,
    results_page,
    run_ablation,
)
from skilltrain.evaluation.page import markdown
from skilltrain.files import read_json, write_json
from skilltrain.metrics.comparison import holm
from small_library import contents, succeeds, write_library

ROOT = Path(__file__).parents[1]
GRIDS = sorted(
    file for file in (ROOT / "recipes" / "ablations").glob("*.yaml") if file.stem != "chain"
)
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*/[0-9]_*.yaml"))


def grid(folder: Path, library: Path | None = None) -> dict[str, Any]:
    """Return a grid of mining, a filter that one variant omits, training by seed and evaluation."""
    library = library or folder / "library"
    if not library.exists():
        write_library(library)
    encoder = {"source": "some/model"}
    data = {"pool": "{pool}", "queries": "{queries}"}
    return {
        "ablation": "filter",
        "claim": "Filtering helps.",
        "baseline": "clean",
        "steps": {
            "pool": {"stage": "pool", "sources": str(library / "skills")},
            "queries": {
                "stage": "queries",
                "files": str(library / "queries" / "*.jsonl"),
                "pool": "{pool}",
            },
            "mine": {"stage": "mine", **data, "encoder": encoder.copy()},
            "filter": {
                "stage": "filter",
                **data,
                "rankings": "{mine}",
                "encoder": encoder.copy(),
                "layers": [{"name": "name"}, {"name": "jaccard"}],
            },
            "lists": {
                "stage": "lists",
                **data,
                "rankings": "{filter}",
                "quotas": {"semantic": 2, "lexical": 1},
            },
            "train": {
                "stage": "train_encoder",
                "model": encoder.copy(),
                "data": {"pool": "{pool}", "lists": "{lists}"},
                "training": {"seed": "{seed}"},
            },
            "evaluate": {
                "stage": "evaluate",
                "pool": "{pool}",
                "benchmark": "{queries}",
                "split": "test",
                "systems": [
                    {"name": "encoder", "rankers": [{"kind": "dense", "source": "{train}"}]}
                ],
            },
        },
        "variants": {"clean": {}, "raw": {"lists.rankings": "{mine}"}},
        "seeds": [1, 2],
        "out": str(folder / "out"),
    }


Grid = tuple[AblationConfig, list[Cell]]


def read(folder: Path, *overrides: str, **changes: Any) -> Grid:
    """Read the grid with these changes; return its settings and its cells."""
    return read_grid(write_grid(folder, grid(folder) | changes), overrides)


def write_grid(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return file


def runs_of(cells: list[Cell]) -> dict[Path, str]:
    """Return the step of each run by its folder."""
    steps = {}
    for cell in cells:
        for step, run in cell.runs.items():
            steps[run.out] = step
    return steps


# What a grid means --------------------------------------------------------------------------------


def test_cells_share_equal_runs(tmp_path):
    _, cells = read(tmp_path)

    names = ["clean, seed 1", "raw, seed 1", "clean, seed 2", "raw, seed 2"]
    assert [str(cell) for cell in cells] == names
    shared = dict.fromkeys(("pool", "queries", "mine", "filter"), 1)
    counts = Counter(runs_of(cells).values())
    assert counts == {**shared, "lists": 2, "train": 4, "evaluate": 4}


def test_run_follows_its_inputs(tmp_path):
    _, cells = read(tmp_path)

    clean, raw, *_ = cells
    after_mining = ["lists", "train", "evaluate"]
    assert [*clean.runs] == ["pool", "queries", "mine", "filter", *after_mining]
    assert [*raw.runs] == ["pool", "queries", "mine", *after_mining]
    assert raw.runs["train"].training.seed == 1
    assert raw.runs["train"].data.lists == raw.runs["lists"].out
    assert raw.runs["lists"].rankings == raw.runs["mine"].out


def test_dry_run_lists_runs(tmp_path, capsys):
    file = write_grid(tmp_path, grid(tmp_path))
    files = contents(tmp_path)

    plan = dry_run_ablation(file, [])

    assert plan == {"num_cells": 4, "num_runs_missing": 14}
    pattern = r"raw, seed 2: pool-\w{12} \(to run\) → .* → evaluate-\w{12} \(to run\)"
    assert re.search(pattern, capsys.readouterr().err)
    assert contents(tmp_path) == files


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("claim=another", set()),
        ("steps.filter.workers.num=2", set()),
        ("steps.train.training.save_every=7", set()),
        ("steps.train.training.epochs=2", {"train", "evaluate"}),
        ("steps.lists.quotas={random: 3}", {"lists", "train", "evaluate"}),
    ],
)
def test_changed_settings_make_other_runs(override: str, changed: set[str], tmp_path):
    runs = runs_of(read(tmp_path)[1])

    changed_runs = runs_of(read(tmp_path, override)[1])

    new_folders = changed_runs.keys() - runs.keys()
    assert {changed_runs[folder] for folder in new_folders} == changed


def test_variant_changes_settings_by_key(tmp_path):
    sharper = {"filter.layers.1.above": 0.4, "lists.quotas": {"random": 1}}

    _, cells = read(tmp_path, "seeds=[5]", variants={"clean": None, "sharper": sharper})

    clean, sharper = (cell.runs for cell in cells)
    assert sharper["filter"].layers[1].above == 0.4
    assert sharper["lists"].quotas == {"random": 1}
    assert sharper["lists"].out != clean["lists"].out


UNTRAINED = {"evaluate.systems.0.rankers.0.source": "some/model"}  # does not use the seed


def test_variant_without_seed_has_one_cell(tmp_path):
    _, cells = read(tmp_path, variants={"clean": {}, "untrained": UNTRAINED})

    assert [str(cell) for cell in cells] == ["clean, seed 1", "untrained, seed 1", "clean, seed 2"]


def test_doubled_braces_are_plain(tmp_path):
    source = {"evaluate.systems.0.rankers.0.source": "a/{{seed}}-{seed}"}

    _, cells = read(tmp_path, variants={"clean": {}, "other": source})

    assert cells[1].runs["evaluate"].systems[0].rankers[0].source == "a/{seed}-1"


# Faults -------------------------------------------------------------------------------------------

NO_RECIPE = "must be a recipe with the key stage and without the key out (steps: pool, queries, mi"
FAULTS = [  # setting, part of the error
    ("baseline=cleen", "baseline: no variant 'cleen'; variants: clean, raw"),
    (
        "compare=[Hit@3]",
        "step 'evaluate' of variant 'clean': measures: Hit@3, which `compare` names, is missing",
    ),
    (
        "steps.lists.rankings='{fliter}'",
        "variant 'clean': '{fliter}' is no step (steps: pool, queries, mine, filter",
    ),
    (
        "steps.lists.rankings={filter: }",
        "step 'lists' of variant 'clean': rankings: must be a path, found {'fil",
    ),
    (
        "steps.pool.sources='{train}'",
        "step 'pool' of variant 'clean': depends on itself: a step that it reads needs its folder",
    ),
    (
        "steps.a/b={stage: pool}",
        "steps.a/b: string should match pattern '^[A-Za-z][A-Za-z0-9_-]*$', found 'a/b'",
    ),
    ("steps.spare={sources: x}", f"step 'spare' of variant 'clean': {NO_RECIPE}"),
    ("steps.lists.out=x", f"step 'lists' of variant 'clean': {NO_RECIPE}"),
    ("steps.evaluate.stage=lists", "variant 'clean': has no step of stage evaluate"),
    ("steps.pool.sources=nowhere", "nowhere: no such file or folder"),
    ("variants.raw={'fliter.layers': []}", f"step 'fliter' of variant 'raw': {NO_RECIPE}"),
    ("variants.raw={'filter.layers.2.name': x}", "'2' is no item of a list of 2, counted from 0"),
    (
        "variants.raw={'mine.pool.x': 1}",
        "variant 'raw', mine.pool.x: 'pool' is a value, not a section",
    ),
    (
        "variants.raw={'lists.seeed': 1}",
        "step 'lists' of variant 'raw': unknown key 'seeed', did you mean 'seed'?",
    ),
    (
        "variants.raw={'evaluate.split': train}",
        "step 'evaluate' of variant 'raw': scores other queries or measures than variant 'clean' "
        "(make a step of its own for each set of queries)",
    ),
    (
        "variants.raw={'evaluate.systems': []}",
        "an evaluation of an ablation has one system, found 0",
    ),
    ("chain=chain.yaml", "unknown key 'chain' (removed: "),
]


@pytest.mark.parametrize(("override", "message"), FAULTS)
def test_invalid_grid_is_refused(override, message, tmp_path):
    values = grid(tmp_path)
    key, _, text = override.partition("=")
    # The command line cannot write keys that hold dots.
    if key.startswith(("variants.", "steps.a/b")):
        section, name = key.split(".", 1)
        values[section][name] = yaml.safe_load(text)
    else:
        values = apply_overrides(values, [override])
    file = write_grid(tmp_path, values)
    files = contents(tmp_path)

    with pytest.raises(SkilltrainError) as raised:
        read_grid(file, [])

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert contents(tmp_path) == files


# A chain that grids share -------------------------------------------------------------------------


def with_chain(folder: Path, **steps: Any) -> Path:
    """Write the grid with its steps in a chain beside it; `steps` change the chain's."""
    values = grid(folder)
    chain = {"steps": values.pop("steps") | {"spare": {"stage": "pool"}}}
    (folder / "chain.yaml").write_text(yaml.safe_dump(chain, sort_keys=False))
    return write_grid(folder, values | {"based_on": "chain.yaml", "steps": steps})


def test_steps_change_chain(tmp_path):
    file = with_chain(tmp_path, train={"training": {"batch_size": 4}})

    _, cells = read_grid(file, ["steps.lists.quotas={random: 3}"])

    train = cells[0].runs["train"]
    assert train.training.batch_size == 4
    assert train.training.seed == 1
    assert train.model.source == "some/model"
    assert cells[0].runs["lists"].quotas == {"random": 3}  # an override is the whole value


def test_chain_gives_same_runs(tmp_path):
    _, cells = read(tmp_path)

    _, chain_cells = read_grid(with_chain(tmp_path), [])

    assert runs_of(chain_cells) == runs_of(cells)


def test_shipped_grids_can_be_planned(monkeypatch):
    monkeypatch.chdir(ROOT)
    encoders: dict[str, set[Path]] = {}

    for file in GRIDS:
        config, cells = read_grid(file, [])

        assert config.runs == Path("runs/ablations/steps")
        assert config.out == Path("runs/ablations") / file.stem
        assert {cell.variant for cell in cells} == {*config.variants}
        encoders[file.stem] = {cell.runs["encoder"].out for cell in cells if "encoder" in cell.runs}

    # Grids share the training runs of encoders.
    assert encoders["filter"] & encoders["random_negatives"] & encoders["inputs"]
    for name in ("epochs", "learning_rate", "num_negatives", "temperature"):
        assert len(encoders[name] & encoders["inputs"]) == 3  # the baseline with each seed
    assert encoders["candidates_k"] == encoders["listwise_pointwise"] <= encoders["filter"]


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_benchmark_grids_can_be_planned(file: Path, tmp_path, monkeypatch):
    for name in ("pool", "queries", "mined", "tasks", "without"):
        (tmp_path / "runs" / "claims" / name).mkdir(parents=True)
        (tmp_path / "runs" / "r3_ablation" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    config, cells = read_grid(file, ["seeds=[1]"])

    assert [cell.variant for cell in cells] == [*config.variants]


# Tables of scores that are written in place of evaluations ----------------------------------------

VARIANTS = {"clean": {}, "raw *new*": {"lists.rankings": "{mine}"}}
QUERIES = "abcdefgh"


def write_values(
    cells: list[Cell], hits: Mapping[tuple[str, int], str], name: str = "evaluate"
) -> None:
    """Write scores of each query by variant and seed.

    A string has Hit@1 as a digit for each query. MRR@10 is half of it, and the last query has none.
    """
    for cell in cells:
        values = hits.get((cell.variant, cell.seed))
        if values is None:
            continue
        rows: list[dict[str, Any]] = []
        for query_id, value in zip(QUERIES, values, strict=True):
            row: dict[str, Any] = {"query_id": query_id, "Hit@1": int(value)}
            rows.append(row if query_id == QUERIES[-1] else row | {"MRR@10": int(value) / 2})
        folder = cell.evaluations[name]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "per_query.jsonl").write_text(jsonl(*rows))


RAW = "raw *new*"
ALL_RIGHT = dict.fromkeys([(RAW, 1), (RAW, 2)], "11111111")


def two_seeds(folder: Path, **changes: Any) -> Grid:
    """Read a grid in which the baseline scores 2 and 4 of 8, and the other variant all."""
    config, cells = read(folder, variants=VARIANTS, **changes)
    write_values(cells, {("clean", 1): "11000000", ("clean", 2): "11110000"} | ALL_RIGHT)
    return config, cells


def test_queries_are_averaged_over_seeds(tmp_path):
    (table,) = make_results(*two_seeds(tmp_path), {})["tables"]

    assert table["evaluation"] == "evaluate"
    assert table["num_queries"] == 8
    clean = table["variants"][0]
    assert clean["num_runs"] == 2
    hit = clean["metrics"]["Hit@1"]
    assert (hit.mean, hit.n) == (3 / 8, 8)
    mrr = clean["metrics"]["MRR@10"]
    assert (mrr.mean, mrr.n) == (pytest.approx(3 / 7 / 2), 7)


def test_seeds_have_standard_deviation(tmp_path):
    results = make_results(*two_seeds(tmp_path), {})

    clean, raw = results["tables"][0]["variants"]

    assert clean["seed_sd"]["Hit@1"] == pytest.approx(0.25 / sqrt(2))  # of 2/8 and 4/8
    assert raw["seed_sd"]["Hit@1"] == 0


def test_variants_are_compared_with_baseline(tmp_path):
    results = make_results(*two_seeds(tmp_path), {})

    hit, mrr = results["tables"][0]["differences"]

    assert (hit.system, hit.baseline, hit.measure) == (RAW, "clean", "Hit@1")
    assert (hit.difference.mean, hit.difference.n) == (5 / 8, 8)
    assert (hit.num_better, hit.num_worse, hit.p) == (6, 0, pytest.approx(2 / 2**6))
    assert (mrr.difference.mean, mrr.difference.n) == (pytest.approx((1 - 3 / 7) / 2), 7)


def test_variant_without_seed_has_no_deviation(tmp_path):
    config, cells = read(tmp_path, variants={"clean": {}, "untrained": UNTRAINED})
    hits = {("clean", 1): "11000000", ("clean", 2): "11110000", ("untrained", 1): "11100000"}
    write_values(cells, hits)

    (table,) = make_results(config, cells, {})["tables"]

    assert [row["num_runs"] for row in table["variants"]] == [2, 1]
    assert "seed_sd" not in table["variants"][1]
    assert table["differences"][0].difference.mean == 0


def test_holm_corrects_over_all_tables(tmp_path):
    steps = grid(tmp_path)["steps"]
    steps["tasks"] = steps["evaluate"] | {"split": "train"}
    config, cells = two_seeds(tmp_path, steps=steps)
    hits = {("clean", 1): "10101010", ("clean", 2): "01010101"}
    write_values(cells, hits | dict.fromkeys(ALL_RIGHT, "11110000"), "tasks")

    first, second = make_results(config, cells, {})["tables"]

    assert (first["evaluation"], second["evaluation"]) == ("evaluate", "tasks")
    comparisons = [*first["differences"], *second["differences"]]
    assert len(comparisons) == 4
    assert [row.p_holm for row in comparisons] == holm([row.p for row in comparisons])


def test_failed_cell_is_excluded(tmp_path):
    config, cells = two_seeds(tmp_path)
    error = "step train: out of memory"

    results = make_results(config, cells, {f"{RAW}, seed 2": error})

    assert results["tables"][0]["variants"][1]["num_runs"] == 1
    assert [cell["error"] for cell in results["cells"]] == [None, None, None, error]


def test_failed_baseline_is_not_compared(tmp_path):
    config, cells = two_seeds(tmp_path)
    errors = {str(cell): "broken" for cell in cells if cell.variant == "clean"}

    results = make_results(config, cells, errors)

    (table,) = results["tables"]
    assert [row["variant"] for row in table["variants"]] == [RAW]
    assert not table["differences"]
    assert "broken" in markdown("ablation", **results)


def test_failed_variants_have_no_table(tmp_path):
    config, cells = two_seeds(tmp_path)

    results = make_results(config, cells, {str(cell): "broken" for cell in cells})

    assert results["tables"] == []
    assert "broken" in markdown("ablation", **results)


def test_markdown_names_variants_with_verdicts(tmp_path):
    config, cells = two_seeds(tmp_path, compare=["Hit@1"])

    text = markdown("ablation", **make_results(config, cells, {"clean, seed 2": "no memory"}))

    assert "Claim: Filtering helps." in text
    assert "(n = 8)" in text
    assert "| raw \\*new\\* | 2 | 1.000 [1.00, 1.00] ± .000 |" in text
    assert "| raw \\*new\\* | Hit@1 | +.750 [" in text
    assert text.count("▲ above") == 1
    assert "correction for the 1 comparison of this file" in text
    for cell in cells:
        assert str(cell.evaluations["evaluate"] / "recipe.yaml").replace("_", "\\_") in text


def test_page_escapes_texts(tmp_path):
    config, cells = two_seeds(tmp_path, compare=["Hit@1"])

    page = results_page(make_results(config, cells, {"clean, seed 2": "<b>no memory</b>"}))

    assert page.count('<td class="word above">above</td>') == 1
    assert "<b>1.000</b><small>[1.00, 1.00] ± .000</small>" in page
    assert "&lt;b&gt;no memory" in page
    assert "src=" not in page


# As it runs ---------------------------------------------------------------------------------------


def lexical_grid(folder: Path, library: Path) -> dict[str, Any]:
    """Return a grid of BM25 with and without the body, which needs no model."""
    values = grid(folder, library)
    bm25 = {"name": "bm25", "rankers": [{"kind": "lexical", "fields": "full"}]}
    steps = {name: values["steps"][name] for name in ("pool", "queries", "evaluate")}
    steps["evaluate"] |= {"systems": [bm25], "split": None}
    nd = {"evaluate.systems.0.rankers.0.fields": "nd"}
    return values | {
        "steps": steps,
        "variants": {"full": {}, "nd": nd},
        "baseline": "full",
        "seeds": [1],
    }


def trained_grid(folder: Path, library: Path, model: Path, **changes: Any) -> Path:
    """Write the grid with a tiny encoder, which trains for three steps."""
    values = grid(folder, library) | changes
    steps = values["steps"]
    for step in ("mine", "filter"):
        steps[step]["encoder"]["source"] = str(model)
    steps["mine"]["depth"] = 8
    steps["lists"]["quotas"] = {"semantic": 3, "random": 0}
    steps["train"]["model"] = {"source": str(model), "max_tokens": 48, "query_max_tokens": 48}
    steps["train"]["training"] |= {
        "batch_size": 4,
        "accumulation": 1,
        "learning_rate": 1e-3,
        "token_budget": 512,
    }
    return write_grid(folder, values)


def folders_of(out: Path) -> Counter[str]:
    """Count the folders of each step of an ablation."""
    return Counter(path.name.rpartition("-")[0] for path in (out / "steps").iterdir())


class Done(NamedTuple):
    """A grid that has run: its file, its folder and the answer of the command."""

    file: Path
    out: Path
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def done(library, tmp_path_factory, model_folders):
    folder = tmp_path_factory.mktemp("ablation")
    file = trained_grid(folder, library, model_folders["bert"])
    return Done(file, folder / "out", run_ablation(file, []))


def test_shared_steps_run_once(done):
    shared = dict.fromkeys(("pool", "queries", "mine", "filter"), 1)

    assert folders_of(done.out) == {**shared, "lists": 2, "train": 4, "evaluate": 4}
    assert done.answer["num_cells"] == 4
    assert dry_run_ablation(done.file, [])["num_runs_missing"] == 0


def test_checkpoints_are_removed(done):
    assert not list(done.out.glob("steps/train-*/checkpoints"))


def test_results_are_written(done):
    results = read_json(done.out / "ablation.json")

    (table,) = results["tables"]
    assert [row["variant"] for row in table["variants"]] == ["clean", "raw"]
    assert [(row["measure"], row["reading"]) for row in table["differences"]] == [
        ("Hit@1", "not told apart"),
        ("MRR@10", "not told apart"),
    ]
    for cell in results["cells"]:
        assert cell["error"] is None
        assert list(cell["recipes"])[-1] == "evaluate"
        assert all(Path(recipe).is_file() for recipe in cell["recipes"].values())


def test_reports_are_written(done):
    assert "## evaluate" in (done.out / "ablation.md").read_text()
    assert "<h2>evaluate</h2>" in (done.out / "ablation.html").read_text()


@pytest.fixture
def recipes(done):
    """The recipe of each step of the last cell."""
    files = read_json(done.out / "ablation.json")["cells"][-1]["recipes"]
    return {step: Path(file) for step, file in files.items()}


def test_recipe_reproduces_training(recipes, tmp_path):
    recipe = recipes["train"]
    assert "already holds this run" in succeeds("train", recipe).err

    succeeds("train", recipe, f"out={tmp_path}/train")

    weights = load_file(tmp_path / "train" / "model.safetensors")
    expected = load_file(recipe.parent / "model.safetensors")
    assert all(weights[name].equal(expected[name]) for name in expected)


def test_recipe_reproduces_evaluation(recipes, tmp_path):
    recipe = recipes["evaluate"]

    succeeds("evaluate", recipe, f"out={tmp_path}/evaluate")

    scores = (tmp_path / "evaluate" / "per_query.jsonl").read_bytes()
    assert scores == (recipe.parent / "per_query.jsonl").read_bytes()


def test_lost_runs_are_repeated(done):
    table = (done.out / "ablation.json").read_bytes()
    _, (clean, raw, *_) = read_grid(done.file, [])
    files = {path: contents(path) for path in (done.out / "steps").iterdir()}
    deleted = [clean.runs["lists"].out, clean.runs["evaluate"].out, raw.runs["evaluate"].out]
    for folder in deleted:
        shutil.rmtree(folder)
    # As kill -9 leaves a training run.
    killed = raw.runs["train"].out
    record = read_json(killed / "run.json")
    write_json(killed / "run.json", record | {"finished": False})
    (killed / "model.safetensors").unlink()
    assert dry_run_ablation(done.file, [])["num_runs_missing"] == 4

    answer = run_ablation(done.file, [])

    assert answer == done.answer
    assert (done.out / "ablation.json").read_bytes() == table
    for path in files.keys() - {killed, *deleted}:
        assert contents(path) == files[path]


def test_interrupted_training_continues(done, tmp_path, library, model_folders):
    model = model_folders["bert"]
    base = {"evaluate.systems.0.rankers.0.source": str(model)}
    file = trained_grid(tmp_path, library, model, variants={"clean": {}, "base": base}, seeds=[1])
    training = "steps.train.training"  # 12 steps, a checkpoint after each
    settings = [f"runs={done.out}/steps", f"{training}.epochs=4", f"{training}.save_every=1"]
    finished = {*done.out.glob("steps/train-*")}

    def interrupt() -> None:
        while not list(done.out.glob("steps/train-*/checkpoints/step-2")):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    with raises("interrupted"):
        run_ablation(file, settings)
    watcher.join()
    (folder,) = {*done.out.glob("steps/train-*")} - finished
    assert not read_json(folder / "run.json")["finished"]
    assert not (tmp_path / "out" / "ablation.json").exists()

    run_ablation(file, settings)

    assert read_json(folder / "run.json")["finished"]
    lines = (folder / "train_log.jsonl").read_text().splitlines()
    # No step is lost or repeated.
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert folders_of(done.out)["train"] == len(finished) + 1


def test_failed_cell_does_not_stop_others(tmp_path, library):
    values = lexical_grid(tmp_path, library)
    ranker = {"kind": "dense", "source": str(tmp_path / "no_model")}
    missing = {"evaluate.systems.0.rankers.0": ranker}
    variants = {"full": {}, "gone": missing, "nd": values["variants"]["nd"]}
    file = write_grid(tmp_path, values | {"variants": variants})

    for _ in range(2):  # the same command tries it again
        with pytest.raises(SkilltrainError) as raised:
            run_ablation(file, [])

        message = str(raised.value)
        assert f"{file}: 1 of 3 cells failed, first gone, seed 1: step evaluate: " in message
        assert "no_model" in message
        assert "\n" not in message
        results = read_json(tmp_path / "out" / "ablation.json")
        assert [row["variant"] for row in results["tables"][0]["variants"]] == ["full", "nd"]
        assert "no_model" in results["cells"][1]["error"]
        assert results["cells"][0]["error"] is None

    assert folders_of(tmp_path / "out") == {"pool": 1, "queries": 1, "evaluate": 2}


def test_internal_error_shows_traceback(tmp_path, library, monkeypatch, capsys):
    tried = []

    def broken(config: Any, resume: bool) -> None:
        tried.append(config.out)
        raise ValueError("no such axis\nsecond line")

    monkeypatch.setattr(ablate, "run_stage", broken)
    message = r"2 of 2 cells failed.*step pool: ValueError: no such axis \(the same"

    with pytest.raises(SkilltrainError, match=message):
        run_ablation(write_grid(tmp_path, lexical_grid(tmp_path, library)), [])

    errors = capsys.readouterr().err
    assert "second line" in errors
    assert "Traceback" in errors
    assert len(tried) == 1, "a run that failed for a cell is not tried for the next"


def test_ranks_are_refused(tmp_path, library, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with raises("one-process"):
        run_ablation(write_grid(tmp_path, lexical_grid(tmp_path, library)), [])
    assert not (tmp_path / "out").exists()
