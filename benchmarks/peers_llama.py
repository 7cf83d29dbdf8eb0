"""llama.cpp as a contender of peers.py: through llama-cpp-python's class, and as its own server."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from edgespec.bench.interleaving import Answer
from edgespec.decode.engine import Prompt
from edgespec.decode.stats import Counters
from edgespec.errors import BackendError

CONTEXT = 4096
_START_S = 120.0


class LlamaPython:
    """llama-cpp-python's high-level class, plain or with its prompt lookup."""

    def __init__(self, name: str, model: Path, threads: int, num_pred_tokens: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=num_pred_tokens)
        self.name = name
        self._llama = Llama(
            str(model),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            draft_model=draft if num_pred_tokens else None,
            logits_all=num_pred_tokens > 0,  # or a prompt of two batches has no room for its rows
            verbose=False,
        )
        self._is_end = {self._llama.token_eos(), self._llama._model.token_eot()}

    def renew(self) -> None:
        """It remembers no text."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The greedy answer; its tokens come one by one."""
        self._llama.reset()
        tokens: list[int] = []
        times: list[float] = []
        start = time.perf_counter()
        for token in self._llama.generate(_ids(prompt), temp=0.0, repeat_penalty=1.0):
            times.append(time.perf_counter())
            tokens.append(token)
            if len(tokens) >= max_tokens or token in self._is_end:
                break
        counters = _counters(prompt, len(tokens), times[0] - start, times[-1] - times[0])
        return Answer(tuple(tokens), counters)

    def close(self) -> None:
        """Free the model."""
        self._llama.close()


class LlamaServer:
    """llama.cpp's server in a process of its own, asked for token ids over HTTP."""

    def __init__(
        self, name: str, server: Path, model: Path, threads: int, options: Sequence[str]
    ) -> None:
        self.name = name
        self._url = f"http://127.0.0.1:{(port := _free_port())}"
        command = [str(server), "-m", str(model), "--port", str(port)]
        command += ["-c", str(CONTEXT), "-np", "1", "-fa", "on"]
        command += ["-t", str(threads), "-tb", str(threads)]
        self.process = subprocess.Popen(
            [*command, "--cache-ram", "0", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise BackendError(f"{self.name} did not start (status {self.process.poll()})")

    def renew(self) -> None:
        """What its n-gram pools hold of earlier answers stays there, as it does for its users."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The greedy answer, with the server's own decode time and the whole time as seen here."""
        request = {
            "prompt": _ids(prompt),
            "n_predict": max_tokens,
            "temperature": 0.0,
            "top_k": 1,  # the cheapest way to be greedy here: no other sampler looks at the logits
            "samplers": ["top_k"],
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        start = time.perf_counter()
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._url}/completion", body, headers)
        try:
            with urllib.request.urlopen(asked) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as problem:
            raise BackendError(f"{self.name}: {problem.read().decode()[:200]}") from problem
        total_s = time.perf_counter() - start
        timings = found["timings"]
        decode_s = timings["predicted_ms"] / 1e3
        if timings["prompt_n"] != len(_ids(prompt)):
            raise BackendError(f"{self.name} read {timings['prompt_n']} tokens of another prompt")
        counters = _counters(prompt, timings["predicted_n"], total_s - decode_s, decode_s)
        counters.drafted_tokens = timings.get("draft_n", 0)
        counters.accepted_tokens = timings.get("draft_n_accepted", 0)
        counters.rounds -= counters.accepted_tokens
        return Answer(tuple(found["tokens"]), counters)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def _counters(prompt: Prompt, generated: int, first_s: float, decode_s: float) -> Counters:
    """Counters of an answer whose tokens came one by one."""
    return Counters(
        prompt_tokens=len(_ids(prompt)),
        generated_tokens=generated,
        rounds=max(0, generated - 1),
        time_to_first_token_s=first_s,
        decode_s=decode_s,
    )


def _ids(prompt: Prompt) -> list[int]:
    return [token for token in prompt if isinstance(token, int)]


def _free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
