"""Nodes and constants of an ONNX graph: what every flavour of the decoder is written with.

Matrices go to one file of external data that several graphs may share: what one of them has
written, the next one refers to. Small tensors lie inside the graph. Knows no transformer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError, imported
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.onnx.facts import BLOCK, packed_bits
from edgespec.models.onnx.weights import dequantize, float_rows, packed_rows, raw_rows
from edgespec.models.spec import ModelSpec

WEIGHTS_FILE = "weights.bin"
CONTRIB = "com.microsoft"
_ACCURACY_LEVEL = 4  # activations in 8 bits, as llama.cpp's kernels have them
_ALIGNMENT = 4096  # of external data, so that it can be mapped

RowOrder = NDArray[np.int64] | None  # rows of the file in the order wanted; None leaves them


def onnx_module() -> Any:
    """The onnx package. Raises MissingDependencyError where it is not installed."""
    needed = "converting a GGUF for ONNX Runtime needs the onnx package"
    return imported("onnx", needed, "pip install 'edgespec[onnx]'")


class WeightsFile:
    """Matrices in the layout of MatMulNBits or as float32, each written once.

    Args:
        progress: told which part of the model's bytes was read.
    """

    def __init__(self, spec: ModelSpec, file: BinaryIO, progress: Callable[[float], None]) -> None:
        self.spec = spec
        self._file = file
        self._progress = progress
        self._done_bytes = 0
        self._places: dict[str, tuple[int, int]] = {}  # offset and length in bytes

    def packed(
        self, tensor: GgufTensor, order: RowOrder = None
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where the blocks and the scales of a matrix lie."""
        blocks, scales = f"{tensor.name}.blocks", f"{tensor.name}.scales"
        if blocks not in self._places:
            start = self._aligned()
            found = []
            for part in packed_rows(self.spec.path, tensor, order):
                part.blocks.tofile(self._file)
                found.append(part.scales)
                self._tell(part.blocks.nbytes)
            self._end(blocks, start)
            start = self._aligned()
            np.concatenate(found).tofile(self._file)
            self._end(scales, start)
        return self._places[blocks], self._places[scales]

    def transposed(self, tensor: GgufTensor, order: RowOrder = None) -> tuple[int, int]:
        """Where a matrix lies in float32 with a column for each of its rows."""
        name = f"{tensor.name}.transposed"
        if name not in self._places:
            columns, rows = tensor.dims
            start = self._aligned()
            self._file.truncate(start + rows * columns * 4)
            self._file.flush()
            shape = (columns, rows)
            target = np.memmap(self._file, np.float32, "r+", start, shape)
            done = 0
            for part in float_rows(self.spec.path, tensor, order):
                target[:, done : done + len(part)] = part.T
                done += len(part)
                self._tell(tensor.data_bytes * len(part) // rows)
            target.flush()
            self._file.seek(0, os.SEEK_END)
            self._end(name, start)
        return self._places[name]

    def _aligned(self) -> int:
        """The next place where a tensor may begin."""
        place = self._file.seek(0, os.SEEK_END)
        padding = -place % _ALIGNMENT
        self._file.write(bytes(padding))
        return place + padding

    def _end(self, name: str, start: int) -> None:
        self._places[name] = (start, self._file.tell() - start)

    def _tell(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._progress(min(1.0, self._done_bytes / self.spec.weight_bytes))


class GraphWriter:
    """Collects the nodes and constants of one graph."""

    def __init__(self, spec: ModelSpec, weights: WeightsFile) -> None:
        self.onnx = onnx_module()
        self.spec = spec
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._weights = weights
        self._count = 0

    # -- operations ------------------------------------------------------------------------

    def op(
        self, kind: str, *inputs: str, domain: str = "", output: str = "", **attributes: Any
    ) -> str:
        """A node with one output; its name."""
        name = output or self.fresh(kind)
        self.node(kind, inputs, (name,), domain, **attributes)
        return name

    def node(
        self,
        kind: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """A node with the outputs named; an empty name is one that is not wanted."""
        make = self.onnx.helper.make_node
        self.nodes.append(make(kind, list(inputs), list(outputs), domain=domain, **attributes))

    def matrix(self, hidden: str, name: str, *, order: RowOrder = None, plain: bool = False) -> str:
        """Product with a weight matrix, and its bias where there is one.

        Args:
            order: takes the matrix's rows, and so the product's columns, in this order.
            plain: multiply by float32 weights, where a provider has no MatMulNBits.
        """
        tensor = self.spec.tensors[f"{name}.weight"]
        product = (self._plain if plain else self._packed)(hidden, tensor, order)
        bias = f"{name}.bias"
        return self.op("Add", product, self.floats(bias, order)) if self.has(bias) else product

    def _packed(self, hidden: str, tensor: GgufTensor, order: RowOrder) -> str:
        columns, rows = tensor.dims
        if columns % BLOCK:
            raise UnsupportedError(
                f"the ONNX backend needs rows of a multiple of {BLOCK} values; {tensor.name} has "
                f"{columns}",
                hint="leave out --backend onnx",
            )
        bits, count, types = packed_bits(tensor), columns // BLOCK, self.onnx.TensorProto
        blocks, scales = self._weights.packed(tensor, order)
        shape = (rows, count, BLOCK * bits // 8)
        return self.op(
            "MatMulNBits",
            hidden,
            self._external(f"{tensor.name}.blocks", types.UINT8, shape, blocks),
            self._external(f"{tensor.name}.scales", types.FLOAT, (rows * count,), scales),
            domain=CONTRIB,
            K=columns,
            N=rows,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_ACCURACY_LEVEL,
        )

    def _plain(self, hidden: str, tensor: GgufTensor, order: RowOrder) -> str:
        place = self._weights.transposed(tensor, order)
        kind = self.onnx.TensorProto.FLOAT
        return self.op("MatMul", hidden, self._external(tensor.name, kind, tensor.dims, place))

    # -- constants -------------------------------------------------------------------------

    def _external(
        self, name: str, kind: int, shape: tuple[int, ...], place: tuple[int, int]
    ) -> str:
        tensor = self.onnx.TensorProto(name=name, data_type=kind, dims=shape)
        tensor.data_location = self.onnx.TensorProto.EXTERNAL
        entries = (("location", WEIGHTS_FILE), ("offset", place[0]), ("length", place[1]))
        for key, value in entries:
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def floats(self, name: str, order: RowOrder = None) -> str:
        """A small tensor of the file, in float32, inside the graph."""
        if not any(known.name == name for known in self.initializers):
            tensor = self.spec.tensors[name]
            values = dequantize(tensor, raw_rows(self.spec.path, tensor)).reshape(-1)
            self._constant(name, values if order is None else values[order])
        return name

    def scalar(self, value: float) -> str:
        return self._constant(self.fresh("scalar"), np.array(value, np.float32))

    def integers(self, values: tuple[int, ...]) -> str:
        """A list of integers such as a shape."""
        return self._constant(self.fresh("shape"), np.array(values, np.int64))

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        self.initializers.append(self.onnx.numpy_helper.from_array(values, name))
        return name

    def has(self, name: str) -> bool:
        return name in self.spec.tensors

    def fresh(self, kind: str) -> str:
        self._count += 1
        return f"{kind}.{self._count}"

    # -- inputs and outputs ----------------------------------------------------------------

    def floats_info(self, name: str, *shape: int | str) -> Any:
        """An input or output of float32."""
        make, types = self.onnx.helper.make_tensor_value_info, self.onnx.TensorProto
        return make(name, types.FLOAT, list(shape))

    def integers_info(self, name: str, *shape: int | str, bits: int = 64) -> Any:
        """An input or output of integers."""
        make, types = self.onnx.helper.make_tensor_value_info, self.onnx.TensorProto
        return make(name, types.INT32 if bits == 32 else types.INT64, list(shape))

    def model(self, inputs: list[Any], outputs: list[Any]) -> Any:
        """The ModelProto of all that was written."""
        helper = self.onnx.helper
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)
