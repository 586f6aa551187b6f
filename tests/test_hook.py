"""The command for agents' hooks: it names skills, and whatever goes wrong it is silent and exits 0 soon."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from loopback import Quiet, serving

SKILL = {
    "uri": "skill://pdf-merge/SKILL.md",
    "name": "pdf-merge",
    "description": "merge \x1b[31mpdf files",
    "flags": ["x: y"],
}
ANSWER = {"fits": True, "skills": [SKILL], "note": "n"}


@contextmanager
def server(answer: bytes, code: int = 200, wait: float = 0.0):
    """A stub of `skilltrain serve` that waits behind each byte; yields its address and the bodies that it was sent."""
    bodies: list[dict] = []

    class Handler(Quiet):
        def do_POST(self):
            bodies.append(
                {"path": self.path, "token": self.headers["Authorization"]}
                | json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            for place in range(len(answer)):
                self.wfile.write(answer[place : place + 1])
                time.sleep(wait)

    with serving(Handler) as address:
        yield address, bodies


def hook(address: str, given: str, seconds: float = 20.0, **variables: str) -> str:
    """What the hook prints; it always exits 0 and says nothing on stderr. Its own limit is for quick machines."""
    code = f"import skilltrain.serving.hook as hook; hook._SECONDS = {seconds}; hook.main()"
    line = [sys.executable, "-c", code, address]
    found = subprocess.run(
        line,
        input=given.encode(),
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | variables,
    )
    assert (found.returncode, found.stderr) == (0, b"")
    return found.stdout.decode()


def test_it_names_the_skills_of_a_prompt():
    with server(json.dumps(ANSWER).encode()) as (address, bodies):
        told = hook(
            address,
            json.dumps({"hook_event_name": "UserPromptSubmit", "prompt": "join these pdf files"}),
        )
        assert told == hook(address, "join these pdf files")
    request = {"path": "/route", "token": None, "query": "join these pdf files", "k": 3}
    assert bodies == [request] * 2
    first, line, last = told.splitlines()
    assert "untrusted" in first and "load_skill" in last
    assert line == (
        "- pdf-merge (skill://pdf-merge/SKILL.md): merge  [31mpdf files FLAGGED by the safety screening."
    )


@pytest.mark.parametrize(
    "given",
    [
        "",
        " \n",
        "0" * 200_000,
        "[]",
        "null",
        "5",
        '"a string"',
        "{}",
        '{"prompt": null}',
        '{"prompt": 5}',
        '{"prompt": ["merge"]}',
        '{"prompt": ""}',
        '{"prompt": "merge',
        "[" * 100_000,
        '{"prompt": "?! 12"}',
    ],
)
def test_what_is_no_users_prompt_is_not_asked_for(given):
    with server(json.dumps(ANSWER).encode()) as (address, bodies):
        assert hook(address, given) == ""

    assert bodies == []


@pytest.mark.parametrize("given", ["not json", "\ufeff合并文件", '"quoted" words', "5 pdfs"])
def test_other_text_is_a_prompt(given):
    with server(json.dumps(ANSWER).encode()) as (address, bodies):
        assert "pdf-merge" in hook(address, given)

    assert [body["query"] for body in bodies] == [given]


def test_it_sends_the_token_of_the_environment():
    with server(json.dumps(ANSWER).encode()) as (address, bodies):
        hook(address, "join", SKILLTRAIN_TOKEN="s3cret")

    assert [body["token"] for body in bodies] == ["Bearer s3cret"]


def test_long_answers_are_cut():
    answer = ANSWER | {"skills": [SKILL | {"name": "x" * 3000}] * 4}
    with server(json.dumps(answer).encode()) as (address, _):
        lines = hook(address, "join").splitlines()

    assert len(lines) == 5 and max(map(len, lines)) < 1100


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_closed_stream_is_silent(closed):
    number = ["stdin", "stdout"].index(closed)
    code = f"import os; os.close({number}); import skilltrain.serving.hook as hook; hook.main()"
    line = [sys.executable, "-c", code, "http://127.0.0.1:1"]

    outcome = subprocess.run(line, input=b"join", capture_output=True, check=False, timeout=120)

    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"", b"")


def test_a_stdin_that_stays_open_does_not_hold_it():
    code = "import skilltrain.serving.hook as hook; hook.main()"

    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(120) == 0


def test_it_exits_with_0_at_any_moment():
    """The limit of time falls into each part of the work, reading, printing and the end included."""
    with server(json.dumps(ANSWER).encode()) as (address, _):
        for number in range(40):
            hook(address, "join", seconds=0.002 * number)


@pytest.mark.parametrize(
    "answer",
    [
        {"fits": False, "skills": []},
        "not json",
        [],
        None,
        {"fits": True},
        {"fits": True, "skills": [7]},
        ANSWER,
    ],
)
def test_no_skill_a_bad_answer_and_an_error_are_silent(answer):
    sent = answer if isinstance(answer, str) else json.dumps(answer)
    with server(sent.encode(), 500 if answer is ANSWER else 200) as (address, bodies):
        assert hook(address, "join these pdf files") == "" and len(bodies) == 1


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1", "nonsense", "http://[", "http://x:99999999"]
)
def test_a_server_that_is_not_there_is_silent(address):
    assert hook(address, "join these pdf files") == ""


def test_it_does_not_wait_for_a_slow_server():
    with server(json.dumps(ANSWER).encode(), wait=0.1) as (address, _):
        assert hook(address, "join", seconds=0.5) == ""
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts, and never answers
        assert hook(f"http://127.0.0.1:{deaf.getsockname()[1]}", "join", seconds=0.5) == ""


def test_it_imports_no_package_but_its_own():
    code = (
        "import sys; before = set(sys.modules); import skilltrain.serving.hook; import sysconfig; "
        "found = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(found - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['skilltrain']"
