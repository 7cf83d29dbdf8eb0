"""A draft model with a vocabulary of its own: text is carried over between tokenizers as bytes.

Tokens of one vocabulary mean nothing in another, but bytes do: the draft model reads what the
target wrote in its own tokens, and what it writes ahead becomes tokens of the target (string-level
agreement of arXiv 2502.05202, universal assisted generation in transformers). Drafts are single
tokens that the target verifies, so its text stays what it is whatever is carried over wrongly.

Both directions tokenize as little as possible again: from the last boundary that further text
cannot move, which is before a word. Pieces of text that come again are looked up.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from edgespec.backends.base import Backend, Logits, Tokenizer
from edgespec.drafting import constants
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.drafters.model import ModelDrafter, ModelText, calibration_of_places
from edgespec.drafting.drafters.proposal_builder import SHARES, share_bin, top_tokens_of
from edgespec.drafting.proposal import Proposal, StepContext
from edgespec.errors import EdgespecError
from edgespec.memory.times.curve import CostCurve
from edgespec.models.chat import prompt_text
from edgespec.prefix import common_prefix_length

# What begins so is a piece that no text before it changes: a word with its space, and a sign behind
# a letter, as all pre-tokenizers have it.
_WORD, _SIGN = re.compile(rb" \S"), re.compile(rb"[!-/:-@\[-`{-~]")
_BETWEEN_PIECES = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z])(?=[!-/:-@\[-`{-~])")
_MOST_OPEN = 16  # tokens that are tokenized again where no word begins
_MOST_PIECES = 4096  # that are kept; a word of prose takes some 100 bytes
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


class Pieces:
    """The tokens of pieces of a text, as they are behind other text.

    SentencePiece puts a space before a text: a line break keeps it away from a piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = tokenizer.control_texts
        self._known: dict[str, Sequence[int]] = {}
        first = self._encoded("a")
        self._adds_space = b"".join(map(tokenizer.token_bytes, first)) == b" a"
        self._line_break = self._encoded("\n") if self._adds_space else []

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(self._controls.mark(text), add_special=False)

    def tokens(self, piece: str) -> Sequence[int]:
        """Token ids of a piece; texts of control tokens in it are words."""
        found = self._known.get(piece)
        if found is None:
            words = _BETWEEN_PIECES.split(piece)
            if len(words) > 1:
                return [token for word in words for token in self.tokens(word)]
            if len(self._known) >= _MOST_PIECES:
                self._known.clear()
            found = self._known[piece] = self._look_up(piece)
        return found

    def _look_up(self, piece: str) -> Sequence[int]:
        if not self._adds_space:
            return self._encoded(piece)
        ids, skipped = self._encoded("\n" + piece), len(self._line_break)
        if ids[:skipped] == self._line_break:
            return ids[skipped:]
        return self._encoded(piece.removeprefix(" "))

    def open_part(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Where the part begins that more text may change, and its bytes.

        That is the last word. A control token ends it, too.
        """
        token_bytes, found = self.tokenizer.token_bytes, b""
        for start in range(len(tokens) - 1, max(-1, len(tokens) - 1 - _MOST_OPEN), -1):
            piece = token_bytes(tokens[start]) if tokens[start] >= 0 else b""
            if not piece:
                return start + 1, found
            if found and begins_piece(piece[-1:], found):
                return start + 1, found
            found = piece + found
            if _WORD.match(piece):
                return start, found
        return len(tokens), b""  # no word begins in it: what comes is taken for itself


def begins_piece(before: bytes, piece: bytes) -> bool:
    """Whether what comes behind the last byte before it is tokenized for itself."""
    if _WORD.match(piece):
        return True
    return before.isalpha() and _SIGN.match(piece) is not None


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

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's tokens for the target's prompt, in its own chat format."""
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
        return self.draft.tokenizer.encode("".join(made))


class TranslatedText(ModelText):
    """The target's text as a draft model of another vocabulary sees it.

    What is written is tokenized from the last word on; bytes of a character that is not complete
    wait in `held`. The cache is a window over the first and the last tokens.
    """

    def __init__(self, backend: Backend, translation: Translation, room: int) -> None:
        super().__init__(backend, 1 << 62, None, room)
        self._translation = translation
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.written: list[int] = []  # the target's last tokens
        self.drafted: list[int] = []  # the draft model's behind the text

    @property
    def held(self) -> bytes:
        """What the target has written of a character."""
        return self._decoder.getstate()[0]

    @property
    def can_be_read(self) -> bool:
        """Whether its tokenizer knows any of the text, and the backend has room for it."""
        return bool(self.tokens) and super().can_be_read

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with a prompt and the first token of an answer; nothing is computed."""
        self._decoder.reset()
        self.drafted = []
        self.written = list(tokens[-_MOST_OPEN - 1 : -1])
        super().begin(self._translation.prompt(tokens[:-1]))
        self.append(tokens[-1:])

    def append(self, emitted: Sequence[int]) -> None:
        """Go on with more of the target's tokens."""
        self.written = [*self.written, *emitted][-_MOST_OPEN:]
        target, pieces = self._translation.target.tokenizer, self._translation.draft
        new = self._decoder.decode(b"".join(map(target.token_bytes, emitted))).encode()
        for token in self.drafted:  # what was right stays as it was drafted
            piece = pieces.tokenizer.token_bytes(token)
            if not (piece and new.startswith(piece)):
                break
            self.tokens.append(token)
            new = new[len(piece) :]
        self.drafted = []
        if new:
            start, changing = pieces.open_part(self.tokens)
            try:
                ids = pieces.tokens((changing + new).decode())
            except UnicodeDecodeError:  # it begins within a character
                start, ids = len(self.tokens), pieces.tokens(new.decode(errors="replace"))
            self.tokens[start:] = ids
            self.shared = min(self.shared, start)
        self.shared = common_prefix_length(self.cached, self.tokens, self.shared)
        self._leave_behind()

    def _leave_behind(self) -> None:
        """Begin anew with the first and the last tokens where that is less to read, or all fits."""
        most, first = constants.TEXT_READ, constants.TEXT_FIRST
        most = min(most, (self.backend.context_size - self._room) // 2)
        if len(self.tokens) > most and (len(self.tokens) - self.shared > most or not self._fits):
            first = min(first, most // 2)
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
        self._calibration, self._draws = calibration, context.sampler is not None
        self._most = min(context.max_nodes, constants.LONGEST)
        self._target, self._draft = translation.target, translation.draft.tokenizer
        self._end = translation.end
        self._drafted = text.drafted = []  # tokens of the draft model
        self.tokens: list[int] = []  # of the target
        self.probabilities: list[float] = []
        self._cells: list[int] = []
        self._held = text.held  # bytes that the draft model has to write first
        start, self._fixed_bytes = self._target.open_part(text.written)
        self._fixed = text.written[start:]
        self._closed = 0  # tokens that further text does not change
        self._open = b""  # bytes behind these
        self._shares: list[tuple[int, float]] = []  # of draft tokens: where in `_open` they begin
        self._is_over = False

    @property
    def tip(self) -> int:
        """The last token of the draft model."""
        return self._drafted[-1]

    @property
    def depth(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def chance(self) -> float:
        """That all of it is accepted, and what was drafted beyond it right."""
        pending = [share for _, share in self._shares] if not self._is_translated else []
        chance = self.probabilities[-1] if self.probabilities else 1.0
        for share in pending:
            chance *= share
        return chance

    @property
    def _is_translated(self) -> bool:
        return self.depth > self._closed or not self._open

    @property
    def is_full(self) -> bool:
        """Whether as much is drafted as may be."""
        return self._is_over or self.depth >= self._most or len(self._drafted) >= constants.LONGEST

    def spine_probabilities(self) -> list[float]:
        """Of its tokens, [depth]."""
        return self.probabilities

    def spine(self) -> list[int]:
        return self.tokens[: self._most]

    def proposal(self, draft_ms: float) -> tuple[Proposal, list[int]]:
        """What has grown, and the cells."""
        size = min(self.depth, self._most)
        parents = range(-1, size - 1)
        made = Proposal(self.tokens[:size], parents, self.probabilities[:size], draft_ms=draft_ms)
        return made, self._cells[:size]

    def take(self, token: int, share: float) -> bool:
        """Go on with a token of the draft model; False where it cannot be carried over."""
        piece = self._draft.token_bytes(token)
        self._drafted.append(token)
        if not piece:
            if self._end < 0 or self._held or not self._draft.is_end(token):
                return False
            self._close()
            self._is_over = True
            self._grow([self._end], [share])
            return True
        if self._held:
            size = min(len(self._held), len(piece))
            if self._held[:size] != piece[:size]:
                return False
            self._held, piece = self._held[size:], piece[size:]
        before = self._open or self._fixed_bytes
        if begins_piece(before[-1:], piece) and complete(before) == len(before):
            self._close()
        self._shares.append((len(self._open), share))
        self._open += piece
        return self._translate()

    def _close(self) -> None:
        """What there is does not change any more."""
        self._rate(self._closed, is_last=False)
        self._closed, self._open = self.depth, b""
        self._shares, self._fixed, self._fixed_bytes = [], [], b""

    def _translate(self) -> bool:
        """Tokenize the open part again, behind what the target has written of the same word."""
        size = complete(self._open)
        try:
            piece = self._open[:size].decode()
            ids: Sequence[int] = []
            if self._fixed:
                with suppress(UnicodeDecodeError):
                    both = self._target.tokens((self._fixed_bytes + self._open[:size]).decode())
                    if list(both[: len(self._fixed)]) == self._fixed:
                        ids = both[len(self._fixed) :]
            ids = ids or self._target.tokens(piece)
        except UnicodeDecodeError:
            return False
        ends = list(accumulate(len(self._target.tokenizer.token_bytes(one)) for one in ids))
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
        """Let these be the tokens behind those that are closed."""
        closed = self._closed
        self.tokens[closed:] = ids
        base = self._draws * 2 * SHARES
        self._cells[closed:] = [base + share_bin(chance) for chance in chances]
        self._rate(closed, is_last=not self._is_over)

    def _rate(self, start: int, *, is_last: bool) -> None:
        """Probabilities of paths from `start` on; the last token may have a cell of its own."""
        chance = self.probabilities[start - 1] if start else 1.0
        del self.probabilities[start:]
        last = self.depth - 1
        for place in range(start, self.depth):
            cell = self._cells[place] % SHARES + self._cells[place] // (2 * SHARES) * 2 * SHARES
            self._cells[place] = cell = cell + SHARES * (is_last and place == last)
            chance *= self._calibration.probability(cell)
            self.probabilities.append(chance)


def complete(data: bytes) -> int:
    """How many bytes are whole characters, as far as the last one is concerned."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= needed else len(data) - back
    return len(data)


def new_calibration() -> Calibration:
    """Cells are numbered (drawn * 2 + last) * shares + share."""
    groups = [cell // SHARES for cell in range(4 * SHARES)]
    counted = [pair for part in constants.TRANSLATED_HITS for pair in part]
    known = dict(enumerate([*counted, *counted]))
    return Calibration(len(groups), groups, groups, [constants.FIRST_CHANCE] * 4, known)


class TranslatingDrafter(ModelDrafter):
    """Drafts with a model of another vocabulary, carried over as `translation` says.

    Its tokens are not drawn, so the same seed gives the same tokens as plain decoding.
    Errors as of `ModelDrafter`.
    """

    _draws = False
    _text: TranslatedText

    def __init__(self, backend: Backend, curve: CostCurve, translation: Translation) -> None:
        super().__init__(backend, curve, backend.tokenizer.vocab_size)
        self._calibration, self._translation = new_calibration(), translation
        self._places = calibration_of_places(constants.TRANSLATED_GAINS)
        self._text = TranslatedText(backend, translation, constants.LONGEST)
        self._usual_prompt = constants.TEXT_READ

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text, for which those before it say little: languages and tasks differ."""
        super().begin(tokens)
        self._places.fade(constants.TEXT_TRIES)

    def _new_builder(self, context: StepContext) -> Any:
        return TranslatedChain(context, self._calibration, self._translation, self._text)

    def _extend(self, builder: Any, logits: Logits, context: StepContext) -> bool:
        tokens, shares = top_tokens_of(logits[: self._vocab_size])
        return bool(tokens) and builder.take(tokens[0], shares[0])
