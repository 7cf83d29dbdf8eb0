"""The process in which llama.cpp's quantizer runs: `edgespec.quantize.convert` starts it.

Reads one job as JSON from stdin; prints a JSON line for each tensor the quantizer takes up, and one
at the end. When nobody reads any more, the next line ends it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.backends.llama.library import LIBRARY_LOG, library, set_params
from edgespec.models.processes import do_job
from edgespec.quantize.imatrix import ImportanceMatrix, read_imatrix

_LINE = re.compile(r"\[ *(\d+)/ *(\d+)\] (.+?) +- \[[^]]*\], type = *(\w+), (.*)")
_NEW_TYPE = re.compile(r"converting to (\w+)|\((\w+)\)$")
_ERROR = 4  # of ggml_log_level
_INTEGER, _STRING = 0, 3  # values of llama_model_kv_override_type


def _quantize(job: dict[str, Any], say: Callable[..., None]) -> None:
    """Do a job: `say` each tensor, then how it ended."""
    lib: Any = library()
    params = lib.llama_model_quantize_default_params()
    set_params(
        params,
        ftype=job["ftype"],
        nthread=job["threads"],
        dry_run=job["dry_run"],
        allow_requantize=True,
    )
    # The structure keeps the arrays of ctypes that it points to; numpy's are kept by `matrix`.
    if job["overrides"]:
        rows = [{"pattern": text.encode(), "type": kind} for text, kind in job["overrides"]]
        set_params(params, tt_overrides=_filled(lib.llama_model_tensor_override, rows))
    if job["blocks"] is not None:
        pruned = [n for n in range(job["num_blocks"]) if n not in job["blocks"]]
        set_params(params, prune_layers=(ctypes.c_int32 * (len(pruned) + 1))(*pruned, -1))
    if job["imatrix"]:
        matrix = read_imatrix(Path(job["imatrix"]))
        floats = ctypes.POINTER(ctypes.c_float)
        rows = [
            {"name": name.encode(), "data": one.ctypes.data_as(floats), "size": one.size}
            for name, one in matrix.values.items()
        ]
        found, said = _filled(lib.llama_model_imatrix_data, rows), _said_of(lib, matrix, job)
        set_params(params, imatrix=found, kv_overrides=said)
    problems: list[str] = []
    callback = lib.llama_log_callback(_listener(problems, say))
    lib.llama_log_set(callback, None)
    lib.edgespec_log_callback = callback  # C keeps the pointer: it must outlive this call
    LIBRARY_LOG.clear()
    status = lib.llama_model_quantize(
        job["source"].encode(), job["target"].encode(), ctypes.byref(params)
    )
    say(status=int(status), problem=problems[-1] if problems else "")


def _listener(
    problems: list[str], say: Callable[..., None]
) -> Callable[[int, bytes | None, Any], None]:
    """Takes the log apart; pieces of a line arrive one by one."""
    line = ""

    def hear(level: int, text: bytes | None, _data: Any) -> None:
        nonlocal line
        if b"=====" in (text or b""):  # a banner in the middle of a line
            return
        said = (text or b"").decode("utf-8", errors="replace")
        if level == _ERROR:
            problems.append(said.strip().split(": ", 1)[-1])
            return
        line += said
        if match := _LINE.match(line):
            number, total, name, old, rest = match.groups()
            new = _NEW_TYPE.search(rest.strip())
            # An unchanged tensor is told at the end of its line, others before the work begins.
            if new or line.endswith("\n"):
                kind = (new[1] or new[2]) if new else old
                say(tensor=name, number=int(number), total=int(total), type=kind.upper())
                line = "" if line.endswith("\n") else "-"
        elif line.endswith("\n"):
            line = ""

    return hear


def _filled(kind: Any, rows: list[dict[str, Any]]) -> Any:
    """An array of structures with these fields, which ends with an empty one."""
    array = (kind * (len(rows) + 1))()
    for place, fields in zip(array, rows, strict=False):
        set_params(place, **fields)
    return array


def _said_of(lib: Any, matrix: ImportanceMatrix, job: dict[str, Any]) -> Any:
    """The keys `llama-quantize` adds about an importance matrix."""
    keys: list[tuple[str, str | int]] = [
        ("file", job["imatrix_name"] or job["imatrix"]),
        *((("dataset", matrix.dataset),) if matrix.dataset else ()),
        ("entries_count", len(matrix.values)),
        *((("chunks_count", matrix.num_chunks),) if matrix.num_chunks > 0 else ()),
    ]
    array = (lib.llama_model_kv_override * (len(keys) + 1))()
    for place, (key, value) in zip(array, keys, strict=False):
        set_params(place, key=f"quantize.imatrix.{key}".encode())
        if isinstance(value, int):
            set_params(place, tag=_INTEGER)
            set_params(place.value, val_i64=value)
        else:
            set_params(place, tag=_STRING)
            set_params(place.value, val_str=value.encode()[:127])
    return array  # ends with an empty key


if __name__ == "__main__":
    do_job(_quantize)
