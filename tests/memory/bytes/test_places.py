"""Where weights lie that a device does not take."""

from __future__ import annotations

from footprint_cases import (
    TIED,
    UNTIED,
    shape,
    takes_up_to,
    weights,
)

from edgespec.memory.bytes.footprint import (
    GPU,
    HOST,
)
from edgespec.memory.bytes.places import refused_weights


def test_what_a_device_does_not_take_stays_here() -> None:
    """The head, in a file with one and where the table is it; norms are taken all the same."""
    some = takes_up_to(64 * 64)
    assert weights(UNTIED, gpu_layers=-1, takes=some) == {
        (HOST, "weights"): 36_000 + 68_000 + 256,
        (GPU, "weights"): 2 * (2304 + 256),
    }
    assert weights(TIED, gpu_layers=1, takes=some) == weights(TIED, gpu_layers=0)
    assert weights(UNTIED, gpu_layers=1, takes=some) == weights(UNTIED, gpu_layers=0)
    (head,) = refused_weights(TIED, shape(gpu_layers=-1, takes=some))
    assert (head.name, head.data_bytes) == ("output.weight", 36_000)
    assert not refused_weights(TIED, shape(gpu_layers=0, takes=some))


def test_a_matrix_of_a_layer_that_a_device_does_not_take_stays_here() -> None:
    few = takes_up_to(0)
    sizes = weights(UNTIED, gpu_layers=-1, takes=few)
    assert sizes[GPU, "weights"] == 2 * 256, "norms"
    assert sizes[HOST, "weights_repacked"] == 2 * 2304
    assert len(refused_weights(UNTIED, shape(gpu_layers=-1, takes=few))) == 3
