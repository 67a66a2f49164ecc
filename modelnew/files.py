"""Files: found in folders, written so that they are never half written, named by contents."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from modelnew.ir import ModelNewError

# What --algebra rewrote is a line each in a solution's header: how it begins, and how it ends
# where infinities, which are no real numbers, may give another result.
ALGEBRA, REAL = "Algebra:", "in real arithmetic"


def replace_file(path: Path, content: str | bytes) -> Path:
    """Writes `content` to a temporary name beside `path`, then renames it; returns `path`.

    Makes the folder. An interrupted write leaves the old file whole and nothing beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def sha256(path: Path) -> str:
    """The hex digest of the file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def algebra_lines(path: Path) -> list[str]:
    """The lines of a solution's header that say what of it was rewritten by algebra."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    header = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return [line for line in header if line.startswith(f"# {ALGEBRA}")]


def reference_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, folders opened: *.py in name order, private names left out.

    Raises ModelNewError for a folder without any.
    """
    files: list[Path] = []
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.glob("*.py") if not p.name.startswith("_"))
        if not found:
            raise ModelNewError(f"{path}: no reference model (*.py) in this folder")
        files += found
    return files
