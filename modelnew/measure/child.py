"""A process of its own for everything that executes a solution.

Everything that executes a solution runs in a child, `python -m modelnew.measure.child TASK RESULT`:
the JSON payload comes on stdin, the child appends one JSON object a line to RESULT, events
first and the result last. So a crash, an illegal access or a hang is one row, and what was
checked before it is kept.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Progress = Callable[[str], None]
Report = Callable[[Json], None]

TASKS = {"verify": "modelnew.measure.verify", "bench": "modelnew.measure.bench"}
PACKAGE_PARENT = Path(__file__).resolve().parents[2]
MESSAGE_LIMIT = 2000
STDERR_TAIL = 1 << 16
POLL_SECONDS = 0.1


def run_child(task: str, payload: Json, timeout_s: float, progress: Progress | None = None) -> Json:
    """Runs `task` in a process of its own and returns its result.

    A child that does not answer gives {"status": "crashed"|"timeout"|"error", "message": ...,
    "events": [...]}; `events` holds what the child reported until then. On a timeout the whole
    process group is killed, compilers included.
    """
    with tempfile.TemporaryDirectory(prefix="modelnew-") as folder:
        result, log = Path(folder, "result.jsonl"), Path(folder, "stderr.txt")
        result.touch()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "modelnew.measure.child", task, str(result)],
                stdin=subprocess.PIPE, stdout=sink, stderr=sink,
                env=_child_environment(), start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin as pipe:  # its exit status tells why
                pipe.write(json.dumps(payload).encode())
            finished = _wait(process, result, timeout_s, progress)
        finally:
            _kill_group(process)
        return _answer(process, _events(result), finished, timeout_s, _meaningful(_tail(log)))


def _child_environment() -> dict[str, str]:
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def _wait(
    process: subprocess.Popen[bytes], result: Path, timeout_s: float, progress: Progress | None
) -> bool:
    """Waits for the child, passing on what it starts; False when the time is over."""
    deadline, seen = time.monotonic() + timeout_s, 0
    while True:
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                return False
        if progress is not None:
            events = _events(result)
            for event in events[seen:]:
                if "started" in event:
                    progress(event["started"])
            seen = len(events)
        if process.poll() is not None:
            return True


def _events(result: Path) -> list[Json]:
    lines = result.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    return [json.loads(line) for line in lines]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _answer(
    process: subprocess.Popen[bytes], lines: list[Json], finished: bool, timeout_s: float, log: str
) -> Json:
    if lines and "result" in lines[-1]:
        result: Json = lines[-1]["result"]
        return result
    started = [line["started"] for line in lines if "started" in line]
    where = f" during: {started[-1]}" if started else ""
    code = process.returncode
    if not finished:
        status, message = "timeout", f"no answer within {timeout_s:g} s{where}"
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
    """The child's side: payload on stdin, events and the result appended to the given file."""
    task, path = arguments
    payload = json.load(sys.stdin)
    with open(path, "a", encoding="utf-8", buffering=1) as sink:

        def report(event: Json) -> None:
            sink.write(json.dumps(plain(event)) + "\n")

        child = importlib.import_module(TASKS[task]).child
        report({"result": child(payload, report)})
    sys.stderr.flush()
    os._exit(0)  # after a device error the interpreter's own end can hang


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
