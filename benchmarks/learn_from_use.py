#!/usr/bin/env python
"""Measure whether a router gets better from a log of its use.

python benchmarks/learn_from_use.py OUT [--users judgements random] [--seeds 0] [--requests 200]

The skills and requests are those of examples/skill_library. A router without training is served
over HTTP and MCP, in this process. Users send requests to it: ten each, from an address of their
own. There are two kinds of users:

- `judgements`: they read the answer from the top, and load the first skill that the judgements
  require. They load nothing if there is none.
- `random`: they load any shown skill, by chance.

Then `skilltrain queries` and `skilltrain fit` learn from the log, with the served router as the
router in use. Both routers are compared on all requests that were not logged. Prints a line for
each kind of users and each seed. Takes about four minutes for each on two cores.
"""

import json
import random
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

import skilltrain
from skilltrain.data.queries import Queries
from skilltrain.data.use_log import UseLog
from skilltrain.metrics.bootstrap import paired_differences, share
from skilltrain.runs import run_stage
from skilltrain.serving.access import read_access
from skilltrain.serving.router import Router
from skilltrain.serving.servers import new_http_app
from skilltrain.serving.service import Service

LIBRARY = Path(__file__).parents[1] / "examples" / "skill_library"
REQUESTS_PER_USER = 10
NUM_SHOWN = 5
MCP_HEADERS = {"Accept": "application/json, text/event-stream"}
Rows = Sequence[Mapping[str, Any]]
Choice = Callable[[Rows, Mapping[str, Any]], Mapping[str, Any] | None]
"""Returns the skill that a user loads, from the shown skills and the request."""


def read_library() -> list[dict[str, Any]]:
    """Return all requests of the library with the skills that they require."""
    files = sorted((LIBRARY / "queries").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def first_required(shown: Rows, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first shown skill that the request requires."""
    required = [skill for skill in shown if skill["skill_id"] in request["skill_ids"]]
    return required[0] if required else None


def random_choice(seed: int) -> Choice:
    """Return a user who loads any shown skill."""
    rng = random.Random(seed)

    def choose(shown: Rows, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        del request
        return rng.choice(shown) if shown else None

    return choose


def use_router(router: Router, requests: Rows, choose: Choice, log: Path) -> None:
    """Send requests to a server, and load skills.

    Args:
        router: Router to serve.
        requests: Requests of all users, in order.
        choose: What users load.
        log: Folder of the server's log.
    """
    service = Service(router, "mark", UseLog(log))
    for start in range(0, len(requests), REQUESTS_PER_USER):
        # A new application for each user, because one application runs only once.
        app = new_http_app(service, read_access("127.0.0.1", [], [], ""))
        address = f"10.0.0.{start // REQUESTS_PER_USER}"
        with TestClient(app, "http://127.0.0.1", client=(address, 50_000)) as client:
            for request in requests[start : start + REQUESTS_PER_USER]:
                body = {"query": request["query"], "k": NUM_SHOWN}
                skill = choose(client.post("/route", json=body).json()["skills"], request)
                if skill is not None:
                    load_skill(client, skill["uri"])


def load_skill(client: TestClient, uri: str) -> None:
    """Call the tool load_skill over MCP."""
    call = {"name": "load_skill", "arguments": {"uri": uri}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    client.post("/mcp", json=message, headers=MCP_HEADERS).raise_for_status()


def learn(old: Path, log: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Make queries of a log, fit a router with them, and return the summary of `fit`."""
    queries = folder / "queries"
    run_stage(Queries(from_log=log, pool=old / "pool", out=queries))
    # The vectors of the base encoder are the same for all routers.
    shutil.copytree(old / "vectors", folder / "router" / "vectors")
    return skilltrain.fit(
        LIBRARY / "skills", folder / "router", queries=[queries], in_use=old, seed=seed
    )


def hits_of(router: Router, requests: Rows) -> np.ndarray:
    """Return for each request whether the first skill is required, [request]."""
    hits = []
    for request in requests:
        skills = router.route(request["query"], k=1).skills
        hits.append(skills[0].skill_id in request["skill_ids"])
    return np.array(hits)


def main() -> None:
    """Run all kinds of users and all seeds."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--users", nargs="+", default=["judgements", "random"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()

    old = options.out / "old"
    skilltrain.fit(LIBRARY / "skills", old, train=False)
    router = Router.load(old)
    for seed in options.seeds:
        requests = read_library()
        random.Random(seed).shuffle(requests)
        logged = requests[: options.requests]
        others = requests[options.requests :]
        old_hits = hits_of(router, others)
        for users in options.users:
            folder = options.out / f"{users}-{seed}"
            choose = first_required if users == "judgements" else random_choice(seed)
            use_router(router, logged, choose, folder / "log")
            summary = learn(old, folder / "log", folder, seed)

            new_hits = hits_of(Router.load(folder / "router"), others)
            differences = (new_hits.astype(float) - old_hits)[:, None]
            [(difference, p)] = paired_differences(differences)
            print(
                f"{users}, seed {seed}: replaced {summary['trained']}, {summary['num_lists']} "
                f"lists, held out {summary['num_queries']}: {summary['Hit@1']}; "
                f"{len(others)} other requests: old {share(old_hits)}, new {share(new_hits)}, "
                f"difference {difference}, p = {p:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
