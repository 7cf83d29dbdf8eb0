"""LoRA adapters: files of small matrices, whose products are added to a model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.spec import ModelSpec
from edgespec.paths import expanded

_A, _B, _NORM = ".lora_a", ".lora_b", "_norm.weight"
_HINT = "an adapter is of one model: llama.cpp's convert_lora_to_gguf.py makes it for its --base"
MOST_SCALE = 1e3  # as large as makes any sense


def adapters_of(named: Sequence[str], spec: ModelSpec) -> tuple[tuple[Path, float], ...]:
    """The adapters of `FILE[=SCALE]` texts, each with the scale that it begins with.

    Raises ModelNotFoundError and ModelFileError for what is no adapter of this model, and
    UnsupportedError for a scale that is none.
    """
    found = []
    for text in named:
        name, _, number = text.rpartition("=")
        try:
            path, scale = expanded(name or text), float(number) if name else 1.0
        except ValueError:  # a name that has such a sign
            path, scale = expanded(text), 1.0
        if not abs(scale) <= MOST_SCALE:
            raise UnsupportedError(
                f"the scale of {path.name} must be {-MOST_SCALE:g} to {MOST_SCALE:g}, not {scale}"
            )
        if (problem := _mismatch(path, spec)) is not None:
            raise ModelFileError(f"{path.name} {problem}", hint=_HINT)
        found.append((path, scale))
    return tuple(found)


def _mismatch(path: Path, spec: ModelSpec) -> str | None:
    """Why a file is no adapter of a model; None where it is one. Raises as `read_gguf`."""
    file = read_gguf(path)
    if file.text("general.type") != "adapter" or file.text("adapter.type") != "lora":
        return "is no LoRA adapter"
    if (arch := file.text("general.architecture")) != spec.arch:
        return (
            f"is an adapter of {arch or 'an unknown'} models, and {spec.path.name} is {spec.arch}"
        )
    if "adapter.alora.invocation_tokens" in file.metadata:
        return "begins to work behind certain words alone (aLoRA), which is not supported"
    dims = {tensor.name: tensor.dims for tensor in file.tensors}
    names = {name.removesuffix(_A).removesuffix(_B) for name in dims if not name.endswith(_NORM)}
    for name in sorted(names):
        a, b, its = dims.get(name + _A), dims.get(name + _B), spec.tensors.get(name)
        if a is None or b is None:
            return f"has one matrix of two for {name}"
        if its is None:
            return f"changes {name}, which {spec.path.name} does not have"
        # A table's are transposed, which llama.cpp looks at itself.
        is_table = name.startswith("token_embd.")
        fits = len(a) > 1 < len(b) and (a[0], a[1], b[1]) == (its.dims[0], b[0], its.dims[1])
        if not (is_table or fits):
            shown = [" x ".join(map(str, one)) for one in (a, b, its.dims)]
            return f"has matrices of {shown[0]} and {shown[1]} for {name} of {shown[2]}"
    return None if names else "changes nothing"
