"""Heads of models, here and in llama.cpp's server: the same tokens, the same drafts.

    python benchmarks/heads.py llama-server model-with-a-head.gguf ...
    python benchmarks/heads.py llama-server model.gguf --draft eagle3-model.gguf
    python benchmarks/heads.py llama-server model.gguf --draft mtp-model.gguf

Each model writes greedily with drafts of one and of three tokens (of a DFlash head, with those of
its block), all of them from its head and verified in every round, on both sides. Compared are the
tokens, how many were drafted, and how many of these were accepted. The server must be of the
llama.cpp that edgespec runs on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.following import Following
from edgespec.backends.llama.head import (
    Followed,
    FollowedBackend,
    FollowedRecurrentBackend,
)
from edgespec.backends.llama.head_files import open_head_file
from edgespec.backends.tree import DraftTree
from edgespec.memory.bytes.head_footprint import block_nodes
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, Reads, read_model_spec

TEXT = b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 "
TOKENS, CONTEXT = 96, 512
DEPTHS = (1, 3)
SERVER_KINDS = {
    MTP: "draft-mtp",
    ASSISTANT: "draft-mtp",
    EAGLE: "draft-eagle3",
    DFLASH: "draft-dflash",
}
PORT = 18_231


class Written(NamedTuple):
    """One text, and the drafts it was written with."""

    tokens: list[int]
    drafted: int
    accepted: int


class Files(NamedTuple):
    """A model, and its head where that has a file of its own."""

    model: Path
    head: Path | None


def opened(files: Files, depth: int) -> Followed:
    """A model that its head can follow."""
    settings = LlamaSettings(CONTEXT, batch_size=128, max_nodes=depth + 1, gpu_layers=0)
    inside = files.head is None
    if read_model_spec(files.model).has_snapshots:
        return FollowedRecurrentBackend(files.model, settings, snapshots=depth, inside=inside)
    return FollowedBackend(files.model, settings, inside=inside)


def head_beside(files: Files, backend: Followed) -> Following:
    """The head of a model, opened beside it."""
    if files.head is None:
        return backend.open_head()
    spec = read_model_spec(files.head, heads=True)
    return backend.open_head(partial(open_head_file, spec, LlamaSettings(CONTEXT, gpu_layers=0)))


def kind_of(head: Path) -> Reads:
    """What a head in a file of its own reads."""
    reads = read_model_spec(head, heads=True).reads
    assert reads is not None, "a head"
    return reads


def depths_of(files: Files) -> tuple[int, ...]:
    """Tokens to be drafted: the server makes a block of as many as it is asked for."""
    if files.head is None or kind_of(files.head).kind != DFLASH:
        return DEPTHS
    return (block_nodes(kind_of(files.head)) - 1,)


def written_here(files: Files, prompt: list[int], depth: int) -> Written:
    """With a fixed depth, without edgespec's loop, which would choose it."""
    with closing(opened(files, depth)) as backend:
        head = head_beside(files, backend)
        tokens = [int(backend.prefill(prompt).argmax())]
        drafted = accepted = 0
        while len(tokens) < TOKENS:
            drafts: list[int] = []
            while len(drafts) < min(depth, TOKENS - len(tokens) - 1):
                row = head.go_on(drafts[-1]) if drafts else head.begin(tokens[-1])
                drafts.append(int(row.argmax()))
            rows = backend.verify(DraftTree.chain([tokens[-1], *drafts]))
            picks = [int(row.argmax()) for row in rows]
            right = 0
            while right < len(drafts) and drafts[right] == picks[right]:
                right += 1
            backend.commit(range(right + 1))
            tokens += picks[: right + 1]
            drafted, accepted = drafted + len(drafts), accepted + right
        return Written(tokens[:TOKENS], drafted, accepted)


def written_by_server(server: str, files: Files, prompt: list[int], depth: int) -> Written:
    """The same request to llama.cpp's server."""
    kind = ["draft-mtp"]
    if files.head is not None:
        kind = [SERVER_KINDS[kind_of(files.head).kind], "-md", str(files.head)]
    command = [
        server, "-m", str(files.model), "-c", str(CONTEXT), "--port", str(PORT), "-t", "1",
        "-np", "1", "-fa", "on", "--no-warmup", "--spec-draft-n-max", str(depth),
        "--spec-draft-p-min", "0", "--spec-type", *kind,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(process)
        request = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
        answer = ask("completion", request | {"cache_prompt": False})
    finally:
        process.terminate()
        process.wait()
    times = answer["timings"]
    return Written(answer["tokens"], times["draft_n"], times["draft_n_accepted"])


def wait_for(process: subprocess.Popen[bytes]) -> None:
    """Until the server has loaded its model."""
    for _ in range(300):
        if process.poll() is not None:
            sys.exit("the server ended at once: is it of the same llama.cpp?")
        try:
            ask("health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit("the server did not begin to answer in a minute")


def ask(route: str, body: dict[str, Any] | None = None) -> Any:
    """One answer of the server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{route}", data=data)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def main() -> int:
    """How many of the runs differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="llama-server")
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--draft", type=Path, help="the head's file, where it is none of a model's")
    options = parser.parse_args()
    differ = 0
    print("| file | depth | drafted, here and there | accepted, here and there | tokens |")
    print("| --- | --- | --- | --- | --- |")
    for path in options.models:
        files = Files(path, options.draft)
        with closing(opened(files, 1)) as backend:
            prompt = backend.tokenizer.encode(TEXT.decode())
        for depth in depths_of(files):
            here = written_here(files, prompt, depth)
            there = written_by_server(options.server, files, prompt, depth)
            same = here.tokens == there.tokens
            differ += here != there
            print(
                f"| {path.name} | {depth} | {here.drafted} / {there.drafted} | "
                f"{here.accepted} / {there.accepted} | {'the same' if same else 'others'} |"
            )
    return differ


if __name__ == "__main__":
    sys.exit(main())
