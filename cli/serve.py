"""`edgespec serve`: OpenAI's interface to a model, and a page to look at."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from edgespec.cli import options
from edgespec.cli.embed import PoolingOption
from edgespec.cli.options import SamplingOptions, load_option, read_text
from edgespec.cli.render import note
from edgespec.cli.start import cancel_on_interrupt, load_engine, start_tools
from edgespec.errors import UnsupportedError
from edgespec.log import PROMPTS
from edgespec.option_fields import option

if TYPE_CHECKING:
    from edgespec.memory.plan.plan import Request
    from edgespec.models.spec import ModelSpec
    from edgespec.serve.server import Server


_KEY_VARIABLE = "EDGESPEC_API_KEY"
_END_S = 0.3  # that the model has to be freed, and the process to end
# starlette, uvicorn, asyncio and what they hold of a dozen connections, 17 MiB when imported.
_INTERFACE_BYTES = 24 << 20


@dataclass(frozen=True)
class ServeOptions(options.Group):
    """Who may ask for what.

    Args:
        host: Address to listen on; any but this machine's own needs a key.
        port: Port to listen on; 0: a free one.
        api_key: Key that requests have to send. All of EDGESPEC_API_KEY is one key.
        api_key_file: File with one key per line.
        cors: Origin whose web pages may use the server; *: all.
        allowed_host: Another name that clients use for the server: a proxy's, host.docker.internal.
        max_tokens: Most tokens of an answer. Default: the rest of the context.
        any_model: Answer requests for any model, whatever its name.
        think_budget: Most tokens of a thought, before the answer begins. Default: no limit.
        log_prompts: Log prompts and answers, too (-v or --log-file).
        mcp: JSON file with mcpServers, whose tools the page offers to the model.
        allow: The page calls this tool without asking; *: all.
    """

    TITLE: ClassVar[str] = options.SERVER

    host: str = option("127.0.0.1")
    port: int = option(8080, low=0, high=65535)
    api_key: list[str] | None = option(None, more={"envvar": _KEY_VARIABLE})
    api_key_file: Path | None = option(None)
    cors: list[str] | None = option(None)
    allowed_host: list[str] | None = option(None)
    max_tokens: int | None = option(
        None, also="-n", panel=options.PROMPT, low=1, by_itself={-1: None}
    )
    any_model: bool = option(False, panel=options.OTHERS)
    think_budget: int | None = option(None, panel=options.OTHERS, low=0)
    log_prompts: bool = option(False, panel=options.LOG)
    mcp: Path | None = option(None, panel=options.TOOLS)
    allow: list[str] | None = option(None, panel=options.TOOLS)
    pooling: PoolingOption = None
    users: int | None = load_option(
        "users", default=None, also="--parallel -np", panel=options.OTHERS
    )

    def request(self, plan_options: options.PlanOptions) -> Request:
        """What each model is planned for."""
        return plan_options.request(
            max_tokens=self.max_tokens or 0,
            sees=True,
            users=self.users,
            keeps_to_form=True,  # whatever is asked for
            interface_bytes=_INTERFACE_BYTES,
            serves=True,
            pooling=self.pooling,
        )

    def access(self, context: typer.Context) -> dict[str, Any]:
        """Who may ask, as arguments of `Server`. Raises UnsupportedError for what is not safe."""
        from edgespec.serve.access import check_exposure, check_tools, checked_keys, checked_origins

        given, source = self.api_key or [], context.get_parameter_source("api_key")
        if (source is None or source.name != "COMMANDLINE") and _KEY_VARIABLE in os.environ:
            # One key with its spaces, of which the library would make several; one that is set and
            # empty is a blank key, which the library would take for none.
            given = [os.environ[_KEY_VARIABLE]]
        given = [*given, *_keys_of(self.api_key_file)]
        keys = checked_keys(given) if given else ()
        check_exposure(self.host, keys)
        origins = checked_origins(self.cors or ())
        hosts = self.allowed_host or ()
        if self.mcp is not None:
            check_tools(keys, origins, hosts)
        return {"keys": keys or None, "origins": origins, "hosts": hosts}


def serve(
    context: typer.Context,
    models: options.ModelsOptions,
    pool_options: options.PoolOptions,
    wanted: ServeOptions,
    plan_options: options.PlanOptions,
    sampling_options: SamplingOptions,
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
    from edgespec.cli.serve_pool import make_pool
    from edgespec.memory.plan.embedding import check_options, embeds
    from edgespec.models.onnx.folder import read_model
    from edgespec.serve.parsing import Defaults
    from edgespec.serve.server import Server, bind

    if wanted.log_prompts:
        PROMPTS.setLevel(logging.INFO)
    access, request = wanted.access(context), wanted.request(plan_options)

    def defaults(spec: ModelSpec) -> Defaults:
        sampling = sampling_options.params_with(context, spec.sampling)
        return Defaults(sampling, wanted.max_tokens, wanted.think_budget)

    with bind(wanted.host, wanted.port, access["keys"] or ()) as listener, ExitStack() as opened:
        # Bound before loading: a port in use is told at once.
        if wanted.mcp is not None:
            access["tools"] = start_tools(wanted.mcp, wanted.allow or ())
            opened.callback(access["tools"].close)
        # While the model is read.
        modules = "edgespec.serve.app", "edgespec.serve.running"
        threading.Thread(target=lambda: [*map(import_module, modules)], daemon=True).start()
        is_pool = pool_options.is_pool(models.names)
        if is_pool and wanted.pooling is not None:
            raise typer.BadParameter("--pooling serves one model")
        name = next(iter(models.names), None)
        spec = None if is_pool else read_model(options.model_path(name, plan_options))
        if spec is None or embeds(spec, request.pooling):
            if spec is not None:  # its texts need no engine, and most options mean nothing to it
                check_options(spec, request)
                pool_options = replace(pool_options, keep_alive=["always"])
            pool = make_pool(
                models.names, pool_options, request, plan_options, defaults, wanted.any_model
            )
            _run(opened.enter_context(Server(pool, **access)), listener)
            return
        plan, engine = load_engine(spec, request, cancel_on_interrupt(), quiet=False)
        opened.enter_context(engine)
        access |= {"names": pool_options.alias or [spec.path.stem], "defaults": defaults(spec)}
        access |= {"any_model": wanted.any_model, "file_name": spec.path.name, "plan": plan}
        _run(opened.enter_context(Server(engine, **access)), listener)


def _run(server: Server, listener: socket.socket) -> None:
    """Answer until it is stopped."""
    from edgespec.serve.running import end_within
    from edgespec.serve.server import address_of

    gc.freeze()  # what is there stays: to look it through for garbage takes several steps
    note(f"listening on {address_of(listener)}; Ctrl-C stops")
    server.run(listener)
    end_within(_END_S)  # a thread that reads a request may never end
    note("stopped")


def _keys_of(file: Path | None) -> list[str]:
    """The keys in a file. Raises UnsupportedError where there are none."""
    if file is None:
        return []
    keys = [line.strip() for line in (read_text(file) or "").splitlines() if line.strip()]
    if not keys:
        raise UnsupportedError(f"there is no key in {file}", hint="write one key a line")
    return keys
