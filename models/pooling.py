"""How a model's file says that texts become vectors or scores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.models.gguf.reader import Gguf

# By their numbers in GGUF (`llama_pooling_type`): what of its tokens' states stands for a text.
POOLINGS = ("none", "mean", "cls", "last", "rank")
RANK = "rank"
# Made to be cut off (Matryoshka): says the file itself, or the papers of these models.
_SHORTENED_ARCHS = ("gemma-embedding", "jina-bert-v3", "nomic-bert-moe")
_SHORTENED_NAMES = re.compile(r"nomic-embed-text-v1\.5|qwen3-embedding|snowflake-arctic-embed-.*v2")
_SHORTENED = "matryoshka"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a file says about embeddings.

    `kind` is one of `POOLINGS`, or "" where the file is silent: it was made to write text.
    Tokens see those before them alone where it is `causal`. First parts of vectors that it
    `shortens` are vectors, too. A `template` joins {query} and {document} for a score.
    """

    kind: str = ""
    causal: bool = True
    shortens: bool = False
    template: str = ""


def pooling_of(gguf: Gguf, *, is_encoder: bool) -> Pooling:
    """Of an encoder that says nothing the mean stands for a text."""
    arch = gguf.text("general.architecture")
    number = gguf.metadata.get(f"{arch}.pooling_type")
    kind = "mean" if is_encoder else ""
    if type(number) is int and 0 <= number < len(POOLINGS):
        kind = POOLINGS[number] if number or not is_encoder else kind
    causal = gguf.metadata.get(f"{arch}.attention.causal", not is_encoder)
    names = [gguf.text(f"general.{key}").lower() for key in ("name", "basename")]
    shortens = (
        arch in _SHORTENED_ARCHS
        or any(_SHORTENED in key for key in gguf.metadata)
        or any(_SHORTENED_NAMES.search(name.replace(" ", "-")) for name in names)
    )
    template = gguf.text("tokenizer.chat_template.rerank")
    has_both = "{query}" in template and "{document}" in template
    return Pooling(kind, causal is not False, shortens, template if has_both else "")


def joined(template: str, query: str, document: str) -> str:
    """A template with both texts, neither of which is looked into."""
    texts = {"{query}": query, "{document}": document}
    parts: Sequence[str] = re.split(r"(\{query\}|\{document\})", template)
    return "".join(texts.get(part, part) for part in parts)
