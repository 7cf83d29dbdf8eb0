"""How tokens are picked and what an answer looks like, as options of every command that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import typer

from edgespec import paths
from edgespec.cli.options import Given, Group, values_of
from edgespec.errors import UnsupportedError
from edgespec.option_fields import option
from edgespec.sampling.params import SamplingParams

_TEMPERATURE = 0.8  # of conversations, as in llama.cpp, where neither command nor file has one


@dataclass(frozen=True)
class SamplingOptions(Given):
    """How tokens are picked, for every command that generates."""

    SOURCE, TITLE = SamplingParams, "Sampling"

    def params(self) -> SamplingParams:
        """Sampling parameters; values no model could honour are misuse."""
        values = values_of(self.known(), self.given)
        if (breakers := values.get("dry_sequence_breakers")) is not None:
            values["dry_sequence_breakers"] = [text for text in breakers if text != "none"]
        try:
            return SamplingParams(**values)
        except UnsupportedError as problem:
            raise typer.BadParameter(f"{problem}; {problem.hint}") from problem

    def params_with(self, context: typer.Context, of_file: Mapping[str, float]) -> SamplingParams:
        """For conversations: what neither command line nor variables say is the file's own.

        Greedy answers of small models end in loops.
        """
        more: dict[str, Any] = {
            name: value
            for name, value in {"temperature": _TEMPERATURE, **of_file}.items()
            if (source := context.get_parameter_source(name)) is None or source.name == "DEFAULT"
        }
        return SamplingOptions({**self.given, **more}).params()


@dataclass(frozen=True)
class FormatOptions(Group):
    """What an answer has to look like, for every command that generates."""

    TITLE: ClassVar[str] = "Form of the answer"

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


def set_text(sampling: SamplingParams) -> str:
    """What differs from greedy decoding, in a line."""
    usual = SamplingParams()
    values = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    told = [f"{name} {value}" for name, value in values.items() if value != getattr(usual, name)]
    return f"sampling: {', '.join(told) or 'greedy'}"


def _text_or_file(given: str | None, *signs: str) -> str | None:
    """A text that holds one of `signs`, or else that of a file, which an @ before it says, too."""
    if given is None or (any(one in given for one in signs) and not given.startswith("@")):
        return given
    return read_text(paths.expanded(given.removeprefix("@")))


def read_text(path: Path | None) -> str | None:
    """The text of a file that was named. Raises UnsupportedError where it cannot be read."""
    return None if path is None else paths.read_text(path)
