"""The replay of ggml's graph allocator: small graphs whose buffers are worked out by hand.

Sizes are bytes and multiples of 32 unless rounding is the point.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.memory.bytes.arena import Graph, Tensor


def leaf(nbytes: int) -> Tensor:
    return Tensor(nbytes, "leaf", is_input=True)


def result(nbytes: int, *sources: Tensor) -> Tensor:
    """An operation that needs room of its own."""
    return Tensor(nbytes, nbytes, sources)


def over(*sources: Tensor) -> Tensor:
    """An operation that may write over the first of its operands that is alike."""
    return Tensor(sources[0].nbytes, sources[0].shape, sources, in_place=True)


def view(tensor: Tensor) -> Tensor:
    return Tensor(0, None, (tensor,), view_of=tensor.view_of or tensor)


def buffer_of(*tensors: Tensor) -> int:
    graph = Graph()
    for tensor in tensors:
        graph.add(tensor)
    return graph.buffer_bytes()


def test_no_graph_needs_no_buffer() -> None:
    assert buffer_of() == 0


@pytest.mark.parametrize(("nbytes", "taken"), [(1, 32), (32, 32), (33, 64), (100, 128)])
def test_tensors_are_aligned_to_32_bytes(nbytes: int, taken: int) -> None:
    assert buffer_of(leaf(nbytes)) == taken


def test_a_result_is_freed_after_its_last_use() -> None:
    """a 0-64, b 64-128; a goes, so c takes 0-64, and d the place of b."""
    a = result(64)
    b = result(64, a)
    c = result(64, b)
    assert buffer_of(result(64, c)) == 128


def test_a_result_that_is_used_again_stays() -> None:
    """a is needed by d: a 0-64, b 64-128, c 128-192, and d the place of b."""
    a = result(64)
    b = result(64, a)
    c = result(64, b)
    assert buffer_of(result(64, c, a)) == 192


def test_inputs_come_before_all_nodes() -> None:
    """Inputs 0-32 and 32-64, though the second is used last; a 64-128, b 128-192.

    Were the second input placed when it is used, the first one's bytes would do: 160.
    """
    first, second = leaf(32), leaf(32)
    a = result(64, first)
    assert buffer_of(result(64, a, second)) == 192


def test_an_input_nobody_reads_takes_its_bytes() -> None:
    assert buffer_of(result(64, leaf(32)), leaf(96)) == 32 + 96 + 64


def test_operands_are_evaluated_from_left_to_right() -> None:
    """wide 0-96, its sum 96-128 and then thin in the place of wide: 128.

    The other way round thin is there while wide and its sum are made: 32 + 96 + 32.
    """
    for is_wide_first, expected in ((True, 128), (False, 160)):
        thin, small = result(32), result(32, result(96))
        operands = (small, thin) if is_wide_first else (thin, small)
        assert buffer_of(result(32, *operands)) == expected


# ------------------------------------------------------------------------------ in place


def test_an_operation_in_place_takes_its_operand() -> None:
    """x 32-96 after the input, and everything after it in the same place."""
    x = result(64, leaf(32))
    assert buffer_of(over(over(over(x)))) == 96


def test_an_operation_of_another_shape_needs_its_own_place() -> None:
    x = Tensor(64, (2, 8))
    assert buffer_of(Tensor(64, (4, 4), (x,), in_place=True)) == 128


def test_an_operand_with_another_use_is_not_overwritten() -> None:
    """The last use may: x 0-64 and y 64-128, then the sum over x."""
    x = result(64)
    y = over(x)
    assert buffer_of(over(x, y)) == 128


def test_a_sum_takes_the_second_operand_where_the_first_is_still_needed() -> None:
    """x 0-64, y 64-128, their sum over y; the end over the sum."""
    x, y = result(64), result(64)
    total = over(x, y)
    assert buffer_of(over(total, x)) == 128


def test_an_operand_with_a_view_is_not_overwritten() -> None:
    x = result(64)
    shown = view(x)
    graph = Graph()
    graph.add(shown)
    y = graph.add(over(x))
    graph.add(result(32, shown, y))
    assert graph.buffer_bytes() == 64 + 64 + 32


def test_inputs_are_overwritten_like_anything_else() -> None:
    x = Tensor(64, "row", is_input=True)
    assert buffer_of(Tensor(64, "row", (x,), in_place=True)) == 64


def test_outputs_are_never_overwritten_and_never_freed() -> None:
    """x 0-64 is kept, so y takes 64-128 and z 128-192; without that 64 would do for all."""
    x = result(64)
    x.is_output = True
    y = over(x)
    assert buffer_of(result(64, y)) == 192
    x.is_output = False
    assert buffer_of(over(over(x))) == 64


# ------------------------------------------------------------------------------ views


def test_a_view_takes_nothing_and_keeps_its_owner() -> None:
    """x 0-64 lives through its view until z: y 64-128, z 128-192."""
    x = result(64)
    shown = view(x)
    y = result(64, x)
    assert buffer_of(shown, y, result(64, shown, y)) == 192


def test_the_last_use_of_a_view_frees_its_owner() -> None:
    """x 0-64, y 64-128 from a view of x; z takes the place of x."""
    y = result(64, view(result(64)))
    assert buffer_of(result(64, y)) == 128


def test_a_view_of_a_view_has_the_same_owner() -> None:
    x = result(64)
    again = view(view(x))
    assert again.view_of is x
    assert buffer_of(result(64, result(64, again))) == 128


# ------------------------------------------------------------------------------ gaps


def test_the_best_fitting_gap_is_taken() -> None:
    """Inputs 0-128, 128-160, 160-224, 224-256; then 0-128 and 160-224 are free.

    64 bytes go to 160-224, so 128 still fit at 0, and `small` at 256-288 is the end. In the first
    gap that fits, the 64 would break up the larger one: 288 + 128.
    """
    large, kept, middle, other = inputs = [leaf(128), leaf(32), leaf(64), leaf(32)]
    small = result(32, large, middle)
    exact = result(64, small)
    whole = result(128, small)
    end = result(0, kept, other, exact, whole)
    assert buffer_of(*inputs, small, exact, whole, end) == 288


def test_of_equal_gaps_the_later_one_is_taken() -> None:
    """Inputs 0-64, 64-96, 96-128, 128-192, 192-224; 64 bytes find 0-64 and 128-192 free.

    They take the later, so that 96 fit into 0-96 once the second input is freed; in the earlier
    one they would leave 64-96, and 96 went behind everything: 320.
    """
    first, beside, fence, second, last = inputs = [leaf(size) for size in (64, 32, 32, 64, 32)]
    steps = [result(0, first, second), held := result(64), result(0, beside), wide := result(96)]
    assert buffer_of(*inputs, *steps, result(0, held, wide, fence, last)) == 224


def test_neighbouring_gaps_are_joined() -> None:
    """Three inputs of 32 are freed in any order, and 96 fit into their place."""
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        inputs = [leaf(32), leaf(32), leaf(32)]
        last = leaf(32)
        freed = [result(0, inputs[i]) for i in order]
        wide = result(96, *freed)
        assert buffer_of(*inputs, last, *freed, wide, result(0, wide, last)) == 128


# ------------------------------------------------------------------------------ property


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.sets(st.integers(1, 6), max_size=3)), max_size=25))
def test_a_buffer_holds_what_lives_at_once_and_no_more_than_everything(
    nodes: list[tuple[int, set[int]]],
) -> None:
    """Nodes of a size in blocks of 32, each from some of the six nodes before it."""
    tensors: list[Tensor] = []
    last_use: dict[int, int] = {}
    for at, (blocks, back) in enumerate(nodes):
        sources = [at - step for step in sorted(back) if at >= step]
        last_use |= dict.fromkeys(sources, at)
        tensors.append(result(32 * blocks, *(tensors[source] for source in sources)))
    alive = [
        sum(32 * nodes[i][0] for i in range(at + 1) if last_use.get(i, len(nodes)) >= at)
        for at in range(len(nodes))
    ]
    everything = sum(32 * blocks for blocks, _ in nodes)
    assert max(alive, default=0) <= buffer_of(*tensors) <= everything


def at(place: int, tensor: Tensor) -> Tensor:
    tensor.place = place
    return tensor


def buffers_of(num_places: int, *tensors: Tensor) -> list[int]:
    graph = Graph()
    for tensor in tensors:
        graph.add(tensor)
    return graph.buffer_sizes(num_places)


def test_a_device_gets_a_copy_of_what_it_needs() -> None:
    """Host: a. Device: the copy of a, b beside it, then c in the place of the copy."""
    a = at(0, result(64))
    b = at(1, result(32, a))
    assert buffers_of(2, at(1, result(32, b))) == [64, 96]


def test_what_lies_between_is_drawn_to_a_device() -> None:
    """b has no weights: it is evaluated where the next or the last one with some is."""
    a = at(0, result(64))
    b = over(a)
    assert buffers_of(2, at(1, result(96, b))) == [64, 160]
    a = at(1, result(64))
    b = over(a)
    assert buffers_of(2, at(0, result(96, b))) == [160, 64], "the host copies what b became"


def test_a_copy_is_made_once_a_device() -> None:
    """The input of two steps on one device, and of one on another."""
    mask = leaf(128)
    a = at(1, result(32, mask))
    b = at(1, result(32, a, mask))
    c = at(2, result(32, b, mask))
    assert buffers_of(3, c) == [128, 192, 192]


def test_one_place_is_what_it_was() -> None:
    """Places that are named change nothing where there is only the host."""
    a = at(0, result(64))
    assert buffers_of(1, at(0, result(64, over(a)))) == [128]
