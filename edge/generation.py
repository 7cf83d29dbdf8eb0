"""One generation: its state while it runs, and what its reader gets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace

from edgespec.accept import never
from edgespec.backends.base import Logits
from edgespec.constrained import ConstrainedSampler, Grammar
from edgespec.drafters.base import Drafter
from edgespec.sampling import Sampler
from edgespec.stats import Counters
from edgespec.stream import TextStream
from edgespec.switch_policy import SMALL, Switch, Turn

Rounds = Generator[list[int], None, None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added: text that is safe to show, and the ids behind it."""

    text: str
    token_ids: tuple[int, ...]
    # How many of the ids, and how much of the text, came from drafts; they come first.
    num_drafted: int = field(default=0, compare=False)
    drafted_chars: int = field(default=0, compare=False)
    model: str = field(default="", compare=False)  # which one wrote it, where there are two


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of an answer, `token_ids[start:end]`, that one model wrote."""

    model: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation.

    `finish_reason` is "stop" (the model ended, or a stop string came), "length" (max_tokens),
    "context_full" or "cancelled". `spans` say which model wrote what, where there are two; `turns`
    have 0 tokens besides where the small one handed back at once.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    counters: Counters
    spans: tuple[Span, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def large_share(self) -> float:
        """Part of the tokens that the large model wrote: all, where there is only one."""
        small = sum(span.end - span.start for span in self.spans if span.model == SMALL)
        return 1.0 - small / len(self.token_ids) if self.token_ids else 1.0


@dataclass(slots=True)
class Run:
    """State of the generation in progress."""

    sampler: Sampler | ConstrainedSampler
    draft_sampler: Sampler | None  # draws drafts, independently of the sampler
    limit: int  # tokens that may be generated
    cancel: threading.Event
    vocab_size: int  # of a row: what comes behind pads a vocabulary
    counters: Counters = field(default_factory=Counters)
    speculates: bool = True
    grammar: Grammar | None = None
    drafter: Drafter | None = None  # None decodes plainly
    reuse: bool = False  # what the cache already holds of the prompt
    min_probability: float = 0.0  # of a draft node that can pay
    hands_over: Callable[[Logits], bool] = never  # whether another model writes a row's token
    model: str = ""  # that is writing, where there are two
    switch: Switch | None = None  # by which it is chosen
    goes_on: float = 1.0  # chance that it also writes the token after the next one
    rounds: weakref.ref[Rounds] | None = None  # the generator that runs it


class Stream:
    """Chunks of one generation; `result` is complete when the iteration has ended.

    The engine is taken from the first chunk to the last one, or to `close`. Meanwhile another
    generation waits if it is started in another thread, and is an error in the same one.
    """

    def __init__(
        self,
        rounds: Rounds,
        text: TextStream,
        is_end: Callable[[int], bool],
        run: Run,
        max_tokens: int,
    ) -> None:
        self._rounds = rounds
        self._text = text
        self._is_end = is_end
        self._run = run
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        self._spans: list[Span] = []

    @property
    def seed(self) -> int | None:
        """Seed the sampler draws with; repeat it to get the same tokens."""
        return self._run.sampler.seed

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for emitted in self._rounds:
                yield self._chunk(emitted)
                if self._text.stopped:
                    break
            rest = self._text.finish()
            if rest:
                yield Chunk(rest, ())
        finally:
            self._rounds.close()

    def close(self) -> None:
        """Stop and give the engine back; what was generated stays in `result`.

        From another thread than the reading one this cancels: the step under way is finished.
        """
        try:
            self._rounds.close()
        except ValueError:  # it is running, in the thread that reads it
            self._run.cancel.set()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunk(self, emitted: list[int]) -> Chunk:
        pieces: list[str] = []
        used = 0
        for token in emitted:
            pieces.append(self._text.push(token))
            used += 1
            if self._text.stopped:
                break
        self._ids += emitted[:used]
        model = self._run.model
        if model:
            self._add_span(model, used)
        drafted = min(used, len(emitted) - 1)  # the last one is the target's own
        drafted_chars = sum(map(len, pieces[:drafted]))
        return Chunk("".join(pieces), tuple(emitted[:used]), drafted, drafted_chars, model)

    def _add_span(self, model: str, count: int) -> None:
        start = end = len(self._ids) - count
        if self._spans and self._spans[-1].model == model:
            start = self._spans.pop().start
        self._spans.append(Span(model, start, end + count))

    @property
    def result(self) -> Result:
        """The generation so far; its finish reason is "cancelled" while it is not complete."""
        counters = replace(self._run.counters, generated_tokens=len(self._ids))
        return Result(
            self._text.text,
            tuple(self._ids),
            self._finish_reason(),
            counters,
            tuple(self._spans),
            self._turns(),
        )

    def _turns(self) -> tuple[Turn, ...]:
        if self._run.switch is None:
            return ()
        *ended, (model, _) = self._run.switch.turns  # which is not told of all tokens of the last
        rest = len(self._ids) - sum(tokens for _, tokens in ended)
        return (*ended, (model, rest)) if rest > 0 else tuple(ended)

    def _finish_reason(self) -> str:
        if self._text.stopped or (self._ids and self._is_end(self._ids[-1])):
            return "stop"
        if len(self._ids) >= self._max_tokens:
            return "length"
        if len(self._ids) >= self._run.limit:
            return "context_full"
        return "cancelled"
