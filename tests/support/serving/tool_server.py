"""A server of tools, by the `mcp` package or by hand: some that work, and some that do not.

The package takes a second to import; by hand, a server answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


TOOLS: dict[str, Callable[..., Any]] = {
    "weather": weather,
    "read_file": lambda path: Path(path).read_text(encoding="utf-8"),
    "hang": lambda: time.sleep(600),
    "die": lambda: os._exit(1),
    "flood": lambda: "x" * (20 << 20),
}


def server() -> Any:
    from mcp.server.mcpserver import MCPServer

    made = MCPServer("tools")
    for name, tool in TOOLS.items():
        made.add_tool(tool, name)
    return made


def answer(method: str, asked: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        version, name = asked["protocolVersion"], {"name": "tools", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": name}
    elif method == "tools/list":
        schema = {"type": "object"}
        result = {"tools": [{"name": name, "inputSchema": schema} for name in TOOLS]}
    elif method == "tools/call":
        text = TOOLS[asked["name"]](**asked["arguments"])
        result = {"content": [{"type": "text", "text": text}]}
    else:
        return {"error": {"code": -32601, "message": f"there is no {method}"}}
    return {"result": result}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its stdin, or is killed
    print("a line for people", file=sys.stderr)
    if "by-hand" not in sys.argv:
        server().run()
    for asked in map(json.loads, sys.stdin):
        if "id" in asked:  # else nobody waits for an answer
            told = answer(asked["method"], asked.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
