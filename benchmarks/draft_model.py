"""Draft models, heads and early exits: what they bring, and what llama.cpp's server makes of them.

python benchmarks/draft_model.py speed TARGET DRAFT --prompts FILE --per-category 2 [--keep]
python benchmarks/draft_model.py agreement TARGET DRAFT --prompts FILE --every 5 --offset 2
python benchmarks/draft_model.py window MODEL --text FILE [--depth 7500] [--tokens 63]
python benchmarks/draft_model.py server LLAMA_SERVER MODEL... [--draft HEAD.gguf]
"""

from __future__ import annotations

import argparse
import json
import statistics
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from shared import read_questions, run, running

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.following import DraftHead
from edgespec.backends.llama.head import (
    BackendWithHead,
    RecurrentBackendWithHead,
    open_head_file,
)
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.bench.switch_calibration import forced_rows
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.drafting import make_drafter
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.model import HeadDrafter, HeadText, ModelDrafter, WritingDrafter
from edgespec.drafting.proposal import EMPTY, Drafter, Proposal, StepContext
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.exits.files import HeadInfo, check_made_for, read_head
from edgespec.exits.target import hyperparameters_of
from edgespec.exits.trainer import LONGEST_RUN, agreement_of
from edgespec.exits.trainer import gains_of as gains_along
from edgespec.measure.noise import find_divergence, measure_batch_noise
from edgespec.measure.timing import expect_slopes, measure_curve, one_step, times_behind
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.head_footprint import HEAD_NODES
from edgespec.memory.device.host import usable_cores
from edgespec.memory.times import CostCurve
from edgespec.models.early_exit import (
    CONTEXT,
    PREFIX,
    WINDOW,
    ExitInfo,
    gains_of,
    read_exit,
    read_made_for,
)
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.gguf.writer import keys_of, text, write_raw
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, HeadSpec, ModelSpec, read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.loading import open_draft_model

# -- speed -----------------------------------------------------------------------------------

_MOST = 4  # forced drafts
_LONG_MS = 1e6  # of a step that is free for more nodes: no real one seems to have lost anything
M = TypeVar("M", bound=ModelDrafter)
H = TypeVar("H", bound=HeadDrafter)


class Free(CostCurve):
    """Steps that seem to cost nothing more for more nodes, so that all are drafted."""

    listener: Callable[[float], None] | None = None

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        """Learn nothing; tell who wants to know."""
        if Free.listener is not None:
            Free.listener(ms)


class Timed(WritingDrafter):
    """Writes down what each round took and what its price was; not those that read a prompt."""

    def price_with(self, target: CostCurve, draft: CostCurve) -> None:
        """Start a new account, at the prices of these curves."""
        self._prices = target, draft
        self.predicted_ms = self.measured_ms = 0.0
        self._round = (0.0, 0.0)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """Draft, and note the price."""
        missing = self._text.num_missing
        proposal = super().propose(context, base)
        self._round = (0.0, 0.0)
        target, draft = self._prices
        if missing <= draft.max_nodes and len(proposal):
            depth, steps = len(self._text.tokens), len(proposal) - 1
            price = draft.step_ms(missing, depth, 1) + steps * draft.step_ms(1, depth)
            price += draft.change_ms * (missing > 1)
            self._round = (
                price + target.step_ms(len(proposal) + 1, context.depth),
                proposal.draft_ms,
            )
        return proposal

    def add_step(self, ms: float) -> None:
        """The target's step of this round took this long."""
        price_ms, draft_ms = self._round
        if price_ms:
            self.predicted_ms += price_ms
            self.measured_ms += draft_ms + ms


class TimedModel(Timed, ModelDrafter):
    """A model that writes its rounds down."""


class TimedHead(Timed, HeadDrafter):
    """A head that does."""


def speed() -> None:
    """Acceptance, price, and whether the controller uses a draft model well.

    DRAFT is a smaller model, an early exit, or a head in a file of its own. Two tables over
    Spec-Bench prompts (first turn, in chat format):

    * forced: 1 to 4 tokens drafted in every round, whatever they cost. Acceptance length, greedy
      output against plain decoding, and the time of a round as the controller predicts it against
      the clock.
    * decided: plain, suffix, and suffix with the draft model in turn; what the controller makes of
      it.

    With `--keep` the file of a head that edgespec trained promises from now on what forced rounds
    of 1, 2, ... drafts brought here, in place of what they did on its own text: plans believe it.
    """
    parser = argparse.ArgumentParser("draft_model.py speed")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, nargs="*", help="tokens to force, not 1 to 4")
    parser.add_argument("--only", choices=("forced", "decided"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = arguments.drafts or list(range(1, _MOST + 1))
    is_forced = arguments.only in (None, "forced") and counts == list(range(1, len(counts) + 1))
    if arguments.keep and not (is_forced and read_made_for(arguments.draft)):
        parser.error("--keep takes a head of edgespec's, and forced rounds of 1, 2, ... drafts")
    bench = Bench(arguments)
    document: dict[str, Any] = {
        "target": Path(arguments.target).name,
        "draft": Path(arguments.draft).name,
    }
    tables: dict[str, Callable[[], Any]] = {
        "forced": lambda: [bench.forced(count) for count in counts],
        "decided": bench.decided,
    }
    for name, measure in tables.items():
        if arguments.only in (None, name):
            document[name] = measure()
    print(json.dumps(document, indent=1))
    if arguments.keep:
        lengths = [1.0, *(row["acceptance_length"] for row in document["forced"])]
        keep(Path(arguments.draft), [after - before for before, after in pairwise(lengths)])
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def keep(path: Path, gains: Sequence[float]) -> None:
    """Write what further drafts add to the tokens of a round into a head's file."""
    made, file = read_made_for(path), read_gguf(path)
    assert made is not None, "a head that edgespec trained"
    data = path.read_bytes()
    count, keys = keys_of(file, data[: file.data_offset])
    report = json.dumps({**made.report, "gains": list(gains), "gains_of": "answers to prompts"})
    before = text(f"{PREFIX}.report", file.text(f"{PREFIX}.report"))
    assert keys.count(before) == 1
    keys = keys.replace(before, text(f"{PREFIX}.report", report))
    tensors = [
        (
            one.name,
            one.dims,
            GGML_NUMBERS[one.type.name],
            data[one.offset : one.offset + one.data_bytes],
        )
        for one in file.tensors
    ]
    write_raw(path, count, keys, tensors)


def _settings(max_nodes: int, max_leaves: int) -> RunConfig:
    return RunConfig(
        3072,
        128,
        max_nodes,
        max_leaves,
        usable_cores(),
        kv_type_k="bf16",
        kernels=not refusal_of_kernels(),
    )


class Bench:
    """Both models, loaded once."""

    _early_exit: ExitInfo | None = None

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._max_tokens = arguments.max_tokens
        self._spec = read_model_spec(arguments.target)
        draft_spec = read_model_spec(arguments.draft, heads=True)
        check_pair(self._spec, draft_spec)
        self._target: LlamaBackend
        self._draft: LlamaBackend | DraftHead
        made = None if draft_spec.reads is None else read_made_for(arguments.draft)
        self._promised = () if made is None else gains_of(made.report)
        if draft_spec.reads is None:
            self._target = LlamaBackend(arguments.target, _settings(max_nodes=16, max_leaves=8))
            self._draft = open_draft_model(draft_spec, self._spec, _settings(8, 1))
            self._early_exit = read_exit(draft_spec)
        else:
            settings = _settings(max_nodes=16, max_leaves=1)
            followed = BackendWithHead(arguments.target, settings)
            self._target = followed
            self._draft = followed.open_head(partial(open_head_file, draft_spec, _settings(8, 1)))
        self._vocab_size = self._target.tokenizer.vocab_size
        questions = read_questions(arguments.prompts, arguments.per_category)
        self._prompts = [question["turns"][0] for question in questions]

    def _curves(self) -> tuple[CostCurve, CostCurve]:
        self._target.truncate(0)
        curves = []
        for backend, most in ((self._target, 16), (self._draft, 8)):
            curves.append(measure_curve(partial(one_step, backend), most, seconds=1.5))
        expect_slopes(curves[0], self._spec)
        times = times_behind(self._target, self._draft, curves[1])
        return curves[0], curves[1].scaled(times)

    def _engine(self, curve: CostCurve, drafter: Drafter | None) -> Engine:
        return Engine(
            self._target,
            curve=curve,
            drafter=drafter,
            chat_template=self._spec.chat_template,
        )

    def _generate(self, engine: Engine, prompt: str, **options: Any) -> Result:
        return engine.generate(prompt, max_tokens=self._max_tokens, **options)

    def _drafter(self, curve: CostCurve, model: type[M], head: type[H]) -> M | H:
        """One whose steps take what a curve says: of the first class for a model."""
        if isinstance(self._draft, DraftHead):
            return head(HeadText(self._draft), curve, self._vocab_size, self._promised)
        return model(self._draft, curve, self._vocab_size, early_exit=self._early_exit)

    def _forced(self) -> TimedModel | TimedHead:
        free = Free([float("inf"), *[1e-4] * 8])
        drafter = self._drafter(free, TimedModel, TimedHead)
        drafter.price_with(free, free)
        return drafter

    def forced(self, count: int) -> dict[str, Any]:
        """Rounds of exactly `count` drafts."""
        drafter = self._forced()
        drafter.price_with(*self._curves())
        Free.listener = drafter.add_step
        engine = self._engine(Free([float("inf"), *[_LONG_MS] * (count + 1)]), drafter)
        capabilities = self._target.capabilities
        self._target.capabilities = replace(capabilities, tree=False)
        same, unexplained, noise = 0, 0, measure_batch_noise(self._target)
        rounds = accepted = 0
        for prompt in self._prompts:
            result = self._generate(engine, prompt)
            plain, counters = self._generate(engine, prompt, speculate=False), result.counters
            parted = find_divergence(
                self._target, engine.encode(prompt), plain.token_ids, result.token_ids
            )
            same += parted is None
            unexplained += parted is not None and parted.gap > noise
            rounds, accepted = rounds + counters.rounds, accepted + counters.accepted_tokens
        self._target.capabilities = capabilities
        Free.listener = None
        return {
            "drafted": count,
            "acceptance_length": 1 + accepted / rounds,
            "identical": f"{same} of {len(self._prompts)}",
            "unexplained": unexplained,
            "batch_noise": noise,
            "predicted_s": drafter.predicted_ms / 1e3,
            "measured_s": drafter.measured_ms / 1e3,
        }

    def decided(self) -> dict[str, Any]:
        """Tokens/s of each way, in turn on every prompt."""
        target, draft = self._curves()
        ways: dict[str, Drafter | None] = {
            "plain": None,
            "suffix": CombinedDrafter([SuffixDrafter()]),
            "suffix,model": CombinedDrafter(
                [SuffixDrafter(), self._drafter(draft, ModelDrafter, HeadDrafter)]
            ),
        }
        seconds: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        drafted: Counter[str] = Counter()
        names = list(ways)
        for number, prompt in enumerate(self._prompts):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                counters = self._generate(self._engine(target, ways[name]), prompt).counters
                tokens[name] += counters.accepted_tokens + counters.rounds
                seconds[name] += counters.decode_s  # type: ignore[assignment]
                if name == "suffix,model":
                    drafted += counters.drafted_by
        speeds = {name: tokens[name] / seconds[name] for name in ways}
        return {
            "tokens_per_s": speeds,
            "ratio_to_plain": {name: speed / speeds["plain"] for name, speed in speeds.items()},
            "drafted_by": dict(drafted),
        }


# -- agreement -------------------------------------------------------------------------------

_CONTEXT, _NODES = 4096, 32
_STRETCH = CONTEXT - WINDOW  # tokens after which an exit begins anew

Hits = NDArray[np.bool_]
Answer = tuple[list[int], list[int]]  # tokens of a prompt, and of what follows


class _Exit:
    """An early exit, or any other model that drafts."""

    def __init__(self, spec: ModelSpec, path: Path, window: int | None) -> None:
        draft_spec = read_model_spec(path)
        check_pair(spec, draft_spec)
        info = read_exit(draft_spec)
        assert info is not None, "not an early exit"
        self._ids, self._window = info.token_ids, window or WINDOW
        settings = RunConfig(_CONTEXT, 128, _NODES, 1, usable_cores())
        self._draft = open_draft_model(draft_spec, spec, settings)
        self.close = self._draft.close

    def hits(self, answers: Sequence[Answer]) -> list[Hits]:
        """Whether its best token is that of each answer, [n]."""
        found: list[Hits] = []
        for prompt, output in answers:
            best = [
                self._ids[row.argmax()]
                for start in range(0, len(output), _STRETCH)
                for row in forced_rows(
                    self._draft,
                    [*prompt, *output[:start]][-self._window :],
                    output[start : start + _STRETCH],
                )
            ]
            found.append(np.array(best) == np.array(output))
        return found


class _Head:
    """A head of `edgespec draft train --kind eagle3`."""

    def __init__(self, spec: ModelSpec, info: HeadInfo) -> None:
        import torch

        from edgespec.exits.eagle import head_shape, values_of
        from edgespec.exits.network import Weights

        check_made_for(spec, info)
        torch.set_num_threads(usable_cores())
        self._spec, self._info = spec, info
        self._shape = head_shape(hyperparameters_of(spec))
        self._embedding = Weights(spec, torch.float32).embedding()
        self._values = values_of(info)

    def hits(self, answers: Sequence[Answer]) -> list[Hits]:
        """Whether the 1st, 2nd, ... token that it drafts is that of each answer, [drafts, n].

        The target's blocks are made numbers of once, for all answers.
        """
        import torch

        from edgespec.exits.network import target_states

        layers = self._info.layers
        tokens = [np.array([*prompt, *text], np.int32) for prompt, text in answers]
        states = target_states(self._spec, tokens, layers)
        return [
            self._hits(answer, torch.cat([states[layer][number] for layer in layers], 1))
            for number, answer in enumerate(answers)
        ]

    def _hits(self, answer: Answer, rows: Any) -> Hits:
        import torch

        from edgespec.exits.eagle import unrolled
        from edgespec.exits.network import rms_norm

        values, (prompt, text) = self._values, answer
        tokens = torch.tensor([*prompt, *text])
        embeddings = self._embedding[tokens[1:-1]][None]
        found = []
        with torch.inference_mode():
            known = rows[None, :-2].float()
            for state in unrolled(self._shape, values, embeddings, known, LONGEST_RUN):
                asked = state[0, len(prompt) - 2 :]
                normed = rms_norm(asked, values["output_norm.weight"], self._shape.epsilon)
                best = (normed @ values["output.weight"].T).argmax(1).numpy()
                found.append(self._info.token_ids[best] == np.array(text))
        return np.stack(found)

    def close(self) -> None:
        """Nothing is held."""


def agreement() -> None:
    """How often a drafter's best token is the target's, along the target's own greedy answers.

    DRAFT is an early exit or a head. The target answers every so many-th prompt (first turn, chat
    format); the drafter then reads the answers. Agreement is the part of places where both best
    tokens are the same; tokens a round are those of decoding with so many drafts in every round,
    walked along the answers. A head is computed in torch, from states of the target in bfloat16.
    """
    parser = argparse.ArgumentParser("draft_model.py agreement")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, metavar="K")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--window", type=int, help="tokens before the text; default: the exit's")
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text().splitlines()[arguments.offset :: arguments.every]
    spec, path = read_model_spec(arguments.target), Path(arguments.draft)
    head, answers, categories = read_head(path), list[Answer](), list[str]()
    with edgespec.load(spec.path, drafter="none", context_size=_CONTEXT) as engine:
        for line in lines:
            question = json.loads(line)
            prompt = engine.encode(question["turns"][0])
            text = engine.generate(prompt, max_tokens=arguments.max_tokens).token_ids
            answers.append((list(prompt), list(text)))
            categories.append(question["category"])
    made = _Exit(spec, path, arguments.window) if head is None else _Head(spec, head)
    with closing(made) as draft:
        found = draft.hits(answers)
    hits: dict[str, list[Hits]] = defaultdict(list)
    for category, row in zip(categories, found, strict=True):
        hits[category].append(row)
    everything = [row for rows in hits.values() for row in rows]
    lengths = 1.0 + np.cumsum(gains_along(everything))
    print(f"{len(everything)} answers, agreement {agreement_of(everything):.3f}")
    print("tokens a round:", ", ".join(f"{n}: {lengths[n - 1]:.2f}" for n in (1, 2, 4, 8)))
    for name, rows in hits.items():
        print(f"{name:<16} {agreement_of(rows):.2f}")


# -- window ---------------------------------------------------------------------------------


def window() -> None:
    """The model drafting for itself over a window, behind a text that does not repeat.

    Plainly, with `suffix` and with `suffix,window`, in turns, behind the first tokens of the text.
    One thread: processor time counts beside other programs, too.
    """
    parser = argparse.ArgumentParser("draft_model.py window")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=7500)
    parser.add_argument("--tokens", type=int, default=63)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    size = chosen.depth + chosen.tokens + 64
    spent: dict[str, list[float]] = {"none": [], "suffix": [], "suffix,window": []}
    with edgespec.load(
        chosen.model, context_size=size, drafter="suffix,window", users=1, threads=1
    ) as engine:
        prompt = engine.encode(chosen.text.read_text())[: chosen.depth]
        drafter: Any = engine.drafter
        drafters = {"suffix": make_drafter("suffix"), "suffix,window": drafter}
        engine.generate(prompt, max_tokens=1, reuse=True)
        for number in range(chosen.rounds):
            for name, times in spent.items():
                engine.drafter = drafters.get(name)
                found = engine.generate(
                    prompt,
                    max_tokens=chosen.tokens,
                    sampling=SamplingParams(temperature=chosen.temperature, seed=number),
                    speculate=name != "none",
                    reuse=True,
                )
                times.append(1e3 * found.counters.decode_s / len(found.token_ids))
                took = found.counters.accepted_by.get("window", 0)
                print(f"{name}: {times[-1]:.1f} ms a token, {took} drafts of the window taken",
                      flush=True)  # fmt: skip
    plain = statistics.mean(spent["none"])
    print(", ".join(f"{name} {plain / statistics.mean(ms):.2f}x" for name, ms in spent.items()))


# -- server ----------------------------------------------------------------------------------

TEXT = b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 "
TOKENS, _SHORT = 96, 512
DEPTHS = (1, 3)
SERVER_KINDS = {
    MTP: "draft-mtp",
    ASSISTANT: "draft-mtp",
    EAGLE: "draft-eagle3",
    DFLASH: "draft-dflash",
}


class Written(NamedTuple):
    """One text, and the drafts it was written with."""

    tokens: list[int]
    drafted: int
    accepted: int


class Files(NamedTuple):
    """A model, and its head where that has a file of its own."""

    model: Path
    head: Path | None


def opened(files: Files, depth: int) -> BackendWithHead:
    """A model that its head can follow."""
    settings = RunConfig(_SHORT, batch_size=128, max_nodes=depth + 1, head=files.head is None)
    if read_model_spec(files.model).has_snapshots:
        return RecurrentBackendWithHead(files.model, replace(settings, snapshots=depth))
    return BackendWithHead(files.model, settings)


def head_beside(files: Files, backend: BackendWithHead) -> DraftHead:
    """The head of a model, opened beside it."""
    if files.head is None:
        return backend.open_head()
    spec = read_model_spec(files.head, heads=True)
    return backend.open_head(partial(open_head_file, spec, RunConfig(_SHORT, gpu_layers=0)))


def kind_of(head: Path) -> HeadSpec:
    """What a head in a file of its own reads."""
    reads = read_model_spec(head, heads=True).reads
    assert reads is not None, "a head"
    return reads


def depths_of(files: Files) -> tuple[int, ...]:
    """Tokens to be drafted: the server makes a block of as many as it is asked for."""
    if files.head is None or kind_of(files.head).kind != DFLASH:
        return DEPTHS
    return (min(kind_of(files.head).block, HEAD_NODES) - 1,)


def written_here(files: Files, prompt: list[int], depth: int) -> Written:
    """With a fixed depth, without edgespec's loop, which would choose it."""
    with closing(opened(files, depth)) as backend:
        head = head_beside(files, backend)
        tokens = [int(backend.prefill(prompt).argmax())]
        drafted = accepted = 0
        while len(tokens) < TOKENS:
            drafts: list[int] = []
            while len(drafts) < min(depth, TOKENS - len(tokens) - 1):
                row = head.go_on(drafts[-1]) if drafts else head.begin(tokens[-1])
                drafts.append(int(row.argmax()))
            rows = backend.verify(DraftTree.chain([tokens[-1], *drafts]))
            picks = [int(row.argmax()) for row in rows]
            right = 0
            while right < len(drafts) and drafts[right] == picks[right]:
                right += 1
            backend.commit(range(right + 1))
            tokens += picks[: right + 1]
            drafted, accepted = drafted + len(drafts), accepted + right
        return Written(tokens[:TOKENS], drafted, accepted)


def written_by_server(server: str, files: Files, prompt: list[int], depth: int) -> Written:
    """The same request to llama.cpp's server."""
    kind = ["draft-mtp"]
    if files.head is not None:
        kind = [SERVER_KINDS[kind_of(files.head).kind], "-md", str(files.head)]
    command = [
        server, "-m", str(files.model), "-c", str(_SHORT), "-t", "1",
        "-np", "1", "-fa", "on", "--no-warmup", "--spec-draft-n-max", str(depth),
        "--spec-draft-p-min", "0", "--spec-type", *kind,
    ]  # fmt: skip
    request = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
    body = json.dumps(request | {"cache_prompt": False}).encode()
    with running(command) as address:
        asked = urllib.request.Request(f"{address}/completion", data=body)
        with urllib.request.urlopen(asked, timeout=120) as told:
            answer = json.load(told)
    times = answer["timings"]
    return Written(answer["tokens"], times["draft_n"], times["draft_n_accepted"])


def server() -> int:
    """The same tokens and drafts as in llama.cpp's server; the status is how many runs differ.

    Each model writes greedily with drafts of one and of three tokens (of a DFlash head, with those
    of its block), all of them from its head and verified in every round, on both sides. Compared
    are the tokens, how many were drafted, and how many of these were accepted. The server must be
    of the llama.cpp that edgespec runs on.
    """
    parser = argparse.ArgumentParser("draft_model.py server")
    parser.add_argument("server", help="llama-server")
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--draft", type=Path, help="the head's file, where it is none of a model's")
    options = parser.parse_args()
    differ = 0
    print("| file | depth | drafted, here and there | accepted, here and there | tokens |")
    print("| --- | --- | --- | --- | --- |")
    for path in options.models:
        files = Files(path, options.draft)
        with closing(opened(files, 1)) as backend:
            prompt = backend.tokenizer.encode(TEXT.decode())
        for depth in depths_of(files):
            here = written_here(files, prompt, depth)
            there = written_by_server(options.server, files, prompt, depth)
            same = here.tokens == there.tokens
            differ += here != there
            print(
                f"| {path.name} | {depth} | {here.drafted} / {there.drafted} | "
                f"{here.accepted} / {there.accepted} | {'the same' if same else 'others'} |"
            )
    return differ


if __name__ == "__main__":
    run(__doc__, speed=speed, agreement=agreement, window=window, server=server)
