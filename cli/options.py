"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from edgespec.common import expanded
from edgespec.drafting.drafters import NAMES
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.footprint import KV_TYPE_BYTES
from edgespec.memory.plan.request import DEVICES, LLAMACPP, ONNX, PREFERENCES, Request

if TYPE_CHECKING:
    from edgespec.sampling.sampling import SamplingParams

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)
_UNITS = {
    f"{letter}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}

ModelArgument = Annotated[
    str | None, typer.Argument(help="GGUF file, or folder of `models export`. Default: embedded.")
]
MAX_TOKENS = 512
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens of an answer.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@dataclass(frozen=True)
class PlanOptions:
    """What every command that plans a run can be asked for; see `takes_shared_options`."""

    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Most memory to take: 512MiB, 1.5GiB, 800MB. Default: free."),
    ] = None
    prefer: Annotated[
        str,
        typer.Option(
            "--prefer", help="speed or quality (both keep f16 for KV), or context (may take less)."
        ),
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
    switch: Annotated[
        Path | None,
        typer.Option("--switch", help="Smaller GGUF that writes where it is sure: lossy, faster."),
    ] = None
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max", min=0, max=255, help="Most tokens drafted at once. Default: by memory."
        ),
    ] = None
    kv_type: Annotated[
        str,
        typer.Option(
            "--kv-type",
            help="KV cache type: f16, bf16, f32, q8_0, q4_0, or auto (f16 unless --exact, "
            "--prefer context or ONNX Runtime need another).",
        ),
    ] = "auto"
    gpu_layers: Annotated[
        str,
        typer.Option(
            "--gpu-layers", "-ngl", help="Layers on the GPU: a number, or auto (all that fit)."
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            min=1,
            help="Most CPU threads, fewer beside busy programs. Default: cores.",
        ),
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

    def request(
        self, *, prompt_tokens: int = 0, max_tokens: int = 0, is_plain_greedy: bool = False
    ) -> Request:
        """A planner's request; a text that is no value of its option is misuse."""
        one_of("--backend", self.backend, ("auto", LLAMACPP, ONNX))
        one_of("--device", self.device, DEVICES)
        check_drafter(self.drafter)
        one_of("--kv-type", self.kv_type, ("auto", *KV_TYPE_BYTES))
        one_of("--prefer", self.prefer, PREFERENCES)
        layers = self.gpu_layers
        if layers != "auto" and not re.fullmatch("-?[0-9]+", layers):
            raise typer.BadParameter(f"--gpu-layers {layers} is neither a number nor auto")
        return Request(
            budget_bytes=None if self.budget is None else size_bytes("--budget", self.budget),
            prefer=self.prefer,
            backend=self.backend,
            device=self.device,
            context_size=self.ctx,
            drafter=self.drafter,
            draft_model=self.draft_model and expanded(self.draft_model),
            switch=self.switch and expanded(self.switch),
            draft_max=self.draft_max,
            kv_type=None if self.kv_type == "auto" else self.kv_type,
            gpu_layers=None if layers == "auto" else int(layers),
            threads=self.threads,
            exact=self.exact,
            remember=self.remember,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            is_plain_greedy=is_plain_greedy,
        )


DEFAULTS = PlanOptions()

_HELP_IN_LISTS = {"drafter": "auto, plain, or a list of suffix, recycling, model."}
_NOT_IN_LISTS = ("remember",)  # what was answered before would be drafted again


@dataclass(frozen=True)
class PlanOptionLists:
    """`PlanOptions` of which each may be given several times; see `takes_shared_options`.

    `each` is the cross product of all but the drafters, every one with a text that tells it from
    the others.
    """

    drafters: tuple[str, ...] = ()
    each: tuple[tuple[str, PlanOptions], ...] = (("", DEFAULTS),)

    @classmethod
    def of(cls, values: dict[str, Any]) -> PlanOptionLists:
        """From a list of values, one value, or None for each option."""
        drafters = tuple(values.pop("drafter") or ())
        given = {name: value for name, value in values.items() if value not in (None, [])}
        lists = [value if isinstance(value, list) else [value] for value in given.values()]
        varied = [name for name, several in zip(given, lists, strict=True) if len(several) > 1]
        each = []
        for chosen in itertools.product(*lists):
            one = dict(zip(given, chosen, strict=True))
            label = " ".join(f"--{name.replace('_', '-')} {one[name]}" for name in varied)
            each.append((label, replace(DEFAULTS, **one)))
        return cls(drafters, tuple(each))

    @staticmethod
    def parameters() -> Iterable[inspect.Parameter]:
        """Of a command: as those of `PlanOptions`, with lists for whatever takes a value."""
        for parameter in inspect.signature(PlanOptions, eval_str=True).parameters.values():
            value, option = get_args(parameter.annotation)
            kind = next(part for part in get_args(value) or (value,) if part is not NoneType)
            if kind is not bool:
                shown = copy(option)
                shown.metavar = f"<{kind.__name__.lower()}>..."
                shown.help = _HELP_IN_LISTS.get(parameter.name, shown.help)
                several: Any = Annotated[list[kind] | None, shown]  # type: ignore[valid-type]
                parameter = parameter.replace(annotation=several, default=None)
            if parameter.name not in _NOT_IN_LISTS:
                yield parameter


LISTS = PlanOptionLists()


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are picked, for every command that generates."""

    seed: Annotated[int | None, typer.Option("--seed", help="Random seed of sampling.")] = None
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", help="Keep this many tokens; 0: all.")] = 0
    top_p: Annotated[float, typer.Option("--top-p", help="Keep this probability mass.")] = 1.0
    min_p: Annotated[float, typer.Option("--min-p", help="Drop below this x the best.")] = 0.0
    repeat_penalty: Annotated[float, typer.Option("--repeat-penalty", help="1 is off.")] = 1.0
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Off the logits of tokens seen; 0 is off.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, for every time seen; 0 is off.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, typer.Option("--logit-bias", help="TOKEN=BIAS, e.g. 42=-5.")
    ] = None

    def params(self) -> SamplingParams:
        """Sampling parameters; values no model could honour are misuse."""
        from edgespec.sampling.sampling import SamplingParams

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["repetition_penalty"] = values.pop("repeat_penalty")
        values["logit_bias"] = _biases(self.logit_bias or [])
        try:
            return SamplingParams(**values)
        except UnsupportedError as problem:
            raise typer.BadParameter(str(problem)) from problem


GREEDY = SamplingOptions()


@dataclass(frozen=True)
class FormatOptions:
    """What an answer has to look like, for every command that generates."""

    grammar: Annotated[
        Path | None, typer.Option("--grammar", help="GBNF file that answers keep to.")
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File; answers are JSON that fits it.")
    ] = None

    def texts(self) -> dict[str, str | None]:
        """Arguments `grammar` and `json_schema` of `Engine.stream`."""
        if self.grammar is not None and self.json_schema is not None:
            raise typer.BadParameter("give --grammar or --json-schema, not both")
        return {"grammar": read_text(self.grammar), "json_schema": read_text(self.json_schema)}


ANY_FORMAT = FormatOptions()


def read_text(path: Path | None) -> str | None:
    """The text of a file that was named. Raises UnsupportedError where it cannot be read."""
    try:
        return None if path is None else path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise UnsupportedError(
            f"cannot read {path}: {problem.strerror}", hint="name a text file"
        ) from problem


def takes_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a class above in place of a parameter.

    Such a parameter has an instance of the class as its default: `LISTS` for lists. Typer reads
    options from a signature, so the command gets one with all of them written out.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    lists = ""  # the parameter whose options may be given several times
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.default is LISTS:
            lists = parameter.name
            parameters += PlanOptionLists.parameters()
        elif is_dataclass(parameter.default):
            groups[parameter.name] = group = type(parameter.default)
            parameters += inspect.signature(group, eval_str=True).parameters.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        chosen: dict[str, Any] = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        if lists:
            names = [parameter.name for parameter in PlanOptionLists.parameters()]
            chosen[lists] = PlanOptionLists.of({name: values.pop(name) for name in names})
        command(**chosen, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    replaced = [parameter.replace(kind=keyword) for parameter in parameters]
    wrapper.__signature__ = inspect.Signature(replaced)  # type: ignore[attr-defined]
    return wrapper


def _biases(texts: list[str]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            pairs.append((int(token), float(bias)))
        except ValueError:
            raise typer.BadParameter(f"--logit-bias {text} is not TOKEN=BIAS") from None
    return tuple(pairs)


def size_bytes(option: str, text: str) -> int:
    """Bytes of a size such as 1.5GiB; a number alone has no unit and is misuse."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{option} {text} is no size such as 512MiB, 1.5GiB or 800MB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size < 1 << 62:
        raise typer.BadParameter(f"{option} {text} is out of range")
    return int(size)


def one_of(option: str, value: str, values: tuple[str, ...]) -> None:
    """Misuse unless `value` is one of `values`."""
    if value not in values:
        raise typer.BadParameter(f"{option} {value} is none of {', '.join(values)}")


def check_drafter(text: str) -> None:
    """Misuse unless `text` is a list of drafters, "auto" or "none"."""
    for name in text.split(","):
        one_of("--drafter", name.strip(), ("auto", "none", *NAMES))


def model_path(model: str | None) -> Path:
    """The file or folder that was named, or the embedded model."""
    from edgespec.models.embedded import embedded_model

    return embedded_model() if model is None else expanded(model)
