"""ONNX Runtime's execution providers: which there are, which one runs a graph, and whether it does.

Providers come with the installed ONNX Runtime (OpenVINO, CUDA, DirectML) or as plugins that are
registered with it (QNN and others); a plugin lists the devices it sees. A device is
chosen by its type and named to ONNX Runtime, never left to a policy: those fail where a plugin is
installed for hardware that is not there. What a provider cannot run ONNX Runtime gives to the
processor without a word, so a session says which share of its nodes runs where it should.

Graphs as the compiler of a device has left them are kept beside those that they were made of. QNN
compiles for seconds a graph. What it made can be stored in place of the graph's nodes ("EP
context"), and is loaded in its stead at the next start. Graphs of several sizes are compiled
together, so that they have the weights once; where that cannot be loaded, each has its own.
OpenVINO keeps what it compiles for a GPU or an NPU by itself, in a folder that it is given.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError, UnsupportedError, imported
from edgespec.models.onnx.facts import GQA, SPLIT, GraphOptions
from edgespec.models.onnx.folder import GRAPH_FILE
from edgespec.models.onnx.graph import bucket_graphs
from edgespec.models.writing import making, put_in_place

CPU_PROVIDER = "CPUExecutionProvider"
QNN, OPENVINO, DIRECTML = (
    "QNNExecutionProvider",
    "OpenVINOExecutionProvider",
    "DmlExecutionProvider",
)
LEAST_SHARE = 0.9  # of a graph's nodes; below it, a device that was asked for is not used
STEPS = (1, 8, 16, 32)  # nodes of the graphs for devices that want fixed shapes

# Packages that bring a provider as a plugin: the module tells the library and the names in it.
_PLUGINS = ("onnxruntime_qnn", "onnxruntime_ep_openvino", "onnxruntime_ep_webgpu")
# Kinds of devices a built-in provider may have, where it does not list them.
_BUILT_IN = {
    "CUDAExecutionProvider": ("gpu",),
    DIRECTML: ("gpu", "npu"),  # it does not tell whether there is one: the first session does
    QNN: ("npu",),
    OPENVINO: ("cpu", "gpu", "npu"),
}
_PACKAGES = {
    "gpu": "onnxruntime-gpu (NVIDIA), onnxruntime-openvino (Intel) or onnxruntime-directml",
    "npu": "onnxruntime-qnn (Snapdragon), onnxruntime-openvino (Intel) or onnxruntime-directml",
}
_QNN_TAKES_BLOCKS = (2, 7)  # the first version tried whose compiler has MatMulNBits


@dataclass(frozen=True, slots=True)
class OnnxDevice:
    """A device of a provider.

    Args:
        kind: "cpu", "gpu" or "npu".
        vendor: as the provider tells it; may be empty.
        handle: the OrtEpDevice of a plugin; None for a provider that is built in.
        options: given to the provider.
    """

    provider: str
    kind: str
    vendor: str = ""
    handle: Any = None
    options: Mapping[str, str] = field(default_factory=dict)


CPU_DEVICE = OnnxDevice(CPU_PROVIDER, "cpu")


def onnxruntime_module() -> Any:
    """The library. Raises MissingDependencyError where it is not installed."""
    needed = "--backend onnx needs onnxruntime"
    return imported("onnxruntime", needed, "pip install 'edgespec[onnx]'")


def devices() -> tuple[OnnxDevice, ...]:
    """Every device of every installed provider; those of plugins first, the CPU's own last."""
    runtime = onnxruntime_module()
    _register_plugins()
    found = [
        OnnxDevice(one.ep_name, one.device.type.name.lower(), one.ep_vendor, one)
        for one in runtime.get_ep_devices()
    ]
    known = {one.provider for one in found}
    for provider in runtime.get_available_providers():
        if provider not in known:
            found += (OnnxDevice(provider, kind) for kind in _kinds(provider))
    return (*(one for one in found if one.provider != CPU_PROVIDER), CPU_DEVICE)


def choose(kind: str) -> OnnxDevice:
    """The device for `--device`: the processor's own kernels unless a GPU or an NPU is asked for.

    Raises UnsupportedError where no provider has such a device.
    """
    if kind in ("auto", "cpu"):
        return CPU_DEVICE
    for one in devices():
        if one.kind == kind:
            return one
    raise UnsupportedError(
        f"--device {kind} is not possible: no provider of ONNX Runtime has one here",
        hint=f"install {_PACKAGES[kind]}; `edgespec doctor` lists what there is",
    )


def graphs_for(place: OnnxDevice, context_size: int) -> dict[str, GraphOptions]:
    """The graphs a device wants: ONNX Runtime's own operations or standard ones, any or fixed
    shapes, packed or plain weights."""
    if place == CPU_DEVICE:
        return {GRAPH_FILE: GraphOptions(GQA)}
    options = GraphOptions(SPLIT, plain=place.provider == QNN and not _takes_blocks())
    if place.kind == "npu":
        return bucket_graphs(STEPS, context_size, options)
    return {GRAPH_FILE: options}


def _takes_blocks() -> bool:
    """Whether QNN's package compiles 4- and 8-bit weights as they are."""
    try:
        numbers = importlib.metadata.version("onnxruntime-qnn").split(".")
        return tuple(map(int, numbers[:2])) >= _QNN_TAKES_BLOCKS
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def open_session(
    path: Path,
    threads: int,
    place: OnnxDevice = CPU_DEVICE,
    entries: Mapping[str, str] | None = None,
    **more: str,
) -> tuple[Any, float]:
    """A session on a device, and the share of its nodes that really runs there.

    Args:
        entries: of the session's configuration, besides what each has.
        more: options of the provider, besides those of its device.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        BackendError: ONNX Runtime cannot load the graph, with its own words.
        UnsupportedError: this ONNX Runtime does not tell what runs on a device.
    """
    runtime = onnxruntime_module()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as well
    chosen: dict[str, Any] = {"providers": [CPU_PROVIDER]}
    if place.provider != CPU_PROVIDER:
        if not hasattr(runtime.InferenceSession, "get_provider_graph_assignment_info"):
            raise UnsupportedError(
                f"ONNX Runtime {runtime.__version__} does not tell what runs on a device",
                hint="--device needs ONNX Runtime 1.24, which is for Python 3.11 and newer",
            )
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for name, value in (entries or {}).items():
            options.add_session_config_entry(name, value)
        options.enable_mem_pattern = place.provider != DIRECTML  # it has none
        settings = {**_options(place, threads), **place.options, **more}
        if place.handle is None:
            chosen = {"providers": [(place.provider, settings), CPU_PROVIDER]}
        else:
            options.add_provider_for_devices([place.handle], settings)
            chosen = {}
    try:
        session = runtime.InferenceSession(str(path), options, enable_fallback=0, **chosen)
    except Exception as error:
        raise BackendError(f"ONNX Runtime cannot load {path.name}: {error}") from error
    if place.provider == CPU_PROVIDER:
        return session, 1.0
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return session, counts[place.provider] / max(1, counts.total())


def require_share(share: float, place: OnnxDevice) -> None:
    """Raise UnsupportedError where a GPU or NPU would run less than LEAST_SHARE of the nodes."""
    if place.kind != "cpu" and share < LEAST_SHARE:
        raise UnsupportedError(
            f"{place.provider} would run {share:.0%} of this graph on the {place.kind.upper()}, "
            f"and the processor the rest",
            hint="use --device cpu, which is faster than a mixture",
        )


def _options(place: OnnxDevice, threads: int) -> dict[str, str]:
    """What a provider has to be told; names are those of its documentation."""
    if place.provider == OPENVINO and place.handle is None:
        return {"device_type": place.kind.upper(), "num_of_threads": str(threads)}
    if place.provider == QNN:
        return {"enable_htp_fp16_precision": "1", "htp_performance_mode": "burst"}
    if place.provider == DIRECTML and place.kind == "npu":
        return {"device_filter": "npu"}
    return {}


def _kinds(provider: str) -> tuple[str, ...]:
    """Kinds of devices a built-in provider has here, as far as it can be known."""
    kinds = _BUILT_IN.get(provider, ())
    if provider != OPENVINO:
        return kinds
    seen: list[str] = ["CPU"]
    with suppress(ImportError, AttributeError):  # a build with OpenVINO inside tells CPU, GPU.0 ...
        from onnxruntime.capi import _pybind_state

        seen = _pybind_state.get_available_openvino_device_ids()
    return tuple(kind for kind in kinds if any(kind.upper() in name for name in seen))


@functools.cache
def _register_plugins() -> None:
    """Tell ONNX Runtime of every plugin that is installed; one that does not load is left out.

    Under the provider's own name: the QNN plugin takes whatever it is registered under for it.
    """
    runtime = onnxruntime_module()
    for package in filter(importlib.util.find_spec, _PLUGINS):
        module = importlib.import_module(package)
        name, library = module.get_ep_names()[0], module.get_library_path()
        with suppress(Exception):  # it is of another ONNX Runtime, or for another system
            runtime.register_execution_provider_library(name, library)


FOLDER = "compiled"
_ABOUT = "about.json"


def open_sessions(
    paths: Sequence[Path], threads: int, place: OnnxDevice, *, keep: bool = True
) -> tuple[list[Any], float]:
    """Sessions of one model's graphs, and the least share of their nodes that runs on the device.

    Args:
        keep: whether what is compiled may be written beside the graphs.

    Raises as `open_session` and `require_share`.
    """
    home = paths[0].parent / FOLDER / _key(place)
    if keep and place.provider == QNN:
        with suppress(BackendError, OSError, ValueError, KeyError):
            return _load(home, paths, threads, place)
        with suppress(BackendError, OSError):  # no room for it
            return _make(home, paths, threads, place)
    more = {}
    if keep and place.provider == OPENVINO and place.kind != "cpu" and place.handle is None:
        more = {"cache_dir": str(home)}
    opened = [open_session(path, threads, place, {}, **more) for path in paths]
    share = min(share for _, share in opened)
    require_share(share, place)
    return [session for session, _ in opened], share


def _make(
    home: Path, paths: Sequence[Path], threads: int, place: OnnxDevice
) -> tuple[list[Any], float]:
    """Compile all, keep it, and load what is kept."""
    home.parent.mkdir(exist_ok=True)
    if home.exists():  # a driver refuses what another one has compiled
        with making(home) as going:
            os.replace(home, going)
    for together in (True, False) if len(paths) > 1 else (False,):
        with making(home) as work:
            work.mkdir()
            share = _compile(work, paths, threads, place, together=together)
            require_share(share, place)
            (work / _ABOUT).write_text(json.dumps({"together": together, "share": share}))
            try:
                _load(work, paths, threads, place)
            except BackendError:
                if not together:
                    raise
                continue
            put_in_place(work, home)
            break
    return _load(home, paths, threads, place)


def _compile(
    work: Path, paths: Sequence[Path], threads: int, place: OnnxDevice, *, together: bool
) -> float:
    """Write each graph with what it was compiled to; the least share of nodes on the device."""
    alive, shares = [], []  # what the first one has is given to the others
    for path in paths:
        entries = {
            "ep.context_enable": "1",
            "ep.context_file_path": str(work / path.name),
            "ep.context_embed_mode": "0",
            **_sharing(together, path == paths[-1]),
        }
        more = {"enable_htp_weight_sharing": "1"} if together else {}
        session, share = open_session(path, threads, place, entries, **more)
        alive.append(session)
        shares.append(share)
    return min(shares)


def _load(
    home: Path, paths: Sequence[Path], threads: int, place: OnnxDevice
) -> tuple[list[Any], float]:
    """What was compiled. Raises where it is not there, or not for this device any more."""
    about = json.loads((home / _ABOUT).read_text())
    together, share = bool(about["together"]), float(about["share"])
    sessions = [
        open_session(home / path.name, threads, place, _sharing(together, path == paths[-1]))[0]
        for path in paths
    ]
    return sessions, share


def _sharing(together: bool, is_last: bool) -> dict[str, str]:
    if not together:
        return {}
    last = {"ep.stop_share_ep_contexts": "1"} if is_last else {}
    return {"ep.share_ep_contexts": "1", **last}


def _key(place: OnnxDevice) -> str:
    """What compiled graphs belong to: the device, its provider and what they are told."""
    told = sorted(getattr(place.handle, "ep_metadata", {}).items())
    options = sorted(place.options.items())
    made_by = f"{onnxruntime_module().__version__} {place.provider} {place.kind} {told} {options}"
    return blake2b(made_by.encode(), digest_size=8).hexdigest()
