"""Streams: their chunks, their results, and how they end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
from decoding_cases import END, VOCAB, Gate, echo_model, engine_of, writes
from fake_backend import FakeBackend
from waiting import PATIENCE_S, in_thread, join

from edgespec.backends.base import Logits
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Chunk, Stream
from edgespec.sampling.params import SamplingParams
from edgespec.testing import ByteTokenizer

TEXTS = {
    "ascii": "The quick brown fox jumps over the lazy dog.",
    "two bytes": "héllo wörld, ça va été",
    "three bytes": "日本語のテキスト",
    "four bytes": "a😀b😀😀c",
    "combined": "e\u0301 👩\u200d👩\u200d👧 \u202eabc",
}


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_chunks_add_up_to_the_text_and_hold_whole_characters(text: str, num_nodes: int) -> None:
    """A token is one byte here, so characters lie across tokens, and tokens across rounds."""
    model = writes(text.encode())
    stream = engine_of(model, num_nodes).stream([0])
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == text == stream.result.text
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == [*text.encode(), END] == list(stream.result.token_ids)
    assert stream.result.finish_reason == "stop"
    if num_nodes:
        assert len(chunks[1].token_ids) == num_nodes + 1


def test_each_round_is_given_out_when_it_is_done() -> None:
    """One chunk for the prompt's last logits and one a round; text is shown as soon as it can."""
    stream = engine_of(writes(b"abcdefgh"), 3).stream([0])
    assert list(stream) == [
        Chunk("a", (97,)),
        Chunk("bcde", (98, 99, 100, 101)),
        Chunk("fgh", (102, 103, 104, END)),
    ]


def test_a_chunk_is_given_out_before_the_next_step_is_run() -> None:
    engine = engine_of(writes(b"abc"))
    assert isinstance(engine.backend, FakeBackend)
    steps = [(chunk.text, len(engine.backend.steps)) for chunk in engine.stream([0])]
    assert steps == [("a", 0), ("b", 1), ("c", 2), ("", 3)]


def test_text_that_may_begin_a_stop_string_is_held_back_and_given_out_at_the_end() -> None:
    stream = engine_of(writes(b"one <sto")).stream([0], stop=["<stop>"])
    texts = [chunk.text for chunk in stream]
    assert texts == ["o", "n", "e", " ", "", "", "", "", "", "<sto"]
    assert stream.result.text == "one <sto"


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 5, 20])
def test_a_stop_string_across_tokens_and_rounds(num_nodes: int) -> None:
    """What follows it in the same round is not part of the answer, nor are its tokens."""
    stream = engine_of(writes("käse STOP käse".encode()), num_nodes).stream([0], stop=["STOP"])
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == "käse " == stream.result.text
    assert bytes(stream.result.token_ids) == "käse STOP".encode()
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == stream.result.token_ids
    assert stream.result.finish_reason == "stop"
    assert stream.result.stop_string == "STOP"


def test_a_result_may_be_read_at_any_time() -> None:
    stream = engine_of(writes(b"abcdef")).stream([0])
    assert (stream.result.text, stream.result.token_ids) == ("", ())
    seen = []
    for _ in stream:
        result = stream.result
        seen.append((result.text, result.finish_reason))
    assert seen[:2] == [("a", "cancelled"), ("ab", "cancelled")]
    assert (stream.result.text, stream.result.finish_reason) == ("abcdef", "stop")


def test_a_stream_is_over_when_it_is_over() -> None:
    stream = engine_of(writes(b"abc")).stream([0])
    assert "".join(chunk.text for chunk in stream) == "abc"
    assert list(stream) == []
    assert stream.result.text == "abc"


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_a_stream_that_nobody_holds_leaves_the_engine_usable(num_nodes: int) -> None:
    engine = engine_of(writes(b"abcdefghijkl"), num_nodes)
    for count in (1, 2, 3):
        for _ in itertools.islice(engine.stream([0]), count):
            pass
        for _ in engine.stream([0]):
            break
        assert engine.generate([0]).text == "abcdefghijkl"
    engine.stream([0])  # never iterated
    assert engine.generate([0]).text == "abcdefghijkl"


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_an_iterator_that_is_dropped_does_not_end_its_stream(num_nodes: int) -> None:
    """As in `next(iter(stream))`: the next iteration goes on there, and `close` ends it."""
    engine = engine_of(writes(b"abcdefghijkl"), num_nodes)
    with engine.stream([0]) as stream:
        assert next(iter(stream)).text == "a"
        assert engine.generate([0]).text == "abcdefghijkl"  # behind what is written by then
        for chunk in stream:
            assert chunk.text.startswith("b")
            break
        assert stream.result.finish_reason == "cancelled"
        assert "".join(chunk.text for chunk in stream).endswith("l")
        assert (stream.result.text, stream.result.finish_reason) == ("abcdefghijkl", "stop")
    with engine.stream([0]) as stream:
        next(iter(stream))
    assert engine.generate([0]).text == "abcdefghijkl"
    assert list(stream) == []
    assert stream.result.text == "a"


# ------------------------------------------------------------------------------ endings


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 9])
def test_finish_reasons(num_nodes: int) -> None:
    """The end token wins over a limit that is reached with it."""
    engine = engine_of(writes(b"abcdef"), num_nodes, context_size=8)
    assert engine.generate([0]).finish_reason == "stop"
    assert engine.generate([0], max_tokens=7).finish_reason == "stop"
    assert engine.generate([0], max_tokens=6).finish_reason == "length"
    assert engine.generate([0], max_tokens=1).finish_reason == "length"
    assert engine.generate([0], stop=["cd"]).finish_reason == "stop"
    assert engine.generate([0], stop=["ef"], max_tokens=6).finish_reason == "stop"
    small = engine_of(writes(b"abcdef"), num_nodes, context_size=5)
    assert small.generate([0]).finish_reason == "context_full"
    assert small.generate([0], max_tokens=4).finish_reason == "length"
    cancel = threading.Event()
    cancel.set()
    assert engine.generate([0], cancel=cancel).finish_reason == "cancelled"


def test_the_end_token_may_come_first() -> None:
    result = engine_of(writes(b""), 3).generate([0])
    assert (result.text, result.token_ids, result.finish_reason) == ("", (END,), "stop")
    assert result.counters.rounds == 0


def test_a_generation_that_was_cancelled_before_it_began_computes_nothing() -> None:
    engine = engine_of(writes(b"abc"), 3)
    cancel = threading.Event()
    cancel.set()
    result = engine.generate([0] * 100, cancel=cancel)
    assert (result.text, result.token_ids) == ("", ())
    assert engine.backend.length == 0 and not engine.scheduler._waiting


def test_cancelling_stops_between_the_batches_of_a_prompt() -> None:
    """A prompt of 30 tokens in batches of 8, cancelled while the second one is computed."""
    cancel = threading.Event()
    batches = itertools.count(1)

    class Slow(FakeBackend):
        def prefill(self, tokens: Sequence[int]) -> Logits:
            if next(batches) == 2:
                cancel.set()
            return super().prefill(tokens)

    backend = Slow(writes(b"abc", 30), VOCAB, batch_size=8)
    result = Engine(backend).generate([0] * 30, cancel=cancel)
    assert (result.finish_reason, backend.length) == ("cancelled", 16)


def test_cancelling_from_another_thread_keeps_what_was_generated() -> None:
    """The step under way (the fourth) is finished, and no other one is begun."""
    gate = Gate(writes(b"abcdefgh"), length=5)
    engine = engine_of(gate)
    cancel = threading.Event()
    thread, results = in_thread(lambda: engine.generate([0], cancel=cancel))
    assert gate.reached.wait(PATIENCE_S)
    cancel.set()
    gate.opened.set()
    join(thread)
    assert (results[0].text, results[0].finish_reason) == ("abcde", "cancelled")
    assert engine.generate([0]).text == "abcdefgh"


def test_a_result_can_be_read_when_the_engine_is_closed() -> None:
    class Strict(ByteTokenizer):
        def is_end(self, token: int) -> bool:
            assert not backend.closed
            return super().is_end(token)

    backend = FakeBackend(writes(b"abc"), VOCAB)
    backend.tokenizer = Strict(VOCAB, END)
    engine = Engine(backend)
    part, whole = engine.stream([0]), engine.stream([0])
    list(whole)
    next(iter(part))
    engine.close()
    assert (part.result.text, part.result.finish_reason) == ("a", "cancelled")
    assert (whole.result.text, whole.result.finish_reason) == ("abc", "stop")


def test_closing_a_stream_leaves_its_users_event_alone() -> None:
    """It may be that of other streams, too."""
    gate, cancel = Gate(echo_model, length=7), threading.Event()
    engine = engine_of(gate)
    stream = engine.stream("abcd", max_tokens=9, cancel=cancel)
    running, _ = in_thread(lambda: list(stream))
    assert gate.reached.wait(PATIENCE_S)
    stream.close()
    gate.opened.set()
    join(running)
    assert (stream.result.text, stream.result.finish_reason) == ("bcdb", "cancelled")
    assert not cancel.is_set()
    assert engine.generate("abcd", max_tokens=9, cancel=cancel).text == "bcdbcdbcd"


def test_streams_know_their_seed() -> None:
    engine = engine_of(echo_model)
    stream = engine.stream("abc", sampling=SamplingParams(temperature=1.0, seed=12))
    assert isinstance(stream, Stream)
    assert stream.seed == 12


def test_chunks_say_what_came_from_drafts() -> None:
    chunks = list(engine_of(writes(b"abcdefgh"), 3).stream([0]))
    assert [(c.num_drafted, c.text[: c.drafted_chars]) for c in chunks] == [
        (0, ""),
        (3, "bcd"),
        (3, "fgh"),
    ]
