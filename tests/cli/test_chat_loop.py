"""A chat: Ctrl-C, its bottom line, and calls of tools that a person is asked about."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from decoding_cases import END
from serving_cases import CALL, TEMPLATE, Speaker, Tools

from edgespec.cli import chat_loop
from edgespec.cli.chat_loop import Chat, ending_of, stoppable
from edgespec.decode.engine import Engine
from edgespec.decode.generation import ToolCall
from edgespec.errors import ModelNotFoundError


def test_the_second_ctrl_c_interrupts_and_outside_it_is_as_before() -> None:
    signal.signal(signal.SIGINT, before := signal.default_int_handler)  # some shells ignore it
    with pytest.raises(KeyboardInterrupt), stoppable() as cancel:
        assert not cancel.is_set()
        signal.raise_signal(signal.SIGINT)
        assert cancel.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_each_answer_is_stopped_by_itself() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stoppable() as first:
        signal.raise_signal(signal.SIGINT)
    with stoppable() as second:
        assert first.is_set() and not second.is_set()


@pytest.mark.parametrize("columns", [*range(4, 80), 120])
def test_a_narrow_status_line_leaves_out_what_has_no_room(columns: int) -> None:
    """It was cut in a number, 409 for 4096, and 2.32x was tokens a step, read as a speed-up."""
    chat: Any = SimpleNamespace(
        last=SimpleNamespace(
            counters=SimpleNamespace(tokens_per_s=361.0, acceptance_length=2.32), spans=()
        ),
        session=SimpleNamespace(used_tokens=438),
        engine=SimpleNamespace(backend=SimpleNamespace(context_size=4096)),
        plan=SimpleNamespace(limit_bytes=19580 << 20),
    )
    shown = Chat.status(chat, columns)
    assert len(shown) <= columns
    told = ["361 tokens/s", "context 438/4096", "2.32 a step"]
    parts = shown.split("  ") if shown else []
    assert parts[:3] == told[: len(parts)]
    assert all(re.fullmatch(r"memory [\d.]+ [MG]iB of 19\.12 GiB", one) for one in parts[3:])
    assert len(parts) >= sum(columns >= most for most in (12, 30, 43, 80))


def test_what_is_typed_while_a_model_loads_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written into the line of the progress."""
    held: list[str] = []
    monkeypatch.setattr(chat_loop, "keys_held", lambda: Held(held))
    monkeypatch.setattr(chat_loop, "read_model", lambda path: path)
    monkeypatch.setattr("edgespec.cli.options.model_path", lambda name: name)
    monkeypatch.setattr(chat_loop, "load_engine", lambda *_, **__: (held == ["held"], None))
    assert Chat._load(object.__new__(Chat), "m.gguf", SimpleNamespace())[0]  # type: ignore[arg-type]
    assert held == ["held", "free"]


def test_a_model_that_is_not_there_is_told_before_the_one_in_use_is_given_up(
    tmp_path: Path,
) -> None:
    chat = Mock()
    with pytest.raises(ModelNotFoundError):
        Chat.reload(chat, str(tmp_path / "no.gguf"), Mock())
    chat.engine.close.assert_not_called()


class Held:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def __enter__(self) -> None:
        self._told.append("held")

    def __exit__(self, *_: object) -> None:
        self._told.append("free")


@pytest.mark.parametrize(
    ("reason", "text", "told"),
    [
        (
            "length",
            "- 1 cup milk\n" * 9,
            "repeated itself: /params dry_multiplier=0.8, then /retry",
        ),
        ("context_full", "- 1 cup milk\n" * 9, "then /retry"),
        ("length", "A list: one, two", "cut off after 3 tokens: /params max_tokens=N"),
        ("context_full", "A list", "the context is full"),
        ("stop", "ha" * 99, ""),
        ("cancelled", "ha" * 99, "stopped; Ctrl-C again leaves"),
    ],
)
def test_an_answer_that_was_cut_off_says_why_and_what_helps(
    reason: str, text: str, told: str
) -> None:
    """A loop of 1,024 tokens was shown as speed."""
    result: Any = SimpleNamespace(finish_reason=reason, text=text, token_ids=(1, 2, 3))
    said = ending_of(result)
    assert said.endswith(told) and bool(said) == bool(told)


def test_calls_are_shown_asked_for_and_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results go back until there is an answer, at most so many times. A person may say always."""
    speaker, tools, refused = Speaker(CALL), Tools(), "error: the user does not want this call"
    monkeypatch.setattr(chat_loop, "start_tools", lambda *_: tools)
    monkeypatch.setattr(chat_loop, "_MOST_ROUNDS", 3)
    engine = Engine(speaker, chat_template=TEMPLATE)
    monkeypatch.setattr(Chat, "_load", lambda *_, **__: (None, engine))
    with Chat(None, None) as talk:  # type: ignore[arg-type]
        talk.take_tools(tmp_path, [])
        talk.say("Weather?")
        results = [one["content"] for one in talk.session.messages if one["role"] == "tool"]
        assert results == 3 * [refused] and tools.made == []
        told = capsys.readouterr().err
        assert '[calls weather({"city": "Rome"})]' in told and "--allow NAME" in told
        for stream in ("stdin", "stderr"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
        answers = iter(["n", "y", "", "a"])
        monkeypatch.setattr("builtins.input", lambda: next(answers))
        call = ToolCall("c1", "weather", '{"city": "Rome"}')
        made = [talk.result(call, tools) == "Rain in Rome" for _ in range(5)]
        assert made == [False, True, False, True, True]

        monkeypatch.setattr("builtins.input", Mock(side_effect=KeyboardInterrupt))
        capsys.readouterr()
        tools.allowed.clear()
        assert talk.result(call, tools) == refused
        assert "anything else: no \n" in capsys.readouterr().err, "what follows has a line"
        tools.allowed.add("weather")

        def result(*_: object) -> str:
            speaker.ids = [*b"It rains.", END]
            raise KeyboardInterrupt

        monkeypatch.setattr(tools, "result", result)
        talk.say("Again?")
        *_, asked, told_back, answer = talk.session.messages
        assert [one["role"] for one in (asked, told_back)] == ["assistant", "tool"]
        assert (told_back["content"], answer["content"]) == ("error: it was stopped", "It rains.")
        assert "It rains." in capsys.readouterr().out
