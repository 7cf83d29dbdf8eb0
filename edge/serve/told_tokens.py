"""Tokens and their logprobs in the words of OpenAI's interface."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from edgespec.backends.base import Tokenizer
from edgespec.sampling.logprobs import TokenLogprob

_LEAST = -9999.0  # in place of minus infinity, which JSON does not have


class ToldTokens:
    """Tokens of one vocabulary. A token that ends an answer is none of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """As `logprobs.content` of a chat has them."""
        return [
            {
                **self._entry(one.token, one.logprob),
                "top_logprobs": [self._entry(*pair) for pair in one.best],
            }
            for one in self._shown(logprobs)
        ]

    def entries_by_id(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """The same with ids, as llama.cpp's server adds them."""
        told = self.entries(logprobs)
        for entry, one in zip(told, self._shown(logprobs), strict=True):
            entry["id"] = one.token
            for inner, (token, _) in zip(entry["top_logprobs"], one.best, strict=True):
                inner["id"] = token
        return told

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """`logprobs` of a choice of a chat; None where there are none."""
        return {"content": self.entries(logprobs), "refusal": None} if logprobs else None

    def _shown(self, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        return [one for one in logprobs if not self._tokenizer.is_end(one.token)]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._text(token), "logprob": _finite(logprob), "bytes": list(data)}

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of several."""
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")

    def _text(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        return data.decode(errors="replace") if data else self._tokenizer.token_text(token)

    def _name(self, token: int) -> str:
        """A key: other parts of characters have other ones."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else self._tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def columns(
        self, logprobs: Sequence[TokenLogprob], place: TextPlace, *, with_end: bool = False
    ) -> dict[str, Any]:
        """`logprobs` of a completion's choice, which go on at a place of its text.

        A first token, which has none, has nan. `with_end` also tells a token that ends the answer.
        """
        shown = list(logprobs) if with_end else self._shown(logprobs)
        return {
            "tokens": [self._name(one.token) for one in shown],
            "token_logprobs": [
                None if math.isnan(one.logprob) else _finite(one.logprob) for one in shown
            ],
            "top_logprobs": [
                None
                if math.isnan(one.logprob)
                else {self._name(token): _finite(logprob) for token, logprob in reversed(one.best)}
                for one in shown
            ],
            "text_offset": [place.pass_by(self._tokenizer.token_bytes(one.token)) for one in shown],
        }


class TextPlace:
    """How many characters were written before a token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._passed = 0

    def pass_by(self, data: bytes) -> int:
        """Where a token of these bytes begins."""
        began = self._passed
        self._passed += len(self._decoder.decode(data))
        return began


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
