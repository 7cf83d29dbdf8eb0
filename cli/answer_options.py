"""How tokens are picked and what an answer looks like, as options of every command that answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec import paths
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

    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="The same seed gives the same answer.")
    ] = None
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "--temp", help="0: always the likeliest token; higher is more varied."
        ),
    ] = 0.0
    top_k: Annotated[
        int, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0: all.")
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", help="Keep the likeliest tokens up to this total probability; 1: all."
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", help="Drop tokens less likely than this share of the likeliest; 0: none."
        ),
    ] = 0.0
    typical_p: Annotated[
        float,
        typer.Option(
            "--typical",
            "--typical-p",
            help="Keep the most typical tokens up to this total; 1: all.",
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        typer.Option(
            "--top-n-sigma",
            "--top-nsigma",
            help="Keep logits within this many deviations of the best; 0: all.",
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        typer.Option(
            "--xtc-probability", help="How often the likeliest tokens are left out (XTC); 0: never."
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        typer.Option("--xtc-threshold", help="XTC: tokens above this probability count as likely."),
    ] = 0.1
    dynatemp_range: Annotated[
        float,
        typer.Option(
            "--dynatemp-range", help="Vary the temperature by entropy, plus or minus this; 0: off."
        ),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, typer.Option("--dynatemp-exp", help="Exponent from entropy to temperature.")
    ] = 1.0
    mirostat: Annotated[
        int, typer.Option("--mirostat", help="2: mirostat, in place of the other filters; 0: off.")
    ] = 0
    mirostat_tau: Annotated[
        float, typer.Option("--mirostat-ent", help="Mirostat: target entropy, in bits.")
    ] = 5.0
    mirostat_eta: Annotated[
        float, typer.Option("--mirostat-lr", help="Mirostat: learning rate.")
    ] = 0.1
    repeat_penalty: Annotated[
        float,
        typer.Option("--repeat-penalty", help="Make tokens already used less likely; 1: off."),
    ] = 1.0
    repeat_last_n: Annotated[
        int, typer.Option("--repeat-last-n", help="Penalties look back this many tokens; -1: all.")
    ] = 64
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty", help="Subtracted from the logits of tokens already used."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", help="Subtracted once for each time a token was used."),
    ] = 0.0
    dry_multiplier: Annotated[
        float,
        typer.Option(
            "--dry-multiplier", help="DRY: penalise tokens that extend a repetition; 0: off."
        ),
    ] = 0.0
    dry_base: Annotated[
        float, typer.Option("--dry-base", help="DRY: growth of the penalty per repeated token.")
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        typer.Option(
            "--dry-allowed-length", help="DRY: longest repetition without a penalty, in tokens."
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int, typer.Option("--dry-penalty-last-n", help="DRY: tokens to look back; -1: all.")
    ] = 64
    dry_sequence_breaker: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-sequence-breaker", help="DRY: text that ends a repetition; none: no such text."
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", help="Add to the logit of a token id, as ID=BIAS: 42=-5."),
    ] = None
    accept: Annotated[
        str,
        typer.Option(
            "--accept",
            help="typical or typical=EPS takes likely drafts that the model would not have picked: "
            "faster, another answer; exact: never.",
        ),
    ] = "exact"
    samplers: Annotated[
        str | None,
        typer.Option("--samplers", help="The samplers to use, in order: top_k;top_p;temperature."),
    ] = None

    def params(self) -> SamplingParams:
        """Sampling parameters; values no model could honour are misuse."""
        from edgespec.sampling.params import SamplingParams

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for option, parameter in _PARAMETERS.items():
            values[parameter] = values.pop(option)
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

    grammar: Annotated[
        str | None,
        typer.Option("--grammar", help="GBNF or Lark grammar for the answer: a text or a file."),
    ] = None
    grammar_file: Annotated[
        Path | None,
        typer.Option("--grammar-file", help="GBNF or Lark grammar for the answer: a file."),
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema", "-j", help="Answer with JSON that fits this schema: a text or a file."
        ),
    ] = None
    json_schema_file: Annotated[
        Path | None,
        typer.Option(
            "--json-schema-file", "-jf", help="Answer with JSON that fits this schema: a file."
        ),
    ] = None

    regex: Annotated[
        str | None,
        typer.Option("--regex", help="Answer with a text that matches this regular expression."),
    ] = None

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
