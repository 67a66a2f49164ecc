"""A process of its own for everything that executes a solution.

A child is `python -m modelnew.measure.child TASK FOLDER`, or the same forked: it reads its payload
from the folder and appends one JSON object a line to a file there, events first and the result
last. So a crash, an illegal access or a hang is one row, and what was checked before it is kept.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

Json = dict[str, Any]
Report = Callable[[Json], None]

# PyTorch asks NVML for the number of GPUs, not the driver; Inductor compiles in the child itself,
# since a pool of compilers in each of several children at a time only costs its imports; what a
# killed child left is cleaned up without a word.
FORK_ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONWARNINGS": "ignore:resource_tracker",
}  # fmt: skip
TASKS = ("build", "devices", "verify", "bench", "sanitize", "kernelbench")
PACKAGE_PARENT = Path(__file__).resolve().parents[2]
MESSAGE_LIMIT = 2000
STDERR_TAIL = 1 << 16
POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_SECONDS = 3.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Limits:
    """What bounds a child: seconds (waiting for a GPU not counted) and a stop from outside."""

    timeout_s: float
    stop: threading.Event = field(default_factory=threading.Event)


def run_child(
    task: str,
    payload: Json,
    limits: Limits,
    *,
    environment: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Json:
    """Runs `task` in a process of its own and returns its result.

    `environment` is added to this process's own; `wrapper` is a command that starts the child,
    such as compute-sanitizer with its options. A child that does not answer gives {"status":
    "crashed"|"timeout"|"stopped"|"error", "message": ..., "events": [...]}; `events` holds what
    the child reported until then. A child whose time is over is ended with its whole process
    group, compilers included: asked first, so that a build gives its lock file back.
    """
    with tempfile.TemporaryDirectory(prefix="modelnew-") as folder:
        files = _Exchange(Path(folder))
        files.payload.write_text(json.dumps(payload), encoding="utf-8")
        files.result.touch()
        values = {**os.environ, **(environment or {}), **_package_path()}
        start = partial(_start_wrapped, wrapper) if wrapper else _start_forked
        process = start(task, files, values)
        events = _Events(files.result)
        try:
            ending = _wait(process, events, limits)
        finally:
            _end_group(process)
        events.read()
        return _answer(process, events.seen, ending, _meaningful(_tail(files.log)))


@dataclass(frozen=True)
class _Exchange:
    """The files that a child and its parent exchange."""

    folder: Path

    @property
    def payload(self) -> Path:
        return self.folder / "payload.json"

    @property
    def result(self) -> Path:
        return self.folder / "result.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "stderr.txt"


class _Process(Protocol):
    """A started child: `wait` returns its exit status, minus a signal's number, or None."""

    @property
    def pid(self) -> int: ...

    def wait(self, seconds: float | None) -> int | None: ...


def _package_path() -> dict[str, str]:
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def _start_wrapped(
    wrapper: Sequence[str], task: str, files: _Exchange, values: Mapping[str, str]
) -> _Process:
    command = [*wrapper, sys.executable, "-m", "modelnew.measure.child", task, str(files.folder)]
    return _Started(subprocess.Popen(command, env=values, start_new_session=True))


def _start_forked(task: str, files: _Exchange, values: Mapping[str, str]) -> _Process:
    """A fork of a process that has imported PyTorch and its compiler, and nothing else done.

    The imports take 10 s of processor time, more than most tasks: in a run of hundreds they
    would be half of it.
    """
    process = _fork_server().Process(target=_forked, args=(task, files.folder, dict(values)))
    process.start()
    return _Forked(process)


@cache
def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["modelnew.measure.preload"])
    before = dict(os.environ)
    os.environ.update({**FORK_ENVIRONMENT, **before, **_package_path()})
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _forked(task: str, folder: Path, values: Mapping[str, str]) -> None:
    os.setsid()
    # The fork server ends when nobody holds this any more; we end with it, so we must not.
    server: Any = forkserver
    os.close(server._forkserver._forkserver_alive_fd)
    os.environ.clear()
    os.environ.update(values)
    main([task, str(folder)])


@dataclass
class _Started:
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float | None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode


@dataclass
class _Forked:
    process: Any

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def wait(self, seconds: float | None) -> int | None:
        self.process.join(seconds)
        code: int | None = self.process.exitcode
        return code


@dataclass
class _Events:
    """What the child has reported, read from where the last reading ended."""

    path: Path
    seen: list[Json] = field(default_factory=list)
    offset: int = 0

    def read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be half written
        self.offset += len(whole + newline)
        self.seen += [json.loads(line) for line in whole.splitlines()]

    @property
    def waiting(self) -> bool:
        """Whether the child waits for its turn on a GPU."""
        return next((e["waiting"] for e in reversed(self.seen) if "waiting" in e), False)


def _wait(process: _Process, events: _Events, limits: Limits) -> str:
    """Waits for the child; returns why not to its end: "", or what to answer."""
    used, before = 0.0, time.monotonic()
    while process.wait(POLL_SECONDS) is None:
        if limits.stop.is_set():
            return "stopped from outside"
        events.read()
        now = time.monotonic()
        used += 0 if events.waiting else now - before
        before = now
        if used > limits.timeout_s:
            return f"no answer within {limits.timeout_s:g} s"
    return ""


def _end_group(process: _Process) -> None:
    if process.wait(0) is None:
        _signal_group(process, signal.SIGTERM)
        process.wait(GRACE_SECONDS)
    _signal_group(process, signal.SIGKILL)  # also what a finished child left running
    process.wait(None)


def _signal_group(process: _Process, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # all of it has ended, or the child has yet to make its group
        if process.wait(0) is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _answer(process: _Process, lines: list[Json], ending: str, log: str) -> Json:
    if lines and "result" in lines[-1]:
        result: Json = lines[-1]["result"]
        return result
    started = [line["started"] for line in lines if "started" in line]
    where = f" during: {started[-1]}" if started else ""
    code = process.wait(None) or 0
    if ending:
        status = "stopped" if ending.startswith("stopped") else "timeout"
        message = f"{ending}{where}"
    elif code < 0:
        status, message = "crashed", f"{_signal_name(-code)}{where}\n{log}".strip()
    else:
        status, message = "error", f"exit status {code}, no result{where}\n{log}".strip()
    return {"status": status, "message": message, "events": lines}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path) -> str:
    data = path.read_bytes()
    return data[-STDERR_TAIL:].decode(errors="replace")


def _meaningful(text: str) -> str:
    """The last lines that say something: no blanks, no warnings, no loader notices."""
    lines = [line.rstrip() for line in text.splitlines()]
    noise = ("Warning", "warnings.warn", "[W", "If this is not desired")
    kept = [line for line in lines if line.strip() and not any(n in line for n in noise)]
    return "\n".join(kept[-12:])[-MESSAGE_LIMIT:]


def describe(error: BaseException) -> str:
    """One message for an exception; of a long compiler log the lines with errors and the end."""
    text = f"{type(error).__name__}: {error}".strip()
    if len(text) <= MESSAGE_LIMIT:
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[1:-4] if "error" in line.lower()][:10]
    return "\n".join([lines[0][:400], *(e[:400] for e in errors), *(x[:400] for x in lines[-4:])])


def main(arguments: list[str]) -> None:
    """The child's side: the payload is read from the folder, events and the result go there."""
    task, files = arguments[0], _Exchange(Path(arguments[1]))
    assert task in TASKS
    # A build is asked to end, so that it gives its lock back; what runs on a GPU may not listen.
    die_with_parent(signal.SIGTERM if task == "build" else signal.SIGKILL)
    signal.signal(signal.SIGTERM, _end)
    with files.log.open("wb") as log, open(os.devnull, "rb") as nothing:
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source.fileno(), target)
    try:
        _run(task, files)
    except _Ended:
        os.killpg(0, signal.SIGKILL)  # this process too, and the compilers it has started
    sys.stderr.flush()
    os._exit(0)  # after a device error the interpreter's own end can hang


class _Ended(SystemExit):
    """The parent ends this process, or is gone."""


def _end(*_: object) -> None:
    raise _Ended


def _run(task: str, files: _Exchange) -> None:
    payload = json.loads(files.payload.read_text(encoding="utf-8"))
    with files.result.open("a", encoding="utf-8", buffering=1) as sink:

        def report(event: Json) -> None:
            sink.write(json.dumps(plain(event)) + "\n")

        child = importlib.import_module(f"modelnew.measure.{task}").child
        report({"result": child(payload, report)})


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """A runner that is killed takes its children along, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def plain(value: Any) -> Any:
    """`value` with numbers that strict JSON lacks replaced: infinities by +-1e300, NaN by None."""
    match value:
        case dict():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple():
            return [plain(v) for v in value]
        case float() if math.isnan(value):
            return None
        case float():
            return max(-1e300, min(1e300, value))
        case _:
            return value


if __name__ == "__main__":
    main(sys.argv[1:])
