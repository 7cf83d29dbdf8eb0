"""The Backend protocol: what the decode loop needs from an inference engine.

A backend holds one sequence of committed tokens in its KV cache. The loop sends a draft tree whose
root is the last emitted token, reads one row of logits per node, and commits the accepted path;
everything else of the step is rolled back. A backend knows nothing about drafters or sampling.

Where the cache holds several sequences (`HoldsSequences`), each of them is such a backend, and one
step may verify the trees of any number of them.

A draft tree is what is verified in one step. Node 0 is the root: the last token that was emitted
and is not in the KV cache yet. Every other node is a drafted continuation of its parent. Positions,
masks and leaves follow from `parents` and are never stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from edgespec.errors import ContextFullError
from edgespec.models.control_texts import ControlTexts
from edgespec.models.images import Image

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

Logits: TypeAlias = "NDArray[np.float32]"
Embeddings: TypeAlias = "NDArray[np.float32]"  # [cells, width]
# Probabilities of all tokens [V], from which a draft's token was drawn; they sum to 1.
DraftDistribution: TypeAlias = "NDArray[np.float64] | NDArray[np.float32]"


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node's parent is the one before it; a range says so at once."""
    if type(parents) is range and parents.step == 1:
        return not len(parents) or parents.start == -1
    return all(parent == node - 1 for node, parent in enumerate(parents))


@dataclass(slots=True)  # not frozen: one is made a step, and that would take three times as long
class DraftTree:
    """Nodes in an order in which parents come before their children; nobody changes a tree.

    >>> tree = DraftTree((11, 12, 13, 14), (-1, 0, 0, 1))   # 11 -> {12 -> 14, 13}
    >>> tree.depths(), tree.leaves(), tree.is_chain
    ([0, 1, 1, 2], [2, 3], False)
    """

    tokens: Sequence[int]  # [n]
    parents: Sequence[int]  # [n], parents[0] == -1 and parents[i] < i
    sources: Sequence[str] = ()  # [n], the drafter of each node, "" for the root; or empty
    distributions: Sequence[
        DraftDistribution | None
    ] = ()  # [n], what each was drawn from; empty: none was drawn

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A tree without branches: each token continues the one before it."""
        return cls(tokens, range(-1, len(tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return is_chain(self.parents)

    def depths(self) -> list[int]:
        """Distance of each node from the root, [n]."""
        depths = [0] * len(self.tokens)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    def leaves(self) -> list[int]:
        """Nodes without children, in node order."""
        inner = set(self.parents)
        return [node for node in range(len(self.tokens)) if node not in inner]

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def child(self, node: int, token: int) -> int:
        """The child of `node` that carries `token`, or -1."""
        tokens, parents = self.tokens, self.parents
        for i in range(node + 1, len(tokens)):
            if tokens[i] == token and parents[i] == node:
                return i
        return -1


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do with the loaded model; `reason` explains a missing one."""

    rollback: bool  # tokens can be taken back, so drafts can be verified
    tree: bool  # sibling branches can be verified in one step
    truncate: bool  # the cache can go back to an earlier committed token
    reason: str = ""
    place: str = ""  # where steps run, if that is not the engine's usual place
    snapshots: int = 0  # tokens of the last step that can be taken back; 0: each that is there


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_text(self) -> str:
        """The begin-of-sequence token as chat templates write it; may be empty."""

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as chat templates write it; may be empty."""

    @property
    def control_texts(self) -> ControlTexts:
        """Texts that become control tokens, which must not be in anybody's words."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; control tokens written in it are recognised, marked ones are text."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (control tokens: none)."""

    def token_text(self, token: int) -> str:
        """The vocabulary's own name of a token, control tokens included."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""


class AnswerFormat(NamedTuple):
    """What an answer keeps to.

    Args:
        kind: "json_schema", "regex" or "grammar" (GBNF or Lark).
        text: of it.
        think_tags: what opens and closes a thought, which may come before the answer and is free.
            The opening one is "" where the prompt ends with it. None for no thought.
        free_after: text that an answer may begin with, which is free behind it; "" for none.
    """

    kind: str
    text: str
    think_tags: tuple[str, str] | None = None
    free_after: str = ""


class Grammar(Protocol):
    """Which tokens may come next, after those accepted so far."""

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""

    def masked(self, logits_row: Logits) -> Logits:
        """A copy of the row, [V], with minus infinity for every token that may not come next."""

    def accept(self, token: int) -> None:
        """Go on after `token`, which must be allowed."""

    def forced(self) -> tuple[Sequence[int], int]:
        """Tokens that have to come next whatever is picked, and how many are surely cut so."""


@runtime_checkable
class MakesGrammars(Protocol):
    """A tokenizer that can tell which tokens keep to a form."""

    def grammar(self, wanted: AnswerFormat) -> Grammar:
        """What may come next. Raises UnsupportedError where the form cannot be read or used."""

    def trial(self, wanted: AnswerFormat) -> Callable[[], object] | None:
        """What finds out what a form takes that nobody asked for lately, or None.

        For up to a second, elsewhere; `grammar` finds it done. Raises as `grammar`, both.
        """


class FillTokens(NamedTuple):
    """Tokens between which a model fills in; -1 for one that it does not have."""

    prefix: int  # before what comes first
    suffix: int
    middle: int  # after it the model writes
    repository: int = -1  # before its name
    file: int = -1  # before the name of each of its files


@runtime_checkable
class FillsIn(Protocol):
    """A tokenizer that knows how its model is asked to fill in the middle of a text."""

    def fill_tokens(self) -> FillTokens | None:
        """The tokens, or None where the vocabulary does not have them."""


class Backend(Protocol):
    """One loaded model with one sequence in its cache."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def context_size(self) -> int:
        """Tokens the cache has room for."""

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""

    @property
    def tokens(self) -> Sequence[int]:
        """Ids of the committed tokens, so that a prompt that begins alike can reuse them."""

    @property
    def pending(self) -> int:
        """Committed tokens that the next step feeds again, besides its nodes; mostly 0."""

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes one verification step may have."""

    @property
    def batch_size(self) -> int:
        """Largest number of tokens one `prefill` may have."""

    @property
    def contention(self) -> float:
        """How many times more threads the backend was loaded with than the last step had.

        1 unless other processes compute.
        """

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append at most `batch_size` tokens and return the logits of the last one, [V].

        Raises ContextFullError before anything is computed when they do not fit.
        """

    def verify(self, tree: DraftTree) -> Logits:
        """Run all nodes in one step and return their logits, [n, V].

        The rows are a view that the next step overwrites. Raises ContextFullError before
        anything is computed when the nodes do not fit.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of `path` (root first) of the last `verify`; roll back the others."""

    def truncate(self, length: int) -> int:
        """Keep at most the first `length` committed tokens; return how many could be kept."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the engine says it allocated, by component."""

    def close(self) -> None:
        """Free everything; safe to call twice."""


@runtime_checkable
class KeepsSnapshots(Backend, Protocol):
    """A model that can take back as many tokens as it keeps snapshots of its recurrent state."""

    def keep_snapshots(self, count: int) -> None:
        """Keep so many from now on, at most those it was opened for; the cache is empty then."""


@runtime_checkable
class KeepsStates(Protocol):
    """A sequence that cannot go back to any token, and may keep states of some prefixes."""

    def stops(self, text: Sequence[int], start: int) -> Sequence[int]:
        """Places behind `start` where reading a text has to stop: its state there is kept."""

    def reach(self, length: int, *, shared: bool = False) -> int:
        """How many tokens `truncate` could keep, or a sequence with which they are `shared`."""


@runtime_checkable
class KeepsLogits(Protocol):
    """A sequence whose last logits are still there where no step was made since."""

    def last_logits(self) -> Logits | None:
        """Those behind its last token, [V]: a view that the next step overwrites; None: gone."""


@runtime_checkable
class ReleasesThreads(Protocol):
    """A backend that keeps something ready for whoever makes its steps, such as threads."""

    def release_threads(self) -> None:
        """The calling thread makes no step soon."""


@runtime_checkable
class HoldsSequences(Protocol):
    """A backend whose cache holds several sequences; it is the first one of them itself."""

    @property
    def sequences(self) -> Sequence[Backend]:
        """All of them. Each may have `context_size` tokens, if the others leave as many cells."""

    @property
    def cells(self) -> int:
        """Tokens the cache has room for, of all sequences together."""

    @property
    def shares_cells(self) -> bool:
        """Whether `share` copies nothing: sequences see the same cells."""

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        """Run trees of different sequences, by their numbers, in one step; read texts in it, too.

        Returns the logits of each tree, [n, V], then those of the last token of each piece, [1, V]:
        views that the next step overwrites. Each sequence then commits its own path; the pieces are
        committed. All nodes and pieces together are at most `max_nodes`, the tokens of pieces at
        most `batch_size`, and no sequence has both. Raises as `verify`.
        """

    def share(self, source: int, target: int, length: int) -> None:
        """Let sequence `target` hold the first `length` committed tokens of another, and no others.

        Cells are shared where the cache can do that. Only where sequences can be truncated.
        """


@dataclass(frozen=True, slots=True)
class ImageRun:
    """A piece of an image in a prompt, which is read at once.

    Args:
        ids: what stands for its cells in the tokens of a text: negative numbers that are made of
            the hash of the image's bytes, so that equal ids are the same image.
        positions: how many it takes of the text's; with M-RoPE fewer than cells.
        image: what it is of.
        index: which piece of it, from 0.
    """

    ids: tuple[int, ...]
    positions: int
    image: Image
    index: int


@runtime_checkable
class SeesImages(Protocol):
    """A backend whose model may have been loaded with a projector for images or sounds."""

    @property
    def sees_images(self) -> bool:
        """Whether it was."""

    @property
    def modalities(self) -> Mapping[str, bool]:
        """Whether it sees images ("vision") and hears sounds ("audio")."""

    def image_pieces(self, image: Image) -> Sequence[Sequence[int] | ImageRun]:
        """What an image becomes in a prompt: token ids, and runs of cells.

        Raises UnsupportedError for an image that cannot be decoded.
        """

    def encode_image(self, run: ImageRun) -> Future[Embeddings]:
        """Begin to compute the embeddings of a piece, beside steps.

        What is cancelled before that has begun is not computed.
        """

    def read_image(self, run: ImageRun) -> Logits:
        """Append a piece of an image as `prefill` does; the logits of its last cell, [V].

        Raises ContextFullError before anything is computed when it does not fit.
        """

    def read_image_parts(
        self, run: ImageRun, rows: Embeddings | None
    ) -> Generator[Logits | None, None, None]:
        """The same in parts, between which other sequences make steps; None before the last one.

        Without its embeddings these are computed first. Closed before its end it takes back what
        it has appended.
        Raises ContextFullError before anything is computed when it does not fit.
        """


@runtime_checkable
class Adapts(Protocol):
    """A backend whose model may have been loaded with LoRA adapters."""

    @property
    def scales(self) -> Sequence[float]:
        """How much of each adapter steps add now; empty where there are none."""

    def adapt(self, scales: Sequence[float]) -> None:
        """Let the next steps of all sequences add so much of each."""


def sequences_of(backend: Backend) -> Sequence[Backend]:
    """All sequences of a backend's cache."""
    return backend.sequences if isinstance(backend, HoldsSequences) else (backend,)


def require_room(backend: Backend, count: int) -> None:
    """Raise ContextFullError unless `count` more tokens fit into the cache."""
    if backend.length + count > backend.context_size:
        raise no_room(backend, count)


def no_room(backend: Backend, count: int) -> ContextFullError:
    """The error where `count` more tokens do not fit into the cache."""
    return ContextFullError(
        f"{count} more tokens do not fit: the context has {backend.context_size} and "
        f"{backend.length} are used",
        hint="raise --ctx, or shorten the prompt",
    )


@runtime_checkable
class KeepsCache(Protocol):
    """A backend whose cache can be written to a file and read back, bit for bit."""

    @property
    def images(self) -> Sequence[Sequence[int]]:
        """The first cell, the cells and the positions of each image that was read."""

    @property
    def splits_cache(self) -> bool:
        """Whether a part of the cells can be written alone, and be read back behind others."""

    def save_cache(self, path: str, start: int = 0, end: int | None = None) -> int:
        """Write the committed cells to a new file; how many bytes it has.

        Only those from `start` to `end`, where the cache can be split.
        """

    def load_cache(
        self,
        path: str,
        tokens: Sequence[int],
        images: Sequence[Sequence[int]] = (),
        start: int = 0,
    ) -> None:
        """Replace the cache by what `save_cache` wrote at the beginning of `path`.

        `tokens` are the ids it was made of, and `images` those it had. Where the cache can be
        split, its first `start` tokens stay. Raises BackendError, with an empty cache, when the
        library does not accept it. The caller makes sure that the file is undamaged.
        """
