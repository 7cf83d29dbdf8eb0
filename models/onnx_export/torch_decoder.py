"""A decoder in torch, through transformers: loaded, run for comparison, traced by optimum.

Imported only to export a model; torch, transformers and optimum are imported inside its functions.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import BackendError, UnsupportedError

_PROBE_TOKENS = 40
_USE_GGUF = "use a GGUF file of this model"


def load_model(source: Path) -> Any:
    """The model in float32. Raises UnsupportedError for an architecture nobody knows."""
    import optimum.exporters.onnx.model_configs  # noqa: F401  (registers the architectures)
    import torch
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        TasksManager.get_exporter_config_constructor(
            "onnx",
            model_type=config.model_type,
            task="text-generation-with-past",
            library_name="transformers",
        )
    except (ValueError, KeyError) as error:
        named = json.loads((source / "config.json").read_text(encoding="utf-8"))
        raise UnsupportedError(
            f"optimum cannot export the architecture {named.get('model_type', '(none)')!r}",
            hint=_USE_GGUF,
        ) from error
    # Only the plain implementation caps attention scores.
    eager = getattr(config, "attn_logit_softcapping", None)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            local_files_only=True,
            **({"attn_implementation": "eager"} if eager else {}),
        )
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise BackendError(f"transformers cannot load {source}: {first_line(error)}") from error
    return model.eval()


def sliding_layers(model: Any) -> tuple[bool, ...]:
    """Whether each layer slides. Raises UnsupportedError for layers that do something else."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    odd = set(kinds) - {"full_attention", "sliding_attention"}
    if odd:
        raise UnsupportedError(
            f"{config.model_type} has layers of {', '.join(sorted(odd))}, which keep other states "
            f"than keys and values",
            hint=_USE_GGUF,
        )
    if not getattr(config, "sliding_window", None):
        return (False,) * int(config.num_hidden_layers)
    if kinds:
        return tuple(str(kind) == "sliding_attention" for kind in kinds)
    slides = hasattr(_module(model), "create_sliding_window_causal_mask")
    return (slides,) * int(config.num_hidden_layers)


def _module(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def reference_logits(model: Any) -> tuple[Any, Any]:
    """Some tokens and transformers' logits for them, [n] and [n, V]."""
    import torch

    ids = np.random.default_rng(0).integers(
        0, model.config.get_text_config().vocab_size, _PROBE_TOKENS
    )
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return ids, logits.float().numpy()


def trace_model(model: Any, path: Path, windows: tuple[bool, ...]) -> None:
    from optimum.exporters.onnx.convert import export_pytorch

    config = _exporter_config(model, num_masks=len(set(windows)))
    try:
        with _several_masks(model) if any(windows) else contextlib.nullcontext():
            export_pytorch(
                model,
                config,
                opset=config.DEFAULT_ONNX_OPSET,
                output=path,
                input_shapes={"batch_size": 1},
            )
    except Exception as error:  # whatever tracing runs into
        raise BackendError(
            f"optimum cannot export this {model.config.model_type} model: {first_line(error)}",
            hint=_USE_GGUF,
        ) from error


def _exporter_config(model: Any, num_masks: int) -> Any:
    """Optimum's description of the architecture, with masks for pairs of tokens."""
    import torch
    from optimum.exporters.tasks import TasksManager

    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{model.config.model_type} models count positions themselves, so drafts cannot be "
            f"verified",
            hint=_USE_GGUF,
        )
    known = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task="text-generation-with-past", library_name="transformers"
    )
    base: Any = known.func if isinstance(known, partial) else known

    class WithMasks(base):  # type: ignore[misc]
        @property
        def inputs(self) -> dict[str, dict[int, str]]:
            inputs = dict(super().inputs)
            inputs["attention_mask"] = {2: "n", 3: "total"}
            inputs["position_ids"] = {1: "n"}
            return inputs

        def generate_dummy_inputs(self, framework: str = "pt", **shapes: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = super().generate_dummy_inputs(framework, **shapes)
            count, past = inputs["input_ids"].shape[1], inputs["past_key_values"][0][0].shape[2]
            inputs["position_ids"] = torch.arange(past, past + count)[None]
            inputs["attention_mask"] = torch.zeros(1, num_masks, count, past + count)
            return inputs

    return WithMasks(model.config, task="text-generation", use_past=True, use_past_in_inputs=True)


@contextlib.contextmanager
def _several_masks(model: Any) -> Iterator[None]:
    """Let layers take their mask from those given: the first one, or the last one if they slide."""
    module, saved = _module(model), {}
    for name, place in (
        ("create_causal_mask", slice(0, 1)),
        ("create_sliding_window_causal_mask", slice(-1, None)),
    ):
        if hasattr(module, name):
            saved[name] = getattr(module, name)
            setattr(module, name, _chosen_mask(place))
    if "create_sliding_window_causal_mask" not in saved:
        raise UnsupportedError(
            f"{model.config.model_type} makes the masks of its sliding layers in a way that cannot "
            f"be exported",
            hint=_USE_GGUF,
        )
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(module, name, function)


def _chosen_mask(place: slice) -> Callable[..., Any]:
    def choose(*_arguments: Any, attention_mask: Any, **_others: Any) -> Any:
        return attention_mask[:, place]

    return choose


def first_line(error: Exception) -> str:
    """The first line of an exception's own words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
