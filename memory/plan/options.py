"""What a load may be told: one table for the Python API, plans and the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgespec.annotations import check_types
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.shape import KV_TYPE_BYTES

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class LoadKeywords(TypedDict, total=False):
        """The fields of `LoadOptions` as keyword arguments."""

        budget_bytes: int | None
        prefer: str
        backend: str
        device: str
        context_size: int | None
        threads: int | None
        kv_type: str | None
        gpu_layers: int | None
        override_tensor: tuple[str, ...] | None
        workers: tuple[str, ...]
        drafter: str
        draft_model: str | os.PathLike[str] | None
        switch: str | os.PathLike[str] | None
        draft_max: int | None
        exact: bool
        remember: bool
        kernels: str
        users: int | None
        latency: float
        mmproj: str | os.PathLike[str] | None
        image_max_tokens: int | None


LLAMACPP, ONNX = "llamacpp", "onnx"
BACKENDS = ("auto", LLAMACPP, ONNX)
DEVICES = ("auto", "cpu", "gpu", "npu")
PREFERENCES = ("speed", "context", "energy")
KERNELS = ("auto", "on", "off")
_LONGEST_PATTERN, _SHOWN = 4096, 80  # characters


def experts_on_host(layers: int | None = None) -> str:
    """What keeps experts on the host, as `LoadOptions.override_tensor`: of the first `layers`."""
    numbers = "" if layers is None else f"blk\\.({'|'.join(map(str, range(layers)))})"
    return rf"{numbers}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; what is left open is chosen. Raises UnsupportedError where it cannot be.

    Args:
        budget_bytes: most memory the whole process may take; None takes what is free.
        prefer: "speed" or "context": what a tight budget is spent on. "energy" is as "speed", and
            drafts are chosen by tokens a joule where the machine counts them.
        backend: "auto", "llamacpp" or "onnx" (ONNX Runtime; converts the file on first use).
        device: "auto", "cpu", "gpu" or "npu"; with llama.cpp a GPU is what `gpu_layers` offloads
            to, an NPU is reached through ONNX Runtime alone.
        context_size: tokens of context; None lets the planner choose.
        threads: most CPU threads; None takes the physical cores this process may use. Steps take
            fewer while other programs compute.
        kv_type: f16, q8_0 or q4_0.
        gpu_layers: layers on GPUs and workers; None takes all that fit on a GPU, and leaves as many
            to workers as is fastest.
        override_tensor: PATTERN=DEVICE each: tensors with a name in which the regular expression is
            found lie there, whatever layer they are of; the first one that fits counts. A device is
            CPU, or one as `edgespec doctor` names it. None leaves experts of some layers on the
            host where that is faster than whole layers; with an empty tuple no tensor is moved.
        workers: HOST:PORT of `edgespec worker` on other machines, whose devices take layers, too.
        drafter: "auto", "none" or a list of `edgespec.drafting.drafters.NAMES`, such as
            "suffix,recycling".
        draft_model: a smaller GGUF model with the same vocabulary, or an EAGLE-3 or DFlash head or
            an early exit of this one, which with `drafter="auto"` are used unless they were seen
            not to pay.
        switch: a smaller GGUF model with the same vocabulary, which writes the tokens
            it is confident about: faster where the pair allows it, and lossy.
        draft_max: most tokens drafted at once.
        exact: only settings in which a token's logits do not depend on what else is in its step.
        remember: keep prompts and answers in the cache directory, to draft from them later.
        kernels: "on" and "off" for edgespec's own matrix kernels on the CPU; "auto" uses them
            where they were measured to be faster than llama.cpp's.
        users: generations that may run at once, on one cache; None lets the planner choose.
        latency: most that reading one prompt may add to a step of other answers, in steps: with 1.0
            these keep half of their speed meanwhile. Each further prompt that waits adds half as
            much.
        mmproj: the projector of a model that sees images, a GGUF file; None takes the one file
            `mmproj*.gguf` beside the model if it fits, and "none" takes none.
        image_max_tokens: most tokens of an image, where the projector leaves it open.
    """

    budget_bytes: int | None = None
    prefer: str = "speed"
    backend: str = "auto"
    device: str = "auto"
    context_size: int | None = None
    threads: int | None = None
    kv_type: str | None = None
    gpu_layers: int | None = None
    override_tensor: tuple[str, ...] | None = None
    workers: tuple[str, ...] = ()
    drafter: str = "auto"
    draft_model: str | os.PathLike[str] | None = None
    switch: str | os.PathLike[str] | None = None
    draft_max: int | None = None
    exact: bool = False
    remember: bool = False
    kernels: str = "auto"
    users: int | None = 1
    latency: float = 1.0
    mmproj: str | os.PathLike[str] | None = None
    image_max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that no model could honour."""
        check_types(self)
        if self.kv_type is not None and self.kv_type not in KV_TYPE_BYTES:
            raise UnsupportedError(
                f"there is no KV cache type {self.kv_type!r}",
                hint=f"use one of {', '.join(KV_TYPE_BYTES)}",
            )
        for name, value, values in (
            ("preference", self.prefer, PREFERENCES),
            ("backend", self.backend, BACKENDS),
            ("device", self.device, DEVICES),
            ("choice of kernels", self.kernels, KERNELS),
        ):
            if value not in values:
                raise UnsupportedError(
                    f"there is no {name} {value!r}", hint=f"use {', '.join(values)}"
                )
        for text in self.override_tensor or ():
            pattern, _, device = text.rpartition("=")
            if not pattern or not device.strip() or "\0" in text or len(text) > _LONGEST_PATTERN:
                raise UnsupportedError(
                    f"--override-tensor {text[:_SHOWN]} is not PATTERN=DEVICE",
                    hint=r"for example: --override-tensor 'blk\.[0-3]\.ffn_.*_exps=CPU'",
                )
        for option, number, low, high in (
            ("--threads", self.threads, 1, 1 << 16),
            ("--draft-max", self.draft_max, 0, 255),
            ("--ctx", self.context_size, 1, 1 << 31),
            ("--budget", self.budget_bytes, 1, 1 << 62),
            ("--users", self.users, 1, 64),
            ("--latency", self.latency, 0.0, 1e6),
            ("--image-max-tokens", self.image_max_tokens, 1, 1 << 16),
        ):
            if number is not None and not low <= number <= high:
                raise UnsupportedError(
                    f"{option} {number} is not possible", hint=f"use {low} to {high}"
                )

    @classmethod
    def of(cls, options: LoadOptions | None, **changes: Unpack[LoadKeywords]) -> LoadOptions:
        """`options`, or the defaults, with these changes."""
        return replace(options or cls(), **changes)
