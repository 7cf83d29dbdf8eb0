"""`edgespec chat` as a person uses it: through a pseudo-terminal, and through pipes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

pexpect = pytest.importorskip("pexpect")
pytestmark = pytest.mark.model

COMMAND = ["-m", "edgespec.cli.main", "chat", "--ctx", "1024", "--temp", "0", "--threads", "1"]
PATIENCE_S = 30
ENDLESS = "Write a list of ten fruits."  # the embedded model never stops counting them
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Person:
    """Types into a chat and looks at what it shows."""

    def __init__(
        self,
        cache: str,
        *arguments: str,
        columns: int = 80,
        shell: str | None = None,  # what bash does when the chat stops or ends
        **environment: str,
    ) -> None:
        variables = {
            **os.environ,
            "EDGESPEC_CACHE": cache,
            "TERM": "xterm-256color",
            **environment,
        }
        command = [sys.executable, *COMMAND, *arguments]
        if shell is not None:
            command = ["bash", "-m", "-c", f"{shlex.join(command)}; {shell}"]
        self.child: Any = pexpect.spawn(
            command[0],
            command[1:],
            env=variables,
            dimensions=(24, columns),
            timeout=PATIENCE_S,
            encoding="utf-8",
        )
        self.shown = ""
        self.sees("Ctrl-D leaves")

    def sees(self, text: str) -> str:
        """Wait for `text`; everything shown since the last call, without escape sequences."""
        self.child.expect_exact(text)
        part: str = self.child.before + text
        self.shown += part
        return ESCAPES.sub("", part)

    def waits(self) -> str:
        """Wait for the prompt, tell where the cursor is, and read the bottom line."""
        self.sees("\x1b[6n")
        self.types("\x1b[1;1R")
        return self.sees("/1024")

    def types(self, text: str) -> None:
        self.child.send(text)

    def sends(self, text: str) -> None:
        """Wait for the prompt and send a line."""
        self.waits()
        self.types(text + "\r")

    def leaves(self) -> int:
        """The exit status."""
        self.child.expect(pexpect.EOF)
        self.shown += self.child.before
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture(scope="module")
def people() -> Iterator[list[Person]]:
    """Who chats, and goes on in the next test."""
    there: list[Person] = []
    yield there
    for someone in there:
        someone.child.close(force=True)


@pytest.fixture
def person(people: list[Person], measured: str, tiny: str) -> Iterator[Person]:
    """Commands are the same with any model, and in a chat that others have had before."""
    if not people:
        people.append(Person(measured, tiny, "-n", "40", "--drafter", "none"))
    someone = people.pop()
    yield someone
    if someone.child.isalive():
        someone.sends("/clear")
        someone.sees("forgotten")
        people.append(someone)
    else:
        someone.child.close()


def test_a_conversation_with_its_commands(person: Person, tmp_path: Path) -> None:
    person.sends("Say hello.")
    person.sends("/stats")
    assert "acceptance length" in person.sees("this chat")
    assert "sampling: greedy; /params changes it" in person.shown
    person.sends("/nonsense")
    person.sees("there is no command /nonsense")
    person.sends("/params temperature=hot")
    person.sees("temperature=hot is not a number")
    person.sends("/params max_tokens=5")
    person.sees("max_tokens")
    person.sends(f"/save {tmp_path / 'a.session'}")
    person.sees("saved")
    person.sends("/retry")
    person.sees("cut off after 5 tokens")
    person.sends("/undo")
    person.sees("took back: Say hello.")
    person.sends("/undo")
    person.sees("nothing to take back")
    person.sends(f"/load {tmp_path / 'a.session'}")
    person.sees("2 messages")
    person.sends(f"/load {tmp_path / 'none'}")
    person.sees("cannot read")
    person.sends("/memory")
    person.sees("measured peak")
    person.sends("/plan")
    person.sees("backend")
    person.sends("/clear")
    person.sees("forgotten")
    person.sends("/exit")
    assert person.leaves() == 0
    assert "Traceback" not in person.shown


def test_several_lines_are_one_message(person: Person) -> None:
    person.waits()
    person.types("Repeat both lines:\\\rfirst line\x1b\rsecond line\r")
    assert "linesecond" not in person.sees("second line")
    person.sends("/save /dev/null/x")
    person.sees("cannot write")
    person.waits()
    person.types("\x04")
    assert person.leaves() == 0


def test_editing_begins_with_the_last_message(person: Person) -> None:
    person.sends("Say yes.")
    person.sends("/edit")
    person.waits()
    person.types(" And no.\r")
    person.sees("And no.")
    person.sends("/undo")
    person.sees("took back: Say yes. And no.")
    person.sends("/undo")
    person.sees("nothing to take back")


def test_an_edit_ends_with_an_empty_line_or_another_command(person: Person) -> None:
    person.sends("Say yes.")
    for other in ("\x15\r", "\x15/stats\r"):  # the line is erased first
        person.sends("/edit")
        person.waits()
        person.types(other)
    person.sends("Say no.")
    person.sends("/undo")
    person.sees("took back: Say no.")
    person.sends("/undo")
    person.sees("took back: Say yes.")
    person.sends("/save ~nobody-of-that-name/x")
    person.sees("cannot write")


def test_ctrl_c_stops_an_answer_and_twice_leaves(measured: str) -> None:
    person = Person(measured, "-n", "900")
    person.sends(ENDLESS)
    person.sees("5.")
    person.types("\x03")
    person.sees("stopped; Ctrl-C again leaves")
    person.waits()
    person.types("half a line\x03")  # clears the line, and does not leave
    person.sends("/stats")
    person.sees("this chat")
    person.waits()
    person.types("\x03")
    person.sees("Ctrl-C again leaves")
    person.waits()
    person.types("\x03")
    assert person.leaves() == 130
    assert "Traceback" not in person.shown


def test_a_model_that_cannot_be_loaded_leaves_the_conversation(
    person: Person, tmp_path: Path
) -> None:
    person.sends("Say hello.")
    person.sends(f"/model {tmp_path / 'no.gguf'}")
    person.sees("there is no file")
    person.sends("/drafter none")
    person.sees("drafter: none")
    person.sends("/drafter auto")
    person.sees("drafter: suffix")
    person.sends("/drafter magic")
    person.sees("there is no drafter")
    person.sends("/undo")
    person.sees("took back: Say hello.")


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash, which resumes a stopped program")
def test_ctrl_z_suspends_the_chat_and_the_line_stays(measured: str, tiny: str) -> None:
    person = Person(
        measured, tiny, "-n", "8", "--drafter", "none", shell='echo "stopped with $?"; fg'
    )
    person.waits()
    person.types("half a")
    person.sees("half a")
    person.types("\x1a")
    person.sees("stopped with 148")
    person.waits()
    person.types(" line\r")
    person.sends("/undo")
    person.sees("took back: half a line")
    person.child.close(force=True)


def test_what_is_typed_during_an_answer_is_the_next_line(measured: str) -> None:
    person = Person(measured, "-n", "60")
    person.sends(ENDLESS)
    person.sees("\n2. ")  # and not one of the memory that the prompt shows
    person.types("typed ahead")
    assert "typed" not in person.sees("cut off")
    person.waits()
    person.types("\r")
    person.sends("/undo")
    person.sees("took back: typed ahead")
    person.child.close(force=True)


@pytest.mark.slow
def test_what_is_typed_is_read_before_it_is_sent(person: Person) -> None:
    """However slow the machine is: it is tried with longer and longer pauses."""
    for pause_s in (1, 4, 16, 64):
        person.waits()
        person.types("Repeat: " + f"blue and green {pause_s} " * 12)
        threading.Event().wait(pause_s)
        person.types("now\r")
        person.sends("/stats")
        told = re.search(r"(\d+) tokens, (\d+) of them reused", person.sees("this chat"))
        assert told is not None
        if int(told[1]) - int(told[2]) < 12:
            break
    else:
        pytest.fail("the message was read when it was sent")
    assert "tokens before they were sent" in person.sees("in vain")


@pytest.mark.slow
def test_a_chat_keeps_what_it_read_for_the_next_one(
    measured: str, tiny: str, tmp_path: Path
) -> None:
    """By itself where the disk has room, and not with `--disk-cache 0`."""
    ignored = shutil.ignore_patterns("prefixes", "lock*")
    cache = shutil.copytree(measured, tmp_path / "cache", ignore=ignored)
    environment = {**os.environ, "EDGESPEC_CACHE": str(cache)}
    by_itself = shutil.disk_usage(cache).free > 16 << 30
    for arguments, is_kept in ((("--disk-cache", "0"), False), ((), by_itself)):
        done = subprocess.run(
            [sys.executable, *COMMAND, tiny, "-n", "4", "--system", "Be of use. " * 60, *arguments],
            input=b"Say hello.\n",
            capture_output=True,
            env=environment,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr.decode()
        assert bool([*cache.glob("prefixes/*/*.cells")]) == is_kept


def test_a_dumb_terminal_gets_no_escapes(measured: str) -> None:
    person = Person(measured, "--color", "drafted", "-n", "60", TERM="dumb")
    for line in (ENDLESS, "/edit", "/etc/hosts?", "/undo", "/exit"):
        person.sees("> ")
        person.types(line + "\n")
    assert person.leaves() == 0
    assert f"in place of: {ENDLESS}" in person.shown
    assert "took back: /etc/hosts?" in person.shown
    assert "\x1b" not in person.shown


@pytest.mark.parametrize("no_color", [pytest.param("", marks=pytest.mark.long), "1"])
def test_drafted_text_is_tinted_and_narrow_terminals_are_enough(
    measured: str, no_color: str
) -> None:
    person = Person(measured, "--color", "drafted", "-n", "120", columns=40, NO_COLOR=no_color)
    person.sends(ENDLESS)
    person.child.expect_exact(["\x1b[4m", "cut off"] if no_color else ["\x1b[36m", "cut off"])
    person.shown += person.child.before + person.child.after
    person.child.close(force=True)
    if no_color:
        colors = re.findall(r"\x1b\[[0-9;]*m", person.shown)
        assert not {c for c in colors if re.search(r"[\[;](3[1-7]|4[1-7]|9\d|38|48)[;m]", c)}


def test_a_pipe_gives_answers_and_nothing_else(here: Command) -> None:
    text = "Say hello.\n\n/system Be brief.\n/nonsense\nSay hello again.\n"
    status, out, err = here(*COMMAND[2:], "-n", "12", stdin=text.encode() + b"\xff\xfe\n")
    assert status == 1  # two lines failed, and the others were answered
    assert "there is no command /nonsense" in err and "nonsense" not in out
    assert "\x1b" not in out and "system:" in err
    assert len(out.split("\n\n")) >= 2
    assert f"error: stdin is not UTF-8 text: byte {len(text)} is 0xff" in err


def test_a_conversation_that_was_saved_goes_on(here: Command, tiny: str, tmp_path: Path) -> None:
    options, file = (
        (*COMMAND[2:], tiny, "-n", "4", "--drafter", "none"),
        str(tmp_path / "a.session"),
    )
    assert here(*options, stdin=f"Say hello.\n/save {file}\n").status == 0
    assert "[2 messages" in here(*options, "--load", file, stdin="").err


def test_a_pipe_without_an_end_of_line_and_an_empty_one(here: Command, tiny: str) -> None:
    for text, answers in (("", False), ("Say hello.", True)):
        done = here(*COMMAND[2:], tiny, "-n", "4", "--drafter", "none", stdin=text)
        assert (done.status, bool(done.out.strip())) == (0, answers)
