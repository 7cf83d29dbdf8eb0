"""`edgespec quantize`: change a file's type, make one that fits or is fast here, compare some."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgespec.cli import options
from edgespec.cli.command import Commands
from edgespec.cli.render import Progress, note, paragraph, printable, size_text, table
from edgespec.cli.start import cancel_on_interrupt, end_if_interrupted, until_set
from edgespec.option_fields import argument, option, size_bytes
from edgespec.paths import expanded

if TYPE_CHECKING:
    from edgespec.models.spec import ModelSpec

quantize_app = Commands("Make smaller or faster model files, and compare them.")

_SOURCE: Any = argument("The model to start from.", default=...)
_TARGET: Any = argument("The file to write.", default=...)
_MATRIX = "Importance matrix: a file of llama.cpp's, or auto."
_DATA: Any = option(None, "Text to measure with. Default: the model writes it.")


@quantize_app.add("type")
def change_type(
    source: str = _SOURCE,
    target: Path = _TARGET,
    file_type: str = argument(
        "One of llama.cpp's file types, e.g. Q4_K_M.", default=..., more={"metavar": "TYPE"}
    ),
    tensor: list[str] | None = option(None, "PATTERN=TYPE for some tensors, e.g. ffn_down=Q6_K."),
    imatrix: str | None = option(None, _MATRIX),
    data: Path | None = _DATA,
    threads: int | None = option(None, "CPU threads. Default: physical cores.", also="-t", low=1),
    as_json: options.JsonOption = False,
) -> None:
    """Change a file's type. Example: edgespec quantize type model.gguf small.gguf Q4_K_M

    A run that is stopped leaves no partial target.
    """
    from dataclasses import replace

    from edgespec.files.quantizing import importance_matrix, require_matrix, unheeded
    from edgespec.memory.device import host
    from edgespec.quantize.convert import (
        Recipe,
        check_target,
        convert,
        file_type_named,
        require_disk,
    )

    if data is not None and imatrix != "auto":
        raise typer.BadParameter("--data goes with --imatrix auto here")
    recipe = Recipe(file_type_named(file_type), tuple(map(_override, tensor or ())))
    spec, progress = _source(source), Progress(has_lines=True)
    with progress:
        check_target(target, spec.files)
        predicted = require_matrix(spec, recipe, imatrix)
        require_disk(target, predicted.file_bytes)
        for sentence in unheeded(spec, recipe, predicted):
            note(sentence)
        if spec.file_type not in ("F32", "F16", "BF16"):
            note(f"{spec.path.name} is quantized already ({spec.file_type}): quality is lost twice")
        threads = threads or host.usable_cores()
        with importance_matrix(spec, imatrix, _text(data), progress) as (path, named):
            weighed = replace(recipe, imatrix=path, imatrix_name=named)
            convert(spec.path, target, weighed, threads=threads, progress=progress)
    _show({"target": str(target), "type": recipe.file_type, **_sizes(spec, target)}, as_json)


@quantize_app.add()
def fit(
    source: str = _SOURCE,
    target: Path = _TARGET,
    size: int = argument("Most bytes of the file, such as 90MiB.", default=..., read=size_bytes),
    types: str | None = option(None, "Tensor types to choose from, with commas. Default: all."),
    data: Path | None = _DATA,
    minutes: float | None = option(
        None, "Most minutes of measuring. Default: as it takes.", low=0.01
    ),
    work: Path | None = option(None, "Keep measurements in this folder, for other sizes."),
    as_json: options.JsonOption = False,
) -> None:
    """Find the best mixture of types for a size.

    Example: edgespec quantize fit model.gguf small.gguf 90MiB

    When time is over, what is known by then decides. The same command goes on where it was stopped.
    """
    from edgespec.files.quantizing import fit_file

    spec, progress = _source(source), Progress(has_lines=True)
    try:
        with progress:
            found = fit_file(
                spec,
                target,
                size,
                work=work and expanded(work),
                types=_names(types),
                data=_text(data),
                minutes=minutes,
                progress=progress,
            )
    except KeyboardInterrupt:
        note("stopped: the same command goes on from here")
        raise
    if not found.has_measured_all:
        note(
            f"time was over: {found.measured} of {len(found.types)} tensors were measured, and the "
            "others are taken to be like them; the same command goes on from here"
        )
    report = {
        "target": str(target),
        "type": "mixed",
        **_sizes(spec, target),
        "kl_on_own_texts": found.kl,
        "evaluations": found.evaluations,
        "measuring_s": found.seconds,
        "tensors_measured": found.measured,
        "tensor_types": found.types,
    }
    _show(report, as_json)


@quantize_app.add()
def tune(
    source: str = _SOURCE,
    target: Path | None = argument("The file to write. Default: only measure."),
    max_kl: float | None = option(
        None, "Most loss, as KL divergence. Default: 1.1 times that of Q4_0.", low=0.0
    ),
    types: str | None = option(None, "File types to try, with commas. Default: 11 common ones."),
    imatrix: str | None = option("auto", _MATRIX),
    data: Path | None = _DATA,
    as_json: options.JsonOption = False,
) -> None:
    """Find the type that is fastest on this device.

    Example: edgespec quantize tune model.gguf fast.gguf
    """
    from edgespec.files import tuning
    from edgespec.files.quantizing import importance_matrix
    from edgespec.quantize.convert import check_target, file_type_named

    spec, progress, text = _source(source), Progress(has_lines=True), _text(data)
    if target is not None:
        check_target(target, spec.files)
    tried = [file_type_named(name) for name in _names(types) or tuning.CANDIDATES]
    with progress, importance_matrix(spec, imatrix, text, progress) as (path, named):
        report = tuning.tune(
            spec,
            target,
            max_kl=max_kl,
            types=tried,
            imatrix=path,
            imatrix_name=named,
            data=text,
            progress=progress,
        )
    _show(report, as_json, target)


@quantize_app.add()
def compare(
    source: str = _SOURCE,
    others: list[Path] | None = argument("Files made from it. None with --kv."),
    kv: bool = option(False, "Compare types of the source's KV cache instead."),
    data: Path | None = _DATA,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the loss and speed of files.

    Example: edgespec quantize compare model.gguf small.gguf. Ctrl-C shows what is measured.
    """
    from edgespec.files.comparison import compare as compare_files
    from edgespec.files.comparison import compare_kv_types
    from edgespec.models.spec import read_model_spec

    if kv and others:
        raise typer.BadParameter("--kv compares cache types of one file, and nothing else")
    if not kv and not others:
        raise typer.BadParameter("name a source and other files, or give --kv")
    spec, progress, text = _source(source), Progress(has_lines=True), _text(data)
    with progress:
        report_part = until_set(cancel_on_interrupt(), progress)
        if kv:
            report = compare_kv_types(spec, data=text, progress=report_part)
        else:
            files = [read_model_spec(expanded(path)) for path in others or ()]
            report = compare_files(spec, files, data=text, progress=report_part)
    _show(report, as_json)
    end_if_interrupted(report)


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


def _sizes(spec: ModelSpec, target: Path) -> dict[str, int]:
    return {"source_bytes": spec.file_bytes, "target_bytes": target.stat().st_size}


def _show(report: dict[str, Any], as_json: bool, target: Path | None = None) -> None:
    """The report, after where the file is that was written."""
    if (written := report.get("target") or target) is not None:
        note(f"written: {written}")
    print(json.dumps(report) if as_json else printable(report_text(report)))


def report_text(report: dict[str, Any]) -> str:
    """What a mode of `quantize` found, as tables."""
    if "rows" in report:
        return _tuned_text(report) if "max_kl" in report else _compared_text(report)
    if "kv_rows" in report:
        return _kv_text(report)
    rows = [
        ("type", report["type"]),
        ("size", f"{size_text(report['target_bytes'])} of {size_text(report['source_bytes'])}"),
    ]
    if "tensor_types" in report:
        counts = Counter(report["tensor_types"].values())
        rows += [
            ("tensors", ", ".join(f"{n} in {kind}" for kind, n in sorted(counts.items()))),
            (
                "divergence",
                f"{report['kl_on_own_texts']:.4f} from the source on the texts it was chosen by",
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
    return f"{table(rows)}\n\n{paragraph(end)}"


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
    return f"{table(rows)}\n\n{paragraph(end)}"


def _kv_text(report: dict[str, Any]) -> str:
    rows = [["KV cache", "KL", "agreement", "perplexity", "t(1)", "t(4)", "t(8)"]]
    for row in report["kv_rows"]:
        times = (f"{row['step_ms'][n]:.2f} ms" for n in ("1", "4", "8"))
        cells = _loss_cells(row.get("quality"))
        cells[0] = cells[0].partition(" [")[0]  # of one text, which has no interval
        rows.append([row["kv_type"], *cells, *times])
    end = (
        f"losses over {report['places']} tokens of one text, against f16; "
        f"steps after {report['step_depth']} tokens; names are of keys/values where these differ"
    )
    return f"{table(rows)}\n\n{paragraph(end)}"


def _loss_cells(quality: dict[str, Any] | None) -> list[str]:
    if quality is None:
        return ["source", "", ""]
    kl = quality["kl"]
    return [
        f"{kl['value']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
        f"{quality['agreement']['value']:.1%}",
        f"{quality['perplexity_ratio']['value']:.3f}x",
    ]
