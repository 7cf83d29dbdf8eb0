"""Clients from the registry, driven against a server: which of them get an answer.

    pip install openai anthropic langchain-openai litellm llm llama-index-llms-openai-like \
        "pydantic-ai-slim[openai]" "smolagents[openai]" instructor aider-chat
    edgespec serve model.gguf --port 8080 &
    python benchmarks/clients.py http://localhost:8080

One that is not installed is named. Each makes one or two calls: a stream, a tool, or a schema.
"""

# Clients are imported where they are driven: none of them has to be here.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call,no-any-unimported,misc"

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ASK = "What is the capital of France? One word."
HELLO: Any = [{"role": "user", "content": ASK}]
MOST = 40  # tokens of an answer
_TIME_S = 600


class City(BaseModel):
    """What a schema asks for."""

    name: str
    country: str


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"{city} is sunny"


def openai(base: str, model: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{base}/v1", api_key="none")
    parts = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=MOST, stream=True, reasoning_effort="low"
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    first = client.responses.create(model=model, input=ASK, max_output_tokens=MOST)
    so_far: Any = [{"role": "user", "content": ASK}, *first.output]
    second = client.responses.create(
        model=model,
        input=[*so_far, {"role": "user", "content": "Again"}],
        max_output_tokens=MOST,
    )
    return text, first.output_text, second.output_text


def anthropic(base: str, model: str) -> Any:
    from anthropic import Anthropic

    client = Anthropic(base_url=base, api_key="none")
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(
        model=model,
        max_tokens=2000,
        system=system,
        messages=HELLO,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        return "".join(stream.text_stream)


def langchain(base: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{base}/v1", api_key="none", model=model, max_tokens=MOST)
    asked = chat.bind_tools([weather], tool_choice="weather").invoke("Weather in Rome?")
    return asked.tool_calls, chat.with_structured_output(City, method="json_schema").invoke(ASK)


def litellm(base: str, model: str) -> Any:
    import litellm as library

    several = ((f"openai/{model}", f"{base}/v1"), (f"anthropic/{model}", base))
    return [
        library.completion(name, HELLO, api_base=address, api_key="none", max_tokens=MOST)
        .choices[0]
        .message.content
        for name, address in several
    ]


def llm(base: str, model: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        entry = (
            f"- model_id: local\n  model_name: {model}\n  api_base: {base}/v1\n  api_key: none\n"
        )
        (Path(folder) / "extra-openai-models.yaml").write_text(entry, encoding="utf-8")
        return _said(["-m", "llm", "-m", "local", ASK], {"LLM_USER_PATH": folder}, folder)


def aider(base: str, model: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        options = (
            "--edit-format whole --yes-always --no-git --no-check-update --no-show-model-warnings"
        )
        asked = [
            "--model",
            f"openai/{model}",
            "--message",
            "add should add: fix calc.py",
            "calc.py",
        ]
        given = {"OPENAI_API_BASE": f"{base}/v1", "OPENAI_API_KEY": "none"}
        return _said(["-m", "aider", *options.split(), *asked], given, folder)


def _said(arguments: list[str], variables: dict[str, str], folder: str) -> str:
    """What a program writes. Raises CalledProcessError where it fails."""
    if importlib.util.find_spec(arguments[1]) is None:
        raise ModuleNotFoundError(name=arguments[1])
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIME_S,
        cwd=folder,
        env={**os.environ, **variables},
    )
    return done.stdout


def llama_index(base: str, model: str) -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(
        model=model, api_base=f"{base}/v1", api_key="none", is_chat_model=True, max_tokens=MOST
    )
    return "".join(part.delta or "" for part in chat.stream_chat([ChatMessage(content=ASK)]))


def pydantic_ai(base: str, model: str) -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="none"))
    return asyncio.run(Agent(chat, output_type=NativeOutput(City)).run(ASK)).output


def smolagents(base: str, model: str) -> Any:
    from smolagents import OpenAIModel

    chat = OpenAIModel(model_id=model, api_base=f"{base}/v1", api_key="none", max_tokens=MOST)
    said = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
    return chat.generate(said).content


def instructor(base: str, model: str) -> Any:
    import instructor as library
    from openai import OpenAI

    inner = OpenAI(base_url=f"{base}/v1", api_key="none")
    made = []
    for mode in (library.Mode.JSON_SCHEMA, library.Mode.TOOLS):
        chat = library.from_openai(inner, mode=mode)
        made.append(
            chat.chat.completions.create(
                model=model, messages=HELLO, response_model=City, max_tokens=MOST
            )
        )
    return made


CLIENTS: tuple[Callable[[str, str], Any], ...] = (
    *(openai, anthropic, langchain, litellm, llm, aider),
    *(llama_index, pydantic_ai, smolagents, instructor),
)


def main() -> int:
    """Drive them all, or those that are named; the status is 1 where one got no answer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("base", help="such as http://localhost:8080")
    parser.add_argument("names", nargs="*", help="of clients; default: all")
    asked = parser.parse_args()
    base, names = asked.base, asked.names
    with urllib.request.urlopen(f"{base}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    failed = 0
    for client in CLIENTS:
        if names and client.__name__ not in names:
            continue
        try:
            told = f"answered: {' '.join(str(client(base, model)).split())[-100:]}"
        except ModuleNotFoundError as missing:
            told = f"not installed: {missing.name}"
        except Exception as problem:
            failed += 1
            more = getattr(problem, "stderr", None) or ""
            told = f"FAILED: {type(problem).__name__}: {problem} {more[-500:]}"
        print(f"{client.__name__:12} {told}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
