"""`edgespec quantize` from the command line, on a small random model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Command
from quantize_cases import little_work, run
from random_gguf import F32, write_model

from edgespec.errors import EdgespecError
from edgespec.files import quantizing
from edgespec.files.tuning import CANDIDATES
from edgespec.models.spec import read_model_spec
from edgespec.quantize import fit


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    little_work(monkeypatch, tmp_path)


def test_a_type(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    result = run("type", source, target, "q4_0", "--tensor", "ffn_down=q8_0", "-t", 1)
    assert result.stdout == "type  Q4_0\nsize  133 KiB of 714 KiB\n"
    assert f"written: {target}\n" in result.stderr
    types = {t.name: t.type.name for t in read_model_spec(target).tensors.values()}
    assert types["blk.1.ffn_down.weight"] == "Q8_0" and types["blk.1.ffn_up.weight"] == "Q4_0"


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
    result = run("fit", source, target, "150KiB", "--types", "Q4_0,Q8_0", "--json")
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
    again = json.loads(run(*arguments).stdout)
    assert again["complete"] and [path.name for path in parts.iterdir()] == ["mine"]


@pytest.mark.long
def test_a_fit_that_time_was_too_short_for_says_so_and_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("fit", source, tmp_path / "fit.gguf", "150KiB", "--types", "Q4_0,Q8_0")
    with monkeypatch.context() as patch:
        patch.setattr(quantizing, "fit", lambda *a, **b: replace(fit.fit(*a, **b), measured=3))
        said = run(*arguments).stderr
    assert "time was over: 3 of 30 tensors were measured" in said
    assert "the same command goes on" in said
    assert (tmp_path / "fit.gguf.parts").exists()
    run(*arguments)
    assert not (tmp_path / "fit.gguf.parts").exists()


def test_the_disk_is_looked_at_before_anything_is_measured(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = shutil.disk_usage(tmp_path)._replace(free=400 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    monkeypatch.setattr(quantizing, "write_texts", lambda *_, **__: pytest.fail("too early"))
    with pytest.raises(EdgespecError, match="MiB free"):
        run("fit", source, tmp_path / "fit.gguf", "150KiB", "--types", "Q4_0,Q8_0")
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


def test_help_counts_the_types_that_are_tried(command: Command) -> None:
    assert f"Default: {len(CANDIDATES)} common ones" in command("quantize", "tune", "--help").out
