"""The slash commands of a chat. Adding one is a function and a line in the table at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container
from dataclasses import asdict, replace
from typing import Any

from edgespec.cli.chat_loop import Chat
from edgespec.cli.options import PLAIN
from edgespec.cli.render import models_text, note, printable, size_text, table
from edgespec.drafting.drafters import drafter_names
from edgespec.errors import UnsupportedError
from edgespec.models.images import image_of, is_image, read_image
from edgespec.paths import expanded

_WHOLE_NUMBERS = (
    *("top_k", "penalty_last_n", "seed", "max_tokens", "mirostat"),
    *("dry_allowed_length", "dry_penalty_last_n"),
)
_LISTS = ("logit_bias", "samplers", "dry_sequence_breakers")  # set on the command line alone
_ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit"}  # Ollama's and llama.cpp's words
_HELP_HINT = "/help lists the commands; begin a message with // if it should start with a slash"


def handle(chat: Chat, text: str) -> None:
    """A message, or a command; see `split_command`.

    Raises EdgespecError; nothing is lost then.
    """
    name, argument = split_command(text, {*COMMANDS, *_ALIASES})
    if not name:
        if argument:
            chat.say(argument, instead=chat.next_line.replaces)
        return
    name = _ALIASES.get(name, name)
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
    session = chat.session
    values: dict[str, Any] = {}
    for word in _words(argument):
        name, equals, text = word.partition("=")
        known = {**asdict(session.sampling), "max_tokens": 0, "stop": ()}
        known = {name: value for name, value in known.items() if name not in _LISTS}
        if not equals or name not in known:
            raise UnsupportedError(
                f"{word!r} sets nothing", hint=f"NAME=VALUE of {', '.join(known)}"
            )
        values[name] = _value(name, text)
    max_tokens = values.pop("max_tokens", session.max_tokens)
    if max_tokens < 1:
        raise UnsupportedError(f"max_tokens must be at least 1, not {max_tokens}")
    stop = values.pop("stop", session.stop)
    session.sampling = replace(session.sampling, **values)
    session.max_tokens, session.stop = max_tokens, stop
    shown = {**asdict(session.sampling), "max_tokens": max_tokens, "stop": ", ".join(stop) or "-"}
    note(table([(name, str(value)) for name, value in shown.items() if name not in _LISTS]))


def _words(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError as problem:
        raise UnsupportedError(f"{argument!r} cannot be read: {problem}") from problem


def _value(name: str, text: str) -> Any:
    if name == "stop":
        return (text,) if text else ()
    if name == "seed" and text == "none":
        return None
    try:
        return int(text) if name in _WHOLE_NUMBERS else float(text)
    except ValueError:
        raise UnsupportedError(f"{name}={text} is not a number") from None


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
        rows.append(("read", said))
    if chat.last.spans:
        rows.insert(1, ("models", models_text(chat.last)))
    if hidden := chat.session.hidden_turns:
        rows.append(("out of sight", f"{hidden} turns that the context has no room for"))
    note(table(rows))


def _memory(chat: Chat, _argument: str) -> None:
    from edgespec.memory.device.track import peak_resident_bytes, resident_bytes

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


def _retry(chat: Chat, _argument: str) -> None:
    chat.say(None)


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
    "/retry": (_retry, "answer the last message again"),
    "/edit": (_edit, "change the last message and answer it again"),
    "/image": (_image, "show a file to the model with the next message"),
    "/audio": (_image, "the same of a sound"),
    "/save": (_save, "write the conversation to a file"),
    "/load": (_load, "go on with a saved conversation"),
    "/clear": (_clear, "forget the conversation"),
    "/exit": (_exit, "leave; Ctrl-D too"),
}
