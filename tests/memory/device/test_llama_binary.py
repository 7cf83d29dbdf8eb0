"""llama.cpp's libraries, which are looked at without loading a model."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.memory.device import accelerators, llama_binary


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


PROGRAM = """
import ctypes
from edgespec.memory.device.accelerators import accelerators
assert accelerators() == ()
from edgespec.backends.llama.library import ggml_function, library
lib = library()

class Device(ctypes.Structure):
    # struct ggml_backend_device: of its functions the first five matter here
    _fields_ = [("functions", ctypes.c_void_p * 16), ("reg", ctypes.c_void_p)]

from edgespec.memory.device.structures import DeviceProperties

pointer = ctypes.c_void_p
texts = ctypes.CFUNCTYPE(pointer, pointer)
name = ctypes.create_string_buffer(b"RPC0")
unused = ctypes.CFUNCTYPE(None)(lambda: None)

def tell(_device, told):
    told[0].name, told[0].description = b"RPC0", b"another machine's"
    told[0].memory_free, told[0].memory_total, told[0].type = 5 << 30, 6 << 30, 1

functions = [
    texts(lambda _: ctypes.addressof(name)),
    unused,
    unused,
    unused,
    ctypes.CFUNCTYPE(None, pointer, ctypes.POINTER(DeviceProperties))(tell),
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
print(*sorted(files), sep="\\n", flush=True)
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
    assert len(names) == len({*names})
    assert {*names} - {"libggml-rpc"} == {"libggml", "libggml-base", "libggml-cpu", "libllama"}
    assert {file.parent.resolve() for file in files} == {folder.resolve()}


def test_functions_are_imported_without_the_package_around_them() -> None:
    """Which imports a template engine, for 0.2 s, and is whole for whoever else asks for it."""
    program = (
        "import sys\n"
        "from edgespec.backends.llama.library import LIBRARY_LOG, library\n"
        "from edgespec.backends.llama.kernels import model_params\n"
        "from edgespec.backends.llama.vision import mtmd\n"
        "lib, images = library(), mtmd()\n"
        "assert not {'jinja2', 'llama_cpp.llama'} & {*sys.modules}\n"
        "import llama_cpp\n"
        "# as whoever walks all modules asks:\n"
        "assert not hasattr(llama_cpp, '__warningregistry__')\n"
        "assert 'llama_cpp.llama' not in sys.modules\n"
        "from llama_cpp import Llama, mtmd_cpp\n"
        "assert (llama_cpp.llama_cpp, mtmd_cpp, llama_cpp.Llama) == (lib, images, Llama)\n"
        "assert not hasattr(llama_cpp, 'nothing')\n"
        "lib.llama_model_load_from_file(b'/none.gguf', model_params())\n"
        "assert '/none.gguf' in LIBRARY_LOG.problem(), 'it has a listener of its own'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
