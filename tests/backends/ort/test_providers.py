"""Which provider of ONNX Runtime is used, what it is told, and when it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")

from edgespec.backends.ort import providers as ort_providers
from edgespec.backends.ort.providers import (
    CPU_DEVICE,
    CPU_PROVIDER,
    OnnxDevice,
    choose,
    devices,
    graphs_for,
    open_session,
    open_sessions,
)
from edgespec.backends.ort.split import SplitRunner, Step
from edgespec.errors import BackendError, UnsupportedError
from edgespec.models.onnx.facts import GQA, SPLIT

QNN, OPENVINO, CUDA, DML = (
    f"{name}ExecutionProvider" for name in ("QNN", "OpenVINO", "CUDA", "Dml")
)


@dataclass
class FakeRuntime:
    """What this module uses of onnxruntime; sessions run `counts` nodes by provider."""

    built_in: Sequence[str] = ()
    plugins: Sequence[tuple[str, str]] = ()  # provider and type of device
    counts: dict[str, int] = field(default_factory=lambda: {CPU_PROVIDER: 10})
    sessions: list[dict[str, Any]] = field(default_factory=list)
    options: Any = None
    __version__ = "1.0"

    def get_available_providers(self) -> list[str]:
        return [*self.built_in, CPU_PROVIDER]

    def get_ep_devices(self) -> list[Any]:
        listed = [(CPU_PROVIDER, "CPU"), *self.plugins]
        return [
            SimpleNamespace(
                ep_name=name,
                ep_vendor="vendor",
                device=SimpleNamespace(type=SimpleNamespace(name=kind)),
            )
            for name, kind in listed
        ]

    def SessionOptions(self) -> Any:
        entries: dict[str, str] = {}
        added: list[Any] = []
        self.options = SimpleNamespace(
            entries=entries,
            added=added,
            add_session_config_entry=entries.__setitem__,
            add_provider_for_devices=lambda handles, options: added.append((handles, options)),
        )
        return self.options

    def InferenceSession(self, path: str, _options: Any, **chosen: Any) -> Any:
        self.sessions.append({"path": path, **chosen})
        parts = [
            SimpleNamespace(ep_name=name, get_nodes=lambda count=count: [0] * count)
            for name, count in self.counts.items()
        ]
        return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)

    InferenceSession.get_provider_graph_assignment_info = None  # type: ignore[attr-defined]


def use(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    monkeypatch.setattr(ort_providers, "onnxruntime_module", lambda: runtime)
    monkeypatch.setattr(ort_providers, "_register_plugins", lambda: None)
    return runtime


def test_the_processor_is_used_unless_another_device_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, FakeRuntime([CUDA], [(QNN, "NPU")]))
    assert choose("auto") == choose("cpu") == CPU_DEVICE
    assert (choose("gpu").provider, choose("npu").provider) == (CUDA, QNN)
    assert [one.provider for one in devices()] == [QNN, CUDA, CPU_PROVIDER]


def test_a_plugin_is_not_taken_for_a_device_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """QNN's plugin lists the host's processor where there is no Snapdragon."""
    use(monkeypatch, FakeRuntime(plugins=[(QNN, "CPU")]))
    with pytest.raises(UnsupportedError, match="--device npu is not possible") as caught:
        choose("npu")
    assert "onnxruntime-qnn" in caught.value.hint and "doctor" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "flavour", "is_plain", "steps"),
    [
        (CPU_DEVICE, GQA, False, {0}),
        (OnnxDevice(OPENVINO, "gpu"), SPLIT, False, {0}),
        (OnnxDevice(OPENVINO, "npu"), SPLIT, False, {1, 8, 16, 32}),
        (OnnxDevice(DML, "gpu"), SPLIT, False, {0}),
        (OnnxDevice(DML, "npu"), SPLIT, False, {1, 8, 16, 32}),
    ],
)
def test_each_device_gets_graphs_it_can_run(
    device: OnnxDevice, flavour: str, is_plain: bool, steps: set[int]
) -> None:
    graphs = graphs_for(device, 1024).values()
    assert {graph.flavour for graph in graphs} == {flavour}
    assert {graph.plain for graph in graphs} == {is_plain}
    assert {graph.step for graph in graphs} == steps
    assert all(graph.capacity == (1024 if graph.step else 0) for graph in graphs)


@pytest.mark.parametrize(
    ("version", "is_plain"), [("1.26.0", True), ("2.6.9", True), ("2.7.0", False), ("3.0", False)]
)
def test_qnn_gets_packed_weights_where_its_compiler_takes_them(
    version: str, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _package: version)
    graphs = graphs_for(OnnxDevice(QNN, "npu"), 1024).values()
    assert {graph.plain for graph in graphs} == {is_plain}
    assert {graph.step for graph in graphs} == {1, 8, 16, 32}


def test_directml_is_told_that_an_npu_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime([DML], counts={DML: 10}))
    for kind, options in (("npu", {"device_filter": "npu"}), ("gpu", {})):
        open_session(Path("m.onnx"), 1, choose(kind))
        assert runtime.sessions[-1]["providers"] == [(DML, options), CPU_PROVIDER]


def test_a_provider_is_named_and_never_left_to_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime([OPENVINO], [(QNN, "NPU")], {OPENVINO: 9, QNN: 91}))
    _, share = open_session(Path("m.onnx"), 3, OnnxDevice(OPENVINO, "cpu"))
    expected = (OPENVINO, {"device_type": "CPU", "num_of_threads": "3"})
    assert runtime.sessions[-1]["providers"] == [expected, CPU_PROVIDER]
    assert share == 0.09
    _, share = open_session(Path("m.onnx"), 3, choose("npu"))
    ((handles, options),) = runtime.options.added
    assert [handle.ep_name for handle in handles] == [QNN]
    assert options["enable_htp_fp16_precision"] == "1"
    assert "providers" not in runtime.sessions[-1] and share == 0.91
    assert runtime.options.entries == {"session.record_ep_graph_assignment_info": "1"}
    assert all(session["enable_fallback"] == 0 for session in runtime.sessions)


def test_a_runtime_that_does_not_tell_what_runs_on_a_device_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the newest one for Python 3.10: it was an AttributeError, behind the compilation."""
    runtime = use(monkeypatch, FakeRuntime(plugins=[(QNN, "NPU")]))
    monkeypatch.delattr(FakeRuntime.InferenceSession, "get_provider_graph_assignment_info")
    with pytest.raises(UnsupportedError, match=r"ONNX Runtime 1\.0 does not tell") as caught:
        open_session(Path("m.onnx"), 3, choose("npu"))
    assert "3.11" in caught.value.hint and runtime.sessions == []
    open_session(Path("m.onnx"), 3, CPU_DEVICE)


def test_a_device_that_would_run_little_of_the_graph_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, FakeRuntime([DML], counts={DML: 89, CPU_PROVIDER: 11}))
    with pytest.raises(UnsupportedError, match="would run 89% of this graph on the GPU") as caught:
        open_sessions([Path("m.onnx")], 1, choose("gpu"))
    assert "--device cpu" in caught.value.hint


def test_a_provider_that_does_not_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is tried again on the processor behind one's back."""
    runtime = use(monkeypatch, FakeRuntime([CUDA]))

    def fail(*_arguments: Any, **_chosen: Any) -> Any:
        raise RuntimeError("no driver")

    fail.get_provider_graph_assignment_info = None  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "InferenceSession", fail, raising=False)
    with pytest.raises(BackendError, match=r"cannot load m\.onnx: no driver"):
        open_session(Path("m.onnx"), 1, choose("gpu"))


# ------------------------------------------------------------------ graphs of other exporters


class OtherSession:
    """A graph that takes ids and rotates inside, and has logits of every token, [1, n, V]."""

    seen: dict[str, Any]

    def get_inputs(self) -> list[Any]:
        shapes = {
            "input_ids": [1, "n"],
            "position_ids": [1, "n"],
            "attention_bias": [1, 1, "n", "cells"],
            "past_key.0": [1, 2, "past", 4],
            "past_value.0": [1, 2, "past", 6],
        }
        return [SimpleNamespace(name=name, shape=shape) for name, shape in shapes.items()]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in ("logits", "new_key.0", "new_value.0")]

    def run(self, names: Sequence[str], feeds: dict[str, Any]) -> list[Any]:
        assert list(names) == ["logits", "new_key.0", "new_value.0"]
        self.seen = feeds
        ids = feeds["input_ids"].astype(np.float32)  # [1, n]
        rows = [np.repeat(ids[:, None, :, None], width, axis=3) for width in (4, 6)]
        return [np.repeat(ids[..., None], 5, axis=2), *(row.repeat(2, axis=1) for row in rows)]


def test_a_graph_gets_what_it_asks_for_and_its_rows_are_kept() -> None:
    session = OtherSession()
    runner = SplitRunner([session], {}, {"attention_bias": 0}, 300)
    assert runner.entry == "input_ids" and runner.max_step is None
    rows = runner.run(Step(0, np.arange(3), first_row=2), np.array([[7, 8, 9]]))
    assert rows.tolist() == [[9.0] * 5]
    runner.keep(0, [0, 2])
    runner.run(Step(2, np.array([2])), np.array([[3]]))
    assert session.seen["position_ids"].tolist() == [[2]]
    assert session.seen["past_key.0"].shape == (1, 2, 256, 4)
    assert session.seen["past_value.0"][0, 1, :3, 5].tolist() == [7.0, 9.0, 0.0]
    bias = session.seen["attention_bias"]
    assert bias.shape == (1, 1, 1, 257)
    assert np.flatnonzero(bias[0, 0, 0] == 0).tolist() == [0, 1, 256]
    assert bias.min() == -1e4
    with pytest.raises(UnsupportedError, match="asks for attention_bias, which is not known"):
        SplitRunner([session], {}, {}, 300)
