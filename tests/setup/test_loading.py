"""Loading that fails at any of its steps leaves nothing open."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laid_out import machine_by_hand
from loading_cases import (
    CURVE,
    SPEC,
    VOCAB,
    Opened,
    StepError,
    assert_nothing_stays_open,
    quiet,
)
from random_gguf import Q4_0, write_model

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.early_exit import ExitBackend
from edgespec.backends.llama.library import library
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.backends.ort import backend as ort
from edgespec.backends.ort.backend import OrtBackend
from edgespec.bench import loaded_model
from edgespec.decode.engine import Engine
from edgespec.drafting.model import ModelDrafter
from edgespec.errors import BackendError, DoesNotFitError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device import host
from edgespec.memory.device.track import MemoryTracker
from edgespec.memory.plan import plan as plans
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.models.spec import read_model_spec
from edgespec.quantize.context import EvalContext
from edgespec.setup import loading, stored
from edgespec.setup.loading import Learning
from edgespec.setup.planning import make_run_plan


@pytest.mark.parametrize(("remember", "beside"), [(False, False), (True, False), (False, True)])
def test_a_model_and_its_draft_model(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, remember: bool, beside: bool
) -> None:
    opened: list[Any] = []

    def load_draft_model(*arguments: Any) -> Sequence[ModelDrafter]:
        opening = arguments[-1]
        backend = Opened(opened) if opening is None else opening.result()
        return (ModelDrafter(backend, CURVE, VOCAB),)

    monkeypatch.setitem(loading._BACKENDS, plan.backend, lambda *_: Opened(opened))
    monkeypatch.setattr(loading, "load_draft_model", load_draft_model)
    monkeypatch.setattr(loading, "open_draft_model", lambda *_: Opened(opened))
    monkeypatch.setattr(loading, "is_kept", lambda *_: True)
    monkeypatch.setattr(plans, "is_translated", lambda *_: False)
    chosen = replace(plan, remember=remember, packed_file=beside)
    load = loading._load_one
    functions = [load, loading._open_beside, Learning.__init__]
    steps = assert_nothing_stays_open(lambda: load(SPEC, chosen, quiet), functions, opened)
    assert steps > 15


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_draft_model_is_read_while_its_target_is_mapped(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """It comes behind one that is packed first, which has all threads."""
    begun = threading.Event()

    def load_target(*_: Any) -> Opened:
        assert begun.wait(60) if is_kept else not begun.is_set()
        return Opened([])

    def open_draft_model(*_: Any) -> Opened:
        begun.set()
        return Opened([])

    monkeypatch.setitem(loading._BACKENDS, plan.backend, load_target)
    monkeypatch.setattr(loading, "open_draft_model", open_draft_model)
    monkeypatch.setattr(loading, "is_kept", lambda *_: is_kept)
    monkeypatch.setattr(loading, "is_translated", lambda *_: False)
    monkeypatch.setattr(loading, "read_exit", lambda _spec: None)
    monkeypatch.setattr(loading, "measure_curve", lambda *_, **__: CURVE)
    monkeypatch.setattr(plans, "is_translated", lambda *_: False)
    loading._load_one(SPEC, replace(plan, packed_file=True), quiet).close()
    assert begun.is_set()


def test_a_draft_model_that_was_read_is_closed_where_its_target_fails(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def fails(*_: Any) -> None:
        raise BackendError("a tensor is missing")

    monkeypatch.setitem(loading._BACKENDS, plan.backend, fails)
    monkeypatch.setattr(loading, "open_draft_model", lambda *_: Opened(opened))
    monkeypatch.setattr(loading, "is_kept", lambda *_: True)
    monkeypatch.setattr(plans, "is_translated", lambda *_: False)
    with pytest.raises(BackendError, match="missing"):
        loading._load_one(SPEC, replace(plan, packed_file=True), quiet)
    assert not opened


def test_how_far_a_draft_model_is_read_is_told(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []

    def open_draft_model(*arguments: Any) -> Opened:
        arguments[-1](0.5)
        return Opened([])

    monkeypatch.setattr(loading, "open_draft_model", open_draft_model)
    for module in (loading, plans):
        monkeypatch.setattr(module, "is_translated", lambda *_: False)
    monkeypatch.setattr(loading, "read_exit", lambda _spec: None)
    monkeypatch.setattr(loading, "measure_curve", lambda *_, **__: CURVE)
    target = Opened([])
    loading.load_draft_model(target, SPEC, plan, lambda what, part: told.append((what, part)))
    assert ("loading the draft model", 0.5) in told


def test_step_times_that_a_run_learned_are_there_for_the_next(plan: Plan) -> None:
    key = stored.curve_key(SPEC, plan)
    stored.keep_curve(key, CURVE, replaced=True)
    curve = stored.curve_at(key)
    assert curve is not None
    learning = Learning(SPEC, plan, curve, (), VOCAB)
    for _ in range(20):
        curve.observe(1, 0, 0, 1.5)
    learning.keep()
    found = stored.curve_at(key)
    assert found is not None and found.t(1, 0)[0] > 1.2 > CURVE.t(1, 0)[0]


def test_the_template_is_compiled_while_the_model_is_loaded(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first prompt does not wait for the process that renders it."""
    done: list[str] = []
    spec = replace(SPEC, chat_template="{{ messages }}")
    monkeypatch.setattr(loading, "reserve", lambda _plan: True)
    monkeypatch.setattr(loading, "prepare_template", done.append)

    def load_weights(*_: Any) -> Opened:
        done.append("weights")
        return Opened([])

    monkeypatch.setattr(loading, "_load", load_weights)
    loading.load_plan(spec, plan)
    assert done == ["{{ messages }}", "weights"]


def test_two_models_that_take_turns(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setitem(loading._BACKENDS, plan.backend, lambda *_: Opened(opened))
    monkeypatch.setattr(loading, "reserve", lambda _plan: True)
    pair = replace(plan, draft_model=None, drafter="suffix", switch=Path("small.gguf"))
    functions = [loading.load_plan, loading._load_one]
    load = loading.load_plan
    assert assert_nothing_stays_open(lambda: load(SPEC, pair), functions, opened) > 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the MiB that are free whenever it is asked; the last ones stay."""
    monkeypatch.setattr(loading, "prepare_kernels", lambda *_: None)
    monkeypatch.setattr("edgespec.setup.planning.memory_bandwidth", lambda _: 20e9)
    monkeypatch.setattr("edgespec.memory.device.accelerators.accelerators", lambda: ())

    monkeypatch.setattr("edgespec.setup.planning.this_machine", machine_by_hand)

    def set_to(*mebibytes: float) -> None:
        left = [int(one * (1 << 20)) for one in mebibytes]
        monkeypatch.setattr(
            host, "available_bytes", lambda: left.pop(0) if len(left) > 1 else left[0]
        )

    return set_to


LONGEST = Request(prefer="context", drafter="none")


def test_a_plan_is_made_anew_where_memory_went_meanwhile(
    free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made for 8 GiB, of which 86 MiB are left."""
    machines: list[int] = []

    def planned(spec: Any, request: Request) -> Plan:
        plan = make_run_plan(spec, request)
        machines.append(plan.available_bytes)
        free(86)
        return plan

    monkeypatch.setattr(loading, "plan_or_say_what_fits", planned)
    free(8192)
    plan = loading.plan_to_load(SPEC, LONGEST, quiet)
    assert plan.predicted_peak_bytes <= 86 << 20
    assert machines == [(8192 - 4) << 20, (86 - 4) << 20]
    free(8192)
    assert make_run_plan(SPEC, LONGEST).predicted_peak_bytes > 86 << 20


def test_a_program_alone_does_not_refuse_itself(
    free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that takes all there is, and a few pages more are used when it is loaded."""
    monkeypatch.setitem(loading._BACKENDS, "llamacpp", lambda *_: Opened([]))
    for mebibytes in (88.0, 91.3, 95.0):
        free(mebibytes)
        plan = make_run_plan(SPEC, LONGEST)
        free(mebibytes - 3)
        loading.load_plan(SPEC, plan).close()
        reserved = loading.plan_to_load(SPEC, LONGEST, quiet)
        free(20)  # the rest is reserved: nobody else may have it
        loading.load_plan(SPEC, reserved).close()
        with pytest.raises(DoesNotFitError, match="free any more"):
            loading.load_plan(SPEC, reserved)


def test_where_others_are_always_quicker_it_says_so(
    free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "reserve", lambda _plan: False)
    free(100)
    with pytest.raises(DoesNotFitError, match="MiB, but only 100 MiB are free any more"):
        loading.plan_to_load(SPEC, LONGEST, quiet)


def test_memory_is_reserved_until_the_engine_is_closed(
    free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or until loading failed."""

    def reserved() -> list[int]:
        found = cache.load("reservations", "programs") or {"programs": []}
        return [one["bytes"] for one in found["programs"]]

    free(8192)
    monkeypatch.setitem(loading._BACKENDS, "llamacpp", lambda *_: Opened([]))
    plan = loading.plan_to_load(SPEC, LONGEST, quiet)
    whole, mapped = plan.predicted_peak_bytes, plan.component_bytes["weights"]
    assert reserved() == [whole - mapped if plan.mapped else whole]
    engine = loading.load_plan(SPEC, plan)
    assert len(reserved()) == 1
    engine.close()
    assert reserved() == []

    def fail(*_: Any) -> Any:
        raise StepError

    monkeypatch.setitem(loading._BACKENDS, "llamacpp", fail)
    with pytest.raises(StepError):
        loading.load_plan(SPEC, plan)
    assert reserved() == []


class Part:
    """A runner or a vocabulary."""

    max_step = None
    vocab_size = VOCAB

    def __init__(self, opened: list[Any]) -> None:
        self._opened = opened
        opened.append(self)

    def close(self) -> None:
        self._opened.remove(self)


def test_a_runner_and_its_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(ort, "open_vocabulary", lambda _spec: Part(opened))
    monkeypatch.setattr(OrtBackend, "_open", lambda *_: Part(opened))

    def load() -> OrtBackend:
        return OrtBackend(SPEC, None, Path(), RunConfig(256))

    assert assert_nothing_stays_open(load, [OrtBackend.__init__], opened) >= 2


def test_a_runner_whose_vocabulary_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in another thread."""
    opened: list[Any] = []

    def fail(_spec: Any) -> Part:
        raise StepError

    monkeypatch.setattr(ort, "open_vocabulary", fail)
    monkeypatch.setattr(OrtBackend, "_open", lambda *_: Part(opened))
    with pytest.raises(StepError):
        OrtBackend(SPEC, None, Path(), RunConfig(256))
    assert opened == []


def test_what_is_measured_and_its_tracker(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Tracker(MemoryTracker):
        def __enter__(self) -> MemoryTracker:
            opened.append(self)
            return super().__enter__()

        def __exit__(self, *arguments: Any) -> None:
            super().__exit__(*arguments)
            opened.remove(self)

        def __eq__(self, other: object) -> bool:
            return self is other

    monkeypatch.setattr(loaded_model, "MemoryTracker", Tracker)
    suffix = replace(plan, drafter="suffix")
    monkeypatch.setattr(loaded_model, "plan_to_load", lambda *_, **__: suffix)
    monkeypatch.setattr(loaded_model, "load_plan", lambda *_, **__: Engine(Opened(opened)))

    def load() -> loaded_model.LoadedModel:
        return loaded_model.open_model(SPEC, Request(), ["auto", "none"], quiet)[0]

    made = loaded_model.LoadedModel
    functions = [loaded_model.open_model, made.__init__, made.renew]
    assert assert_nothing_stays_open(load, functions, opened) > 5


@pytest.fixture
def pointers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models and contexts of llama.cpp that are open."""
    lib, opened = library(), list[Any]()
    for made, freed in (
        ("llama_model_load_from_file", "llama_model_free"),
        ("llama_init_from_model", "llama_free"),
    ):
        make, free = getattr(lib, made), getattr(lib, freed)

        def count(*arguments: Any, make: Any = make) -> Any:
            pointer = make(*arguments)
            opened.append(pointer)
            return pointer

        def forget(pointer: Any, free: Any = free) -> None:
            opened.remove(pointer)
            free(pointer)

        monkeypatch.setattr(lib, made, count)
        monkeypatch.setattr(lib, freed, forget)
    return opened


@pytest.mark.parametrize("kind", ["model", "exit", "for looking at"])
def test_llama_cpp_itself(kind: str, tmp_path: Path, pointers: list[Any]) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", Q4_0)
    spec = read_model_spec(path)
    settings = RunConfig(context_size=64, batch_size=16, max_nodes=4, max_leaves=1)
    made: dict[str, Callable[[], Any]] = {
        "model": lambda: LlamaBackend(path, settings),
        "exit": lambda: ExitBackend(str(path), settings, spec),
        "for looking at": lambda: EvalContext(path, context_size=64, batch_size=16, threads=1),
    }
    functions = [
        value
        for kind_of in (LlamaBackend, ExitBackend, EvalContext)
        for name, value in vars(kind_of).items()
        if hasattr(value, "__code__") and name not in ("close", "__del__")
    ]
    assert assert_nothing_stays_open(made[kind], functions, pointers) > 5
    with closing(made[kind]()):
        assert len(pointers) == 2


@pytest.mark.parametrize("kind", ["model", "exit"])
def test_a_model_that_is_dropped_is_freed(kind: str, tmp_path: Path, pointers: list[Any]) -> None:
    """As an engine is that was never closed."""
    path = write_model(tmp_path / "model.gguf", "llama", Q4_0)
    settings = RunConfig(context_size=64, batch_size=16, max_nodes=4, max_leaves=1)
    backend: Any = None
    if kind == "model":
        backend = LlamaBackend(path, settings)
    else:
        backend = ExitBackend(str(path), settings, read_model_spec(path))
    engine = Engine(backend)
    stream = iter(engine.stream([1, 2, 3], max_tokens=9))
    next(stream)
    vocabulary = VocabularyTokenizer(path)
    assert len(pointers) == 3
    del backend, engine, stream, vocabulary
    gc.collect()
    assert pointers == []
