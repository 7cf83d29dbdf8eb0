"""`edgespec quantize` from the command line, on a small random model."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_gguf import F32, write_model
from tiny_folder import TinyModel, write_folder
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.cli.quantize import respelled
from edgespec.errors import EdgespecError
from edgespec.files import comparison, quantizing, tuning
from edgespec.memory.device import host
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.spec import read_model_spec
from edgespec.quantize import fit, step_times
from edgespec.quantize.convert import Prediction, Recipe
from edgespec.setup.stored import stored_kv_losses

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32)


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As much measuring as a test can afford."""
    monkeypatch.delenv("EDGESPEC_DATA", raising=False)
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quantizing, "_SEARCH_TEXTS", 2)
    monkeypatch.setattr(comparison, "TEXTS", 2)
    monkeypatch.setattr(comparison.held_out, "__defaults__", (2,))
    monkeypatch.setattr(step_times, "_FLUSHED_FLOATS", 1)
    monkeypatch.setattr(step_times, "_REPEATS", 1)
    monkeypatch.setattr(host, "usable_cores", lambda: 1)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_a_type(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    result = run("type", source, target, "q4_0", "--tensor", "ffn_down=q8_0", "-t", 1)
    assert result.stdout == "type  Q4_0\nsize  133 KiB of 714 KiB\n"
    assert f"written: {target}\n" in result.stderr
    types = {t.name: t.type.name for t in read_model_spec(target).tensors.values()}
    assert types["blk.1.ffn_down.weight"] == "Q8_0" and types["blk.1.ffn_up.weight"] == "Q4_0"


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


def test_a_missing_importance_matrix_is_said_to_be_missing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match=r"cannot read .*nope\.dat: No such file"):
        run("type", source, tmp_path / "a.gguf", "Q4_0", "--imatrix", tmp_path / "nope.dat")


def test_a_computed_importance_matrix_changes_the_weights(source: Path, tmp_path: Path) -> None:
    plain, weighed = tmp_path / "plain.gguf", tmp_path / "weighed.gguf"
    run("type", source, plain, "Q4_0")
    run("type", source, weighed, "Q4_0", "--imatrix", "auto")
    ours, theirs = (read_model_spec(path) for path in (plain, weighed))
    assert ours.type_bytes != theirs.type_bytes or plain.read_bytes() != weighed.read_bytes()
    assert b"computed by edgespec" in weighed.read_bytes()


def test_a_size(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fit.gguf"
    result = run(
        "fit", source, target, "150KiB", "--minutes", 0.01, "--types", "Q4_0,Q8_0", "--json"
    )
    report = json.loads(result.stdout)
    assert report["target_bytes"] == target.stat().st_size <= 150 * 1024
    assert report["kl_on_search_texts"] <= report["kl_of_start"] and report["complete"]
    types = {t.name: t.type.name for t in read_model_spec(target).tensors.values()}
    assert report["tensor_types"].items() <= types.items()
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["fit.gguf"]


def test_a_search_that_is_stopped_leaves_the_best_so_far(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was measured; folders of others beside it stay as they are."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    target, parts = tmp_path / "fit.gguf", tmp_path / "fit.gguf.parts"
    parts.mkdir()
    (parts / "mine").touch()
    arguments = ("fit", source, target, "150KiB", "--types", "Q4_0,Q8_0", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(fit._Search, "run", stopped)
        report = json.loads(run(*arguments, code=130).stdout)
    assert not report["complete"] and report["kl_on_search_texts"] == report["kl_of_start"] > 0
    assert target.stat().st_size <= 150 * 1024 and len(list(parts.iterdir())) == 2
    again = json.loads(run(*arguments, "--minutes", 0.01).stdout)
    assert again["complete"] and [path.name for path in parts.iterdir()] == ["mine"]


def test_comparing(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small, page = tmp_path / "small.gguf", tmp_path / "page.html"
    run("type", source, small, "Q4_0")
    result = run("compare", source, small, "--html", page, "--json")
    report = json.loads(result.stdout)
    assert [row["file"] for row in report["rows"]] == ["random.gguf", "small.gguf"]
    kl = report["rows"][1]["quality"]["kl"]
    assert 0 < kl["low"] <= kl["value"] <= kl["high"]
    assert all(set(row["step_ms"]) >= {"1", "4", "8"} for row in report["rows"])
    text = page.read_text()
    assert (
        text.count("<svg") == 2 and "small.gguf" in text and "http://" not in text.split("<svg")[0]
    )
    shown = run("compare", source, small).stdout
    assert re.search(r"small\.gguf +117 KiB +\d\.\d{4} \[", shown)


def test_cache_types(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What smaller caches lose is kept for the planner."""
    monkeypatch.setattr(comparison, "_KV_DEPTH", 32)
    monkeypatch.setattr(comparison, "_KV_LENGTH", 96)
    report = json.loads(run("compare", source, "--kv", "--json").stdout)
    assert [row["kv_type"] for row in report["kv_rows"]] == ["f16", "q8_0", "q4_0"]
    losses = [row["quality"]["kl"]["value"] for row in report["kv_rows"][1:]]
    assert 0 < losses[0] < losses[1]
    stored = stored_kv_losses(read_model_spec(source))
    assert stored == dict(zip(("q8_0", "q4_0"), losses, strict=True))


def test_onnx_folders_are_compared_on_a_text(tmp_path: Path) -> None:
    """Rounding the head to multiples of 0.1 costs something; the folder itself loses nothing."""
    for name in ("onnx", "onnxruntime", "tokenizers"):
        pytest.importorskip(name)
    same, coarse = TinyModel(), TinyModel()
    coarse.weights["head"] = np.round(coarse.weights["head"], 1)
    folders = [
        write_folder(tmp_path / name, tiny)
        for name, tiny in (("source", same), ("again", same), ("coarse", coarse))
    ]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(["The cat sat on the mat, and so did the dog." * 4] * 4))
    result = run("compare", *folders, "--data", text, "--json")
    rows = json.loads(result.stdout)["rows"]
    losses = [row["quality"]["kl"]["value"] for row in rows[1:]]
    assert abs(losses[0]) < 1e-6 < 1e-4 < losses[1]
    with pytest.raises(EdgespecError, match="writes no text") as caught:
        run("compare", *folders)
    assert "--data" in caught.value.hint


@pytest.mark.slow
def test_tuning(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "tuned.gguf"
    arguments = ("tune", source, target, "--types", "Q4_0,Q8_0", "--max-kl", 0.2, "--json")
    report = json.loads(run(*arguments).stdout)
    chosen = next(row for row in report["rows"][1:] if row["type"] == report["type"])
    assert chosen["kl"] <= 0.2 and report["type"].startswith(read_model_spec(target).file_type)
    tried = [row["type"] for row in report["rows"]]
    assert tried == ["F32", "Q4_0", "Q4_0, head Q4_0", "Q8_0"]
    heads = [row["bytes"] for row in report["rows"][1:3]]
    assert heads[1] < heads[0]
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["tuned.gguf"]


@pytest.mark.parametrize(
    ("steps", "chosen"), [({"Q2_K": 2}, "Q8_0"), ({"Q8_0": 1}, "Q2_K"), ({"Q8_0": 4}, "Q2_K")]
)
def test_exact_tuning_counts_only_steps_that_round_alike(
    source: Path, monkeypatch: pytest.MonkeyPatch, steps: dict[str, int], chosen: str
) -> None:
    """Q2_K is a little faster, as far as its steps may be as long."""

    def times(_path: Path, _types: Any, kind: str, *_: Any, **__: Any) -> dict[int, float]:
        return {n: (1.0 + 0.02 * n) * (0.95 if kind == "Q2_K" else 1.0) for n in range(1, 33)}

    monkeypatch.setattr(tuning, "predicted_step_ms", times)
    monkeypatch.setattr(tuning, "pace", lambda *_, **__: nullcontext(lambda: 1.0))
    monkeypatch.setattr(tuning, "invariant_step", lambda spec: steps.get(spec.file_type, 32))
    monkeypatch.setattr(tuning, "_recipes", lambda _, types, *__: {k: Recipe(k) for k in types})
    arguments = ("tune", source, "--exact", "--types", "Q2_K,Q8_0", "--max-kl", 99, "--json")
    report = json.loads(run(*arguments).stdout)
    assert report["type"] == chosen


def test_a_machine_that_slows_down_makes_no_candidate_slow(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take the same; the second one is timed when everything takes half as long again."""
    paces = iter([2.0, 2.0, 4.0])

    def times(_path: Path, _types: Any, kind: str, *_: Any, **__: Any) -> dict[int, float]:
        return {1: 10.0 if kind == "Q4_0" else 15.0, 32: 90.0}

    monkeypatch.setattr(tuning, "predicted_step_ms", times)
    monkeypatch.setattr(tuning, "pace", lambda *_, **__: nullcontext(lambda: next(paces)))
    monkeypatch.setattr(tuning, "_recipes", lambda _, types, *__: {k: Recipe(k) for k in types})
    report = json.loads(run("tune", source, "--types", "Q4_0,Q8_0", "--json").stdout)
    first, second = (row["step_ms"]["1"] for row in report["rows"][1:])
    assert first == second == pytest.approx(10.0)


def test_no_type_is_invariant(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "invariant_step", lambda _: 1)
    with pytest.raises(EdgespecError, match="none has steps that round like") as caught:
        run("tune", source, "--exact", "--types", "Q8_0", "--max-kl", 99)
    assert "--exact" in caught.value.hint


@pytest.mark.slow
def test_types_that_need_a_matrix_are_tuned_too(source: Path) -> None:
    report = json.loads(run("tune", source, "--types", "IQ3_S", "--max-kl", 99, "--json").stdout)
    assert report["type"].startswith("IQ3_S")


@pytest.mark.slow
def test_no_type_is_good_enough(source: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match=r"loses at most 0\.0000") as caught:
        run("tune", source, "--types", "Q4_0", "--max-kl", 0)
    assert "--max-kl" in caught.value.hint and tuning.CANDIDATES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "b"), "No such command"),
        (("a", "b", "--type", "Q4_0", "--tune"), "No such command"),
        (("type", "a", "b"), "Missing argument 'TYPE'"),
        (("compare", "a"), "name a source and other files"),
        (("compare", "a", "b", "--kv"), "cache types of one file"),
        (("type", "a", "b", "Q4_0", "--tensor", "ffn"), "is not PATTERN=TYPE"),
        (("fit", "a", "b", "90"), "SIZE 90 is no size"),
        (("fit", "a", "b", "90MiB", "--tensor", "ffn=Q8_0"), "No such option: --tensor"),
        (("type", "a", "b", "Q4_0", "--data", "x"), "--data goes with --imatrix auto"),
    ],
)
def test_misuse(source: Path, arguments: tuple[str, ...], said: str) -> None:
    named = [str(source) if argument == "a" else argument for argument in arguments]
    result = run(*named, code=2)
    assert said in " ".join(re.sub(r"[│╭╮╰╯─]", "", result.stderr).split())


@pytest.mark.parametrize(
    ("once", "now"),
    [
        ("a b --type Q4_0", "type a b Q4_0"),
        ("a b --type=Q4_0 --tensor ffn=Q8_0", "type a b --tensor ffn=Q8_0 Q4_0"),
        ("--fit 90MiB a b --minutes 2", "fit a b --minutes 2 90MiB"),
        ("a --tune --exact", "tune a --exact"),
        ("--compare a b --html page", "compare a b --html page"),
        ("a b", "a b"),
        ("a b --tune --compare", "a b --tune --compare"),
    ],
)
def test_modes_that_were_options_are_sub_commands(once: str, now: str) -> None:
    assert respelled(once.split()) == now.split()


def test_an_old_spelling_works_and_says_the_new_one(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    result = run(source, target, "--type", "q4_0")
    assert f"note: this is `edgespec quantize type {source} {target} q4_0` now" in result.stderr
    assert read_model_spec(target).file_type == "Q4_0"


@pytest.mark.parametrize("how", [("type", "Q4_0"), ("fit", "90KiB"), ("tune", "--types", "Q4_0")])
def test_a_source_is_never_its_own_target(
    source: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    link = tmp_path / "the_same.gguf"
    link.symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(EdgespecError, match="it is the source"):
        run(how[0], source, link, *how[1:])
    assert source.read_bytes() == before and link.is_symlink()


def test_text_to_judge_by_is_not_the_text_that_was_searched_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, data = read_model_spec(source), tmp_path / "text.txt"

    def texts(lines: int, seed: int) -> set[bytes]:
        monkeypatch.setattr(quantizing, "read_prompts", lambda *_: [[n] * 20 for n in range(lines)])
        found = quantizing.texts_for(spec, 24, lambda *_: None, data=data, seed=seed)
        return {text.tokens.tobytes() for text in found}

    searched, judged = (
        texts(9, seed) for seed in (quantizing.SEARCH_SEED, quantizing.HELD_OUT_SEED)
    )
    assert (len(searched), len(judged), len(searched & judged)) == (5, 4, 0)
    with pytest.raises(EdgespecError, match="too little text"):
        texts(1, quantizing.SEARCH_SEED)
