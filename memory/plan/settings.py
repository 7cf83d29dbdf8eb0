"""What decides step times: a cost curve is stored under these settings."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.layout import Layout
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides step times; a cost curve is stored under these."""

    threads: int
    kv_type_k: str
    kv_type_v: str
    gpu_layers: int
    drafter: str
    backend: str = LLAMACPP
    padded: bool = False  # one-token steps take two rows
    device: str = "cpu"  # of ONNX Runtime; with llama.cpp the layers on the GPU say it
    kernels: bool = False  # edgespec's own, in llama.cpp
    head: bool = False  # of the head in a model's file alone
    shares: str = ""  # layers by device, of those that have any, and tensors that lie elsewhere
    snapshots: int = 0  # of a recurrent state: what steps write besides


def settings_of(chosen: Plan | Layout) -> Settings:
    """What decides the step times of a plan, or of a layout that becomes one.

    A layout has no drafts yet, and with that no snapshots.
    """
    is_onnx = chosen.backend == ONNX
    return Settings(
        chosen.threads,
        chosen.kv_type_k,
        chosen.kv_type_v,
        chosen.gpu_layers,
        chosen.drafter,
        chosen.backend,
        is_onnx and chosen.exact,
        chosen.device if is_onnx else "cpu",
        chosen.kernels,
        snapshots=chosen.snapshots if isinstance(chosen, Plan) else 0,
        shares=", ".join(
            [
                *(f"{one.layers} on {_name(one.device)}" for one in chosen.shares),
                *(f"{pattern}={label}" for pattern, label in chosen.overrides),
            ]
        ),
    )


def draft_shares(plan: Plan) -> str:
    """The GPUs beside the layers of which a draft model lies: with all of its own there."""
    return ", ".join(_name(one.device) for one in plan.shares if not one.device.worker)


def _name(device: Accelerator) -> str:
    """A worker's address; a GPU's own name: its number may be another one's the next time."""
    return device.name if device.worker else device.description
