"""What a server needs besides the package: asked before any of it is imported."""

from __future__ import annotations

from importlib.util import find_spec

from edgespec.errors import MissingDependencyError


def require_packages() -> None:
    """Raise MissingDependencyError where the packages of the `serve` extra are missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"a server needs the package {missing[0]}", hint="pip install 'edgespec[serve]'"
        )
