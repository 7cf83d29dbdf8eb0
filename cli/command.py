"""A command whose help is in groups, and whose options are variables, too.

Typer has panels for help, but draws them with a library whose import takes longer than the rest of
`--help`; these are plain text.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from edgespec.cli.log import log_options, start_log
from edgespec.cli.options import LOG, MEMORY, OTHERS, OUTPUT, PROMPT, SERVER, TOOLS, takes_options
from edgespec.cli.render import note
from edgespec.memory.plan.options import DRAFTS
from edgespec.paths import text_of

_Function = TypeVar("_Function", bound=Callable[..., None])
_ARGUMENTS = "Arguments"
# Titles of groups of options, in this order; others come last.
TITLES = (
    *(PROMPT, SERVER, TOOLS, "Sampling", "Form of the answer", MEMORY, DRAFTS),
    OUTPUT,
)
# What stands for a value in help, by what the library calls its type.
_VALUES = {
    **{"str": "TEXT", "list[str]": "TEXT", "path": "FILE", "float": "X", "float range": "X"},
    **{"int": "N", "int range": "N"},
}
# What is no value of a type, in words; ranges come first, as their names contain the others'.
_KINDS = {
    **{"float range": "a number", "int range": "a whole number"},
    **{"float": "a number", "integer": "a whole number"},
}
# Commands of Ollama, and what does the same here.
_OLLAMA = {
    **{"list": "'models list'", "ls": "'models list'", "pull": "'models pull'"},
    **{"show": "'models show'", "ps": "GET /api/ps of a server", "rm": "'models remove'"},
}
_FEW = 12  # options, of a command that needs no note on other places to set them
_NARROW = 60  # columns under which the help of an option stands below it
_NOTE = "Every option can also be set by a variable: EDGESPEC_CTX=8192 is --ctx 8192."
# What a person says once, and what the environment has another meaning for.
_NO_VARIABLES = {
    *("help", "version", "clear", "yes", "force", "install-completion", "show-completion"),
    *("insecure", "data", "cache", "models"),
}


def title_of(parameter: Any) -> str:
    """The group of an option in help."""
    return getattr(parameter, "rich_help_panel", None) or OTHERS


def summary(command: Any) -> str:
    """The first sentence of a command's help, without its example."""
    first = " ".join((command.help or "").split("\n\n")[0].split())
    return first.split(". Example:")[0].rstrip(".") + "."


def option_name(parameter: Any) -> str:
    """The long name of an option, without its dashes; "" for an argument."""
    longs = [name for name in parameter.opts if name.startswith("--")]
    return longs[0][2:] if longs and parameter.param_type_name == "option" else ""


class CommandGroup(TyperGroup):
    """Commands with a sentence each, in terminals of any width."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """As usual, with help as wide as the terminal; the library's own is 50 columns or more."""
        extra.setdefault("terminal_width", max(min(shutil.get_terminal_size().columns, 80) - 2, 30))
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """As usual; what the library would end without a word, or as a failure, ends as it is."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note("interrupted")
            raise SystemExit(130) from None
        except BrokenPipeError:  # the reader has gone, as with `| head -1`
            raise SystemExit(141) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As usual; names of Ollama's commands lead to those that do the same."""
        if args[0] in _OLLAMA.keys() - self.commands.keys():
            ctx.fail(f"No such command '{args[0]}'. Did you mean {_OLLAMA[args[0]]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Whole sentences, where the library cuts them off."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(self.get_command(ctx, name))) for name in names])


class Commands(typer.Typer):
    """Commands that take options as `edgespec.cli.options` makes them."""

    def __init__(self, text: str, **more: Any) -> None:
        super().__init__(
            cls=CommandGroup, help=text, no_args_is_help=True, rich_markup_mode=None, **more
        )

    def add(self, name: str | None = None) -> Callable[[_Function], _Function]:
        """What adds a function as a command, of its name or this."""

        def added(function: _Function) -> _Function:
            self.command(name, cls=Command)(takes_options(function))
            return function

        return added


class Command(TyperCommand):
    """Help in groups. An option `--some-name` is also the variable `EDGESPEC_SOME_NAME`."""

    def __init__(self, name: str | None, **more: Any) -> None:
        super().__init__(name, **more)
        self.params += log_options()
        parameter: Any
        for parameter in self.params:
            option = option_name(parameter)
            # Who reaches a worker runs code on it, and EDGESPEC_HOST may be meant for a server.
            is_said_alone = option in _NO_VARIABLES or (name, option) == ("worker", "host")
            if option and not is_said_alone and not parameter.envvar:
                parameter.envvar = "EDGESPEC_" + option.upper().replace("-", "_")
                parameter.show_envvar = False
        self.epilog = self.epilog or (_NOTE if len(self.params) > _FEW else None)

    def get_params(self, ctx: Any) -> list[Any]:
        """Its own options, and behind a model also those that llama.cpp's commands have."""
        found = super().get_params(ctx)
        names = {name for one in found for name in (*one.opts, *one.secondary_opts)}
        return [*found, *(other_options(names) if "--ctx" in names else ())]

    def make_parser(self, ctx: Any) -> Any:
        """As usual, but `-fa` is an option of that name, never an `-f` with the value `a`.

        Behind a single letter come further flags, or a value that does not begin with a letter.
        """
        parser: Any = super().make_parser(ctx)
        by_letters, known = parser._match_short_opt, parser._short_opt

        def match(arg: str, state: Any) -> None:
            first = known.get(arg[:2])
            if first is not None and first.takes_value:
                is_one_name = arg[2:3].isalpha()
            else:
                is_one_name = any(f"-{letter}" not in known for letter in arg[1:])
            if is_one_name:
                parser._match_long_opt(arg, None, state)  # which says that there is none
            by_letters(arg, state)

        parser._match_short_opt = match
        return parser

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """As usual; a wrong value names the variable it is of. Raises UnsupportedError.

        That is for bytes of the command line that are no text, nor a file's name.
        """
        given = {arg.partition("=")[0] for arg in args}
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except typer.BadParameter as problem:
            name: Any = getattr(problem.param, "envvar", None)
            if name and os.environ.get(name) and not given & {*getattr(problem.param, "opts", ())}:
                problem.param_hint = f"the variable {name}"
            for kind, said in _KINDS.items():
                problem.message = problem.message.replace(f"a valid {kind}", said)
            raise
        for place, value in context.params.items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str) and not one.isascii() and not os.path.exists(one):
                    text_of(os.fsencode(one), f"the argument for {place.replace('_', '-')}")
        return context

    def invoke(self, ctx: Any) -> Any:
        """As usual, with a log as wanted."""
        start_log(**{name: ctx.params.pop(name) for name in ("verbose", "log_file")})
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options under the titles of their groups."""
        sections: dict[str, list[tuple[str, str]]]
        sections = {title: [] for title in (_ARGUMENTS, *TITLES, OTHERS, LOG)}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                title = title_of(parameter)
                title = _ARGUMENTS if is_argument else title
                sections[title].append((_readable(record[0], is_argument), record[1]))
        if sum(bool(sections[title]) for title in TITLES) == 1:  # a small command has one list
            group = next(title for title in TITLES if sections[title])
            sections[OTHERS] = sections.pop(group) + sections[OTHERS]
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=30 if formatter.width >= _NARROW else 4)


def _readable(names: str, is_argument: bool) -> str:
    """`--ctx <int range>` as `--ctx N`; an argument by its name alone."""
    if is_argument:
        return re.sub(r" <.*", "", names)
    return re.sub(r"<([a-z\[\] ]+)>", lambda match: _VALUES.get(match[1], match[0]), names)


# -- options of llama.cpp in commands that people copy ---------------------------------------------
# They are taken where they change nothing here. One that would change the answer is refused, with
# what does the same.


_FLASH = ("on", "off", "auto", "1", "0")
# Names, and whether a value follows.
_HARMLESS = (
    *(("-fa --flash-attn", True), ("-b --batch-size", True), ("-ub --ubatch-size", True)),
    *(("-tb --threads-batch", True), ("-np --parallel", True), ("--numa", True), ("--prio", True)),
    *(("--poll", True), ("--fit -fit", True), ("--jinja", False), ("--no-mmap", False)),
    *(("--mmap", False), ("--mlock", False), ("-cnv --conversation", False)),
    *(("-st --single-turn", False), ("-cb --cont-batching", False), ("--no-warmup", False)),
    *(("--warmup", False), ("-kvu --kv-unified", False), ("--no-display-prompt", False)),
    *(("--simple-io", False), ("--log-disable", False), ("--perf --no-perf", False)),
    *(("--metrics", False), ("--slots", False)),
)
# Names, whether a value follows, and what to do instead.
_OTHERWISE = (
    ("--lora-scaled", True, "use --lora FILE=SCALE"),
    ("-no-cnv --no-conversation", False, "use --raw"),
    ("--chat-template --chat-template-file", True, "the model's own is used, or none with --raw"),
    ("-hff --hf-file", True, "name the file's type, as in hf:OWNER/REPO:Q4_K_M"),
    ("-e --escape", False, "write line ends as they are, or use --file"),
    ("--draft --draft-n", True, "use --draft-max"),
    ("--mirostat-n", True, "use --mirostat"),
)


def other_options(names: Collection[str]) -> Iterator[TyperOption]:
    """Those of llama.cpp that are none of a command's own `names`; help and files have none."""
    for texts, has_value in _HARMLESS:
        yield from _option(texts, has_value, _taken, names)
    for texts, has_value, instead in _OTHERWISE:

        def refuse(_: Any, _option: Any, value: Any, instead: str = instead) -> None:
            if value:
                raise typer.BadParameter(f"edgespec has none: {instead}")

        yield from _option(texts, has_value, refuse, names)


def _option(
    texts: str, has_value: bool, callback: Any, names: Collection[str]
) -> Iterator[TyperOption]:
    known = [one for one in texts.split() if one not in names]
    if known:
        place = known[0].strip("-").replace("-", "_")
        yield TyperOption(
            param_decls=[f"llama_{place}", *known],
            type=str if has_value else bool,
            is_flag=not has_value,
            default=None if has_value else False,
            multiple=False,
            hidden=True,
            expose_value=False,
            callback=callback,
        )


def _taken(context: Any, option: Any, value: Any) -> None:
    if not value or context.resilient_parsing:
        return
    name = option.opts[0]
    if name == "-fa" and value not in _FLASH:
        raise typer.BadParameter(f"-fa is {', '.join(_FLASH)}, not {value}")
    note(f"{name} is llama.cpp's and changes nothing here")
