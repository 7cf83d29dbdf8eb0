"""Two models write one text, in turns: lossy, and never on by default.

Each is an `Engine` with its own cache, curve and drafters. The one whose turn it is runs its
ordinary loop (drafts included) until the policy hands over; the other then reads what it missed in
one batched step, which gives its first token. Whose turn it is follows from the tokens alone, so
with drafts and without the same text is written, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.backends.base import Backend, Logits
from edgespec.decode.accept import never
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Rounds, Run
from edgespec.switching.policy import LARGE, Switch, SwitchPolicy, SwitchPrices

_NOTHING = -80.0  # of a log-probability: exp of it adds nothing to an entropy
_LEAST, _MOST = 1e-3, 1e30  # sums of exponentials that are exact enough


class SwitchingEngine(Engine):
    """A large model, and a small one that writes where it is sure.

    Args:
        backend: the large model.
        small: an engine of its own, which this one closes.
        policy: who writes when; it may be replaced between answers.
        options: of the large model, as in `Engine`.

    One vocabulary may end earlier: tokens that only pad the other are never picked.
    """

    def __init__(
        self, backend: Backend, *, small: Engine, policy: SwitchPolicy, **options: Any
    ) -> None:
        options["reuses_cache"] = options.get("reuses_cache", True) and small.reuses_cache
        super().__init__(backend, **options)
        self.vocab_size = min(self.vocab_size, small.vocab_size)
        self.small = small
        self.policy = policy
        self.prices: SwitchPrices | None = None
        if self.curve is not None and small.curve is not None:
            # Of this moment: what is learned while generating would change the text.
            large_curve = self.curve.resized(self.curve.max_nodes)
            self.prices = SwitchPrices(large_curve, small.curve.resized(small.curve.max_nodes))

    def memory_bytes(self) -> dict[str, int]:
        """As `Engine.memory_bytes`, with the small model's as `switch_...`."""
        small = {f"switch_{name}": size for name, size in self.small.memory_bytes().items()}
        return {**super().memory_bytes(), **small}

    def _free(self) -> None:
        try:
            super()._free()
        finally:
            self.small.close()

    def _decode(self, prompt: list[int], run: Run) -> Rounds:
        """Yield the tokens of each round of both models, which others cannot use meanwhile."""
        with self.small.exclusive(run.cancel) as has_both:
            if has_both:
                yield from self._take_turns(prompt, run)

    def _take_turns(self, prompt: list[int], run: Run) -> Rounds:
        saved_ms = self.prices.saved_ms if self.prices is not None else None
        run.switch = switch = Switch(self.policy, saved_ms, len(prompt))
        text, writers = list(prompt), set[str]()
        while True:
            run.model = switch.writer
            engine = self if run.model == LARGE else self.small
            turn = replace(
                run,
                hands_over=never if switch.is_settled else _watched(switch),
                goes_on=switch.goes_on,
            )
            turn.reuse = run.reuse or run.model in writers
            writers.add(run.model)
            engine._equip(turn, len(text))
            rounds = Engine._decode(engine, text, turn)
            for emitted in rounds:
                text += emitted
                yield emitted
                if switch.is_due:
                    break
            rounds.close()
            if not switch.is_due or self._is_over(text, run):
                return
            switch.change()
            run.counters.switches += 1

    def _is_over(self, text: list[int], run: Run) -> bool:
        generated = run.counters.generated_tokens
        at_end = generated > 0 and self.backend.tokenizer.is_end(text[-1])
        return at_end or generated >= run.limit


def entropy_nats(row: Logits) -> float:
    """Entropy of the softmax of logits [V], in nats; minus infinity is a token without a chance.

    Logits are not shifted by their largest first, which would read them once more, unless their
    exponentials do not fit. No BLAS: its threads would wait beside those of the next step.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(row)
        total = float(weights.sum())
        weights *= row
        weighted = float(weights.sum())
    if _LEAST < total < _MOST and math.isfinite(weighted):
        return max(0.0, math.log(total) - weighted / total)
    most = row.max()
    if not math.isfinite(most):  # nothing can be chosen, which is for the sampler to say
        return math.nan
    return entropy_nats(np.maximum(row - most, _NOTHING))


def _watched(switch: Switch) -> Callable[[Logits], bool]:
    """Whether the token of a row is another model's; rows are looked at only until one is."""
    return lambda row: switch.is_due or switch.sees(entropy_nats(row) if switch.looks else 0.0)
