"""The Dockerfile as far as it can be checked without Docker: it is read, not built."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if "==" in line)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions():
    """(stage, instruction, arguments), lines joined; what stands before the first FROM has the stage ''."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            name, _, arguments = line.partition(" ")
            stage = arguments.split(" AS ")[-1] if name == "FROM" else stage
            found.append((stage, name, arguments))
    return found


def of(name, stage=None):
    return [arguments for where, what, arguments in instructions() if what == name and stage in (None, where)]


def test_both_targets_come_from_one_pinned_base():
    assert of("FROM") == ["${BASE} AS base", "base AS cpu", "base AS cuda"]
    (image,) = [value.removeprefix("BASE=") for value in of("ARG", "")]
    name, version, _ = re.fullmatch(r"(python):(\d+\.\d+\.\d+)(-slim-\w+)", image).groups()
    assert name == "python" and version in Requirement(f"python{PROJECT['requires-python']}").specifier
    known = {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "CMD", "USER"}  # no ADD: it takes addresses
    assert {what for _, what, _ in instructions()} == known


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_a_target_ends_as_a_user_without_rights(stage):
    last = [(what, arguments) for where, what, arguments in instructions() if where == stage][-1]
    assert last == ("USER", "skilltrain")
    assert any("useradd" in line and line.endswith("chown skilltrain runs") for line in of("RUN", "base"))


def test_what_is_copied_exists_and_what_is_installed_is_pinned():
    sources = [source for line in of("COPY") for source in line.split()[:-1]]
    assert sources and [source for source in sources if not (ROOT / source).exists()] == []
    installs = [line for line in of("RUN") if "pip install" in line]
    assert len(installs) == 3 and all("-c constraints.txt" in line for line in installs)
    assert re.findall(r"torch==([\d.]+)\+cpu", " ".join(installs)) == [PINS["torch"]]
    for extras in (value.partition("=")[2] for value in of("ARG") if value.startswith("EXTRAS=")):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_cpu_target_asks_for_its_index_before_it_installs_anything():
    first, *_ = of("RUN", "cpu")
    assert first.startswith('test -n "$TORCH_INDEX" ||') and "exit 2" in first
