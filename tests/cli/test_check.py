"""`--check` notices a backend that lies: what users verify lossless decoding with is verified."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import Command
from frozen_times import let_drafts_pay

from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaSequence
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.setup import loading

_PROMPT = "Write the word hello 20 times, with spaces between."
_OPTIONS = "--drafter suffix --draft-max 4 --ctx 256 --max-tokens 40 --check".split()


@pytest.fixture
def lying_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps over drafts give another best token than steps over one token do; their sizes."""
    seen: list[int] = []
    verify, load = LlamaSequence.verify, loading.load_plan

    def lying(self: LlamaSequence, tree: DraftTree) -> Any:
        logits = verify(self, tree)
        if len(tree) > 1:
            seen.append(len(tree))
            logits = logits.copy()
            logits[0, logits[0].argmax()] -= 1000.0
        return logits

    def loaded(*arguments: Any, **options: Any) -> Any:
        engine = load(*arguments, **options)
        let_drafts_pay(engine)
        return engine

    monkeypatch.setattr(LlamaSequence, "verify", lying)
    monkeypatch.setattr(loading, "load_plan", loaded)
    return seen


@pytest.mark.model
def test_a_backend_that_lies_is_found_out(
    here: Command, tiny: str, lying_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted_again: list[int] = []
    generate = Engine.generate

    def watched(self: Engine, *arguments: Any, **options: Any) -> Result:
        before = len(lying_steps)
        result = generate(self, *arguments, **options)
        drafted_again.append(len(lying_steps) - before)
        return result

    monkeypatch.setattr(Engine, "generate", watched)
    done = here("run", tiny, "-p", _PROMPT, *_OPTIONS, "--json")
    assert lying_steps, "nothing was drafted, so nobody lied"
    assert drafted_again == [0], "it is compared with plain decoding"
    found = json.loads(done.out)["check"]
    assert found["identical"] is False
    assert 0 <= found["position"] < 40
    assert found["best_two_logits_gap"] >= 0.0 and found["batch_noise"] > 100.0


@pytest.mark.model
@pytest.mark.usefixtures("lying_steps")
def test_people_are_told_where_outputs_part(here: Command, tiny: str) -> None:
    done = here("run", tiny, "-p", _PROMPT, *_OPTIONS)
    line = done.err.splitlines()[-2]
    assert line.startswith("check: differs from plain decoding at token "), done.err
    assert "where the two best logits are" in line and "batch noise here: " in line
