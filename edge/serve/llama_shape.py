"""`/completion` and `/infill`, llama.cpp's own: what their answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.decode.generation import Chunk, Result
from edgespec.serve.shapes import Choice, Delta, timings
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
        tokens: tells logprobs, where there are any.
        prompts: by answer.
        settings: what it was generated with, as it is told.
        returns_tokens: whether an answer that is not streamed has its ids.
    """

    def __init__(
        self,
        model: str,
        tokens: ToldTokens,
        prompts: Sequence[LlamaPrompt],
        settings: dict[str, Any],
        *,
        returns_tokens: bool,
    ) -> None:
        self._model, self._tokens, self._settings = model, tokens, settings
        self._prompts, self._returns_tokens = prompts, returns_tokens
        self._written = [0] * len(prompts)  # tokens so far

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        ids = [token for chunk in chunks for token in chunk.token_ids]
        self._written[index] += len(ids)
        if not (delta.content or ids):
            return []
        document = {
            "index": index,
            "content": delta.content,
            "tokens": ids,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._written[index],
            "tokens_evaluated": self._prompts[index].num_tokens,
        }
        logprobs = [one for chunk in chunks for one in chunk.logprobs]
        if logprobs:
            document["completion_probabilities"] = self._tokens.entries_by_id(logprobs)
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
            ids = list(choice.result.token_ids) if self._returns_tokens else []
            document = self._final(choice, choice.content, ids)
            if choice.result.logprobs:
                entries = self._tokens.entries_by_id(choice.result.logprobs)
                document["completion_probabilities"] = entries
            told.append(document)
        return told[0] if len(told) == 1 else told

    def _final(self, choice: Choice, content: str, ids: list[int]) -> dict[str, Any]:
        prompt, result = self._prompts[choice.index], choice.result
        choice.check_complete()
        counters = result.counters
        return {
            "index": choice.index,
            "content": content,
            "tokens": ids,
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": counters.generated_tokens,
            "tokens_evaluated": counters.prompt_tokens,
            "generation_settings": self._settings,
            "prompt": prompt.text,
            "has_new_line": "\n" in choice.content,
            "truncated": prompt.is_cut,
            "stop_type": _stop_type(result),
            "stopping_word": result.stop_string or "",
            "tokens_cached": counters.prompt_tokens + counters.generated_tokens - 1,
            "timings": timings([choice]),
        }


def _stop_type(result: Result) -> str:
    if result.stop_string is not None:
        return "word"
    return "eos" if result.finish_reason == "stop" else "limit"
