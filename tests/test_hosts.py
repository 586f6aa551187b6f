"""Configuration of agent hosts, the plugin, and the project's own skill."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs skilltrain[serve]")

from skilltrain import Router
from skilltrain import __version__ as skilltrain_version
from skilltrain.data.pool.read import read_pool
from small_library import skilltrain, succeeds, write_library

ROOT = Path(__file__).parents[1]
PROGRAM = str(Path(sys.executable).with_name("skilltrain"))
OWN_SKILL = ROOT / "skills" / "skilltrain"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> tuple[Path, Path]:
    """Return a router with BM25 as its only ranker, and the folder of its skills."""
    folder = tmp_path_factory.mktemp("hosts")
    skills = write_library(folder / "library") / "skills"
    router = folder / "router"
    succeeds("index", f"pool={skills}", "rankers=[{kind: lexical}]", f"out={router}")
    return router, skills


def print_config(host: str, router: Path, *options: object) -> str:
    return succeeds("serve", router, "--print-config", host, *options).out


# Configuration ----------------------------------------------------------------


@pytest.mark.parametrize("host", ["claude-code", "cursor", "gemini"])
def test_most_hosts_share_a_form(library, host):
    router, _ = library

    config = json.loads(print_config(host, router))

    server = {"command": PROGRAM, "args": ["serve", str(router)]}
    assert config == {"mcpServers": {"skilltrain": server}}


def test_vscode_needs_a_type(library):
    router, _ = library

    config = json.loads(print_config("vscode", router))

    server = {"type": "stdio", "command": PROGRAM, "args": ["serve", str(router)]}
    assert config == {"servers": {"skilltrain": server}}


def test_codex_reads_toml(library):
    router, _ = library

    config = tomllib.loads(print_config("codex", router))

    server = config["mcp_servers"]["skilltrain"]
    assert (server["command"], server["args"]) == (PROGRAM, ["serve", str(router)])
    assert server["startup_timeout_sec"] > 10


def test_config_keeps_options(library, tmp_path, monkeypatch):
    router, skills = library
    monkeypatch.chdir(tmp_path)
    options = ("--watch", skills, "--flagged", "withhold", "--log", "requests")

    config = tomllib.loads(print_config("codex", router, *options))

    log = str(tmp_path / "requests")
    expected = ["--watch", str(skills), "--flagged", "withhold", "--log", log]
    assert config["mcp_servers"]["skilltrain"]["args"][2:] == expected
    assert not (tmp_path / "requests").exists()


def test_the_file_is_named(library):
    router, _ = library

    outcome = succeeds("serve", router, "--print-config", "cursor")

    assert outcome.err == "for ~/.cursor/mcp.json\n"


def test_an_unknown_host_is_refused(library):
    outcome = skilltrain("serve", library[0], "--print-config", "emacs")

    assert outcome.code == 2
    assert "'cursor'" in outcome.err


def test_config_is_not_for_http(library):
    outcome = skilltrain("serve", library[0], "--print-config", "cursor", "--mcp", "http")

    assert "--print-config is for --mcp stdio" in outcome.only_line


def test_config_needs_a_router(tmp_path):
    outcome = skilltrain("serve", tmp_path, "--print-config", "cursor")

    assert str(tmp_path) in outcome.only_line


# Plugin and skill -------------------------------------------------------------


def read_json(name: str):
    return json.loads((ROOT / name).read_text())


def test_the_marketplace_offers_the_plugin():
    marketplace = read_json(".claude-plugin/marketplace.json")
    plugin = read_json(".claude-plugin/plugin.json")

    (offered,) = marketplace["plugins"]
    assert marketplace["owner"]["name"]
    assert (offered["name"], offered["source"]) == (plugin["name"], "./")
    assert offered["description"] == plugin["description"]
    assert plugin["version"] == skilltrain_version


@pytest.mark.parametrize("file", [".claude-plugin/plugin.json", "examples/codex/.codex/hooks.json"])
def test_hooks_run_our_command(file):
    hooks = read_json(file)["hooks"]

    (group,) = hooks["UserPromptSubmit"]
    (handler,) = group["hooks"]
    assert (handler["type"], handler["command"]) == ("command", "skilltrain-hook")


def test_the_own_skill_is_valid():
    validator = pytest.importorskip("skills_ref.validator", reason="needs skills-ref")

    assert validator.validate(OWN_SKILL) == []


def test_the_own_skill_raises_no_flag():
    router = Router([*read_pool(OWN_SKILL.parent)], "lexical")

    answer = router.route("train a skill router", 1)

    assert answer.skills[0].flags == ()


@pytest.fixture(scope="module")
def router_with_own_skill():
    library = read_pool(ROOT / "examples" / "skill_library" / "skills")
    return Router([*library, *read_pool(OWN_SKILL.parent)], "lexical")


@pytest.mark.parametrize(
    "task",
    [
        "my agent has 300 skills and keeps loading the wrong one",
        "fine-tune an encoder on our SKILL.md files",
        "train a skill router and serve it over MCP",
        "how good is our skill router on held-out requests",
    ],
)
def test_the_own_skill_is_found(router_with_own_skill, task):
    answer = router_with_own_skill.route(task, 1)

    assert answer.skills[0].skill_id == "skilltrain"


def test_the_own_skill_names_real_commands():
    text = (OWN_SKILL / "SKILL.md").read_text()

    commands = set(re.findall(r"`skilltrain ([a-z-]+)", text))

    assert commands == {"fit", "route", "queries", "evaluate", "serve", "index"}
    for command in commands:
        succeeds(command, "--help")
