"""A loaded model in a process of its own, with the drafters it is tried with, and their turns.

Its memory is its own then, and several take turns. The parent asks for a method with its arguments
and gets progress, and then a result or an error. The process ends when its parent does.

Contenders answer the same prompts, interleaved: a machine's speed drifts by more than most
differences worth measuring, and what drifts slowly cancels between answers that are given one after
the other.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from edgespec.decode.engine import Engine, Prompt
from edgespec.decode.generation import Counters
from edgespec.drafting import HEAD, MODEL, WINDOW, drafter_names, make_drafter
from edgespec.drafting.combined import CombinedDrafter, RoundHistory
from edgespec.drafting.model import WritingDrafter
from edgespec.drafting.proposal import Drafter
from edgespec.errors import BackendError, EdgespecError
from edgespec.measure.noise import find_divergence, measure_batch_noise
from edgespec.memory.device.track import MemoryTracker, peak_resident_bytes
from edgespec.memory.plan.plan import Plan, Request
from edgespec.models.processes import importing_safely, leave_stdout_and_interrupts
from edgespec.models.spec import ModelSpec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.loading import load_plan, plan_to_load
from edgespec.switching.engine import SwitchingEngine


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its numbers."""

    token_ids: tuple[int, ...]
    counters: Counters
    joules: float | None = None  # that the machine took meanwhile; None where nothing counts them


class Contender(Protocol):
    """Something that answers prompts."""

    name: str

    def renew(self) -> None:
        """Forget the answers that were given: the same prompts come again."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The answer to `prompt`."""


def order_of(prompt: int, contenders: int, repeat: int = 0) -> list[int]:
    """Who answers a prompt first, second, ...: an order at random, then its reverse (A B, B A).

    Each contender is as often early as late. A fixed order would give the first place to the same
    contender wherever tasks come round in the same rhythm.
    """
    number = prompt + repeat
    order = random.Random(number // 2).sample(range(contenders), contenders)
    return order[::-1] if number % 2 else order


def interleaved(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], *, max_tokens: int, repeats: int = 1
) -> Iterator[tuple[int, int, int, Answer]]:
    """Yield (repeat, prompt, contender, answer), the last three by their places in the arguments.

    Contenders are asked in the order of `order_of`. All prompts come before any comes again,
    because a drafter would know an answer that was just given. A prompt that cannot be answered
    ends everything: the error says which one.
    """
    for repeat in range(repeats):
        for contender in contenders:
            contender.renew()
        for number, prompt in enumerate(prompts):
            for place in order_of(number, len(contenders), repeat):
                contender = contenders[place]
                try:
                    answer = contender.answer(prompt, max_tokens)
                except EdgespecError as problem:
                    raise type(problem)(
                        f"prompt {number + 1}, {contender.name}: {problem}", hint=problem.hint
                    ) from problem
                yield repeat, number, place, answer


def memory_facts(plan: Plan, engine: Engine, tracker: MemoryTracker) -> dict[str, Any]:
    """The memory that was predicted, allocated and measured."""
    return {
        "limit_bytes": plan.limit_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": peak_resident_bytes(),
        "predicted": plan.component_bytes,
        "allocated": engine.memory_bytes(),
        "samples": [asdict(sample) for sample in list(tracker.samples)],
        "phases": [{"time_s": at, "name": name} for at, name in tracker.phases],
    }


AUTO, PLAIN = "auto", "none"
_SAMPLE_S = 0.1  # between two looks at the memory


class LoadedModel:
    """The answers of one loaded model by each of `drafters`, in that order.

    A drafter is the text of a list as `--drafter` takes it; `AUTO` is what the plan chooses and
    `PLAIN` decodes plainly. All of them share one load, whose plan has room for each.
    """

    def __init__(
        self, engine: Engine, plan: Plan, drafters: Sequence[str], tracker: MemoryTracker
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._names = drafters
        self._tracker = tracker
        loaded = engine.drafter
        members = loaded.member if isinstance(loaded, CombinedDrafter) else lambda _name: None
        self._model = members(MODEL) or members(HEAD) or members(WINDOW)
        self._state = loaded.state() if loaded is not None else {}
        self._drafters: list[Drafter | None] = [None] * len(drafters)
        self._of_small: list[Drafter | None] = [None] * len(drafters)  # of a pair that takes turns
        # What is counted for later runs are rounds of the drafter that was loaded alone.
        self._histories = [
            engine.history if loaded is not None and name == loaded.name else RoundHistory()
            for name in drafters
        ]
        for place in range(len(drafters)):
            self.renew(place)

    def renew(self, place: int) -> None:
        """A new drafter at `place`, which knows what was counted so far, and no text."""
        before = self._drafters[place]
        state = self._state if before is None else before.state()
        self._drafters[place] = drafter = make_drafter(self._names[place], self._model)
        if drafter is not None:
            drafter.load_state(state)
        if isinstance(self._engine, SwitchingEngine):
            known = self._of_small[place] or self._engine.small.drafter
            if known is not None:
                self._of_small[place] = fresh = make_drafter(known.name)
                assert fresh is not None
                fresh.load_state(known.state())

    def answer(
        self, place: int, prompt: Prompt, max_tokens: int, sampling: SamplingParams | None = None
    ) -> Answer:
        """The answer with the drafter at `place`, greedy by default."""
        self._engine.drafter = drafter = self._drafters[place]
        self._engine.history = self._histories[place]
        if isinstance(self._model, WritingDrafter):
            self._model.forget()  # the others' answer to this prompt, or the prompt itself
        if isinstance(self._engine, SwitchingEngine):
            self._engine.small.drafter = self._of_small[place]
        result = self._engine.generate(
            prompt, max_tokens=max_tokens, sampling=sampling, speculate=drafter is not None
        )
        return Answer(result.token_ids, result.counters)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in the model's chat format."""
        return self._engine.encode(prompt)

    def gap(self, prompt: Prompt, ids: Sequence[int], others: Sequence[int]) -> float:
        """How close the two best logits are where two answers to `prompt` part.

        0.0 where two models write: rounding may as well have moved a hand-over.
        """
        if isinstance(self._engine, SwitchingEngine):
            return 0.0
        divergence = find_divergence(self._engine.backend, self._engine.encode(prompt), ids, others)
        return divergence.gap if divergence else 0.0

    def noise(self) -> float:
        """How far step sizes move gaps between logits here."""
        return measure_batch_noise(self._engine.backend)

    def facts(self) -> dict[str, Any]:
        """The plan, step times, and the memory that was predicted, allocated and measured.

        `step_ms` are the times of steps over 1, 2, ... tokens; None was not measured.
        """
        curve = self._engine.curve
        steps = [] if curve is None else curve.base[1:]
        return {
            "step_ms": [ms if isfinite(ms) else None for ms in steps],
            "plan": self._plan.as_json(),
            "threads": self._plan.threads,
            "place": self._engine.backend.capabilities.place or self._plan.device,
            "memory": memory_facts(self._plan, self._engine, self._tracker),
        }

    def mark(self, phase: str) -> None:
        self._tracker.mark(phase)

    def close(self) -> None:
        with self._engine:
            self._tracker.__exit__(None, None, None)


def open_model(
    spec: ModelSpec,
    request: Request,
    drafters: Sequence[str],
    report: Callable[[str, float], None],
) -> tuple[LoadedModel, list[str]]:
    """Load `spec` for all of `drafters`; also what each of them came to. Raises as `load`."""
    with ExitStack() as opened:
        tracker = opened.enter_context(MemoryTracker(_SAMPLE_S))
        tracker.mark("load")
        plan_for = partial(plan_to_load, spec, report=report)
        chosen = plan_for(replace(request, drafter=AUTO)) if AUTO in drafters else None
        resolved = [chosen.drafter if chosen and name == AUTO else name for name in drafters]
        every = ",".join(dict.fromkeys(part for name in resolved for part in drafter_names(name)))
        plan = chosen if chosen and chosen.drafter == every else None
        plan = plan or plan_for(replace(request, drafter=every or PLAIN))
        engine = opened.enter_context(load_plan(spec, plan, progress=report))
        loaded = LoadedModel(engine, plan, resolved, tracker)
        opened.pop_all()
        return loaded, resolved


_PROGRESS, _RESULT, _ERROR = "progress", "result", "error"
_PATIENCE_S = 20.0


class Worker:
    """A process that has loaded a model. Raises what loading it raises."""

    def __init__(
        self,
        model: Path,
        request: Request,
        drafters: Sequence[str],
        report: Callable[[str, float], None] = lambda _what, _fraction: None,
    ) -> None:
        self._report = report
        context = multiprocessing.get_context("spawn")  # a fork would share what is loaded here
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        try:
            with theirs, importing_safely():
                self._process.start()
            self.drafters: list[str] = self.call("open", model, request, list(drafters))
        except BaseException:
            self.close(at_once=True)
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """What `LoadedModel.method` returns or raises."""
        try:
            self._connection.send((method, arguments))
            while True:
                kind, value = self._connection.recv()
                if kind == _PROGRESS:
                    self._report(*value)
                elif kind == _ERROR:
                    raise value
                else:
                    return value
        except (EOFError, ConnectionError) as problem:
            self.close()
            raise BackendError(
                f"the process that ran the model ended with status {self._process.exitcode}",
                hint="status -9 means that the system took its memory back: try --ctx or --budget",
            ) from problem

    def close(self, *, at_once: bool = False) -> None:
        """End the process: politely, or in the middle of what it does."""
        self._connection.close()
        if self._process.pid is None:  # it could not be started
            return
        if at_once:
            self._process.kill()
        self._process.join(_PATIENCE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


@dataclass(slots=True)
class WorkerContender:
    """One drafter of a worker's model, as a contender."""

    name: str
    worker: Worker
    place: int
    sampling: SamplingParams | None = None

    def renew(self) -> None:
        self.worker.call("renew", self.place)

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        answer = self.worker.call("answer", self.place, prompt, max_tokens, self.sampling)
        assert isinstance(answer, Answer)
        return answer


def _serve(parent: Connection) -> None:
    """What the process does: answer the parent's calls until it closes, or is gone."""
    from edgespec.models.onnx.folder import read_model

    leave_stdout_and_interrupts()

    def report(what: str, fraction: float) -> None:
        parent.send((_PROGRESS, (what, fraction)))

    loaded: LoadedModel | None = None
    try:
        while True:
            method, arguments = parent.recv()
            try:
                if method == "open":
                    path, request, drafters = arguments
                    loaded, resolved = open_model(read_model(path), request, drafters, report)
                    parent.send((_RESULT, resolved))
                else:
                    parent.send((_RESULT, getattr(loaded, method)(*arguments)))
            except EdgespecError as problem:
                parent.send((_ERROR, problem))
    except (EOFError, ConnectionError):
        pass
    finally:
        if loaded is not None:
            loaded.close()
