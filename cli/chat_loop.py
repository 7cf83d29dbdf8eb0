"""What a chat does with a message or a slash command, whoever typed it.

Adding a command is a function and a line in the table at the end.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options
from edgespec.cli.answer_writer import NONE, keys_held, repeats, show_answer, with_progress
from edgespec.cli.options import PLAIN
from edgespec.cli.render import models_text, note, printable, size_text, table
from edgespec.cli.start import cancel_on_interrupt, load_engine, start_tools
from edgespec.decode.session import Content, Session, Turn
from edgespec.drafting import drafter_names
from edgespec.errors import UnsupportedError
from edgespec.memory.device.energy import measured_energy
from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.models.images import image_of, is_image, read_image
from edgespec.models.onnx.folder import read_model
from edgespec.option_fields import Option, options_of
from edgespec.paths import expanded
from edgespec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from edgespec.decode.engine import Engine
    from edgespec.decode.generation import Result, ToolCall
    from edgespec.memory.plan.plan import Plan, Request
    from edgespec.models.images import Image
    from edgespec.serve.tool_servers import ToolServers


_MOST_ROUNDS = 8  # of calls, behind a message
_SHOWN_CHARS = 200  # of a call


@dataclass
class Totals:
    """All answers of this chat."""

    answers: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    read_ahead: int = 0  # tokens that were read before a message was sent
    read_in_vain: int = 0  # of these, the ones that no message had
    read_ahead_j: float | None = None  # joules of reading these; None without a counter

    def add(self, result: Result) -> None:
        self.answers += 1
        self.tokens += len(result.token_ids)
        self.decode_s += result.counters.decode_s


@dataclass
class NextLine:
    """What is known of the line to be typed next."""

    draft: str = ""  # what it begins with
    replaces: bool = False  # its message takes the place of the last one
    is_after_stop: bool = False  # the last answer was stopped by Ctrl-C
    is_wanted: bool = True  # False ends the chat


class Chat:
    """A session, the engine under it, and what was measured.

    The engine may be replaced by another one (`reload`); the conversation stays.

    Args:
        model, request: what is loaded, and what it was asked for.
        color: which text is tinted in a terminal.
        answer_format: `grammar` or `json_schema` of every answer.

    Raises as `edgespec.load`, and UnsupportedError for a model without a chat format.
    """

    def __init__(
        self,
        model: str | None,
        request: Request,
        *,
        color: str = NONE,
        answer_format: dict[str, str | None] | None = None,
    ) -> None:
        self.model, self.request = model, request
        self._format: dict[str, Any] = dict(answer_format or {})
        self.speculate = True
        self.last: Result | None = None
        self.totals = Totals()
        self.next_line = NextLine()
        self.file: Path | None = None
        self._ahead = 0  # tokens that were read of the next message
        self.images: list[Image] = []  # that the next message shows
        self.tools: ToolServers | None = None
        self._color = color
        self.plan, self.engine = self._load(model, request)
        try:
            self.session = Session(self.engine)
        except BaseException:
            self.engine.close()
            raise

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_error: object) -> None:
        self.engine.close()
        if self.tools is not None:
            self.tools.close()

    def take_tools(self, file: Path, allowed: Sequence[str]) -> None:
        """Start the servers of a file, whose tools answers may call from now on."""
        from edgespec.decode.engine import Engine
        from edgespec.serve.tool_calls import conversation

        Engine.with_tools = conversation
        self.tools = start_tools(file, allowed)
        self.session.tools = tuple(self.tools.tools)

    # -- messages --------------------------------------------------------------------------

    def say(self, text: str | None, *, instead: bool = False) -> None:
        """Send a message and show the answer; `instead` of the last message, None repeats it."""
        self.next_line.replaces = False
        content: Content | None = text
        if text is not None and self.images:  # which stand before it
            content = [*(image.part for image in self.images), {"type": "text", "text": text}]

        def ask(**how: Any) -> Turn:
            if text is None or instead:
                return self.session.retry(content, **how)
            assert content is not None, "there is a text"
            return self.session.stream(content, **how)

        self._show(ask)
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            assert self.last is not None, "there is an answer"
            if (tools := self.tools) is None or not (calls := self.last.tool_calls):
                break
            results = [call.result(self.result(call, tools)) for call in calls]
            # With the last round there is nothing to do with further calls.
            choice: dict[str, Any] = {} if rounds_left else {"tool_choice": "none"}
            self._show(partial(self.session.stream, results, **choice))

    def result(self, call: ToolCall, tools: ToolServers) -> str:
        """What a call gives: shown, asked for where it has to be, made. Never raises for it."""
        shown = f"{call.name}({call.arguments})"
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
        note(f"[calls {printable(shown)}]")
        said = "y" if tools.may_call(call.name) else _said()
        if said in ("a", "always"):  # until the chat ends
            tools.allowed.add(call.name)
        elif said not in ("y", "yes"):
            note("[not called: --allow NAME lets a tool be called without asking]")
            return "error: the user does not want this call"
        try:
            text = tools.result(call, self.engine.backend.context_size)
        except KeyboardInterrupt:
            text = "error: it was stopped"
        if text.startswith("error: "):
            note(f"[{printable(text[:_SHOWN_CHARS])}]", WARNING)
        return text

    def _show(self, ask: Callable[..., Turn]) -> None:
        """An answer, as it comes."""
        with stoppable() as cancel:
            turn = ask(speculate=self.speculate, cancel=cancel, **self._format)
            self.images = []
            before = self.session.used_tokens
            if turn.dropped_turns:
                note(f"[the context is full: {turn.dropped_turns} turns are out of sight now]")
            if self.totals.answers and not sys.stdin.isatty():
                sys.stdout.write("\n")
            show_answer(with_progress(turn), self._color)
        self.last = turn.result
        self.totals.add(turn.result)
        used = max(0, turn.result.counters.reused_tokens - before)
        self.totals.read_in_vain += max(0, self._ahead - used)
        self._ahead = 0
        self.next_line.is_after_stop = turn.result.finish_reason == "cancelled"
        if ending := ending_of(turn.result):
            note(f"[{ending}]")

    def read_ahead(self, text: str, cancel: threading.Event) -> None:
        """Read what the next message begins with, as far as it is typed. Raises as a session."""
        with measured_energy(idle=False) as energy:
            count = self.session.prepare(text, cancel=cancel)
        if energy.joules is not None:
            self.totals.read_ahead_j = (self.totals.read_ahead_j or 0.0) + energy.joules
        self._ahead += count
        self.totals.read_ahead += count

    # -- the engine ------------------------------------------------------------------------

    def reload(self, model: str | None, request: Request) -> None:
        """Go on with another model or drafter; the one in use comes back if that fails."""
        read_model(options.model_path(model))  # before anything is given up
        old = self.model, self.request
        self.engine.close()
        try:
            self._go_on(model, request)
        except KeyboardInterrupt:
            self._go_on(*old)
            raise UnsupportedError("interrupted; the model in use stays") from None
        except BaseException:
            self._go_on(*old)
            raise
        self.speculate = True

    def _go_on(self, model: str | None, request: Request) -> None:
        plan, engine = self._load(model, request, is_first=False)
        try:
            self.session = self.session.moved_to(engine)
        except BaseException:
            engine.close()
            raise
        self.model, self.request, self.plan, self.engine = model, request, plan, engine

    def _load(
        self, model: str | None, request: Request, *, is_first: bool = True
    ) -> tuple[Plan, Engine]:
        spec = read_model(options.model_path(model))
        with stoppable() as cancel, keys_held():  # else they were written into the progress
            return load_engine(spec, request, cancel, quiet=False, is_first=is_first)

    def load(self, path: Path) -> None:
        tools = self.session.tools
        self.session = Session.load(self.engine, path)
        self.session.tools = tools
        self.file = path
        held = "" if self.engine.backend.length else ", which is read again with the next message"
        note(f"[{len(self.session.messages)} messages{held}]")

    # -- the bottom line -------------------------------------------------------------------

    def status(self, columns: int) -> str:
        """Speed, context, tokens a step and memory: as many of them as `columns` have room for."""
        counters = self.last.counters if self.last else None
        used, size = self.session.used_tokens, self.engine.backend.context_size
        peak, limit = peak_resident_bytes(), self.plan.limit_bytes
        speed = f"{counters.tokens_per_s:.0f}" if counters else "-"
        length = f"{counters.acceptance_length:.2f}" if counters else "-"
        share = f"  large {self.last.large_share:.0%}" if self.last and self.last.spans else ""
        parts = [f"{speed} tokens/s", f"context {used}/{size}", f"{length} a step{share}"]
        parts.append(f"memory {size_text(peak)} of {size_text(limit)}")
        while len("  ".join(parts)) > columns:
            parts.pop()  # half a number would be another one, and a number alone says nothing
        return "  ".join(parts)


def _said() -> str:
    """What a person says to a call; "" where nobody is there to be asked."""
    asked = "call it? y once, a always, anything else: no "
    try:
        if sys.stdin.isatty() and sys.stderr.isatty():
            print(asked, end="", file=sys.stderr, flush=True)
            return input().strip().lower()
    except (EOFError, KeyboardInterrupt):
        note("")
    return ""


def ending_of(result: Result) -> str:
    """What is said below an answer; "" where the model ended it."""
    if result.finish_reason in ("stop", "cancelled"):
        return "stopped; Ctrl-C again leaves" * (result.finish_reason == "cancelled")
    if repeats(result.text):
        return "cut off while it repeated itself: /params dry_multiplier=0.8, then /retry"
    if result.finish_reason == "length":
        return f"cut off after {len(result.token_ids)} tokens: /params max_tokens=N"
    return "cut off: the context is full"


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; a second Ctrl-C interrupts. Outside it interrupts at once."""
    before = signal.getsignal(signal.SIGINT)
    cancel = cancel_on_interrupt()
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit"}  # Ollama's and llama.cpp's words
_HELP_HINT = "/help lists the commands; begin a message with // if it should start with a slash"


def handle(chat: Chat, text: str) -> None:
    """A message, or a command; see `split_command`.

    Raises EdgespecError; nothing is lost then.
    """
    name, argument = split_command(text, {*COMMANDS, *ALIASES})
    if not name:
        if argument:
            chat.say(argument, instead=chat.next_line.replaces)
        return
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        raise UnsupportedError(f"there is no command {printable(name)[:40]}", hint=_HELP_HINT)
    action, _ = COMMANDS[name]
    chat.next_line.replaces = False  # an edit ends with the message or with another command
    action(chat, argument)


def split_command(text: str, known: Container[str]) -> tuple[str, str]:
    """A command's name and its argument, or "" and a message.

    A text that begins with one slash is a command, whether known or not. Two slashes begin a
    message; one of them is taken away. Paths and pasted texts begin with a slash, too: where the
    first word is no known command, a second slash in it or a second line makes it a message.
    """
    stripped = text.strip()
    name, *rest = stripped.split(maxsplit=1) or [""]
    is_pasted = name not in known and ("/" in name[1:] or "\n" in stripped)
    if not text.startswith("/") or text.startswith("//") or is_pasted:
        return "", (text[1:] if text.startswith("//") else text).strip("\n")
    return name, rest[0] if rest else ""


def _help(_chat: Chat, _argument: str) -> None:
    note(table([(name, text) for name, (_, text) in COMMANDS.items()]))
    note("\nEnter sends, Alt-Enter (or \\ and Enter) begins a new line, Ctrl-C stops an answer")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.session.system = None if argument == "none" else argument
    note(f"system: {chat.session.system or '(that of the model)'}")


def _model(chat: Chat, argument: str) -> None:
    if argument:
        chat.reload(argument, chat.request)
    else:
        note(str(chat.model or "the embedded model"))


def _drafter(chat: Chat, argument: str) -> None:
    drafter = chat.engine.drafter
    loaded = drafter.name if drafter else "none"
    argument = "none" if argument == PLAIN else argument
    if argument == "none" or (argument in ("auto", loaded) and drafter):
        chat.speculate = argument != "none"
    elif argument:
        if argument != "auto":
            drafter_names(argument)  # before anything is given up
        chat.reload(chat.model, replace(chat.request, drafter=argument))
    drafter = chat.engine.drafter
    note(f"drafter: {drafter.name if drafter and chat.speculate else 'none'}")


def _params(chat: Chat, argument: str) -> None:
    session, known = chat.session, options_of(SamplingParams)
    usual = {**asdict(SamplingParams()), "max_tokens": 0, "stop": ()}
    values: dict[str, Any] = {"max_tokens": session.max_tokens, "stop": session.stop}
    try:
        words = shlex.split(argument)
    except ValueError as problem:
        raise UnsupportedError(f"{argument!r} cannot be read: {problem}") from problem
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in usual:
            raise UnsupportedError(
                f"{word!r} sets nothing", hint=f"NAME=VALUE of {', '.join(usual)}"
            )
        one, kind = known.get(name, Option(several=name == "stop")), type(usual[name])
        kind = int if name == "seed" else str if one.read or kind is tuple else kind
        try:
            value = None if (name, text) == ("seed", "none") else one.value(kind(text))
        except ValueError as problem:
            why = problem if one.read else "is not a number"
            raise UnsupportedError(f"{word} {why}") from None
        values[name] = ((value,) if text else ()) if one.several else value
    max_tokens, stop = values.pop("max_tokens"), values.pop("stop")
    if max_tokens < 1:
        raise UnsupportedError(f"max_tokens must be at least 1, not {max_tokens}")
    session.sampling = replace(session.sampling, **values)
    session.max_tokens, session.stop = max_tokens, stop
    shown = {**asdict(session.sampling), "max_tokens": max_tokens, "stop": stop}
    lists = {name: ", ".join(map(str, v)) or "-" for name, v in shown.items() if type(v) is tuple}
    rows = {name: str(value) for name, value in {**shown, **lists}.items()}
    note(table([(name, text.replace("\n", "\\n")) for name, text in rows.items()]))


def _stats(chat: Chat, _argument: str) -> None:
    if chat.last is None:
        note("no answer yet")
        return
    counters, totals = chat.last.counters, chat.totals
    speed = totals.tokens / totals.decode_s if totals.decode_s else 0.0
    rows = [
        ("last answer", f"{len(chat.last.token_ids)} tokens, {counters.tokens_per_s:.1f} tokens/s"),
        ("acceptance length", f"{counters.acceptance_length:.2f} tokens a step (plain is 1.00)"),
        ("drafts", f"{counters.drafted_tokens} tokens, {counters.accepted_tokens} accepted"),
        *(
            (f"  {name}", f"{drafted} tokens, {counters.accepted_by[name]} accepted")
            for name, drafted in counters.drafted_by.items()
        ),
        ("first token", f"after {counters.time_to_first_token_s:.2f} s"),
        ("prompt", f"{counters.prompt_tokens} tokens, {counters.reused_tokens} of them reused"),
        (
            "this chat",
            f"{totals.answers} answer{'s' * (totals.answers != 1)}, {totals.tokens} tokens, "
            f"{speed:.1f} tokens/s",
        ),
    ]
    if totals.read_ahead:
        said = f"{totals.read_ahead} tokens before they were sent, {totals.read_in_vain} in vain"
        if totals.read_ahead_j is not None:
            said += f"; {totals.read_ahead_j:.1f} J"
        rows.append(("read", said))
    if chat.last.spans:
        rows.insert(1, ("models", models_text(chat.last)))
    if hidden := chat.session.hidden_turns:
        rows.append(("out of sight", f"{hidden} turns that the context has no room for"))
    note(table(rows))


def _memory(chat: Chat, _argument: str) -> None:
    plan = chat.plan
    rows = [(name.replace("_", " "), size_text(n)) for name, n in plan.component_bytes.items()]
    rows += [
        ("predicted peak", size_text(plan.predicted_peak_bytes)),
        ("measured peak", size_text(peak_resident_bytes())),
        ("resident now", size_text(resident_bytes())),
        ("limit", size_text(plan.limit_bytes)),
    ]
    note(table(rows))


def _plan(chat: Chat, _argument: str) -> None:
    choices = chat.plan.choices
    note(table([(c.name.replace("_", " "), str(c.value), c.reason) for c in choices]))


def _undo(chat: Chat, _argument: str) -> None:
    text = printable(chat.session.undo())
    note(f"took back: {text if len(text) <= 60 else text[:59] + '…'}")


def _edit(chat: Chat, argument: str) -> None:
    if argument:
        chat.say(argument, instead=True)
        return
    users = [m["content"] for m in chat.session.messages if m["role"] == "user"]
    if not users:
        raise UnsupportedError("there is no message to edit", hint="say something first")
    parts = users[-1] if isinstance(users[-1], list) else [{"text": users[-1]}]
    chat.images = [image_of(part) for part in parts if is_image(part)]
    chat.next_line.draft = "".join(part.get("text", "") for part in parts)
    chat.next_line.replaces = True


def _image(chat: Chat, argument: str) -> None:
    if not argument:
        raise UnsupportedError("no file is named", hint="/image FILE or /audio FILE")
    image = read_image(argument)
    chat.engine.shown("", [image])  # or it is refused now, and not with the next message
    chat.images.append(image)
    note(f"with the next message: {', '.join(map(str, chat.images))}")


def _save(chat: Chat, argument: str) -> None:
    path = expanded(argument) if argument else chat.file
    if path is None:
        raise UnsupportedError("no file is named", hint="/save FILE")
    chat.session.save(path)
    chat.file = path
    note(f"saved {path} ({size_text(path.stat().st_size)})")


def _load(chat: Chat, argument: str) -> None:
    if not argument:
        raise UnsupportedError("no file is named", hint="/load FILE")
    chat.load(expanded(argument))


def _clear(chat: Chat, _argument: str) -> None:
    chat.session.clear()
    note("forgotten, but for the system message")


def _exit(chat: Chat, _argument: str) -> None:
    chat.next_line.is_wanted = False


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "/help": (_help, "this list"),
    "/system": (_system, "show or set the system message; none removes it"),
    "/model": (_model, "show the model, or go on with another file"),
    "/drafter": (_drafter, "show or choose where drafts come from: auto, none, or names"),
    "/params": (_params, "show or set: temperature=0.8 top_p=0.9 max_tokens=300 stop=END seed=1"),
    "/stats": (_stats, "speed and acceptance of the last answer and of all"),
    "/memory": (_memory, "memory by component, predicted and measured"),
    "/plan": (_plan, "every choice and its reason"),
    "/undo": (_undo, "take the last message and its answer back"),
    "/retry": (lambda chat, _: chat.say(None), "answer the last message again"),
    "/edit": (_edit, "change the last message and answer it again"),
    "/image": (_image, "show a file to the model with the next message"),
    "/audio": (_image, "the same of a sound"),
    "/save": (_save, "write the conversation to a file"),
    "/load": (_load, "go on with a saved conversation"),
    "/clear": (_clear, "forget the conversation"),
    "/exit": (_exit, "leave; Ctrl-D too"),
}
