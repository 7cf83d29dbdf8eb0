"""Templates that would fill the memory or never end: refused within an allowance that is counted.

What is tested is the count and what is allocated, never the clock.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.models import template_sandbox
from edgespec.models.chat import render_chat
from edgespec.models.template_sandbox import ExhaustedError

HELLO = [{"role": "user", "content": "Hello"}]
LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
GROWING = "{% set ns = namespace(x='ab', l=[1]) %}" + LOOP
FORTY_MIB = 40 << 20

# Each is refused for its size alone.
HOSTILE = [
    GROWING + "{% set ns.x = ns.x ~ ns.x %}" + END,
    GROWING + "{% set ns.x = ns.x + ns.x %}" + END,
    GROWING + "{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}" + END,
    GROWING + "{% set ns.x = [ns.x, ns.x] | join %}" + END,
    GROWING + "{% set ns.x = ns.x.replace('a', ns.x) %}" + END,
    GROWING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}" + END,
    GROWING + "{% set ns.x = '{0}{0}'.format(ns.x) %}" + END,
    GROWING + "{% set ns.l = ns.l + ns.l %}" + END,
    # lists that hold a list twice, which holds a list twice: small until somebody looks
    GROWING + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l }}",
    GROWING + "{% set ns.l = [ns.l, ns.l] %}{% if ns.l == [ns.l] %}{% endif %}" + END,
    "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l | tojson }}",
    "{% set ns = namespace(l=(1,)) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}"
    "{% endfor %}{{ {ns.l: 1} }}",
    "{% set ns = namespace(l={}) %}{% for i in range(60) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}"
    "{% endfor %}{{ ns.l ~ '' }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(60) %}{% set ns.l = [ns.l] * 2 %}"
    "{% endfor %}{{ [ns.l] | map('string') | join }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ 'x' | indent(10**9, true) }}",
    "{{ [1] | batch(10**9, 1) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ 'x' * 10**12 }}",
    "{{ 10**12 * 'x' }}",
    "{{ [1] * 10**12 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(n=9) %}" + LOOP + "{% set ns.n = ns.n * ns.n %}" + END,
    "{{ 1.5 | round(10**9) }}",
    "{{ range(10**9) | list }}",
    "{{ range(99999) | map('center', 999) | list }}",
    LOOP + LOOP + END + END,
    LOOP + "{% for b in range(99999) if false %}{% endfor %}" + END,
    LOOP + "{{ 'x' * 9999 }}" + END,
    "{% set all %}" + LOOP + "x" * 9999 + END + "{% endset %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% macro f() %}" + "x" * 9999 + "{% endmacro %}" + LOOP + "{% set y = f() %}" + END,
    LOOP + "{% set y = range(99999) | map('string') | list %}" + END,
]


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_template_without_an_end_is_a_sentence(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "_BASE", 5_000_000)  # a tenth, to be done sooner
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            render_chat(template, HELLO)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value.__cause__, ExhaustedError), caught.value
    assert "\n" not in str(caught.value) and peak < FORTY_MIB


@pytest.mark.parametrize(
    "template",
    [
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ lipsum(10**9) }}",
        "{{ 'x' | urlize }}",
        "{{ 'x'.encode() }}",
        "{{ 'x'.translate({}) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ [1] | sum(start=[]) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "1 + " * 20_000 + "1 }}",
        "{{ a }}" * 20_000,
    ],
)
def test_what_is_not_thought_of_is_a_sentence(template: str) -> None:
    with pytest.raises(ModelFileError):
        render_chat(template, HELLO)


def test_every_kind_of_node_was_decided_on() -> None:
    """A new version of Jinja brings none that is let through unseen."""
    kinds = {one for one in vars(nodes).values() if isinstance(one, type)}
    refused = {
        *{"Block", "Extends", "Include", "Import", "FromImport", "OverlayScope"},
        *{"EvalContextModifier", "ScopedEvalContextModifier", "ExtensionAttribute"},
        *{"ImportedName", "InternalName", "MarkSafe", "MarkSafeIfAutoescape"},
        *{"ContextReference", "DerivedContextReference"},
    }
    bases = {"Node", "Stmt", "Helper", "Expr", "Literal", "_FilterTestCommon"}
    known = {
        one.__name__
        for one in kinds
        if issubclass(one, nodes.Node) and not issubclass(one, template_sandbox._ALLOWED)
    }
    assert known <= refused | bases


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}a{{ 1 }}{% endgeneration %}", "a1"),
        ("{% filter upper | trim %} a{{ 'b' }}{% endfilter %}", "AB"),
        ("{% set x | upper %}a{% endset %}{{ x }}", "A"),
        ("{% call(x) f(2) %}<{{ x }}>{% endcall %}", ""),
        ("{% if messages | selectattr('role', 'eq', 'no') %}true{% endif %}", "true"),
        (
            "{{ 1 < 2 < 3 }}{{ 1 < 2 < 2 }}{{ 'a' in ['a'] }}{{ 'b' not in 'abc' }}",
            "TrueFalseTrueFalse",
        ),
        (
            "{{ [1, 'a', none, 2.5] }}{{ (1,) }}{{ {'a': [1]} }}",
            "[1, 'a', None, 2.5](1,){'a': [1]}",
        ),
        ("{{ 'abc'[::-1] }}{{ messages[1:] }}{{ [1, 2, 3][-2:] }}", "cba[][2, 3]"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ x }}{% endfor %}", "1123"),
        ("{{ ['b', 'a'] | sort | join(', ') }}{{ 'a-b' | replace('-', '+') }}", "a, ba+b"),
        (
            "{{ '%s=%d' % ('a', 1) }}{{ '{}:{b}'.format(1, b=2) }}{{ '%s' | format('x') }}",
            "a=11:2x",
        ),
        ("{{ '<' | e }}{{ '<' | safe }}{{ missing | default('d') }}{{ nothing }}", "&lt;<d"),
        (
            "{{ loop is defined }}{{ messages is iterable }}{{ 4 is divisibleby 2 }}",
            "FalseTrueTrue",
        ),
    ],
)
def test_templates_work_as_in_jinja(template: str, expected: str) -> None:
    if "call" in template:
        template = "{% macro f(n) %}{{ caller(n) }}{% endmacro %}" + template
        expected = "<2>"
    assert render_chat(template, HELLO) == expected


def test_an_allowance_grows_with_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "_BASE", 300_000)
    template = "{% for m in messages %}{{ m.content.split('x')[-1] | trim }}{% endfor %}"
    assert len(render_chat(template, [{"role": "user", "content": "a" * 1000}] * 2000)) == 2_000_000


PIECES: list[Any] = [
    *("{% for m in messages %}", "{% endfor %}", "{% if m.x %}", "{% endif %}", "{{ ns.x }}"),
    *("{% set ns.x = ns.x ~ ns.x %}", "{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l | tojson }}"),
    *("{% for i in range(99999) %}", "{{ ns.x | center(10**9) }}", "{{ ns.l == ns.l }}", "x"),
    *("{% macro f(a) %}", "{% endmacro %}", "{{ f(ns.l) }}", "{{ ns.x.split('a') }}", "{{", "%}"),
    *("{% set ns.l = ns.l * 99 %}", "{{ ns.x * 10**9 }}", "{{ ns.l | sort | unique | list }}"),
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_whatever_is_put_together_renders_or_is_a_sentence(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_sandbox, "_BASE", 1_000_000)
        try:
            render_chat("{% set ns = namespace(x='ab', l=[1]) %}" + "".join(pieces), HELLO)
        except EdgespecError as error:
            assert len(str(error)) > 20
