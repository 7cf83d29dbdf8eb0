"""Counters of one generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened, in numbers. Times are in seconds.

    A round is one step of the target after the prompt. `host_s` is what drafting, choosing,
    accepting and counting took, all rounds together; `step_s` is the target's part. Of the prompt,
    `reused_tokens` were in the cache already.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    host_s: float = 0.0
    step_s: float = 0.0

    def add_round(self, drafted: int, emitted: int, step_s: float, host_s: float) -> None:
        """Count one round that emitted `emitted` tokens, the target's own one included."""
        self.rounds += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += emitted - 1
        self.generated_tokens += emitted
        self.step_s += step_s
        self.host_s += host_s

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own one included: plain decoding is 1.00."""
        return (self.accepted_tokens + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first one over the time after the first one."""
        tokens = self.accepted_tokens + self.rounds
        return tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def host_share(self) -> float:
        """Part of the rounds that was spent outside the target."""
        total = self.host_s + self.step_s
        return self.host_s / total if total else 0.0
