"""What plans say is allocated, beside what llama.cpp allocates for them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from random_gguf import Q8_0, write_model

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.device.accelerators import accelerators
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import read_model_spec
from edgespec.setup import loading
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model
ROUNDING = 0.01 * 2**20  # of the sizes in llama.cpp's log


@pytest.mark.parametrize("drafter", ["suffix", "suffix,recycling"])
@pytest.mark.parametrize("layers", [0, 2, 5])
def test_components_are_what_llama_cpp_allocates(tmp_path: Path, layers: int, drafter: str) -> None:
    """With drafts that branch, too; with layers on a GPU where there is one."""
    if layers and not accelerators():
        pytest.skip("llama.cpp sees no GPU here")
    spec = read_model_spec(write_model(tmp_path / "m.gguf", "llama", Q8_0))
    request = Request(context_size=512, threads=1, gpu_layers=layers, drafter=drafter, draft_max=15)
    plan = make_run_plan(spec, request)
    with closing(loading._BACKENDS[LLAMACPP](spec, plan, lambda _what, _part: None)) as backend:
        assert isinstance(backend, LlamaBackend)
        allocated = backend.memory_bytes()
    planned = plan.component_bytes
    assert {name for name in allocated if name.startswith("gpu")} <= planned.keys()
    for name in allocated.keys() - {"logits"}:
        above = planned[name] - allocated[name]
        # A GPU's library may reorder a graph so that it needs less.
        most = 0.1 * planned[name] if name == "gpu_compute" else 0.0
        assert -ROUNDING <= above <= max(ROUNDING, most), name
