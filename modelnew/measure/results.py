"""The result file of a run: a JSON list with a row on each line, whole at every moment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelnew.files import replace_file, sha256
from modelnew.ir import ModelNewError
from modelnew.measure.child import Json
from modelnew.measure.jobs import Job

UNFINISHED = ("crashed", "error", "timeout")  # what `retry` measures again


class Results:
    """The rows of a run so far, in the order of its jobs; each is on disk once `add` returns."""

    def __init__(self, path: Path | None, jobs: Sequence[Job], kept: Iterable[Json] = ()) -> None:
        self.path = path
        self.order = {job.key: place for place, job in enumerate(jobs)}
        self.lines: list[tuple[int, str]] = []
        for row in kept:
            self._enter(row)

    def add(self, *rows: Json) -> None:
        """Enters rows and writes the file anew, to a temporary name first."""
        for row in rows:
            self._enter(row)
        if self.path is not None:
            text = ",\n".join(line for _, line in sorted(self.lines))
            replace_file(self.path, f"[\n{text}\n]\n")

    def _enter(self, row: Json) -> None:
        task = "verify" if row["task"] == "disagreement" else row["task"]
        place = self.order.get((task, row["reference"]), len(self.order))
        self.lines.append((place, json.dumps(row, allow_nan=False)))


def load(paths: Iterable[Path]) -> list[Json]:
    """The rows of result files, each with its "task"; ModelNewError for anything else."""
    rows: list[Json] = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelNewError(f"{path}: cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ModelNewError(f"{path}: is not JSON: {error}") from None
        if not isinstance(found, list):
            raise ModelNewError(f"{path}: is no result file: not a list of rows")
        for index, row in enumerate(found):
            if not _is_row(row):
                raise ModelNewError(
                    f'{path}: is no result file: entry {index} has no "reference" and "status"'
                )
        # A row of an error may hold nothing else: it is of the kind that its file is of.
        kinds = Counter(kind for kind in map(task_kind, found) if kind)
        usual = kinds.most_common(1)[0][0] if kinds else ""
        rows += [{**row, "task": task_kind(row) or usual} for row in found]
    return rows


def _is_row(row: object) -> bool:
    fields = [row.get(key) for key in ("reference", "status")] if isinstance(row, dict) else [None]
    return all(isinstance(field, str) for field in fields)


def task_kind(row: Mapping[str, Any]) -> str:
    """What a row is a result of: verify, bench, ..., or "" where the row does not tell."""
    if row.get("status") == "disagree":
        return "disagreement"
    if row.get("task"):
        return str(row["task"])
    return "bench" if "milliseconds" in row else "verify" if "checks" in row else ""


def kept(path: Path, jobs: Sequence[Job], *, retry: bool) -> list[Json]:
    """The rows of an earlier run that need no repetition: same solution, same options.

    With `retry` a row without an answer (crashed, error, timeout) is measured again.
    """
    if not path.exists():
        return []
    wanted = {job.key: job for job in jobs}
    rows = load([path])
    return [row for row in rows if _stands(row, wanted, rows, retry)]


def _stands(row: Json, wanted: dict[tuple[str, str], Job], rows: list[Json], retry: bool) -> bool:
    if row["task"] == "disagreement":  # stays with the row that it is about
        about = [r for r in rows if (r["task"], r["reference"]) == ("verify", row["reference"])]
        return any(_stands(r, wanted, rows, retry) for r in about)
    job = wanted.get((row["task"], row["reference"]))
    if job is None or row.get("options") != job.said:
        return False
    if retry and row["status"] in UNFINISHED:
        return False
    return job.solution.exists() and sha256(job.solution) == row["sha256"]
