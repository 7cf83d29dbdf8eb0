"""From an exported decoder to the graph edgespec runs: names, shapes, rows of logits, new keys.

An exporter's graph takes the past and gives it back with the new rows behind it. The graph made
here gives the new rows alone, so that the cache stays with the backend and no step holds a second
one, and computes logits only for the rows that are asked for:

    input_ids [1, n] i64, position_ids [1, n] i64, rows [r] i64,
    attention_bias [1, 1, n, past + n] f32, added to the scores: 0 or -1e4
    (attention_bias_window, too, where layers see a window),
    past_key.i, past_value.i [1, H, past, D]
    -> logits [r, V], new_key.i, new_value.i [1, H, n, D]

Knows the onnx package and no exporter; the weights are in the graph while it is changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgespec.errors import UnsupportedError

_ELEMENTWISE = {"Add", "Cast", "Div", "Identity", "Mul", "Tanh"}  # between the head and logits
_LARGE_TABLE = 1 << 20  # values; smaller ones stay in float32
_LARGEST_F16 = 65504.0


def to_contract(model: Any, windowed: tuple[bool, ...]) -> None:
    """Change an exporter's graph in place.

    Args:
        model: an `onnx.ModelProto` with the inputs `input_ids`, `position_ids`, `attention_mask`
            [1, masks, n, total] and `past_key_values.i.key|value`, and outputs `logits` [1, n, V]
            and `present.i.key|value`.
        windowed: whether each layer slides. Where some do, the last of the masks is for them.

    Raises UnsupportedError where the graph has other inputs or outputs.
    """
    graph = model.graph
    names = {value.name for value in (*graph.input, *graph.output)}
    wanted = {"input_ids", "position_ids", "attention_mask", "logits", *_caches(len(windowed))}
    if names != wanted:
        odd = ", ".join(sorted(names ^ wanted)[:4])
        raise UnsupportedError(
            f"the exported graph has other inputs or outputs than a decoder's ({odd})",
            hint="use a GGUF file of this model",
        )
    _Surgeon(model, windowed).operate()


def _caches(num_layers: int) -> dict[str, str]:
    """Names of an exporter's keys and values, and what they become."""
    return {
        f"{theirs}.{layer}.{what}": f"{ours}_{what}.{layer}"
        for theirs, ours in (("past_key_values", "past"), ("present", "new"))
        for layer in range(num_layers)
        for what in ("key", "value")
    }


class _Surgeon:
    def __init__(self, model: Any, windowed: tuple[bool, ...]) -> None:
        import onnx

        self.helper, self.numpy_helper, self.types = (
            onnx.helper,
            onnx.numpy_helper,
            onnx.TensorProto,
        )
        self.graph = model.graph
        self.num_layers = len(windowed)
        self.masks = ["attention_bias"] * (not all(windowed))
        self.masks += ["attention_bias_window"] * any(windowed)
        self.made_by = {name: node for node in self.graph.node for name in node.output}

    def operate(self) -> None:
        graph = self.graph
        del graph.value_info[:]  # tells shapes that no longer hold
        shapes = {value.name: _dims(value) for value in (*graph.input, *graph.output)}
        self._new_rows()
        graph.node.extend(self._choose_rows())
        if len(self.masks) > 1:  # the exporter's only one has all masks behind each other
            joined = self.helper.make_node("Concat", self.masks, ["attention_mask"], axis=1)
            graph.node.insert(0, joined)
        else:
            _rename(graph, {"attention_mask": self.masks[0]})
        _rename(graph, {old: new for old, new in _caches(self.num_layers).items() if "past" in old})
        self._declare(shapes)

    def _new_rows(self) -> None:
        """What each present has behind the past; the present itself ends with its layer."""
        self._constant("axis_2", [2])
        self._constant("to_end", [np.iinfo(np.int64).max])
        first = self.helper.make_node(
            "Shape", ["past_key_values.0.key"], ["past_length"], start=2, end=3
        )
        self.graph.node.insert(0, first)
        for theirs, ours in _caches(self.num_layers).items():
            if theirs.startswith("present"):
                place = list(self.graph.node).index(self.made_by[theirs]) + 1
                self.graph.node.insert(place, self._rows_of(theirs, ours))

    def _rows_of(self, present: str, name: str) -> Any:
        made, past = self.made_by[present], present.replace("present", "past_key_values")
        if made.op_type == "Concat" and len(made.input) == 2 and made.input[0] == past:
            return self.helper.make_node("Identity", [made.input[1]], [name])
        inputs = [present, "past_length", "to_end", "axis_2"]
        return self.helper.make_node("Slice", inputs, [name])

    def _choose_rows(self) -> list[Any]:
        """Gather rows of the hidden states before the head, or of the logits if there is none."""
        make = self.helper.make_node
        _rename(self.graph, {"logits": "logits_of_rows"})
        self._constant("axis_0", [0])
        squeeze = make("Squeeze", ["logits_of_rows", "axis_0"], ["logits"])
        head = self._head("logits")
        if head is None:
            _rename(self.graph, {"logits_of_rows": "all_logits"})
            return [make("Gather", ["all_logits", "rows"], ["logits_of_rows"], axis=1), squeeze]
        place = list(self.graph.node).index(head)
        gather = make("Gather", [head.input[0], "rows"], ["hidden_of_rows"], axis=1)
        head.input[0] = "hidden_of_rows"
        self.graph.node.insert(place, gather)
        return [squeeze]

    def _head(self, name: str) -> Any:
        """The product that makes the logits; None if they are not a plain product."""
        constants = {tensor.name for tensor in self.graph.initializer}
        node = self.made_by.get(name)
        while node is not None and node.op_type in _ELEMENTWISE:
            name = next((one for one in node.input if one not in constants), "")
            node = self.made_by.get(name)
        return node if node is not None and node.op_type == "MatMul" else None

    def _constant(self, name: str, values: list[int]) -> None:
        array = np.array(values, np.int64)
        self.graph.initializer.append(self.numpy_helper.from_array(array, name))

    def _declare(self, shapes: dict[str, list[Any]]) -> None:
        """The inputs and outputs of the contract."""
        graph, make = self.graph, self.helper.make_tensor_value_info
        integer, real = self.types.INT64, self.types.FLOAT
        del graph.input[:], graph.output[:]
        graph.input.append(make("input_ids", integer, [1, "n"]))
        graph.input.append(make("position_ids", integer, [1, "n"]))
        graph.input.append(make("rows", integer, ["r"]))
        for mask in self.masks:
            graph.input.append(make(mask, real, [1, 1, "n", "total"]))
        graph.output.append(make("logits", real, ["r", "vocabulary"]))
        for old, new in _caches(self.num_layers).items():
            _, heads, _, length = shapes[old.replace("present", "past_key_values")]
            middle, values = ("past", graph.input) if "past" in old else ("n", graph.output)
            values.append(make(new, real, [1, heads, middle, length]))


def cache_shapes(model: Any) -> list[tuple[int, int, int]]:
    """Heads, and the lengths of a key and of a value, by layer."""
    dims = {value.name: _dims(value) for value in model.graph.input}
    num_layers = sum(name.startswith("past_key.") for name in dims)
    keys = [dims[f"past_key.{layer}"] for layer in range(num_layers)]
    values = [dims[f"past_value.{layer}"] for layer in range(num_layers)]
    return [(key[1], key[3], value[3]) for key, value in zip(keys, values, strict=True)]


def split_linear(model: Any) -> None:
    """Write `Gemm` with constant weights as a product and a sum, which can be quantized."""
    import onnx

    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        facts = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        plain = not facts.pop("transA", 0) and all(facts.pop(n, 1) == 1 for n in ("alpha", "beta"))
        if node.op_type != "Gemm" or not plain or node.input[1] not in weights:
            nodes.append(node)
            continue
        weight = node.input[1]
        if facts.get("transB", 0):
            array = np.ascontiguousarray(onnx.numpy_helper.to_array(weights[weight]).T)
            weight = f"{weight}.transposed.{len(nodes)}"
            graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
        product = f"{node.output[0]}.product" if len(node.input) > 2 else node.output[0]
        nodes.append(onnx.helper.make_node("MatMul", [node.input[0], weight], [product], node.name))
        if len(node.input) > 2:
            nodes.append(onnx.helper.make_node("Add", [product, node.input[2]], list(node.output)))
    del graph.node[:]
    graph.node.extend(nodes)


def halve_tables(model: Any) -> None:
    """Keep large lookup tables in float16; rows are made float32 after they are looked up."""
    import onnx

    graph = model.graph
    tables = {tensor.name: tensor for tensor in graph.initializer}
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    for name, tensor in tables.items():
        nodes = users.get(name, [])
        if any(n.op_type != "Gather" or n.input[0] != name for n in nodes) or not nodes:
            continue
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size < _LARGE_TABLE:
            continue
        if np.abs(array).max() > _LARGEST_F16:
            continue
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float16), name))
        for node in nodes:
            out, node.output[0] = node.output[0], f"{node.output[0]}.f16"
            cast = onnx.helper.make_node("Cast", [node.output[0]], [out], to=1)
            graph.node.insert(list(graph.node).index(node) + 1, cast)


def _dims(value: Any) -> list[Any]:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value or dim.dim_param for dim in dims]


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Other names for tensors, in graphs inside of nodes, too."""
    for node in graph.node:
        for places in (node.input, node.output):
            for place, name in enumerate(places):
                places[place] = names.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


# -- sizes that never change -----------------------------------------------------------

TensorShape = list[int | str]

_SMALL = 16  # values of a tensor that may be a shape


def freeze_shapes(model: Any) -> None:
    """Replace what is known of sizes by constants, in place: a step of a small model takes a third
    less time.

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
