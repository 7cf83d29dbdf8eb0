"""Servers of tools (Model Context Protocol): what they offer, and calls of it.

Each has a client of its own in a guest process. A server that hangs, dies or floods ends its call,
and is started again by the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import BackendError, MissingDependencyError, UnsupportedError
from edgespec.models.processes import Guest, GuestEndedError, GuestLimits
from edgespec.paths import read_text

if TYPE_CHECKING:
    import psutil

    from edgespec.decode.generation import ToolCall

# A client has 65 MiB of data, and ends a call that takes 24 MiB more.
_LIMITS = GuestLimits(128 << 20, seconds=20.0, patience_s=60.0)
_END_S = 2.0  # that a server has to end by itself, and then when it is told to
_MOST_TOOLS = 128
_HINT = 'it looks like {"mcpServers": {"files": {"command": "...", "args": ["..."]}}}'


class ToolServers:
    """The servers of a file, started. Those that cannot be are told, and left out.

    Args:
        file: JSON with `mcpServers`, as Claude Desktop, LM Studio and llama-server read it.
        allowed: names of tools that are called without asking; "*" is all.
        tell: is told which server is left out, and why.

    Raises MissingDependencyError without the package, and UnsupportedError for another file.
    """

    def __init__(self, file: Path, allowed: Sequence[str], tell: Callable[[str], None]) -> None:
        if find_spec("mcp") is None:
            raise MissingDependencyError(
                "--mcp needs the package mcp", hint="pip install 'edgespec[mcp]'"
            )
        self.allowed = set(allowed)
        self.tools: list[dict[str, Any]] = []  # OpenAI's definitions
        self._by_name: dict[str, tuple[_Server, str]] = {}
        self._servers = [_Server(name, how) for name, how in _servers_in(file).items()]
        with ThreadPoolExecutor(max(1, len(self._servers))) as threads:
            answers = list(threads.map(_Server.ask, self._servers))
        for server, found in zip(self._servers, answers, strict=True):
            if "problem" in found:
                tell(f"{server.name}: no tools: {found['problem']}")
            for tool in found.get("tools", ()):
                name = tool["name"]
                name = name if name not in self._by_name else f"{server.name}_{name}"
                self._by_name[name] = server, tool["name"]
                self.tools.append({"type": "function", "function": {**tool, "name": name}})
        del self.tools[_MOST_TOOLS:]

    def may_call(self, name: str) -> bool:
        """Whether nobody needs to be asked before a tool is called; nothing is, of none."""
        return name not in self._by_name or bool(self.allowed & {name, "*"})

    def result(self, call: ToolCall, context_size: int) -> str:
        """The text that a call gives; `error: ...` where it gives none."""
        if call.name not in self._by_name:
            return "error: there is no such tool"
        try:
            values = call.values
        except (ValueError, RecursionError):
            return "error: the arguments are no object, or cut off"
        server, name = self._by_name[call.name]
        # A character is a quarter of a token or more, and two results shall fit.
        found = server.ask(name=name, values=values, most_chars=context_size)
        text: str = found["text"] if "text" in found else f"error: {found['problem']}"
        return text

    def close(self) -> None:
        """End all servers; safe to call twice."""
        for server in self._servers:
            server.end()


class _Server:
    """A server, and the guest that is its client."""

    def __init__(self, name: str, how: dict[str, Any]) -> None:
        self.name, self._how = name, how  # of the file
        self._guest = Guest("edgespec.serve.tool_guest", _LIMITS)
        self._started: list[psutil.Process] = []  # by the guest

    def ask(self, **question: Any) -> dict[str, Any]:
        """What the guest answers; `problem` says why there is nothing, and the server has ended."""
        import psutil

        try:
            found: dict[str, Any] = self._guest.ask({"server": self._how, **question})
        except (GuestEndedError, BackendError) as problem:
            found = {"problem": str(problem)}
        except BaseException:
            self.end()
            raise
        if "problem" in found:
            self.end()
        elif not self._started and (pid := self._guest.pid) is not None:
            with suppress(psutil.Error):
                self._started = psutil.Process(pid).children()
        return found

    def end(self) -> None:
        """End the guest and the server, whose input ends with the guest, or which is ended then."""
        import psutil

        if (pid := self._guest.pid) is not None:
            with suppress(psutil.Error):  # while another thread waits for its answer
                psutil.Process(pid).kill()
        left, self._started = self._started, []
        for end in (psutil.Process.is_running, psutil.Process.terminate, psutil.Process.kill):
            for one in left:
                with suppress(psutil.Error):
                    end(one)
            _, left = psutil.wait_procs(left, _END_S)
        self._guest.end()


def _servers_in(file: Path) -> dict[str, dict[str, Any]]:
    """The servers that a file names, but for disabled ones. Raises UnsupportedError."""
    try:
        document = json.loads(read_text(file))
        servers = document["mcpServers"]
        for name, how in servers.items():
            if not isinstance(how.get("command", how.get("url")), str):
                raise UnsupportedError(f"{file}: {name} has neither command nor url", hint=_HINT)
    except UnsupportedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedError(f"{file} is no file of MCP servers", hint=_HINT) from None
    return {name: how for name, how in servers.items() if not how.get("disabled")}
