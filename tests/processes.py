"""Functions in processes of their own, forked from a clean one that has loaded torch: each starts within a second."""

import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "accelerate",
        "pytest",
        "transformers.models.bert.modeling_bert",
        "transformers.models.qwen3.modeling_qwen3",
        "skilltrain.cli",
        "skilltrain.data.encode",
    ]
)
_PATIENCE = 120.0


class Ended(NamedTuple):
    """How a process ended (minus a signal's number), and what it wrote."""

    code: int | None
    out: str
    err: str


def run_apart(
    *calls: Callable[[], Any], environments: Sequence[Mapping[str, str]] = ()
) -> list[Ended]:
    """Run calls side by side to their end, each in a process and with variables of its own."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(calls))]
        processes: list[Any] = []
        for folder, call, variables in zip(
            folders, calls, environments or [{}] * len(calls), strict=True
        ):
            folder.mkdir()
            processes.append(_CONTEXT.Process(target=_enter, args=(folder, dict(variables), call)))
            processes[-1].start()
        for process in processes:
            process.join(_PATIENCE)
            process.kill()
            process.join()
        texts = [[(folder / stream).read_text() for stream in ("out", "err")] for folder in folders]
        return [
            Ended(process.exitcode, *pair) for process, pair in zip(processes, texts, strict=True)
        ]


def _enter(folder: Path, variables: dict[str, str], call: Callable[[], Any]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= variables
    call()


def run_ranks(num: int, call: Callable[[], Any]) -> list[Ended]:
    """The same call on `num` ranks of one launch on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {
        "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    environments = [every | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]
    return run_apart(*[call] * num, environments=environments)
