"""`/v1/responses`: what its answers look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.serve.refusal import Refusal
from edgespec.serve.shapes import Choice, Delta, ToolCall, new_id, now_s, timings, usage

Event = dict[str, Any]


class ResponsesShape:
    """The answer to one request; there is only one choice.

    Args:
        told: fields of the request that the answer repeats.
        keep: is given the answer when it is complete; None where it is not kept.
        summarises: tells thoughts as summaries of what was thought, in full.
    """

    def __init__(
        self,
        model: str,
        told: dict[str, Any],
        keep: Callable[[Event], None] | None = None,
        *,
        summarises: bool = False,
    ) -> None:
        self._keep, self._summarises = keep, summarises
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now_s(),
            "model": model,
            "error": None,
            **told,
            "metadata": told.get("metadata") or {},
            "tools": told.get("tools") or [],
            "tool_choice": told.get("tool_choice") or "auto",
            "parallel_tool_calls": told.get("parallel_tool_calls") is not False,
            "truncation": told.get("truncation") or "disabled",
            "store": keep is not None,
        }
        self._number = 0
        self._done: list[dict[str, Any]] = []  # items of the output
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._text = ""  # of it

    def begin(self, index: int) -> list[Event]:
        """An answer without content."""
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[Event]:
        """Thoughts, text and calls, each in an item of its own."""
        events = self._write("reasoning", delta.reasoning) if delta.reasoning else []
        if delta.content:
            events += self._write("message", delta.content)
        for call in delta.calls:
            events += self._call(call)
        return events

    def end(self, choice: Choice) -> list[Event]:
        """The whole answer."""
        events = self._close_item()
        reason = choice.reason
        response = self._finished(choice, self._done)
        kind = "response.incomplete" if reason == "length" else "response.completed"
        return [*events, self._event(kind, response=response)]

    def failed(self, refusal: Refusal) -> Event:
        """The last event of an answer that failed."""
        response = self._response("failed", self._done)
        error = {"code": refusal.code or "server_error", "message": str(refusal)}
        return self._event("response.failed", response={**response, "error": error})

    def close(self, choices: Sequence[Choice]) -> list[Event]:
        """Nothing more."""
        return []

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer, for who asked for no stream."""
        choice = choices[0]
        self.add(0, Delta(reasoning=choice.reasoning), ())
        self.add(0, Delta(choice.content, calls=choice.calls), ())
        self._close_item()
        return self._finished(choice, self._done)

    # -- items -----------------------------------------------------------------------------

    def _write(self, kind: str, text: str) -> list[Event]:
        """Text of an item, which is opened where another one was written."""
        events = []
        if self._open is None or self._open["type"] != kind:
            events = self._close_item() + self._open_item(kind)
        self._text += text
        return [*events, self._event(f"{self._name()}.delta", **self._place(), delta=text)]

    def _name(self) -> str:
        """How events of the item that is written begin."""
        assert self._open is not None
        if self._open["type"] == "message":
            return "response.output_text"
        return f"response.reasoning_{'summary_' * self._summarises}text"

    def _part_event(self, kind: str) -> Event:
        assert self._open is not None
        is_summary = self._summarises and self._open["type"] == "reasoning"
        name = "reasoning_summary_part" if is_summary else "content_part"
        return self._event(f"response.{name}.{kind}", **self._place(), part=self._part())

    def _open_item(self, kind: str) -> list[Event]:
        item: dict[str, Any] = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        if kind == "reasoning":
            item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
        self._open = {**item, "status": "in_progress", "content": []}
        self._text = ""
        added = self._event(
            "response.output_item.added", output_index=len(self._done), item=self._open
        )
        return [added, self._part_event("added")]

    def _close_item(self) -> list[Event]:
        if self._open is None:
            return []
        is_summary = self._summarises and self._open["type"] == "reasoning"
        field = "summary" if is_summary else "content"
        item = {**self._open, "status": "completed", field: [self._part()]}
        text = self._event(f"{self._name()}.done", **self._place(), text=self._text)
        return [text, self._part_event("done"), self._item_done(item)]

    def _item_done(self, item: dict[str, Any]) -> Event:
        self._done.append(item)
        self._open = None
        number = len(self._done) - 1
        return self._event("response.output_item.done", output_index=number, item=item)

    def _call(self, call: ToolCall) -> list[Event]:
        """A call, or more of the one whose arguments are written."""
        events, name = [], "response.function_call_arguments"
        if self._open is None or self._open.get("call_id") != call.identity:
            events = [*self._close_item(), self._open_call(call)]
        self._text += call.arguments
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._done)}
        events.append(self._event(f"{name}.delta", **place, delta=call.arguments))
        if call.is_open:
            return events
        status = "completed" if call.is_whole else "incomplete"
        item = {**self._open, "arguments": self._text, "status": status}
        done = self._event(f"{name}.done", **place, arguments=self._text, name=call.name)
        return [*events, done, self._item_done(item)]

    def _open_call(self, call: ToolCall) -> Event:
        self._text = ""
        self._open = {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": call.identity,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        number = len(self._done)
        return self._event("response.output_item.added", output_index=number, item=self._open)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        is_summary = self._summarises and self._open["type"] == "reasoning"
        index = "summary_index" if is_summary else "content_index"
        return {"item_id": self._open["id"], "output_index": len(self._done), index: 0}

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            kind = "summary_text" if self._summarises else "reasoning_text"
            return {"type": kind, "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    # -- the answer ------------------------------------------------------------------------

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "incomplete_details": None}

    def _finished(self, choice: Choice, output: list[dict[str, Any]]) -> dict[str, Any]:
        is_cut = choice.reason == "length"
        response = self._response("incomplete" if is_cut else "completed", output)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        tokens = usage([choice], 1)
        response |= {
            "usage": {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": tokens["prompt_tokens_details"],
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens["total_tokens"],
            },
            "timings": timings([choice]),
        }
        if self._keep is not None:
            self._keep(response)
        return response
