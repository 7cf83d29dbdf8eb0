"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from edgespec.drafting.drafters import NAMES
from edgespec.memory.bytes.shape import KV_TYPE_BYTES
from edgespec.memory.plan.options import (
    BACKENDS,
    DEVICES,
    KERNELS,
    PREFERENCES,
    experts_on_host,
)
from edgespec.memory.plan.request import Request

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)
_UNITS = {
    f"{letter}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}

MAX_TOKENS = 512
_MOST_LAYERS = 512  # of a model, in llama.cpp
PLAIN = "plain"  # another word for the drafter "none"
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "--n-predict", "-n", min=1, help="Most tokens of an answer.")
]
UsersOption = Annotated[
    str, typer.Option("--users", help="Answers at the same time, on one cache: a number or auto.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def _names_here(begun: str) -> list[str]:
    """Names of models on this machine, for completion in a shell."""
    from edgespec.models.hub.caches import local_models

    return [one.name for one in local_models() if one.name.startswith(begun)]


def users_of(text: str) -> int | None:
    """The value of --users; None lets the planner choose."""
    if text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,4}", text):
        raise typer.BadParameter(f"--users {text} is neither a number nor auto")
    return int(text)


def option(default: Any, text: str, *, also: str = "", called: str = "", **more: Any) -> Any:
    """A field of a class of options, and the help of its option.

    The option is called as the field is and `also` so, or only as `called` says.
    """
    return field(default=default, metadata={"help": text, "names": (also, called), "more": more})


def parameters_of(group: type[Any]) -> Iterator[inspect.Parameter]:
    """The fields of a class of options as parameters of a command."""
    types = get_type_hints(group, include_extras=True)
    for one in fields(group):
        kind, told = types[one.name], one.metadata
        if told:
            also, called = told["names"]
            names = (called or f"--{one.name.replace('_', '-')} {also}").split()
            more = {"help": told["help"], "rich_help_panel": group.TITLE, **told["more"]}
            kind = Annotated[kind, typer.Option(*names, **more)]
        yield inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kind
        )


NamedOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="The model, instead of the argument.", autocompletion=_names_here
    ),
]
_HubRepo = Annotated[
    str | None,
    typer.Option("--hf-repo", "-hf", help="A model of the Hugging Face hub: OWNER/REPO[:QUANT]."),
]
_WHICH = "GGUF file, ONNX folder, hf:OWNER/REPO[:QUANT], ollama:NAME[:TAG]. Default: embedded."


@dataclass(frozen=True)
class ModelOptions:
    """Which model a command is about, for every command that takes one."""

    model: Annotated[str | None, typer.Argument(help=_WHICH, autocompletion=_names_here)] = None
    named: NamedOption = None
    hf_repo: _HubRepo = None

    @property
    def name(self) -> str | None:
        """What was named, in whichever way; None is the embedded model."""
        if self.model is not None:
            return self.model  # --model may be a variable that stands for every command
        return f"hf:{self.hf_repo.removeprefix('hf:')}" if self.hf_repo else self.named

    def path(self, plan_options: PlanOptions | None = None) -> Path:
        """The file or folder; see `model_path`."""
        return model_path(self.name, plan_options)


@dataclass(frozen=True)
class ModelsOptions:
    """The same, for commands that take several."""

    models: Annotated[list[str] | None, typer.Argument(help=_WHICH, autocompletion=_names_here)] = (
        None
    )
    named: NamedOption = None
    hf_repo: _HubRepo = None

    @property
    def names(self) -> list[str]:
        """What was named; nothing is the embedded model."""
        other = ModelOptions(None, self.named, self.hf_repo).name
        return self.models or ([] if other is None else [other])

    def paths(self, plan_options: PlanOptions | None = None) -> list[Path]:
        """The files or folders; see `model_path`."""
        named = [ModelOptions(one) for one in self.names] or [EMBEDDED]
        return [one.path(plan_options) for one in named]


SEVERAL = ModelsOptions()
EMBEDDED = ModelOptions()


@dataclass(frozen=True)
class PlanOptions:
    """What every command that plans a run can be asked for; see `takes_shared_options`."""

    TITLE: ClassVar = "Memory and device"

    budget: str | None = option(
        None, "Most memory to use: 512MiB, 1.5GiB, 800MB. Default: what is free."
    )
    prefer: str = option(
        "speed",
        "speed, context (longer, may use a smaller type of KV cache), or energy (drafts by tokens "
        "a joule, where the machine counts them).",
    )
    ctx: int | None = option(
        None, "Tokens of context. Default: chosen to fit.", also="--ctx-size -c", min=1
    )
    drafter: str = option(
        "auto", "auto, none (or plain), or a list of suffix, recycling, model, head."
    )
    draft_model: str | None = option(
        None,
        "GGUF file that drafts: a smaller model, a head or an early exit.",
        also="--model-draft -md",
    )
    switch: str | None = option(
        None, "A smaller GGUF writes the tokens it is confident about. Changes the output."
    )
    draft_max: int | None = option(
        None, "Most tokens drafted in one step. Default: as many as pay and fit.", min=0, max=255
    )
    kv_type: str = option(
        "auto",
        "Type of the KV cache: f16, bf16, f32, q8_0, q4_0, or auto (f16, unless --exact, "
        "--prefer context or ONNX Runtime need another).",
    )
    cache_type_k: str | None = option(
        None, "The same as --kv-type. Needs --cache-type-v.", also="-ctk"
    )
    cache_type_v: str | None = option(None, "As --cache-type-k, of the same type.", also="-ctv")
    gpu_layers: str = option(
        "auto",
        "Layers on GPUs and workers: a number, all, or auto (as many as fit on a GPU).",
        also="--n-gpu-layers -ngl",
    )
    cpu_moe: bool = option(False, "Keep the experts of all layers on the CPU.", also="-cmoe")
    n_cpu_moe: int | None = option(
        None,
        "Keep the experts of the first N layers on the CPU. Default: as is fastest.",
        also="-ncmoe",
        min=0,
    )
    override_tensor: str | None = option(
        None,
        "PATTERN=DEVICE,...: tensors whose name the regular expression is found in lie there: "
        "CPU, or a device that `edgespec doctor` names.",
        also="-ot",
    )
    workers: str | None = option(
        None, "HOST:PORT,... of `edgespec worker`: machines that lend their devices."
    )
    threads: int | None = option(
        None,
        "Most CPU threads; fewer while other programs compute. Default: cores.",
        also="-t",
        min=1,
    )
    backend: str = option("auto", "auto, llamacpp, or onnx (ONNX Runtime).")
    device: str = option("auto", "auto, cpu, gpu, or npu (through ONNX Runtime).")
    kernels: str = option("auto", "edgespec's own CPU kernels: auto (if faster), on, off.")
    exact: bool = option(False, "Use only settings whose output equals plain decoding's.")

    mmproj: str | None = option(
        None,
        "GGUF file of the projector that sees images, or none. Default: the one mmproj file "
        "beside the model.",
        also="-mm",
    )
    image_max_tokens: int | None = option(
        None, "Most tokens of an image, where the projector leaves it open.", min=1, max=1 << 16
    )
    remember: bool = option(False, "Keep prompts and answers on disk, to draft from them later.")

    def request(
        self,
        *,
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        is_plain_greedy: bool = False,
        sees: bool = False,
        images: int = 0,
    ) -> Request:
        """A planner's request; a text that is no value of its option is misuse.

        A projector is looked for where the command `sees` images, or the prompt has some.
        """
        one_of("--backend", self.backend, BACKENDS)
        one_of("--device", self.device, DEVICES)
        check_drafter(self.drafter)
        kv_type = self._kv_type()
        one_of("--prefer", self.prefer, PREFERENCES)
        one_of("--kernels", self.kernels, KERNELS)
        layers = "-1" if self.gpu_layers == "all" else self.gpu_layers
        if layers != "auto" and not re.fullmatch("-?[0-9]+", layers):
            raise typer.BadParameter(f"--gpu-layers {layers} is neither a number, all nor auto")
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        budget, values["context_size"] = values.pop("budget"), values.pop("ctx")
        values["budget_bytes"] = None if budget is None else size_bytes("--budget", budget)
        for name in ("draft_model", "switch"):
            values[name] = None if values[name] is None else model_path(values[name])
        values["mmproj"] = self.mmproj or (None if sees or images else "none")
        del values["cache_type_k"], values["cache_type_v"]
        values["kv_type"] = None if kv_type == "auto" else kv_type
        values["drafter"] = "none" if self.drafter == PLAIN else self.drafter
        values["override_tensor"] = self._overrides()
        del values["cpu_moe"], values["n_cpu_moe"]
        values["gpu_layers"] = None if layers == "auto" else int(layers)
        named = (self.workers or "").split(",")
        values["workers"] = tuple(one.strip() for one in named if one.strip())
        return Request(
            **values,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            is_plain_greedy=is_plain_greedy,
            images=images,
        )

    def _overrides(self) -> tuple[str, ...] | None:
        """Tensors on devices of their own, by any of three options; None lets the planner choose.

        The first pattern that fits counts, so that those of --override-tensor go before.
        """
        if not self.cpu_moe and self.n_cpu_moe is None and self.override_tensor is None:
            return None
        named = [one.strip() for one in (self.override_tensor or "").split(",") if one.strip()]
        if self.cpu_moe:
            named.append(experts_on_host())
        elif self.n_cpu_moe:
            named.append(experts_on_host(min(self.n_cpu_moe, _MOST_LAYERS)))
        return tuple(named)

    def _kv_type(self) -> str:
        """The cache type, by either program's options."""
        named = {self.cache_type_k, self.cache_type_v} - {None}
        if named and (len(named) > 1 or None in (self.cache_type_k, self.cache_type_v)):
            raise typer.BadParameter(
                "--cache-type-k and --cache-type-v go together and are one type; or use --kv-type"
            )
        kv_type = named.pop() or "auto" if named else self.kv_type
        one_of("--kv-type", kv_type, ("auto", *KV_TYPE_BYTES))
        return kv_type


DEFAULTS = PlanOptions()

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
        for parameter in parameters_of(PlanOptions):
            value, option = get_args(parameter.annotation)
            kind = next(part for part in get_args(value) or (value,) if part is not NoneType)
            if kind is not bool:
                shown = copy(option)
                shown.metavar = ("N" if kind is int else "TEXT") + "..."
                several: Any = Annotated[list[kind] | None, shown]  # type: ignore[valid-type]
                parameter = parameter.replace(annotation=several, default=None)
            if parameter.name not in _NOT_IN_LISTS:
                yield parameter


LISTS = PlanOptionLists()


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
            parameters += parameters_of(group)
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
    """Misuse unless `text` is a list of drafters, "auto", "none" or "plain"."""
    for name in text.split(","):
        one_of("--drafter", name.strip(), ("auto", "none", PLAIN, *NAMES))


def model_path(model: str | None, plan_options: PlanOptions | None = None) -> Path:
    """The file or folder that was named, or the embedded model.

    One of the hub is fetched where it is not here, if what is planned with it fits.
    Raises ModelNotFoundError, and DoesNotFitError or DownloadError for what is fetched.
    """
    from edgespec.cli.hub import fetcher
    from edgespec.models.embedded import embedded_model
    from edgespec.models.hub.resolve import model_file

    if model is None:
        return embedded_model()
    return model_file(model, fetcher((plan_options or DEFAULTS).request))
