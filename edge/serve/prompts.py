"""The prompts of an engine: from messages to a text, and from that to ids.

A request brings the whole conversation. Where it goes on from one that was answered lately, what
the model wrote then keeps its ids, so that all of it is found in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from edgespec.backends.vocabulary import TextBound
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.session import KnownText
from edgespec.errors import UnsupportedError
from edgespec.models.chat import Message, render_chat
from edgespec.models.images import Image
from edgespec.prefix import common_prefix_length
from edgespec.serve.access import CACHE_SALT
from edgespec.serve.api_error import ApiError


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
        salt = CACHE_SALT.get()
        with self._lock:
            known = self._known_of(text, salt)
            known = KnownText(known.text, [*known.ids], [*known.places])
        respelled = partial(self._engine.respelled, salt=salt)
        return self._engine.encode(known.encode(text, shown, respelled), images=images)

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
