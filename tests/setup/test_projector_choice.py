"""Which projector a plan loads, and what keeps images away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from random_gguf import F32, write_model

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.plan.plan import Request
from edgespec.models.projector import read_projector
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan, with_projector


@pytest.fixture
def folder(vision_folder: Path, tmp_path: Path) -> Path:
    """A model that sees, with its projector under a name that fits every model."""
    shutil.copy(vision_folder / "llava.gguf", tmp_path / "sees.gguf")
    shutil.copy(vision_folder / "mmproj-llava.gguf", tmp_path / "mmproj-F16.gguf")
    return tmp_path


def projector_of(model: Path, **changes: object) -> str | None:
    plan = make_run_plan(read_model_spec(model), Request(**changes))  # type: ignore[arg-type]
    return None if plan.projector is None else plan.projector.name


def test_the_one_beside_a_model_is_planned(folder: Path) -> None:
    model = folder / "sees.gguf"
    assert projector_of(model) == projector_of(model, images=1) == "mmproj-F16.gguf"
    assert projector_of(model, mmproj="none") is None


def test_that_of_a_model_of_another_width_is_not(folder: Path) -> None:
    """In one folder lie a text model and the projector of another one."""
    other = write_model(folder / "reads.gguf", "llama", F32, reads_bytes=True, width=96)
    assert projector_of(other) is None
    with pytest.raises(UnsupportedError, match=r"there is no projector beside reads\.gguf"):
        projector_of(other, images=1)
    assert projector_of(folder / "sees.gguf") == "mmproj-F16.gguf"


def test_images_of_a_prompt_are_counted(folder: Path) -> None:
    spec = read_model_spec(folder / "sees.gguf")
    cells = read_projector(folder / "mmproj-F16.gguf").cells(None)
    request, may_leave_out = with_projector(spec, Request(images=2, prompt_tokens=5))
    assert (request.prompt_tokens, may_leave_out) == (5 + 2 * cells, False)
    request, may_leave_out = with_projector(spec, Request(prompt_tokens=5))
    assert (request.prompt_tokens, may_leave_out) == (5, True)


@pytest.mark.slow
def test_images_are_smaller_where_memory_or_context_is(vision_folder: Path) -> None:
    """Qwen2.5-VL's buffers grow with the square of an image: 1.6 GiB for one of 4096 tokens."""
    spec = read_model_spec(vision_folder / "qwen2.5vl.gguf")
    roomy = make_run_plan(spec, Request(images=1, context_size=4096))
    assert [choice.name for choice in roomy.choices].count("image_max_tokens") == 1
    assert roomy.image_tokens == 2048, "the context has 4096, and the prompt other words"
    assert make_run_plan(spec, Request(images=1, image_max_tokens=4096)).image_tokens == 4096
    chat = make_run_plan(spec, Request(mmproj=vision_folder / "mmproj-qwen2.5vl.gguf"))
    assert chat.image_tokens == 2048
    tight = make_run_plan(spec, Request(images=1, budget_bytes=1200 << 20))
    assert tight.image_tokens == 2048
    small = make_run_plan(spec, Request(images=1, context_size=1024))
    assert small.image_tokens == 512
    with pytest.raises(DoesNotFitError):
        make_run_plan(spec, Request(images=1, budget_bytes=500 << 20))
    fixed = make_run_plan(read_model_spec(vision_folder / "gemma3.gguf"), Request(images=1))
    assert "image_max_tokens" not in [choice.name for choice in fixed.choices]
