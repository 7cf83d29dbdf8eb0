"""`edgespec quantize`: change a file's type, make one that fits or is fast here, compare some."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.command import Command, Group
from edgespec.cli.quantize_text import report_text
from edgespec.cli.render import Progress, note, printable
from edgespec.paths import expanded

if TYPE_CHECKING:
    from edgespec.models.spec import ModelSpec
    from edgespec.quantize.convert import Recipe

_ONCE_OPTIONS = {"--type": "type", "--fit": "fit", "--tune": "tune", "--compare": "compare"}
_WITH_VALUE = ("--type", "--fit")
_LINE_EVERY_S = 15.0  # of progress, where stderr is no terminal


class _Modes(Group):
    """Sub-commands that were options of one command once, and may be written so still."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, after putting an old spelling right."""
        new = respelled(args) if args and args[0] not in self.commands else args
        if new != args:
            note(f"note: this is `edgespec quantize {shlex.join(new)}` now")
        return super().parse_args(ctx, new)


def respelled(args: list[str]) -> list[str]:
    """`a b --type Q4_0` as `type a b Q4_0`; what asks for no mode, or for two, as it is."""
    asked = [place for place, word in enumerate(args) if word.split("=")[0] in _ONCE_OPTIONS]
    if len(asked) != 1:
        return args
    place = asked[0]
    option, is_joined, value = args[place].partition("=")
    rest = args[place + 1 :]
    if option in _WITH_VALUE:
        values = [value] if is_joined else rest[:1]
        rest = rest if is_joined else rest[1:]
        return [_ONCE_OPTIONS[option], *args[:place], *rest, *values]
    return [_ONCE_OPTIONS[option], *args[:place], *rest]


quantize_app = typer.Typer(
    cls=_Modes,
    help="Make smaller or faster model files, and compare them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SourceArgument = Annotated[str, typer.Argument(help="The model to start from.")]
TargetArgument = Annotated[Path, typer.Argument(help="The file to write.")]
ImatrixOption = Annotated[
    str | None,
    typer.Option("--imatrix", help="Importance matrix: a file of llama.cpp's, or auto."),
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Text to measure with. Default: the model writes it.")
]


@quantize_app.command("type", cls=Command)
def change_type(
    source: SourceArgument,
    target: TargetArgument,
    file_type: Annotated[
        str, typer.Argument(metavar="TYPE", help="One of llama.cpp's file types, e.g. Q4_K_M.")
    ],
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", help="PATTERN=TYPE for some tensors, e.g. ffn_down=Q6_K."),
    ] = None,
    imatrix: ImatrixOption = None,
    data: DataOption = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, help="CPU threads. Default: physical cores."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Change a file's type. Example: edgespec quantize type model.gguf small.gguf Q4_K_M

    A run that is stopped leaves no partial target.
    """
    from edgespec.quantize.convert import Recipe, file_type_named

    if data is not None and imatrix != "auto":
        raise typer.BadParameter("--data goes with --imatrix auto here")
    recipe = Recipe(file_type_named(file_type), tuple(map(_override, tensor or ())))
    spec, progress = _source(source), Progress(line_every_s=_LINE_EVERY_S)
    try:
        _convert(spec, target, recipe, imatrix, _text(data), threads, progress)
    finally:
        progress.clear()
    _show({"target": str(target), "type": recipe.file_type, **_sizes(spec, target)}, as_json)


@quantize_app.command(cls=Command)
def fit(
    source: SourceArgument,
    target: TargetArgument,
    size: Annotated[str, typer.Argument(help="Most bytes of the file, such as 90MiB.")],
    types: Annotated[
        str | None,
        typer.Option("--types", help="Tensor types to choose from, with commas. Default: all."),
    ] = None,
    data: DataOption = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.01,
            help="Most minutes in all, but for the least work. Default: as it takes.",
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Keep measurements in this folder, for other sizes."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Find the best mixture of types for a size.

    Example: edgespec quantize fit model.gguf small.gguf 90MiB

    With Ctrl-C while searching, or when time is over, the best so far is written. The same command
    goes on where it was stopped.
    """
    from edgespec.files.quantizing import fit_file

    most_bytes = options.size_bytes("SIZE", size)
    spec, progress = _source(source), Progress(line_every_s=_LINE_EVERY_S)
    try:
        found = fit_file(
            spec,
            target,
            most_bytes,
            work=work and expanded(work),
            types=_names(types),
            data=_text(data),
            minutes=minutes,
            progress=progress,
        )
    except KeyboardInterrupt:
        progress.clear()
        note("stopped: the same command goes on from here")
        raise
    finally:
        progress.clear()
    if not found.complete:
        note("stopped: this is the best so far; the same command goes on")
    elif not found.has_tried_all:
        note(
            f"time was over: {found.measured} of {len(found.types)} tensors were measured, and the "
            "others are taken to be like them"
        )
        if found.left_out:
            note(f"types that were not tried: {', '.join(found.left_out)}")
        note("the same command goes on from here")
    report = {
        "target": str(target),
        "type": "mixed",
        **_sizes(spec, target),
        "kl_on_search_texts": found.kl,
        "kl_of_start": found.start_kl,
        "generations": found.generations,
        "evaluations": found.evaluations,
        "measuring_s": found.seconds,
        "complete": found.complete,
        "tensors_measured": found.measured,
        "types_left_out": list(found.left_out),
        "tensor_types": found.types,
    }
    _show(report, as_json)
    if not found.complete:
        raise typer.Exit(130)


@quantize_app.command(cls=Command)
def tune(
    source: SourceArgument,
    target: Annotated[
        Path | None, typer.Argument(help="The file to write. Default: only measure.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl",
            min=0.0,
            help="Most loss, as KL divergence. Default: 1.1 times that of Q4_0.",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only types that `run --exact` can use.")
    ] = False,
    types: Annotated[
        str | None,
        typer.Option("--types", help="File types to try, with commas. Default: 20 of them."),
    ] = None,
    imatrix: ImatrixOption = "auto",
    data: DataOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Find the type that is fastest on this device.

    Example: edgespec quantize tune model.gguf fast.gguf
    """
    from edgespec.files import tuning
    from edgespec.files.quantizing import importance_matrix
    from edgespec.quantize.convert import check_target, file_type_named

    spec, progress, text = _source(source), Progress(line_every_s=_LINE_EVERY_S), _text(data)
    if target is not None:
        check_target(target, spec.files)
    tried = [file_type_named(name) for name in _names(types) or tuning.CANDIDATES]
    try:
        with importance_matrix(spec, imatrix, text, progress) as (path, named):
            report = tuning.tune(
                spec,
                target,
                max_kl=max_kl,
                exact=exact,
                types=tried,
                imatrix=path,
                imatrix_name=named,
                data=text,
                progress=progress,
            )
    finally:
        progress.clear()
    _show(report, as_json, target)


@quantize_app.command(cls=Command)
def compare(
    source: SourceArgument,
    others: Annotated[
        list[Path] | None, typer.Argument(help="Files made from it. None with --kv.")
    ] = None,
    kv: Annotated[
        bool, typer.Option("--kv", help="Compare types of the source's KV cache instead.")
    ] = False,
    data: DataOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the loss and speed of files.

    Example: edgespec quantize compare model.gguf small.gguf
    """
    from edgespec.files.comparison import compare as compare_files
    from edgespec.files.comparison import compare_kv_types
    from edgespec.models.spec import read_model_spec

    if kv and others:
        raise typer.BadParameter("--kv compares cache types of one file, and nothing else")
    if not kv and not others:
        raise typer.BadParameter("name a source and other files, or give --kv")
    spec, progress, text = _source(source), Progress(line_every_s=_LINE_EVERY_S), _text(data)
    try:
        if kv:
            report = compare_kv_types(spec, data=text, progress=progress)
        else:
            files = [read_model_spec(expanded(path)) for path in others or ()]
            report = compare_files(spec, files, data=text, progress=progress)
    finally:
        progress.clear()
    _show(report, as_json)


# -- values of options ---------------------------------------------------------------------


def _source(name: str) -> ModelSpec:
    from edgespec.models.spec import read_model_spec

    return read_model_spec(options.model_path(name))


def _text(data: Path | None) -> Path | None:
    return data and expanded(data)


def _names(types: str | None) -> list[str] | None:
    """The types that were listed."""
    return (types and [name.strip().upper() for name in types.split(",")]) or None


def _override(text: str) -> tuple[str, str]:
    pattern, _, kind = text.rpartition("=")
    if not pattern or not kind:
        raise typer.BadParameter(f"--tensor {text} is not PATTERN=TYPE")
    return pattern.lower(), kind.upper()


# -- what is asked for ---------------------------------------------------------------------


def _convert(
    spec: ModelSpec,
    target: Path,
    recipe: Recipe,
    imatrix: str | None,
    data: Path | None,
    threads: int | None,
    progress: Progress,
) -> None:
    """Write `target` by a recipe that has no importance matrix yet."""
    from dataclasses import replace

    from edgespec.files.quantizing import importance_matrix, require_matrix, unheeded
    from edgespec.memory.device import host
    from edgespec.quantize.convert import check_target, convert, require_disk

    check_target(target, spec.files)
    predicted = require_matrix(spec, recipe, imatrix)
    require_disk(target, predicted.file_bytes)
    for sentence in unheeded(spec, recipe, predicted):
        note(sentence)
    if spec.file_type not in ("F32", "F16", "BF16"):
        note(f"{spec.path.name} is quantized already ({spec.file_type}): quality is lost twice")
    with importance_matrix(spec, imatrix, data, progress) as (path, named):
        weighed = replace(recipe, imatrix=path, imatrix_name=named)
        convert(
            spec.path, target, weighed, threads=threads or host.usable_cores(), progress=progress
        )


def _sizes(spec: ModelSpec, target: Path) -> dict[str, int]:
    return {"source_bytes": spec.file_bytes, "target_bytes": target.stat().st_size}


def _show(report: dict[str, Any], as_json: bool, target: Path | None = None) -> None:
    """The report, after where the file is that was written."""
    if (written := report.get("target") or target) is not None:
        note(f"written: {written}")
    print(json.dumps(report) if as_json else printable(report_text(report)))
