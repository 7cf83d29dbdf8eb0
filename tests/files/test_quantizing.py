"""Making files: what is said of them, and which text they are judged by."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantize_cases import TYPES, run

from edgespec.errors import EdgespecError
from edgespec.files import quantizing
from edgespec.models.spec import read_model_spec
from edgespec.quantize.convert import Prediction, Recipe


def test_tensors_that_cannot_have_the_type_are_named(source: Path, tmp_path: Path) -> None:
    """Norms stay in floats whatever is asked for, which is said where nothing else was meant."""
    target = tmp_path / "small.gguf"
    result = run("type", source, target, "Q4_0", "--tensor", "blk.0.attn=q8_0")
    assert "become" not in result.stderr
    target.unlink()
    spec, recipe = read_model_spec(source), Recipe("Q4_0", (("attn_[qk]", "Q6_K"),))
    types = {name: TYPES["Q8_0" if "attn_q" in name else "Q6_K"] for name in spec.tensors}
    found = list(quantizing.unheeded(spec, recipe, Prediction(types, 0)))
    assert found == ["4 of 8 tensors that match 'attn_[qk]' become Q8_0"]
    with pytest.raises(EdgespecError, match="no tensor that matches 'norm' can be Q8_0"):
        run("type", source, target, "Q4_0", "--tensor", "norm=q8_0")
    assert not target.exists()


def test_text_to_judge_by_is_not_the_text_that_was_searched_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, data = read_model_spec(source), tmp_path / "text.txt"

    def texts(lines: int, seed: int) -> set[bytes]:
        monkeypatch.setattr(quantizing, "read_prompts", lambda *_: [[n] * 20 for n in range(lines)])
        found = quantizing.texts_for(spec, 24, lambda *_: None, data=data, seed=seed)
        return {text.tokens.tobytes() for text in found}

    searched, judged = (texts(9, seed) for seed in (quantizing.FIT_SEED, quantizing.HELD_OUT_SEED))
    assert (len(searched), len(judged), len(searched & judged)) == (5, 4, 0)
    with pytest.raises(EdgespecError, match="too little text"):
        texts(1, quantizing.FIT_SEED)
