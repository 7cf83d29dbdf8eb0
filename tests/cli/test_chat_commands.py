"""Slash commands of a chat, without a model; as a person uses them they are in test_chat."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.chat_loop import COMMANDS, NextLine, handle
from edgespec.errors import UnsupportedError
from edgespec.sampling.params import SamplingParams


class Chat(SimpleNamespace):
    """As much of a chat as these commands need; keeps what is said."""

    def __init__(self) -> None:
        session = SimpleNamespace(
            sampling=SamplingParams(seed=3), max_tokens=64, stop=(), system=None, messages=[]
        )
        super().__init__(session=session, next_line=NextLine(), file=None, last=None, said=[])

    def say(self, text: str | None, *, instead: bool = False) -> None:
        self.said.append((text, instead))


def do(chat: Any, *lines: str) -> None:
    for line in lines:
        handle(chat, line)


def test_two_slashes_are_a_message() -> None:
    chat = Chat()
    do(chat, "Hi", "//etc", "\n")
    assert chat.said == [("Hi", False), ("/etc", False)]


def test_words_of_other_programs_are_known_and_others_are_told() -> None:
    chat = Chat()
    do(chat, "/bye")
    assert not chat.next_line.is_wanted
    with pytest.raises(UnsupportedError, match="there is no command /fly") as caught:
        do(chat, "/fly away")
    assert "begin a message with //" in caught.value.hint
    with pytest.raises(UnsupportedError):
        do(chat, "/\x1b[2J")


@pytest.mark.parametrize(
    "text",
    [
        "/etc/hosts what is this file?",
        "/usr/bin/env: 'python': No such file",
        "/usage: tool FILE\nmore of what was pasted",
        "/stats/today",
    ],
)
def test_a_path_or_a_pasted_text_is_a_message(text: str) -> None:
    chat = Chat()
    do(chat, text)
    assert chat.said == [(text, False)]


def test_a_command_may_have_an_argument_of_several_lines() -> None:
    chat = Chat()
    do(chat, "/system Be brief.\nBe kind.")
    assert chat.session.system == "Be brief.\nBe kind."
    do(chat, "/system\n  none\n")
    assert chat.session.system is None
    for typo in ("/modle hf:owner/name", "/savee /tmp/a\n"):
        with pytest.raises(UnsupportedError, match="there is no command"):
            do(chat, typo)
    assert chat.said == []


def test_an_edit_is_over_with_any_other_command() -> None:
    chat = Chat()
    with pytest.raises(UnsupportedError, match="no message to edit"):
        do(chat, "/edit")
    chat.session.messages = [{"role": "user", "content": "one"}, {"role": "assistant"}]
    do(chat, "/edit")
    assert (chat.next_line.draft, chat.next_line.replaces) == ("one", True)
    do(chat, "two")
    do(chat, "/edit", "/params", "three", "/edit four", "/retry")
    assert chat.said == [("two", True), ("three", False), ("four", True), (None, False)]


def test_settings_are_changed_all_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat()
    do(chat, '/params temperature=0.8 max_tokens=9 stop="the end" seed=none')
    assert chat.session.sampling == SamplingParams(temperature=0.8)
    assert (chat.session.max_tokens, chat.session.stop) == (9, ("the end",))
    assert ["stop", "the", "end"] in [line.split() for line in capsys.readouterr().err.splitlines()]
    wrong = ["top_k=5 top_p=7", "top_k=5 max_tokens=0", "top_k=5 magic=1", "top_k=many", 'stop="']
    for words in [*wrong, "top_k=5 temperature", "logit_bias=1"]:
        with pytest.raises(UnsupportedError):
            do(chat, f"/params {words}")
        assert chat.session.sampling == SamplingParams(temperature=0.8), words
        assert chat.session.max_tokens == 9, words


def test_a_system_message_is_set_and_taken_away() -> None:
    chat = Chat()
    do(chat, "/system Be brief.", "/system")
    assert chat.session.system == "Be brief."
    do(chat, "/system none")
    assert chat.session.system is None


def test_a_file_has_to_be_named_once(tmp_path: Path) -> None:
    chat, saved = Chat(), list[Path]()

    def save(path: Path) -> None:
        saved.append(path)
        path.write_text("{}")

    chat.session.save = save
    for command in ("/save", "/load"):
        with pytest.raises(UnsupportedError, match="no file is named"):
            do(chat, command)
    do(chat, f"/save {tmp_path / 'talk.json'}", "/save")
    assert saved == [tmp_path / "talk.json"] * 2


def test_every_command_is_explained() -> None:
    assert all(name.startswith("/") and text for name, (_, text) in COMMANDS.items())
