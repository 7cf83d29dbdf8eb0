"""Models of the hub on the command line: planned first, then fetched with a progress line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.render import Progress, note, size_text, speed_text
from edgespec.errors import DownloadError

if TYPE_CHECKING:
    from edgespec.memory.plan.request import Request
    from edgespec.models.spec import ModelSpec


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
    fetching.check(wanted, None if request is None else lambda spec: _plan(spec, request))
    progress = Progress()
    try:
        path = fetching.fetch(wanted, progress)
    except KeyboardInterrupt:
        progress.clear()
        note("stopped; the same command goes on from there")
        raise
    finally:
        progress.clear()
    files, chosen = wanted.repository.files, wanted.paths[0]
    if choice.is_model(chosen):  # what is beside it is offered
        for head in choice.heads_of(files, chosen):
            note(f"a head lies beside it: hf:{wanted.repository.name}/{head}")
        if (projector := choice.projector_of(files, chosen)) is not None:
            note(f"with this it sees images: hf:{wanted.repository.name}/{projector}")
    return path


def _plan(spec: ModelSpec, request: Request) -> None:
    """Say what a file that is not here yet would take. Raises DoesNotFitError."""
    from edgespec.setup.planning import make_run_plan

    plan = make_run_plan(spec, request)
    note(
        f"would take at most {size_text(plan.predicted_peak_bytes)} of "
        f"{size_text(plan.limit_bytes)} with {plan.context_size} tokens of context, "
        f"{speed_text(plan.speed_range)} tokens/s ({plan.speed_source})"
    )
