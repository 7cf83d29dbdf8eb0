"""A GGUF model in ONNX Runtime behind the Backend protocol.

What differs between kinds of graphs (who owns the KV cache, what goes in) is a runner's; which one
is seen from a graph's inputs and outputs. Embeddings come from the GGUF itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, DraftTree, Logits, require_room
from edgespec.backends.ort.providers import CPU_DEVICE, OnnxDevice, open_sessions
from edgespec.backends.ort.split import GqaRunner, SplitRunner, Step, is_split, rope_tables
from edgespec.backends.vocabulary import OwnTokenizer, open_vocabulary
from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.onnx.facts import GraphFacts
from edgespec.models.onnx.folder import FACTS_FILE, GRAPH_FILE
from edgespec.models.onnx.weights import dequantize, raw_rows
from edgespec.models.spec import ModelSpec


class OrtBackend:
    """A converted GGUF model, or an ONNX model folder, in ONNX Runtime.

    Args:
        spec: the GGUF the graph was made from, whose embeddings and vocabulary are read; or the
            folder, whose graph takes ids.
        facts: of the GGUF; None for a folder, whose graph knows them.
        folder: where `model.onnx` (or graphs of fixed shapes, or of parts) and the weights lie.
        place: where it runs; the CPU if left out.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        BackendError: ONNX Runtime cannot load the graph, with its own words.
        UnsupportedError: too little of the graph runs on the device that was asked for.
    """

    pending = 0
    contention = 1.0  # threads take work from each other, so they wait less for a busy core

    def __init__(
        self,
        spec: ModelSpec,
        facts: GraphFacts | None,
        folder: Path,
        settings: RunConfig,
        place: OnnxDevice = CPU_DEVICE,
    ) -> None:
        self.spec, self.settings = spec, settings
        self.context_size = settings.context_size
        # Attention sums a path in another order when its cells lie between those of siblings.
        reason = "a branch rounds differently from a chain" if settings.exact else ""
        self.capabilities = Capabilities(True, not settings.exact, True, reason)
        self._embed: Callable[[Sequence[int]], NDArray[np.float32]] | None = None
        if facts is not None:  # rows of the GGUF's embedding table, [1, n, E] for n tokens
            table, scale = spec.tensors["token_embd.weight"], np.float32(facts.embedding_scale)
            raw = raw_rows(spec.path, table)
            self._embed = lambda tokens: (dequantize(table, raw[list(tokens)]) * scale)[None]
        self.node_share = 1.0  # of the graph's nodes, the part that `place` runs
        with ExitStack() as opened, ThreadPoolExecutor(1) as beside:
            vocabulary = beside.submit(
                open_vocabulary, spec
            )  # both leave Python alone while they read
            opened.callback(_close, vocabulary)
            self._runner: SplitRunner | GqaRunner = opened.enter_context(
                closing(self._open(facts, folder, place))
            )
            self.tokenizer: OwnTokenizer = vocabulary.result()
            if place != CPU_DEVICE:
                where = f"{place.provider} on the {place.kind.upper()}"
                told = f"{where}, with {self.node_share:.0%} of the graph's nodes"
                self.capabilities = replace(self.capabilities, place=told)
            self._opened = opened.pop_all()
        self.tokens: list[int] = []
        self._tree: DraftTree | None = None

    def _open(
        self, facts: GraphFacts | None, folder: Path, place: OnnxDevice
    ) -> SplitRunner | GqaRunner:
        spec, settings = self.spec, self.settings
        capacity = settings.context_size + settings.max_nodes + 1  # room for a padded step, too
        tables = {} if facts is None else rope_tables(spec, facts, capacity)
        windows = {"attention_bias": 0}
        if any(spec.is_sliding):
            windows["attention_bias_window"] = spec.sliding_window

        is_whole = (folder / GRAPH_FILE).exists()
        paths = [folder / GRAPH_FILE] if is_whole else sorted(folder.glob("*.onnx"))
        sessions, self.node_share = open_sessions(
            paths, settings.threads, place, keep=facts is not None
        )
        if facts is None:  # the graph is the one that the folder's facts tell of
            shapes = {info.name: list(info.shape) for info in sessions[0].get_inputs()}
            wanted = {
                f"past_{what}.{layer}": [1, spec.num_kv_heads[layer], "past", length[layer]]
                for layer in range(spec.num_layers)
                for what, length in (("key", spec.key_length), ("value", spec.value_length))
            }
            caches = {name: shape for name, shape in shapes.items() if name.startswith("past_")}
            if caches != wanted or not {"input_ids", "position_ids", "rows"} <= shapes.keys():
                raise ModelFileError(
                    f"the graph in {spec.path} is not the one that {FACTS_FILE} describes",
                    hint="make it again with `edgespec models export`",
                )
        if is_split(sessions[0]):
            return SplitRunner(sessions, tables, windows, settings.context_size)
        widest = max(settings.max_nodes, settings.batch_size, 2)
        sizes = {"capacity": capacity, "max_nodes": settings.max_nodes, "widest": widest}
        return GqaRunner(sessions[0], tables, windows, **sizes)

    # -- Backend protocol ------------------------------------------------------------------

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def max_nodes(self) -> int:
        return min(self.settings.max_nodes, self._runner.max_step or self.settings.max_nodes)

    @property
    def batch_size(self) -> int:
        return min(self.settings.batch_size, self._runner.max_step or self.settings.batch_size)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        require_room(self, len(tokens))
        self._tree = None
        rows = self._step(tokens, range(len(tokens)), None, first_row=len(tokens) - 1)
        self._runner.keep(self.length, range(len(tokens)))
        self.tokens += tokens
        logits: Logits = rows[0]
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        count = len(tree)
        if count > self.max_nodes:
            raise UnsupportedError(f"a step has room for {self.max_nodes} nodes, not {count}")
        if not self.capabilities.tree and not tree.is_chain:
            raise UnsupportedError(f"no branches in this mode: {self.capabilities.reason}")
        require_room(self, count)
        self._tree = tree
        return self._step(tree.tokens, tree.depths(), tree)

    def commit(self, path: Sequence[int]) -> None:
        tree, self._tree = self._tree, None
        assert tree is not None and path[0] == 0, "commit follows verify and keeps the root"
        self._runner.keep(self.length, path)
        self.tokens += [tree.tokens[node] for node in path]

    def truncate(self, length: int) -> int:
        self._tree = None
        del self.tokens[length:]
        return self.length

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the arrays this backend holds; ONNX Runtime's own are not told."""
        return self._runner.memory_bytes()

    def close(self) -> None:
        self._opened.close()

    # -- one step --------------------------------------------------------------------------

    def _step(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        tree: DraftTree | None,
        first_row: int = 0,
    ) -> Logits:
        """Evaluate nodes behind the committed tokens; logits from `first_row` on."""
        count = len(tokens)
        wanted = count - first_row
        if count == 1 and self.settings.exact:
            tokens, depths = (*tokens, tokens[0]), (*depths, 1)
        positions = np.asarray(depths, np.int64) + self.length
        branches = tree is not None and not tree.is_chain
        step = Step(self.length, positions, tree if branches else None, first_row)
        values = self._embed(tokens) if self._embed else np.asarray(tokens, np.int64)[None]
        return self._runner.run(step, values)[:wanted]


def _close(vocabulary: Future[OwnTokenizer]) -> None:
    """Close what another thread opens, when it has; what went wrong there is told elsewhere."""
    if vocabulary.exception() is None:
        vocabulary.result().close()
