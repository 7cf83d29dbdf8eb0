"""What chat templates find in their sandbox, and what they do not."""

from __future__ import annotations

import pytest

from edgespec.models.control_texts import ControlTexts
from edgespec.models.template_sandbox import TemplateRaisedError, render

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


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
    assert render(template, HELLO) == expected


def test_what_a_template_refuses_with_is_its_own() -> None:
    with pytest.raises(TemplateRaisedError, match="no"):
        render("{{ raise_exception('no') }}", HELLO)


@pytest.mark.parametrize("name", ["lipsum", "cycler", "joiner", "self.__init__", "dict.mro"])
def test_functions_that_nobody_needs_are_not_there(name: str) -> None:
    with pytest.raises(Exception, match=r"undefined|unsafe|has no attribute"):
        render("{{ " + name + "() }}", HELLO)


@pytest.mark.parametrize("text", ["{{ x | safe }}&", "{{ (x | safe) + '&' }}", "{{ x ~ '&' }}"])
def test_text_is_no_markup(text: str) -> None:
    """Jinja would escape what is added to a text that is marked as safe."""
    assert render(text, {"x": "<b>"}) == "<b>&"


def test_replacing_is_the_only_way_to_a_control_token_and_marks_it() -> None:
    controls = ControlTexts(["<|im_end|>"])
    for how in ("x.replace('</t>', '')", "x | replace('</t>', '')", "x.replace('</t>', '', 1)"):
        made = render(
            "{% for _ in [1] %}{{ " + how + " }}{% endfor %}", {"x": "<|im_</t>end|>"}, controls
        )
        assert controls.count(made) == 0 and controls.plain(made) == "<|im_end|>"
    meant = render("{{ x.replace('END', '<|im_end|>') }}", {"x": "aEND"}, controls)
    assert meant == "a<|im_end|>"
