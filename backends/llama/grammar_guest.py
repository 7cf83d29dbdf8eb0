"""The guest that tries grammars and regular expressions of strangers before they are compiled.

llguidance goes down into rules within rules by recursion, without a bound of its own, and the time
and memory that a grammar takes are not told by its length. What comes back from here is compiled
with the model's vocabulary in the engine's process, which takes as much there.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from edgespec.backends.llama.gbnf import lark_of
from edgespec.errors import UnsupportedError
from edgespec.models.processes import answer_questions

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
_STEPS = 8  # bytes that are drawn: of some forms the states are made then


def _answer(question: dict[str, Any]) -> dict[str, str]:
    """The document of a form that can be compiled, or what is wrong with it.

    An unknown control token is for the model's own vocabulary to tell, which knows all the others.
    """
    answers: list[dict[str, str]] = []

    def work() -> None:
        try:
            document = _document(question["kind"], question["text"])
            error = _tried(document, question["size"], json.dumps(question["control_texts"]))
            is_wrong = error and "special token" not in error
            answers.append({"error": error} if is_wrong else {"document": document})
        except UnsupportedError as problem:
            answers.append({"refusal": str(problem), "hint": problem.hint})
        except MemoryError:
            pass
        except BaseException as problem:  # a panic of Rust is one of these
            answers.append({"error": str(problem)})

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not answers:
        raise MemoryError
    return answers[0]


def _tried(document: str, size: int, control_texts: str) -> str:
    """What llguidance says against a document, or ""; the first steps are made as well."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LLGUIDANCE_LIMITS)  # type: ignore[arg-type]
    matcher = LLMatcher(_engine(size, control_texts), document, log_level=0, limits=limits)
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    for _ in range(_STEPS):
        allowed = int.from_bytes(bits, "little")
        if matcher.is_stopped() or not allowed:
            break
        # The highest bit: bytes come behind the vocabulary, so letters before control tokens.
        matcher.consume_token(allowed.bit_length() - 1)
        bits = matcher.compute_bitmask()
    return ""


class _Bytes:
    """A vocabulary as llguidance takes it: control tokens at their places, behind all the bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, control_texts: dict[int, str]) -> None:
        self._size = size
        self.tokens = [b""] * size + [bytes([one]) for one in range(256)] + [b"<end>"]
        for token, text in control_texts.items():
            self.tokens[token] = text.encode()
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*control_texts, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._size + one for one in (text.encode() if isinstance(text, str) else text)]


@lru_cache(maxsize=2)
def _engine(size: int, control_texts: str) -> LLTokenizer:
    from llguidance import LLTokenizer

    found = {int(token): text for token, text in json.loads(control_texts).items()}
    return LLTokenizer(_Bytes(size, found), slices=[])  # type: ignore[arg-type]


def _document(kind: str, text: str) -> str:
    """llguidance's document of a regular expression or a grammar. Raises UnsupportedError."""
    from llguidance import LLMatcher

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return json.dumps({"grammars": [{"lark_grammar": lark_of(text)}]})


if __name__ == "__main__":
    answer_questions(_answer)
