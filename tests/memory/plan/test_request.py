"""What follows from a request alone: contexts, and whether there can be drafters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_cases import (
    RECURRENT,
    SPEC,
    plan_of,
    reason,
)

from edgespec.errors import UnsupportedError
from edgespec.models.spec import ModelSpec


@pytest.mark.parametrize(
    ("request_", "trained", "context_size"),
    [
        ({}, 32768, 4096),
        ({}, 2048, 2048),
        ({"prompt_tokens": 3000, "max_tokens": 1000}, 32768, 4096),
        ({"prompt_tokens": 5000, "max_tokens": 1000}, 32768, 6144),
        ({"prompt_tokens": 40_000, "max_tokens": 1000}, 32768, 32768),
        ({"context_size": 333}, 32768, 333),
        ({"context_size": 32768}, 32768, 32768),
        ({"prefer": "context"}, 32768, 32768),
        ({"prefer": "context"}, 1000, 1000),
    ],
)
def test_the_context_is_what_is_needed_and_what_was_trained(
    request_: dict[str, Any], trained: int, context_size: int
) -> None:
    assert plan_of(replace(SPEC, context_length=trained), **request_).context_size == context_size


@pytest.mark.parametrize("spec", [RECURRENT, replace(SPEC, arch="jamba", keeps_state=True)])
def test_a_state_that_cannot_be_rolled_back_has_no_drafter_and_no_tables(spec: ModelSpec) -> None:
    plan = plan_of(spec)
    assert (plan.drafter, plan.draft_max) == ("none", 0)
    assert "drafter_tables" not in plan.component_bytes
    assert "cannot take back" in reason(plan, "drafter")
    assert plan.tokens_per_s == plan.plain_tokens_per_s
    with pytest.raises(UnsupportedError, match=f"{spec.arch} .*cannot take back") as caught:
        plan_of(spec, drafter="suffix")
    assert "--drafter" in caught.value.hint
