"""edgespec's kernels inside llama.cpp: products against ggml's, models with and without."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.llama import kernels as loaded_kernels
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.kernels import (
    kernels,
    leave_out,
    packed_type,
)
from edgespec.backends.llama.library import ggml_function, library
from edgespec.measure.noise import largest_invariant_step, prefill_is_invariant
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import weights_parts
from edgespec.memory.bytes.simulation import ContextRequest, simulated
from edgespec.memory.device import host
from edgespec.memory.device.kernels import attends
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("attached")]


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with closing(load(True)) as made:
        yield made


def load(use: bool, kv_type: str = "f16") -> LlamaBackend:
    spec = read_model_spec(embedded_model())
    chosen = RunConfig(
        1024,
        64,
        max_nodes=8,
        threads=2,
        gpu_layers=0,
        mapped=False,
        kv_type_k=kv_type,
        kv_type_v=kv_type,
        kernels=use,
        tied=spec.tied_embeddings,
    )
    return LlamaBackend(embedded_model(), chosen)


def first_logits(backend: LlamaBackend) -> NDArray[np.float32]:
    backend.truncate(0)
    return np.array(backend.prefill(backend.tokenizer.encode("The capital of France is")))


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    return weights / float(weights.sum())


def test_a_model_says_the_same(backend: LlamaBackend) -> None:
    with closing(load(False)) as plain:
        theirs = probabilities(first_logits(plain))
    ours = probabilities(first_logits(backend))
    assert (theirs * np.log(theirs / ours)).sum() < 0.02


def test_bytes_are_those_that_were_planned(backend: LlamaBackend) -> None:
    spec = read_model_spec(embedded_model())
    shape = RunConfig(1024, 64, 8, threads=2, mapped=False, kernels=True)
    (answer,) = simulated([ContextRequest(spec, shape)])
    planned = {part.name: part.nbytes for part in weights_parts(spec, shape, answer)}
    loaded = backend.memory_bytes()
    assert loaded["weights_repacked"] == pytest.approx(planned["weights_repacked"], rel=1e-3)
    assert "CPU_EDGESPEC" not in loaded
    # The embedding table is the head, too, and is kept once.
    assert planned["weights_repacked"] < 1.02 * spec.weight_bytes


@pytest.mark.long
@pytest.mark.parametrize("kv_type", ["f16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_all_steps_round_like_single_tokens(kv_type: str) -> None:
    """Prompts too, and at depths where llama.cpp takes another path."""
    if not attends(64, 64):
        pytest.skip("edgespec's attention needs AVX2, AVX-512 or NEON with dotprod")
    with closing(load(True, kv_type)) as backend:
        assert largest_invariant_step(backend, depths=(20, 530), sizes=(2, 5, 8)) == 8
        assert prefill_is_invariant(backend, 8, depths=(530,))


@pytest.mark.parametrize(("kv_type", "most"), [("q8_0", 0.008), ("q4_0", 0.03)])
def test_smaller_caches_say_the_same(backend: LlamaBackend, kv_type: str, most: float) -> None:
    """As f16 does: llama.cpp's attention rounds queries, too, and is further from it."""
    with closing(load(True, kv_type)) as smaller:
        ours = probabilities(first_logits(smaller))
    exact = probabilities(first_logits(backend))
    assert (exact * np.log(exact / ours)).sum() < most


def test_only_loads_in_the_body_use_them() -> None:
    library()
    with kernels(True, threads=2):
        pass
    with closing(load(False)) as plain:
        assert "weights_repacked" not in plain.memory_bytes()  # Q4_1: llama.cpp has none


# Without model_params(): a program that knows llama-cpp-python alone. edgespec comes while it
# decodes.
BESIDE_ANOTHER_USER = """
import ctypes, json, sys, threading, time
from llama_cpp import llama_cpp as lib

quiet = lib.llama_log_callback(lambda *_: None)
lib.llama_log_set(quiet, None)
path = sys.argv[1].encode()
model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
settings = lib.llama_context_default_params()
settings.n_ctx, settings.n_batch, settings.n_threads, settings.n_threads_batch = 256, 8, 1, 1
vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
said, is_over = [], threading.Event()

def decode():
    context = lib.llama_init_from_model(model, settings)
    while not is_over.is_set():
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens = (lib.llama_token * 4)(1, 2, 3, 4)  # whose address the batch has
        assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, 4)) == 0
        said.append(hash(ctypes.string_at(lib.llama_get_logits(context), 4 * vocab)))

thread = threading.Thread(target=decode)
thread.start()
while len(said) < 2:
    time.sleep(0.01)
address_of = lib._lib["_Z39ggml_backend_cpu_get_extra_buffer_typesv"]
address_of.restype = ctypes.POINTER(ctypes.c_void_p)
before = address_of()[0]

from edgespec.backends.llama import kernels
reason = kernels.refusal_of_kernels()
count = len(said)
while len(said) < count + 2 and thread.is_alive():
    time.sleep(0.01)
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
loaded = LlamaBackend(sys.argv[1], RunConfig(256, kernels=True, mapped=False))
is_over.set()
thread.join()
print(json.dumps([reason, before == address_of()[0], len(set(said)), loaded.memory_bytes()]))
"""


def test_they_are_made_known_while_another_user_of_the_library_decodes() -> None:
    """What its threads read stays where it is, and a model that is loaded then uses them."""
    command = [sys.executable, "-c", BESIDE_ANOTHER_USER, str(embedded_model())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reason, stays, different, loaded = json.loads(done.stdout)
    assert stays and different == 1
    if "no room" in reason:
        pytest.skip("this system's allocator gave the list no room")
    assert reason == "" and loaded["weights_repacked"] > 0


def test_products_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same kernels on the same processor; where one differs, at each start."""
    compared: list[int] = []
    differences = [0.0]

    def difference(kind: int, *_: object) -> float:
        compared.append(kind)
        return differences[0]

    monkeypatch.setattr(loaded_kernels, "difference", difference)
    assert [loaded_kernels._check() for _ in range(3)] == ["", "", ""]
    assert len(compared) == len({*compared}) > 10
    for name in ("cpu_name", "llama_build"):
        compared.clear()
        monkeypatch.setattr(host, name, lambda: "another")
        assert loaded_kernels._check() == "" and len(compared) > 10
    monkeypatch.setattr(loaded_kernels, "kernels_key", lambda: "others")
    differences[0] = 0.1
    assert [loaded_kernels._check() for _ in range(2)] == 2 * ["a product differs from ggml's own"]


def test_buffer_types_are_left_out_by_name_where_they_stand() -> None:
    """As llama.cpp's for AMX are, in builds for processors that have it."""
    plain = ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    packed = packed_type()
    types = (ctypes.c_void_p * 5)(plain, packed, plain, None, 7)
    leave_out(types, "CPU")
    assert list(types)[:2] == [packed, None] and types[4] == 7
    leave_out(types, "AMX")
    assert list(types)[:2] == [packed, None]
