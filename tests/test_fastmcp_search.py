"""The example that puts a router behind the search of FastMCP's tools."""

import asyncio
import sys
from pathlib import Path

import pytest

fastmcp = pytest.importorskip("fastmcp", reason="needs fastmcp")


def test_tools_are_found_by_a_router(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    from fastmcp_search import RouterSearch

    server = fastmcp.FastMCP("tools")
    server.tool(lambda files: files, name="pdf_merge", description="merge pdf files into one document")
    server.tool(lambda table: table, name="csv_repair", description="repair broken csv data")
    server.add_transform(RouterSearch([{"kind": "lexical"}], max_results=1))

    async def ask():
        async with fastmcp.Client(server) as client:
            listed = [tool.name for tool in await client.list_tools()]
            return listed, (await client.call_tool("search_tools", {"query": "broken csv"})).content[0].text

    listed, found = asyncio.run(ask())
    assert listed == ["search_tools", "call_tool"] and "csv_repair" in found and "pdf_merge" not in found
    assert "fastmcp_search" in sys.modules
