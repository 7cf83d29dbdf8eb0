"""One generation: its state while it runs, and what its reader gets."""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from edgespec.backends.base import Grammar, ImageRun, Logits
from edgespec.decode.stats import ALONE, LARGE, Counters, ModelTurn, Writers
from edgespec.errors import UnsupportedError
from edgespec.sampling.constrained import ConstrainedSampler, LimitedThought
from edgespec.sampling.logprobs import TokenLogprob, logprob_of
from edgespec.sampling.sampling import Sampler

Chunks = Generator["Chunk", None, None]


FinishReason: TypeAlias = Literal["stop", "length", "context_full", "cancelled"]


class Written(NamedTuple):
    """What one round wrote, ids first; the first "round" is the last logits of the prompt."""

    tokens: list[int]
    sources: tuple[str, ...]  # who drafted its first tokens
    logprobs: tuple[TokenLogprob, ...]  # of each token, where they were asked for


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model calls, or in a `Chunk` a part of that, with more of its arguments.

    `arguments` is the text of a JSON object; where `is_whole` is False they were cut off.
    """

    id: str
    name: str
    arguments: str
    is_whole: bool = True

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by their names. Raises ValueError where they are not whole."""
        found = json.loads(self.arguments)
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments[:80]}")
        return found

    def result(self, value: object) -> dict[str, Any]:
        """The message that tells the model what the call gave: a text, or what JSON can hold."""
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": content}


class Parts(Protocol):
    """What a part of an answer adds: to its text, to the thought before it, and to calls."""

    @property
    def content(self) -> str: ...

    @property
    def reasoning(self) -> str: ...

    @property
    def calls(self) -> Sequence[Any]: ...


class PartReader(Protocol):
    """Finds thoughts and calls of tools in an answer while it is written."""

    def push(self, text: str) -> Parts:
        """What is known with more of the text."""

    def finish(self) -> Parts:
        """What was held back."""


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
    # Where tools were offered: what was thought, and parts of calls; neither is in the text.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


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
    finish_reason: FinishReason
    counters: Counters
    spans: tuple[Span, ...] = ()
    turns: tuple[ModelTurn, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None  # which came
    reasoning: str = ""  # what was thought before, where tools were offered
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a conversation, with the calls in it."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.tool_calls
        ]
        said = {"role": "assistant", "content": self.text}
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {**said, **thought, **({"tool_calls": calls} if calls else {})}

    @property
    def large_share(self) -> float:
        """Part of the tokens that the large model wrote: all, where there is only one."""
        other = sum(span.end - span.start for span in self.spans if span.model != LARGE)
        return 1.0 - other / len(self.token_ids) if self.token_ids else 1.0


@dataclass(slots=True, eq=False)
class Run:
    """One generation: what is asked for, how far it is, and what its reader has not read yet."""

    prompt: list[int]
    sampler: Sampler | ConstrainedSampler | LimitedThought
    draft_sampler: Sampler | None  # draws drafts, independently of the sampler
    text: TextStream
    is_end: Callable[[int], bool]
    max_tokens: int
    limit: int  # tokens that may be generated: what the context has room for, too
    cancel: threading.Event | None  # its user's, and maybe that of others, too
    vocab_size: int  # of a row: what comes behind pads a vocabulary
    counters: Counters = field(default_factory=Counters)
    speculates: bool = True
    history: str = ""  # whose texts draft for this one, and that it joins
    salt: str = ""  # of its cells: those of other salts are not reused
    prediction: tuple[int, ...] = ()  # the end of the prompt, and what probably follows
    num_read: int = 0  # tokens of the prompt that are in the cache
    num_reused: int = 0  # of these, without having been read now
    grammar: Grammar | None = None
    reuse: bool = False  # what the cache already holds of the prompt
    ahead: bool = False  # it is read before anybody asks, in small pieces
    writers: Writers = ALONE
    images: Mapping[int, ImageRun] = field(default_factory=dict)  # by where they begin
    num_best: int | None = None  # of each place, told with a token's logprob; None tells none
    # How far it is.
    was_closed: bool = False
    asked_s: float = field(default_factory=perf_counter)  # when it was called
    began_s: float = 0.0  # by the clock of the scheduler
    first_s: float = 0.0
    tokens: list[int] = field(default_factory=list)  # that models have written
    chunks: SimpleQueue[Chunk | None] = field(default_factory=SimpleQueue)  # then None
    num_chunks: int = 0  # that were written
    finish_reason: FinishReason = "cancelled"
    has_ended: bool = False
    problem: Exception | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether it shall stop: it was closed, or its user's event is set."""
        return self.was_closed or (self.cancel is not None and self.cancel.is_set())

    @property
    def is_over(self) -> bool:
        """Whether the last token was the last one."""
        return self.finish_reason != "cancelled"

    def logprobs(
        self, rows: Logits, path: Sequence[int], emitted: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        """Of tokens, of which each came of the row [V] of its node; none where none are told."""
        if self.num_best is None:
            return ()
        pairs = zip(path, emitted, strict=False)
        return tuple(logprob_of(rows[node], token, self.num_best) for node, token in pairs)

    def add(self, written: Written, now_s: float) -> None:
        """Take what a round wrote; its text is made here, where the vocabulary is there."""
        counters = self.counters
        if counters.rounds == 0:
            self.first_s, counters.prompt_s = now_s, now_s - self.began_s
            counters.time_to_first_token_s = perf_counter() - self.asked_s
        counters.decode_s = now_s - self.first_s
        pieces: list[str] = []
        for token in written.tokens:
            pieces.append(self.text.push(token))
            if self.text.stopped:
                break
        self.tokens += written.tokens
        self.chunks.put(_chunk(written, pieces, self.writers.writer))
        self.num_chunks += 1
        if self.text.stopped or self.is_end(written.tokens[-1]):
            self.finish_reason = "stop"
        elif counters.generated_tokens >= self.limit:
            is_asked = counters.generated_tokens >= self.max_tokens
            self.finish_reason = "length" if is_asked else "context_full"

    def finish(self, problem: Exception | None = None) -> None:
        """Tell the reader that no more comes."""
        self.problem, self.has_ended = problem, True
        self.chunks.put(None)


def _chunk(written: Written, pieces: Sequence[str], model: str) -> Chunk:
    """A round's tokens as far as their text goes."""
    tokens, names, logprobs = written
    used, text = len(pieces), "".join(pieces)
    ids, logprobs = tuple(tokens[:used]), logprobs[:used]
    drafted = min(used, len(tokens) - 1)  # the last one is the target's own
    if not drafted:
        return Chunk(text, ids, model=model, logprobs=logprobs)
    sizes = [len(piece) for piece in pieces[:drafted]]
    sources = tuple(zip(names, sizes, strict=False))
    return Chunk(text, ids, drafted, sum(sizes), sources, model, logprobs)


class Stream:
    """Chunks of one generation; `result` is complete when the iteration has ended.

    Iterating goes on where the last iteration was left. With an engine of one user the model writes
    on when a chunk is waited for, of this or of another generation: one that is started meanwhile
    comes after this one. An engine of several users writes on whether chunks are read or not.
    """

    def __init__(
        self,
        run: Run,
        chunks: Chunks,
        drop_cancelled: Callable[[], None],
        reader: PartReader | None = None,
    ) -> None:
        self._run, self._chunks, self._drop_cancelled = run, chunks, drop_cancelled
        self._reader, self._is_finished = reader, False
        self._read: list[Chunk] = []

    @property
    def seed(self) -> int | None:
        """Seed the sampler draws with; repeat it to get the same tokens."""
        return self._run.sampler.seed

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self._run.prompt)

    @property
    def written(self) -> str:
        """What was written so far, thoughts and calls included."""
        return self._run.text.text

    @property
    def num_read(self) -> tuple[int, int]:
        """Tokens of the prompt that are in the cache, and how many were there before."""
        return self._run.num_read, self._run.num_reused

    @property
    def result(self) -> Result:
        """The generation so far; its finish reason is "cancelled" while it is not complete."""
        run, chunks = self._run, tuple(self._read)
        reason = run.finish_reason  # which is set behind the last chunk
        is_read = len(chunks) >= run.num_chunks
        ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return Result(
            "".join(chunk.text for chunk in chunks),
            ids,
            reason if is_read else "cancelled",
            replace(run.counters, generated_tokens=len(ids)),
            _spans(chunks),
            _turns(run.writers.turns, len(ids)),
            tuple(one for chunk in chunks for one in chunk.logprobs),
            run.text.stop_string if is_read else None,
            "".join(chunk.reasoning for chunk in chunks),
            _joined(call for chunk in chunks for call in chunk.tool_calls),
        )

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            chunk = self._with_parts(next(self._chunks))
        except StopIteration:
            run = self._run
            # What may have begun a stop string has not, now that no more comes.
            is_read = len(self._read) >= run.num_chunks
            rest = run.text.finish() if run.has_ended and is_read else ""
            chunk = self._with_parts(Chunk(rest, ()), is_last=run.has_ended and is_read)
            if not (chunk.text or chunk.reasoning or chunk.tool_calls):
                raise
        self._read.append(chunk)
        return chunk

    def _with_parts(self, chunk: Chunk, *, is_last: bool = False) -> Chunk:
        """A chunk with thoughts and calls taken out of its text, where tools were offered."""
        if self._reader is None or self._is_finished:
            return chunk
        found = [self._reader.push(chunk.text)]
        if is_last:
            self._is_finished = True
            found.append(self._reader.finish())
        return replace(
            chunk,
            text="".join(one.content for one in found),
            drafted_chars=0,
            sources=(),
            reasoning="".join(one.reasoning for one in found),
            tool_calls=tuple(
                ToolCall(call.identity, call.name, call.arguments, call.is_whole)
                for one in found
                for call in one.calls
            ),
        )

    def close(self) -> None:
        """Stop and give the engine back; what was read stays in `result`.

        From another thread than the reading one this cancels: the step under way is finished.
        """
        self._run.was_closed = True
        with suppress(ValueError):  # it is being read
            self._chunks.close()
        self._drop_cancelled()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls with their parts put together."""
    found: dict[str, ToolCall] = {}
    for part in parts:
        before = found[part.id].arguments if part.id in found else ""
        found[part.id] = replace(part, arguments=before + part.arguments)
    return tuple(found.values())


def _spans(chunks: Iterable[Chunk]) -> tuple[Span, ...]:
    """Who wrote what, where there are two models."""
    spans: list[Span] = []
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if spans and spans[-1].model == chunk.model:
            start = spans.pop().start
        if chunk.model:
            spans.append(Span(chunk.model, start, end))
    return tuple(spans)


def _turns(turns: Sequence[ModelTurn], count: int) -> tuple[ModelTurn, ...]:
    """Of so many tokens; the last turn may have had more."""
    if not turns:
        return ()
    *ended, (model, _) = turns
    rest = count - sum(tokens for _, tokens in ended)
    return (*ended, (model, rest)) if rest > 0 else tuple(ended)


class Closable(Protocol):
    """A stream or a turn."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _End:
    """What comes after the last chunk."""

    problem: BaseException | None


async def chunks_of(stream: Closable) -> AsyncGenerator[Chunk, None]:
    """The chunks of `stream`, without blocking the event loop.

    Leaving the iteration early, or cancelling the task, stops the generation after the step under
    way and waits for that; so does closing the event loop, which waits for nothing. Raises what the
    stream raises.
    """
    import asyncio  # costs 40 ms, which commands do not need

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Chunk | _End] = asyncio.Queue()

    def put(item: Chunk | _End) -> bool:
        """False where nobody can wait for it any more: the event loop is closed."""
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def read() -> None:
        problem: BaseException | None = None
        try:
            for chunk in stream:
                if not put(chunk):
                    stream.close()
                    break
        except BaseException as caught:
            problem = caught
        put(_End(problem))

    threading.Thread(target=read, name="edgespec-stream", daemon=True).start()
    end: _End | None = None
    try:
        while end is None:
            item = await queue.get()
            if isinstance(item, _End):
                end = item
            else:
                yield item
    finally:
        if end is None:
            stream.close()
            while not isinstance(await queue.get(), _End):
                pass
    if end.problem is not None:
        raise end.problem


class TextStream:
    """Text of one answer, as far as it may be shown: incremental UTF-8 and stop strings.

    Held back until they are decided are bytes of an unfinished character, and text that may be the
    beginning of a stop string. Where the stop is depends on the text alone, not on how tokens cut
    it: the first character that completes a stop string ends the text. If it completes several at
    once, the one that began earliest is removed: with the stops "bcd" and "abcde" the text "xabcde"
    becomes "xa".

    `token_bytes` gives the bytes of a token, `b""` for one that is not shown. Bytes that are no
    UTF-8 become U+FFFD, as in `bytes.decode(errors="replace")`. Raises `UnsupportedError` for an
    empty stop string.

        tokens "I", " like", "#", "##", "#"; stop "###"
        pushes give "I", " like", "", "" -> `stopped`, `text` "I like"
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._matchers = [_Matcher(text) for text in stops]
        self._held = ""  # whole characters that are not given out: a stop string may have begun
        self._emitted: list[str] = []
        self._finished = False
        self.stopped = False  # True from the token on that completed a stop string
        self.stop_string: str | None = None  # this one

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._emitted)

    def push(self, token: int) -> str:
        """Text that has become safe to show, often `""`.

        Tokens after the one that completed a stop string are ignored.
        """
        assert not self._finished
        if self.stopped:
            return ""
        return self._add(self._decode(self._token_bytes(token)))

    def finish(self) -> str:
        """The rest, now that no more tokens come: an unfinished character is one U+FFFD."""
        if self._finished or self.stopped:
            return ""
        self._finished = True
        shown = self._add(self._decode(b"", final=True))
        rest, self._held = self._held, ""
        self._emitted.append(rest)
        return shown + rest

    def _add(self, new_text: str) -> str:
        if not self._matchers:
            self._emitted.append(new_text)
            return new_text
        text = self._held + new_text
        length = len(self._held)
        for character in new_text:
            length += 1
            completed = [m.text for m in self._matchers if m.completes(character)]
            if completed:
                self.stopped, self.stop_string = True, max(completed, key=len)
                return self._emit(text[: length - len(self.stop_string)], held="")
        num_held = max(m.num_matched for m in self._matchers)
        cut = len(text) - num_held
        return self._emit(text[:cut], held=text[cut:])

    def _emit(self, shown: str, *, held: str) -> str:
        self._held = held
        self._emitted.append(shown)
        return shown


class _Matcher:
    """One stop string, and how much of it the text seen so far ends with (Knuth-Morris-Pratt).

    A character costs a constant number of steps on average, however long the stop string is.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise UnsupportedError(
                "a stop string must not be empty: it would stop before the first token",
                hint="leave the stop string out",
            )
        self.text = text
        self.num_matched = 0
        self._fallback = _fallbacks(text)

    def completes(self, character: str) -> bool:
        """Read one character; True if the stop string ends with it."""
        matched = self.num_matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        self.num_matched = matched + (self.text[matched] == character)
        return self.num_matched == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """At n: the length of the longest proper prefix of `text` that ends `text[:n]`.

    "abab!" gives [0, 0, 0, 1, 2, 0].
    """
    fallbacks = [0, 0]
    matched = 0
    for character in text[1:]:
        while matched and text[matched] != character:
            matched = fallbacks[matched]
        matched += text[matched] == character
        fallbacks.append(matched)
    return fallbacks
