"""Plans of models that make embeddings: as long a text as fits, and errors in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bert_gguf import write_random_bert
from random_gguf import F32, write_model

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.device import host
from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds, plan_embedding
from edgespec.memory.plan.machine import this_machine
from edgespec.memory.plan.options import LoadOptions
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """As if it were made for texts of 8,192 tokens with a vocabulary of 30,000."""
    found = read_model_spec(write_random_bert(tmp_path_factory.mktemp("bert") / "bert.gguf"))
    return replace(found, context_length=8192, vocab_size=30_000)


def planned(spec: ModelSpec, budget_bytes: int | None = None, **options: Any) -> EmbeddingPlan:
    machine = this_machine()
    sizes = machine.sizes

    def sized(wanted: Any) -> Any:  # the file itself has shorter texts
        small = [replace(one, spec=replace(one.spec, vocab_size=17)) for one in wanted]
        return sizes(small)

    machine = replace(machine, sizes=sized, free_bytes=8 << 30)
    return plan_embedding(spec, LoadOptions(budget_bytes=budget_bytes, **options), None, machine)


def test_the_longest_text_is_as_long_as_fits(spec: ModelSpec) -> None:
    """A row of the vocabulary for each token of a step is what most bytes go to."""
    usual = planned(spec)
    assert usual.context_size == 2048 and usual.step_tokens == 128
    assert usual.component_bytes["logits"] == 4 * 30_000 * 2048
    budget = usual.predicted_peak_bytes - (60 << 20)
    shorter = planned(spec, budget)
    assert shorter.context_size in (512, 1024) and shorter.predicted_peak_bytes <= budget
    longest = planned(spec, context_size=8192)
    assert longest.batch_size == 8192 and longest.step_tokens == 128


def test_what_does_not_fit_says_its_bytes(spec: ModelSpec) -> None:
    with pytest.raises(DoesNotFitError, match=r"needs \d+ MiB for texts of 64 tokens; budget: 8 "):
        planned(spec, 8 << 20)
    with pytest.raises(DoesNotFitError, match="texts of 8192 tokens") as told:
        planned(spec, 200 << 20, context_size=8192)
    assert told.value.hint == "leave out --ctx"


def test_more_threads_take_larger_steps(spec: ModelSpec) -> None:
    assert [planned(spec, threads=count).step_tokens for count in (1, 4, 8, 64)] == [
        *(128, 128, 256, 512)
    ]


def test_bf16_is_llama_cpps_where_the_processor_multiplies_it(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing_kernels():
        pytest.skip("edgespec has no matrix kernels for this processor or llama.cpp")
    bf16 = {name: replace(one, type=GGML_TYPES[30]) for name, one in spec.tensors.items()}
    file = replace(spec, tensors=bf16)

    def used(spec: ModelSpec, flags: set[str], asked: str = "auto") -> bool:
        monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(flags))
        return planned(spec, kernels=asked, context_size=64).kernels

    assert used(spec, {"avx512_bf16"}) and used(file, {"avx2"})
    assert not used(file, {"avx512_bf16"}) and used(file, {"avx512_bf16"}, "on")


def test_options_about_writing_are_refused(spec: ModelSpec) -> None:
    for options, word in (
        ({"switch": "a.gguf"}, "--switch is about writing text"),
        ({"kv_type": "q8_0"}, "--kv-type is about writing text"),
        ({"backend": "onnx"}, "embeddings are made with llama.cpp"),
        ({"context_size": 9000}, "--ctx 9000 exceeds the 8192 tokens"),
    ):
        with pytest.raises(UnsupportedError, match=word):
            planned(spec, **options)
    for pooling, word in (("best", "there is no pooling 'best'"), ("rank", "no head that ranks")):
        with pytest.raises(UnsupportedError, match=word):
            plan_embedding(spec, LoadOptions(), pooling)


def test_what_a_file_says_of_embeddings(tmp_path: Path, spec: ModelSpec) -> None:
    assert embeds(spec) and spec.pooling.kind == "mean" and not spec.pooling.causal
    writes = read_model_spec(write_model(tmp_path / "llama.gguf", "llama", F32))
    assert not embeds(writes) and writes.pooling.causal
    template = "<q>{query}<d>{document}"
    more = {"tokenizer.chat_template.rerank": template}
    ranks = read_model_spec(write_random_bert(tmp_path / "rank.gguf", pooling=4, more=more))
    assert ranks.pooling.kind == "rank" and ranks.pooling.template == template
