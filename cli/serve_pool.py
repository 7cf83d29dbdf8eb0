"""The models of `edgespec serve` where there are several: which, and how long each stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from logging import WARNING
from math import inf
from pathlib import Path

from edgespec.cli import options
from edgespec.cli.render import note, printable, size_text
from edgespec.errors import DoesNotFitError, EdgespecError, UnsupportedError
from edgespec.memory.bytes.footprint import RUNTIME_BYTES
from edgespec.memory.bytes.requests import guests_bytes, requests_bytes
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds
from edgespec.memory.plan.machine import this_machine
from edgespec.memory.plan.plan import Request
from edgespec.models.hub.resolve import gguf_files, local_models
from edgespec.models.onnx.folder import read_model
from edgespec.models.projector import is_projector
from edgespec.models.spec import ModelSpec
from edgespec.option_fields import options_of
from edgespec.paths import expanded
from edgespec.serve.model_file import ModelFile
from edgespec.serve.parsing import Defaults, Limits
from edgespec.serve.pool import CHAT, Member, Pool, Shared, keep_alive_of
from edgespec.setup.planning import largest_sets, plan_set, prepare_kernels

_ALWAYS = "always"
_BLOB = "sha256-"  # how Ollama calls files
_SETS = 4  # that are told
_LARGE_VOCABULARY = 262_144  # of a model that nobody has named yet: Gemma's


def make_pool(
    named: Sequence[str],
    choice: options.PoolOptions,
    request: Request,
    plan_options: options.PlanOptions,
    defaults: Callable[[ModelSpec], Defaults],
    any_model: bool,
) -> Pool:
    """The model pool of a command. Those that it names, and pinned ones, are planned now.

    Says what each of these adds, and which sets fit together. Raises ModelNotFoundError,
    ModelFileError or DoesNotFitError for one that it names, also where pinned ones do not fit
    together, and UnsupportedError for options that fit no model.
    """
    for name, known in options_of(Request).items():
        if known.for_one and getattr(request, name):
            raise UnsupportedError(
                f"{known.names(name)[0]} is for one model, and several are served",
                hint="serve that model alone, without --keep-alive and --pin",
            )
    shared, machine = Shared(Limits()), this_machine(request.workers)
    members, ranks, eager = list[Member](), dict[int, int](), list[Member]()
    found = list(_found(named, choice, plan_options))
    for names, path, _ in found:
        file = ModelFile(names, path, request, machine, shared, defaults)
        members.append(Member(file))
    _apply_options(members, choice)
    for one, (_, _, is_named) in zip(members, found, strict=True):
        if is_named or one.is_pinned:  # on the command line: it has to be there
            eager.append(one)
        try:  # what was named, then what has a chat format
            talks = is_named or (one.model.kind == CHAT and bool(one.model.spec.chat_template))
            ranks[id(one)] = -int(is_named) if talks else 1
        except EdgespecError as problem:
            one.problem, ranks[id(one)] = str(problem), 2
            note(f"{printable(one.name)} cannot be loaded: {printable(str(problem))}", WARNING)
    specs = [read_model(one.model.path) for one in eager]
    for spec in specs:
        if not embeds(spec, request.pooling):
            prepare_kernels(spec, request)
    pinned = [number for number, one in enumerate(eager) if one.is_pinned]
    planned, capacity = plan_set(specs, request, machine, pinned)
    for one, plan in zip(eager, planned, strict=True):
        if plan.problem is not None:
            raise plan.problem
        assert plan.plan is not None
        one.model.planned = plan
        size = f"{plan.plan.context_size} tokens of context"
        if isinstance(plan.plan, EmbeddingPlan):
            size = f"embeddings of up to {plan.plan.context_size} tokens"
        pinned_too = ", pinned" if one.is_pinned else ""
        note(
            f"{printable(one.name)} {plan.spec.file_type}: {size}, "
            f"{size_text(sum(plan.sizes.values()))}{pinned_too}"
        )
    if not capacity.fits([planned[number].sizes for number in pinned]):
        held = sum(sum(planned[number].sizes.values()) for number in pinned)
        raise DoesNotFitError(
            f"pinned models take {size_text(held)}, and there are "
            f"{size_text(capacity.host_bytes - capacity.shared_bytes)} for models",
            hint="pin fewer, or raise --budget",
        )
    if len(eager) > 1:
        for together in list(largest_sets([one.sizes for one in planned], capacity))[:_SETS]:
            at_once = " + ".join(printable(eager[number].name) for number in together)
            note(f"at once: {at_once}")
    if not capacity.shared_bytes:  # nothing was planned yet
        once = request.interface_bytes + requests_bytes(0) + guests_bytes(_LARGE_VOCABULARY, 0)
        capacity = replace(capacity, shared_bytes=RUNTIME_BYTES + once)
    # The first one is the default: of what was not named, one that holds conversations.
    members.sort(key=lambda one: ranks[id(one)])
    return Pool(members, capacity, shared=shared, any_model=any_model)


def _found(
    named: Sequence[str], choice: options.PoolOptions, plan_options: options.PlanOptions
) -> Iterator[tuple[list[str], Path, bool]]:
    """Names of each file, which are no other one's, its path, and whether it was named."""
    given: list[tuple[str | None, Path, bool]] = [
        (name, options.model_path(name, plan_options), True) for name in named
    ]
    if choice.folder is not None:
        folder = expanded(choice.folder)
        if not folder.is_dir():
            raise UnsupportedError(f"{folder} is no folder", hint="name one with GGUF files")
        given += [(None, path, False) for path in gguf_files(folder)]
    if choice.any_here:
        given += [(one.name, one.path, False) for one in local_models()]
    if not given:
        if choice.folder is not None or choice.any_here:
            raise UnsupportedError(
                "there is no model here", hint="`edgespec models pull hf:OWNER/REPO` gets one"
            )
        given = [(None, options.model_path(None, plan_options), True)]
    taken, seen = set[str](), set[Path]()
    for name, path, is_named in given:
        if path.resolve() in seen or is_projector(path.name):
            continue
        seen.add(path.resolve())
        wanted = [path.stem, name or str(path), str(path)]
        names = [one for one in dict.fromkeys(wanted) if one not in taken]
        if path.name.startswith(_BLOB):
            names = names[1:] or names
        taken.update(names)
        yield names, path, is_named


def _apply_options(found: Sequence[Member], choice: options.PoolOptions) -> None:
    """What options say of models: names, how long each stays, and which ones always do."""
    for text in choice.alias or ():
        one, alias = _split_named(found, text, "--alias", "NAME=ALIAS")
        one.model.names = (alias, *one.model.names)
    # That of all goes first.
    for text in sorted(choice.keep_alive or (), key=lambda text: "=" in text):
        named, value = found, text
        if "=" in text:
            one, value = _split_named(found, text, "--keep-alive", "NAME=5m")
            named = [one]
        for one in named:
            one.is_pinned = value == _ALWAYS
            one.keep_alive_s = inf if one.is_pinned else keep_alive_of(value, "--keep-alive")
    for text in choice.pin or ():
        _split_named(found, f"{text}=", "--pin", "NAME")[0].is_pinned = True


def _split_named(found: Sequence[Member], text: str, option: str, form: str) -> tuple[Member, str]:
    """The model that NAME=VALUE is about, and the value. With one model NAME may be left out."""
    name, _, value = text.rpartition("=")
    one = next((one for one in found if name in one.model.names), None)
    if one is None and len(found) == 1 and not name:
        return found[0], value
    if one is None:
        names = ", ".join(one.name for one in found)
        raise UnsupportedError(
            f"{option} {text.rstrip('=')} names no model that is served",
            hint=f"write {option} {form}, with one of {names}",
        )
    return one, value
