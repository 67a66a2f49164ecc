"""Views between pointwise operators (modelnew/views.py): plans, and solutions run on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from merged import DTYPES, Collection, Inputs, Subject, built, moved, planned
from references import reference_text
from test_on_cpu import (
    expanded_first,
    expanded_last,
    offset,
    reversed_dims,
    step_first,
    step_last,
    transposed,
    window,
)
from torch import nn

from modelnew.interpret import interpret
from modelnew.plan import plan
from modelnew.reference import load
from modelnew.strides import PERMUTING
from modelnew.trace import trace
from modelnew.views import RESHAPING, RESIZING, STRIDED

GIVEN = Inputs(
    {
        "x": "torch.randn(n, 6, 8)",
        "y": "torch.randn(n, 6, 8)",
        "column": "torch.randn(6, 1)",
        "row": "torch.randn(8)",
        "one": "torch.tensor(0.7)",
        "count": "torch.arange(48).view(6, 8) - 20",
        "mask": "torch.rand(6, 8) > 0.5",
    },
    "self.slope = 0.3\nself.linear = nn.Linear(8, 8)",
    n=11,
)
# By operator, the views that are put between f and g of g(view(f(...))).
PERMUTED = {
    "adjoint": [".adjoint()"],
    "mT": [".mT"],
    "moveaxis": [".moveaxis(0, 1)"],
    "movedim": [".movedim(0, -1)", ".movedim((0, 1), (1, 2))"],
    "numpy_T": [".T"],
    "permute": [".permute(2, 0, 1)", ".permute(0, -1, 1)"],
    "swapaxes": [".swapaxes(0, 1)"],
    "swapdims": [".swapdims(1, 2)"],
    "t": ["[:, 1].t()", ".select(2, 3).t()"],
    "transpose": [".transpose(0, 2)", ".transpose(-1, -2)"],
}
IN_ORDER = {
    "broadcast_to": [".broadcast_to((2, x.shape[0], 6, 8))"],
    "chunk": [".chunk(2, 1)[1]", ".chunk(4, -1)[3]"],
    "diagonal": [".diagonal(0, 1, 2)", ".diagonal(1, 2, 1)"],
    "expand": [".expand(3, -1, -1, -1)", "[:, :1].expand(-1, 5, -1)"],
    "expand_as": [".expand_as(x.unsqueeze(0))"],
    "narrow": [".narrow(1, 1, 3)", ".narrow(-1, 4, 4)"],
    "select": [".select(1, 2)", "[..., -1]"],
    "slice": ["[:, 1::2]", "[..., :3]", "[:, -2:, 1:7:3]"],
    "split": [".split(4, 1)[1]", ".split(4, 1)[0]"],
    "split_with_sizes": [".split([1, 2, 3], 1)[2]"],
    "squeeze": [".squeeze(1)", "[:, :1].squeeze(1)", "[:, :1].squeeze()"],
    "tensor_split": [".tensor_split(4, 1)[0]", ".tensor_split((1, 3), 1)[1]"],
    "unbind": [".unbind(1)[3]"],
    "unfold": [".unfold(2, 3, 2)", ".unfold(1, 1, 2)"],
    "unsqueeze": [".unsqueeze(1)", "[..., None]"],
}
RESHAPED = {
    "flatten": [".flatten()", ".flatten(1)", ".flatten(0, 1)"],
    "reshape": [".reshape(-1)", ".reshape(x.shape[0], 4, 12)"],
    "reshape_as": [".reshape_as(x.flatten(1))"],
    "unflatten": [".unflatten(1, (2, 3))", ".unflatten(-1, (2, -1))"],
}
VIEWED = {
    "view": [".view(-1)", ".view(x.shape[0], 2, 3, 8)", ".view(x.size(0) * 6, 8)"],
    "view_as": [".view_as(x.flatten(1))"],
}
FAMILIES = {"permuted": PERMUTED, "in_order": IN_ORDER, "reshaped": RESHAPED, "viewed": VIEWED}
# Row, column and a number beside a whole operand; views that depend on how a value lies have
# whole ones alone, since an expanded one would have to be copied.
BROADCAST, WHOLE = "torch.relu(x * column + row * one)", "torch.sigmoid(x * one + y)"


def between(family: str) -> list[str]:
    start = BROADCAST if family in ("permuted", "in_order") else WHOLE
    return [f"{start}{view} + 1" for views in FAMILIES[family].values() for view in views]


# Each with the steps of its plan that are no views.
OTHERS: Mapping[str, tuple[str, list[str]]] = {
    "chain": (f"{BROADCAST}[:, 1::2].mT.unsqueeze(0).unfold(2, 4, 4) + 1",
              ["mul_mul_add_relu_add"]),
    "chain with a reshape": (f"{WHOLE}.flatten(1).unflatten(1, (4, 12)).mT[:, 1:] * 2",
                             ["mul_add_sigmoid_mul"]),
    "views at several depths": (
        "torch.relu(torch.tanh(x * one).mT + column.mT)[:, 2:5] * column.mT",
        ["mul_tanh_add_relu_mul"]),
    "view of what a view gave, beside a row": (
        "torch.relu(torch.relu(x).chunk(2, 1)[1].mT * row[:3]).unsqueeze(1) + 1",
        ["relu_mul_relu_add"]),
    "gate": ("a, b = torch.tanh(x * row).chunk(2, -1)\nreturn a * torch.sigmoid(b)",
             ["mul_tanh_mul_tanh_sigmoid_mul"]),
    "two halves": ("a, b = torch.tanh(x).split(3, 1)\nreturn a + 1, b * 2",
                   ["tanh_add", "tanh_mul"]),
    "one view twice": ("v = torch.relu(x * one)\nreturn v.mT * torch.tanh(v.mT)",
                       ["mul_relu_mul_relu_tanh_mul"]),
    "two views": ("v = torch.relu(x)\nreturn v[:, :3] * v[:, 3:]", ["relu_relu_mul"]),
    "view and itself": ("v = torch.relu(x)\nreturn v.mT + 1, v * 2", ["relu_add", "relu_mul"]),
    "view beside itself": ("v = torch.relu(x[..., :6])\nreturn v + v.mT", ["relu_relu_add"]),
    "returned too": ("v = torch.relu(x)\nreturn v, v.mT + 1", ["relu", "add"]),
    "view returned too": ("v = torch.relu(x).mT\nreturn v, v + 1", ["relu", "add"]),
    "library call too": ("v = torch.relu(x)\nreturn v.mT + 1, v.cumsum(1)",
                         ["relu", "add", "[cumsum]"]),
    "view for a library call": ("v = torch.relu(x)\nreturn v.mT.cumsum(1), v + 1",
                                ["relu_add", "[cumsum]"]),
    "library call first": ("return torch.relu(self.linear(x)).unflatten(2, (2, 4)) * one",
                           ["[linear]", "relu_mul"]),
    "written in between": (
        "v = x.cumsum(1)\nw = torch.relu(v)\nt = w.mT\nw.add_(1)\nreturn t * 2, w",
        ["[cumsum]", "relu", "[add_]", "mul"]),
    "operand written in between": (
        "v = x.cumsum(1)\nfirst = v[:, 0]\nw = torch.relu(v)\nfirst.mul_(2)\nreturn w.mT + v.mT",
        ["[cumsum]", "relu", "[mul_]", "add"]),
    "comparisons": ("return (x > column).mT & (x * 2 < row).mT, ~(y > one)[:, ::2]",
                    ["gt_mul_lt_bitwise_and", "gt_bitwise_not"]),
    "masks": ("v = x.masked_fill(mask, -1.0)\nreturn v.mT + 1, torch.where((x > y).mT, v.mT, one)",
              ["masked_fill", "add_gt_where"]),
    "masks as numbers": ("return torch.relu(x * mask)[..., 1:] * 2", ["mul_relu_mul"]),
    "integers": ("return (x * count).mT + 1, (count > 3).t() & mask.t()",
                 ["mul_add", "[gt]", "bitwise_and"]),
    "attributes": ("return F.leaky_relu(x, self.slope).mT * self.slope", ["leaky_relu_mul"]),
    "without dimensions": ("return torch.relu(one * 2).expand(3) + 1", ["mul_relu", "add"]),
    "no operand as large": ("return (row + column).mT * x.mT", ["add", "mul"]),
    "larger than its operand": ("return torch.relu(row).expand(6, 8) + column", ["relu_add"]),
    # Copies of expanded operands would be more traffic than the value itself.
    "reshape that copies": ("return torch.relu(x * row).mT.reshape(x.shape[0], -1) + 1",
                            ["mul", "relu_add"]),
    "reshape of an expanded operand": ("return torch.relu(x + column).flatten(1) * 2",
                                       ["add", "relu_mul"]),
    "other dtype": ("return (x.half() * 2).view(torch.bfloat16) + 1", ["mul", "add"]),
}  # fmt: skip
TEXTS = {
    **{family: GIVEN.text(*between(family)) for family in FAMILIES},
    "others": GIVEN.text(*(body for body, _ in OTHERS.values())),
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Collection:
    return built(TEXTS, tmp_path_factory.mktemp("views"), pytestconfig, ["in_order"])


def test_all_views_are_tried() -> None:
    own = {"part"}  # of a concatenation: see test_joins.py
    unsafe = {"unsafe_view"}  # in no model's own text
    assert {*PERMUTED, *IN_ORDER} | own == {*STRIDED}
    assert {*RESHAPED, *VIEWED} | unsafe == {*RESHAPING}
    assert {*PERMUTED} == {*PERMUTING}
    assert not {*RESIZING} & {*PERMUTING}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_kernel(family: str, tmp_path: Path) -> None:
    """Each by itself: one kernel, and else only views, none of them twice."""
    whole = family in ("reshaped", "viewed")
    wanted = "mul_add_sigmoid_add" if whole else "mul_mul_add_relu_add"
    for number, body in enumerate(between(family)):
        subject = planned(GIVEN.text(body), tmp_path / f"view_{number}.py")
        assert subject.kernels == [wanted], body
        assert len(subject.views) == len(set(subject.views)) > 0, body
        subject.check_plan()


@pytest.mark.parametrize("name", OTHERS)
def test_steps(name: str, tmp_path: Path) -> None:
    body, steps = OTHERS[name]
    subject = planned(GIVEN.text(body), tmp_path / "reference.py")
    assert subject.kernels == steps
    assert len(subject.views) == len(set(subject.views))
    subject.check_plan()


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(name: str, collection: Collection, dtype: torch.dtype) -> None:
    subject = collection.subjects[name]
    for n in (11,) if name == "others" else (11, 6, 0):  # some of them have calls of one size
        subject.judge(subject.inputs(dtype, n), dtype)


LAYOUTS = (offset, transposed, reversed_dims, step_first, step_last, window)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(name: str, collection: Collection, dtype: torch.dtype) -> None:
    """All operands laid out otherwise, the first, the second."""
    subject = collection.subjects[name]
    for layout in LAYOUTS:
        for places in ("", "0", "1"):
            if name == "viewed" and layout in (transposed, reversed_dims) and places != "1":
                continue  # the reference itself refuses
            subject.judge(moved(subject.inputs(dtype), layout, places), dtype)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("layout", [expanded_first, expanded_last])
def test_expanded(name: str, collection: Collection, layout: object) -> None:
    """Of several dimensions of stride 0 PyTorch lets their order decide, which a view changes."""
    subject = collection.subjects[name]
    for places in ("", "0", "1"):
        given = moved(subject.inputs(), layout, places)  # type: ignore[arg-type]
        subject.judge(given, strides=name not in ("permuted", "others"))


@pytest.mark.parametrize("name", ["permuted", "reshaped"])
def test_one_image(name: str, collection: Collection) -> None:
    subject = collection.subjects[name]
    for dtype in DTYPES:
        subject.judge(subject.inputs(dtype, 1), dtype)


def test_attributes_are_live(collection: Collection) -> None:
    def change(model: nn.Module) -> None:
        model.slope = 0.6

    subject = collection.subjects["others"]
    subject.judge(subject.inputs(), change=change)


def test_operands_that_broadcast_at_run_time(collection: Collection) -> None:
    subject = collection.subjects["permuted"]
    x, y, *rest = subject.inputs(n=6)
    for size in ((6, 1, 8), (1, 6, 8), (6, 6, 1), (1, 1, 1)):
        subject.judge([x, torch.randn(size), *rest])
        subject.judge([x, y, torch.randn(size), *rest[1:]])


RESIZED = [
    "squeeze()", "squeeze(1)", "diagonal(0, 1, 2)", "flatten(0, 1)", "tensor_split(2, 1)[1]",
    "narrow(1, 1, 1)", "unbind(1)[1]", "chunk(2, 1)[1]",
]  # fmt: skip


@pytest.mark.parametrize("view", [*RESIZED, "__getitem__((slice(None), slice(1, None)))"])
def test_nothing_is_silently_of_another_shape(view: str, tmp_path: Path) -> None:
    """Whatever broadcasts at run time: the reference's answer, or an error."""
    subject = planned(
        GIVEN.text(f"(torch.relu(x) * one + y).{view} + 1"), tmp_path / "reference.py"
    )
    answers = 0
    for size in ((6, 6, 8), (6, 1, 8), (6, 2, 8), (1, 2, 8), (1, 6, 1), (1, 1, 8)):
        for other in ((6, 6, 8), (6, 1, 8), (6, 2, 8), (1, 2, 8), (1, 1, 8)):
            answers += answer_or_error(subject, size, other)
    assert answers >= 3


def answer_or_error(subject: Subject, size: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the plan has an answer for x and y of these sizes, which is then the model's."""
    rest = subject.inputs()[2:]
    given = dict(zip(GIVEN.drawn, (torch.randn(size), torch.randn(other), *rest), strict=True))
    model = subject.ref.namespace["Model"]()
    try:
        own = model(**given)
        found = interpret(subject.plan, model, given)
    except (RuntimeError, IndexError):
        return False
    torch.testing.assert_close(found, own)
    return True


def test_copies_on_both_sides_of_a_write(tmp_path: Path) -> None:
    """The same view of one value may be a copy, which a write in between makes another one."""
    body = "v = x.cumsum(1)\na = v.mT.flatten(1)\nv.add_(1)\nreturn torch.relu(a) + v.mT.flatten(1)"
    planned(GIVEN.text(body), tmp_path / "reference.py").check_plan()


def test_items_of_a_library_call_that_gives_several(tmp_path: Path) -> None:
    """What sort gives has no strides that PyTorch says before it runs."""
    text = reference_text(
        """
        def forward(self, x):
            values, places = torch.sort(x, 1)
            return torch.relu(values).t() + 1, torch.tanh(values * 2).reshape(-1) * 3, places
        """,
        "torch.randn(n, n)",
        n=7,
    )
    path = tmp_path / "several.py"
    path.write_text(text)
    made = plan(trace(load(path)))
    assert len(made.kernels) == 2
    x = torch.randn(7, 7)
    found = interpret(made, nn.Module(), {"x": x})
    values, places = torch.sort(x, 1)
    expected = torch.relu(values).t() + 1, torch.tanh(values * 2).reshape(-1) * 3, places
    assert all(map(torch.equal, found, expected))
