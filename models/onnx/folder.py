"""ONNX model folders: what `edgespec models export` writes, read without loading weights.

A folder holds the graph, its weights beside it, the tokenizer and the settings it came with, and
`edgespec.json` with what planning needs. All of it is checked before it is used: a folder may have
been downloaded.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.layers import MAX_LAYERS
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, content_hash, read_model_spec

CONTRACT_VERSION = 1
FACTS_FILE = "edgespec.json"
GRAPH_FILE, WEIGHTS_FILE = "model.onnx", "weights.bin"
TOKENIZER_FILE, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    TOKENIZER_FILE,
    TOKENIZER_SETTINGS,
    TEMPLATE_FILE,
)
_EXPORT_AGAIN = "make it again with `edgespec models export`"
_LARGEST_NUMBER = 1 << 31
_LARGEST_TEXT = 1 << 24  # bytes of a settings file


def read_model(path: str | os.PathLike[str]) -> ModelSpec:
    """The facts of a GGUF file or of an ONNX model folder.

    Raises ModelNotFoundError if there is nothing, and ModelFileError if it is no language model.
    """
    return read_folder_spec(Path(path)) if os.path.isdir(path) else read_model_spec(path)


def read_folder_spec(folder: Path) -> ModelSpec:
    """The facts of an ONNX model folder.

    Weights are what a step multiplies by; of the embedding's table only rows are read.

    Raises ModelFileError for a folder that `edgespec models export` did not write or that is
    damaged, and UnsupportedError for one that another version wrote.
    """
    facts = _Facts(folder)
    layers = facts.num_layers
    files = (folder / GRAPH_FILE, folder / WEIGHTS_FILE)
    sizes = [_size(path) for path in files]
    table = min(facts.integer("table_bytes", low=0, high=1 << 62), sizes[1])
    kind = f"INT{facts.integer('bits')}"
    return ModelSpec(
        path=folder,
        files=files,
        file_bytes=sum(sizes),
        weight_bytes=sizes[1] - table,
        fingerprint=content_hash(zip(files, sizes, strict=True)),
        arch=facts.text("arch"),
        name=facts.text("name"),
        file_type=kind,
        num_layers=layers,
        embedding_size=facts.integer("embedding_size"),
        vocab_size=facts.integer("vocab_size"),
        context_length=facts.integer("context_length"),
        feed_forward_size=(facts.integer("feed_forward_size"),) * layers,
        num_heads=(facts.integer("num_heads"),) * layers,
        num_kv_heads=facts.by_layer("num_kv_heads"),
        key_length=facts.by_layer("key_length"),
        value_length=facts.by_layer("value_length"),
        sliding_window=facts.integer("sliding_window", low=0),
        is_sliding=tuple(bool(flag) for flag in facts.by_layer("is_sliding", low=0)),
        is_recurrent_layer=(False,) * layers,
        table_bytes=table,
        type_bytes=((kind, sizes[1] - table), ("F16", table)),
        chat_template=_chat_template(folder, "default"),
        tool_template=_chat_template(folder, "tool_use"),
        bos_id=next(iter(_ids(folder, "bos_token_id")), None),
        eos_id=next(iter(end_ids(folder)), None),
        tokenizer_model="tokenizers",
        tokenizer_hash=_hash(folder / TOKENIZER_FILE),
        format=ONNX_FORMAT,
    )


def end_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a generation, from generation_config.json, else config.json."""
    return _ids(folder, "eos_token_id")


def special_text(folder: Path, which: str) -> str:
    """A special token as chat templates write it: `bos_token`, `eos_token`; may be empty."""
    value = read_settings(folder / TOKENIZER_SETTINGS).get(which)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object of a folder; empty where there is no such file.

    Raises ModelFileError for a file that is something else.
    """
    try:
        if path.stat().st_size > _LARGEST_TEXT:
            raise ModelFileError(f"{path} is too large for settings")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelFileError(f"{path} cannot be read: {problem}", hint=_EXPORT_AGAIN) from problem
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds no settings", hint=_EXPORT_AGAIN)
    return value


class _Facts:
    """The numbers of `edgespec.json`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FACTS_FILE
        if not self.path.is_file():
            raise _no_facts(folder)
        self.values = read_settings(self.path)
        version = self.values.get("contract")
        if version != CONTRACT_VERSION:
            raise UnsupportedError(
                f"{folder} was exported by another version of edgespec (contract {version!r}, "
                f"not {CONTRACT_VERSION})",
                hint=_EXPORT_AGAIN,
            )
        heads = self.values.get("num_kv_heads")
        self.num_layers = len(heads) if isinstance(heads, list) else 0
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise self._bad("num_kv_heads")

    def integer(self, name: str, low: int = 1, high: int = _LARGEST_NUMBER) -> int:
        return self._checked(name, self.values.get(name), low, high)

    def by_layer(self, name: str, low: int = 1) -> tuple[int, ...]:
        values = self.values.get(name)
        if not isinstance(values, list) or len(values) != self.num_layers:
            raise self._bad(name)
        return tuple(self._checked(name, value, low, _LARGEST_NUMBER) for value in values)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._bad(name)
        return "".join(letter for letter in value[:200] if letter.isprintable())

    def _checked(self, name: str, value: Any, low: int, high: int) -> int:
        if not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name)
        return int(value)

    def _bad(self, name: str) -> ModelFileError:
        return ModelFileError(f"{self.path} gives no usable {name!r}", hint=_EXPORT_AGAIN)


def _no_facts(folder: Path) -> ModelFileError:
    """What a folder without `edgespec.json` is instead."""
    if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        return ModelFileError(
            f"{folder} is a Hugging Face model in torch's format",
            hint=f"`edgespec models export {folder}` makes an ONNX folder of it",
        )
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")):
        return ModelFileError(
            f"{folder} was not exported by edgespec: its graph cannot verify drafts",
            hint="`edgespec models export` makes such a folder from the original model",
        )
    if any(folder.glob("*.gguf")):
        return ModelFileError(f"{folder} is a folder", hint="name the .gguf file in it")
    return ModelFileError(
        f"{folder} holds no model", hint="name a GGUF file, or a folder of `edgespec models export`"
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as problem:
        raise ModelFileError(
            f"{path.parent} has no {path.name}, so the export is not whole", hint=_EXPORT_AGAIN
        ) from problem


def _ids(folder: Path, name: str) -> tuple[int, ...]:
    for file in ("generation_config.json", "config.json"):
        value = read_settings(folder / file).get(name)
        values = value if isinstance(value, list) else [value]
        if ids := tuple(number for number in values if isinstance(number, int)):
            return ids
    return ()


def _chat_template(folder: Path, name: str) -> str | None:
    """The folder's own file, else the one of this name in the tokenizer's settings."""
    path = folder / (TEMPLATE_FILE if name == "default" else f"{_MORE_TEMPLATES}/{name}.jinja")
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LARGEST_TEXT) or None
    value = read_settings(folder / TOKENIZER_SETTINGS).get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get(name)
    elif name != "default":
        return None
    return value if isinstance(value, str) and value else None


def _hash(path: Path) -> str:
    digest = blake2b(digest_size=8)
    try:
        digest.update(path.read_bytes())
    except OSError as problem:
        raise ModelFileError(
            f"{path.parent} has no {path.name}", hint="copy it from the original model's folder"
        ) from problem
    return digest.hexdigest()
