"""The ledger of verified solutions, `solutions/verified.json`: one entry for each file's sha256.

An entry holds file, gpu, torch, cuda, max_error_ratio and checks (how many compared), and once
timed solution_ms, eager_ms and roofline_ratio. The text is the same for the same entries: sorted
keys, two spaces, a newline at the end; it is replaced at once, never half written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelnew.files import replace_file, sha256

NAME = "verified.json"
SPEED = ("solution_ms", "eager_ms", "roofline_ratio")

Entries = dict[str, dict[str, Any]]


def read(path: Path) -> Entries:
    """The entries of the ledger at `path`; none when the file does not exist."""
    if not path.exists():
        return {}
    entries: Entries = json.loads(path.read_text(encoding="utf-8"))
    return entries


def record_verification(path: Path, row: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Enters a row of "verify"; True when the solution now counts as verified.

    Only a complete row with status ok does; any other row takes the solution's entry away.
    Entries of hashes that no file of `folder` (default: the ledger's) has any more are dropped.
    """
    entries = read(path)
    before = entries.pop(row["sha256"], {})
    verified = row["status"] == "ok" and bool(row["complete"])
    if verified:
        entries[row["sha256"]] = {
            "file": Path(row["solution"]).name,
            "gpu": row["device"],
            "torch": row["torch"],
            "cuda": row["cuda"],
            "max_error_ratio": _rounded(row["max_error_ratio"]),
            "checks": sum(check["status"] == "ok" for check in row["checks"]),
            **{key: before[key] for key in SPEED if key in before},
        }
    _write(path, entries, folder or path.parent)
    return verified


def record_speed(path: Path, row: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Adds a row of "bench" to the solution's entry; False when it has none to add to."""
    entries = read(path)
    entry = entries.get(row["sha256"])
    if entry is None or row["status"] != "ok":
        return False
    entry.update({key: _rounded(row[key]) for key in SPEED})
    _write(path, entries, folder or path.parent)
    return True


def unverified(folder: Path, path: Path | None = None) -> list[Path]:
    """The solutions (*.py) of `folder` whose hash has no entry, sorted by name."""
    entries = read(path or folder / NAME)
    return [file for file in sorted(folder.glob("*.py")) if sha256(file) not in entries]


def _rounded(value: float | None) -> float | None:
    """Four significant digits: more is noise, and would move the file at every run."""
    return None if value is None else float(f"{value:.4g}")


def _write(path: Path, entries: Entries, folder: Path) -> None:
    present = {sha256(file) for file in folder.glob("*.py")}
    kept = {digest: entry for digest, entry in entries.items() if digest in present}
    text = json.dumps(kept, indent=2, sort_keys=True, allow_nan=False) + "\n"
    replace_file(path, text)
