"""A small model, devices and step times that plans are made for."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from laid_out import machine_with, sizes_by_hand

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import Component, footprint
from edgespec.memory.bytes.simulation import ContextRequest
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.plan.planner import make_plan
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import ModelSpec

MIB = 1 << 20
INF = float("inf")
TABLES = 3 * MIB  # of the drafter
PLENTY = machine_with(64 << 30)
TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
quick = settings(max_examples=60)
thorough = settings(max_examples=12)


@contextmanager
def held(size_bytes: int) -> Iterator[None]:
    """Pages of the system, all touched: what was freed before could be used again for an array."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size_bytes, flags=private) as block:
        for page in range(0, size_bytes, mmap.PAGESIZE):
            block[page] = 1
        yield


def model(
    layers: int = 4,
    width: int = 256,
    heads: tuple[int, int] = (4, 2),
    head: int = 64,
    feed_forward: int = 512,
    vocabulary: int = 4000,
    kind: str = "Q4_1",
    **changes: Any,
) -> ModelSpec:
    """A llama with tied embeddings. By default a token takes 4 x 2 x (64 + 64) values of cache."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (width, vocabulary),
        "output_norm.weight": (width,),
    }
    for number in range(layers):
        parts = {
            "attn_norm": (width,),
            "attn_q": (width, heads[0] * head),
            "attn_k": (width, heads[1] * head),
            "attn_v": (width, heads[1] * head),
            "attn_output": (heads[0] * head, width),
            "ffn_norm": (width,),
            "ffn_gate": (width, feed_forward),
            "ffn_up": (width, feed_forward),
            "ffn_down": (feed_forward, width),
        }
        shapes |= {f"blk.{number}.{name}.weight": dims for name, dims in parts.items()}
    tensors = {}
    for name, dims in shapes.items():
        used = TYPES["F32"] if len(dims) == 1 else TYPES[kind]
        size = prod(dims) // used.block_size * used.block_bytes
        tensors[name] = GgufTensor(name, used, dims, 0, size)
    spec = ModelSpec(
        path=Path("tiny.gguf"), files=(Path("tiny.gguf"),), file_bytes=0,
        weight_bytes=sum(one.data_bytes for one in tensors.values()), fingerprint="f00d",
        arch="llama", name="tiny", file_type=kind, notes=(), num_layers=layers,
        num_prediction_layers=0, embedding_size=width, vocab_size=vocabulary,
        context_length=32768, feed_forward_size=(feed_forward,) * layers,
        num_heads=(heads[0],) * layers, num_kv_heads=(heads[1],) * layers,
        key_length=(head,) * layers, value_length=(head,) * layers, sliding_window=0,
        is_sliding=(False,) * layers, num_experts=0, num_experts_used=0,
        expert_feed_forward_size=0, keeps_state=False,
        is_recurrent_layer=(False,) * layers,
        tied_embeddings=True, table_bytes=tensors["token_embd.weight"].data_bytes,
        expert_bytes=0, type_bytes=(), chat_template=None,
        bos_id=None, eos_id=None, tokenizer_model="gpt2",
        tokenizer_hash="", tensors=tensors,
    )  # fmt: skip
    return replace(spec, **changes)


def with_experts(spec: ModelSpec, experts: int, used: int) -> ModelSpec:
    """The model with so many of its feed-forward networks in each layer."""
    tensors = {}
    for name, one in spec.tensors.items():
        if ".ffn_" in name and "norm" not in name:
            name = name.replace(".weight", "_exps.weight")
            dims, size = (*one.dims, experts), one.data_bytes * experts
            one = replace(one, name=name, dims=dims, data_bytes=size)
        tensors[name] = one
    return replace(
        spec,
        arch="qwen3moe",
        tensors=tensors,
        weight_bytes=sum(one.data_bytes for one in tensors.values()),
        num_experts=experts,
        num_experts_used=used,
    )


SPEC = model()
CELL = 4 * 2 * (64 + 64) * 2  # bytes of cache a token
RECURRENT = replace(SPEC, arch="mamba", keeps_state=True, num_kv_heads=(0,) * 4)


def curve(cost: float = 0.1, max_nodes: int = 32) -> CostCurve:
    """10 ms for one token, and a part of that for each further one."""
    return CostCurve([INF, *(10.0 * (1 + cost * (n - 1)) for n in range(1, max_nodes + 1))])


def measured(cost: float = 0.1) -> Callable[[RunConfig], SpeedModel]:
    return lambda _settings: SpeedModel(curve(cost), is_measured=True)


def unmeasured(_settings: RunConfig) -> SpeedModel:
    return SpeedModel(curve(0.35), is_measured=False)


def plan_of(
    spec: ModelSpec = SPEC,
    machine: Machine = PLENTY,
    speed_of: Callable[[RunConfig], SpeedModel] | None = None,
    max_step: int | None = None,
    kv_losses: Any = None,
    **request: Any,
) -> Plan:
    return make_plan(
        spec,
        Request(**{"threads": 2, "is_plain_greedy": True, **request}),
        machine,
        speed_of or measured(),
        drafter_bytes=TABLES,
        max_step_of=lambda _settings: max_step,
        kv_losses=kv_losses,
    )


def outcome(*args: Any, **request: Any) -> Plan | DoesNotFitError:
    try:
        return plan_of(*args, **request)
    except DoesNotFitError as error:
        return error


def does_not_fit(*args: Any, **request: Any) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(*args, **request)
    return caught.value


def reason(plan: Plan, name: str) -> str:
    return str(plan.as_json()[name]["reason"])


def gpu(free: int, shares: bool = False) -> tuple[Accelerator, ...]:
    return (Accelerator("GPU0", "Some GPU", 2 * free, free, shares),)


def parts_by_hand(
    context_size: int, batch: int = 32, nodes: int = 1, tables: int = 0, **shape: Any
) -> tuple[Component, ...]:
    """Components of a run of `SPEC`."""
    run = RunConfig(context_size, batch, nodes, **{"threads": 2, **shape})
    (answer,) = sizes_by_hand([ContextRequest(SPEC, run)])
    return footprint(SPEC, run, answer, drafter_bytes=tables)


def peak(**request: Any) -> int:
    """Bytes of a plan with the smallest batch and no drafts."""
    return sum(part.nbytes for part in parts_by_hand(request.pop("context_size"), **request))
