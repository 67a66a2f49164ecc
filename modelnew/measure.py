"""Runs a reference and a solution for real: child process, loading, helpers on nested tensors.

Everything that executes a solution runs in a child, `python -m modelnew.measure TASK RESULT`:
the JSON payload comes on stdin, the child appends one JSON object a line to RESULT, events
first and the result last. So a crash, an illegal access or a hang is one row, and what was
checked before it is kept.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelnew.ir import ModelNewError
from modelnew.reference import parse

Json = dict[str, Any]
Progress = Callable[[str], None]
Report = Callable[[Json], None]

TASKS = {"verify": "modelnew.verify", "bench": "modelnew.bench"}
PACKAGE_PARENT = Path(__file__).resolve().parent.parent
MESSAGE_LIMIT = 2000
STDERR_TAIL = 1 << 16
POLL_SECONDS = 0.1


# --- the child process ---------------------------------------------------------------------------


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
                [sys.executable, "-m", "modelnew.measure", task, str(result)],
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


# --- loading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """A reference and its solution, executed: constructors and input functions."""

    reference: Callable[..., nn.Module]
    solution: Callable[..., nn.Module]
    get_inputs: Callable[[], Any]
    get_init_inputs: Callable[[], Any]
    build_seconds: float


def sha256(path: Path) -> str:
    """The hex digest of the file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_files(reference: Path, solution: Path, overrides: Mapping[str, str]) -> Files:
    """Executes both files; the solution's import compiles it (`build_seconds`).

    Raises ModelNewError naming the file when one cannot be executed or lacks what it must define.
    """
    _, tree = parse(reference, overrides)
    model = _execute(tree, reference, "modelnew_measured_reference")
    begin = time.perf_counter()
    new = _execute(parse(solution, {})[1], solution, "modelnew_measured_solution")
    seconds = time.perf_counter() - begin
    wanted = ((reference, model, ("Model", "get_inputs")), (solution, new, ("ModelNew",)))
    for path, module, names in wanted:
        missing = [name for name in names if not callable(getattr(module, name, None))]
        if missing:
            raise ModelNewError(f"{path}: defines no {', '.join(missing)}")
    init_inputs = getattr(model, "get_init_inputs", list)
    return Files(model.Model, new.ModelNew, model.get_inputs, init_inputs, seconds)


def _execute(tree: ast.Module, path: Path, name: str) -> types.ModuleType:
    """Executes as harnesses do, by exec and without `__file__`.

    The module is listed in sys.modules, where copy, pickle and torch.compile look it up.
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ModelNewError(f"{path}: import: {describe(error)}") from error
    return module


def construct(
    make: Callable[..., nn.Module], device: torch.device, args: Any, kwargs: Mapping[str, Any]
) -> nn.Module:
    """Builds a model under the fixed seed, its parameters created on `device`."""
    torch.manual_seed(0)
    with device:
        model = make(*args, **kwargs)
    return model.to(device)


def own_inputs(files: Files, seed: int, device: torch.device) -> list[Any]:
    """`get_inputs()` under `seed`, drawn on `device` where the file's code allows it."""
    torch.manual_seed(seed)
    try:
        with device:
            inputs = files.get_inputs()
    except RuntimeError:  # a generator or a buffer of the file's own that lives on the CPU
        inputs = files.get_inputs()
    return [map_tensors(lambda t: t.to(device), x) for x in inputs]


# --- nested tensors ------------------------------------------------------------------------------


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` (tensors in lists, tuples and dicts) with `change` applied to each tensor."""
    match tree:
        case torch.Tensor():
            return change(tree)
        case dict():
            return {key: map_tensors(change, value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(map_tensors(change, value) for value in tree))
        case list() | tuple():
            return type(tree)(map_tensors(change, value) for value in tree)
        case _:
            return tree


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested value with its place, as ("output[0]['mean']", leaf)."""
    match tree:
        case dict():
            for key, value in tree.items():
                yield from leaves(value, f"{name}[{key!r}]" if name else str(key))
        case list() | tuple():
            for index, value in enumerate(tree):
                yield from leaves(value, f"{name}[{index}]")
        case _:
            yield name, tree


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and storage offset, gaps and overlaps included."""
    storage: Any = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage.clone(), tensor.storage_offset(), tensor.size(), tensor.stride())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality of two tensors, NaN payloads and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0 or a.dtype == torch.bool:
        return torch.equal(a, b)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size(), torch.uint8)
    bits = [x.contiguous().flatten().view(word) for x in (a, b)]
    return torch.equal(bits[0], bits[1])


def resolve(name: str) -> torch.device:
    """The device of that name with its index, so that it equals the tensors' own."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that its errors are raised where they were caused."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts(device: torch.device) -> Json:
    """What a row says about the machine: device name, torch and CUDA versions."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if on_gpu else None,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
