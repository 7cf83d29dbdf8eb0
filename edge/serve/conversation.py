"""From a chat that was asked for to the ids of a prompt, and to what reads the answer.

A request brings the whole conversation. Where it goes on from one that was answered lately, what
the model wrote then keeps its ids, so that all of it is found in the cache.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.backends.vocabulary import TextBound
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.options import GenerationOptions
from edgespec.decode.session import KnownText
from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.chat import Message, continues, in_call_order, render_chat
from edgespec.models.images import Image
from edgespec.prefix import common_prefix_length
from edgespec.sampling.params import ThoughtLimit
from edgespec.serve.access import CACHE_SALT
from edgespec.serve.answer_reader import THINK, AnswerReader, ThinkTags, think_tags
from edgespec.serve.api_error import ApiError, api_error_of
from edgespec.serve.asked import ChatAsked
from edgespec.serve.tool_formats import (
    HARMONY,
    HERMES,
    ToolFormat,
    format_of,
    knows_tools,
    markers_in,
    pieces,
)
from edgespec.serve.tools import Tools, instructions

_MOST_CALLS = 128


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, how it is continued, and what finds the parts of the answer."""

    text: str
    options: GenerationOptions
    make_reader: Callable[[], AnswerReader]


def conversation_of(asked: ChatAsked, prompts: Prompts, template: str) -> Conversation:
    """The prompt of a chat. Raises ApiError, also where the template refuses its messages."""
    tools, formats = asked.tools, [format_of(template)]
    messages, variables = asked.messages, dict(asked.variables)
    if knows_tools(template):
        if tools.offered:
            variables["tools"] = list(tools.offered)
    else:
        messages, formats = _without_tools(messages, tools), [HERMES, *formats]
    try:
        text, options = prompts.text_of(messages, variables), asked.options
    except (UnsupportedError, ModelFileError) as problem:
        raise api_error_of(problem, asked.field) from problem
    tags = think_tags(template, formats)
    within = text.rstrip().endswith(tags.opening) or _is_thought(messages)
    begun, header = "", formats[0].text and formats[0].opening
    if tools.required:
        begun, schema = _required(tools, formats[0])
        text = f"{text.rstrip()}\n\n{tags.closing}\n\n" if within else text
        text += begun.removeprefix(header) if header and text.endswith(header) else begun
        options = replace(options, json_schema=schema, regex=None, grammar=None)
        within = False
    elif header and text.endswith(header):
        begun = header
    is_text = not begun and HARMONY in formats and not text.endswith("assistant")
    if options.answer_format and not tools.required and not is_text:
        before = _before_form(text, template, formats, tags, within=within)
        marker = _call_marker(formats[0]) if tools.offered else ""
        options = replace(options, think_tags=before, free_after=marker)
    thinks = not tools.required and not is_text and _may_think(options)
    budget = asked.think_budget if thinks else None
    options = replace(
        options,
        thought=None if budget is None else ThoughtLimit(budget, within, *tags[:3]),
        markers=_markers(tools, formats, None if tools.required else tags),
    )

    def make_reader() -> AnswerReader:
        is_marked = bool(options.free_after)
        reader = _reader(tools, formats, tags, within=within, is_text=is_text, is_marked=is_marked)
        reader.push(begun)
        return reader

    return Conversation(text, options, make_reader)


def _before_form(
    text: str, template: str, formats: Sequence[ToolFormat], tags: ThinkTags, *, within: bool
) -> tuple[str, str] | None:
    """What a thought stands between before an answer of a given form; None for no thought."""
    if HARMONY not in formats and tags.closing not in template:
        return None
    is_over = text.rstrip().endswith(tags.closing)
    return None if is_over else ("" if within else tags.opening, tags.closing + tags.after)


def _call_marker(how: ToolFormat) -> str:
    """What a call begins with where an answer has a form else. Raises ApiError."""
    if how is HARMONY or how.text:
        message = "a form of the answer is not supported beside tools with this model's chat format"
        raise ApiError(message, code="unsupported_value")
    return (pieces(how.opening) or pieces(how.begin))[0].strip()


def _reader(
    tools: Tools, formats: Sequence[ToolFormat], tags: ThinkTags, **more: bool
) -> AnswerReader:
    if HARMONY in formats and len(tools.required) > 1:
        formats = [HERMES]  # calls are JSON alone
    elif not tools.offered:
        formats = [how for how in formats if how is HARMONY or how.text]
    return AnswerReader(
        formats,
        tools.schemas,
        most=_MOST_CALLS if tools.parallel else 1,
        is_calls=bool(tools.required),
        tags=tags,
        **more,
    )


def _markers(
    tools: Tools, formats: Sequence[ToolFormat], tags: ThinkTags | None
) -> tuple[str, ...]:
    """Control tokens that a reader has to see."""
    found = markers_in(*THINK, *tags) if tags else set[str]()
    for how in formats:
        if tools.offered or how is HARMONY:
            found |= how.markers
    return tuple(sorted(found))


def _may_think(options: GenerationOptions) -> bool:
    """Whether a thought is possible; where the form of the answer is given, before that."""
    return options.answer_format is None or options.think_tags is not None


def _is_thought(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether what is continued is a thought, and no answer yet."""
    last = messages[-1]
    return continues(messages) and bool(last.get("reasoning_content")) and not last["content"]


def _required(tools: Tools, how: ToolFormat) -> tuple[str, str]:
    """What an answer that has to be calls begins with, and the JSON schema of its rest.

    Where the arguments of one tool are the only JSON, all before them is begun. Where the format
    has no JSON, or the name of one of several tools comes first, calls are JSON alone.
    """
    if len(tools.required) == 1 and how.kind in ("named", "harmony"):
        name = tools.required[0]
        before = how.header(name)
        if before:
            call = tools.call_schema("name", "arguments")
            inner = {"$defs": call["$defs"]} if "$defs" in call else {}
            return before, json.dumps({**call["properties"]["arguments"], **inner})
    is_json = how.kind == "json"
    fields = how.fields if is_json and all(how.fields) else HERMES.fields
    call = tools.call_schema(*fields)
    begun = how.opening if is_json and (how.closing or how.is_list) else ""
    if not is_json or not how.is_list:
        return begun, json.dumps(call)
    inner = {"$defs": call.pop("$defs")} if "$defs" in call else {}
    most = {} if tools.parallel else {"maxItems": 1}
    return begun, json.dumps({"type": "array", "items": call, "minItems": 1, **most, **inner})


def _without_tools(messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: all of it is text."""
    made = [_as_text(message) for message in in_call_order(messages)]
    if not tools.offered:
        return made
    about = instructions(tools.offered)
    if made[0]["role"] == "system":
        made[0] = {**made[0], "content": f"{made[0]['content']}\n\n{about}"}
        return made
    return [{"role": "system", "content": about}, *made]


def _as_text(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        response = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": response}
    calls = message.get("tool_calls", [])
    if not calls:
        return dict(message)
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    written = [f"{HERMES.opening}{text}{HERMES.closing}" for text in texts]
    content = "\n".join([message["content"], *written]).lstrip()
    return {"role": "assistant", "content": content}


class Prompts:
    """Prompts of one engine, for any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # By salt, used least recently first; as many as the cache may hold.
        self._known = [("", KnownText()) for _ in range(engine.users)]
        self._lock = threading.Lock()
        self.bound = TextBound(engine.backend.tokenizer, engine.backend.context_size)

    def check_length(self, *texts: str, param: str | None = None) -> None:
        """Raise ApiError where these texts of a prompt are longer than any that fits."""
        if least := self.bound.least_tokens(*texts):
            size = self.bound.context_size
            raise ApiError(
                f"the text has at least {least} tokens and the context {size}",
                param=param,
                code="context_length_exceeded",
                more={"n_prompt_tokens": least, "n_ctx": size},
            )

    def template(self, *, with_tools: bool) -> str | None:
        """The chat format; some files have one of their own for tools."""
        engine = self._engine
        return (engine.tool_template if with_tools else None) or engine.chat_template

    def text_of(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises as `check_length` and `render_chat`.

        The variable `add_generation_prompt` may leave out what opens an answer.
        """
        self.check_length(*_texts_in([messages, variables]))
        opens = bool(variables.get("add_generation_prompt", True))
        template = self.template(with_tools=bool(variables.get("tools")))
        if template is None:
            raise UnsupportedError(
                "this model has no chat format", hint="send a prompt to /v1/completions"
            )
        tokenizer = self._engine.backend.tokenizer
        return render_chat(
            template,
            messages,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            control_texts=tokenizer.control_texts,
            add_generation_prompt=opens,
            variables=variables,
        )

    def ids_of(self, text: str, images: Sequence[Image] = ()) -> list[int]:
        """Ids of a prompt's text, which has marks of these images. Raises as `Engine.encode`.

        Encoded outside the lock, which the engine's threads take, too. Raises ApiError as well, for
        a text that is far too long.
        """
        self.check_length(text)
        shown = self._engine.shown("", images)
        with self._lock:
            known = self._known_of(text, CACHE_SALT.get())
            known = KnownText(known.text, [*known.ids], [*known.places])
        return self._engine.encode(known.encode(text, shown), images=images)

    def learn(self, text: str, prompt_ids: Sequence[int], result: Result, salt: str = "") -> None:
        """Keep the ids of what was said, for texts of the same salt."""
        tokenizer = self._engine.backend.tokenizer
        with self._lock:
            known = self._known_of(text, salt)
            if known.text and text.startswith(known.text):
                self._known.remove((salt, known))
            else:  # another conversation, or another answer in it: in place of the oldest one
                empty = next((one for one in self._known if not one[1].text), self._known[0])
                self._known.remove(empty)
                known = KnownText()
            known.learn(text, prompt_ids, result.text, result.token_ids, tokenizer)
            self._known.append((salt, known))

    def _known_of(self, text: str, salt: str) -> KnownText:
        """The conversation of a salt that has most in common with a text; an empty one of none."""
        its = [known for one, known in self._known if one == salt]
        return max(
            its, key=lambda known: common_prefix_length(known.text, text), default=KnownText()
        )


def _texts_in(value: Any) -> Iterator[str]:
    """Whatever a template may write of messages and variables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(one)
