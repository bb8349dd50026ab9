"""Tools of MCP servers as an environment: one client session per episode and server (package `mcp`, extra `mcp`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from rlhfless.environments.contract import ToolError

_INVALID_PARAMS = -32602
"""JSON-RPC's code for arguments that do not fit: the model's fault."""


class McpTools:
    """Base of an environment with the tools of `servers`. Add `reward()` and `done()`, and in `reset` call
    `await super().reset(seed, row)`."""

    servers: ClassVar[Sequence[Mapping[str, Any] | str]] = ()
    """Each `{"command": "python", "args": ["tools.py"], "env": {...}, "cwd": ...}`, or a URL."""

    async def reset(self, seed: int, row: dict[str, Any]) -> str | None:  # noqa: ARG002
        """Connect to all servers and list their tools."""
        from mcp import Client, StdioServerParameters, stdio_client

        self._stack = AsyncExitStack()
        self._clients: dict[str, Any] = {}
        self._schemas: list[dict[str, Any]] = []
        for server in self.servers:
            place = server if isinstance(server, str) else stdio_client(StdioServerParameters(**_own_python(server)))
            client = await self._stack.enter_async_context(Client(place))
            for tool in (await client.list_tools()).tools:
                if tool.name in self._clients:
                    raise ValueError(f"two MCP servers have a tool `{tool.name}`")
                self._clients[tool.name] = client
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                self._schemas.append({"type": "function", "function": function})
        return None

    async def tools(self) -> list[dict[str, Any]]:
        return self._schemas

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Raises ToolError if the server reports an error of the call."""
        from mcp import MCPError

        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of `{name}` must be a JSON object")
        try:
            result = await self._clients[name].call_tool(name, dict(arguments))
        except MCPError as error:
            if error.error.code == _INVALID_PARAMS:
                raise ToolError(str(error)) from error
            raise
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        await self._stack.aclose()


def _own_python(server: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server with `python` as this interpreter, which has the packages of the run."""
    return {**server, "command": sys.executable if server["command"] == "python" else server["command"]}


def tools_of_servers(given: Sequence[Mapping[str, Any] | str]) -> type[McpTools]:
    """Return an environment with the tools of these servers and nothing else; `rewards` score its episodes."""

    class McpServers(McpTools):
        servers = tuple(given)

    return McpServers
