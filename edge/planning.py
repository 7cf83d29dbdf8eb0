"""Plans for whole runs: the planner, the drafter's tables, and what was measured before.

Imports no inference library and no numpy, so that `edgespec plan` answers at once.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from edgespec.drafters import make_drafter
from edgespec.memory import cache, device
from edgespec.memory.curve import CostCurve
from edgespec.memory.plan import Plan, Request, make_plan
from edgespec.models.spec import ModelSpec


def make_run_plan(spec: ModelSpec, request: Request) -> Plan:
    """The plan of a request, with the drafter's tables counted.

    Raises UnsupportedError or DoesNotFitError, as `make_plan` does.
    """
    drafter = make_drafter("suffix" if request.drafter == "auto" else request.drafter)
    return make_plan(spec, request, drafter_bytes=drafter.nbytes if drafter else 0)


def settings_key(spec: ModelSpec, plan: Plan) -> str:
    """Under what step times and batch noise are stored: device, file, settings, library."""
    return (
        f"{device.device_key()} | {spec.fingerprint} | {plan.threads} threads | "
        f"{plan.kv_type_k}/{plan.kv_type_v} | {plan.gpu_layers} gpu layers | "
        f"llama-cpp-python {_library_version()}"
    )


def calibration_key(spec: ModelSpec, drafter: str) -> str:
    """Under what a drafter's acceptance counts are stored."""
    return f"{spec.fingerprint} | {drafter}"


def stored_curve(spec: ModelSpec, plan: Plan) -> CostCurve | None:
    """The step-time curve measured earlier under these settings, or None."""
    document = cache.load("curves", settings_key(spec, plan))
    try:
        curve = CostCurve.from_json(document) if document else None
    except (KeyError, TypeError, ValueError):
        return None
    if curve is not None:  # the largest step is a setting: cut, or leave room to measure more
        missing = plan.draft_max + 2 - len(curve.base)
        curve.base = curve.base[: plan.draft_max + 2] + [float("inf")] * missing
    return curve


def _library_version() -> str:
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "missing"
