"""`edgespec serve`: OpenAI's interface to a model, and a page to look at."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import answer_options, options
from edgespec.cli.embed import PoolingOption
from edgespec.cli.render import Progress, note, printable, size_text
from edgespec.cli.start import cancel_on_interrupt, load_engine
from edgespec.errors import UnsupportedError
from edgespec.log import PROMPTS

if TYPE_CHECKING:
    from edgespec.memory.plan.request import Request
    from edgespec.models.spec import ModelSpec
    from edgespec.sampling.params import SamplingParams
    from edgespec.serve.embeddings import EmbeddingService
    from edgespec.serve.server import Server

_KEY_VARIABLE = "EDGESPEC_API_KEY"
_END_S = 0.4  # that the model has to be freed, and the process to end
# starlette, uvicorn, asyncio and what they hold of a dozen connections, 17 MiB when imported; and
# the responses that are kept.
_INTERFACE_BYTES = (24 << 20) + (8 << 20)
_TEMPERATURE = 0.8  # llama.cpp's, where neither the command nor the file has one


@options.takes_shared_options
def serve(
    context: typer.Context,
    models: options.ModelsOptions = options.SEVERAL,
    folder: Annotated[
        Path | None,
        typer.Option("--models", help="Folder of GGUF files, which are loaded when asked for."),
    ] = None,
    any_here: Annotated[
        bool, typer.Option("--any", help="Load any model that `models list` knows when asked for.")
    ] = False,
    keep_alive: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-alive",
            help="How long an idle model stays: 5m, 0 or always; for one model NAME=5m. Default: "
            "until others need its memory.",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Name of a model that is loaded at once and stays."),
    ] = None,
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
            "--api-key",
            envvar=_KEY_VARIABLE,
            help="Key that requests have to send. All of EDGESPEC_API_KEY is one key.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with one key per line.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option("--cors", help="Origin whose web pages may use the server; *: all."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="Another name that clients use for the server: a proxy's, host.docker.internal.",
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            help="Name of the model for clients; of several models NAME=ALIAS. Default: the "
            "file's name.",
        ),
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
    any_model: Annotated[
        bool,
        typer.Option("--any-model", help="Answer requests for any model, whatever its name."),
    ] = False,
    think_budget: Annotated[
        int | None,
        typer.Option(
            "--think-budget",
            min=0,
            help="Most tokens of a thought, before the answer begins. Default: no limit.",
        ),
    ] = None,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Log prompts and answers, too (-v or --log-file)."),
    ] = False,
    pooling: PoolingOption = None,
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

    OpenAI's interface is below /v1, a page to chat with at /. Several models share one --budget:
    each is loaded when a request names it, and leaves when others need its memory. Sampling options
    are the defaults of requests. Ctrl-C stops it, and again at once. -v logs each request.
    """
    from edgespec.memory.device.track import use_one_arena
    from edgespec.serve.server import require_packages

    require_packages()
    use_one_arena()
    from edgespec.cli.serve_pool import PoolChoice, make_pool
    from edgespec.memory.plan.embedding import embeds
    from edgespec.models.onnx.folder import read_model
    from edgespec.serve.access import check_exposure, checked_keys, checked_origins
    from edgespec.serve.asked import Defaults
    from edgespec.serve.server import Server, bind

    if log_prompts:
        PROMPTS.setLevel(logging.INFO)
    given = [*_given_keys(context, api_key), *_keys_of(api_key_file)]
    keys = checked_keys(given) if given else ()
    check_exposure(host, keys)
    origins = checked_origins(cors or ())
    request = replace(
        plan_options.request(max_tokens=max_tokens or 0, sees=True),
        users=options.users_of(users),
        latency=latency,
        keeps_to_form=True,  # whatever is asked for
        interface_bytes=_INTERFACE_BYTES,
        serves=True,
    )

    def defaults(spec: ModelSpec) -> Defaults:
        return Defaults(_sampling(context, sampling_options, spec), max_tokens, think_budget)

    access: dict[str, Any] = {"keys": keys or None, "origins": origins, "hosts": allowed_host or ()}
    with bind(host, port, keys) as listener, ExitStack() as opened:
        # Bound before loading: a port in use is told at once.
        threading.Thread(target=_import_server, daemon=True).start()
        choice = PoolChoice(
            models.names, folder, any_here, keep_alive or (), pin or (), alias or ()
        )
        if choice.is_pool:
            if pooling is not None:
                raise typer.BadParameter("--pooling serves one model")
            pool, shared = make_pool(choice, request, plan_options, defaults, any_model)
            _run(opened.enter_context(Server.of_pool(pool, shared, **access)), listener)
            return
        spec = read_model(models.paths(plan_options)[0])
        if pooling is not None or embeds(spec):
            from edgespec.serve.model_file import pool_of
            from edgespec.serve.service import Shared

            service = _embedding_service(spec, request, pooling, alias, any_model)
            made = pool_of(service, service.limits), Shared(service.limits)
            _run(opened.enter_context(Server.of_pool(*made, **access)), listener)
            return
        plan, engine = load_engine(spec, request, cancel_on_interrupt(), quiet=False)
        opened.enter_context(engine)
        access |= {"names": alias or [spec.path.stem], "defaults": defaults(spec), "plan": plan}
        access |= {"any_model": any_model, "file_name": spec.path.name}
        _run(opened.enter_context(Server(engine, **access)), listener)


def _embedding_service(
    spec: ModelSpec,
    request: Request,
    pooling: str | None,
    names: list[str] | None,
    any_model: bool,
) -> EmbeddingService:
    """A loaded model that makes embeddings alone. Raises as `Embedder.load`."""
    from edgespec.memory.plan.embedding import plan_embedding
    from edgespec.serve.embeddings import EmbeddingService
    from edgespec.setup.embedding import Embedder

    plan = plan_embedding(spec, request, pooling)
    note(
        f"{printable(spec.name) or spec.path.name} {spec.file_type}, embeddings by {plan.pooling}, "
        f"texts of at most {plan.context_size} tokens, {plan.threads} threads; at most "
        f"{size_text(plan.predicted_peak_bytes)} of {size_text(plan.limit_bytes)}"
    )
    progress = Progress()
    try:
        embedder = Embedder.reserved(plan, progress)
    finally:
        progress.clear()
    return EmbeddingService(embedder, names or [spec.path.stem], any_model=any_model)


def _run(server: Server, listener: socket.socket) -> None:
    """Answer until it is stopped."""
    from edgespec.serve.running import end_within
    from edgespec.serve.server import address_of

    gc.freeze()  # what is there stays: to look it through for garbage takes several steps
    note(f"listening on {address_of(listener)}; Ctrl-C stops")
    server.run(listener)
    end_within(_END_S)  # a thread that reads a request may never end
    note("stopped")


def _sampling(
    context: typer.Context, given: answer_options.SamplingOptions, spec: ModelSpec
) -> SamplingParams:
    """How tokens are picked: what the command does not say is the file's, as in llama.cpp."""
    more: dict[str, Any] = {
        name: value
        for name, value in {"temperature": _TEMPERATURE, **spec.sampling}.items()
        if (source := context.get_parameter_source(name)) is None or source.name == "DEFAULT"
    }
    return replace(given, **more).params()


def _given_keys(context: typer.Context, keys: list[str] | None) -> list[str]:
    """Keys of the command line, else of the variable, else of a file of settings.

    The variable is one key with its spaces, where the library would make several of it; one that
    is set and empty is a blank key, where the library would take it for none.
    """
    source = context.get_parameter_source("api_key")
    if (source is None or source.name != "COMMANDLINE") and _KEY_VARIABLE in os.environ:
        return [os.environ[_KEY_VARIABLE]]
    return keys or []


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
