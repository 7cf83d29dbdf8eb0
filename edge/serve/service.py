"""An engine that answers requests, what all of them share, and what a server says about itself."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.backends.base import AnswerFormat, MakesGrammars
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.options import GenerationOptions
from edgespec.decode.stats import Counters
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.log import PROMPTS, REQUEST_ID
from edgespec.memory.device.energy import energy_meter, is_on_battery
from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.memory.plan.plan import Plan
from edgespec.prefix import common_prefix_length
from edgespec.sampling.constrained import make_grammar
from edgespec.sampling.params import FIELD_NAMES, SamplingParams
from edgespec.serve.access import CACHE_SALT, HISTORY
from edgespec.serve.api_error import LOGGER, ApiError
from edgespec.serve.parsing import Defaults, Limits, ServedModel, seed_of_choice
from edgespec.serve.pool import Member, Pool, Stops
from edgespec.serve.prompts import Prompts
from edgespec.serve.shapes import ToldTokens, fingerprint
from edgespec.serve.worker import Generation, Task, Worker

if TYPE_CHECKING:
    from edgespec.serve.tool_servers import ToolServers

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


class Totals:
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
        self.limits, self.totals = limits, Totals()
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
        return self.worker.is_full

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

# What llama.cpp's server has no name for.
_HELP = {
    "generations": "Answers that ended.",
    "cancelled": "Answers whose client went away.",
    "read_ahead": "Tokens of prompts that were read before anybody asked.",
    "read_ahead_used": "Tokens of these that prompts began with.",
    "time_to_first_token_s": "Seconds from arrival to first tokens, waiting included.",
}


def props(_pool: Pool, _shared: Shared, member: Member) -> dict[str, Any]:
    """The model and the settings of answers, under the names that llama.cpp's server gives them.

    Of a model that is not loaded, or makes embeddings, only what its plan says.
    """
    service = member.loaded
    told = {"model_alias": member.name, "build_info": fingerprint(), "is_sleeping": service is None}
    if not isinstance(service, Service):
        size = member.model.about["context_length"]
        return {**told, "default_generation_settings": {"n_ctx": size}}
    engine, setup = service.engine, service.setup
    template, sampling = engine.chat_template or "", setup.defaults.sampling
    names = [one.name for one in fields(sampling) if one.name != "logit_bias"]
    params = {FIELD_NAMES.get(name, name): getattr(sampling, name) for name in names}
    most = setup.defaults.max_tokens
    params["n_predict"] = -1 if most is None else most
    return {
        **told,
        "default_generation_settings": {"n_ctx": setup.context_size, "params": params},
        "total_slots": service.engine.users,
        "model_path": service.file_name,
        "chat_template": template,
        "chat_template_caps": {
            "supports_tools": "tools" in template,
            "supports_tool_calls": "tool_calls" in template,
            "supports_system_role": "system" in template,
        },
        "modalities": member.model.about["modalities"],
        "bos_token": engine.backend.tokenizer.bos_text,
        "eos_token": engine.backend.tokenizer.eos_text,
    }


def adapters(_pool: Pool, _shared: Shared, member: Member) -> list[dict[str, Any]]:
    """The adapters of a model that is loaded, under the names that llama.cpp's server gives them.

    Their scales are those of requests that say nothing.
    """
    service = member.loaded
    named = service.plan.lora if isinstance(service, Service) and service.plan else ()
    asked = service.lora if named else None
    return [
        {
            "id": number,
            "path": path.name,
            "scale": scale if asked is None else asked.get(number, 0.0),
        }
        for number, (path, scale) in enumerate(named)
    ]


def status(pool: Pool, shared: Shared, member: Member) -> dict[str, Any]:
    """Everything that changes while it runs, and the plan of a model with its reasons."""
    loaded = member.loaded
    plan = None if loaded is None else loaded.plan
    running, waiting = _queue(pool)
    return {
        "model": member.name,
        "context_size": member.model.about["context_length"],
        "models": [one.card for one in pool.members],
        "queue": {
            "running": running,
            "users": sum(one.engine.users for one in pool.ready()),
            "waiting": waiting,
            "most": shared.limits.waiting,
        },
        "memory": {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_resident_bytes(),
            "planned_peak_bytes": pool.planned_bytes,
            "limit_bytes": pool.limit_bytes or (0 if plan is None else plan.limit_bytes),
            "planned": {} if plan is None else plan.component_bytes,
            "allocated": {} if loaded is None else loaded.memory_bytes(),
        },
        "on_battery": is_on_battery(),
        "draft_failure": loaded.engine.draft_failure if isinstance(loaded, Service) else None,
        "totals": shared.totals.as_json(),
        "plan": {} if plan is None else plan.as_json(),
    }


def _queue(pool: Pool) -> tuple[int, int]:
    """Answers under way, and those that wait for their turn or for a model."""
    workers = [one.worker for one in pool.ready()]
    asked = sum(len(one.tickets) for one in pool.members)
    waiting = sum(worker.num_waiting for worker in workers) + asked
    return sum(len(worker.running) for worker in workers), waiting


def metrics(pool: Pool, shared: Shared, _member: Member) -> str:
    """Numbers as Prometheus reads them."""
    totals = shared.totals
    running, waiting = _queue(pool)
    lines = []
    for name, about in _HELP.items():
        unit = f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
        lines += _metric(f"{unit}_total", "counter", about, {"": totals.sums[name]})
    for kind in ("drafted", "accepted"):
        counts = getattr(totals, f"{kind}_by").copy()
        values = {f'{{drafter="{name}"}}': count for name, count in sorted(counts.items())}
        lines += _metric(f"{kind}_by_total", "counter", f"Tokens {kind}, by drafter.", values)
    statuses = {f'{{status="{one}"}}': n for one, n in sorted(totals.statuses.copy().items())}
    lines += _metric("requests_total", "counter", "Requests by their status.", statuses)
    loads = {f"{{model={json.dumps(one.name)}}}": one.loads for one in pool.members}
    lines += _metric("model_loads_total", "counter", "Times a model was loaded.", loads)
    held = resident_bytes()
    lines += _metric("resident_memory_bytes", "gauge", "Memory of the process.", {"": held})
    if shared.energy is not None:
        about = "Energy since the server began, idle time included, as the counter counts it."
        counted = {f'{{counter="{shared.energy.source.name}"}}': round(shared.energy.joules(), 3)}
        lines += _metric("energy_joules_total", "counter", about, counted)
    for name, (about, value) in _llama_metrics(totals, running, waiting).items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += _metric(name, kind, about, {"": value}, "llamacpp:")
    return "\n".join([*lines, ""])


def _llama_metrics(totals: Totals, running: int, waiting: int) -> dict[str, tuple[str, float]]:
    """What llama.cpp's server has a name for, so that its dashboards show it."""
    sums = totals.sums
    cached, accepted = sums["cached_tokens"], sums["accepted_tokens"]
    read, decoded = sums["prompt_tokens"] - cached, accepted + sums["rounds"]
    decode_rate = _rate(decoded, sums["decode_s"])
    return {
        "prompt_tokens_total": ("Tokens of prompts that were read.", read),
        "prompt_tokens_cached_total": ("Tokens of prompts that were in the cache.", cached),
        "prompt_seconds_total": ("Seconds of reading prompts.", sums["prompt_s"]),
        "prompt_tokens_seconds": ("Tokens of prompts per second.", _rate(read, sums["prompt_s"])),
        "tokens_predicted_total": ("Tokens written.", sums["generated_tokens"]),
        "tokens_predicted_seconds_total": ("Seconds from first to last tokens.", sums["decode_s"]),
        "predicted_tokens_seconds": ("Tokens written per second.", decode_rate),
        "n_decode_total": ("Steps, one for each prompt.", sums["generations"] + sums["rounds"]),
        "spec_decode_num_draft_tokens_total": ("Tokens drafted.", sums["drafted_tokens"]),
        "spec_decode_num_accepted_tokens_total": ("Drafted tokens that were right.", accepted),
        "requests_processing": ("Answers under way.", running),
        "requests_deferred": ("Answers in the queue.", waiting),
    }


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _metric(
    name: str, kind: str, about: str, values: dict[str, Any], prefix: str = "edgespec_"
) -> list[str]:
    name = f"{prefix}{name}"
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{labels} {value}" for labels, value in values.items()]
