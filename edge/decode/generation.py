"""One generation: its state while it runs, and what its reader gets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from edgespec.backends.base import Grammar, Logits
from edgespec.decode.stats import Counters
from edgespec.decode.stream import TextStream
from edgespec.decode.writers import ALONE, LARGE, ModelTurn, Writers
from edgespec.sampling.constrained import ConstrainedSampler
from edgespec.sampling.logprobs import TokenLogprob, logprob_of
from edgespec.sampling.sampling import Sampler
from edgespec.sampling.thought import LimitedThought

Chunks = Generator["Chunk", None, None]


class Written(NamedTuple):
    """What one round wrote, ids first; the first "round" is the last logits of the prompt."""

    tokens: list[int]
    sources: tuple[str, ...]  # who drafted its first tokens
    logprobs: tuple[TokenLogprob, ...]  # of each token, where they were asked for


Rounds = Generator[Written, None, None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added: text that is safe to show, and the ids behind it."""

    text: str
    token_ids: tuple[int, ...]
    # How many of the ids, and how much of the text, came from drafts; they come first.
    num_drafted: int = field(default=0, compare=False)
    drafted_chars: int = field(default=0, compare=False)
    # Of each drafted id: who drafted it, and how much of the text it brought.
    sources: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    model: str = field(default="", compare=False)  # which one wrote it, where there are two
    # Of each id, where they were asked for.
    logprobs: tuple[TokenLogprob, ...] = field(default=(), compare=False)


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
    have 0 tokens besides where the small one handed back at once. `logprobs` has one of each token,
    where they were asked for: of the model's own logits, also for tokens that were drafted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    counters: Counters
    spans: tuple[Span, ...] = ()
    turns: tuple[ModelTurn, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None  # which came

    @property
    def large_share(self) -> float:
        """Part of the tokens that the large model wrote: all, where there is only one."""
        other = sum(span.end - span.start for span in self.spans if span.model != LARGE)
        return 1.0 - other / len(self.token_ids) if self.token_ids else 1.0


class Cancel:
    """Whether a generation shall stop: it was closed, or its user has set the event given."""

    def __init__(self, event: threading.Event | None = None) -> None:
        self._event = event
        self._was_closed = False

    def set(self) -> None:
        """Stop this generation alone; the event may be that of others, too."""
        self._was_closed = True

    def is_set(self) -> bool:
        return self._was_closed or (self._event is not None and self._event.is_set())


@dataclass(slots=True)
class Run:
    """State of the generation in progress."""

    sampler: Sampler | ConstrainedSampler | LimitedThought
    draft_sampler: Sampler | None  # draws drafts, independently of the sampler
    limit: int  # tokens that may be generated
    cancel: Cancel
    vocab_size: int  # of a row: what comes behind pads a vocabulary
    counters: Counters = field(default_factory=Counters)
    speculates: bool = True
    history: str = ""  # whose texts draft for this one, and that it joins
    prediction: tuple[int, ...] = ()  # the end of the prompt, and what probably follows
    num_read: int = 0  # tokens of the prompt that are in the cache
    num_reused: int = 0  # of these, without having been read now
    grammar: Grammar | None = None
    reuse: bool = False  # what the cache already holds of the prompt
    writers: Writers = ALONE
    num_best: int | None = None  # of each place, told with a token's logprob; None tells none
    chunks: weakref.ref[Chunks] | None = None  # the generator that runs it

    def logprobs(
        self, rows: Logits, path: Sequence[int], emitted: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        """Of tokens, of which each came of the row [V] of its node; none where none are told."""
        if self.num_best is None:
            return ()
        pairs = zip(path, emitted, strict=False)
        return tuple(logprob_of(rows[node], token, self.num_best) for node, token in pairs)

    def end(self) -> bool:
        """End it now, or after the step that some thread computes: False then."""
        chunks = self.chunks() if self.chunks is not None else None
        try:
            if chunks is not None:
                chunks.close()
        except ValueError:  # it is running
            self.cancel.set()
            return False
        return True


class _SoFar:
    """What a generation has written. It knows no stream, so that one nobody refers to ends."""

    def __init__(
        self, text: TextStream, is_end: Callable[[int], bool], run: Run, max_tokens: int
    ) -> None:
        self._text = text
        self._is_end = is_end
        self._run = run
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        self._spans: list[Span] = []
        self._logprobs: list[TokenLogprob] = []
        self._has_ended = False  # by a token that ends a generation

    def read(self, rounds: Rounds) -> Chunks:
        """Chunks as they come. All that needs the model runs in here, while it holds the engine."""
        try:
            for written in rounds:
                yield self._chunk(written)
                if self._text.stopped:
                    break
        finally:
            rounds.close()

    def rest(self) -> str:
        """Text that was held back, now that no more comes; "" when asked again."""
        return self._text.finish()

    def _chunk(self, written: Written) -> Chunk:
        emitted, names, logprobs = written
        pieces: list[str] = []
        for token in emitted:
            pieces.append(self._text.push(token))
            if self._text.stopped:
                break
        used = len(pieces)
        token_ids, logprobs = tuple(emitted[:used]), logprobs[:used]
        self._ids += token_ids
        self._logprobs += logprobs
        self._has_ended = self._is_end(token_ids[-1])
        model = self._run.writers.writer
        if model:
            self._add_span(model, used)
        drafted = min(used, len(emitted) - 1)  # the last one is the target's own
        if not drafted:
            return Chunk("".join(pieces), token_ids, model=model, logprobs=logprobs)
        drafted_chars = sum(map(len, pieces[:drafted]))
        sources = tuple(zip(names, map(len, pieces[:drafted]), strict=False))
        return Chunk(
            "".join(pieces),
            token_ids,
            drafted,
            drafted_chars,
            sources,
            model,
            logprobs,
        )

    def _add_span(self, model: str, count: int) -> None:
        start = end = len(self._ids) - count
        if self._spans and self._spans[-1].model == model:
            start = self._spans.pop().start
        self._spans.append(Span(model, start, end + count))

    def result(self) -> Result:
        counters = replace(self._run.counters, generated_tokens=len(self._ids))
        return Result(
            self._text.text,
            tuple(self._ids),
            self._finish_reason(),
            counters,
            tuple(self._spans),
            self._turns(),
            tuple(self._logprobs),
            self._text.stop_string,
        )

    def _turns(self) -> tuple[ModelTurn, ...]:
        if not self._run.writers.turns:
            return ()
        *ended, (model, _) = self._run.writers.turns  # which do not count all tokens of the last
        rest = len(self._ids) - sum(tokens for _, tokens in ended)
        return (*ended, (model, rest)) if rest > 0 else tuple(ended)

    def _finish_reason(self) -> str:
        if self._text.stopped or self._has_ended:
            return "stop"
        if len(self._ids) >= self._max_tokens:
            return "length"
        if len(self._ids) >= self._run.limit:
            return "context_full"
        return "cancelled"


class Stream:
    """Chunks of one generation; `result` is complete when the iteration has ended.

    Iterating goes on where the last iteration was left. An engine of one user is taken from the
    first chunk to the last one, to `close`, or until nothing refers to the stream. Meanwhile
    another generation waits if it is started in another thread, and is an error in the same one.
    One of several users writes on whether its chunks are read or not.
    """

    def __init__(
        self,
        rounds: Rounds,
        text: TextStream,
        is_end: Callable[[int], bool],
        run: Run,
        max_tokens: int,
    ) -> None:
        self._run = run
        self._so_far = _SoFar(text, is_end, run, max_tokens)
        self._chunks = self._so_far.read(rounds)
        run.chunks = weakref.ref(self._chunks)

    @property
    def seed(self) -> int | None:
        """Seed the sampler draws with; repeat it to get the same tokens."""
        return self._run.sampler.seed

    @property
    def num_read(self) -> tuple[int, int]:
        """Tokens of the prompt that are in the cache, and how many were there before."""
        return self._run.num_read, self._run.num_reused

    @property
    def result(self) -> Result:
        """The generation so far; its finish reason is "cancelled" while it is not complete."""
        return self._so_far.result()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            return next(self._chunks)
        except StopIteration:
            if rest := self._so_far.rest():
                return Chunk(rest, ())
            raise

    def close(self) -> None:
        """Stop and give the engine back; what was generated stays in `result`.

        From another thread than the reading one this cancels: the step under way is finished.
        """
        self._run.end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
