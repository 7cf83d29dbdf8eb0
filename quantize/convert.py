"""Change the type of a GGUF file's weights with llama.cpp's quantizer."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from edgespec.backends.llama_library import LOG, library
from edgespec.errors import BackendError, ModelNotFoundError, UnsupportedError

# Values of llama_ftype. The names are those of `llama-quantize`.
_FILE_TYPES = {
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q2_K": 10,
    "Q4_K_M": 15,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "BF16": 32,
}
FILE_TYPES = tuple(_FILE_TYPES)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    file_type: str,
    *,
    threads: int = 1,
) -> None:
    """Write `source` with another file type to `target`, which appears only when complete.

    A quantized source is quantized again, which costs quality.

    Raises:
        ModelNotFoundError: there is no such source.
        UnsupportedError: the type is not one of FILE_TYPES.
        BackendError: llama.cpp failed, with its own words.
    """
    if not os.path.exists(source):
        raise ModelNotFoundError(f"no such file: {os.fspath(source)}")
    if file_type not in _FILE_TYPES:
        raise UnsupportedError(
            f"there is no file type {file_type!r}", hint=f"use one of {', '.join(FILE_TYPES)}"
        )
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[file_type]
    params.allow_requantize = True
    params.nthread = threads
    partial = Path(f"{os.fspath(target)}.partial")
    LOG.clear()
    try:
        status = lib.llama_model_quantize(
            os.fsencode(source), os.fsencode(partial), ctypes.byref(params)
        )
        if status != 0:
            raise BackendError(f"llama.cpp cannot convert {source}: {LOG.problem() or status}")
        os.replace(partial, target)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot write {os.fspath(target)}: {problem.strerror}", hint="name another target"
        ) from problem
    finally:
        partial.unlink(missing_ok=True)
