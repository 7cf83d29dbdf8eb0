"""All output of the command line: sizes, lines, tables, progress, errors.

stdout carries what another program may read; everything else goes to stderr. Names of files, words
of templates and of other servers are written by strangers: `printable_streams` keeps what could
steer a terminal out of all that is printed, by whomever.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO, cast

from edgespec.errors import DraftModelWarning, EdgespecError, EdgespecWarning

if TYPE_CHECKING:
    from edgespec.decode.generation import Result
    from edgespec.memory.plan.embedding import EmbeddingPlan
    from edgespec.memory.plan.plan import Plan

_MIBI, _GIBI = 1 << 20, 1 << 30
NOTES = logging.getLogger("edgespec.cli")  # what a person is told, for a log of it
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # what turns the order of letters
_STEERING: dict[int, str | None] = {
    **dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}),
    **{one: f"\\u{one:04x}" for one in _TURNING},
}


def size_text(size_bytes: float) -> str:
    """Bytes in MiB or GiB (powers of two)."""
    if size_bytes >= _GIBI:
        return f"{size_bytes / _GIBI:.2f} GiB"
    return (
        f"{size_bytes / _MIBI:.0f} MiB" if size_bytes >= _MIBI else f"{size_bytes / 1024:.0f} KiB"
    )


def speed_text(speeds: tuple[float, float]) -> str:
    """A range of tokens per second, in two digits each: "180 to 290"."""
    low, high = (f"{float(f'{one:.2g}'):g}" for one in speeds)
    return low if low == high else f"{low} to {high}"


def printable(text: str) -> str:
    """`text` without control characters that could steer a terminal.

    Those that turn the order of letters, so that a name reads as another one, are shown by their
    numbers.
    """
    return text.translate(_STEERING)


class _Printable:
    """A text stream that writes what is `printable`; `unfiltered` is the one below it."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """As of any text stream: the number of characters is that of `text`."""
        self.unfiltered.write(printable(text))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def printable_streams() -> Iterator[None]:
    """Meanwhile nothing that is printed, in whichever way, steers a terminal."""
    out, err = (stream and cast(TextIO, _Printable(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def write_answer(text: str, shown: str) -> None:
    """Write a part of an answer to stdout: as it is to a file or a pipe, `shown` to a terminal.

    `shown` may hold marks of ours, and nothing of `text` that is not printable.
    """
    stream = _unfiltered(sys.stdout)
    stream.write(shown if stream.isatty() else text)
    stream.flush()


def _unfiltered(stream: TextIO) -> TextIO:
    return cast(TextIO, getattr(stream, "unfiltered", stream))


def note(text: str, level: int = logging.INFO) -> None:
    """One line for the person, on stderr, and in the log; broken where a terminal is narrower."""
    NOTES.log(level, text.strip())
    if sys.stderr.isatty() and (columns := shutil.get_terminal_size((0, 0)).columns):
        text = "\n".join(_fitting(line, columns) for line in text.split("\n"))
    print(text, file=sys.stderr, flush=True)


def _fitting(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    wrapped = textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped)


def show_warnings() -> None:
    """From now on a warning of ours is one line; where it is made is nobody's concern."""
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, EdgespecWarning):
            others(message, category, *place, **more)
            return
        in_an_answer = issubclass(category, DraftModelWarning)
        if in_an_answer and sys.stdout.isatty() and sys.stderr.isatty():
            print(file=sys.stderr)  # it stands on this line
        note(f"warning: {message}", logging.WARNING)

    warnings.showwarning = show


def error(problem: EdgespecError) -> None:
    """A failure: one sentence, and what to do next."""
    text = f"error: {problem}".replace("\n", "\n  ")  # no line of it passes for a hint
    note(text, logging.ERROR)
    if problem.hint:
        note(f"\nhint: {problem.hint}")


_WRAPPED = 16  # characters: a last column that is longer may be wrapped, to no less


def paragraph(text: str) -> str:
    """The text, broken between words where the terminal is narrower."""
    columns = max(20, shutil.get_terminal_size((100, 24)).columns)
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; the last one is wrapped to the terminal, or stands below.

    Columns that there is no room for are a table below the others, beside the first one again.
    """
    columns = max(20, shutil.get_terminal_size((100, 24)).columns)
    *widths, last = (max(len(row[i]) for row in rows) for i in range(len(rows[0])))
    whole = [*widths, last] if last <= _WRAPPED else widths  # columns that are not wrapped
    # 40 columns hold more with one blank between two.
    gap = 2 if sum(whole) + 2 * (len(whole) - 1) <= columns else 1
    if len(widths) > 1 and sum(whole) + gap * (len(whole) - 1) > columns:
        count = 2
        while sum(whole[: count + 1]) + count <= columns:
            count += 1
        parts = [row[:count] for row in rows], [(row[0], *row[count:]) for row in rows]
        return "\n\n".join(table(part) for part in parts)
    indent = sum(widths) + gap * len(widths)
    room = columns - indent
    below = room < _WRAPPED < last  # no room for its words beside the others
    indent = 4 if below else indent
    lines = []
    for row in rows:
        head = "".join(cell.ljust(width + gap) for cell, width in zip(row, widths, strict=False))
        wrapped = textwrap.wrap(row[-1], columns - 5 if below else max(_WRAPPED, room - 1))
        beside = "" if below or not wrapped else wrapped.pop(0)
        lines += [(head + beside).rstrip(), *(" " * indent + line for line in wrapped)]
    return "\n".join(lines)


def embedding_memory_json(plan: EmbeddingPlan) -> dict[str, Any]:
    """As `memory_json`, of a model that makes embeddings."""
    return {
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "limit_bytes": plan.limit_bytes,
        "components": plan.component_bytes,
    }


def memory_json(plan: Plan) -> dict[str, Any]:
    """The predicted memory of a plan; every number is bytes."""
    return {
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_gpu_bytes": plan.predicted_gpu_bytes,
        "available_bytes": plan.available_bytes,
        "limit_bytes": plan.limit_bytes,
        "components": plan.component_bytes,
        "devices": [
            {
                "label": one.label,
                "name": one.name,
                "layers": one.layers,
                "predicted_bytes": plan.predicted_bytes_of(one.label),
                "free_bytes": one.free_bytes,
            }
            for one in plan.devices
        ],
        "ceilings": [part.name for part in plan.components if part.is_ceiling],
        "mapped": [part.name for part in plan.components if part.is_mapped],
    }


def models_text(result: Result) -> str:
    """Who wrote how much, where two models took turns."""
    from edgespec.decode.generation import LARGE

    switches = f"{result.counters.switches} switch{'es' * (result.counters.switches != 1)}"
    large = sum(span.end - span.start for span in result.spans if span.model == LARGE)
    return (
        f"{large} tokens by the large model ({result.large_share:.0%}), "
        f"{len(result.token_ids) - large} by the small one, {switches}"
    )


_LINE_S = 0.2  # between two lines


class Progress:
    """One line on stderr that is overwritten.

    When stderr is not a terminal it is silent, or writes a line for each tenth (`has_lines`), and
    no more than one every `_LINE_S`: short pieces of work follow each other.
    """

    def __init__(self, *, has_lines: bool = False) -> None:
        self._line = ""
        self._enabled = sys.stderr.isatty()
        self._has_lines, self._tenth, self._line_s = has_lines, -1, -math.inf

    def __call__(self, what: str, fraction: float) -> None:
        """Show that `fraction` (0..1) of `what` is done."""
        if not self._enabled:
            tenth, now = int(10 * fraction), monotonic()
            if self._has_lines and tenth != self._tenth and now - self._line_s >= _LINE_S:
                note(f"{what} {fraction:4.0%}")
                self._tenth, self._line_s = tenth, now
            return
        width = max(1, shutil.get_terminal_size().columns - 1)
        line = (printable(what)[: max(0, width - 5)] + f" {fraction:4.0%}")[:width]
        if line != self._line:
            _unfiltered(sys.stderr).write("\r" + line.ljust(len(self._line)))
            sys.stderr.flush()
            self._line = line

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.clear()

    def clear(self) -> None:
        if self._line:
            _unfiltered(sys.stderr).write("\r" + " " * len(self._line) + "\r")
            sys.stderr.flush()
            self._line = ""
