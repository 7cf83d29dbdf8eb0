"""A server of tools, by the `mcp` package: some that work, and some that do not."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


def read_file(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def hang() -> None:
    time.sleep(600)


def die() -> None:
    os._exit(1)


def flood() -> str:
    return "x" * (200 << 20)


for tool in (weather, read_file, hang, die, flood):
    server.add_tool(tool)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its stdin, or is killed
    print("a line for people", file=sys.stderr)
    server.run()
