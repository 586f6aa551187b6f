"""A server process under many, slow and broken connections; and its log handler."""

import http.client
import json
import logging
import os
import socket
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs skilltrain[serve]")
pytest.importorskip("resource", reason="this system has no limit of descriptors")

import resource

from starlette.requests import ClientDisconnect

from processes import start_apart
from skilltrain.cli import main
from skilltrain.serving import connections as serving_connections
from skilltrain.serving.connections import LineHandler
from small_library import succeeds, write_library

HALF_HEAD = b"POST /route HTTP/1.1\r\nHost: localhost\r\nContent-Le"
HALF_BODY = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 999\r\n\r\n{"que'
)


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Path:
    """Return a router with BM25 as its only ranker."""
    folder = tmp_path_factory.mktemp("served")
    skills = write_library(folder / "library") / "skills"
    succeeds("index", f"pool={skills}", "rankers=[{kind: lexical}]", f"out={folder / 'router'}")
    return folder / "router"


class Server:
    """A running `skilltrain serve --mcp http`."""

    def __init__(self, process: ForkServerProcess, port: int, errors: Path) -> None:
        self.process = process
        self.port = port
        self.errors = errors

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(data)
        return connection

    def health(self) -> int:
        """Return the status of /health, or 0 without a response."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            client.request("GET", "/health")
            return client.getresponse().status
        except OSError:
            return 0
        finally:
            client.close()

    def wait_for_health(self) -> None:
        deadline = time.monotonic() + 240
        while self.health() != 200:
            assert self.process.is_alive() and time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.1)

    def log(self) -> str:
        """Return the text on stderr after the two lines with the address and how to connect."""
        lines = self.errors.read_text().splitlines(keepends=True)
        assert [line.split()[0] for line in lines[:2]] == ["serving", "connect:"]
        return "".join(lines[2:])

    def stop(self) -> tuple[int | None, str]:
        """Send SIGTERM; return the exit code and `log()`."""
        self.process.terminate()
        self.process.join(120)
        return self.process.exitcode, self.log()


def serve(seconds: int, arguments: list[str]) -> None:
    """Serve a router in this process, which may open 1,024 descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    serving_connections._MAX_WAITING_SECONDS = seconds
    main(["serve", *arguments])


@contextmanager
def running(router: Path, folder: Path, *options: str, seconds: int = 20):
    """Start a server that drops clients after `seconds` and may open 1,024 descriptors."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [str(router), "--mcp", "http", "--port", str(port), *options]
    process = start_apart(partial(serve, seconds, arguments), folder / "output", {})
    try:
        server = Server(process, port, folder / "output" / "err")
        server.wait_for_health()
        yield server
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def impatient_server(router, tmp_path_factory):
    """Start a server that drops slow clients after one second."""
    with running(router, tmp_path_factory.mktemp("impatient"), seconds=1) as server:
        yield server


@pytest.fixture
def many_files():
    """Let this process open 1,400 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1400:
        pytest.skip("this process may not open 1,400 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_it_survives_thousand_idle_connections(router, tmp_path, many_files):
    with running(router, tmp_path) as server:
        with ExitStack() as connections:
            for _ in range(1100):
                connections.enter_context(server.connect())

            status_when_full = server.health()

        server.wait_for_health()

        assert status_when_full == 503
        assert server.stop() == (0, "512 connections are open: more get 503\n")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_it_survives_lack_of_descriptors(router, tmp_path):
    with running(router, tmp_path) as server:
        num_open = len([*Path(f"/proc/{server.process.pid}/fd").iterdir()])
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_open + 5, 1024))
        with ExitStack() as connections:
            for _ in range(30):
                connections.enter_context(server.connect())
            while "accept() out of system resource" not in server.errors.read_text():
                assert server.process.is_alive()
                time.sleep(0.1)

        server.wait_for_health()
        code, errors = server.stop()

        assert code == 0
        assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [b"", HALF_HEAD, HALF_BODY % b"/route", HALF_BODY % b"/mcp"],
    ids=["idle", "half head", "half body", "half body of mcp"],
)
def test_slow_clients_are_dropped(impatient_server, data):
    with impatient_server.connect(data) as connection:
        assert connection.recv(1000) == b"", "the server has closed it"

    assert impatient_server.health() == 200
    assert impatient_server.log() == ""


@pytest.mark.slow
def test_client_that_reads_nothing_is_dropped(impatient_server):
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", impatient_server.port))

        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(request * 100)

    assert impatient_server.health() == 200


@pytest.mark.slow
def test_dropped_connections_leave_no_log(impatient_server):
    for path in (b"/route", b"/mcp", b"/nope"):
        for _ in range(20):
            impatient_server.connect(HALF_BODY % path).close()
    impatient_server.connect(b"\x00\xff nonsense\r\n\r\n").close()

    assert impatient_server.health() == 200
    assert impatient_server.log() == ""


@pytest.mark.slow
def test_fault_of_the_log_is_one_line(router, tmp_path):
    log = tmp_path / "log"
    with running(router, tmp_path, "--log", str(log)) as server:
        log.rmdir()
        log.write_text("")

        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        client.request("POST", "/route", json.dumps({"query": "merge pdf"}))

        assert client.getresponse().status == 200
        code, errors = server.stop()

    assert code == 0
    assert errors.startswith(f"{log}: cannot write the log")
    assert errors.count("\n") == 1


# The log handler ----------------------------------------------------------------------------------


@pytest.fixture
def logger():
    logger = logging.Logger("server")
    logger.addHandler(LineHandler())
    return logger


def test_error_is_logged_on_one_line(logger, capsys):
    try:
        {}["missing"]
    except KeyError:
        logger.exception("Exception in ASGI application\n")

    (line,) = capsys.readouterr().err.splitlines()

    assert line.startswith("Exception in ASGI application : KeyError: 'missing' (")
    assert f"{Path(__file__).name}:" in line


def test_repeated_line_is_printed_once(logger, capsys):
    for message in ("first", "first", "second", "first"):
        logger.error(message)

    assert capsys.readouterr().err.splitlines() == ["first", "second", "first"]


def test_a_disconnect_is_not_logged(logger, capsys):
    logger.error("fault", exc_info=ClientDisconnect())

    assert capsys.readouterr().err == ""


def test_the_log_handler_never_raises(logger, monkeypatch, capsys):
    logger.error("%d", "no number")
    with open(os.devnull) as closed:  # noqa: PTH123
        pass
    monkeypatch.setattr(sys, "stderr", closed)

    logger.error("lost")
    monkeypatch.undo()
    logger.error("second", exc_info=ValueError("without a traceback"))

    *_, line = capsys.readouterr().err.splitlines()
    assert line == "second: ValueError: without a traceback"
