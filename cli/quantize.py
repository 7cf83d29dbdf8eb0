"""`edgespec quantize`: change a file's type, make one that fits or is fast here, compare some."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.render import Progress, note, printable, size_text, table
from edgespec.paths import expanded

if TYPE_CHECKING:
    from edgespec.models.spec import ModelSpec


@dataclass(frozen=True)
class MeasureOptions:
    """What files are measured with, for every way of making or comparing some."""

    imatrix: Annotated[
        str | None,
        typer.Option("--imatrix", help="Importance matrix: a file of llama.cpp's, or auto."),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Text to measure with. Default: written by the model."),
    ] = None
    types: Annotated[
        str | None, typer.Option("--types", help="File types for --tune, tensor types for --fit.")
    ] = None

    def names(self) -> list[str] | None:
        """The types that were listed."""
        return (self.types and [name.strip().upper() for name in self.types.split(",")]) or None

    def path(self) -> Path | None:
        """The text file that was named."""
        return self.data and expanded(self.data)


MEASURED = MeasureOptions()
# What an option goes with, of --type, --fit, --tune and --compare.
_GOES_WITH = {
    "--tensor": ("--type",),
    "--threads": ("--type",),
    "--imatrix": ("--type", "--tune"),
    "--types": ("--fit", "--tune"),
    "--minutes": ("--fit",),
    "--work": ("--fit",),
    "--max-kl": ("--tune",),
    "--exact": ("--tune",),
    "--kv": ("--compare",),
    "--html": ("--compare",),
}


@options.takes_shared_options
def quantize(
    files: Annotated[
        list[Path], typer.Argument(help="Source and target; with --compare, source and others.")
    ],
    file_type: Annotated[
        str | None, typer.Option("--type", help="One of llama.cpp's file types, e.g. Q4_K_M.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option("--fit", help="Find the best mixture of this size, e.g. 90MiB.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the type that is fastest on this device.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure the loss and speed of files.")
    ] = False,
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", help="PATTERN=TYPE for some tensors, e.g. ffn_down=Q6_K."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", min=0.0, help="Most loss with --tune. Default: 1.1 x Q4_0's."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="With --tune: only types --exact runs with.")
    ] = False,
    kv: Annotated[
        bool, typer.Option("--kv", help="With --compare: types of the source's KV cache.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="With --compare: write a page of plots here.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="With --fit: how long to measure.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="With --fit: folder to keep for other sizes.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, help="With --type. Default: physical cores."),
    ] = None,
    measure: MeasureOptions = MEASURED,
    as_json: options.JsonOption = False,
) -> None:
    """Change a file's type. Example: edgespec quantize model.gguf small.gguf --type Q4_0

    A run that is stopped leaves no partial target; --fit goes on where it was stopped, and writes
    the best so far when stopped with Ctrl-C while searching.
    """
    from edgespec.models.onnx.folder import read_model
    from edgespec.models.spec import read_model_spec

    mode = _mode(
        {
            "--type": file_type is not None,
            "--fit": fit is not None,
            "--tune": tune,
            "--compare": compare,
        }
    )
    given = {
        "--tensor": bool(tensor),
        "--threads": threads is not None,
        "--imatrix": measure.imatrix is not None,
        "--types": measure.types is not None,
        "--minutes": minutes is not None,
        "--work": work is not None,
        "--max-kl": max_kl is not None,
        "--exact": exact,
        "--kv": kv,
        "--html": html is not None,
    }
    _check_options(mode, given, measure)
    _check_files(mode, len(files), kv=kv)
    spec, others = options.model_path(str(files[0])), [expanded(path) for path in files[1:]]
    source = read_model(spec) if compare else read_model_spec(spec)
    progress = Progress()
    try:
        if file_type is not None:
            report = _change_type(
                source, others[0], file_type, tensor or [], measure, threads, progress
            )
        elif fit is not None:
            report = _fit(source, others[0], fit, measure, minutes, work, progress)
        elif tune:
            report = _tune(source, others, max_kl, exact, measure, progress)
        else:
            report = _compare(source, others, kv, html, measure, progress)
    finally:
        progress.clear()
    if others and not compare:
        note(f"written: {others[0]}")
    print(json.dumps(report) if as_json else printable(_text(report)))
    if not report.get("complete", True):
        raise typer.Exit(130)


# -- misuse --------------------------------------------------------------------------------


def _mode(modes: dict[str, bool]) -> str:
    """The one that is asked for."""
    if sum(modes.values()) != 1:
        raise typer.BadParameter("give one of --type, --fit, --tune and --compare")
    return next(name for name, is_given in modes.items() if is_given)


def _check_options(mode: str, given: dict[str, bool], measure: MeasureOptions) -> None:
    """Misuse where an option goes with another mode than this."""
    if mode == "--fit" and measure.imatrix is not None:
        raise typer.BadParameter("--fit computes an importance matrix of its own: no --imatrix")
    for option, is_given in given.items():
        if is_given and mode not in _GOES_WITH[option]:
            raise typer.BadParameter(f"{option} goes with {' and '.join(_GOES_WITH[option])}")
    if mode == "--type" and measure.data is not None and measure.imatrix != "auto":
        raise typer.BadParameter("--data goes with --imatrix auto here")


def _check_files(mode: str, count: int, *, kv: bool) -> None:
    """Misuse where there are too few or too many files: the source is one of them."""
    is_compared = mode == "--compare"
    least = 1 if kv or mode == "--tune" else 2
    most = 99 if is_compared else 2
    if not least <= count <= most:
        other = "other files" if is_compared else "a target"
        raise typer.BadParameter(f"name a source and {other}")


# -- what is asked for ---------------------------------------------------------------------


def _change_type(
    spec: ModelSpec,
    target: Path,
    name: str,
    tensor: list[str],
    measure: MeasureOptions,
    threads: int | None,
    progress: Progress,
) -> dict[str, Any]:
    from edgespec.files.quantizing import importance_matrix, require_matrix, unheeded
    from edgespec.memory.device import host
    from edgespec.quantize.convert import (
        Recipe,
        check_target,
        convert,
        file_type_named,
        require_disk,
    )

    recipe = Recipe(file_type_named(name), tuple(_override(text) for text in tensor))
    check_target(target, spec.files)
    predicted = require_matrix(spec, recipe, measure.imatrix)
    require_disk(target, predicted.file_bytes)
    for sentence in unheeded(spec, recipe, predicted):
        note(sentence)
    if spec.file_type not in ("F32", "F16", "BF16"):
        note(f"{spec.path.name} is quantized already ({spec.file_type}): quality is lost twice")
    with importance_matrix(spec, measure.imatrix, measure.path(), progress) as (path, named):
        recipe = Recipe(recipe.file_type, recipe.overrides, path, named)
        convert(
            spec.path, target, recipe, threads=threads or host.usable_cores(), progress=progress
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
    measure: MeasureOptions,
    minutes: float | None,
    work: Path | None,
    progress: Progress,
) -> dict[str, Any]:
    from edgespec.files.quantizing import fit_file

    found = fit_file(
        spec,
        target,
        options.size_bytes("--fit", size),
        work=work and expanded(work),
        types=measure.names(),
        data=measure.path(),
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
        "tensor_types": found.types,
    }


def _sizes(spec: ModelSpec, target: Path) -> dict[str, int]:
    return {"source_bytes": spec.file_bytes, "target_bytes": target.stat().st_size}


def _tune(
    spec: ModelSpec,
    targets: list[Path],
    max_kl: float | None,
    exact: bool,
    measure: MeasureOptions,
    progress: Progress,
) -> dict[str, Any]:
    from edgespec.files.quantizing import importance_matrix
    from edgespec.files.tuning import CANDIDATES, tune
    from edgespec.quantize.convert import check_target, file_type_named

    for target in targets:
        check_target(target, spec.files)
    types = [file_type_named(name) for name in measure.names() or CANDIDATES]
    with importance_matrix(spec, measure.imatrix or "auto", measure.path(), progress) as (
        path,
        named,
    ):
        return tune(
            spec,
            targets[0] if targets else None,
            max_kl=max_kl,
            exact=exact,
            types=types,
            imatrix=path,
            imatrix_name=named,
            data=measure.path(),
            progress=progress,
        )


def _compare(
    spec: ModelSpec,
    others: list[Path],
    kv: bool,
    html: Path | None,
    measure: MeasureOptions,
    progress: Progress,
) -> dict[str, Any]:
    from edgespec.files.comparison import compare, compare_kv_types
    from edgespec.memory.report.page import require_place, require_plots, write_page
    from edgespec.models.onnx.folder import read_model
    from edgespec.quantize.loss_page import render_losses

    if html is not None:
        require_plots()
        require_place(html)
    data = measure.path()
    if kv:
        if others or html:
            raise typer.BadParameter("--kv compares cache types of one file, and nothing else")
        return compare_kv_types(spec, data=data, progress=progress)
    found = compare(
        spec,
        [read_model(path) for path in others],
        data=data,
        progress=progress,
    )
    if html is not None:
        write_page(render_losses(found, spec.name or spec.path.stem), html)
        progress.clear()
        note(f"page: {html}")
    return found


# -- text ----------------------------------------------------------------------------------


def _text(report: dict[str, Any]) -> str:
    if "rows" in report:
        return _tuned_text(report) if "max_kl" in report else _compared_text(report)
    if "kv_rows" in report:
        return _kv_text(report)
    rows = [
        ("type", report["type"]),
        ("size", f"{size_text(report['target_bytes'])} of {size_text(report['source_bytes'])}"),
    ]
    if "tensor_types" in report:
        counts: dict[str, int] = {}
        for kind in report["tensor_types"].values():
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


def _speed_cells(row: dict[str, Any]) -> list[str]:
    from edgespec.memory.report.page import ms_of

    times = map(ms_of, (row["step_ms"].get(str(n)) for n in (1, 4, 8)))
    speeds = (f"{row[f'{key}_tokens_per_s']:.1f}" for key in ("plain", "speculative"))
    return [*times, *speeds]


def _tuned_text(report: dict[str, Any]) -> str:
    head = ["type", "size", "t(1)", "t(4)", "t(8)", "plain t/s", "speculative t/s", "KL"]
    rows = [head]
    for row in report["rows"]:
        name = f"{row['type']} (source)" if row["is_source"] else row["type"]
        loss = f"{row['kl']:.4f}" if "kl" in row else ""
        mark = " <- chosen" if row["type"] == report["type"] and not row["is_source"] else ""
        rows.append([name, size_text(row["bytes"]), *_speed_cells(row), loss + mark])
    chosen = next(row for row in report["rows"][1:] if "measured" in row)
    source, now = report["rows"][0]["measured"], chosen["measured"]
    end = (
        f"{chosen['type']}: {now['plain_tokens_per_s']:.1f} tokens/s plain as written, "
        f"{chosen['plain_tokens_per_s']:.1f} predicted, "
        f"{now['plain_tokens_per_s'] / source['plain_tokens_per_s']:.2f}x of the source; "
        f"at most {report['max_kl']:.4f} of loss was allowed"
    )
    return f"{table(rows)}\n\n{end}"


def _compared_text(report: dict[str, Any]) -> str:
    head = ["file", "size", "KL [95%]", "agreement", "perplexity", "t(1)", "t(4)", "t(8)"]
    head += ["plain t/s", "speculative t/s"]
    rows = [head]
    for row in report["rows"]:
        cells = [row["file"], size_text(row["bytes"]), *_loss_cells(row.get("quality"))]
        cells += _speed_cells(row)
        rows.append(cells)
    end = (
        f"{report['places']} places of {report['texts']} texts; all but the likeliest "
        f"{report['tokens_kept']} tokens are taken together, "
        f"{report['mass_taken_together']:.2%} of the probability"
    )
    return f"{table(rows)}\n\n{end}"


def _kv_text(report: dict[str, Any]) -> str:
    rows = [["KV cache", "KL [95%]", "agreement", "perplexity", "t(1)", "t(4)", "t(8)"]]
    for row in report["kv_rows"]:
        times = (f"{row['step_ms'][n]:.2f} ms" for n in ("1", "4", "8"))
        rows.append([row["kv_type"], *_loss_cells(row.get("quality")), *times])
    depth = report["step_depth"]
    return f"{table(rows)}\n\n{report['places']} places, each after {depth} tokens and more"


def _loss_cells(quality: dict[str, Any] | None) -> list[str]:
    if quality is None:
        return ["source", "", ""]
    kl = quality["kl"]
    return [
        f"{kl['value']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
        f"{quality['agreement']['value']:.1%}",
        f"{quality['perplexity_ratio']['value']:.3f}x",
    ]
