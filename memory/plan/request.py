"""What a person asks of a plan, and what follows from that alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import padded
from edgespec.memory.bytes.snapshots import most_snapshots
from edgespec.memory.device import host
from edgespec.memory.plan.options import ONNX, LoadOptions
from edgespec.models.early_exit import read_exit
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

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
