"""Concatenations (modelnew/joins.py), operands that lie across the results (modelnew/strides.py),
and half types beside float32: plans, and solutions run on the CPU."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from merged import DTYPES, Collection, Inputs, built, moved, planned
from test_on_cpu import (
    channels_last,
    expanded_first,
    expanded_last,
    offset,
    reversed_dims,
    step_first,
    step_last,
    transposed,
    window,
)

from modelnew.ir import Joined
from modelnew.joins import MAX_PARTS
from modelnew.measure.nested import cast

Cases = Mapping[str, tuple[str, list[str]]]

GIVEN = Inputs(
    {
        "x": "torch.randn(n, 6, 8)",
        "y": "torch.randn(n, 6, 8)",
        "z": "torch.randn(n, 3, 8)",
        "w": "torch.randn(9, 1)",
        "row": "torch.randn(8)",
        "one": "torch.tensor(0.7)",
        "whole": "torch.randn(n, 9, 8)",
    },
    "self.slope = 0.3\nself.gain = nn.Parameter(torch.ones(1, 1))",
    n=11,
)
# Each with the steps of its plan that are no views.
CATS: Cases = {
    "two": ("torch.cat([torch.relu(x), y.sigmoid()], 1)", ["cat(relu, sigmoid)"]),
    "first dimension": ("torch.cat([torch.relu(x), y.sigmoid()])", ["cat(relu, sigmoid)"]),
    "last dimension": ("torch.cat([torch.relu(x), y.sigmoid()], -1)", ["cat(relu, sigmoid)"]),
    "ragged": ("torch.cat([torch.relu(x), z * 2, y[:, :1] - 1], 1)", ["cat(relu, mul, sub)"]),
    "an input": ("torch.cat([z, torch.relu(x)], -2)", ["cat(relu, clone)"]),
    "one of them": ("torch.cat([x * 2], 1)", ["cat(mul)"]),
    "more": (f"torch.cat([x * i for i in range({MAX_PARTS + 1})], 1) + 1",
             ["mul_mul_to_mul", "[cat]", "add"]),
    "inputs, used": ("torch.cat([x, z], 1) * 2 + 1", ["cat(mul_add, mul_add)"]),
    "row": ("torch.relu(torch.cat([x, z], 1) * row)", ["cat(mul_relu, mul_relu)"]),
    "column": ("torch.relu(torch.cat([x, z], 1) * w)", ["cat(mul_relu, mul_relu)"]),
    "number": ("torch.cat([x, z], 1) * one + self.slope", ["cat(mul_add, mul_add)"]),
    "parameter": ("torch.cat([x, z], 1) * self.gain", ["cat(mul, mul)"]),
    "whole": ("torch.cat([x, z], 1).sub(whole).tanh()", ["cat(sub_tanh, sub_tanh)"]),
    "itself": ("v = torch.cat([x, y], 1)\nreturn v * torch.sigmoid(v)",
               ["cat(sigmoid_mul, sigmoid_mul)"]),
    "nested": ("torch.cat([torch.cat([x + 1, y], 1), z.abs()], 1)", ["cat(add, abs, clone)"]),
    "part used too": ("v = torch.exp(x)\nreturn torch.cat([v, y], 1), v + 1",
                      ["cat(exp, clone)", "exp_add"]),
    "rotary": ("a, b = x.chunk(2, -1)\n"
               "return x * torch.cos(row) + torch.cat([-b, a], -1) * torch.sin(row)",
               ["cat(neg_sin_mul, sin_mul)", "cos_mul_add"]),
    "stacked first": ("torch.stack([torch.relu(x[:, 0]), y[:, 0]])", ["cat(relu, clone)"]),
    "stacked": ("torch.stack([torch.relu(x[:, 0]), y[:, 0]], 1)", ["cat(relu, clone)"]),
    "stacked last": ("torch.stack([-x, y * 2], -1).flatten(-2)", ["cat(neg, mul)"]),
    "stacked, used": ("torch.stack([x[:, 0], y[:, 1]], 1) * 2", ["cat(mul, mul)"]),
    "viewed": ("torch.cat([x * 2, y], 1)[:, 1:] + 1", ["cat(mul, clone)", "add"]),
    "empty part": ("torch.cat([x * 2, z[:, :0], y[:, :0] * 2], 1)", ["cat(mul, mul, clone)"]),
}  # fmt: skip
# Those that add nothing to what is run.
PLANNED: Cases = {
    "nested, used too": (
        "v = torch.cat([x + 1, y], 1)\nreturn torch.cat([v, z.abs()], 1), v.cumsum(1)",
        ["cat(add, clone)", "cat(abs, clone)", "[cumsum]"]),
    "part written in between": (
        "v = x.cumsum(1)\nfirst = v[:, 0]\nw = torch.cat([v, y], 1)\nfirst.mul_(2)\nreturn w * 2",
        ["[cumsum]", "[cat]", "[mul_]", "mul"]),
    "as many as there may be": (
        f"torch.cat([x * i for i in range({MAX_PARTS})], 1)", ["cat(mul_mul_to_mul)"]),
    "inputs alone": ("torch.cat([x, z], 1)", ["[cat]"]),
    "whole first": ("whole - torch.cat([x, z * 2], 1)", ["cat(mul, clone)", "sub"]),
    "two of the same parts": ("torch.cat([x, y], 2) + torch.cat([x * 2, y * 2], 2).abs()",
                              ["cat(mul_abs_add, mul_abs_add)"]),
    "two of others": ("torch.cat([x, y * 2], 1) * torch.cat([z, y, x[:, :3]], 1)",
                      ["cat(mul, clone)", "[cat]", "mul_2"]),
    "two users": ("v = torch.cat([x, y * 3], 1)\nreturn torch.relu(v), v * 2",
                  ["cat(relu, mul_relu)", "cat(mul, mul_mul)"]),
    "returned too": ("v = torch.cat([x, y * 3], 1)\nreturn torch.relu(v), v",
                     ["cat(mul, clone)", "relu"]),
    "nested otherwise": ("torch.cat([torch.cat([x + 1, y], 2), torch.cat([x, y * 2], 2)], 1)",
                         ["cat(add, clone)", "cat(mul, clone)", "[cat]"]),
    "one value twice": ("v = x * 2\nreturn torch.cat([v, v], 1) + 1", ["mul", "[cat]", "add"]),
    "part returned": ("v = torch.exp(x)\nreturn torch.cat([v, y], 1), v", ["exp", "[cat]"]),
    "part for a library call": ("v = torch.exp(x)\nreturn torch.cat([v, y], 1), v.cumsum(1)",
                                ["exp", "[cat]", "[cumsum]"]),
    "part of two": ("v = torch.exp(x)\nreturn torch.cat([v, y], 1), torch.cat([z, v], 1)",
                    ["cat(exp, clone)", "cat(exp, clone)"]),
    "shorter rotary": ("a, b = (x * 2).chunk(2, -1)\nreturn torch.cat([-b, a], -1)",
                       ["cat(mul, mul_neg)"]),
    "stacked inputs": ("torch.stack([x, y], 1)", ["[stack]"]),
    "views": ("torch.cat([torch.relu(x).flatten(1), y.flatten(1) * 2], 1)", ["cat(relu, mul)"]),
    "integers": ("torch.cat([(x > 0).int(), (y > 0).int()], 1) * z[:, :1]",
                 ["gt", "gt", "[cat]", "mul"]),
    "comparisons": ("torch.cat([x > 0, y > one], 1)", ["gt", "gt_2", "[cat]"]),
}  # fmt: skip

IMAGES = Inputs(
    {"x": "torch.randn(n, 4, 5, 6)", "y": "torch.randn(n, 4, 5, 6)", "z": "torch.randn(n, 3, 5, 6)"}
)
IMAGE_CATS: Cases = {
    "channels": ("torch.cat([x * 2, z.sigmoid(), y], 1)", ["cat(mul, sigmoid, clone)"]),
    "images": ("torch.cat([x + y, x * y])", ["cat(add_mul)"]),
    "columns": ("torch.cat([x.relu(), y * 2], 3) + 1", ["cat(relu_add, mul_add)"]),
}

HALF = "torch.randn(n, 33).half()"
MIXED = Inputs(
    {
        "x": "torch.randn(n, 33)", "h": HALF, "g": HALF, "b": "torch.randn(n, 33).bfloat16()",
        "row": "torch.randn(33).half()", "k": "torch.arange(33).to(torch.int8) - 16",
        "u": "torch.arange(33).to(torch.uint8)", "m": "torch.rand(n, 33) > 0.5",
    }
)  # fmt: skip
MIXTURES: Cases = {
    "half": ("x + h", ["add"]),
    "half first": ("h * x", ["mul"]),
    "bfloat16": ("torch.sigmoid(x) * b", ["sigmoid_mul"]),
    "two": ("x * h + g", ["mul_add"]),
    "of two kinds": ("x * h + b", ["mul_add"]),
    "row": ("torch.relu(x * row)", ["mul_relu"]),
    "integers": ("x * k + u, h * k", ["mul_add_mul"]),
    "mask": ("x * m + h", ["mul_add"]),
    "several results": ("return x * h, h * 2, g + h", ["mul_mul_add"]),
    "choice": ("torch.where(h > 0, x, h)", ["gt_where"]),
    "view": ("torch.relu(x * h).unsqueeze(1) + h[:, None]", ["mul_relu_add"]),
    "parts": ("torch.cat([x * 2, h * 2], 1)", ["cat(mul, mul_2)"]),
    "parts of two kinds": ("torch.cat([h * 2, b * 2], 1)", ["cat(mul, mul_2)"]),
    "half parts": ("torch.cat([h + 1, g * 2], 1)", ["cat(add, mul)"]),
    "copied part": ("torch.cat([x * h, b], 1)", ["cat(mul, clone)"]),
    "parts, used": ("torch.relu(torch.cat([x, h], 1))", ["cat(relu, relu_2)"]),
    "masked part": ("torch.cat([h * m, x + row], 1)", ["cat(mul, add)"]),
}

ACROSS = Inputs(
    {
        "x": "torch.randn(72, n)", "y": "torch.randn(n, 72)", "z": "torch.randn(2, n, 5, 70)",
        "w": "torch.randn(2, 70, 5, n)", "j": "torch.randn(2, 70, 9, 5)",
        "i": "torch.randn(2, 70, 9, 5).to(memory_format=torch.channels_last)",
        "h": "torch.randn(72, n).half()", "m": "torch.rand(72, n) > 0.5",
    },
    n=66,
)  # fmt: skip
# Each with the operands that lie across, by kernel.
TILES: Mapping[str, tuple[str, list[tuple[str, ...]]]] = {
    "transposed first": ("x.t() + y", [("y",)]),
    "transposed second": ("y * x.t()", [("t",)]),
    "in between": ("torch.relu(x).t() + y", [("y",)]),
    "transposed alone": ("x.t() * x.t()", [()]),
    "permuted": ("z.permute(0, 3, 2, 1) * w", [("w",)]),
    "permuted second": ("w + z.permute(0, 3, 2, 1)", [("permute",)]),
    "permuted 3-D": ("z[0].permute(2, 1, 0) - w[1]", [("select_1",)]),
    "copied part": ("torch.cat([y * 2, x.t()], 1)", [(), ("t",)]),
    "part": ("torch.cat([x.t() * y, y * 2], 1)", [("t",), ()]),
    "transposed parts": ("torch.cat([x.t() * 2, x.t()], 0)", [("t",), ("t",)]),
    "channels_last": ("i + j", [("j",)]),
    "channels_last second": ("torch.relu(j) * i", [("i",)]),
    "half": ("y + h.t()", [("t",)]),
    "mask": ("y * m.t()", [("t",)]),
    "several results": ("return y + x.t(), y * h.t()", [("t", "t_1")]),
}

MODES = Inputs(
    {"x": "torch.randn(n, 6, 8)", "y": "torch.randn(n, 6, 8)"},
    'self.norm = nn.BatchNorm1d(6)\nself.register_buffer("seen", torch.zeros(8))',
)
STATEFUL = """
before = self.seen * 2
if self.training:
    self.seen.add_(x.sum((0, 1)))
a = torch.cat([self.norm(x).relu(), y + before], 1)
return a * self.seen, torch.cat([torch.tanh(y), x + self.seen], -1)
"""

# Of shapes that are tried at run time, each in a model of its own.
SHAPES = {
    "parts": "torch.cat([torch.relu(x), y.sigmoid()], 1)",
    "one_kernel": "torch.cat([x * 2, x * y], 1)",
    "operand": "torch.relu(torch.cat([x, z], 1) * w)",
    "ones": "torch.stack([x[:, 0], y[:, 0]], 1) * w[:1]",
}
TEXTS = {
    "cats": GIVEN.text(*(body for body, _ in CATS.values())),
    "images": IMAGES.text(*(body for body, _ in IMAGE_CATS.values())),
    "mixed": MIXED.text(*(body for body, _ in MIXTURES.values())),
    "modes": MODES.text(STATEFUL),
    **{name: GIVEN.text(body) for name, body in SHAPES.items()},
    "across": ACROSS.text(*(body for body, _ in TILES.values())),
}
MISTAKE = ("ops.count = count;", "ops.count = count + 1;")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Collection:
    folder = tmp_path_factory.mktemp("joins")
    return built(TEXTS, folder, pytestconfig, ["operand"], MISTAKE)


ALL = {
    **{("cat", name): (GIVEN, case) for name, case in CATS.items()},
    **{("plan", name): (GIVEN, case) for name, case in PLANNED.items()},
    **{("images", name): (IMAGES, case) for name, case in IMAGE_CATS.items()},
    **{("mixed", name): (MIXED, case) for name, case in MIXTURES.items()},
}


@pytest.mark.parametrize("key", ALL, ids=": ".join)
def test_steps(key: tuple[str, str], tmp_path: Path) -> None:
    given, (body, steps) = ALL[key]
    subject = planned(given.text(body), tmp_path / "reference.py")
    assert subject.kernels == steps
    assert len(subject.views) == len(set(subject.views))
    subject.check_plan()


@pytest.mark.parametrize("name", TILES)
def test_across(name: str, tmp_path: Path) -> None:
    body, across = TILES[name]
    subject = planned(ACROSS.text(body), tmp_path / "reference.py")
    assert [kernel.across for kernel in subject.plan.kernels] == across
    subject.check_plan()


@pytest.mark.parametrize("name", ["cats", "images"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(name: str, collection: Collection, dtype: torch.dtype) -> None:
    subject = collection.subjects[name]
    for n in (subject.inputs()[0].shape[0], 2, 0):
        subject.judge(subject.inputs(dtype, n), dtype)


LAYOUTS = (offset, transposed, reversed_dims, step_first, step_last, window)


@pytest.mark.parametrize("name", ["cats", "images"])
def test_layouts(name: str, collection: Collection) -> None:
    """All laid out otherwise, the first, the second; a result lies as PyTorch's would."""
    subject = collection.subjects[name]
    for layout in (*LAYOUTS, expanded_first, expanded_last, channels_last):
        for places in ("", "0", "1"):
            subject.judge(moved(subject.inputs(), layout, places))


@pytest.mark.parametrize("dtype", DTYPES)
def test_across_values(collection: Collection, dtype: torch.dtype) -> None:
    subject = collection.subjects["across"]
    given = subject.inputs(dtype)
    given[6] = given[6].half() if dtype == torch.float32 else given[6]
    for layout in (torch.Tensor.contiguous, *LAYOUTS):
        subject.judge(moved(given, layout), dtype)
    for n in (0, 1, 9, 130):
        subject.judge(subject.inputs(dtype, n), dtype)


def test_tiles_are_in_the_text(collection: Collection) -> None:
    text = collection.texts["across"]
    kernels = collection.subjects["across"].plan.kernels
    tiled = {kernel.name for kernel in kernels if kernel.across}
    assert set(re.findall(r"(\w+)_tiled_kernel\(const Tiles", text)) == tiled
    assert "tiled_kernel" not in collection.texts["cats"]


def test_slope_is_live(collection: Collection) -> None:
    subject = collection.subjects["cats"]
    subject.judge(subject.inputs(), change=lambda model: setattr(model, "slope", 0.9))


def test_mixed(collection: Collection) -> None:
    """Inputs as in the trace, all of one dtype, and halves of other kinds than in the trace."""
    subject = collection.subjects["mixed"]
    for n in (8, 3, 0):
        own = subject.inputs(n=n)
        traced = [
            x.to(y.dtype) for x, y in zip(own, subject.ref.namespace["get_inputs"](), strict=True)
        ]
        subject.judge(traced)
        for dtype in DTYPES:
            subject.judge(cast(traced, dtype), dtype)
        for change in ({1: 2, 2: 1}, {1: 2}, {2: 0}, {0: 1}, {0: 2, 3: 0}, {3: 1, 4: 2}, {4: 0}):
            given = [x.to(DTYPES[change[i]]) if i in change else x for i, x in enumerate(traced)]
            subject.judge(given)


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_parts_of_two_dtypes(
    collection: Collection, first: torch.dtype, second: torch.dtype
) -> None:
    """Of a model that was traced in float32."""
    subject = collection.subjects["parts"]
    x, y, *rest = subject.inputs()
    subject.judge([x.to(first), y.to(second), *rest])


def test_parts_of_wrong_shapes_are_refused(collection: Collection) -> None:
    subject = collection.subjects["parts"]
    mine, theirs = subject.models()
    x, _, *rest = subject.inputs()
    for size in ((1, 6, 8), (11, 6, 1), (11, 6, 9), (6, 8), (8,), (2, 11, 6, 8)):
        y = torch.randn(size)
        with pytest.raises(RuntimeError, match=r"[Ss]izes|dimension"):
            theirs(x, y, *rest)
        with pytest.raises((RuntimeError, IndexError), match=r"shapes differ|range"):
            mine(x, y, *rest)
    subject.judge([x, torch.randn(11, 1, 8), *rest])


def test_results_of_one_kernel_keep_their_shapes(collection: Collection) -> None:
    subject = collection.subjects["one_kernel"]
    mine, _ = subject.models()
    x, y, *rest = subject.inputs()
    subject.judge([x, y[:, :1], *rest])
    with pytest.raises(RuntimeError, match="shape"):
        mine(x[:, :1], y, *rest)


@pytest.mark.parametrize("size", [(9, 1), (9, 8), (1, 1), (12, 1), (2, 1), (6, 1)])
def test_operand_of_another_size(collection: Collection, size: tuple[int, ...]) -> None:
    subject = collection.subjects["operand"]
    x, y, z, _, *rest = subject.inputs()
    if size[0] == 9:
        subject.judge([x, y, z, torch.randn(size), *rest])
    else:
        with pytest.raises(ValueError, match=r"ModelNew (was generated for w|got a size)"):
            subject.models()[0](x, y, z, torch.randn(size), *rest)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_operand_that_broadcast_in_the_trace(collection: Collection, rows: int) -> None:
    """A size of 1 beside parts of size 1: each would be as large as the whole."""
    subject = collection.subjects["ones"]
    x, y, z, _, *rest = subject.inputs()
    if rows < 3:
        subject.judge([x, y, z, torch.randn(1, 8).expand(rows, 8), *rest])
    else:
        subject.judge([x, y, z, torch.randn(rows, 1), *rest])


def test_two_modes(collection: Collection) -> None:
    """A buffer that is written in between keeps its place among the parts, in both modes."""
    subject = collection.subjects["modes"]
    assert subject.plan.other is not None
    for made in subject.plan.modes:
        assert sum(isinstance(step, Joined) for step in made.steps) == 2
    mine, theirs = subject.models()
    for dtype in (torch.float32, torch.float16):
        for train in (True, False, True):
            models = [model.to(dtype).train(train) for model in (mine, theirs)]
            given = subject.inputs(dtype)
            found, own = (model(*copy.deepcopy(given)) for model in models)
            torch.testing.assert_close(found, own)
            torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


RUN = """
operand, mistake = models
def inputs(n, dtype):
    x, y, z = (torch.randn(n, size, 8, dtype=dtype) for size in (6, 6, 3))
    w, row, whole = (torch.randn(size, dtype=dtype) for size in ((9, 1), 8, (n, 9, 8)))
    return x, y, z, w, row, torch.tensor(0.5), whole
with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        for n in (0, 1, 7, 66):
            x, y, z, *rest = inputs(n, dtype)
            operand(x, y, z, *rest)
            operand(x.mT.clone().mT, y, z[:, :1].expand(z.shape), *rest)
            operand(torch.randn(n, 7, 9, dtype=dtype)[:, 1:, 1:], y, z, *rest)
    print("clean", flush=True)
    mistake(*inputs(7, torch.float32))
    print("not seen")
"""


def test_address_sanitizer(collection: Collection) -> None:
    """No access outside of exactly sized buffers, and one element too many is seen."""
    collection.check_addresses(RUN)
