"""`edgespec config`: what is set, and where."""

from __future__ import annotations

from pathlib import Path

from command_line import Command


def test_config_show_names_the_files(say: Command, project: Path, user: Path) -> None:
    project.write_text("ctx = 512\n")
    _, out, told = say("config", "show")
    assert ["--ctx", "512", str(project)] in [line.split() for line in out.splitlines()]
    assert told == f"read: {project}\nnot there: {user}\n"
    assert say("config", "show", "fly")[0] == 2
