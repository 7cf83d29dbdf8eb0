"""`edgespec chat`: a conversation in the terminal, or one message a line from a pipe."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import typer

from edgespec.cli import options
from edgespec.cli.answer_writer import color_option
from edgespec.cli.options import PROMPT, TOOLS, FormatOptions, SamplingOptions
from edgespec.cli.read_ahead import AUTO, OFF, ON, ReadAhead
from edgespec.cli.render import error
from edgespec.errors import EdgespecError
from edgespec.option_fields import option


def chat(
    context: typer.Context,
    model: options.ModelOptions,
    plan_options: options.PlanOptions,
    sampling_options: SamplingOptions,
    format_options: FormatOptions,
    system: str | None = option(None, "System message.", panel=PROMPT),
    max_tokens: int = options.max_tokens_option(1024),
    stop: list[str] | None = option(
        None,
        "End an answer before this text.",
        also="--reverse-prompt -r",
        panel=PROMPT,
    ),
    load: Path | None = option(
        None, "Continue a conversation that /save wrote, with its settings.", panel=PROMPT
    ),
    no_shift: bool = option(
        False, "When the context is full, refuse a turn instead of dropping old ones.", panel=PROMPT
    ),
    read_ahead: str = option(
        AUTO,
        "Read what is typed before it is sent: on, off, or auto (not on battery).",
        choices=(AUTO, ON, OFF),
        panel=PROMPT,
    ),
    mcp: Path | None = option(
        None, "JSON file with mcpServers, whose tools the model may call.", panel=TOOLS
    ),
    allow: list[str] | None = option(
        None, "Call this tool without asking; *: all. From a pipe others are not.", panel=TOOLS
    ),
    color: str = color_option(),
) -> None:
    """Hold a conversation. Example: edgespec chat model.gguf --system "Be brief."

    In a terminal, /help lists the commands; Ctrl-C stops an answer, twice leaves. What is typed is
    read meanwhile, so that the answer begins with Enter. From a pipe,
    every line is a message or a command, and stdout carries nothing but the answers, with an empty
    line between two. Sampling that you do not set is the file's own, else temperature 0.8, as in
    serve; --temperature 0 is greedy.
    """
    sampling_options.params()  # before a model is looked for
    texts = format_options.texts()
    from edgespec.cli.chat_input import interface_bytes, read_messages
    from edgespec.cli.chat_loop import Chat, handle
    from edgespec.memory.store.cells import usual_budget
    from edgespec.models.onnx.folder import read_model
    from edgespec.setup.planning import most_prompt_tokens

    spec = read_model(model.path(plan_options))
    request = plan_options.request(
        prompt_tokens=most_prompt_tokens(spec, [system or ""]),
        max_tokens=max_tokens,
        sees=True,
        interface_bytes=interface_bytes(),
        keeps_to_form=any(texts.values()),
    )
    if request.disk_cache_bytes is None:
        request = replace(request, disk_cache_bytes=usual_budget())
    with Chat(model.name, request, color=color, answer_format=texts) as talk:
        session = talk.session
        session.sampling = sampling_options.params_with(context, spec.sampling)
        session.system, session.max_tokens = system, max_tokens
        session.stop, session.shift = tuple(stop or ()), not no_shift
        if load is not None:
            talk.load(load)
        if mcp is not None:
            talk.take_tools(mcp, allow or ())
        failed = False
        for text in read_messages(talk, ReadAhead(talk, read_ahead)):
            try:
                handle(talk, text)
            except EdgespecError as problem:
                failed = True
                error(problem)
            if not talk.next_line.is_wanted:
                break
        if failed and not sys.stdin.isatty():
            raise typer.Exit(1)
