"""Options of commands: made from fields that say what they are, and shared by several of them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from edgespec import paths
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.memory.plan.options import DRAFTERS, LoadOptions, experts_on_host
from edgespec.option_fields import Option, argument, option, options_of
from edgespec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from edgespec.memory.plan.plan import Request


MAX_TOKENS, ENDLESS = 512, 1 << 31  # of an answer: usually, and up to the end of the context
_MOST_LAYERS = 512  # of a model, in llama.cpp
_MOST_SHOWN = 1 << 16  # a larger limit tells a person nothing
PLAIN = "plain"  # another word for the drafter "none"
PROMPT, SERVER, TOOLS, OUTPUT = "Model and prompt", "Server", "Tools", "Output"  # titles in help
MEMORY, OTHERS, LOG = "Memory and device", "Options", "Log"
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=OUTPUT),
]


def max_tokens_option(default: int = MAX_TOKENS) -> Any:
    """How long an answer may be; -1 is to the end of the context, as in llama.cpp."""
    text, names = "Most tokens of an answer.", "--max-tokens --n-predict -n"
    return option(default, text, called=names, panel=PROMPT, low=1, by_itself={-1: ENDLESS})


# -- from fields to options of a command -----------------------------------------------------------


def load_option(name: str, **changes: Any) -> Any:
    """An option of a load, for a command that takes some; with changes of its default and help."""
    default, _, known = _own(LoadOptions)[name]
    default = changes.pop("default", default)
    assert known is not None
    return field(default=default, metadata={"option": replace(known, **changes)})


class _Own(NamedTuple):
    """A field of a class of options."""

    default: Any
    hint: Any  # what it is annotated with
    known: Option | None


def _own(kind: Any) -> dict[str, _Own]:
    hints, known = get_type_hints(kind, include_extras=True), options_of(kind)
    return {
        one.name: _Own(one.default, hints[one.name], known.get(one.name)) for one in fields(kind)
    }


def _parameter(name: str, own: _Own, title: str = "") -> inspect.Parameter:
    """A field as a parameter of a command, as the library of the command line reads it."""
    default, hint, known = own
    parts = get_args(hint)
    if get_origin(hint) is Literal:  # what is none of a closed set is told by its own option
        hint = str
    elif NoneType in parts and any(get_origin(one) is Literal for one in parts):
        hint = str | None
    if known is not None:
        if known.shown or known.none:
            is_default = default is None or not known.none
            hint, default = str, (known.shown or known.none) if is_default else str(default)
        elif known.several:
            hint, default = list[str] | None, None
        elif known.read or any(get_origin(part) is os.PathLike for part in parts):
            hint = str if default is ... else str | None
            default = None if isinstance(default, tuple) else default
        more: dict[str, Any] = {"help": known.help, **(known.more or {})}
        if known.is_argument:
            told = typer.Argument(rich_help_panel=known.panel or None, **more)
        else:
            if known.read is None:
                is_shown = known.high is not None and known.high <= _MOST_SHOWN
                low = None if known.low is None else min((known.low, *(known.by_itself or ())))
                more |= {"min": low, "max": known.high if is_shown else None}
            panel = known.panel or title or None
            told = typer.Option(*known.names(name), rich_help_panel=panel, **more)
        hint = Annotated[hint, told]
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def values_of(known: Mapping[str, Option], texts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options; a text that is none is misuse."""
    return {
        name: _value(known[name].names(name)[0], known[name], text) if name in known else text
        for name, text in texts.items()
    }


def _value(named: str, known: Option, text: Any) -> Any:
    if known.several and isinstance(text, list):
        return tuple(_value(named, known, one) for one in text)
    try:
        return known.value(text)
    except EdgespecError:
        raise
    except ValueError as problem:
        raise typer.BadParameter(f"{named} {text} {problem}") from None


class Group:
    """Options that commands take as one value. The classes below are dataclasses."""

    TITLE: ClassVar[str] = ""  # in help

    @classmethod
    def own(cls) -> dict[str, _Own]:
        return _own(cls)

    @classmethod
    def known(cls) -> dict[str, Option]:
        return {name: one.known for name, one in cls.own().items() if one.known is not None}

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Of a command that takes them: arguments, then options."""
        kind: Any = cls  # mypy takes the class for one of its objects, which have no hash
        return _parameters(kind)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Any:
        """From what was given for each of the parameters."""
        return cls(**values_of(cls.known(), values))


@functools.cache  # several commands take the same ones
def _parameters(kind: Any) -> list[inspect.Parameter]:
    found = [_parameter(name, own, kind.TITLE) for name, own in kind.own().items()]
    arguments = {name for name, known in kind.known().items() if known.is_argument}
    return sorted(found, key=lambda one: one.name not in arguments)


@dataclass(frozen=True)
class Given(Group):
    """Options that are fields of `SOURCE`, as texts where they have any.

    `given` are those that differ from the defaults, in the order of help.
    """

    SOURCE: ClassVar[Any]

    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def own(cls) -> dict[str, _Own]:
        return _own(cls.SOURCE)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Any:
        """From what was given for each of the parameters, or some."""
        usual = {one.name: one.default for one in cls.parameters()}
        return cls({name: value for name, value in values.items() if value != usual[name]})


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as the library reads it: options of a `Group` and those of fields written out."""
    groups: dict[str, type[Group]] = {}
    parameters: list[inspect.Parameter] = []
    known: dict[str, Option] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint, default = hints[name], parameter.default
        if isinstance(hint, type) and issubclass(hint, Group):
            groups[name] = hint
            parameters += hint.parameters()
        elif isinstance(default, Field):
            known[name] = default.metadata["option"]
            parameters.append(_parameter(name, _Own(default.default, hint, known[name])))
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hint))

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        chosen = {
            name: group.of({one.name: values.pop(one.name) for one in group.parameters()})
            for name, group in groups.items()
        }
        command(**chosen, **values_of(known, values))

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapper


# -- which model -----------------------------------------------------------------------------------


def _names_here(begun: str) -> list[str]:
    """Names of models on this machine, for completion in a shell."""
    from edgespec.models.hub.resolve import local_models

    return [one.name for one in local_models() if one.name.startswith(begun)]


def named_option() -> Any:
    """The model, as an option."""
    completed = {"autocompletion": _names_here}
    text = "The model, instead of the argument."
    return option(None, text, called="--model -m", panel=PROMPT, more=completed)


_WHICH = "GGUF file, ONNX folder, hf:OWNER/REPO[:QUANT], ollama:NAME[:TAG]. Default: embedded."


@dataclass(frozen=True)
class _Named(Group):
    """A model, by options in place of an argument."""

    named: str | None = named_option()
    hf_repo: str | None = option(
        None, "A model of the Hugging Face hub: OWNER/REPO[:QUANT].", also="-hf", panel=PROMPT
    )

    @property
    def other(self) -> str | None:
        """What was named; None is the embedded model."""
        return f"hf:{self.hf_repo.removeprefix('hf:')}" if self.hf_repo else self.named


@dataclass(frozen=True)
class ModelOptions(_Named):
    """Which model a command is about, for every command that takes one."""

    model: str | None = argument(_WHICH, panel=PROMPT, more={"autocompletion": _names_here})

    @property
    def name(self) -> str | None:
        """What was named, in whichever way; None is the embedded model."""
        # --model may be a variable that stands for every command.
        return self.other if self.model is None else self.model

    def path(self, plan_options: PlanOptions | None = None) -> Path:
        return model_path(self.name, plan_options)


@dataclass(frozen=True)
class ModelsOptions(_Named):
    """The same, for commands that take several."""

    models: list[str] | None = argument(_WHICH, panel=PROMPT, more={"autocompletion": _names_here})

    @property
    def names(self) -> Sequence[str]:
        """What was named; nothing is the embedded model."""
        return self.models or ([] if self.other is None else [self.other])


@dataclass(frozen=True)
class PoolOptions(Group):
    """Which models answer, and how long each stays.

    Args:
        folder: Folder of GGUF files, which are loaded when asked for.
        any_here: Load any model that `models list` knows when asked for.
        keep_alive: How long an idle model stays: 5m, 0 or always; for one model NAME=5m. Default:
            until others need its memory.
        pin: Name of a model that is loaded at once and stays.
        alias: Name of the model for clients; of several models NAME=ALIAS. Default: the file's
            name.
    """

    TITLE: ClassVar[str] = SERVER

    folder: Path | None = option(None, called="--models")
    any_here: bool = option(False, called="--any")
    keep_alive: list[str] | None = option(None)
    pin: list[str] | None = option(None)
    alias: list[str] | None = option(None)

    def is_pool(self, named: Sequence[str]) -> bool:
        """Whether models are loaded when they are asked for: not one model that stays."""
        is_chosen = self.folder or self.any_here or self.keep_alive or self.pin
        return len(named) > 1 or bool(is_chosen)


# -- how to load it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OtherWords(Group):
    """llama.cpp's words for what a load is told by other options."""

    TITLE: ClassVar[str] = MEMORY

    cpu_moe: bool = option(False, "Keep the experts of all layers on the CPU.", also="-cmoe")
    n_cpu_moe: int | None = option(
        None,
        "Keep the experts of the first N layers on the CPU. Default: as is fastest.",
        also="-ncmoe",
        low=0,
    )


# The words that stand in help behind an option.
_BEHIND = {"gpu_layers": ("cpu_moe", "n_cpu_moe")}


@dataclass(frozen=True)
class PlanOptions(Given):
    """What a command that plans a run was told of the load."""

    SOURCE, TITLE = LoadOptions, MEMORY

    @classmethod
    def own(cls) -> dict[str, _Own]:
        words, found = _OtherWords.own(), {}
        for name, own in super().own().items():
            if own.known is not None and not own.known.of_servers:
                found[name] = own
                found |= {word: words[word] for word in _BEHIND.get(name, ())}
        return found

    def request(self, *, sees: bool = False, **more: Any) -> Request:
        """A planner's request, of `more` fields; a text that is no value of its option is misuse.

        A projector is looked for where the command `sees` images, or the prompt has some.
        """
        from edgespec.memory.plan.plan import Request

        if more.get("max_tokens") == ENDLESS:
            more["max_tokens"] = 0
        words = _OtherWords.known()
        texts = {name: text for name, text in self.given.items() if name not in words}
        values = values_of(self.known(), texts)
        for name, read in _READ.items():
            if values.get(name) is not None:
                values[name] = read(values[name])
        if not values.get("mmproj"):
            values["mmproj"] = None if sees or more.get("images") else "none"
        # The first pattern that fits counts, so that those of --override-tensor go before.
        layers, named = self.given.get("n_cpu_moe"), values.get("override_tensor") or ()
        if self.given.get("cpu_moe"):
            values["override_tensor"] = (*named, experts_on_host())
        elif layers:
            values["override_tensor"] = (*named, experts_on_host(min(layers, _MOST_LAYERS)))
        elif layers is not None:
            values["override_tensor"] = named
        return Request(**values, **more)


def drafters_of(text: str) -> str:
    """A list of drafters, "auto", "none" or "plain"; another name is misuse."""
    for name in text.split(","):
        if name.strip() not in (known := ("auto", "none", PLAIN, *DRAFTERS)):
            raise typer.BadParameter(f"--drafter {name.strip()} is none of {', '.join(known)}")
    return "none" if text == PLAIN else text


DEFAULTS = PlanOptions()


@dataclass(frozen=True)
class SettingsInTurns(Group):
    """`PlanOptions` of which one may be given twice, and any number of drafters.

    `each` has one load or two, which a text tells apart.
    """

    drafters: tuple[str, ...] = ()
    each: tuple[tuple[str, PlanOptions], ...] = (("", DEFAULTS),)

    @classmethod
    def of(cls, values: dict[str, Any]) -> SettingsInTurns:
        """From a list of values, one value, or None for each option."""
        drafters = tuple(values.pop("drafter") or ())
        given = {name: value for name, value in values.items() if value not in (None, [])}
        lists = {name: value for name, value in given.items() if isinstance(value, list)}
        twice = [name for name, several in lists.items() if len(several) > 1]
        if len(twice) > 1 or any(len(several) > 2 for several in lists.values()):
            raise typer.BadParameter("one option besides --drafter may be given twice, no more")
        each = []
        for place in range(1 + len(twice)):
            one = {name: several[min(place, len(several) - 1)] for name, several in lists.items()}
            known = cls.known()
            label = "".join(f"{known[name].names(name)[0]} {one[name]}" for name in twice)
            one |= {name: [text] for name, text in one.items() if known[name].several}
            each.append((label, PlanOptions.of({**given, **one})))
        return cls(drafters, tuple(each))

    @classmethod
    def own(cls) -> dict[str, _Own]:
        return PlanOptions.own()

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Those of `PlanOptions`, with lists for whatever takes a value."""
        found = []
        for parameter in PlanOptions.parameters():
            value, about = get_args(parameter.annotation)
            kind = next(part for part in get_args(value) or (value,) if part is not NoneType)
            kind = next(iter(get_args(kind)), kind)  # of one of several
            if kind is not bool:
                shown = copy(about)
                shown.metavar = ("N" if kind is int else "TEXT") + "..."
                several: Any = Annotated[list[kind] | None, shown]  # type: ignore[valid-type]
                parameter = parameter.replace(annotation=several, default=None)
            if parameter.name != "remember":  # what was answered before would be drafted again
                found.append(parameter)
        return found


def model_path(model: str | None, plan_options: PlanOptions | None = None) -> Path:
    """The file or folder that was named, or the embedded model.

    One of the hub is fetched where it is not here, if what is planned with it fits.
    Raises ModelNotFoundError, and DoesNotFitError or DownloadError for what is fetched.
    """
    from edgespec.cli.start import pull
    from edgespec.models.embedded import embedded_model
    from edgespec.models.hub.resolve import model_file

    if model is None:
        return embedded_model()
    asked = plan_options or DEFAULTS
    return model_file(model, lambda repository, tag: pull(repository, tag, asked.request()))


# Values of a load that are more than their texts say.
_READ: Mapping[str, Callable[[str], Any]] = {
    "drafter": drafters_of,
    "draft_model": model_path,
    "switch": model_path,
}


_TEMPERATURE = 0.8  # of conversations, as in llama.cpp, where neither command nor file has one


@dataclass(frozen=True)
class SamplingOptions(Given):
    """How tokens are picked, for every command that generates."""

    SOURCE, TITLE = SamplingParams, "Sampling"

    def params(self) -> SamplingParams:
        """Sampling parameters; values no model could honour are misuse."""
        values = values_of(self.known(), self.given)
        if (breakers := values.get("dry_sequence_breakers")) is not None:
            values["dry_sequence_breakers"] = [text for text in breakers if text != "none"]
        try:
            return SamplingParams(**values)
        except UnsupportedError as problem:
            raise typer.BadParameter(f"{problem}; {problem.hint}") from problem

    def params_with(self, context: typer.Context, of_file: Mapping[str, float]) -> SamplingParams:
        """For conversations: what neither command line nor variables say is the file's own.

        Greedy answers of small models end in loops.
        """
        more: dict[str, Any] = {
            name: value
            for name, value in {"temperature": _TEMPERATURE, **of_file}.items()
            if (source := context.get_parameter_source(name)) is None or source.name == "DEFAULT"
        }
        return SamplingOptions({**self.given, **more}).params()


@dataclass(frozen=True)
class FormatOptions(Group):
    """What an answer has to look like, for every command that generates."""

    TITLE: ClassVar[str] = "Form of the answer"

    grammar: str | None = option(None, "GBNF or Lark grammar for the answer: a text or a file.")
    grammar_file: Path | None = option(None, "GBNF or Lark grammar for the answer: a file.")
    json_schema: str | None = option(
        None, "Answer with JSON that fits this schema: a text or a file.", also="-j"
    )
    json_schema_file: Path | None = option(
        None, "Answer with JSON that fits this schema: a file.", also="-jf"
    )

    regex: str | None = option(None, "Answer with a text that matches this regular expression.")

    def texts(self) -> dict[str, str | None]:
        """Arguments `grammar`, `json_schema` and `regex` of `Engine.stream`."""
        if sum(getattr(self, field.name) is not None for field in fields(self)) > 1:
            raise typer.BadParameter("give one of --grammar, --json-schema and --regex, and once")
        return {
            "grammar": _text_or_file(self.grammar, "::=", "start:") or read_text(self.grammar_file),
            "json_schema": _text_or_file(self.json_schema, "{") or read_text(self.json_schema_file),
            "regex": self.regex,
        }


def set_text(sampling: SamplingParams) -> str:
    """What differs from greedy decoding, in a line."""
    usual = SamplingParams()
    values = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    told = [f"{name} {value}" for name, value in values.items() if value != getattr(usual, name)]
    return f"sampling: {', '.join(told) or 'greedy'}"


def _text_or_file(given: str | None, *signs: str) -> str | None:
    """A text that holds one of `signs`, or else that of a file, which an @ before it says, too."""
    if given is None or (any(one in given for one in signs) and not given.startswith("@")):
        return given
    return read_text(paths.expanded(given.removeprefix("@")))


def read_text(path: Path | None) -> str | None:
    """The text of a file that was named. Raises UnsupportedError where it cannot be read."""
    return None if path is None else paths.read_text(path)
