"""Two models write one text, in turns: lossy, and never on by default.

Each is an `Engine` with its own cache, curve and drafters. The one whose turn it is runs its
ordinary loop (drafts included) until the policy hands over; the other then reads what it missed in
one batched step, which gives its first token. Whose turn it is follows from the tokens alone, so
with drafts and without the same text is written, but for rounding.
"""

from __future__ import annotations

from typing import Any
from warnings import warn

from edgespec.backends.base import Backend
from edgespec.decode.decoding import Decoding
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Rounds, Run
from edgespec.decode.step import rounds_of
from edgespec.decode.writers import LARGE
from edgespec.errors import BackendError, EdgespecWarning
from edgespec.switching.policy import SwitchPolicy, SwitchPrices
from edgespec.switching.switch import Switch


class SwitchingEngine(Engine):
    """A large model, and a small one that writes what it is confident about.

    Args:
        backend: the large model.
        small: an engine of its own, which this one closes.
        policy: who writes when; it may be replaced between answers.
        options: of the large model, as in `Engine`.

    One vocabulary may end earlier: tokens that only pad the other are never picked.

    A small model that fails is left out for good, which is said once, with an EdgespecWarning: the
    large one writes what is missing, and all later answers.
    """

    def __init__(
        self, backend: Backend, *, small: Engine, policy: SwitchPolicy, **options: Any
    ) -> None:
        options["reuses_cache"] = options.get("reuses_cache", True) and small.reuses_cache
        super().__init__(backend, **options)
        self.small = small
        self.policy = policy
        self.prices: SwitchPrices | None = None
        self._failure: str | None = None  # of the small model
        if self.curve is not None and small.curve is not None:
            # Of this moment: what is learned while generating would change the text.
            large_curve = self.curve.resized(self.curve.max_nodes)
            self.prices = SwitchPrices(large_curve, small.curve.resized(small.curve.max_nodes))

    def memory_bytes(self) -> dict[str, int]:
        """As `Engine.memory_bytes`, with the small model's as `switch_...`."""
        small = {f"switch_{name}": size for name, size in self.small.memory_bytes().items()}
        return {**super().memory_bytes(), **small}

    @property
    def draft_failure(self) -> str | None:
        """As `Engine.draft_failure`, of a draft model or of the small one."""
        return super().draft_failure or self._failure

    def _free(self) -> None:
        try:
            super()._free()
        finally:
            self.small.close()

    @property
    def vocab_size(self) -> int:
        """Tokens that may be picked: those of both models."""
        return min(super().vocab_size, self.small.vocab_size)

    def _rounds(self, prompt: list[int], run: Run) -> Rounds:
        """The tokens of each round of both models, which others cannot use meanwhile."""
        with self.small.exclusive(run.cancel) as has_both:
            if has_both:
                yield from self._turns(prompt, run)

    def _turns(self, prompt: list[int], run: Run) -> Rounds:
        saved_ms = self.prices.saved_ms if self.prices is not None else None
        policy = self.policy if self._failure is None else SwitchPolicy.always(LARGE)
        run.writers = switch = Switch(policy, saved_ms, len(prompt))
        text, have_written = list(prompt), set[str]()
        while True:
            engine = self if switch.writer == LARGE else self.small
            reuse = run.reuse or switch.writer in have_written
            have_written.add(switch.writer)
            decoding = Decoding(engine.model(), run, list(text), reuse)
            rounds = rounds_of(decoding)
            try:
                for written in rounds:
                    text += written.tokens
                    yield written
                    if switch.is_due:
                        break
            except BackendError as problem:
                if switch.writer == LARGE or decoding.has_unsaid:
                    raise
                self._leave_out_small(switch, str(problem))
            else:
                if not switch.is_due or self._is_over(text, run):
                    return
                switch.change()
            finally:
                rounds.close()
            run.counters.switches += 1

    def _leave_out_small(self, switch: Switch, failure: str) -> None:
        self._failure = failure
        warn(f"the small model failed and is left out: {failure}", EdgespecWarning, stacklevel=2)
        switch.leave_out_small()

    def _is_over(self, text: list[int], run: Run) -> bool:
        generated = run.counters.generated_tokens
        at_end = generated > 0 and self.backend.tokenizer.is_end(text[-1])
        return at_end or generated >= run.limit
