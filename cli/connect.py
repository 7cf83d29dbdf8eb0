"""`--connect`: `run` and `chat` with a server in place of a model of this process."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from edgespec.cli import answer_options, options
from edgespec.cli.answer_writer import show_answer
from edgespec.cli.render import error, note
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.option_fields import option
from edgespec.sampling.params import FIELD_NAMES

if TYPE_CHECKING:
    from edgespec.models.images import Image
    from edgespec.serve.client import Client


def connect_option() -> Any:
    """The server that is asked, as an option."""
    text = "Ask the server at this URL; its key is EDGESPEC_API_KEY."
    return option(None, text, panel=options.PROMPT)


_HELP = "/system TEXT, /clear and /help are the commands with a server; Ctrl-C stops an answer"


def request_fields(
    model: options.ModelOptions,
    max_tokens: int,
    stop: list[str] | None,
    plan: options.PlanOptions,
    sampling: answer_options.SamplingOptions,
    answer_format: answer_options.FormatOptions,
) -> dict[str, Any]:
    """What a server is asked for; options that it plans by itself are misuse."""
    for name in plan.given:
        named = plan.known()[name].names(name)[0]
        raise typer.BadParameter(f"{named} is the server's to choose, with --connect")
    params, texts = sampling.params(), answer_format.texts()
    values: dict[str, Any] = {"max_tokens": max_tokens, "model": model.name, "stop": stop or None}
    for name in ("temperature", "seed", *sampling.given):  # OpenAI's, and what was asked for
        values[FIELD_NAMES.get(name, name)] = getattr(params, name)
    if params.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in dict(params.logit_bias).items()}
    values["grammar"] = texts["grammar"]  # llama.cpp's field
    if texts["regex"] is not None:
        values["structured_outputs"] = {"regex": texts["regex"]}  # vLLM's
    if texts["json_schema"] is not None:
        values["response_format"] = _schema_format(texts["json_schema"])
    return {name: value for name, value in values.items() if value is not None}


def _schema_format(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as problem:
        raise UnsupportedError(f"the JSON schema cannot be read: {problem}") from problem
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class _Answer:
    """An answer of a server: chunks to iterate over, and what is known of it then."""

    def __init__(self, client: Client, path: str, body: dict[str, Any]) -> None:
        self.text, self.reason = "", "cancelled"
        self.usage: dict[str, float] = {}
        self.timings: dict[str, float] = {}
        self._events = client.stream(path, {**body, "stream_options": {"include_usage": True}})

    def pieces(self, cancel: threading.Event) -> Iterator[str]:
        """Text as it comes, until Ctrl-C. Raises as `Client.stream`."""
        try:
            for event in self._events:
                self.usage = event.usage or self.usage
                self.timings = event.timings or self.timings
                self.text += event.text
                self.reason = event.finish_reason or self.reason
                yield event.text
                if cancel.is_set():
                    break
        except EdgespecError:
            self.reason = "error"
            raise
        finally:
            self._events.close()  # type: ignore[attr-defined]

    def line(self) -> str:
        """What is told of it on stderr."""
        told = f"{self.usage.get('completion_tokens', 0):.0f} tokens"
        if self.timings:
            speed = self.timings.get("predicted_per_second", 0.0)
            told += f", {speed:.1f} tokens/s"
            if "acceptance_length" in self.timings:
                told += f", acceptance length {self.timings['acceptance_length']:.2f}"
        return told + ("; cut off" if self.reason == "length" else "")


def _client(url: str) -> Client:
    from edgespec.serve.client import Client

    return Client(url, os.environ.get("EDGESPEC_API_KEY", ""))


def _show(answer: _Answer, cancel: threading.Event, color: str | None) -> None:
    """Write an answer to stdout as it comes. Raises as `Client.stream`."""
    from edgespec.decode.generation import Chunk

    pieces = (Chunk(piece, ()) for piece in answer.pieces(cancel))
    if color is None:
        for _ in pieces:
            pass
    else:
        show_answer(pieces, color)


def run_connected(
    url: str,
    settings: dict[str, Any],
    system: str | None,
    text: str,
    images: Sequence[Image],
    *,
    raw: bool,
    color: str,
    as_json: bool,
) -> None:
    """`run` with a server: answer one prompt."""
    from edgespec.cli.start import cancel_on_interrupt

    head = [] if system is None else [{"role": "system", "content": system}]
    shown = [image.sent_part for image in images]
    if shown and raw:
        raise typer.BadParameter("--raw sends a text alone, and --image and --audio a message")
    content = [*shown, {"type": "text", "text": text}] if shown else text
    messages = [*head, {"role": "user", "content": content}]
    body = {**settings, **({"prompt": text} if raw else {"messages": messages})}
    cancel = cancel_on_interrupt()
    answer = _Answer(_client(url), "completions" if raw else "chat/completions", body)
    try:
        _show(answer, cancel, None if as_json else color)
    finally:
        if as_json and (answer.text or answer.reason != "error"):
            measured = {"usage": answer.usage, "timings": answer.timings}
            print(json.dumps({"text": answer.text, "finish_reason": answer.reason, **measured}))
    if not as_json:
        note(answer.line())
    if cancel.is_set():
        raise typer.Exit(130)


class ConnectedChat:
    """A conversation whose answers come from a server."""

    def __init__(self, url: str, settings: dict[str, Any], system: str | None, color: str) -> None:
        from edgespec.cli.chat_loop import NextLine

        self._client, self._settings, self._system = _client(url), settings, system
        self._color = color
        self._messages: list[dict[str, str]] = []
        self.next_line = NextLine()
        self._last = ""

    def status(self, columns: int) -> str:
        """Where the answers come from, and the last one's figures."""
        return f"{self._client.url}  {self._last}"[:columns]

    def handle(self, text: str) -> None:
        """A message or a command. Raises EdgespecError; nothing is lost then."""
        from edgespec.cli.chat_commands import split_command

        name, argument = split_command(text, ("/clear", "/system", "/help"))
        if not name:
            self._say(argument)
        elif name == "/clear":
            self._messages.clear()
        elif name == "/system":
            self._system = argument or self._system
            note(f"system: {self._system or '(that of the model)'}")
        elif name == "/help":
            note(_HELP)
        else:
            raise UnsupportedError(f"there is no command {name[:40]} with a server", hint=_HELP)

    def _say(self, text: str) -> None:
        from edgespec.cli.chat_loop import stoppable

        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = [*self._messages, {"role": "user", "content": text}]
        body = {**self._settings, "messages": [*head, *asked]}
        answer = _Answer(self._client, "chat/completions", body)
        try:
            with stoppable() as cancel:
                _show(answer, cancel, self._color)
                self.next_line.is_after_stop = cancel.is_set()
        finally:  # also where the server broke off
            self._last = answer.line()
            if answer.text:
                self._messages = [*asked, {"role": "assistant", "content": answer.text}]


def chat_connected(url: str, settings: dict[str, Any], system: str | None, *, color: str) -> None:
    """`chat` with a server."""
    from edgespec.cli.chat_input import read_messages

    talk, failed = ConnectedChat(url, settings, system, color), False
    for text in read_messages(talk):
        try:
            talk.handle(text)
        except EdgespecError as problem:
            failed = True
            error(problem)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)
