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


server.add_tool(weather)
server.add_tool(lambda path: Path(path).read_text(encoding="utf-8"), "read_file")
server.add_tool(lambda: time.sleep(600), "hang")
server.add_tool(lambda: os._exit(1), "die")
server.add_tool(lambda: "x" * (200 << 20), "flood")

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its stdin, or is killed
    print("a line for people", file=sys.stderr)
    server.run()
