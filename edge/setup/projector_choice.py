"""Which projector a plan loads, so that its model sees images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.errors import UnsupportedError
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.request import Request
from edgespec.models.projector import projector_beside, read_projector
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec


def with_projector(spec: ModelSpec, request: Request) -> tuple[Request, bool]:
    """The request with a projector's path, or None, and whether the plan may do without it.

    Raises UnsupportedError where one is needed that cannot be used, and as `read_projector`.
    """
    if str(request.mmproj) == "none":
        return replace(request, mmproj=None), False
    reason, is_found = _unsupported_reason(spec, request), request.mmproj is None
    path = projector_beside(spec.path) if request.mmproj is None else Path(request.mmproj)
    if path is None and request.images:
        raise UnsupportedError(
            f"there is no projector beside {spec.path.name}, and the prompt has an image",
            hint="--mmproj FILE names the mmproj file of a model that sees",
        )
    if reason and (request.images or not is_found):
        raise UnsupportedError(f"images are not possible: {reason}")
    if path is None or reason:
        return replace(request, mmproj=None), False
    cells = request.images * read_projector(path).cells(request.image_max_tokens)
    request = replace(request, mmproj=path, prompt_tokens=request.prompt_tokens + cells)
    return request, is_found and not request.images


def _unsupported_reason(spec: ModelSpec, request: Request) -> str:
    """What keeps images away, or ""."""
    if request.backend == ONNX or spec.format == ONNX_FORMAT:
        return "ONNX Runtime has models of text alone"
    if request.switch is not None:
        return "with --switch two models write, and one of them sees nothing"
    if "head" in request.drafter.split(","):
        return "a head follows texts alone"
    if request.draft_model is not None and read_model_spec(request.draft_model, heads=True).reads:
        return "a head follows texts alone"
    return ""
