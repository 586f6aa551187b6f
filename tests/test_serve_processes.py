"""`skilltrain serve` as a process: clients over stdio and HTTP, skills that change under load; writers killed."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs skilltrain[serve]")

from mcp import Client, StdioServerParameters

from skilltrain.routing.router import Router
from small_library import skilltrain, succeeds, write_library

pytestmark = pytest.mark.slow
CLIENTS = 50


@pytest.fixture
def places(tmp_path) -> tuple[Path, Path]:
    """(a router of BM25 alone, the folder of skills that it was made of)."""
    skills, router = write_library(tmp_path / "library") / "skills", tmp_path / "router"
    succeeds("index", f"pool={skills}", "rankers=[{kind: lexical}]", f"out={router}")
    return router, skills


def write_skill(skills: Path, name: str, words: str) -> None:
    place = skills / "new" / name / "SKILL.md"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"---\nname: {name}\ndescription: {words}\n---\nDo it: {words}.\n")


def command(router: Path, *options: object) -> list[str]:
    return [sys.executable, "-m", "skilltrain", "serve", str(router), *map(str, options)]


def until(happens, seconds: float = 240) -> None:
    last = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < last, "it has not happened"
        time.sleep(0.1)


def asked(port: int, method: str, path: str, body: dict | None = None):
    """The answer as a value, or None where nobody answers."""
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        server.request(method, path, json.dumps(body) if body else None)
        answer = server.getresponse()
        return json.loads(answer.read()) if answer.status == 200 else None
    except OSError:
        return None


def first(port: int, query: str) -> str | None:
    found = asked(port, "POST", "/route", {"query": query, "k": 1})
    return found["skills"][0]["skill_id"] if found and found["skills"] else None


async def search(client: Client, query: str) -> str:
    found = (await client.call_tool("search_skills", {"query": query, "k": 1})).structured_content
    uri = found["skills"][0]["uri"]
    text = (await client.call_tool("load_skill", {"uri": uri})).content[0].text
    assert "untrusted" in text or "not orders" in text
    return uri


def test_an_agent_starts_it_over_stdio(places):
    start, *arguments = command(places[0])

    async def ask():
        async with Client(StdioServerParameters(command=start, args=arguments, env=dict(os.environ))) as client:
            return await search(client, "merge these pdf files into one document")

    assert asyncio.run(ask()) == "skill://documents/pdf-merge/SKILL.md"


def test_fifty_clients_are_answered_while_skills_change(places):
    router, skills = places
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--mcp", "http", "--port", port, "--watch", skills, "--log", router.parent / "log")

    async def one(number: int) -> list[str]:
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            if number % 25 == 0:
                write_skill(skills, f"zebra-{number}", f"paint zebra number{number}")
            return [await search(client, "merge these pdf files into one document") for _ in range(2)]

    async def all_of_them() -> list[list[str]]:
        return await asyncio.gather(*map(one, range(CLIENTS)))

    with subprocess.Popen(command(router, *options)) as process:
        try:
            until(lambda: asked(port, "GET", "/health") is not None or process.poll() is not None)
            found = asyncio.run(all_of_them())
            assert {uri for uris in found for uri in uris} == {"skill://documents/pdf-merge/SKILL.md"}
            for number in range(0, CLIENTS, 25):
                until(lambda n=number: first(port, f"paint zebra number{n}") == f"new/zebra-{n}")
            assert asked(port, "GET", "/health")["num_skills"] == 20 + CLIENTS // 25
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    assert [*(router.parent / "log").glob("*/queries.parquet")], "the log is written at the end"


@pytest.mark.parametrize(("line", "kills"), [("index out={}", 3), ("serve {} --watch {}", 2)], ids=["index", "serve"])
def test_a_kill_in_an_update_leaves_the_router_of_before_or_after(places, line, kills):
    """At moments from the first byte of the next generation on."""
    router, skills = places
    for number in range(kills):
        for name in range(100):
            write_skill(skills, f"thing-{name}", f"handle thing{name} round{number}")
        writer = [sys.executable, "-m", "skilltrain", *line.format(router, skills).split()]
        with subprocess.Popen(writer, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not [*router.glob(".index-*.partial")]:
                time.sleep(0.001)
            time.sleep(0.02 * number)
            process.kill()
        opened = Router.load(router)
        assert len(opened.skills) in (20, 120)
        assert opened.route("merge these pdf files into one document", 1).skills[0].skill_id == "documents/pdf-merge"
    succeeds("index", f"out={router}")
    found = Router.load(router).route(f"handle thing7 round{kills - 1}", 1).skills[0]
    assert found.skill_id == "new/thing-7" and f"round{kills - 1}" in found.description
    assert len([*router.glob("*index-*")]) == 1, "nothing is left of what was killed"


def test_bad_settings_are_one_line(places):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, line in {
            "holds no router": ("nowhere",),
            "nowhere: no such folder": (places[0], "--watch", "nowhere"),
            "smoke": (places[0], "--mcp", "smoke"),
            "--port": (places[0], "--mcp", "http", "--port", 0),
            f"127.0.0.1:{port}: cannot listen here": (places[0], "--mcp", "http", "--port", port),
        }.items():
            assert words in skilltrain("serve", *line).error_line
