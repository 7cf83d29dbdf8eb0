"""Sessions with a model that repeats what it hears in capitals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from decoding_cases import END, ONE_HOT, VOCAB, flat
from fake_backend import FakeBackend

from edgespec.backends.base import Logits
from edgespec.decode.engine import Engine
from edgespec.decode.session import Session
from edgespec.drafting.suffix import SuffixDrafter

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def shouting(context: tuple[int, ...]) -> Sequence[float]:
    """Repeats the last user message in capitals, up to its line's end."""
    text = bytes(token for token in context if token < END).decode(errors="replace")
    message = text.rsplit("<u>", 1)[-1].split("\n", 1)[0].upper()
    written = text.rsplit("<a>", 1)[-1]
    place = len(written.encode())
    wanted = [*message.encode(), END]
    return ONE_HOT[wanted[min(place, len(wanted) - 1)]]


class Counting(FakeBackend):
    """Knows how many tokens it was given to prefill."""

    prefilled = 0

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.prefilled += len(tokens)
        return super().prefill(tokens)


def engine_of(
    model: Callable[[tuple[int, ...]], Sequence[float]] = shouting, **options: Any
) -> Engine:
    backend = Counting(model, VOCAB, end=END, **options)
    return Engine(backend, curve=flat(), drafter=SuffixDrafter(), chat_template=TEMPLATE)


def backend_of(session: Session) -> Counting:
    assert isinstance(session.engine.backend, Counting)
    return session.engine.backend
