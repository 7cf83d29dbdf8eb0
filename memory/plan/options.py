"""What a load may be told: one table for the Python API, plans and the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from edgespec.annotations import check_keywords, check_types
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.memory.bytes.config import KV_TYPE_BYTES
from edgespec.option_fields import (
    check_options,
    layers_of,
    number_or_auto,
    option,
    options_of,
    size_bytes,
    size_or_none,
    texts_of,
)

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class LoadKeywords(TypedDict, total=False):
        """The fields of `LoadOptions` as keyword arguments."""

        budget_bytes: int | None
        prefer: Preference
        context_size: int | None
        drafter: str
        draft_model: str | os.PathLike[str] | None
        switch: str | os.PathLike[str] | None
        draft_max: int | None
        kv_type: KvType | None
        cache_type_k: KvType | None
        cache_type_v: KvType | None
        gpu_layers: int | None
        override_tensor: tuple[str, ...] | None
        workers: tuple[str, ...]
        threads: int | None
        backend: BackendName
        device: DeviceName
        kernels: KernelChoice
        packed_file: KernelChoice
        exact: bool
        mmproj: str | os.PathLike[str] | None
        image_max_tokens: int | None
        lora: Sequence[str]
        remember: bool
        disk_cache_bytes: int | None
        users: int | None


LLAMACPP: Final = "llamacpp"
ONNX: Final = "onnx"
BackendName: TypeAlias = Literal["auto", "llamacpp", "onnx"]
DeviceName: TypeAlias = Literal["auto", "cpu", "gpu", "npu"]
Preference: TypeAlias = Literal["speed", "context"]
KernelChoice: TypeAlias = Literal["auto", "on", "off"]
KvType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "q4_0"]
PREFERENCES, BACKENDS, DEVICES, KERNELS = map(
    get_args, (Preference, BackendName, DeviceName, KernelChoice)
)
DRAFTERS = ("suffix", "recycling", "model", "head", "window")  # edgespec.drafting
DRAFTS = "Drafts"  # a title in help


def experts_on_host(layers: int | None = None) -> str:
    """What keeps experts on the host, as `LoadOptions.override_tensor`: of the first `layers`."""
    numbers = "" if layers is None else f"blk\\.({'|'.join(map(str, range(layers)))})"
    return rf"{numbers}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; what is left open is chosen. Raises UnsupportedError where it cannot be.

    All that is known of an option is here: the command line, variables, files of settings and the
    documentation are made from it.

    Args:
        budget_bytes: Most memory to use: 512MiB, 1.5GiB, 800MB. Default: what is free. More: in
            bytes, for the whole process.
        prefer: speed, or context (longer, may use a smaller type of KV cache).
        context_size: Tokens of context. Default: chosen to fit.
        drafter: auto, none (or plain), or a list of suffix, recycling, model, head. More: in Python
            the list is one text, such as "suffix,recycling", and there is no "plain".
        draft_model: GGUF file that drafts: a smaller model, a head or an early exit. More: a
            smaller model may have any vocabulary, and a head (EAGLE-3, DFlash) or an exit is of
            this one. With `drafter="auto"` it is used unless it was seen not to pay.
        switch: A smaller GGUF writes the tokens it is confident about. Changes the output.
        draft_max: Most tokens drafted in one step. Default: as many as pay and fit.
        kv_type: Type of the KV cache: f16, bf16, f32, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, or auto
            (f16, unless --exact, --prefer context or ONNX Runtime need another). More: None is
            auto. What a type loses with a file is measured by the first load with it.
        cache_type_k: Type of the cache's keys. Default: --kv-type.
        cache_type_v: Type of the cache's values, which lose less. Default: --kv-type.
        gpu_layers: Layers on GPUs and workers: a number, all, or auto (as many as fit on a GPU).
            More: -1 is all, and None is auto: all that fit on a GPU, and on workers as many as is
            fastest.
        override_tensor: PATTERN=DEVICE,...: tensors whose name the regular expression is found in
            lie there: CPU, or a device that `edgespec doctor` names. More: one text for each;
            the first one that fits counts. None leaves experts of some layers on the host where
            that is faster than whole layers; with an empty tuple no tensor is moved.
        workers: HOST:PORT,... of `edgespec worker`: machines that lend their devices. More: one
            text for each.
        threads: Most CPU threads; fewer while other programs compute. Default: cores.
        backend: auto, llamacpp, or onnx (ONNX Runtime). More: onnx converts the file on first
            use.
        device: auto, cpu, gpu, or npu (through ONNX Runtime).
        kernels: edgespec's own CPU kernels: auto (where they fit), on, off.
        packed_file: Keep weights as edgespec's kernels read them in the cache folder, for later
            starts: auto (256 MiB or more, in a quarter of the disk's room), on, off.
        exact: Use only settings whose output equals plain decoding's.
        mmproj: GGUF file of the projector that sees images, or none. Default: the one mmproj file
            beside the model.
        image_max_tokens: Most tokens of an image, where the projector leaves it open.
        lora: FILE[=SCALE] of a LoRA adapter of the model; the scale is 1. More: one text for each.
            A generation's `lora` has other scales.
        remember: Keep prompts and answers on disk, to draft from them later.
        disk_cache_bytes: Most disk for what the KV cache held, over restarts: 4GiB, or 0 for none.
            Default: 4GiB for chat where the disk has four times that free, else none. More: in
            bytes, of all models. None is none, as 0.
        users: Answers at the same time, on one cache: a number or auto. More: None is auto.
    """

    budget_bytes: int | None = option(None, called="--budget", read=size_bytes, low=1, high=1 << 62)
    prefer: Preference = option("speed", choices=PREFERENCES, noun="preference")
    context_size: int | None = option(
        None, called="--ctx --ctx-size -c", low=1, high=1 << 31, by_itself={-1: None, 0: None}
    )
    drafter: str = option("auto", panel=DRAFTS)
    draft_model: str | os.PathLike[str] | None = option(
        None, also="--model-draft -md", panel=DRAFTS, for_one=True
    )
    switch: str | os.PathLike[str] | None = option(None, panel=DRAFTS, for_one=True)
    draft_max: int | None = option(None, panel=DRAFTS, low=0, high=255)
    kv_type: KvType | None = option(
        None, choices=tuple(KV_TYPE_BYTES), noun="KV cache type", none="auto"
    )
    cache_type_k: KvType | None = option(
        None, also="-ctk", choices=tuple(KV_TYPE_BYTES), noun="KV cache type"
    )
    cache_type_v: KvType | None = option(
        None, also="-ctv", choices=tuple(KV_TYPE_BYTES), noun="KV cache type"
    )
    gpu_layers: int | None = option(None, also="--n-gpu-layers -ngl", none="auto", read=layers_of)
    override_tensor: tuple[str, ...] | None = option(None, also="-ot", read=texts_of)
    workers: tuple[str, ...] = option((), read=texts_of)
    threads: int | None = option(
        None, also="-t", low=1, high=1 << 16, by_itself={-1: None, 0: None}
    )
    backend: BackendName = option("auto", choices=BACKENDS)
    device: DeviceName = option("auto", choices=DEVICES)
    kernels: KernelChoice = option("auto", choices=KERNELS, noun="choice of kernels")
    packed_file: KernelChoice = option("auto", choices=KERNELS, noun="choice of a packed file")
    exact: bool = option(False, panel=DRAFTS)
    mmproj: str | os.PathLike[str] | None = option(None, also="-mm")
    image_max_tokens: int | None = option(None, low=1, high=1 << 16)
    lora: Sequence[str] = option((), several=True, for_one=True)
    remember: bool = option(False, panel=DRAFTS)
    disk_cache_bytes: int | None = option(
        None, called="--disk-cache", read=size_or_none, low=0, high=1 << 62
    )
    users: int | None = option(
        1,
        none="auto",
        read=number_or_auto,
        by_itself={"-1": None},
        low=1,
        high=64,
        of_servers=True,
    )

    def __post_init__(self) -> None:
        """Refuse values that no model could honour."""
        named = (self.lora,) if isinstance(self.lora, str) else tuple(self.lora or ())
        object.__setattr__(self, "lora", named)
        check_types(self)
        check_options(self)
        for text in self.override_tensor or ():
            pattern, _, device = text.rpartition("=")
            if not pattern or not device.strip() or "\0" in text or len(text) > 4096:
                raise UnsupportedError(
                    f"--override-tensor {text[:80]} is not PATTERN=DEVICE",
                    hint=r"for example: --override-tensor 'blk\.[0-3]\.ffn_.*_exps=CPU'",
                )

    @property
    def kv_types(self) -> tuple[str, str]:
        """Types of keys and values that are asked for; f16 where nobody says."""
        usual = self.kv_type or "f16"
        return self.cache_type_k or usual, self.cache_type_v or usual

    @property
    def asks_kv_type(self) -> bool:
        """Whether any type of the cache is asked for."""
        return any((self.kv_type, self.cache_type_k, self.cache_type_v))

    @classmethod
    def of(cls, options: LoadOptions | None, **changes: Unpack[LoadKeywords]) -> LoadOptions:
        """`options`, or the defaults, with these changes. Raises TypeError for a name of none."""
        check_keywords(changes, _NAMES, _WORDS)
        with said_as_arguments():
            return replace(options or cls(), **changes)


_SAID = re.compile(r"(?<![\w-])--([a-z][a-z-]*)(?: (\d[\w.]*|[a-z]+\d+_\d|f16|f32))?")


@contextmanager
def said_as_arguments() -> Iterator[None]:
    """Let errors in here speak of Python's arguments, not of options: `context_size=512`."""
    try:
        yield
    except EdgespecError as problem:
        problem.args = (_as_arguments(str(problem)),)
        problem.hint = _as_arguments(problem.hint)
        raise


def _as_arguments(text: str) -> str:
    def argument(said: re.Match[str]) -> str:
        name, value = _WORDS.get(said[1].replace("-", "_")), said[2]
        if name is None:
            return said[0]
        if value is None:
            return name
        if name == "budget_bytes":
            return f"{name}={size_bytes(value)}"
        return f"{name}={value if value.isdecimal() else repr(value)}"

    return _SAID.sub(argument, text)


_NAMES = tuple(one.name for one in fields(LoadOptions))
_WORDS = {
    word.strip("-").replace("-", "_"): name
    for name, known in options_of(LoadOptions).items()
    for word in known.names(name)
}
