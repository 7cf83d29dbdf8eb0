"""What a request gets that does not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings of answers.

    `max_tokens` None goes on to the end of the context; a completion, by OpenAI's rule, ends after
    16 tokens then. `think_budget` tokens of thoughts come before an answer; None is no limit.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    think_budget: int | None = None
