"""Layers on workers: what they compute, what they take, and what happens when one of them fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from delaying import DelayingProxy
from hybrid_gguf import Shape, write_hybrid
from random_gguf import LAYERS, Q8_0, write_model
from rpc_workers import NO_RPC, LocalWorker, local_worker
from waiting import Lived

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.errors import BackendError, DoesNotFitError
from edgespec.memory.bytes.config import Device, RunConfig
from edgespec.memory.device import rpc
from edgespec.memory.device.accelerators import has_rpc
from edgespec.memory.plan.options import LoadOptions, experts_on_host
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import read_model_spec
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.skipif(not has_rpc(), reason=NO_RPC)
KIB = 1 << 10
TEXT = "a worker computes what it has the weights of, " * 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", "llama", Q8_0, reads_bytes=True)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[LocalWorker, LocalWorker]]:
    with (
        local_worker("--threads", "1") as first,
        local_worker("--threads", "1", "--memory", "64MiB") as second,
    ):
        yield first, second


def backend(file: Path, *devices: Device) -> LlamaBackend:
    layers = sum(device.layers for device in devices)
    settings = RunConfig(
        512, 64, max_nodes=8, max_leaves=4, gpu_layers=layers, mapped=False, devices=devices
    )
    return LlamaBackend(file, settings)


def on(worker: LocalWorker, label: str, layers: int) -> Device:
    return Device(label, layers, worker.address, worker.address)


def written(model: LlamaBackend, count: int = 24) -> list[int]:
    """What it writes greedily, in steps of one token and of trees."""
    ids = model.tokenizer.encode(TEXT)
    for start in range(0, len(ids) - 1, model.batch_size):
        model.prefill(ids[start : min(start + model.batch_size, len(ids) - 1)])
    found: list[int] = []
    token = ids[-1]
    while len(found) < count:
        tree = DraftTree((token, 1, 2), (-1, 0, 0)) if len(found) % 2 else DraftTree.chain((token,))
        token = int(model.verify(tree)[0].argmax())
        model.commit((0,))
        found.append(token)
    return found


def test_the_host_and_two_workers_write_what_the_host_alone_does(
    file: Path, workers: tuple[LocalWorker, LocalWorker]
) -> None:
    with closing(backend(file)) as alone:
        expected = written(alone)
    for first, second in ((1, 2), (LAYERS, 1), (0, LAYERS + 1)):
        devices = [on(workers[0], "worker1", first), on(workers[1], "worker2", second)]
        with closing(backend(file, *(d for d in devices if d.layers))) as spread:
            assert written(spread) == expected
            found = spread.memory_bytes()
            assert ("worker1_kv_cache" in found) == (first > 0)
            assert {"worker2_weights", "worker2_compute"} <= set(found)


@pytest.mark.parametrize("layers", [1, 3, -1])
def test_a_worker_takes_what_was_planned(
    file: Path, workers: tuple[LocalWorker, LocalWorker], layers: int
) -> None:
    """Weights, cache and results; ggml pads tensors, llama.cpp logs hundredths of MiB."""
    options = LoadOptions(
        workers=tuple(one.address for one in workers), gpu_layers=layers, context_size=512
    )
    spec = read_model_spec(file)
    plan = make_run_plan(spec, Request.loading(options))
    assert plan.devices
    with load_plan(spec, plan) as engine:
        allocated = engine.memory_bytes()
        assert engine.generate(TEXT, raw=True, max_tokens=8).token_ids
    for label in {one.label for one in plan.devices}:
        taken = sum(size for name, size in allocated.items() if name.startswith(label))
        assert taken == pytest.approx(plan.predicted_bytes_of(label), rel=0.02, abs=24 * KIB)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape("qwen3moe", width=128, hidden=512, experts=16, interval=1)
    return write_hybrid(tmp_path_factory.mktemp("experts") / "m.gguf", shape)


@pytest.mark.slow
def test_experts_stay_here_and_a_worker_has_the_rest(experts: Path) -> None:
    """Of a mixture of experts that it has room for a third of: planned, allocated, and the same."""
    spec = read_model_spec(experts)
    room = spec.weight_bytes // 3 + (1 << 20)
    written, placed = set(), []
    with local_worker("--threads", "1", "--memory", f"{room // KIB}KiB") as worker:
        for layers, overrides in (
            (0, None),
            (-1, (experts_on_host(),)),
            (-1, (experts_on_host(3),)),
            (2, None),
            (0, (f"blk.0.ffn_up_exps={worker.address}",)),
        ):
            options = LoadOptions(
                workers=(worker.address,),
                gpu_layers=layers,
                context_size=512,
                kernels="off",
                override_tensor=overrides,
            )
            plan = make_run_plan(spec, Request.loading(options))
            with load_plan(spec, plan) as engine:
                allocated = engine.memory_bytes()
                written.add(engine.generate(TEXT[:40], raw=True, max_tokens=24).token_ids)
            taken = sum(size for name, size in allocated.items() if name.startswith("worker1"))
            assert taken == pytest.approx(
                plan.predicted_bytes_of("worker1"), rel=0.02, abs=24 * KIB
            )
            placed.append(taken)
    assert len(written) == 1
    assert placed[0] == 0 < placed[4] < placed[1] < placed[2] < room


@pytest.mark.parametrize(
    "hangs",
    [pytest.param(False, id="dies"), pytest.param(True, id="hangs", marks=pytest.mark.long)],
)
def test_a_worker_that_fails_in_the_middle_of_an_answer(file: Path, hangs: bool) -> None:
    """What was written stays, a sentence says which worker, and everything can be closed.

    One that hangs still takes connections and bytes, and says nothing: here what stands before it
    does, because a stopped process would be continued together with all others of the machine.
    """
    with (
        local_worker("--threads", "1") as worker,
        DelayingProxy(("127.0.0.1", worker.port)) as before,
    ):
        address = before.address if hangs else worker.address
        options = {"workers": (address,), "gpu_layers": -1, "context_size": 2048}
        with edgespec.load(file, **options) as engine, Lived() as lived:  # type: ignore[arg-type]
            text, start = "", -1.0
            with pytest.raises(BackendError, match=f"worker {address}") as caught:
                for chunk in engine.stream(TEXT, raw=True, max_tokens=1500):
                    text += chunk.text
                    if start < 0 and len(text) > 8:
                        start = lived.seconds
                        if hangs:
                            before.is_silent = True
                        else:
                            worker.process.kill()
            assert len(text) > 8 and caught.value.hint
            assert lived.seconds - start < 60
            with pytest.raises(BackendError, match=f"worker {address}"):
                engine.generate(TEXT, raw=True, max_tokens=2)
    with local_worker("--threads", "1") as again:
        with edgespec.load(file, workers=(again.address,), gpu_layers=-1) as engine:
            assert engine.generate(TEXT, raw=True, max_tokens=4).token_ids, "another one is used"


def test_a_worker_that_is_started_anew_in_the_middle_of_an_answer(file: Path) -> None:
    """At the same address is another one then, which has nothing of the model."""
    text = ""
    with local_worker("--threads", "1") as worker:
        options = {"workers": (worker.address,), "gpu_layers": -1, "context_size": 2048}
        engine = edgespec.load(file, **options)  # type: ignore[arg-type]
        with closing(engine):
            stream = iter(engine.stream(TEXT, raw=True, max_tokens=1500))
            while len(text) <= 8:
                text += next(stream).text
            worker.process.kill()
            worker.process.wait()
            with local_worker("--threads", "1", port=worker.port):
                with pytest.raises(BackendError, match="is gone") as caught:
                    text += "".join(chunk.text for chunk in stream)
                assert "started anew" in str(caught.value.hint)
                with pytest.raises(BackendError, match="is gone"):
                    engine.generate(TEXT, raw=True, max_tokens=2)
                with edgespec.load(file, **options) as another:  # type: ignore[arg-type]
                    again = another.generate(TEXT, raw=True, max_tokens=8).text
    assert text.startswith(again[:8])


def test_a_worker_lends_no_more_than_its_limit(file: Path) -> None:
    """A planner is told, and who does not ask is refused."""
    with local_worker("--threads", "1", "--memory", "200KiB") as small:
        with pytest.raises(DoesNotFitError, match=f"free on worker {small.address}: 0 MiB"):
            edgespec.load(file, workers=(small.address,), gpu_layers=-1)
        with pytest.raises(DoesNotFitError, match=r"llama\.cpp cannot"):
            backend(file, on(small, "worker1", LAYERS))


def test_a_worker_serves_one_program_at_a_time(
    file: Path, workers: tuple[LocalWorker, LocalWorker]
) -> None:
    device = on(workers[0], "worker1", 1)
    with closing(backend(file, device)), FakeClient(workers[0]) as other:
        assert other.is_turned_away()
    with closing(backend(file, device)) as model:
        assert len(written(model, 2)) == 2, "it is free again"


class FakeClient:
    """Another program, which has no relay."""

    def __init__(self, worker: LocalWorker) -> None:
        self._connection = socket.create_connection(("127.0.0.1", worker.port), 10.0)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()

    def is_turned_away(self) -> bool:
        try:
            rpc.ask(self._connection, rpc.Command.HELLO, bytes(rpc.HELLO_BYTES))
        except ConnectionError:
            return True
        return False
