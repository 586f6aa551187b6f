"""Search the tools of a FastMCP 4 server with skilltrain's rankers instead of FastMCP's own search.

    from fastmcp_search import RouterSearch
    server.add_transform(RouterSearch([{"kind": "dense", "source": "runs/encoder"}]))

A client then sees only `search_tools` and `call_tool`. The rankers are written as in a recipe. The
first search builds an index of the tools, and the next search after a change builds it again.
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
    """FastMCP's search transform with a router in memory."""

    def __init__(self, rankers: Sequence[Mapping[str, Any]], **settings: Any) -> None:
        """Create the transform.

        Args:
            rankers: Rankers of a system, as in a recipe.
            settings: Settings of FastMCP's transform.
        """
        super().__init__(**settings)
        self._system = validate(SystemConfig, {"name": "tools", "rankers": [*rankers]}, "rankers")
        self._router: Router | None = None

    async def _search(self, tools: Sequence[Tool], query: str) -> Sequence[Tool]:
        return await run_sync(self._route, {tool.name: tool for tool in tools}, query)

    def _route(self, tools: Mapping[str, Tool], query: str) -> list[Tool]:
        """Return the tools that answer a query, best first; none if the router says none fits.

        Args:
            tools: All tools by name.
            query: What the client searches for.
        """
        skills = {name: _skill_of(tool) for name, tool in tools.items()}
        if self._router is None or self._router.skills != skills:
            self._router = Router([*skills.values()], self._system)
        answer = self._router.route(query, self._max_results)
        if not answer.fits:
            return []
        return [tools[skill.skill_id] for skill in answer.skills]


def _skill_of(tool: Tool) -> Skill:
    """Convert a tool to a skill whose body is the JSON schema of the tool's parameters."""
    body = json.dumps(tool.parameters, ensure_ascii=False)
    return Skill(tool.name, tool.name, tool.description or "", body)
