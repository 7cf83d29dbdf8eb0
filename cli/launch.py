"""`edgespec launch`: runs a coding agent with a server's address, key and model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

from edgespec.cli.options import SERVER
from edgespec.cli.render import printable
from edgespec.errors import UnsupportedError
from edgespec.option_fields import argument, option

PROGRAMS = ("aider", "claude", "codex")


def _told(program: str, url: str, key: str, model: str) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments by which a program gets a server's address, key and model."""
    openai = {"OPENAI_API_KEY": key}
    if program == "aider":
        return {"OPENAI_API_BASE": f"{url}/v1", **openai}, ["--model", f"openai/{model}"]
    if program == "claude":
        names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
        told = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key}
        return told | dict.fromkeys(names, model), []
    values = {"name": "edgespec", "base_url": f"{url}/v1", "wire_api": "responses"}
    values["env_key"] = "OPENAI_API_KEY"
    set_ = {"model_provider": "edgespec", "model": model}
    set_ |= {f"model_providers.edgespec.{name}": value for name, value in values.items()}
    return openai, [one for name in set_ for one in ("-c", f"{name}={json.dumps(set_[name])}")]


def launch(
    program: str = argument("aider, claude or codex.", default=""),
    arguments: list[str] = argument("Its own arguments, behind --.", default=()),
    url: str = option("http://127.0.0.1:8080", "Address of the server.", panel=SERVER),
    api_key: str = option("", "The server's key.", panel=SERVER),
    model: str = option("", "Which of the server's models. Default: the first.", panel=SERVER),
    only_print: bool = option(False, "Print the command line; run nothing.", called="--print"),
) -> None:
    """Run a coding agent on a server. Example: edgespec launch aider -- --edit-format whole

    The server runs already, as by `edgespec serve model.gguf`. The agent gets its address, key and
    model by variables and arguments of this one run; nothing is written to its files.
    """
    if program not in PROGRAMS:
        raise UnsupportedError(
            f"there is no way to launch {program!r}" if program else "no program was named",
            hint=f"name one of {', '.join(PROGRAMS)}; docs/integrations.md has others",
        )
    url = url.rstrip("/").removesuffix("/v1")
    names = _models_of(url, api_key)
    if model and model not in names:
        raise UnsupportedError(
            f"the server has no model {model!r}", hint=f"it has {', '.join(names)}"
        )
    # Some refuse to run without a key.
    variables, given = _told(program, url, api_key or "none", model or names[0])
    command = [program, *given, *arguments]
    if only_print:
        set_ = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(printable(" ".join([*set_, shlex.join(command)])))
        return
    path = shutil.which(program)
    if path is None:
        raise UnsupportedError(
            f"{program} is not on the PATH", hint="install it, or see the command line with --print"
        )
    if os.name == "posix":  # it takes the place of this program
        os.execve(path, command, os.environ | variables)
    sys.exit(subprocess.call([path, *command[1:]], env=os.environ | variables))


def _models_of(url: str, key: str) -> list[str]:
    """Names of a server's models, at least one. Raises UnsupportedError where it tells none."""
    import http.client
    import urllib.error
    import urllib.request

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        asked = urllib.request.Request(f"{url}/v1/models", headers=headers)
        # It knows them without loading one, in less than 5 s and 1 MiB.
        with urllib.request.urlopen(asked, timeout=5.0) as answer:
            found = [str(one["id"]) for one in json.loads(answer.read(1 << 20))["data"]]
    except urllib.error.HTTPError as problem:
        wants_key = problem.code in (401, 403)
        raise UnsupportedError(
            f"the server at {url} answered {problem.code}",
            hint="--api-key has to be its key" if wants_key else "--url has to be its address",
        ) from problem
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as problem:
        raise UnsupportedError(
            f"no server of models answers at {url}",
            hint="start one with `edgespec serve model.gguf`, or name it with --url",
        ) from problem
    if not found:
        raise UnsupportedError(f"the server at {url} has no model")
    return found
