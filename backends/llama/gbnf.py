"""GBNF, llama.cpp's notation of grammars, in that of Lark, which llguidance reads."""

from __future__ import annotations

import re

from edgespec.backends.base import Tokenizer
from edgespec.errors import UnsupportedError

_ANY = f"[\\x00-{chr(0x10FFFF)}]"
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\.", re.DOTALL)
# Texts, classes of characters and comments, which may have anything in them; then what is left.
# One without an end goes on to that of the grammar: else each quote in it would be tried as one.
_PARTS = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\n]*'
_PART = re.compile(
    rf"{_PARTS}|(?P<not>!?)<(?:\[(?P<id>\d{{1,9}})\]|(?P<name>[^<>]+))>|\.", re.DOTALL
)
_RULE_OR_PART = re.compile(rf"{_PARTS}|(?P<rule>::=)", re.DOTALL)
_TOKEN_RULE = "edgespectoken"


def with_token_ids(grammar: str, tokenizer: Tokenizer) -> str:
    """GBNF whose tokens are named by their ids: `<[2]>` for `<think>`, `!<[2]>` for any other.

    One that ends an answer is nothing here: it may come wherever the text may end. Raises
    UnsupportedError for a name that is not one token.
    """

    def by_id(part: re.Match[str]) -> str:
        if part["name"] is None and part["id"] is None:
            return part[0]
        ids = (
            [int(part["id"])]
            if part["id"]
            else tokenizer.encode(part[0].lstrip("!"), add_special=False)
        )
        if len(ids) != 1:
            raise UnsupportedError(
                f"the grammar names {part[0]}, which is {len(ids)} tokens of this model",
                hint="name a token of its vocabulary, or write a text in quotes",
            )
        if not part["not"] and tokenizer.is_end(ids[0]):
            return '""'
        return f"{part['not']}<[{ids[0]}]>"

    names_any = "<" in grammar and _is_gbnf(grammar)
    return _PART.sub(by_id, grammar) if names_any else grammar


def lark_of(grammar: str) -> str:
    """A grammar in Lark's notation. Raises UnsupportedError for what is neither that nor GBNF.

    Tokens are named by their ids, see `with_token_ids`.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if not grammar.strip():
        raise UnsupportedError("the grammar is empty", hint="it has a rule root (GBNF) or start")
    tokens: dict[str, str] = {}  # names of rules that stand for tokens, which GBNF's reader lacks

    def converted(part: re.Match[str]) -> str:
        """A part of GBNF as its reader takes it: no long escapes, no dot, no tokens."""
        if part["id"] is None:
            return _ANY if part[0] == "." else _ESCAPE.sub(_short_escape, part[0])
        token = f"<[{'^' * bool(part['not'])}{part['id']}]>"
        return f" {tokens.setdefault(token, f'{_TOKEN_RULE}{len(tokens)}')} "

    try:
        if is_lark_syntax(grammar) and not _is_gbnf(grammar):
            return grammar
        text = _PART.sub(converted, grammar)
        # A rule that names itself is none of characters alone, which would be read as one of them.
        rules = [f'{name} ::= {name} "a" | "b"' for name in tokens.values()]
        lark = gbnf_to_lark("\n".join([text, *rules]) if rules else text)
    except MemoryError:
        raise
    except Exception as problem:  # of any kind: it raises bare ones
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise UnsupportedError(
            f"the grammar cannot be read: {' '.join(reason.split())[:300]}",
            hint="it is GBNF with a rule root, or Lark with a rule start",
        ) from None
    for token, name in tokens.items():
        lark = re.sub(rf'(?m)^{name}: {name} "a"\s*\| "b"$', f"{name}: {token}", lark)
    return lark


def _is_gbnf(grammar: str) -> bool:
    """Whether a rule is written as in GBNF, found at its first one."""
    return "::=" in grammar and any(one["rule"] for one in _RULE_OR_PART.finditer(grammar))


def _short_escape(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or "0", 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    if not code:
        return escape[0] if escape[1] is None and escape[2] is None else "\\x00"
    return f"\\x{code:02x}" if code < 128 else chr(code)
