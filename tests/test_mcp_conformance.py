"""The HTTP server under the MCP conformance suite, and under clients of the Skills extension."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mcp", reason="needs skilltrain[serve]")

from processes import start_apart
from skilltrain.cli import main
from small_library import succeeds, write_library

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "mcp_conformance"
NODE = FOLDER / "node_modules" / ".bin" / "node"
SUITE = FOLDER / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
NOT_APPLICABLE = FOLDER / "not_applicable.yaml"
PAGE = ROOT / "docs" / "guides" / "mcp_conformance.md"


def is_healthy(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health").status == 200
    except urllib.error.URLError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve the small library over HTTP; yield the address."""
    folder = tmp_path_factory.mktemp("conformance")
    skills = write_library(folder / "library") / "skills"
    router = folder / "router"
    succeeds("index", f"pool={skills}", "rankers=[{kind: lexical}]", f"out={router}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    arguments = ["serve", str(router), "--mcp", "http", "--port", str(port)]
    arguments += ["--allowed-origin", address]

    process = start_apart(partial(main, arguments), folder / "output", {})
    try:
        while not is_healthy(address):
            assert process.is_alive()
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.skipif(
    not (NODE.exists() and SUITE.exists()),
    reason="needs the suite, which `make test` installs with npm",
)
@pytest.mark.parametrize(
    "scenarios", [("--suite", "all"), ("--requirements", "2025-11-25")], ids=["all", "2025-11-25"]
)
def test_applicable_scenarios_pass(server, scenarios, tmp_path):
    command = [NODE, SUITE, "server", "--url", f"{server}/mcp", *scenarios]
    command += ["--expected-failures", NOT_APPLICABLE, "--output-dir", tmp_path]

    outcome = subprocess.run(command, capture_output=True, text=True, timeout=240)

    assert outcome.returncode == 0, outcome.stdout
    assert "✓ sep-2640-skills-enumeration" in outcome.stdout or "2025-11-25" in scenarios


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("exit_code", "is_installed", "message"),
    [(0, True, ""), (1, False, "npm failed, so the MCP conformance test is skipped\n")],
)
def test_make_installs_suite_with_npm(tmp_path, exit_code, is_installed, message):
    folder = tmp_path / "tests" / "mcp_conformance"
    (folder / "node_modules").mkdir(parents=True)
    shutil.copy(FOLDER / "package.json", folder)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "npm").write_text(f"#!/bin/sh\nexit {exit_code}\n")
    (tmp_path / "npm").chmod(0o755)

    outcome = subprocess.run(
        ["make", "tests/mcp_conformance/node_modules/installed"],
        cwd=tmp_path,
        # `make test` gives its children flags that only a recipe with $(MAKE) may use.
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
    )

    assert (outcome.returncode, outcome.stderr) == (0, message)
    assert (folder / "node_modules" / "installed").exists() == is_installed


def test_page_lists_what_does_not_apply():
    excluded = yaml.safe_load(NOT_APPLICABLE.read_text())["server"]

    table_rows = re.findall(r"^\| .* \|$", PAGE.read_text(), re.MULTILINE)
    listed = re.findall(r"`([^`]+)`", "\n".join(table_rows))

    assert sorted(listed) == sorted(excluded)


@pytest.mark.slow
def test_fastmcp_lists_searches_and_loads(server):
    fastmcp = pytest.importorskip("fastmcp", reason="needs FastMCP 4.2 or newer")
    skills_client = pytest.importorskip("fastmcp.skills", reason="needs FastMCP 4.2 or newer")
    extension = skills_client.SkillsClientExtension()

    async def use_skills():
        async with fastmcp.Client(f"{server}/mcp", extensions=[extension]) as client:
            listed = await client.list_skills()
            found = await client.call_tool("search_skills", {"query": "merge pdf files", "k": 1})
            uri = found.structured_content["skills"][0]["uri"]
            return listed, await client.read_skill(uri)

    listed, skill = asyncio.run(use_skills())

    assert len(listed) == 20
    assert skill.name == "pdf-merge"
    assert b"join their pages" in skill.files["SKILL.md"].lower()
