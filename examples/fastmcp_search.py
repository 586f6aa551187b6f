"""The tools of a FastMCP server, found by skilltrain's rankers in place of FastMCP's own search (FastMCP 4).

    from fastmcp_search import RouterSearch
    server.add_transform(RouterSearch([{"kind": "dense", "source": "runs/encoder"}]))

A client then sees `search_tools` and `call_tool` alone. The rankers are those of a recipe; tools are indexed when the
first is searched for, and again when they change.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from anyio.to_thread import run_sync
from fastmcp.server.transforms.search import BM25SearchTransform
from fastmcp.tools.base import Tool

from skilltrain import Router, Skill
from skilltrain.config import validate
from skilltrain.retrieval.cascade import SystemConfig


class RouterSearch(BM25SearchTransform):
    """FastMCP's search transform over a router in memory. Settings are those of FastMCP's own."""

    def __init__(self, rankers: Sequence[Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self._system = validate(SystemConfig, {"name": "tools", "rankers": [*rankers]}, "rankers")
        self._router: Router | None = None

    async def _search(self, tools: Sequence[Tool], query: str) -> Sequence[Tool]:
        return await run_sync(self._found, {tool.name: tool for tool in tools}, query)

    def _found(self, tools: Mapping[str, Tool], query: str) -> list[Tool]:
        skills = {name: _as_skill(tool) for name, tool in tools.items()}
        if self._router is None or self._router.skills != skills:
            self._router = Router([*skills.values()], self._system)
        answer = self._router.route(query, self._max_results)
        return [tools[routed.skill_id] for routed in answer.skills] if answer.fits else []


def _as_skill(tool: Tool) -> Skill:
    return Skill(
        tool.name,
        tool.name,
        tool.description or "",
        json.dumps(tool.parameters, ensure_ascii=False),
    )
