"""Which convolutions run in channels_last, and that the model's answer stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelnew import layout
from modelnew.interpret import interpret
from modelnew.ir import Library, Live, Plan, Pointwise
from modelnew.pipeline import planned

CONV = "self.conv = nn.Conv2d(16, 16, 3)"
TWO = "self.a, self.b = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 32, 3)"
IMAGES = "torch.randn(2, 16, 9, n)"

MODELS = {
    "alone": ("return self.conv(x)", "self.conv = nn.Conv2d(16, 16, 3, bias=False)"),
    "alone with bias": ("return self.conv(x)", CONV),
    "relu": ("return torch.relu(self.conv(x))", CONV),
    "two": ("return torch.relu(self.b(torch.relu(self.a(x))))", TWO),
    "two results": ("y = torch.relu(self.a(x))\nreturn y, self.b(y)", TWO),
    "input reused": ("return torch.relu(self.conv(x))[:, :, :5, :5] + x[:, :, :5, :5]", CONV),
    "pooled": ("return F.max_pool2d(torch.relu(self.conv(x)), 2)", CONV),
    "flattened": ("return torch.relu(self.conv(x)).flatten(1)", CONV),
    "normalized": ("return F.group_norm(torch.relu(self.conv(x)), 4)", CONV),
    "branches": ("return torch.cat([self.a(x), torch.relu(self.b(x))], 1)", TWO),
    "softmax": ("return torch.softmax(self.conv(x), dim=1) * 2", CONV),
    "transposed": (
        "return torch.sigmoid(self.conv(x))", "self.conv = nn.ConvTranspose2d(16, 16, 3)",
    ),
    "batch norm": (
        "return torch.relu(self.norm(self.conv(x)))",
        f"{CONV}\nself.norm = nn.BatchNorm2d(16)",
    ),
    "mean": ("return torch.relu(self.conv(x)).mean([2, 3])", CONV),
    "depthwise": (
        "return torch.relu(self.conv(x))", "self.conv = nn.Conv2d(16, 16, 3, groups=16)",
    ),
}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Plans a model of small tensors as if they were large."""

    def make(forward: str, init: str, inputs: str = IMAGES, large: bool = True) -> Any:
        body = "\n    ".join(["def forward(self, x):", *forward.splitlines()])
        text = references.reference_text(body, inputs, init, n=8)
        path = tmp_path / "model.py"
        path.write_text(text)
        with monkeypatch.context() as patched:
            if large:
                patched.setattr(layout, "LAUNCH_MS", 0.0)
                patched.setattr(layout, "WORTH_MS", 0.0)
            _, plan = planned(path, {})
        namespace = references.namespace(text)
        torch.manual_seed(0)
        return plan, namespace["Model"](), namespace["get_inputs"]()

    return make


def steps(plan: Plan) -> list[str]:
    """Each kernel in brackets, with the layout that it is told to write, each call by its name."""
    return [
        f"[{s.name}{' ' + s.layout if s.layout else ''}]"
        if isinstance(s, Pointwise)
        else s.node.packet
        for s in plan.steps
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("last", [False, True])
def test_the_answer_stays(name: str, last: bool, made: Callable[..., Any]) -> None:
    plan, model, (x,) = made(*MODELS[name])
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        found, expected = interpret(plan, model, {"x": x}), model(x)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # A copy in and a copy out cost more than they save.
        ("alone", ["conv2d"]),
        # The copy out saves the pass that would add the bias.
        (
            "alone with bias",
            [
                "[as_channels_last channels_last]",
                "conv2d",
                "[channel_bias_as_contiguous contiguous]",
            ],
        ),
        (
            "relu",
            ["[as_channels_last channels_last]", "conv2d", "[channel_bias_relu contiguous]"],
        ),
        (
            "two",
            [
                "[as_channels_last channels_last]",
                "conv2d",
                "[channel_bias_relu]",
                "conv2d",
                "[channel_bias_relu_2 contiguous]",
            ],
        ),
        (
            "pooled",
            [
                "[as_channels_last channels_last]",
                "conv2d",
                "[channel_bias_relu]",
                "max_pool2d",
                "[as_contiguous contiguous]",
            ],
        ),
        (
            "normalized",
            [
                "[as_channels_last channels_last]",
                "conv2d",
                "[channel_bias_relu contiguous]",
                "group_norm",
            ],
        ),
        (
            "softmax",
            [
                "[as_channels_last channels_last]",
                "conv2d",
                "movedim",
                "softmax",
                "movedim",
                "[mul contiguous]",
            ],
        ),
        (
            "mean",
            ["[as_channels_last channels_last]", "conv2d", "[channel_bias_relu]", "mean"],
        ),
    ],
)
def test_where_layouts_change(name: str, expected: list[str], made: Callable[..., Any]) -> None:
    plan, _, _ = made(*MODELS[name])
    assert steps(plan) == expected


def test_small_tensors_stay_as_they_are(made: Callable[..., Any]) -> None:
    plan, _, _ = made(*MODELS["two"], large=False)
    assert not any(isinstance(s, Pointwise) and s.layout for s in plan.steps)


@pytest.mark.parametrize(
    ("init", "inputs"),
    [
        ("self.conv = nn.Conv2d(3, 16, 3)", "torch.randn(2, 3, 9, n)"),
        ("self.conv = nn.Conv2d(16, 8, 3)", IMAGES),
        ("self.conv = nn.Conv2d(16, 16, 3, groups=2)", IMAGES),
        ("self.conv = nn.Conv2d(16, 16, (3, 7), groups=16)", IMAGES),
        ("self.conv = nn.Conv1d(16, 16, 3)", "torch.randn(2, 16, n)"),
    ],
)
def test_what_would_be_slower_or_of_another_precision(
    init: str, inputs: str, made: Callable[..., Any]
) -> None:
    plan, _, _ = made("return torch.relu(self.conv(x))", init, inputs)
    assert steps(plan)[0] in ("conv2d", "conv1d")


def test_what_the_reference_lays_out_so(made: Callable[..., Any]) -> None:
    """The result is channels_last where the input or the weight is."""
    plan, _, _ = made(*MODELS["relu"])
    last = plan.steps[-1]
    assert isinstance(last, Pointwise)
    assert [tensor.name for tensor in last.like] == ["x", "conv_weight"]


def test_the_plan_that_cudnn_finds_by_trying(made: Callable[..., Any]) -> None:
    plan, model, (x,) = made(
        "return torch.relu(self.conv(x))", "self.conv = nn.ConvTranspose3d(16, 16, 3)",
        "torch.randn(2, 16, 4, 5, n)",
    )  # fmt: skip
    (call,) = (s.node for s in plan.steps if isinstance(s, Library))
    assert call.op == "aten._convolution.default"
    at_traced_sizes = Live(layout.AT_TRACED_SIZES, True)
    assert {call.value("benchmark"), call.value("deterministic")} == {at_traced_sizes}
    with torch.no_grad():
        torch.testing.assert_close(interpret(plan, model, {"x": x}), model(x))


@pytest.mark.parametrize(("images", "moves"), [(2, False), (2000, True)])
def test_a_model_that_is_bound_by_its_host_stays_as_it_is(
    images: int, moves: bool, made: Callable[..., Any]
) -> None:
    """Half a gigabyte a tensor, or half a megabyte: 20 calls take the host 0.36 ms."""
    body = "\n".join(["for layer in self.layers:", "    x = torch.relu(layer(x))", "return x"])
    init = "self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(10))"
    plan, _, _ = made(body, init, f"torch.empty({images}, 16, 64, 64, device='meta')", large=False)
    assert ("[as_channels_last channels_last]" in steps(plan)) == moves


class Operands(TorchDispatchMode):
    """Notes the layout that convolutions read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.found.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("shape", "last"),
    [((2, 16, 9, 8), True), ((5, 16, 9, 8), True), ((2, 16, 9, 10), False), ((2, 16, 8, 8), False)],
)
def test_other_sizes_keep_the_layout_of_the_reference(
    shape: tuple[int, ...], last: bool, made: Callable[..., Any]
) -> None:
    """cuDNN may take TF32 there for channels_last alone; another batch changes nothing."""
    plan, model, _ = made(*MODELS["two"])
    x = torch.randn(shape)
    with torch.no_grad(), Operands() as operands:
        found = interpret(plan, model, {"x": x})
    assert operands.found == [last, last]
    torch.testing.assert_close(found, model(x))
    assert found.is_contiguous()


NORMS = f"{TWO}\nself.first, self.norm = nn.BatchNorm2d(16), nn.BatchNorm2d(32)"


@pytest.mark.parametrize(
    ("forward", "moves"),
    [
        ("return torch.relu(self.norm(self.b(torch.relu(self.a(x)))))", False),
        ("return self.norm(self.b(self.first(self.a(x))) * 2) * 3, x + 1", False),
        ("y = self.b(self.a(x))\nreturn F.instance_norm(torch.tanh(y) * y)", False),
        ("y = self.b(self.first(self.a(x)))\nreturn y", True),
        ("y = self.b(self.a(x))\nreturn torch.relu(self.norm(y) + y)", True),
    ],
)
def test_what_is_normalized_last_keeps_its_sums(
    forward: str, moves: bool, made: Callable[..., Any]
) -> None:
    plan, _, _ = made(forward, NORMS)
    assert any(isinstance(s, Pointwise) and s.layout for s in plan.steps) == moves
