"""GPUs are those that llama.cpp registers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.memory.device import accelerators, host, llama_binary

GIB = 1 << 30


def test_a_library_that_does_not_load_shows_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "_ggml", lambda: None)
    assert (accelerators.accelerators(), accelerators.gpu_kinds()) == ((), ())
    monkeypatch.undo()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp.llama_cpp", raising=False)
    fresh = functools.cache(llama_binary._libraries.__wrapped__)
    monkeypatch.setattr(llama_binary, "_libraries", fresh)
    assert accelerators._asked_once.__wrapped__() is None


class Registry:
    """ggml's device registry with a processor, a GPU and one that is part of the processor."""

    devices = ((0, b"CPU", 0, 0), (1, b"CUDA0", 5 * GIB, 6 * GIB), (2, b"Vulkan0", GIB, 8 * GIB))

    def ggml_backend_reg_count(self) -> int:
        return 4

    def ggml_backend_reg_get(self, number: int) -> int:
        return number

    def ggml_backend_reg_name(self, number: int) -> bytes:
        return (b"Vulkan", b"CUDA", b"BLAS", b"CPU")[number]

    def ggml_backend_dev_count(self) -> int:
        return len(self.devices)

    def ggml_backend_dev_get(self, number: int) -> int:
        return number

    def ggml_backend_dev_type(self, number: int) -> int:
        return self.devices[number][0]

    def ggml_backend_dev_name(self, number: int) -> bytes:
        return self.devices[number][1]

    def ggml_backend_dev_description(self, number: int) -> bytes:
        return b"Some \xff GPU"

    def ggml_backend_dev_memory(self, number: int, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.devices[number][2:]


@pytest.mark.parametrize("unified", [False, True])
def test_gpus_are_those_of_the_registry(monkeypatch: pytest.MonkeyPatch, unified: bool) -> None:
    """The processor is none; an integrated one shares memory, any one does on such a machine."""
    monkeypatch.setattr(host, "has_unified_memory", lambda: unified)
    monkeypatch.setattr(accelerators, "_ggml", Registry)
    found = accelerators.accelerators()
    assert [gpu.name for gpu in found] == ["CUDA0", "Vulkan0"]
    assert [gpu.shares_memory for gpu in found] == [unified, True]
    assert [(gpu.free_bytes, gpu.total_bytes) for gpu in found] == [
        (5 * GIB, 6 * GIB),
        (GIB, 8 * GIB),
    ]
    assert found[0].description == "Some \ufffd GPU"
    assert accelerators.gpu_kinds() == ("cuda", "vulkan")


PROGRAM = """
import ctypes
from edgespec.memory.device.accelerators import accelerators
assert accelerators() == ()
from edgespec.backends.llama.library import ggml_function, library
lib = library()

class Device(ctypes.Structure):
    # struct ggml_backend_device: of its functions the first four are asked for here
    _fields_ = [("functions", ctypes.c_void_p * 16), ("reg", ctypes.c_void_p)]

pointer, size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
texts = ctypes.CFUNCTYPE(pointer, pointer)
name, description = map(ctypes.create_string_buffer, (b"RPC0", b"another machine's"))

def memory(_device, free, total):
    free[0], total[0] = 5 << 30, 6 << 30

functions = [
    texts(lambda _: ctypes.addressof(name)),
    texts(lambda _: ctypes.addressof(description)),
    ctypes.CFUNCTYPE(None, pointer, size, size)(memory),
    ctypes.CFUNCTYPE(ctypes.c_int, pointer)(lambda _: 1),
]
device = Device()
for place, function in enumerate(functions):
    device.functions[place] = ctypes.cast(function, pointer)
register = lib._lib["ggml_backend_device_register"]
register.argtypes, register.restype = [pointer], None
register(ctypes.addressof(device))
(found,) = accelerators()
assert (found.name, found.description) == ("RPC0", "another machine's")
assert (found.free_bytes, found.total_bytes, found.shares_memory) == (5 << 30, 6 << 30, False)
ggml_function("ggml_nbytes", ctypes.c_size_t, pointer)
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libggml" in line or "/libllama" in line}
print(*sorted(files), sep="\\n")
import os
os._exit(0)  # the registry would go on with a device that is gone
"""


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["the wheel's", "LLAMA_CPP_LIB_PATH"])
def test_there_is_one_registry_with_all_that_was_registered(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is llama.cpp's own: none of its libraries is there twice, and a late device is seen."""
    folder = llama_binary.library_folder()
    assert folder is not None
    if elsewhere:
        shutil.copytree(folder, tmp_path / "llama")
        folder = tmp_path / "llama"
        monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(folder))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    files = [Path(line) for line in done.stdout.split()]
    names = [file.name.partition(".so")[0] for file in files]
    assert sorted(names) == ["libggml", "libggml-base", "libggml-cpu", "libllama"]
    assert {file.parent.resolve() for file in files} == {folder.resolve()}


@pytest.mark.parametrize(
    ("system", "processor", "board", "unified"),
    [
        ("Darwin", "arm64", "", True),
        ("Darwin", "x86_64", "", False),
        (
            "Linux",
            "aarch64",
            "nvidia,p3768-0000+p3767-0003\0nvidia,tegra234\0nvidia,tegra23x",
            True,
        ),
        ("Linux", "aarch64", "raspberrypi,5-model-b\0brcm,bcm2712", False),
        ("Linux", "x86_64", "", False),
    ],
)
def test_unified_memory_is_that_of_apple_silicon_and_jetson(
    monkeypatch: pytest.MonkeyPatch, system: str, processor: str, board: str, unified: bool
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr(host, "_read", lambda path: board if path.name == "compatible" else "")
    assert host.has_unified_memory() is unified
