"""Judges from outside: KernelBench's evaluation, compute-sanitizer, a second process for cuDNN.

And what users of a module see of ModelNew from outside: its state, copies, hooks and modes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu
import pytest
import torch
from planted import POINTWISE, measured, pointwise, write
from torch import nn

from modelnew import pipeline
from modelnew.measure import jobs, kernelbench, sanitize
from modelnew.render import Options

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
        names = re.findall(jobs.KERNEL, text)
        assert len(names) == text.count("__global__"), path
        # Instances of a template, or what the host asks the runtime about.
        assert all(re.search(rf"\b{name}(<|\))", text) for name in names), path


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


# --- the same module from outside ----------------------------------------------------------------

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return torch.tanh(self.norm(x) * self.scale)

class Model(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.register_buffer("offset", torch.rand(width))
        self.register_buffer("mask", torch.rand(width), persistent=False)
        self.last = nn.Linear(width, width)
        self.first = nn.Linear(width, width)
        self.first.weight = self.last.weight
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.blocks[0].scale.requires_grad_(False)
        self.hidden = torch.rand(width)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.last(x) * self.mask + self.offset)

def get_inputs():
    return [torch.rand(5, 7)]

def get_init_inputs():
    return []
"""

Pair = tuple[nn.Module, nn.Module]


@pytest.fixture(scope="module")
def classes(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[type[nn.Module], type[nn.Module]]:
    """Model and its ModelNew, whose kernels run on the CPU."""
    path = tmp_path_factory.mktemp("outside") / "module.py"
    path.write_text(MODULE)
    text = pipeline.generate(path, {}, Options()).text
    assert pytestconfig.cache is not None
    solution = cpu.load_on_cpu(text, pytestconfig.cache.mkdir("solutions_on_cpu"))
    reference: dict[str, Any] = {}
    exec(compile(MODULE, str(path), "exec", dont_inherit=True), reference)
    return reference["Model"], solution["ModelNew"]


def built(cls: type[nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return cls()


@pytest.fixture
def pair(classes: tuple[type[nn.Module], type[nn.Module]]) -> Pair:
    """Both models from one seed."""
    return built(classes[0]), built(classes[1])


def described(model: nn.Module) -> list[Any]:
    """Everything about a model's state but its values, in order."""
    names: dict[int, str] = {}
    parameters = [
        (name, names.setdefault(id(p), name), p.shape, p.dtype, p.device, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [(name, b.shape, b.dtype, b.device) for name, b in model.named_buffers()]
    modes = [(name, module.training) for name, module in model.named_modules()]
    return [parameters, buffers, modes, list(model.state_dict()), model.hidden.dtype]


def assert_same(pair: Pair, run: bool = False) -> None:
    """That both have the same state, bit by bit unless they have run, and give the same answers."""
    reference, solution = pair
    assert described(reference) == described(solution)
    allowed = {} if run else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(reference.state_dict(), solution.state_dict(), **allowed)
    dtype = reference.get_parameter("first.bias").dtype
    x = torch.linspace(-1, 1, 35).reshape(5, 7).to(dtype)
    for mode in (True, False):
        with torch.no_grad():
            expected, found = (model.train(mode)(x) for model in pair)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(reference.state_dict(), solution.state_dict())


def test_one_seed_gives_one_module(pair: Pair) -> None:
    assert_same(pair)


def test_state_goes_both_ways(classes: tuple[type[nn.Module], type[nn.Module]]) -> None:
    for seed, (source, target) in enumerate([classes, classes[::-1]]):
        given, taker = built(source, seed), built(target, seed + 9)
        assert taker.load_state_dict(given.state_dict(), strict=True) == ([], [])
        taker.mask.copy_(given.mask)  # no part of the state
        assert_same((given, taker) if seed == 0 else (taker, given))


def test_saved_state_is_read_by_the_other(pair: Pair) -> None:
    reference, solution = pair
    for given, taker in (pair, (solution, reference)):
        with torch.no_grad():
            given.get_parameter("first.bias").add_(1)
        file = io.BytesIO()
        torch.save(given.state_dict(), file)
        file.seek(0)
        taker.load_state_dict(torch.load(file, weights_only=True))
        assert_same(pair)
        taker.load_state_dict(pickle.loads(pickle.dumps(given.state_dict())))
        assert_same(pair)


@pytest.mark.parametrize("where", ["bfloat16", "float16", "meta", "assigned"])
def test_conversions(pair: Pair, where: str) -> None:
    for model in pair:
        if where == "meta":
            model.to("meta")
        elif where == "assigned":
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        else:
            model.to(getattr(torch, where))
    assert described(pair[0]) == described(pair[1])
    if where == "bfloat16":
        x = torch.linspace(-1, 1, 35).reshape(5, 7).bfloat16()
        expected, found = (model.eval()(x) for model in pair)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_copies_are_alike_and_on_their_own(pair: Pair) -> None:
    copies = (copy.deepcopy(pair[0]), copy.deepcopy(pair[1]))
    assert_same(copies)
    with torch.no_grad():
        for model in copies:
            model.get_parameter("last.weight").zero_()
    assert_same(copies, run=True)
    assert_same(pair)
    assert pair[1].get_parameter("last.weight").any()


def test_parts_can_be_replaced(pair: Pair) -> None:
    """ModelNew reads its parts when it is called, as the reference does."""
    for model in pair:
        torch.manual_seed(5)
        model.blocks[1].norm = nn.BatchNorm1d(7)
        model.register_buffer("offset", torch.rand(7))
        model.blocks[0].scale = nn.Parameter(torch.rand(7))
    assert_same(pair)


def test_hooks_of_the_whole_module_run(pair: Pair) -> None:
    x = torch.linspace(-1, 1, 35).reshape(5, 7)
    results = []
    for model in pair:
        seen: list[Any] = []
        model.eval().requires_grad_(False)
        handles = [
            model.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
            model.register_forward_hook(lambda _, args, out, seen=seen: seen.append((*args, out))),
            model.register_forward_hook(lambda _, args, out: out + 1),
        ]
        hooked = model(x)
        for handle in handles:
            handle.remove()
        results.append([seen[0], hooked, model(x), len(seen)])
    torch.testing.assert_close(results[1], results[0])


def test_modes_reach_every_child(pair: Pair) -> None:
    for change in (
        lambda model: model.eval(),
        lambda model: model.blocks.train(),
        lambda model: model.train(),
        lambda model: model.requires_grad_(False),
        lambda model: model.apply(lambda module: setattr(module, "seen", True)),
    ):
        for model in pair:
            change(model)
        assert described(pair[0]) == described(pair[1])
    assert all(module.seen for module in pair[1].modules())


def test_a_part_in_another_mode(pair: Pair) -> None:
    """A frozen norm gives the reference's answer, or an error that says so: never another."""
    x = torch.linspace(-1, 1, 35).reshape(5, 7)
    for model in pair:
        model.train().requires_grad_(False)
        model.blocks[0].norm.eval()
    expected = pair[0](x)
    with contextlib.suppress(ValueError):
        torch.testing.assert_close(pair[1](x), expected)


PLAIN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.hidden = torch.rand(width)

    def forward(self, x):
        return torch.relu(x - self.hidden)

def get_inputs():
    return [torch.rand(5, 7)]

def get_init_inputs():
    return []
"""


def test_tensors_that_are_not_registered_are_read_when_the_model_runs(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    text = pipeline.generate(tmp_path / "plain.py", {}, Options()).text
    assert pytestconfig.cache is not None
    solution = cpu.load_on_cpu(text, pytestconfig.cache.mkdir("solutions_on_cpu"))
    reference: dict[str, Any] = {}
    exec(compile(PLAIN, "plain.py", "exec", dont_inherit=True), reference)
    models = (built(reference["Model"]), built(solution["ModelNew"]))
    x = torch.linspace(0, 1, 35).reshape(5, 7)
    for _ in range(2):
        assert torch.equal(models[0](x), models[1](x))
        for model in models:
            model.hidden = torch.full((7,), 0.5)
