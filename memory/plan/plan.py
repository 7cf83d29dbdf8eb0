"""What is asked of a plan, and the plan: every choice with its reason, and the bytes it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import GPU, HOST, KV_FLOATS, RunConfig, kv_name, padded
from edgespec.memory.bytes.footprint import Component, has_packed_weights, kv_type_fits
from edgespec.memory.bytes.snapshots import most_snapshots
from edgespec.memory.device import host
from edgespec.memory.plan.options import ONNX, LoadOptions
from edgespec.models.early_exit import read_exit
from edgespec.models.pairing import is_translated
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_CONTEXT = 4096
LEAST_CONTEXT = 512  # offered unasked; a question and its answer


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting, its value and why it has it."""

    name: str
    value: str | int
    reason: str


@dataclass(frozen=True, slots=True)
class Request(LoadOptions):
    """What a plan is made for: the options of a load, and how much will be read and written."""

    prompt_tokens: int = 0  # a ceiling is enough
    max_tokens: int = 0
    interface_bytes: int = 0  # of what the process holds besides, such as a line editor
    is_plain_greedy: bool = False  # no answer is sampled, penalised or kept to a grammar
    is_one_text: bool = False  # a prompt and its answer, and no more
    images: int = 0  # and sounds, in the prompt
    sounds_s: tuple[float, ...] = ()  # seconds of each sound
    serves: bool = False  # prompts come by HTTP
    pooling: str | None = None  # that makes vectors of texts, whatever the file is made for
    keeps_to_form: bool = False  # answers may have to keep to a schema or a grammar

    @classmethod
    def loading(cls, options: LoadOptions) -> Request:
        """Of a load alone, whose prompts are not known yet."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(options)})

    @property
    def depth(self) -> int:
        """Tokens in the cache halfway through the answer: where speed is predicted."""
        return self.prompt_tokens + (self.max_tokens or 256) // 2


@dataclass(frozen=True, slots=True)
class ContextRange:
    """Tokens of context that plans of a request may have."""

    least: int  # without which it makes no sense
    longest: int  # of a plan that memory does not limit
    trained: int  # what its models are made for
    reason: str  # for the longest one


def threads_of(request: Request) -> Choice:
    if request.threads is not None:
        return Choice("threads", request.threads, "as asked")
    return Choice("threads", host.usable_cores(), "physical cores this process may use")


def drafter_of(spec: ModelSpec, request: Request) -> Choice:
    """The drafters, by name. Raises UnsupportedError where the model cannot have any."""
    if spec.keeps_state and not spec.has_snapshots:
        state = "a recurrent state that llama.cpp cannot take back"
        if request.drafter not in ("auto", "none"):
            raise UnsupportedError(
                f"{spec.arch} models keep {state}, so drafts cannot be verified",
                hint="leave out --drafter",
            )
        return Choice("drafter", "none", f"{spec.arch} keeps {state}")
    if spec.keeps_state and (request.draft_max or 0) > most_snapshots(spec):
        raise UnsupportedError(
            f"--draft-max {request.draft_max} is not possible: llama.cpp can take back "
            f"{most_snapshots(spec)} tokens of this model's recurrent state",
            hint=f"use --draft-max {most_snapshots(spec)} or less",
        )
    if request.drafter != "auto":
        names = ",".join(name.strip() for name in request.drafter.split(","))
        return Choice("drafter", names, "as asked")
    if request.draft_model is not None:
        reason = "the draft model writes where it is worth its time"
        return Choice("drafter", "suffix,model", reason)
    reason = "drafts what the text has had before; needs no second model, used only where it pays"
    return Choice("drafter", "suffix", reason)


def users_of(specs: Sequence[ModelSpec], request: Request, draft_spec: ModelSpec | None) -> Choice:
    """Generations that may run at once. Raises UnsupportedError where they cannot be so many."""
    unsupported = _single_user_reason(specs, request, draft_spec)
    if request.users is None:
        reason = "at once, in shared steps; --users changes it"
        return Choice("users", 1 if unsupported else 4, unsupported or reason)
    if request.users > 1 and unsupported:
        raise UnsupportedError(
            f"--users {request.users} is not possible: {unsupported}", hint="leave out --users"
        )
    return Choice("users", request.users, "as asked")


def _single_user_reason(
    specs: Sequence[ModelSpec], request: Request, draft_spec: ModelSpec | None
) -> str:
    """Why a cache holds one text, or ""."""
    if request.backend == ONNX or specs[0].format == ONNX_FORMAT:
        return "ONNX Runtime's cache holds one text"
    if len(specs) > 1:
        return "two models write one text in turns"
    if draft_spec is not None and read_exit(draft_spec) is not None:
        return "an early exit follows one text"
    is_head = draft_spec is not None and draft_spec.reads is not None
    if is_head or "head" in request.drafter.split(","):
        return "a head follows one text"
    if specs[0].keeps_state:
        return f"{specs[0].arch} keeps a recurrent state of one text"
    return ""


def contexts_of(specs: Sequence[ModelSpec], request: Request) -> ContextRange:
    """The contexts that a request asks for or needs, no longer than its models are made for.

    Raises UnsupportedError where it asks for more.
    """
    trained = min(spec.context_length or DEFAULT_CONTEXT for spec in specs)
    asked = request.context_size
    if asked is not None:
        if asked > trained:
            raise UnsupportedError(
                f"--ctx {asked} exceeds the {trained} tokens the model is made for",
                hint=f"use --ctx {trained} or less",
            )
        return ContextRange(asked, asked, trained, "as asked")
    needed = request.prompt_tokens + request.max_tokens
    usual, reason = DEFAULT_CONTEXT, "enough for most prompts; --ctx changes it"
    if needed > DEFAULT_CONTEXT:
        usual, reason = padded(needed), "room for the prompt and the answer"
    usual = min(trained, usual)
    least = min(usual, max(LEAST_CONTEXT, padded(needed)))
    if request.prefer == "context":
        return ContextRange(least, trained, trained, "all the model is made for, and it fits")
    return ContextRange(least, usual, trained, reason)


# -- the plan -----------------------------------------------------------------------------

# A draft model writes one token a step; a few more catch up with what others drafted.
DRAFT_MODEL_NODES = 8


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that somebody could prefer: the options that make it, and what they would bring."""

    name: str  # "smaller", "longer context", "faster"
    options: str
    peak_bytes: int
    context_size: int
    tokens_per_s: float


class PlanBase(RunConfig):
    """What plans of models that write text and of those that make embeddings have in common."""

    __slots__ = ()
    components: tuple[Component, ...]
    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, config: RunConfig, **more: Any) -> Self:
        """The plan to load a model like that; `more` are the fields that a plan has besides."""
        return cls(**{one.name: getattr(config, one.name) for one in fields(RunConfig)}, **more)

    @property
    def predicted_peak_bytes(self) -> int:
        """Ceiling of the process's resident memory, GPU memory not counted unless it is shared."""
        return sum(part.nbytes for part in self.components if part.device == HOST)

    @property
    def component_bytes(self) -> dict[str, int]:
        """Bytes by component; those on another device begin with its label, such as `gpu_`."""
        return component_bytes(self.components)

    def as_json(self) -> dict[str, Any]:
        """Choices by name, each with value and reason."""
        return {c.name: {"value": c.value, "reason": c.reason} for c in self.choices}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanBase):
    """The configuration of one run, why it is this one, and what it is expected to take."""

    draft_max: int
    draft_model: Path | None
    draft_mapped: bool
    switch: Path | None
    switch_mapped: bool
    switch_snapshots: int = 0
    remember: bool
    choices: tuple[Choice, ...]
    components: tuple[Component, ...]
    limit_bytes: int
    available_bytes: int
    plain_tokens_per_s: float
    plain_range: tuple[float, float]  # tokens/s, between which it is likely to lie
    tokens_per_s: float
    speed_range: tuple[float, float]
    wanted_context: int  # that it would have if memory were no limit
    wanted_drafts: int
    speed_source: str
    # plans them, and therefore only if asked
    find_alternatives: Callable[[], Iterable[Alternative]] = field(default=tuple, compare=False)
    drafter_is_asked: bool = True  # for by name, and not one that was chosen
    kv_loss: float | None = None  # nats that the type of the cache loses, as measured

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """What a person could prefer: less memory, more context, more speed."""
        return tuple(self.find_alternatives())

    @property
    def kv_type(self) -> str:
        """The type of the cache, or those of its keys and values: "q8_0/q4_0"."""
        return kv_name(self.kv_type_k, self.kv_type_v)

    def of_small(self) -> Plan:
        """How the small model of a switching plan is loaded: as the large one."""
        names = [
            name for name in self.drafter.split(",") if name not in ("model", "head", "window")
        ]
        return replace(
            self,
            switch=None,
            draft_model=None,
            projector=None,
            drafter=",".join(names) or "suffix",
            mapped=self.switch_mapped,
            snapshots=self.switch_snapshots,
            overrides=(),
            head=False,
            captured_layers=(),
            lora=(),
            drafts_itself=False,
            states=0,
            switch_snapshots=0,
        )

    def with_choice(self, choice: Choice) -> Plan:
        """The same plan, which says this first."""
        return replace(self, choices=(choice, *self.choices))

    def with_reason(self, name: str, reason: str) -> Plan:
        """The same plan, which gives another reason for one of its choices."""
        choices = [replace(c, reason=reason) if c.name == name else c for c in self.choices]
        return replace(self, choices=tuple(choices))

    @property
    def is_limited(self) -> bool:
        """Whether more memory would bring a longer context or a larger draft."""
        return (self.context_size, self.draft_max) < (self.wanted_context, self.wanted_drafts)

    @property
    def predicted_gpu_bytes(self) -> int:
        """Ceiling of what is allocated on GPUs of this machine."""
        return sum(part.nbytes for part in self.components if part.device.startswith(GPU))

    def predicted_bytes_of(self, label: str) -> int:
        """Ceiling of what is allocated on one device."""
        return sum(part.nbytes for part in self.components if part.device == label)


def most_leaves(drafter: str, draft_max: int) -> int:
    """Drafts of the text and of a window are chains; others may branch anywhere."""
    is_chain = set(drafter.split(",")) <= {"suffix", "window"}
    return 1 if is_chain else max(1, draft_max)


def component_bytes(components: Sequence[Component]) -> dict[str, int]:
    """Bytes by component; those on another device begin with its label, such as `gpu_`."""
    names = (c.name if c.device == HOST else f"{c.device}_{c.name}" for c in components)
    return {name: c.nbytes for name, c in zip(names, components, strict=True)}


def draft_config(
    config: RunConfig, draft: ModelSpec, target: ModelSpec | None = None, *, mapped: bool = True
) -> RunConfig:
    """How a draft model is loaded beside a model that is loaded as `config` says: in small steps.

    On a GPU with all of its layers where that one uses any. Without a `target` its context, which
    changes no step's time, is as long as the target's.
    """
    context, cells = config.context_size, config.cells if config.users > 1 else 0
    on_gpu = any(not one.worker for one in config.devices)
    if target is not None and draft.reads is None:
        context = min(context, draft.context_length or context)
        if is_translated(target, draft):
            # The first 64 tokens of a text, the last 1,024, and room for drafts up to a multiple of
            # 256. With the last 512 alone a 135M model keeps 95% of what it has right, with 256,
            # which each of several users has, 94% (LOG.md).
            context = min(context, 64 + (1024 if config.users == 1 else 256) + 192)
            cells = config.users * context
    return RunConfig(
        context_size=context,
        cells=cells,
        batch_size=64,
        max_nodes=DRAFT_MODEL_NODES,
        threads=config.threads,
        kv_type_k=_draft_kv_type(draft, config.kv_type_k),
        kv_type_v=_draft_kv_type(draft, config.kv_type_v),
        gpu_layers=-1 if on_gpu else 0,
        mapped=mapped,
        kernels=config.kernels,
        packed_file=config.packed_file and not on_gpu and has_packed_weights(draft),
        tied=draft.tied_embeddings,
        users=config.users,
        whole=any(draft.is_sliding) and draft.reads is None,
    )


def _draft_kv_type(spec: ModelSpec, kind: str) -> str:
    """Type of a draft model's cache whose target keeps values as `kind`: as small, if it can be."""
    return kind if kind not in KV_FLOATS and kv_type_fits(spec, kind) else "f16"
