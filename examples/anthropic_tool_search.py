"""Search the deferred tools of Anthropic's Messages API with a router instead of its own search.

    search = ToolSearch(tools, Router.load("runs/router"))
    message = client.messages.create(model=MODEL, tools=search.tools, messages=messages, ...)
    results = [search.result(block) for block in message.content if search.is_call(block)]

Claude sees only `search_tools`. The API loads the tools that a result refers to. The router lends
its models. Of its skills none is used.
"""

import json
from collections.abc import Sequence
from typing import Any

from skilltrain import Router, Skill

SEARCH_TOOL = {
    "name": "search_tools",
    "description": "Find the tools for a task in plain words.",
    "input_schema": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "the task"}},
        "required": ["query"],
    },
}


class ToolSearch:
    """Tools for a request to the API, and results of their search."""

    def __init__(self, tools: Sequence[dict[str, Any]], router: Router, top_k: int = 5) -> None:
        """Index tools, given as the API takes them, with the models of a router."""
        skills = [_skill_of(tool) for tool in tools]
        self._router = router.with_skills(skills)
        self._top_k = top_k
        self.tools = [SEARCH_TOOL, *(tool | {"defer_loading": True} for tool in tools)]

    def is_call(self, block: Any) -> bool:
        """Return whether a block of a message calls the search."""
        return block.type == "tool_use" and block.name == SEARCH_TOOL["name"]

    def result(self, call: Any) -> dict[str, Any]:
        """Return the tool_result for a call of the search."""
        answer = self._router.route(call.input["query"], self._top_k)
        skills = answer.skills if answer.fits else ()
        references = [{"type": "tool_reference", "tool_name": s.skill_id} for s in skills]
        content = references or "no tool fits"
        return {"type": "tool_result", "tool_use_id": call.id, "content": content}


def _skill_of(tool: dict[str, Any]) -> Skill:
    """Convert a tool to a skill whose body is the JSON schema of its input."""
    name = tool["name"]
    return Skill(name, name, tool.get("description", ""), json.dumps(tool["input_schema"]))
