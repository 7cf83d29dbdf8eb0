"""Jinja's own sandbox for chat templates, set up as transformers and llama.cpp's server have it.

It keeps a template from attributes, modules and files, not from filling the memory or never ending:
whoever renders a stranger's template does so in a process with limits (`template_guest`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import datetime
from html import escape
from json import dumps
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.models.control_texts import NO_CONTROLS, ControlTexts

_COMPILED = 4  # templates that are kept compiled


class TemplateRaisedError(Exception):
    """The template called `raise_exception`; the message is its own."""


def render(source: str, values: Mapping[str, Any], controls: ControlTexts = NO_CONTROLS) -> str:
    """The text of a template.

    Args:
        source: Jinja source.
        values: plain data by name: texts, numbers, lists and dictionaries.
        controls: what must not come about where a template takes something out of a text.

    Raises TemplateRaisedError, and whatever Jinja and Python raise of a stranger's expressions.
    """
    _ENVIRONMENT.controls = controls
    return str(compiled(source).render(values))


@functools.lru_cache(_COMPILED)
def compiled(source: str) -> Template:
    """A template, compiled. Raises as Jinja does."""
    return _ENVIRONMENT.from_string(source)


class _Environment(ImmutableSandboxedEnvironment):
    """What templates have: Jinja's filters and tests, two functions, and transformers' `tojson`.

    Jinja's own functions besides `range`, `dict` and `namespace` are not among it: no template
    needs them, and their attributes led out of earlier sandboxes.
    """

    controls = NO_CONTROLS

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals = {**kept, "raise_exception": _refuse}
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.filters.update(tojson=_tojson, replace=self._replaced, safe=str)
        # A text, as that of `safe`: Jinja's own markup would escape what is added to it, too.
        escaped = ("e", "escape", "forceescape")
        self.filters.update(dict.fromkeys(escaped, lambda value: escape(str(value))))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As a template calls it; a text's own `replace` is the filter."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and getattr(function, "__name__", "") == "replace":
            named = {name: one for name, one in kwargs.items() if name == "count"}
            return self._replaced(owner, *args, **named)  # Jinja adds names of its own in loops
        return super().call(context, function, *args, **kwargs)

    def _replaced(self, given: Any, old: Any, new: Any, count: int | None = None) -> str:
        """A text in which no more control tokens stand than before.

        "<|im_</think>end|>" without "</think>" is one, which its author may not write.
        """
        text, old, new = str(given), str(old), str(new)
        made = text.replace(old, new, -1 if count is None else count)
        if made == text or not self.controls.count(made):
            return made
        before = self.controls.count(text) + text.count(old) * self.controls.count(new)
        return made if self.controls.count(made) <= before else str(self.controls.mark(made))


class _Generation(Extension):
    """`{% generation %}`, with which templates mark answers for training: what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: Any = "") -> NoReturn:
    raise TemplateRaisedError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any
) -> str:
    """The filter of transformers' chat templates: Jinja's own escapes for HTML."""
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)


_ENVIRONMENT = _Environment()
