"""The measuring half on the CPU: every planted fault is found by the check meant for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import (
    FAULTS,
    LAYER_FAULTS,
    LAYERS,
    LAYERS_NEW,
    POINTWISE,
    examine,
    measured,
    pointwise,
    write,
    wrong,
)

from modelnew import files
from modelnew.measure import bench, child, jobs, load, nested, verify


@pytest.mark.parametrize(
    ("reference", "solution"), [(POINTWISE, pointwise("")), (LAYERS, LAYERS_NEW)]
)
def test_a_right_solution_is_ok_in_every_check(
    tmp_path: Path, reference: str, solution: str
) -> None:
    row = examine(tmp_path, reference, solution)
    assert row["status"] == "ok", row["message"]
    assert row["complete"]
    assert len({(c["name"], c["dtype"]) for c in row["checks"]}) == len(row["checks"])
    assert sum(c["status"] == "ok" for c in row["checks"]) > 60
    reasons = {c["message"] for c in row["checks"] if c["status"] == "skipped"}
    assert all("reference" in reason or "CUDA" in reason for reason in reasons)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_by_its_check(tmp_path: Path, fault: str) -> None:
    body, group, check = FAULTS[fault]
    row = examine(tmp_path, POINTWISE, pointwise(body), group)
    assert row["status"] == "wrong"
    assert not row["complete"]
    found = wrong(row)
    assert any(name.startswith(check) for name in found), found
    assert all(c["message"] for c in row["checks"] if c["status"] == "wrong")


@pytest.mark.parametrize("fault", LAYER_FAULTS)
def test_each_fault_of_a_model_with_weights_is_found(tmp_path: Path, fault: str) -> None:
    old, new, group, check = LAYER_FAULTS[fault]
    assert old in LAYERS_NEW
    row = examine(tmp_path, LAYERS, LAYERS_NEW.replace(old, new), group)
    assert row["status"] == "wrong"
    assert check in wrong(row)


def test_a_clear_refusal_is_recorded_and_not_wrong(tmp_path: Path) -> None:
    body = """if not x.dim(): raise ValueError("x: 0-dim input: give it one dimension")
        if x.dtype == torch.float16: raise RuntimeError("ModelNew: float32 only")"""
    row = examine(tmp_path, POINTWISE, pointwise(body), "own", "sizes")
    assert row["status"] == "ok", row["message"]
    refused = [c["name"] for c in row["checks"] if c["message"].startswith("refused: ")]
    assert "sizes 0-dim" in refused
    assert "own seed 0" in refused


def test_checks_take_a_shape_that_the_solution_takes(tmp_path: Path) -> None:
    body = """if x.dim() != 2 or x.shape[1] != 40:
            raise ValueError("x: generated for 40 columns")"""
    row = examine(tmp_path, POINTWISE, pointwise(body), "layouts", "behaviour", "sizes")
    assert row["status"] == "ok", row["message"]
    shapes = {c["name"]: c["shape"] for c in row["checks"] if c["dtype"] == "float32"}
    done = {c["name"] for c in row["checks"] if c["status"] == "ok"}
    assert done >= {"layout offset", "layout transposed", "repeatable", "train()"}
    assert shapes["layout offset"] == [[64, 40]]
    assert "sizes odd (all), normal values float32" in row["refused"]


def test_a_reference_that_loses_the_device_says_nothing_of_the_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def lost(task: str, payload: Any, *_: Any, **__: Any) -> Any:
        asked.append(list(payload["barred"]) if "barred" in payload else [])
        name = {0: "layout offset float32", 1: "a float32"}.get(len(asked) - 1, "")
        return {"status": "lost" if name else "ok", "message": "", "reference_lost": name}

    monkeypatch.setattr(jobs, "run_child", lost)
    row = measured("verify", write(tmp_path, POINTWISE, pointwise("")))
    assert row["status"] == "ok"
    assert "reference_lost" not in row
    assert asked == [[], ["layout offset float32"], ["layout offset float32", "a float32"]]
    monkeypatch.setattr(
        jobs,
        "run_child",
        lambda *_, **__: {"status": "lost", "message": "m", "reference_lost": "x"},
    )
    assert measured("verify", write(tmp_path, POINTWISE, pointwise("")))["status"] == "crashed"


def test_a_barred_check_is_skipped(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, pointwise(""))
    options = jobs.verify_options(device="cpu", groups=["layouts"])
    payload = {"reference": str(paths[0]), "solution": str(paths[1]), **options}
    barred = {**payload, "barred": ["layout offset float32"]}
    row = verify.child(barred, lambda event: None)
    skipped = [c["name"] for c in row["checks"] if "loses the device" in c["message"]]
    assert skipped == ["layout offset"]


@pytest.mark.parametrize("who", ["reference", "solution"])
def test_memory_that_cuda_lacks_is_no_fault_while_others_share_the_gpu(
    tmp_path: Path, who: str
) -> None:
    """What CUDA itself allocates fails as another class than what PyTorch's allocator does."""
    lacking = 'if x.numel() < 480: raise RuntimeError("CUDA error: out of memory")'
    reference = POINTWISE.replace("return torch.where", f"{lacking}\n        return torch.where")
    texts = {"reference": (reference, pointwise("")), "solution": (POINTWISE, pointwise(lacking))}
    assert reference != POINTWISE
    paths = write(tmp_path, *texts[who])
    options = jobs.verify_options(device="cpu", large=False)
    for alone in (True, False):
        row = jobs.measure(jobs.Job("verify", *paths, options), jobs.Place(alone=alone), {})
        assert row["starved"] == (not alone)
        assert not wrong(row)
        counts = jobs.row(jobs.Job("verify", *paths, options), {}, row)["check_counts"]
        assert sum(counts.values()) == len(row["checks"])


def test_a_float64_truth_that_lacks_memory_ends_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone on the GPU there is nothing to wait for: the checks that need it are skipped."""

    def lacking(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(verify, "reference_runs", lacking)
    row = examine(tmp_path, POINTWISE, pointwise(""))
    assert row["status"] == "ok", row["message"]
    assert {"values tiny", "layout offset"} <= {c["name"] for c in row["checks"]}


def test_own_float32_inputs_may_not_be_refused(tmp_path: Path) -> None:
    body = 'if x.dtype == torch.float32: raise ValueError("x: no float32")'
    row = examine(tmp_path, POINTWISE, pointwise(body), "own")
    assert "own seed 0 float32" in wrong(row)


def test_a_constructor_argument_may_be_refused_by_name(tmp_path: Path) -> None:
    named = 'if self.slope != 0.2: raise ValueError("slope: generated for 0.2 only")'
    row = examine(tmp_path, POINTWISE, pointwise(named), "constructor")
    assert row["status"] == "ok"
    messages = [c["message"] for c in row["checks"] if c["name"].startswith("constructor")]
    assert ["generated for 0.2" in message for message in messages] == [True]
    nameless = named.replace("slope: g", "G")
    assert wrong(examine(tmp_path, POINTWISE, pointwise(nameless), "constructor"))


def test_a_raising_backward_is_right(tmp_path: Path) -> None:
    solution = pointwise("y = _Once.apply(x, y.detach())").replace(
        "class ModelNew",
        """class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("ModelNew has no backward")

class ModelNew""",
    )
    row = examine(tmp_path, POINTWISE, solution, "behaviour")
    assert row["status"] == "ok", row["message"]
    backward = next(c for c in row["checks"] if c["name"] == "backward")
    assert "no backward" in backward["message"]


def test_a_reference_that_refuses_its_own_inputs_is_an_error(tmp_path: Path) -> None:
    reference = POINTWISE.replace("return torch.where", 'raise KeyError("k")\n        return torch')
    row = examine(tmp_path, reference, pointwise(""))
    assert (row["status"], row["complete"]) == ("error", False)
    assert "KeyError" in row["message"]


def test_integer_inputs_stay_in_range(tmp_path: Path) -> None:
    reference = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, target):
        return nn.functional.cross_entropy(x, target)

def get_inputs():
    return [torch.rand(32, 500), torch.randint(0, 500, (32,))]
"""
    solution = reference.replace("class Model(", "class ModelNew(")
    row = examine(tmp_path, reference, solution, "own", "sizes", "layouts")
    assert row["status"] == "ok"
    odd = next(c for c in row["checks"] if c["name"].startswith("sizes odd"))
    assert odd["shape"] == [[37, 129], [37]]


# --- the child process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "status", "message"),
    [
        ("os.abort()", "crashed", "SIGABRT"),
        ("time.sleep(60)", "timeout", "no answer within"),
        ("os._exit(3)", "error", "exit status 3"),
        ("raise SystemExit('stop here')", "error", "stop here"),
    ],
)
def test_what_a_solution_does_to_its_process_is_one_row(
    tmp_path: Path, where: str, status: str, message: str
) -> None:
    condition = "if x.shape[0] == 37:"
    body = f"{condition} print('noise'); {where}"
    paths = write(tmp_path, POINTWISE, pointwise(body))
    limit = 15 if status == "timeout" else 100
    row = measured("verify", paths, limit)
    assert row["status"] == status
    assert message in row["message"]
    assert "during: sizes odd" in row["message"]
    assert row["sha256"] == files.sha256(paths[1])
    assert row["torch"] == torch.__version__
    assert not row["complete"]
    assert any(c["name"] == "own seed 0" and c["status"] == "ok" for c in row["checks"])


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("raise RuntimeError('no compiler')", "error", "no compiler"),
        ("x = = 1", "error", "syntax error"),
        ("del ModelNew", "error", "defines no ModelNew"),
    ],
)
def test_a_solution_that_cannot_be_imported_is_an_error(
    tmp_path: Path, line: str, status: str, message: str
) -> None:
    row = examine(tmp_path, POINTWISE, pointwise("") + line)
    assert row["status"] == status
    assert message in row["message"]


def test_an_abort_at_import_and_a_missing_file(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, "import os\nos.abort()")
    row = measured("verify", paths)
    assert (row["status"], row["checks"]) == ("crashed", [])
    assert "SIGABRT" in row["message"]
    row = measured("verify", (paths[0], tmp_path / "none.py"))
    assert row["status"] == "error"
    assert "none.py" in row["message"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
def test_a_timeout_ends_the_childs_own_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    solution = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({str(mark)!r}, "w").write(str(child.pid))
child.wait()
"""
    paths = write(tmp_path, POINTWISE, solution)
    row = measured("verify", paths, 12)
    assert row["status"] == "timeout"
    state = Path("/proc", mark.read_text(), "stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_child_that_has_yet_to_make_its_group_is_ended() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        assert os.getpgid(process.pid) != process.pid
        child._end_group(child._Started(process))
        assert process.returncode == -signal.SIGTERM


def test_the_child_runs_from_any_folder(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, pointwise(""))
    code = (
        "import json, sys; from pathlib import Path; from modelnew.measure import jobs; "
        "options = jobs.verify_options(device='cpu', groups=['state', 'own']); "
        "job = jobs.Job('verify', *map(Path, sys.argv[1:]), options); "
        "print(json.dumps(jobs.row(job, {}, jobs.measure(job, jobs.Place(), {}))))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(child.PACKAGE_PARENT)},
    )
    row = json.loads(answer.stdout)
    assert row["status"] == "ok"
    assert not row["complete"]
    assert row["max_error_ratio"] <= 1
    assert row["load_seconds"] >= 0


def test_long_messages_keep_the_errors() -> None:
    log = "\n".join(["FAILED: x", *["note: "] * 900, "file.cu(3): error: no", *["note: "] * 900])
    text = child.describe(RuntimeError(log))
    assert "file.cu(3): error: no" in text
    assert len(text) < 3000


# --- loading -------------------------------------------------------------------------------------


def test_overrides_replace_module_constants(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, pointwise(""))
    files = load.load_files(*paths, {"rows": "3", "columns": "2 + 2"})
    inputs = load.own_inputs(files, 0, torch.device("cpu"))
    assert inputs[0].shape == (3, 4)
    with pytest.raises(load.ModelNewError, match="--set depth: no such"):
        load.load_files(*paths, {"depth": "3"})


def test_twin_keeps_layout_and_contents() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base[1:, ::2], base.t(), base[:1].expand(5, 6), base[2, 3], base[:0]):
        copy = nested.twin(view)
        assert torch.equal(copy, view)
        assert copy.stride() == view.stride()
        assert copy.storage_offset() == view.storage_offset()
        assert copy.data_ptr() != view.data_ptr() or not view.numel()


# --- bench ---------------------------------------------------------------------------------------


def bench_payload(paths: tuple[Path, Path], **options: Any) -> dict[str, Any]:
    plain = {"reference": str(paths[0]), "solution": str(paths[1]), "device": "cpu"}
    chosen = jobs.bench_options(device="cpu", compiled=False, seconds=0.05)
    return {**plain, **chosen, "bytes_moved": 4096, **options}


def test_bench_times_all_candidates(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, pointwise("time.sleep(0.004)"))
    row = bench.child(bench_payload(paths), lambda event: None)
    assert row["status"] == "ok", row["message"]
    assert set(row["milliseconds"]) == {"solution", "eager"}
    assert row["solution_ms"] == row["milliseconds"]["solution"] > 4
    assert row["compile_ms"] is None
    assert row["flops"] == {"product": 0, "convolution": 0}
    assert row["speedup"]["eager"] < 1
    assert row["repetitions"]["solution"] in range(10, 14)
    assert row["repetitions"]["eager"] in range(10, 101)
    assert row["roofline_ms"] == pytest.approx(4096 / (row["big_copy_gbps"] * 1e6))
    assert row["roofline_ratio"] < 1
    assert row["copy_gbps"] > 0
    assert set(row["spread"]) > {"solution", "eager"}
    json.dumps(row, allow_nan=False)


def test_no_candidate_is_always_timed_after_the_same(tmp_path: Path) -> None:
    calls: list[str] = []
    repetitions = {"solution": 100, "eager": 100, "copy": 100, "product": 20}

    def timed(name: str) -> Callable[[], float]:
        return lambda: float(calls.append(name) or 1.0)

    cpu = torch.device("cpu")
    candidates = bench._Candidates(
        {name: timed(name) for name in repetitions}, repetitions, {}, 1.0, cpu, True, calls.append
    )
    times = bench._interleaved(candidates, bench.Clocks(cpu))
    assert {name: len(values) for name, values in times.items()} == repetitions
    before = Counter((first, name) for first, name in pairwise(calls) if first != name)
    for name in ("solution", "eager"):
        assert all(
            before[other, name] >= 15 for other in ("solution", "eager", "copy") if other != name
        )
        assert before["product", name] >= 2
    rounds = [frozenset(calls[4 * turn : 4 * turn + 4]) for turn in range(20)]
    assert set(rounds) == {frozenset(repetitions)}


def test_a_failing_compiler_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(model: Any, **options: Any) -> Callable[..., Any]:
        raise RuntimeError(f"cannot compile with {options}")

    monkeypatch.setattr(torch, "compile", compiler)
    paths = write(tmp_path, POINTWISE, pointwise(""))
    payload = bench_payload(paths, compiled=True, bytes_moved=None)
    row = bench.child(payload, lambda event: None)
    assert row["status"] == "ok"
    assert "cannot compile" in row["messages"]["compile"]
    assert "compile" not in row["milliseconds"]
    assert row["roofline_ratio"] is None


def test_bench_survives_a_crash(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, pointwise("os.abort()"))
    row = measured("bench", paths, compiled=False)
    assert row["status"] == "crashed"
    assert row["milliseconds"] == {}
    assert row["sha256"] == files.sha256(paths[1])


# --- on a GPU ------------------------------------------------------------------------------------


def on_gpu(test: Any) -> Any:
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needed(test))


@on_gpu
@pytest.mark.parametrize(
    ("reference", "solution"), [(POINTWISE, pointwise("")), (LAYERS, LAYERS_NEW)]
)
def test_a_right_solution_is_ok_on_the_gpu(tmp_path: Path, reference: str, solution: str) -> None:
    row = measured("verify", write(tmp_path, reference, solution), 600, device="cuda")
    assert row["status"] == "ok", row["message"]
    assert row["complete"]
    assert row["cuda"] == torch.version.cuda
    done = {c["name"] for c in row["checks"] if c["status"] == "ok"}
    assert done >= {"other stream", "CUDA graph", "poisoned memory"}


@on_gpu
@pytest.mark.parametrize(
    ("body", "check"),
    [
        (
            "z = x\n        with torch.cuda.stream(torch.cuda.default_stream()): "
            "y = torch.where(z > 0, z, z * self.slope)",
            "other stream float32",
        ),
        ("torch.cuda.synchronize()", "CUDA graph float32"),
        ("z = torch.empty_like(y); z[1:] = y[1:]; y = z", "poisoned memory float32"),
    ],
)
def test_faults_that_only_a_gpu_shows(tmp_path: Path, body: str, check: str) -> None:
    row = examine(tmp_path, POINTWISE, pointwise(body), "behaviour", device="cuda")
    assert check in wrong(row)


@on_gpu
def test_a_lost_device_is_one_row(tmp_path: Path) -> None:
    body = "x.view(-1)[torch.full((1,), 10**9, device=x.device)] if x.shape[0] == 37 else x"
    row = measured("verify", write(tmp_path, POINTWISE, pointwise(body)), 600, device="cuda")
    assert row["status"] == "crashed"
    assert "sizes odd" in row["message"]
    assert row["checks"][0]["status"] == "ok"


@on_gpu
def test_bench_on_the_gpu(tmp_path: Path) -> None:
    paths = write(tmp_path, POINTWISE, pointwise(""))
    sizes = {"rows": "8192", "columns": "8192"}
    options = jobs.bench_options(overrides=sizes)
    job = jobs.Job("bench", *paths, options)
    place = jobs.Place()
    row = jobs.row(job, {}, jobs.measure(job, place, {"bytes_moved": 8 * 8192**2}))
    assert row["status"] == "ok", row["message"]
    assert 0 < row["roofline_ratio"] < 1.2
    assert row["peak_bytes"]["solution"] >= 4 * 8192**2
    assert "compile" in {**row["milliseconds"], **row["messages"]}
