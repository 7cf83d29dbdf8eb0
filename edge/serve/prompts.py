"""Ids of prompts: conversations in the model's chat format, with the ids of what was said before.

A request brings the whole conversation. Where it goes on from one that was answered lately, what
the model wrote then keeps its ids, so that all of it is found in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.session import KnownText
from edgespec.errors import UnsupportedError
from edgespec.models.chat import Message, render_chat
from edgespec.models.images import Image
from edgespec.prefix import common_prefix_length


class Prompts:
    """Prompts of one engine, for any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Used least recently first; as many as the cache may hold.
        self._known = [KnownText() for _ in range(engine.users)]
        self._lock = threading.Lock()

    def template(self, *, with_tools: bool) -> str | None:
        """The chat format; some files have one of their own for tools."""
        engine = self._engine
        return (engine.tool_template if with_tools else None) or engine.chat_template

    def text_of(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises as `render_chat`.

        The variable `add_generation_prompt` may leave out what opens an answer.
        """
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
        """Ids of a prompt's text, which has marks of these images. Raises as `Engine.encode`."""
        shown = self._engine.shown("", images)
        with self._lock:
            ids = self._known_of(text).encode(text, shown)
        return self._engine.encode(ids, images=images)

    def learn(self, text: str, prompt_ids: Sequence[int], result: Result) -> None:
        """Keep the ids of what was said."""
        tokenizer = self._engine.backend.tokenizer
        with self._lock:
            known = self._known_of(text)
            if not text.startswith(known.text):  # another conversation, or another answer in it
                known = next((one for one in self._known if not one.text), self._known[0])
            known.learn(text, prompt_ids, result.text, result.token_ids, tokenizer)
            self._known.remove(known)
            self._known.append(known)

    def _known_of(self, text: str) -> KnownText:
        """The conversation that has most in common with a text."""
        return max(self._known, key=lambda known: common_prefix_length(known.text, text))
