"""The guest that is one MCP server's client: what the server offers, and calls of it.

The official `mcp` package takes 55 MiB and reads whatever a server sends: neither is a matter of
the process that has the model.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

from edgespec.errors import BackendError
from edgespec.memory.device.track import resident_bytes
from edgespec.models.processes import answer_questions

_LOOK_S = 0.02  # between two looks at what a call takes
# That this process may grow by for it, twice an answer's bytes or more. The package copies all that
# came with each part that comes: 12 MiB take 2 s, and 30 MiB take 9.
_MOST_BYTES = 24 << 20


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

    async with AsyncExitStack() as opened:
        if "command" in how:
            given = {name: how[name] for name in ("command", "args", "env", "cwd") if name in how}
            started = stdio_client(StdioServerParameters(**given))
            with _without_limit():
                streams = await opened.enter_async_context(started)
            yield streams
        else:
            http = await opened.enter_async_context(create_mcp_http_client(how.get("headers")))
            reached = streamable_http_client(how["url"], http_client=http)
            yield await opened.enter_async_context(reached)


@contextmanager
def _without_limit() -> Iterator[None]:
    """For what is started meanwhile, which would have this process's limit of memory."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


if __name__ == "__main__":
    with ExitStack() as opened:
        answer_questions(_Connection(opened).answer)
