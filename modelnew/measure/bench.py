"""Times a solution beside its reference, eager and compiled, and beside the GPU's ceilings."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from modelnew.measure.child import Json, Report, describe
from modelnew.measure.clocks import Clocks
from modelnew.measure.load import (
    Files,
    construct,
    facts,
    failure,
    lacks_memory,
    load_files,
    own_inputs,
    resolve,
    synchronize,
)
from modelnew.measure.rival import Rival
from modelnew.measure.turn import hold

REPETITIONS = (10, 100)  # at least, at most
WARM_UP = 3
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # written before each timed call: empties L2
BIG_COPY_BYTES = {"cuda": 4 * 10**9, "cpu": 16 << 20}  # one buffer; read and write count twice
PRODUCT_SIZE = {"cuda": 8192, "cpu": 256}  # of the square products that give the matrix ceilings
CEILING_SECONDS = 0.1  # of timed calls a ceiling: at full clocks it repeats to a percent
COPIES = ("copy", "big copy")
HEADLINE = ("solution", "eager", "compile")  # also in the row as <name>_ms
SPREAD = 0.03  # 20th to 80th percentile over the median, above which a row warns
TICK_MS = 1e-3  # two ticks of a CUDA event: less is no spread

Call = Callable[[], Any]
Timed = Callable[[], float]

_cuda: Any = torch.cuda  # parts of it are untyped, other parts from one release to the next


@dataclass(frozen=True)
class Timer:
    """Times one call on the device, its L2 cache emptied before."""

    device: torch.device
    flush: Tensor

    @staticmethod
    def on(device: torch.device) -> Timer:
        """A timer with its own flush buffer."""
        size = FLUSH_BYTES[device.type]
        return Timer(device, torch.empty(size, dtype=torch.uint8, device=device))

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


@dataclass
class _Candidates:
    """What is timed: a function that gives the milliseconds of one call, for each name."""

    timed: dict[str, Timed]
    repetitions: dict[str, int]
    messages: dict[str, str]
    seconds: float
    device: torch.device
    alone: bool
    report: Report

    def add(self, name: str, timed: Timed, seconds: float | None = None) -> None:
        """Warms a candidate up; one that fails is a message, but ours and eager must run."""
        self.report({"started": f"warm-up of {name}"})
        budget = self.seconds if seconds is None else seconds
        try:
            once = [timed() for _ in range(WARM_UP + 3)]
            low, high = REPETITIONS
            fitting = int(budget * 1e3 / max(statistics.median(once[WARM_UP:]), 1e-6))
            self.repetitions[name] = max(low, min(high, fitting))
            self.timed[name] = timed
        except Exception as error:
            synchronize(self.device)  # raises when the device itself is lost
            lacking = not self.alone and lacks_memory(error)
            if lacking or name in ("solution", "eager"):
                raise
            self.messages[name] = describe(error)


def child(payload: Json, report: Report) -> Json:
    """Prepares the candidates, then times them while no other process uses the GPU.

    The answer has `milliseconds` (medians; solution_ms, eager_ms and compile_ms once more),
    `spread` (20th to 80th percentile over the median), `speedup` (each other candidate's time over
    the solution's), `peak_bytes` (what a call allocates at most), `flops` of products and
    convolutions, the `ceilings` of the same run (GB/s of a 4 GB copy, TFLOP/s of square products),
    `roofline_ms` and `roofline_ratio` (see `roofline`; 1 is at the limit), `clocks`, `warnings`,
    in `messages` the error of each candidate that failed, in `phases` the seconds of preparing,
    waiting for the others and timing. `starved` says that memory was lacking while others prepared.
    """
    lock, alone = payload.get("lock"), payload.get("alone", True)
    try:
        with Rival(payload) as rival, torch.no_grad():
            files = load_files(
                Path(payload["reference"]), Path(payload["solution"]), payload["overrides"]
            )
            with hold(lock, report, alone=alone):
                marks = [time.perf_counter()]
                device = resolve(payload["device"])
                about = {**facts(device), "load_seconds": round(files.load_seconds, 3)}
                report({"facts": about})
                prepared = _prepare(files, payload, device, report, rival)
                if device.type == "cuda":
                    torch.cuda.empty_cache()  # others prepare beside what waits
                marks.append(time.perf_counter())
            with hold(lock, report, alone=True):
                marks.append(time.perf_counter())
                row = _timed(*prepared, payload["bytes_moved"])
                marks.append(time.perf_counter())
        spent = (round(end - begin, 2) for begin, end in pairwise(marks))
        phases = dict(zip(("preparing", "waiting", "timing"), spent, strict=True))
        return {**about, **row, "phases": phases}
    except Exception as error:
        return failure(error, alone=alone)


def _prepare(
    files: Files, payload: Json, device: torch.device, report: Report, rival: Rival
) -> tuple[_Candidates, Json]:
    """Everything but the timing: models, inputs, compilers, warm-up, memory, FLOPs."""
    inputs = own_inputs(files, 0, device)
    args = files.get_init_inputs()
    reference = construct(files.reference, device, args, {})
    solution = construct(files.solution, device, args, {})
    solution.load_state_dict(reference.state_dict())
    calls: dict[str, Call] = {
        "solution": partial(solution, *inputs),
        "eager": partial(reference, *inputs),
    }
    report({"started": "first calls"})
    peaks = {}
    for name, call in calls.items():
        call()  # libraries set up their workspaces in the first call
        peaks[name] = _peak_bytes(call, device)
    flops = count_flops(calls["eager"])
    if flops["convolution"]:  # all that the setting changes
        rival.start()
    calls.update(_others(reference, inputs, payload, device))
    alone = payload.get("alone", True)
    candidates = _Candidates({}, {}, {}, payload["seconds"], device, alone, report)
    timer = Timer.on(device)
    for name, call in calls.items():
        candidates.add(name, partial(timer, call))
    if flops["convolution"]:
        candidates.add("eager, cudnn.benchmark", rival.milliseconds)
    return candidates, {"flops": flops, "peak_bytes": peaks, "messages": candidates.messages}


def _others(
    reference: nn.Module, inputs: Any, options: Json, device: torch.device
) -> dict[str, Call]:
    """The reference compiled and in a CUDA graph; each starts at its first call."""
    calls: dict[str, Call] = {}
    if options["compiled"]:
        calls["compile"] = _started_late(lambda: torch.compile(reference), inputs)
    if options["max_autotune"]:
        tuned = partial(torch.compile, reference, mode="max-autotune")
        calls["compile, max-autotune"] = _started_late(tuned, inputs)
    if options["cuda_graph"] and device.type == "cuda":
        calls["eager, CUDA graph"] = _started_late(
            lambda: partial(_replayed, _captured(reference, inputs)), inputs
        )
    return calls


def _started_late(make: Callable[[], Callable[..., Any]], inputs: Any) -> Call:
    made: list[Callable[..., Any]] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0](*inputs)

    return call


def _captured(model: nn.Module, inputs: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(*inputs)
    return graph


def _replayed(graph: torch.cuda.CUDAGraph, *inputs: Any) -> None:
    graph.replay()


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


def count_flops(call: Call) -> Json:
    """FLOPs of a call's products and convolutions, as PyTorch's own counter gives them."""
    with FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts().get("Global", {})
    convolution = sum(n for op, n in counts.items() if "conv" in str(op))
    return {"product": sum(counts.values()) - convolution, "convolution": convolution}


# --- timing --------------------------------------------------------------------------------------


def _timed(candidates: _Candidates, found: Json, bytes_moved: int | None) -> Json:
    """Times all candidates and ceilings in turn; called while the GPU is ours alone."""
    device, flops = candidates.device, found["flops"]
    timer, units = Timer.on(device), {}
    for name, (call, unit) in _ceilings(bytes_moved, flops, device).items():
        candidates.add(name, partial(timer, call), CEILING_SECONDS)
        units[name] = unit
    candidates.report({"started": "timing"})
    clocks = Clocks(device)
    times = _interleaved(candidates, clocks)
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: _spread(values) for name, values in times.items()}
    rates = {name: units[name] / (medians[name] * 1e9) for name in units if name in medians}
    mine = medians["solution"]
    others = [name for name in medians if name not in units and name != "solution"]
    limit = roofline(bytes_moved, flops, rates)
    return {
        "status": "ok",
        **found,
        "milliseconds": {n: t for n, t in medians.items() if n not in units},
        **{f"{name}_ms": medians.get(name) for name in HEADLINE},
        "spread": spread,
        "repetitions": candidates.repetitions,
        "speedup": {name: medians[name] / mine for name in others},
        "copy_gbps": rates["copy"] * 1e3 if "copy" in rates else None,
        "big_copy_gbps": rates["big copy"] * 1e3,
        "ceilings": {
            "copy": rates["big copy"] * 1e3,
            **{name: rate for name, rate in rates.items() if name not in COPIES},
        },
        "roofline_ms": limit,
        "roofline_ratio": None if limit is None else limit / mine,
        "clocks": clocks.summary(),
        "warnings": _warnings(medians, spread, units, clocks),
    }


def _ceilings(
    bytes_moved: int | None, flops: Json, device: torch.device
) -> dict[str, tuple[Call, float]]:
    """Device copies and matrix products, each with its bytes or FLOPs.

    "copy" reads and writes together what the task does at least, "big copy" 8 GB. The products
    are timed where the task has FLOPs of its own.
    """
    limit = BIG_COPY_BYTES["cuda"]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        limit = torch.cuda.mem_get_info(device)[0] // 8  # four such buffers, half stays free
    sizes = {"big copy": min(BIG_COPY_BYTES[device.type], limit)}
    if bytes_moved:
        sizes["copy"] = max(16, min(bytes_moved // 2, limit) // 16 * 16)
    found: dict[str, tuple[Call, float]] = {}
    for name, size in sizes.items():
        source = torch.ones(size, dtype=torch.uint8, device=device)
        found[name] = partial(torch.empty_like(source).copy_, source), 2.0 * size
    if any(flops.values()):
        full = PRODUCT_SIZE[device.type]
        for name, dtype, tf32, size in (
            ("float32 product", torch.float32, False, full // 2),  # large enough for its rate
            ("TF32 product", torch.float32, True, full),
            ("float16 product", torch.float16, False, full),
        ):  # fmt: skip
            # Random values: a product of constants draws less power and runs at higher clocks.
            factor = torch.rand(size, size, dtype=dtype, device=device)
            found[name] = partial(_product, factor, tf32), 2.0 * size**3
    return found


def _product(factor: Tensor, tf32: bool) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return factor @ factor
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _interleaved(candidates: _Candidates, clocks: Clocks) -> dict[str, list[float]]:
    """One of each a round, so that clocks and temperature drift over all candidates alike.

    Each round has an order of its own: always after the float16 product, which draws the most
    power, 25 models of products came out at 1.000 of eager (geometric mean), so at 1.008, twice.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates.timed}
    order = list(candidates.timed)
    draw = random.Random(0)
    for turn in range(max(candidates.repetitions.values())):
        draw.shuffle(order)
        for name in order:
            if turn < candidates.repetitions[name]:
                times[name].append(candidates.timed[name]())
        if turn % 10 == 0:
            clocks.read()
    return times


def _spread(values: list[float]) -> float:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return (fifths[3] - fifths[0]) / statistics.median(values)


def roofline(bytes_moved: int | None, flops: Json, rates: Mapping[str, float]) -> float | None:
    """The least milliseconds that the GPU's measured ceilings allow, or None without bytes.

    The larger of bytes over the copy bandwidth and FLOPs over the matrix rates. A product at
    float32 accuracy takes three float16 ones at least (or the float32 units, where those are
    faster); PyTorch's convolutions run in TF32 by default. Rates are in TB/s and TFLOP/s.
    """
    if not bytes_moved:
        return None
    maths = 0.0
    if flops["product"]:
        best = max(rates["float16 product"] / 3, rates["float32 product"])
        maths += flops["product"] / (best * 1e9)
    if flops["convolution"]:
        best = max(rates["TF32 product"], rates["float32 product"])
        maths += flops["convolution"] / (best * 1e9)
    return max(bytes_moved / (rates["big copy"] * 1e9), maths)


def _warnings(
    medians: Mapping[str, float], spread: Mapping[str, float], units: Json, clocks: Clocks
) -> list[str]:
    """What makes the times doubtful."""
    found = [
        f"{name}: spread {spread[name]:.1%} of {medians[name]:.4g} ms"
        for name in medians
        if name not in units and spread[name] > SPREAD and spread[name] * medians[name] > TICK_MS
    ]
    moved = clocks.warning()
    return [*found, moved] if moved else found
