"""Templates that would fill the memory or never end: they cost their guest its life, and no more.

What is tested is what this process allocates and that all of them end, never the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.memory.device.track import peak_resident_bytes
from edgespec.models import chat
from edgespec.models.chat import render_chat
from edgespec.models.processes import Guest, GuestEndedError

HELLO = [{"role": "user", "content": "Hello"}]
LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
GROWING = "{% set ns = namespace(x='ab', l=[1]) %}" + LOOP
# Each takes more than any prompt needs: of memory, or of time in one step.
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
    "{{ range(99999) | map('center', 999) | list }}",
    LOOP + LOOP + END + END,
    LOOP + "{% for b in range(99999) if false %}{% endfor %}" + END,
    LOOP + "{{ 'x' * 9999 }}" + END,
    "{% set all %}" + LOOP + "x" * 9999 + END + "{% endset %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    LOOP + "{% set y = range(99999) | map('string') | list %}" + END,
    '{{ "%(a)8000000000d" % {"a": 1} }}',
    '{{ ("%(a)8000000000d" | format(a=1)) | length }}',
    '{{ ("aa " * 80_000_000).split() }}',
    '{{ ("{0:\U0001f600>999}" * 80_000).format("a") }}',
    '{{ ("%(a)999s" * 1_000_000) % {"a": 1} }}',
    # a hash table of values with one hash, and searches that are a product of two lengths
    "{% set p = 2 ** 61 - 1 %}{{ range(0, 99_999 * p, p) | unique | list | length }}",
    '{% set b = "b" * 10_000_000 ~ "a" %}{{ ("a" * 1_000_000).strip(b) }}',
    '{% set b = "b" * 10_000_000 ~ "a" %}{{ ("a" * 1_000_000) | trim(b) }}',
]

_QUICK = chat.TEMPLATE_LIMITS._replace(seconds=0.3)  # to be done sooner
_MOST_GROWN = 24 << 20  # bytes of this process, whose readings of a guest are a few MiB


@pytest.fixture(autouse=True)
def _own_guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    guest = Guest(chat._MODULE, _QUICK)
    monkeypatch.setattr(chat, "_guest", guest)
    monkeypatch.setattr(chat, "_seconds", {})
    monkeypatch.setattr(chat, "TEMPLATE_LIMITS", _QUICK)
    yield
    guest.end()


def refused(template: str) -> str:
    """What rendering raises; a sentence, of a process that was ended."""
    with pytest.raises(ModelFileError) as caught:
        render_chat(template, HELLO)
    assert isinstance(caught.value.__cause__, GuestEndedError), caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(one, id=str(number), marks=pytest.mark.long if number % 4 else ())
        for number, one in enumerate(HOSTILE)
    ],
)
def test_a_template_without_an_end_is_a_sentence(template: str) -> None:
    before = peak_resident_bytes()
    assert "it takes more than" in refused(template)
    assert peak_resident_bytes() - before < _MOST_GROWN


def test_memory_and_time_are_the_guests() -> None:
    before = peak_resident_bytes()
    assert "more than 36 MiB" in refused('{{ "%(a)8000000000d" % {"a": 1} }}')
    assert "more than 0.3 s" in refused("{{ 9 ** (9 ** 9) }}")
    assert peak_resident_bytes() - before < _MOST_GROWN


def test_a_text_of_any_length_is_not_read() -> None:
    text = "{% for i in range(2000) %}{{ 'x' * 999 }}{% endfor %}"
    assert "it writes more than" in refused(text)


def test_nobody_waits_long_for_a_template_that_ended_the_guest() -> None:
    """It has less time then, and more again after it went well; there is one guest for all."""
    spins = "{% if messages[0].content == 'Hello' %}{{ 9 ** (9 ** (messages | length * 9)) }}"
    spins += "{% endif %}"
    for seconds in ("0.3", "0.15", "0.1", "0.1"):
        assert f"more than {seconds} s" in refused(spins)
        assert chat._guest.pid is None, "none starts beside steps for nobody"
        assert render_chat("a", HELLO) == "a"
    assert render_chat(spins, [{"role": "user", "content": "Hi"}]) == ""
    assert "more than 0.2 s" in refused(spins)
    for place in range(chat._MOST_HURRIED + 1):
        chat._seconds[f"{place}"] = 0.1
    assert "more than 0.3 s" in refused("{{ 8 ** (9 ** 9) }}")
    assert len(chat._seconds) == chat._MOST_HURRIED and spins not in chat._seconds


def test_a_long_conversation_has_the_memory_it_needs() -> None:
    """4 MiB of which one letter makes all of it four times as large."""
    long = [{"role": "user", "content": "word " * 800_000 + "\U0001f600"}]
    template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    assert len(render_chat(template, long)) == 4_000_001


def test_a_template_is_compiled_before_the_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(chat._guest, "ask", asked.append)
    chat.prepare_template("{{ 1 }}")
    until(lambda: asked == [{"template": "{{ 1 }}"}])


def test_what_json_has_not_is_a_sentence() -> None:
    with pytest.raises(EdgespecError, match="what JSON has not"):
        render_chat("{{ x }}", HELLO, variables={"x": {1, 2}})


PIECES: list[Any] = [
    *("{% for m in messages %}", "{% endfor %}", "{% if m.x %}", "{% endif %}", "{{ ns.x }}"),
    *("{% set ns.x = ns.x ~ ns.x %}", "{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l | tojson }}"),
    *("{% for i in range(99999) %}", "{{ ns.x | center(10**9) }}", "{{ ns.l == ns.l }}", "x"),
    *("{% macro f(a) %}", "{% endmacro %}", "{{ f(ns.l) }}", "{{ ns.x.split('a') }}", "{{", "%}"),
    *("{% set ns.l = ns.l * 99 %}", "{{ ns.x * 10**9 }}", "{{ ns.l | sort | unique | list }}"),
]


@pytest.mark.slow
@settings(max_examples=20)  # of which many take all the time that a guest has
@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_whatever_is_put_together_renders_or_is_a_sentence(pieces: list[str]) -> None:
    try:
        render_chat("{% set ns = namespace(x='ab', l=[1]) %}" + "".join(pieces), HELLO)
    except EdgespecError as error:
        assert len(str(error)) > 20
