"""Requests that the HTTP server refuses by their headers, on every route."""

import logging
from contextlib import ExitStack

import pytest

from faults import raises

pytest.importorskip("mcp", reason="needs skilltrain[serve]")

from starlette.testclient import TestClient

from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.serving.access import read_access
from skilltrain.serving.router import Router
from skilltrain.serving.servers import new_http_app
from skilltrain.serving.service import Service

PAGE = "https://app.example.com"
ROUTES = {
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
    "/route": {"query": "merge pdf"},
    "/embed": {"inputs": "pdf"},
    "/rerank": {"query": "pdf", "texts": ["pdf"]},
    "/health": None,
    "/metrics": None,
}
ANSWERED = dict.fromkeys(ROUTES, 200) | {"/embed": 424, "/rerank": 424}


@pytest.fixture
def start():
    """Return a function that starts a server with these options and returns a client."""
    with ExitStack() as clients:

        def start(host="127.0.0.1", hosts=(), origins=(), token_variable=""):
            skill = Skill("pdf-merge", "pdf-merge", "merge pdf files", "Use pypdf.")
            router = Router([skill], SystemConfig(name="router", rankers=(LexicalConfig(),)))
            access = read_access(host, hosts, origins, token_variable)
            app = new_http_app(Service(router, "mark", None), access)
            return clients.enter_context(TestClient(app))

        yield start


def statuses(client, **headers) -> dict[str, int]:
    """Return the status of each route for a request with these headers."""
    headers = {"Host": "127.0.0.1:8765", "Accept": "application/json", **headers}
    answers = {}
    for path, body in ROUTES.items():
        method = "POST" if body else "GET"
        answers[path] = client.request(method, path, json=body, headers=headers).status_code
    return answers


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1", "[::1]", "[::1]:8765"])
def test_loopback_names_are_answered_everywhere(start, host, caplog):
    caplog.set_level(logging.WARNING)

    assert statuses(start(), Host=host) == ANSWERED

    assert caplog.records == []


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "evil.test:8765",
        "127.0.0.1.evil.test",
        "127.0.0.1@evil.test",
        "0.0.0.0",
        "localhost:8765:1",
        "[::1",
        "",
    ],
)
def test_other_hosts_are_refused_everywhere(start, host):
    assert statuses(start(), Host=host) == dict.fromkeys(ROUTES, 421)


@pytest.mark.parametrize(
    ("host", "hosts", "origins", "is_local"),
    [
        ("127.0.0.1", [], [], True),
        ("::1", ["localhost"], [], True),
        ("127.0.0.1", ["router.example.com"], [], False),
        ("127.0.0.1", [], ["https://a.example"], False),
        ("0.0.0.0", ["localhost"], [], False),
    ],
)
def test_only_loopback_clients_are_local(host, hosts, origins, is_local):
    assert read_access(host, hosts, origins, "").is_local == is_local


def test_public_addresses_need_allowed_hosts(start):
    client = start("0.0.0.0", ["Router.internal"])

    assert statuses(client, Host="router.internal:80") == ANSWERED
    for host in ("localhost", "127.0.0.1", "0.0.0.0", "evil.test"):
        assert statuses(client, Host=host) == dict.fromkeys(ROUTES, 421)


def test_loopback_names_stay_allowed(start):
    client = start(hosts=["router.example.com"])

    assert statuses(client, Host="router.example.com") == statuses(client) == ANSWERED


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("origin", ["https://evil.test", "http://127.0.0.1:8765", "null", ""])
def test_web_pages_are_refused_everywhere(start, host, origin):
    client = start(host, ["127.0.0.1"])

    assert statuses(client, Origin=origin) == dict.fromkeys(ROUTES, 403)


def test_an_allowed_page_can_ask(start):
    client = start(origins=[PAGE])

    assert statuses(client, Origin=PAGE) == ANSWERED
    assert statuses(client, Origin=f"{PAGE}.evil.test") == dict.fromkeys(ROUTES, 403)


def test_allowed_page_can_read_with_token(start, monkeypatch):
    monkeypatch.setenv("ROUTER_TOKEN", "s3cret")
    client = start(origins=[PAGE], token_variable="ROUTER_TOKEN")
    preflight = {
        "Host": "localhost",
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }

    answer = client.options("/route", headers=preflight)

    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE


def test_every_route_but_health_needs_token(start, monkeypatch):
    monkeypatch.setenv("ROUTER_TOKEN", "s3cret")
    client = start(token_variable="ROUTER_TOKEN")

    refused = dict.fromkeys(ROUTES, 401) | {"/health": 200}

    assert statuses(client, Authorization="Bearer s3cret") == ANSWERED
    assert statuses(client) == refused
    for header in ("Bearer s3cre", "Bearer s3cret2", "s3cret", "Basic s3cret", "Bearer é"):
        assert statuses(client, Authorization=header.encode()) == refused


def test_mcp_refuses_get_requests(start):
    headers = {"Host": "localhost", "Accept": "text/event-stream"}

    assert start().get("/mcp", headers=headers).status_code == 405


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("0.0.0.0", [], [], ""), "invalid-host"),
        (("::", [], [], ""), "invalid-host"),
        (("127.0.0.1", ["*"], [], ""), "invalid-host"),
        (("127.0.0.1", ["https://a.example"], [], ""), "invalid-host"),
        (("127.0.0.1", [], ["*"], ""), "invalid-host"),
        (("127.0.0.1", [], ["null"], ""), "invalid-host"),
        (("127.0.0.1", [], ["a.example"], ""), "invalid-host"),
        (("127.0.0.1", [], ["https://a.example/"], ""), "invalid-host"),
        (("127.0.0.1", [], [], "UNSET_TOKEN"), "missing-key"),
    ],
)
def test_bad_options_are_refused(options, code):
    with raises(code):
        read_access(*options)
