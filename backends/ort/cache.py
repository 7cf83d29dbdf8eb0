"""Converted models, kept between runs: GGUF in, a folder for ONNX Runtime out.

A conversion belongs to a file's content, this version of the graph, ONNX Runtime's version and the
processor, because it holds the weights as the kernels want them ("prepacked"): they are then mapped
from disk instead of being packed into private memory at every start. Folders appear and go as a
whole, what killed conversions left is removed by the next one, and the least recently used ones go
when all together take too much.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.backends.ort.backend import OrtBackend
from edgespec.backends.ort.providers import CPU_PROVIDER, onnxruntime_module
from edgespec.errors import (
    BackendError,
    MissingDependencyError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedError,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.onnx.facts import GQA, GraphFacts, GraphOptions, read_facts
from edgespec.models.onnx.folder import GRAPH_FILE
from edgespec.models.onnx.graph import GRAPH_VERSION, write_graphs
from edgespec.models.onnx.writer import WEIGHTS_FILE
from edgespec.models.processes import do_job, messages_of
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import making, put_in_place, refusing, remove_dead

_DISK_FACTOR = 3.3  # of the GGUF, while the converted and the packed file both exist
_KEPT_BYTES = 16 << 30
_PACKING_SHARE = 0.5  # of the time
# What ONNX Runtime's CPU kernels run; only these are packed, since packing is theirs.
_CPU_GRAPHS = {GRAPH_FILE: GraphOptions(GQA)}
_HINT = "make room, or set EDGESPEC_CACHE to a larger disk"
_ERRORS = {  # that the other process may name
    kind.__name__: kind
    for kind in (UnsupportedError, MissingDependencyError, ModelFileError, ModelNotFoundError)
}
_LAST_BYTES = 4096  # of what a conversion that failed has printed


def converted(
    spec: ModelSpec,
    root: Path,
    device: str,
    progress: Callable[[float], None] = lambda _fraction: None,
    graphs: Mapping[str, GraphOptions] | None = None,
) -> Path:
    """The folder of a converted model below `root`, made now if it is not there yet.

    Args:
        device: names the processor; packed weights are not shared between kinds.
        graphs: what is written, by file name; the packed graph for the CPU if left out.

    Raises:
        UnsupportedError: the graph cannot express this model, or the disk is too full.
        MissingDependencyError: onnx or onnxruntime is not installed.
        BackendError: ONNX Runtime cannot pack it.
    """
    graphs = dict(graphs or _CPU_GRAPHS)
    folder = root / _key(spec, device, graphs)
    if _is_whole(folder, graphs):
        with contextlib.suppress(OSError):
            os.utime(folder)
        return folder
    with refusing("the converted model", _HINT):
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root):
            if not _is_whole(folder, graphs):
                remove_dead(root)
                _require_space(spec, root, graphs)
                with making(folder) as work:
                    (work / "packed").mkdir(parents=True)
                    _convert_elsewhere(spec, work, graphs, progress)
                    try:
                        put_in_place(work / "packed", folder)
                    except OSError:  # another process was faster: its is as good
                        if not _is_whole(folder, graphs):
                            _remove(folder)  # somebody took files out of it
                            put_in_place(work / "packed", folder)
    progress(1.0)
    _evict(root, keep=folder)
    return folder


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let other processes wait that would convert: two at once take twice the room and the time.

    Where no file can be locked they do not wait.
    """
    from filelock import FileLock

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            held.enter_context(FileLock(root / "lock"))
        yield


def _is_whole(folder: Path, graphs: Mapping[str, GraphOptions]) -> bool:
    return all((folder / name).exists() for name in (*graphs, WEIGHTS_FILE))


def _convert_elsewhere(
    spec: ModelSpec,
    work: Path,
    graphs: Mapping[str, GraphOptions],
    progress: Callable[[float], None],
) -> None:
    """Convert in a process of its own, whose memory is gone when the model is loaded here."""
    wanted = {name: asdict(options) for name, options in graphs.items()}
    job = {"path": str(spec.path), "work": str(work), "graphs": wanted}
    end: dict[str, Any] = {}
    # What it prints besides is in a file, because a pipe that nobody empties would stop it.
    with tempfile.TemporaryFile() as printed:
        with contextlib.closing(messages_of(__spec__.name, job, stderr=printed)) as messages:
            for said in messages:
                if "part" in said:
                    progress(said["part"])
                else:
                    end |= said
        if end["exit_status"] or "problem" in end:
            raise _failure(end, printed)


def _failure(said: dict[str, Any], printed: BinaryIO) -> Exception:
    """Why the process that converts has ended: what it said last, or else printed last."""
    if "errno" in said:
        return OSError(said["errno"], said["problem"])
    if "problem" in said:
        kind = _ERRORS.get(said["kind"], BackendError)
        return kind(f"the model cannot be converted: {said['problem']}", hint=said["hint"])
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = printed.read().decode("utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    last = last or f"status {said['exit_status']}"
    return BackendError(f"the model cannot be converted: {last}")


def _convert(job: dict[str, Any], say: Callable[..., None]) -> None:
    """What the other process does: write the graphs and pack them, and say how far it is."""
    spec, folder = read_model_spec(job["path"]), Path(job["work"])
    graphs = {name: GraphOptions(**options) for name, options in job["graphs"].items()}
    is_packed = graphs == _CPU_GRAPHS

    def report(part: float) -> None:
        say(part=round(part * (1 - _PACKING_SHARE * is_packed), 3))

    facts = read_facts(spec)
    write_graphs(spec, facts, folder if is_packed else folder / "packed", graphs, report)
    if is_packed:
        _pack(folder / GRAPH_FILE, folder / "packed")
        _check(spec, facts, folder, folder / "packed")


def _key(spec: ModelSpec, device: str, graphs: Mapping[str, GraphOptions]) -> str:
    """What a conversion belongs to; one that is not packed fits every processor and version."""
    is_packed = graphs == _CPU_GRAPHS
    place = f"{_runtime_version()} {device}" if is_packed else f"{sorted(graphs.items())}"
    made_of = f"{GRAPH_VERSION} {place} {spec.fingerprint}"
    return blake2b(made_of.encode(), digest_size=12).hexdigest()


def _runtime_version() -> str:
    return str(onnxruntime_module().__version__)


def _require_space(spec: ModelSpec, root: Path, graphs: Mapping[str, GraphOptions]) -> None:
    needed = int(_DISK_FACTOR * spec.weight_bytes)
    if any(options.plain for options in graphs.values()):
        needed = sum(4 * math.prod(tensor.dims) for tensor in spec.tensors.values())
    free = shutil.disk_usage(root).free
    if free < needed:
        raise UnsupportedError(
            f"converting this model takes {needed >> 20} MiB of disk for a moment, and "
            f"{free >> 20} MiB are free",
            hint=_HINT,
        )


def _pack(graph: Path, folder: Path) -> None:
    """Let ONNX Runtime optimize the graph and store it with its packed weights."""
    onnxruntime = onnxruntime_module()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # The graph is fused already, and ONNX Runtime 1.31 stores packed weights wrongly where it
    # shares constants between nodes or keeps their scales inside the graph: answers are then NaN
    # or nonsense, so scales (never this small) go to the file, and `_check` compares.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(folder / GRAPH_FILE)
    for name, value in (
        ("session.optimized_model_external_initializers_file_name", WEIGHTS_FILE),
        ("session.optimized_model_external_initializers_min_size_in_bytes", "256"),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(name, value)
    try:
        onnxruntime.InferenceSession(str(graph), options, providers=[CPU_PROVIDER])
    except Exception as error:
        raise BackendError(f"ONNX Runtime cannot pack the weights: {error}") from error


def _check(spec: ModelSpec, facts: GraphFacts, written: Path, packed: Path) -> None:
    """Refuse packed weights that compute anything else than the graph as it was written."""
    rows = []
    for folder in (written, packed):
        backend = OrtBackend(spec, facts, folder, RunConfig(64, batch_size=8, max_nodes=4))
        rows.append(backend.prefill(range(8)).copy())
        backend.close()
    if not np.array_equal(*rows):
        raise BackendError("ONNX Runtime packed the weights wrongly: the logits differ")


def _evict(root: Path, keep: Path) -> None:
    """Remove the least recently used models while all together are too large."""
    found = []
    for folder in root.iterdir():
        if folder.is_dir() and folder.name[0] != ".":
            with contextlib.suppress(OSError):  # another process has just removed it
                files = [file.stat() for file in folder.rglob("*") if file.is_file()]
                found.append((folder.stat().st_mtime, sum(one.st_size for one in files), folder))
    total = sum(size for _, size, _ in found)
    for _, size, folder in sorted(found):
        if total > _KEPT_BYTES and folder != keep:
            total -= size
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a converted model: all of it at once, whenever this process may be killed."""
    with contextlib.suppress(OSError), making(folder) as going:
        os.replace(folder, going)


if __name__ == "__main__":
    do_job(_convert)
