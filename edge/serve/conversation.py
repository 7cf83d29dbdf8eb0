"""From a chat that was asked for to a prompt's text, and to what reads the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.models.chat import continues
from edgespec.serve.answer_text import PlainReader, Reader
from edgespec.serve.asked import ChatAsked
from edgespec.serve.prompts import Prompts
from edgespec.serve.reasoning import CLOSING, OPENING, ReasoningReader
from edgespec.serve.tool_formats import HERMES, ToolFormat, format_of, knows_tools
from edgespec.serve.tool_reader import ToolReader
from edgespec.serve.tools import Tools, instructions

_MOST_CALLS = 128


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, how it is continued, and what finds the parts of the answer."""

    text: str
    options: GenerationOptions
    make_reader: Callable[[], Reader]


def conversation_of(asked: ChatAsked, prompts: Prompts, template: str) -> Conversation:
    """The prompt of a chat. Raises as `Prompts.text_of`."""
    tools, how = asked.tools, format_of(template)
    messages, variables = asked.messages, dict(asked.variables)
    if knows_tools(template):
        if tools.offered:
            variables["tools"] = list(tools.offered)
    else:
        messages, how = _without_tools(messages, tools), HERMES
    text, options = prompts.text_of(messages, variables), asked.options
    within = text.rstrip().endswith(OPENING) or _is_thought(messages)
    if tools.required:
        text = (f"{text.rstrip()}\n\n{CLOSING}\n\n" if within else text) + how.prefix
        options, within = replace(options, json_schema=_schema(tools, how)), False
    elif options.answer_format and CLOSING in template and not text.rstrip().endswith(CLOSING):
        options = replace(options, think_tags=("" if within else OPENING, CLOSING))

    def make_reader() -> Reader:
        reader: Reader = PlainReader()
        if tools.offered:
            most = _MOST_CALLS if tools.parallel else 1
            reader = ToolReader(how, tools.names, most=most)
        return reader if tools.required else ReasoningReader(reader, within=within)

    return Conversation(text, options, make_reader)


def _is_thought(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether what is continued is a thought, and no answer yet."""
    last = messages[-1]
    return continues(messages) and bool(last.get("reasoning_content")) and not last["content"]


def _schema(tools: Tools, how: ToolFormat) -> str:
    """JSON schema of an answer that has to be calls."""
    call = tools.call_schema(how.arguments)
    if not how.is_list:
        return json.dumps(call)
    most = {} if tools.parallel else {"maxItems": 1}
    return json.dumps({"type": "array", "items": call, "minItems": 1, **most})


def _without_tools(messages: Sequence[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: all of it is text."""
    made = [_as_text(message) for message in messages]
    if not tools.offered:
        return made
    about = instructions(tools.offered)
    if made[0]["role"] == "system":
        made[0] = {**made[0], "content": f"{made[0]['content']}\n\n{about}"}
        return made
    return [{"role": "system", "content": about}, *made]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        response = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": response}
    calls = message.get("tool_calls", [])
    if not calls:
        return message
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    written = [f"{HERMES.opening}\n{text}\n{HERMES.closing}" for text in texts]
    content = "\n".join([message["content"], *written]).lstrip()
    return {"role": "assistant", "content": content}
