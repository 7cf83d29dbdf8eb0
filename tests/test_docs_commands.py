"""Every command in README and docs is one that the program knows, and is run here or elsewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.models.embedded import embedded_model

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n?)+", re.MULTILINE)
INLINE = re.compile(r"`(edgespec [a-z][^`\n]*)`")
# Where commands are run that need more than the embedded model and some seconds.
ELSEWHERE = {
    r"edgespec \w+ hf:|edgespec models pull|edgespec embed bge-small": "tests/cli/test_models.py, "
    "against a local hub",
    r"edgespec \w+ ollama:": "tests/models/hub, in folders laid out like Ollama's",
    r"edgespec serve": "tests/cli/test_serve.py",
    r"edgespec worker|.*--workers": "tests/cli/test_worker.py, tests/backends/llama",
    r"edgespec plan \S+\.gguf \S+\.gguf": "tests/cli/test_serve_pool.py",
    r".*-ngl [1-9]": "tests/backends/llama/test_full_device.py, where there is a GPU",
    r".*--draft-model eagle3-": "tests/backends/llama/test_head_files.py",
    r".*--draft-model dflash-": "tests/backends/llama/test_head_files.py",
    r".*--draft-model mtp-": "tests/backends/llama/test_head_files.py",
    r"edgespec (run|plan) .*--(images?|audio) ": "tests/cli/test_images.py, with a projector",
    r".*--lora ": "tests/backends/llama/test_adapters.py, with adapters of random matrices",
    r".*--mcp ": "tests/serve/test_tool_servers.py, with servers of the mcp package",
    r".*--drafter NAME": "docs/architecture.md: a drafter of one's own",
    r".*--drafter suffix,window": "tests/backends/llama/test_window.py",
    r"edgespec bench": "tests/cli/test_drafters.py and tests/bench",
    r"edgespec quantize": "tests/cli/test_quantize.py",
    r"edgespec draft train": "tests/cli/test_draft.py, tests/exits where torch is installed",
    r"edgespec (run|plan|profile) large\.gguf": "tests/cli/test_switching.py",
    r".*--backend onnx": "tests/backends/ort",
    r".*--device npu|edgespec run smollm2-onnx": "not run: needs a device or torch",
    r"edgespec models export": "not run: needs a device or torch",
}


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if page.name != "commands.md"]  # made from the program itself


def typed(page: Path) -> Iterator[str]:
    """Commands of a page that stand in blocks, without comments, pipes and redirections."""
    text = page.read_text(encoding="utf-8")
    blocks = [inside for kind, inside in FENCED.findall(text) if kind in ("", "sh", "console")]
    blocks += INDENTED.findall(FENCED.sub("", text))
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if found := re.search(r"(?:^|\| |\$ )(edgespec .*)", line.strip()):
            yield re.split(r"\s+(?:#|>|->)(?:\s|$)", found[1])[0].strip()


TYPED = sorted({command for page in pages() for command in typed(page)})
NAMED = sorted({one for page in pages() for one in INLINE.findall(page.read_text("utf-8"))})


def parsed(command: str) -> None:
    """Raises a usage error for a command, an option or a value that there is not."""
    words = [word.strip(",") for word in shlex.split(command)[1:]]
    current: Any = typer.main.get_command(app)
    context = current.make_context("edgespec", words, resilient_parsing=True)
    while hasattr(current, "commands") and words:
        _, inner, words = current.resolve_command(context, words)
        assert inner is not None, command
        current = inner
    known = {name for one in current.params for name in (*one.opts, *one.secondary_opts)}
    options = {word.split("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)}
    assert options <= known | {"--help", "-h", "--version"}, command


def test_a_command_is_one_that_there_is() -> None:
    for command in (*TYPED, *NAMED):
        if not re.search(r"[\[\]…]|\.\.\.$|\bCOMMAND\b", command):  # else a form of commands
            parsed(command)


def test_a_command_is_run_somewhere() -> None:
    """The places are tests that there are; all others are run here."""
    for place in ELSEWHERE.values():
        for path in re.findall(r"tests/[\w/.]+", place):
            assert (ROOT / path.rstrip(".")).exists(), place


HERE = [one for one in TYPED if not any(re.match(form, one) for form in ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("exact_engine")  # which has measured the file
@pytest.mark.parametrize("command", HERE)
def test_a_command_runs(
    command: str, measured_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(measured_cache))
    monkeypatch.setenv("EDGESPEC_MAX_TOKENS", "4")
    monkeypatch.setattr("edgespec.memory.device.host.usable_cores", lambda: 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(embedded_model())
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    done = CliRunner().invoke(app, shlex.split(command)[1:], input="Hello there.\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()
