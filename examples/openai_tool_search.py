"""Search tools for OpenAI's Responses API with a router on the client's side.

    search = ToolSearch(tools, Router.load("runs/router"))
    response = client.responses.create(model=MODEL, tools=[SEARCH_TOOL], input=items)
    items += response.output
    items += [search.output(item) for item in response.output if item.type == "tool_search_call"]

The model sees only the search. The API loads the tools that an output holds. The router lends its
models. Of its skills none is used.
"""

import json
from collections.abc import Sequence
from typing import Any

from skilltrain import Router, Skill

SEARCH_TOOL = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find the tools for a task in plain words.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "the task"}},
        "required": ["query"],
        "additionalProperties": False,
    },
}


class ToolSearch:
    """Outputs of the search for tools."""

    def __init__(self, tools: Sequence[dict[str, Any]], router: Router, top_k: int = 5) -> None:
        """Index function tools, given as the API takes them, with the models of a router."""
        self._tools = {tool["name"]: tool | {"defer_loading": True} for tool in tools}
        self._router = router.with_skills([_skill_of(tool) for tool in tools])
        self._top_k = top_k

    def output(self, call: Any) -> dict[str, Any]:
        """Return the tool_search_output for a tool_search_call."""
        answer = self._router.route(call.arguments["query"], self._top_k)
        skills = answer.skills if answer.fits else ()
        return {
            "type": "tool_search_output",
            "call_id": call.call_id,
            "execution": "client",
            "status": "completed",
            "tools": [self._tools[skill.skill_id] for skill in skills],
        }


def _skill_of(tool: dict[str, Any]) -> Skill:
    """Convert a tool to a skill whose body is the JSON schema of its parameters."""
    name = tool["name"]
    return Skill(name, name, tool.get("description", ""), json.dumps(tool["parameters"]))
