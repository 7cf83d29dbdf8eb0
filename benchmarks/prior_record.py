"""Records a model's answers to many prompts at once: the text that drafts are counted on.

    python benchmarks/prior_record.py MODEL --count 240 --out RECORDING
    python benchmarks/prior_record.py MODEL --prompts FILE --temperature 0.8 --out RECORDING

Each line of the recording has `category`, `prompt` and `output` (token ids), as `replay.py` reads
them. Answers share the model's steps, which makes them several times as fast as one by one; how
they round plays no part for counts. Without `--prompts` those of `prior_prompts.py` are used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from prior_prompts import prior_prompts

from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext, LlamaSettings
from edgespec.memory.device.host import usable_cores
from edgespec.models.chat import prompt_text
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

_BATCH = 128


@dataclass(slots=True)
class _Answer:
    """A prompt that is being answered in one sequence of the cache."""

    category: str
    prompt: list[int]
    sampler: Sampler
    output: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {"category": self.category, "prompt": self.prompt, "output": self.output}


class Recorder:
    """A model that writes several answers at a time."""

    def __init__(self, path: Path, at_once: int, threads: int, context: int) -> None:
        self._spec = read_model_spec(path)
        self._at_once, self._context_size = at_once, context
        settings = LlamaSettings(context * at_once, _BATCH, at_once, 1, threads, kernels=True)
        self._context = LlamaContext(settings)
        self._context.open(str(path), None, self._adjust)
        self._batch = Batch(self._context.lib, _BATCH, 1, None, self._context.width)

    def _adjust(self, params: Any) -> None:
        params.n_seq_max = self._at_once
        params.kv_unified = False  # no sequence walks over the cells of the others

    def encode(self, text: str) -> list[int]:
        """Token ids of one user message in the model's chat format."""
        tokenizer = self._context.tokenizer
        template, bos, eos = self._spec.chat_template, tokenizer.bos_text, tokenizer.eos_text
        return tokenizer.encode(prompt_text(text, template, bos_token=bos, eos_token=eos))

    def answers(
        self, prompts: Sequence[tuple[str, str]], max_tokens: int, sampling: SamplingParams
    ) -> Iterator[dict[str, Any]]:
        """A row for each prompt that is not too long, in the order in which answers end."""
        waiting = list(enumerate(prompts))[::-1]
        live: dict[int, _Answer] = {}
        while waiting or live:
            for place in set(range(self._at_once)) - live.keys():
                answer = self._next(waiting, max_tokens, sampling)
                if answer is not None:
                    self._read(place, answer)
                    live[place] = answer
            self._step(live)
            for place, answer in list(live.items()):
                last = answer.output[-1]
                if len(answer.output) >= max_tokens or self._context.tokenizer.is_end(last):
                    self._context.lib.llama_memory_seq_rm(self._context.memory, place, -1, -1)
                    yield live.pop(place).row()

    def _next(
        self,
        waiting: list[tuple[int, tuple[str, str]]],
        max_tokens: int,
        sampling: SamplingParams,
    ) -> _Answer | None:
        """An answer to the next prompt that fits."""
        tokenizer = self._context.tokenizer
        while waiting:
            number, (category, text) = waiting.pop()
            ids = self.encode(text)
            if len(ids) + max_tokens <= self._context_size:
                params = SamplingParams(temperature=sampling.temperature, seed=number)
                sampler = Sampler(params, tokenizer.vocab_size, ids, tokenizer.token_bytes)
                return _Answer(category, ids, sampler)
        return None

    def _read(self, place: int, answer: _Answer) -> None:
        """The prompt, and the first token of the answer."""
        for start in range(0, len(answer.prompt), _BATCH):
            piece = answer.prompt[start : start + _BATCH]
            count = len(piece)
            self._batch.put(0, piece)
            self._batch.positions[:count] = range(start, start + count)
            self._batch.ids[:count, 0] = place
            self._batch.outputs[:count] = 0
            self._batch.outputs[count - 1] = 1
            self._context.decode(self._batch, count)
        self._pick([answer])

    def _step(self, live: dict[int, _Answer]) -> None:
        """One more token of each."""
        for row, (place, answer) in enumerate(live.items()):
            self._batch.put(row, answer.output[-1:])
            self._batch.positions[row] = len(answer.prompt) + len(answer.output) - 1
            self._batch.ids[row, 0] = place
            self._batch.outputs[row] = 1
        if live:
            self._context.decode(self._batch, len(live))
            self._pick(list(live.values()))

    def _pick(self, answers: Sequence[_Answer]) -> None:
        rows = self._context.rows(len(answers))[:, : self._context.tokenizer.vocab_size]
        for answer, logits in zip(answers, rows, strict=True):
            answer.output.append(answer.sampler.pick(logits))

    def close(self) -> None:
        self._context.close()


def _prompts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    if arguments.prompts is None:
        return prior_prompts(arguments.count, arguments.seed)
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // arguments.count)
    questions = [json.loads(line) for line in lines[::step][: arguments.count]]
    return [(question["category"], question["turns"][0]) for question in questions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--context", type=int, default=2048, help="of a prompt and its answer")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recorder = Recorder(arguments.model, arguments.at_once, arguments.threads, arguments.context)
    start, tokens = perf_counter(), 0
    sampling = SamplingParams(temperature=arguments.temperature)
    with arguments.out.open("w", encoding="utf-8") as out:
        for row in recorder.answers(_prompts(arguments), arguments.max_tokens, sampling):
            out.write(json.dumps(row) + "\n")
            out.flush()
            tokens += len(row["output"])
    recorder.close()
    print(f"{tokens} tokens in {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
