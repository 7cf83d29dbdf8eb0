"""Text whose ids are known: a conversation is not cut into other ids than the model wrote.

What is kept of an answer are the ids the model wrote, not those its text would be cut into. The ids
of a prompt are the known ones as far as the text is the same, and the rest of the text encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.backends.base import Tokenizer
from edgespec.decode.images import ShownImages
from edgespec.prefix import common_prefix_length


@dataclass(slots=True)
class KnownText:
    """A text, its ids, and the places at which both may be cut."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    # (characters, ids), ascending; at the ends of prompts and answers
    places: list[tuple[int, int]] = field(default_factory=list)

    def encode(self, text: str, tokenizer: Tokenizer | ShownImages) -> list[int]:
        """Ids of a prompt's text: known ones where it is the same."""
        chars, ids = self._part_of(text)
        rest = tokenizer.encode(text[chars:], add_special=False) if chars else []
        if chars and (not rest or tokenizer.token_bytes(rest[0]) == b""):
            return [*ids, *rest]  # text is cut alike on both sides of a control token
        return tokenizer.encode(text)

    def learn(
        self,
        text: str,
        prompt_ids: Sequence[int],
        answer: str,
        answer_ids: Sequence[int],
        tokenizer: Tokenizer,
    ) -> None:
        """Keep the ids of a prompt's text and of what the model answered."""
        self._cut(common_prefix_length(self.text, text))
        while self.ids != list(prompt_ids[: len(self.ids)]):  # this prompt was encoded anew
            self._cut(len(self.text) - 1)
        self._add(text[len(self.text) :], prompt_ids[len(self.ids) :])
        ids = [token for token in answer_ids if not tokenizer.is_end(token)]
        pieces = [(tokenizer.token_bytes(token), token) for token in ids]
        plain = b"".join(data for data, _ in pieces).decode(errors="replace")
        named = b"".join(data or tokenizer.token_text(token).encode() for data, token in pieces)
        if answer in (plain, named.decode(errors="replace")):
            self._add(answer, ids)

    def _part_of(self, text: str) -> tuple[int, list[int]]:
        common = common_prefix_length(self.text, text)
        places = [place for place in self.places if place[0] <= common]
        chars, count = places[-1] if places else (0, 0)
        return chars, self.ids[:count]

    def _cut(self, num_chars: int) -> None:
        """Forget what goes beyond a common text of `num_chars`."""
        while self.places and self.places[-1][0] > num_chars:
            self.places.pop()
        chars, ids = self.places[-1] if self.places else (0, 0)
        self.text, self.ids = self.text[:chars], self.ids[:ids]

    def _add(self, text: str, ids: Sequence[int]) -> None:
        self.text += text
        self.ids += ids
        self.places.append((len(self.text), len(self.ids)))
