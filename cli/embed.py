"""`edgespec embed`: vectors of texts."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.options import PROMPT, load_option, named_option
from edgespec.cli.render import Progress, embedding_memory_json, printable
from edgespec.errors import ModelNotFoundError, UnsupportedError
from edgespec.option_fields import argument, option
from edgespec.paths import stdin_lines

PoolingOption = Annotated[
    str | None,
    typer.Option(
        "--pooling",
        help="What stands for a text: mean, cls, last or rank. Default: what the file says.",
    ),
]


def embed(
    context: typer.Context,
    model: str | None = argument(
        "GGUF file, hf:OWNER/REPO[:QUANT], ollama:NAME[:TAG], bge-small.", panel=PROMPT
    ),
    texts: list[str] | None = argument("The texts. Default: the lines of stdin."),
    named: str | None = named_option(),
    pooling: PoolingOption = None,
    dimensions: int | None = option(None, "Keep the first N, if the model allows it.", low=1),
    truncate: bool = option(False, "Cut off texts that are longer than the context."),
    budget: int | None = load_option("budget_bytes"),
    ctx: int | None = load_option(
        "context_size", help="Tokens of the longest text. Default: 2048."
    ),
    threads: int | None = load_option("threads", help="Most CPU threads. Default: cores."),
    as_json: options.JsonOption = False,
) -> None:
    """Turn texts into vectors. Example: edgespec embed bge-small "a text" "another text"

    Prints a line of numbers for each text, in their order; --json one document.
    """
    from edgespec.memory.device.track import peak_resident_bytes
    from edgespec.memory.plan.embedding import plan_embedding
    from edgespec.memory.plan.options import LoadOptions
    from edgespec.models.hub.resolve import EMBEDDING_MODELS
    from edgespec.models.spec import read_model_spec
    from edgespec.setup.embedding import Embedder

    source = context.get_parameter_source("named")
    if source is not None and source.name == "COMMANDLINE" and model is not None:
        texts, model = [model, *(texts or ())], None
    name = model or named
    if name is None:
        known = ", ".join(EMBEDDING_MODELS)
        raise typer.BadParameter(f"no model: name it first, or with -m; the hub has {known}")
    if texts is None and sys.stdin.isatty():
        raise typer.BadParameter("no texts: give them as arguments, or one a line on stdin")
    wanted = LoadOptions(budget_bytes=budget, context_size=ctx, threads=threads)
    try:
        with Progress() as progress:
            path = options.model_path(name)
            plan = plan_embedding(read_model_spec(path), wanted, pooling)
            embedder = Embedder(plan, progress=progress)
    except ModelNotFoundError as problem:
        if " " not in name:
            raise
        hint = f"name a model before the texts, or with -m; {problem.hint}"
        raise ModelNotFoundError(f"{printable(name)[:60]} is no model", hint=hint) from problem
    given = stdin_lines() if texts is None else texts
    with embedder:
        lines = []
        for line in given:
            if isinstance(line, UnsupportedError):  # of stdin, what is no text
                raise line
            lines.append(line)
        made = embedder.embed(lines, dimensions=dimensions, truncate=truncate)
    rows = made.rows.tolist()
    if as_json:
        memory = {**embedding_memory_json(plan), "measured_peak_bytes": peak_resident_bytes()}
        tokens = [*made.num_tokens]
        print(json.dumps({"embeddings": rows, "tokens": tokens, "memory": memory}))
        return
    for row in rows:
        print(" ".join(f"{value:.8g}" for value in row))
