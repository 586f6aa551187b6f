"""Configuration files of agent hosts, with which they start the MCP server over stdio.

Notes:
    - Editors start servers without the PATH of a shell, so the program is an absolute path.
    - JSON's strings and lists of strings are also TOML.
    - Codex waits ten seconds for a server. Importing torch can take longer.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

Host = Literal["claude-code", "codex", "cursor", "gemini", "vscode"]
CONFIG_FILES: dict[Host, str] = {
    "claude-code": ".mcp.json of a project",
    "codex": "~/.codex/config.toml",
    "cursor": "~/.cursor/mcp.json",
    "gemini": "~/.gemini/settings.json",
    "vscode": ".vscode/mcp.json of a project",
}
"""The configuration file of each host."""
_STARTUP_SECONDS = 60


def host_config(host: Host, program: str, arguments: Sequence[str]) -> str:
    """Return the text of a host's configuration file that starts a program as MCP server.

    Args:
        host: Agent host.
        program: Absolute path of the program.
        arguments: Arguments of the program.
    """
    server: dict[str, Any] = {"command": program, "args": [*arguments]}
    # Codex reads TOML and waits only ten seconds by default. The other hosts read JSON.
    if host == "codex":
        server["startup_timeout_sec"] = _STARTUP_SECONDS
        return _toml_table("mcp_servers.skilltrain", server)
    # VS Code has another key for servers, and wants the type of the connection.
    if host == "vscode":
        content = {"servers": {"skilltrain": {"type": "stdio", **server}}}
    else:
        content = {"mcpServers": {"skilltrain": server}}
    return json.dumps(content, indent=2, ensure_ascii=False)


def _toml_table(name: str, values: dict[str, Any]) -> str:
    """Return a table of strings, lists and numbers in TOML."""
    lines = [f"[{name}]"]
    for key, value in values.items():
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
