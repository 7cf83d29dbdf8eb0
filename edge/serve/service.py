"""An engine that answers requests: its prompts, the threads that read its streams, its totals.

A request brings the whole conversation. Where it goes on from one that was answered lately, what
the model wrote then keeps its ids, so that all of it is found in the cache.

Everything in front of the threads hands over generations and reads their mailboxes. As many run as
the engine takes at once; which of them share a step is the engine's business.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any

from edgespec.backends.base import AnswerFormat, MakesGrammars
from edgespec.backends.vocabulary import TextBound
from edgespec.decode.engine import Engine, sees_images
from edgespec.decode.generation import Chunk, Result, Stream
from edgespec.decode.options import GenerationOptions
from edgespec.decode.session import KnownText
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.log import PROMPTS, REQUEST_ID
from edgespec.memory.plan.plan import Plan
from edgespec.models.chat import Message, render_chat
from edgespec.models.images import Image
from edgespec.prefix import common_prefix_length
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import make_grammar
from edgespec.serve.access import CACHE_SALT, HISTORY
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.parsing import LOGGER, ApiError, Defaults, Limits, ServedModel, seed_of_choice
from edgespec.serve.pool import CHAT, Member, Shared, about
from edgespec.serve.serializers import Choice, Serializer, ToldTokens, unwritten
from edgespec.setup.planning import Sizes


class Prompts:
    """Prompts of one engine, for any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # By salt, used least recently first; as many as the cache may hold.
        self._known = [("", KnownText()) for _ in range(engine.users)]
        # The last ones, as many, by salt and text: what was read ahead is asked with the same text.
        self._encoded: dict[tuple[str, str], array[int]] = {}
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
            if not images and (found := self._encoded.get((salt, text))) is not None:
                return found.tolist()
            known = self._known_of(text, salt)
            known = KnownText(known.text, [*known.ids], [*known.places])
        anew = partial(self._engine.ids_of, images=images, salt=salt)
        ids = self._engine.encode(known.encode(text, shown, anew), images=images)
        with self._lock:
            self._encoded[salt, text] = array("i", ids)
            while len(self._encoded) > self._engine.users:
                del self._encoded[next(iter(self._encoded))]
        return ids

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


@dataclass(eq=False)
class Generation:
    """One that waits, runs or has ended, and is read by one event loop."""

    loop: asyncio.AbstractEventLoop  # of who reads it
    stream: Stream  # of an engine, not yet begun
    cancelled: threading.Event  # that `stream` was given
    text: str  # of its prompt, where ids of what was said before are kept; "" elsewhere
    prompt_ids: list[int]
    most_s: float | None = None  # from its first token, after which it ends with the line
    salt: str = ""  # of what may know its ids
    # It runs only while nobody else waits, and ends where somebody comes, or another one that
    # yields, which knows more of what is typed.
    yields: bool = False
    began_j: float = 0.0  # joules that were counted when it was asked for
    request_id: str = field(default_factory=REQUEST_ID.get)  # of who asked for it
    ran_out: bool = False  # of time, which ended it

    def __post_init__(self) -> None:
        self._asked_s, self._woken_s = perf_counter(), 0.0
        self._first_s: float | None = None
        self._has_line = False
        self._news, self._lock = asyncio.Event(), threading.Lock()
        self._chunks: list[Chunk] = []
        self._end: tuple[Result, Exception | None] | None = None  # what comes after the last chunk

    # -- for the event loop ----------------------------------------------------------------

    def cancel(self) -> None:
        """Stop it after the step under way, or before its first one."""
        self.cancelled.set()

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    @property
    def is_reading(self) -> bool:
        return self._first_s is None

    @property
    def reading(self) -> dict[str, int]:
        """How many tokens of its prompt were read since it was asked for, by llama.cpp's names.

        Those that were `processed` are those that were there before (`cache`), too.
        """
        processed, cache = self.stream.num_read
        time_ms = round(1e3 * (perf_counter() - self._asked_s))
        told = {"total": len(self.prompt_ids), "cache": cache, "processed": processed}
        return {**told, "time_ms": time_ms}

    @property
    def result(self) -> Result:
        """What was generated; only when `batches` has ended."""
        assert self._end is not None
        return self._end[0]

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
        if end[1] is not None:
            raise end[1]

    # -- for the engine's thread -----------------------------------------------------------

    def put(self, chunk: Chunk) -> None:
        """Hand over a chunk; never waits for who reads it."""
        with self._lock:
            self._chunks.append(chunk)
        now = perf_counter()
        self._first_s = now if self._first_s is None else self._first_s
        self._has_line = self._has_line or "\n" in chunk.text
        is_over = self.most_s is not None and now - self._first_s >= self.most_s
        if is_over and self._has_line and not self.cancelled.is_set():
            self.ran_out = True
            self.cancelled.set()
        if now - self._woken_s >= _PAUSE_S:
            self._woken_s = now
            self._wake()

    def end(self, result: Result, problem: Exception | None = None) -> None:
        with self._lock:
            self._end = result, problem
        self._wake()

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            if not self.loop.is_closed():
                raise
            self.cancelled.set()


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
        self._most, self._on_end = most + users, on_end
        self.waiting, self.running = list[Generation](), list[Generation]()
        self._lock = threading.Lock()
        self.is_closed = False
        self._threads = ThreadPoolExecutor(users, "edgespec-engine")

    @property
    def is_full(self) -> bool:
        return len(self.waiting) + len(self.running) >= self._most

    def submit(self, generations: Sequence[Generation]) -> None:
        """Put them at the end of the queue. Raises ApiError where they do not all fit."""
        with self._lock:
            if self.is_closed:
                raise ApiError("the server stops", status=503, code="stopping")
            others = [*self.running, *self.waiting]
            if len(others) + len(generations) > self._most:
                raise ApiError(
                    f"the queue is full ({len(self.waiting)} wait): try again in a second",
                    status=429,
                    code="queue_full",
                )
            if all(one.yields for one in generations) and not all(one.yields for one in others):
                left = generations
            else:
                left = [one for one in others if one.yields]
                self.waiting += generations
                for one in generations:
                    self._threads.submit(self._work, one)
        for one in left:
            self.cancel(one)

    def cancel(self, generation: Generation) -> None:
        """Stop one after its step, or take it out of the queue."""
        generation.cancel()
        with self._lock:
            if generation in self.running:
                return
            if generation in self.waiting:
                self.waiting.remove(generation)
        if not generation.has_ended:
            generation.end(generation.stream.result)

    def close(self) -> None:
        """End all of them and the threads; safe to call twice."""
        with self._lock:
            self.is_closed = True
            left = [*self.running, *self.waiting]
        for generation in left:
            self.cancel(generation)
        self._threads.shutdown()

    def _work(self, generation: Generation) -> None:
        with self._lock:
            if generation not in self.waiting:  # it was cancelled
                return
            self.waiting.remove(generation)
            self.running.append(generation)
        try:
            for chunk in generation.stream:
                generation.put(chunk)
                if not threading.main_thread().is_alive():  # Python ends, and waits for this
                    generation.cancel()
            self._on_end(generation, generation.stream.result)
            generation.end(generation.stream.result)
        except Exception as problem:  # its client is told; the next one gets its turn
            generation.end(generation.stream.result, problem)
        finally:
            with self._lock:
                self.running.remove(generation)


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """Generations that have not begun, and how their answers are told."""

    generations: Sequence[Generation]
    serializer: Serializer
    streams: bool
    make_reader: Callable[[], AnswerReader] = AnswerReader
    writes: bool = True  # else the prompts are read, and nothing is told of what would be written

    def choice(self, index: int, reader: AnswerReader) -> Choice:
        """The answer of a generation that has ended."""
        generation = self.generations[index]
        found = reader.choice(index, generation.result)
        return found if self.writes else unwritten(found, may_be_cut=generation.yields)


class Underway:
    """A request on its way: the loop that reads it, and `cancel`, set when its client leaves.

    `began_s` is when it came, by `perf_counter`; `keep_alive_s` how long it wants its model, the
    `member`, kept.
    """

    member: Member
    keep_alive_s: float | None

    def __init__(self) -> None:
        self.loop, self.cancel = asyncio.get_running_loop(), threading.Event()
        self.began_s = perf_counter()


_MOST_AHEAD = 32  # prompts read ahead, of which it is to be seen whether somebody asks
_MOST_TRIALS = 3  # grammars that are tried, or wait for that: in so many threads, and seconds
_TRIALS = threading.BoundedSemaphore(_MOST_TRIALS)
_TRIAL = threading.Lock()  # of the one that is tried
_LOOK_S = 0.05  # between two looks whether who waits for it has left


class Service:
    """An engine, its thread, and what requests are held against.

    Args:
        engine: which this one uses until it is closed, and does not close.
        names: of the model; the first one is what answers call it.
        plan: what the engine was loaded with, to be shown; None shows none.
        file_name: of the model, to be shown.
        shared: what all models of a server have in common.
        owns_engine: the engine is closed with this one.
    """

    kind = CHAT

    def __init__(
        self,
        engine: Engine,
        *,
        names: Sequence[str],
        defaults: Defaults | None = None,
        plan: Plan | None = None,
        file_name: str = "",
        shared: Shared | None = None,
        owns_engine: bool = False,
    ) -> None:
        self.engine, self.plan, self.file_name = engine, plan, file_name
        self.spec = engine.spec  # what the model's file says; None where that is not known
        shared = shared or Shared(Limits())
        self.limits, self.totals, self._energy = shared.limits, shared.totals, shared.energy
        self._owns_engine = owns_engine
        size = engine.backend.context_size
        self.names = tuple(names)
        self.setup = ServedModel(self.names, size, defaults or Defaults(), self.limits)
        self.prompts = Prompts(engine)
        self.told_tokens = ToldTokens(engine.backend.tokenizer)
        self.lora: dict[int, float] | None = None  # of requests that say nothing; None: as loaded
        # What was read before anybody asked: the salt, ids, and from which one on.
        self._ahead: deque[tuple[str, list[int], int]] = deque(maxlen=_MOST_AHEAD)
        self.executor = Executor(self.limits.waiting, self._ended, engine.users)

    @cached_property
    def sizes(self) -> Sizes:
        plan, allocated = self.plan, sum(self.memory_bytes().values())
        return {"process": allocated if plan is None else plan.predicted_peak_bytes}

    @property
    def about(self) -> Mapping[str, Any]:
        backend = self.engine.backend
        senses = backend.modalities if sees_images(backend) else None
        return about(self.setup.context_size, self.engine.vocab_size, senses)

    @cached_property
    def end_ids(self) -> Sequence[int]:
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
        """Build what all schemas share, which keeps the interpreter for half a second.

        Ahead of the first schema, with which it would halt everybody's answers.
        """
        with suppress(UnsupportedError):  # of a vocabulary that has none
            make_grammar(self.engine.backend.tokenizer, AnswerFormat("json_schema", "{}"))

    def generations(
        self,
        request: Underway,
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
            self._try_form(options.answer_format, request.cancel)
        PROMPTS.info("%s prompt: %s", REQUEST_ID.get(), text or ids)
        for index in range(choices):
            cancel = threading.Event()
            asked = replace(
                options,
                sampling=seed_of_choice(options.sampling or SamplingParams(), index),
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
            salt, ahead = asked.cache_salt, options.ahead
            who = salt, ahead, self._joules()
            made.append(Generation(request.loop, stream, cancel, text, ids, most_s, *who))
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
        return self.engine.memory_bytes()

    @property
    def is_full(self) -> bool:
        return self.executor.is_full

    @property
    def is_busy(self) -> bool:
        return bool(self.executor.running or self.executor.waiting)

    def close(self) -> None:
        """End all generations and the threads, and the engine if it is its own; safe twice."""
        self.executor.close()
        if self._owns_engine:
            self.engine.close()

    def _joules(self) -> float:
        """That the machine took since the server began; 0 without a counter."""
        return 0.0 if self._energy is None else self._energy.joules()

    def _ended(self, generation: Generation, result: Result) -> None:
        salt, ids, counters = generation.salt, generation.prompt_ids, result.counters
        if generation.yields:
            end, begin = generation.stream.num_read
            self._ahead.append((salt, ids[:end], begin))
            joules = self._joules() - generation.began_j
            self.totals.count(read_ahead=end - begin, read_ahead_joules=joules)
            return
        for one in [*self._ahead]:  # what was read ahead for this prompt is forgotten then
            common = common_prefix_length(one[1], ids) if one[0] == salt else 0
            if (num_used := min(common, counters.reused_tokens) - one[2]) > 0:
                self.totals.count(read_ahead_used=num_used)
                self._ahead.remove(one)
        is_cancelled = result.finish_reason == "cancelled" and not generation.ran_out
        self.totals.add(counters, cancelled=is_cancelled)
        LOGGER.info(
            "%s %s: prompt %d tokens, %d of them kept, first token after %.2f s; "
            "answer %d tokens, %.1f tokens/s, %.2f tokens a step",
            *(generation.request_id, result.finish_reason, counters.prompt_tokens),
            *(counters.reused_tokens, counters.time_to_first_token_s, counters.generated_tokens),
            *(counters.tokens_per_s, counters.acceptance_length),
        )
        PROMPTS.info("%s answer: %s", generation.request_id, result.text)
        if generation.text and result.token_ids:
            self.prompts.learn(generation.text, ids, result, salt)
