"""What a device's compiler has made is loaded at the next start; on a runtime that is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")

from edgespec.backends.ort import providers
from edgespec.backends.ort.backend import OrtBackend
from edgespec.backends.ort.cache import converted
from edgespec.backends.ort.providers import CPU_PROVIDER, OPENVINO, QNN, OnnxDevice, open_sessions
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.onnx.facts import GraphOptions, read_facts
from edgespec.models.onnx.graph import bucket_graphs
from edgespec.models.spec import read_model_spec

SHARE, STOP = "ep.share_ep_contexts", "ep.stop_share_ep_contexts"
NPU = OnnxDevice(QNN, "npu", handle=SimpleNamespace(ep_metadata={"version": "1"}))


class Compiler:
    """A runtime whose provider compiles, on the CPU: a compiled graph is the graph itself.

    `loads_shared`: whether it opens what several graphs share, as the emulator does not. `driver`
    is what compiled graphs belong to.
    """

    def __init__(self, *, loads_shared: bool = True, share: float = 1.0) -> None:
        self.loads_shared, self.driver = loads_shared, "driver 1"
        self.counts = {QNN: round(100 * share), CPU_PROVIDER: 100 - round(100 * share)}
        self.opened: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.__version__ = "1.30"

    @property
    def num_compiled(self) -> int:
        return sum("ep.context_enable" in entries for _, entries, _ in self.opened)

    def SessionOptions(self) -> Any:
        entries: dict[str, str] = {}
        added: dict[str, str] = {}
        return SimpleNamespace(
            entries=entries,
            added=added,
            add_session_config_entry=entries.__setitem__,
            add_provider_for_devices=lambda _devices, options: added.update(options),
        )

    def InferenceSession(self, path: str, options: Any, **chosen: Any) -> Any:
        entries, source = options.entries, Path(path)
        self.opened.append((path, dict(entries), {**options.added, **chosen}))
        marker = source.with_suffix(".driver")
        if marker.exists():
            told = marker.read_text().split("|")
            if told[0] != self.driver or (told[1] and not self.loads_shared):
                raise RuntimeError("contextCreateFromBinary failed")
        if "ep.context_enable" in entries:
            made = Path(entries["ep.context_file_path"])
            made.write_bytes(source.read_bytes())
            made.with_suffix(".driver").write_text(f"{self.driver}|{entries.get(SHARE, '')}")
            weights = source.with_name("weights.bin")
            if weights.exists():
                made.with_name("weights.bin").write_bytes(weights.read_bytes())
        return self.session(path)

    def session(self, path: str) -> Any:
        parts = [
            SimpleNamespace(ep_name=name, get_nodes=lambda count=count: [0] * count)
            for name, count in self.counts.items()
        ]
        return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts, path=path)

    InferenceSession.get_provider_graph_assignment_info = None  # type: ignore[attr-defined]


Use = Callable[[Compiler], Compiler]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def used(runtime: Compiler) -> Compiler:
        monkeypatch.setattr(providers, "onnxruntime_module", lambda: runtime)
        return runtime

    return used


@pytest.fixture
def graphs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"step-{size}.onnx" for size in (1, 8)]
    for path in paths:
        path.write_bytes(b"graph")
    return paths


def test_a_second_start_compiles_nothing(use: Use, graphs: list[Path]) -> None:
    runtime = use(Compiler(share=0.95))
    for _ in range(2):
        sessions, share = open_sessions(graphs, 2, NPU)
        assert [Path(one.path).name for one in sessions] == ["step-1.onnx", "step-8.onnx"]
        assert all(Path(one.path).parent != graphs[0].parent for one in sessions)
        assert share == 0.95, "of the graph's nodes; one that was compiled is a single node"
        assert runtime.num_compiled == 2


def test_graphs_of_several_sizes_share_their_weights(use: Use, graphs: list[Path]) -> None:
    runtime = use(Compiler())
    open_sessions(graphs, 2, NPU)
    runtime.opened.clear()
    open_sessions(graphs, 2, NPU)
    assert [(SHARE in entries, STOP in entries) for _, entries, _ in runtime.opened] == [
        (True, False),
        (True, True),
    ]


def test_where_shared_weights_cannot_be_loaded_each_graph_has_its_own(
    use: Use, graphs: list[Path]
) -> None:
    """And the next start does not try again."""
    runtime = use(Compiler(loads_shared=False))
    open_sessions(graphs, 2, NPU)
    assert runtime.num_compiled == 4
    runtime.opened.clear()
    open_sessions(graphs, 2, NPU)
    assert len(runtime.opened) == 2 and not any(SHARE in one for _, one, _ in runtime.opened)


def test_another_driver_compiles_anew(use: Use, graphs: list[Path]) -> None:
    runtime = use(Compiler())
    open_sessions(graphs, 2, NPU)
    runtime.driver = "driver 2"
    open_sessions(graphs, 2, NPU)
    assert runtime.num_compiled == 4
    open_sessions(graphs, 2, NPU)
    assert runtime.num_compiled == 4
    assert len([*(graphs[0].parent / providers.FOLDER).iterdir()]) == 1


def test_a_folder_that_cannot_be_written_to_is_only_slower(use: Use, graphs: list[Path]) -> None:
    (graphs[0].parent / providers.FOLDER).write_text("a file")
    use(Compiler())
    sessions, _ = open_sessions(graphs, 2, NPU)
    assert [Path(one.path) for one in sessions] == graphs
    assert open_sessions(graphs, 2, NPU, keep=False)[0][0].path == str(graphs[0])


def test_a_graph_that_mostly_runs_elsewhere_is_refused_and_not_kept(
    use: Use, graphs: list[Path]
) -> None:
    use(Compiler(share=0.5))
    with pytest.raises(UnsupportedError, match="would run 50% of this graph on the NPU"):
        open_sessions(graphs, 2, NPU)
    assert not [*(graphs[0].parent / providers.FOLDER).iterdir()]


def test_openvino_is_told_where_to_keep_what_it_compiles(use: Use, graphs: list[Path]) -> None:
    runtime = use(Compiler())
    runtime.counts = {OPENVINO: 10}
    for kind, keeps in (("npu", True), ("cpu", False)):
        open_sessions(graphs[:1], 2, OnnxDevice(OPENVINO, kind))
        ((_, options), _) = runtime.opened[-1][2]["providers"]
        assert ("cache_dir" in options) == keeps


@pytest.mark.parametrize("plain", [True, False])
def test_a_model_writes_the_same_at_its_second_start(
    plain: bool, use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs are run by the CPU, from where the compiler has left them."""
    import onnxruntime
    from random_gguf import Q8_0, write_model

    spec = read_model_spec(write_model(tmp_path / "m.gguf", "llama", Q8_0, reads_bytes=True))
    graphs = bucket_graphs((1, 8), 64, GraphOptions("split", plain=plain))
    folder = converted(spec, tmp_path / "onnx", "cpu", graphs=graphs)
    runtime = use(Compiler())

    def session(path: str) -> Any:
        made = onnxruntime.InferenceSession(path, providers=[CPU_PROVIDER])
        names = SimpleNamespace(ep_name=QNN, get_nodes=lambda: [0])
        return SimpleNamespace(
            run=made.run,
            get_inputs=made.get_inputs,
            get_outputs=made.get_outputs,
            get_provider_graph_assignment_info=lambda: [names],
        )

    monkeypatch.setattr(runtime, "session", session)
    rows = []
    for _ in range(2):
        backend = OrtBackend(spec, read_facts(spec), folder, RunConfig(64, 8, 4), NPU)
        rows.append(backend.prefill([1, 2, 3]).tolist())
        backend.close()
    assert rows[0] == rows[1] and runtime.num_compiled == 2
