"""What a generation hands out: chunks as they come, its result, and its numbers."""

from __future__ import annotations

import codecs
import json
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from edgespec.backends.base import DraftTree
from edgespec.errors import UnsupportedError
from edgespec.models.chat import ChatMessage

if TYPE_CHECKING:  # commands ask for the names alone
    from edgespec.backends.base import Logits
    from edgespec.sampling.chain import TokenLogprob


@dataclass(slots=True)
class Counters:
    """What happened, in numbers. Times are in seconds.

    `time_to_first_token_s` counts from the call, the wait for a turn included; `prompt_s` is what
    reading the prompt took from then on. A round is one step of the target after the prompt.
    `step_s` is what the target's steps took, `draft_s` a draft model's, and `host_s` everything
    else: tables, choosing, accepting, counting.
    `drafted_by` and `accepted_by` split the drafted and accepted tokens by drafter. Of the prompt,
    `reused_tokens` were in the cache already. `caught_up_tokens` are what a model had to prefill
    when it took over from another one, in `catch_up_s`; its first token is of that prefill.
    `switches` are all hand-overs, those to a small model that hands back at once included.
    `contended_rounds` had fewer threads than the plan, because other processes computed.
    `changed_tokens` were drafts that typical acceptance took in place of what the target picked.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    time_to_first_token_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    host_s: float = 0.0
    step_s: float = 0.0
    draft_s: float = 0.0
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    caught_up_tokens: int = 0
    catch_up_s: float = 0.0
    contended_rounds: int = 0
    changed_tokens: int = 0

    def add_round(
        self, tree: DraftTree, path: Sequence[int], step_s: float, draft_s: float, round_s: float
    ) -> tuple[str, ...]:
        """Count one round that verified `tree`, kept `path` and emitted one token for each node.

        One that was handed over before its first token takes time and is no round. Returns the
        drafters of the accepted tokens, in order, where the tree says them.
        """
        count = len(path)
        if count:
            self.rounds += 1
            self.generated_tokens += count
            self.accepted_tokens += count - 1
        self.drafted_tokens += len(tree.tokens) - 1
        self.step_s += step_s
        self.draft_s += draft_s
        self.host_s += max(0.0, round_s - step_s - draft_s)
        if not tree.sources:
            return ()
        accepted = tuple(tree.sources[node] for node in path[1:])
        self.drafted_by.update(tree.sources[1:])
        self.accepted_by.update(accepted)
        return accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own one included: plain decoding is 1.00."""
        return (self.accepted_tokens + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first one over the time after the first one."""
        tokens = self.accepted_tokens + self.rounds
        return tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def host_share(self) -> float:
        """Part of the decoding that was spent outside the steps of models."""
        steps_s = self.step_s + self.draft_s + self.catch_up_s
        return max(0.0, 1.0 - steps_s / self.decode_s) if self.decode_s else 0.0

    @staticmethod
    def total(several: Iterable[Counters]) -> Counters:
        """The sums of several generations."""
        sums = Counters()
        for one in several:
            for known in fields(Counters):
                value = getattr(sums, known.name) + getattr(one, known.name)
                setattr(sums, known.name, value)
        return sums


LARGE, SMALL = "large", "small"  # their names
# A model and the tokens it wrote until the other one took over; 0 where it handed back at once.
ModelTurn = tuple[str, int]


class Routing:
    """Who writes a text: one model, unless a subclass knows more."""

    writer = ""  # the one that is writing; empty where there is only one
    is_due = False  # another model writes the next token

    @property
    def turns(self) -> Sequence[ModelTurn]:
        """Who wrote how many tokens, in order; the last one may have written more."""
        return ()

    def switches_model(self, row: Logits) -> bool:
        """Whether another model writes the token of this row.

        Told each row of the writer, in order, before its token is picked; a round ends there.
        """
        return False


ALONE = Routing()


FinishReason: TypeAlias = Literal["stop", "length", "context_full", "cancelled"]


class StepOutput(NamedTuple):
    """What a step wrote for a request, ids first; the first token comes of the prompt's logits."""

    tokens: list[int]
    sources: tuple[str, ...]  # who drafted its first tokens
    logprobs: tuple[TokenLogprob, ...]  # of each token, where they were asked for


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model calls, or in a `Chunk` a part of that, with more of its arguments.

    `arguments` is the text of a JSON object, or what the model wrote instead; where `is_whole` is
    False they were cut off. `is_open` is a part that others of the same `id` follow.
    """

    id: str
    name: str
    arguments: str
    is_whole: bool = True
    is_open: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by their names. Raises ValueError where they are not whole."""
        found = json.loads(self.arguments)
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments[:80]}")
        return found

    def result(self, value: object) -> ChatMessage:
        """The message that tells the model what the call gave: a text, or what JSON can hold."""
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": content}


def joined_calls(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls with their parts put together."""
    found: dict[str, ToolCall] = {}
    for part in parts:
        before = found[part.id].arguments if part.id in found else ""
        found[part.id] = replace(part, arguments=before + part.arguments)
    return tuple(found.values())


class PartReader(Protocol):
    """Finds thoughts and calls of tools in an answer while it is written.

    What a part adds has `content` for the text, `reasoning` for the thought before it, and `calls`.
    """

    def push(self, text: str) -> Any:
        """What is known with more of the text."""

    def finish(self) -> Any:
        """What was held back."""


@dataclass(slots=True, unsafe_hash=True)  # not frozen: as `DraftTree`
class Chunk:
    """What one step added: text that is safe to show, and the ids behind it. Not to be changed."""

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


Chunks: TypeAlias = Generator[Chunk, None, None]


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
    def message(self) -> ChatMessage:
        """The answer as a message of a conversation, with the calls in it."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.tool_calls
        ]
        message: ChatMessage = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    @property
    def large_share(self) -> float:
        """Part of the tokens that the large model wrote: all, where there is only one."""
        other = sum(span.end - span.start for span in self.spans if span.model != LARGE)
        return 1.0 - other / len(self.token_ids) if self.token_ids else 1.0


def chunk_of(written: StepOutput, pieces: Sequence[str], model: str) -> Chunk:
    """A step's tokens as far as their text goes."""
    tokens, names, logprobs = written
    used, text = len(pieces), "".join(pieces)
    ids, logprobs = tuple(tokens[:used]), logprobs[:used]
    drafted = min(used, len(tokens) - 1)  # the last one is the target's own
    if not drafted:
        return Chunk(text, ids, model=model, logprobs=logprobs)
    sizes = [len(piece) for piece in pieces[:drafted]]
    sources = tuple(zip(names, sizes, strict=False))
    return Chunk(text, ids, drafted, sum(sizes), sources, model, logprobs)


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
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stops:
            raise UnsupportedError(
                "a stop string must not be empty: it would stop before the first token",
                hint="leave the stop string out",
            )
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
        shown, self._held = self._held + new_text, ""
        if places := [shown.find(one) + len(one) for one in self._stops if one in shown]:
            found = shown[: min(places)]
            self.stopped = True
            self.stop_string = max((one for one in self._stops if found.endswith(one)), key=len)
            shown = found.removesuffix(self.stop_string)
        elif self._stops:  # the end may be the beginning of one
            most = min(len(shown), max(map(len, self._stops)))
            ends = (shown[-size:] for size in range(most, 0, -1))
            begun = (one for one in ends if any(stop.startswith(one) for stop in self._stops))
            self._held = next(begun, "")
            shown = shown.removesuffix(self._held)
        self._emitted.append(shown)
        return shown


# -- the reader's side: chunks as they come, and the result behind them -------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Progress:
    """How far a generation is, for who reads it."""

    prompt: list[int]
    text: TextStream
    counters: Counters = field(default_factory=Counters)
    num_read: int = 0  # tokens of the prompt that are in the cache
    num_reused: int = 0  # of these, without having been read now
    routing: Routing = ALONE
    was_closed: bool = False
    num_chunks: int = 0  # that were written
    finish_reason: FinishReason = "cancelled"
    has_ended: bool = False


class Stream:
    """Chunks of one generation; `result` is complete when the iteration has ended.

    Iterating goes on where the last iteration was left. With an engine of one user the model writes
    on when a chunk is waited for, of this or of another generation: one that is started meanwhile
    comes after this one. An engine of several users writes on whether chunks are read or not.
    """

    def __init__(
        self,
        job: Progress,
        seed: int,
        chunks: Chunks,
        drop_cancelled: Callable[[], None],
        reader: PartReader | None = None,
    ) -> None:
        self.prompt_ids = tuple(job.prompt)
        self.seed = seed  # that it draws with; repeat it to get the same tokens
        self._job, self._chunks, self._drop_cancelled = job, chunks, drop_cancelled
        self._reader, self._is_finished = reader, False
        self._read: list[Chunk] = []

    @property
    def written(self) -> str:
        """What was written so far, thoughts and calls included."""
        return self._job.text.text

    @property
    def num_read(self) -> tuple[int, int]:
        """Tokens of the prompt that are in the cache, and how many were there before."""
        return self._job.num_read, self._job.num_reused

    @property
    def result(self) -> Result:
        """The generation so far; its finish reason is "cancelled" while it is not complete."""
        job, chunks = self._job, tuple(self._read)
        reason = job.finish_reason  # which is set behind the last chunk
        is_read = len(chunks) >= job.num_chunks
        ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return Result(
            "".join(chunk.text for chunk in chunks),
            ids,
            reason if is_read else "cancelled",
            replace(job.counters, generated_tokens=len(ids)),
            _spans(chunks),
            _turns(job.routing.turns, len(ids)),
            tuple(one for chunk in chunks for one in chunk.logprobs),
            job.text.stop_string if is_read else None,
            "".join(chunk.reasoning for chunk in chunks),
            joined_calls(call for chunk in chunks for call in chunk.tool_calls),
        )

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            chunk = self._with_parts(next(self._chunks))
        except StopIteration:
            job = self._job
            # What may have begun a stop string has not, now that no more comes.
            is_read = len(self._read) >= job.num_chunks
            rest = job.text.finish() if job.has_ended and is_read else ""
            chunk = self._with_parts(Chunk(rest, ()), is_last=job.has_ended and is_read)
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
            tool_calls=tuple(call for one in found for call in one.calls),
        )

    def close(self) -> None:
        """Stop and give the engine back; what was read stays in `result`.

        From another thread than the reading one this cancels: the step under way is finished.
        """
        self._job.was_closed = True
        with suppress(ValueError):  # it is being read
            self._chunks.close()
        self._drop_cancelled()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """The turns of the first `count` tokens; the last turn may have written more."""
    if not turns:
        return ()
    *ended, (model, _) = turns
    rest = count - sum(tokens for _, tokens in ended)
    return (*ended, (model, rest)) if rest > 0 else tuple(ended)


async def chunks_of(stream: Any) -> AsyncGenerator[Chunk, None]:
    """The chunks of a `Stream` or a `Turn`, without blocking the event loop.

    Leaving the iteration early, or cancelling the task, stops the generation after the step under
    way and waits for that; so does closing the event loop, which waits for nothing. Raises what the
    stream raises.
    """
    import asyncio  # costs 40 ms, which commands do not need

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

    def put(item: Chunk | BaseException | None) -> bool:
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
        put(problem)  # None where it has ended well

    threading.Thread(target=read, name="edgespec-stream", daemon=True).start()
    item: Chunk | BaseException | None = None
    has_ended = False
    try:
        while isinstance(item := await queue.get(), Chunk):
            yield item
        has_ended = True
    finally:
        if not has_ended:
            stream.close()
            while isinstance(await queue.get(), Chunk):
                pass
    if item is not None:
        raise item
