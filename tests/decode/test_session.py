"""Sessions: what is kept of a conversation in memory and in the cache."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from decoding_cases import END, ONE_HOT, VOCAB
from fake_backend import FakeBackend
from session_cases import Counting, backend_of, engine_of, shouting

from edgespec.decode.engine import Engine
from edgespec.decode.session import Session
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import BackendError, ContextFullError, UnsupportedError
from edgespec.testing import ByteTokenizer

# ------------------------------------------------------------------------------ turns


def test_a_turn_prefills_only_what_is_new() -> None:
    session = Session(engine_of())
    assert session.send("hello there").text == "HELLO THERE"
    assert backend_of(session).prefilled == len("<u>hello there\n<a>")
    backend_of(session).prefilled = 0
    result = session.send("and now?")
    assert result.text == "AND NOW?"
    assert backend_of(session).prefilled == len("\n<u>and now?\n<a>")
    counters = result.counters
    assert counters.prompt_tokens - counters.reused_tokens == backend_of(session).prefilled
    assert session.messages == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "HELLO THERE"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "AND NOW?"},
    ]


@pytest.mark.parametrize("speculate", [True, False])
def test_every_turn_is_what_it_is_from_scratch(speculate: bool) -> None:
    """Also after editing, trying again, clearing, and another use of the engine between turns."""
    engine, other = engine_of(), engine_of()
    session = Session(engine, system="be loud")
    for step in "one, two two two, /retry, three, /undo, /other, four, /clear, five".split(", "):
        if step == "/undo":
            assert session.undo() == "three"
        elif step == "/clear":
            session.clear()
        elif step == "/other":
            engine.generate("something else", raw=True, max_tokens=3)
        else:
            turn = (
                session.retry(speculate=speculate)
                if step == "/retry"
                else session.stream(step, speculate=speculate)
            )
            list(turn)
            fresh = other.generate(list(turn.prompt_ids), speculate=False)
            assert turn.result.token_ids == fresh.token_ids
    assert [m["content"] for m in session.messages] == ["be loud", "five", "FIVE"]


def test_trying_again_reuses_the_whole_prompt() -> None:
    session = Session(engine_of())
    session.send("hello")
    backend_of(session).prefilled = 0
    list(session.retry())
    assert backend_of(session).prefilled == 1  # logits cost one token
    assert [m["content"] for m in session.messages] == ["hello", "HELLO"]


def test_a_backend_that_cannot_go_back_prefills_again() -> None:
    session = Session(engine_of(rollback=False))
    session.send("hello")
    assert session.send("again").text == "AGAIN"
    list(session.retry())
    assert [m["content"] for m in session.messages] == ["hello", "HELLO", "again", "AGAIN"]


class Pairs(ByteTokenizer):
    """Knows "LL" as token 200; models may still write it as two tokens."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode().replace(b"LL", b"\xc8").replace(b"\n", b"\xc9"))

    def token_bytes(self, token: int) -> bytes:
        known = {200: b"LL", 201: b""}  # the line's end is a control token here
        return known[token] if token in known else super().token_bytes(token)


def test_ids_that_the_model_wrote_are_kept_where_its_text_would_be_cut_otherwise() -> None:
    def model(context: tuple[int, ...]) -> Sequence[float]:
        text = bytes(context).replace(b"\xc8", b"LL").replace(b"\xc9", b"\n")
        return shouting(tuple(text))

    engine = engine_of(model)
    assert isinstance(engine.backend, Counting)
    engine.backend.tokenizer = Pairs(VOCAB, END)
    session = Session(engine)
    first = session.send("hello all")
    assert first.token_ids == (*b"HELLO ALL", END)
    turn = session.stream("more")
    list(turn)
    assert turn.prompt_ids[: len("<u>hello all.<a>HELLO ALL")] == (
        *b"<u>hello all\xc9<a>HELLO ALL",
    )
    assert turn.result.counters.reused_tokens == len("<u>hello all.<a>HELLO ALL")


def test_ids_and_text_stay_together_where_a_turn_is_encoded_anew() -> None:
    """The second answer ends within a token's text, so the third prompt is cut as one text."""

    def spelled(ids: Sequence[int]) -> bytes:
        return bytes(ids).replace(b"\xc8", b"LL").replace(b"\xc9", b"\n")

    engine = engine_of(lambda context: shouting(tuple(spelled(context))))
    assert isinstance(engine.backend, Counting)
    engine.backend.tokenizer = Pairs(VOCAB, END)
    session = Session(engine)
    session.send("hello all")  # whose answer has LL as two tokens
    session.stop = ("OR",)
    assert session.send("more").text == "M"
    session.stop = ()
    assert session.send("again").text == "AGAIN"
    assert spelled(session._known.ids).decode() == session._known.text
    turn = session.stream("and on")
    list(turn)
    assert spelled(turn.prompt_ids).decode() == turn.prompt.text


def test_drafts_come_from_earlier_turns() -> None:
    """Nothing is read twice, but for the ends of the two answers before."""
    session = Session(engine_of())
    drafter = session.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    session.send("the quick brown fox")
    session.send("the quick brown fox")
    turn = session.stream("the quick brown fox")
    list(turn)
    assert turn.result.counters.acceptance_length > 4
    own = sum(len(text.tokens) - text.first for text in drafter.texts.texts())
    assert own - len(turn.prompt_ids) - len(turn.result.token_ids) in (0, 1, 2)


# ------------------------------------------------------------------------------ interruptions


def test_a_cancelled_answer_is_kept_as_far_as_it_came() -> None:
    session = Session(engine_of())
    cancel = threading.Event()
    turn = session.stream("hello", cancel=cancel, speculate=False)
    for number, _ in enumerate(turn):
        if number == 1:
            cancel.set()
    assert turn.result.finish_reason == "cancelled"
    assert session.messages[-1] == {"role": "assistant", "content": "HE"}
    assert session.send("and").text == "AND"


def test_a_turn_that_was_left_early_is_kept_too_and_one_never_read_is_not() -> None:
    session = Session(engine_of())
    turn = session.stream("hello", speculate=False)
    assert [chunk.text for chunk in itertools.islice(turn, 2)] == ["H", "E"]
    assert session.messages[-1]["content"] == "HE"
    session.stream("never")
    assert len(session.messages) == 2


def test_a_turn_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(engine_of())
    session.send("hello")
    before = session.messages

    def fail(*_: object) -> None:
        raise BackendError("llama_decode failed with -3")

    with monkeypatch.context() as patched:
        patched.setattr(session.engine.backend, "verify", fail)
        with pytest.raises(BackendError):
            session.send("more")
    assert session.messages == before
    assert session.send("more").text == "MORE"


def test_a_turn_made_before_another_one_is_refused() -> None:
    session = Session(engine_of())
    old = session.stream("old")
    session.send("new")
    with pytest.raises(UnsupportedError, match="went on"):
        list(old)


def test_what_is_refused() -> None:
    session = Session(engine_of())
    with pytest.raises(UnsupportedError, match="nothing to take back"):
        session.undo()
    with pytest.raises(UnsupportedError, match="must be text"):
        session.send([{"type": "input_video", "input_video": "x"}])
    with pytest.raises(UnsupportedError, match="a sound needs its bytes"):
        session.send([{"type": "input_audio", "input_audio": "x"}])
    with pytest.raises(UnsupportedError, match="not fetched from addresses"):
        session.send([{"type": "image_url", "image_url": "x"}])
    assert session.send([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).text == "AB"
    with pytest.raises(UnsupportedError, match="no chat format"):
        Session(Engine(FakeBackend(shouting, VOCAB)))


# ------------------------------------------------------------------------------ full contexts


def test_the_oldest_turns_are_hidden_when_the_context_is_full() -> None:
    session = Session(engine_of(context_size=200), system="loud", max_tokens=30)
    dropped = []
    for number in range(60):
        turn = session.stream(f"message {number}")
        list(turn)
        assert turn.result.text == f"MESSAGE {number}"
        assert turn.result.finish_reason == "stop"
        assert bytes(turn.prompt_ids).startswith(b"<s>loud\n<u>message ")
        dropped.append(turn.dropped_turns)
    assert sum(map(bool, dropped)) < 20  # a good share at once
    assert sum(dropped) == session.hidden_turns
    assert len(session.messages) == 121


def test_a_turn_is_refused_without_shifting() -> None:
    session = Session(engine_of(context_size=100), max_tokens=40, shift=False)
    session.send("a" * 30)
    with pytest.raises(ContextFullError, match="of 100 tokens"):
        session.send("b" * 30)
    assert len(session.messages) == 2


def test_a_message_that_can_never_fit_is_refused_and_nothing_is_lost() -> None:
    session = Session(engine_of(context_size=100))
    session.send("hello")
    with pytest.raises(ContextFullError):
        session.send("x" * 200)
    assert len(session.messages) == 2 and session.hidden_turns == 0


# ------------------------------------------------------------------------------ asynchronous


def test_asynchronous_turns_leave_the_loop_free() -> None:
    release = threading.Event()

    def waiting(context: tuple[int, ...]) -> Sequence[float]:
        assert release.wait(30)
        return shouting(context)

    async def main() -> tuple[str, str]:
        session = Session(engine_of(waiting))
        task = asyncio.ensure_future(session.asend("hello"))
        await asyncio.sleep(0.01)  # the loop runs while the model waits
        assert not task.done()
        release.set()
        first = (await task).text
        texts = [chunk.text async for chunk in session.astream("more")]
        return first, "".join(texts)

    assert asyncio.run(main()) == ("HELLO", "MORE")


def test_cancelling_a_task_frees_the_engine() -> None:
    async def main() -> None:
        engine = engine_of(lambda _context: ONE_HOT[97])
        seen = asyncio.Event()

        async def read() -> None:
            async for _ in engine.astream("x", max_tokens=10**6):
                seen.set()

        task = asyncio.ensure_future(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.agenerate("x", max_tokens=3)).text == "aaa"

    asyncio.run(main())


def test_tasks_take_turns_and_a_waiting_one_can_be_cancelled() -> None:
    async def main() -> None:
        engine = engine_of(lambda _context: ONE_HOT[97])
        holder = engine.astream("x", max_tokens=10**6)
        await holder.__anext__()
        waiting = asyncio.ensure_future(engine.agenerate("x", max_tokens=3))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await holder.aclose()
        assert (await engine.agenerate("x", max_tokens=3)).text == "aaa"

    asyncio.run(main())


def test_errors_reach_the_task() -> None:
    async def main() -> None:
        engine = engine_of(lambda _context: [float("nan")] * VOCAB)
        with pytest.raises(BackendError, match="nan"):
            await engine.agenerate("x")

    asyncio.run(main())


# ------------------------------------------------------------------------------ the real thing


@pytest.mark.model
def test_turns_of_a_real_model_are_exact_and_survive_a_file(
    exact_engine: Engine, tmp_path: Path
) -> None:
    engine = exact_engine
    session = Session(engine, max_tokens=24)
    turns = [session.stream(text) for text in ("Name three colours.",)]
    list(turns[0])
    turns.append(session.stream("Repeat them."))
    list(turns[1])
    session.save(tmp_path / "a.session")
    held = len(engine.backend.tokens)
    for turn in turns:
        fresh = engine.generate(list(turn.prompt_ids), max_tokens=24, speculate=False)
        assert turn.result.token_ids == fresh.token_ids
    assert turns[1].result.counters.reused_tokens > len(turns[0].prompt_ids)
    again = Session.load(engine, tmp_path / "a.session")
    assert len(engine.backend.tokens) == held
    third = again.stream("Thanks.")
    list(third)
    assert third.result.counters.reused_tokens >= held
    fresh = engine.generate(list(third.prompt_ids), max_tokens=24, speculate=False)
    assert third.result.token_ids == fresh.token_ids
