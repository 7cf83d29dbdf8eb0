"""An engine that answers requests: what the routes share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from edgespec.backends.base import AnswerFormat
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.options import GenerationOptions
from edgespec.decode.stats import Counters
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.log import PROMPTS, REQUEST_ID
from edgespec.memory.device.energy import energy_meter
from edgespec.memory.plan.plan import Plan
from edgespec.sampling.constrained import make_grammar
from edgespec.sampling.params import SamplingParams
from edgespec.serve.access import HISTORY
from edgespec.serve.api_error import LOGGER, ApiError
from edgespec.serve.asked import Defaults, Setup
from edgespec.serve.generation_fields import seed_of_choice
from edgespec.serve.limits import Limits
from edgespec.serve.prompts import Prompts
from edgespec.serve.responses import KeptResponses
from edgespec.serve.worker import Generation, Worker


@dataclass(slots=True)
class Totals:
    """Sums over all generations, and how many requests had which status."""

    generations: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counters: Counters, *, cancelled: bool) -> None:
        """Count a generation that has ended."""
        with self._lock:
            self.generations += 1
            self.cancelled += cancelled
            self.prompt_tokens += counters.prompt_tokens
            self.cached_tokens += counters.reused_tokens
            self.generated_tokens += counters.generated_tokens
            self.drafted_tokens += counters.drafted_tokens
            self.accepted_tokens += counters.accepted_tokens
            self.rounds += counters.rounds
            self.prompt_s += counters.time_to_first_token_s
            self.decode_s += counters.decode_s
            self.drafted_by.update(counters.drafted_by)
            self.accepted_by.update(counters.accepted_by)

    def add_status(self, status: int) -> None:
        """Count a request that was answered."""
        with self._lock:
            self.statuses[status] += 1


_POWER_EVERY_S = 1.0  # often enough for an hour's mean, and an idle board goes on sleeping


class Shared:
    """What all models of a server have in common: limits, totals, kept responses, joules."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.totals = limits, Totals()
        self.responses = KeptResponses(limits.response_bytes, limits.responses)
        self.started_s = int(time.time())
        self._opened = ExitStack()
        self.energy, _ = self._opened.enter_context(energy_meter(every_s=_POWER_EVERY_S))

    def close(self) -> None:
        """End the thread that counts joules; safe to call twice."""
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
        self.limits, self.totals, self.responses = shared.limits, shared.totals, shared.responses
        self._owns_engine = owns_engine
        self._read_tokens, self._read_s = 0, 0.0
        size = engine.backend.context_size
        self.setup = Setup(tuple(names), size, defaults or Defaults(), self.limits, any_model)
        self.prompts = Prompts(engine)
        self.worker = Worker(self.limits.waiting, self._ended, engine.users)

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
        if self.worker.is_closed:
            raise ApiError("the server stops", status=503, code="stopping")

    def prepare_formats(self) -> None:
        """Build what all schemas share, which keeps the interpreter for up to a second.

        Before anybody is answered: with the first schema it would halt everybody's answers.
        """
        with suppress(UnsupportedError):  # of a vocabulary that has none
            make_grammar(self.engine.backend.tokenizer, AnswerFormat("json_schema", "{}"))

    def generations(
        self,
        loop: asyncio.AbstractEventLoop,
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
        PROMPTS.info("%s prompt: %s", REQUEST_ID.get(), text or ids)
        for index in range(choices):
            cancel = threading.Event()
            sampling = seed_of_choice(options.sampling or SamplingParams(), index)
            asked = replace(options, sampling=sampling, cancel=cancel, history=HISTORY.get())
            try:
                stream = self.engine.stream(ids, asked)
            except ContextFullError as problem:
                raise ApiError(
                    f"{problem} ({problem.hint})",
                    code="context_length_exceeded",
                    more={"n_prompt_tokens": len(ids), "n_ctx": self.setup.context_size},
                ) from problem
            made.append(Generation(loop, stream, cancel, text, ids, most_s))
        return made

    def memory_bytes(self) -> dict[str, int]:
        """What was allocated, by component."""
        return self.engine.memory_bytes()

    @property
    def prompt_s_per_token(self) -> float:
        """Seconds that reading a token of a prompt has taken; 0 where none was read."""
        return self._read_s / max(1, self._read_tokens)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way, or waits."""
        return bool(self.worker.running or self.worker.num_waiting)

    def close(self) -> None:
        """End all generations and the threads, and the engine if it is its own; safe twice."""
        self.worker.close()
        if self._owns_engine:
            self.engine.close()

    def _ended(self, generation: Generation, result: Result) -> None:
        is_cancelled = result.finish_reason == "cancelled" and not generation.ran_out
        counters = result.counters
        self.totals.add(counters, cancelled=is_cancelled)
        self._read_tokens += counters.prompt_tokens - counters.reused_tokens
        self._read_s += counters.time_to_first_token_s
        LOGGER.info(
            "%s %s: prompt %d tokens, %d of them kept, %.2f s; answer %d tokens, %.1f tokens/s, "
            "%.2f tokens a step",
            generation.request_id,
            result.finish_reason,
            counters.prompt_tokens,
            counters.reused_tokens,
            counters.time_to_first_token_s,
            counters.generated_tokens,
            counters.tokens_per_s,
            counters.acceptance_length,
            extra={
                "fields": {
                    "request_id": generation.request_id,
                    "finish_reason": result.finish_reason,
                    "prompt_tokens": counters.prompt_tokens,
                    "cached_tokens": counters.reused_tokens,
                    "generated_tokens": counters.generated_tokens,
                    "tokens_per_s": round(counters.tokens_per_s, 2),
                }
            },
        )
        PROMPTS.info("%s answer: %s", generation.request_id, result.text)
        if generation.text and result.token_ids:
            self.prompts.learn(generation.text, generation.prompt_ids, result)
