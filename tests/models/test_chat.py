"""Chat templates: the embedded model's own, hand-made ones, and hostile ones."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ModelFileError, UnsupportedError
from edgespec.models.chat import Message, render_chat
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec

HELLO: list[Message] = [{"role": "user", "content": "Hello"}]
ROLES = "{% for m in messages %}[{{ m.role }}: {{ m['content'] }}]{% endfor %}"


def failure(template: str, messages: list[Message] = HELLO) -> EdgespecError:
    """What rendering raises; checks that it is one line with something in it."""
    with pytest.raises(EdgespecError) as caught:
        render_chat(template, messages)
    text = str(caught.value)
    assert len(text) > 20 and "\n" not in text
    return caught.value


# ------------------------------------------------------------------------- the embedded one


@pytest.fixture(scope="module")
def embedded() -> str:
    template = read_model_spec(embedded_model()).chat_template
    assert template is not None
    return template


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.mark.model
def test_embedded_template_brings_its_own_system_message(embedded: str) -> None:
    assert render_chat(embedded, HELLO) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_embedded_template_with_a_system_message_and_turns(embedded: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  1 + 1?\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "{{ 1 }} 日本 <b>"},
    ]
    assert render_chat(embedded, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n  1 + 1?\n<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n{{ 1 }} 日本 <b><|im_end|>\n"
    )


# -------------------------------------------------------------------------------- hand-made


def test_messages_keep_their_order_and_are_not_touched() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = copy.deepcopy(messages)
    assert render_chat(ROLES, messages) == "[user: a][assistant: b]"
    assert messages == before


@pytest.mark.parametrize(("flag", "expected"), [(True, "Hello>"), (False, "Hello")])
def test_generation_prompt(flag: bool, expected: str) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render_chat(template, HELLO, add_generation_prompt=flag) == expected


def test_special_tokens() -> None:
    template = "{{ bos_token }}{{ messages[-1]['content'] }}{{ eos_token }}"
    assert render_chat(template, HELLO, bos_token="<s>", eos_token="</s>") == "<s>Hello</s>"
    assert render_chat(template, HELLO) == "Hello"


def test_blocks_leave_no_blank_lines() -> None:
    """Templates are written for `trim_blocks` and `lstrip_blocks`, as in transformers."""
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n"
    assert render_chat(template + "{% endfor %}\nend", HELLO) == "Hello\nend"


def test_loop_controls() -> None:
    template = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render_chat(template, HELLO) == "023"


def test_namespaces() -> None:
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}"
    )
    assert render_chat(template, [*HELLO, *HELLO]) == "2"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("messages[0] | tojson", '{"role": "user", "content": "Hello"}'),
        ("{'k': '<é>日'} | tojson", '{"k": "<é>日"}'),  # neither HTML nor ASCII escapes
        ("[1, true, none] | tojson(indent=2)", "[\n  1,\n  true,\n  null\n]"),
        # Arguments that transformers' filter takes and templates in the wild use.
        ("{'a': 'é'} | tojson(ensure_ascii=False)", '{"a": "é"}'),
        ("[1, 2] | tojson(separators=(',', ':'))", "[1,2]"),
    ],
)
def test_tojson(expression: str, expected: str) -> None:
    assert render_chat("{{ " + expression + " }}", HELLO) == expected


def test_strftime_now() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    rendered = render_chat("{{ strftime_now('%Y-%m-%d') }}", HELLO)
    assert rendered in (before, datetime.now().strftime("%Y-%m-%d"))


# --------------------------------------------------------------------------------- refusals


def test_a_template_that_refuses_says_why() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    error = failure(template)
    assert isinstance(error, UnsupportedError)
    assert str(error) == "the model's chat template refuses: roles must alternate"


def test_a_refusal_depends_on_the_messages() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}ok"
    assert render_chat(template, HELLO) == "ok"
    assert isinstance(failure(template, [{"role": "system", "content": ""}]), UnsupportedError)


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages[0].content",
        "{% for m in messages %}",
        "{% unheard_of %}",
        "{{ 1 | no_such_filter }}",
        "{{ no_such_function() }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ 1 + 'a' }}",
        "{{ messages | tojson(1, 2, 3, 4, 5, 6, 7) }}",
    ],
)
def test_broken_templates_are_file_errors_with_a_way_out(template: str) -> None:
    error = failure(template)
    assert isinstance(error, ModelFileError)
    assert "--raw" in error.hint


@pytest.mark.parametrize(
    "template",
    [
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",  # RecursionError
        "{{ 'a'.zfill(10 ** 16) }}",  # MemoryError
        "{{ range(10 ** 9) | list }}",  # the sandbox's own limit
    ],
)
def test_templates_that_exhaust_the_machine_are_file_errors(template: str) -> None:
    assert isinstance(failure(template), ModelFileError)


def test_a_huge_template_is_not_compiled() -> None:
    error = failure("a" * 200_001)
    assert isinstance(error, ModelFileError) and "200001" in str(error)
    assert render_chat("a" * 200_000, HELLO) == "a" * 200_000


# ---------------------------------------------------------------------------------- sandbox


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "messages.__class__.__base__.__subclasses__()",
        "messages[0].content.__class__.__mro__[1]",
        "raise_exception.__globals__['__builtins__']",
        "strftime_now.__globals__['__builtins__']['open']('/etc/passwd').read()",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "(''|attr('__class__')).__mro__",
        "'{0.__class__.__mro__}'.format(1)",
        "'{x.__class__.__mro__}'.format_map({'x': 1})",
        "self.__init__.__globals__",
        "lipsum.__globals__.os",
        "messages.append(1)",
        "messages[0].update({'content': 'x'})",
        "messages[0].clear()",
    ],
)
def test_attributes_are_out_of_reach(expression: str) -> None:
    error = failure("{{ " + expression + " }}")
    assert isinstance(error, ModelFileError)


@pytest.mark.parametrize(
    "template",
    [
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% from 'os' import getcwd %}{{ getcwd() }}",
        "{% include '/etc/passwd' %}",
        "{% extends '/etc/passwd' %}",
        "{{ __import__('os').getcwd() }}",
        "{{ open('/etc/passwd').read() }}",
        "{{ eval('1') }}",
    ],
)
def test_modules_and_files_are_out_of_reach(template: str) -> None:
    assert isinstance(failure(template), ModelFileError)


@pytest.mark.parametrize("name", ["__class__", "__init__", "__dict__", "__subclasshook__"])
def test_a_forbidden_attribute_that_is_only_printed_shows_nothing(name: str) -> None:
    assert render_chat("<{{ messages." + name + " }}>", HELLO) == "<>"


# --------------------------------------------------------------------------- parts and bounds


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render_chat(ROLES, [{"role": "user", "content": parts}]) == "[user: Hello]"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"content": "x"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": b"x"},
        {"role": 1, "content": "x"},
        "x",
    ],
    ids=str,
)
def test_what_is_no_message_of_text_is_refused(message: Any) -> None:
    problem = failure(ROLES, [message])
    assert isinstance(problem, UnsupportedError) and problem.hint


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% set x = b %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(40) }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ 10**12 * 'x' }}",
        "{{ [1] * 10**12 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_template_without_an_end_is_an_error(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.chat._MAX_STEPS", 20_000)
    assert isinstance(failure(template), ModelFileError)


def test_long_conversations_stay_far_from_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.models.chat._MAX_STEPS", 20_000)
    assert len(render_chat(ROLES, HELLO * 1000)) == len("[user: Hello]") * 1000
