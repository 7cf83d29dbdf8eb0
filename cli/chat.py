"""`edgespec chat`: a conversation in the terminal, or one message a line from a pipe."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli import answer_options, options
from edgespec.cli.connect import ConnectOption, RequestFields, chat_connected
from edgespec.cli.render import error
from edgespec.cli.tint import COLORS, NONE, ColorOption
from edgespec.errors import EdgespecError


@options.takes_shared_options
def chat(
    model: options.ModelOptions = options.EMBEDDED,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: options.MaxTokensOption = 1024,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End an answer before this text.")
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option("--load", help="Continue a conversation that /save wrote, with its settings."),
    ] = None,
    no_shift: Annotated[
        bool,
        typer.Option(
            "--no-shift",
            help="When the context is full, refuse a turn instead of dropping old ones.",
        ),
    ] = False,
    color: ColorOption = NONE,
    plan_options: options.PlanOptions = options.DEFAULTS,
    sampling_options: answer_options.SamplingOptions = answer_options.GREEDY,
    format_options: answer_options.FormatOptions = answer_options.ANY_FORMAT,
    connect: ConnectOption = None,
) -> None:
    """Hold a conversation. Example: edgespec chat model.gguf --system "Be brief."

    In a terminal, /help lists the commands; Ctrl-C stops an answer, twice leaves. From a pipe,
    every line is a message or a command, and stdout carries nothing but the answers, with an empty
    line between two.
    """
    options.one_of("--color", color, COLORS)
    if connect is not None:
        if load is not None or no_shift:
            raise typer.BadParameter("--load and --no-shift are for a model of this process")
        settings = RequestFields.of(
            model, max_tokens, stop, plan_options, sampling_options, format_options
        )
        chat_connected(connect, settings, system, color=color)
        return
    sampling, texts = sampling_options.params(), format_options.texts()
    from edgespec.cli.chat_commands import handle
    from edgespec.cli.chat_input import interface_bytes, read_messages
    from edgespec.cli.chat_loop import Chat
    from edgespec.models.onnx.folder import read_model
    from edgespec.setup.prompt_size import most_prompt_tokens

    spec = read_model(model.path(plan_options))
    request = plan_options.request(
        prompt_tokens=most_prompt_tokens(spec, [system or ""]), max_tokens=max_tokens, sees=True
    )
    request = replace(request, interface_bytes=interface_bytes(), keeps_to_form=any(texts.values()))
    with Chat(model.name, request, color=color, answer_format=texts) as talk:
        session = talk.session
        session.system, session.sampling, session.max_tokens = system, sampling, max_tokens
        session.stop, session.shift = tuple(stop or ()), not no_shift
        if load is not None:
            talk.load(load)
        failed = False
        for text in read_messages(talk):
            try:
                handle(talk, text)
            except EdgespecError as problem:
                failed = True
                error(problem)
            if not talk.next_line.is_wanted:
                break
        if failed and not sys.stdin.isatty():
            raise typer.Exit(1)
