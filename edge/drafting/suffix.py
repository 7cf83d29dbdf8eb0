"""The suffix drafter: what followed the last time the text ended like this?

An index of the last texts gives earlier places where a text ended the same way.
Every place votes for the token that followed it, with the square of its match
length as weight; the winner becomes a node. Its probability is calibrated by counting over

    match length x share of the votes x number of places that agree x this text or an older one

where length and age are those of the heaviest place that voted for it. (Edges deeper in the draft
are described as if the draft had already been accepted, so one table serves every depth.)
Ideas: prompt lookup decoding, SuffixDecoding (arXiv 2411.04975), consensus of
several matches from GOOSE (arXiv 2604.02047).

The index has the last texts of a process, prompts and answers, and where in them the same tokens
stood. All users' drafters read one. Hash chains over the last 4, 2 and 1 tokens of every place, as
in LZ77 compressors, lead from the end of a text to earlier places that end the same way. A text
that begins like another one shares its places up to there: of a conversation, of a long system
prompt, or of the same question again only the rest is added. The least recently written text goes
where there are too many bytes.

Texts of different histories (the users of different API keys) never meet: their places lie in
different chains, and what a hash brings together all the same is not looked at.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from operator import itemgetter

from edgespec.drafting import constants
from edgespec.drafting.constants import (
    AGREEING_BORDERS,
    LENGTH_BORDERS,
    OF_OLDER_TEXTS,
    OF_THIS_TEXT,
    OLD_TEXT_WEIGHT,
    VOTE_BORDERS,
)
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    CountingDrafter,
    Counts,
    Proposal,
    StepContext,
    VerifyResult,
)
from edgespec.memory.store.texts import KeptText
from edgespec.prefix import common_prefix_length

ORDERS = (4, 2, 1)  # lengths of the indexed endings, longest first
LENGTH_CAP = max(LENGTH_BORDERS)  # matches are not followed further back than this
_HASHES = 1 << 16
# A place is 32 bits: the number of its text, times this, and how many tokens stand before what came
# next.
_PLACES = 1 << 20
_TOKEN_BYTES = 16  # of a token and of its links, by order


class Text:
    """One text: its tokens, and the places in it that no other text has."""

    __slots__ = ("continued", "first", "history", "is_new", "links", "number", "shared", "tokens")

    def __init__(self, number: int, history: str, tokens: array[int]) -> None:
        self.number = number
        self.history = history
        self.tokens = tokens
        self.first = len(tokens)  # places before it are those of other texts:
        self.shared: dict[int, int] = {}  # by their numbers, so many tokens of each
        # By order and place: the place before it with the same hash; 0 is none.
        self.links = [array("I") for _ in ORDERS]
        self.is_new = True  # else of an earlier process, or nobody has asked for it
        self.continued = 0  # the number of the text that it goes on from; 0 is none

    @property
    def nbytes(self) -> int:
        own = len(self.tokens) - self.first
        more = 1024 + 128 * len(self.shared)  # besides its tokens and links
        return more + 4 * self.first + _TOKEN_BYTES * own


# Where a text ended like the one that is written does now: the tokens of its text, the index of
# what came next, how many tokens are the same, and whether it is the text that is written.
Place = tuple["array[int]", int, int, bool]


class TextIndex:
    """Texts and their hash chains.

    Args:
        limit_bytes: of all texts.
    """

    def __init__(self, limit_bytes: int = 3 << 19) -> None:
        self._limit_bytes = limit_bytes
        self._longest = min(_PLACES - 1, limit_bytes // (2 * _TOKEN_BYTES))
        self._texts: dict[int, Text] = {}  # the least recently written first
        self._bytes = 0
        self._last_number = 0
        # By order: the last place whose ending has this hash.
        self._heads: list[array[int]] = []

    @property
    def nbytes(self) -> int:
        """Ceiling in bytes; growing arrays take up to an eighth more."""
        return self._limit_bytes * 9 // 8 + len(ORDERS) * 4 * _HASHES

    def texts(self) -> Iterator[Text]:
        """All of them, the least recently written first."""
        return iter(self._texts.values())

    def recall(self, history: str, tokens: Sequence[int]) -> None:
        """Add a text of an earlier process."""
        self.begin(history, tokens).is_new = False

    def begin(self, history: str, tokens: Sequence[int], count: int | None = None) -> Text:
        """A new text, which has the places of others as far as it begins like them.

        With a `count` only so many of its tokens are appended now: `extend` is told the others.
        """
        if not self._heads:
            self._heads = [array("I", [0]) * _HASHES for _ in ORDERS]
        ids = array("i", tokens)
        alike, known = self._most_alike(history, ids)
        text = Text(self._free_number(), history, ids[:known])
        if alike is not None:
            text.shared = {one: min(count, known) for one, count in alike.shared.items()}
            text.shared[alike.number] = known
            if known >= len(alike.tokens) - 8:  # all but the end of an answer
                text.continued = alike.number
            for number in text.shared:  # which go last, as the text needs their places
                if number in self._texts:
                    self._texts[number] = self._texts.pop(number)
        self._texts[text.number] = text
        self._bytes += text.nbytes
        return self.extend(text, ids[known:count])

    def _most_alike(self, history: str, ids: array[int]) -> tuple[Text | None, int]:
        """The text with the longest common beginning, and how many tokens of it are shared."""
        found, known = None, 15  # tokens in common at most, which are not worth sharing
        last = len(ids) - 1  # whose place the new text has in any case
        for one in self._texts.values():
            if one.history == history and one.tokens[known : known + 1] == ids[known : known + 1]:
                length = min(common_prefix_length(one.tokens, ids), last)
                if length > known:
                    found, known = one, length
        return (found, known) if found is not None else (None, 0)

    def _free_number(self) -> int:
        most = (1 << 32) // _PLACES - 1
        if len(self._texts) >= most:
            self._forget_oldest()
        while True:
            self._last_number = self._last_number % most + 1
            if self._last_number not in self._texts:
                return self._last_number

    def extend(self, text: Text, tokens: Sequence[int]) -> Text:
        """Append to a text, about 2 us a token.

        Returns the text; a new one with its end where it was forgotten meanwhile or is too long.
        """
        is_there = self._texts.get(text.number) is text
        if not is_there or len(text.tokens) + len(tokens) > self._longest:
            kept = (text.tokens + array("i", tokens))[-self._longest // 2 :]
            if is_there:
                self._forget(text)
            anew = Text(self._free_number(), text.history, array("i"))
            anew.is_new = text.is_new
            self._texts[anew.number] = anew
            self._bytes += anew.nbytes
            return self.extend(anew, kept)
        self._bytes += _TOKEN_BYTES * len(tokens)
        if self._bytes > self._limit_bytes:
            self._make_room(text)
        if next(reversed(self._texts)) != text.number:
            self._texts[text.number] = self._texts.pop(text.number)
        self._append(text, tokens)
        return text

    def _make_room(self, text: Text) -> None:
        """Forget the oldest ones but this, which takes half of the bytes at most."""
        self._texts[text.number] = self._texts.pop(text.number)
        while self._bytes > self._limit_bytes and len(self._texts) > 1:
            self._forget_oldest()

    def take_back(self, text: Text) -> None:
        """Leave the index as if a text had never come: 2 us for each token of its own."""
        if self._texts.get(text.number) is not text:
            return
        self._forget(text)
        salt, tokens = _salt(text.history), text.tokens
        while len(tokens) > text.first:
            place, ending = text.number * _PLACES + len(tokens), [0, 0, 0, *tokens[-4:]][-4:]
            for order, heads, links in zip(ORDERS, self._heads, text.links, strict=True):
                key = ending[-1] if order == 1 else hash(tuple(ending[-order:]))
                slot, before = (key ^ salt) % _HASHES, links.pop()
                if heads[slot] == place:  # no other text was written meanwhile
                    heads[slot] = before
            tokens.pop()

    def _forget_oldest(self) -> None:
        self._forget(next(iter(self._texts.values())))

    def _forget(self, text: Text) -> None:
        """Links to its places end there, or where its number is another text's by then."""
        del self._texts[text.number]
        self._bytes -= text.nbytes

    def _append(self, text: Text, added: Sequence[int]) -> None:
        tokens, salt = text.tokens, _salt(text.history)
        (heads4, heads2, heads1), (links4, links2, links1) = self._heads, text.links
        place = text.number * _PLACES + len(tokens)
        a, b, c = ([0, 0, 0, *tokens[-3:]])[-3:]
        for d in added:
            tokens.append(d)
            place += 1
            for key, heads, links in (
                (hash((a, b, c, d)), heads4, links4),
                (hash((c, d)), heads2, links2),
                (d, heads1, links1),
            ):
                slot = (key ^ salt) % _HASHES
                links.append(heads[slot])
                heads[slot] = place
            a, b, c = b, c, d

    # -- looking up ------------------------------------------------------------------------

    def is_familiar(self, text: Text, more: Sequence[int]) -> bool:
        """Whether the last four tokens, with `more` behind the text, stood together before.

        The last place with their hash alone is looked at.
        """
        ending = [*text.tokens[-4:], *more[-4:]][-4:]
        if len(ending) < 4:
            return False
        if more:
            place = self._heads[0][(hash(tuple(ending)) ^ _salt(text.history)) % _HASHES]
        else:
            place = text.links[0][-1] if text.links[0] else 0
        number, end = divmod(place, _PLACES)
        other = self._texts.get(number)
        if other is None or other.history != text.history:
            return False
        return other.tokens[end - 4 : end].tolist() == ending

    def places(self, text: Text) -> list[Place]:
        """Earlier places that ended like the text does now: by the length of the ending that led
        there, the newest first."""
        tokens, found = text.tokens, {}
        end = len(tokens)
        for chain, order in enumerate(ORDERS):
            other: Text | None = text
            links, is_read = text.links[chain], True
            place = links[-1] if links and end >= order else 0
            for _ in range(16):  # links of one hash chain
                number, next_ = divmod(place, _PLACES)
                if other is None or number != other.number:
                    other = self._texts.get(number)
                    if other is None:
                        break  # the chain ends, or what it led to was forgotten
                    links, is_read = other.links[chain], other.history == text.history
                at = next_ - 1 - other.first
                if not 0 <= at < len(links):
                    break  # of a text that had this number before
                if is_read and place not in found:
                    is_own = other is text or next_ < text.shared.get(other.number, 0)
                    source = tokens if is_own else other.tokens
                    length = _match(source, next_, tokens, end)
                    if length >= order:  # a smaller one is a hash collision
                        found[place] = (source, next_, length, is_own)
                place = links[at]
        return list(found.values())


def _match(source: array[int], next_: int, tokens: array[int], end: int) -> int:
    """How many tokens before one place are those before another, at most `LENGTH_CAP`.

    As many where both texts are the same from their beginnings on, eight tokens at least.
    """
    limit, block = min(LENGTH_CAP, next_, end), 8
    length = 0
    while length < limit and source[next_ - 1 - length] == tokens[end - 1 - length]:
        length += 1
        while length >= block and length + block <= limit:  # many at C speed
            there, here = next_ - length, end - length
            if source[there - block : there] != tokens[here - block : here]:
                limit = min(limit, length + block)
                break
            length += block
    return LENGTH_CAP if length == next_ == end and length >= block else length


def _salt(history: str) -> int:
    """What keeps the chains of a history apart from those of others."""
    return hash(history) if history else 0


def to_keep(texts: Iterable[Text]) -> list[KeptText]:
    """What this process wrote, with its history: conversations as a whole, not each turn again."""
    new = [one for one in texts if one.is_new]
    continued = {one.continued for one in new}
    return [
        (one.history, one.tokens.tolist())
        for one in new
        if one.number not in continued and len(one.tokens) > 1
    ]


# Cells of the calibration. A value lands in the bucket of the last border it reaches.
_NUM_SHARES = len(VOTE_BORDERS) + 1
_NUM_COUNTS = len(AGREEING_BORDERS) + 1
NUM_CELLS = (len(LENGTH_BORDERS) + 1) * _NUM_SHARES * _NUM_COUNTS * 2
# The weight of its vote comes with it.
_Vote = tuple[float, Place]


def new_calibration(known: Counts, make: type[Calibration] = Calibration) -> Calibration:
    """Cells are numbered ((length * shares + share) * counts + count) * 2 + this_text."""
    lengths = [cell // (2 * _NUM_COUNTS * _NUM_SHARES) for cell in range(NUM_CELLS)]
    groups = [2 * length + cell % 2 for cell, length in enumerate(lengths)]
    recents = [0 if length < 4 else 1 if length < 6 else 2 for length in lengths]
    pairs = zip(OF_OLDER_TEXTS, OF_THIS_TEXT, strict=True)
    priors = [chance for pair in pairs for chance in pair]
    return make(NUM_CELLS, groups, recents, priors, known)


class SuffixDrafter(CountingDrafter):
    """Drafts from repetitions in the text, in the last texts of this process, and of itself.

    Args:
        texts: the index of these texts.
    """

    name = "suffix"

    def __init__(self, texts: TextIndex | None = None) -> None:
        super().__init__(new_calibration(known_counts()))
        self.texts = texts or TextIndex()
        self._text: Text | None = None
        # Of a text that is read: its tokens, how many of them are in the index already, and whether
        # nobody has asked for it yet.
        self._coming: Sequence[int] = ()
        self._num_indexed, self._is_ahead = 0, False

    @property
    def nbytes(self) -> int:
        return self.texts.nbytes

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text; older ones of its history stay as a weaker source."""
        super().begin(tokens)
        self.prepare(tokens, len(tokens))
        self._num_indexed = 0

    def prepare(self, tokens: Sequence[int], count: int, *, ahead: bool = False) -> None:
        """Index the first `count` tokens, about 4 us each."""
        text, done = self._text, self._num_indexed
        if text is not None and self._is_ahead:
            size = len(self._coming)  # to which its answer's first token may have come
            is_same = tokens[:size] == self._coming and len(tokens) <= size + 1
            if not is_same or text.history != self.history:
                self.texts.take_back(text)  # nobody has asked for it
                done = 0
        if text is None or not done or tokens[:done] != self._coming[:done]:
            text = self.texts.begin(self.history, tokens, max(1, count))
            done = max(1, count, len(text.tokens))  # another text may have had more
        elif count > done:
            text, done = self.texts.extend(text, tokens[done:count]), count
        text.is_new = not ahead
        self._text, self._coming, self._num_indexed, self._is_ahead = text, tokens, done, ahead

    def recall(self, texts: Sequence[KeptText]) -> None:
        """Texts of earlier runs are a source like older texts of this one."""
        for history, tokens in texts:
            self.texts.recall(history, tokens)

    def written(self) -> list[KeptText]:
        """The texts of this process, all users', with the history of each."""
        return to_keep(self.texts.texts())

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the last four tokens, with `tokens` behind the text, stood together before."""
        return self._text is not None and self.texts.is_familiar(self._text, tokens)

    # -- proposing -------------------------------------------------------------------------

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        votes = self._votes()
        self._proposal = self._chain(votes, context) if votes else EMPTY
        return self._proposal

    def _votes(self) -> list[_Vote]:
        """Earlier places that ended like the text does now, heaviest first."""
        if self._text is None:
            return []
        votes = []
        for place in self.texts.places(self._text):
            _, _, length, is_own = place
            weight = float(length * length)
            if not is_own and length < LENGTH_CAP:
                weight *= OLD_TEXT_WEIGHT
            votes.append((weight, place))
        votes.sort(key=itemgetter(0), reverse=True)
        return votes

    def _chain(self, votes: list[_Vote], context: StepContext) -> Proposal:
        """What most of the votes say, token by token."""
        tokens: list[int] = []
        probabilities: list[float] = []
        cells: list[int] = []
        probability = 1.0
        while len(tokens) < context.max_nodes:
            token, cell, votes = self._elect(votes, tokens)
            if not votes:
                break
            probability *= self._calibration.probability(cell)
            if probability < context.min_probability and tokens:
                break
            tokens.append(token)
            probabilities.append(probability)
            cells.append(cell)
        self._cells = cells
        parents = range(-1, len(tokens) - 1)
        return Proposal(tokens, parents, probabilities, (self.name,) * len(tokens))

    def _elect(self, votes: list[_Vote], path: Sequence[int]) -> tuple[int, int, list[_Vote]]:
        """What `votes` say comes after the text and `path`: token, cell, and who voted for it.

        Nobody where all their texts have ended.
        """
        depth = len(path)
        if len(votes) == 1:
            [(_, (tokens, next_, _, is_own))] = votes
            at = next_ + depth
            if at < len(tokens):
                return tokens[at], _cell(votes, depth, 1.0), votes
            if not is_own:
                return 0, 0, []
            return path[at - len(tokens)], _cell(votes, depth, 1.0), votes
        ballots: list[tuple[int, _Vote]] = []
        weights: dict[int, float] = {}
        for vote in votes:
            weight, (tokens, next_, _, is_own) = vote
            at = next_ + depth
            if at < len(tokens):
                token = tokens[at]
            elif is_own:
                # A place near the end reads on in the draft itself: that is how loops continue.
                token = path[at - len(tokens)]
            else:
                continue  # an older text has ended
            ballots.append((token, vote))
            weights[token] = weights.get(token, 0.0) + weight
        if len(weights) == 1:
            agreeing = votes if len(ballots) == len(votes) else [vote for _, vote in ballots]
            return ballots[0][0], _cell(agreeing, depth, 1.0), agreeing
        if not weights:
            return 0, 0, []
        winner = max(weights, key=weights.__getitem__)
        agreeing = [vote for ballot, vote in ballots if ballot == winner]
        return winner, _cell(agreeing, depth, weights[winner] / sum(weights.values())), agreeing

    # -- learning --------------------------------------------------------------------------

    def observe(self, result: VerifyResult) -> None:
        if self._proposal.tokens:
            super().observe(result)
        if self._text is not None:
            self._text = self.texts.extend(self._text, result.emitted)

    def share_with(self, other: SuffixDrafter) -> None:
        super().share_with(other)
        self.texts = other.texts


def _cell(agreeing: list[_Vote], depth: int, share: float) -> int:
    """The calibration cell of a token that these voted for."""
    _, _, length, is_own = agreeing[0][1]
    cell = bisect_right(LENGTH_BORDERS, length + depth) * _NUM_SHARES
    cell += bisect_right(VOTE_BORDERS, share)
    return (cell * _NUM_COUNTS + bisect_right(AGREEING_BORDERS, len(agreeing))) * 2 + is_own


@cache
def known_counts() -> Counts:
    """Hits and tries by cell that the file of this package has, of other models."""
    text = files("edgespec.drafting").joinpath("priors.json").read_text(encoding="utf-8")
    return cautious({int(cell): counts for cell, counts in json.loads(text)["cells"].items()})


def cautious(counts: Counts) -> Counts:
    """The same number of tries, at the odds that one may expect of another model."""
    found = {}
    for cell, (hits, tries) in counts.items():
        odds = constants.PRIOR_ODDS * (hits + 0.5) / (tries - hits + 0.5)
        found[cell] = (tries * odds / (1.0 + odds), tries)
    return found
