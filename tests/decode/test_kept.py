"""Prefixes that are kept on disk: who comes after a restart reads what is new, and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
from decoding_cases import END
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping_cases import Keeping, keeping_engine
from random_gguf import finish
from waiting import until

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.decode import kept
from edgespec.decode.engine import Engine
from edgespec.decode.kept import PrefixKeeper
from edgespec.decode.session import Session
from edgespec.errors import EdgespecWarning
from edgespec.memory.bytes.config import PIECE_TOKENS
from edgespec.memory.store.cells import PrefixStore, ends_of
from edgespec.models.chat import ChatMessage
from edgespec.models.embedded import embedded_model

LONG = "words and words " * 60


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(kept, "_QUIET_S", 0.01)
    return tmp_path / "prefixes"


def num_read(engine: Engine, prompt: str, **options: object) -> int:
    """Tokens of a prompt that an engine reads."""
    counters = engine.generate(prompt, reuse=True, **options).counters  # type: ignore[arg-type]
    return counters.prompt_tokens - counters.reused_tokens


def respelled(engine: Engine, ids: list[int], salt: str = "") -> list[int]:
    """The ids of a text that is tokenized so, with those of what is kept."""
    assert engine._kept is not None
    return engine._kept.encode("", lambda _: ids, salt)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.cells"))


@pytest.mark.parametrize("splits", [True, False])
def test_a_conversation_goes_on_after_a_restart(
    _folder: Path, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written at the end alone: what comes behind an earlier writing may be too short to keep."""
    monkeypatch.setattr(kept, "_QUIET_S", 60.0)

    def talk(engine: Engine, *said: str, messages: list[ChatMessage] | None = None) -> Session:
        session = Session(engine, system=None if messages else LONG, messages=messages or ())
        for one in said:
            session.send(one)
        return session

    with keeping_engine() as never_stopped:
        expected = talk(never_stopped, "one", "two", "three").messages
    for one in files(_folder):
        one.unlink()
    with keeping_engine(splits=splits) as engine:
        first = talk(engine, "one", "two")
    assert len(files(_folder)) == 1 or splits
    assert all(one.stat().st_mode & 0o777 == 0o600 for one in files(_folder))
    with keeping_engine(splits=splits) as engine:
        again = talk(engine, "three", messages=first.messages)
        assert again.messages == expected
        backend = engine.backend
        assert isinstance(backend, Keeping)
        assert backend.prefilled == len("\n<u>three\n<a>")


def test_the_text_used_last_is_there_before_anybody_asks(_folder: Path) -> None:
    with keeping_engine(users=2) as engine:
        engine.generate("another text " * 60)
        engine.generate(LONG)
    with keeping_engine() as engine:
        until(lambda: bytes(engine.backend.tokens[3:][: len(LONG)]) == LONG.encode())
        assert num_read(engine, LONG) == 1


def test_a_text_with_a_salt_is_put_back_for_its_owner_alone(_folder: Path) -> None:
    with keeping_engine() as engine:
        engine.generate(LONG, cache_salt="a")
    with keeping_engine() as engine:
        assert engine._kept is not None
        engine._kept._resume()
        assert not engine.backend.tokens


def test_who_asks_while_a_text_is_put_back_waits_for_one_piece(
    _folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there by then is not loaded again."""
    with keeping_engine() as engine:
        engine.generate(LONG * 3)
    load, asked, starts = Keeping.load_cache, threading.Event(), list[int]()

    def slow(self: Keeping, path: str, *cells: Any) -> None:
        starts.append(cells[2])
        assert asked.wait(10)
        load(self, path, *cells)

    monkeypatch.setattr(Keeping, "load_cache", slow)
    with keeping_engine(users=2) as engine:
        until(lambda: starts == [0])
        thread = threading.Thread(target=lambda: engine.generate("another", max_tokens=4))
        thread.start()
        until(lambda: not engine.scheduler.is_idle and bool(engine.scheduler._waiting))
        asked.set()
        thread.join(10)
        assert not thread.is_alive() and starts == [0]
        assert num_read(engine, LONG * 3) == 1
    assert starts == list(range(0, len(LONG) * 3, PIECE_TOKENS))


def test_it_is_written_while_the_server_lives_and_nobody_is_answered(_folder: Path) -> None:
    """A process that is killed has left it."""
    engine = keeping_engine(users=2)
    engine.generate(LONG)
    until(lambda: len(files(_folder)) >= 2)  # the answer is a third one
    with keeping_engine() as other:
        assert num_read(other, LONG) == 1
    engine.close()


def test_who_is_answered_does_not_wait_for_what_is_written(
    _folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece is all that is waited for; the rest is written when it is quiet again."""
    saving, go_on = threading.Event(), threading.Event()
    save = Keeping.save_cache

    def slow(self: Keeping, path: str, start: int = 0, end: int | None = None) -> int:
        saving.set()
        assert go_on.wait(10)
        return save(self, path, start, end)

    monkeypatch.setattr(Keeping, "save_cache", slow)
    with keeping_engine(users=2) as engine:
        engine.generate(LONG * 3)
        assert saving.wait(10)
        stream = engine.stream("another", max_tokens=10)
        thread = threading.Thread(target=lambda: list(stream))
        thread.start()
        go_on.set()
        thread.join(10)
        assert not thread.is_alive()
        until(lambda: sum(one.stat().st_size for one in files(_folder)) > len(LONG * 3))


def test_texts_of_others_are_not_found(_folder: Path) -> None:
    with keeping_engine() as engine:
        engine.generate(LONG, cache_salt="a")
    with keeping_engine() as engine:
        size = len(engine.encode(LONG))
        assert num_read(engine, LONG) == size
        assert num_read(engine, LONG, cache_salt="b") == size
        assert respelled(engine, [*LONG.encode(), END], "b") == [*LONG.encode(), END]
        assert num_read(engine, LONG, cache_salt="a") == 1
    with keeping_engine(key="another model") as engine:
        assert num_read(engine, LONG, cache_salt="a") == size
    names = b"".join(one.read_bytes() for one in files(_folder))
    assert b'"a"' not in names  # the owner's name does not tell the salt


def test_the_same_text_in_other_tokens_is_found(_folder: Path) -> None:
    """Two tokens stand for the same letters here, as a model may spell an answer in its own way."""
    with keeping_engine() as engine:
        kept_ids = engine.encode([*LONG.encode(), *b"<u>", END, *b"abc", END, *b"more"])
        engine.generate(kept_ids)

    def token_bytes(_self: object, token: int) -> bytes:
        return b"b" if token == ord("x") else bytes([token]) if token < END else b""

    with keeping_engine() as engine:
        tokenizer = type(engine.backend.tokenizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "token_bytes", token_bytes)
            engine._kept._bytes_of = engine.backend.tokenizer.token_bytes  # type: ignore[union-attr]
            other = [ord("x") if one == ord("b") else one for one in kept_ids]
            assert other != kept_ids and respelled(engine, [*other, END]) == [*kept_ids, END]
            assert respelled(engine, other[:-1]) == kept_ids[:-1]


def test_what_is_damaged_is_read_from_the_prompt_instead(_folder: Path) -> None:
    with keeping_engine() as engine:
        engine.generate(LONG)
    for one in files(_folder):
        data = one.read_bytes()
        one.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with keeping_engine() as engine:
        assert num_read(engine, LONG) == len(engine.encode(LONG))
        assert not files(_folder)


def test_a_full_disk_is_told_once_and_answers_go_on(
    _folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Keeping, path: str, start: int = 0, end: int | None = None) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Keeping, "save_cache", full)
    with pytest.warns(EdgespecWarning, match="no more prefixes are kept on disk: No space left"):
        with keeping_engine() as engine:
            assert engine.generate(LONG).text
    assert not files(_folder)


def test_short_texts_are_not_kept(_folder: Path) -> None:
    with keeping_engine() as engine:
        engine.generate("short")
    assert not files(_folder)


TURN, CLOSED = "<|im_start|>", "<|im_end|>"
WORDS = st.text("ab <|>\n\t🎉é漢и", max_size=12)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "", " "]), WORDS), min_size=1, max_size=5)


def write_pieces(path: Path, *, adds_space: bool) -> Path:
    """A file with a vocabulary as SentencePiece makes it."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 64)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    words = ("▁", "a", "b", "▁a", "ab", "▁ab", "▁▁", "ba", "us", "er", "user")
    tokens += [(one, kinds.NORMAL) for one in words]
    tokens += [(TURN, kinds.CONTROL), (CLOSED, kinds.CONTROL)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([name for name, _ in tokens])
    writer.add_token_scores([float(-place) for place in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(adds_space)
    finish(writer)
    return path


@pytest.mark.model
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["words", "pieces", "pieces behind a space"])
def test_a_text_that_is_kept_is_not_tokenized_again(kind: str, tmp_path: Path) -> None:
    """Its ids are those of all of the text at once, whatever is in it, and what comes behind it."""
    path = embedded_model()
    if kind != "words":
        path = write_pieces(tmp_path / "pieces.gguf", adds_space=kind.endswith("space"))
    with open_tokenizer(path) as tokenizer:

        @settings(max_examples=60, deadline=None)
        @given(TURNS, TURNS, st.booleans(), st.booleans())
        def check(kept: Any, more: Any, is_open: bool, has_first: bool) -> None:
            store = PrefixStore("key", "a model", 1 << 20)
            known = tokenizer.bos_text * has_first
            known += "".join(f"{TURN}{role}\n{words}{CLOSED}\n" for role, words in kept)
            known = known.removesuffix(f"{CLOSED}\n") if is_open else known
            ids = tokenizer.encode(known)
            ends = ends_of(ids, tokenizer.token_bytes, is_open=True)
            piece = store.add(None, 0, ids, "", lambda _: 0, ends=ends)
            text = f"{known}{CLOSED if is_open else ''}"
            text += "".join(f"{TURN}{role}\n{words}{CLOSED}" for role, words in more)
            asked: Any = None
            keeper, seen = PrefixKeeper(store, asked, asked, tokenizer), list[str]()

            def encode(part: str, **how: bool) -> list[int]:
                seen.append(part)
                return tokenizer.encode(part, **how)

            try:
                assert keeper.encode(text, encode, "") == tokenizer.encode(text)
                if not known.startswith(2 * TURN):  # of which a tokenizer may leave one out
                    if kind != "pieces behind a space":  # which is in no text
                        assert seen == [text[len(known) :]]
            finally:
                store.remove(piece)

        check()
