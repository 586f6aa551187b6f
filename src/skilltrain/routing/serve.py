"""`skilltrain serve`: a router that answers agents over MCP, and programs over HTTP, while its skills change."""

import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import uvicorn
import watchfiles

from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.routing.router import Router
from skilltrain.routing.servers import LOOPBACK, new_http_app, new_mcp_server
from skilltrain.routing.service import Service
from skilltrain.terminal import say
from skilltrain.texts import clean_text

_LOOK, _WRITE = 2.0, 60.0  # seconds between looks at what another process has written, and between writes of the log


def serve_stdio(service: Service, watched: Path | None) -> None:
    """Serve MCP on stdin and stdout until stdin ends."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the log is written
    anyio.run(_beside_watch, service, watched, new_mcp_server(service).run_stdio_async)


def serve_http(service: Service, watched: Path | None, host: str, port: int) -> None:
    """Serve MCP and HTTP until Ctrl-C or SIGTERM. Raises SkilltrainError where the port is taken."""
    try:
        place = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        what = f"cannot listen here: {reason_of(error)}"
        raise SkilltrainError(what, where=f"{host}:{port}", fix="give another --port") from error
    if host not in LOOPBACK:
        say(f"warning: whoever reaches {host}:{port} may ask this router; it knows no passwords")
    server = uvicorn.Server(uvicorn.Config(new_http_app(service, host), log_level="warning"))
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn ends its work, and raises it again
    anyio.run(_beside_watch, service, watched, partial(server.serve, sockets=[place]))


async def _beside_watch(service: Service, watched: Path | None, serve: Callable[[], Awaitable[None]]) -> None:
    """Serve while the skills are kept current; at the end what is logged is written."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_again_and_again, service, _LOOK, "refresh", service.router.refresh)
        if service.log is not None:
            tasks.start_soon(_again_and_again, service, _WRITE, "log", service.log.flush)
        if watched is not None:
            tasks.start_soon(_watch, service, watched)
        try:
            await serve()
        finally:
            tasks.cancel_scope.cancel()
            if service.log is not None:
                service.log.flush()


async def _again_and_again(service: Service, seconds: float, name: str, work: Callable[[], object]) -> None:
    while True:
        await anyio.sleep(seconds)
        await _try(service, name, work)


async def _watch(service: Service, watched: Path) -> None:
    """Update the router for what has changed below `watched`, at first for what changed while nobody watched."""
    is_current = False
    async for changes in watchfiles.awatch(watched, yield_on_timeout=True):  # what failed is tried again when it wakes
        if changes or not is_current:
            is_current = await _try(service, "update", update_from, service.router, watched)


async def _try(service: Service, name: str, work: Callable[..., object], *arguments: object) -> bool:
    """Do it, counted as a request; after a fault, which is said once, the server goes on as it is."""
    fault = ""
    try:
        await service.timed(name, work, *arguments)
    except Exception as error:
        fault = f"{name}: {error}"
    if fault and fault != service.faults.get(name):
        say(fault)
    service.faults[name] = fault
    return not fault


def update_from(router: Router, watched: Path) -> dict[str, int]:
    """Let the router answer with the skills that `watched` holds now; those of other sources stay as they are.

    A skill keeps its category. Raises SkilltrainError where nothing can be read, or where another process writes.
    """
    before, source = router.skills, clean_text(watched.resolve().name)
    others = [skill for skill in before.values() if skill.source != source]
    taken = {skill.skill_id for skill in others}
    read = [skill for skill in read_pool(watched) if skill.skill_id not in taken]
    known = {skill.skill_id: before[skill.skill_id].category for skill in read if skill.skill_id in before}
    return router.update([*others, *(replace(skill, category=known.get(skill.skill_id)) for skill in read)])
