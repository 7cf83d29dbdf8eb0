"""What a profile measures of a backend: which steps at which depths, and that nothing is left."""

from __future__ import annotations

from edgespec.backends.fake import FakeBackend
from edgespec.bench import profiling


def backend_of(**options: int) -> FakeBackend:
    return FakeBackend(lambda _: [0.0] * 64, 64, **options)  # type: ignore[arg-type]


def test_steps_are_measured_as_large_and_as_deep_as_there_is_room() -> None:
    """Four of each size, the first of which builds its graph; 2048 tokens do not fit."""
    backend = backend_of(max_nodes=6, context_size=600)
    found = profiling._measure_steps(backend, lambda _what, _part: None)
    assert [one["depth"] for one in found] == [0, 512]
    assert all(list(one["ms"]) == ["1", "2", "3", "4", "5", "6"] for one in found)
    assert backend.steps == [size for _ in found for size in range(1, 7) for _ in range(4)]
    assert sum(backend.reads) == 512 and max(backend.reads) <= backend.batch_size
    assert backend.length == 0


def test_a_prompt_of_four_batches_is_read_or_what_fits() -> None:
    for size, tokens in ((4096, 256), (100, 100)):
        backend = backend_of(context_size=size)
        found = profiling._measure_prefill(backend, lambda _what, _part: None)
        assert found["tokens"] == sum(backend.reads) == tokens
        assert backend.length == 0
