"""Everything edgespec raises on purpose.

    EdgespecError
    ├── ModelFileError        (ValueError)    the file is not a model that can be read
    ├── ModelNotFoundError    (FileNotFoundError)  there is no such model file
    ├── DoesNotFitError       (MemoryError)   the request needs more memory than there is
    ├── ContextFullError      (ValueError)    the prompt or the answer leaves no room in the context
    ├── UnsupportedError      (ValueError)    a backend, model or setting cannot do what was asked
    ├── DownloadError         (OSError)       a model could not be fetched
    ├── SessionFileError      (ValueError)    a saved conversation cannot be read or written
    ├── MissingDependencyError (ImportError)  an optional package is not installed
    └── BackendError          (RuntimeError)  the inference library failed

And warnings, where it goes on:

    EdgespecWarning           (RuntimeWarning)  something was left out; what was asked for goes on
    └── DraftModelWarning                       a draft model failed: it is not asked any more

Each message is one sentence with the values in it; `hint` says what to do next. The command line
prints both and never a traceback. A class also inherits the builtin a caller would catch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class EdgespecError(Exception):
    """Base of all errors raised on purpose. `hint` is a next step in one sentence, or ``""``."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ModelFileError(EdgespecError, ValueError):
    """The file is truncated, foreign, hostile, or of a kind edgespec does not read."""


class ModelNotFoundError(EdgespecError, FileNotFoundError):
    """No model file lies at the path that was given."""


class DoesNotFitError(EdgespecError, MemoryError):
    """The request needs more memory than the machine or the budget has."""


class ContextFullError(EdgespecError, ValueError):
    """The tokens do not fit into the context; raised before the step that would overflow."""


class UnsupportedError(EdgespecError, ValueError):
    """A backend, model file or setting cannot honour what was asked."""


class DownloadError(EdgespecError, OSError):
    """A model could not be fetched: no connection, no permission, or not what was announced."""


class SessionFileError(EdgespecError, ValueError):
    """A saved conversation is missing, damaged or foreign, or cannot be written."""


class MissingDependencyError(EdgespecError, ImportError):
    """An optional package is needed and not installed; the hint is the install command."""


class BackendError(EdgespecError, RuntimeError):
    """The inference library reported a failure; the message carries its own words."""


class EdgespecWarning(RuntimeWarning):
    """Something was left out, and what was asked for goes on without it."""


class DraftModelWarning(EdgespecWarning):
    """A draft model failed; answers go on without it, as `Engine.draft_failure` says."""


def imported(module: str, needed: str, hint: str) -> Any:
    """A module of an optional package. Raises MissingDependencyError where that is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(needed, hint=hint) from error


def no_memory_hint(usual: str) -> str:
    """What to do where the system gave no memory: a limit on addresses says it, or else `usual`."""
    if find_spec("resource") is None:  # Windows has no such limits
        return usual
    resource = import_module("resource")
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return usual
    return f"this process may use {most >> 20} MiB of addresses: raise `ulimit -v` or its like"
