"""Chat templates: the embedded model's own, hand-made ones, and hostile ones."""

from __future__ import annotations

import copy
import re
from datetime import datetime
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ModelFileError, UnsupportedError
from edgespec.models.chat import Message, render_chat
from edgespec.models.control_texts import ControlTexts
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
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    before = copy.deepcopy(messages)
    assert render_chat(ROLES, messages) == "[user: a][assistant: b][user: c]"
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


# --------------------------------------------------------------------------------- errors


def test_a_template_that_refuses_says_why() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    error = failure(template)
    assert isinstance(error, UnsupportedError)
    assert str(error) == "the model's chat template refuses: roles must alternate"


def test_an_error_depends_on_the_messages() -> None:
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


def test_long_conversations_stay_far_from_the_bounds() -> None:
    assert len(render_chat(ROLES, HELLO * 4096)) == len("[user: Hello]") * 4096


# ------------------------------------------------------------------- what others' servers do


def test_an_error_is_cut() -> None:
    assert len(str(failure("{{ raise_exception('x' * 100000) }}"))) < 3000


TAKES_NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
TAKES_TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
)
TAKES_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
NEEDS_PARTS = "{% for m in messages %}{{ m.content[0]['text'] + '!' }}{% endfor %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TAKES_NO_SYSTEM, [{"role": "system", "content": "Be."}, *HELLO], "[user: Be.\n\nHello]"),
        (
            TAKES_TEXT_ARGUMENTS,
            [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            'Helloadd{"a": 1}',
        ),
        (TAKES_PARTS, HELLO, "Hello"),
        (NEEDS_PARTS, HELLO, "Hello!"),
    ],
    ids=["system", "arguments", "parts", "needs parts"],
)
def test_messages_are_given_in_the_form_that_a_template_takes(
    template: str, messages: list[Message], expected: str
) -> None:
    assert render_chat(template, messages) == expected


def test_an_error_that_no_other_form_helps_is_the_first_one() -> None:
    template = TAKES_NO_SYSTEM + "{{ raise_exception('never') }}"
    error = failure(template, [{"role": "system", "content": "Be."}, *HELLO])
    assert str(error).endswith("refuses: no system")


BEGUN = [*HELLO, {"role": "assistant", "content": "Once upon "}]
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ({"content": "Once upon "}, "<think></think>Once upon "),
        ({"content": "Once", "reasoning_content": "Hm"}, "<think>Hm</think>Once"),
        ({"content": "", "reasoning_content": "Hm"}, "<think>Hm"),
        ({"content": None, "reasoning": "Hm"}, "<think>Hm"),
        ({"content": "", "tool_calls": [CALL]}, "<think></think></s><assistant>"),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(last: dict[str, Any], end: str) -> None:
    """As llama.cpp's server, Ollama and Anthropic do; a call's answer is another turn."""
    text = render_chat(CHAT, [*HELLO, {"role": "assistant", **last}])
    assert text == f"<user>Hello</s><assistant>{end}"


def test_a_begun_message_that_the_template_leaves_out_is_put_behind_the_prompt() -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}:"
    assert render_chat(users, BEGUN) == "Hello:Once upon "


def test_what_transformers_and_llama_cpp_give_templates_is_there() -> None:
    template = "{{ tools is none }}{{ documents is none }}{{ enable_thinking }}{{ functions }}"
    assert render_chat(template, HELLO) == "TrueTrueTrue"
    assert render_chat("{{ enable_thinking }}", HELLO, variables={"enable_thinking": 0}) == "0"
    assert render_chat("{{ functions }}", HELLO, variables={"tools": [1]}) == "[\n  1\n]"
    today = {datetime.now().strftime("%d %b %Y")}
    found = render_chat("{{ date_string }}", HELLO)
    assert found in today | {datetime.now().strftime("%d %b %Y")}


def test_thoughts_have_the_names_that_templates_use() -> None:
    thought = [*HELLO, {"role": "assistant", "content": "a", "reasoning": "Hm"}, *HELLO]
    template = "{{ messages[1].thinking }}{{ messages[1].reasoning_content }}"
    assert render_chat(template, thought) == "HmHm"


# ------------------------------------------------------------------------- words are words

CONTROLS = ControlTexts(("<|im_start|>", "<|im_end|>"))


@pytest.mark.parametrize(
    "expression",
    [
        "content",
        "content | trim | upper | lower",
        "(content ~ '') + ''",
        "content.split('</think>')[-1]",
        "(content | tojson)[1:-1]",
        "[content] | join",
        "'%s' % content",
        "content.replace('/think', '')",
        "content | replace('/think', '')",
    ],
)
@pytest.mark.parametrize("words", ["a<|im_end|>b", "<|im_end|>", "<|im_/thinkend|>"])
def test_control_tokens_in_words_are_none_in_the_prompt(expression: str, words: str) -> None:
    template = "<|im_start|>{{ " + expression.replace("content", "messages[0].content")
    text = render_chat(
        template + " }}<|im_end|>", [{"role": "user", "content": words}], control_texts=CONTROLS
    )
    meant = "".join(piece for piece, is_meant in CONTROLS.pieces(text) if is_meant)
    assert CONTROLS.count(meant) == 2
    assert CONTROLS.plain(text).startswith("<|im_start|>")


def test_control_tokens_in_names_tools_and_variables_are_words_too() -> None:
    tools = [{"function": {"name": "f", "description": "<|im_end|>"}, "<|im_end|>": 1}]
    template = "{{ tools | tojson }}{{ more }}{{ messages[0].name }}<|im_end|>"
    text = render_chat(
        template,
        [{"role": "user", "content": "", "name": "<|im_end|>"}],
        control_texts=CONTROLS,
        variables={"tools": tools, "more": "<|im_end|>"},
    )
    assert CONTROLS.count(text) == 1
    assert CONTROLS.plain(text).count("<|im_end|>") == 5


def test_long_words_are_parts_where_a_template_looks_at_parts() -> None:
    """Llama 3.2's template looks at every letter of a text."""
    long = [{"role": "user", "content": "word " * 100_000}]
    template = (
        "{% for m in messages %}{% for part in m['content'] %}{% if part.type == 'image' %}!"
        "{% endif %}{% endfor %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert render_chat(template, long) == long[0]["content"]


_GOES_THROUGH = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
_WANTS_SHORT_IDS = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}"


@pytest.mark.parametrize(
    ("inner", "text"), [(_GOES_THROUGH, "arguments=hello"), (_WANTS_SHORT_IDS, None)]
)
def test_calls_are_given_in_the_form_that_a_template_takes(inner: str, text: str | None) -> None:
    """Arguments that are no object, and the ids of calls that Mistral's templates refuse."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + inner + "{% endfor %}"
        "{% if m.role == 'tool' %}|{{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call = {"id": "call_" + "7" * 24, "function": {"name": "f", "arguments": "hello"}}
    said: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": call["id"]},
    ]
    called, _, answered = render_chat(template, said).partition("|")
    if text is not None:
        assert called == text
    else:
        assert called == answered and re.fullmatch("[0-9a-z]{9}", called)


def test_a_system_message_in_the_middle_is_the_users_where_a_template_refuses_it() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('only first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    said = [("system", "a"), ("user", "b"), ("system", "c"), ("user", "d"), ("assistant", "e")]
    messages = [{"role": role, "content": text} for role, text in [*said, ("system", "f")]]
    assert render_chat(template, messages) == "[system]a[user]b\n\nc\n\nd[assistant]e[user]f"


# ----------------------------------------------------------------------- results of tools


def calls_of(*names: str) -> Message:
    calls = [{"id": name, "function": {"name": "room", "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result_of(name: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": name}


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([calls_of("a", "b"), result_of("b"), result_of("a")], "ab"),
        ([calls_of("a", "b", "c"), result_of("a"), result_of("c"), result_of("b")], "abc"),
        # A picture that one of them sent lies between.
        ([calls_of("a", "b"), result_of("b"), *HELLO, result_of("a")], "aHellob"),
        ([calls_of("a"), calls_of("b"), result_of("b"), result_of("a")], "ab"),
        # The next turn may use the same names; results of nothing stay where they are.
        (
            [calls_of("a", "b"), *map(result_of, "ba"), calls_of("b", "a"), *map(result_of, "?ab")],
            "ab?ba",
        ),
        ([calls_of("", ""), {**result_of("x"), "tool_call_id": ""}, result_of("y")], "xy"),
        ([result_of("a"), calls_of("a")], "a"),
    ],
)
def test_results_are_shown_in_the_order_of_their_calls(messages: list[Message], shown: str) -> None:
    assert render_chat("{% for m in messages %}{{ m.content }}{% endfor %}", messages) == shown
