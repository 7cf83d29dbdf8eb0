"""Predicted against real memory: components, peaks, budgets, architectures, and what it costs.

python benchmarks/memory.py grid MODEL... [--json OUT] [--quick] [--draft-model FILE]
python benchmarks/memory.py peaks FOLDER [ROW...]
python benchmarks/memory.py budgets MODEL... [--steps 40] [--json OUT]
python benchmarks/memory.py atlas FOLDER [--kernels] [--users 4] [--kv-type q8_0]
python benchmarks/memory.py frugality MODEL [--ctx 4096] [--kv-type f16] [--json OUT]
python benchmarks/memory.py two MODEL [--budget MIB]
python benchmarks/memory.py experts MODEL --budget MIB [--tokens 64] [--prompt 1000]
python benchmarks/memory.py projectors FOLDER
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any

from shared import run

import edgespec
from edgespec.backends.base import Capabilities, DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.simulator import SimulatedContext, allocated
from edgespec.errors import BackendError, ModelFileError
from edgespec.measure.prompts import PROMPTS
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.simulation import ContextRequest, DeviceBytes, simulated, simulating
from edgespec.memory.plan.options import LoadOptions
from edgespec.memory.plan.plan import Plan
from edgespec.models.spec import ModelSpec, read_model_spec

# -- grid ------------------------------------------------------------------------------------


_CONTEXTS = (512, 4096, 16384)
_KV_TYPES = ("f16", "q8_0", "q4_0")
_DRAFTS = (1, 16, 64)
_COMPONENTS = ("weights", "weights_repacked", "kv_cache", "compute", "logits")
_DRAFT_COMPONENTS = tuple(f"draft_{name}" for name in _COMPONENTS)
_SIDES = ("predicted", "real")
_MEBIBYTE = 1 << 20


def grid() -> None:
    """Predicted against real memory: every component, and the peak of the whole process.

    Each row is one `edgespec run` with its own context size, KV type and largest draft, over a
    prompt of more than one batch. Columns are the plan's bytes and what llama.cpp says it
    allocated, in MiB, and at the end the predicted and measured peak resident set of the
    process. `worst` lines sum up; the exit status is 1 when a component is off by more than 2%
    and 1 MiB, the peak by more than 4% and 8 MiB, or when a process took more than its
    predicted peak.
    """
    parser = argparse.ArgumentParser("memory.py grid")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--draft-model", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one row of each column only")
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':<34} {'ctx':>5} {'KV':<5}{'draft':>5}  component MiB predicted/real ... peak")
    for model in arguments.models:
        for settings in _grid(model, arguments.quick):
            row = _in_own_process(model, settings, arguments.draft_model)
            rows.append(row)
            print(_line(row), flush=True)
    failed = _sum_up(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    sys.exit(failed)


def _grid(model: Path, quick: bool) -> list[dict[str, Any]]:
    from edgespec.memory.bytes.footprint import kv_type_fits
    from edgespec.models.spec import read_model_spec

    spec = read_model_spec(model)
    points = list(itertools.product(_CONTEXTS, _KV_TYPES, _DRAFTS))
    if quick:
        points = [(512, "f16", 1), (4096, "q8_0", 16), (4096, "q4_0", 64)]
    return [
        {"ctx": context, "kv-type": kv_type, "draft-max": draft}
        for context, kv_type, draft in points
        if context <= spec.context_length and kv_type_fits(spec, kv_type)
    ]


def _in_own_process(
    model: Path, settings: dict[str, Any], draft_model: Path | None
) -> dict[str, Any]:
    """One `edgespec run`: what it planned, allocated and used at its peak."""
    prompt = "The quick brown fox jumps over the lazy dog. " * (30 if settings["ctx"] > 512 else 20)
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    if draft_model is not None:
        options += ["--draft-model", str(draft_model), "--drafter", "suffix,model"]
    memory = _run_of(model, prompt, 16, options)
    return {
        "model": model.stem,
        **settings,
        "predicted": memory["components"],
        "real": memory["allocated_bytes"],
        "predicted_peak_bytes": memory["predicted_peak_bytes"],
        "peak_bytes": memory["measured_peak_bytes"],
    }


def _run_of(model: Path, prompt: str, tokens: int, options: list[str]) -> dict[str, Any]:
    """The memory that one `edgespec run` tells of."""
    done = _edgespec("run", str(model), prompt, "--json", "--max-tokens", f"{tokens}", *options)
    if done.returncode != 0:
        sys.exit(f"status {done.returncode}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)["memory"]
    return found


def _line(row: dict[str, Any]) -> str:
    pairs = (
        _pair(row["predicted"].get(name, 0), row["real"].get(name, 0)) for name in _names([row])
    )
    peak = _pair(row["predicted_peak_bytes"], row["peak_bytes"])
    name = f"{row['model'][:33]:<34} {row['ctx']:>5} {row['kv-type']:<5}"
    return f"{name}{row['draft-max']:>5}  {''.join(pairs)}{peak}"


def _names(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    drafts = any("draft_weights" in row["real"] for row in rows)
    return _COMPONENTS + _DRAFT_COMPONENTS if drafts else _COMPONENTS


def _pair(predicted: int, real: int) -> str:
    return f"{predicted / _MEBIBYTE:8.1f}/{real / _MEBIBYTE:<8.1f}"


def _sum_up(rows: list[dict[str, Any]]) -> int:
    failed = 0
    for name in _names(rows):
        pairs = [(row["predicted"].get(name, 0), row["real"].get(name, 0)) for row in rows]
        failed |= _worst(name, pairs, 0.02, _MEBIBYTE)
    for row in rows:
        drafts = [sum(row[of].get(name, 0) for name in _DRAFT_COMPONENTS) for of in _SIDES]
        if drafts[1]:
            target = sum(row["real"].get(name, 0) for name in _COMPONENTS)
            print(
                f"draft model {drafts[0] / _MEBIBYTE:.2f} MiB predicted, "
                f"{drafts[1] / _MEBIBYTE:.2f} allocated ({drafts[0] / drafts[1] - 1:+.2%}), "
                f"{drafts[1] / target:.1%} of the target's"
            )
    peaks = [(row["predicted_peak_bytes"], row["peak_bytes"]) for row in rows]
    failed |= _worst("peak", peaks, 0.04, 8 * _MEBIBYTE)
    return failed | any(real > predicted for predicted, real in peaks)


def _worst(name: str, pairs: list[tuple[int, int]], part: float, slack: int) -> int:
    """Print the row furthest off; 1 when one is off by more than `part` and `slack` bytes."""
    predicted, real = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    off = predicted - real
    within = sum(abs(p - r) <= max(part * r, slack) for p, r in pairs)
    print(
        f"worst {name:<17} {off / _MEBIBYTE:+7.2f} MiB ({off / max(1, real):+.2%}); "
        f"{within} of {len(pairs)} within {part:.0%} or {slack // _MEBIBYTE} MiB"
    )
    return int(within < len(pairs))


# -- peaks -----------------------------------------------------------------------------------


# A file's name, tokens of the prompt or so, and options.
_PEAKS = (
    ("smollm2-*-q4_0", 6000, "--ctx 8192 --kv-type q8_0"),
    ("smollm2-*-q4_0", 7000, "--ctx 8192 --kv-type q8_0"),
    ("smollm2-*-q4_0", 7000, "--ctx 8192 --kv-type q4_0"),
    ("smollm2-*-q4_1", 0, "--ctx 1000 --kv-type f32 --kernels off -t 1 --drafter none"),
    ("smollm2-*-q4_0", 0, "--ctx 777 --budget 215MiB"),
    ("gemma-3-270m-*", 6000, "--ctx 8000 --kv-type bf16"),
    ("qwen2.5-*-q4_0", 0, "--ctx 3000 --kv-type q4_0 --exact --budget 1500MiB"),
    ("qwen2.5-*-q4_0", 0, "--ctx 3000 --kv-type q4_0 --exact --budget 1165MiB"),
    ("smollm2-*-q4_0", 0, "--backend onnx --ctx 3000"),
)


def peaks() -> None:
    """Predicted against measured peaks of first runs, each with a cache folder of its own.

    FOLDER has the models, as `fetch_models.py` names them. A first run measures kernels, step times
    and what a cache loses, which later ones do not. The exit status is 1 where a process took more
    than was predicted, or less by more than 4% and 8 MiB.
    """
    parser = argparse.ArgumentParser("memory.py peaks")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int, nargs="*", default=range(len(_PEAKS)), help="from 0 on")
    arguments, pairs = parser.parse_args(), []
    for name, tokens, options in (_PEAKS[row] for row in arguments.rows):
        (model,) = arguments.folder.glob(f"{name}.gguf")
        words = "\n\n".join(prompt.text for prompt in PROMPTS)
        prompt = (60 * words)[: 4 * tokens] or "Why is the sky blue?"
        with tempfile.TemporaryDirectory() as cache:
            os.environ["EDGESPEC_CACHE"] = cache
            memory = _run_of(model, prompt, 48, options.split())
        pairs.append((memory["predicted_peak_bytes"], memory["measured_peak_bytes"]))
        predicted, real = pairs[-1]
        off = f"{(real - predicted) / _MEBIBYTE:+6.1f} MiB ({real / predicted - 1:+.1%})"
        print(f"{_pair(predicted, real)} {off}  {model.stem} {options}", flush=True)
    failed = _worst("peak", pairs, 0.04, 8 * _MEBIBYTE)
    sys.exit(failed | any(real > predicted for predicted, real in pairs))


# -- budgets ---------------------------------------------------------------------------------


_NOISE = 0.9  # every run teaches the next prediction something
_PROMPT = "Write a JSON list of six fruits with the keys name, colour, sweetness and season."


def budgets() -> None:
    """Budgets from far too small to ample: refused or run, never over, never slower with more.

    Each budget is one `edgespec run`. Columns: budget, what was planned and the measured peak
    in MiB, context, largest draft, predicted and measured tokens/s. The exit status is 1 when a
    peak was over its budget, a run failed in another way than by this error, or a larger budget
    predicts less speed.
    """
    parser = argparse.ArgumentParser("memory.py budgets")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = False
    for model in arguments.models:
        ample = json.loads(_edgespec("plan", str(model), "--json").stdout)
        most = ample["memory"]["predicted_peak_bytes"]
        print(f"\n{model.name}: budget, plan, peak MiB, context, draft, predicted, measured t/s")
        best = 0.0
        for step in range(arguments.steps):
            budget = int(most * (0.3 + 0.8 * step / (arguments.steps - 1)))
            row = {"model": model.stem, **_one(model, budget)}
            rows.append(row)
            print(_budgets_line(row), flush=True)
            failed |= not row["refused"] and (
                row["peak_bytes"] > budget or row["predicted_tokens_per_s"] < _NOISE * best
            )
            best = max(best, row.get("predicted_tokens_per_s", 0.0))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    sys.exit(failed)


def _edgespec(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgespec.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _one(model: Path, budget: int) -> dict[str, Any]:
    options = ["--budget", f"{budget / _MEBIBYTE:.3f}MiB"]
    done = _edgespec("run", str(model), _PROMPT, "--max-tokens", "48", "--json", *options)
    if done.returncode == 1 and "hint:" in done.stderr and "Traceback" not in done.stderr:
        return {"budget_bytes": budget, "refused": True, "hint": done.stderr.split("hint: ")[1]}
    if done.returncode != 0:
        sys.exit(f"status {done.returncode} at {budget} bytes: {done.stderr}")
    found = json.loads(done.stdout)
    plan = found["plan"]
    options += ["--ctx", str(plan["context_size"]["value"])]  # a plan is made for longer answers
    predicted = json.loads(_edgespec("plan", str(model), "--json", *options).stdout)
    return {
        "budget_bytes": budget,
        "refused": False,
        "planned_bytes": found["memory"]["predicted_peak_bytes"],
        "peak_bytes": found["memory"]["measured_peak_bytes"],
        "context_size": plan["context_size"]["value"],
        "draft_max": plan["draft_max"]["value"],
        "predicted_tokens_per_s": predicted["predicted_tokens_per_s"],
        "tokens_per_s": found["tokens_per_s"],
    }


def _budgets_line(row: dict[str, Any]) -> str:
    budget = f"{row['budget_bytes'] / _MEBIBYTE:8.1f}"
    if row["refused"]:
        return f"{budget}  refused; {row['hint'].strip()}"
    planned, peak = row["planned_bytes"] / _MEBIBYTE, row["peak_bytes"] / _MEBIBYTE
    return (
        f"{budget} {planned:8.1f} {peak:8.1f} {row['context_size']:6} {row['draft_max']:3} "
        f"{row['predicted_tokens_per_s']:7.1f} {row['tokens_per_s']:7.1f}"
    )


# -- atlas -----------------------------------------------------------------------------------


_REFUSED = "refused"  # such as a cache of blocks that no head is a multiple of


def atlas() -> None:
    """Bytes that llama.cpp says models would take, against what they take when they are loaded.

    FOLDER has GGUF files, such as llama.cpp's `test-llama-archs -s 7 -o FOLDER` writes: one or
    two tiny random models of every architecture it can build. Each is asked about by its
    skeleton, then loaded.
    """
    parser = argparse.ArgumentParser("memory.py atlas")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--kv-type", default="f16")
    options = parser.parse_args()
    kinds = {"kv_type_k": options.kv_type, "kv_type_v": options.kv_type}
    shape = RunConfig(1024, 64, 8, threads=2, kernels=options.kernels, users=options.users, **kinds)
    right = wrong = 0
    with simulating():
        for spec in _models(options.folder):
            said, taken = _said(spec, shape), _taken(spec, shape)
            right, wrong = right + (said == taken), wrong + (said != taken)
            if said != taken:
                print(f"{spec.path.name}: said {said}, took {taken}")
    print(f"{right} of {right + wrong} files right to the byte")


def _models(folder: Path) -> Iterator[ModelSpec]:
    for path in sorted(folder.glob("*.gguf")):
        try:
            yield read_model_spec(path, heads=True)
        except ModelFileError as problem:
            print(f"{path.name}: {problem}")


def _said(spec: ModelSpec, shape: RunConfig) -> dict[str, DeviceBytes] | str:
    try:
        return dict(simulated([ContextRequest(spec, shape)])[0])
    except BackendError:
        return _REFUSED


def _taken(spec: ModelSpec, shape: RunConfig) -> dict[str, DeviceBytes] | str:
    """Of the file itself, loaded and allocated."""
    settings = replace(SimulatedContext(shape, 0).settings, tied=spec.tied_embeddings, mapped=False)
    context = LlamaContext(settings)
    try:
        context._load(str(spec.path), None)
        context.capabilities = Capabilities(True, False, True)
        context._make_context(lambda _params: None)
        return allocated(context)
    except BackendError:
        return _REFUSED
    finally:
        context.close()


# -- frugality -------------------------------------------------------------------------------


_REPEATS = 2
_DRAFT = 64
_PROMPTS = 4
_TOKENS = 96


def frugality() -> None:
    """The plan's memory against llama.cpp's defaults, and what it costs in speed.

    Three kinds of process, each on its own: llama.cpp as it comes (default parameters, a prompt
    of 512 tokens, one step over a 64-node draft) for its memory; this engine on a context of
    that size (ubatch 512, 64-node drafts, mapped weights), and this engine on its plan,
    alternating, for the speed of both and the memory of the plan. Generation memory is
    everything but weights, libraries and vocabulary: KV cache, compute buffer, logits, drafter
    tables.
    """
    parser = argparse.ArgumentParser("memory.py frugality")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        parts = {"defaults": _defaults, "large": _large, "plan": _plan}
        print(json.dumps(parts[arguments.part](arguments)))
        return
    defaults = _run("defaults", arguments)
    runs: dict[str, list[dict[str, Any]]] = {"large": [], "plan": []}
    for turn in range(2 * _REPEATS):
        for part in ("large", "plan") if turn % 2 else ("plan", "large"):
            runs[part].append(_run(part, arguments))
    document = _compare(defaults, runs)
    print(json.dumps(document, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def _run(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "frugality", str(arguments.model), "--part", part]
    command += ["--ctx", str(arguments.ctx), "--kv-type", arguments.kv_type]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _compare(defaults: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    plan = runs["plan"][0]

    def ratio(name: str) -> float:
        pairs = zip(runs["plan"], runs["large"], strict=True)
        return float(statistics.median(ours[name] / theirs[name] for ours, theirs in pairs))

    return {
        "generation_bytes": {"defaults": defaults["generation"], "plan": plan["generation"]},
        "generation_saved": 1 - plan["generation"] / defaults["generation"],
        "peak_bytes": {"defaults": defaults["peak"], "plan": plan["peak"]},
        "peak_saved": 1 - plan["peak"] / defaults["peak"],
        "plain_speed_ratio": ratio("plain_tokens_per_s"),
        "speculative_speed_ratio": ratio("tokens_per_s"),
        "prefill_speed_ratio": ratio("prefill_tokens_per_s"),
        "runs": runs,
        "defaults": defaults,
    }


def _generation_bytes(allocated: dict[str, int]) -> int:
    return sum(size for name, size in allocated.items() if "weights" not in name)


def _defaults(arguments: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp with its default parameters, a long prompt, and all logits of a draft."""
    from edgespec.backends.llama.library import LIBRARY_LOG, library
    from edgespec.memory.device.host import usable_cores
    from edgespec.memory.device.track import peak_resident_bytes

    lib = library()
    model = lib.llama_model_load_from_file(
        str(arguments.model).encode(), lib.llama_model_default_params()
    )
    params = lib.llama_context_default_params()
    params.n_ctx = arguments.ctx
    params.n_threads = params.n_threads_batch = usable_cores()
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    for start, count, outputs in ((0, 512, 1), (512, _DRAFT + 1, _DRAFT + 1)):
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = 100 + i, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i >= count - outputs
        lib.llama_decode(context, batch)
        lib.llama_batch_free(batch)
    ctypes.cast(lib.llama_get_logits(context), ctypes.c_void_p)
    allocated = {**LIBRARY_LOG.buffer_bytes(), "logits": 4 * (_DRAFT + 1) * vocab_size}
    return {
        "allocated": allocated,
        "generation": _generation_bytes(allocated),
        "peak": peak_resident_bytes(),
    }


def _large(arguments: argparse.Namespace) -> dict[str, Any]:
    """This engine on buffers of llama.cpp's default sizes."""
    from edgespec.backends.llama.backend import LlamaBackend
    from edgespec.decode.engine import Engine
    from edgespec.drafting.suffix import SuffixDrafter
    from edgespec.memory.device.host import usable_cores
    from edgespec.models.spec import read_model_spec
    from edgespec.setup.planning import speed_model

    spec = read_model_spec(arguments.model)
    kv, threads = arguments.kv_type, usable_cores()
    config = RunConfig(arguments.ctx, 512, _DRAFT + 1, 1, threads, kv, kv, drafter="suffix")
    backend = LlamaBackend(arguments.model, config)
    curve = speed_model(spec, config).curve.resized(_DRAFT + 1)
    engine = Engine(backend, curve=curve, drafter=SuffixDrafter(), chat_template=spec.chat_template)
    with engine:
        return _speeds(engine)


def _plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """This engine on its own plan."""
    import edgespec
    from edgespec.memory.device.track import peak_resident_bytes

    with edgespec.load(
        arguments.model, context_size=arguments.ctx, kv_type=arguments.kv_type
    ) as engine:
        found = _speeds(engine)
        allocated = engine.backend.memory_bytes()
        assert engine.drafter is not None
        allocated["drafter_tables"] = engine.drafter.nbytes
    found["allocated"] = allocated
    found["generation"] = _generation_bytes(allocated)
    found["peak"] = peak_resident_bytes()
    return found


def _speeds(engine: Any) -> dict[str, Any]:
    engine.generate(PROMPTS[0].text, max_tokens=16)
    plain, speculative = [], []
    for prompt in PROMPTS[:_PROMPTS]:
        options = {"max_tokens": _TOKENS}
        plain.append(engine.generate(prompt.text, speculate=False, **options).counters)
        speculative.append(engine.generate(prompt.text, **options).counters)
    longest = max(plain, key=lambda counters: counters.prompt_tokens)
    return {
        "plain_tokens_per_s": _rate(plain),
        "tokens_per_s": _rate(speculative),
        "prefill_tokens_per_s": longest.prompt_tokens / longest.time_to_first_token_s,
    }


def _rate(counters: list[Any]) -> float:
    return float(
        sum(c.accepted_tokens + c.rounds for c in counters) / sum(c.decode_s for c in counters)
    )


# -- two processes ---------------------------------------------------------------------------


def two() -> None:
    """What two processes of one model hold together, each behind an answer.

    Pss: of pages that both have, each has half. With packed weights that are pages of a file, and
    with a copy in each process.
    """
    parser = argparse.ArgumentParser("memory.py two")
    parser.add_argument("model", type=Path)
    parser.add_argument("--budget", type=int, metavar="MIB", help="of each process")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        _answer_and_wait(arguments)
        return
    budget = [] if arguments.budget is None else ["--budget", str(arguments.budget)]
    for packed in ("auto", "off"):
        command = [sys.executable, __file__, "two", str(arguments.model), "--part", packed]
        command += ["--ctx", str(arguments.ctx), *budget]
        processes, lines = [], []
        for _ in range(2):
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            one = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
            processes.append(one)
            assert one.stdout is not None
            lines.append(one.stdout.readline())
        if not all(lines):
            print(f"packed file {packed}: it does not load")
        else:
            held = [_held_mib(one.pid) for one in processes]
            both = {name: sum(each[name] for each in held) for name in _HELD}
            print(f"packed file {packed}: {both}, of each {[one['Pss'] for one in held]} MiB")
        for one in processes:
            one.communicate()


_HELD = ("Pss", "Pss_Anon", "Pss_File")


def _answer_and_wait(arguments: argparse.Namespace) -> None:
    budget = arguments.budget
    with edgespec.load(
        arguments.model,
        context_size=arguments.ctx,
        budget_bytes=None if budget is None else budget << 20,
        packed_file=arguments.part,
    ) as engine:
        engine.generate("Count to five.", max_tokens=24)
        print("ready", flush=True)
        sys.stdin.read()


def _held_mib(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {name: int(rest.split()[0]) >> 10 for name, rest in (one.split(":") for one in lines)}
    return {name: found[name] for name in _HELD}


# -- experts ---------------------------------------------------------------------------------


def experts() -> None:
    """Of a mixture larger than its budget: what a plan said of a token, and what it took.

    Random tokens, one a step, behind a prompt of random ones. `--random` draws others: a first run
    counts what a plan for another budget, and for other texts, goes by.
    """
    parser = argparse.ArgumentParser("memory.py experts")
    parser.add_argument("model", type=Path)
    parser.add_argument("--budget", type=int, metavar="MIB", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--random", type=int, default=1)
    arguments = parser.parse_args()
    options = LoadOptions(
        context_size=2048, budget_bytes=arguments.budget << 20, drafter="none", packed_file="on"
    )
    _say_experts("before the load", edgespec.plan(arguments.model, options))
    with edgespec.load(arguments.model, options) as engine:
        backend, random = engine.backend, Random(arguments.random)
        assert isinstance(backend, LlamaBackend)
        for name, size, count in (
            ("prompt", backend.batch_size, arguments.prompt),
            ("tokens", 1, arguments.tokens),  # the first ones that ask the last layer
            ("tokens behind them", 1, arguments.tokens),
        ):
            tokens = [random.randrange(300, engine.vocab_size) for _ in range(count)]
            before, began = backend.expert_counts, perf_counter()
            used = process_time()
            for start in range(0, len(tokens), size):
                if size == 1:
                    backend.verify(DraftTree.chain(tokens[start : start + 1]))
                    backend.commit([0])
                else:
                    backend.prefill(tokens[start : start + size])
            seconds, after = perf_counter() - began, backend.expert_counts
            read = (after.read_bytes - before.read_bytes) / _MEBIBYTE
            busy = (after.busy_ns - before.busy_ns) / 1e9
            waited = (after.waited_ns - before.waited_ns) / 1e6
            print(
                f"{name}: {read / len(tokens):.1f} MiB a token, {len(tokens) / seconds:.2f} "
                f"tokens/s, {1e3 * seconds / len(tokens):.1f} ms each; threads waited for "
                f"{waited / len(tokens):.1f}, all together, and computed for "
                f"{1e3 * (process_time() - used) / len(tokens):.1f}; the disk was busy for "
                f"{busy / seconds:.0%}, at {read / max(busy, 1e-9):.0f} MiB/s",
                flush=True,
            )
    _say_experts("behind it", edgespec.plan(arguments.model, options))


def _say_experts(when: str, plan: Plan) -> None:
    (said,) = (f"{one.value}, {one.reason}" for one in plan.choices if one.name == "experts")
    low, high = plan.plain_range
    speed = f"{plan.plain_tokens_per_s:.2f} tokens/s ({low:.2f} to {high:.2f})"
    print(f"{when}: {said}; {speed}, {plan.speed_source}", flush=True)


# -- projectors ------------------------------------------------------------------------------


_FEW_LAYERS, _DEEP = 4, (0, 1, 2)
_SIDES_OF_IMAGES = {  # of the one that is timed, and of the largest
    "smolvlm2-500m": (512, 512),
    "qwen3vl-2b": (448, 2048),
    "gemma3-4b": (896, 896),
}


def projectors() -> None:
    """What projectors of real sizes are planned to take, and take, and the time of one image.

    They have random weights, and are written to FOLDER where they are not there yet (2.4 GB). Each
    row is two processes: one plans, loads and times one image (of several pieces the first one, in
    the processor's time); the other has few layers, which take turns in the same buffers, and
    encodes the largest image. The last pair is what is planned for that, and by how much more of
    the process is resident behind it. The exit status is 1 where a pair is off by more than 1%
    and 1 MiB.
    """
    parser = argparse.ArgumentParser("memory.py projectors")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, side = arguments.part
        print(json.dumps(_encode(arguments.folder / name, int(side))))
        return
    failed = 0
    print(f"{'projector':<16}{'weights MiB':>17}{'at first':>17}{'largest image':>17}   one image")
    for name, sides in _SIDES_OF_IMAGES.items():
        _write_projectors(arguments.folder, name)
        command = [sys.executable, __file__, "projectors", str(arguments.folder), "--part"]
        timed, largest = (
            json.loads(subprocess.check_output([*command, part, str(side)], text=True))
            for part, side in zip((name, f"{name}-few"), sides, strict=True)
        )
        pairs = timed["weights"], timed["first"], largest["image"]
        failed |= any(abs(one - other) > max(other / 100, _MEBIBYTE) for one, other in pairs)
        print(
            f"{name:<16}{''.join(_pair(*one) for one in pairs)} {timed['tokens']} tokens, "
            f"{timed['seconds']:.1f} s; largest: {largest['tokens']}",
            flush=True,
        )
    sys.exit(failed)


def _write_projectors(folder: Path, name: str) -> None:
    """One of the sizes that `vision_gguf` has, and the same with few layers."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from vision_gguf import REAL, write_vision

    REAL[f"{name}-few"] = REAL[name]._replace(layers=_FEW_LAYERS, deep=_DEEP)
    for one in (name, f"{name}-few"):
        if not (folder / f"mmproj-{one}.gguf").exists():
            write_vision(folder, one)


def _encode(model: Path, side: int) -> dict[str, Any]:
    """Bytes of a projector, planned and taken, and the time of an image."""
    import os
    import time

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import psutil
    from vision_cases import open_backend
    from vision_gguf import picture, png

    from edgespec.backends.base import ImageRun
    from edgespec.memory.bytes.projector import projector_parts
    from edgespec.memory.device.host import usable_cores
    from edgespec.memory.device.track import give_back_memory
    from edgespec.models.images import read_image
    from edgespec.models.projector import read_projector

    os.environ["EDGESPEC_CACHE"] = str(model.parent / "cache")
    projector = read_projector(model.parent / f"mmproj-{model.name}.gguf")
    planned = {one.name: one.nbytes for one in projector_parts(projector, None, on_gpu=False)}
    backend = open_backend(model.parent, model.name, threads=usable_cores(), batch_size=512)
    told, vision, process = backend.memory_bytes(), backend._context.vision, psutil.Process()
    assert vision is not None
    encode, found = vision._encoded, dict[str, Any]()

    def watched(*given: Any) -> Any:
        give_back_memory()  # of the picture's decoder
        before, began = process.memory_info().rss, time.process_time()
        rows = encode(*given)
        found["seconds"] = time.process_time() - began
        give_back_memory()  # of the pixels
        found["taken"] = process.memory_info().rss - before
        return rows

    setattr(vision, "_encoded", watched)  # noqa: B010 - a method, to mypy
    image = read_image(png(picture(1, side, side)))
    piece = next(one for one in backend.image_pieces(image) if isinstance(one, ImageRun))
    rows = vision.embeddings(piece)
    of_image = planned["projector_compute"] + planned["projector_work"] + 2 * rows.nbytes
    names = "projector", "projector_compute"
    weights, first = ([planned[name], told[name]] for name in names)
    backend.close()
    return {
        **{"weights": weights, "first": first, "image": [of_image, found["taken"]]},
        **{"tokens": len(piece.ids), "seconds": found["seconds"]},
    }


if __name__ == "__main__":
    run(
        __doc__,
        grid=grid,
        peaks=peaks,
        budgets=budgets,
        atlas=atlas,
        frugality=frugality,
        projectors=projectors,
        two=two,
        experts=experts,
    )
