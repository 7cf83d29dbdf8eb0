"""How far back llama.cpp can take a model's recurrent state."""

from __future__ import annotations

from edgespec.models.spec import ModelSpec

# llama.cpp makes room for so many objects a tensor of the file, and ends the process where a graph
# has more (`llama.cpp: src/llama-context.cpp`, `graph_max_nodes`). Other kinds have room enough.
_OBJECTS_A_TENSOR, _LEAST_OBJECTS = 8, 1024
_OTHER_OBJECTS = 32  # inputs, and what stands before and behind the layers
_OBJECTS_A_SNAPSHOT = 3  # of a recurrent layer: two views and a copy
# Of a layer without snapshots: a recurrent one, one that attends, a feed-forward one.
_OBJECTS = {"lfm2": (35, 47, 0), "nemotron_h": (56, 28, 12)}
# What experts have more than the network in their place, and each one that a token goes to.
_OBJECTS_OF_EXPERTS, _OBJECTS_AN_EXPERT = {"lfm2": 15, "nemotron_h": 22}, 2
_MOST_SNAPSHOTS = 255


def most_snapshots(spec: ModelSpec) -> int:
    """How many snapshots of its recurrent state llama.cpp can keep of a model; 0 for none at all.

    LFM2 1.2B: 149 tensors make room for 1,192 objects, and its graph has 680 and 30 a snapshot.
    """
    if not spec.has_snapshots:
        return 0
    kind = spec.arch.removesuffix("moe").removesuffix("_")
    objects = _OBJECTS.get(kind)
    if objects is None:
        return _MOST_SNAPSHOTS
    recurrent, attending, feeding = objects
    room = max(_LEAST_OBJECTS, _OBJECTS_A_TENSOR * len(spec.tensors)) - _OTHER_OBJECTS
    trunk = spec.num_layers - spec.num_prediction_layers
    recurring = sum(spec.is_recurrent_layer)
    attends = sum(heads > 0 for heads in spec.num_kv_heads)
    room -= recurrent * recurring + attending * attends
    room -= feeding * (trunk - recurring - attends)
    routed = sum(f"blk.{layer}.ffn_gate_inp.weight" in spec.tensors for layer in range(trunk))
    room -= routed * (_OBJECTS_OF_EXPERTS[kind] + _OBJECTS_AN_EXPERT * spec.num_experts_used)
    return max(0, min(_MOST_SNAPSHOTS, room // (_OBJECTS_A_SNAPSHOT * max(1, recurring)) - 2))
