"""How tokens are picked and what an answer looks like, as options of every command that answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from edgespec import paths
from edgespec.cli.options import option
from edgespec.errors import UnsupportedError

if TYPE_CHECKING:
    from edgespec.sampling.params import SamplingParams


# Other words for samplers, llama.cpp's among them.
_SAMPLERS = {"typical": "typ_p", "typical_p": "typ_p", "temp": "temperature", "nucleus": "top_p"}
# Options that have another name as a parameter of a sampler.
_MEDUSAS = 0.09  # epsilon of typical acceptance in the paper's runs (arXiv 2401.10774)
_PARAMETERS = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n"}


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are picked, for every command that generates."""

    TITLE: ClassVar = "Sampling"

    seed: int | None = option(None, "The same seed gives the same answer.", also="-s")
    temperature: float = option(
        0.0, "0: always the likeliest token; higher is more varied.", also="--temp"
    )
    top_k: int = option(0, "Keep this many of the likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Keep the likeliest tokens up to this total probability; 1: all.")
    min_p: float = option(0.0, "Drop tokens less likely than this share of the likeliest; 0: none.")
    typical_p: float = option(
        1.0,
        "Keep the most typical tokens up to this total; 1: all.",
        called="--typical --typical-p",
    )
    top_n_sigma: float = option(
        0.0, "Keep logits within this many deviations of the best; 0: all.", also="--top-nsigma"
    )
    xtc_probability: float = option(
        0.0, "How often the likeliest tokens are left out (XTC); 0: never."
    )
    xtc_threshold: float = option(0.1, "XTC: tokens above this probability count as likely.")
    dynatemp_range: float = option(
        0.0, "Vary the temperature by entropy, plus or minus this; 0: off."
    )
    dynatemp_exponent: float = option(
        1.0, "Exponent from entropy to temperature.", called="--dynatemp-exp"
    )
    mirostat: int = option(0, "2: mirostat, in place of the other filters; 0: off.")
    mirostat_tau: float = option(5.0, "Mirostat: target entropy, in bits.", called="--mirostat-ent")
    mirostat_eta: float = option(0.1, "Mirostat: learning rate.", called="--mirostat-lr")
    repeat_penalty: float = option(1.0, "Make tokens already used less likely; 1: off.")
    repeat_last_n: int = option(64, "Penalties look back this many tokens; -1: all.")
    presence_penalty: float = option(0.0, "Subtracted from the logits of tokens already used.")
    frequency_penalty: float = option(0.0, "Subtracted once for each time a token was used.")
    dry_multiplier: float = option(0.0, "DRY: penalise tokens that extend a repetition; 0: off.")
    dry_base: float = option(1.75, "DRY: growth of the penalty per repeated token.")
    dry_allowed_length: int = option(2, "DRY: longest repetition without a penalty, in tokens.")
    dry_penalty_last_n: int = option(64, "DRY: tokens to look back; -1: all.")
    dry_sequence_breaker: list[str] | None = option(
        None, "DRY: text that ends a repetition; none: no such text."
    )
    logit_bias: list[str] | None = option(
        None, "Add to the logit of a token id, as ID=BIAS: 42=-5."
    )
    accept: str = option(
        "exact",
        "typical or typical=EPS takes likely drafts that the model would not have picked: faster, "
        "another answer; exact: never.",
    )
    samplers: str | None = option(None, "The samplers to use, in order: top_k;top_p;temperature.")

    def params(self) -> SamplingParams:
        """Sampling parameters; values no model could honour are misuse."""
        from edgespec.sampling.params import SamplingParams

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, parameter in _PARAMETERS.items():
            values[parameter] = values.pop(name)
        values["accept_typical"] = _epsilon(values.pop("accept"))
        values["logit_bias"] = _biases(self.logit_bias or [])
        breakers, order = values.pop("dry_sequence_breaker"), values.pop("samplers")
        if breakers is not None:
            values["dry_sequence_breakers"] = [text for text in breakers if text != "none"]
        if order is not None:
            values["samplers"] = _order(order)
        try:
            return SamplingParams(**values)
        except UnsupportedError as problem:
            raise typer.BadParameter(f"{problem}; {problem.hint}") from problem


def _epsilon(text: str) -> float:
    """Of typical acceptance; 0 where drafts change nothing."""
    name, _, number = text.partition("=")
    try:
        if name == "typical":
            return float(number) if number else _MEDUSAS
        if text != "exact":
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"--accept {text} is not exact, typical or typical=EPS") from None
    return 0.0


def _order(text: str) -> list[str]:
    """Names of samplers, with llama.cpp's semicolons or commas between them."""
    words = [word.strip().lower().replace("-", "_") for word in re.split("[;,]", text)]
    return [_SAMPLERS.get(word, word) for word in words if word]


GREEDY = SamplingOptions()


@dataclass(frozen=True)
class FormatOptions:
    """What an answer has to look like, for every command that generates."""

    TITLE: ClassVar = "Form of the answer"

    grammar: str | None = option(None, "GBNF or Lark grammar for the answer: a text or a file.")
    grammar_file: Path | None = option(None, "GBNF or Lark grammar for the answer: a file.")
    json_schema: str | None = option(
        None, "Answer with JSON that fits this schema: a text or a file.", also="-j"
    )
    json_schema_file: Path | None = option(
        None, "Answer with JSON that fits this schema: a file.", also="-jf"
    )

    regex: str | None = option(None, "Answer with a text that matches this regular expression.")

    def texts(self) -> dict[str, str | None]:
        """Arguments `grammar`, `json_schema` and `regex` of `Engine.stream`."""
        if sum(getattr(self, field.name) is not None for field in fields(self)) > 1:
            raise typer.BadParameter("give one of --grammar, --json-schema and --regex, and once")
        return {
            "grammar": _text_or_file(self.grammar, "::=", "start:") or read_text(self.grammar_file),
            "json_schema": _text_or_file(self.json_schema, "{") or read_text(self.json_schema_file),
            "regex": self.regex,
        }


ANY_FORMAT = FormatOptions()


def _text_or_file(given: str | None, *signs: str) -> str | None:
    """A text that holds one of `signs`, or else that of a file, which an @ before it says, too."""
    if given is None or (any(one in given for one in signs) and not given.startswith("@")):
        return given
    return read_text(paths.expanded(given.removeprefix("@")))


def read_text(path: Path | None) -> str | None:
    """The text of a file that was named. Raises UnsupportedError where it cannot be read."""
    return None if path is None else paths.read_text(path)


def _biases(texts: list[str]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            pairs.append((int(token), float(bias)))
        except ValueError:
            raise typer.BadParameter(f"--logit-bias {text} is not TOKEN=BIAS") from None
    return tuple(pairs)
