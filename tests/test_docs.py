"""The examples of docs/api.md run as they stand, and the document names what is public."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgespec

DOCUMENT = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def test_every_public_name_is_in_the_document_or_is_an_error() -> None:
    for name in edgespec.__all__:
        if not name.endswith("Error"):
            assert f"`{name}" in DOCUMENT, name


@pytest.mark.model
@pytest.mark.usefixtures("exact_engine")  # which has measured what exact settings are
def test_the_examples_run(
    measured_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread: a second one waits in a busy loop, which is slow wherever something else runs."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(measured_cache))
    monkeypatch.setattr("edgespec.memory.device.host.usable_cores", lambda: 1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "examples"}
    try:
        for example in EXAMPLES:
            exec(compile(example, "docs/api.md", "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].close()
    assert len(EXAMPLES) >= 6


WRONG = """
import edgespec

edgespec.load(prefer="sped")
edgespec.plan(kv_type="q9")
edgespec.load(contextsize=5)
engine = edgespec.load()
engine.generate("x", json_schema=5)
engine.generate("x", max_token=5)
edgespec.Embedder("x.gguf", pooling="sum")
engine.generate([{"role": "userr", "content": "x"}])
edgespec.Session(engine, messages=[{"role": "userr", "content": "x"}])
if engine.generate("x").finish_reason == "stopped":
    raise SystemExit
"""


@pytest.mark.long
def test_type_checkers_take_the_examples_and_refuse_wrong_values(tmp_path: Path) -> None:
    """Preferences, types of the cache, reasons to finish; a list of drafters is any text."""
    programs = {"right": "\n".join(EXAMPLES), "wrong": WRONG}
    told = {}
    for name, text in programs.items():
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        line = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file)]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        told[name] = [one for one in done.stdout.splitlines() if ": error:" in one]
    assert told["right"] == []
    lines = {
        number
        for number, line in enumerate(WRONG.splitlines(), 1)
        if "(" in line and "load()" not in line
    }
    assert {int(one.split(":")[1]) for one in told["wrong"]} == lines


# ------------------------------------------------------------------------------- the whole tree

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def links(page: Path) -> list[Path]:
    """Files that a page links to; no page of this tree needs the network to be read."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return [(page.parent / link).resolve() for link in found if "://" not in link]


def test_results_of_several_users_are_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `benchmarks/serving.py --results` writes; nothing where it was not run."""
    made, serving = module("docs/generate.py"), module("benchmarks/serving.py")
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    assert made._serving("") == ""
    row = {"tokens_per_s": 182.6, "first_ms": 410.0, "first_p95_ms": 990.0, "gap_ms": 36.4}
    row |= {"gap_p95_ms": 61.0, "slowest_over_mean": 0.7, "below_half": 0}
    names = {"edgespec": 182.6, "edgespec plain": 91.3, "llama-server": 60.1}
    names["llama-server n-gram"] = 70.2
    rows = {
        (name, 8): [serving.Turn({**row, "tokens_per_s": speed}, [20.0, 30.0])]
        for name, speed in names.items()
    }
    asked = {"model": Path("some.gguf"), "threads": 2, "answers": 4, "tokens": 64, "ctx": 1024}
    asked["prompts"] = made.ROOT / "README.md"
    found = serving.document(argparse.Namespace(**asked, repeats=1), serving.summary(rows))
    (tmp_path / "serving-some-zen5.json").write_text(json.dumps(found))
    tables = made._serving("").split("\n\n")
    assert tables[1].splitlines()[::2] == [
        "| | 8 users |",
        "| some, EPYC (Zen 5) | 183 / 91 / 70 |",
    ]
    assert tables[3].splitlines()[2] == "| some, EPYC (Zen 5) | 0.41 / 0.41 |"
    written = found["made"]
    told = f"`serving-some-zen5.json` ({written['date']} at {written['edgespec']}"
    assert f"By `serving.py compare`, in `benchmarks/results`: {told}" in tables[4].replace(
        "\n", " "
    )
    assert len(written["prompts_sha256"]) == 64 and written["compiler"]
    assert "CPU" in written["llama_cpp_features"]

    of_old = {**found, "made": {"date": "2026-11-23"}}
    (tmp_path / "serving-some-zen5.json").write_text(json.dumps(of_old))
    told = made._serving("").replace("\n", " ")
    left_behind = (
        "; more than 60 commits before kernels or drafting last changed" * made.has_history()
    )
    assert told.endswith(f"json` (2026-11-23, commit and compiler not recorded{left_behind}) ")
    (tmp_path / "serving-some-zen5.json").write_text(json.dumps({**found, "made": {}}))
    with pytest.raises(ValueError, match=r"serving-some-zen5\.json does not say when"):
        made._serving("")
    del written["compiler"]
    (tmp_path / "serving-some-zen5.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"serving-some-zen5\.json does not say compiler"):
        made._serving("")

    faster = {**row, "tokens_per_s": 190.0, "below_half": 2}
    rows = {("edgespec", 8): rows["edgespec", 8] + [serving.Turn(faster, [10.0, 70.0])] * 2}
    rows["edgespec plain", 8] = [
        serving.Turn({**row, "tokens_per_s": speed}, [mean - 1.0, mean + 1.0])
        for speed, mean in ((91.3, 20.0), (95.0, 20.0), (190.0, 21.0))
    ]
    drafted, plain = serving.summary(rows)
    assert (drafted["tokens_per_s_low"], drafted["tokens_per_s_high"]) == (182.6, 190.0)
    assert drafted["over_plain_median"] == 2.0 and drafted["over_plain_low"] == 1.0
    assert plain["over_plain_median"] == plain["over_plain_high"] == 1.0
    assert drafted["slowest_over_mean_of_plain"] == 0.5
    assert drafted["below_half_of_plain"] == 1 and drafted["below_half"] == 4


def test_results_say_that_kernels_or_drafting_left_them_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many commits as may be it is not said yet; a commit that nobody knows is refused."""
    made = module("docs/generate.py")

    def commit(file: str) -> str:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(made._git("rev-list", "--count", "--all"))
        made._git("add", ".")
        made._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--no-verify")
        return str(made._git("rev-parse", "--short=8", "HEAD"))

    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    monkeypatch.setattr(made, "_MOST_BEHIND", 3)
    made._git("init", "-q")
    first, second, *_, last = map(
        commit, ["a", "b", "docs/c", "edge/drafting/d", "backends/kernels/e"]
    )
    commit("docs/f")
    recorded = dict.fromkeys(made._RECORDED, "x")
    document = {"made": {**recorded, "date": "2026-11-28"}}
    for known, is_behind in (first, True), (second, False), (f"{last}-dirty", False):
        document["made"]["edgespec"] = known
        (tmp_path / "r.json").write_text(json.dumps(document))
        told = " ".join(made._made("a.py", ["r.json"]).split())
        assert (
            "x; more than 3 commits before kernels or drafting last changed" in told
        ) == is_behind
    document["made"]["edgespec"] = "01234567"
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="at 01234567, which is no commit"):
        made._made("a.py", ["r.json"])


def test_generated_parts_are_what_the_program_says() -> None:
    """Without git's history all but which results kernels and drafting left behind."""
    made = module("docs/generate.py")
    behind = "; more than 60 commits before kernels or drafting last changed"
    for page in made.pages():
        text = page.read_text(encoding="utf-8")
        told = made.renewed(text)
        if not made.has_history():
            text, told = (" ".join(one.split()).replace(behind, "") for one in (text, told))
        assert told == text, f"run python docs/generate.py: {page.name}"


def test_every_link_leads_somewhere_and_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        reached.add(page)
        for target in links(page):
            assert target.exists(), f"{page.name} links to {target}"
            if target.suffix == ".md" and target not in reached:
                waiting.append(target)
    assert {page.resolve() for page in (ROOT / "docs").glob("*.md")} <= reached


def test_every_script_of_the_benchmarks_says_which_number_it_makes() -> None:
    told = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"`{script.name}" in told, script.name


def module(path: str) -> Any:
    if (folder := str((ROOT / path).parent)) not in sys.path:
        sys.path.append(folder)  # what its scripts share
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # where dataclasses look their module up
    spec.loader.exec_module(found)
    return found


def test_the_bars_are_those_of_the_results() -> None:
    for path, picture in module("benchmarks/pictures.py").pictures().items():
        assert path.read_text(encoding="utf-8") == picture, "run benchmarks/pictures.py bars"
