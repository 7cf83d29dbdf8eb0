"""From options to a loaded engine, by way of the hub, and what Ctrl-C does to what takes long."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgespec.cli.render import Progress, note, printable, size_text, speed_text
from edgespec.errors import DownloadError

if TYPE_CHECKING:
    from edgespec.decode.engine import Engine
    from edgespec.memory.plan.plan import Plan, Request
    from edgespec.models.spec import ModelSpec
    from edgespec.progress import Progress as ProgressCall
    from edgespec.serve.tool_servers import ToolServers

_NATIVE_S = 0.4  # after Ctrl-C, for what a library does and the end of a load


def cancel_on_interrupt() -> threading.Event:
    """An event that the first Ctrl-C sets; the second one interrupts at once.

    A process that ignores them, as one in the background of a script does, goes on ignoring them.
    """
    cancel = threading.Event()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return cancel

    def handle(_signal: int, _frame: Any) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    signal.signal(signal.SIGINT, handle)
    return cancel


def until_set(cancel: threading.Event, progress: Progress) -> ProgressCall:
    """The same progress, which raises KeyboardInterrupt once the event is set."""

    def report(what: str, fraction: float) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        progress(what, fraction)

    return report


def end_if_interrupted(measured: dict[str, Any]) -> None:
    """End as what was interrupted does, when what was measured until then has been told."""
    if not measured["complete"]:
        note("interrupted: this is what was measured until then")
        raise typer.Exit(130)


@contextmanager
def _interrupted_at_once(cancel: threading.Event, *, is_first: bool) -> Iterator[None]:
    """The first Ctrl-C interrupts what a block does, which may ask for no event for seconds.

    `cancel` is set as well: an exception is lost where Python can pass it to nobody. A call of
    llama.cpp that goes on meanwhile, as while it fills a large cache with zeros, ends with the
    process where the load is the first one: nothing is lost then.
    """
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_signal: int, _frame: Any) -> None:
        cancel.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        with _ended_soon() if is_first else nullcontext():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ended_soon() -> Iterator[None]:
    """End the process where a block goes on for `_NATIVE_S` after Ctrl-C.

    Python hears of a signal when a call into a library returns; a pipe hears of it at once.
    """
    if sys.platform == "win32":
        yield
        return
    heard, hears = os.pipe()
    os.set_blocking(hears, False)
    is_over = threading.Event()

    def watch() -> None:
        while number := os.read(heard, 1):
            if number[0] == signal.SIGINT and not is_over.wait(_NATIVE_S):
                os._exit(130)
        os.close(heard)

    threading.Thread(target=watch, daemon=True).start()
    before = signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        is_over.set()
        os.close(hears)


def load_engine(
    spec: ModelSpec,
    request: Request,
    cancel: threading.Event,
    *,
    quiet: bool,
    is_first: bool = True,
) -> tuple[Plan, Engine]:
    """Plan and load a model with a progress line; KeyboardInterrupt when cancelled meanwhile.

    Where it `is_first` of what the process does, Ctrl-C ends that within 0.5 s.
    """
    progress = Progress()
    report = until_set(cancel, progress)
    with _interrupted_at_once(cancel, is_first=is_first):
        if cancel.is_set():  # while modules were imported and the header was read
            raise KeyboardInterrupt
        from edgespec.setup.loading import load_plan, plan_to_load

        with progress:
            plan = plan_to_load(spec, request, report)
        if not quiet:
            note(headline(spec, plan))
        with progress:
            engine = load_plan(spec, plan, progress=report)
    if cancel.is_set():
        engine.close()
        raise KeyboardInterrupt
    if engine.backend.capabilities.place and not quiet:
        note(f"runs on {engine.backend.capabilities.place}")
    return plan, engine


def headline(spec: ModelSpec, plan: Plan) -> str:
    """What was chosen, in one line."""
    drafts = "no drafts" if plan.drafter == "none" else f"{plan.drafter} drafts where they pay"
    if plan.switch is not None:
        drafts += f", {plan.switch.name} writes what it is confident about (lossy)"
    return (
        f"{printable(spec.name) or spec.path.name} {spec.file_type}, {plan.context_size} tokens of "
        f"context, {plan.threads} threads, {drafts}; at most "
        f"{size_text(plan.predicted_peak_bytes)} of {size_text(plan.limit_bytes)} "
        f"{'free' if plan.limit_bytes == plan.available_bytes else 'budget'}"
    )


def pull(repository: str, tag: str, request: Request | None) -> Path:
    """Bring a model of the hub into the cache; without a request, whether it fits or not.

    One that is here is enough where the hub does not answer, and nothing is written for it.
    """
    from edgespec.models.hub import choice, fetching
    from edgespec.models.hub.resolve import cached

    try:
        wanted = fetching.find(repository, tag)
    except DownloadError as problem:
        if (path := cached(repository, tag)) is None:
            raise
        note(f"{path.name} is here already; a newer one is not looked for: {problem}")
        return path
    if (path := fetching.here(wanted)) is not None:
        note(f"{wanted.name} is here already")
        return path
    note(f"{wanted.name}: {size_text(wanted.file_bytes)}, from the hub")
    fetching.check(wanted, None if request is None else lambda spec: _tell_plan(spec, request))
    try:
        with Progress() as progress:
            path = fetching.fetch(wanted, progress)
    except KeyboardInterrupt:
        note("stopped; the same command goes on from there")
        raise
    files, chosen = wanted.repository.files, wanted.paths[0]
    if choice.is_model(chosen):  # what is beside it is offered
        for head in choice.heads_of(files, chosen):
            note(f"a head lies beside it: hf:{wanted.repository.name}/{head}")
        if (projector := choice.projector_of(files, chosen)) is not None:
            note(f"with this it sees images: hf:{wanted.repository.name}/{projector}")
    return path


def _tell_plan(spec: ModelSpec, request: Request) -> None:
    """Say what a file that is not here yet would take. Raises DoesNotFitError."""
    from edgespec.setup.planning import make_run_plan

    plan = make_run_plan(spec, request)
    note(
        f"would take at most {size_text(plan.predicted_peak_bytes)} of "
        f"{size_text(plan.limit_bytes)} with {plan.context_size} tokens of context, "
        f"{speed_text(plan.speed_range)} tokens/s ({plan.speed_source})"
    )


def start_tools(file: Path, allowed: Sequence[str]) -> ToolServers:
    """The MCP servers of a file, started. Raises as `ToolServers`."""
    from edgespec.serve.tool_servers import ToolServers

    tools = ToolServers(file, allowed, lambda text: note(printable(text), WARNING))
    names = [tool["function"]["name"] for tool in tools.tools]
    note(f"[tools: {printable(', '.join(names)) or 'none'}]")
    return tools
