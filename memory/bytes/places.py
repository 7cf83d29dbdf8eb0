"""On which device the weights of each layer lie, and which ones stay with the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from edgespec.memory.device.taking import Weight
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import ModelSpec

TABLE, HEAD = "token_embd.weight", "output.weight"
LOOKUP_TABLES = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")
_EXPERTS = "_exps.weight"


class Shape(Protocol):
    """What decides where weights lie, of a run's settings."""

    @property
    def takes(self) -> Callable[[str, Weight], bool]:
        """Whether a device has a weight of its layers."""
        ...

    @property
    def head(self) -> bool:
        """Whether the block that predicts further tokens is loaded."""
        ...

    def counts(self, everything: int) -> tuple[tuple[str, int], ...]:
        """How many of all layers each device has, the last ones, by its label."""
        ...


def takes_all(_label: str, _weight: Weight) -> bool:
    """The answer for devices that are not asked."""
    return True


def device_layers(spec: ModelSpec, shape: Shape) -> dict[str, range]:
    """The layers on each device but the host, by its label; the head comes after the last layer.

    A head that its device does not take is on the host.
    """
    head, found = _head(spec), {}
    for label, layers in _asked_layers(spec, shape).items():
        is_last = spec.num_layers in layers
        if is_last and head is not None and not is_taken(spec, shape, label, head):
            layers = layers[:-1]
        if layers:
            found[label] = layers
    return found


def refused_weights(spec: ModelSpec, shape: Shape) -> list[GgufTensor]:
    """Matrices of the devices' layers that these do not take: they are on the host."""
    devices = _asked_layers(spec, shape)
    placed = [(holder(devices, layer_of(spec, one)), one) for one in loaded_tensors(spec, shape)]
    if spec.tied_embeddings and (head := _head(spec)) is not None:
        placed.append((holder(devices, spec.num_layers), replace(head, name=HEAD)))
    return [
        tensor
        for label, tensor in placed
        if label is not None and not is_taken(spec, shape, label, tensor)
    ]


def is_taken(spec: ModelSpec, shape: Shape, label: str, tensor: GgufTensor) -> bool:
    """Whether a tensor of a device's layers lies there: a vector always does."""
    if len(tensor.dims) < 2:
        return True
    experts = spec.num_experts_used if tensor.name.endswith(_EXPERTS) else 0
    return shape.takes(label, Weight(GGML_NUMBERS[tensor.type.name], tensor.dims, experts))


def holder(devices: Mapping[str, range], layer: int) -> str | None:
    """The device that has a layer, or None for the host."""
    return next((label for label, layers in devices.items() if layer in layers), None)


def layer_of(spec: ModelSpec, tensor: GgufTensor) -> int:
    """The layer a tensor belongs to; the head comes after all, lookup tables before."""
    if tensor.name.startswith("blk."):
        number = tensor.name.split(".", 2)[1]
        return int(number) if number.isdigit() else 0
    return -1 if tensor.name.startswith(LOOKUP_TABLES) else spec.num_layers


def loaded_tensors(spec: ModelSpec, shape: Shape) -> Iterator[GgufTensor]:
    """All but those of layers that predict further tokens, which are skipped unless wanted."""
    trunk = spec.num_layers - spec.num_prediction_layers
    for tensor in spec.tensors.values():
        if shape.head or not tensor.name.startswith("blk.") or layer_of(spec, tensor) < trunk:
            yield tensor


def _asked_layers(spec: ModelSpec, shape: Shape) -> dict[str, range]:
    """The layers that each device was given, the head included."""
    end, found = spec.num_layers + 1, {}
    counts = shape.counts(end)
    first = end - sum(count for _, count in counts)
    for label, count in counts:
        found[label] = range(first, first + count)
        first += count
    return found


def _head(spec: ModelSpec) -> GgufTensor | None:
    """The matrix that makes logits."""
    return spec.tensors.get(TABLE if spec.tied_embeddings else HEAD)
