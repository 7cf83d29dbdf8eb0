"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.drafters import NAMES
from edgespec.memory.footprint import KV_TYPE_BYTES
from edgespec.memory.plan import DEVICES, LLAMACPP, ONNX, PREFERENCES, Request

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)
_UNITS = {
    f"{letter}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@dataclass(frozen=True)
class PlanOptions:
    """What every command that plans a run can be asked for; see `takes_plan_options`."""

    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Most memory to take: 512MiB, 1.5GiB, 800MB. Default: free."),
    ] = None
    prefer: Annotated[
        str,
        typer.Option("--prefer", help="speed, context (may take q8_0 for KV) or quality (never)."),
    ] = "speed"
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", "-c", min=1, help="Tokens of context. Default: chosen to fit."),
    ] = None
    drafter: Annotated[
        str,
        typer.Option("--drafter", help="auto, none, or a list of suffix, recycling, model."),
    ] = "auto"
    draft_model: Annotated[
        Path | None,
        typer.Option("--draft-model", help="GGUF to draft: a smaller model or an early exit."),
    ] = None
    draft_max: Annotated[
        int | None,
        typer.Option("--draft-max", min=0, max=255, help="Most tokens drafted at once."),
    ] = None
    kv_type: Annotated[
        str, typer.Option("--kv-type", help="KV cache type: f16, q8_0, q4_0 or auto (f16).")
    ] = "auto"
    gpu_layers: Annotated[
        str,
        typer.Option("--gpu-layers", "-ngl", help="Layers on the GPU: a number or auto (all)."),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, help="CPU threads. Default: physical cores."),
    ] = None
    backend: Annotated[str, typer.Option("--backend", help="auto, llamacpp or onnx.")] = "auto"
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, gpu, or npu (through ONNX Runtime).")
    ] = "auto"
    exact: Annotated[
        bool, typer.Option("--exact", help="Only settings whose output equals plain decoding's.")
    ] = False

    remember: Annotated[
        bool, typer.Option("--remember", help="Keep what is generated, to draft from it later.")
    ] = False

    def request(self, *, prompt_tokens: int = 0, max_tokens: int = 0) -> Request:
        """A planner's request; a text that is no value of its option is misuse."""
        _one_of("--backend", self.backend, ("auto", LLAMACPP, ONNX))
        _one_of("--device", self.device, DEVICES)
        for name in self.drafter.split(","):
            _one_of("--drafter", name.strip(), ("auto", "none", *NAMES))
        _one_of("--kv-type", self.kv_type, ("auto", *KV_TYPE_BYTES))
        _one_of("--prefer", self.prefer, PREFERENCES)
        layers = self.gpu_layers
        if layers != "auto" and not layers.lstrip("-").isdigit():
            raise typer.BadParameter(f"--gpu-layers {layers} is neither a number nor auto")
        return Request(
            budget_bytes=None if self.budget is None else _size_bytes(self.budget),
            prefer=self.prefer,
            backend=self.backend,
            device=self.device,
            context_size=self.ctx,
            drafter=self.drafter,
            draft_model=self.draft_model and self.draft_model.expanduser(),
            draft_max=self.draft_max,
            kv_type=None if self.kv_type == "auto" else self.kv_type,
            gpu_layers=None if layers == "auto" else int(layers),
            threads=self.threads,
            exact=self.exact,
            remember=self.remember,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )


DEFAULTS = PlanOptions()


def takes_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `PlanOptions` in place of its parameter `plan_options`.

    Typer reads options from a signature, so the command gets one with all of them written out.
    """
    names = [field.name for field in fields(PlanOptions)]
    shared = inspect.signature(PlanOptions, eval_str=True).parameters.values()
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += shared if parameter.name == "plan_options" else [parameter]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        chosen = PlanOptions(**{name: values.pop(name) for name in names})
        command(plan_options=chosen, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    replaced = [parameter.replace(kind=keyword) for parameter in parameters]
    wrapper.__signature__ = inspect.Signature(replaced)  # type: ignore[attr-defined]
    return wrapper


def _size_bytes(text: str) -> int:
    """Bytes of a size such as 1.5GiB; a number alone has no unit and is misuse."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"--budget {text} is no size such as 512MiB, 1.5GiB or 800MB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size < 1 << 62:
        raise typer.BadParameter(f"--budget {text} is out of range")
    return int(size)


def _one_of(option: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise typer.BadParameter(f"{option} {value} is none of {', '.join(values)}")


def model_path(model: str | None) -> Path:
    """The file that was named, or the embedded model."""
    from edgespec.models.embedded import embedded_model

    return embedded_model() if model is None else Path(model).expanduser()
