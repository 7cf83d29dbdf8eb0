"""How many tokens a prompt takes, before its model is loaded: a plan makes room for them.

Counted with the model's own vocabulary, which is loaded without its weights: 0.1 s for 49,152
tokens. No bound by letters would do: a rare script takes a token a byte, and so do letters that
make no word, while usual text takes one for every four.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

from edgespec.models.chat import Message, prompt_text
from edgespec.models.spec import ModelSpec

_SHORT_BYTES = 512  # whose tokens are not worth a look: there are at most as many, and a format's
_FORMAT_TOKENS = 64


def most_prompt_tokens(
    spec: ModelSpec, prompts: Iterable[str | Sequence[Message]], *, raw: bool = False
) -> int:
    """Tokens of the longest prompt, its chat format included; of short ones a ceiling.

    Raises as `models.chat.prompt_text`, and as the tokenizer of the file.
    """
    several = list(prompts)
    words = [
        one if isinstance(one, str) else "".join(str(message["content"]) for message in one)
        for one in several
    ]
    most_bytes = max((len(text.encode(errors="surrogatepass")) for text in words), default=0)
    if most_bytes <= _SHORT_BYTES:
        return most_bytes + _FORMAT_TOKENS
    from edgespec.backends.vocabulary import open_vocabulary  # which loads numpy and llama.cpp

    with closing(open_vocabulary(spec)) as tokenizer:
        return max(
            len(
                tokenizer.encode(
                    prompt_text(
                        one,
                        spec.chat_template,
                        bos_token=tokenizer.bos_text,
                        eos_token=tokenizer.eos_text,
                        control_texts=tokenizer.control_texts,
                        raw=raw,
                    )
                )
            )
            for one in several
        )
