"""What llama.cpp says it would allocate against what it allocates, to the byte."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from dflash_gguf import DFlash, write_dflash
from eagle3_gguf import Head, write_eagle
from gemma4_gguf import Heads, write_hollow_gemma4
from hybrid_gguf import HYBRIDS, Shape, write_hollow, write_hybrid
from mutated_headers import headers, mutated
from random_gguf import Q8_0, write_model

from edgespec.backends.llama import simulator
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.head import BackendWithHead, open_head_file
from edgespec.backends.llama.library import library
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.backends.llama.simulator import SimulatedContext, allocated
from edgespec.errors import BackendError, EdgespecError
from edgespec.memory.bytes import simulation
from edgespec.memory.bytes.config import HOST, Device, RunConfig
from edgespec.memory.bytes.head_footprint import wanted_head
from edgespec.memory.bytes.projector import projector_parts
from edgespec.memory.bytes.simulation import (
    ContextRequest,
    DeviceBytes,
    simulated,
    simulated_projector,
    simulating,
)
from edgespec.memory.store import cache
from edgespec.models import processes
from edgespec.models.embedded import embedded_drafter_path, embedded_model
from edgespec.models.processes import GuestLimits, start_module
from edgespec.models.projector import read_projector
from edgespec.models.spec import ModelSpec, read_model_spec

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was asked before, of a process that is there for all of these tests."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    for name in ("_known", "_skeletons"):
        monkeypatch.setattr(simulation._simulator, name, {})


def really(spec: ModelSpec, config: RunConfig) -> dict[str, DeviceBytes]:
    """What a backend that is loaded so allocates."""
    make = RecurrentBackend if config.snapshots else LlamaBackend
    backend = make(spec.path, replace(config, mapped=False, tied=spec.tied_embeddings))
    found = allocated(backend._context)
    backend.close()
    return found


PLAIN = RunConfig(1000, 64, 8, threads=2)


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        replace(PLAIN, kernels=True),
        replace(PLAIN, kv_type_k="q8_0", kv_type_v="q8_0", kernels=True),
        replace(PLAIN, kv_type_k="f32", kv_type_v="f32"),
        replace(PLAIN, users=4, max_nodes=12, kernels=True),
        replace(PLAIN, context_size=4096, users=4, exact=True, kernels=True),
        replace(PLAIN, max_leaves=7, kernels=True),
        RunConfig(300, 512, 31, threads=3),
    ],
    ids=str,
)
def test_a_model_takes_what_was_said(shape: RunConfig) -> None:
    spec = read_model_spec(embedded_model())
    assert simulated([ContextRequest(spec, shape)])[0] == really(spec, shape)


def test_contexts_are_closed_with_their_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process answers hundreds of questions, and its memory is limited."""
    opened: list[Any] = []

    class Context:
        def __init__(self, *_: Any) -> None:
            opened.append(self)

        def loaded(self, _path: str) -> None: ...

        def make(self, _loaded: Any, changes: dict[str, int], _beside: Any) -> None:
            if changes:
                raise BackendError("it cannot be made")

        def allocated_bytes(self) -> dict[str, DeviceBytes]:
            assert len(opened) == 2, "all are open at once"
            return {}

        def close(self) -> None:
            opened.remove(self)

    monkeypatch.setattr(simulator, "SimulatedContext", Context)
    monkeypatch.setattr(simulator, "_MODELS", {})
    alike = {"skeleton": "one", "tied_bytes": 0, "adapters": [], "beside": None}

    def answer(*changes: dict[str, int]) -> Any:
        contexts = [{**alike, "config": asdict(PLAIN), "changes": one} for one in changes]
        return simulator._answer({"folder": ".", "contexts": contexts})

    assert answer({}, {}) == {"contexts": [{}, {}]} and not opened
    assert answer({}, {"n_ctx": 1}) == {"error": "it cannot be made"} and not opened


def test_work_that_llama_cpp_does_not_tell_is_not_underestimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Windows, where C++ functions have other names."""
    spec = read_model_spec(embedded_model())
    told = really(spec, PLAIN)["host"].work
    monkeypatch.setattr(simulator, "_RESULT", "nothing")
    assert 0 < told < really(spec, PLAIN)["host"].work < 16 << 20


@pytest.mark.parametrize("arch", sorted(HYBRIDS))
def test_a_hybrid_takes_what_was_said(arch: str, tmp_path: Path) -> None:
    """With no, four and sixteen snapshots of its state."""
    spec = read_model_spec(write_hybrid(tmp_path / "model.gguf", Shape(arch)))
    with simulating():
        for snapshots in (0, 4, 16):
            nodes = 1 + snapshots
            shape = RunConfig(512, 64, nodes, snapshots=snapshots, kernels=True)
            assert simulated([ContextRequest(spec, shape)])[0] == really(spec, shape), snapshots


@pytest.mark.parametrize("arch", ["qwen35", "lfm2moe"])
def test_without_our_library_the_log_is_read(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has two decimals of a MiB, and one line for each kind of cache."""
    spec = read_model_spec(write_hybrid(tmp_path / "model.gguf", Shape(arch)))
    table = spec.tensors["token_embd.weight"].data_bytes if spec.tied_embeddings else 0
    first, context = (SimulatedContext(replace(PLAIN, snapshots=4), table) for _ in range(2))
    loaded = first.loaded(str(spec.path))
    for one in (first, context):  # what was said of another one is not counted
        one.make(loaded, {}, None)
    exact = context.allocated_bytes()[HOST]
    monkeypatch.setattr(simulator, "allocated", missing_library)
    rounded = context.allocated_bytes()[HOST]
    first.close()
    context.close()
    library().llama_model_free(loaded[0])
    assert rounded.cache == pytest.approx(exact.cache, abs=3 * 0.01 * 2**20)
    assert rounded.compute == pytest.approx(exact.compute, abs=0.01 * 2**20)
    weights = exact.weights + exact.packed
    assert 0.99 * weights <= rounded.packed <= 1.2 * weights + table


# As their publishers describe them; bytes of all tensors, and of a cache of 4096 cells.
REAL = {
    "Qwen3-30B-A3B": (
        Shape("qwen3moe", 48, 2048, 1536, 151_936, 32, 4, 128, experts=128, used=8),
        17.2e9,
        48 * 4096 * 2 * 4 * 128 * 2,
    ),
    "gpt-oss-20b": (
        Shape("gpt-oss", 24, 2880, 5760, 201_088, 64, 8, 64, experts=32, used=4),
        11.7e9,
        12 * (4096 + 512) * 2 * 8 * 64 * 2,
    ),
    "Gemma 4 26B-A4B": (
        Shape("gemma4", 30, 2816, 2112, 262_144, 16, 2, 512, interval=6, experts=128, used=8),
        14.6e9,
        5 * 4096 * 2 * 2 * 512 * 2 + 25 * 1280 * 2 * 8 * 256 * 2,
    ),
}
SLIDING = Heads(length=256, kv_heads=8, window=1024, inner=704)


@pytest.mark.parametrize("name", REAL)
def test_mixtures_of_experts_have_their_real_sizes(name: str, tmp_path: Path) -> None:
    """All weights are somewhere: rearranged or not, with experts elsewhere or not."""
    shape, weights, cache = REAL[name]
    path = tmp_path / "model.gguf"
    if shape.arch == "gemma4":
        write_hollow_gemma4(path, shape, SLIDING)
    else:
        write_hollow(path, shape, "MXFP4" if shape.arch == "gpt-oss" else "Q4_0")
    spec = read_model_spec(path)
    assert spec.weight_bytes == pytest.approx(weights, rel=0.05)
    for overrides in ((), (("ffn_.*_exps", HOST),)):
        wanted = ContextRequest(spec, RunConfig(4096, 256, 8, overrides=overrides))
        found = simulated([wanted])[0][HOST]
        assert found.weights + found.packed == pytest.approx(spec.weight_bytes, rel=0.001)
        assert found.cache == cache


def missing_library(_context: object) -> None:
    raise OSError("it was not compiled")


TARGET = Shape("llama", 6, 128, 256, 258, 4, 2, 32, interval=1)


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("made", [Head((1, 3, 4)), DFlash((1, 4), 5)], ids=["eagle3", "dflash"])
def test_a_head_and_its_model_take_what_was_said(
    made: Head | DFlash, has_kernels: bool, tmp_path: Path
) -> None:
    """The model, too, of which some layers are kept from then on."""
    spec = read_model_spec(write_hybrid(tmp_path / "model.gguf", TARGET))
    write: Any = write_eagle if isinstance(made, Head) else write_dflash
    head = read_model_spec(write(tmp_path / "head.gguf", spec.path, TARGET, made), heads=True)
    assert head.reads is not None
    plain = replace(PLAIN, kernels=has_kernels)
    target = replace(plain, captured_layers=head.reads.layers)
    wanted = [ContextRequest(spec, target), wanted_head(head, target, plain)]
    said = simulated(wanted)
    settings = replace(plain, mapped=False, tied=spec.tied_embeddings)
    backend = BackendWithHead(spec.path, settings)
    backend.open_head(lambda model: open_head_file(head, replace(plain, mapped=False), model))
    assert backend.head is not None
    assert list(said) == [allocated(backend._context), allocated(backend.head._context)]
    backend.close()


def test_the_shipped_head_is_laid_out_beside_a_packed_table() -> None:
    """It looks its tokens up in the model's own table, which is the model's head, too."""
    path = embedded_drafter_path()
    assert path is not None
    spec, head = read_model_spec(embedded_model()), read_model_spec(path, heads=True)
    assert head.reads is not None
    target = replace(PLAIN, kernels=True, captured_layers=head.reads.layers)
    answers = simulated([ContextRequest(spec, target), wanted_head(head, target, target)])
    assert answers[0][HOST].packed > 0.9 * spec.weight_bytes
    pages = 4096 * len(head.tensors)  # each matrix begins with one
    assert 0 < answers[1][HOST].weights + answers[1][HOST].packed <= head.weight_bytes + pages


# ------------------------------------------------------------------------------ what is kept


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "model.gguf", "llama", Q8_0))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that were started, of which there is none before."""
    monkeypatch.setattr(simulation._simulator, "__dict__", vars(simulation._Simulator()))
    found: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(original(*arguments, **options))
        return found[-1]

    original = start_module
    monkeypatch.setattr(processes, "start_module", start)
    yield found


def test_one_process_answers_and_is_gone_afterwards(
    spec: ModelSpec, started: list[subprocess.Popen[bytes]]
) -> None:
    with simulating():
        for cells in (256, 512, 768):
            simulated([ContextRequest(spec, RunConfig(cells, 64, 8))])
        assert started[0].poll() is None
    assert len(started) == 1 and started[0].poll() is not None


def test_what_was_asked_before_starts_nothing(
    spec: ModelSpec, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, and in a later one."""
    first = simulated([ContextRequest(spec, PLAIN)])
    assert simulated([ContextRequest(spec, PLAIN)]) == first
    monkeypatch.setattr(simulation._simulator, "__dict__", vars(simulation._Simulator()))
    assert simulated([ContextRequest(spec, PLAIN)]) == first
    assert len(started) == 1


def test_another_build_is_asked_anew(
    spec: ModelSpec, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated([ContextRequest(spec, PLAIN)])
    monkeypatch.setattr(simulation._simulator, "__dict__", vars(simulation._Simulator()))
    monkeypatch.setattr(simulation, "_library", lambda: "another")
    simulated([ContextRequest(spec, PLAIN)])
    assert len(started) == 2


@pytest.mark.parametrize("document", [{}, {"answers": 3}, {"answers": {"x": 1}}])
def test_damaged_answers_are_asked_anew(
    spec: ModelSpec, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = simulated([ContextRequest(spec, PLAIN)])
    name = simulation._simulator._skeleton(spec).name
    cache.store("layouts", simulation._key(name), document)
    monkeypatch.setattr(simulation._simulator, "_known", {})
    assert simulated([ContextRequest(spec, PLAIN)]) == first


# ------------------------------------------------------------------------------ what fails


def test_a_file_that_llama_cpp_does_not_load_is_told_with_its_words(spec: ModelSpec) -> None:
    kept = {name: one for name, one in spec.tensors.items() if "attn_q" not in name}
    broken = replace(spec, tensors=kept, fingerprint="broken")
    with pytest.raises(BackendError, match=r"cannot load model.gguf: .*attn_q.weight. not found"):
        simulated([ContextRequest(broken, PLAIN)])
    assert simulated([ContextRequest(spec, PLAIN)])[0][HOST].cache > 0, (
        "and the next one is answered"
    )


def test_a_process_that_dies_is_told_in_a_sentence(
    spec: ModelSpec, started: list[subprocess.Popen[bytes]]
) -> None:
    with simulating():
        simulated([ContextRequest(spec, PLAIN)])
        started[0].kill()
        started[0].wait()
        assert simulated([ContextRequest(spec, RunConfig(512, 64, 8))])[0][HOST].cache > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_may_take_so_much_memory_and_no_more(
    spec: ModelSpec, started: list[subprocess.Popen[bytes]]
) -> None:
    with simulating():
        simulated([ContextRequest(spec, PLAIN)])
        limits = Path(f"/proc/{started[0].pid}/limits").read_text()
    [data] = [line for line in limits.splitlines() if line.startswith("Max data size")]
    assert data.split()[3] == str(simulation.MOST_BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_a_header_that_would_take_too_much_is_told_in_a_sentence(spec: ModelSpec) -> None:
    """Of 80 million tokens, at 40 bytes each and more."""
    huge = replace(spec, vocab_size=80_000_000, fingerprint="huge")
    with pytest.raises(BackendError, match="tables for this model take more than 2 GiB"):
        simulated([ContextRequest(huge, PLAIN)])
    assert simulated([ContextRequest(spec, PLAIN)])[0][HOST].cache > 0


def test_a_process_that_takes_too_much_is_ended_and_told_in_a_sentence(
    spec: ModelSpec, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no such limit, this process looks at it."""
    monkeypatch.setattr(processes, "_LOOK_S", 0.001)
    monkeypatch.setattr(processes, "_LIMITS_ITSELF", False)
    monkeypatch.setattr(simulation._simulator._guest, "_limits", GuestLimits(1 << 20, 6.0, 60.0))
    with pytest.raises(BackendError, match=r"ended while it was asked about model\.gguf"):
        simulated([ContextRequest(spec, PLAIN)])
    monkeypatch.undo()
    assert started[0].poll() is not None


def test_an_end_of_the_process_by_llama_cpp_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Of more snapshots than its graph has room for: it aborts."""
    shape = Shape("nemotron_h", 16)
    spec = read_model_spec(write_hybrid(tmp_path / "model.gguf", shape))
    with pytest.raises(BackendError, match=r"ended while it was asked about model\.gguf"):
        simulated([ContextRequest(spec, RunConfig(512, 64, 8, snapshots=250))])
    assert simulated([ContextRequest(spec, RunConfig(512, 64, 8))])[0][HOST].cache > 0


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("exps(", r"cannot load model\.gguf: .*Mismatched '\(' and '\)'"),
        ("[z-a]", r"cannot load model\.gguf: .*Invalid range"),
        pytest.param("(.*)*" * 7 + "Q$", "ended while it was asked", marks=pytest.mark.long),
    ],
)
def test_a_pattern_that_is_none_is_told_in_a_sentence(
    spec: ModelSpec, pattern: str, told: str
) -> None:
    """Also one without an end: its time is bounded, and the next question is answered."""
    start = time.monotonic()
    with pytest.raises(BackendError, match=told) as caught:
        simulated([ContextRequest(spec, replace(PLAIN, overrides=((pattern, HOST),)))])
    assert "a pattern of --override-tensor may be no regular expression" in (
        caught.value.hint or ""
    )
    assert time.monotonic() - start < simulation._LIMITS.patience_s
    assert simulated([ContextRequest(spec, PLAIN)])[0][HOST].cache > 0


def test_patterns_reach_llama_cpp_the_same_way_twice(tmp_path: Path) -> None:
    """In a load and in a simulation, on the one device that is always there.

    Here the processor is also a device that takes layers, whose own memory it is: what is named for
    it is not rewritten for kernels, and what is named for the host is.
    """
    spec = read_model_spec(write_hybrid(tmp_path / "model.gguf", Shape("qwen3moe", 4, 256, 512)))
    device = (Device(HOST, 5, "CPU"),)
    placed = replace(PLAIN, gpu_layers=5, devices=device, kernels=True)
    settings = replace(placed, mapped=False)
    found = []
    for overrides in ((), (("ffn_.*_exps", HOST),), (("blk.(0|1).ffn_.*_exps", HOST),)):
        backend = LlamaBackend(spec.path, replace(settings, overrides=overrides))
        real = allocated(backend._context)
        backend.close()
        said = simulated([ContextRequest(spec, replace(placed, overrides=overrides))])[0]
        assert said[HOST][:3] == real[HOST][:3]  # a buffer of results is counted by each of both
        found.append(real[HOST].packed)
    assert found[1] == 2 * found[2] > found[0] == 0


def survived(file: Path, header: bytes) -> str:
    """What came of a header: bytes, or the words of one error of ours."""
    file.write_bytes(header)
    try:
        spec = read_model_spec(file)
        shape = RunConfig(512, 64, 8, snapshots=4 if spec.has_snapshots else 0, kernels=True)
        with_block = replace(shape, head=True)
        simulated([ContextRequest(spec, shape)])
        if spec.num_prediction_layers:
            simulated([ContextRequest(spec, with_block), wanted_head(spec, with_block, with_block)])
    except EdgespecError as problem:
        return f"{problem}"
    return "bytes"


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.long)])
def test_odd_headers_end_in_bytes_or_in_a_sentence(tmp_path: Path, count: int) -> None:
    """Some of them end llama.cpp's process; the next one is answered all the same."""
    known = headers(tmp_path)
    with simulating():
        said = [survived(tmp_path / "model.gguf", mutated(known, seed)) for seed in range(count)]
    assert said.count("bytes") > count // 10 and all(one and "\n" not in one for one in said)


# ------------------------------------------------------------------------------ projectors


def test_a_projector_is_asked_about_once(
    vision_folder: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    projector = read_projector(vision_folder / "mmproj-llava.gguf")
    found = [simulated_projector(projector, None, on_gpu=False)]
    monkeypatch.setattr(simulation._simulator, "__dict__", vars(simulation._Simulator()))
    found.append(simulated_projector(projector, None, on_gpu=False))
    assert found[0] == found[1] and found[0][1] == projector.image_size
    assert len(started) == 1


def test_a_projector_that_libmtmd_does_not_load_is_told_in_its_words(
    vision_folder: Path, tmp_path: Path
) -> None:
    data = (vision_folder / "mmproj-llava.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(data.replace(b"v.blk.1.attn_out.weight", b"v.blk.1.attn_OUT.weight"))
    projector = read_projector(path)
    for _ in range(2):
        with pytest.raises(
            BackendError, match=r"cannot load mmproj.gguf: .*v.blk.1.attn_out.weight"
        ):
            simulated_projector(projector, None, on_gpu=False)
    assert next(projector_parts(projector, None, on_gpu=False)).nbytes == projector.weight_bytes
