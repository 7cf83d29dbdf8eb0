"""The engine as its users see it: prompts, closing, errors, speculation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from decoding_cases import END, INF, ONE_HOT, VOCAB, Prophet, echo_model, engine_of, flat, writes
from fake_backend import FakeBackend
from frozen_times import Frozen

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import BackendError, ContextFullError, UnsupportedError
from edgespec.memory.times import CostCurve


def test_a_prompt_is_text_or_token_ids() -> None:
    engine = engine_of(echo_model)
    assert engine.generate("xabc", max_tokens=6).text == "abcabc"
    assert engine.generate(list(b"xabc"), max_tokens=6).text == "abcabc"
    assert engine.generate(tuple(b"xabc"), max_tokens=6).text == "abcabc"


def test_text_is_one_user_message_where_the_model_has_a_chat_format() -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ bos_token }}"
    backend = FakeBackend(echo_model, VOCAB)
    backend.tokenizer.bos_text, backend.tokenizer.eos_text = "<s>", "</s>"
    engine = Engine(backend, chat_template=template)
    assert engine.encode("hi") == list(b"[user:hi]<s>")
    assert engine.encode("hi", raw=True) == list(b"hi")
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}]
    assert engine.encode(messages) == list(b"[system:be][user:go]<s>")
    assert engine.generate("hi", max_tokens=3).text == "<s>"


def test_messages_need_a_chat_format() -> None:
    with pytest.raises(UnsupportedError, match="no chat template"):
        engine_of(echo_model).generate([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    engine = engine_of(echo_model)
    with pytest.raises(UnsupportedError, match="prompt is empty"):
        engine.generate(prompt)
    with pytest.raises(UnsupportedError, match="prompt is empty"):
        engine.generate(prompt, raw=True)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UnsupportedError, match=f"token id {token} "):
        engine_of(echo_model).generate([1, 2, token])


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_nothing_to_generate_is_refused(max_tokens: int) -> None:
    with pytest.raises(UnsupportedError, match=f"not {max_tokens}"):
        engine_of(echo_model).generate("abc", max_tokens=max_tokens)


def test_an_empty_stop_string_is_refused_and_the_engine_stays_usable() -> None:
    engine = engine_of(echo_model)
    with pytest.raises(UnsupportedError, match="stop string"):
        engine.generate("abc", stop=[""])
    assert engine.generate("abc", max_tokens=3).text == "abc"


@pytest.mark.parametrize("length", [20, 21, 500])
def test_a_prompt_that_fills_the_context_is_refused_before_any_step(length: int) -> None:
    class Untouched(FakeBackend):
        def prefill(self, tokens: Sequence[int]) -> Logits:
            raise AssertionError("the prompt was sent to the model")

        def truncate(self, length: int) -> int:
            raise AssertionError("the cache was touched")

    engine = Engine(Untouched(echo_model, VOCAB, context_size=20))
    with pytest.raises(ContextFullError, match=f"{length} tokens and the context 20") as caught:
        engine.generate([97] * length)
    assert caught.value.hint


@pytest.mark.parametrize("num_nodes", [0, 4])
@pytest.mark.parametrize("length", [17, 18, 19])
def test_a_prompt_that_nearly_fills_the_context_leaves_room_for_the_rest(
    length: int, num_nodes: int
) -> None:
    engine = engine_of(echo_model, num_nodes, context_size=20)
    result = engine.generate(list(b"abc" * 6 + b"a")[-length:])
    assert result.text == ("bca" * 2)[: 20 - length]
    assert result.finish_reason == "context_full"


# ------------------------------------------------------------------------------ closing


def test_closing_twice_is_closing_once() -> None:
    order: list[str] = []

    class Closing(FakeBackend):
        def close(self) -> None:
            order.append("backend")

    engine = Engine(Closing(echo_model, VOCAB), on_close=lambda: order.append("on_close"))
    engine.close()
    engine.close()
    assert order == ["on_close", "backend"]


@pytest.mark.parametrize("problem", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_while_closing_is_raised_and_the_model_freed(problem: BaseException) -> None:
    def fail() -> None:
        raise problem

    backend = FakeBackend(echo_model, VOCAB)
    engine = Engine(backend, on_close=fail)
    with pytest.raises(type(problem)) as caught:
        engine.close()
    assert caught.value is problem
    assert backend.closed
    engine.close()


def test_a_model_that_could_not_be_freed_is_freed_by_the_next_close() -> None:
    """As where a signal handler closes in the middle of a call; what was learned is kept once."""
    calls: list[str] = []

    class Busy(FakeBackend):
        def close(self) -> None:
            calls.append("free")
            if len(calls) == 2:
                raise UnsupportedError("busy")
            super().close()

    backend = Busy(echo_model, VOCAB)
    engine = Engine(backend, on_close=lambda: calls.append("keep"))
    with pytest.raises(UnsupportedError, match="busy"):
        engine.close()
    engine.close()
    engine.close()
    assert backend.closed
    assert calls == ["keep", "free", "free"]


def test_leaving_the_with_block_closes_also_after_an_error() -> None:
    engine = engine_of(echo_model)
    assert isinstance(engine.backend, FakeBackend)
    with pytest.raises(KeyError), engine as entered:
        assert entered is engine
        for _ in engine.stream("abc", max_tokens=9):
            raise KeyError
    assert engine.backend.closed


def test_a_closed_engine_says_so() -> None:
    engine = engine_of(echo_model)
    engine.close()
    with pytest.raises(UnsupportedError, match="closed"):
        engine.generate("abc")
    with pytest.raises(UnsupportedError, match="closed"):
        engine.stream("abc")


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("where", ["prefill", "verify", "commit"])
def test_an_error_of_the_library_leaves_the_engine_usable(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(writes(b"abcdefgh"), 2)

    def fail(*_: object) -> None:
        raise BackendError("llama_decode failed with -3")

    with monkeypatch.context() as patched:
        patched.setattr(engine.backend, where, fail)
        stream = engine.stream([0])
        with pytest.raises(BackendError, match="-3"):
            list(stream)
        assert stream.result.text == ("" if where == "prefill" else "a")
    assert engine.generate([0]).text == "abcdefgh"


def test_logits_that_are_no_numbers_are_an_error_and_not_a_token() -> None:
    def broken(context: tuple[int, ...]) -> Sequence[float]:
        return [float("nan")] * VOCAB if len(context) == 4 else ONE_HOT[97]

    stream = engine_of(broken).stream([0])
    with pytest.raises(BackendError, match="nan"):
        list(stream)
    assert stream.result.text == "aaa"


# ------------------------------------------------------------------------------ speculation


def test_speculation_can_be_left_out_and_the_drafter_does_not_notice() -> None:
    engine = engine_of(echo_model, 4)
    assert isinstance(engine.drafter, Prophet) and isinstance(engine.backend, FakeBackend)
    assert engine.generate("xabc", max_tokens=9, speculate=False).text == "abcabcabc"
    assert engine.drafter.calls == []
    assert engine.drafter.text == []
    assert engine.backend.steps == [1] * 8
    assert engine.generate("xabc", max_tokens=9).text == "abcabcabc"
    assert engine.drafter.calls == ["begin", "propose", "observe", "propose", "observe"]
    assert engine.drafter.text == list(b"xabcabcabcabc")


def test_the_drafter_hears_every_token_once_and_in_order() -> None:
    engine = engine_of(writes(b"abcdefgh"), 2)
    assert isinstance(engine.drafter, Prophet)
    for _ in range(2):
        engine.generate([0])
        assert engine.drafter.text == [0, *b"abcdefgh", END]


def test_the_drafter_is_told_how_likely_a_node_must_be_to_pay() -> None:
    """A step of two takes a fifth more than one of one: a node must be worth half of that."""
    drafter = Prophet(echo_model, 2)
    engine = Engine(
        FakeBackend(echo_model, VOCAB), curve=Frozen([INF, 10.0, 12.0, 15.0]), drafter=drafter
    )
    engine.generate("xabc", max_tokens=9)
    assert drafter.min_probability == pytest.approx(0.1)


def test_the_drafter_is_told_how_much_may_still_be_written() -> None:
    engine = engine_of(echo_model, 2)
    assert isinstance(engine.drafter, Prophet)
    engine.generate("xabc", max_tokens=9)
    assert engine.drafter.remaining == [8, 5, 2], "a token of the prompt's row, then three a round"


def test_without_rollback_there_is_no_drafter() -> None:
    backend = FakeBackend(echo_model, VOCAB, rollback=False)
    engine = Engine(backend, curve=flat(), drafter=SuffixDrafter())
    assert engine.drafter is None
    assert engine.generate("abcabc", max_tokens=6).text == "abcabc"


class Diary(CostCurve):
    """Keeps the steps it is shown."""

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        diary.append((num_nodes, depth, previous, ms))


diary: list[tuple[int, int, int, float]] = []


@pytest.fixture
def steps() -> Iterator[list[tuple[int, int, int, float]]]:
    diary.clear()
    yield diary
    diary.clear()


def test_the_curve_is_shown_every_step(steps: list[tuple[int, int, int, float]]) -> None:
    """Its size, the tokens in the cache, and the size before (0: there was none)."""
    backend = FakeBackend(echo_model, VOCAB)
    engine = Engine(backend, curve=Diary([INF, *[1.0] * 32]), drafter=Prophet(echo_model, 3))
    result = engine.generate("xabc", max_tokens=11)
    assert [step[:3] for step in steps] == [(4, 4, 0), (4, 8, 4), (2, 12, 4)]
    total_ms = sum(step[3] for step in steps)
    assert total_ms == pytest.approx(1e3 * result.counters.step_s)


def test_tokens_that_are_fed_again_are_part_of_a_step(
    steps: list[tuple[int, int, int, float]],
) -> None:
    """Two pending tokens: a step of four is two drafted nodes, and is timed as a step of five."""

    class Pending(FakeBackend):
        def verify(self, tree: DraftTree) -> Logits:
            self.pending = 0
            return super().verify(tree)

        def commit(self, path: Sequence[int]) -> None:
            super().commit(path)
            self.pending = 2

    backend = Pending(echo_model, VOCAB)
    # Only steps of five tokens are cheap; without pending tokens that means four drafted ones.
    curve = Diary([INF, 10.0, 20.0, 20.0, 20.0, 10.0, *[40.0] * 8])
    engine = Engine(backend, curve=curve, drafter=Prophet(echo_model, 6))
    engine.generate("xabc", max_tokens=20)
    assert backend.steps[:3] == [5, 3, 3]
    assert [step[0] for step in steps[:3]] == [5, 5, 5]


def test_a_prompt_may_start_from_what_the_cache_holds() -> None:
    engine = engine_of(echo_model, 2)
    engine.generate("abcabc", max_tokens=5)
    held = len(engine.backend.tokens)
    longer = [*engine.backend.tokens, 97]
    result = engine.generate(longer, max_tokens=5, reuse=True)
    assert result.counters.reused_tokens == held
    again = engine.generate(longer, max_tokens=5)
    assert (again.counters.reused_tokens, again.token_ids) == (0, result.token_ids)


class Slow(SuffixDrafter):
    """Takes its time to read a prompt."""

    begun = False

    def begin(self, tokens: Sequence[int]) -> None:
        self.begun = True
        super().begin(tokens)


def test_the_first_token_does_not_wait_for_the_drafter() -> None:
    drafter = Slow()
    backend = FakeBackend(writes(b"abcabcabcabc"), VOCAB, end=END)
    with Engine(backend, curve=flat(), drafter=drafter) as engine:
        chunks = iter(engine.stream([1], max_tokens=12))
        assert next(chunks).token_ids == (ord("a"),)
        assert not drafter.begun
        rest = [token for chunk in chunks for token in chunk.token_ids]
    assert bytes(rest) == b"bcabcabcabc"
    assert drafter.begun


def test_a_role_that_is_none_is_refused() -> None:
    """A mistyped one was answered as if nobody had spoken."""
    template = "{% for m in messages %}{% if m.role == 'ipython' %}!{% endif %}{{ m.content }}"
    engine = Engine(FakeBackend(echo_model, VOCAB), chat_template=template + "{% endfor %}")
    for role in ("system", "user", "assistant", "tool", "ipython"):
        assert engine.encode([{"role": role, "content": "go"}])
    with pytest.raises(UnsupportedError, match="there is no role 'userr'"):
        engine.generate([{"role": "userr", "content": "go"}])  # type: ignore[list-item]


def test_an_engine_shows_what_it_is() -> None:
    engine = engine_of(echo_model)
    assert repr(engine).startswith("<edgespec.Engine: ")
    engine.close()
    assert repr(engine).startswith("<edgespec.Engine closed: ")
