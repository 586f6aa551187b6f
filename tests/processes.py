"""Run functions in processes of their own, forked from one that has loaded torch."""

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "accelerate",
        "pytest",
        "transformers.models.bert.modeling_bert",
        "transformers.models.qwen3.modeling_qwen3",
        "skilltrain.serving.servers",
        "skilltrain.cli",
        "skilltrain.data.encode",
    ]
)


class Ended(NamedTuple):
    """The exit code of a process (minus the number of a signal) and its output."""

    code: int | None
    out: str
    err: str


def run_apart(
    *calls: Callable[[], Any],
    environments: Sequence[Mapping[str, str]] = (),
    timeout: float = 120.0,
) -> list[Ended]:
    """Run calls at the same time, each in a process and with environment variables of its own.

    A process is killed after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(calls))]
        environments = environments or [{}] * len(calls)
        processes = [start_apart(*each) for each in zip(calls, folders, environments, strict=True)]

        results = []
        for process, folder in zip(processes, folders, strict=True):
            process.join(timeout)
            process.kill()
            process.join()
            out = (folder / "out").read_text()
            err = (folder / "err").read_text()
            results.append(Ended(process.exitcode, out, err))
        return results


def start_apart(
    call: Callable[[], Any], folder: Path, variables: Mapping[str, str]
) -> ForkServerProcess:
    """Start a call in a process with environment variables of its own, which hears Ctrl-C.

    Its stdout and stderr are the files `out` and `err` of `folder`.
    """
    folder.mkdir(exist_ok=True)
    process = _CONTEXT.Process(target=_enter, args=(folder, dict(variables), call))
    process.start()
    return process


def _enter(folder: Path, variables: dict[str, str], call: Callable[[], Any]) -> None:
    """Run a call whose stdout and stderr are files."""
    # A shell's background jobs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= variables
    call()


def run_ranks(num: int, call: Callable[[], Any]) -> list[Ended]:
    """Run a call on `num` ranks of one launch on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    environments = [variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]
    return run_apart(*[call] * num, environments=environments)
