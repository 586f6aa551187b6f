"""The command line as a person meets it: one line for every fault, nothing lost, and trainings that can be broken off.

Every fault ends with exit code 2 and one line on stderr that begins with `error: ` and names the place.
"""

import contextlib
import inspect
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from skilltrain import __version__
from skilltrain.cli import main
from skilltrain.errors import StoppedError
from skilltrain.stage import STAGES, command_of, load_stage
from skilltrain.tables import SKILLS, read_table
from skilltrain.training.log import TrainingLog
from small_library import contents, encoder_recipe, skilltrain, succeeds, write_recipe
from tiny_models import WORDS

ROOT = Path(__file__).parents[1]

BASE = "stage: train_encoder\nmodel: {source: {bert}}\ndata: {pool: {runs}/pool, lists: {runs}/encoder_lists}\n"
RECIPES = {
    "good": BASE + "out: {tmp}/out\n",
    "reranker": BASE.replace("encoder", "reranker") + "out: {tmp}/out\n",
    "stage": "stage: trian_encoder\nout: {tmp}/out\n",
    "no_stage": "out: {tmp}/out\n",
    "no_out": BASE,
    "systems": "stage: evaluate\nsystems: [{name: a, rankers: [{kind: lexical}]}]\nout: {tmp}/out\n",
}


@pytest.fixture(scope="module")
def places(runs, tmp_path_factory, model_folders):
    """Name → place, for the commands below; `tmp` is a folder full of bad input."""
    tmp = tmp_path_factory.mktemp("bad")
    names = {
        "tmp": tmp,
        "runs": runs,
        **{name: str(folder) for name, folder in model_folders.items()},
    }
    for name, text in RECIPES.items():
        write = write_recipe if name == "good" else Path.write_text
        write(tmp / f"{name}.yaml", fill(text, names))
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
    (tmp / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(model_folders["bert"], tmp / "poisoned")  # a model whose vectors are no numbers
    weights = load_file(tmp / "poisoned" / "model.safetensors")
    weights["embeddings.LayerNorm.weight"][0] = float("nan")
    save_file(weights, tmp / "poisoned" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(
        model_folders["qwen3_reranker"], tmp / "without_yes"
    )  # its tokenizer knows single bytes alone
    tokenizer = json.loads((tmp / "without_yes" / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (tmp / "without_yes" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return names


def fill(text: str, places) -> str:
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", str(place))
    return text


def arguments(command: str, places) -> list[str]:
    return shlex.split(fill(command, places))


TRAIN = "train {tmp}/good.yaml "
# What a module says of bad input is tested with the module; here stands what only a command meets.
FAULTS = {
    # Inputs that are not what they should be.
    "pool sources={tmp}/empty out={tmp}/out": "{tmp}/empty: holds no SKILL.md",
    "queries files={tmp}/queries.jsonl pool={tmp}/nowhere out={tmp}/out": "{tmp}/nowhere: no such file or folder (made by `skilltrain pool`, ",
    "queries files={tmp}/queries.jsonl pool={runs}/pool out={tmp}/out": "{tmp}/queries.jsonl, line 2: query 'queries-",
    "pool sources={tmp}/.kept.partial out={tmp}/kept": "{tmp}/.kept.partial: lies where the stage writes before it names the folder kept",
    # Models.
    TRAIN + "model.source=nowhere": "nowhere: no such model",
    TRAIN + "model.source={tmp}/empty": "{tmp}/empty: is no model folder: it has no config.json",
    TRAIN + "model.source={tmp}/unfinished": "continue it with --resume",
    "train {tmp}/reranker.yaml model.source={runs}/encoder": "{runs}/encoder: its model is of kind encoder, but reranker is needed here",
    TRAIN
    + "model.source={tmp}/poisoned": "the loss is not a finite number in a step with queries q",
    "train {tmp}/reranker.yaml model.source={tmp}/without_yes model.template.form=yes_no": "has no single tokens 'yes' and 'no'",
    TRAIN + "adapter.targets=[]": "adapter.targets: must",
    "train {tmp}/reranker.yaml model.template.form=cosine_pair": "(removed: use form pair, with a loss of temperature 1)",
    TRAIN
    + "'loss={name: infonce, lexical_weight: 1}'": "unknown key 'loss.lexical_weight' (removed: fuse the trained encoder with BM25)",
    TRAIN
    + "loss.name=lambda_rank": "loss.name: unknown choice 'lambda_rank' (removed: use ranknet)",
    TRAIN + "loss.name=margin": "loss.name: unknown choice 'margin' (removed: use ranknet)",
    TRAIN + "data.clusters={tmp}": "unknown key 'data.clusters' (removed: training finds near-dup",
    TRAIN
    + "'loss={name: matryoshka, dims: [16, 64]}'": "loss.dims: 64 is more than the encoder's 32",
    "train {tmp}/reranker.yaml training.varlen=true": "varlen is for encoders; a causal reranker never pads",
    # The output folder.
    TRAIN + "out={tmp}/foreign": "{tmp}/foreign: the output folder is not empty and holds no run",
    "pool sources={runs}/pool out={tmp}/foreign_run": "{tmp}/foreign_run: the output folder is not empty and holds no",
    TRAIN + "out={tmp}/file": "{tmp}/file: is a file; the output is a folder",
    "pool sources={runs}/pool out={tmp}/file/below": "{tmp}/file/",
    TRAIN + "--resume": "{tmp}/out: holds no run to resume (leave --resume out)",
    # Recipes.
    "train {tmp}/stage.yaml": "{tmp}/stage.yaml: stage: unknown stage 'trian_encoder'; allowed: pool,",
    "train {tmp}/no_stage.yaml": "{tmp}/no_stage.yaml: missing key 'stage'; allowed: pool,",
    "train {tmp}/no_out.yaml": "{tmp}/no_out.yaml: missing key 'out'",
    "mine {tmp}/good.yaml": "{tmp}/good.yaml: is a recipe of stage train_encoder, not mine",
    "train {runs}/pool/recipe.yaml": "{runs}/pool/recipe.yaml: is a recipe of stage pool (run: skilltrain pool",
    "pool {runs}/pool/recipe.yaml {tmp}/good.yaml": "more than one recipe: {runs}/pool/recipe.yaml {tmp}/good.yaml",
    "pool out={tmp}/out": "skilltrain pool: missing key 'sources'",
    TRAIN
    + "training.seed=1180591620717411303424": "training.seed: must be less than 2147483648, found 11805916207174",
    **{
        f"synthesize pool={{runs}}/pool llm.kind=openai llm.base_url={url} out={{tmp}}/out": "llm.base_url: give a URL such as http://localhost:8000/v1"
        for url in ("http://127.0.0.1:abc/v1", "http://127.0.0.1:99999/v1", "http://[::1/v1")
    },
    # Evaluation and routing.
    "evaluate {tmp}/systems.yaml --encoder {bert}": "{tmp}/systems.yaml: the recipe lists systems already",
    "evaluate --benchmark {runs}/queries --predictions {tmp}/empty.json --json {tmp}/empty.json": "{tmp}/empty.json: --json would overwrite the predictions",
    "route words --pool {tmp}/nowhere": "{tmp}/nowhere: no such file or folder",
    "route words --pool {runs}/pool --top 0": "Invalid value for '--top': ",
    "route words": "skilltrain route: give either --router or --pool",
    # The command itself.
    "rout words": "No such command 'rout'",
    "train": "Missing argument 'file'",
    "export {runs}/encoder": "Missing option '--out'",
    "export {runs}/encoder --checkpoint step-4711 --out {tmp}/out": "step-4711",
    "recipes --dir {tmp}/nowhere": "{tmp}/nowhere: no such folder (recipes come with the repository",
    "recipes --schema trian": "skilltrain recipes: unknown stage 'trian'; allowed: pool, ",
    TRAIN
    + "--resum": "--resum is no option of this command, or has no value (a setting is written resum=VALUE; see",
    "ablate grid.yaml more.yaml": "more.yaml: is no setting (settings have the form key=value)",
}


@pytest.mark.parametrize("command", FAULTS)
def test_a_fault_is_one_line_and_changes_nothing(command, places, runs, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = contents(places["tmp"], runs)

    outcome = skilltrain(*arguments(command, places))

    assert fill(FAULTS[command], places) in outcome.error_line
    assert contents(places["tmp"], runs) == before

    if not command.startswith(
        ("train", "evaluate")
    ):  # which say what they read before they meet a fault
        assert outcome.only_line


def test_debug_shows_where_it_happened(places):
    with pytest.raises(Exception, match="no such model") as raised:
        skilltrain(*arguments(TRAIN + "model.source=nowhere --debug", places))
    assert raised.traceback[-1].name == "resolve_model"


def test_without_a_home_the_line_says_what_to_set(runs, model_folders, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)  # as without HOME and an entry of the user

    command = ("route", "words", "--pool", runs / "pool", "--encoder", model_folders["bert"])

    assert (
        skilltrain(*command).only_line
        == "error: there is no home folder, which ~ stands for (set HOME)"
    )


STOPPED = StoppedError("interrupted", "interrupted after step 3", number=signal.SIGTERM)


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted; what was finished is kept"),
        (STOPPED, 143, "interrupted after step 3 [interrupted]"),
    ],
)
def test_ctrl_c_and_sigterm_are_one_line_and_an_exit_code_of_their_own(
    runs, tmp_path, monkeypatch, raised, code, line
):
    def interrupted(config, out):
        (out / "half").write_text("")
        raise raised

    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", interrupted)
    outcome = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path}/out")

    assert (outcome.code, outcome.err) == (code, f"error: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_lacks_letters_gets_them_escaped(tmp_path):
    (tmp_path / "SKILL.md").write_text(
        "---\nname: größe-“x”\ndescription: 日本\n---\nMerges PDF files 😀.\n"
    )
    shown = []
    for option in ("--top=1", "--json"):
        stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(io.StringIO()):
            main(["route", "merge pdf", "--pool", str(tmp_path), option])
            stream.flush()
        shown.append(stream.detach().getvalue().decode("latin-1"))

    assert "\\u65e5\\u672c" in shown[0]
    assert json.loads(shown[1])["skills"][0]["name"] == "größe-“x”"


def test_what_data_say_steers_no_terminal(tmp_path, runs):
    evil = "\x9b31m\u202eevil" + "x" * 5000
    (tmp_path / "r.yaml").write_text(f"stage: {json.dumps(evil)}\nout: a\n")

    line = skilltrain("pool", tmp_path / "r.yaml").only_line

    assert "is a recipe of stage [U+009B]31m[U+202E]evilx" in line
    assert len(line) < 2100
    assert line.endswith("…")

    row = {"query_id": "a", "query": "merge", "skill_ids": ["\u202edata/none"], "split": "train"}
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")

    assert (
        "'[U+202E]data/none'"
        in skilltrain(
            "queries", f"files={tmp_path}/q.jsonl", f"pool={runs}/pool", f"out={tmp_path}/q"
        ).only_line
    )

    (folder := tmp_path / "\u202elib").mkdir()
    (folder / "SKILL.md").write_text("Merges PDF files.")
    shown = succeeds("pool", f"sources={folder}", f"out={tmp_path}/pool", "--json").out

    assert "\\u202elib" in shown
    assert "\u202e" not in shown
    assert str(folder) in json.loads(shown)["num_found"]


def test_settings_may_be_written_as_options_and_a_recipes_path_may_hold_an_equals_sign(
    runs, tmp_path
):
    train = (
        "train",
        runs / "recipes" / "encoder.yaml",
        "--training.epochs",
        "1",
        f"--out={tmp_path}/out",
        "--dry-run",
    )

    assert json.loads(succeeds(*train).out)["dry_run"]["num_steps"] == 3

    inputs = (
        "--pool",
        runs / "pool",
        "--queries",
        runs / "queries",
        "--rankings",
        runs / "candidates_filtered",
    )
    lists = ("lists", *inputs, "--list-size", 4, "--out", tmp_path / "lists", "--json")

    assert json.loads(succeeds(*lists).out)["list_length"]["max"] == 4

    (file := tmp_path / "seed=7" / "pool.yaml").parent.mkdir()
    file.write_text(f"stage: pool\nsources: {runs}/pool\nout: {tmp_path}/pool\n")

    assert "num_skills" in json.loads(succeeds("pool", file, "--json").out)


def test_help_lists_commands_settings_and_an_example():
    commands = succeeds("--help").out
    for name in STAGES:
        command = command_of(name)
        shown = succeeds(*command.split(), "--help").out

        assert f" {command.split()[0]} " in commands
        assert shown.startswith(f"Example:\n  skilltrain {command} ")

        if command != "train":  # it names no stage, so it lists no settings
            settings = load_stage(name).model_fields.keys() - {"stage"}
            assert [key for key in settings if f"  {key}: " not in shown] == []


def test_help_tells_the_settings_inside_sections_and_those_of_each_choice():
    assert "llm.model" not in succeeds("synthesize", "--help").out

    shown = succeeds("synthesize", "--help-all").out

    assert "  llm with kind=openai:\n  llm.model: " in shown
    assert "  llm.budget.max_dollars: " in shown
    assert "  llm.temperature: null: the server's own (default 1.0)" in shown
    assert "Undefined" not in succeeds("pool", "--help-all").out
    assert "{query_id: [skill_id, …]}" in " ".join(
        succeeds("evaluate", "--help").out.replace("│", "").split()
    )

    shown = succeeds("evaluate", "--help-all").out

    assert (
        '  systems[].rankers[].template.skill.separator: what stands between the parts (default " | ")'
        in shown
    )
    assert (
        "  systems[].rankers[].template.skill.…: as systems[].rankers[].template.skill.…" in shown
    )
    assert "evaluate" in succeeds().out
    assert succeeds("--version").out.strip() == __version__


def test_recipes_are_listed_by_what_they_train_and_their_schema_is_json(tmp_path):
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

    listed = succeeds("recipes", "--dir", tmp_path).out.splitlines()

    assert [line.rstrip() for line in listed] == [
        f"{tmp_path}/pool.yaml  pool",
        "",
        f"{tmp_path}/below/encoder.yaml  train_encoder  owner/name  infonce",
        "    An encoder.",
    ]

    schema = json.loads(succeeds("recipes", "--schema", "train_reranker").out)

    assert schema["properties"]["stage"]["const"] == "train_reranker"
    assert "ListwiseCE" in schema["$defs"]

    any_stage = json.loads(succeeds("recipes", "--schema").out)

    assert [one["properties"]["stage"]["const"] for one in any_stage["oneOf"]] == [*STAGES]


# Real processes -----------------------------------------------------------------------------------


def program(command: str, *more: object, cwd: Path | None = None) -> subprocess.Popen:
    """A command as a user types it, started."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "PATH": path,
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
    """(exit code, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def signal_at(step, which):
    """Have this process's next training send itself a signal as soon as it has logged a step; call it to end that."""

    def logged(log, number, figures):
        write(log, number, figures)
        if number == step:
            os.kill(os.getpid(), which)

    write, TrainingLog.write = TrainingLog.write, logged
    return lambda: setattr(TrainingLog, "write", write)


@pytest.mark.slow
def test_killed_then_interrupted_then_resumed_is_the_same_model(runs, model_folders, tmp_path):
    """kill -9 in `python recipe.yaml`, Ctrl-C in `skilltrain train --resume`, and resumed to the end."""
    text = encoder_recipe(runs, model_folders["bert_dropout"]).replace(
        "epochs: 2", "epochs: 4, save_every: 2"
    )
    recipe, out = write_recipe(tmp_path / "r.yaml", text), tmp_path / "out"
    succeeds("train", recipe, f"out={tmp_path}/undisturbed")

    code = f"""
import os, runpy, sys
from skilltrain.training.log import TrainingLog
{inspect.getsource(signal_at)}
signal_at(5, {int(signal.SIGKILL)})
runpy.run_path(sys.argv.pop(1), run_name="__main__")"""

    assert finished(program("python -c", code, recipe, f"out={out}"))[0] == -signal.SIGKILL
    assert (out / "checkpoints" / "step-4").is_dir()
    assert not (out / "config.json").exists()

    refused = skilltrain("train", recipe, f"out={out}")

    assert (
        refused.only_line
        == f"error: {out}: holds an unfinished run (add --resume, or delete the folder) [unfinished-run]"
    )

    changed = skilltrain("train", recipe, f"out={out}", "training.seed=1", "--resume")

    assert "holds another run: training.seed differs" in changed.only_line

    undone = signal_at(9, signal.SIGINT)
    stopped = skilltrain("train", recipe, f"out={out}", "--resume")
    undone()

    assert stopped.code == 130
    assert not stopped.out
    assert [line for line in stopped.err.splitlines() if not line.startswith("warning: ")] == [
        f"error: {out}: interrupted after step 9 of 12; a checkpoint is saved (run the same command with --resume to "
        "go on) [interrupted]"
    ]
    assert (out / "checkpoints" / "step-9").is_dir()

    succeeds("train", recipe, f"out={out}", "--resume")

    for name in ("model.safetensors", "skilltrain.json", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    assert (out / "checkpoints" / "step-12").is_dir()  # any of them can be exported

    log, whole_log = (
        [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
        for folder in (out, tmp_path / "undisturbed")
    )

    assert [(row["step"], row["loss"]) for row in log] == [
        (row["step"], row["loss"]) for row in whole_log
    ]


TINY = ROOT / "recipes" / "tiny" / "sr_emb_8b_full.yaml"


def small_training(runs: Path, model: Path) -> list[str]:
    """Settings that let a tiny recipe train on the library of these tests, in two updates."""
    return [
        f"model.source={model}",
        f"data.pool={runs}/pool",
        f"data.lists={runs}/encoder_lists",
        "data.max_lists=8",
        "training.accumulation=1",
        "training.batch_size=4",
        "model.max_tokens=48",
    ]


@pytest.mark.slow
def test_a_launcher_and_the_command_give_the_same_model(runs, model_folders, tmp_path):
    assert torch.get_num_threads() == int(
        os.environ["OMP_NUM_THREADS"]
    )  # comparisons of bytes rest on it

    dev = f"dev={{benchmark: {runs}/queries, split: test}}"
    settings = [*small_training(runs, model_folders["qwen3"]), dev]
    succeeds("train", TINY, *settings, f"out={tmp_path}/here")
    (tmp_path / "elsewhere").mkdir()
    launch = program(
        "torchrun --nproc_per_node 1",
        TINY,
        *settings,
        f"out={tmp_path}/launched",
        "--json",
        cwd=tmp_path / "elsewhere",
    )
    code, out, err = finished(launch)

    assert code == 0, err

    summary = json.loads(out)

    assert summary["num_steps"] == 2
    assert summary["dev"]["MRR@10"]["n"] == 4
    assert list((tmp_path / "elsewhere").iterdir()) == []

    here, launched = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("here", "launched")
    )

    assert here == launched


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks on the CPU, where there is no GPU")
def test_two_ranks_train_to_the_parameters_of_one(runs, tmp_path):
    launch = f"accelerate launch --config_file {ROOT}/launch/ddp.yaml --num_processes 2 --main_process_port 0"
    code, out, err = finished(
        program(launch, runs / "recipes" / "encoder.yaml", f"out={tmp_path}/out", "--json")
    )

    assert code == 0, err

    one, two = (
        load_file(folder / "model.safetensors") for folder in (runs / "encoder", tmp_path / "out")
    )

    assert one.keys() == two.keys()

    # A key's bias shifts all attention scores of a token alike: its gradient is rounding noise, and it changes nothing.
    compared = [name for name in one if not name.endswith("key.bias")]

    assert max(float((one[name] - two[name]).abs().max()) for name in compared) < 1e-5

    texts = [" ".join(WORDS[start : start + 9]) for start in range(0, len(WORDS), 3)]
    vectors = [
        SentenceTransformer(str(f), device="cpu").encode(texts)
        for f in (runs / "encoder", tmp_path / "out")
    ]

    assert abs(vectors[0] - vectors[1]).max() < 1e-5
    assert json.loads(out)["num_steps"] == 6  # one rank speaks
    assert len((tmp_path / "out" / "train_log.jsonl").read_text().splitlines()) == 6


def test_show_prints_the_rows_of_a_table_that_fit(runs):
    skills = runs / "pool" / "skills.parquet"
    [skill_id, *_] = read_table(skills.parent, SKILLS).column("skill_id").to_pylist()

    outcome = succeeds("show", skills, f"skill_id={skill_id}", "--json")

    assert [json.loads(line)["skill_id"] for line in outcome.out.splitlines()] == [skill_id]
    assert succeeds("show", skills, "--rows", 1).out.count("skill_id") == 1
    assert (
        "its tables: dropped.parquet, flags.parquet" in skilltrain("show", skills.parent).error_line
    )
    assert "no column 'x' (its columns: skill_id, " in skilltrain("show", skills, "x=1").error_line


def test_removed_command_says_its_replacement(monkeypatch, capsys):
    monkeypatch.setattr("skilltrain.config.REMOVED", {"oldstage": "use mine"})

    with pytest.raises(SystemExit) as stopped:
        main(["oldstage", "pool=x"])

    assert stopped.value.code == 2
    assert "No such command 'oldstage' (removed: use mine)" in capsys.readouterr().err
