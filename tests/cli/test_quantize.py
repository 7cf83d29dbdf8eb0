"""`edgespec quantize` from the command line, on a small random model."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from quantize_cases import little_work, run
from random_gguf import F32, write_model

from edgespec.cli.quantize import report_text
from edgespec.errors import EdgespecError
from edgespec.files import quantizing
from edgespec.files.tuning import CANDIDATES
from edgespec.models.spec import read_model_spec
from edgespec.quantize import fit, quality


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32, layers=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    little_work(monkeypatch, tmp_path)


def test_a_type(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    result = run("type", source, target, "q4_0", "--tensor", "ffn_down=q8_0", "-t", 1)
    assert result.stdout == "type  Q4_0\nsize  57 KiB of 279 KiB\n"
    assert f"written: {target}\n" in result.stderr
    types = {t.name: t.type.name for t in read_model_spec(target).tensors.values()}
    assert types["blk.0.ffn_down.weight"] == "Q8_0" and types["blk.0.ffn_up.weight"] == "Q4_0"


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


def test_a_fit_that_is_stopped_goes_on_where_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured stays; folders of others beside it stay as they are."""
    measure, calls = quality.score, itertools.count()

    def stopped(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return measure(*arguments, **more)

    target, parts = tmp_path / "fit.gguf", tmp_path / "fit.gguf.parts"
    parts.mkdir()
    (parts / "mine").touch()
    arguments = ("fit", source, target, "62KiB", "--types", "Q4_0,Q8_0", "--json")
    monkeypatch.setattr(fit, "score", stopped)
    assert "the same command goes on" in run(*arguments, code=130).stderr
    assert not target.exists() and len(list(parts.iterdir())) == 2
    report = json.loads(run(*arguments).stdout)
    assert next(calls) == 1 + report["evaluations"]  # once more what was interrupted
    assert [path.name for path in parts.iterdir()] == ["mine"]
    assert report["target_bytes"] == target.stat().st_size <= 62 * 1024
    types = {t.name: t.type.name for t in read_model_spec(target).tensors.values()}
    assert report["tensor_types"].items() <= types.items()


@pytest.mark.long
def test_a_fit_that_time_was_too_short_for_says_so_and_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("fit", source, tmp_path / "fit.gguf", "62KiB", "--types", "Q4_0,Q8_0")
    with monkeypatch.context() as patch:
        patch.setattr(quantizing, "fit", lambda *a, **b: replace(fit.fit(*a, **b), measured=3))
        said = run(*arguments).stderr
    assert "time was over: 3 of 9 tensors were measured" in said
    assert "the same command goes on" in said
    assert (tmp_path / "fit.gguf.parts").exists()
    run(*arguments)
    assert not (tmp_path / "fit.gguf.parts").exists()


def test_the_disk_is_looked_at_before_anything_is_measured(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = shutil.disk_usage(tmp_path)._replace(free=160 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    monkeypatch.setattr(quantizing, "write_texts", lambda *_, **__: pytest.fail("too early"))
    with pytest.raises(EdgespecError, match="MiB free"):
        run("fit", source, tmp_path / "fit.gguf", "62KiB", "--types", "Q4_0,Q8_0")
    assert not (tmp_path / "fit.gguf.parts").exists()


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


def test_a_wrong_target_is_told_before_a_matrix_is_computed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.files.quantizing.importance_matrix", None)
    with pytest.raises(EdgespecError, match="it is the source"):
        run("tune", source, source)


def test_help_counts_the_types_that_are_tried(command: Command) -> None:
    assert f"Default: {len(CANDIDATES)} common ones" in command("quantize", "tune", "--help").out


STEP_MS = {"1": 10.0, "4": 12.5, "8": 20.0}
LOSS = {
    "kl": {"value": 0.01, "low": 0.008, "high": 0.012},
    "agreement": {"value": 0.95},
    "perplexity_ratio": {"value": 1.02},
}


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_mixture_says_how_many_tensors_have_which_type() -> None:
    report = {
        "type": "Q4_0",
        "target_bytes": 133 << 10,
        "source_bytes": 714 << 10,
        "tensor_types": {"a": "Q6_K", "b": "Q4_0", "c": "Q4_0"},
        "kl_on_own_texts": 0.0123,
        "evaluations": 7,
        "measuring_s": 3.2,
    }
    assert words(report_text(report)) == [
        ["type", "Q4_0"],
        "size 133 KiB of 714 KiB".split(),
        "tensors 2 in Q4_0, 1 in Q6_K".split(),
        "divergence 0.0123 from the source on the texts it was chosen by".split(),
        "measured 7 mixtures in 3 s".split(),
    ]


def test_types_of_a_cache_are_held_against_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [
        {"kv_type": "f16", "step_ms": STEP_MS},
        {"kv_type": "q8_0", "step_ms": STEP_MS, "quality": LOSS},
    ]
    found = words(report_text({"kv_rows": rows, "places": 64, "step_depth": 256}))
    times = "10.00 ms 12.50 ms 20.00 ms".split()
    assert found[1] == ["f16", "source", *times]
    assert found[2] == ["q8_0", "0.0100", "95.0%", "1.020x", *times]
    assert "losses over 64 tokens of one text" in " ".join(map(" ".join, found))
    monkeypatch.setenv("COLUMNS", "40")
    narrow = report_text({"kv_rows": rows, "places": 64, "step_depth": 256})
    assert max(map(len, narrow.splitlines())) <= 40 and "20.00 ms" in narrow


def test_the_chosen_type_is_marked_beside_what_was_predicted_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    def row(kind: str, plain: float, **more: Any) -> dict[str, Any]:
        speeds = {"plain_tokens_per_s": plain, "speculative_tokens_per_s": 1.5 * plain}
        return {
            "type": kind, "is_source": False, "bytes": 1 << 20, "step_ms": STEP_MS, **speeds, **more
        }  # fmt: skip

    source = row("Q8_0", 20.0, measured={"plain_tokens_per_s": 20.0})
    chosen = row("Q4_0", 38.0, measured={"plain_tokens_per_s": 40.0}, kl=0.02)
    rows = [{**source, "is_source": True}, row("Q5_0", 30.0, kl=0.01), chosen]
    text = report_text({"rows": rows, "type": "Q4_0", "max_kl": 0.05})
    assert [line.endswith("<- chosen") for line in text.splitlines()[1:4]] == [False, False, True]
    assert " ".join(text.split()).endswith(
        "Q4_0: 40.0 tokens/s plain as written, 38.0 predicted, 2.00x of the source; "
        "at most 0.0500 of loss was allowed"
    )
