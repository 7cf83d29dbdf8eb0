"""`/v1/responses`: the chat that a request stands for, and its answers.

No response is kept: a client sends the whole conversation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from edgespec.decode.generation import Chunk, ToolCall
from edgespec.serve.chat import ChatRequest, answer_job, count_chat, prompt_of, read_chat
from edgespec.serve.parsing import ApiError, Fields, ServedModel, note_ignored, shown
from edgespec.serve.serializers import (
    Choice,
    Delta,
    Serializer,
    ToldTokens,
    new_id,
    timings,
    usage,
)
from edgespec.serve.service import AnswerJob, Service, Underway

_REPEATED = (
    *("instructions", "metadata", "tools", "tool_choice", "temperature", "top_p", "reasoning"),
    *("max_output_tokens", "previous_response_id", "parallel_tool_calls", "text", "truncation"),
)
# What tools of other servers left in a conversation: nothing that this model called.
_SKIPPED = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("compaction", "tool_search_call", "tool_search_output"),
)
_OTHERS = ("instructions", "input", "n", "stream_options")  # no fields of the chat
_LOGPROBS = "message.output_text.logprobs"  # how `include` asks for them
_WHOLE = "responses are not kept, so send the whole conversation as input"
_NOT_THERE = {
    "background": "leave it out, and wait or read the stream",
    "conversation": _WHOLE,
    "previous_response_id": _WHOLE,
    "prompt": "send its text as instructions",
}


Asked = tuple[ChatRequest, dict[str, Any], bool]


def read_response(fields: Fields, setup: ServedModel) -> Asked:
    """What a request wants, the fields that its answer repeats, whether it summarises thoughts.

    Raises ApiError.
    """
    repeated = {name: fields.peek(name) for name in _REPEATED}
    fields.refuse_set(_NOT_THERE)
    reasoning = repeated["reasoning"]
    asked_for = reasoning if isinstance(reasoning, dict) else {}
    kinds = [asked_for.get(name) for name in ("summary", "generate_summary")]
    summarises = any(kind not in (None, "none") for kind in kinds)
    chat = fields.within(as_chat(fields.take()))
    return read_chat(chat, setup), repeated, summarises


def prepare_response(service: Service, wanted: Asked, request: Underway) -> AnswerJob:
    """The next message of a conversation. Raises ApiError, and as `Engine.stream`."""
    asked, repeated, summarises = wanted
    talk, ids = prompt_of(service, asked)
    tokens = None if asked.options.logprobs is None else service.told_tokens
    serializer = ResponsesSerializer(
        service.setup.names[0], repeated, summarises=summarises, tokens=tokens
    )
    return answer_job(service, asked, talk, ids, serializer, request)


def count_response(service: Service, wanted: Asked, request: Underway) -> dict[str, Any]:
    """How many tokens the prompt of a response has. Raises as `prepare_response`."""
    return {"object": "response.input_tokens", **count_chat(service, wanted[0], request)}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that a request stands for; what is wrong in it stays, for the chat's reader.

    Raises ApiError for items that no chat has.
    """
    chat = {name: value for name, value in body.items() if name not in _OTHERS}
    items, found = body.get("input"), list[Any]()
    if "instructions" in body:
        found.append({"role": "system", "content": body["instructions"]})
    if isinstance(items, list):
        for number, item in enumerate(items):
            found += _messages(item, f"input[{number}].type", found)
    else:
        found.append({"role": "user", "content": items})
    chat["messages"] = [] if items in (None, []) else found
    chat["max_tokens"] = chat.pop("max_output_tokens", None)
    text, include = chat.pop("text", {}), chat.pop("include", [])
    chat["response_format"] = text.get("format") if isinstance(text, dict) else text
    chat["logprobs"] = isinstance(include, list) and _LOGPROBS in include
    return chat


def _messages(item: Any, param: str, before: list[Any]) -> list[Any]:
    """A chat's messages for an item; thoughts, text and calls of one answer are one message."""
    if not isinstance(item, dict):
        return [item]
    kind = item.get("type", "message")
    last = before[-1] if before and isinstance(before[-1], dict) else {}
    last = last if last.get("role") == "assistant" else {}
    if kind == "message":
        if item.get("role") == "assistant" and last and not last["content"]:
            last["content"] = item.get("content")
            return []
        return [{"role": item.get("role"), "content": item.get("content")}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"type": "function", "id": item.get("call_id"), "function": function}
        if last:
            last.setdefault("tool_calls", []).append(call)
            return []
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        told = item.get("output")
        return [{"role": "tool", "content": told, "tool_call_id": item.get("call_id")}]
    if kind == "reasoning":  # in plain words; what another server encrypted is left out
        thought = _text_of(item.get("content")) or _text_of(item.get("summary"))
        made = {"role": "assistant", "content": "", "reasoning_content": thought}
        return [made] if thought else []
    if kind in _SKIPPED:
        note_ignored(f"input[].type {kind}")
        return []
    more = f": {_WHOLE}" if kind == "item_reference" else ""
    problem = f"{param} {shown(kind)} is not supported{more}"
    raise ApiError(problem, param=param, code="unsupported_value")


def _text_of(parts: Any) -> str:
    """The texts of parts, as lines."""
    if not isinstance(parts, list):
        return parts if isinstance(parts, str) else ""
    named = [one.get("text") for one in parts if isinstance(one, dict)]
    return "\n".join(one for one in named if isinstance(one, str))


Event = dict[str, Any]


def _within(entries: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Of logprobs those of a text, which may stand behind a thought."""
    pieces = [bytes(one["bytes"]) for one in entries]
    start = max(0, b"".join(pieces).rfind(text.encode()))
    ends = list(accumulate(map(len, pieces)))
    last = start + len(text.encode())
    return [
        one
        for one, end, piece in zip(entries, ends, pieces, strict=True)
        if end > start and end - len(piece) < last
    ]


class ResponsesSerializer(Serializer):
    """The answer to one request; there is only one choice.

    Args:
        told: fields of the request that the answer repeats.
        summarises: tells thoughts as summaries of what was thought, in full.
        tokens: tells logprobs, where there are any.
    """

    names_events = True

    def __init__(
        self,
        model: str,
        told: dict[str, Any],
        *,
        summarises: bool = False,
        tokens: ToldTokens | None = None,
    ) -> None:
        self._summarises, self._tokens = summarises, tokens
        self._waiting: list[dict[str, Any]] = []  # logprobs of what is not told yet
        self._logprobs: list[dict[str, Any]] = []  # of the item that is written
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            **told,
            "metadata": told.get("metadata") or {},
            "tools": told.get("tools") or [],
            "tool_choice": told.get("tool_choice") or "auto",
            "parallel_tool_calls": told.get("parallel_tool_calls") is not False,
            "truncation": told.get("truncation") or "disabled",
            "store": False,
        }
        self._number = 0
        self._done: list[dict[str, Any]] = []  # items of the output
        self._open = dict[str, Any]()  # the item that is being written
        self._text = ""  # of it

    def begin(self, index: int) -> list[Event]:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[Event]:
        if self._tokens is not None:
            self._waiting += self._tokens.entries([x for one in chunks for x in one.logprobs])
        if delta.content:
            self._waiting = _within(self._waiting, delta.content)
        elif delta.reasoning or delta.calls:
            self._waiting.clear()  # of a thought or a call, which have none
        events = self._write("reasoning", delta.reasoning) if delta.reasoning else []
        if delta.content:
            events += self._write("message", delta.content)
        for call in delta.calls:
            events += self._call(call)
        return events

    def end(self, choice: Choice) -> list[Event]:
        reason = choice.reason
        events = self._close_item("incomplete" if reason == "length" else "completed")
        response = self._finished(choice, self._done)
        kind = "response.incomplete" if reason == "length" else "response.completed"
        return [*events, self._event(kind, response=response)]

    def failed(self, error: ApiError) -> Event:
        """The last event of an answer that failed."""
        response = self._response("failed", self._done)
        told = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response={**response, "error": told})

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        choice = choices[0]
        self.add(0, Delta(reasoning=choice.reasoning), ())
        if self._tokens is not None:
            self._waiting = self._tokens.entries(choice.result.logprobs)
        self.add(0, Delta(choice.content), ())
        self.add(0, Delta(calls=choice.calls), ())
        self._close_item("incomplete" if choice.reason == "length" else "completed")
        return self._finished(choice, self._done)

    # -- items -----------------------------------------------------------------------------

    def _write(self, kind: str, text: str) -> list[Event]:
        """Text of an item, which is opened where another one was written."""
        events = []
        if self._open.get("type") != kind:
            events = self._close_item()
            item: dict[str, Any] = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
            if kind == "reasoning":
                item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
            self._logprobs = []
            added = self._begin({**item, "status": "in_progress", "content": []})
            events += [added, self._part_event("added")]
        self._text += text
        told = {**self._place(), "delta": text}
        if kind == "message":
            told["logprobs"], self._waiting = self._waiting, []
            self._logprobs += told["logprobs"]
        return [*events, self._event(f"{self._name()}.delta", **told)]

    def _name(self) -> str:
        """How events of the item that is written begin."""
        if self._open["type"] == "message":
            return "response.output_text"
        return f"response.reasoning_{'summary_' * self._summarises}text"

    def _part_event(self, kind: str) -> Event:
        is_summary = self._summarises and self._open["type"] == "reasoning"
        name = "reasoning_summary_part" if is_summary else "content_part"
        return self._event(f"response.{name}.{kind}", **self._place(), part=self._part())

    def _begin(self, item: dict[str, Any]) -> Event:
        self._open, self._text, number = item, "", len(self._done)
        return self._event("response.output_item.added", output_index=number, item=item)

    def _close_item(self, status: str = "completed") -> list[Event]:
        """The end of the item that is written, which a limit on tokens may have cut off."""
        if not self._open:
            return []
        is_summary = self._summarises and self._open["type"] == "reasoning"
        field = "summary" if is_summary else "content"
        item = {**self._open, "status": status, field: [self._part()]}
        more = {"logprobs": self._logprobs} if self._open["type"] == "message" else {}
        text = self._event(f"{self._name()}.done", **self._place(), text=self._text, **more)
        return [text, self._part_event("done"), self._item_done(item)]

    def _item_done(self, item: dict[str, Any]) -> Event:
        self._done.append(item)
        self._open = {}
        number = len(self._done) - 1
        return self._event("response.output_item.done", output_index=number, item=item)

    def _call(self, call: ToolCall) -> list[Event]:
        """A call, or more of the one whose arguments are written."""
        events, name = [], "response.function_call_arguments"
        if self._open.get("call_id") != call.id:
            item = {
                "id": new_id("fc_"),
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            events = [*self._close_item(), self._begin(item)]
        self._text += call.arguments
        place = {"item_id": self._open["id"], "output_index": len(self._done)}
        events.append(self._event(f"{name}.delta", **place, delta=call.arguments))
        if call.is_open:
            return events
        status = "completed" if call.is_whole else "incomplete"
        whole = {**self._open, "arguments": self._text, "status": status}
        done = self._event(f"{name}.done", **place, arguments=self._text, name=call.name)
        return [*events, done, self._item_done(whole)]

    def _place(self) -> dict[str, Any]:
        is_summary = self._summarises and self._open["type"] == "reasoning"
        index = "summary_index" if is_summary else "content_index"
        return {"item_id": self._open["id"], "output_index": len(self._done), index: 0}

    def _part(self) -> dict[str, Any]:
        if self._open["type"] == "reasoning":
            kind = "summary_text" if self._summarises else "reasoning_text"
            return {"type": kind, "text": self._text}
        told = {"annotations": [], "logprobs": self._logprobs}
        return {"type": "output_text", "text": self._text, **told}

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
                "output_tokens_details": tokens["completion_tokens_details"],
                "total_tokens": tokens["total_tokens"],
            },
            "timings": timings([choice]),
        }
        return response
