"""Structures that Python declares, compared with those that a C++ compiler sees."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgespec.memory.device import structures

# The headers name them so. Nobody ships those of `Clip...`: tests of projectors compute with them.
OURS = {
    "DeviceCapabilities": "struct ggml_backend_dev_caps",
    "DeviceProperties": "struct ggml_backend_dev_props",
    "BufferBytes": "EdgespecBufferBytes",
    "BlockRows": "edgespec::Taken",
    "ExpertCounts": "edgespec::ExpertCounts",
    "GraphPlan": "struct ggml_cplan",
    "InitParams": "struct ggml_init_params",
    "TypeTraits": "struct ggml_type_traits",
    "Tensor": "struct ggml_tensor",
}
WITHOUT_HEADERS = {"ClipContextParams", "ClipInitResult", "LoadedWeights"}
NESTED = {
    "EdgespecBufferBytes": {name: f"bytes.{name}" for name in ("model", "context", "compute")},
    "struct llama_model_kv_override": {"value": "val_i64"},  # a union without a name
}
# Of llama-cpp-python, whose declarations are written by hand as well.
THEIRS = {
    "llama_cpp.llama_cpp": (
        "llama_batch llama_model_params llama_context_params llama_model_quantize_params "
        "llama_model_tensor_override llama_model_imatrix_data llama_model_kv_override"
    ),
    "llama_cpp.mtmd_cpp": "mtmd_context_params mtmd_input_text",
}
HEADERS = ("ggml.h", "ggml-backend.h", "ggml-cpu.h", "llama.h", "mtmd.h")
OF_KERNELS = ("expert_cache.h", "llama_memory.cpp", "ggml_outputs.cpp")


def include_folder() -> Path:
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None and found.origin is not None
    return Path(found.origin).parents[1] / "include"


def declared() -> dict[str, Any]:
    """Structures that are compared, by their names in C++."""
    found = {name: getattr(structures, python) for python, name in OURS.items()}
    for module, names in THEIRS.items():
        for name in names.split():
            found[f"struct {name}"] = getattr(importlib.import_module(module), name)
    return found


def as_compiled(folder: Path) -> dict[str, int]:
    """Sizes of the structures and offsets of their fields."""
    asked = {
        f"{name} {field}": f"offsetof({name}, {NESTED.get(name, {}).get(field, field)})"
        for name, structure in declared().items()
        for field, *_ in structure._fields_
    }
    asked |= {name: f"sizeof({name})" for name in declared()}
    kernels = Path(__file__).parents[3] / "backends" / "kernels"
    lines = [
        "#include <cstddef>",
        "#include <cstdio>",
        *(f'#include "{name}"' for name in HEADERS),
        *(f'#include "{kernels / name}"' for name in OF_KERNELS),
        "int main() {",
        *(f'printf("{key}=%zu\\n", size_t({value}));' for key, value in asked.items()),
        "}",
    ]
    (folder / "offsets.cpp").write_text("\n".join(lines))
    command = ["c++", "-std=c++17", "-w", "-I", str(include_folder()), "-I", str(kernels)]
    # What the kernels call is not linked: only the layout is asked for.
    command += ["-ffunction-sections", "-Wl,--gc-sections", "-O1", "offsets.cpp", "-o", "offsets"]
    subprocess.run(command, cwd=folder, check=True)
    out = subprocess.run([folder / "offsets"], capture_output=True, text=True, check=True).stdout
    return {
        key: int(value) for key, _, value in (line.partition("=") for line in out.split("\n")[:-1])
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(not (include_folder() / "llama.h").exists(), reason="needs llama.cpp's headers")
def test_they_lie_as_the_headers_of_the_wheel_have_them(tmp_path: Path) -> None:
    here = {name: ctypes.sizeof(structure) for name, structure in declared().items()}
    for name, structure in declared().items():
        here |= {
            f"{name} {field}": getattr(structure, field).offset for field, *_ in structure._fields_
        }
    assert here == as_compiled(tmp_path)


def test_all_are_compared_and_declared_in_one_place() -> None:
    found = {
        name
        for name, one in vars(structures).items()
        if isinstance(one, type) and issubclass(one, ctypes.Structure)
    }
    assert found == OURS.keys() | WITHOUT_HEADERS
    for package in ("backends.llama", "memory.device", "models", "quantize"):
        folder = Path(importlib.import_module(f"edgespec.{package}").__path__[0])
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "(ctypes.Structure)" not in text or path.name == "structures.py", path
