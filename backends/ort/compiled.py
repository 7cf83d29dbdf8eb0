"""Graphs as the compiler of a device has left them, kept beside those that they were made of.

QNN compiles for seconds a graph. What it made can be stored in place of the graph's nodes ("EP
context"), and is loaded in its stead at the next start. Graphs of several sizes are compiled
together, so that they have the weights once; where that cannot be loaded, each has its own.
OpenVINO keeps what it compiles for a GPU or an NPU by itself, in a folder that it is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from edgespec.backends.ort.providers import (
    OPENVINO,
    QNN,
    OnnxDevice,
    onnxruntime_module,
    open_session,
    require_share,
)
from edgespec.errors import BackendError
from edgespec.models.writing import making, put_in_place

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
