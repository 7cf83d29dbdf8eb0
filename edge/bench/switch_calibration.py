"""Thresholds for a pair of models: `edgespec profile MODEL --switch SMALL`.

The models write to the same prompts in turn, both read all of the text, and the policy is chosen
that does what is wanted along it. Then both write together under that policy, and the choice is
made again with that text: who writes changes what is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from edgespec.backends.base import Backend, Logits
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL, Result
from edgespec.errors import UnsupportedError
from edgespec.measure.prompts import PROMPTS
from edgespec.memory.plan.request import Request
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.loading import load_plan, plan_to_load
from edgespec.switching.engine import (
    SwitchingEngine,
    Trace,
    accepted_drafts,
    choose,
    entropy_nats,
    forecast,
    sweep,
)
from edgespec.switching.planning import Calibrated, Curves, SwitchPolicy, keep_switch

_SECONDS = 60.0
_MOST_TOKENS, _LEAST_TOKENS = 96, 24  # of a text
_SETTINGS = 10
_MOST_DRAFTED = 8


def calibrate(
    spec: ModelSpec,
    request: Request,
    *,
    large_share: float | None = None,
    quality: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find the policy for a wanted share of large-model tokens, or a wanted quality, and keep it.

    Args:
        request: names the small model (`switch`).
        large_share: part of the tokens that the large model is to write, 0 to 1.
        quality: part of the disagreement between the models that is to be removed, 0 to 1.

    Raises UnsupportedError for a wish out of range, and as `edgespec.load` does.
    """
    report = progress or (lambda _what, _fraction: None)
    if request.switch is None:
        raise UnsupportedError("there is no model to switch to", hint="name one with --switch")
    for name, wish in (("--large-share", large_share), ("--quality", quality)):
        if wish is not None and not 0.0 <= wish <= 1.0:
            raise UnsupportedError(f"{name} {wish} is not between 0 and 1")
    small_spec = read_model_spec(request.switch)
    wishes = {"large_share": large_share, "quality": quality}
    plan = plan_to_load(spec, request, report)
    traces, results, half = list[Trace](), list[Result](), len(PROMPTS) // 2
    with load_plan(spec, plan, progress=report) as engine:
        assert isinstance(engine, SwitchingEngine)
        curves = curves_of(engine)
        # As long as there is time for: texts are written by one model and read by both.
        both_ms = sum(curve.step_ms(1, 128) for curve in curves.values())
        tokens = round(_SECONDS * 1e3 / (len(PROMPTS) * both_ms))
        tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, tokens))
        for number, prompt in enumerate(PROMPTS[:half]):
            report("writing with both models", number / half)
            for model in (LARGE, SMALL):
                traces.append(_written(engine, SwitchPolicy.always(model), prompt.text, tokens)[0])
        found = choose(traces, curves, **wishes)
        for number, prompt in enumerate(PROMPTS[half:]):
            report("writing in turns", number / half)
            trace, result = _written(engine, found.policy, prompt.text, tokens)
            traces.append(trace)
            results.append(result)
    found = choose(traces, curves, **wishes)
    written = sum(len(result.token_ids) - 1 for result in results)  # by decoding
    drafted = accepted_drafts(traces, _MOST_DRAFTED)
    kept = Calibrated(found.policy, found.large_share, found.quality, found.turns, drafted)
    keep_switch(spec, small_spec, kept)
    depth = sum(trace.depth for trace in traces) // len(traces)
    return {
        "large": spec.path.name,
        "small": small_spec.path.name,
        "wanted": {name: wish for name, wish in wishes.items() if wish is not None},
        "policy": kept.policy.as_json(),
        "expected": found.as_json(),
        "alone": {
            model: forecast(SwitchPolicy.always(model), traces, curves).as_json()
            for model in (LARGE, SMALL)
        },
        "lossless": {"drafting_tokens_per_s": kept.drafting_tokens_per_s(curves, depth)},
        "tokens": sum(len(trace.agrees) for trace in traces),
        "points": [point.as_json() for point in sweep(traces, curves, _SETTINGS)],
        "measured": {
            "large_share": sum(result.large_share for result in results) / len(results),
            "tokens_per_s": written / sum(result.counters.decode_s for result in results),
        },
    }


def curves_of(engine: SwitchingEngine) -> Curves:
    """Step times of both models as they are now; raises UnsupportedError without any."""
    large, small = engine.curve, engine.small.curve
    if large is None or small is None:
        raise UnsupportedError(
            "without drafters step times are not measured, and nothing says how fast turns are",
            hint="leave out --drafter none",
        )
    return {LARGE: large.resized(large.max_nodes), SMALL: small.resized(small.max_nodes)}


def forced_rows(backend: Backend, prompt: Sequence[int], text: Sequence[int]) -> Iterator[Logits]:
    """Logits of each token of a text behind a prompt, as if the model had written it.

    Rows are views that the next step overwrites.
    """
    backend.truncate(0)
    before, size = len(prompt) - 1, backend.batch_size
    for start in range(0, before, size):
        backend.prefill(prompt[start : min(start + size, before)])
    tokens = [prompt[-1], *text[:-1]]
    for start in range(0, len(tokens), backend.max_nodes):
        nodes = tokens[start : start + backend.max_nodes]
        yield from backend.verify(DraftTree.chain(nodes))
        backend.commit(range(len(nodes)))


def trace_of(engine: SwitchingEngine, prompt: Sequence[int], text: Sequence[int]) -> Trace:
    """What both models make of a text. Both caches are empty afterwards."""
    large, small = (_read(one, prompt, text) for one in (engine, engine.small))
    agrees = [a[1] == b[1] for a, b in zip(large, small, strict=True)]
    return Trace([a[0] for a in large], [b[0] for b in small], agrees, len(prompt))


def _read(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> list[tuple[float, int]]:
    """Entropy in nats and best token at each place of a text."""
    with engine.scheduler.exclusive():
        rows = forced_rows(engine.backend, prompt, text)
        read = [(entropy_nats(row), int(np.argmax(row))) for row in rows]
        engine.backend.truncate(0)
    return read


def _written(
    engine: SwitchingEngine, policy: SwitchPolicy, prompt: str, tokens: int
) -> tuple[Trace, Result]:
    """A text of a policy under both models, and how it came about."""
    engine.policy = policy
    ids = engine.encode(prompt)
    result = engine.generate(ids, max_tokens=tokens)
    return trace_of(engine, ids, result.token_ids), result
