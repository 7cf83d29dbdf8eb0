"""llama.cpp's own server tests, run against `edgespec serve`: a table by file.

    python benchmarks/llama_server_tests.py LLAMA_CPP [--only FILE ...] [--failures] [--kept FILE]

LLAMA_CPP is its source tree; the source package of llama-cpp-python has one in vendor/llama.cpp.
Needs pytest, requests, openai and filelock. Nothing is downloaded. What became of each test is
written down at once: the table comes as well where the run is interrupted, and --kept FILE goes on
with what earlier runs found.

The tests start llama-server with tiny models of a hub. Here their start options become those of
`edgespec serve`, on two layers of the embedded model, which write nonsense quickly. Where
they look for a text of their model, any text will do. What else differs is in `_ADAPTED`: a line
for each difference, applied to the source of the tests. A test counts as adapted where that changed
it, and as it is elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shared import free_port

from edgespec.models.embedded import embedded_model

# Files of interfaces that are here. The others: embeddings, reranking, images, LoRA, several models
# in one server, saved slots, tools and MCP servers inside the server.
_FILES = (
    "basic chat_completion compat_anthropic compat_oai_responses completion ctx_shift ignore_eos "
    "infill metrics security speculative stream template tokenize tool_call"
).split()
# Part of a file's name, a regular expression, and what stands for it.
_ADAPTED = (
    # how many tokens a prompt has, by their vocabulary
    ("", r'\["(prompt_n|prompt_tokens)"\] == (n_prompt|\d+)', r'["\1"] > 0'),
    ("", r'timings\["cache_n"\] == n_prompt', 'timings["cache_n"] > 0'),
    ("chat_completion", r'(\["cached_tokens"\]) == n_cache', r"\1 >= (n_cache > 0)"),
    ("completion", r'(life is")\*32', r"\1*64"),
    ("ctx_shift", r'"prompt": LONG_TEXT', '"prompt": LONG_TEXT * 4'),
    ("ctx_shift", r"248, True", "252, True"),
    # a real model ends its answers
    ("ctx_shift", r'"n_predict": n_predict,', '"n_predict": n_predict, "ignore_eos": True,'),
    ("chat_completion", r"== n_predicted", "<= n_predicted"),
    ("chat_completion", r"== finish_reason", 'in (finish_reason, "stop")'),
    # their vocabulary has a token before each text
    ("", r'"<s> " \+ prompt', "prompt"),
    ("chat_completion", r'(res.body\["__verbose"\]\["prompt"\]) == "<s> (.*)"', r'\1 == "\2"'),
    ("tool_call", r"server\.jinja = True", "server.jinja = server.null_first = True"),
    # one prompt's template is asked for at /apply-template, not with each answer
    ("chat_completion", r"server\.debug = True", 'server.debug = "template"'),
    ("chat_completion", r'"verbose": verbose,', ""),
    # what OpenAI's interface has: the first event's content is "", and errors have its types
    ("", r'(delta(\.|\[|"\])*"?content("\])?) is None', r"\1 in (None, '')"),
    ("", "exceed_context_size_error", "invalid_request_error"),
    ("", "exceeds the available context size", "context"),
    ("", r'system_fingerprint(.*)startswith\("b"\)', r'system_fingerprint\1startswith("edgespec")'),
    ("security", r'"/completions"(, data)', r'"/completion"\1'),
    ("ctx_shift", r'"n_predict": 256', '"max_tokens": 256'),
    # tokens that come within 33 ms share an event
    ("completion", r'(completion_probabilities"\]\)) == 1$', r"\1 >= 1"),
    # speeds come with what each drafter wrote, by its name
    (
        "metrics",
        r"^( +)for key, value in timings.items\(\):",
        r"\g<0>\n\1    if isinstance(value, dict):\n\1        continue",
    ),
    # the first event has what the cache has; how many follow is a matter of time, not of batches
    ("chat_completion", r"== batch_count", ">= 2"),
    # samplers and numbers that are not there
    ("completion", r'            assert "adaptive_\w+" in .*\n', ""),
    ("metrics", r'        "llamacpp:(n_tokens_max|spec_decode_num_drafts_total|n_busy.*)",\n', ""),
    ("metrics", r'    assert "Process-Start-Time-Unix" in .*\n', ""),
    # /slots and /metrics are always there
    ("", r'    assert res\.status_code == 501.*\n(    assert "error" in res.body\n)?', ""),
    # thinking is a field of a request, and no option of the server
    ("template", r"server\.reasoning = reasoning", 'server.thinks = reasoning != "off"'),
    # an image is refused with status 400
    ("", r"== 500\n(.*)image input is not supported", r"== 400\n\1image"),
    # origins are named whole; pages of others are refused, and `*` is answered with `*`
    ("security", r"assert res.headers\[cors_header\] == .*", "assert res.headers[cors_header]"),
    (
        "security",
        r'(origin: str\):(\n.*){8}\n    assert res.status_code) == 200(\n.*"Access\S* not in)',
        r"\1 == 403\3",
    ),
)
# llama.cpp's names of templates, as far as the tests look at them
_HEADED = (  # a template's last newline is none of its text
    "{% for m in messages %}OPEN{{ m.role }}CLOSE{{ m.content }}END{% endfor %}OPENassistantCLOSE\n"
)
_TEMPLATES = {
    "chatml": ("<|im_start|>", "\n", "<|im_end|>\n"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
}
_COMMAND_R = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ m.role | upper }}_TOKEN|>{{ m.content }}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
# Names by which the tests ask for whatever model there is.
_NAMES = "test davinci-002 gpt-3.5-turbo gpt-3.5-turbo-instruct gpt-4.1 codellama70b".split()
_NO_TEXT = {"content": None}
_LAYERS = 2  # of 30
_LOCAL = [f"http://{host}" for host in ("localhost", "127.0.0.1", "[::1]")]


def main() -> None:
    """Run them and print the table."""
    parser = argparse.ArgumentParser(description="llama.cpp's server tests on edgespec serve")
    parser.add_argument("source", type=Path, help="llama.cpp's source tree")
    parser.add_argument("--only", nargs="+", default=_FILES, metavar="FILE")
    parser.add_argument("--failures", action="store_true", help="say why each of them failed")
    parser.add_argument("--kept", type=Path, help="outcomes of earlier runs, which this one joins")
    asked = parser.parse_args()
    names = [f"test_{name.removeprefix('test_')}.py" for name in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        tests = _tree(asked.source, Path(folder))
        model = _small_model(Path(folder) / "small.gguf")
        out = (asked.kept or Path(folder) / "outcomes.json").resolve()
        settings = {"model": str(model), "folder": folder, "out": str(out)}
        changed = _adapt(tests)
        found = _run(tests, [f"unit/{name}" for name in names], settings)
    _print(found, changed, sorted({name.partition("::")[0][len("unit/") :] for name in found}))
    if asked.failures:
        for name, (outcome, why) in found.items():
            if outcome == "failed":
                print(f"{name}\n    {why}")


def _tree(source: Path, folder: Path) -> Path:
    """A copy of the tests where their relative paths lead to the source tree."""
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(source / "tools" / "server" / "tests", tests)
    (folder / "models").symlink_to(source.resolve() / "models")
    return tests


def _small_model(path: Path) -> Path:
    """Some layers of the embedded model, and tokens for filling in that it has never learned."""
    import gguf

    source = gguf.GGUFReader(embedded_model())
    writer = gguf.GGUFWriter(path, "llama")
    changed = {"llama.block_count": _LAYERS, "tokenizer.ggml.add_bos_token": True}
    for name, field in source.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kinds = [*field.types, None][:2]
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, kinds[0], sub_type=kinds[1])
    for token, part in enumerate(("pre", "suf", "mid"), 3):
        writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", token)
    for tensor in source.tensors:
        layer = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else 0
        if layer < _LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _adapt(tests: Path) -> set[str]:
    """Rewrite the tests; returns those that changed, as `FILE::FUNCTION`."""
    changed = set()
    for path in sorted((tests / "unit").glob("test_*.py")):
        text = before = path.read_text()
        for part, pattern, by in _ADAPTED:
            if part in path.name:
                text = re.sub(pattern, by, text, flags=re.MULTILINE)
        path.write_text(text)
        old, new = _functions(before), _functions(text)
        changed |= {f"{path.name}::{name}" for name in new if new[name] != old[name]}
    return changed


def _functions(source: str) -> dict[str, str]:
    tree = ast.parse(source)
    return {one.name: ast.dump(one) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}


def _run(tests: Path, names: list[str], settings: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test, by its id."""
    paths = [str(tests), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"),
        *("-p", Path(__file__).stem, "--tb=no", *names),
    ]
    shimmed = {"SHIM": json.dumps(settings), "PORT": str(free_port())}
    env = {**os.environ, **shimmed, "PYTHONPATH": os.pathsep.join(paths)}
    with suppress(KeyboardInterrupt), _interrupted_by_sigterm():
        subprocess.run(command, cwd=tests, env=env, stdout=sys.stderr, check=False)
    return _read(Path(settings["out"]))


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: `timeout` ends a command this way."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test, by its id, as far as they are known."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {name: (outcome, why) for name, (outcome, why) in kept.items()}


def _print(found: dict[str, tuple[str, str]], changed: set[str], names: list[str]) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test, (outcome, _) in found.items():
        function = test.removeprefix("unit/").partition("[")[0]
        is_adapted = outcome == "passed" and function in changed
        counts[function.partition("::")[0]]["adapted" if is_adapted else outcome] += 1
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
    _ask_otherwise(utils.ServerProcess)


def _ask_otherwise(server_class: Any) -> None:
    """What `_ADAPTED` leaves to requests: thinking, what a template makes, null for no text."""
    from requests.structures import CaseInsensitiveDict

    ask, stream = server_class.make_request, server_class.make_stream_request

    def make_request(
        server: Any, method: str, path: str, data: Any = None, *more: Any, **named: Any
    ) -> Any:
        if data is not None and getattr(server, "thinks", None) is False:
            data = {**data, "chat_template_kwargs": {"enable_thinking": False}}
        answer = ask(server, method, path, data, *more, **named)
        answer.headers = CaseInsensitiveDict(answer.headers)  # as HTTP has them
        if server.debug == "template" and path == "/chat/completions":
            answer.body["__verbose"] = ask(server, method, "/apply-template", data).body
        return answer

    def make_stream_request(server: Any, *more: Any, **named: Any) -> Any:
        for event in stream(server, *more, **named):
            for choice in event.get("choices", ()) if hasattr(server, "null_first") else ():
                choice.get("delta", {}).update({} if choice["delta"].get("content") else _NO_TEXT)
            yield event

    server_class.make_request = make_request
    server_class.make_stream_request = make_stream_request


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
    if "split" in (server.model_hf_file or ""):
        raise RuntimeError("there is no model in parts here")
    slots = server.n_slots or 1
    size = server.n_ctx or 2048
    model = settings["model"]
    told: list[Any] = [
        *("-m", _with_template(server, Path(model), Path(settings["folder"]))),
        *("--host", server.server_host, "--port", server.server_port),
        *("--temp", server.temperature, "--seed", server.seed),
        *("--users", slots, "--ctx", size if server.kv_unified else size // slots),
    ]
    for name in [server.model_alias or "model", *_NAMES]:
        told += ["--alias", name]
    for origin in _origins(server):
        told += ["--cors", origin]
    if server.spec_type is None:  # what is measured at the start is not needed
        told += ["--drafter", "none", "--kernels", "off", "-t", 1]
    else:
        told += ["--drafter", "model", "-md", model, "--draft-max", server.spec_draft_n_max]
    if server.n_predict and server.n_predict > 0:
        told += ["-n", server.n_predict]
    if server.api_key:
        told += ["--api-key", server.api_key]
    return told


def _origins(server: Any) -> list[str]:
    """llama-server takes pages of all origins unless it is told otherwise, or has tools."""
    if server.cors_origins == "localhost" or server.server_tools:
        return [f"{host}{port}" for host in _LOCAL for port in ("", ":3000", ":8080")]
    return [server.cors_origins or "*"]


def _with_template(server: Any, model: Path, folder: Path) -> Path:
    """The model, or a copy with the chat template that a test asks for."""
    text = server.chat_template
    if server.chat_template_file:
        text = Path(server.chat_template_file).read_text()
    elif text in _TEMPLATES:
        begin, close, end = _TEMPLATES[text]
        text = _HEADED.replace("OPEN", begin).replace("CLOSE", close).replace("END", end)
    elif text == "command-r":
        text = _COMMAND_R
    if text is None:
        return model
    made = folder / f"template-{abs(hash(text))}.gguf"
    if not made.exists():
        script = "gguf.scripts.gguf_new_metadata"
        options = ["--chat-template", text, str(model), str(made)]
        subprocess.run([sys.executable, "-m", script, *options], check=True)
    return made


class _Outcomes:
    """What became of each test, written down as soon as it is known."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._found = _read(self._path)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One of set-up, call and tear-down."""
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else ""
            self._found[report.nodeid] = (report.outcome, " ".join(why.split())[:300])
            self._path.write_text(json.dumps(self._found))


if __name__ == "__main__":
    main()
elif "SHIM" in os.environ:
    _install()
