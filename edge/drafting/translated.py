"""A draft model with a vocabulary of its own: text is carried over between tokenizers as bytes.

Tokens of one vocabulary mean nothing in another, but bytes do: the draft model reads what the
target wrote in its own tokens, and what it writes ahead becomes tokens of the target (string-level
agreement of arXiv 2502.05202, universal assisted generation in transformers). Drafts are single
tokens that the target verifies, so its text stays what it is whatever is carried over wrongly.

Both directions tokenize as little as possible again: asking a tokenizer takes 12 us a word, and 75
where llama.cpp's pre-tokenizer has no fast path. Nothing is asked for before the last place that
further text cannot move, and pieces that come again are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from edgespec.backends.base import Backend, Logits, Tokenizer
from edgespec.drafting import constants
from edgespec.drafting.model import (
    SHARES,
    ModelDrafter,
    ModelText,
    calibration_of_places,
    share_bin,
    top_tokens_of,
)
from edgespec.drafting.proposal import Calibration, DraftEstimate, Proposal, StepContext
from edgespec.errors import EdgespecError
from edgespec.memory.times import CostCurve
from edgespec.models.chat import prompt_text
from edgespec.prefix import common_prefix_length, complete

MOST_OPEN = 16  # tokens that are tokenized again where no word begins
_BETWEEN_PIECES = re.compile(
    rb"(?<=\S)(?= \S)|(?<=[A-Za-z])(?=[!-/:-@\[-`{-~\n])|(?<=\n)(?=[A-Za-z])"
)
_SPACES = frozenset(b" \t\n\r\f\v")
_BEHIND_LETTERS = frozenset(b"\n!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_CONTROL = "\ufdd2"  # around the name of a control token in a text; no character of Unicode
# Whose message ends and whose begins at each place of `ChatFormat.around`; "" is nobody's.
_TURNS = (
    ("", "user"),
    ("user", "assistant"),
    ("assistant", "user"),
    ("user", "assistant"),
    ("", "system"),
    ("system", "user"),
)
_SAID = ("edgespecfirst", "edgespecsecond", "edgespecthird", "edgespecsystem")


def begins_piece(before: bytes, piece: bytes) -> bool:
    """Whether a piece is tokenized for itself behind other bytes.

    So is a word with its space, a sign or a line break behind a letter, and a letter behind a line
    break, as pre-tokenizers have it.
    """
    if piece[:1] == b" ":
        return len(piece) > 1 and piece[1] not in _SPACES
    if piece[0] in _BEHIND_LETTERS:
        return before[-1:].isalpha()
    return before[-1:] == b"\n" and piece[:1].isalpha()


class Pieces:
    """The tokens of pieces of a text, as they are behind other text.

    SentencePiece puts a space before a text: a line break keeps it away from a piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = tokenizer.control_texts
        # Pieces come again; a word of prose takes some 100 bytes.
        self.tokens = lru_cache(4096)(self._tokens)
        first = self._encoded("a")
        self._adds_space = b"".join(map(tokenizer.token_bytes, first)) == b" a"
        self._line_break = self._encoded("\n") if self._adds_space else []

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(self._controls.mark(text), add_special=False)

    def _tokens(self, piece: bytes) -> Sequence[int]:
        """Token ids of a piece; texts of control tokens in it are words.

        Raises UnicodeDecodeError for one that begins within a character.
        """
        words = _BETWEEN_PIECES.split(piece)
        if len(words) > 1:
            return [token for word in words for token in self.tokens(word)]
        text = piece.decode()
        if not self._adds_space:
            return self._encoded(text)
        found, skipped = self._encoded("\n" + text), len(self._line_break)
        is_apart = found[:skipped] == self._line_break
        return found[skipped:] if is_apart else self._encoded(text.removeprefix(" "))

    def open_part(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Where the part begins that more text may change, and its bytes.

        That is the last word. A control token ends it, too.
        """
        token_bytes, found = self.tokenizer.token_bytes, b""
        for start in range(len(tokens) - 1, max(-1, len(tokens) - 1 - MOST_OPEN), -1):
            piece = token_bytes(tokens[start]) if tokens[start] >= 0 else b""
            if not piece or (found and begins_piece(piece, found)):
                return start + 1, found
            found = piece + found
            if piece[:1] == b" " and begins_piece(b"", piece):
                return start, found
        return len(tokens), b""  # no word begins in it: what comes is taken for itself


class ChatFormat:
    """What stands around the messages of a chat, for changing one model's format into another's.

    Args:
        template: Jinja source; None for a model without a chat format.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self.around: list[str] = []  # a first user's message, answers, users' messages, a system's
        if template is None:
            return
        user, answer, again, system = _SAID
        said = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": again},
        ]

        def parts(messages: Sequence[dict[str, str]], words: Sequence[str]) -> list[str]:
            text = prompt_text(
                messages, template, bos_token=tokenizer.bos_text, eos_token=tokenizer.eos_text
            )
            text = shown(tokenizer, tokenizer.encode(text))
            return re.split("|".join(words), text)

        with suppress(EdgespecError):  # a template that refuses such a chat
            found = parts(said, _SAID)
            if len(found) != len(said) + 1:
                return
            with_system = [{"role": "system", "content": system}, *said]
            self.around = found
            first = parts(with_system, _SAID)
            if len(first) == len(found) + 1:
                self.around += first[:2]


def shown(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, in which control tokens can be told from words that look like them."""
    parts: list[bytes] = []
    for token in tokens:
        if token >= 0 and not (piece := tokenizer.token_bytes(token)):
            piece = f"{_CONTROL}{tokenizer.token_text(token)}{_CONTROL}".encode()
        parts.append(piece if token >= 0 else b"")
    return b"".join(parts).decode(errors="replace")


class Translation:
    """Texts of a target in the tokens of a draft model, and its tokens in the target's.

    Made once for a pair of vocabularies.

    Args:
        target, draft: their tokenizers.
        target_template, draft_template: Jinja sources of their chat formats, as far as they have
            one.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        target_template: str | None = None,
        draft_template: str | None = None,
    ) -> None:
        self.target, self.draft = Pieces(target), Pieces(draft)
        self.word = lru_cache(4096)(self._word)
        mine, theirs = ChatFormat(target, target_template), ChatFormat(draft, draft_template)
        # By what stands between two messages, and whose the first one is: what stands there in the
        # other format, and whose the second one is.
        self._formats: dict[str, dict[str, tuple[str, str]]] = {}
        for number, (text, (before, behind)) in enumerate(zip(mine.around, _TURNS, strict=False)):
            has_it = number < len(theirs.around)
            other = theirs.around[number] if has_it else "\n\n" if before else ""
            if text:
                self._formats.setdefault(text, {}).setdefault(before, (other, behind))
        longest = sorted(self._formats, key=len, reverse=True)
        self._format = re.compile("|".join(map(re.escape, longest))) if longest else None
        opens = [one.around[3] for one in (mine, theirs) if one.around]
        self._opening = (opens[0], opens[1] if len(opens) > 1 else "\n\n") if mine.around else None
        self.end = self._end_of_turn(mine)

    def _end_of_turn(self, of_target: ChatFormat) -> int:
        """The token with which the target ends an answer; -1 without any."""
        target = self.target.tokenizer
        behind = of_target.around[2] if of_target.around else ""
        for name in [*re.findall(f"{_CONTROL}(.*?){_CONTROL}", behind), target.eos_text]:
            ids = target.encode(name, add_special=False) if name else []
            if len(ids) == 1 and target.is_end(ids[0]):
                return ids[0]
        return -1

    def _word(self, token: int) -> tuple[bytes, Sequence[int]]:
        """The bytes of a draft model's token, and the target's tokens for it; none if no word."""
        piece, ids = self.draft.tokenizer.token_bytes(token), list[int]()
        if piece[:1] == b" " and begins_piece(b"", piece) and complete(piece) == len(piece):
            with suppress(UnicodeDecodeError):
                ids = list(self.target.tokens(piece))
            if sum(len(self.target.tokenizer.token_bytes(one)) for one in ids) != len(piece):
                ids = []  # nothing that a tokenizer adds or leaves out
        return piece, ids

    def prompt(self, tokens: Sequence[int]) -> tuple[list[int], float]:
        """The draft model's tokens for the target's prompt, in its own chat format.

        And its fertility there: how many of its tokens stand for one of the target's in the last
        message.
        """
        text, controls = shown(self.target.tokenizer, tokens), self.draft.tokenizer.control_texts
        opening = ""  # of the answer
        if self._opening is not None and text.endswith(self._opening[0]):
            text, opening = text.removesuffix(self._opening[0]), self._opening[1]
        parts, place, writer = list[str](), 0, ""
        for found in self._format.finditer(text) if self._format is not None else ():
            ways = self._formats[found[0]]
            other, writer = ways.get(writer) or next(iter(ways.values()))
            parts += (text[place : found.start()], other)
            place = found.end()
        parts += (text[place:], opening)
        made = []
        for number, part in enumerate(parts):  # every other one is of a chat format
            for place, piece in enumerate(part.split(_CONTROL)):
                if place % 2:
                    made.append(piece if number % 2 or controls.count(piece) == 1 else "")
                else:
                    made.append(controls.mark(piece))
        said = next((one for one in reversed(parts[::2]) if one.strip()), "")
        return self.draft.tokenizer.encode("".join(made)), self.fertility(said)

    def fertility(self, text: str) -> float:
        """Tokens of the draft model for one of the target's, by the end of a text; at least 1.

        A text of a few tokens says little, so four of which each is one of the other's come first.
        """
        end = text.replace(_CONTROL, "")[-200:]
        theirs, ours = (
            len(pieces.tokenizer.encode(end, add_special=False)) + 4
            for pieces in (self.draft, self.target)
        )
        return max(1.0, theirs / ours)


class TranslatedText(ModelText):
    """The target's text as a draft model of another vocabulary sees it.

    What is written is tokenized from the last word on; bytes of a character that is not complete
    wait in `held`. The cache is a window over the first and the last tokens.
    """

    def __init__(self, backend: Backend, translation: Translation, room: int) -> None:
        super().__init__(backend, 1 << 62, None, room)
        self._translation = translation
        self._most = min(constants.TEXT_READ, (backend.context_size - room) // 2)
        self.held = b""  # what the target has written of a character
        self.written: list[int] = []  # the target's last tokens
        self.drafted: list[int] = []  # the draft model's behind the text
        self.fertility = 1.0  # of the prompt

    @property
    def can_be_read(self) -> bool:
        """Whether its tokenizer knows any of the text, and the backend has room for it."""
        return bool(self.tokens) and super().can_be_read

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with a prompt and the first token of an answer; nothing is computed."""
        self.held, self.drafted = b"", []
        self.written = list(tokens[-MOST_OPEN - 1 : -1])
        prompt, self.fertility = self._translation.prompt(tokens[:-1])
        super().begin(prompt)
        self.append(tokens[-1:])

    def append(self, emitted: Sequence[int]) -> None:
        """Go on with more of the target's tokens."""
        self.written = [*self.written, *emitted][-MOST_OPEN:]
        pieces, tokens = self._translation.draft, self.tokens
        token_bytes = pieces.tokenizer.token_bytes
        new = self.held + b"".join(map(self._translation.target.tokenizer.token_bytes, emitted))
        size = complete(new)
        self.held, new = new[size:], new[:size]
        if not new.isascii():
            new = new.decode(errors="replace").encode()
        for token in self.drafted:  # what was right stays as it was drafted
            piece = token_bytes(token)
            if not (piece and new.startswith(piece)):
                break
            tokens.append(token)
            new = new[len(piece) :]
        self.drafted = []
        if new:
            start, changing = len(tokens), b""
            if not (tokens and begins_piece(token_bytes(tokens[-1]), new)):
                start, changing = pieces.open_part(tokens)
            try:
                ids = pieces.tokens(changing + new)
            except UnicodeDecodeError:  # it begins within a character
                start, ids = len(tokens), pieces.tokens(new.decode(errors="replace").encode())
            tokens[start:] = ids
            self.shared = min(self.shared, start)
        self.shared = common_prefix_length(self.cached, tokens, self.shared)
        self._leave_behind()

    def _leave_behind(self) -> None:
        """Begin anew with the first and the last tokens where that is less to read, or all fits."""
        most, length = self._most, len(self.tokens)
        if length > most and (length - self.shared > most or not self._fits):
            first = min(constants.TEXT_FIRST, most // 2)
            self.tokens = [*self.tokens[:first], *self.tokens[first - most :]]
            self.shared = min(self.shared, first)


class TranslatedChain:
    """A proposal of the target's tokens that grows by a draft model's tokens.

    A token's probability is counted by the product of the shares of those that begin in it, whether
    it is the last one, which further text may still lengthen, and whether tokens are drawn.
    """

    def __init__(
        self,
        context: StepContext,
        calibration: Calibration,
        translation: Translation,
        text: TranslatedText,
    ) -> None:
        self._probability = calibration.probability
        self._base = 2 * SHARES if context.sampler is not None else 0  # of the cells
        self._most = min(context.max_nodes, constants.LONGEST)
        self._translation, self._target = translation, translation.target
        self._drafted = text.drafted = []  # tokens of the draft model
        self.tokens: list[int] = []  # of the target
        self.probabilities: list[float] = []
        self._cells: list[int] = []
        self._held = text.held  # bytes that the draft model has to write first
        self._written: Sequence[int] | None = (
            text.written
        )  # until a word begins, or its end is asked
        self._fixed: Sequence[int] = ()  # of the target's tokens, those of the word that goes on
        self._fixed_bytes = b""
        self._closed = 0  # tokens that further text does not change
        self._open = b""  # bytes behind these
        self._shares: list[tuple[int, float]] = []  # of draft tokens: where in `_open` they begin
        self._is_over = False

    @property
    def last_draft(self) -> int:
        """The last token of the draft model."""
        return self._drafted[-1]

    @property
    def depth(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def chance(self) -> float:
        """That all of it is accepted, and what was drafted beyond it right."""
        chance = self.probabilities[-1] if self.probabilities else 1.0
        if self._open and len(self.tokens) == self._closed:
            for _, share in self._shares:
                chance *= share
        return chance

    @property
    def is_full(self) -> bool:
        """Whether as much is drafted as may be."""
        return (
            self._is_over
            or len(self.tokens) >= self._most
            or len(self._drafted) >= constants.LONGEST
        )

    def main_chain_probabilities(self) -> list[float]:
        """Of its tokens, [depth]."""
        return self.probabilities

    def main_chain(self) -> list[int]:
        return self.tokens[: self._most]

    def proposal(self, draft_ms: float) -> tuple[Proposal, list[int]]:
        """What has grown, and the cells."""
        size = min(self.depth, self._most)
        parents = range(-1, size - 1)
        made = Proposal(self.tokens[:size], parents, self.probabilities[:size], draft_ms=draft_ms)
        return made, self._cells[:size]

    def take(self, token: int, share: float) -> bool:
        """Go on with a token of the draft model; False where it cannot be carried over."""
        self._drafted.append(token)
        piece, ids = self._translation.word(token)
        if not piece:
            end = self._translation.end
            if end < 0 or self._held or not self._translation.draft.tokenizer.is_end(token):
                return False
            self._close()
            self._is_over = True
            self._grow([end], [share])
            return True
        if self._held:
            size = min(len(self._held), len(piece))
            if self._held[:size] != piece[:size]:
                return False
            self._held, piece = self._held[size:], piece[size:]
        elif ids and (not self._open or complete(self._open) == len(self._open)):
            self._close()  # a word, which is looked up
            self._open, self._shares = piece, [(0, share)]
            self._grow(ids, (share,) if len(ids) == 1 else [share, *[1.0] * (len(ids) - 1)])
            return True
        if self._written is not None:
            start, self._fixed_bytes = self._target.open_part(self._written)
            self._fixed, self._written = self._written[start:], None
        before = self._open or self._fixed_bytes
        if piece and begins_piece(before, piece) and complete(before) == len(before):
            self._close()
        self._shares.append((len(self._open), share))
        self._open += piece
        return self._translate()

    def _close(self) -> None:
        """What there is does not change any more."""
        last = self.depth - 1
        if last >= self._closed and not self._is_over:
            self._cells[last] -= SHARES  # it is not the last one any more
            chance = self.probabilities[last - 1] if last else 1.0
            self.probabilities[last] = chance * self._probability(self._cells[last])
        self._closed, self._open, self._shares = self.depth, b"", []
        self._written, self._fixed, self._fixed_bytes = None, (), b""

    def _translate(self) -> bool:
        """Tokenize the open part again, behind what the target has written of the same word."""
        size, target = complete(self._open), self._target
        try:
            ids: Sequence[int] = []
            if self._fixed:
                with suppress(UnicodeDecodeError):
                    both = target.tokens(self._fixed_bytes + self._open[:size])
                    if list(both[: len(self._fixed)]) == self._fixed:
                        ids = both[len(self._fixed) :]
            ids = ids or target.tokens(self._open[:size])
        except UnicodeDecodeError:
            return False
        ends = list(accumulate(map(len, map(target.tokenizer.token_bytes, ids))))
        if ends and ends[-1] != size:  # nothing that a tokenizer adds or leaves out
            return False
        chances = [1.0] * len(ids)
        place = 0
        for start, share in self._shares:
            while place < len(ids) and ends[place] <= start:
                place += 1
            if place < len(ids):
                chances[place] *= share
        self._grow(ids, chances)
        return True

    def _grow(self, ids: Sequence[int], chances: Sequence[float]) -> None:
        """Let these be the tokens behind those that are closed; the last one may still grow."""
        closed, last = self._closed, len(ids) - 1
        if closed < len(self.tokens):
            del self.tokens[closed:], self._cells[closed:], self.probabilities[closed:]
        chance = self.probabilities[-1] if closed else 1.0
        for place, token in enumerate(ids):
            cell = self._base + share_bin(chances[place])
            if place == last and not self._is_over:
                cell += SHARES
            chance *= self._probability(cell)
            self.tokens.append(token)
            self._cells.append(cell)
            self.probabilities.append(chance)


def new_calibration() -> Calibration:
    """Cells are numbered (drawn * 2 + last) * shares + share."""
    groups = [cell // SHARES for cell in range(4 * SHARES)]
    counted = [pair for part in constants.TRANSLATED_HITS for pair in part]
    known = dict(enumerate([*counted, *counted]))
    return Calibration(len(groups), groups, groups, [constants.DRAFT_GUESSES[0][0]] * 4, known)


class TranslatingDrafter(ModelDrafter):
    """Drafts with a model of another vocabulary, carried over as `translation` says.

    Its tokens are not drawn, so the same seed gives the same tokens as plain decoding.
    Errors as of `ModelDrafter`.
    """

    draws = False
    _text: TranslatedText

    def __init__(self, backend: Backend, curve: CostCurve, translation: Translation) -> None:
        super().__init__(backend, curve, backend.tokenizer.vocab_size)
        self._calibration, self._translation = new_calibration(), translation
        self._places = calibration_of_places(constants.TRANSLATED_GAINS)
        self._text = TranslatedText(backend, translation, constants.LONGEST)
        self._usual_prompt = constants.TEXT_READ

    def estimate(self, context: StepContext) -> DraftEstimate:
        """As of `WritingDrafter`, where a token of the target's takes several of this model's.

        Of each of these it has to be sure: of Chinese SmolLM2 writes 2.4 to 3 for one of Qwen's.
        """
        found, fertility = super().estimate(context), self._text.fertility
        chances = [chance**fertility for chance in found.probabilities]
        return replace(found, probabilities=chances, node_ms=fertility * found.node_ms)

    def _new_builder(self, context: StepContext) -> Any:
        return TranslatedChain(context, self._calibration, self._translation, self._text)

    def _extend(self, builder: Any, logits: Logits, context: StepContext) -> bool:
        tokens, shares = top_tokens_of(logits[: self._vocab_size])
        return bool(tokens) and bool(builder.take(tokens[0], shares[0]))
