"""A server of tools, by the `mcp` package: some that work, and some that do not."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")


@server.tool()
def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


@server.tool()
def read_file(path: str) -> str:
    """The text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


@server.tool()
def flood() -> str:
    """Sends far more than anybody wants."""
    return "x" * (200 << 20)


if __name__ == "__main__":
    print("a line for people", file=sys.stderr)
    server.run()
