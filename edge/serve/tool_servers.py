"""Servers of tools (Model Context Protocol): what they offer, and calls of it.

Each has a client of its own in a guest process, as the official `mcp` package takes 55 MiB and
reads whatever a server sends. A server that hangs, dies or floods ends its call, and is started
again by the next one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from edgespec.errors import BackendError, MissingDependencyError, UnsupportedError
from edgespec.memory.device.track import resident_bytes
from edgespec.models.processes import (
    Guest,
    GuestEndedError,
    GuestLimits,
    answer_questions,
    limit_memory,
)
from edgespec.paths import read_text

if TYPE_CHECKING:
    from edgespec.decode.generation import ToolCall

# A client has 65 MiB of data, and ends a call that takes 24 MiB more.
_LIMITS = GuestLimits(128 << 20, seconds=20.0, patience_s=60.0)
_LOOK_S = 0.02  # between two looks at what a call takes
# That a client may grow by for it, twice an answer's bytes or more. The package copies all that
# came with each part that comes: 12 MiB take 2 s, and 30 MiB take 9.
_MOST_BYTES = 24 << 20
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
        return str(found["text"] if "text" in found else f"error: {found['problem']}")

    def close(self) -> None:
        for server in self._servers:
            server.end()


class _Server:
    """A server, and the guest that is its client."""

    def __init__(self, name: str, how: dict[str, Any]) -> None:
        self.name, self._how = name, how  # of the file
        self._guest = Guest("edgespec.serve.tool_servers", _LIMITS)
        self._started: list[psutil.Process] = []  # by the guest

    def ask(self, **question: Any) -> dict[str, Any]:
        """What the guest answers; `problem` says why there is nothing, and the server has ended."""
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
    text = read_text(file)
    try:
        servers = json.loads(text)["mcpServers"]
        named = {name: how.get("command", how.get("url")) for name, how in servers.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedError(f"{file} is no file of MCP servers", hint=_HINT) from None
    if wrong := [name for name, what in named.items() if not isinstance(what, str)]:
        raise UnsupportedError(f"{file}: {wrong[0]} has neither command nor url", hint=_HINT)
    return {name: how for name, how in servers.items() if not how.get("disabled")}


# -- the guest -----------------------------------------------------------------------------


class _Connection:
    """The connection to the server, from the first question on until what is `opened` is closed."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._client: Any = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its tools; or where a call is asked for, the result's text. `problem` says why not."""
        from anyio.from_thread import start_blocking_portal
        from mcp import Client

        try:
            if self._client is None:
                self._portal = self._opened.enter_context(start_blocking_portal())
                client = Client(_transport(question["server"]))
                connected = self._portal.wrap_async_context_manager(client)
                self._client = self._opened.enter_context(connected)
            if (name := question.get("name")) is None:
                return {"tools": self._portal.call(_tools, self._client)}
            found = self._called(name, question["values"])
        except MemoryError:
            raise
        except Exception as problem:  # what tools say of themselves is no exception
            while others := getattr(problem, "exceptions", None):  # of a group
                problem = others[0]
            return {"problem": str(problem) or type(problem).__name__}
        texts = [getattr(one, "text", None) or f"[{one.type}]" for one in found.content]
        text = f"{'error: ' * bool(found.is_error)}{chr(10).join(texts)}"
        rest = len(text) - (most := question["most_chars"])
        return {"text": text if rest <= 0 else f"{text[:most]}\n[{rest} characters cut off]"}

    def _called(self, name: str, values: dict[str, Any]) -> Any:
        held = resident_bytes()
        future = self._portal.start_task_soon(self._client.call_tool, name, values)
        while not wait([future], _LOOK_S).done:
            if resident_bytes() - held > _MOST_BYTES:
                raise BackendError(f"its answer takes more than {_MOST_BYTES >> 20} MiB")
        return future.result()


async def _tools(client: Any) -> list[dict[str, Any]]:
    tools, cursor = [], None
    for _ in range(16):  # pages; a list without an end is cut off
        page = await client.list_tools(cursor=cursor)
        tools += [
            {"name": one.name, "description": one.description or "", "parameters": one.input_schema}
            for one in page.tools
        ]
        if not (cursor := page.next_cursor):
            break
    return tools


@asynccontextmanager
async def _transport(how: dict[str, Any]) -> AsyncIterator[Any]:
    """What is read from a server and written to it, until it is left: then the server ends."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    if "command" not in how:
        http = create_mcp_http_client(how.get("headers"))
        async with http, streamable_http_client(how["url"], http_client=http) as streams:
            yield streams
        return
    given = {name: how[name] for name in ("command", "args", "env", "cwd") if name in how}
    limit_memory(sys.maxsize)  # else the server had this process's limit
    async with stdio_client(StdioServerParameters(**given)) as streams:
        limit_memory(_LIMITS.data_bytes)
        yield streams


if __name__ == "__main__":
    with ExitStack() as opened:
        answer_questions(_Connection(opened).answer)
