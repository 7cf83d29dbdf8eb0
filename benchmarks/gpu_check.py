"""Whether models run on another device as planned: a GPU of this machine, or workers.

    python benchmarks/gpu_check.py [MODEL] [--workers HOST:PORT,...] [--tokens 48] [--json]
    python benchmarks/gpu_check.py [MODEL] --delays 0 0.2 1 5   # a worker behind a slow network

With no, some and all layers there: the same tokens as on this processor (or where rounding
explains it), the bytes that were planned for each device beside those that llama.cpp allocated, and
step times. Then budgets for each device, trees, rollback, caches that are saved, sessions, drafts,
the shipped head and --exact. One table; the exit status is 1 where something failed. Without such a
device it says so, and the status is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import edgespec
from edgespec.backends.base import DraftTree, Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.errors import DoesNotFitError, EdgespecError, UnsupportedError
from edgespec.measure.noise import find_divergence, measure_batch_noise
from edgespec.memory.bytes.config import GPU, HOST, WORKER
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.memory.plan.machine import Machine, this_machine
from edgespec.memory.plan.options import LoadOptions
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.times import CostCurve
from edgespec.models.embedded import embedded_drafter_path, embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

_NO_DEVICE = "skipped: llama.cpp sees no GPU here, and no --workers were named"
# Sent as it is: a text that goes on as it was, so that drafts are accepted.
_PROMPT = "red, green, blue, yellow, black, white, orange, purple, " * 4
_CONTEXT = 1024
_MOST_ERROR = 0.02  # of the bytes that were planned for a device
_MOST_SPARE = 0.10  # of those for results, which need not be used up
_SLACK_BYTES = 1 << 20  # tensors are padded
_MOST_DIFFERENCE = 0.2  # of logits of a tree and of its paths, of which the largest is some 20
_PARTS = ("weights", "weights_repacked", "kv_cache", "compute")


class Finding(NamedTuple):
    """One line of the table."""

    check: str
    ok: bool
    text: str


class Case(NamedTuple):
    """What is checked: a model on a machine with other devices."""

    spec: ModelSpec
    machine: Machine
    workers: tuple[str, ...]
    tokens: int
    rounding: float = 0.0  # of this processor's two kinds of kernels, in a logit

    @contextmanager
    def engine(self, machine: Machine | None = None, **options: Any) -> Iterator[Loaded]:
        """The model loaded with these options. Raises as `load`."""
        chosen = {"context_size": _CONTEXT, "workers": self.workers, **options}
        request = Request.loading(LoadOptions(**chosen))
        plan = make_run_plan(self.spec, request, machine or self.machine)
        with load_plan(self.spec, plan) as engine:
            yield Loaded(engine, plan)


class Loaded(NamedTuple):
    engine: Engine
    plan: Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path, default=None)
    parser.add_argument("--workers", default="")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--delays", type=float, nargs="+", help="of a trip, in ms")
    arguments = parser.parse_args()
    if arguments.delays:
        _measure_delays(arguments)
        return
    workers = tuple(one for one in arguments.workers.split(",") if one)
    try:
        machine = this_machine(workers)
    except EdgespecError as problem:
        raise SystemExit(f"error: {problem}\nhint: {problem.hint}") from problem
    if not machine.accelerators:
        print(_NO_DEVICE)
        return
    spec = read_model_spec(arguments.model or embedded_model())
    if not arguments.json:
        print(f"{spec.path.name} on {', '.join(one.description for one in machine.accelerators)}")
        print(f"host: {cpu_name()}\n\n| check | | found |\n| --- | --- | --- |")
    found = []
    for one in findings(Case(spec, machine, workers, arguments.tokens)):
        found.append(one)
        if not arguments.json:
            print(f"| {one.check} | {'ok' if one.ok else 'FAILED'} | {one.text} |", flush=True)
    if arguments.json:
        print(json.dumps([one._asdict() for one in found]))
    sys.exit(0 if all(one.ok for one in found) else 1)


def findings(case: Case) -> Iterator[Finding]:
    """Every check, whatever the ones before it found."""
    everything = case.spec.num_layers + 1
    with case.engine(gpu_layers=0) as (engine, _):
        plain, row = _written(engine, case, drafts=False).token_ids, _first_row(engine)
    with case.engine(gpu_layers=0, kernels="off") as (engine, _):
        case = case._replace(rounding=float(np.abs(_first_row(engine) - row).max()))
    for layers in (0, everything // 2, everything):
        yield from _guarded(f"{layers} layers there", partial(_placed, case, layers, plain))
    yield from _guarded("budgets", partial(_budgets, case))
    with case.engine(gpu_layers=everything, draft_max=15, drafter="suffix,recycling") as loaded:
        for name, check in _ON_ONE_ENGINE.items():
            yield from _guarded(name, partial(check, loaded.engine, case))
    yield from _guarded("head", partial(_head, case, everything))
    yield from _guarded("--exact", partial(_exact, case, everything))


def _written(engine: Engine, case: Case, *, drafts: bool) -> Result:
    return engine.generate(_PROMPT, raw=True, max_tokens=case.tokens, speculate=drafts)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except EdgespecError as problem:
        yield Finding(name, False, str(problem))


# -- where layers lie ----------------------------------------------------------------------


def _placed(case: Case, layers: int, plain: tuple[int, ...]) -> Iterator[Finding]:
    with case.engine(gpu_layers=layers) as (engine, plan):
        name = f"{layers} layers there"
        yield from _bytes(name, engine, plan)
        curve = engine.curve
        if curve is not None:
            times = (f"{n}: {curve.base[n]:.1f}" for n in (1, 2, 4, 8, 16) if n < len(curve.base))
            yield Finding(f"{name}, ms a step", True, ", ".join(times))
        for drafts in (False, True):
            ids = _written(engine, case, drafts=drafts).token_ids
            how = "drafts" if drafts else "plain"
            yield _same(f"{name}, {how}", engine, plain, ids, rounding=case.rounding)


def _bytes(name: str, engine: Engine, plan: Plan) -> Iterator[Finding]:
    """Planned and allocated, for each device and of the host what llama.cpp tells."""
    planned, allocated = plan.component_bytes, engine.memory_bytes()
    for label in (HOST, *(share.label for share in plan.devices)):
        prefix = "" if label == HOST else f"{label}_"
        sizes = {
            part: (planned.get(prefix + part, 0), allocated.get(prefix + part, 0))
            for part in _PARTS
        }
        ok = all(_agrees(part, *pair) for part, pair in sizes.items())
        text = ", ".join(
            f"{part.replace('_', ' ')} {a / 2**20:.2f} / {b / 2**20:.2f}"
            for part, (a, b) in sizes.items()
            if a or b
        )
        yield Finding(f"{name}, MiB of {label}, planned / allocated", ok, text)
    strangers = {name for name in allocated if name.startswith((GPU, WORKER))} - planned.keys()
    if strangers:
        yield Finding(f"{name}, not planned", False, ", ".join(sorted(strangers)))


def _agrees(part: str, planned: int, taken: int) -> bool:
    """A GPU's library may reorder a graph so that results need less room than planned."""
    most = _MOST_SPARE if part == "compute" else _MOST_ERROR
    return taken - planned <= max(_MOST_ERROR * planned, _SLACK_BYTES) and planned - taken <= max(
        most * planned, _SLACK_BYTES
    )


def _same(
    name: str,
    engine: Engine,
    plain: tuple[int, ...],
    ids: tuple[int, ...],
    whose: str = "on this processor",
    rounding: float = 0.0,
) -> Finding:
    """Whether tokens are those of `whose` plain decoding, or part where rounding explains it.

    Another device may round as much otherwise as this processor's own kinds of kernels do.
    """
    prompt = engine.encode(_PROMPT, raw=True)
    parted = find_divergence(engine.backend, prompt, plain, ids)
    if parted is None:
        return Finding(name, True, f"the same {len(ids)} tokens as {whose}")
    noise = max(measure_batch_noise(engine.backend), rounding, _MOST_DIFFERENCE)
    text = f"parts at token {parted.position}, where two logits are {parted.gap:.3f} apart"
    return Finding(name, parted.gap <= noise, f"{text} (rounding: up to {noise:.3f})")


def _budgets(case: Case) -> Iterator[Finding]:
    """Half of what all layers take, on each device in turn: planned and allocated stay below."""
    with case.engine(gpu_layers=case.spec.num_layers + 1) as (_, plan):
        pass
    for number, one in enumerate(case.machine.accelerators):
        label = case.machine.labels[number]
        limit = plan.predicted_bytes_of(label) // 2
        if not limit:
            continue
        devices = list(case.machine.accelerators)
        devices[number] = replace(one, free_bytes=limit)
        # A host that counts as slow: layers stay on workers where there is room.
        machine = replace(case.machine, accelerators=tuple(devices), bytes_per_s=1.0)
        try:
            with case.engine(machine) as (engine, smaller):
                sizes = engine.memory_bytes().items()
                taken = sum(size for name, size in sizes if name.startswith(f"{label}_"))
                text = f"{limit >> 20} MiB: {smaller.predicted_bytes_of(label) >> 20} planned, "
                yield Finding(f"budget of {label}", taken <= limit, text + f"{taken >> 20} taken")
        except DoesNotFitError as problem:
            yield Finding(f"budget of {label}", True, f"refused: {problem}")


# -- what is computed there ----------------------------------------------------------------


def _prefilled(engine: Engine) -> list[int]:
    """The prompt in the cache but its last token, which is the root of the next step."""
    ids = engine.encode(_PROMPT, raw=True)
    engine.backend.truncate(0)
    for start in range(0, len(ids) - 1, engine.backend.batch_size):
        engine.backend.prefill(ids[start : min(len(ids) - 1, start + engine.backend.batch_size)])
    return ids


def _first_row(engine: Engine) -> Logits:
    """Logits behind the prompt."""
    ids = _prefilled(engine)
    row = np.array(engine.backend.verify(DraftTree.chain(ids[-1:]))[0])
    engine.backend.commit((0,))
    return row


def _tree(engine: Engine, case: Case) -> Iterator[Finding]:
    """Rows of a tree with two branches, and of its paths one by one."""
    if not engine.backend.capabilities.tree:
        yield Finding("tree", True, f"none: {engine.backend.capabilities.reason}")
        return
    ids = _prefilled(engine)
    tree = DraftTree((ids[-1], *ids[:4]), (-1, 0, 0, 1, 2))
    rows = np.array(engine.backend.verify(tree))
    engine.backend.commit((0, 2, 4))
    after = _next(engine)
    differences = []
    for leaf in (3, 4):
        _prefilled(engine)
        path = tree.path(leaf)
        chain = np.array(engine.backend.verify(DraftTree.chain([tree.tokens[i] for i in path])))
        differences.append(float(np.abs(chain - rows[path]).max()))
        engine.backend.commit(range(len(path)))
    most = max(differences)
    yield Finding("tree", most <= _MOST_DIFFERENCE, f"rows differ by {most:.4f} from their paths")
    change = float(np.abs(_next(engine) - after).max())
    yield Finding("rollback", change <= _MOST_DIFFERENCE, f"the next row differs by {change:.4f}")


def _next(engine: Engine) -> Logits:
    row = np.array(engine.backend.verify(DraftTree.chain((1,)))[0])
    engine.backend.commit((0,))
    return row


def _saved(engine: Engine, case: Case) -> Iterator[Finding]:
    ids = _prefilled(engine)[:-1]
    backend = engine.backend
    assert isinstance(backend, LlamaBackend)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cells")
        nbytes = backend.save_cache(path)
        expected = _next(engine)
        backend.load_cache(path, ids)
    change = float(np.abs(_next(engine) - expected).max())
    text = f"{nbytes / 2**20:.1f} MiB; the next row differs by {change:.4f}"
    yield Finding("saved cache", change <= _MOST_DIFFERENCE, text)


def _session(engine: Engine, case: Case) -> Iterator[Finding]:
    engine.backend.truncate(0)
    try:
        session = edgespec.Session(engine)
    except UnsupportedError as problem:
        yield Finding("session", True, f"none: {problem}")
        return
    first = session.send("Name three colours.", max_tokens=16)
    second = session.send("And three more.", max_tokens=16)
    reused = second.counters.reused_tokens
    ok = bool(first.text and second.text) and reused > 0
    yield Finding("session", ok, f"the second turn reuses {reused} tokens")


def _drafts(engine: Engine, case: Case) -> Iterator[Finding]:
    with _drafting_freely(engine):
        plain, drafted = (_written(engine, case, drafts=drafts) for drafts in (False, True))
    found = _same("drafts", engine, plain.token_ids, drafted.token_ids, "without")
    yield Finding("drafts", found.ok, f"{_drafted(drafted)}; {found.text}")


@contextmanager
def _drafting_freely(engine: Engine) -> Iterator[None]:
    """Decode as if further tokens cost no time: whether they pay here is not the question."""
    measured = engine.curve
    if measured is not None:
        free = [measured.base[1]] * measured.max_nodes
        engine.curve = CostCurve([float("inf"), *free])
    try:
        yield
    finally:
        engine.curve = measured


def _drafted(result: Result) -> str:
    counters = result.counters
    return f"{counters.drafted_tokens} drafted, {counters.accepted_tokens} accepted"


_ON_ONE_ENGINE: dict[str, Callable[[Engine, Case], Iterator[Finding]]] = {
    "tree": _tree,
    "saved cache": _saved,
    "session": _session,
    "drafts": _drafts,
}


def _head(case: Case, layers: int) -> Iterator[Finding]:
    head = embedded_drafter_path()
    try:
        with case.engine(gpu_layers=layers, draft_model=head, drafter="head") as (engine, _):
            with _drafting_freely(engine):
                plain, found = (_written(engine, case, drafts=drafts) for drafts in (False, True))
            same = _same("head", engine, plain.token_ids, found.token_ids, "without")
            yield same._replace(
                ok=same.ok and not engine.draft_failure,
                text=f"{_drafted(found)}; {same.text}",
            )
    except UnsupportedError as problem:  # of another model
        yield Finding("head", True, f"refused: {problem}")


def _exact(case: Case, layers: int) -> Iterator[Finding]:
    """Its promise is kept, or refused where rows depend on what else is in a step."""
    try:
        with case.engine(gpu_layers=layers, exact=True) as (engine, plan):
            outputs = {_written(engine, case, drafts=drafts).token_ids for drafts in (False, True)}
            text = f"steps of up to {plan.draft_max + 1} tokens"
            yield Finding("--exact", len(outputs) == 1, text)
    except UnsupportedError as problem:
        yield Finding("--exact", True, f"refused: {problem}")


# -- a slow network ------------------------------------------------------------------------

_SIZES = (1, 2, 4, 8, 16)
_DELAYED = (  # sent as they are: two that go on as they were, one that does not
    "red, green, blue, yellow, black, white, orange, purple, " * 4,
    "The quick brown fox jumps over the lazy dog near the river. " * 4,
    "The sky is blue because",
)


def _measure_delays(arguments: argparse.Namespace) -> None:
    """What a worker is worth behind a slow network, and what drafts add there.

    A worker on this machine is reached through a proxy that makes each trip there and back longer,
    by so many milliseconds. Its times are those of two processes that share this processor. For
    each delay: t(n) as measured at load and what a change of n adds, then decoding with and without
    drafts, in turns, over three prompts of which two are repeated by the answer.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support/gguf"))
    from delaying import DelayingProxy
    from rpc_workers import local_worker

    model = arguments.model or embedded_model()
    os.environ["EDGESPEC_CACHE"] = tempfile.mkdtemp()  # each delay is measured anew
    print(f"{model.name}, worker and host on {cpu_name()}, {usable_cores()} cores\n")
    print("| trip, ms | " + " | ".join(f"t({n})" for n in _SIZES), end=" | ")
    print("change | plain, tokens/s | drafts | | drafted a round | acceptance length |")
    print("| --- " * (len(_SIZES) + 7) + "|")
    with local_worker("--threads", "1") as worker:
        for delay in arguments.delays:
            with DelayingProxy(("127.0.0.1", worker.port), delay / 1e3) as proxy:
                print(_row(model, arguments.tokens, delay, proxy.address), flush=True)


def _row(model: Path, tokens: int, delay: float, address: str) -> str:
    with edgespec.load(model, workers=(address,), gpu_layers=-1, context_size=1024) as engine:
        curve = engine.curve
        assert curve is not None
        times = [curve.base[n] if n < len(curve.base) else float("nan") for n in _SIZES]
        found = {True: [0.0, 0.0, 0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0, 0.0, 0.0]}
        for prompt in _DELAYED:
            for drafts in (False, True):
                counters = engine.generate(
                    prompt, raw=True, max_tokens=tokens, speculate=drafts
                ).counters
                numbers = (
                    *(counters.generated_tokens, counters.decode_s, counters.rounds),
                    *(counters.drafted_tokens, counters.accepted_tokens),
                )
                for i, number in enumerate(numbers):
                    found[drafts][i] += number
    plain, (written, seconds, rounds, drafted, accepted) = found[False], found[True]
    rates = plain[0] / plain[1], written / seconds
    cells = [f"{delay:g}", *(f"{time:.1f}" for time in (*times, curve.change_ms))]
    cells += [f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[1] / rates[0]:.2f}x"]
    cells += [f"{drafted / rounds:.2f}", f"{1 + accepted / rounds:.2f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
