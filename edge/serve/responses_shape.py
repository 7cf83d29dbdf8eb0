"""`/v1/responses`: what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.serve.shapes import Choice, Delta, ToolCall, new_id, now_s, timings, usage

Event = dict[str, Any]


class ResponsesShape:
    """The answer to one request; there is only one choice.

    Args:
        told: fields of the request that the answer repeats.
    """

    def __init__(self, model: str, told: dict[str, Any]) -> None:
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now_s(),
            "model": model,
            "error": None,
            "instructions": told.get("instructions"),
            "metadata": told.get("metadata") or {},
            "tools": told.get("tools") or [],
            "tool_choice": told.get("tool_choice") or "auto",
            "parallel_tool_calls": True,
            "store": False,
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
            events += self._close_item() + self._call(call)
        return events

    def end(self, choice: Choice) -> list[Event]:
        """The whole answer."""
        events = self._close_item()
        reason = choice.reason
        response = self._finished(choice, self._done)
        kind = "response.incomplete" if reason == "length" else "response.completed"
        return [*events, self._event(kind, response=response)]

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
        name = "response.reasoning_text" if kind == "reasoning" else "response.output_text"
        return [*events, self._event(f"{name}.delta", **self._place(), delta=text)]

    def _open_item(self, kind: str) -> list[Event]:
        item: dict[str, Any] = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        if kind == "reasoning":
            item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
        self._open = {**item, "status": "in_progress", "content": []}
        self._text = ""
        added = self._event(
            "response.output_item.added", output_index=len(self._done), item=self._open
        )
        part = self._event("response.content_part.added", **self._place(), part=self._part())
        return [added, part]

    def _close_item(self) -> list[Event]:
        if self._open is None:
            return []
        is_thought = self._open["type"] == "reasoning"
        name = "response.reasoning_text" if is_thought else "response.output_text"
        place, part = self._place(), self._part()
        item = {**self._open, "status": "completed", "content": [part]}
        events = [
            self._event(f"{name}.done", **place, text=self._text),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=len(self._done), item=item),
        ]
        self._done.append(item)
        self._open = None
        return events

    def _call(self, call: ToolCall) -> list[Event]:
        number = len(self._done)
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": call.identity,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed" if call.is_whole else "incomplete",
        }
        self._done.append(item)
        place = {"item_id": item["id"], "output_index": number}
        begun = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=number, item=begun),
            self._event(f"{name}.delta", **place, delta=call.arguments),
            self._event(f"{name}.done", **place, arguments=call.arguments, name=call.name),
            self._event("response.output_item.done", output_index=number, item=item),
        ]

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
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
        return {
            **response,
            "usage": {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": tokens["prompt_tokens_details"],
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens["total_tokens"],
            },
            "timings": timings([choice]),
        }
