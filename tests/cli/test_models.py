"""`edgespec models`: what is listed, fetched and removed, and what is said meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bert_gguf import write_random_bert
from command_line import Command, first_column
from eagle3_gguf import Head, write_eagle
from hub_server import COMMIT, Hub, endpoint
from hybrid_gguf import Shape, write_hollow, write_hybrid
from random_gguf import Q8_0, write_model

import edgespec
from edgespec.errors import MissingDependencyError, ModelNotFoundError
from edgespec.memory.bytes import simulation
from edgespec.memory.plan.plan import Plan
from edgespec.memory.store.packed import PackedFile
from edgespec.models import processes
from edgespec.models.embedded import embedded_model
from edgespec.models.processes import start_module
from edgespec.models.projector import projector_beside
from edgespec.setup import planning

NAME = "hf:owner/Tiny-GGUF:Q8_0"


@pytest.fixture
def hub(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one small model, and a head beside it."""
    data = write_model(tmp_path / "tiny.gguf", "llama", Q8_0).read_bytes()
    with endpoint(monkeypatch) as one:
        one.repositories["owner/Tiny-GGUF"] = {"Tiny-Q8_0.gguf": data, "mtp-Tiny.gguf": b"GGUF"}
        yield one


def test_a_model_is_pulled_listed_and_removed(at_home: Command, hub: Hub, home: Path) -> None:
    status, out, told = at_home("models", "pull", "owner/Tiny-GGUF")
    path = Path(out.strip())
    assert status == 0 and path.is_file() and path.is_relative_to(home / "hub")
    first, plan, head = told.splitlines()
    assert first.startswith(f"{NAME}: ") and first.endswith(", from the hub")
    assert plan.startswith("would take at most ")
    assert head == "a head lies beside it: hf:owner/Tiny-GGUF/mtp-Tiny.gguf"
    assert at_home("models", "pull", NAME)[1:] == (out, f"{NAME} is here already\n")
    rows = {one["name"]: one for one in json.loads(at_home("models", "list", "--json")[1])}
    assert rows[NAME]["path"] == str(path) and rows[NAME]["fits"] is True
    assert rows[NAME]["file_bytes"] == path.stat().st_size
    status, _, told = at_home("models", "remove", NAME, stdin="n\n")
    assert status == 1 and "nothing was removed" in told and path.is_file()
    status, _, told = at_home("models", "remove", NAME, stdin="y\n")
    assert status == 0 and f"removed {NAME}" in told and not path.exists()
    assert at_home("models", "remove", NAME)[0] == 1


def test_the_projector_of_a_model_is_offered_and_found(
    at_home: Command, hub: Hub, vision_folder: Path
) -> None:
    files = {f"{name}.gguf": vision_folder / f"{name}.gguf" for name in ("llava", "mmproj-llava")}
    hub.repositories["owner/Sees-GGUF"] = {name: one.read_bytes() for name, one in files.items()}
    _, model, told = at_home("models", "pull", "owner/Sees-GGUF")
    offered = told.splitlines()[-1]
    assert offered == "with this it sees images: hf:owner/Sees-GGUF/mmproj-llava.gguf"
    status, path, told = at_home("models", "pull", offered.rpartition(" ")[2])
    assert (status, len(told.splitlines())) == (0, 1)
    assert projector_beside(Path(model.strip())) == Path(path.strip())


def test_a_model_that_is_here_needs_no_hub_and_writes_nothing(
    at_home: Command, hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = at_home("models", "pull", NAME)
    with read_only(home / "hub"):
        assert at_home("models", "pull", "owner/tiny-gguf")[:2] == (0, out)
        hub.status["owner/Tiny-GGUF"] = 500
        status, shown, told = at_home("models", "pull", NAME)
        assert (status, shown) == (0, out)
        assert told.startswith("Tiny-Q8_0.gguf is here already; a newer one is not looked for: ")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        status, shown, told = at_home("models", "pull", "owner/TINY-gguf:q8_0")
        assert (status, shown) == (0, out) and "HF_HUB_OFFLINE forbids asking" in told
        assert at_home("models", "pull", "hf:owner/Tiny-GGUF:F32")[0] == 1
    reference = next((home / "hub").rglob("refs/main"))
    reference.unlink()
    reference.parent.rmdir()
    reference.parent.touch()  # in which nothing can be made
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.status.clear()
    assert at_home("models", "pull", NAME)[:2] == (0, out)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing is made or changed in the folder, also by a person who may write everywhere."""
    before = {path: path.stat().st_mode for path in (folder, *folder.rglob("*")) if path.is_dir()}
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in before:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path, mode in before.items():
            path.chmod(mode)
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_what_a_link_in_the_cache_means_elsewhere_is_not_removed(
    at_home: Command, home: Path, tmp_path: Path
) -> None:
    mine = write_model(tmp_path / "mine.gguf", "llama", Q8_0)
    link = home / "hub" / "models--owner--Tiny-GGUF" / "snapshots" / COMMIT / "Tiny-Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(mine)
    status, _, told = at_home("models", "remove", "hf:owner/tiny-gguf:q8_0", "--yes")
    assert status == 0 and not link.is_symlink() and mine.is_file()
    assert told.splitlines()[-1] == f"{mine} stays: the cache had a link to it"


def test_every_command_takes_any_part_of_a_split_model(at_home: Command, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", "llama", Q8_0, reads_bytes=True, tensors_per_part=15)
    parts = [str(path) for path in sorted(tmp_path.glob("tiny-*.gguf"))]
    for command in (
        ("models", "show"),
        ("run", "--raw", "--prompt", "abc", "--max-tokens", "4", "--drafter", "none"),
    ):
        done = [at_home(*command, "-m", part) for part in parts]
        assert all(status == 0 for status, *_ in done), done
        assert len({out for _, out, _ in done}) == 1
    plans = [json.loads(at_home("plan", "--json", "-m", part)[1]) for part in parts]
    assert {one["model"] for one in plans} == {parts[0]}
    Path(parts[0]).unlink()
    for name in ("plan", "run"):
        status, _, told = at_home(
            name, "-m", parts[1], *(["--prompt", "a"] if name == "run" else [])
        )
        assert status == 1 and f"{Path(parts[0]).name} is missing: 1 of the" in told


def test_what_does_not_fit_is_fetched_by_force_alone(at_home: Command, hub: Hub) -> None:
    status, out, told = at_home("models", "pull", NAME, "--budget", "1MiB")
    assert (status, out) == (1, "")
    assert f"error: {NAME} would not fit: needs " in told and "hint: `--budget " in told
    status, out, _ = at_home("models", "pull", NAME, "--budget", "1MiB", "--force")
    assert status == 0 and Path(out.strip()).is_file()


def test_every_command_fetches_what_it_is_asked_for(at_home: Command, hub: Hub) -> None:
    status, out, told = at_home("plan", "-hf", "owner/Tiny-GGUF", "--json")
    assert status == 0 and f"{NAME}: " in told
    assert json.loads(out)["file_type"] == "Q8_0"
    assert at_home("plan", "-m", NAME, "--json")[2] == "", "and the second time it is here"


def test_an_embedding_model_is_fetched_by_its_short_name(
    at_home: Command, hub: Hub, tmp_path: Path
) -> None:
    """No page and no message named one."""
    bert = write_random_bert(tmp_path / "bert.gguf").read_bytes()
    hub.repositories["ggml-org/bge-small-en-v1.5-Q8_0-GGUF"] = {"bge-small-en-v1.5-q8_0.gguf": bert}
    with pytest.raises(ModelNotFoundError, match="is not on this machine"):
        edgespec.Embedder("bge-small")
    status, out, told = at_home("embed", "bge-small", "a cat")
    assert status == 0 and "from the hub" in told and len(out.split()) > 8
    assert at_home("models", "pull", "bge-small")[2].endswith("is here already\n")
    with edgespec.Embedder("bge-small") as embedder:
        row = embedder.embed(["a cat"]).rows[0]
    assert row.tolist() == pytest.approx([float(one) for one in out.split()], abs=1e-5)
    assert "the hub has bge-small, nomic-embed-text" in " ".join(at_home("embed")[2].split())


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (
            Shape("qwen35", predicting=1),
            {"recurrent state": "in 2 of 5 layers; drafts of up to", "head inside": "yes"},
        ),
        (Shape("lfm2"), {"recurrent state": "in 2 of 4 layers; drafts of up to"}),
    ],
)
def test_a_file_says_what_it_can_do_for_drafting(
    at_home: Command, tmp_path: Path, shape: Shape, rows: dict[str, str]
) -> None:
    path = write_hollow(tmp_path / "tiny-Q4_0.gguf", shape)
    (tmp_path / "mtp-tiny-Q8_0.gguf").write_bytes(b"GGUF")
    status, shown, _ = at_home("models", "show", str(path))
    assert status == 0
    rows = rows | {
        "head beside it": "mtp-tiny-Q8_0.gguf: ",
    }
    found = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
    for name, text in rows.items():
        assert text in found[name], name
    assert ("head inside" in found) == bool(shape.predicting)
    _, document, _ = at_home("models", "show", str(path), "--json")
    can = json.loads(document)
    assert can["most_snapshots"] > 7 and can["has_head"] == bool(shape.predicting)
    assert "settings" not in can
    assert list(can["heads_beside"]) == ["mtp-tiny-Q8_0.gguf"]


def test_a_head_beside_a_model_is_shown_with_what_it_is_good_for(
    at_home: Command, tmp_path: Path
) -> None:
    shape = Shape("llama", interval=1)
    path = write_hybrid(tmp_path / "tiny-Q8_0.gguf", shape)
    other = write_hybrid(tmp_path / "other.gguf", replace(shape, width=96))
    head = write_eagle(tmp_path / "eagle3-tiny-Q8_0.gguf", path, shape, Head())
    for model, said in ((path, "--draft-model uses it"), (other, "the model has 96")):
        _, shown, _ = at_home("models", "show", str(model))
        found = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
        assert f"{head.name}: " in found["head beside it"] and said in found["head beside it"]
    status, _, told = at_home("models", "show", str(head))
    assert status == 1 and "this file with --draft-model" in told


def test_a_state_that_cannot_be_taken_back_is_named(at_home: Command, tmp_path: Path) -> None:
    path = write_hollow(tmp_path / "model.gguf", Shape("qwen3next"))
    _, shown, _ = at_home("models", "show", str(path))
    assert "no drafts: llama.cpp cannot take it back" in shown


@pytest.mark.model
def test_models_show_json(command: Command) -> None:
    document = command("models", "show", "--json").document
    expected = {
        "path": str(embedded_model()),
        "arch": "llama",
        "file_type": "Q4_1",
        "file_bytes": embedded_model().stat().st_size,
        "num_layers": 30,
        "vocab_size": 49152,
        "context_length": 8192,
        "embedding_size": 576,
        "tied_embeddings": True,
    }
    assert {name: document[name] for name in expected} == expected
    assert document["fingerprint"] and document["chat_template"].startswith("{%")


@pytest.mark.model
def test_models_show(command: Command) -> None:
    done = command("models", "show")
    assert (done.status, done.err) == (0, "")
    assert first_column(done.out) == [
        "name", "architecture", "file", "context", "vocabulary", "KV cache", "chat template",
        "fingerprint",
    ]  # fmt: skip
    assert "llama, 30 layers, 9 heads, 3 for keys and values" in done.out
    assert "22.5 KiB per token in f16" in done.out


def test_the_list_says_how_fast_where_it_was_measured(
    at_home: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planning.make_run_plan
    monkeypatch.setenv("EDGESPEC_MODELS", str(home))
    write_model(home / "here.gguf", "llama", Q8_0)
    (home / "broken.gguf").write_bytes(b"<!doctype html>")

    def measured(*arguments: Any) -> Plan:
        source = "measured on 24 November 2026 with 50% of its threads, as other programs computed"
        return replace(made(*arguments), speed_source=source, tokens_per_s=42.4)

    for plan, speed in ((made, "-"), (measured, "42")):
        monkeypatch.setattr(planning, "make_run_plan", plan)
        lines = [line.split() for line in at_home("models", "list")[1].splitlines()]
        row = next(line for line in lines if line[0] == "~/here.gguf")
        assert row[1] == "Q8_0" and row[6] == speed
        broken = next(line for line in lines if line[0] == "~/broken.gguf")
        assert " ".join(broken[-8:]) == "- a web page, not a GGUF model"


def test_one_process_of_llama_cpp_answers_for_all_files(
    at_home: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was one for each: half a second of every file."""
    started = list[str]()

    def counted(module: str, *arguments: str, **options: Any) -> Any:
        started.append(module)
        return start_module(module, *arguments, **options)

    monkeypatch.setattr(processes, "start_module", counted)
    monkeypatch.setattr(simulation._simulator, "__dict__", vars(simulation._Simulator()))
    monkeypatch.setenv("EDGESPEC_MODELS", str(home))
    for arch in ("llama", "qwen2", "qwen3"):
        write_model(home / f"{arch}.gguf", arch, Q8_0)
    listed = at_home("models", "list")[1]
    assert all(f"~/{arch}.gguf" in listed for arch in ("llama", "qwen2", "qwen3"))
    assert len(started) == 1


def test_a_machine_without_models_says_how_to_get_one(
    at_home: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise MissingDependencyError("it is not installed")

    monkeypatch.setattr("edgespec.models.hub.resolve.embedded_model", missing)
    status, out, told = at_home("models", "list")
    assert (status, out) == (0, "")
    assert told == "no model is here; `edgespec models pull hf:OWNER/REPO` gets one\n"


def test_packed_weights_are_listed_and_removed(at_home: Command) -> None:
    assert at_home("models", "packed") == (0, "", "no packed weights are kept\n")
    for name in ("first", "second"):
        new = PackedFile(name).begin(f"{name}.gguf", 3 << 20)
        os.truncate(new.handle, 3 << 20)
        new.finish("order")
        new.join()
    status, out, told = at_home("models", "packed")
    assert (status, told) == (0, "")
    assert sorted(out.splitlines()) == ["    3 MiB  first.gguf", "    3 MiB  second.gguf"]
    assert at_home("models", "packed", "--remove") == (0, out, "removed 6 MiB\n")
    assert at_home("models", "packed")[1] == ""
