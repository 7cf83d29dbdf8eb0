"""What a type of the KV cache loses: measured by the first load with it, and told."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
from random_gguf import F32, write_model

import edgespec
from edgespec.backends.llama.context import LlamaContext
from edgespec.errors import BackendError, EdgespecWarning
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup import cache_types
from edgespec.setup.stored import keep_kv_losses, stored_kv_losses

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:a .* cache makes answers"),
]
OPTIONS: dict[str, Any] = {"context_size": 1024, "drafter": "none", "threads": 1, "kernels": "off"}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("bytes")
    return read_model_spec(
        write_model(folder / "bytes.gguf", "llama", F32, reads_bytes=True, width=64)
    )


def test_the_first_load_measures_a_type_once_and_plans_show_it(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edgespec.plan(spec.path, **OPTIONS, kv_type="q4_0").kv_loss is None
    for _ in range(2):
        with edgespec.load(spec.path, **OPTIONS, kv_type="q4_0") as engine:
            assert engine.generate("abc", max_tokens=4).token_ids
        monkeypatch.setattr(cache_types, "measure_kv_losses", lambda *_, **__: 1 / 0)
    loss = stored_kv_losses(spec)["q4_0"]
    assert loss > 0
    plan = edgespec.plan(spec.path, **OPTIONS, kv_type="q4_0")
    assert plan.kv_loss == loss and f"{loss:.2g} nats" in plan.as_json()["kv_type"]["reason"]
    assert f"q4_0 {loss:.2g}" in plan.as_json()["kv_losses"]["value"]


def test_a_load_that_measures_leaves_no_library_behind(spec: ModelSpec) -> None:
    """numpy.random takes 7 MiB that no plan has, and the mean needs none of it."""
    program = (
        "import sys, edgespec\n"
        f"edgespec.load({str(spec.path)!r}, **{OPTIONS!r}, kv_type='q4_0').close()\n"
        "assert 'edgespec.quantize.quality' in sys.modules\n"
        "assert 'numpy.random' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=60, check=True)
    assert stored_kv_losses(spec)["q4_0"] > 0


def test_keys_and_values_of_two_types_are_loaded_and_measured(spec: ModelSpec) -> None:
    with edgespec.load(spec.path, **OPTIONS, cache_type_k="q8_0", cache_type_v="q4_0") as engine:
        settings = engine.backend.settings  # type: ignore[attr-defined]
        assert (settings.kv_type_k, settings.kv_type_v) == ("q8_0", "q4_0")
    losses = stored_kv_losses(spec)
    assert set(losses) == {"q8_0/q4_0"} and losses["q8_0/q4_0"] > 0


def test_how_far_measuring_is_is_told_to_its_end(spec: ModelSpec) -> None:
    parts: list[float] = []
    options: dict[str, Any] = {"threads": 1, "tokens": 128}
    kinds = ["q8_0", "q4_0"]
    told = cache_types.measure_kv_losses(
        spec, kinds, **options, progress=lambda _what, part: parts.append(part)
    )
    assert [kind for kind, _ in told] == ["f16", *kinds]
    assert parts == [0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize(("loss", "warns"), [(0.09, False), (5.2, True)])
def test_a_type_that_loses_much_is_warned_of(spec: ModelSpec, loss: float, warns: bool) -> None:
    keep_kv_losses(spec, {"q4_0": loss})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        edgespec.load(spec.path, **OPTIONS, kv_type="q4_0").close()
    texts = [str(one.message) for one in told if issubclass(one.category, EdgespecWarning)]
    assert len(texts) == warns and all("loses 5.2 nats" in text for text in texts)


def test_a_preference_for_context_measures_what_it_may_take(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loses too much is not loaded, whatever it would bring."""
    lost = {"q8_0": 0.2, "q8_0/q4_0": 0.3, "q5_0": 0.05, "q4_0": 0.06}
    asked: list[str] = []

    def measure(of: ModelSpec, kinds: list[str], **_: Any) -> list[Any]:
        asked.extend(kinds)
        keep_kv_losses(of, {kind: lost[kind] for kind in kinds})
        return []

    monkeypatch.setattr(cache_types, "measure_kv_losses", measure)
    least = edgespec.plan(spec.path, context_size=512, threads=1, drafter="none")
    budget = least.predicted_peak_bytes + (64 << 10)
    options: dict[str, Any] = {"budget_bytes": budget, "prefer": "context"}
    with edgespec.load(spec.path, threads=1, drafter="none", **options) as engine:
        assert engine.backend.settings.kv_type_k in ("q5_0", "q4_0")  # type: ignore[attr-defined]
    assert asked[:3] == ["q8_0", "q8_0/q4_0", "q5_0"]


def test_a_cache_that_is_shorter_than_the_text_measures_with_less_of_it(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text's f16 cache takes no more than the plan's cache of q4_0."""
    lengths: list[int] = []

    def measure(*_: Any, tokens: int, **__: Any) -> list[Any]:
        lengths.append(tokens)
        return []

    monkeypatch.setattr(cache_types, "measure_kv_losses", measure)
    for context in (256, 1024, 4096):
        options = {**OPTIONS, "context_size": context, "kv_type": "q4_0"}
        edgespec.load(spec.path, **options).close()
    assert lengths == [288, 512]  # 256 cells of q4_0 are 72 of f16: too few to say anything


@pytest.mark.model
def test_a_file_is_measured_as_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's table, which is its head, too, was there twice: 94 MiB over the plan."""
    opened: list[RunConfig] = []

    def open_none(self: LlamaContext, *_: Any) -> None:
        opened.append(self.settings)
        raise BackendError("not today")

    monkeypatch.setattr(LlamaContext, "open", open_none)
    spec = read_model_spec(embedded_model())
    plan = edgespec.plan(spec.path, drafter="none", threads=1, kv_type="q4_0")
    assert not cache_types._measure(spec, plan, "q4_0", lambda *_: None)
    (settings,) = opened
    assert settings.tied == spec.tied_embeddings is True
    assert settings.kernels == plan.kernels and settings.mapped != plan.kernels
