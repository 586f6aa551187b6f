"""The command line as a person meets it: faults, signals, help and whole training runs.

A fault ends with exit code 2 and one line on stderr, which begins with `error: ` and says where."""

import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from benchmark_folders import jsonl
from processes import run_apart
from skilltrain import __version__
from skilltrain.cli import main
from skilltrain.config import load_recipe
from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.files import locked
from skilltrain.stage import STAGES, command_of, load_stage
from skilltrain.tables import SKILLS, read_table
from skilltrain.terminal import console
from skilltrain.training.log import TrainingLog
from small_library import contents, encoder_recipe, skilltrain, succeeds, write_recipe
from tiny_models import WORDS

ROOT = Path(__file__).parents[1]

DATA = "data: {pool: {runs}/pool, lists: {runs}/encoder_lists}\n"
BASE = f"stage: train_encoder\nmodel: {{source: {{bert}}}}\n{DATA}"
EVALUATE = "stage: evaluate\nsystems: [{name: a, rankers: [{kind: lexical}]}]\n"
RECIPES = {
    "good": BASE + "out: {tmp}/out\n",
    "reranker": BASE.replace("encoder", "reranker") + "out: {tmp}/out\n",
    "stage": "stage: trian_encoder\nout: {tmp}/out\n",
    "no_stage": "out: {tmp}/out\n",
    "no_out": BASE,
    "systems": EVALUATE + "out: {tmp}/out\n",
}


def write_faulty_models(folder: Path, model_folders) -> None:
    """Write a model whose vectors are no numbers, and one whose tokenizer knows only bytes."""
    shutil.copytree(model_folders["bert"], folder / "poisoned")
    weights = load_file(folder / "poisoned" / "model.safetensors")
    weights["embeddings.LayerNorm.weight"][0] = float("nan")
    save_file(weights, folder / "poisoned" / "model.safetensors", metadata={"format": "pt"})

    shutil.copytree(model_folders["qwen3_reranker"], folder / "without_yes")
    tokenizer = json.loads((folder / "without_yes" / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (folder / "without_yes" / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def paths(runs, tmp_path_factory, model_folders):
    """Path by the name that commands write in braces; `tmp` is a folder full of bad input."""
    tmp = tmp_path_factory.mktemp("bad")
    path_by_name = {"tmp": tmp, "runs": runs, **model_folders}
    for name, text in RECIPES.items():
        write = write_recipe if name == "good" else Path.write_text
        write(tmp / f"{name}.yaml", fill(text, path_by_name))
    for folder in ("empty", ".kept.partial", "foreign", "foreign_run", "unfinished/checkpoints"):
        (tmp / folder).mkdir(parents=True)
    (tmp / "empty.json").write_text("{}")
    (tmp / "file").write_text("a file")
    (tmp / "foreign" / "letters.txt").write_text("dear")
    (tmp / "foreign_run" / "run.json").write_text("[1, 2]")
    rows = [
        {"query": name, "skill_ids": [f"data/{name}"], "split": "train"}
        for name in ("csv-repair", "nothing")
    ]
    (tmp / "queries.jsonl").write_text(jsonl(*rows))
    write_faulty_models(tmp, model_folders)
    return path_by_name


def fill(text: str, paths) -> str:
    for name, path in paths.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


def arguments(command: str, paths) -> list[str]:
    return shlex.split(fill(command, paths))


TRAIN = "train {tmp}/good.yaml "
# Only what a command adds; each module has tests for its own input.
SYNTHESIZE = "synthesize pool={runs}/pool llm.kind=openai out={tmp}/out llm.base_url="
INVALID_URL = "llm.base_url: give a URL such as http://localhost:8000/v1"
FAULTS = [  # command, part of the error
    # Inputs that are not what they should be.
    ("pool sources={tmp}/empty out={tmp}/out", "{tmp}/empty: holds no SKILL.md"),
    (
        "queries files={tmp}/queries.jsonl pool={tmp}/nowhere out={tmp}/out",
        "{tmp}/nowhere: no such file or folder (made by `skilltrain pool`, ",
    ),
    (TRAIN + "dev.benchmark=nowhere", "nowhere: no such file or folder (it is the setting dev.be"),
    (
        "queries files={tmp}/queries.jsonl pool={runs}/pool out={tmp}/out",
        "{tmp}/queries.jsonl, line 2: query 'queries-",
    ),
    (
        "pool sources={tmp}/.kept.partial out={tmp}/kept",
        "{tmp}/.kept.partial: lies where the stage writes before it names the folder kept",
    ),
    # Models.
    (TRAIN + "model.source=nowhere", "nowhere: no such model"),
    (TRAIN + "model.source={tmp}/empty", "{tmp}/empty: is no model folder: it has no config.json"),
    (TRAIN + "model.source={tmp}/unfinished", "continue it with --resume"),
    (
        "train {tmp}/reranker.yaml model.source={runs}/encoder",
        "{runs}/encoder: its model is of kind encoder, but reranker is needed here",
    ),
    (
        TRAIN + "model.source={tmp}/poisoned",
        "the loss is not a finite number in a step with queries q",
    ),
    (
        "train {tmp}/reranker.yaml model.source={tmp}/without_yes model.template.form=yes_no",
        "has no single tokens 'yes' and 'no'",
    ),
    (TRAIN + "adapter.targets=[]", "adapter.targets: must"),
    (
        TRAIN + "training.optimizer='{name: adamw, betas: [0.9]}'",
        "missing key 'training.optimizer.betas.1'",
    ),
    (
        "train {tmp}/reranker.yaml model.template.form=cosine_pair",
        "(removed: use form pair, with a loss of temperature 1)",
    ),
    (
        TRAIN + "'loss={name: infonce, lexical_weight: 1}'",
        "unknown key 'loss.lexical_weight' (removed: fuse the trained encoder with BM25)",
    ),
    (
        TRAIN + "loss.name=lambda_rank",
        "loss.name: unknown choice 'lambda_rank' (removed: use ranknet)",
    ),
    (
        TRAIN + "loss.name=acme.losses.Hinge",
        "sum (an import path has a colon: package.module:Class)",
    ),
    (TRAIN + "loss.name=margin", "loss.name: unknown choice 'margin' (removed: use ranknet)"),
    (
        TRAIN + "data.clusters={tmp}",
        "unknown key 'data.clusters' (removed: training finds near-dup",
    ),
    (
        TRAIN + "'loss={name: matryoshka, dims: [16, 64]}'",
        "loss.dims: 64 is more than the encoder's 32",
    ),
    (
        "train {tmp}/reranker.yaml training.varlen=true",
        "varlen is for encoders; a causal reranker never pads",
    ),
    (
        "train {tmp}/reranker.yaml training.two_pass=true",
        "two_pass is for encoders; the lists of a reranker do not share a loss",
    ),
    # The output folder.
    (TRAIN + "out={tmp}/foreign", "{tmp}/foreign: the output folder is not empty and holds no run"),
    (
        "pool sources={runs}/pool out={tmp}/foreign_run",
        "{tmp}/foreign_run: the output folder is not empty and holds no",
    ),
    (TRAIN + "out={tmp}/file", "{tmp}/file: is a file; the output is a folder"),
    ("pool sources={runs}/pool out={tmp}/file/below", "{tmp}/file/"),
    (TRAIN + "--resume", "{tmp}/out: holds no run to resume (leave --resume out)"),
    # Recipes.
    (
        "train {tmp}/stage.yaml",
        "{tmp}/stage.yaml: stage: unknown stage 'trian_encoder'; allowed: pool,",
    ),
    ("train {tmp}/no_stage.yaml", "{tmp}/no_stage.yaml: missing key 'stage'; allowed: pool,"),
    ("train {tmp}/no_out.yaml", "{tmp}/no_out.yaml: missing key 'out'"),
    ("mine {tmp}/good.yaml", "{tmp}/good.yaml: is a recipe of stage train_encoder, not mine"),
    (
        "train {runs}/pool/recipe.yaml",
        "{runs}/pool/recipe.yaml: is a recipe of stage pool (run: skilltrain pool",
    ),
    (
        "pool {runs}/pool/recipe.yaml {tmp}/good.yaml",
        "more than one recipe: {runs}/pool/recipe.yaml {tmp}/good.yaml",
    ),
    ("pool out={tmp}/out", "skilltrain pool: missing key 'sources'"),
    (
        "pool {runs}",
        "{runs}: is a folder, not a recipe (settings have the form key=value, such as:",
    ),
    ("pool sources={runs}/pool out={runs}/pool/below", "below: is inside {runs}/pool, from which"),
    (
        TRAIN + "training.seed=1180591620717411303424",
        "training.seed: must be less than 2147483648, found 11805916207174",
    ),
    (SYNTHESIZE + "http://127.0.0.1:abc/v1", INVALID_URL),
    (SYNTHESIZE + "http://127.0.0.1:99999/v1", INVALID_URL),
    (SYNTHESIZE + "http://[::1/v1", INVALID_URL),
    # Evaluation and routing.
    (
        "evaluate {tmp}/systems.yaml --encoder {bert}",
        "{tmp}/systems.yaml: the recipe lists systems already",
    ),
    (
        "evaluate --benchmark {runs}/queries --predictions {tmp}/empty.json --json "
        "{tmp}/empty.json",
        "{tmp}/empty.json: --json would overwrite the predictions",
    ),
    ("route words --pool {tmp}/nowhere", "{tmp}/nowhere: no such file or folder"),
    ("route words --pool {runs}/pool --top 0", "Invalid value for '--top': "),
    ("route words", "skilltrain route: give either --router or --pool"),
    ("pool sources=hf: out={tmp}/out", "sources: write a path, or hf:NAME without a space"),
    # The command itself.
    ("rout words", "No such command 'rout'"),
    ("train", "Missing argument 'file'"),
    ("export {runs}/encoder", "Missing option '--out' (see skilltrain export --help)"),
    ("recipes copy", "Missing argument 'name' (see skilltrain recipes copy --help)"),
    ("export {runs}/encoder --checkpoint step-4711 --out {tmp}/out", "step-4711"),
    (
        "recipes list --dir {tmp}/nowhere",
        "{tmp}/nowhere: no such folder (see the recipes that ship",
    ),
    ("recipes --schema", "No such option: --schema (removed: run skilltrain recipes schema STAGE)"),
    ("recipes copy ../src/x", "../src/x: no such recipe ships; see: skilltrain recipes list"),
    ("recipes copy sr_emb_06b", "no such recipe ships, did you mean 'sr_emb_0.6b"),
    ("train sr_emb_0.6b", "to copy a recipe that ships: skilltrain recipes copy NAME"),
    ("recipes schema trian", "skilltrain recipes: unknown stage 'trian'; allowed: pool, "),
    (
        TRAIN + "--resum",
        "--resum is no option of this command, or has no value (a setting is written "
        "resum=VALUE; see",
    ),
    ("ablate grid.yaml more.yaml", "more.yaml: is no setting (settings have the form key=value;"),
    ("push {runs} --repo me/x --license mit --dry-run", "{runs}: holds no model to push"),
    ("show {runs}", "{runs}: is a folder, not a .parquet file (its tables: none)"),
]


@pytest.mark.parametrize(("command", "message"), FAULTS)
def test_fault_is_one_line(command, message, paths, runs, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = contents(paths["tmp"], runs)

    outcome = skilltrain(*arguments(command, paths))

    assert fill(message, paths) in outcome.error_line
    assert contents(paths["tmp"], runs) == files
    # These two say what they read before they meet a fault.
    if not command.startswith(("train", "evaluate")):
        assert outcome.only_line


def test_missing_extra_says_how_to_install_it(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "skilltrain.serving.servers", None)

    outcome = skilltrain("serve", paths["tmp"])

    assert "pip install -e '.[serve]' -c constraints.txt" in outcome.error_line


def test_debug_shows_traceback(paths):
    with pytest.raises(Exception, match="no such model") as raised:
        skilltrain(*arguments(TRAIN + "model.source=nowhere --debug", paths))

    assert raised.traceback[-1].name == "resolve_model"


def test_missing_home_says_what_to_set(runs, model_folders, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)  # as without HOME and an entry of the user

    outcome = skilltrain(
        "route", "words", "--pool", runs / "pool", "--encoder", model_folders["bert"]
    )

    line = "error: there is no home folder, which ~ stands for (set HOME)"
    assert outcome.only_line == line


STOPPED = StoppedError("interrupted", "interrupted after step 3", number=signal.SIGTERM)


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted; what was finished is kept"),
        (STOPPED, 143, "interrupted after step 3 [interrupted]"),
    ],
)
def test_signal_has_exit_code_of_its_own(runs, tmp_path, monkeypatch, raised, code, line):
    def interrupted(config, out):
        (out / "half").write_text("")
        raise raised

    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", interrupted)

    outcome = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path}/out")

    assert outcome.code == code
    assert outcome.err == f"error: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_no_temporary_files(runs, tmp_path, monkeypatch):
    def terminated(config, out):
        (out / "half").write_text("")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", terminated)

    outcome = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path}/out")

    assert outcome.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
        (ImportError("libx.so: failed to map segment"), "memory ran out"),
        (EOFError("No data left in file"), "EOFError: No data left in file"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "x"), "name is not valid UTF-8 (rename"),
        (RuntimeError("Symlink loop from 'a'"), "Symlink loop from 'a' (use a folder that is"),
        (OSError(36, "File name too long", "x" * 999), f"{'x' * 300}: File name too long"),
    ],
)
def test_fault_of_library_is_one_line(runs, tmp_path, monkeypatch, raised, line):
    def fail(config, out):
        raise raised

    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", fail)

    outcome = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path}/out")

    assert outcome.code == 2
    assert line in outcome.error_line


def test_model_without_memory_is_not_called_damaged(runs, tmp_path, monkeypatch):
    def fail(config, out):
        cause = OSError("unable to mmap 90868376 bytes: Cannot allocate memory (12)")
        raise SkilltrainError("unreadable-model", "cannot load the weights") from cause

    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", fail)

    outcome = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path}/out")

    assert outcome.code == 2
    assert outcome.error_line.startswith("error: memory ran out")


@pytest.fixture
def route_on_latin_1(tmp_path):
    """Return a function that routes over one skill and prints to a terminal without its letters."""
    (tmp_path / "SKILL.md").write_text(
        "---\nname: größe-“x”\ndescription: 日本\n---\nMerges PDF files 😀.\n"
    )

    def route(option):
        stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(io.StringIO()):
            main(["route", "merge pdf", "--pool", str(tmp_path), option])
            stream.flush()
        return stream.detach().getvalue().decode("latin-1")

    return route


def test_terminal_gets_missing_letters_escaped(route_on_latin_1):
    assert "\\u65e5\\u672c" in route_on_latin_1("--top=1")


def test_json_keeps_missing_letters(route_on_latin_1):
    skill = json.loads(route_on_latin_1("--json"))["skills"][0]

    assert skill["name"] == "größe-“x”"


def test_control_characters_of_recipe_are_named(tmp_path):
    evil = "\x9b31m\u202eevil" + "x" * 5000
    (tmp_path / "r.yaml").write_text(f"stage: {json.dumps(evil)}\nout: a\n")

    line = skilltrain("pool", tmp_path / "r.yaml").only_line

    assert "is a recipe of stage [U+009B]31m[U+202E]evilx" in line
    assert len(line) < 2100
    assert line.endswith("…")


def test_control_characters_of_row_are_named(tmp_path, runs):
    row = {"query_id": "a", "query": "merge", "skill_ids": ["\u202edata/none"], "split": "train"}
    (tmp_path / "q.jsonl").write_text(jsonl(row))

    outcome = skilltrain(
        "queries", f"files={tmp_path}/q.jsonl", f"pool={runs}/pool", f"out={tmp_path}/q"
    )

    assert "'[U+202E]data/none'" in outcome.only_line


def test_control_characters_in_json_are_escaped(tmp_path):
    folder = tmp_path / "\u202elib"
    folder.mkdir()
    (folder / "SKILL.md").write_text("Merges PDF files.")

    output = succeeds("pool", f"sources={folder}", f"out={tmp_path}/pool", "--json").out

    assert "\\u202elib" in output
    assert "\u202e" not in output
    assert str(folder) in json.loads(output)["num_found"]


def test_options_of_recipe_are_settings(runs, tmp_path):
    command = ("train", runs / "recipes" / "encoder.yaml", f"--out={tmp_path}/out")

    outcome = succeeds(*command, "--training.epochs", "1", "--dry-run")

    assert json.loads(outcome.out)["dry_run"]["num_steps"] == 3


def test_options_of_stage_are_settings(runs, tmp_path):
    inputs = ("--pool", runs / "pool", "--queries", runs / "queries")
    rankings = ("--rankings", runs / "candidates_filtered")
    options = ("--list-size", 4, "--out", tmp_path / "lists", "--json")

    outcome = succeeds("lists", *inputs, *rankings, *options)

    assert json.loads(outcome.out)["list_length"]["max"] == 4


def test_path_of_recipe_may_hold_equals_sign(runs, tmp_path):
    file = tmp_path / "seed=7" / "pool.yaml"
    file.parent.mkdir()
    file.write_text(f"stage: pool\nsources: {runs}/pool\nout: {tmp_path}/pool\n")

    assert "num_skills" in json.loads(succeeds("pool", file, "--json").out)


def test_help_lists_every_command():
    text = succeeds("--help").out

    commands = [command_of(name).split()[0] for name in STAGES]
    assert [command for command in commands if f" {command} " not in text] == []


@pytest.mark.parametrize("name", STAGES)
def test_help_of_stage_lists_settings(name):
    command = command_of(name)
    settings = load_stage(name).model_fields.keys() - {"stage"}

    text = succeeds(*command.split(), "--help").out

    assert text.startswith(f"Example:\n  skilltrain {command} ")
    assert [key for key in settings if f"  {key}: " not in text] == []


def test_help_omits_settings_of_sections():
    assert "llm.model" not in succeeds("synthesize", "--help").out


def test_help_all_lists_settings_of_each_choice():
    text = succeeds("synthesize", "--help-all").out

    assert "  llm with kind=openai:\n  llm.model: " in text
    assert "  llm.budget.max_dollars: " in text
    assert "  llm.temperature: null: the server's own (default 1.0)" in text


def test_help_of_train_has_settings_of_both_stages():
    text = succeeds("train", "--help").out

    assert text.startswith("Example:\n  skilltrain train recipes/tiny/sr_emb_minilm.yaml ")
    assert "Settings of train_encoder (" in text
    assert "Settings of train_reranker (" in text


def test_help_all_of_train_lists_sections():
    text = succeeds("train", "--help-all").out

    assert text.startswith("Settings of train_encoder (")
    assert "\nSettings of train_reranker (" in text
    assert text.count("  training.optimizer with name=adafactor:\n") == 2


def test_help_all_shows_defaults():
    text = succeeds("evaluate", "--help-all").out

    separator = "  systems[].rankers[].template.skill.separator: text between the fields"
    assert f'{separator} (default " | ")' in text
    assert "  systems[].rankers[].template.skill.…: as systems[].rankers[].template.skill.…" in text
    assert "Undefined" not in succeeds("pool", "--help-all").out


def test_help_of_evaluate_shows_form_of_predictions():
    text = succeeds("evaluate", "--help").out.replace("│", "")

    assert "{query_id: [skill_id, …]}" in " ".join(text.split())


def test_command_without_arguments_shows_help():
    assert "evaluate" in succeeds().out


def test_version_is_printed():
    assert succeeds("--version").out.strip() == __version__


def test_recipes_lists_recipes(tmp_path):
    files = {
        "below/encoder": "# An encoder.\nstage: train_encoder\nmodel: {source: owner/name}\n"
        "data: {pool: a, lists: b}\nout: c\n",
        "pool": "stage: pool\nsources: a\nout: b\n",
        "launch": "num_processes: 2\n",
        "list": "- stage: pool\n",
        "odd": "stage: [pool]\n",
    }
    (tmp_path / "below").mkdir()
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)

    lines = succeeds("recipes", "list", "--dir", tmp_path).out.splitlines()

    assert [line.rstrip() for line in lines] == [
        "pool  pool",
        "",
        "below/encoder  train_encoder  owner/name  infonce",
        "    An encoder.",
    ]


def test_listed_recipes_cannot_control_terminal(tmp_path):
    text = "# \u202ea\nstage: pool\nsources: a\nout: b\n"
    (tmp_path / "\x1b[2J.yaml").write_text(text)

    out = succeeds("recipes", "list", "--dir", tmp_path).out

    assert out == "[U+001B][2J  pool\n    [U+202E]a\n"


def test_shipped_recipes_are_listed_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    lines = succeeds("recipes").out.splitlines()

    assert "sr_emb_0.6b  train_encoder  Qwen/Qwen3-Embedding-0.6B  infonce" in lines


def test_copied_recipe_brings_its_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    outcome = succeeds("recipes", "copy", "paper/sr_emb_8b")

    recipe = load_recipe(Path("recipes/paper/sr_emb_8b.yaml"))
    assert recipe == load_recipe(ROOT / "recipes" / "paper" / "sr_emb_8b.yaml")
    assert outcome.out.splitlines() == [
        "recipes/paper/sr_emb_8b.yaml",
        "recipes/sr_emb_8b.yaml",
        "names files of the repository, not in this folder: data_pipelines/skillrouter.py",
        "next: skilltrain train recipes/paper/sr_emb_8b.yaml --dry-run",
    ]


def test_copied_grid_brings_its_chain(tmp_path):
    outcome = succeeds("recipes", "copy", "ablations/filter", tmp_path)

    assert (tmp_path / "ablations" / "chain.yaml").is_file()
    assert f"skilltrain ablate {tmp_path}/ablations/filter.yaml" in outcome.out


@pytest.mark.parametrize("content", [b"stage: train_encoder\n", b"\xff\x00"])
def test_copied_recipe_replaces_no_other_file(tmp_path, content):
    changed = tmp_path / "sr_emb_8b.yaml"
    changed.write_bytes(content)
    files = contents(tmp_path)

    outcome = skilltrain("recipes", "copy", "paper/sr_emb_8b", tmp_path)

    assert f"{changed}: is another file (name another folder" in outcome.error_line
    assert contents(tmp_path) == files


def test_schema_of_stage_is_json():
    schema = json.loads(succeeds("recipes", "schema", "train_reranker").out)

    assert schema["properties"]["stage"]["const"] == "train_reranker"
    assert "ListwiseCE" in schema["$defs"]


def test_schema_is_of_all_stages():
    schemas = json.loads(succeeds("recipes", "schema").out)["oneOf"]

    assert [schema["properties"]["stage"]["const"] for schema in schemas] == [*STAGES]


# Real processes -----------------------------------------------------------------------------------


def program(command: str, *more: object, cwd: Path | None = None) -> subprocess.Popen:
    """Start a command as a user types it."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
    }
    return subprocess.Popen(
        [*shlex.split(command), *map(str, more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
    )


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    """Wait for a process and return its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def signal_at(step, which):
    """Let the next training run of this process send itself a signal after it has logged `step`.

    Returns a function that undoes this.
    """
    write = TrainingLog.write

    def write_and_signal(log, number, figures):
        write(log, number, figures)
        if number == step:
            os.kill(os.getpid(), which)

    TrainingLog.write = write_and_signal
    return lambda: setattr(TrainingLog, "write", write)


def run_recipe_and_die(step: int, recipe: Path, out: Path) -> None:
    """Do what `python RECIPE out=OUT` does, and die after `step` is logged."""
    signal_at(step, signal.SIGKILL)
    sys.argv = [str(recipe), f"out={out}"]
    runpy.run_path(str(recipe), run_name="__main__")


def logged_losses(out: Path) -> list[tuple[int, float]]:
    """Return the step and the loss of each row of a training log."""
    rows = map(json.loads, (out / "train_log.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


@pytest.mark.slow
def test_interrupted_run_resumes_bit_identically(runs, model_folders, tmp_path):
    """The run is killed in `python recipe.yaml`, gets Ctrl-C in `train --resume`, then ends."""
    text = encoder_recipe(runs, model_folders["bert_dropout"])
    recipe = write_recipe(
        tmp_path / "r.yaml", text.replace("epochs: 2", "epochs: 4, save_every: 2")
    )
    out = tmp_path / "out"
    undisturbed = tmp_path / "undisturbed"
    succeeds("train", recipe, f"out={undisturbed}")

    # Killed after step 5.
    (killed,) = run_apart(partial(run_recipe_and_die, 5, recipe, out))
    assert killed.code == -signal.SIGKILL
    assert (out / "checkpoints" / "step-4").is_dir()
    assert not (out / "config.json").exists()

    # Neither a new run nor other settings may continue.
    refused = skilltrain("train", recipe, f"out={out}")
    line = f"error: {out}: holds an unfinished run (add --resume, or delete the folder)"
    assert refused.only_line == f"{line} [unfinished-run]"
    with locked(out):
        busy = skilltrain("train", recipe, f"out={out}")
    assert "another process is writing this folder" in busy.only_line
    changed = skilltrain("train", recipe, f"out={out}", "training.seed=1", "--resume")
    assert "holds another run: training.seed differs" in changed.only_line

    # Interrupted after step 9.
    undo = signal_at(9, signal.SIGINT)
    stopped = skilltrain("train", recipe, f"out={out}", "--resume")
    undo()
    assert stopped.code == 130
    assert not stopped.out
    line = f"error: {out}: interrupted after step 9 of 12; a checkpoint is saved"
    last_line = stopped.err.splitlines()[-1]
    assert last_line == f"{line} (run the same command with --resume to go on) [interrupted]"
    assert (out / "checkpoints" / "step-9").is_dir()

    succeeds("train", recipe, f"out={out}", "--resume")

    for name in ("model.safetensors", "skilltrain.json", "config.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert (out / "checkpoints" / "step-12").is_dir()  # any of them can be exported
    assert logged_losses(out) == logged_losses(undisturbed)


TINY = ROOT / "recipes" / "tiny" / "sr_emb_8b_full.yaml"


def small_training(runs: Path, model: Path) -> list[str]:
    """Return settings that let a tiny recipe train on the small library in two updates."""
    return [
        f"model.source={model}",
        f"data.pool={runs}/pool",
        f"data.lists={runs}/encoder_lists",
        "data.max_lists=8",
        "training.accumulation=1",
        "training.batch_size=4",
        "model.max_tokens=48",
    ]


def test_tiny_recipe_trains_with_dev(runs, model_folders, tmp_path):
    dev = f"dev={{benchmark: {runs}/queries, split: test}}"
    settings = small_training(runs, model_folders["qwen3"])

    outcome = succeeds("train", TINY, *settings, dev, f"out={tmp_path}/out", "--json")

    summary = json.loads(outcome.out)
    assert summary["num_steps"] == 2
    assert summary["dev"]["MRR@10"]["n"] == 4


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks on the CPU, where there is no GPU")
def test_two_ranks_train_same_model_as_one(runs, tmp_path):
    launch = f"accelerate launch --config_file {ROOT}/launch/ddp.yaml --num_processes 2"
    out = tmp_path / "out"
    working_folder = tmp_path / "elsewhere"
    working_folder.mkdir()

    code, summary, err = finished(
        program(
            f"{launch} --main_process_port 0",
            runs / "recipes" / "encoder.yaml",
            f"out={out}",
            "--json",
            cwd=working_folder,
        )
    )

    assert code == 0, err
    assert list(working_folder.iterdir()) == []
    # One rank writes.
    assert json.loads(summary)["num_steps"] == 6
    assert len(logged_losses(out)) == 6
    weights = load_file(out / "model.safetensors")
    expected = load_file(runs / "encoder" / "model.safetensors")
    assert weights.keys() == expected.keys()
    # The bias of a key shifts all attention scores of a token alike. So its gradient is rounding
    # noise, and it changes nothing.
    names = [name for name in weights if not name.endswith("key.bias")]
    differences = [float((weights[name] - expected[name]).abs().max()) for name in names]
    # Adam turns a gradient that is nearly zero, and so mostly rounding noise, into a step of up to
    # the learning rate of 1e-3.
    assert max(differences) < 1e-4
    texts = [" ".join(WORDS[start : start + 9]) for start in range(0, len(WORDS), 3)]
    vectors, expected_vectors = [
        SentenceTransformer(str(folder), device="cpu").encode(texts)
        for folder in (out, runs / "encoder")
    ]
    assert abs(vectors - expected_vectors).max() < 1e-5


def test_show_prints_matching_rows(runs):
    skills = runs / "pool" / "skills.parquet"
    skill_id = read_table(skills.parent, SKILLS).column("skill_id")[0].as_py()

    outcome = succeeds("show", skills, f"skill_id={skill_id}", "--json")

    assert [json.loads(line)["skill_id"] for line in outcome.out.splitlines()] == [skill_id]


def test_show_limits_rows(runs):
    outcome = succeeds("show", runs / "pool" / "skills.parquet", "--rows", 1)

    assert outcome.out.count("skill_id") == 1


@pytest.fixture
def drops(tmp_path):
    """A table with a long reason, a null in a list and a column without a value."""
    reason = " ".join(f"word{number}" for number in range(40))
    rows = [
        {"skill_id": "a", "reason": reason, "scores": [1.5], "empty": None},
        {"skill_id": "b", "reason": "short", "scores": None, "empty": ""},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "drops.parquet")
    return tmp_path / "drops.parquet"


def test_show_wraps_reasons_to_terminal(drops, monkeypatch):
    monkeypatch.setattr(console, "width", 70)

    lines = succeeds("show", drops).out.splitlines()

    assert max(map(len, lines)) <= 70
    assert [word for word in " ".join(lines).split() if word.startswith("word")] == [
        f"word{number}" for number in range(40)
    ]


def test_show_leaves_out_empty_columns(drops):
    lines = succeeds("show", drops).out.splitlines()

    header = next(line for line in lines if line.strip())
    assert header.split() == ["skill_id", "reason", "scores"]


def test_show_prints_rows_apart_if_narrow(drops, monkeypatch):
    monkeypatch.setattr(console, "width", 40)

    out = succeeds("show", drops).out

    assert out.count("skill_id") == 2


def test_show_compares_items_of_lists(drops):
    matching = succeeds("show", drops, "scores=1.5", "--json").out
    nothing = succeeds("show", drops, "scores=2")

    assert json.loads(matching)["skill_id"] == "a"
    assert nothing.out == ""


def test_show_names_tables_of_folder(runs):
    line = skilltrain("show", runs / "pool").error_line

    assert "its tables: dropped.parquet, flags.parquet" in line


def test_show_names_columns_of_table(runs):
    line = skilltrain("show", runs / "pool" / "skills.parquet", "x=1").error_line

    assert "no column 'x' (its columns: skill_id, " in line


def test_removed_command_says_its_replacement(monkeypatch, capsys):
    monkeypatch.setattr("skilltrain.config.REMOVED", {"oldstage": "use mine"})

    with pytest.raises(SystemExit) as stopped:
        main(["oldstage", "pool=x"])

    assert stopped.value.code == 2
    assert "No such command 'oldstage' (removed: use mine)" in capsys.readouterr().err
