"""What a person can ask of sampling, by llama.cpp's names, and which values no sampler honours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from edgespec.annotations import check_types
from edgespec.errors import UnsupportedError
from edgespec.option_fields import option, options_of

PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL = "penalties", "dry", "top_n_sigma", "top_k", "typ_p"
TOP_P, MIN_P, XTC, TEMPERATURE = "top_p", "min_p", "xtc", "temperature"
# llama.cpp's order (`common/common.h`, the default of `samplers`).
ORDER = (PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL, TOP_P, MIN_P, XTC, TEMPERATURE)
BREAKERS = ("\n", ":", '"', "*")
MIROSTAT_2 = 2
# llama.cpp's names of fields of a request, where ours are others.
FIELD_NAMES = {"repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n"}
LARGE = 1e6  # penalties up to this size leave finite logits finite
LOWEST = -(2.0 - 2.0**-23) * 2.0**127  # the least finite number of a logit's type


# Other words for samplers, llama.cpp's among them.
SAMPLER_WORDS = {"typical": TYPICAL, "typical_p": TYPICAL, "temp": TEMPERATURE, "nucleus": TOP_P}
_MEDUSAS = 0.09  # epsilon of typical acceptance in the paper's runs (arXiv 2401.10774)


def _epsilon_of(text: str) -> float:
    """The epsilon of typical acceptance that an option names; 0 for exact."""
    name, _, number = text.partition("=")
    if text != "exact" and name != "typical":
        raise ValueError("is not exact, typical or typical=EPS")
    try:
        return 0.0 if text == "exact" else float(number or _MEDUSAS)
    except ValueError:
        raise ValueError("is not exact, typical or typical=EPS") from None


def _order_of(text: str) -> tuple[str, ...]:
    """Names of samplers, with llama.cpp's semicolons or commas between them."""
    words = [word.strip().lower().replace("-", "_") for word in re.split("[;,]", text)]
    return tuple(SAMPLER_WORDS.get(word, word) for word in words if word)


def _bias_of(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError("is not TOKEN=BIAS") from None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to sample; the default is greedy decoding. Raises `UnsupportedError` out of range.

    Meanings are llama.cpp's.

    Args:
        seed: The same seed gives the same answer. More: None draws one, which `Sampler.seed` tells.
        temperature: 0: always the likeliest token; higher is more varied.
        top_k: Keep this many of the likeliest tokens; 0: all.
        top_p: Keep the likeliest tokens up to this total probability; 1: all.
        min_p: Drop tokens less likely than this share of the likeliest; 0: none.
        typical_p: Keep the most typical tokens up to this total; 1: all. More: those nearest to the
            expected surprise (arXiv 2202.00666).
        top_n_sigma: Keep logits within this many deviations of the best; 0: all. More: arXiv
            2411.07641.
        xtc_probability: How often the likeliest tokens are left out (XTC); 0: never. More: all that
            count as likely, but for the last of them.
        xtc_threshold: XTC: tokens above this probability count as likely. More: above 0.5 none do.
        dynatemp_range: Vary the temperature by entropy, plus or minus this; 0: off.
        dynatemp_exponent: Exponent from entropy to temperature. More: of the entropy as 0 to 1.
        mirostat: 2: mirostat, in place of the other filters; 0: off. More: it keeps the surprise of
            tokens near a target (arXiv 2007.14966); bias and temperature stay.
        mirostat_tau: Mirostat: target entropy, in bits.
        mirostat_eta: Mirostat: learning rate.
        repetition_penalty: Make tokens already used less likely; 1: off. More: divides positive and
            multiplies other logits (CTRL, arXiv 1909.05858).
        penalty_last_n: Penalties look back this many tokens; -1: all. More: the prompt's, too.
        presence_penalty: Subtracted from the logits of tokens already used.
        frequency_penalty: Subtracted once for each time a token was used.
        dry_multiplier: DRY: penalise tokens that extend a repetition; 0: off.
        dry_base: DRY: growth of the penalty per repeated token.
        dry_allowed_length: DRY: longest repetition without a penalty, in tokens.
        dry_penalty_last_n: DRY: tokens to look back; -1: all.
        dry_sequence_breakers: DRY: text that ends a repetition; none: no such text.
        logit_bias: Add to the logit of a token id, as ID=BIAS: 42=-5. More: before everything else;
            minus infinity forbids a token. A mapping or pairs, which are kept sorted by token, so
            that two equal settings compare and hash as equal.
        accept_typical: typical or typical=EPS takes likely drafts that the model would not have
            picked: faster, another answer; exact: never. More: the epsilon (Medusa, arXiv
            2401.10774); 0 is never. The only setting with which drafts change an answer.
        samplers: The samplers to use, in order: top_k;top_p;temperature. More: what is left out is
            off.
    """

    seed: int | None = option(None, also="-s", by_itself={-1: None})
    temperature: float = option(
        0.0, also="--temp", low=0, usual="0 is greedy, 0.8 is llama.cpp's default"
    )
    top_k: int = option(
        0, low=0, by_itself={-1: 0}, usual="0 keeps all tokens, 40 is llama.cpp's default"
    )
    top_p: float = option(1.0, low=0, high=1, usual="1 keeps all tokens")
    min_p: float = option(0.0, low=0, high=1, usual="0 keeps all tokens")
    typical_p: float = option(
        1.0, called="--typical --typical-p", low=0, high=1, usual="1 keeps all tokens"
    )
    top_n_sigma: float = option(
        0.0, also="--top-nsigma", low=-1, high=LARGE, usual="0 keeps all tokens, 1 is a usual value"
    )
    xtc_probability: float = option(0.0, low=0, high=1, usual="0 is off, 0.5 is a usual value")
    xtc_threshold: float = option(
        0.1, low=0, high=1, usual="0.1 is the default; above 0.5 it is off"
    )
    dynatemp_range: float = option(0.0, low=0, high=LARGE, usual="0 is a fixed temperature")
    dynatemp_exponent: float = option(
        1.0, called="--dynatemp-exp", low=0, high=LARGE, usual="1 is the default"
    )
    mirostat: int = option(0, low=0, high=2, usual="2 is mirostat, 0 is off")
    mirostat_tau: float = option(
        5.0, called="--mirostat-ent", low=0, high=LARGE, usual="5 is the default"
    )
    mirostat_eta: float = option(
        0.1, called="--mirostat-lr", low=0, high=1, usual="0.1 is the default"
    )
    repetition_penalty: float = option(
        1.0,
        called="--repeat-penalty",
        low=1 / LARGE,
        high=LARGE,
        usual="1 is none, 1.1 a usual one",
    )
    penalty_last_n: int = option(
        64, called="--repeat-last-n", low=-1, usual="-1 counts the whole history, 64 is the default"
    )
    presence_penalty: float = option(0.0, low=-LARGE, high=LARGE, usual="0 is no penalty")
    frequency_penalty: float = option(0.0, low=-LARGE, high=LARGE, usual="0 is no penalty")
    dry_multiplier: float = option(0.0, low=0, high=LARGE, usual="0 is off, 0.8 is a usual value")
    dry_base: float = option(1.75, low=1, high=LARGE, usual="1.75 is the default")
    dry_allowed_length: int = option(2, low=1, usual="2 is the default")
    dry_penalty_last_n: int = option(64, low=-1, usual="-1 searches all, 64 is the default")
    dry_sequence_breakers: tuple[str, ...] = option(
        BREAKERS, called="--dry-sequence-breaker", several=True
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = option(
        (), several=True, read=_bias_of
    )
    accept_typical: float = option(
        0.0,
        called="--accept",
        shown="exact",
        read=_epsilon_of,
        low=0,
        high=1,
        usual="0 is lossless, 0.09 is what Medusa was measured with",
    )
    samplers: tuple[str, ...] = option(ORDER, read=_order_of)

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("samplers", "dry_sequence_breakers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check(self)
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """True when the best token is always taken, which needs no random numbers."""
        return self.temperature == 0.0

    @property
    def draws_freely(self) -> bool:
        """True when drafts may be drawn: no pick of a round changes the law of later ones."""
        is_free = not (self.is_greedy or self.uses_history or self.uses_xtc or self.mirostat)
        return is_free and not self.accept_typical

    @property
    def uses_penalties(self) -> bool:
        """True when the logits of recent tokens are changed."""
        subtracts = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        is_on = self.penalty_last_n != 0 and (self.repetition_penalty != 1.0 or subtracts)
        return is_on and PENALTIES in self.samplers and not self.mirostat

    @property
    def uses_dry(self) -> bool:
        """True when repetitions are penalised."""
        is_on = self.dry_multiplier != 0.0 and self.dry_penalty_last_n != 0
        return is_on and DRY in self.samplers and not self.mirostat

    @property
    def uses_xtc(self) -> bool:
        """True when every pick tosses a coin first."""
        is_on = self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5
        return is_on and XTC in self.samplers and not self.mirostat

    @property
    def uses_history(self) -> bool:
        """True when earlier tokens change the logits of later ones."""
        return self.uses_penalties or self.uses_dry

    @property
    def active(self) -> tuple[str, ...]:
        """The samplers that do anything, in their order."""
        is_on = {
            PENALTIES: self.uses_penalties,
            DRY: self.uses_dry,
            TOP_N_SIGMA: self.top_n_sigma > 0.0,
            TOP_K: self.top_k > 0,
            TYPICAL: self.typical_p < 1.0,
            TOP_P: self.top_p < 1.0,
            MIN_P: self.min_p > 0.0,
            XTC: self.uses_xtc,
            TEMPERATURE: True,
        }
        return tuple(name for name in self.samplers if is_on[name])

    @property
    def keeps_all(self) -> bool:
        """True when every token may be drawn, at one temperature."""
        is_fixed = not self.mirostat and self.dynatemp_range <= 0.0
        return is_fixed and {PENALTIES, DRY, TEMPERATURE}.issuperset(self.active)

    @property
    def changes_logits(self) -> bool:
        """True when penalties or a bias change logits, which needs a copy of the row."""
        return self.uses_history or bool(self.logit_bias)

    @property
    def is_plain_greedy(self) -> bool:
        """True when the best logit is taken as it is, which needs no memory either."""
        return self.is_greedy and not self.changes_logits


# -- values that nothing can honour ------------------------------------------------------------


def _check(params: SamplingParams) -> None:
    """Raises UnsupportedError with the value, and a usual one as a hint."""
    for name, known in options_of(SamplingParams).items():
        value = getattr(params, name)
        if known.low is not None and not (known.is_in_range(value) and math.isfinite(value)):
            raise UnsupportedError(
                f"{name} must be {known.shown_range}, got {value}", hint=known.usual
            )
    if params.seed is not None and params.seed < 0:
        raise UnsupportedError(
            f"seed must be 0 or more, got {params.seed}",
            hint="leave the seed out to have one drawn",
        )
    if params.mirostat not in (0, MIROSTAT_2):
        raise UnsupportedError(
            f"mirostat must be 0 or 2, got {params.mirostat}",
            hint="2 is the simpler one with the same aim as 1; 0 is off",
        )
    for name in params.samplers:
        if name not in ORDER:
            raise UnsupportedError(
                f"there is no sampler {name!r}", hint=f"name some of {';'.join(ORDER)}"
            )
    if len(set(params.samplers)) != len(params.samplers):
        raise UnsupportedError("samplers names one twice", hint="give each sampler one place")
    leaves_out_the_best = {
        "typical_p": params.typical_p < 1.0 and TYPICAL in params.samplers,
        "xtc_probability": params.uses_xtc,
        "dynatemp_range": params.dynatemp_range > 0.0,
        "mirostat": params.mirostat,
    }
    if params.is_greedy and any(leaves_out_the_best.values()):
        name = next(name for name, is_on in leaves_out_the_best.items() if is_on)
        raise UnsupportedError(
            f"{name} needs a temperature above 0", hint="0 is greedy; 0.8 is llama.cpp's default"
        )


def bias_pairs(
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...],
) -> tuple[tuple[int, float], ...]:
    items = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias
    pairs = tuple(sorted((int(token), float(bias)) for token, bias in items))
    for token, bias in pairs:
        if not (bias == -math.inf or LOWEST <= bias <= -LOWEST):
            raise UnsupportedError(
                f"the logit bias of token {token} must be a float32 number or -inf, got {bias}",
                hint="a bias of 100 makes a token all but certain, -inf forbids it",
            )
    for (token, _), (following, _) in pairwise(pairs):
        if token == following:
            raise UnsupportedError(
                f"logit_bias names token {token} twice", hint="give each token one bias"
            )
    return pairs


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """How long a model may think. Raises UnsupportedError for a negative number.

    Args:
        max_tokens: of the thought; 0 closes it at once.
        within: the prompt ends inside a thought.
        opening: text that begins a thought.
        closing: text that ends it.
        forced: what is written for the model at the limit.
    """

    max_tokens: int
    within: bool = False
    opening: str = "<think>"
    closing: str = "</think>"
    forced: str = "\n</think>\n\n"

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UnsupportedError(f"a thought has at least 0 tokens, not {self.max_tokens}")
