"""One task of a run: what is asked of its child processes, and the row made of their answers."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelnew.files import algebra_lines, sha256
from modelnew.measure.child import Json, Limits, run_child

GROUPS = ("state", "own", "sizes", "layouts", "values", "behaviour", "constructor", "large")
TOOLS = ("memcheck", "initcheck", "racecheck")  # of compute-sanitizer
BUILD_TIMEOUT_S = 600.0
KERNEL = r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\("
# Without the caching allocator every tensor is an allocation of its own, so that an access past
# its end is seen, and a new one is not initialised by what was there before.
SANITIZER_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# What a row holds in any case, whether its child answered or not.
_BLANK: Json = {
    "message": "", "device": "", "torch": "", "cuda": None, "build_seconds": None,
    "load_seconds": None, "seconds": None,
}  # fmt: skip
BLANK: Mapping[str, Json] = {
    "verify": {**_BLANK, "complete": False, "checks": [], "degenerate": [], "truth": {}},
    "bench": {
        **_BLANK, "bytes_moved": None, "flops": {}, "milliseconds": {}, "spread": {},
        "repetitions": {}, "speedup": {}, "peak_bytes": {}, "messages": {}, "warnings": [],
        "clocks": {}, "ceilings": {}, "copy_gbps": None, "big_copy_gbps": None,
        "roofline_ms": None, "roofline_ratio": None, "solution_ms": None, "eager_ms": None,
        "compile_ms": None,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A reference and a solution to verify or to time; `options` are the task's own.

    The options of "verify": seeds, groups, large, sanitize, kernelbench (its folder or None); of
    "bench": seconds (of timed calls a candidate), compiled, max_autotune, cuda_graph. Of both:
    device and overrides (module constants of the reference).
    """

    task: str
    reference: Path
    solution: Path
    options: Json
    timeout_s: float = 600.0

    @property
    def key(self) -> tuple[str, str]:
        return self.task, str(self.reference)

    @property
    def said(self) -> Json:
        """The options as a row says them: whether with KernelBench, not where it lies."""
        return {k: bool(v) if k == "kernelbench" else v for k, v in self.options.items()}


@dataclass(frozen=True)
class Place:
    """Where a job's children run: environment, the GPU's lock file, whether nobody shares it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    lock: str | None = None
    alone: bool = True
    stop: threading.Event = field(default_factory=threading.Event)


def verify_options(
    *, seeds: int = 3, device: str = "cuda", overrides: Mapping[str, str] | None = None,
    large: bool = True, groups: Sequence[str] = GROUPS, sanitize: bool = False,
    kernelbench: Path | None = None,
) -> Json:  # fmt: skip
    """Options of a "verify" job; `groups` are the groups of checks to run."""
    return {
        "seeds": seeds, "device": device, "overrides": dict(overrides or {}), "large": large,
        "groups": list(groups), "sanitize": sanitize,
        "kernelbench": None if kernelbench is None else str(kernelbench.resolve()),
    }  # fmt: skip


def bench_options(
    *, seconds: float = 1.5, device: str = "cuda", overrides: Mapping[str, str] | None = None,
    compiled: bool = True, max_autotune: bool = False, cuda_graph: bool = False,
) -> Json:  # fmt: skip
    """Options of a "bench" job: which candidates besides eager, how long each is timed."""
    return {
        "seconds": seconds, "device": device, "overrides": dict(overrides or {}),
        "compiled": compiled, "max_autotune": max_autotune, "cuda_graph": cuda_graph,
    }  # fmt: skip


def build(job: Job, place: Place) -> Json:
    """The build step of a job: its answer, with status ok when the solution can be measured."""
    if not job.solution.exists():
        return {"status": "error", "message": f"{job.solution}: not rendered yet"}
    payload = {**_files(job), "overrides": job.options["overrides"]}
    limits = Limits(BUILD_TIMEOUT_S, place.stop)
    answer = run_child("build", payload, limits, environment=place.environment)
    if answer["status"] == "timeout":
        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        answer["message"] += f"; is a file `lock` left in the extension's folder ({folder})?"
    answer.pop("events", None)
    return answer


def measure(job: Job, place: Place, built: Json) -> Json:
    """Runs the job's task and returns its answer, whatever became of the child."""
    begin = time.perf_counter()
    payload = {
        **_files(job), **job.options, "bytes_moved": built.get("bytes_moved"), "lock": place.lock,
        "alone": place.alone,
    }  # fmt: skip
    limits = Limits(job.timeout_s, place.stop)
    barred = payload["barred"] = list[str]()
    while True:
        answer = run_child(job.task, payload, limits, environment=place.environment)
        lost = answer.pop("reference_lost", "")
        if not lost or lost in barred:
            break
        barred.append(lost)  # the other checks need a process whose device is alive
    if lost:
        answer["status"] = "crashed"
    for event in answer.pop("events", []):
        answer.update(event.get("facts", {}))
        if "check" in event:
            answer.setdefault("checks", []).append(event["check"])
    if job.options.get("sanitize"):
        answer.setdefault("checks", []).extend(_sanitized(payload, limits, place))
        _settle(answer)
    if job.options.get("kernelbench") and not answer.get("starved"):
        found = run_child("kernelbench", payload, limits, environment=place.environment)
        found.pop("events", None)
        answer["starved"] = found.pop("starved", False)
        answer["kernelbench"] = found
    return {**answer, "seconds": round(time.perf_counter() - begin, 3)}


def row(job: Job, built: Json, answer: Json) -> Json:
    """The row of a job: what its build and its measuring answered, every key present."""
    found = {**_kept(built), **answer}
    head = {"task": job.task, **_files(job), "status": answer["status"], "options": job.said}
    full = {**head, **BLANK[job.task], **found}
    if job.task == "verify":
        checks = full["checks"]
        full["check_counts"] = dict(Counter(check["status"] for check in checks))
        full["max_error_ratio"] = max(
            (check["ratio"] for check in checks if check["status"] != "skipped"), default=0.0
        )
        full["refused"] = [
            f"{check['name']} {check['dtype']}".strip()
            for check in checks
            if check["message"].startswith("refused") and check["status"] == "skipped"
        ]
    return full


def disagreement(row: Json) -> Json | None:
    """A row of its own where our verdict and KernelBench's differ."""
    theirs = row.get("kernelbench")
    if not theirs or row["status"] not in ("ok", "wrong") or theirs["status"] != "ok":
        return None
    ours = row["status"] == "ok"
    if ours == theirs["correct"]:
        return None
    said = {True: "right", False: "wrong"}
    text = f"ours: {said[ours]} {row['message']}\nKernelBench: {said[not ours]} {theirs['message']}"
    if theirs.get("reference_correct") is False:
        text += "\nIts evaluation calls the reference itself wrong too."
    names = ("reference", "solution", "sha256", "algebra", "device", "torch", "cuda")
    kept = {key: row[key] for key in names if key in row}
    return {"task": "disagreement", **kept, "status": "disagree", "message": text}


def _files(job: Job) -> Json:
    try:
        digest, algebra = sha256(job.solution), bool(algebra_lines(job.solution))
    except OSError:
        digest, algebra = "", False
    paths = {"reference": str(job.reference), "solution": str(job.solution)}
    return {**paths, "sha256": digest, "algebra": algebra}


def _kept(built: Json) -> Json:
    """What a row keeps of the build step's answer."""
    names = ("plan", "plan_message", "bytes_moved", "kind", "kernels", "build_seconds")
    return {name: built[name] for name in names if name in built}


def _sanitized(payload: Json, limits: Limits, place: Place) -> list[Json]:
    """A check for each tool of compute-sanitizer over the solution's own kernels."""
    kernels = re.findall(KERNEL, Path(payload["solution"]).read_text(encoding="utf-8"))
    found = []
    for tool in TOOLS:
        answer: Json = {"status": "skipped", "message": "the solution has no kernel of its own"}
        if kernels:
            answer = _under(tool, kernels, payload, limits, place)
        status = answer["status"] if answer["status"] in ("ok", "skipped") else "wrong"
        found.append({
            "name": f"compute-sanitizer {tool}", "dtype": "", "shape": answer.get("shapes", []),
            "status": status, "error": 0.0, "reference_error": 0.0, "ratio": 0.0,
            "message": answer["message"], "truth": "",
        })  # fmt: skip
    return found


def _under(tool: str, kernels: Sequence[str], payload: Json, limits: Limits, place: Place) -> Json:
    """The answer of the solution's kernels run under one tool, wrong with its first complaint.

    initcheck must see every kernel that writes, so it watches PyTorch's too, and only what it
    says of ours counts.
    """
    every = tool == "initcheck"
    names = [] if every else [x for name in kernels for x in ("--kernel-name", f"kns={name}")]
    environment = {**place.environment, **SANITIZER_ENVIRONMENT}
    with tempfile.TemporaryDirectory(prefix="modelnew-") as folder:
        log = Path(folder, "log")
        limit = ("--print-limit", "1000" if every else "10")
        wrapper = ["compute-sanitizer", "--tool", tool, "--log-file", str(log), *limit, *names]
        answer = run_child("sanitize", payload, limits, environment=environment, wrapper=wrapper)
        text = log.read_text(errors="replace") if log.exists() else ""
    complaints = [part for part in complaints_in(text) if not every or _names(part, kernels)]
    if complaints:
        count = f"{len(complaints)} complaints, the first:"
        return {**answer, "status": "wrong", "message": f"{count}\n{complaints[0]}"}
    return answer


def complaints_in(log: str) -> list[str]:
    """The complaints in a log of compute-sanitizer: a line, then lines that are set in."""
    found: list[list[str]] = []
    for line in (line.removeprefix("=========").rstrip() for line in log.splitlines()):
        if line.startswith("     ") and found:
            found[-1].append(line)
        elif re.match(r" (COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY)", line):
            continue
        elif re.match(r" \S", line):
            found.append([line])
    texts = ["\n".join(lines).strip() for lines in found]
    return [text for text in texts if not text.startswith(("Target application", "Note"))]


def _names(complaint: str, kernels: Sequence[str]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", complaint) for name in kernels)


def _settle(answer: Json) -> None:
    """A check that was added after the child's end makes an ok row wrong."""
    wrong = [check for check in answer["checks"] if check["status"] == "wrong"]
    if answer["status"] == "ok" and wrong:
        message = f"{wrong[0]['name']}: {wrong[0]['message']}"
        answer.update(status="wrong", complete=False, message=message)


def sanitizer_found() -> bool:
    """Whether compute-sanitizer, part of the CUDA toolkit, is on PATH."""
    return shutil.which("compute-sanitizer") is not None


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))
