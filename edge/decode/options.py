"""What a generation may be told: one table for engines, sessions and the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from edgespec.annotations import check_keywords, check_types
from edgespec.backends.base import AnswerFormat
from edgespec.errors import UnsupportedError
from edgespec.models.images import Image, ImageSource, read_image
from edgespec.sampling.params import SamplingParams, ThoughtLimit

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class SamplingKeywords(TypedDict, total=False):
        """The usual fields of `GenerationOptions.sampling`."""

        temperature: float
        top_k: int
        top_p: float
        min_p: float
        repetition_penalty: float
        presence_penalty: float
        frequency_penalty: float
        seed: int | None

    class GenerationKeywords(SamplingKeywords, total=False):
        """The fields of `GenerationOptions` as keyword arguments, too."""

        max_tokens: int
        sampling: SamplingParams | None
        stop: Sequence[str]
        raw: bool
        speculate: bool
        history: str
        cache_salt: str
        reuse: bool
        grammar: str | None
        json_schema: str | Mapping[str, Any] | HasSchema | None
        regex: str | None
        think_tags: tuple[str, str] | None
        free_after: str
        logprobs: int | None
        markers: Sequence[str]
        thought: ThoughtLimit | None
        prediction: str
        begun: Sequence[int]
        images: Sequence[ImageSource]
        cancel: threading.Event | None
        tools: Sequence[Tool]
        tool_choice: str | Mapping[str, object]
        ahead: bool
        lora: Mapping[int, float] | None


Tool: TypeAlias = Callable[..., Any] | Mapping[str, object]


@runtime_checkable
class HasSchema(Protocol):
    """A class of pydantic models."""

    def model_json_schema(self) -> dict[str, Any]:
        """Its JSON schema."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to continue a prompt. Raises UnsupportedError for values that cannot be.

    Args:
        max_tokens: most tokens to generate.
        sampling: how tokens are picked; greedy by default. Calls take its fields, too, such as
            `temperature`.
        stop: strings that end the answer, or one; they are not part of it.
        raw: send a text as it is, instead of as one user message in the model's chat format.
        speculate: False decodes plainly, one token a step.
        history: texts of the same name draft for each other. A text shows in the speed of no other
            name's.
        cache_salt: with `reuse`, cells of texts with the same salt alone are found in the cache.
        reuse: start from what the cache holds of the prompt, as a `Session` does. Without the
            settings of `--exact` its logits may be rounded differently from a fresh prefill's.
        grammar: text in GBNF or Lark's notation that the answer keeps to.
        json_schema: a JSON schema, as a mapping, its text, or a model of pydantic; the answer is a
            document that fits it, on one line.
        regex: a regular expression that the whole answer matches.
        think_tags: what opens and closes a thought. One may come before an answer of a given form,
            and is free; the first tag is "" where the prompt ends with it.
        free_after: text that an answer of a given form may begin with instead, to be free then.
            Such as the marker of a tool call.
        logprobs: tell how probable each token was, and this many of the best ones at its place. 0
            tells of the written ones alone, None of none.
        markers: control tokens that are part of the text, by their texts. Others have none.
        thought: how long the model may think before it answers. None: as long as it likes.
        begun: tokens that the answer begins with, whatever the model would write. They count, and
            have logprobs, so that a text can be scored. Not beside a form of the answer.
        prediction: what the answer probably is, such as a file with few changes: it is drafted.
        images: files, bytes or `Image`s that the prompt shows. They come before a prompt that is a
            text; messages have them as parts, and need not name them here.
        cancel: set it from another thread to stop after the current step.
        tools: what the model may call: functions, or OpenAI's definitions. The calls are in
            `Result.tool_calls`, and their parts in those of chunks; nothing is called.
        tool_choice: "auto", "none", "required", or the name of the tool that must be called.
        ahead: the prompt is read before anybody asks: in small pieces, behind each of which it can
            be stopped, and no drafter learns what nobody asks.
        lora: how much of each adapter the model has, by its place among those it was loaded with;
            those that are left out count 0. None: the scales of the load.
    """

    max_tokens: int = 512
    sampling: SamplingParams | None = None
    stop: Sequence[str] = ()
    raw: bool = False
    speculate: bool = True
    history: str = ""
    cache_salt: str = ""
    reuse: bool = False
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | HasSchema | None = None
    regex: str | None = None
    think_tags: tuple[str, str] | None = None
    free_after: str = ""
    logprobs: int | None = None
    markers: Sequence[str] = ()
    thought: ThoughtLimit | None = None
    prediction: str = ""
    begun: Sequence[int] = ()
    images: Sequence[ImageSource] = ()
    cancel: threading.Event | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, object] = "auto"
    ahead: bool = False
    lora: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        check_types(self)
        object.__setattr__(self, "images", tuple(map(read_image, self.images)))
        if self.max_tokens < 1:
            raise UnsupportedError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            raise UnsupportedError(f"logprobs must be at least 0, not {self.logprobs}")
        forms = [one is not None for one in (self.grammar, self.json_schema, self.regex)]
        if self.begun and any(forms):
            raise UnsupportedError("an answer that begins with known tokens has no other form")
        if sum(forms) > 1:
            raise UnsupportedError("give one of a grammar, a JSON schema and a regular expression")

    @property
    def answer_format(self) -> AnswerFormat | None:
        """What the answer keeps to, if anything."""
        for kind in ("grammar", "json_schema", "regex"):
            text: str | None = getattr(self, kind)
            if text is not None:
                return AnswerFormat(kind, text, self.think_tags, self.free_after)
        return None

    @property
    def shown(self) -> tuple[Image, ...]:
        """The images, read."""
        return tuple(map(read_image, self.images))

    @classmethod
    def of(
        cls, options: GenerationOptions | None, **changes: Unpack[GenerationKeywords]
    ) -> GenerationOptions:
        """`options`, or the defaults, with these changes, also of fields of `sampling`."""
        check_keywords(changes, (*_OWN, *_OF_SAMPLING))
        given: dict[str, Any] = dict(changes)
        picked = {name: given.pop(name) for name in changes if name not in _OWN}
        asked = replace(options or cls(), **given)
        if not picked:
            return asked
        return replace(asked, sampling=replace(asked.sampling or SamplingParams(), **picked))


def _schema_text(schema: str | Mapping[str, Any] | HasSchema | None) -> str | None:
    """The text of a schema. Raises UnsupportedError for a mapping that is no JSON."""
    if schema is None or isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise UnsupportedError(
            f"json_schema must be a mapping, a text or a model of pydantic, not {schema!r:.80}"
        )
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as problem:
        raise UnsupportedError(f"json_schema is no JSON: {problem}") from None


_OWN = {field.name for field in fields(GenerationOptions)}
_OF_SAMPLING = {field.name for field in fields(SamplingParams)}
