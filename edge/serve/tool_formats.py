"""How models write calls of tools, by what their chat templates say.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one for each call; Qwen, too
llama     {"name": ..., "parameters": {...}}, alone or after <|python_tag|>, several with ";"
mistral   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]; the marker may be no text
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    Args:
        opening: what comes before calls.
        closing: what comes after each; "" where they go on to the end of the answer.
        prefix: what a prompt ends with so that a call has to come.
        arguments: the field that has them.
        is_list: calls are the items of one list.
    """

    name: str
    opening: str
    closing: str
    prefix: str
    arguments: str = "arguments"
    is_list: bool = False


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "<tool_call>\n")
LLAMA = ToolFormat("llama", "<|python_tag|>", "", "", arguments="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "[TOOL_CALLS]", is_list=True)


def format_of(template: str) -> ToolFormat:
    """The way that a template's model was taught."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA
    return HERMES  # which `tools.instructions` teaches


def knows_tools(template: str) -> bool:
    """Whether a template writes the tools of a request into its prompt."""
    return "tools" in template
