"""Models that nobody closed are closed while Python can still import and write.

Later, in a destructor at the interpreter's end, what they learned could not be kept.
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Any
from weakref import WeakSet

_OPEN: WeakSet[Any] = WeakSet()


def close_at_exit(model: Any) -> None:
    """Close a model when the interpreter ends, if it is still there; twice does no harm."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # before what was registered earlier, as a log's end
    _OPEN.add(model)


def _close_all() -> None:
    for model in [*_OPEN]:
        with suppress(Exception):
            model.close()
