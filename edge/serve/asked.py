"""What a request wants, whichever interface it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.sampling.params import SamplingParams
from edgespec.serve.api_error import ApiError
from edgespec.serve.parsing import Fields, Limits, shown
from edgespec.serve.shapes import Output
from edgespec.serve.tools import Tools


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings of answers.

    `max_tokens` None goes on to the end of the context; a completion, by OpenAI's rule, ends after
    16 tokens then. `think_budget` tokens of thoughts come before an answer; None is no limit.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    think_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What requests are held against.

    `names` are those of the model, the first one being what answers call it. With `any_model`
    a request for another model is answered by this one.
    """

    names: tuple[str, ...]
    context_size: int
    defaults: Defaults
    limits: Limits
    any_model: bool = False


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """A request for the next message of a conversation."""

    messages: Sequence[dict[str, Any]]
    options: GenerationOptions
    output: Output
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    tools: Tools = field(default_factory=Tools)
    think_budget: int | None = None  # tokens of a thought; None is no limit
    writes: bool = True  # else its prompt is read, and nothing is answered
    field: str = "messages"  # that has them, for what is wrong with all of them


@dataclass(frozen=True, slots=True)
class CompletionAsked:
    """A request to continue prompts as they are: texts, or token ids.

    With a `suffix` what stands between each text and that is filled in. Without `writes` only the
    prompt is told, as `echo` asks for it.
    """

    prompts: Sequence[str | list[int]]
    options: GenerationOptions
    output: Output
    echo: bool = False
    suffix: str = ""
    writes: bool = True

    @property
    def scores(self) -> bool:
        """Whether the tokens of the prompts have logprobs as well."""
        return self.echo and self.options.logprobs is not None


def take_output(fields: Fields, limits: Limits) -> Output:
    """The fields that say how an answer is sent. Raises ApiError."""
    streams = fields.flag("stream")
    options = fields.object("stream_options")
    output = Output(
        choices=fields.whole("n", 1, 1, limits.choices),
        streams=streams,
        usage=options.flag("include_usage"),
        sources=options.flag("include_sources"),
        progress=fields.flag("return_progress"),
    )
    options.ignore("include_obfuscation")  # padding; an answer without it is read alike
    options.end()
    return output


def take_model(fields: Fields, setup: Setup) -> None:
    """Refuse a model that is not the one that is served, unless any name will do."""
    name = fields.any("model", setup.names[0])
    if name not in setup.names and not (setup.any_model and isinstance(name, str)):
        message = (
            f"there is no model {shown(name)} here, only {setup.names[0]}: "
            "ask for that one, or start the server with --alias NAME or --any-model"
        )
        raise ApiError(message, status=404, param="model", code="model_not_found")
