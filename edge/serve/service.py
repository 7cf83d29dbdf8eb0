"""An engine that answers requests: its prompts, the threads that read its streams, its totals.

A request brings the whole conversation. Where it goes on from one that was answered lately, what
the model wrote then keeps its ids, so that all of it is found in the cache.

Everything in front of the threads hands over generations and reads their mailboxes. As many run as
the engine takes at once; which of them share a step is the engine's business.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.backends.base import AnswerFormat, MakesGrammars
from edgespec.backends.vocabulary import TextBound
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Chunk, Counters, Result
from edgespec.decode.options import GenerationOptions
from edgespec.decode.session import KnownText
from edgespec.decode.stream import Stream
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.log import PROMPTS, REQUEST_ID
from edgespec.memory.device.energy import energy_meter
from edgespec.memory.plan.plan import Plan
from edgespec.models.chat import Message, render_chat
from edgespec.models.images import Image
from edgespec.prefix import common_prefix_length
from edgespec.sampling.constrained import make_grammar
from edgespec.sampling.params import SamplingParams
from edgespec.serve.access import CACHE_SALT, HISTORY
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.parsing import LOGGER, ApiError, Defaults, Limits, ServedModel, seed_of_choice
from edgespec.serve.pool import Stops
from edgespec.serve.serializers import Choice, ReadingProgress, Serializer, ToldTokens, unwritten

if TYPE_CHECKING:
    from edgespec.serve.pool import Member
    from edgespec.serve.tool_servers import ToolServers


class Prompts:
    """Prompts of one engine, for any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # By salt, used least recently first; as many as the cache may hold.
        self._known = [("", KnownText()) for _ in range(engine.users)]
        self._lock = threading.Lock()
        self.bound = TextBound(engine.backend.tokenizer, engine.backend.context_size)

    def check_length(self, *texts: str, param: str | None = None) -> None:
        """Raise ApiError where these texts of a prompt are longer than any that fits."""
        if least := self.bound.least_tokens(*texts):
            size = self.bound.context_size
            raise ApiError(
                f"the text has at least {least} tokens and the context {size}",
                param=param,
                code="context_length_exceeded",
                more={"n_prompt_tokens": least, "n_ctx": size},
            )

    def template(self, *, with_tools: bool) -> str | None:
        """The chat format; some files have one of their own for tools."""
        engine = self._engine
        return (engine.tool_template if with_tools else None) or engine.chat_template

    def text_of(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises as `check_length` and `render_chat`.

        The variable `add_generation_prompt` may leave out what opens an answer.
        """
        self.check_length(*_texts_in([messages, variables]))
        opens = bool(variables.get("add_generation_prompt", True))
        template = self.template(with_tools=bool(variables.get("tools")))
        if template is None:
            raise UnsupportedError(
                "this model has no chat format", hint="send a prompt to /v1/completions"
            )
        tokenizer = self._engine.backend.tokenizer
        return render_chat(
            template,
            messages,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            control_texts=tokenizer.control_texts,
            add_generation_prompt=opens,
            variables=variables,
        )

    def ids_of(self, text: str, images: Sequence[Image] = ()) -> list[int]:
        """Ids of a prompt's text, which has marks of these images. Raises as `Engine.encode`.

        Encoded outside the lock, which the engine's threads take, too. Raises ApiError as well, for
        a text that is far too long.
        """
        self.check_length(text)
        shown = self._engine.shown("", images)
        salt = CACHE_SALT.get()
        with self._lock:
            known = self._known_of(text, salt)
            known = KnownText(known.text, [*known.ids], [*known.places])
        respelled = partial(self._engine.respelled, salt=salt)
        return self._engine.encode(known.encode(text, shown, respelled), images=images)

    def learn(self, text: str, prompt_ids: Sequence[int], result: Result, salt: str = "") -> None:
        """Keep the ids of what was said, for texts of the same salt."""
        tokenizer = self._engine.backend.tokenizer
        with self._lock:
            known = self._known_of(text, salt)
            if known.text and text.startswith(known.text):
                self._known.remove((salt, known))
            else:  # another conversation, or another answer in it: in place of the oldest one
                empty = next((one for one in self._known if not one[1].text), self._known[0])
                self._known.remove(empty)
                known = KnownText()
            known.learn(text, prompt_ids, result.text, result.token_ids, tokenizer)
            self._known.append((salt, known))

    def _known_of(self, text: str, salt: str) -> KnownText:
        """The conversation of a salt that has most in common with a text; an empty one of none."""
        its = [known for one, known in self._known if one == salt]
        return max(
            its, key=lambda known: common_prefix_length(known.text, text), default=KnownText()
        )


def _texts_in(value: Any) -> Iterator[str]:
    """Whatever a template may write of messages and variables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(one)


# Between two wake-ups of the event loop: it shares its cores, and the interpreter's lock, with the
# steps, and sending an event takes 0.4 ms. What a faster model writes meanwhile is sent together.
_PAUSE_S = 1 / 30


class _End(NamedTuple):
    """What comes after the last chunk."""

    result: Result
    problem: Exception | None


class Generation:
    """One that waits, runs or has ended, and is read by one event loop.

    Args:
        loop: of who reads it.
        stream: of an engine, not yet begun.
        cancel: the event that `stream` was given.
        text: of its prompt, where ids of what was said before are kept; "" elsewhere.
        prompt_ids: ids of the prompt.
        most_s: from its first token, after which it ends with the line; None is no limit.
        salt: of what may know its ids.
        yields: it runs only while nobody else waits, and ends where somebody comes, or another
            one that yields, which knows more of what is typed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: Stream,
        cancel: threading.Event,
        text: str,
        prompt_ids: list[int],
        most_s: float | None = None,
        salt: str = "",
        *,
        yields: bool = False,
    ) -> None:
        self.stream = stream
        self.text, self.prompt_ids, self.salt = text, prompt_ids, salt
        self.request_id = REQUEST_ID.get()  # of who asked for it
        self.ran_out = False  # of time, which ended it
        self.yields = yields
        self._cancel, self._most_s = cancel, most_s
        self._first_s: float | None = None
        self._asked_s = perf_counter()
        self._has_line = False
        self._loop = loop
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._end: _End | None = None
        self._woken_s = 0.0

    # -- for the event loop ----------------------------------------------------------------

    def cancel(self) -> None:
        """Stop it after the step under way, or before its first one."""
        self._cancel.set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._end is not None

    @property
    def is_reading(self) -> bool:
        """Whether its first token has not come."""
        return self._first_s is None

    @property
    def reading(self) -> ReadingProgress:
        """How much of its prompt was read, since it was asked for."""
        processed, cache = self.stream.num_read
        time_ms = round(1e3 * (perf_counter() - self._asked_s))
        return ReadingProgress(len(self.prompt_ids), cache, processed, time_ms)

    @property
    def result(self) -> Result:
        """What was generated; only when `batches` has ended."""
        assert self._end is not None
        return self._end.result

    async def batches(self, most_s: float | None = None) -> AsyncIterator[list[Chunk]]:
        """Chunks as they come, those of one moment together. Raises what the engine raised.

        Args:
            most_s: seconds without any, after which an empty list comes; None waits.
        """
        while True:
            try:
                await asyncio.wait_for(self._news.wait(), most_s)
            except asyncio.TimeoutError:
                yield []
                continue
            self._news.clear()
            with self._lock:
                chunks, self._chunks = self._chunks, []
                end = self._end
            if chunks:
                yield chunks
            if end is not None:
                break
        if end.problem is not None:
            raise end.problem

    async def ended(self) -> Result:
        """Wait for its end. Raises as `batches`."""
        async for _ in self.batches():
            pass
        return self.result

    # -- for the engine's thread -----------------------------------------------------------

    def put(self, chunk: Chunk) -> None:
        """Hand over a chunk; never waits for who reads it."""
        with self._lock:
            self._chunks.append(chunk)
        now = perf_counter()
        self._first_s = now if self._first_s is None else self._first_s
        self._has_line = self._has_line or "\n" in chunk.text
        is_over = self._most_s is not None and now - self._first_s >= self._most_s
        if is_over and self._has_line and not self._cancel.is_set():
            self.ran_out = True
            self._cancel.set()
        if now - self._woken_s >= _PAUSE_S:
            self._woken_s = now
            self._wake()

    def end(self, result: Result, problem: Exception | None = None) -> None:
        """Nothing more comes."""
        with self._lock:
            self._end = _End(result, problem)
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            if not self._loop.is_closed():
                raise
            self._cancel.set()


class Executor:
    """Runs generations in the order in which they came.

    Args:
        most: generations that may wait.
        on_end: told what each generation brought, in its worker's thread, before its reader is.
        users: generations that run at once.
    """

    def __init__(
        self, most: int, on_end: Callable[[Generation, Result], None], users: int = 1
    ) -> None:
        self._most, self._users = most, users
        self._on_end = on_end
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._change = threading.Condition()
        self.is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name="edgespec-engine", daemon=True)
            for _ in range(users)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Generations in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Generation]:
        """Those that have begun."""
        return tuple(self._running)

    @property
    def is_full(self) -> bool:
        """Whether no more may come."""
        return len(self._waiting) + len(self._running) >= self._most + self._users

    def submit(self, generations: Sequence[Generation]) -> None:
        """Put them at the end of the queue. Raises ApiError where they do not all fit."""
        with self._change:
            if self.is_closed:
                raise ApiError("the server stops", status=503, code="stopping")
            there = len(self._waiting) + len(self._running)
            if there + len(generations) > self._most + self._users:
                raise ApiError(
                    f"the queue is full ({len(self._waiting)} wait): try again in a second",
                    status=429,
                    code="queue_full",
                )
            others = [*self._running, *self._waiting]
            if all(one.yields for one in generations) and not all(one.yields for one in others):
                left = generations
            else:
                left = [one for one in others if one.yields]
                self._waiting += generations
            self._change.notify_all()
        for one in left:
            self.cancel(one)

    def cancel(self, generation: Generation) -> None:
        """Stop one after its step, or take it out of the queue."""
        generation.cancel()
        with self._change:
            if generation in self._running:
                return
            if generation in self._waiting:
                self._waiting.remove(generation)
        if not generation.has_ended:
            generation.end(generation.stream.result)

    def close(self) -> None:
        """End all of them and the threads; safe to call twice."""
        with self._change:
            self.is_closed = True
            left = [*self._waiting]
            for generation in self._running:
                generation.cancel()
            self._change.notify_all()
        for generation in left:
            self.cancel(generation)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            try:
                self._run(generation)
            finally:
                with self._change:
                    self._running.remove(generation)

    def _next(self) -> Generation | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self.is_closed)
            if self.is_closed:
                return None
            generation = self._waiting.popleft()
            self._running.append(generation)
            return generation

    def _run(self, generation: Generation) -> None:
        problem: Exception | None = None
        try:
            for chunk in generation.stream:
                generation.put(chunk)
            self._on_end(generation, generation.stream.result)
        except Exception as caught:  # its client is told; the next one gets its turn
            problem = caught
        generation.end(generation.stream.result, problem)


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """Generations that have not begun, and how their answers are told."""

    generations: Sequence[Generation]
    serializer: Serializer
    streams: bool
    make_reader: Callable[[], AnswerReader] = AnswerReader
    names_events: bool = False  # each event has a line with its type; there is no [DONE] then
    fail: Callable[[ApiError], dict[str, Any]] | None = None  # what failed, as an event of its own
    writes: bool = True  # else the prompts are read, and nothing is told of what would be written

    def choice(self, index: int, reader: AnswerReader) -> Choice:
        """The answer of a generation that has ended."""
        generation = self.generations[index]
        found = reader.choice(index, generation.result)
        return found if self.writes else unwritten(found, may_be_cut=generation.yields)


class Task(NamedTuple):
    """Whose request is prepared: the loop that reads its answer, and an event when it leaves.

    `began_s` is when it came, by `perf_counter`; `keep_alive_s` how long it wants the model kept.
    """

    loop: asyncio.AbstractEventLoop
    cancel: threading.Event
    member: Member
    began_s: float
    keep_alive_s: float | None


# What is summed of a generation's counters, by the names that /status gives it.
_SUMMED = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "reused_tokens",
    "generated_tokens": "generated_tokens",
    "drafted_tokens": "drafted_tokens",
    "accepted_tokens": "accepted_tokens",
    "rounds": "rounds",
    "prompt_s": "prompt_s",
    "time_to_first_token_s": "time_to_first_token_s",
    "decode_s": "decode_s",
}
_OTHERS = ("generations", "cancelled", "read_ahead", "read_ahead_used")


class Metrics:
    """Sums over all generations, and how many requests had which status."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys((*_OTHERS, *_SUMMED), 0)
        self.drafted_by, self.accepted_by = Counter[str](), Counter[str]()
        self.statuses = Counter[int]()
        self._lock = threading.Lock()

    def add(self, counters: Counters, *, cancelled: bool) -> None:
        """Count a generation that has ended."""
        sums = {name: getattr(counters, its) for name, its in _SUMMED.items()}
        self.count(generations=1, cancelled=int(cancelled), **sums)
        with self._lock:
            self.drafted_by.update(counters.drafted_by)
            self.accepted_by.update(counters.accepted_by)

    def count(self, **numbers: float) -> None:
        """Add to some sums."""
        with self._lock:
            for name, number in numbers.items():
                self.sums[name] += number

    def add_status(self, status: int) -> None:
        """Count a request that was answered."""
        with self._lock:
            self.statuses[status] += 1

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        names = "drafted_by", "accepted_by", "statuses"
        return {**self.sums, **{name: dict(getattr(self, name)) for name in names}}


_MOST_TRIALS = 3  # grammars that are tried, or wait for that: in so many threads, and seconds
_TRIALS = threading.BoundedSemaphore(_MOST_TRIALS)
_TRIAL = threading.Lock()  # of the one that is tried
_LOOK_S = 0.05  # between two looks whether who waits for it has left
_POWER_EVERY_S = 1.0  # often enough for an hour's mean, and an idle board goes on sleeping


class Shared:
    """What all models of a server have in common: limits, totals, joules."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.totals = limits, Metrics()
        self.started_s = int(time.time())
        self.underway = set[Stops]()
        self.tools: ToolServers | None = None
        self._opened = ExitStack()
        self.energy, _ = self._opened.enter_context(energy_meter(every_s=_POWER_EVERY_S))

    def stop(self) -> None:
        """Tell all who wait for an answer, or read one, that the server ends; in its event loop."""
        for one in [*self.underway]:
            one.stop()

    def close(self) -> None:
        """End the servers of tools, and the thread that counts joules; safe to call twice."""
        if self.tools is not None:
            self.tools.close()
        self._opened.close()


class Service:
    """An engine, its thread, and what requests are held against.

    Args:
        engine: which this one uses until it is closed, and does not close.
        names: of the model; the first one is what answers call it.
        plan: what the engine was loaded with, to be shown; None shows none.
        file_name: of the model, to be shown.
        any_model: answer for every model that is asked for.
        shared: what all models of a server have in common.
        owns_engine: the engine is closed with this one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: Sequence[str],
        defaults: Defaults | None = None,
        plan: Plan | None = None,
        file_name: str = "",
        any_model: bool = False,
        shared: Shared | None = None,
        owns_engine: bool = False,
    ) -> None:
        self.engine, self.plan, self.file_name = engine, plan, file_name
        shared = shared or Shared(Limits())
        self.limits, self.totals = shared.limits, shared.totals
        self._owns_engine = owns_engine
        size = engine.backend.context_size
        self.setup = ServedModel(tuple(names), size, defaults or Defaults(), self.limits, any_model)
        self.prompts = Prompts(engine)
        self.told_tokens = ToldTokens(engine.backend.tokenizer)
        self.lora: dict[int, float] | None = None  # of requests that say nothing; None: as loaded
        self._ahead: deque[_Ahead] = deque(maxlen=_MOST_AHEAD)
        self.executor = Executor(self.limits.waiting, self._ended, engine.users)

    @cached_property
    def end_ids(self) -> Sequence[int]:
        """The tokens that end an answer."""
        is_end = self.engine.backend.tokenizer.is_end
        return [token for token in range(self.engine.vocab_size) if is_end(token)]

    def check(self) -> None:
        """Raise ApiError where no request can be answered: it is what health tells."""
        try:
            self.engine.check()
        except UnsupportedError as problem:
            raise ApiError(
                f"{problem} ({problem.hint})", status=503, code="engine_unusable"
            ) from problem
        if self.executor.is_closed:
            raise ApiError("the server stops", status=503, code="stopping")

    def prepare_formats(self) -> None:
        """Build what all schemas share, which keeps the interpreter for up to a second.

        Before anybody is answered: with the first schema it would halt everybody's answers.
        """
        with suppress(UnsupportedError):  # of a vocabulary that has none
            make_grammar(self.engine.backend.tokenizer, AnswerFormat("json_schema", "{}"))

    def generations(
        self,
        task: Task,
        text: str,
        ids: list[int],
        options: GenerationOptions,
        choices: int,
        most_s: float | None = None,
    ) -> list[Generation]:
        """Answers to one prompt, of which none has begun.

        Raises ApiError for a prompt that does not fit, and as `Engine.stream`.
        """
        made = []
        if options.answer_format is not None:
            self._try_form(options.answer_format, task.cancel)
        PROMPTS.info("%s prompt: %s", REQUEST_ID.get(), text or ids)
        for index in range(choices):
            cancel = threading.Event()
            sampling = seed_of_choice(options.sampling or SamplingParams(), index)
            asked = replace(
                options,
                sampling=sampling,
                cancel=cancel,
                history=HISTORY.get(),
                cache_salt=CACHE_SALT.get(),
                lora=self.lora if options.lora is None else options.lora,
            )
            try:
                stream = self.engine.stream(ids, asked)
            except ContextFullError as problem:
                raise ApiError(
                    f"{problem} ({problem.hint})",
                    code="context_length_exceeded",
                    more={"n_prompt_tokens": len(ids), "n_ctx": self.setup.context_size},
                ) from problem
            made.append(
                Generation(
                    task.loop,
                    stream,
                    cancel,
                    text,
                    ids,
                    most_s,
                    CACHE_SALT.get(),
                    yields=options.ahead,
                )
            )
        return made

    def _try_form(self, wanted: AnswerFormat, has_left: threading.Event) -> None:
        """Find out what a form takes that nobody has asked for lately.

        For up to a second, one at a time: most threads that read requests never wait for that.
        Raises ApiError where a few do or the client has left, and as `Engine.stream`.
        """
        tokenizer = self.engine.backend.tokenizer
        trial = tokenizer.trial(wanted) if isinstance(tokenizer, MakesGrammars) else None
        if trial is None:
            return
        if not _TRIALS.acquire(blocking=False):
            raise ApiError(
                f"{_MOST_TRIALS} other grammars are being compiled: try again later",
                status=429,
                code="queue_full",
            )
        try:
            while not _TRIAL.acquire(timeout=_LOOK_S):
                if has_left.is_set():
                    raise ApiError("the client left while its grammar waited")
            try:
                trial()
            finally:
                _TRIAL.release()
        finally:
            _TRIALS.release()

    def memory_bytes(self) -> dict[str, int]:
        """What was allocated, by component."""
        return self.engine.memory_bytes()

    @property
    def is_full(self) -> bool:
        """Whether the queue takes no more."""
        return self.executor.is_full

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way, or waits."""
        return bool(self.executor.running or self.executor.num_waiting)

    def close(self) -> None:
        """End all generations and the threads, and the engine if it is its own; safe twice."""
        self.executor.close()
        if self._owns_engine:
            self.engine.close()

    def _ended(self, generation: Generation, result: Result) -> None:
        if generation.yields:
            end, begin = generation.stream.num_read
            self._ahead.append(_Ahead(generation.salt, generation.prompt_ids[:end], begin))
            self.totals.count(read_ahead=end - begin)
            return
        self._use_ahead(generation, result.counters.reused_tokens)
        is_cancelled = result.finish_reason == "cancelled" and not generation.ran_out
        counters = result.counters
        self.totals.add(counters, cancelled=is_cancelled)
        LOGGER.info(
            "%s %s: prompt %d tokens, %d of them kept, first token after %.2f s; "
            "answer %d tokens, %.1f tokens/s, %.2f tokens a step",
            generation.request_id,
            result.finish_reason,
            counters.prompt_tokens,
            counters.reused_tokens,
            counters.time_to_first_token_s,
            counters.generated_tokens,
            counters.tokens_per_s,
            counters.acceptance_length,
        )
        PROMPTS.info("%s answer: %s", generation.request_id, result.text)
        if generation.text and result.token_ids:
            self.prompts.learn(generation.text, generation.prompt_ids, result, generation.salt)

    def _use_ahead(self, generation: Generation, num_reused: int) -> None:
        """Count what was read ahead for this prompt, which is forgotten then."""
        for one in [*self._ahead]:
            if one.salt == generation.salt:
                common = common_prefix_length(one.ids, generation.prompt_ids)
                if (num_used := min(common, num_reused) - one.begin) > 0:
                    self.totals.count(read_ahead_used=num_used)
                    self._ahead.remove(one)


class _Ahead(NamedTuple):
    """What was read before anybody asked: the tokens from `begin` on."""

    salt: str
    ids: list[int]
    begin: int


_MOST_AHEAD = 32  # of these, of which it is still to be seen whether somebody asks
