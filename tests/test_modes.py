"""Models that differ between train() and eval(): both plans, interpreted, against the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu
import pytest
import references
import torch
from torch import nn

from modelnew import layout
from modelnew.explain import explain
from modelnew.interpret import interpret
from modelnew.ir import Library, Plan, Pointwise
from modelnew.pipeline import planned
from modelnew.reference import Reference
from modelnew.render import render

IMAGE, ROWS = "torch.randn(4, 6, 5, n)", "torch.randn(5, n)"

# forward, inputs, __init__
MODELS = {
    "batch_norm": ("return self.norm(x)", IMAGE, "self.norm = nn.BatchNorm2d(6)"),
    "rows": ("return torch.relu(self.norm(x))", ROWS, "self.norm = nn.BatchNorm1d(n)"),
    "volume": (
        "return self.norm(x) * 2", "torch.randn(2, 3, 4, 5, n)", "self.norm = nn.BatchNorm3d(3)",
    ),
    "convolution": (
        "return F.hardswish(self.norm(self.conv(x)))",
        IMAGE,
        "self.conv, self.norm = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8)",
    ),
    "residual": (
        "return torch.relu(self.b(self.conv(torch.relu(self.a(x)))) + x)",
        IMAGE,
        "self.conv = nn.Conv2d(6, 6, 3, padding=1)\n"
        "self.a, self.b = nn.BatchNorm2d(6), nn.BatchNorm2d(6)",
    ),
    "without affine": (
        "return torch.tanh(self.norm(x))", IMAGE, "self.norm = nn.BatchNorm2d(6, affine=False)",
    ),
    "without statistics": (
        "return torch.tanh(self.norm(x))",
        IMAGE,
        "self.norm = nn.BatchNorm2d(6, track_running_stats=False)",
    ),
    "cumulative average": (
        "return torch.tanh(self.norm(x))", IMAGE, "self.norm = nn.BatchNorm2d(6, momentum=0.25)",
    ),
    "functional": (
        "return F.batch_norm(x, self.mean, self.var, training=self.training) + 1",
        IMAGE,
        "self.register_buffer('mean', torch.zeros(6))\nself.register_buffer('var', torch.ones(6))",
    ),
    "a value that is shared": (
        "y = self.norm(x)\nreturn y * torch.sigmoid(y.mean(1, keepdim=True)), y",
        IMAGE,
        "self.norm = nn.BatchNorm2d(6)",
    ),
    "a weight read twice": (
        "return self.norm(x) * self.norm.weight.sum() + self.norm.weight[:5, None]",
        IMAGE,
        "self.norm = nn.BatchNorm2d(6)",
    ),
    "a weight as a row": (
        "return self.norm(x) + self.norm.weight",
        "torch.randn(4, 7, 5, n)",
        "self.norm = nn.BatchNorm2d(7)",
    ),
    "branch": ("return x * 2 if self.training else torch.relu(x)", ROWS, ""),
}  # fmt: skip

Made = tuple[Reference, Plan, nn.Module, dict[str, Any]]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    def make(forward: str, inputs: str, init: str = "") -> Made:
        body = "\n    ".join(["def forward(self, x):", *forward.splitlines()])
        text = references.reference_text(body, inputs, init or "self.n = n", n=7)
        path = tmp_path / "model.py"
        path.write_text(text)
        ref, plan = planned(path, {})
        namespace = references.namespace(text)
        torch.manual_seed(0)
        return ref, plan, namespace["Model"](), namespace

    return make


def run(plan: Plan, model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return interpret(plan, model, {"x": x})


@pytest.mark.parametrize("name", MODELS)
def test_both_modes_over_several_steps(name: str, made: Callable[..., Made]) -> None:
    """Three steps of training, so that running statistics move, then evaluation, then training."""
    _, plan, model, namespace = made(*MODELS[name])
    mine = copy.deepcopy(model)
    for mode in (True, True, True, False, False, True, False):
        model.train(mode)
        mine.train(mode)
        (x,) = namespace["get_inputs"]()
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(run(plan, mine, x), expected, rtol=1e-5, atol=1e-5)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[key], value, msg=key)


@pytest.mark.parametrize("name", ["batch_norm", "rows", "volume", "convolution", "without affine"])
def test_evaluation_folds_batch_norm_into_one_kernel(name: str, made: Callable[..., Made]) -> None:
    _, plan, _, _ = made(*MODELS[name])
    assert plan.other is not None
    assert not plan.other.graph.training
    (kernel,) = (step for step in plan.other.steps if isinstance(step, Pointwise))
    assert "batch_norm" in [node.packet for node in kernel.body.statements]
    calls = [s.node.packet for s in plan.other.steps if isinstance(s, Library)]
    assert calls == (["conv2d"] if name == "convolution" else [])


def test_statistics_of_the_batch_stay_a_call(made: Callable[..., Made]) -> None:
    _, plan, _, _ = made(*MODELS["without statistics"])
    for mode in plan.modes:
        assert "batch_norm" in [s.node.packet for s in mode.steps if isinstance(s, Library)]


def test_momentum_is_no_argument_of_a_kernel(made: Callable[..., Made]) -> None:
    _, plan, _, _ = made(*MODELS["batch_norm"])
    assert {scalar.text for kernel in plan.kernels for scalar in kernel.scalars} == {
        "self.norm.eps"
    }


def test_modes_share_the_kernels_that_they_have_in_common(made: Callable[..., Made]) -> None:
    _, plan, _, _ = made(
        "return torch.tanh(self.drop(torch.sigmoid(x) * 2))", ROWS, "self.drop = nn.Dropout(0.5)"
    )
    names = [[s.name for s in mode.steps if isinstance(s, Pointwise)] for mode in plan.modes]
    assert names == [["sigmoid_mul", "tanh"], ["sigmoid_mul_tanh"]]
    _, plan, _, _ = made(
        "y = torch.relu(x)\nreturn self.norm(y @ y.t()), y", "torch.randn(7, 7)",
        "self.norm = nn.BatchNorm1d(7, track_running_stats=False)\nself.drop = nn.Dropout(0.5)",
    )  # fmt: skip
    assert [kernel.name for kernel in plan.kernels] == ["relu"]


def test_the_file_and_the_page_show_both_modes(made: Callable[..., Made]) -> None:
    ref, plan, _, _ = made(*MODELS["convolution"])
    text = render(ref, plan)
    assert "def _forward_in_training(self, x):" in text
    assert "def _forward_in_evaluation(self, x):" in text
    assert "# Plan in training, for the shapes it was traced with:" in text
    page = explain(ref, plan)
    assert "  in training\n" in page
    assert "  in evaluation\n" in page


def test_one_forward_where_the_modes_agree(made: Callable[..., Made]) -> None:
    ref, plan, _, _ = made("return torch.relu(x)", ROWS)
    assert plan.other is None
    assert "self.training" not in render(ref, plan)


# --- the file itself, its kernels included, on the CPU --------------------------------------------

BLOCK = (
    "y = torch.relu(self.a(self.first(x)))\nreturn torch.relu(self.b(self.second(y)) + x)",
    "torch.randn(3, 16, 9, n)",
    "self.first = nn.Conv2d(16, 16, 3, padding=1, bias=False)\n"
    "self.second = nn.Conv2d(16, 16, 3, padding=1)\n"
    "self.a, self.b = nn.BatchNorm2d(16), nn.BatchNorm2d(16)",
)


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Any:
    """A residual block and the model of its file, planned as if it were large."""
    folder = tmp_path_factory.mktemp("block")
    body = "\n    ".join(["def forward(self, x):", *BLOCK[0].splitlines()])
    text = references.reference_text(body, BLOCK[1], BLOCK[2], n=8)
    path = folder / "model.py"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        for constant in ("LAUNCH_MS", "WORTH_MS"):
            patched.setattr(layout, constant, 0.0)
        ref, plan = planned(path, {})
    assert {kernel.layout for kernel in plan.kernels} == {"", "contiguous", "channels_last"}
    solution = render(ref, plan)
    built = cpu.build([[solution]], Path(pytestconfig.cache.mkdir("cpu")))  # type: ignore[union-attr]
    namespace = references.namespace(text)
    torch.manual_seed(0)
    model = namespace["Model"]()
    mine = cpu.load_on_cpu(solution, folder, built)["ModelNew"]()
    mine.load_state_dict(model.state_dict())
    return model, mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", ["nothing", "input", "weights"])
@pytest.mark.parametrize("training", [True, False])
def test_the_file_gives_the_models_answer_and_strides(
    training: bool, last: str, dtype: torch.dtype, block: Any
) -> None:
    model, mine = (copy.deepcopy(m).train(training).to(dtype) for m in block)
    x = torch.randn(3, 16, 9, 8, dtype=dtype)
    if last == "input":
        x = x.contiguous(memory_format=torch.channels_last)
    if last == "weights":
        model, mine = (m.to(memory_format=torch.channels_last) for m in (model, mine))
    with torch.no_grad():
        found, expected = mine(x), model(x)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.stride() == expected.stride()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=tolerance, atol=tolerance)


def test_other_sizes_of_batch_and_image(block: Any) -> None:
    model, mine = (copy.deepcopy(m).eval() for m in block)
    for shape in ((1, 16, 9, 8), (5, 16, 7, 7), (2, 16, 1, 5)):
        with torch.no_grad():
            x = torch.randn(shape)
            torch.testing.assert_close(mine(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"generated for x\.shape\[1\] = \(16,\)"):
        mine(torch.randn(3, 8, 9, 8))


def test_values_a_channel_of_another_dtype_are_refused(block: Any) -> None:
    mine = copy.deepcopy(block[1]).eval()
    mine.first.to(torch.bfloat16)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"one value a channel of BFloat16"):
        mine(torch.randn(3, 16, 9, 8, dtype=torch.bfloat16))
