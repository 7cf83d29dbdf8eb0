"""`edgespec serve`: OpenAI's interface to a model, and a page to look at."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli import answer_options, options
from edgespec.cli.render import note
from edgespec.cli.start import cancel_on_interrupt, load_engine
from edgespec.errors import UnsupportedError

# starlette, uvicorn, asyncio and what they hold of a dozen connections; 17 MiB when imported.
_INTERFACE_BYTES = 24 << 20


@options.takes_shared_options
def serve(
    model: options.ModelOptions = options.EMBEDDED,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen on; any but this machine's own needs a key."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free one.")
    ] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", envvar="EDGESPEC_API_KEY", help="Key that requests have to send."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with one key per line.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option("--cors", help="Origin whose web pages may use the server; *: all."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", help="Name of the model for clients. Default: the file's name."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Most tokens of an answer. Default: the rest of the context.",
        ),
    ] = None,
    users: options.UsersOption = "auto",
    latency: Annotated[
        float,
        typer.Option(
            "--latency",
            min=0.0,
            help="Most that reading one prompt adds to a step of other answers, in steps.",
        ),
    ] = 1.0,
    plan_options: options.PlanOptions = options.DEFAULTS,
    sampling_options: answer_options.SamplingOptions = answer_options.GREEDY,
) -> None:
    """Serve OpenAI's interface and a chat page. Example: edgespec serve model.gguf --port 8080

    OpenAI's interface is below /v1, a page to chat with at /. Sampling options are the defaults of
    requests that do not say otherwise. Ctrl-C stops it.
    """
    from edgespec.serve.packages import require_packages

    require_packages()
    from edgespec.models.onnx.folder import read_model
    from edgespec.serve.defaults import Defaults
    from edgespec.serve.server import Server, address_of, bind, check_exposure

    keys = [*(api_key or []), *_keys_of(api_key_file)]
    check_exposure(host, keys)
    sampling = sampling_options.params()
    spec = read_model(model.path(plan_options))
    request = replace(
        plan_options.request(max_tokens=max_tokens or 0),
        users=options.users_of(users),
        latency=latency,
    )
    with bind(host, port) as listener:  # before the model is loaded: a port in use is told at once
        threading.Thread(target=_import_server, daemon=True).start()
        plan, engine = load_engine(
            spec,
            replace(request, interface_bytes=_INTERFACE_BYTES),
            cancel_on_interrupt(),
            quiet=False,
        )
        with (
            engine,
            Server(
                engine,
                names=alias or [spec.path.stem],
                keys=keys,
                origins=cors or (),
                defaults=Defaults(sampling, max_tokens),
                plan=plan,
            ) as server,
        ):
            gc.freeze()  # what is there stays: to look it through for garbage takes several steps
            note(f"listening on {address_of(listener)}; Ctrl-C stops")
            server.run(listener)
    note("stopped")


def _import_server() -> None:
    """While the model is read."""
    import edgespec.serve.app
    import edgespec.serve.running  # noqa: F401


def _keys_of(file: Path | None) -> list[str]:
    """The keys in a file. Raises UnsupportedError where there are none."""
    if file is None:
        return []
    keys = [
        line.strip() for line in (answer_options.read_text(file) or "").splitlines() if line.strip()
    ]
    if not keys:
        raise UnsupportedError(f"there is no key in {file}", hint="write one key a line")
    return keys
