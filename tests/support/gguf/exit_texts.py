"""Texts that a tiny model wrote, for the tests of what is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from random_gguf import VOCABULARY

from edgespec.exits.texts import LONG_LENGTH, Places, TextWriter, TrainingText
from edgespec.models.spec import ModelSpec
from edgespec.quantize.texts import Chat

CHAT = Chat([1, 2], [3, 4], frozenset(range(200, VOCABULARY)), [])


def written_texts(
    target: ModelSpec,
    count: int = 60,
    *,
    chat: Chat = CHAT,
    places: int = 32,
    first: Sequence[Sequence[int]] = (),
    layers: Sequence[int] = (),
) -> list[TrainingText]:
    """So many, `places` at once; they begin with answers to the turns that come `first`."""
    with closing(
        Places(target, places=places, length=LONG_LENGTH, layers=layers, threads=1)
    ) as model:
        writer = TextWriter(model, chat, seed=1, prompts=first)
        return [text for _, text in zip(range(count), writer.write(), strict=False)]
