"""Times a solution against its reference, eager and compiled, and against copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelnew.measure.child import Json, Progress, Report, describe, run_child
from modelnew.measure.load import (
    Files,
    construct,
    facts,
    load_files,
    own_inputs,
    resolve,
    sha256,
    synchronize,
)

SECONDS_EACH = 1.5  # of timed calls a candidate
REPETITIONS = (10, 100)  # at least, at most
WARM_UP = 3
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # written before each timed call: empties L2
BIG_COPY_BYTES = {"cuda": 4 * 10**9, "cpu": 16 << 20}  # one buffer; read and write count twice
COPIES = ("copy", "big copy")
HEADLINE = ("solution", "eager", "compile")  # also in the row as <name>_ms

Call = Callable[[], Any]

_cuda: Any = torch.cuda  # parts of it are untyped, other parts from one release to the next


def bench(
    reference: Path,
    solution: Path,
    *,
    bytes_moved: int | None,
    device: str = "cuda",
    timeout_s: float = 600,
    overrides: Mapping[str, str] | None = None,
    compiled: bool = True,
    max_autotune: bool = False,
    cudnn_benchmark: bool = False,
    progress: Progress | None = None,
) -> Json:
    """Times solution, eager and torch.compile in one interleaved run and returns a row.

    `bytes_moved` is the least traffic of the task (each input read once, each output written
    once); roofline_ms is that over the bandwidth of a 4 GB device copy timed in the same run,
    roofline_ratio is roofline_ms over the solution's time (1 is the roofline). `milliseconds`
    holds medians (solution_ms, eager_ms and compile_ms once more), `spread` the distance from
    the 20th to the 80th percentile over the median, `speedup` each other candidate's time over
    the solution's, `peak_bytes` what a call allocates at most. A candidate that fails is left
    out, with its error in `messages`.
    """
    row: Json = {"reference": str(reference), "solution": str(solution), "sha256": ""}
    begin = time.perf_counter()
    options: Json = {
        "bytes_moved": bytes_moved, "device": device, "overrides": dict(overrides or {}),
        "compiled": compiled, "max_autotune": max_autotune, "cudnn_benchmark": cudnn_benchmark,
    }  # fmt: skip
    try:
        row["sha256"] = sha256(solution)
        answer = run_child("bench", {**row, **options}, timeout_s, progress)
    except OSError as error:
        answer = {"status": "error", "message": describe(error)}
    answer.pop("events", None)
    blank = _blank(bytes_moved)
    return {**row, **blank, **answer, "seconds": round(time.perf_counter() - begin, 3)}


def _blank(bytes_moved: int | None) -> Json:
    """What a row without an answer says."""
    return {
        "message": "", "device": "", "torch": "", "cuda": None, "build_seconds": None,
        "bytes_moved": bytes_moved, "milliseconds": {}, "spread": {}, "repetitions": {},
        "speedup": {}, "peak_bytes": {}, "messages": {}, "copy_gbps": None,
        "big_copy_gbps": None, "roofline_ms": None, "roofline_ratio": None,
        **{f"{name}_ms": None for name in HEADLINE},
    }  # fmt: skip


# --- in the child --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Timer:
    """Times one call on the device, its L2 cache emptied before."""

    device: torch.device
    flush: Tensor

    def __call__(self, call: Call) -> float:
        """Milliseconds of the call on the device.

        Nothing is awaited between flush and call: the host launches while the flush still runs,
        as in KernelBench, so that only launches slower than 60 us count.
        """
        if self.device.type != "cuda":
            self.flush.zero_()
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        self.flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def child(payload: Json, report: Report) -> Json:
    """Builds the candidates, warms them up and times them; called in the child process."""
    try:
        device = resolve(payload["device"])
        about = facts(device)
        files = load_files(
            Path(payload["reference"]), Path(payload["solution"]), payload["overrides"]
        )
        about["build_seconds"] = round(files.build_seconds, 3)
        inputs = own_inputs(files, 0, device)
        with torch.no_grad():
            return {**about, **_timed(files, inputs, payload, device, report)}
    except Exception as error:
        return {"status": "error", "message": describe(error)}


def _timed(files: Files, inputs: Any, payload: Json, device: torch.device, report: Report) -> Json:
    args = files.get_init_inputs()
    reference = construct(files.reference, device, args, {})
    solution = construct(files.solution, device, args, {})
    solution.load_state_dict(reference.state_dict())
    timer = _Timer(device, torch.empty(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device))
    candidates = _candidates(reference, solution, inputs, payload)
    messages: dict[str, str] = {}
    peaks = {}
    for name in ("solution", "eager"):
        report({"started": f"peak memory of {name}"})
        candidates[name]()  # libraries set up their workspaces in the first call
        peaks[name] = _peak_bytes(candidates[name], device)
    copies, copied = _copies(payload["bytes_moved"], device)
    candidates.update(copies)
    repetitions = {}
    for name, call in list(candidates.items()):
        report({"started": f"warm-up of {name}"})
        try:
            repetitions[name] = _repetitions(call, timer)
        except Exception as error:
            synchronize(device)  # raises when the device itself is lost
            if name in ("solution", "eager"):
                raise
            messages[name] = describe(error)
            del candidates[name]
    report({"started": "timing"})
    times = _interleaved(candidates, repetitions, timer)
    row = _summary(times, copied, payload["bytes_moved"])
    return {**row, "repetitions": repetitions, "peak_bytes": peaks, "messages": messages}


def _candidates(
    reference: nn.Module, solution: nn.Module, inputs: Any, options: Json
) -> dict[str, Call]:
    calls: dict[str, Call] = {
        "solution": partial(solution, *inputs),
        "eager": partial(reference, *inputs),
    }
    if options["cudnn_benchmark"]:
        calls["eager, cudnn.benchmark"] = partial(_with_cudnn_benchmark, calls["eager"])
    if options["compiled"]:
        calls["compile"] = _compiled(reference, inputs, "default")
    if options["max_autotune"]:
        calls["compile, max-autotune"] = _compiled(reference, inputs, "max-autotune")
    return calls


def _compiled(model: nn.Module, inputs: Any, mode: str) -> Call:
    """torch.compile of the model, started by the first call, where its failure is recorded."""
    compiled: list[Callable[..., Any]] = []

    def call() -> Any:
        if not compiled:
            compiled.append(torch.compile(model, mode=mode))
        return compiled[0](*inputs)

    return call


def _with_cudnn_benchmark(call: Call) -> Any:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        return call()
    finally:
        torch.backends.cudnn.benchmark = before


def _copies(
    bytes_moved: int | None, device: torch.device
) -> tuple[dict[str, Call], dict[str, int]]:
    """Device copies whose reads and writes together are the task's traffic, and a big one."""
    limit = BIG_COPY_BYTES["cuda"]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        limit = torch.cuda.mem_get_info(device)[0] // 8  # four such buffers, half stays free
    sizes = {"big copy": min(BIG_COPY_BYTES[device.type], limit)}
    if bytes_moved:
        sizes["copy"] = max(16, min(bytes_moved // 2, limit) // 16 * 16)
    calls: dict[str, Call] = {}
    for name, size in sizes.items():
        source = torch.ones(size, dtype=torch.uint8, device=device)
        calls[name] = partial(torch.empty_like(source).copy_, source)
    return calls, {name: 2 * size for name, size in sizes.items()}


def _peak_bytes(call: Call, device: torch.device) -> int | None:
    """What the call allocates at most beyond what is there before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _repetitions(call: Call, timer: _Timer) -> int:
    """Warms the call up and says how often it fits into SECONDS_EACH, within bounds."""
    for _ in range(WARM_UP):
        call()
    once = statistics.median(timer(call) for _ in range(3))
    low, high = REPETITIONS
    return max(low, min(high, int(SECONDS_EACH * 1e3 / max(once, 1e-6))))


def _interleaved(
    candidates: Mapping[str, Call], repetitions: Mapping[str, int], timer: _Timer
) -> dict[str, list[float]]:
    """Round robin, so that clocks and temperature drift over all candidates alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(max(repetitions.values())):
        for name, call in candidates.items():
            if turn < repetitions[name]:
                times[name].append(timer(call))
    return times


def _summary(
    times: Mapping[str, list[float]], copied: Mapping[str, int], bytes_moved: int | None
) -> Json:
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = {}
    for name, values in times.items():
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        spread[name] = (fifths[3] - fifths[0]) / medians[name]
    gbps = {name: copied[name] / (medians[name] * 1e6) for name in COPIES if name in copied}
    roofline = bytes_moved / (gbps["big copy"] * 1e6) if bytes_moved else None
    mine = medians["solution"]
    others = [name for name in medians if name not in (*COPIES, "solution")]
    return {
        "status": "ok",
        "milliseconds": {n: t for n, t in medians.items() if n not in COPIES},
        **{f"{name}_ms": medians.get(name) for name in HEADLINE},
        "spread": spread,
        "speedup": {name: medians[name] / mine for name in others},
        "copy_gbps": gbps.get("copy"),
        "big_copy_gbps": gbps["big copy"],
        "roofline_ms": roofline,
        "roofline_ratio": None if roofline is None else roofline / mine,
    }
