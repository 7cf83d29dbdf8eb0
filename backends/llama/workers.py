"""Devices of workers as llama.cpp's own: made known through its C API, each behind a relay."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from edgespec.backends.llama.library import ggml_function, library, set_params
from edgespec.backends.llama.relay import Relay
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import HOST, Device
from edgespec.memory.device.accelerators import require_rpc

_P = ctypes.c_void_p
_NO_TENSOR = "^no tensor has this name$"
_relays: dict[str, Relay] = {}
_lock = threading.Lock()


class Placed:
    """Layers of one model on several devices; without any, `gpu_layers` as llama.cpp spreads them.

    What is computed where its weights lie keeps to what was planned: llama.cpp would copy weights
    of the processor's layers to a GPU for each larger batch, into memory that it takes there, and
    would not rearrange them for its processor's kernels.
    `overrides` are as of `RunConfig`.
    `labels` has what the bytes of each are reported under, by the name in llama.cpp's log.
    Raises UnsupportedError where this llama.cpp has no RPC, and BackendError for a device that is
    not there any more.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        gpu_layers: int,
        overrides: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._devices = devices
        self._overrides = overrides
        self._gpu_layers = gpu_layers
        self._relays = _relays_of(device for device in devices if device.worker)
        self.has_workers = bool(self._relays)
        self._kept: list[Any] = []  # what llama.cpp has addresses of
        self.labels = {self._logged(device): device.label for device in devices}

    def apply(self, params: Any) -> None:
        """Let a model be loaded like that."""
        devices = self._devices
        set_params(params, n_gpu_layers=self._gpu_layers, no_host=True)
        if not devices and self._gpu_layers:
            return
        handles = [self._handle(device) for device in devices]
        table = (_P * (len(handles) + 1))(*handles, None)
        self._kept = [table]
        # None: a GPU computes nothing either.
        set_params(params, devices=ctypes.cast(table, _P).value)
        if devices:
            self._split(params)
        if devices or self._overrides:
            self._override(params, handles)

    def _split(self, params: Any) -> None:
        most = max(len(self._devices), int(library().llama_max_devices()))
        shares = (ctypes.c_float * most)(*(device.layers for device in self._devices))
        self._kept.append(shares)
        set_params(params, tensor_split=shares)

    def _override(self, params: Any, handles: Sequence[int]) -> None:
        memory_of = ggml_function("ggml_backend_dev_buffer_type", _P, _P)
        memories = {HOST: ggml_function("ggml_backend_cpu_buffer_type", _P)()}
        for device, handle in zip(self._devices, handles, strict=False):
            memories[device.label] = memory_of(handle)
        table = (_P * (2 * len(self._overrides) + 4))()
        # No tensor has this name. With any such rule steps run one after the other: computing
        # several at once takes four copies of what passes between devices, and serves prompts only.
        for i, (pattern, label) in enumerate([*self._overrides, (_NO_TENSOR, HOST)]):
            text = ctypes.c_char_p(pattern.encode(errors="surrogatepass"))
            self._kept.append(text)
            table[2 * i], table[2 * i + 1] = ctypes.cast(text, _P), memories[label]
        self._kept.append(table)
        set_params(params, tensor_buft_overrides=ctypes.cast(table, _P).value)

    def check(self) -> None:
        """Raises BackendError where a worker failed since the model was loaded."""
        for relay in self._relays.values():
            if relay.failure:
                raise BackendError(relay.failure, hint=relay.hint)

    def _handle(self, device: Device) -> int:
        if not device.worker:
            by_name = ggml_function("ggml_backend_dev_by_name", _P, ctypes.c_char_p)
            handle = by_name(device.name.encode())
        else:
            relay = self._relays[device.worker]
            registry = rpc_function("ggml_backend_rpc_add_server", _P, ctypes.c_char_p)(
                relay.endpoint.encode()
            )
            self.check()
            get = ggml_function("ggml_backend_reg_dev_get", _P, _P, ctypes.c_size_t)
            handle = get(registry, device.number) if registry else None
        if not handle:
            raise BackendError(f"llama.cpp does not see {device.name} any more")
        return int(handle)

    def _logged(self, device: Device) -> str:
        if not device.worker:
            return device.name
        return f"RPC{device.number}[{self._relays[device.worker].endpoint}]"


def _relays_of(devices: Iterable[Device]) -> dict[str, Relay]:
    """A relay for each worker: kept, since llama.cpp never forgets an endpoint, until it fails."""
    most: dict[str, int] = {}
    for device in devices:
        most[device.worker] = max(device.number + 1, most.get(device.worker, 0))
    with _lock:
        for worker, count in most.items():
            if worker not in _relays or _relays[worker].failure:
                _relays[worker] = Relay(worker, count)
        return {worker: _relays[worker] for worker in most}


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp's RPC part, which is asked for by name. Raises UnsupportedError."""
    require_rpc()
    registry = ggml_function("ggml_backend_reg_by_name", _P, ctypes.c_char_p)(b"RPC")
    find = ggml_function("ggml_backend_reg_get_proc_address", _P, _P, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(registry, name.encode()))
