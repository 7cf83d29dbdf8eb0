"""llama.cpp's shared libraries: where they lie, and functions of the ones that are in use.

Planning asks them about GPUs, and imports no inference library for that. They are opened by
llama-cpp-python's own loader, which it is not needed to import for, so that the process holds each
of them once: a wheel has copies of a library under several names, and a copy would have a device
registry of its own, initialise a GPU again, and not know what was registered in the other one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_LOADER = "_ctypes_extensions"  # of llama-cpp-python: how it finds and opens a library
_VERSION = re.compile(r"""__version__ *= *["']([^"']+)""")
# The llama-cpp-python that edgespec was tested with. With 0.3.35 no model loads: it has no lazy
# mode. The kernels are made for the llama.cpp of 0.3.36 alone.
TESTED = "0.3.36"
GGML_VERSION, COMMIT = "0.25.3", "0c1e570"  # of the llama.cpp in it
PACKAGE = f"llama-cpp-python=={TESTED}"  # as pip installs it
_PARTS = ("ggml", "ggml-base")  # what libllama is bound to, where functions are found by library


def library_folder() -> Path | None:
    """Where the llama.cpp lies that llama-cpp-python loads; None where there is none."""
    if (override := os.environ.get("LLAMA_CPP_LIB_PATH")) is not None:  # llama-cpp-python's own
        return Path(override)
    package = _package()
    return package / "lib" if package is not None else None


def kernel_files() -> list[Path]:
    """Files with the kernels of that llama.cpp."""
    folder = library_folder()
    return sorted(folder.glob("*ggml-*")) if folder is not None else []


def function_of(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function by its signature: a handle of our own, as signatures belong to handles.

    Raises AttributeError where the library does not have it.
    """
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml, as the library has it that llama.cpp computes with.

    Raises FileNotFoundError, OSError or RuntimeError where there is none that loads, and
    AttributeError for a function that it does not have.
    """
    for library in _libraries():
        with suppress(AttributeError):
            return function_of(library, name, result, *arguments)
    raise AttributeError(f"llama.cpp has no function {name}")


def package_version() -> str:
    """Version of llama-cpp-python, read in its file: the library that knows takes 15 ms; or ""."""
    package = _package()
    try:
        text = (package / "__init__.py").read_text() if package is not None else ""
    except (OSError, UnicodeDecodeError):
        return ""
    found = _VERSION.search(text)
    return found[1] if found is not None else ""


def is_tested(installed: str) -> bool:
    """Whether a version of llama-cpp-python, of whatever build, is the one that was tested."""
    return installed.partition("+")[0] == TESTED


def _package() -> Path | None:
    """The folder of llama-cpp-python, which is located and not imported."""
    found = importlib.util.find_spec("llama_cpp")
    return Path(found.origin).parent if found is not None and found.origin else None


def import_functions(name: str) -> ModuleType:
    """A module of llama-cpp-python that declares C functions, without the package around it.

    That imports Jinja2 and more that is not used here, which takes 0.2 s, and leaves two files
    open. It is imported as soon as anybody asks the package for something else. Raises as `import`.
    """
    if "llama_cpp" not in sys.modules and (spec := importlib.util.find_spec("llama_cpp")):
        sys.modules["llama_cpp"] = _later(spec)
    importlib.import_module("llama_cpp")  # fails where that was forbidden
    return importlib.import_module(f"llama_cpp.{name}")


def _later(spec: ModuleSpec) -> ModuleType:
    """A package whose own code runs when it is asked for what is no module that was imported."""
    package = importlib.util.module_from_spec(spec)
    lock, begun = threading.RLock(), threading.Event()

    def attribute(name: str) -> Any:
        is_asked_of_any = name.startswith("__") and name != "__all__"  # by what walks all modules
        if not is_asked_of_any and spec.loader is not None:
            with lock:
                if not begun.is_set():
                    begun.set()
                    spec.loader.exec_module(package)
                    functions = sys.modules["llama_cpp.llama_cpp"]
                    if listener := getattr(functions, "edgespec_log_callback", None):
                        functions.llama_log_set(listener, None)  # it put its own there
        if name in vars(package):
            return vars(package)[name]
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

    vars(package)["__getattr__"] = attribute
    return package


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Libraries in which ggml's functions are found.

    A symbol is looked for in what a library is bound to as well, so that libllama is enough; not on
    Windows, where a library of the same name in the same folder is the same one.
    """
    imported = sys.modules.get("llama_cpp.llama_cpp")
    folder = getattr(imported, "_base_path", None) or library_folder()
    llama = getattr(imported, "_lib", None) or _loader().load_shared_library("llama", folder)
    if sys.platform != "win32":
        return (llama,)
    return (llama, *(_loader().load_shared_library(part, folder) for part in _PARTS))


@functools.cache
def _loader() -> ModuleType:
    """llama-cpp-python's loader, without the rest of it."""
    package = _package()
    spec: ModuleSpec | None = None
    if package is not None:
        spec = importlib.util.spec_from_file_location(_LOADER, package / f"{_LOADER}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("llama-cpp-python is not installed")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
