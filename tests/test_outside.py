"""Judges from outside: KernelBench's evaluation, compute-sanitizer, a second process for cuDNN."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import POINTWISE, measured, pointwise, write

from modelnew.measure import jobs, kernelbench, sanitize

KERNEL = "__global__ void __launch_bounds__(kThreads) scale_kernel(const float* x)"


# --- KernelBench ---------------------------------------------------------------------------------

EVALUATION = """
import dataclasses
import openai, litellm, dotenv, pydantic, requests

class KernelExecResult(pydantic.BaseModel):
    compiled: bool = False
    correctness: bool = False
    metadata: dict = {}

def eval_kernel_against_ref(original, custom, num_correct_trials, measure_performance, device,
                            backend, precision):
    assert num_correct_trials == 5 and "class Model" in original
    print("noise on standard output")
    if "no verdict" in custom:
        return None
    said = {"runtime_error": "CUDA out of memory" if "memory" in custom else "wrong value"}
    good = "bad" not in custom
    return KernelExecResult(compiled=True, correctness=good, metadata={} if good else said)
"""
CHECKER = """
def validate_kernel_static(code, backend, precision):
    return False, ["Missing __global__ kernel definition"], ["Uses torch.nn.functional"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a benchmark with KernelBench's interface."""
    package = tmp_path / "bench" / "src" / "kernelbench"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("eval", EVALUATION), ("kernel_static_checker", CHECKER)):
        (package / f"{name}.py").write_text(text)
    return tmp_path / "bench"


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", {"status": "ok", "correct": True, "compiled": True, "message": ""}),
        ("# bad", {"status": "ok", "correct": False}),
        ("# no verdict", {"status": "error"}),
    ],
)
def test_kernelbenchs_verdict_is_beside_ours(
    checkout: Path, tmp_path: Path, comment: str, expected: dict[str, Any]
) -> None:
    paths = write(tmp_path, POINTWISE, pointwise("") + comment)
    row = measured("verify", paths, groups=["state"], kernelbench=checkout)
    assert row["status"] == "ok"
    theirs = row["kernelbench"]
    assert expected.items() <= theirs.items(), theirs
    if expected["status"] == "ok":
        assert theirs["checker_errors"] == ["Missing __global__ kernel definition"]
        assert theirs["checker_warnings"] == ["Uses torch.nn.functional"]
        assert ("wrong value" in theirs["message"]) == (not expected["correct"])
    other = jobs.disagreement(row)
    assert (other is not None) == (expected.get("correct") is False)
    if other is not None:
        assert theirs["reference_correct"]
        assert "the reference itself" not in other["message"]


def test_a_task_that_kernelbench_cannot_judge_is_said(checkout: Path, tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE + "# bad", pointwise("") + "# bad")
    row = measured("verify", paths, groups=["state"], kernelbench=checkout)
    other = jobs.disagreement(row)
    assert other is not None
    assert other["message"].endswith("Its evaluation calls the reference itself wrong too.")


def test_lack_of_memory_there_is_no_verdict_while_the_gpu_is_shared(
    checkout: Path, tmp_path: Path
) -> None:
    paths = write(tmp_path, POINTWISE, pointwise("") + "# bad memory")
    job = jobs.Job("verify", *paths, jobs.verify_options(
        device="cpu", groups=["state"], kernelbench=checkout
    ))  # fmt: skip
    for alone in (True, False):
        answer = jobs.measure(job, jobs.Place(alone=alone), {})
        assert answer["starved"] == (not alone)


def test_a_folder_without_kernelbench(tmp_path: Path) -> None:
    payload = {"kernelbench": str(tmp_path), "reference": "", "solution": "", "device": "cpu"}
    answer = kernelbench.child(payload, lambda event: None)
    assert answer["status"] == "error"
    assert "no checkout of KernelBench" in answer["message"]


# --- compute-sanitizer ---------------------------------------------------------------------------

LOG = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::other_kernel<float>(float*)+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void <unnamed>::scale_kernel<float, (int)4>(Operands)+0x50
=========     by thread (3,0,0) in block (0,0,0)
=========     Access to 0x7f0 is not initialised
=========         Host Frame: run [0x1] in main.so
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""


def test_the_complaints_in_a_log() -> None:
    first, second = jobs.complaints_in(LOG)
    assert first.startswith("Uninitialized")
    assert "other_kernel" in first
    assert "scale_kernel" in second
    assert "Host Frame" in second
    assert (
        jobs.complaints_in("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors") == []
    )


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """A compute-sanitizer on PATH that runs its program and writes the given log for one tool."""

    def install(name: str, log: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "log").write_text(log)
        script = folder / "compute-sanitizer"
        script.write_text(f"""#!/bin/sh
echo "$@" >> {folder}/calls
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING" >> {folder}/caching
[ "$2" = {name} ] && cp {folder}/log "$4"
while [ "$1" != -m ]; do program=$1; shift; done
exec "$program" "$@"
""")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return install


@pytest.mark.parametrize(
    ("name", "bad"), [("memcheck", True), ("initcheck", True), ("none", False)]
)
def test_what_compute_sanitizer_says_is_a_check(
    tool: Callable[[str, str], Path], tmp_path: Path, name: str, bad: bool
) -> None:
    folder = tool(name, LOG)
    paths = write(tmp_path, POINTWISE, pointwise("") + f"_text = {KERNEL!r}")
    row = measured("verify", paths, groups=["state"], sanitize=True)
    assert row["status"] == ("wrong" if bad else "ok"), row["message"]
    found = {c["name"]: c for c in row["checks"] if c["name"].startswith("compute-sanitizer")}
    assert list(found) == [f"compute-sanitizer {t}" for t in jobs.TOOLS]
    states = {key: check["status"] for key, check in found.items()}
    assert states == {
        key: "wrong" if key.endswith(name) else "ok" for key in states
    }, "one tool complained"  # fmt: skip
    calls = (folder / "calls").read_text().splitlines()
    assert ["kns=scale_kernel" in call for call in calls] == [True, False, True]
    assert (folder / "caching").read_text().split() == ["1"] * 3
    if bad:
        wrong = found[f"compute-sanitizer {name}"]["message"]
        counted = "1 complaints" if name == "initcheck" else "2 complaints"
        assert wrong.startswith(counted), "of PyTorch's own kernels initcheck tells too"
        assert row["message"].startswith(f"compute-sanitizer {name}")
    else:
        shapes = [shape for call in found["compute-sanitizer memcheck"]["shape"] for shape in call]
        assert [37, 129] in shapes
        assert [12, 40] in shapes


def test_a_solution_without_kernels_is_not_run_under_it(
    tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = tool("memcheck", LOG)
    paths = write(tmp_path, POINTWISE, pointwise(""))
    row = measured("verify", paths, groups=["state"], sanitize=True)
    assert row["status"] == "ok"
    states = [c["status"] for c in row["checks"] if "sanitizer" in c["name"]]
    assert states == ["skipped"] * 3
    assert not (folder / "calls").exists()


def test_every_committed_kernel_is_found_by_name() -> None:
    folder = Path(__file__).resolve().parent.parent / "solutions"
    for path in folder.glob("*.py"):
        text = path.read_text()
        names = jobs.re.findall(jobs.KERNEL, text)
        assert len(names) == text.count("__global__"), path
        assert all(f"{name}<" in text for name in names), path


def test_large_inputs_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "OWN_LIMIT", 1)
    paths = write(tmp_path, POINTWISE, pointwise(""))
    payload = {
        "reference": str(paths[0]), "solution": str(paths[1]), "overrides": {}, "device": "cpu",
    }  # fmt: skip
    answer = sanitize.child(payload, lambda event: None)
    shapes = [shape for call in answer.get("shapes", []) for shape in call]
    assert [12, 40] not in shapes


# --- cudnn.benchmark -----------------------------------------------------------------------------

CONVOLUTION = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)

def get_inputs():
    return [torch.rand(2, 3, 16, 16)]

def get_init_inputs():
    return []
"""


def test_cudnn_benchmark_is_timed_in_another_process(tmp_path: Path) -> None:
    setting = "assert not torch.backends.cudnn.benchmark; return self.conv(x)"
    solution = CONVOLUTION.replace("class Model", "class ModelNew")
    solution = solution.replace("return self.conv(x)", setting)
    row = measured("bench", write(tmp_path, CONVOLUTION, solution), compiled=False, seconds=0.02)
    assert row["status"] == "ok", row["message"]
    assert row["milliseconds"]["eager, cudnn.benchmark"] > 0
    assert row["flops"] == {"product": 0, "convolution": 2 * 2 * 4 * 14 * 14 * 27}
    assert set(row["ceilings"]) == {"copy", "float32 product", "TF32 product", "float16 product"}
    assert set(row["phases"]) == {"preparing", "waiting", "timing"}
    json.dumps(row, allow_nan=False)


def test_a_process_for_cudnn_that_fails_is_a_message(tmp_path: Path) -> None:
    reference = CONVOLUTION.replace(
        "return self.conv(x)", "assert not torch.backends.cudnn.benchmark; return self.conv(x)"
    )
    solution = CONVOLUTION.replace("class Model", "class ModelNew")
    row = measured("bench", write(tmp_path, reference, solution), compiled=False, seconds=0.02)
    assert row["status"] == "ok", row["message"]
    assert "AssertionError" in row["messages"]["eager, cudnn.benchmark"]
    assert torch.backends.cudnn.benchmark is False
