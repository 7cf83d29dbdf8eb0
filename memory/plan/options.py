"""What a load may be told: one table for the Python API, plans and the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgespec.annotations import check_types
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.shape import KV_TYPE_BYTES
from edgespec.option_fields import (
    check_options,
    described,
    layers_of,
    number_or_auto,
    option,
    size_bytes,
    texts_of,
)

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class LoadKeywords(TypedDict, total=False):
        """The fields of `LoadOptions` as keyword arguments."""

        budget_bytes: int | None
        prefer: str
        context_size: int | None
        drafter: str
        draft_model: str | os.PathLike[str] | None
        switch: str | os.PathLike[str] | None
        draft_max: int | None
        kv_type: str | None
        gpu_layers: int | None
        override_tensor: tuple[str, ...] | None
        workers: tuple[str, ...]
        threads: int | None
        backend: str
        device: str
        kernels: str
        exact: bool
        mmproj: str | os.PathLike[str] | None
        image_max_tokens: int | None
        remember: bool
        users: int | None
        latency: float


LLAMACPP, ONNX = "llamacpp", "onnx"
BACKENDS = ("auto", LLAMACPP, ONNX)
DEVICES = ("auto", "cpu", "gpu", "npu")
PREFERENCES = ("speed", "context")
KERNELS = ("auto", "on", "off")
DRAFTS = "Drafts"  # a title in help
_LONGEST_PATTERN, _SHOWN = 4096, 80  # characters


def experts_on_host(layers: int | None = None) -> str:
    """What keeps experts on the host, as `LoadOptions.override_tensor`: of the first `layers`."""
    numbers = "" if layers is None else f"blk\\.({'|'.join(map(str, range(layers)))})"
    return rf"{numbers}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; what is left open is chosen. Raises UnsupportedError where it cannot be.

    All that is known of an option is here: what the command line, variables, files and the
    documentation say of it follows.
    """

    budget_bytes: int | None = option(
        None,
        "Most memory to use: 512MiB, 1.5GiB, 800MB. Default: what is free.",
        python="In bytes, for the whole process.",
        called="--budget",
        read=size_bytes,
        low=1,
        high=1 << 62,
        for_projects=True,
    )
    prefer: str = option(
        "speed",
        "speed, or context (longer, may use a smaller type of KV cache).",
        python="It is what a tight budget is spent on.",
        choices=PREFERENCES,
        noun="preference",
        for_projects=True,
    )
    context_size: int | None = option(
        None,
        "Tokens of context. Default: chosen to fit.",
        called="--ctx --ctx-size -c",
        low=1,
        high=1 << 31,
    )
    drafter: str = option(
        "auto",
        "auto, none (or plain), or a list of suffix, recycling, model, head.",
        python='The list is one text, such as "suffix,recycling"; plain is "none" here.',
        panel=DRAFTS,
    )
    draft_model: str | os.PathLike[str] | None = option(
        None,
        "GGUF file that drafts: a smaller model, a head or an early exit.",
        python="A smaller model has the same vocabulary, a head (EAGLE-3, DFlash) or an early exit "
        'is of this one. With `drafter="auto"` it is used unless it was seen not to pay.',
        also="--model-draft -md",
        panel=DRAFTS,
        for_one=True,
    )
    switch: str | os.PathLike[str] | None = option(
        None,
        "A smaller GGUF writes the tokens it is confident about. Changes the output.",
        python="Of the same vocabulary; faster where the pair allows it, and lossy.",
        panel=DRAFTS,
        for_one=True,
    )
    draft_max: int | None = option(
        None,
        "Most tokens drafted in one step. Default: as many as pay and fit.",
        panel=DRAFTS,
        low=0,
        high=255,
    )
    kv_type: str | None = option(
        None,
        "Type of the KV cache: f16, bf16, f32, q8_0, q4_0, or auto (f16, unless --exact, "
        "--prefer context or ONNX Runtime need another).",
        python="None is auto.",
        choices=tuple(KV_TYPE_BYTES),
        noun="KV cache type",
        none="auto",
        for_projects=True,
    )
    gpu_layers: int | None = option(
        None,
        "Layers on GPUs and workers: a number, all, or auto (as many as fit on a GPU).",
        python="-1 is all. None takes all that fit on a GPU, and leaves as many to workers as is "
        "fastest.",
        also="--n-gpu-layers -ngl",
        none="auto",
        read=layers_of,
        for_projects=True,
    )
    override_tensor: tuple[str, ...] | None = option(
        None,
        "PATTERN=DEVICE,...: tensors whose name the regular expression is found in lie there: "
        "CPU, or a device that `edgespec doctor` names.",
        python="One text for each, whatever layer a tensor is of; the first one that fits counts. "
        "None leaves experts of some layers on the host where that is faster than whole layers; "
        "with an empty tuple no tensor is moved.",
        also="-ot",
        read=texts_of,
    )
    workers: tuple[str, ...] = option(
        (),
        "HOST:PORT,... of `edgespec worker`: machines that lend their devices.",
        python="One text for each.",
        read=texts_of,
    )
    threads: int | None = option(
        None,
        "Most CPU threads; fewer while other programs compute. Default: cores.",
        python="These are the physical cores that this process may use.",
        also="-t",
        low=1,
        high=1 << 16,
    )
    backend: str = option(
        "auto",
        "auto, llamacpp, or onnx (ONNX Runtime).",
        python="onnx converts the file on first use.",
        choices=BACKENDS,
        noun="backend",
    )
    device: str = option(
        "auto",
        "auto, cpu, gpu, or npu (through ONNX Runtime).",
        python="With llama.cpp a GPU is what `gpu_layers` offloads to.",
        choices=DEVICES,
        noun="device",
    )
    kernels: str = option(
        "auto",
        "edgespec's own CPU kernels: auto (if faster), on, off.",
        python="auto uses them where they were measured to be faster than llama.cpp's.",
        choices=KERNELS,
        noun="choice of kernels",
    )
    exact: bool = option(
        False,
        "Use only settings whose output equals plain decoding's.",
        python="In these a token's logits do not depend on what else is in its step.",
        panel=DRAFTS,
    )
    mmproj: str | os.PathLike[str] | None = option(
        None,
        "GGUF file of the projector that sees images, or none. Default: the one mmproj file "
        "beside the model.",
        python="That one is taken if it fits.",
        also="-mm",
    )
    image_max_tokens: int | None = option(
        None, "Most tokens of an image, where the projector leaves it open.", low=1, high=1 << 16
    )
    remember: bool = option(
        False, "Keep prompts and answers on disk, to draft from them later.", panel=DRAFTS
    )
    users: int | None = option(
        1,
        "Answers at the same time, on one cache: a number or auto.",
        python="None is auto.",
        none="auto",
        read=number_or_auto,
        low=1,
        high=64,
        for_projects=True,
        of_servers=True,
    )
    latency: float = option(
        1.0,
        "Most that reading one prompt adds to a step of other answers, in steps.",
        python="With 1.0 these keep half of their speed meanwhile. Each further prompt that waits "
        "adds half as much.",
        low=0.0,
        high=1e6,
        of_servers=True,
    )

    def __post_init__(self) -> None:
        """Refuse values that no model could honour."""
        check_types(self)
        check_options(self)
        for text in self.override_tensor or ():
            pattern, _, device = text.rpartition("=")
            if not pattern or not device.strip() or "\0" in text or len(text) > _LONGEST_PATTERN:
                raise UnsupportedError(
                    f"--override-tensor {text[:_SHOWN]} is not PATTERN=DEVICE",
                    hint=r"for example: --override-tensor 'blk\.[0-3]\.ffn_.*_exps=CPU'",
                )

    @classmethod
    def of(cls, options: LoadOptions | None, **changes: Unpack[LoadKeywords]) -> LoadOptions:
        """`options`, or the defaults, with these changes."""
        return replace(options or cls(), **changes)


LoadOptions.__doc__ = f"{LoadOptions.__doc__}\n{described(LoadOptions)}\n"
