"""The guest that tries grammars and regular expressions of strangers before they are compiled.

llguidance goes down into rules within rules by recursion, without a bound of its own, and the time
and memory that a grammar takes are not told by its length. What comes back from here is compiled
with the model's vocabulary in the engine's process, which takes as much there.
"""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends.llama.gbnf import lark_of
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.requests import FORM_BYTES, FORM_TOKEN_BYTES
from edgespec.models.processes import answer_questions, limit_memory, limit_time

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MODULE = "edgespec.backends.llama.grammar_guest"
# In llguidance's units. With its own defaults schemas were found that take 0.8 s to compile and as
# long for one token, and 250,000 states of 1 to 2 KB; with these no call of 10,000 hostile forms
# took 50 ms (`benchmarks/schemas.py`), and public schemas that its defaults take still compile.
LLGUIDANCE_LIMITS = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 60_000,
    "verbose_errors": False,
}
# Of the thread that compiles: a part of what any thread of the engine's process has (8 MiB on
# Linux, 16 on macOS, 2 to 4 on Windows), with room for 400 to 600 rules within rules.
_STACK_BYTES = 1 << 20
_BUILDING_S = 30.0  # for a vocabulary: 0.1 s for 49,152 tokens
MOST_FORCED = 8 << 10  # bytes that are cut into tokens at once: 8 ms in which nobody else writes
_ANSWERS, _TOKENS = 3, 12  # that are begun, and tokens of each
_LOOK_S, _MOST_ASLEEP = 0.05, 6  # between looks at the thread; of these, in which it waits
_SLOW_S = 0.05  # for a token; no schema takes that (`benchmarks/schemas.py`)
_SLOW_HELD_S = 0.02  # of that, in calls while which no other thread of Python's goes on
CONTROL = b"\xff"  # before the names of tokens that stand for no text


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """The document of a form that can be compiled, or what is wrong with it.

    A vocabulary is told once, by a name; a form whose vocabulary is not known is not looked at.
    """
    name = question["vocabulary"]
    if "pieces" in question:
        _ENGINES.clear()  # a guest has one
        limit_time(_BUILDING_S)
        _ENGINES[name] = _engine(json.loads(question["pieces"]), question["slices"])
        return {}
    if name not in _ENGINES:
        return {"unknown": True}
    engine = _ENGINES[name]
    limit_memory(FORM_BYTES + FORM_TOKEN_BYTES * engine.vocab_size)
    answers: list[dict[str, str]] = []

    def work() -> None:
        try:
            document = _document(question["kind"], question["text"])
            error = _tried(document, engine)
            answers.append({"error": error} if error else {"document": document})
        except UnsupportedError as problem:
            answers.append({"unsupported": str(problem), "hint": problem.hint})
        except MemoryError:
            pass
        except BaseException as problem:  # a panic of Rust is one of these
            answers.append({"error": str(problem)})

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    asleep = 0
    while thread.is_alive() and asleep < _MOST_ASLEEP:
        thread.join(_LOOK_S)
        asleep = asleep + 1 if _is_asleep(thread.native_id) else 0
    if not answers:
        raise MemoryError
    return answers[0]


def _is_asleep(thread_id: int | None) -> bool:
    """Whether a thread waits. Where no memory is left llguidance may wait for itself, for ever."""
    with suppress(OSError):  # it is gone, or this is not Linux, where memory is not limited
        return Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2][1] == "S"
    return False


def _tried(document: str, engine: LLTokenizer) -> str:
    """What there is against a document, or "".

    Answers of it are begun as well: where a token takes long, everybody's next token would wait.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LLGUIDANCE_LIMITS)  # type: ignore[arg-type]
    matcher = LLMatcher(engine, document, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    draw = random.Random(1)
    for _ in range(_ANSWERS):
        matcher.reset()
        for _ in range(_TOKENS):
            if matcher.is_stopped():  # it has no mask then
                break
            began_s = time.thread_time()
            if (size := len(matcher.compute_ff_bytes())) > MOST_FORCED:
                return (
                    f"it forces {size:,} bytes of an answer at once, {MOST_FORCED:,} are the most"
                )
            matcher.compute_ff_tokens()
            held_s = time.thread_time() - began_s
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            spent_s = time.thread_time() - began_s
            if bits:
                place = draw.randrange(engine.vocab_size)
                later = bits >> place << place  # the next token that may come, from a random one on
                bits = later or bits
                token = (bits & -bits).bit_length() - 1
                began_s = time.thread_time()
                matcher.consume_token(token)
                took_s = time.thread_time() - began_s
                held_s, spent_s = held_s + took_s, spent_s + took_s
            if held_s > _SLOW_HELD_S or spent_s > _SLOW_S:
                return f"a token of an answer takes {spent_s * 1e3:.0f} ms"
            if not bits:
                break
    return ""


class _Tokens:
    """A vocabulary as llguidance takes it. Texts are cut into bytes, which most have as tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, pieces: list[str]) -> None:
        self.tokens = [piece.encode("latin-1") for piece in pieces]
        self.special_token_ids = [
            token for token, piece in enumerate(self.tokens) if piece.startswith(CONTROL)
        ]
        for token in self.special_token_ids:
            self.tokens[token] = self.tokens[token].removeprefix(CONTROL)
        self._of_bytes = {one[0]: token for token, one in enumerate(self.tokens) if len(one) == 1}
        self.eos_token_id = self.special_token_ids[0] if self.special_token_ids else 0

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._of_bytes[one] for one in data if one in self._of_bytes]


_ENGINES: dict[str, LLTokenizer] = {}


def _engine(pieces: list[str], slices: list[str]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Tokens(pieces), slices=slices)  # type: ignore[arg-type]


def _document(kind: str, text: str) -> str:
    """llguidance's document of a regular expression or a grammar. Raises UnsupportedError."""
    from llguidance import LLMatcher

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return json.dumps({"grammars": [{"lark_grammar": lark_of(text)}]})


if __name__ == "__main__":
    answer_questions(_answer)
