"""Servers of tools (Model Context Protocol) beside a chat: what they offer, and calls of it.

The official `mcp` package speaks to them, in a thread with an event loop of its own. A server that
hangs, dies or floods ends its call, and is started again by the next one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Waited
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from edgespec.cli.answer_options import read_text
from edgespec.cli.render import note, printable
from edgespec.errors import MissingDependencyError, UnsupportedError
from edgespec.memory.device.track import resident_bytes

if TYPE_CHECKING:
    from edgespec.decode.generation import ToolCall

_START_S, _CALL_S = 30.0, 60.0  # until a server answers first, and a call
_END_S = 10.0  # the package kills a server that does not end 4 s after it was asked to
_LOOK_S = 0.02  # between two looks at what a call takes
_MOST_BYTES = 64 << 20  # that this process may grow by within a call: it is being flooded
_MOST_PAGES, _MOST_TOOLS = 16, 128
_SHOWN_CHARS = 200
_HINT = 'it looks like {"mcpServers": {"files": {"command": "...", "args": ["..."]}}}'


class _CallError(Exception):
    """Why a call gave no result."""


@dataclass(eq=False)
class _Server:
    name: str
    how: dict[str, Any]  # of the file
    task: asyncio.Task[None] | None = None
    queue: asyncio.Queue[tuple[str, dict[str, Any], asyncio.Future[Any]]] = field(
        default_factory=asyncio.Queue
    )


class ToolServers:
    """The servers of a file, started. Those that cannot be are told, and left out.

    Args:
        file: JSON with `mcpServers`, as Claude Desktop, LM Studio and llama-server read it.
        allowed: names of tools that are called without asking; "*" is all.
        most_chars: of a result; the rest is cut off.

    Raises MissingDependencyError without the package, and UnsupportedError for another file.
    """

    def __init__(self, file: Path, allowed: Sequence[str], most_chars: int) -> None:
        if find_spec("mcp") is None:
            raise MissingDependencyError(
                "--mcp needs the package mcp", hint="pip install 'edgespec[mcp]'"
            )
        self._servers = [_Server(name, how) for name, how in _servers_in(file).items()]
        self._tasks: set[asyncio.Task[None]] = set()  # of servers that run, or are being ended
        self._allowed, self._most_chars = set(allowed), most_chars
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tools", daemon=True)
        self._thread.start()
        self._by_name: dict[str, tuple[_Server, str]] = {}
        self.tools: list[dict[str, Any]] = []  # OpenAI's definitions
        begun = [(one, self._started(one)) for one in self._servers]
        for server, future in begun:
            try:
                self._offer(server, self._awaited(future, server, _START_S))
            except _CallError as problem:
                note(f"{printable(server.name)}: no tools: {printable(str(problem))}", WARNING)

    def _offer(self, server: _Server, found: Sequence[Any]) -> None:
        for tool in found:
            name = tool.name if tool.name not in self._by_name else f"{server.name}_{tool.name}"
            self._by_name[name] = server, tool.name
            function = {"name": name, "description": tool.description or ""}
            function["parameters"] = dict(tool.input_schema)
            self.tools.append({"type": "function", "function": function})
        del self.tools[_MOST_TOOLS:]

    def result(self, call: ToolCall) -> str:
        """What a call gives: shown, asked for where it has to be, made. Never raises for it."""
        shown = f"{call.name}({call.arguments})"
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
        note(f"[calls {printable(shown)}]")
        if call.name not in self._by_name or not call.is_whole:
            return "error: there is no such tool, or its arguments are cut off"
        if not self._may(call.name):
            note("[not called: --allow NAME lets a tool be called without asking]")
            return "error: the user does not want this call"
        server, name = self._by_name[call.name]
        try:
            text = self._called(server, name, call.values)
        except _CallError as problem:
            text = f"error: {problem}"
            note(f"[{printable(server.name)}: {printable(str(problem))}]", WARNING)
        rest = len(text) - self._most_chars
        return text if rest <= 0 else f"{text[: self._most_chars]}\n[{rest} characters cut off]"

    def _may(self, name: str) -> bool:
        if self._allowed & {name, "*"}:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        try:
            print(
                "call it? y once, a always, anything else: no ", end="", file=sys.stderr, flush=True
            )
            said = input().strip().lower()
        except (EOFError, KeyboardInterrupt):
            note("")
            return False
        self._allowed |= {name} if said in ("a", "always") else set()
        return said in ("y", "yes", "a", "always")

    # -- calls -----------------------------------------------------------------------------

    def _called(self, server: _Server, name: str, values: dict[str, Any]) -> str:
        if server.task is None:
            self._awaited(self._started(server), server, _START_S)

        async def ask() -> Any:
            answer: asyncio.Future[Any] = self._loop.create_future()
            server.queue.put_nowait((name, values, answer))
            assert server.task is not None
            await asyncio.wait({answer, server.task}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _CallError("the server has ended")
            return answer.result()

        future = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        found = self._awaited(future, server, _CALL_S)
        texts = [getattr(one, "text", None) or f"[{one.type}]" for one in found.content]
        return f"{'error: ' * bool(found.is_error)}{chr(10).join(texts)}"

    def _awaited(self, future: Future[Any], server: _Server, most_s: float) -> Any:
        """What a server gives. Raises _CallError, and ends a server that gives nothing."""
        began_s, held, problem = monotonic(), resident_bytes(), ""
        try:
            while not problem:
                try:
                    return future.result(_LOOK_S)
                except Waited:
                    if future.done():  # it was the server's own
                        problem = "the server did not answer in time"
                    elif monotonic() - began_s > most_s:
                        problem = f"no answer within {most_s:g} s"
                    elif resident_bytes() - held > _MOST_BYTES:
                        problem = f"the server sent more than {_MOST_BYTES >> 20} MiB"
        except KeyboardInterrupt:
            problem = "it was stopped"
        except BaseException as other:
            problem = str(other) or type(other).__name__
        future.cancel()
        self._ended(server)
        raise _CallError(problem)

    def _ended(self, server: _Server) -> None:
        """Let a server end; the next call starts another one.

        Cancelled a second time, the package would leave the server's process behind.
        """
        task, server.task = server.task, None
        if task is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    # -- in the loop -----------------------------------------------------------------------

    def _started(self, server: _Server) -> Future[Any]:
        """Start a server; the future has its tools."""

        async def start() -> Any:
            ready: asyncio.Future[Any] = self._loop.create_future()
            server.queue = asyncio.Queue()
            server.task = self._loop.create_task(_run(server, ready))
            self._tasks.add(server.task)
            server.task.add_done_callback(self._tasks.discard)
            await asyncio.wait({ready, server.task}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            server.task.result()  # why it ended
            raise _CallError("the server has ended")

        return asyncio.run_coroutine_threadsafe(start(), self._loop)

    def close(self) -> None:
        """End all servers; safe to call twice."""

        async def end() -> None:
            for server in self._servers:
                if server.task is not None:
                    server.task.cancel()
                    server.task = None
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_END_S)

        if self._loop.is_closed():
            return
        with suppress(Waited):  # a process that does not end is the system's
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(2 * _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _run(server: _Server, ready: asyncio.Future[Any]) -> None:
    """One server from its start to its end: it answers what is in its queue."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with AsyncExitStack() as opened:
        how: dict[str, Any] = server.how
        transport: Any
        if "command" in how:
            silent = opened.enter_context(open(os.devnull, "w", encoding="utf-8"))
            given = {name: how[name] for name in ("command", "args", "env", "cwd") if name in how}
            transport = stdio_client(StdioServerParameters(**given), errlog=silent)
        else:
            http = await opened.enter_async_context(create_mcp_http_client(how.get("headers")))
            transport = streamable_http_client(how["url"], http_client=http)
        client = await opened.enter_async_context(Client(transport))
        tools, cursor = [], None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if not (cursor := page.next_cursor):
                break
        ready.set_result(tools)
        while True:
            name, values, answer = await server.queue.get()
            try:
                found = await client.call_tool(name, values)
                if not answer.done():
                    answer.set_result(found)
            except Exception as problem:  # what tools say of themselves is no exception
                if not answer.done():
                    answer.set_exception(_CallError(str(problem) or type(problem).__name__))
                return


def _servers_in(file: Path) -> dict[str, dict[str, Any]]:
    """The servers that a file names, but for disabled ones. Raises UnsupportedError."""
    try:
        document = json.loads(read_text(file) or "")
        servers = document["mcpServers"]
        for name, how in servers.items():
            if not isinstance(how.get("command", how.get("url")), str):
                raise UnsupportedError(f"{file}: {name} has neither command nor url", hint=_HINT)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedError(f"{file} is no file of MCP servers", hint=_HINT) from None
    return {name: how for name, how in servers.items() if not how.get("disabled")}
