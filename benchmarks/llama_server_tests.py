"""llama.cpp's own server tests, run against `edgespec serve`: a table by file.

    python benchmarks/llama_server_tests.py LLAMA_CPP [--only test_basic ...] [--failures]

LLAMA_CPP is its source tree; the source package of llama-cpp-python has one in vendor/llama.cpp.
Needs pytest, requests, openai and filelock. Nothing is downloaded.

The tests start llama-server with tiny models of a hub. Here their start options become those of
`edgespec serve`, on the embedded model (or `--model`). They run twice: as they are, where a text of
their model may be any text; then those that failed again, with `_ADAPTED` applied to their source.
Each line there says which difference it removes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from edgespec.models.embedded import embedded_model

# Files of interfaces that are here. The others: embeddings, reranking, images, LoRA, several models
# in one server, saved slots, tools and MCP servers inside the server.
_FILES = (
    "basic chat_completion compat_anthropic compat_oai_responses completion ctx_shift ignore_eos "
    "infill metrics security speculative stream template tokenize tool_call"
).split()
_ADAPTED: tuple[tuple[str, str, str], ...] = (
    # their tokenizer: how many tokens a prompt has
    (r'\["prompt_n"\] == (n_prompt|\d+)', '["prompt_n"] > 0', ""),
)
_TEMPLATES = {  # names that llama.cpp knows, as files of its source tree
    "llama3": "meta-llama-Llama-3.1-8B-Instruct",
    "command-r": "CohereForAI-c4ai-command-r-plus-tool_use",
}
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Run them and print the table."""
    parser = argparse.ArgumentParser(description="llama.cpp's server tests on edgespec serve")
    parser.add_argument("source", type=Path, help="llama.cpp's source tree")
    parser.add_argument("--only", nargs="+", default=_FILES, metavar="FILE")
    parser.add_argument("--model", type=Path, help="default: the embedded model")
    parser.add_argument("--infill", type=Path, help="a model with tokens for filling in")
    parser.add_argument("--once", action="store_true", help="only as they are")
    parser.add_argument("--failures", action="store_true", help="say why each of them failed")
    asked = parser.parse_args()
    names = [f"test_{name.removeprefix('test_')}.py" for name in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        tests = _tree(asked.source, Path(folder))
        model = asked.model or embedded_model()
        settings = {"model": str(model), "infill": str(asked.infill or model), "folder": folder}
        first = _run(tests, [f"unit/{name}" for name in names], settings)
        failed = [name for name, (outcome, _) in first.items() if outcome == "failed"]
        _adapt(tests)
        again = _run(tests, failed, settings) if failed and not asked.once else {}
    second = {**{name: first[name] for name in failed}, **again}
    _print(first, second, names)
    if asked.failures:
        for name, (outcome, why) in second.items():
            if outcome == "failed":
                print(f"{name}\n    {why}")


def _tree(source: Path, folder: Path) -> Path:
    """A copy of the tests where their relative paths lead to the source tree."""
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(source / "tools" / "server" / "tests", tests)
    (folder / "models").symlink_to(source.resolve() / "models")
    return tests


def _adapt(tests: Path) -> None:
    for path in sorted((tests / "unit").glob("test_*.py")):
        text = path.read_text()
        for pattern, by, only in _ADAPTED:
            if only in path.name:
                text = re.sub(pattern, by, text)
        path.write_text(text)


def _run(tests: Path, names: list[str], settings: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test, by its id."""
    out = Path(settings["folder"]) / "outcomes.json"
    paths = [str(tests), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"),
        *("-p", Path(__file__).stem, "--tb=no", *names),
    ]
    shimmed = {"SHIM": json.dumps({**settings, "out": str(out)}), "PORT": str(_free_port())}
    env = {**os.environ, **shimmed, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, cwd=tests, env=env, stdout=sys.stderr, check=False)
    found = json.loads(out.read_text())
    return {name: (outcome, why) for name, (outcome, why) in found.items()}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _print(
    first: dict[str, tuple[str, str]], second: dict[str, tuple[str, str]], names: list[str]
) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test, (outcome, _) in first.items():
        file = test.partition("::")[0].removeprefix("unit/")
        how = outcome if outcome != "failed" else second[test][0].replace("passed", "adapted")
        counts[file][how] += 1
    counts["all"] = sum(counts.values(), Counter[str]())
    kinds = ("passed", "adapted", "skipped", "failed")
    print("| file | tests | as they are | adapted | skipped | failed |\n|---|---|---|---|---|---|")
    for name in [*names, "all"]:
        row = counts[name]
        print(f"| {name} | {row.total()} | " + " | ".join(str(row[kind]) for kind in kinds) + " |")


# -- inside pytest -------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    """Keep what becomes of each test."""
    config.pluginmanager.register(_Outcomes(json.loads(os.environ["SHIM"])["out"]))


def _install() -> None:
    """Put our server where theirs would start, before their tests are read."""
    missing = types.ModuleType("wget")
    missing.download = _no_download  # type: ignore[attr-defined]
    sys.modules["wget"] = missing
    import utils  # type: ignore[import-not-found]

    utils.DEFAULT_REQUEST_TIMEOUT = 60
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda _regex, text: bool(text)
    utils.download_file = lambda *_: json.loads(os.environ["SHIM"])["model"]
    begin = utils.ServerProcess.start

    def start(server: Any, timeout_seconds: int = 60) -> None:
        server.server_path = str(_launcher(server))
        begin(server, timeout_seconds)

    utils.ServerProcess.start = start


def _no_download(*_: Any, **__: Any) -> None:
    raise OSError("nothing is downloaded")


def _launcher(server: Any) -> Path:
    """A program that takes llama-server's options and starts ours with what it asks for."""
    settings = json.loads(os.environ["SHIM"])
    path = Path(settings["folder"]) / "llama-server"
    told = [str(one) for one in _options(server, settings)]
    command = [str(Path(sys.executable).with_name("edgespec")), "serve", *told]
    path.write_text(
        f"#!{sys.executable}\nimport os\ncommand = {command!r}\nos.execv(command[0], command)\n"
    )
    path.chmod(0o755)
    return path


def _options(server: Any, settings: dict[str, str]) -> list[Any]:
    """Options of `edgespec serve`; each slot of llama-server has its part of the context."""
    slots = server.n_slots or 1
    size = server.n_ctx or 2048
    model = settings["infill" if "infill" in (server.model_alias or "") else "model"]
    told: list[Any] = [
        *("-m", _with_template(server, Path(model), Path(settings["folder"]))),
        *("--host", server.server_host, "--port", server.server_port),
        *("--temp", server.temperature, "--seed", server.seed),
        *("--users", slots, "--ctx", size if server.kv_unified else size // slots),
        *("--alias", server.model_alias or "model"),
    ]
    if server.spec_type is None:  # what is measured at the start is not needed
        told += ["--drafter", "none", "--kernels", "off", "-t", 1]
    if server.n_predict and server.n_predict > 0:
        told += ["-n", server.n_predict]
    if server.api_key:
        told += ["--api-key", server.api_key]
    if server.cors_origins:
        told += ["--cors", server.cors_origins]
    if server.debug:
        told += ["-v"]
    return told


def _with_template(server: Any, model: Path, folder: Path) -> Path:
    """The model, or a copy with the chat template that a test asks for."""
    text = server.chat_template
    if server.chat_template_file:
        text = Path(server.chat_template_file).read_text()
    elif text in _TEMPLATES:
        text = (folder / "models" / "templates" / f"{_TEMPLATES[text]}.jinja").read_text()
    elif text == "chatml":
        text = _CHATML
    if text is None:
        return model
    made = folder / f"template-{abs(hash(text))}.gguf"
    if not made.exists():
        script = "gguf.scripts.gguf_new_metadata"
        options = ["--chat-template", text, str(model), str(made)]
        subprocess.run([sys.executable, "-m", script, *options], check=True)
    return made


class _Outcomes:
    """What became of each test, written down when all have ended."""

    def __init__(self, path: str) -> None:
        self._path, self._found = Path(path), dict[str, tuple[str, str]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One of set-up, call and tear-down."""
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else ""
            self._found[report.nodeid] = (report.outcome, " ".join(why.split())[:300])

    def pytest_sessionfinish(self) -> None:
        """All have ended."""
        self._path.write_text(json.dumps(self._found))


if __name__ == "__main__":
    main()
elif "SHIM" in os.environ:
    _install()
