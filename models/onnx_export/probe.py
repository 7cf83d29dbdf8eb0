"""Does an exported graph compute what transformers does: on a chain, with a past, on a tree?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import BackendError, UnsupportedError
from edgespec.models.onnx_export.torch_decoder import first_line

_PROBE_PAST = 23
_SAME = 1e-2  # of the spread of the logits; float32 rounds a hundred times finer
_MASKED = -1e4


class ExportedGraph:
    """One step of a graph after the other, with all keys and values kept here."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime cannot load the export: {first_line(error)}",
                hint="convert this model to GGUF instead",
            ) from error
        self.window = facts["sliding_window"]
        self.past = {
            f"past_{what}.{layer}": np.zeros((1, heads, 0, length), np.float32)
            for layer, heads in enumerate(facts["num_kv_heads"])
            for what, length in (
                ("key", facts["key_length"][layer]),
                ("value", facts["value_length"][layer]),
            )
        }

    def step(self, ids: Any, positions: Any, sees: Any, past: dict[str, Any]) -> tuple[Any, Any]:
        """Logits [n, V] and the past with the new rows; `sees` is [n, past + n], true or false."""
        inputs = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "position_ids": np.asarray(positions, np.int64)[None],
            "rows": np.arange(len(ids)),
            **past,
        }
        cells = np.concatenate((np.arange(sees.shape[1] - len(ids)), positions))
        near = np.asarray(positions)[:, None] - cells[None] < self.window
        wanted = {value.name for value in self.session.get_inputs()}
        for name, seen in (
            ("attention_bias", sees),
            ("attention_bias_window", sees & near),
        ):
            if name in wanted:
                inputs[name] = np.where(seen, 0, _MASKED).astype(np.float32)[None, None]
        names = ["logits", *(name.replace("past", "new") for name in past)]
        logits, *new = self.session.run(names, inputs)
        grown = [
            np.concatenate((old, rows), 2) for old, rows in zip(past.values(), new, strict=True)
        ]
        return logits, dict(zip(past, grown, strict=True))


def require_same_logits(runner: ExportedGraph, ids: Any, expected: Any) -> None:
    """Refuse a graph that computes anything else than transformers, on a chain or on a tree."""
    limit = _SAME * float(expected.std())
    count, past = len(ids), _PROBE_PAST
    causal = np.tril(np.ones((count, count), bool))
    first, cache = runner.step(ids[:past], range(past), causal[:past, :past], runner.past)
    second, _ = runner.step(ids[past:], range(past, count), causal[past:], cache)
    chain = float(np.abs(np.concatenate((first, second)) - expected).max())
    # Two copies of the rest as branches: node after node of one, then of the other.
    rest = count - past
    sees = np.zeros((2 * rest, past + 2 * rest), bool)
    sees[:, :past] = True
    sees[:rest, past : past + rest] = sees[rest:, past + rest :] = causal[:rest, :rest]
    places = [*range(past, count)] * 2
    branches, _ = runner.step([*ids[past:], *ids[past:]], places, sees, cache)
    tree = float(np.abs(branches - np.concatenate((expected[past:],) * 2)).max())
    if not max(chain, tree) <= limit:
        raise UnsupportedError(
            f"the exported graph does not compute what transformers does: logits differ by "
            f"{chain:.3g} on a chain and {tree:.3g} on a tree, where {limit:.3g} is rounding",
            hint="convert this model to GGUF instead",
        )


def require_finite_logits(runner: ExportedGraph, ids: Any) -> None:
    sees = np.tril(np.ones((len(ids), len(ids)), bool))
    logits, _ = runner.step(ids, range(len(ids)), sees, runner.past)
    if not np.isfinite(logits).all():
        raise BackendError(
            "the quantized graph gives logits that are no numbers", hint="try --bits 8"
        )
