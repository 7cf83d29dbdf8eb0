"""Models of a model pool that are made up, and a server of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from decoding_cases import VOCAB
from serving_cases import HELLO, TEMPLATE, Speaker
from waiting import PATIENCE_S

from edgespec.decode.engine import Engine
from edgespec.errors import ModelFileError
from edgespec.serve.parsing import Defaults, Limits, ServedModel
from edgespec.serve.pool import Shared, about
from edgespec.serve.server import Server
from edgespec.serve.service import Service
from edgespec.setup.planning import Sizes

SIZE = 100


class Made:
    """A model of some bytes. It is loaded when its gate is open, and fails where told to."""

    def __init__(self, name: str, size: int = SIZE, kind: str = "chat") -> None:
        self.names: tuple[str, ...] = (name, f"{name}.gguf")
        self.kind, self.size = kind, size
        self.sizes: Sizes | None = None
        self.about, self.spec = about(2048, VOCAB), None
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.others: list[int] = []  # models that were there at each load
        self.shared = Shared(Limits())
        self.backends: list[Speaker] = []
        self.setup = ServedModel(self.names, 2048, Defaults(), Limits())

    def plan(self, _pinned: Sequence[Sizes]) -> None:
        if isinstance(self.failure, ModelFileError):
            raise self.failure
        self.sizes = {"host": self.size}

    def load(self, others: Sequence[Sizes], report: Callable[[str, float], None]) -> Service:
        while not self.gate.wait(0.01):
            report("loading", 0.5)
        if self.failure is not None:
            raise self.failure
        self.others.append(len(others))
        self.backends.append(Speaker(f"I am {self.names[0]}."))
        engine = Engine(self.backends[-1], chat_template=TEMPLATE)
        return Service(engine, names=self.names, shared=self.shared, owns_engine=True)


class PoolServer(Server):
    """With its models at hand."""

    models: dict[str, Made]
    address: str

    def ask(self, model: str | None, **fields: Any) -> httpx.Response:
        body = {"messages": HELLO, **({} if model is None else {"model": model}), **fields}
        return httpx.post(f"{self.address}/v1/chat/completions", json=body, timeout=PATIENCE_S)

    def states(self) -> dict[str, str]:
        found = httpx.get(f"{self.address}/v1/models").json()["data"]
        return {one["id"]: one["state"] for one in found}


Start = Callable[..., PoolServer]
