"""Hugging Face transformers as a contender of peers.py: the same GGUF file, as it reads it.

It turns all weights into float32, so what it reads for a token is several times the file; that is
what its users get. Needs `pip install torch transformers gguf accelerate`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from edgespec.bench.interleaving import Answer
from edgespec.decode.engine import Prompt
from edgespec.decode.stats import Counters


class Transformers:
    """Greedy `generate`: plain, with its prompt lookup, or assisted by a draft model.

    Args:
        lookup: most tokens its prompt lookup drafts; 0 looks nothing up.
        draft_model: file of the assistant, whose number of drafts it adapts by itself.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        threads: int,
        lookup: int = 0,
        draft_model: Path | None = None,
    ) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.name = name
        self._model = _load(model)
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        if draft_model is not None:
            self._options["assistant_model"] = _load(draft_model)

    def renew(self) -> None:
        """It remembers no text."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The greedy answer; its tokens come with the steps that gave them."""
        import torch

        ids = [token for token in prompt if isinstance(token, int)]
        times = _Times()
        start = time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=times,
                **self._options,
            )
        tokens = tuple(found[0].tolist()[len(ids) :])
        # The first call has the prompt. Where drafts were right at once the second one has several
        # tokens, which took no decoding: only those after them count.
        first, last = times.seen[1], times.seen[-1]
        counters = Counters(
            prompt_tokens=len(ids),
            generated_tokens=len(tokens),
            rounds=len(times.seen) - 2,
            accepted_tokens=len(tokens) - times.sizes[1] - (len(times.seen) - 2),
            time_to_first_token_s=first - start,
            decode_s=last - first,
        )
        return Answer(tokens, counters)


class _Times:
    """A streamer that only looks at the clock, and counts."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with the tokens of each step."""
        self.seen.append(time.perf_counter())
        self.sizes.append(int(value.numel()))

    def end(self) -> None:
        """Nothing is left to be printed."""


def _load(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
