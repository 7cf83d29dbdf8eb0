"""Plans for whole runs: the planner, the drafter's tables, and what was measured before.

    request -> candidates -> plan

A request leaves open who drafts and which kernels compute. Every way to settle that is a request
that says more, planned as any other (`planned`): drafters (`candidates`), with edgespec's kernels
and with llama.cpp's.

Imports no inference library and no numpy, so that `edgespec plan` answers at once.

Files that fit where a model does not, smaller ones on this machine or one to be made, are named to
people alone, as headers of other files are read for them: `make_run_plan` refuses in milliseconds.

How many tokens a prompt takes is counted with the model's own vocabulary, which is loaded without
its weights: 0.1 s for 49,152 tokens. No bound by letters would do: a rare script takes a token a
byte, and so do letters that make no word, while usual text takes one for every four.

Of several models in one process, what it has once (interpreter, libraries, the interface) is
counted once, and plans say which of them fit together: nothing is loaded to know it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import prod
from pathlib import Path
from shlex import quote
from typing import TypeVar

from edgespec.decode.generation import LARGE, SMALL
from edgespec.drafting import HEAD, MODEL, WINDOW, drafter_names, tables_bytes
from edgespec.drafting.constants import MOST_DRAWN
from edgespec.errors import DoesNotFitError, EdgespecError, UnsupportedError
from edgespec.memory.bytes.config import HOST, MEBIBYTE, WORKER, RunConfig
from edgespec.memory.bytes.footprint import Component, beside_another
from edgespec.memory.bytes.simulation import simulating
from edgespec.memory.device.bandwidth import is_from_busy_moment, memory_bandwidth
from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds, plan_embedding
from edgespec.memory.plan.machine import Machine, this_machine
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import LEAST_CONTEXT, Choice, Plan, PlanBase, Request, users_of
from edgespec.memory.plan.planner import make_plan
from edgespec.memory.times import SpeedModel, estimated_curve
from edgespec.models.chat import Message, prompt_text
from edgespec.models.early_exit import read_exit
from edgespec.models.heads import DRAFTED, require_head
from edgespec.models.hub.resolve import local_models
from edgespec.models.onnx.facts import check_supported
from edgespec.models.pairing import check_drafter, is_translated
from edgespec.models.projector import projector_beside, read_projector
from edgespec.models.spec import GGUF_FORMAT, ONNX_FORMAT, ModelSpec, read_model_spec
from edgespec.setup.candidates import (
    SMALL_MODEL,
    DraftSource,
    best_drafters,
    source_of,
    window_unsupported,
)
from edgespec.setup.stored import (
    curve_at,
    curve_with,
    known_exact_step,
    plain_key,
    stored_curve,
    stored_kv_losses,
    stored_rounds,
)
from edgespec.switching.planning import check_switch, stored_switch, switch_reason


def make_run_plan(spec: ModelSpec, request: Request, machine: Machine | None = None) -> Plan:
    """The plan of a request on this machine, with everything that was measured earlier.

    llama.cpp runs GGUF files unless ONNX Runtime is asked for, which alone runs ONNX model folders.

    Raises UnsupportedError or DoesNotFitError, as `make_plan` does.
    """
    machine = machine or this_machine(request.workers)
    with simulating():
        sized, is_found = with_projector(spec, request)
        limits = [request.image_max_tokens]  # None leaves it to the projector
        if sized.mmproj is not None and request.image_max_tokens is None:
            projector = read_projector(Path(sized.mmproj))
            tokens = projector.tokens(None)
            limits += (one for one in (2048, 1024, 512, 256) if projector.tokens(one) < tokens)
        for most in limits:
            sized, _ = with_projector(spec, replace(request, image_max_tokens=most))
            try:
                plan = _made(spec, sized, machine)
            except DoesNotFitError:
                if most != limits[-1]:
                    continue
                if not is_found:
                    raise
                plan = _made(spec, replace(sized, mmproj=None), machine)
                reason = "the one beside the model does not fit"
                return plan.with_choice(Choice("mmproj", "none", reason))
            if sized.mmproj is None:
                break
            # Images of a prompt have to fit, and the next one must leave half of the context.
            tokens = 2 * read_projector(Path(sized.mmproj)).tokens(sized.image_max_tokens)
            if (sized.prompt_tokens if sized.images else tokens) <= plan.context_size:
                break
    if plan.projector is None:
        return plan
    name = plan.projector.name
    if most != limits[0]:
        reason = "larger images do not fit, or leave too little of the context"
        plan = plan.with_choice(Choice("image_max_tokens", plan.image_tokens or 0, reason))
    found = "the one beside the model; --mmproj none leaves it out"
    reason = found if is_found else "images are asked for"
    return plan.with_choice(Choice("mmproj", name, reason))


def _made(spec: ModelSpec, request: Request, machine: Machine) -> Plan:
    request, backend = with_backend(spec, request, machine)
    request, source = _for_users(spec, request)

    def drafting(one: Request) -> Plan:
        return best_drafters(spec, one, source, partial(planned, spec, machine=machine))

    plan = best_kernels(spec, request, drafting).with_choice(backend)
    return replace(plan, drafter_is_asked=request.drafter != "auto")


def prepare_kernels(spec: ModelSpec, request: Request) -> None:
    """Hand the kernels to llama.cpp, so that the next plan knows where they do not fit it."""
    asked = request.gpu_layers or 0
    is_elsewhere = asked < 0 or asked > spec.num_layers
    is_possible = request.kernels != "off" and not missing_kernels() and not is_elsewhere
    if request.backend == ONNX or spec.format == ONNX_FORMAT or not is_possible:
        return
    from edgespec.backends.llama.kernels import refusal_of_kernels

    refusal_of_kernels()


def best_kernels(spec: ModelSpec, request: Request, plan_of: Callable[[Request], Plan]) -> Plan:
    """The plan with the kernels whose steps were measured to be faster, as by `bench`.

    Else with edgespec's, where they fit: a file of quantized weights was slower with them on no
    processor that was measured (docs/measurements.md), so nothing is timed before a first load.
    """
    plan = plan_of(request)
    if request.kernels != "auto" or not plan.kernels:
        return plan
    own = replace(plan, kernels=False)
    curves = stored_curve(spec, own), stored_curve(spec, plan)
    if any(one is None or one.contention != 1.0 for one in curves):
        return plan
    other = plan_of(replace(request, kernels="off"))
    speeds = plan.tokens_per_s, other.tokens_per_s
    reason = "{:.1f} tokens/s predicted, {:.1f} with llama.cpp's".format(*speeds)
    return (plan if speeds[0] >= speeds[1] else other).with_reason("kernels", reason)


def _for_users(spec: ModelSpec, request: Request) -> tuple[Request, DraftSource | None]:
    """What may draft besides tables: an early exit or a head for one user, a small model for all.

    Raises UnsupportedError.
    """
    draft_spec, switch_spec = draft_spec_of(spec, request), switch_spec_of(spec, request)
    specs = (spec,) if switch_spec is None else (spec, switch_spec)
    users = int(users_of(specs, request, draft_spec).value)
    if request.mmproj is not None:  # a head or an exit would follow what it cannot read
        return request, None
    source = source_of(spec, request)
    if users > 1:
        return request, source if source is not None and source.kind == SMALL_MODEL else None
    if request.draft_model is not None:  # candidates without it are planned, too
        request = replace(request, users=1)
    return request, source


def planned(spec: ModelSpec, request: Request, machine: Machine) -> Plan:
    """One candidate's plan: its models read, and what earlier runs know put in."""
    draft_spec, switch_spec = draft_spec_of(spec, request), switch_spec_of(spec, request)
    names = "suffix" if request.drafter == "auto" else request.drafter
    plan = make_plan(
        spec,
        request,
        machine,
        partial(speed_model, spec),
        drafter_bytes=tables_bytes(names) + draft_rows_bytes(spec, draft_spec, names),
        draft_spec=draft_spec,
        switch_spec=switch_spec,
        max_step_of=lambda config: known_exact_step(spec, config) if request.exact else None,
        kv_losses=stored_kv_losses(spec),
    )
    if switch_spec is None:
        return plan
    return with_switch(plan, spec, switch_spec, request.depth)


def speed_model(spec: ModelSpec, config: RunConfig) -> SpeedModel:
    """Predicts speed from the stored curve and history, or from bandwidth where there is none."""
    curve = curve_with(spec, config)
    rounds = stored_rounds(spec, config.drafter)
    if curve is not None:
        return SpeedModel(curve, is_measured=True, rounds=rounds)
    nbytes = spec.bytes_per_token
    plain = curve_at(plain_key(spec, config))
    estimate = estimated_curve(nbytes, memory_bandwidth(nbytes), 32, plain)
    return SpeedModel(estimate, False, rounds, is_from_busy_moment(nbytes))


def draft_spec_of(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The draft model that was named. Raises UnsupportedError if it cannot draft for this one."""
    names = () if request.drafter == "auto" else drafter_names(request.drafter)
    if HEAD in names and request.backend == ONNX:
        raise UnsupportedError(
            "ONNX Runtime runs no heads", hint="leave out --backend, or the drafter 'head'"
        )
    if WINDOW in names and (reason := window_unsupported(spec, request)):
        raise UnsupportedError(
            f"the drafter 'window' is not possible: {reason}", hint="leave it out"
        )
    if request.draft_model is None:
        if HEAD in names:
            require_head(spec)
        if MODEL in names:
            raise UnsupportedError(
                "the drafter 'model' needs a draft model", hint="name one with --draft-model FILE"
            )
        return None
    draft_spec = read_model_spec(request.draft_model, heads=True)
    drafts_as = MODEL if draft_spec.reads is None else HEAD
    if names and drafts_as not in names:
        raise UnsupportedError(
            f"--draft-model is not used by --drafter {request.drafter}",
            hint=f"leave out one, or name the drafter '{drafts_as}'",
        )
    check_drafter(spec, draft_spec)
    return draft_spec


def draft_rows_bytes(spec: ModelSpec, draft_spec: ModelSpec | None, names: str) -> int:
    """Bytes of the distributions of drawn nodes, and of the target's that they are held against.

    Or of what carries text over to a draft model.
    """
    if draft_spec is None and not {HEAD, WINDOW} & set(names.split(",")):
        return 0
    if draft_spec is not None and is_translated(spec, draft_spec):
        # Of another vocabulary, whose tokens are not drawn: pieces of text in both, and its texts.
        return 4 << 20
    distributions = MOST_DRAWN * spec.vocab_size * (4 + 8)  # of float32, and of float64
    is_part = draft_spec and (DRAFTED in draft_spec.tensors or read_exit(draft_spec))
    spread = spec.vocab_size * 4 if is_part else 0
    return distributions + spread


def switch_spec_of(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The smaller model that was named. Raises UnsupportedError if it cannot take turns."""
    if request.switch is None:
        return None
    if request.remember:
        raise UnsupportedError(
            "--remember keeps what one model writes, and with --switch two do",
            hint="leave out one of them",
        )
    small = read_model_spec(request.switch)
    check_switch(spec, small)
    return small


def with_switch(plan: Plan, spec: ModelSpec, small: ModelSpec, depth: int) -> Plan:
    """The plan with what taking turns with a smaller model is expected to bring.

    `depth` counts the tokens in the cache where speed is predicted.
    """
    pair = (spec, plan), (small, plan.of_small())
    large_curve, small_curve = (speed_model(*one).curve for one in pair)
    curves = {LARGE: large_curve, SMALL: small_curve}
    why, speed = switch_reason(stored_switch(spec, small), curves, depth, plan.tokens_per_s)
    choices = (*plan.choices, Choice("switch", small.path.name, why))
    low, high = (one * speed / plan.tokens_per_s for one in plan.speed_range)
    return replace(plan, choices=choices, tokens_per_s=speed, speed_range=(low, high))


def with_projector(spec: ModelSpec, request: Request) -> tuple[Request, bool]:
    """The request with a projector's path, or None, and whether the plan may do without it.

    Raises UnsupportedError where one is needed that cannot be used, and as `read_projector`.
    """
    if str(request.mmproj) == "none":
        return replace(request, mmproj=None), False
    reason, is_found = _unsupported_reason(spec, request), request.mmproj is None
    path = projector_beside(spec.path) if request.mmproj is None else Path(request.mmproj)
    if is_found and path is not None and not read_projector(path).fits(spec.embedding_size):
        path = None  # of another model
    if path is None and request.images:
        raise UnsupportedError(
            f"there is no projector beside {spec.path.name}, and the prompt has images or sounds",
            hint="--mmproj FILE names the mmproj file of a model that sees or hears",
        )
    if reason and (request.images or not is_found):
        raise UnsupportedError(f"images are not possible: {reason}")
    if path is None or reason:
        return replace(request, mmproj=None), False
    projector = read_projector(path)
    seen = request.images - len(request.sounds_s)
    cells = seen * projector.cells(request.image_max_tokens)
    cells += sum(map(projector.sound_cells, request.sounds_s))
    request = replace(request, mmproj=path, prompt_tokens=request.prompt_tokens + cells)
    return request, is_found and not request.images


def _unsupported_reason(spec: ModelSpec, request: Request) -> str:
    """What keeps images away, or ""."""
    if request.backend == ONNX or spec.format == ONNX_FORMAT:
        return "ONNX Runtime has models of text alone"
    if request.switch is not None:
        return "with --switch two models write, and one of them sees nothing"
    if "head" in request.drafter.split(","):
        return "a head follows texts alone"
    if request.draft_model is not None and read_model_spec(request.draft_model, heads=True).reads:
        return "a head follows texts alone"
    return ""


def with_backend(spec: ModelSpec, request: Request, machine: Machine) -> tuple[Request, Choice]:
    """The request with a backend, and why it has that one.

    Raises UnsupportedError where options contradict each other or the file.
    """
    asked = request.backend
    if spec.format == ONNX_FORMAT:
        if request.backend == LLAMACPP:
            raise UnsupportedError(
                f"llama.cpp runs GGUF files, and {spec.path} is an ONNX model folder",
                hint="leave out --backend, or name a GGUF file",
            )
        if request.exact:
            # Empty cells lie between the past and the new tokens: sums are taken in another order.
            raise UnsupportedError(
                "--exact is not possible with an ONNX model folder: a token rounds differently "
                "once it is past",
                hint="leave out --exact, or use a GGUF file of this model",
            )
        request = _with_device(replace(request, backend=ONNX), machine)
        return request, Choice("backend", ONNX, "the model is an ONNX folder")
    request = _with_device(request, machine)
    if request.backend == ONNX:
        check_supported(spec)
        reason = "an NPU is ONNX Runtime's" if request.device == "npu" else "as asked"
        return request, Choice("backend", ONNX, reason)
    reason = "as asked" if asked == LLAMACPP else "it runs GGUF files"
    return replace(request, backend=LLAMACPP), Choice("backend", LLAMACPP, reason)


def _with_device(request: Request, machine: Machine) -> Request:
    """The request with what its device means for the other options.

    Raises UnsupportedError where they contradict it.
    """
    if request.device == "npu":
        if request.backend == LLAMACPP:
            raise UnsupportedError(
                "--device npu is not possible with llama.cpp", hint="use --backend onnx"
            )
        return replace(request, backend=ONNX)
    if request.backend == ONNX or request.device not in ("cpu", "gpu"):
        return request
    if request.gpu_layers is not None and (request.gpu_layers == 0) != (request.device == "cpu"):
        raise UnsupportedError(
            f"--device {request.device} and --gpu-layers {request.gpu_layers} contradict each "
            "other",
            hint="leave one of them out",
        )
    if request.device == "gpu" and not machine.accelerators:
        raise UnsupportedError(
            f"--device gpu is not possible: {machine.missing_gpu}",
            hint="`edgespec doctor` says what is missing; or add --backend onnx",
        )
    return replace(request, gpu_layers=0) if request.device == "cpu" else request


def most_prompt_tokens(
    spec: ModelSpec, prompts: Iterable[str | Sequence[Message]], *, raw: bool = False
) -> int:
    """Tokens of the longest prompt, its chat format included; of short ones a ceiling.

    Raises as `models.chat.prompt_text`, and as the tokenizer of the file.
    """
    several = list(prompts)
    words = [
        one if isinstance(one, str) else "".join(str(message["content"]) for message in one)
        for one in several
    ]
    most_bytes = max((len(text.encode(errors="surrogatepass")) for text in words), default=0)
    # Not worth a look: there are at most as many tokens as bytes, and those of a chat format.
    if most_bytes <= 512:
        return most_bytes + 64
    from edgespec.backends.vocabulary import open_vocabulary  # which loads numpy and llama.cpp

    with closing(open_vocabulary(spec)) as tokenizer:
        return max(
            len(
                tokenizer.encode(
                    prompt_text(
                        one,
                        spec.chat_template,
                        bos_token=tokenizer.bos_text,
                        eos_token=tokenizer.eos_text,
                        control_texts=tokenizer.control_texts,
                        raw=raw,
                    )
                )
            )
            for one in several
        )


def plan_or_say_what_fits(
    spec: ModelSpec, request: Request, machine: Machine | None = None
) -> Plan:
    """As `make_run_plan`; what does not fit is refused with files that would."""
    with simulating():
        try:
            return make_run_plan(spec, request, machine)
        except DoesNotFitError as problem:
            if spec.format != GGUF_FORMAT or request.draft_model or request.switch:
                raise
            machine = machine or this_machine(request.workers)
            ways = [*_files_that_fit(spec, request, machine), *_to_be_made(spec, request, machine)]
            if not ways:
                raise
            others = [problem.hint] if "smaller model file" not in problem.hint else []
            raise DoesNotFitError(str(problem), hint="; ".join([*others, *ways])) from None


def _files_that_fit(spec: ModelSpec, request: Request, machine: Machine) -> Iterator[str]:
    """The largest smaller file of this model, beside it or in a cache, that does fit."""
    beside = {one: str(one) for one in spec.path.parent.glob("*.gguf")}
    known = {**{one.path: one.name for one in local_models()}, **beside}
    sizes = {path: path.stat().st_size for path in known if path.exists()}
    smaller = [path for path, size in sizes.items() if size < spec.file_bytes]
    for path in sorted(smaller, key=lambda one: -sizes[one])[:12]:  # up to 0.1 s each
        with suppress(EdgespecError, OSError):
            other = read_model_spec(path)
            # The same network and tokens; whose training, names alone say.
            alike = ("arch", "num_layers", "embedding_size", "tokenizer_hash", "name")
            is_same = all(getattr(spec, name) == getattr(other, name) for name in alike)
            if is_same and other.weight_bytes < spec.weight_bytes:
                plan = make_run_plan(other, request, machine)
                takes = -(-(plan.predicted_peak_bytes + plan.predicted_gpu_bytes) // MEBIBYTE)
                is_beside = path.parent == spec.path.parent  # named as the other one was
                name = str(spec.path.with_name(path.name)) if is_beside else known[path]
                yield f"`{name}` ({other.file_type}) fits in {takes} MiB"
                return


def _to_be_made(spec: ModelSpec, request: Request, machine: Machine) -> Iterator[str]:
    """The file that `quantize fit` would make, if its types get so small."""
    least = replace(
        request,
        budget_bytes=None,
        context_size=request.context_size or max(LEAST_CONTEXT, request.prompt_tokens),
        draft_max=0 if request.draft_max is None else request.draft_max,
    )
    with suppress(EdgespecError):
        needed = make_run_plan(spec, least, replace(machine, free_bytes=1 << 60))
        limit = min(machine.free_bytes, request.budget_bytes or machine.free_bytes)
        left = spec.file_bytes - (needed.predicted_peak_bytes - limit)
        # Other types may be copied, and these are not planned.
        size = int(0.98 * left) // MEBIBYTE
        weights = sum(prod(tensor.dims) for tensor in spec.tensors.values())
        # 2.8 bits of a weight are what `quantize fit` gets down to: Q2_K has 2.6, and heads more.
        if size * MEBIBYTE >= weights * 2.8 / 8 and left < spec.file_bytes:
            made = f"{spec.path.stem}-{size}MiB.gguf"
            names = f"{quote(str(spec.path))} {quote(made)}"
            yield f"`edgespec quantize fit {names} {size}MiB` makes one that fits"


# -- several models in one process: how much each adds, and which fit together -------------

# Of a process, whatever it loads; its runtime, too.
_ONCE = ("interface", "requests", "guests", "process")

Sizes = Mapping[str, int]  # bytes by label of a device
AnyPlan = TypeVar("AnyPlan", bound=Plan | EmbeddingPlan)


def own_bytes(spec: ModelSpec, plan: PlanBase) -> Sizes:
    """What a model adds to a process that has a runtime already."""
    parts = [part for part in plan.components if part.name not in _ONCE]
    sizes = Counter[str]()
    for part in beside_another("", spec, parts):
        sizes[part.device] += part.nbytes
    return sizes


def shared_bytes(spec: ModelSpec, plan: PlanBase) -> int:
    """What the process has once: the rest of a plan."""
    return plan.predicted_peak_bytes - own_bytes(spec, plan)[HOST]


def beside(plan: AnyPlan, others: Sequence[Sizes]) -> AnyPlan:
    """The plan of a model that is loaded beside others: as its own, with their bytes in it."""
    held = sum(sizes.get(HOST, 0) for sizes in others)
    parts = (*plan.components, Component("other_models", held)) if held else plan.components
    return replace(plan, components=parts)


@dataclass(frozen=True)
class Capacity:
    """What the models of a process may take: of each device, and together.

    `shared_bytes` is what it has once.
    """

    there: Sizes
    limit_bytes: int
    shared_bytes: int = 0

    @classmethod
    def of(cls, machine: Machine, budget_bytes: int | None, shared: int = 0) -> Capacity:
        """Of a machine, and of a budget if there is one."""
        gpus = zip(machine.labels, machine.accelerators, strict=True)
        there = {HOST: machine.free_bytes, **{label: gpu.free_bytes for label, gpu in gpus}}
        return cls(there, min(budget_bytes or 1 << 62, 1 << 62), shared)

    def fits(self, models: Sequence[Sizes]) -> bool:
        """Whether all of them may be there at once."""
        total = Counter({HOST: self.shared_bytes})
        for sizes in models:
            total.update(sizes)
        local = sum(size for label, size in total.items() if not label.startswith(WORKER))
        free = self.there
        return local <= self.limit_bytes and all(n <= free.get(i, 0) for i, n in total.items())

    @property
    def host_bytes(self) -> int:
        """The most that the process may hold."""
        return min(self.limit_bytes, self.there[HOST])


def plan_beside(
    spec: ModelSpec,
    request: Request,
    machine: Machine,
    pinned: Sequence[Sizes] = (),
    others: Sequence[Sizes] = (),
) -> tuple[Plan | EmbeddingPlan, bool]:
    """A plan in what pinned models leave, and others as well, where that costs no context.

    Also whether it fits beside all of them. Raises as `make_run_plan` where the pinned ones leave
    too little.
    """
    alone = _made_beside(spec, request, machine, pinned)
    try:
        plan = _made_beside(spec, request, machine, [*pinned, *others]) if others else alone
    except DoesNotFitError:
        return alone, False
    return (alone, False) if plan.context_size < alone.context_size else (plan, True)


def _made_beside(
    spec: ModelSpec, request: Request, machine: Machine, taken: Sequence[Sizes]
) -> Plan | EmbeddingPlan:
    """A plan beside models with these sizes, told with the limits of all of them."""
    total = Counter[str]()
    for sizes in taken:
        total.update(sizes)
    gpus = [
        replace(gpu, free_bytes=max(0, gpu.free_bytes - total[label]))
        for label, gpu in zip(machine.labels, machine.accelerators, strict=True)
    ]
    free = max(0, machine.free_bytes - total[HOST])
    left, asked = replace(machine, free_bytes=free, accelerators=tuple(gpus)), request
    if request.budget_bytes:
        asked = replace(request, budget_bytes=max(1, request.budget_bytes - total.total()))
    limit = min(machine.free_bytes, request.budget_bytes or machine.free_bytes)
    if embeds(spec, request.pooling):
        made = plan_embedding(spec, _for_embedding(spec, asked), request.pooling, left)
        return replace(made, limit_bytes=limit)
    plan = make_run_plan(spec, asked, left)
    return replace(plan, limit_bytes=limit, available_bytes=machine.free_bytes)


def _for_embedding(spec: ModelSpec, request: Request) -> Request:
    """What a request for all models says to one that makes embeddings."""
    asked = request.context_size
    return Request(
        budget_bytes=request.budget_bytes,
        context_size=None if asked is None else min(asked, spec.context_length),
        threads=request.threads,
        gpu_layers=request.gpu_layers,
        kernels=request.kernels,
        interface_bytes=request.interface_bytes,
        serves=request.serves,
    )


@dataclass(frozen=True)
class Planned:
    """A model of a set: its plan and what it adds to the process, or why it cannot be there."""

    spec: ModelSpec
    plan: Plan | EmbeddingPlan | None
    sizes: Sizes
    problem: EdgespecError | None = None

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan | EmbeddingPlan) -> Planned:
        """Of a plan."""
        return cls(spec, plan, own_bytes(spec, plan))


def plan_set(
    specs: Sequence[ModelSpec],
    request: Request,
    machine: Machine,
    pinned: Collection[int] = (),
) -> tuple[list[Planned], Capacity]:
    """Models that one process loads when they are asked for, and what it has for all of them.

    The numbers of `pinned` ones say which stay: these are planned first. Each of the others is
    planned beside those before it where that costs it no context; else it takes turns with them.
    """
    found: dict[int, Planned] = {}
    kept: list[Sizes] = []
    together: list[Sizes] = []
    shared = 0
    for number in sorted(range(len(specs)), key=lambda i: (i not in pinned, i)):
        spec = specs[number]
        try:
            plan, fits = plan_beside(spec, request, machine, kept, together)
        except EdgespecError as problem:
            found[number] = Planned(spec, None, {}, problem)
            continue
        found[number] = one = Planned.of(spec, plan)
        shared = max(shared, shared_bytes(spec, plan))
        if number in pinned:
            kept.append(one.sizes)
        elif fits:
            together.append(one.sizes)
    capacity = Capacity.of(machine, request.budget_bytes, shared)
    return [found[number] for number in range(len(specs))], capacity


def largest_sets(models: Sequence[Sizes], capacity: Capacity) -> Iterator[tuple[int, ...]]:
    """Sets of models that fit together, to which no other can be added; the largest ones first.

    Of more than a dozen models those that follow are left out.
    """
    found: list[set[int]] = []
    numbers = range(min(len(models), 12))
    for count in range(len(numbers), 0, -1):
        for one in combinations(numbers, count):
            is_new = not any(set(one) <= larger for larger in found)
            if is_new and capacity.fits([models[i] for i in one]):
                found.append(set(one))
                yield one
