"""Which models `edgespec serve` has where there are several, and what it says of wrong options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

import pytest
from bert_gguf import write_random_bert
from command_line import Command
from random_gguf import F32, write_model
from serving_cases import TEMPLATE

from edgespec.cli.options import DEFAULTS, PoolOptions
from edgespec.cli.serve_pool import make_pool
from edgespec.errors import DoesNotFitError, ModelNotFoundError, UnsupportedError
from edgespec.memory.plan.plan import Request
from edgespec.serve.parsing import Defaults
from edgespec.serve.pool import ANY, Pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc"):
        write_model(tmp_path / f"{name}.gguf", "llama", F32, seed)
    return tmp_path


@pytest.fixture
def made(folder: Path) -> Iterator[Any]:
    """Makes pools of files in the folder, which are closed with the test."""
    with ExitStack() as opened:

        def make(*named: str, request: Request | None = None, **choice: Any) -> Pool:
            pool = make_pool(
                [str(folder / f"{name}.gguf") for name in named],
                PoolOptions(**choice),
                request or Request(users=2),
                DEFAULTS,
                lambda _spec: Defaults(),
                False,
            )
            opened.callback(pool.close)
            return pool

        yield make


def test_files_are_known_by_their_names_and_by_what_was_typed(made: Any, folder: Path) -> None:
    pool = made("a", "b")
    assert [one.name for one in pool.members] == ["a", "b"]
    assert pool.find(str(folder / "b.gguf")) is pool.members[1]
    assert all(one.nbytes > 0 and one.keep_alive_s == inf for one in pool.members)


def test_a_folder_is_listed_and_its_files_planned_when_somebody_asks(
    made: Any, folder: Path
) -> None:
    (folder / "mmproj-a.gguf").write_bytes(b"GGUF")
    pool = made(folder=folder)
    assert [one.name for one in pool.members] == ["a", "b", "c"]


def test_the_default_of_a_folder_holds_conversations_and_broken_files_are_told(
    made: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind what was named, whatever that is."""
    write_model(folder / "talks.gguf", "llama", F32, template=TEMPLATE)
    whole = (folder / "a.gguf").read_bytes()
    (folder / "a-cut.gguf").write_bytes(whole[: len(whole) // 2])
    pool = made(folder=folder)
    assert [one.name for one in pool.members] == ["talks", "a", "b", "c", "a-cut"]
    assert pool.find(None).name == pool.find(None, ANY).name == "talks"
    assert "is cut off" in pool.find("a-cut").card["problem"]
    assert "a-cut cannot be loaded: " in capsys.readouterr().err
    assert made("b", folder=folder).find(None).name == "b"


def test_models_that_make_embeddings_are_told_apart_and_planned_for_shorter_texts(
    made: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options about writing are not theirs."""
    write_random_bert(folder / "embed.gguf")
    pool = made("a", "embed", request=Request(context_size=256, kv_type="q8_0"))
    assert [one.model.kind for one in pool.members] == ["chat", "embed"]
    assert pool.find(None, "embed").model.about["context_length"] == 64
    told = capsys.readouterr().err
    assert "embed F32: embeddings of up to 64 tokens" in told and "at once: a + embed" in told
    lazily = made(folder=folder)
    assert lazily.find(None, "embed").name == "embed"


def test_any_is_what_models_list_knows(
    made: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_MODELS", str(folder))
    pool = made(any_here=True)
    assert {"a", "b", "c"} <= {one.name for one in pool.members}


def test_files_of_one_name_have_names_of_their_own(made: Any, folder: Path) -> None:
    (folder / "more").mkdir()
    write_model(folder / "more" / "a.gguf", "llama", F32)
    pool = made("a", "more/a", "a")
    assert [one.name for one in pool.members] == ["a", str(folder / "more" / "a.gguf")]


def test_options_are_about_all_or_about_one(made: Any) -> None:
    pool = made(*"abc", keep_alive=["b=always", "5m", "c=0"], pin=["a"], alias=["c=gpt-4o"])
    a, b, c = pool.members
    assert (a.keep_alive_s, a.is_pinned) == (300.0, True)
    assert (b.keep_alive_s, b.is_pinned) == (inf, True)
    assert (c.keep_alive_s, c.is_pinned) == (0.0, False)
    assert pool.find("gpt-4o") is pool.find("c") is c and c.name == "gpt-4o"


def test_one_model_needs_no_name(made: Any) -> None:
    pool = made("a", keep_alive=["5m"], alias=["mine"])
    assert pool.members[0].name == "mine" and pool.members[0].keep_alive_s == 300.0


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"pin": ["d"]}, "--pin d names no model that is served"),
        ({"keep_alive": ["d=5m"]}, "--keep-alive d=5m names no model"),
        ({"keep_alive": ["soon"]}, '--keep-alive "soon" is no time'),
        ({"alias": ["other"]}, "--alias other names no model"),
        ({"folder": Path("nowhere")}, "nowhere is no folder"),
        ({"request": Request(switch="a.gguf")}, "--switch is for one model"),
    ],
)
def test_what_fits_no_model_is_told(made: Any, choice: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        made("a", "b", **choice)
    assert told in str(raised.value) and raised.value.hint


def test_pinned_models_have_to_fit_together(made: Any) -> None:
    alone = made("a").planned_bytes + made("a").members[0].nbytes
    with pytest.raises(DoesNotFitError):
        made("a", "b", pin=["a", "b"], request=Request(users=2, budget_bytes=alone + (1 << 20)))


def test_a_missing_file_is_told_before_there_is_a_server(made: Any, say: Command) -> None:
    with pytest.raises(ModelNotFoundError):
        made("a", "missing")
    status, _, err = say("serve", "a.gguf", "missing.gguf", "--port", "0")
    assert status == 1 and "there is no file a.gguf" in err
