"""What a load may be told, as one value and as keywords."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import edgespec
from edgespec.cli.main import application
from edgespec.cli.options import PlanOptions
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import KV_TYPE_BYTES
from edgespec.memory.plan import options as module
from edgespec.memory.plan.options import KvType, LoadOptions
from edgespec.memory.plan.plan import Request
from edgespec.option_fields import options_of

DOCS = Path(__file__).parents[3] / "docs"


def test_keywords_are_the_fields() -> None:
    """They are written twice, so that editors and type checkers know the keywords."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    keywords = {
        part.target.id: ast.unparse(part.annotation)
        for part in classes["LoadKeywords"].body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    assert keywords == {field.name: field.type for field in fields(LoadOptions)}


def test_closed_sets_are_whole() -> None:
    assert set(get_args(KvType)) == {*KV_TYPE_BYTES}


@pytest.mark.parametrize(
    ("given", "meant"),
    [({"ctx": 512}, "context_size"), ({"budget_byte": 1}, "budget_bytes"), ({"ngl": 1}, "gpu_lay")],
)
def test_a_wrong_keyword_is_the_called_function_s(given: Any, meant: str) -> None:
    """It was blamed on the class that happens to hold the options."""
    for called in (edgespec.load, edgespec.plan):
        with pytest.raises(
            TypeError, match=rf"^{called.__name__}\(\) got .* Did you mean '{meant}"
        ):
            called(**given)
    with pytest.raises(TypeError, match=r"^Embedder\(\) got .*'poling'"):
        edgespec.Embedder("x.gguf", poling="last")  # type: ignore[call-arg]


@pytest.mark.model
def test_errors_of_python_speak_of_arguments() -> None:
    with pytest.raises(edgespec.DoesNotFitError) as caught:
        edgespec.plan(budget_bytes=10 << 20)
    enough = re.fullmatch(r"`budget_bytes=(\d+)` is enough", caught.value.hint)
    assert enough and edgespec.plan(budget_bytes=int(enough[1]))
    with pytest.raises(UnsupportedError, match=r"^context_size=100000 exceeds") as refused:
        edgespec.load(context_size=100000)
    assert refused.value.hint == "use context_size=8192 or less"
    with pytest.raises(UnsupportedError, match=r"^context_size=0 is not possible"):
        LoadOptions.of(None, context_size=0)


def test_every_field_is_an_option_a_variable_and_a_line_of_the_documentation() -> None:
    """All of these are made from what stands beside the field."""
    serve = typer.main.get_command(application("serve")).commands["serve"]  # type: ignore[attr-defined]
    parameters = {one.name: one for one in serve.params}
    command_page = (DOCS / "commands.md").read_text(encoding="utf-8")
    python_page = (DOCS / "api.md").read_text(encoding="utf-8")
    known = options_of(LoadOptions)
    assert known.keys() == {field.name for field in fields(LoadOptions)}
    for name, option in known.items():
        longest = option.names(name)[0]
        assert longest in parameters[name].opts
        assert parameters[name].help == option.help
        variable = "EDGESPEC_" + longest[2:].upper().replace("-", "_")
        assert parameters[name].envvar == variable
        assert re.search(f"`{longest}[`=]", command_page)
        assert re.search(f"`{name}[`=]", python_page)
        assert f" {name}: {option.help}" in " ".join(str(LoadOptions.__doc__).split())


def test_without_options_a_command_asks_for_what_python_asks_for() -> None:
    assert PlanOptions().request(sees=True) == Request() == Request.loading(LoadOptions())


@pytest.mark.model
def test_options_and_keywords_make_the_same_plan() -> None:
    options = LoadOptions(context_size=512, threads=1, drafter="none")
    plan = edgespec.plan(None, options)
    assert (plan.context_size, plan.threads, plan.drafter) == (512, 1, "none")
    keywords = edgespec.plan(context_size=512, threads=1, drafter="none")
    assert keywords.components == plan.components
    assert edgespec.plan(None, options, context_size=600).context_size == 600
    assert options.context_size == 512


@pytest.mark.parametrize(
    ("options", "problem", "hint"),
    [
        ({"kv_type": "q9"}, "no KV cache type 'q9'", "f16"),
        ({"prefer": "size"}, "no preference 'size'", "speed, context"),
        ({"backend": "cuda"}, "no backend 'cuda'", "auto, llamacpp, onnx"),
        ({"device": "tpu"}, "no device 'tpu'", "auto, cpu, gpu, npu"),
        ({"threads": 0}, "--threads 0 is not possible", "use 1 to"),
        ({"draft_max": 256}, "--draft-max 256 is not possible", "use 0 to 255"),
        ({"budget_bytes": 0}, "--budget 0 is not possible", "use 1 to"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_said(
    options: dict[str, object], problem: str, hint: str
) -> None:
    with pytest.raises(UnsupportedError, match=problem) as caught:
        LoadOptions(**options)  # type: ignore[arg-type]
    assert hint in str(caught.value.hint)


def test_an_option_that_there_is_not_is_no_keyword() -> None:
    with pytest.raises(TypeError, match="context"):
        edgespec.plan(context=512)  # type: ignore[call-arg]
