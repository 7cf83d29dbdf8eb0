"""Converted models, kept between runs: GGUF in, a folder for ONNX Runtime out.

A conversion belongs to a file's content, this version of the graph, ONNX Runtime's version and the
processor, because it holds the weights as the kernels want them ("prepacked"): they are then mapped
from disk instead of being packed into private memory at every start. Folders are made beside their
final place and renamed, so a killed conversion leaves nothing that could be mistaken for a whole
one, and the least recently used ones go when all together take too much.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgespec.backends.ort import OrtBackend, OrtSettings
from edgespec.backends.ort_providers import CPU_PROVIDER, onnxruntime_module
from edgespec.errors import BackendError, UnsupportedError
from edgespec.models.onnx_facts import GQA, GraphFacts, GraphOptions, read_facts
from edgespec.models.onnx_graph import GRAPH_FILE, GRAPH_VERSION, write_graphs
from edgespec.models.onnx_writer import WEIGHTS_FILE
from edgespec.models.spec import ModelSpec, read_model_spec

_SAMPLE_BYTES = 1 << 14  # of each tensor; two fine-tunes differ everywhere
_DISK_FACTOR = 3.3  # of the GGUF, while the converted and the packed file both exist
_KEPT_BYTES = 16 << 30
_PACKING_SHARE = 0.5  # of the time
# What ONNX Runtime's CPU kernels run; only these are packed, since packing is theirs.
_CPU_GRAPHS = {GRAPH_FILE: GraphOptions(GQA)}


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
    if all((folder / name).exists() for name in graphs):
        with contextlib.suppress(OSError):
            os.utime(folder)
        return folder
    root.mkdir(parents=True, exist_ok=True)
    _require_space(spec, root, graphs)
    work = Path(tempfile.mkdtemp(prefix="making-", dir=root))
    try:
        (work / "packed").mkdir()
        _convert_elsewhere(spec, work, graphs, progress)
        with contextlib.suppress(OSError):  # somebody else was faster: theirs is as good
            os.replace(work / "packed", folder)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot write the converted model: {problem.strerror}",
            hint="make room, or set EDGESPEC_CACHE to a larger disk",
        ) from problem
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(1.0)
    _evict(root, keep=folder)
    return folder


def _convert_elsewhere(
    spec: ModelSpec,
    work: Path,
    graphs: Mapping[str, GraphOptions],
    progress: Callable[[float], None],
) -> None:
    """Convert in a process of its own, whose memory is gone when the model is loaded here."""
    wanted = json.dumps({name: asdict(options) for name, options in graphs.items()})
    command = [sys.executable, "-m", __spec__.name, str(spec.path), str(work), wanted]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                progress(float(line))
            problem = process.stderr.read().strip()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        last = problem.splitlines()[-1] if problem else f"status {process.returncode}"
        raise BackendError(f"the model cannot be converted: {last}")


def _convert(path: str, work: str, wanted: str) -> None:
    """What the other process does: write the graphs, pack them, and print how far it is."""
    spec, folder = read_model_spec(path), Path(work)
    graphs = {name: GraphOptions(**options) for name, options in json.loads(wanted).items()}
    is_packed = graphs == _CPU_GRAPHS

    def report(part: float) -> None:
        print(round(part * (1 - _PACKING_SHARE * is_packed), 3), flush=True)

    facts = read_facts(spec)
    write_graphs(spec, facts, folder if is_packed else folder / "packed", graphs, report)
    if is_packed:
        _pack(folder / GRAPH_FILE, folder / "packed")
        _check(spec, facts, folder, folder / "packed")


def _key(spec: ModelSpec, device: str, graphs: Mapping[str, GraphOptions]) -> str:
    """What a conversion belongs to; one that is not packed fits every processor and version."""
    is_packed = graphs == _CPU_GRAPHS
    place = f"{_runtime_version()} {device}" if is_packed else f"{sorted(graphs.items())}"
    digest = blake2b(digest_size=12)
    digest.update(f"{GRAPH_VERSION} {place} {spec.fingerprint}\n".encode())
    with spec.path.open("rb") as file:
        for tensor in spec.tensors.values():
            file.seek(tensor.offset)
            digest.update(file.read(min(_SAMPLE_BYTES, tensor.data_bytes)))
    return digest.hexdigest()


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
            hint="make room, or set EDGESPEC_CACHE to a larger disk",
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
        backend = OrtBackend(spec, facts, folder, OrtSettings(64, batch_size=8, max_nodes=4))
        rows.append(backend.prefill(range(8)).copy())
        backend.close()
    if not np.array_equal(*rows):
        raise BackendError("ONNX Runtime packed the weights wrongly: the logits differ")


def _evict(root: Path, keep: Path) -> None:
    """Remove the least recently used models while all together are too large."""
    folders = sorted(
        (folder for folder in root.iterdir() if folder.is_dir() and folder != keep),
        key=lambda folder: folder.stat().st_mtime,
    )
    total = sum(_folder_bytes(folder) for folder in (*folders, keep))
    for folder in folders:
        if total <= _KEPT_BYTES:
            return
        total -= _folder_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _folder_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return 0


if __name__ == "__main__":
    _convert(*sys.argv[1:])
