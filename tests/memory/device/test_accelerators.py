"""GPUs are those that llama.cpp registers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from edgespec.memory.device import accelerators, host

GIB = 1 << 30


class Registry:
    """ggml's device registry with a processor and GPUs: kind, name, free and all bytes, slot."""

    kinds: tuple[bytes, ...] = (b"Vulkan", b"CUDA", b"BLAS", b"CPU")
    processor = 0, b"CPU", 0, 0, None, False
    integrated = 2, b"Vulkan0", GIB, 8 * GIB, b"0000:00:02.0", False
    discrete = 1, b"CUDA0", 5 * GIB, 6 * GIB, b"0000:01:00.0", False
    again = 1, b"Vulkan1", 5 * GIB, 6 * GIB, b"0000:01:00.0", False
    nameless = 1, b"CUDA1", 3 * GIB, 6 * GIB, None, False
    apple = 1, b"Metal", 5 * GIB, 6 * GIB, None, True

    def __init__(self, *devices: Any) -> None:
        self.devices = (self.processor, *devices)

    def ggml_backend_reg_count(self) -> int:
        return len(self.kinds)

    def ggml_backend_reg_get(self, number: int) -> int:
        return number

    def ggml_backend_reg_name(self, number: int) -> bytes:
        return self.kinds[number]

    def ggml_backend_dev_count(self) -> int:
        return len(self.devices)

    def ggml_backend_dev_get(self, number: int) -> int:
        return number

    def ggml_backend_dev_backend_reg(self, number: int) -> int:
        return hash(self.devices[number][1].rstrip(b"0123456789"))

    def ggml_backend_dev_get_props(self, number: int, properties: Any) -> None:
        told = properties._obj
        found = self.devices[number]
        told.type, told.name, told.memory_free, told.memory_total, told.device_id, maps = found
        told.description = b"Some \xff GPU"
        told.caps.buffer_from_host_ptr = maps


Seen = Callable[..., tuple[str, ...]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Names of the GPUs that are used of those in a registry."""

    def names(*devices: Any) -> tuple[str, ...]:
        monkeypatch.setattr(accelerators, "_ggml", lambda: Registry(*devices))
        return tuple(gpu.name for gpu in accelerators.accelerators())

    return names


def test_gpus_are_looked_for_without_a_word_of_their_drivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ggml = Mock()
    monkeypatch.setattr(accelerators, "ggml_function", lambda name, *_: getattr(ggml, name))
    accelerators._asked_once.__wrapped__()
    told = [name for name, *_ in ggml.method_calls]
    assert told == ["ggml_log_get", "ggml_log_set", "ggml_backend_dev_count", "ggml_log_set"]


@pytest.mark.parametrize("unified", [False, True])
def test_gpus_are_those_of_the_registry(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    """The processor is none; an integrated one shares memory, any one does on such a machine."""
    monkeypatch.setattr(host, "has_unified_memory", lambda: unified)
    assert seen(Registry.discrete) == ("CUDA0",)
    (found,) = accelerators.accelerators()
    assert (found.shares_memory, found.maps_files) == (unified, False)
    assert (found.free_bytes, found.total_bytes) == (5 * GIB, 6 * GIB)
    assert found.description == "Some \ufffd GPU"
    assert seen(Registry.integrated) == ("Vulkan0",)
    (found,) = accelerators.accelerators()
    assert (found.shares_memory, found.free_bytes) == (True, GIB)
    assert accelerators.gpu_kinds() == ("cuda", "vulkan")


def test_a_gpu_counts_once_and_the_processor_s_own_only_without_another(seen: Seen) -> None:
    """As in llama.cpp, which would otherwise get layers for memory that is another device's."""
    assert seen(Registry.integrated, Registry.discrete) == ("CUDA0",)
    assert seen(Registry.discrete, Registry.again) == ("CUDA0",)
    assert seen(Registry.nameless, Registry.nameless) == ("CUDA1", "CUDA1")
    another = 2, b"SYCL0", GIB, 8 * GIB, b"0000:00:02.0", False
    assert seen(Registry.integrated, another) == ("Vulkan0",)


def test_whether_pages_of_a_file_are_computed_with_is_the_library_s_word(seen: Seen) -> None:
    """Shared memory is not enough: Vulkan and CUDA copy weights on such machines, too."""
    seen(Registry.apple)
    assert [gpu.maps_files for gpu in accelerators.accelerators()] == [True]
    seen(Registry.integrated)
    assert [gpu.maps_files for gpu in accelerators.accelerators()] == [False]


def test_why_there_is_no_gpu(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vulkan without a driver that starts registers nothing, but its library is there."""
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setattr(Registry, "kinds", (b"CPU", b"RPC"))
    assert seen() == ()
    assert accelerators.missing_gpu() == "llama.cpp was built without GPU support"
    (tmp_path / "libggml-vulkan.so").write_bytes(b"")
    assert accelerators.gpu_kinds() == ("vulkan",)
    assert accelerators.missing_gpu() == "llama.cpp was built for vulkan but sees no GPU"
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "7")
    assert accelerators.missing_gpu().endswith("sees no GPU with GGML_VK_VISIBLE_DEVICES=7")
    assert seen(Registry.discrete) == ("CUDA0",)
    assert accelerators.missing_gpu() == ""


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
    monkeypatch.setattr(host, "read_text", lambda path: board if path.name == "compatible" else "")
    assert host.has_unified_memory() is unified
