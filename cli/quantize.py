"""`edgespec quantize`: change a file's type, or make one that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.render import Progress, note, printable, size_text, table

if TYPE_CHECKING:
    from edgespec.models.spec import ModelSpec


def quantize(
    files: Annotated[list[Path], typer.Argument(help="Source and target, GGUF files.")],
    file_type: Annotated[
        str | None, typer.Option("--type", help="One of llama.cpp's file types, e.g. Q4_K_M.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option("--fit", help="Find the best mixture of this size, e.g. 90MiB.")
    ] = None,
    imatrix: Annotated[
        str | None,
        typer.Option("--imatrix", help="Importance matrix: a file of llama.cpp's, or auto."),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", help="PATTERN=TYPE for some tensors, e.g. ffn_down=Q6_K."),
    ] = None,
    types: Annotated[
        str | None, typer.Option("--types", help="With --fit: tensor types to choose from.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Text to measure with. Default: written by the model."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="With --fit: how long to measure.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="With --fit: folder to keep for other sizes.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="Default: physical cores.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Change a file's type. Example: edgespec quantize model.gguf small.gguf --type Q4_0

    A run that is stopped leaves no partial target; --fit goes on where it was stopped, and writes
    the best so far when stopped with Ctrl-C while searching.
    """
    from edgespec.models.spec import read_model_spec

    if (file_type is None) == (fit is None):
        raise typer.BadParameter("give one of --type and --fit")
    if len(files) != 2:
        raise typer.BadParameter("name a source and a target")
    source, target = (path.expanduser() for path in files)
    spec = read_model_spec(source)
    progress = Progress()
    try:
        if file_type is not None:
            report = _change_type(
                spec, target, file_type, imatrix, tensor or [], data, threads, progress
            )
        else:
            assert fit is not None
            report = _fit(spec, target, fit, types, data, minutes, work, progress)
    finally:
        progress.clear()
    note(f"written: {target}")
    print(json.dumps(report) if as_json else printable(_text(report)))


def _change_type(
    spec: ModelSpec,
    target: Path,
    name: str,
    imatrix: str | None,
    tensor: list[str],
    data: Path | None,
    threads: int | None,
    progress: Progress,
) -> dict[str, Any]:
    from edgespec.memory import device
    from edgespec.quantize.convert import Recipe, convert, file_type_named
    from edgespec.quantizing import importance_matrix, require_matrix

    recipe = Recipe(file_type_named(name), tuple(_override(text) for text in tensor))
    require_matrix(spec, recipe, imatrix)
    if spec.file_type not in ("F32", "F16", "BF16"):
        progress.clear()
        note(f"{spec.path.name} is quantized already ({spec.file_type}): quality is lost twice")
    with importance_matrix(spec, imatrix, data, progress) as (path, named):
        recipe = Recipe(recipe.file_type, recipe.overrides, path, named)
        convert(
            spec.path, target, recipe, threads=threads or device.usable_cores(), progress=progress
        )
    return {"target": str(target), "type": recipe.file_type, **_sizes(spec, target)}


def _override(text: str) -> tuple[str, str]:
    pattern, _, kind = text.rpartition("=")
    if not pattern or not kind:
        raise typer.BadParameter(f"--tensor {text} is not PATTERN=TYPE")
    return pattern.lower(), kind.upper()


def _fit(
    spec: ModelSpec,
    target: Path,
    size: str,
    types: str | None,
    data: Path | None,
    minutes: float | None,
    work: Path | None,
    progress: Progress,
) -> dict[str, Any]:
    from edgespec.quantizing import fit_file

    found = fit_file(
        spec,
        target,
        options.size_bytes("--fit", size),
        work=work and work.expanduser(),
        types=None if types is None else [name.strip().upper() for name in types.split(",")],
        data=data and data.expanduser(),
        minutes=minutes,
        progress=progress,
    )
    if not found.complete:
        progress.clear()
        note("stopped: this is the best so far; the same command goes on")
    return {
        "target": str(target),
        "type": "mixed",
        **_sizes(spec, target),
        "kl_on_search_texts": found.kl,
        "kl_of_start": found.start_kl,
        "generations": found.generations,
        "evaluations": found.evaluations,
        "measuring_s": found.seconds,
        "complete": found.complete,
        "types": found.types,
    }


def _sizes(spec: ModelSpec, target: Path) -> dict[str, int]:
    return {"source_bytes": spec.file_bytes, "target_bytes": target.stat().st_size}


def _text(report: dict[str, Any]) -> str:
    rows = [
        ("type", report["type"]),
        ("size", f"{size_text(report['target_bytes'])} of {size_text(report['source_bytes'])}"),
    ]
    if "types" in report:
        counts: dict[str, int] = {}
        for kind in report["types"].values():
            counts[kind] = counts.get(kind, 0) + 1
        rows += [
            ("tensors", ", ".join(f"{n} in {kind}" for kind, n in sorted(counts.items()))),
            (
                "divergence",
                f"{report['kl_on_search_texts']:.4f} from the source on the texts of the search, "
                f"{report['kl_of_start']:.4f} before it",
            ),
            ("measured", f"{report['evaluations']} mixtures in {report['measuring_s']:.0f} s"),
        ]
    return table(rows)
