"""The ledger of verified solutions: what enters it, what leaves it, and its text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modelnew import files
from modelnew.measure import ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def verified(file: Path, **changes: Any) -> dict[str, Any]:
    return {
        "solution": str(file),
        "sha256": files.sha256(file),
        "status": "ok",
        "complete": True,
        "device": "Some GPU",
        "torch": "2.11.0",
        "cuda": "13.0",
        "max_error_ratio": 0.123456,
        "checks": [{"status": "ok"}, {"status": "skipped"}, {"status": "ok"}],
        **changes,
    }


def timed(file: Path, **changes: Any) -> dict[str, Any]:
    return {
        "sha256": files.sha256(file),
        "status": "ok",
        "solution_ms": 1.23456,
        "eager_ms": 2.0,
        "roofline_ratio": 0.98765,
        **changes,
    }


def test_an_ok_row_is_entered_and_the_text_is_stable(folder: Path) -> None:
    path = folder / ledger.NAME
    assert ledger.unverified(folder) == [folder / "a.py", folder / "b.py"]
    assert ledger.record_verification(path, verified(folder / "b.py"))
    assert ledger.unverified(folder) == [folder / "a.py"]
    assert ledger.record_verification(path, verified(folder / "a.py"))
    text = path.read_text()
    assert text.endswith("}\n")
    entries = json.loads(text)
    assert list(entries) == sorted(entries)
    assert entries[files.sha256(folder / "b.py")] == {
        "file": "b.py",
        "gpu": "Some GPU",
        "torch": "2.11.0",
        "cuda": "13.0",
        "max_error_ratio": 0.1235,
        "checks": 2,
    }
    ledger.record_verification(path, verified(folder / "b.py"))
    assert path.read_text() == text
    assert {p.name for p in folder.iterdir()} == {"a.py", "b.py", ledger.NAME}


@pytest.mark.parametrize("changes", [{"status": "wrong"}, {"complete": False}])
def test_a_row_that_is_not_ok_takes_the_entry_away(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / ledger.NAME
    ledger.record_verification(path, verified(folder / "a.py"))
    assert not ledger.record_verification(path, verified(folder / "a.py", **changes))
    assert ledger.read(path) == {}


def test_an_edited_solution_is_unverified_and_its_old_entry_goes(folder: Path) -> None:
    path = folder / ledger.NAME
    ledger.record_verification(path, verified(folder / "a.py"))
    (folder / "a.py").write_text("# edited\n")
    assert folder / "a.py" in ledger.unverified(folder)
    ledger.record_verification(path, verified(folder / "b.py"))
    assert [entry["file"] for entry in ledger.read(path).values()] == ["b.py"]


def test_speed_joins_a_verified_entry_and_stays_there(folder: Path) -> None:
    path = folder / ledger.NAME
    assert not ledger.record_speed(path, timed(folder / "a.py"))
    assert not path.exists()
    ledger.record_verification(path, verified(folder / "a.py"))
    assert not ledger.record_speed(path, timed(folder / "a.py", status="crashed"))
    assert ledger.record_speed(path, timed(folder / "a.py"))
    ledger.record_verification(path, verified(folder / "a.py", max_error_ratio=0.5))
    entry = ledger.read(path)[files.sha256(folder / "a.py")]
    assert (entry["solution_ms"], entry["eager_ms"]) == (1.235, 2.0)
    assert entry["roofline_ratio"] == 0.9877
    assert entry["max_error_ratio"] == 0.5


def test_a_failed_write_leaves_the_ledger_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / ledger.NAME
    ledger.record_verification(path, verified(folder / "a.py"))
    before = path.read_text()

    def refuse(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        ledger.record_verification(path, verified(folder / "b.py"))
    assert path.read_text() == before
    assert {p.name for p in folder.iterdir()} == {"a.py", "b.py", ledger.NAME}


def test_the_ledger_may_lie_elsewhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("other") / "ledger.json"
    ledger.record_verification(path, verified(folder / "a.py"), folder)
    assert ledger.unverified(folder, path) == [folder / "b.py"]
