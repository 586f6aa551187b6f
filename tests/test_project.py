"""Metadata, pinned versions, recipes, launch files, the Dockerfile and documents are consistent."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import skilltrain
from skilltrain.config import load_recipe
from skilltrain.stage import TrainingStage, list_recipes, parse_recipe
from small_library import skilltrain as run_command

ROOT = Path(__file__).parents[1]
RECIPES = sorted(
    path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "ablations"
)
FULL_SIZE_RECIPES = [path.stem for path in sorted((ROOT / "recipes").glob("[rs][3r]_*.yaml"))]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def relative_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


PROJECT: dict[str, Any] = tomllib.loads(read("pyproject.toml"))["project"]


def code_in(markdown: str) -> str:
    """Return the fenced blocks and the inline code of a document."""
    fence = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", fence.sub("", markdown))
    return "\n".join([*fence.findall(markdown), *inline])


# Metadata and pins ------------------------------------------------------------


def test_metadata_names_existing_files():
    assert PROJECT["version"] == skilltrain.__version__
    assert f"## [{skilltrain.__version__}]" in read("CHANGELOG.md")
    for name in PROJECT["license-files"]:
        assert (ROOT / name).is_file(), name
    assert Version("3.11.4") in Requirement(f"python{PROJECT['requires-python']}").specifier


def test_command_is_installed():
    (script,) = metadata.entry_points(group="console_scripts", name="skilltrain")

    assert script.value == PROJECT["scripts"]["skilltrain"]
    assert callable(script.load())


def pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt."""
    versions = {}
    for line in read("constraints.txt").splitlines():
        if line and not line.startswith("#"):
            # A beta only where a dependency of ours has no release.
            pin = re.fullmatch(r"([\w.-]+)==([\d.]+(?:b\d+|post\d+)?)", line)
            assert pin is not None, line
            versions[canonicalize_name(pin[1])] = pin[2]
    return versions


def test_pins_are_sorted():
    assert list(pins()) == sorted(pins())


def test_every_dependency_is_pinned_within_its_range():
    requirements = list(PROJECT["dependencies"])
    for extra in ("dev", "quickstart", "deepspeed", "trackers", "qlora", "gpu", "onnx"):
        requirements += PROJECT["optional-dependencies"][extra]

    for text in requirements:
        requirement = Requirement(text)
        version = Version(pins()[canonicalize_name(requirement.name)])
        assert requirement.specifier, f"{text} has no version range"
        assert version in requirement.specifier, text
        assert not version.is_prerelease, text


# The command line and the recipes ---------------------------------------------


def test_every_full_size_recipe_has_a_tiny_one():
    tiny = {path.stem for path in RECIPES if path.parent.name == "tiny"}

    assert tiny == {*FULL_SIZE_RECIPES, "sr_emb_minilm", "sr_rank_minilm", "skillflow"}


@pytest.fixture(scope="module")
def summaries():
    """The summary of each recipe by its path."""
    return {summary.path: summary for summary in list_recipes(ROOT / "recipes")}


@pytest.mark.parametrize("path", RECIPES, ids=relative_path)
def test_recipe_is_valid(path: Path, summaries):
    summary = summaries[path]

    stage = parse_recipe(load_recipe(path), path)

    is_training = isinstance(stage, TrainingStage)
    assert summary.about.endswith(".")
    assert 20 < len(summary.about) < 140
    assert len(summary.facts) == (3 if is_training else 1)
    if is_training:
        # A spawned worker imports the recipe, which must not start the stage.
        assert "run" in runpy.run_path(str(path), run_name="imported")


def keys_of(values: Any, path: str = "") -> set[str]:
    """Return the key paths of nested settings, for example `training.epochs`."""
    if not isinstance(values, dict):
        return {path}
    keys: set[str] = set()
    for name, value in values.items():
        keys |= keys_of(value, f"{path}.{name}".lstrip("."))
    return keys


@pytest.mark.parametrize("name", FULL_SIZE_RECIPES)
def test_tiny_recipe_has_same_settings(name: str):
    full = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    tiny = load_recipe(ROOT / "recipes" / "tiny" / f"{name}.yaml")

    # The tiny recipe has the same keys, and only these more.
    assert keys_of(full) <= keys_of(tiny)
    added = keys_of(tiny) - keys_of(full)
    assert {key for key in added if not key.startswith("dev.")} <= {"data.max_lists"}

    # These values are the same.
    for key in ("stage", "gains", "loss", "in_batch_negatives", "near_duplicates"):
        assert full.get(key) == tiny.get(key), key
    for key in (
        "epochs",
        "batch_size",
        "accumulation",
        "warmup_share",
        "weight_decay",
        "recompute",
        "seed",
    ):
        assert full["training"][key] == tiny["training"][key], key
    assert full["model"]["template"] == tiny["model"]["template"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "paper").glob("sr_*.yaml")), ids=relative_path
)
def test_paper_recipe_differs_in_few_settings(path: Path):
    recipe = load_recipe(path)
    name = re.sub("_raw|_appendix_c|_structured", "", path.name)
    expected = load_recipe(ROOT / "recipes" / name)

    template = expected["model"]["template"]
    if "appendix_c" not in path.stem:
        template["instruction"] = template["instruction"].replace("a task", "a coding task")
    template["skill"]["verbatim"] = True
    if "structured" in path.stem:
        template["skill"] |= {"labelled": True, "separator": "\n"}
    # Limits in tokens of the first version: the pool has them, so that the template has none.
    template["skill"] |= {"description_chars": 100_000, "body_chars": 100_000}
    expected["data"]["lists"] = recipe["data"]["lists"]
    expected["out"] = f"runs/paper/{path.stem}"
    if "emb" in path.stem:
        expected["data"]["pool"] = "runs/paper/encoder_pool"
        expected["model"]["max_tokens"] = 3000
        expected["in_batch_mask"] = "none"
        template["query_chars"] = 100_000
    else:
        expected["data"]["pool"] = "runs/paper/reranker_pool"
        expected["model"]["max_tokens"] = 5000
        template["query_chars"] = None
        expected["model"]["query_max_tokens"] = 4000
        assert recipe["data"]["lists"] == "runs/paper/reranker_lists"
    assert recipe == expected


@pytest.mark.parametrize(
    ("name", "batch_size", "accumulation", "learning_rate"),
    [("emb", 8, 4, 2e-5), ("rank", 1, 16, 1e-5)],
)
def test_training_has_values_of_skillrouter(
    name: str, batch_size: int, accumulation: int, learning_rate: float
):
    recipe = load_recipe(ROOT / "recipes" / f"sr_{name}_0.6b.yaml")

    expected = {
        "epochs": 1,
        "warmup_share": 0.05,
        "weight_decay": 0.01,
        "recompute": True,
        "precision": "bfloat16",
        "batch_size": batch_size,
        "accumulation": accumulation,
        "learning_rate": learning_rate,
    }
    assert expected.items() <= recipe["training"].items()
    assert recipe["model"]["template"]["query_chars"] == 1500


def test_encoder_has_values_of_skillrouter():
    recipe = load_recipe(ROOT / "recipes" / "sr_emb_0.6b.yaml")

    assert recipe["loss"] == {"name": "infonce", "temperature": 0.05}
    assert recipe["model"]["max_tokens"] == 2048
    skill = recipe["model"]["template"]["skill"]
    assert (skill["description_chars"], skill["body_chars"]) == (300, 2500)


def test_reranker_has_values_of_skillrouter():
    recipe = load_recipe(ROOT / "recipes" / "sr_rank_0.6b.yaml")

    assert recipe["loss"] == {"name": "listwise_ce", "temperature": 1.0}
    assert recipe["model"]["max_tokens"] == 4096
    assert recipe["model"]["template"]["separator"] == "\n\n"
    skill = recipe["model"]["template"]["skill"]
    assert (skill["description_chars"], skill["body_chars"]) == (500, 2000)


def test_tiny_cascade_has_same_rankers():
    full = load_recipe(ROOT / "recipes" / "skillflow.yaml")["systems"]
    tiny = load_recipe(ROOT / "recipes" / "tiny" / "skillflow.yaml")["systems"]

    for system, tiny_system in zip(full, tiny, strict=True):
        assert system["name"] == tiny_system["name"]
        for ranker, tiny_ranker in zip(system["rankers"], tiny_system["rankers"], strict=True):
            assert ranker["kind"] == tiny_ranker["kind"]
            assert keys_of(ranker) <= keys_of(tiny_ranker)


def test_cascade_has_values_of_skillflow():
    systems = load_recipe(ROOT / "recipes" / "skillflow.yaml")["systems"]

    first, shallow, deep, chooser = systems[-2]["rankers"]
    assert first["of"]["template"]["skill"]["fields"] == "description"
    assert (first["count"], first["join"]) == (5, "union")
    assert (first["of"]["keep"], first["keep"]) == (200, 1000)
    assert (shallow["count"], deep["count"]) == (1, 1)
    assert (shallow["of"]["keep"], shallow["of"]["max_tokens"]) == (1000, 512)
    assert (deep["of"]["keep"], deep["of"]["max_tokens"]) == (100, 4096)
    assert (chooser["keep"], chooser["most"]) == (10, 5)
    assert systems[-1]["rankers"] == [first, shallow, deep, chooser | {"specificity": True}]
    assert {ranker["llm"]["model"] for ranker in systems[-1]["rankers"]} == {"gpt-4o-mini"}


# Launch files -----------------------------------------------------------------


# The configurations of accelerate. SkyPilot's task is another kind of file.
LAUNCH_CONFIGS = {
    path.stem: path for path in (ROOT / "launch").glob("*.yaml") if path.stem != "skypilot"
}


def test_launch_configs_have_promised_types():
    configs = {name: yaml.safe_load(path.read_text()) for name, path in LAUNCH_CONFIGS.items()}

    assert {name: config["distributed_type"] for name, config in configs.items()} == {
        "cpu": "NO",
        "single_gpu": "NO",
        "ddp": "MULTI_GPU",
        "multi_node": "MULTI_GPU",
        "fsdp2": "FSDP",
        "zero2": "DEEPSPEED",
        "zero3": "DEEPSPEED",
    }
    # The default of accelerate (pdsh) starts one training run on each machine.
    for name in ("zero2", "zero3"):
        assert configs[name]["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


@pytest.mark.parametrize("name", sorted(LAUNCH_CONFIGS))
def test_accelerate_knows_keys_of_launch_config(name: str):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = vars(launch_command_parser().parse_args(["train.py"]))

    config = load_config_from_file(str(LAUNCH_CONFIGS[name]))  # refuses unknown keys at the top

    if config.num_processes != "gpu":
        assert config.num_processes % config.num_machines == 0
    assert config.mixed_precision is None, "the recipe sets the precision"
    for section in yaml.safe_load(LAUNCH_CONFIGS[name].read_text()).values():
        if isinstance(section, dict):
            assert section.keys() <= options.keys()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_launcher_takes_all_gpus(name: str, monkeypatch: pytest.MonkeyPatch):
    from accelerate.commands.launch import launch_command, launch_command_parser

    if "zero" in name:
        pytest.importorskip("deepspeed")
    numbers = []  # of processes, as torchrun understands them
    run = "torch.distributed.run.run"
    monkeypatch.setattr(run, lambda arguments: numbers.append(arguments.nproc_per_node))
    for options in ([], ["--num_processes", "2"]):
        command = ["--config_file", str(LAUNCH_CONFIGS[name]), *options, "recipe.yaml"]

        launch_command(launch_command_parser().parse_args(command))

    assert numbers == ["gpu", "2"]


@pytest.mark.parametrize("name", ["sr_emb_0.6b", "sr_emb_8b", "sr_emb_8b_full", "r3_emb_0.6b"])
def test_encoder_recipe_pads_nothing(name: str):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")

    assert recipe["training"]["varlen"] is True


def test_shell_scripts_are_valid():
    scripts = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100, ".ci/run must be executable"


SLURM_SCRIPT = ROOT / "launch" / "slurm.sh"
# Commands of a Slurm cluster. `accelerate` prints its environment, process id and arguments.
FAKE_COMMANDS = {
    "scontrol": "echo first",
    "srun": 'shift; echo srun $$; SLURM_NODEID=1 exec "$@"',
    "accelerate": "env; echo $$ $*",
}


def test_slurm_script_needs_a_recipe():
    result = subprocess.run(["bash", str(SLURM_SCRIPT)], capture_output=True, text=True)

    assert result.returncode == 2
    assert result.stderr.startswith("usage: sbatch launch/slurm.sh RECIPE.yaml")


def test_slurm_script_leaves_time_to_save(tmp_path):
    """Slurm sends its signal to the launcher, which waits as long for its workers."""
    for name, body in FAKE_COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
    }
    command = ["bash", str(SLURM_SCRIPT), "r.yaml"]

    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    srun_line, *variables, accelerate_line = result.stdout.splitlines()
    script = SLURM_SCRIPT.read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", script, re.MULTILINE)
    assert f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds}" in variables
    assert accelerate_line.split()[0] == srun_line.removeprefix("srun "), "the same process"
    assert accelerate_line.endswith(
        "--num_processes 16 --machine_rank 1"
        " --main_process_ip first --main_process_port 20007 r.yaml"
    )


def test_hf_jobs_script_prints_its_job(tmp_path):
    """The real `hf` reads the options, and submits nothing."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "constraints.txt").write_text("")
    # The script builds a wheel with pip, which would need a network.
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {"PATH": path, "HF_TOKEN": "made-up", "HF_JOBS_OPTIONS": "--dry-run"}
    command = ["bash", str(ROOT / "launch" / "hf_jobs.sh"), "recipes/a.yaml", "out=runs/a b"]

    job = subprocess.check_output(command, cwd=tmp_path, env=os.environ | options, text=True)

    assert "\"$@\"' launch recipes/a.yaml 'out=runs/a b'" in job
    assert "./runs:/app/runs:rw" in job
    assert "made-up" not in job
    assert job.endswith("(dry run) Job not submitted.\n")


def test_skypilot_task_has_documented_keys():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())

    assert task.keys() == {"name", "workdir", "file_mounts", "resources", "envs", "setup", "run"}
    assert task["resources"].keys() <= {"accelerators", "disk_size"}
    assert (ROOT / task["envs"]["RECIPE"]).is_file()
    for step in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[step], check=True, text=True)
    assert {"RECIPE", "ARGUMENTS"} == task["envs"].keys()


# The Dockerfile, as far as it can be checked without Docker -------------------


def instructions() -> list[tuple[str, str, str]]:
    """Return the stage, the name and the arguments of each instruction of the Dockerfile.

    The stage is empty before the first FROM. Continued lines are joined.
    """
    text = re.sub(r"^#.*\n", "", read("Dockerfile"), flags=re.MULTILINE)
    rows = []
    stage = ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            stage = arguments.split(" AS ")[-1]
        if line.strip():
            rows.append((stage, name, arguments))
    return rows


def arguments_of(name: str, stage: str | None = None) -> list[str]:
    """Return the arguments of all instructions of a name, in one stage or in all."""
    return [
        arguments
        for row_stage, row_name, arguments in instructions()
        if row_name == name and stage in (None, row_stage)
    ]


def test_targets_share_a_pinned_base():
    stages = ["${BASE} AS base", "base AS cpu", "base AS cuda", "${DEVICE} AS serve"]
    assert arguments_of("FROM") == stages

    image, device = arguments_of("ARG", "")
    assert device == "DEVICE=cuda"
    (version,) = re.findall(r"^BASE=python:(\d+\.\d+\.\d+)-slim-\w+$", image)
    assert version in Requirement(f"python{PROJECT['requires-python']}").specifier


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs the extra dev")
def test_hadolint_finds_no_fault():
    outcome = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True)

    assert (outcome.returncode, outcome.stdout) == (0, "")


def test_dockerfile_adds_no_address():
    """ADD could download a file."""
    names = {name for _, name, _ in instructions()}

    assert names == {
        *("ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "CMD", "USER"),
        *("VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"),
    }


def test_targets_run_without_root():
    users = {stage: arguments for stage, name, arguments in instructions() if name == "USER"}

    assert users == dict.fromkeys(("cpu", "cuda", "serve"), "1000")
    (line,) = [line for line in arguments_of("RUN", "base") if "useradd" in line]
    assert "--uid 1000" in line
    assert "chown skilltrain runs" in line


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_dependencies_come_before_source(target: str):
    assert arguments_of("COPY", "base") == ["pyproject.toml constraints.txt ./"]

    steps = [(name, line) for stage, name, line in instructions() if stage == target]
    position = steps.index(("COPY", ". ."))
    installs = [line for _, line in steps[:position] if "pip install" in line]
    assert all("-r requirements.txt" in line for line in installs)
    assert len(installs) == 1
    assert "--no-deps -e ." in steps[position + 1][1]


def test_dependencies_are_listed(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (line,) = arguments_of("RUN", "base")
    command = "python3" + line.partition("&& python3")[2]
    variables = os.environ | {"EXTRAS": "serve,onnx"}

    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=variables, check=True)

    extras = PROJECT["optional-dependencies"]
    expected = [*PROJECT["dependencies"], *extras["serve"], *extras["onnx"]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == expected


def test_copied_source_is_allowed():
    lines = read(".dockerignore").splitlines()

    assert lines[0] == "*"
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert {"pyproject.toml", "constraints.txt", "README.md", "src", "recipes"} <= set(allowed)
    assert [name for name in allowed if not (ROOT / name).exists()] == []


def test_container_starts_server(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTER_TOKEN", "secret")
    arguments = json.loads(arguments_of("ENTRYPOINT")[0])

    outcome = run_command(*arguments[1:], tmp_path / "router")

    assert arguments[0] == "skilltrain"
    assert outcome.error_line.endswith("[no-router]")  # so the options are valid
    assert json.loads(arguments_of("CMD", "serve")[0]) == ["/router"]
    assert json.loads(arguments_of("VOLUME")[0]) == ["/router", "/cache"]


def test_health_check_is_answered(monkeypatch):
    access = pytest.importorskip("skilltrain.serving.access", reason="needs skilltrain[serve]")
    monkeypatch.setenv("ROUTER_TOKEN", "secret")
    arguments = json.loads(arguments_of("ENTRYPOINT")[0])
    options = dict(pairwise(arguments))
    (check,) = arguments_of("HEALTHCHECK")
    (host, path) = re.findall(r"http://([^/]+)(/\w+)", check)[0]

    allowed = access.read_access(
        options["--host"], [options["--allowed-host"]], (), options["--token-env"]
    )

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", host.encode())]}
    assert allowed.check(scope) is None
    assert host.endswith(f":{options['--port']}")
    assert arguments_of("EXPOSE") == [options["--port"]]


def test_cpu_target_requires_package_index():
    assert re.match(r'test -n "\$TORCH_INDEX" \|\|.*exit 2', arguments_of("RUN", "cpu")[0])


def test_copied_files_exist():
    sources = []
    for line in arguments_of("COPY"):
        sources += line.split()[:-1]

    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_installed_packages_are_pinned():
    installs = [line for line in arguments_of("RUN") if "pip install" in line]

    assert len(installs) == 4
    for line in installs:
        assert line.count("pip install") == line.count("-c constraints.txt")
    assert re.findall(r"torch==([\d.]+)\+cpu", " ".join(installs)) == [pins()["torch"]]
    for argument in arguments_of("ARG"):
        name, _, extras = argument.partition("=")
        if name == "EXTRAS":
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


# Documents --------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_names_existing_make_targets(name: str):
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)

    assert set(re.findall(r"\bmake ([a-z][\w-]*)", code_in(read(name)))) <= set(targets)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_names_existing_files(name: str):
    folders = "recipes|data_pipelines|launch|examples|src|tests|benchmarks"

    paths = re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*\w", code_in(read(name)))

    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
