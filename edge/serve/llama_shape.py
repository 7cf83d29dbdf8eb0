"""`/completion` and `/infill`, llama.cpp's own: what their answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.decode.generation import Chunk, Result
from edgespec.serve.generation import Generation
from edgespec.serve.llama_request import LlamaAsked
from edgespec.serve.shapes import Choice, Delta, speeds, timings
from edgespec.serve.told_tokens import ToldTokens


@dataclass(frozen=True, slots=True)
class LlamaPrompt:
    """A prompt that is continued; texts that were too long for it may have been cut."""

    text: str
    num_tokens: int
    is_cut: bool = False


class LlamaShape:
    """Answers to one request.

    Args:
        asked: what is told, and what is not.
        tokens: tells logprobs, where there are any.
        generations: by answer.
        prompts: by answer.
        settings: what it was generated with, as it is told.
    """

    def __init__(
        self,
        model: str,
        asked: LlamaAsked,
        tokens: ToldTokens,
        generations: Sequence[Generation],
        prompts: Sequence[LlamaPrompt],
        settings: dict[str, Any],
    ) -> None:
        self._model, self._tokens, self._settings = model, tokens, settings
        self._asked, self._generations, self._prompts = asked, generations, prompts
        self._written = [0] * len(prompts)  # tokens so far

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        ids = [token for chunk in chunks for token in chunk.token_ids]
        self._written[index] += len(ids)
        if self._asked.only_reads or not (delta.content or ids):
            return []
        generation = self._generations[index]
        document: dict[str, Any] = {
            "index": index,
            "content": delta.content,
            "tokens": ids,
            "stop": False,
            "id_slot": generation.slot,
            "tokens_predicted": self._written[index],
            "tokens_evaluated": self._prompts[index].num_tokens,
        }
        logprobs = [one for chunk in chunks for one in chunk.logprobs]
        if logprobs:
            document["completion_probabilities"] = self._tokens.entries_by_id(logprobs)
        if self._asked.tells_times:
            document["timings"] = speeds([generation.stream.result.counters])
        return [document]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """Everything but the text."""
        return [self._final(choice, "", [])]

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Nothing more."""
        return []

    def whole(self, choices: Sequence[Choice]) -> Any:
        """The answer, or a list of them for several prompts."""
        told = []
        for choice in choices:
            is_written = not self._asked.only_reads
            ids = list(choice.result.token_ids) if self._asked.returns_tokens else []
            told.append(self._final(choice, choice.content if is_written else "", ids, whole=True))
        return told[0] if len(told) == 1 else told

    def _final(
        self, choice: Choice, content: str, ids: list[int], *, whole: bool = False
    ) -> dict[str, Any]:
        prompt, result = self._prompts[choice.index], choice.result
        generation = self._generations[choice.index]
        if not generation.ran_out:
            choice.check_complete()
        counters = result.counters
        document = {
            "index": choice.index,
            "content": content,
            "tokens": ids,
            "id_slot": generation.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": counters.generated_tokens,
            "tokens_evaluated": counters.prompt_tokens,
            "generation_settings": self._settings,
            "prompt": prompt.text,
            "has_new_line": "\n" in choice.content,
            "truncated": prompt.is_cut or result.finish_reason == "context_full",
            "stop_type": _stop_type(result),
            "stopping_word": result.stop_string or "",
            "tokens_cached": counters.prompt_tokens + counters.generated_tokens - 1,
            "timings": timings([choice]),
        }
        if whole and result.logprobs:
            document["completion_probabilities"] = self._tokens.entries_by_id(result.logprobs)
        return _picked(document, self._asked.paths) if self._asked.paths else document


def _picked(document: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Only what these name; "a/b" is b of a. Those that are not there are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = document
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def _stop_type(result: Result) -> str:
    if result.stop_string is not None:
        return "word"
    return "eos" if result.finish_reason == "stop" else "limit"
