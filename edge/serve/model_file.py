"""A model file as the model pool holds it: planned, loaded, closed, by what it was made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.plan import Request
from edgespec.models.onnx.folder import read_model
from edgespec.models.projector import projector_beside, read_projector
from edgespec.models.spec import ModelSpec
from edgespec.serve.embeddings import EmbeddingService
from edgespec.serve.parsing import Defaults, Limits, ServedModel
from edgespec.serve.pool import CHAT, EMBED, Shared, about
from edgespec.serve.service import Service
from edgespec.setup.embedding import Embedder
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import Planned, Sizes, beside, plan_beside, prepare_kernels


@dataclass(eq=False)
class ModelFile:
    """One that can be loaded: it answers chats, or makes embeddings."""

    names: Sequence[str]  # as clients ask for it
    path: Path  # of the file, or of a folder
    request: Request  # how it is loaded
    machine: Machine  # as it is before any model is loaded
    # What all models of a server have in common.
    shared: Shared = field(default_factory=lambda: Shared(Limits()))
    defaults: Callable[[ModelSpec], Defaults] = lambda _: Defaults()  # by what the file says
    planned: Planned | None = None  # with others already, or alone when it is asked for
    _spec: ModelSpec | None = None

    @property
    def spec(self) -> ModelSpec:
        """What the file says of itself. Raises as `read_model`."""
        self._spec = self._spec or read_model(self.path)
        return self._spec

    @property
    def kind(self) -> str:
        """What the file says; a chat where it cannot be read, which its load will tell."""
        try:
            return EMBED if embeds(self.spec, self.request.pooling) else CHAT
        except EdgespecError:
            return CHAT

    @property
    def setup(self) -> ServedModel:
        """What requests are held against. Raises as `read_model`."""
        spec, limits = self.spec, self.shared.limits
        size = self.about.get("context_length") or spec.context_length
        return ServedModel(tuple(self.names), size, self.defaults(spec), limits)

    @property
    def sizes(self) -> Sizes | None:
        """What it adds to the process; None before it was planned."""
        return None if self.planned is None else self.planned.sizes

    def plan(self, pinned: Sequence[Sizes]) -> None:
        """Plan it for a process in which these stay. Raises as `make_run_plan`."""
        self._spec = spec = read_model(self.path)
        if not embeds(spec, self.request.pooling):
            prepare_kernels(spec, self.request)
        made, _ = plan_beside(spec, self.request, self.machine, pinned)
        self.planned = Planned.of(spec, made)

    @property
    def about(self) -> Mapping[str, Any]:
        """What is told of it: null as long as it is not known."""
        one = self.planned
        if one is None or one.plan is None:
            return about(None, None, self._may_take)
        if isinstance(one.plan, EmbeddingPlan):
            size = one.spec.embedding_size
            return {"context_length": one.plan.context_size, "embedding_length": size}
        path = one.plan.projector
        senses = None if path is None else read_projector(path).modalities
        return about(one.plan.context_size, one.spec.vocab_size, senses)

    @cached_property
    def _may_take(self) -> Mapping[str, bool] | None:
        """What its projector takes, as far as files tell before it is planned."""
        asked = self.request.mmproj
        path = projector_beside(self.path) if asked is None else Path(asked)
        if path is None or str(asked) == "none":
            return None
        try:
            return read_projector(path).modalities
        except EdgespecError:  # which its load will tell
            return None

    def load(
        self, others: Sequence[Sizes], report: Callable[[str, float], None]
    ) -> Service | EmbeddingService:
        """What answers requests beside other models. Raises as `load_plan`."""
        one = self.planned
        assert one is not None and one.plan is not None, "it was planned"
        if isinstance(one.plan, EmbeddingPlan):
            embedder = Embedder(beside(one.plan, others), progress=report)
            return EmbeddingService(embedder, self.names[0])
        engine = load_plan(one.spec, beside(one.plan, others), progress=report)
        try:
            return Service(
                engine,
                names=self.names,
                defaults=self.defaults(one.spec),
                plan=one.plan,
                file_name=self.path.name,
                shared=self.shared,
                owns_engine=True,
            )
        except BaseException:
            engine.close()
            raise
