"""Which convolutions run in channels_last, and that the model's answer stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from torch.utils._pytree import tree_leaves

from modelnew import layout
from modelnew.interpret import interpret
from modelnew.ir import Library, Plan, Pointwise
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
        namespace: dict[str, Any] = {"__name__": "reference"}
        exec(compile(text, "model.py", "exec"), namespace)
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
    assert (call.value("benchmark"), call.value("deterministic")) == (True, True)
    with torch.no_grad():
        torch.testing.assert_close(interpret(plan, model, {"x": x}), model(x))
