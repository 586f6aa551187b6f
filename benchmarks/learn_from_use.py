#!/usr/bin/env python
"""Measure what a router learns from 200 logged requests, on other requests for the same skills.

python benchmarks/learn_from_use.py SKILLS ROUTER QUERIES OUT [--choice random] [--epochs 2]

ROUTER is the router in use over a folder of SKILLS, made by `fit --no-train`, with its folder
`pool`. QUERIES is a folder of the stage `queries` over this pool. 200 queries are sent over HTTP to
`skilltrain serve --log`, by 20 users of ten requests each. A user reads the ten skills of an answer
and loads a skill over MCP: the one that the judgements name, if it is shown, or with `--choice
random` any of them. Then `queries --from-log` and `fit` make a new router, and both routers answer
the other queries. Prints Hit@1 of both routers and the paired difference. A second call skips
logging if OUT/queries exists.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import httpx2
import numpy as np

import skilltrain
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import paired_differences, share
from skilltrain.serving.router import Router

NUM_LOGGED = 200
REQUESTS_PER_USER = 10
NUM_SHOWN = 10
SEED = 0


def run(*arguments: object) -> None:
    """Run a command of skilltrain, and stop if it fails."""
    subprocess.run([sys.executable, "-m", "skilltrain", *map(str, arguments)], check=True)


@contextmanager
def serve(router: Path, log: Path):
    """Serve a router over HTTP with a log. Yield the address, and stop the server afterwards."""
    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "skilltrain", "serve", str(router), "--mcp", "http"]
    with subprocess.Popen([*command, "--port", str(port), "--log", str(log)]) as process:
        try:
            while not is_healthy(address):
                if process.poll() is not None:
                    raise SystemExit("the server ended")
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()  # lets the server write its log


def is_healthy(address: str) -> bool:
    """Return whether the server answers."""
    try:
        return httpx2.get(f"{address}/health").status_code == 200
    except httpx2.TransportError:
        return False


def simulate_users(address: str, tasks: Sequence[Task], choice: str) -> int:
    """Send requests and load skills of the answers. Return the number of loads.

    Args:
        address: Address of the server.
        tasks: Requests with their gold skills.
        choice: `judged` loads a gold skill that is shown, `random` any skill that is shown.
    """
    rng = random.Random(SEED)
    num_loads = 0
    for start in range(0, len(tasks), REQUESTS_PER_USER):
        # The log tells users apart by their addresses. All of 127.0.0.0/8 is this machine.
        user = f"127.0.0.{2 + start // REQUESTS_PER_USER}"
        transport = httpx2.HTTPTransport(local_address=user)
        with httpx2.Client(base_url=address, transport=transport, timeout=60) as client:
            for task in tasks[start : start + REQUESTS_PER_USER]:
                body = {"query": task.query.text, "k": NUM_SHOWN}
                skills = client.post("/route", json=body).raise_for_status().json()["skills"]
                if choice == "judged":
                    skills = [row for row in skills if row["skill_id"] in task.relevance.gold]
                if skills:
                    load_skill(client, rng.choice(skills)["uri"])
                    num_loads += 1
    return num_loads


def load_skill(client: httpx2.Client, uri: str) -> None:
    """Call the tool load_skill over MCP."""
    call = {"name": "load_skill", "arguments": {"uri": uri}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    headers = {"Accept": "application/json, text/event-stream"}
    client.post("/mcp", json=message, headers=headers).raise_for_status()


def hit_at_1(router: Router, tasks: Sequence[Task]) -> np.ndarray:
    """Return Hit@1 of each request: 1 if the first skill is a gold skill, otherwise 0."""
    hits: list[float] = []
    for task in tasks:
        best_id, _ = router.trace(task.query.text).ranking[0]
        hits.append(float(best_id in task.relevance.gold))
    return np.array(hits)


def log_requests(tasks: Sequence[Task], options: Namespace, query_folder: Path) -> None:
    """Let users send requests to the old router, and make queries from its log."""
    log = options.out / "log"
    shutil.rmtree(log, ignore_errors=True)  # of a call that stopped
    with serve(options.router, log) as address:
        num_loads = simulate_users(address, tasks, options.choice)
    print(f"{num_loads} loads after {len(tasks)} requests")
    run("queries", "--from-log", log, f"pool={options.router}/pool", f"out={query_folder}")


def train(options: Namespace, query_folder: Path, new_router: Path) -> dict[str, Any]:
    """Train a new router with the queries of the log, and return what `fit` decided."""
    summary = skilltrain.fit(
        options.skills,
        new_router,
        queries=[query_folder],
        in_use=options.router,
        epochs=options.epochs,
    )
    return {key: summary.get(key) for key in ("trained", "Hit@1", "num_queries")}


def compare(old_folder: Path, new_folder: Path, held_out: Sequence[Task]) -> dict[str, Any]:
    """Compare both routers on the requests that were not logged."""
    old_router = Router.load(old_folder)
    new_router = Router.load(new_folder)
    old_hits = hit_at_1(old_router, held_out)
    new_hits = hit_at_1(new_router, held_out)
    [(difference, p)] = paired_differences((new_hits - old_hits)[:, None])
    return {
        "router unchanged": new_router.identity == old_router.identity,
        "other requests": len(held_out),
        "Hit@1, in use": str(share(old_hits.astype(bool))),
        "Hit@1, new router": str(share(new_hits.astype(bool))),
        "difference": str(difference),
        "p": p,
        "better, worse": [int((new_hits > old_hits).sum()), int((new_hits < old_hits).sum())],
    }


def main() -> None:
    """Log requests, train a router with the log, and compare it with the router in use."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("skills", "router", "queries", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--choice", choices=["judged", "random"], default="judged")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    tasks = [*load_benchmark(options.queries).tasks]
    random.Random(SEED).shuffle(tasks)
    logged = tasks[:NUM_LOGGED]
    held_out = tasks[NUM_LOGGED:]

    query_folder = options.out / "queries"
    new_router = options.out / "router"
    if not query_folder.exists():
        log_requests(logged, options, query_folder)
    gate = train(options, query_folder, new_router)
    comparison = compare(options.router, new_router, held_out)
    print(json.dumps({"choice": options.choice, "gate": gate, **comparison}, indent=1))


if __name__ == "__main__":
    main()
