"""The plan's memory against llama.cpp's defaults, and what it costs in speed.

    python benchmarks/frugality.py MODEL [--ctx 4096] [--kv-type f16] [--json OUT]

Three kinds of process, each on its own: llama.cpp as it comes (default parameters, a prompt of 512
tokens, one step over a 64-node draft) for its memory; this engine on a context of that size (ubatch
512, 64-node drafts, mapped weights), and this engine on its plan, alternating, for the speed of
both and the memory of the plan. Generation memory is everything but weights, libraries and
vocabulary: KV cache, compute buffer, logits, drafter tables.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

_REPEATS = 2
_DRAFT = 64
_PROMPTS = 4
_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
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
    command = [sys.executable, __file__, str(arguments.model), "--part", part]
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
    from edgespec.backends.llama.library import LOG, library
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
    allocated = {**LOG.buffer_bytes(), "logits": 4 * (_DRAFT + 1) * vocab_size}
    return {
        "allocated": allocated,
        "generation": _generation_bytes(allocated),
        "peak": peak_resident_bytes(),
    }


def _large(arguments: argparse.Namespace) -> dict[str, Any]:
    """This engine on buffers of llama.cpp's default sizes."""
    from edgespec.backends.llama.backend import LlamaBackend
    from edgespec.backends.llama.context import LlamaSettings
    from edgespec.decode.engine import Engine
    from edgespec.drafting.drafters.suffix import SuffixDrafter
    from edgespec.memory.device.host import usable_cores
    from edgespec.memory.plan.settings import Settings
    from edgespec.models.spec import read_model_spec
    from edgespec.setup.planning import speed_model

    spec = read_model_spec(arguments.model)
    kv, threads = arguments.kv_type, usable_cores()
    backend = LlamaBackend(
        arguments.model,
        LlamaSettings(arguments.ctx, 512, _DRAFT + 1, 1, threads, kv, kv, mapped=True),
    )
    curve = speed_model(spec, Settings(threads, kv, kv, 0, "suffix")).curve.resized(_DRAFT + 1)
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
    from edgespec.measure.prompts import PROMPTS

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


if __name__ == "__main__":
    main()
