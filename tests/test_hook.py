"""The command for agents' hooks: it prints skills, or nothing after a fault, and exits with 0."""

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
    """Start a stub of `skilltrain serve`; yield its address and the requests that it gets.

    Args:
        answer: Content of each response.
        code: Status of each response.
        wait: Seconds after each byte of the content.
    """
    requests: list[dict] = []

    class Handler(Quiet):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            head = {"path": self.path, "token": self.headers["Authorization"]}
            requests.append(head | body)
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            for n in range(len(answer)):
                self.wfile.write(answer[n : n + 1])
                time.sleep(wait)

    with serving(Handler) as address:
        yield address, requests


def hook(address: str, text: str, seconds: float = 100.0, **variables: str) -> str:
    """Run the hook and return what it prints. Check that it exits with 0 and that stderr is empty.

    Args:
        address: Address of the server.
        text: Text on stdin.
        seconds: Time limit; the hook's own is too short for slow machines.
        **variables: Environment variables.
    """
    code = f"import skilltrain.serving.hook as hook; hook._SECONDS = {seconds}; hook.main()"
    outcome = subprocess.run(
        [sys.executable, "-c", code, address],
        input=text.encode(),
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | variables,
    )
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    return outcome.stdout.decode()


def test_it_prints_skills_of_prompt():
    with server(json.dumps(ANSWER).encode()) as (address, _):
        first, line, last = hook(address, "join these pdf files").splitlines()

    assert "untrusted" in first
    assert line == (
        "- pdf-merge (skill://pdf-merge/SKILL.md): merge  [31mpdf files "
        "FLAGGED by the safety screening."
    )
    assert "load_skill" in last


def test_it_reads_json_of_hook():
    text = json.dumps({"hook_event_name": "UserPromptSubmit", "prompt": "join these pdf files"})

    with server(json.dumps(ANSWER).encode()) as (address, requests):
        printed = hook(address, text)

    assert "pdf-merge" in printed
    assert requests == [
        {"path": "/route", "token": None, "query": "join these pdf files", "k": 3},
    ]


@pytest.mark.parametrize(
    "text",
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
def test_other_text_than_prompt_is_not_sent(text):
    with server(json.dumps(ANSWER).encode()) as (address, requests):
        assert hook(address, text) == ""

    assert requests == []


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "<task-notification>\n<summary>pdfs are merged</summary>"},
        {"prompt": " <task-notification> merge"},
        {"prompt": "<system-reminder>merge the pdfs</system-reminder>"},
        {"prompt": '<cross-session-message from="a">merge the pdfs'},
        {"prompt": '<teammate-message teammate_id="a">merge the pdfs'},
        {"prompt": "[SYSTEM NOTIFICATION - NOT USER INPUT] pdfs"},
        {"prompt": "merge the pdfs", "agent_id": "a1"},
    ],
)
def test_a_prompt_of_no_user_is_not_sent(values):
    with server(json.dumps(ANSWER).encode()) as (address, requests):
        assert hook(address, json.dumps(values)) == ""

    assert requests == []


def test_a_user_may_quote_a_notification():
    text = json.dumps({"prompt": "what does <task-notification> mean"})

    with server(json.dumps(ANSWER).encode()) as (address, _):
        assert "pdf-merge" in hook(address, text)


@pytest.mark.parametrize("text", ["not json", "\ufeff合并文件", '"quoted" words', "5 pdfs"])
def test_plain_text_is_a_prompt(text):
    with server(json.dumps(ANSWER).encode()) as (address, requests):
        assert "pdf-merge" in hook(address, text)

    assert [request["query"] for request in requests] == [text]


def test_it_sends_token_of_environment():
    with server(json.dumps(ANSWER).encode()) as (address, requests):
        hook(address, "join", SKILLTRAIN_TOKEN="s3cret")

    assert [request["token"] for request in requests] == ["Bearer s3cret"]


def test_long_answers_are_cut():
    answer = ANSWER | {"skills": [SKILL | {"name": "x" * 3000}] * 4}
    with server(json.dumps(answer).encode()) as (address, _):
        lines = hook(address, "join").splitlines()

    assert len(lines) == 5
    assert max(map(len, lines)) < 1100


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_closed_stream_is_silent(closed):
    number = ["stdin", "stdout"].index(closed)
    code = f"import os; os.close({number}); import skilltrain.serving.hook as hook; hook.main()"
    line = [sys.executable, "-c", code, "http://127.0.0.1:1"]

    outcome = subprocess.run(line, input=b"join", capture_output=True, check=False, timeout=120)

    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"", b"")


def test_open_stdin_does_not_block():
    code = "import skilltrain.serving.hook as hook; hook.main()"

    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(120) == 0


def test_it_prints_all_or_nothing_at_any_time_limit():
    """The limit ends each part of the work in turn, from reading to the end after printing."""
    with server(json.dumps(ANSWER).encode()) as (address, _):
        complete = hook(address, "join")
        printed = {hook(address, "join", seconds=0.004 * number) for number in range(20)}

    assert "pdf-merge" in complete
    assert printed <= {"", complete}


@pytest.mark.parametrize(
    "answer",
    [
        {"fits": False, "skills": []},
        "not json",
        [],
        None,
        {"fits": True},
        {"fits": True, "skills": [7]},
    ],
)
def test_an_unusable_answer_is_silent(answer):
    content = answer if isinstance(answer, str) else json.dumps(answer)
    with server(content.encode()) as (address, requests):
        assert hook(address, "join these pdf files") == ""

    assert len(requests) == 1


def test_error_of_server_is_silent():
    with server(json.dumps(ANSWER).encode(), code=500) as (address, requests):
        assert hook(address, "join these pdf files") == ""

    assert len(requests) == 1


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1", "nonsense", "http://[", "http://x:99999999"]
)
def test_a_missing_server_is_silent(address):
    assert hook(address, "join these pdf files") == ""


def test_it_does_not_wait_for_slow_server():
    with server(json.dumps(ANSWER).encode(), wait=0.1) as (address, _):
        assert hook(address, "join", seconds=0.5) == ""


def test_it_does_not_wait_for_silent_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"

        assert hook(address, "join", seconds=0.5) == ""


def test_it_imports_no_other_package():
    code = (
        "import sys; before = set(sys.modules); import skilltrain.serving.hook; import sysconfig; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(names - set(sys.stdlib_module_names)))"
    )

    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert outcome.stdout.strip() == "['skilltrain']"
