"""What models of other architectures can: windows that slide take chains, a state nothing back."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llama_cases import (
    LOG_ROUNDING,
    THREADS,
    assert_ceiling,
    feed,
    flat,
    recording,
    settings,
    step,
)
from random_gguf import byte_tokens

import edgespec
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.measure.noise import find_divergence, measure_batch_noise
from edgespec.memory.plan.request import Request
from edgespec.models.spec import read_model_spec
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

WORDS = "to be or not to be that is the question to be or not to be that is the answer "
BYTES = list(WORDS.encode())
END = 257  # id of the end token; 256 is the only merge


def write_random(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A model with a byte vocabulary of 258 tokens. Tensor shapes are (rows, columns)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_tokens(), "Ġt", "<|end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def output_rows(rows: Any) -> Any:
    """Logits with a standard deviation of 8, and an end that never comes."""
    rows[END] = 0.0
    return 8.0 * rows


def write_gemma3(path: Path, window: int, num_layers: int = 4) -> Path:
    """Random weights; layers alternate between sliding and global."""
    source = np.random.default_rng(5)

    def normal(*shape: int) -> Any:
        return source.normal(0.0, shape[-1] ** -0.5, shape)

    keys = {
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": num_layers,
        "feed_forward_length": 128,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    ones = np.ones(64)
    tensors: dict[str, Any] = {
        "token_embd.weight": normal(258, 64),
        "output.weight": output_rows(normal(258, 64)),
        "output_norm.weight": ones,
    }
    for layer in range(num_layers):
        parts = {
            "attn_norm": ones,
            "attn_q": normal(64, 64),
            "attn_k": normal(32, 64),
            "attn_v": normal(32, 64),
            "attn_q_norm": np.ones(32),
            "attn_k_norm": np.ones(32),
            "attn_output": normal(64, 64),
            "post_attention_norm": 2 * ones,
            "ffn_norm": ones,
            "ffn_gate": normal(128, 64),
            "ffn_up": normal(128, 64),
            "ffn_down": normal(64, 128),
            "post_ffw_norm": ones,
        }
        tensors |= {f"blk.{layer}.{name}.weight": values for name, values in parts.items()}
    return write_random(path, "gemma3", keys, tensors)


def write_mamba(path: Path, num_layers: int = 2) -> Path:
    source = np.random.default_rng(6)

    def normal(*shape: int) -> Any:
        return source.normal(0.0, shape[-1] ** -0.5, shape)

    inner, state, rank, kernel = 128, 8, 4, 4
    keys = {
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": num_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    tensors: dict[str, Any] = {
        "token_embd.weight": normal(258, 64),
        "output.weight": output_rows(normal(258, 64)),
        "output_norm.weight": np.ones(64),
    }
    for layer in range(num_layers):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": np.ones(64),
            f"{block}.ssm_in.weight": normal(2 * inner, 64),
            f"{block}.ssm_conv1d.weight": normal(inner, kernel),
            f"{block}.ssm_conv1d.bias": np.zeros(inner),
            f"{block}.ssm_x.weight": normal(rank + 2 * state, inner),
            f"{block}.ssm_dt.weight": normal(inner, rank),
            f"{block}.ssm_dt.bias": np.zeros(inner),
            f"{block}.ssm_a": -np.tile(np.arange(1.0, state + 1), (inner, 1)) / 4,
            f"{block}.ssm_d": np.ones(inner),
            f"{block}.ssm_out.weight": normal(64, inner),
        }
    return write_random(path, "mamba", keys, tensors)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3") / "model.gguf", window=64)


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mamba(tmp_path_factory.mktemp("mamba") / "model.gguf")


def test_a_sliding_window_allows_chains_only(gemma3: Path) -> None:
    backend = LlamaBackend(gemma3, settings())
    capabilities = backend.capabilities
    assert (capabilities.rollback, capabilities.tree, capabilities.truncate) == (True, False, False)
    assert "sliding" in capabilities.reason
    feed(backend, BYTES)
    with pytest.raises(UnsupportedError, match="sliding"):
        backend.verify(DraftTree((1, 2, 3), (-1, 0, 0)))
    assert backend.verify(DraftTree.chain((1, 2, 3))).shape == (3, 258)
    backend.close()


def test_a_sliding_window_is_cut_where_its_cells_are_there_and_else_emptied(gemma3: Path) -> None:
    """They are overwritten only when the window has left them."""
    backend = LlamaBackend(gemma3, settings())
    first = feed(backend, BYTES)
    assert backend.truncate(len(BYTES)) == len(BYTES)
    assert backend.truncate(len(BYTES) - 1) == len(BYTES) - 1 == backend.length
    assert np.abs(feed(backend, BYTES[-1:]) - first).max() < 0.1
    for _ in range(2):
        feed(backend, BYTES * 2)
    assert backend.truncate(len(BYTES)) == 0 == backend.length
    assert np.array_equal(feed(backend, BYTES), first)
    backend.close()


def test_roll_backs_in_a_sliding_window_lose_no_cells(gemma3: Path) -> None:
    """300 tokens, every step with 15 wrong drafts, against a cache that never rolled back.

    Rounding to F16 in the cache moves the logits (standard deviation 8) by less than 0.1; one
    wrong token among those the window shows moves them by more than 1.
    """
    source = random.Random(1)
    text = source.choices(range(256), k=300)
    one, other = LlamaBackend(gemma3, settings()), LlamaBackend(gemma3, settings())
    feed(one, text[:100])
    feed(other, text[:100])
    worst, at = 0.0, 100
    while at < len(text):
        right = text[at : at + source.randint(1, 3)]
        rows = one.verify(DraftTree.chain([*right, *source.choices(range(256), k=15)])).copy()
        one.commit(range(len(right)))
        for row, token in zip(rows, right, strict=False):
            worst = max(worst, float(np.abs(row - step(other, token)).max()))
        at += len(right)
    assert one.length == other.length == 300
    right_row, wrong = step(other, 7), list(text)
    wrong[-30] ^= 1
    one.truncate(0)
    feed(one, wrong)
    mistake = float(np.abs(step(one, 7) - right_row).max())
    one.close()
    other.close()
    assert worst < 0.3 < 0.6 < mistake


def test_a_sliding_window_is_lossless(gemma3: Path) -> None:
    """Prompt and output are longer than the window of 64 tokens.

    F32 weights are not batch-invariant: outputs may part where the target itself is undecided.
    """
    backend = recording(gemma3, settings())
    noise = measure_batch_noise(backend, depths=(40, 200))
    assert noise < 1.0
    engine = Engine(backend, curve=flat(), drafter=SuffixDrafter())
    accepted = compared = 0
    for prompt in (BYTES * 2, list(b"abcdefg " * 20), BYTES[20:60] * 3):
        assert len(prompt) > 64
        plain = engine.generate(prompt, max_tokens=160, speculate=False).token_ids
        result = engine.generate(prompt, max_tokens=160)
        assert len(plain) == len(result.token_ids) == 160
        found = find_divergence(backend, prompt, plain, result.token_ids)
        assert found is None or found.gap <= noise, f"{found}, noise {noise}"
        compared += 160 if found is None else found.position
        accepted += result.counters.accepted_tokens
    assert accepted > 50 and compared > 240
    assert {leaves for _, leaves, _ in backend.seen} == {1}
    backend.close()


@pytest.mark.parametrize("window", [64, 512])
def test_a_plan_is_a_ceiling_for_sliding_caches(tmp_path: Path, window: int) -> None:
    spec = read_model_spec(write_gemma3(tmp_path / "model.gguf", window, num_layers=6))
    plan = make_run_plan(spec, Request(context_size=2048, draft_max=31))
    with load_plan(spec, plan) as engine:
        found = engine.backend.memory_bytes()
    assert_ceiling(found, plan)
    assert found["kv_cache"] == pytest.approx(
        plan.component_bytes["kv_cache"], abs=2 * LOG_ROUNDING
    ), "two caches, two lines of the log"
    assert found["kv_cache"] < 2048 * spec.kv_values_per_token * 2, "layers that slide keep less"


def test_a_recurrent_model_says_what_it_cannot(mamba: Path) -> None:
    backend = LlamaBackend(mamba, settings())
    capabilities = backend.capabilities
    assert (capabilities.rollback, capabilities.tree, capabilities.truncate) == (False,) * 3
    assert "recurrent" in capabilities.reason
    assert backend.max_nodes == 1
    feed(backend, BYTES)
    with pytest.raises(UnsupportedError, match="1 nodes, not 2"):
        backend.verify(DraftTree.chain((1, 2)))
    assert backend.truncate(10) == 0 == backend.length
    backend.close()


def test_a_recurrent_model_decodes_plainly(mamba: Path) -> None:
    """Also right after a longer text, whose state must not be seen."""
    with edgespec.load(mamba, context_size=512, threads=THREADS) as engine:
        assert engine.drafter is None
        first = engine.generate(BYTES, max_tokens=40)
        engine.generate(list(b"something else entirely" * 5), max_tokens=20)
        again = engine.generate(BYTES, max_tokens=40)
        text = list(BYTES)
        for _ in range(40):  # the slow way: everything again for every token
            engine.backend.truncate(0)
            rows = [
                engine.backend.prefill(text[i : i + engine.backend.batch_size])
                for i in range(0, len(text), engine.backend.batch_size)
            ]
            text.append(int(rows[-1].argmax()))
        assert first.token_ids == again.token_ids == tuple(text[len(BYTES) :])
    counters = first.counters
    assert (counters.drafted_tokens, counters.rounds, counters.generated_tokens) == (0, 39, 40)
    assert first.finish_reason == "length"
    assert len(set(first.token_ids)) > 1


def test_a_recurrent_model_refuses_a_drafter(mamba: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot take back") as caught:
        edgespec.load(mamba, context_size=512, drafter="suffix")
    assert "drafter" in caught.value.hint


def test_a_recurrent_state_is_planned(mamba: Path) -> None:
    spec = read_model_spec(mamba)
    plan = make_run_plan(spec, Request(context_size=512))
    with load_plan(spec, plan) as engine:
        found = engine.backend.memory_bytes()
    planned = plan.component_bytes["kv_cache"]
    assert found["kv_cache"] == pytest.approx(planned, abs=LOG_ROUNDING)
    assert os.fspath(spec.path) == os.fspath(mamba)
