"""What types of the KV cache lose with a file: KL divergence from f16, measured once for each.

One model loses nothing by a q4_0 cache and another one all of its sense (docs/memory.md has a
table). So nothing but q8_0 is chosen unmeasured, and who asks for a type is told what it loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING
from warnings import warn

import numpy as np

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.errors import EdgespecError, EdgespecWarning, UnsupportedError
from edgespec.measure.prompts import PROMPTS
from edgespec.memory.bytes.config import KV_FLOATS, KV_TYPE_BYTES
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.placing import MOST_KV_LOSS, SMALLER_KV_TYPES, may_choose
from edgespec.memory.plan.plan import Plan
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress
from edgespec.quantize.quality import Loading, QuantizationLoss, make_reference, quality_of, score
from edgespec.quantize.texts import CountedText
from edgespec.setup.stored import keep_kv_losses, stored_kv_losses

if TYPE_CHECKING:
    from typing_extensions import Unpack

TOKENS = 512  # of the text that is read twice; the table of docs/memory.md is of as many
_LEAST_TOKENS = 128


def measure_kv_losses(
    spec: ModelSpec,
    kinds: Sequence[str],
    *,
    threads: int,
    text: str | None = None,
    tokens: int = TOKENS,
    progress: Progress = lambda _what, _part: None,
    **loading: Unpack[Loading],
) -> Iterator[tuple[str, Callable[[], QuantizationLoss] | None]]:
    """What caches of these types (as `kv_name` has them) lose against f16, one after the other.

    Over the first `tokens` of a text, or of the built-in prompts. The first one is f16 itself, with
    None. Of the others it is computed when it is asked for: resampling brings numpy.random into the
    process, 7 MiB that no plan has, and a load needs the mean alone. Each mean is kept before the
    next one is measured, so an interruption loses none. One file is open at a time, with a cache as
    long as the text. Raises UnsupportedError where the text is too short.
    """
    with open_tokenizer(spec.path) as tokenizer:
        start = [] if spec.bos_id is None else [spec.bos_id]
        read = text or "\n\n".join(prompt.text for prompt in PROMPTS)
        ids = np.array([*start, *tokenizer.encode(read)][:tokens], np.int32)
    if len(ids) < min(tokens, _LEAST_TOKENS):
        raise UnsupportedError(
            f"a cache is measured over {_LEAST_TOKENS} tokens of text, and there are {len(ids)}",
            hint="name a longer text with --data",
        )
    counted = np.ones(len(ids), np.bool_)
    counted[-1] = False
    progress(_measuring(kinds[0]), 0.0)
    reference = make_reference(
        spec.path, [CountedText(ids, counted)], threads=threads, top=512, **loading
    )
    yield "f16", None
    for number, kind in enumerate(kinds, 1):
        progress(_measuring(kind), number / (1 + len(kinds)))
        how: Loading = {**loading, "kv_type": kind}
        scores = score(spec.path, reference, threads=threads, **how)
        keep_kv_losses(spec, {kind: float(scores.kl.mean(dtype=np.float64))})
        yield kind, partial(quality_of, reference, scores)
    progress(_measuring(kinds[-1]), 1.0)


def _measuring(kind: str) -> str:
    return f"measuring what a {kind} cache loses (once)"


def know_cache_type(spec: ModelSpec, plan: Plan, report: Progress) -> None:
    """Measure what the cache of a plan loses, where nobody did, and warn where that is much.

    In the memory of the plan, before it is loaded: the cache of the text takes no more than the
    plan's. Not measured where that is too short, or layers lie on workers.
    """
    kind = plan.kv_type
    if plan.backend != LLAMACPP or {plan.kv_type_k, plan.kv_type_v} <= {*KV_FLOATS}:
        return
    if kind not in stored_kv_losses(spec):
        _measure(spec, plan, kind, report)
    loss = stored_kv_losses(spec).get(kind, 0.0)
    if loss > MOST_KV_LOSS:
        warn(
            f"a {kind} cache makes answers that are not this model's: it loses {loss:.2g} nats "
            f"against f16, and {MOST_KV_LOSS} is much; keys are what is fragile: try "
            "--cache-type-k q8_0 --cache-type-v q4_0",
            EdgespecWarning,
            stacklevel=2,
        )


def measure_smaller_types(spec: ModelSpec, plan: Plan, report: Progress) -> bool:
    """Measure the next smaller type that `--prefer context` could take; False if there is none."""
    is_short = plan.context_size < plan.wanted_context
    known = stored_kv_losses(spec)
    for kind in SMALLER_KV_TYPES:
        is_next = kind == plan.kv_type or is_short
        if is_next and kind not in known and may_choose(kind, [spec], {kind: 0.0}):
            return _measure(spec, plan, kind, report)
    return False


def _measure(spec: ModelSpec, plan: Plan, kind: str, report: Progress) -> bool:
    """Whether a type could be measured in the memory of a plan."""
    if any(one.worker for one in plan.devices) or plan.overrides:
        return False
    cell = KV_TYPE_BYTES[plan.kv_type_k] + KV_TYPE_BYTES[plan.kv_type_v]
    tokens = min(TOKENS, int(plan.cells * cell / (2 * KV_TYPE_BYTES["f16"])))
    if tokens < _LEAST_TOKENS:
        return False
    loading: Loading = {
        "batch_size": min(32, max(8, plan.max_nodes)),  # a plan has room for its steps' rows
        "kernels": plan.kernels,
        "tied": spec.tied_embeddings,
        "gpu_layers": plan.gpu_layers,
    }
    try:
        for _ in measure_kv_losses(
            spec, [kind], threads=plan.threads, tokens=tokens, progress=report, **loading
        ):
            pass
    except EdgespecError:  # a vocabulary without words for the text; loading says what else it is
        return False
    return True
