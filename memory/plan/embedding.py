"""The plan of a model that makes embeddings: its batches, and the bytes it will allocate.

A text is read at once, so that the longest one decides how much a context takes. llama.cpp has room
for a row of logits for each token of a batch, whether there is a head or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.bytes.config import MEBIBYTE, RunConfig
from edgespec.memory.bytes.footprint import (
    RUNTIME_BYTES,
    Component,
    footprint,
    multiplied_tensors,
)
from edgespec.memory.bytes.requests import requests_bytes
from edgespec.memory.bytes.simulation import ContextRequest
from edgespec.memory.device import host
from edgespec.memory.plan.machine import Machine, this_machine
from edgespec.memory.plan.options import ONNX, LoadOptions
from edgespec.memory.plan.plan import Choice, PlanBase, Request, contexts_of, threads_of
from edgespec.models.pooling import POOLINGS, RANK
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

# What this kind of model can be told, and what changes nothing; others are about writing text.
_TAKEN = {
    *("budget_bytes", "context_size", "threads", "gpu_layers", "kernels", "backend", "device"),
    *("prefer", "users", "remember", "exact", "drafter", "draft_max", "mmproj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan(PlanBase):
    """How a model that makes embeddings is loaded. Sizes are in tokens.

    `step_tokens` are computed at once, of up to `users` texts, or one longer text; with `goes_on`
    in parts of that size. `batch_size` is the longest part, which sizes the buffers.
    """

    spec: ModelSpec
    pooling: str
    step_tokens: int
    goes_on: bool  # a text may be read in parts: its last token sees all others
    limit_bytes: int
    components: tuple[Component, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def parameters(self) -> tuple[tuple[str, int], ...]:
        """Of llama.cpp's context, where they are others than those of one that writes text."""
        return (
            ("embeddings", 1),
            ("pooling_type", POOLINGS.index(self.pooling)),
            ("n_batch", self.batch_size),
            ("n_ubatch", self.batch_size),
            ("n_seq_max", self.users),
            ("n_outputs_max", 0),
        )


def embeds(spec: ModelSpec, pooling: str | None = None) -> bool:
    """Whether a model makes embeddings or scores: by what its file says, or as it is asked to."""
    return pooling is not None or spec.pooling.kind not in ("", "none")


def plan_embedding(
    spec: ModelSpec,
    options: LoadOptions,
    pooling: str | None = None,
    machine: Machine | None = None,
) -> EmbeddingPlan:
    """The plan for a model: with the longest texts that fit, where nobody says how long.

    Raises UnsupportedError for options and poolings that are not possible with this model, and
    DoesNotFitError where it does not fit.
    """
    check_options(spec, options)
    chosen = _pooling_of(spec, pooling)
    machine = machine or this_machine()
    limit = min(machine.free_bytes, options.budget_bytes or machine.free_bytes)
    request = options if isinstance(options, Request) else Request.loading(options)
    asked, trained = options.context_size, contexts_of((spec,), request).trained
    longest, least = asked or min(trained, 2048), 64
    halves = (longest >> times for times in range(1, 6) if asked is None)
    for context in [longest, *(half for half in halves if half >= least)]:
        plan = _planned(spec, request, chosen, context, limit, machine)
        if plan.predicted_peak_bytes <= limit:
            return plan
    needed = -(-plan.predicted_peak_bytes // MEBIBYTE)
    where = "free" if options.budget_bytes is None else "budget"
    raise DoesNotFitError(
        f"needs {needed} MiB for texts of {plan.context_size} tokens; {where}: "
        f"{plan.limit_bytes // MEBIBYTE} MiB",
        hint="leave out --ctx" if (asked or 0) > least else "use a smaller model file",
    )


def check_options(spec: ModelSpec, options: LoadOptions) -> None:
    """Raise UnsupportedError for options that mean nothing to a model that makes embeddings."""
    if (
        options.backend == ONNX
        or spec.format == ONNX_FORMAT
        or options.device not in ("auto", "cpu")
    ):
        raise UnsupportedError(
            "embeddings are made with llama.cpp on the processor",
            hint="name a GGUF file, and leave out --backend and --device",
        )
    usual = LoadOptions()
    for one in fields(LoadOptions):
        value = getattr(options, one.name)
        if one.name not in _TAKEN and value != getattr(usual, one.name):
            raise UnsupportedError(
                f"--{one.name.replace('_', '-')} is about writing text, and this model is loaded "
                "for embeddings",
                hint="leave it out",
            )


def _pooling_of(spec: ModelSpec, asked: str | None) -> Choice:
    """What stands for a text. Raises UnsupportedError where nothing does, and for other words."""
    own = spec.pooling.kind
    if asked is None:
        if not embeds(spec):
            raise UnsupportedError(
                f"{spec.path.name} was made to write text: its file does not say how a text "
                "becomes a vector",
                hint="--pooling last takes the state of the last token; a model made for "
                "embeddings, such as bge-small, is far better at finding what is alike",
            )
        return Choice("pooling", own, "as the file says" if own else "")
    if asked not in POOLINGS[1:]:
        raise UnsupportedError(
            f"there is no pooling {asked!r}", hint=f"use {', '.join(POOLINGS[1:])}"
        )
    if asked == RANK and own != RANK:
        raise UnsupportedError(
            f"{spec.path.name} has no head that ranks texts", hint="use a reranking model"
        )
    return Choice("pooling", asked, "as asked")


def _planned(
    spec: ModelSpec,
    request: Request,
    pooling: Choice,
    context: int,
    limit: int,
    machine: Machine,
) -> EmbeddingPlan:
    threads = threads_of(request)
    # Every token of a batch looks at every other one, of whichever text: 1,000 short texts with
    # all-MiniLM-L6-v2 took 1.73 s of two cores in batches of 128, and 1.85 and 2.01 s in 256 and
    # 512. More threads need more rows.
    batch = min(context, max(128, min(512, 32 * int(threads.value))))
    is_here = request.kernels != "off" and not request.gpu_layers
    is_on = is_here and not machine.missing_kernels
    kernels = Choice("kernels", "on" if is_on else "off", machine.missing_kernels or "on this CPU")
    if request.kernels == "auto" and _is_bf16(spec) and "avx512_bf16" in host.cpu_flags():
        # edgespec's keep 32 bits.
        kernels = Choice("kernels", "off", "this CPU multiplies BF16, and llama.cpp's own do so")
    # Of a batch at most; each text has a recurrent state, where the model keeps any.
    texts = max(1, min(4 if spec.keeps_state else 64, batch))
    choices = (
        pooling,
        Choice("context_size", context, "tokens of the longest text; --ctx changes it"),
        Choice("batch_size", batch, "tokens of several texts that are computed at once"),
        threads,
        kernels,
    )
    goes_on = pooling.value == "last" and spec.pooling.causal
    at_once = batch if goes_on else max(batch, context)
    config = RunConfig(
        context_size=context,
        batch_size=at_once,
        max_nodes=at_once,
        threads=int(threads.value),
        gpu_layers=request.gpu_layers or 0,
        mapped=kernels.value == "off",
        kernels=kernels.value == "on",
        users=texts,
    )
    plan = EmbeddingPlan.of(
        config,
        spec=spec,
        pooling=str(pooling.value),
        step_tokens=batch,
        goes_on=goes_on,
        limit_bytes=limit,
        choices=choices,
    )
    # What llama.cpp says that it allocates, and what that does not know of.
    (answer,) = machine.sizes([ContextRequest(spec, config, plan.parameters)])
    requests = requests_bytes(context) if request.serves else 0
    others = (
        Component("interface", request.interface_bytes, is_ceiling=True),
        Component("requests", requests, is_ceiling=True),
        Component("process", machine.process_bytes - RUNTIME_BYTES - request.interface_bytes),
    )
    parts = (*footprint(spec, config, answer), *(one for one in others if one.nbytes > 0))
    return replace(plan, components=parts)


def _is_bf16(spec: ModelSpec) -> bool:
    """Whether most bytes of the matrices are BF16."""
    nbytes = Counter[str]()
    for tensor in multiplied_tensors(spec):
        nbytes[tensor.type.name] += tensor.data_bytes
    return 2 * nbytes["BF16"] > nbytes.total()
