"""The model pool: models that are loaded when they are asked for, and leave for others.

One thread plans, loads and unloads, one model at a time. Requests hold a lease of a model while
they are answered. What a model is (a chat, embeddings) is nobody's business here: it says what it
takes, is loaded, says whether it is busy, and is closed.

The rule, which docs/serve.md tells users:

1. The model is loaded whose first request has waited longest. All that wait for it begin together.
2. What has to leave is idle, not pinned, and least recently used. A model that answers never
   leaves. Where that is not enough, the next one in line is looked at.
3. A request that waited for ten seconds is not overtaken any more, and the models that are in its
   way take no new requests until they are idle. So nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from edgespec.decode.generation import Counters
from edgespec.errors import DoesNotFitError, EdgespecError, UnsupportedError
from edgespec.memory.bytes.config import HOST
from edgespec.memory.device import reservations
from edgespec.memory.device.energy import energy_meter
from edgespec.memory.device.track import give_back_memory
from edgespec.serve.parsing import ApiError, Limits, api_error_of, shown
from edgespec.setup.planning import Capacity

if TYPE_CHECKING:
    from edgespec.serve.tool_servers import ToolServers

CHAT, EMBED, ANY = "chat", "embed", ""  # kinds of models
_NOTHING_MORE = Capacity({HOST: 0}, 0)  # than what is loaded already
LOG = logging.getLogger("edgespec.serve.pool")
_LOOK_S = 0.05  # between two looks at whether a model that ends its answers is idle
_PATIENCE_S = 10.0  # that a request lets others go on before it
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NAMED = 20  # models, in an error
_ELSE = {  # what a model is told that is asked for the other kind
    CHAT: "makes embeddings and writes no text: ask /v1/embeddings or /v1/rerank, or a model that "
    "writes",
    EMBED: "writes text and makes no embeddings (--pooling last serves it for embeddings alone): "
    "ask a model that was made for them",
}


def about(
    context_size: int | None, vocab_size: int | None, senses: Mapping[str, bool] | None = None
) -> dict[str, Any]:
    """What a list of models says of one that answers chats."""
    return {
        "modalities": senses or {"vision": False, "audio": False},
        "context_length": context_size,
        "max_model_len": context_size,
        "meta": {"n_ctx": context_size, "n_vocab": vocab_size},
    }


# What is summed of a generation's counters; /status has other words for what was reused.
_SUMMED = (
    *("prompt_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens", "rounds"),
    *("prompt_s", "time_to_first_token_s", "decode_s"),
)
_OTHERS = (
    *("generations", "cancelled", "cached_tokens"),
    *("read_ahead", "read_ahead_used", "read_ahead_joules"),
)


class Metrics:
    """Sums over all generations, and how many requests had which status."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys((*_OTHERS, *_SUMMED), 0)
        self.drafted_by, self.accepted_by = Counter[str](), Counter[str]()
        self.statuses = Counter[int]()
        self._lock = threading.Lock()

    def add(self, counters: Counters, *, cancelled: bool) -> None:
        sums = {name: getattr(counters, name) for name in _SUMMED}
        sums["cached_tokens"] = counters.reused_tokens
        self.count(generations=1, cancelled=int(cancelled), **sums)
        with self._lock:
            self.drafted_by.update(counters.drafted_by)
            self.accepted_by.update(counters.accepted_by)

    def count(self, **numbers: float) -> None:
        with self._lock:
            for name, number in numbers.items():
                self.sums[name] += number

    def add_status(self, status: int) -> None:
        with self._lock:
            self.statuses[status] += 1

    def as_json(self) -> dict[str, Any]:
        names = "drafted_by", "accepted_by", "statuses"
        return {**self.sums, **{name: dict(getattr(self, name)) for name in names}}


_POWER_EVERY_S = 1.0  # often enough for an hour's mean, and an idle board goes on sleeping


class Shared:
    """What all models of a server have in common: limits, totals, joules."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.totals = limits, Metrics()
        self.started_s = int(time.time())
        self.underway = set[Any]()  # answers under way, which have a `stop`
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


@dataclass(slots=True, eq=False)
class Member:
    """A model of a pool; `keep_alive_s` is how long it may be idle, if no request says so."""

    model: Any  # a `ModelFile`, or the `Service` of an engine that stays
    keep_alive_s: float = inf
    is_pinned: bool = False
    loaded: Any = None  # a `Service` or an `EmbeddingService`
    is_loading: bool = False
    progress: float = 0.0  # of that, 0 to 1
    is_leaving: bool = False  # no request gets it any more, and its memory is still there
    leaves: Any = None  # what was loaded, until that is closed: nobody else may refer to it
    must_leave: bool = False  # as soon as it is idle, pinned or not
    problem: str = ""  # why it could not be loaded the last time
    holders: int = 0
    tickets: dict[Future[None], float] = field(default_factory=dict)  # since when they wait
    lives_s: float = inf
    idle_since_s: float = 0.0
    last_use: int = 0  # larger than that of any use before it
    loads: int = 0

    @property
    def name(self) -> str:
        """What answers call it."""
        return str(self.model.names[0])

    @property
    def nbytes(self) -> int:
        """What it adds to the process; 0 before it was planned."""
        return sum((self.model.sizes or {}).values())

    @property
    def is_there(self) -> bool:
        """Whether the process holds something of it: also while it is loaded, or leaves."""
        return self.loaded is not None or self.is_loading or self.is_leaving

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and answers nothing."""
        return self.loaded is not None and not self.holders and not self.loaded.is_busy

    @property
    def state(self) -> str:
        """unloaded, loading or ready."""
        return "loading" if self.is_loading else "unloaded" if self.loaded is None else "ready"

    @property
    def card(self) -> dict[str, Any]:
        more: dict[str, Any] = {"problem": self.problem} if self.problem else {}
        if self.is_pinned:
            more["pinned"] = True
        if self.is_loading:
            more["progress"] = round(self.progress, 3)
        about = {**self.model.about, "kind": self.model.kind, "state": self.state}
        return {"id": self.name, **about, "bytes": self.nbytes, "loads": self.loads, **more}


class Lease:
    """A model that stays until the lease is released."""

    def __init__(self, pool: Pool, member: Member, keep_alive_s: float | None) -> None:
        self.loaded = member.loaded
        self._pool, self._member, self._keep_alive_s = pool, member, keep_alive_s
        self._is_over = False

    def release(self) -> None:
        """The request was answered; safe to call twice."""
        if not self._is_over:
            self._is_over = True
            self._pool.release(self._member, self._keep_alive_s)


class Pool:
    """Models by name, of which as many are loaded as fit.

    Args:
        members: the first one of a kind that can be planned answers requests that name no model.
        capacity: what they may take together; none is loaded besides those that are there.
        shared: what they have in common, which is closed with the pool.
        any_model: whether the first one answers for every name.
    """

    def __init__(
        self,
        members: Sequence[Member],
        capacity: Capacity = _NOTHING_MORE,
        *,
        shared: Shared | None = None,
        any_model: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members, self.capacity = tuple(members), capacity
        self.shared = shared or Shared(Limits())
        self.limits = self.shared.limits
        self._any_model, self._clock = any_model, clock
        self._by_name = {name: one for one in members[::-1] for name in one.model.names}
        self._uses = 0
        self._drained: list[Member] = []  # which take no requests until they have left
        self._change = threading.Condition(threading.RLock())
        self.is_closed = False
        self._thread = threading.Thread(target=self._work, name="edgespec-pool", daemon=True)
        self._thread.start()

    @property
    def planned_bytes(self) -> int:
        """Ceiling of what the process holds with the models that are loaded, come or leave."""
        there = sum(one.nbytes for one in self.members if one.is_there)
        return self.capacity.shared_bytes + there

    @property
    def sees_images(self) -> bool:
        """Whether a model has a projector."""
        return any(True in one.model.about.get("modalities", {}).values() for one in self.members)

    # -- for requests ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise ApiError where no request can be answered."""
        if self.is_closed:
            raise _stopping()
        for one in self.members:
            if one.loaded is not None:
                one.loaded.check()

    def check_queue(self, kind: str) -> None:
        """Raise ApiError where no request is taken, whatever model of a kind it names."""
        of_kind = [one for one in self.members if kind in (ANY, one.model.kind)]
        takes = (one.loaded is not None and not one.loaded.is_full for one in of_kind)
        may_wait = self._num_waiting < self.limits.waiting
        if of_kind and not any(takes) and not (may_wait and any(o.loaded is None for o in of_kind)):
            raise _full("the queue is full: try again later")

    @property
    def _num_waiting(self) -> int:
        return sum(len(one.tickets) for one in self.members)

    def ready(self) -> list[Any]:
        """What is loaded and answers chats."""
        there = (one for one in self.members if one.loaded is not None)
        return [one.loaded for one in there if one.model.kind == CHAT]

    def find(self, name: Any, kind: str = CHAT) -> Member:
        """The model that a request means. Raises ApiError where there is none of that name."""
        if isinstance(name, str) and name not in self._by_name:
            name = name.removesuffix(":latest")  # as clients of Ollama write names without a tag
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is not None and kind in (ANY, found.model.kind):
            return found
        of_kind = [one for one in self.members if kind in (ANY, one.model.kind)]
        is_any = name is None or (self._any_model and isinstance(name, str))
        if found is None and of_kind and is_any:
            # The first one, but for what could not even be planned: a broken file.
            sound = (one for one in of_kind if one.model.sizes is not None or not one.problem)
            return next(sound, of_kind[0])
        names = [one.name for one in of_kind]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        others = f"{', '.join(names[:_NAMED])}{more}"
        if found is not None or not of_kind:
            raise ApiError(
                f"{(found or self.members[0]).name} {_ELSE[kind]}"
                + (f", such as {others}" if others else ""),
                status=404,
                param="model",
                code="unsupported_endpoint",
            )
        hint = ": ask for that one, or start the server with --alias NAME or --any-model"
        raise ApiError(
            f"there is no model {shown(name)} here, only {others}" + hint * (len(names) == 1),
            status=404,
            param="model",
            code="model_not_found",
        )

    def lease_now(self, member: Member, keep_alive_s: float | None = None) -> Lease | None:
        """A lease of a model that is ready; None where it has to be waited for."""
        with self._change:
            if self.is_closed:
                raise _stopping()
            if member.loaded is None or member in self._drained:
                return None
            self._hold(member)
            return Lease(self, member, keep_alive_s)

    async def lease(self, member: Member, keep_alive_s: float | None = None) -> Lease:
        """The same, which waits for the model.

        Raises ApiError where it cannot be loaded, or was not within `limits.model_s`.
        """
        found = self.lease_now(member, keep_alive_s)
        if found is not None:
            return found
        ticket, most = Future[None](), self.limits.waiting
        with self._change:
            if self._num_waiting >= most:
                raise _full(f"the queue is full ({most} wait for models): try again in a second")
            member.tickets[ticket] = self._clock()
            self._change.notify_all()
        try:
            await asyncio.wait_for(asyncio.wrap_future(ticket), self.limits.model_s)
        except BaseException as problem:
            if not ticket.cancel() and ticket.exception() is None:
                self.release(member)  # it had it already
            if not isinstance(problem, asyncio.TimeoutError):
                raise
            raise ApiError(
                f"{member.name} was not loaded within {self.limits.model_s:.0f} s: other models "
                "are answering; try again later",
                status=503,
                code="model_busy",
            ) from problem
        finally:
            with self._change:
                member.tickets.pop(ticket, None)
        return Lease(self, member, keep_alive_s)

    def release(self, member: Member, keep_alive_s: float | None = None) -> None:
        """A lease has ended; the model may be idle for as long as its request says."""
        with self._change:
            member.holders -= 1
            member.idle_since_s = self._clock()
            member.lives_s = member.keep_alive_s if keep_alive_s is None else keep_alive_s
            self._change.notify_all()

    async def unload(self, member: Member) -> None:
        """Let a model leave because it was asked to, pinned or not; returns when it is gone.

        Raises ApiError while it answers, and for a server of one model that stays.
        """
        with self._change:
            if member.model is member.loaded:
                raise ApiError("the server was given a loaded model, which stays", status=409)
            if member.is_loading or not (member.is_idle or member.loaded is None):
                raise ApiError(f"{member.name} is in use", status=409, code="model_busy")
            member.must_leave = member.loaded is not None
            self._change.notify_all()
        while (member.must_leave or member.is_leaving) and not self.is_closed:
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """End what waits, a load under way and all models; safe to call twice."""
        with self._change:
            self.is_closed = True
            for one in self.members:
                self._fail(one, _stopping())
            self._change.notify_all()
        self._thread.join()
        for one in self.members:
            if one.loaded is not None:
                one.loaded.close()
        self.shared.close()

    # -- the thread ------------------------------------------------------------------------

    def _work(self) -> None:
        while not self.is_closed:
            with self._change:
                now = self._clock()
                task = None if self.is_closed else self._task(now)
                if task is None and not self.is_closed:  # until something is told, or may be due
                    idle = (one for one in self.members if one.is_idle)
                    ends = [one.idle_since_s + one.lives_s - now for one in idle]
                    # A step may be under way that nobody waits for any more.
                    busy = (one for one in self.members if one.loaded is not None)
                    if self._num_waiting or any(not (o.holders or o.is_idle) for o in busy):
                        ends.append(_LOOK_S)
                    soonest = min(ends, default=inf)
                    self._change.wait(None if soonest == inf else max(_LOOK_S, soonest))
            if task is not None:
                task()

    def _task(self, now: float) -> Callable[[], None] | None:
        for one in self.members:
            if one.tickets and one.model.sizes is None:
                return partial(self._plan, one)
            if one.tickets and (problem := self._never_fits(one)) is not None:
                self._fail(one, problem)
            is_over = not one.is_pinned and now - one.idle_since_s >= one.lives_s
            if one.is_idle and (is_over or one.must_leave):
                why = f"nobody used it for {one.lives_s:g} s" if is_over else "it was asked to"
                self._detach(one)
                return partial(self._free, one, why)
        wanted, leaving = self._next_load(now)
        for one in self.members:
            if one.loaded is not None and one not in (*self._drained, *leaving):
                self._grant(one)
        if wanted is None:
            unplanned = (one for one in self.members if one.model.sizes is None)
            rest = next((one for one in unplanned if not one.problem), None)
            is_quiet = not any(one.holders for one in self.members)
            return partial(self._plan, rest) if rest is not None and is_quiet else None
        asked = len(wanted.tickets)
        why = f"{asked} {'request waits' if asked == 1 else 'requests wait'}" if asked else "pinned"
        gone = []
        for one in leaving:
            self._detach(one)
            gone.append(partial(self._free, one, f"for {wanted.name}"))
        wanted.is_loading = True
        return partial(self._load, wanted, why, gone)

    def _next_load(self, now: float) -> tuple[Member | None, list[Member]]:
        """The rule above: what is loaded next, and what leaves for it."""
        self._drained = []
        ready = [one for one in self.members if one.loaded is not None]
        waiting = list[tuple[float, Member]]()  # since when a first request does
        for one in self.members:
            is_due = one.is_pinned and not one.loads and not one.problem
            if one.loaded is None and one.model.sizes is not None and (one.tickets or is_due):
                waiting.append((min(one.tickets.values(), default=0.0), one))
        for since_s, wanted in sorted(waiting, key=lambda pair: pair[0]):
            idle = [one for one in ready if one.is_idle]
            leaving = self._leaving(wanted, idle, ready)
            if leaving is not None:
                return wanted, leaving
            if now - since_s >= _PATIENCE_S:
                self._drained = self._leaving(wanted, ready, ready) or []
                break
        return None, []

    def _leaving(
        self, wanted: Member, candidates: Iterable[Member], ready: Iterable[Member]
    ) -> list[Member] | None:
        """The least recently used ones without which it fits; None where they do not suffice."""
        there, gone = [*ready, wanted], list[Member]()
        for one in sorted(candidates, key=lambda one: one.last_use):
            if not one.is_pinned and not self._fit(there):
                there.remove(one)
                gone.append(one)
        if not self._fit(there):
            return None
        for one in gone[::-1]:  # what turned out not to be in the way stays
            if self._fit([*there, one]):
                there.append(one)
                gone.remove(one)
        return gone

    def _fit(self, members: Iterable[Member]) -> bool:
        return self.capacity.fits([one.model.sizes or {} for one in members])

    def _never_fits(self, wanted: Member) -> ApiError | None:
        """Why a model cannot be loaded, whatever leaves."""
        pinned = [one for one in self.members if one.is_pinned and one is not wanted]
        if wanted.model.sizes is None or self._fit([*pinned, wanted]):
            return None
        held = sum(one.nbytes for one in pinned) + self.capacity.shared_bytes
        return ApiError(
            f"{wanted.name} needs {wanted.nbytes >> 20} MiB, and of "
            f"{self.capacity.host_bytes >> 20} MiB pinned models and the program take "
            f"{held >> 20} MiB",
            code="model_does_not_fit",
        )

    # -- what the thread does --------------------------------------------------------------

    def _plan(self, member: Member) -> None:
        pinned = [one.model.sizes or {} for one in self.members if one.is_pinned]
        try:
            member.model.plan(pinned)
            member.problem = ""
        except Exception as problem:
            with self._change:
                member.problem = str(problem)
                self._fail(member, _cannot(member, problem))
            LOG.warning("%s cannot be loaded: %s", member.name, problem)

    def _load(self, member: Member, why: str, leaving: Sequence[Callable[[], None]]) -> None:
        for free in leaving:
            free()
        others = [one.model.sizes or {} for one in self.members if one.loaded is not None]
        began, loaded, failure = self._clock(), None, None
        try:
            loaded = member.model.load(others, partial(self._report, member))
        except ApiError as stops:
            failure = stops
        except Exception as problem:
            member.problem, failure = str(problem), _cannot(member, problem, is_planned=True)
            LOG.warning("%s could not be loaded (%s): %s", member.name, why, problem)
            _collect()
        with self._change:
            member.is_loading, member.loaded = False, loaded
            if failure is not None:
                self._fail(member, failure)
                return
            member.loads += 1
            member.problem, member.lives_s = "", member.keep_alive_s
            member.idle_since_s = self._clock()
            LOG.info(
                "%s loaded: %s; %d MiB, %.1f s",
                *(member.name, why, member.nbytes >> 20, self._clock() - began),
            )
            gc.freeze()  # what is there stays: to look it through for garbage takes several steps
            self._grant(member)

    def _report(self, member: Member, _what: str, fraction: float) -> None:
        member.progress = fraction
        if self.is_closed:
            raise _stopping()

    def _free(self, member: Member, why: str) -> None:
        try:
            member.leaves.close()
        except Exception as problem:  # what it has learned could not be kept, for one
            LOG.warning("%s: %s", member.name, problem)
        member.leaves = None
        _collect()
        with self._change:  # who leaves gives up what the process has reserved, for all of them
            left = [one.model.sizes or {} for one in self.members if one.loaded is not None]
        if left:
            host = self.capacity.shared_bytes + sum(sizes.get(HOST, 0) for sizes in left)
            reservations.reserve(host, lambda: True)
        member.is_leaving = member.must_leave = False
        LOG.info("%s unloaded: %s", member.name, why)

    def _detach(self, member: Member) -> None:
        """Take what is loaded from a model, so that no request gets it any more."""
        member.leaves, member.loaded, member.is_leaving = member.loaded, None, True

    def _hold(self, member: Member) -> None:
        member.holders += 1
        self._uses += 1
        member.last_use = self._uses

    def _grant(self, member: Member) -> None:
        """Let all requests that wait for a model have it."""
        tickets, member.tickets = member.tickets, {}
        for ticket in tickets:
            if ticket.set_running_or_notify_cancel():
                self._hold(member)
                ticket.set_result(None)

    def _fail(self, member: Member, problem: ApiError) -> None:
        tickets, member.tickets = member.tickets, {}
        for ticket in tickets:
            if ticket.set_running_or_notify_cancel():
                ticket.set_exception(problem)


def _full(message: str) -> ApiError:
    return ApiError(message, status=429, code="queue_full")


def _stopping() -> ApiError:
    return ApiError("the server stops", status=503, code="stopping")


def _cannot(member: Member, problem: Exception, *, is_planned: bool = False) -> ApiError:
    """What a request is told whose model cannot be had: later it can, if others took memory."""
    if not isinstance(problem, EdgespecError):
        return api_error_of(problem)
    status, code = 500, "model_not_loaded"
    if isinstance(problem, DoesNotFitError):
        status, code = 503 if is_planned else 400, "model_does_not_fit"
    hint = f" ({problem.hint})" if problem.hint else ""
    message = f"{member.name} cannot be loaded: {problem}{hint}"
    return ApiError(message, status=status, code=code)


def _collect() -> None:
    """Let go of what a model left behind: cycles, and what the C library keeps."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    give_back_memory()


def keep_alive_of(value: Any, name: str = "keep_alive") -> float:
    """Seconds of `keep_alive`, as Ollama takes it: a number, or "5m", "1h30m"; negative: for ever.

    An error calls it by its name, that of the option or field.

    Raises UnsupportedError.

    >>> keep_alive_of("1h30m"), keep_alive_of(0), keep_alive_of("-1")
    (5400.0, 0.0, inf)
    """
    text = str(value).strip()
    is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
    if is_number and re.fullmatch(r"-?\d+(\.\d+)?", text):
        return inf if float(text) < 0 else float(text)
    parts = _DURATION.findall(text)
    if isinstance(value, str) and parts and "".join(map("".join, parts)) == text.removeprefix("-"):
        seconds = sum(float(count) * _SECONDS[unit] for count, unit in parts)
        return inf if text.startswith("-") else seconds
    raise UnsupportedError(
        f"{name} {shown(value)} is no time such as 5m, 30s or 0",
        hint="a negative time keeps the model until others need its memory",
    )
