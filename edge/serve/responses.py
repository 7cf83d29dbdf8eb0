"""`/v1/responses`: from the fields of a request to what it wants, and its answers.

No response is kept: a client sends the whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.models.images import KINDS as IMAGES
from edgespec.serve.chat import (
    ChatRequest,
    answer_job,
    content_of,
    count_chat,
    parse_parts,
    parse_thinking,
    prompt_of,
    text_of,
)
from edgespec.serve.parsing import (
    ApiError,
    Fields,
    Limits,
    Output,
    ServedModel,
    format_within,
    note_ignored,
    parse_max_tokens,
    parse_model,
    parse_options,
    shown,
    takes_prewarm,
)
from edgespec.serve.serializers import (
    Choice,
    Delta,
    Serializer,
    ToldTokens,
    ToolCall,
    new_id,
    now_s,
    timings,
    usage,
)
from edgespec.serve.service import AnswerJob, Service, Task
from edgespec.serve.tools import call_arguments, parse_tools

_PARTS = ("input_text", "output_text", "summary_text", "reasoning_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
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

# Fields that change no answer here, whatever they say.
_NO_EFFECT = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "client_metadata"),
    *("prompt_cache_retention", "service_tier", "truncation", "max_tool_calls"),
    *("context_management", "stream_options", "verbosity", "store"),
)
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
    parse_model(fields, setup)
    repeated = {name: fields.peek(name) for name in _REPEATED}
    fields.refuse_set(_NOT_THERE)
    messages = _messages(fields, setup.limits)
    reasoning = fields.peek("reasoning")
    asked_for = reasoning if isinstance(reasoning, dict) else {}
    kinds = [asked_for.get(name) for name in ("summary", "generate_summary")]
    summarises = any(kind not in (None, "none") for kind in kinds)
    budget, variables = parse_thinking(fields, setup)
    limit, size = setup.defaults.max_tokens, setup.context_size
    most = parse_max_tokens(fields, limit, size, "max_output_tokens")
    prewarms = takes_prewarm(fields)
    options = parse_options(
        *(fields, setup, most),
        stop=None,
        ahead=prewarms,
        logprobs=_logprobs(fields, setup.limits),
        **format_within(fields, "text", setup.limits),
    )
    tools = parse_tools(fields, setup.limits)
    output = Output(streams=fields.flag("stream"))
    fields.ignore(*_NO_EFFECT)
    asked = ChatRequest(
        messages, options, output, variables, tools, budget, most > 0 and not prewarms, "input"
    )
    return asked, repeated, summarises


def prepare_response(service: Service, wanted: Asked, task: Task) -> AnswerJob:
    """The next message of a conversation. Raises ApiError, and as `Engine.stream`."""
    asked, repeated, summarises = wanted
    talk, ids = prompt_of(service, asked)
    tokens = None if asked.options.logprobs is None else service.told_tokens
    serializer = ResponsesSerializer(
        service.setup.names[0], repeated, summarises=summarises, tokens=tokens
    )
    events: dict[str, Any] = {"names_events": True, "fail": serializer.failed}
    return answer_job(service, asked, talk, ids, serializer, task, **events)


def count_response(service: Service, wanted: Asked) -> dict[str, Any]:
    """How many tokens the prompt of a response has. Raises as `prepare_response`."""
    return {"object": "response.input_tokens", **count_chat(service, wanted[0])}


def _messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """The messages of a conversation's items."""
    value = fields.peek("input")
    if not isinstance(value, str | list) or value == []:
        fields.refuse("input", f"must be a text or a list of items, not {shown(value)}")
    instructions = fields.text("instructions", "")
    found = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        found.append({"role": "user", "content": fields.text("input")})
    else:
        for one in fields.objects("input", limits.messages):
            found += _item(one, found)
    if not found:
        fields.refuse("input", "has no message")
    return found


def _item(fields: Fields, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The message of an item; thoughts, text and calls of one answer are one message."""
    kind = fields.text("type", "message")
    fields.ignore("id", "status", "phase", "encrypted_content", "created_by")
    last = before[-1] if before and before[-1]["role"] == "assistant" else None
    if kind == "message":
        role = fields.text("role")
        if role not in _ROLES:
            fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
        content = _content(fields, role)
        if role == "assistant" and last is not None and not last["content"]:
            last |= content
            return []
        return [{"role": _ROLES[role], **content}]
    if kind == "function_call":
        call = _call(fields)
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
            return []
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        identity, output = fields.text("call_id", ""), _content(fields, "tool", "output")
        return [{"role": "tool", **output, "tool_call_id": identity}]
    if kind == "reasoning":
        return _thought(fields)
    if kind in _SKIPPED:
        note_ignored(f"input[].type {kind}")
        fields.skip()
        return []
    more = f": {_WHOLE}" if kind == "item_reference" else ""
    fields.refuse("type", f"{shown(kind)} is not supported{more}", code="unsupported_value")


def _content(fields: Fields, role: str, field: str = "content") -> dict[str, Any]:
    kinds = _PARTS if role == "assistant" else (*_PARTS, *IMAGES)
    return content_of(parse_parts(fields, field, kinds, may_lack=role in ("assistant", "tool")))


def _thought(fields: Fields) -> list[dict[str, Any]]:
    """A thought in plain words; one that another server encrypted is left out."""
    content, summary = (
        text_of(fields, name, _PARTS, may_lack=True) for name in ("content", "summary")
    )
    thought = content or summary
    return [{"role": "assistant", "content": "", "reasoning_content": thought}] if thought else []


def _call(fields: Fields) -> dict[str, Any]:
    function = {"name": fields.text("name"), "arguments": call_arguments(fields)}
    return {"type": "function", "id": fields.text("call_id", ""), "function": function}


def _logprobs(fields: Fields, limits: Limits) -> int | None:
    """Best tokens to be told at each place; None for no logprobs at all."""
    is_asked = _LOGPROBS in fields.list("include", limits.stops)
    count = fields.whole("top_logprobs", 0, 0, limits.logprobs)
    if count and not is_asked:
        fields.refuse("top_logprobs", f"needs logprobs: include {_LOGPROBS} as well")
    return count if is_asked else None


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
            "created_at": now_s(),
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
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._text = ""  # of it

    def begin(self, index: int) -> list[Event]:
        """An answer without content."""
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[Event]:
        """Thoughts, text and calls, each in an item of its own."""
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
        """The whole answer."""
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
        """The answer, for who asked for no stream."""
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
        if self._open is None or self._open["type"] != kind:
            events = self._close_item() + self._open_item(kind)
        self._text += text
        told = {**self._place(), "delta": text}
        if kind == "message":
            told["logprobs"], self._waiting = self._waiting, []
            self._logprobs += told["logprobs"]
        return [*events, self._event(f"{self._name()}.delta", **told)]

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
        self._text, self._logprobs = "", []
        added = self._event(
            "response.output_item.added", output_index=len(self._done), item=self._open
        )
        return [added, self._part_event("added")]

    def _close_item(self, status: str = "completed") -> list[Event]:
        """The end of the item that is written, which a limit on tokens may have cut off."""
        if self._open is None:
            return []
        is_summary = self._summarises and self._open["type"] == "reasoning"
        field = "summary" if is_summary else "content"
        item = {**self._open, "status": status, field: [self._part()]}
        more = {"logprobs": self._logprobs} if self._open["type"] == "message" else {}
        text = self._event(f"{self._name()}.done", **self._place(), text=self._text, **more)
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
