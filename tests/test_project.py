"""What ships beside the code: metadata, pins, launch files, recipes, and documents that name real things."""

import copy
import os
import re
import runpy
import subprocess
import tomllib
from importlib import metadata
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

ROOT = Path(__file__).parents[1]
RECIPES = sorted(
    path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "ablations"
)
FULL_SIZE = [path.stem for path in sorted((ROOT / "recipes").glob("[rs][3r]_*.yaml"))]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def code_in(markdown: str) -> list[str]:
    """Fenced blocks and inline code of a document."""
    fence = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [*fence.findall(markdown), *re.findall(r"`([^`\n]+)`", fence.sub("", markdown))]


# Metadata and pins ------------------------------------------------------------


def test_metadata_points_at_what_exists():
    assert PROJECT["version"] == skilltrain.__version__
    assert f"## [{skilltrain.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    names = [PROJECT["readme"], *PROJECT["license-files"]]
    assert [name for name in names if not (ROOT / name).is_file()] == []
    assert Version("3.11.4") in Requirement(f"python{PROJECT['requires-python']}").specifier
    (script,) = metadata.entry_points(group="console_scripts", name="skilltrain")
    assert script.value == PROJECT["scripts"]["skilltrain"] and callable(script.load())


def pins() -> dict[str, str]:
    """Package → its release in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    # Betas only where a dependency has nothing else: we ask for none ourselves.
    found = [
        re.fullmatch(r"([\w.-]+)==([\d.]+(?:b\d+)?)", line)
        for line in lines
        if line and not line.startswith("#")
    ]
    return {canonicalize_name(pin[1]): pin[2] for pin in found if pin} if all(found) else {}


def test_pins_are_plain_releases_in_order_and_every_dependency_has_one_within_its_range():
    assert [*pins()] == sorted(pins()) and pins()
    pinned = ("dev", "quickstart", "deepspeed", "trackers", "qlora", "onnx")
    extras = [text for name in pinned for text in PROJECT["optional-dependencies"][name]]
    for text in (*PROJECT["dependencies"], *extras):
        needed = Requirement(text)
        assert needed.specifier, f"{text} has no version range"
        release = Version(pins()[canonicalize_name(needed.name)])
        assert release in needed.specifier and not release.is_prerelease, text


# The command line and the recipes ---------------------------------------------


def test_recipes_are_valid_say_what_they_are_and_start_nothing_when_imported():
    assert {path.stem for path in RECIPES if path.parent.name == "tiny"} == {
        *FULL_SIZE,
        "sr_emb_minilm",
        "sr_rank_minilm",
        "skillflow",
    }
    listed = {one.path: one for one in list_recipes(ROOT / "recipes")}
    for path in RECIPES:
        stage, found = parse_recipe(load_recipe(path), path), listed[path]
        assert found.about.endswith(".") and 20 < len(found.about) < 140, path
        assert len(found.facts) == (3 if isinstance(stage, TrainingStage) else 1), path
        if isinstance(stage, TrainingStage):
            assert "run" in runpy.run_path(
                str(path), run_name="imported"
            )  # what a spawned worker does


def keys_of(values: Any, path: str = "") -> set[str]:
    """The key paths of nested settings; what gains and layers hold is theirs."""
    if not isinstance(values, dict):
        return {path}
    return {
        key
        for name, value in values.items()
        for key in keys_of(value, f"{path}.{name}".lstrip("."))
    }


@pytest.mark.parametrize("name", FULL_SIZE)
def test_every_recipe_of_full_size_has_a_twin_with_the_same_keys(name: str):
    full, twin = (
        load_recipe(ROOT / "recipes" / folder / f"{name}.yaml") for folder in ("", "tiny")
    )
    assert keys_of(full) <= keys_of(twin)
    more = {key for key in keys_of(twin) - keys_of(full) if not key.startswith("dev.")}
    assert more <= {"data.max_lists"}
    alike = ("stage", "gains", "loss", "in_batch_negatives", "near_duplicates")
    assert [key for key in alike if full.get(key) != twin.get(key)] == []
    for key in (
        "epochs",
        "batch_size",
        "accumulation",
        "warmup_share",
        "weight_decay",
        "recompute",
        "seed",
    ):
        assert full["training"][key] == twin["training"][key], key
    assert full["model"]["template"] == twin["model"]["template"]


def test_the_papers_recipes_are_ours_but_for_a_few_lines():
    for path in sorted((ROOT / "recipes" / "paper").glob("sr_*.yaml")):
        ours = load_recipe(ROOT / "recipes" / path.name.replace("_raw", ""))
        found, expected = load_recipe(path), copy.deepcopy(ours)
        template = expected["model"]["template"]
        template["instruction"] = template["instruction"].replace("a task", "a coding task")
        template["skill"]["verbatim"] = True
        expected["data"] |= {"pool": "runs/paper/pool", "lists": found["data"]["lists"]}
        expected["out"] = f"runs/paper/{path.stem}"
        if "emb" in path.stem:
            expected["near_duplicates"] = None
        else:
            template["query_chars"], expected["model"]["query_max_tokens"] = None, 4000
        assert found == expected, path.name
    assert found["data"]["lists"] == "runs/paper/reranker_lists"


def test_the_recipes_hold_skillrouters_values():
    encoder, reranker = (
        load_recipe(ROOT / "recipes" / f"sr_{name}_0.6b.yaml") for name in ("emb", "rank")
    )
    training = {
        "epochs": 1,
        "warmup_share": 0.05,
        "weight_decay": 0.01,
        "recompute": True,
        "precision": "bfloat16",
    }
    own = (
        {"batch_size": 8, "accumulation": 4, "learning_rate": 2e-5},
        {
            "batch_size": 1,
            "accumulation": 16,
            "learning_rate": 1e-5,
        },
    )
    for recipe, mine in zip((encoder, reranker), own, strict=True):
        assert {key: recipe["training"][key] for key in (*training, *mine)} == training | mine
        assert recipe["model"]["template"]["query_chars"] == 1500
    assert encoder["loss"] == {"name": "infonce", "temperature": 0.05}
    assert reranker["loss"] == {"name": "listwise_ce", "temperature": 1.0}
    assert (encoder["model"]["max_tokens"], reranker["model"]["max_tokens"]) == (2048, 4096)
    skills = [recipe["model"]["template"]["skill"] for recipe in (encoder, reranker)]
    assert [(skill["description_chars"], skill["body_chars"]) for skill in skills] == [
        (300, 2500),
        (500, 2000),
    ]
    assert reranker["model"]["template"]["separator"] == "\n\n"


def test_the_cascade_has_skillflows_values_and_a_twin_of_the_same_systems():
    full, twin = (
        load_recipe(ROOT / "recipes" / folder / "skillflow.yaml")["systems"]
        for folder in ("", "tiny")
    )
    for one, other in zip(full, twin, strict=True):
        assert one["name"] == other["name"]
        for ranker, small in zip(one["rankers"], other["rankers"], strict=True):
            assert keys_of(ranker) - keys_of(small) == set() and ranker["kind"] == small["kind"]
    first, shallow, deep, chooser = full[-1]["rankers"]
    assert first["of"]["template"]["skill"]["fields"] == "description"
    assert (first["count"], first["join"], first["of"]["keep"], first["keep"]) == (
        5,
        "union",
        200,
        1000,
    )
    values = [(one["count"], one["of"]["keep"], one["of"]["max_tokens"]) for one in (shallow, deep)]
    assert values == [(1, 1000, 512), (1, 100, 4096)]
    assert (chooser["keep"], chooser["most"], chooser["specificity"]) == (10, 5, True)
    assert {one["llm"]["model"] for one in full[-1]["rankers"]} == {"gpt-4o-mini"}


# Launch files -----------------------------------------------------------------


def test_the_launch_configs_are_the_ones_we_promise_and_accelerate_knows_their_keys():
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = vars(launch_command_parser().parse_args(["train.py"]))
    found: dict[str, Any] = {}
    for path in sorted((ROOT / "launch").glob("*.yaml")):
        config = load_config_from_file(str(path))  # refuses unknown keys at the top
        assert config.num_processes % config.num_machines == 0
        assert config.mixed_precision is None, "precision is the recipe's"
        found[path.stem] = values = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {
            key for section in values.values() if isinstance(section, dict) for key in section
        } <= options.keys()
    one, ddp = {"cpu": "NO", "single_gpu": "NO"}, {"ddp": "MULTI_GPU", "multi_node": "MULTI_GPU"}
    kinds = {**one, **ddp, "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert {name: values["distributed_type"] for name, values in found.items()} == kinds
    # accelerate's default (pdsh) starts a training of its own on each machine, and writes all keys into a file
    for name in ("zero2", "zero3"):
        assert found[name]["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


def test_shell_scripts_are_valid():
    scripts = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100, ".ci/run must be executable"


def test_a_slurm_job_has_time_to_save_when_it_is_told_to_stop(tmp_path: Path):
    """Slurm's signal reaches the launcher, as early as the launcher waits for its workers."""
    script = ROOT / "launch" / "slurm.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(
        "usage: sbatch launch/slurm.sh RECIPE.yaml"
    )
    (early,) = re.findall(
        r"^#SBATCH --signal=TERM@(\d+)$", script.read_text(encoding="utf-8"), re.MULTILINE
    )
    started = 'shift; echo srun $$; SLURM_NODEID=1 exec "$@"'
    for name, body in {
        "scontrol": "echo first",
        "srun": started,
        "accelerate": "env; echo $$ $*",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "x",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
    }
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job}
    done = subprocess.run(
        ["bash", str(script), "r.yaml"], env=environment, capture_output=True, text=True, check=True
    )
    first, *variables, last = done.stdout.splitlines()
    assert f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={early}" in variables
    assert last.split()[0] == first.removeprefix("srun "), (
        "the launcher is the process that Slurm signals"
    )
    assert last.endswith(
        "--num_processes 16 --machine_rank 1 --main_process_ip first --main_process_port 20007 r.yaml"
    )


# The Dockerfile, as far as it can be checked without Docker -------------------


def instructions() -> list[tuple[str, str, str]]:
    """(stage, instruction, arguments), lines joined; what stands before the first FROM has the stage ''."""
    text = re.sub(
        r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            name, _, arguments = line.partition(" ")
            stage = arguments.split(" AS ")[-1] if name == "FROM" else stage
            found.append((stage, name, arguments))
    return found


def of(name: str, stage: str | None = None) -> list[str]:
    return [
        arguments
        for where, problem, arguments in instructions()
        if problem == name and stage in (None, where)
    ]


def test_both_targets_come_from_one_pinned_base():
    assert of("FROM") == ["${BASE} AS base", "base AS cpu", "base AS cuda"]
    (image,) = of("ARG", "")
    (version,) = re.findall(r"^BASE=python:(\d+\.\d+\.\d+)-slim-\w+$", image)
    assert version in Requirement(f"python{PROJECT['requires-python']}").specifier
    known = {
        "ARG",
        "FROM",
        "ENV",
        "WORKDIR",
        "RUN",
        "COPY",
        "CMD",
        "USER",
    }  # no ADD: it takes addresses
    assert {problem for _, problem, _ in instructions()} == known


def test_targets_end_as_a_user_without_rights_and_the_cpu_target_first_asks_for_its_index():
    last = {stage: (problem, arguments) for stage, problem, arguments in instructions()}
    assert last["cpu"] == last["cuda"] == ("USER", "skilltrain")
    assert any(
        "useradd" in line and line.endswith("chown skilltrain runs") for line in of("RUN", "base")
    )
    assert re.match(r'test -n "\$TORCH_INDEX" \|\|.*exit 2', of("RUN", "cpu")[0])


def test_what_is_copied_exists_and_what_is_installed_is_pinned():
    sources = [source for line in of("COPY") for source in line.split()[:-1]]
    assert sources and [source for source in sources if not (ROOT / source).exists()] == []
    installs = [line for line in of("RUN") if "pip install" in line]
    assert len(installs) == 3 and all("-c constraints.txt" in line for line in installs)
    assert re.findall(r"torch==([\d.]+)\+cpu", " ".join(installs)) == [pins()["torch"]]
    for extras in (value.partition("=")[2] for value in of("ARG") if value.startswith("EXTRAS=")):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


# Documents --------------------------------------------------------------------


def test_every_make_target_and_file_in_a_document_exists():
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    code = "\n".join(
        part for name in DOCUMENTS for part in code_in((ROOT / name).read_text(encoding="utf-8"))
    )
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", code)) <= targets
    folders = "recipes|data_pipelines|launch|examples|src|tests|benchmarks"
    named = set(re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*\w", code))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
