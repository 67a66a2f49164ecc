"""Flips, rolls, paddings and triangles in kernels (modelnew/moves.py, modelnew/places.py): plans,
and solutions run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cpu
import pytest
import torch
from merged import DTYPES, Collection, Inputs, Subject, moved, planned
from test_on_cpu import LAYOUTS
from test_solutions import asked, compiled, needs_nvcc, ptx_faults

from modelnew import layout
from modelnew.emit import kernel
from modelnew.explain import page
from modelnew.measure.nested import cast
from modelnew.moves import moves
from modelnew.render import render

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
    "self.fill = 0.3\nself.shift = 2\nself.conv = nn.Conv1d(6, 6, 3, padding=1)\n"
    "self.bias = nn.Parameter(torch.randn(6))",
    n=5,
)
F_OF = "torch.relu(x * column + row * one)"
BY = "mul_mul_add_relu"
# Before and behind a pointwise operator: each is one kernel. `%s` stands for the operand.
FLIPS = ["%s.flip(0)", "%s.flip(-1)", "%s.flip(0, 2)", "%s.flip(0, 1, 2)"]
ROLLS = [
    "%s.roll(1, 0)", "%s.roll(-3, -1)", "%s.roll(-25, 1)",
    "%s.roll((1, -11), (0, -1))", "%s.roll((2, 0, 3), (2, 1, 0))", "%s.roll(self.shift, 1)",
]  # fmt: skip
PADS = [
    "F.pad(%s, (2, 3), mode='reflect')", "F.pad(%s, (7, 0), mode='reflect')",
    "F.pad(%s, (0, 3, 5, 0), mode='reflect')", "F.pad(%s, (0, 0), mode='reflect')",
    "F.pad(%s.unsqueeze(0), (1, 0, 0, 2, 1, 4), mode='reflect')",
    "F.pad(%s, (9, 0), mode='replicate')", "F.pad(%s, (2, 3, 0, 11), mode='replicate')",
    "F.pad(%s.unsqueeze(0), (1, 0, 0, 2, 7, 1), mode='replicate')",
    "F.pad(%s, (8, 8), mode='circular')", "F.pad(%s, (0, 3, 6, 0), mode='circular')",
    "F.pad(%s.unsqueeze(0), (1, 0, 0, 2, 5, 1), mode='circular')",
    "nn.ReflectionPad1d(3)(%s)", "nn.CircularPad2d((1, 2, 3, 4))(%s)",
]  # fmt: skip
CONSTANTS = [
    "F.pad(%s, (2, 3))", "F.pad(%s, (0, 1), value=-1.5)", "F.pad(%s, (0, 0, 4, 0), value=1)",
    "F.pad(%s, (2, 2), value=float('-inf'))", "F.pad(%s, (0, 1, 2, 0, 1, 2), value=self.fill)",
    "nn.ZeroPad2d((1, 2, 0, 3))(%s)",
]  # fmt: skip
TRIANGLES = [
    f"torch.{name}(%s, {diagonal})" for name in ("tril", "triu") for diagonal in (0, 2, -3)
] + ["%s.mT.tril(1)", "%s[0].triu()", "%s[:, 0].tril(-1)"]

# Each with the steps of its plan that are no views.
OTHERS: Mapping[str, tuple[str, list[str]]] = {
    "move first": ("x.flip(0) * 2, F.pad(y, (2, 1), mode='reflect') * 2", ["mul", "mul_2"]),
    "place first": ("torch.tril(x) * 2, F.pad(y, (2, 1)) * 2",
                    ["lower_triangle_mul", "padded_mul"]),
    "place last": ("torch.tril(x * 2), F.pad(y * 2, (2, 1))",
                   ["mul_lower_triangle", "mul_padded"]),
    "rows moved": ("x.flip(1) * row.flip(0) + column.roll(1, 0)", ["mul_add"]),
    "views before": ("x.mT[:, 1:].unsqueeze(1).roll(1, 2) * 2", ["mul"]),
    "views behind": ("torch.relu(x).unsqueeze(1).flip(0) * 2", ["relu_mul"]),
    "view of a move": ("x.roll(1, 1).mT * 2", ["[roll]", "mul"]),
    "several of one": ("x.flip(0) * x.roll(1, 0) + x - x.flip(0, 2)", ["mul_add_sub"]),
    "masks": ("torch.where(mask.flip(0), x, x.flip(2)), x * mask.roll(1, 1)", ["where_mul"]),
    "masks alone": ("mask.flip(0) & mask.roll(-1, 1)", ["bitwise_and"]),
    "integers": ("x * count.flip(1) + 1", ["mul_add"]),
    "returned too": ("v = x.flip(0)\nreturn v, v * 2", ["[flip]", "mul"]),
    "library call too": ("v = x.flip(0)\nreturn v.cumsum(0), v * 2",
                         ["[flip]", "[cumsum]", "mul"]),
    "before a library call": ("torch.relu(x * y).flip(0).cumsum(0)", ["mul_relu", "[cumsum]"]),
    "twice": ("torch.relu(x.flip(0).roll(1, 1)) + 1", ["[flip]", "relu_add"]),
    "of another kernel's": ("v = torch.relu(x)\nreturn v, v.flip(0) + v", ["relu", "add"]),
    "of another kernel's padded": ("v = x * y\nreturn v, F.pad(v, (1, 2)) + 1",
                                   ["mul", "padded_add"]),
    "written in between": ("v = x.cumsum(1)\nw = v.flip(0)\nv.add_(1)\nreturn w * 2 + v",
                           ["[cumsum]", "[flip]", "[add_]", "mul_add"]),
    "padded, then written": (
        "v = x.cumsum(1)\nfirst = v[0]\nw = F.pad(v * 2, (1, 0))\nfirst.add_(1)\n"
        "return w + v[:, :1, :1]",
        ["[cumsum]", "mul_padded", "[add_]", "add"]),
    "padding of a padding": ("F.pad(F.pad(x * 2, (1, 1)), (2, 1), value=1.0) + 1",
                             ["mul_padded", "padded_add"]),
    "triangle of a padding": ("torch.tril(F.pad(x * 2, (1, 0), value=3.0), 1) + 1",
                              ["mul_padded_lower_triangle_add"]),
    "padding of a triangle": ("F.pad(torch.triu(x * 2), (0, 1)) + 1",
                              ["mul_upper_triangle", "padded_add"]),
    "band": ("torch.tril(torch.triu(x * 2, -2), 2) + 1", ["mul_upper_triangle_lower_triangle_add"]),
    "smaller": ("x * torch.tril(row * column) + F.pad(row[1:] * 2, (1, 0))",
                ["mul_lower_triangle_mul_mul_padded_add"]),
    "triangle by itself": ("torch.tril(x), F.pad(x, (1, 1))", ["[tril]", "[pad]"]),
    "triangle returned": ("v = torch.tril(x)\nreturn v, v + 1", ["lower_triangle_add"]),
    "bools": ("F.pad(mask, (1, 1)) & F.pad(mask, (1, 1), value=True)",
              ["[pad]", "[pad]", "bitwise_and"]),
    "taken away": (f"F.pad({F_OF}, (-1, 3)) * 2", [BY, "[pad]", "mul"]),
    "nothing padded": (f"F.pad({F_OF}, (0, 0)) * 2", [BY, "[pad]", "mul"]),
    "reflected, taken away": (f"F.pad({F_OF}, (-1, 3), mode='reflect') * 2", [BY, "[pad]", "mul"]),
    "rolled as one": (f"{F_OF}.roll(3) * 2", [BY, "[roll]", "mul"]),
    "rolled twice along one": (f"{F_OF}.roll((1, 2), (1, -2)) * 2", [BY, "[roll]", "mul"]),
    "part": ("torch.cat([torch.relu(x * y).flip(0), y * 2], 1)",
             ["mul_relu", "[flip]", "cat(mul, clone)"]),
    "padded part": ("torch.cat([F.pad(torch.relu(x), (1, 1)), F.pad(y, (0, 2)) * 2], 1)",
                    ["relu", "[pad]", "[padding]", "padded_mul", "[cat]"]),
    # One value a channel is read by another index than its own.
    "channels": ("torch.relu(F.conv1d(x, self.conv.weight, self.bias.flip(0))) * 2",
                 ["[flip]", "[conv1d]", "channel_bias_relu_mul"]),
}  # fmt: skip
# What runs: kernels that have many of the above in common.
RUN: Mapping[str, list[str]] = {
    "same size": [
        f"{F_OF}.flip(0, 2) + x.roll((1, -11), (0, -1)) * x.flip(1) - y.roll(-3, 1) + x",
        "torch.where(mask.flip(0), x.mT.contiguous().mT.flip(2), count.roll(1, 1) * x)",
        "(x.flip(1) > row.flip(0)) & mask.roll(1, 0)",
    ],
    "paddings": [
        "F.pad(x * row, (2, 3), mode='reflect') + F.pad(x, (5, 0), mode='replicate')"
        " * F.pad(x * column, (1, 4), mode='circular') - F.pad(y, (0, 5), value=float('-inf'))",
        "F.pad(x, (0, 4, 1, 0), mode='reflect') + F.pad(y * one, (3, 1, 0, 1), value=self.fill)"
        " * F.pad(x, (4, 0, 1, 0), mode='circular') - F.pad(x, (2, 2, 1, 0), mode='replicate')",
        "F.pad(x * row + y, (8, 0)) * 2",
    ],
    "volumes": [
        "F.pad(x.unsqueeze(0), (1, 0, 0, 2, 1, 0), mode='reflect') +"
        " F.pad(y.unsqueeze(0), (0, 1, 1, 1, 0, 1), mode='replicate') *"
        " F.pad(x.unsqueeze(0), (1, 0, 0, 2, 0, 1), mode='circular')"
        " + F.pad(x, (1, 0, 2, 0, 0, 1), value=2)",
    ],
    "triangles": [
        f"torch.tril({F_OF}) + torch.triu(x, 2) * torch.tril(y.mT, -3).mT",
        "x * torch.tril(row * column, 1) + F.pad(row[1:] * 2, (1, 0))",
        "torch.triu(F.pad(x * y, (0, 2)), 1) + 1",
    ],
    "others": [
        OTHERS[name][0]
        for name in ("padded part", "channels", "written in between", "of another kernel's")
    ],
}  # fmt: skip
TEXTS = {name: GIVEN.text(*bodies) for name, bodies in RUN.items()}
SMALL = Inputs({"x": "torch.randn(n, 8, 16)"}, n=3)
FLIP = SMALL.text("x.flip(1) * 2")
MOVED = SMALL.text("x.flip(1, 2) * x.roll((1, 2), (0, 1)) + x")
PADDED = SMALL.text("torch.tril(F.pad(x * 2, (1, 2, 1, 0)) + 1)")
# Mistakes planted in the text of "flip", which must be seen.
MISTAKES = {
    "flip/end": ("map.size - 1 - i", "map.size - i"),
    "flip/alignment": ("if (from % kVec == 0) return", "return"),
}
ADDRESS = ["flip", "flip/end"]


def build(texts: Mapping[str, str], folder: Path, *, address: bool = False) -> Path:
    others = [text for name, text in texts.items() if name not in ADDRESS]
    groups = [[texts[name] for name in ADDRESS], others[::2], others[1::2]]
    return cpu.build(groups, folder, address={0} if address else ())


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Collection:
    """The solutions, and those with mistakes, in one extension."""
    assert pytestconfig.cache is not None
    cache, folder = pytestconfig.cache.mkdir("solutions_on_cpu"), tmp_path_factory.mktemp("moves")
    subjects = {name: planned(text, folder / f"{name}.py") for name, text in TEXTS.items()}
    subjects["flip"] = planned(FLIP, folder / "flip.py")
    texts = {name: render(subject.ref, subject.plan) for name, subject in subjects.items()}
    for name, (right, wrong) in MISTAKES.items():
        subjects[name] = subjects["flip"]
        assert texts["flip"].count(right) == 1
        texts[name] = texts["flip"].replace(right, wrong)
    extension = build(texts, cache)
    for name, text in texts.items():
        model_new = cpu.load_on_cpu(text, cache, extension)["ModelNew"]
        subjects[name] = replace(subjects[name], model_new=model_new)
    return Collection(subjects, texts, ADDRESS, cache)


def shaped(n: int, h: int, w: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """The inputs for images of another size than the traced one."""
    torch.manual_seed(n + h + w)
    mask, count = torch.rand(h, w) > 0.5, torch.arange(h * w).view(h, w) - 20
    numbers = [torch.randn(n, h, w), torch.randn(n, h, w), torch.randn(h, 1), torch.randn(w)]
    return [*cast([*numbers, torch.tensor(0.7)], dtype), count, mask]


# --- plans ---------------------------------------------------------------------------------------


def judge_plan(body: str, steps: list[str], path: Path) -> Subject:
    subject = planned(GIVEN.text(body), path)
    assert subject.kernels == steps, body
    subject.check_plan()
    return subject


@pytest.mark.parametrize("move", [*FLIPS, *ROLLS, *PADS])
def test_moves_are_read_in_place(move: str, tmp_path: Path) -> None:
    """Each operand by itself."""
    subject = judge_plan(f"{move % F_OF} * 2", [f"{BY}_mul"], tmp_path / "reference.py")
    (step,) = subject.plan.kernels
    found = [access.node for access in step.reads if access.tensor.shape]
    assert all(node and moves(node) for node in found)


@pytest.mark.parametrize("move", [*CONSTANTS, *TRIANGLES])
def test_places_are_steps(move: str, tmp_path: Path) -> None:
    name = "lower_triangle" if "tril" in move else "upper_triangle" if "triu" in move else "padded"
    judge_plan(f"{move % F_OF} * 2", [f"{BY}_{name}_mul"], tmp_path / "reference.py")


@pytest.mark.parametrize("name", OTHERS)
def test_steps(name: str, tmp_path: Path) -> None:
    """And what stays a call of PyTorch's is said to be one."""
    body, steps = OTHERS[name]
    subject = judge_plan(body, steps, tmp_path / "reference.py")
    calls = {step[1:-1] for step in steps if step.startswith("[")}
    text = page(subject.plan)
    assert all(re.search(rf"PyTorch \w+\.{call}\.", text) for call in calls), text
    for call in {"flip", "roll", "pad", "tril", "triu"} - calls:
        assert not re.search(rf"PyTorch \w+\.{call}\.", text), text


def test_kernels_that_are_told_a_layout_know_no_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "LAUNCH_MS", 0.0)  # as if the images were large
    monkeypatch.setattr(layout, "WORTH_MS", 0.0)
    conv = "self.conv = nn.Conv2d(16, 16, 3, padding=1)"
    images = Inputs({"x": "torch.randn(2, 16, 9, n)"}, conv, n=8)
    body = """
        v = F.pad(torch.relu(self.conv(x)), (1, 1), value=0.5) * 2
        v = torch.relu(self.conv(v))
        return torch.tril(v * 2) + 1, torch.relu(self.conv(v)).flip(3) + 1
    """
    subject = planned(images.text(body), tmp_path / "reference.py")
    told = [step for step in subject.plan.kernels if step.layout]
    assert any(step.layout == "channels_last" for step in told)
    assert not any(access.node for step in told for access in step.reads)
    names = " ".join(step.name for step in subject.plan.kernels)
    assert "padded" not in names
    assert "triangle" not in names
    assert {"[pad]", "[tril]"} <= {*subject.kernels}
    subject.check_plan()


@pytest.mark.parametrize(
    "term", ["x{}.flip(0, 1)", "F.pad(x{} * 2, (1, 1, 1, 1))", "torch.tril(x{} * 2)"]
)
def test_coordinates_count_as_operands(term: str, tmp_path: Path) -> None:
    """A kernel's parameters have to fit into 4 KB."""
    given = Inputs({f"x{i}": "torch.randn(n, 8)" for i in range(40)}, n=6)
    text = given.text(" + ".join(map(term.format, range(40))))
    subject = planned(text, tmp_path / "reference.py")
    for step in subject.plan.kernels:
        k = kernel(step)
        assert k.count <= 48
        assert 76 * k.count + 24 * len(k.mapped) + 128 <= 4096
    assert 1 < len(subject.plan.kernels) < 20
    subject.check_plan()


# --- values --------------------------------------------------------------------------------------

ELASTIC = ("same size", "paddings", "triangles")


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(name: str, collection: Collection, dtype: torch.dtype) -> None:
    subject = collection.subjects[name]
    if name == "others" and dtype != torch.float32:
        return  # a convolution of half types adds its bias before it rounds
    for n in (5, 6, 2):
        subject.judge(subject.inputs(dtype, n), dtype)


@pytest.mark.parametrize("name", ELASTIC)
@pytest.mark.parametrize("shape", [(5, 6, 16), (3, 9, 64), (4, 8, 13), (2, 5, 8), (1, 7, 9)])
def test_sizes(name: str, collection: Collection, shape: tuple[int, int, int]) -> None:
    """Rows of whole packs and ragged ones, fewer images than in the trace, one."""
    for dtype in (torch.float32, torch.bfloat16):
        collection.subjects[name].judge(shaped(*shape, dtype), dtype)


@pytest.mark.parametrize("name", ["same size", "triangles"])
@pytest.mark.parametrize("shape", [(0, 6, 8), (5, 1, 8), (1, 1, 2)])
def test_none_and_one(name: str, collection: Collection, shape: tuple[int, int, int]) -> None:
    collection.subjects[name].judge(shaped(*shape))


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("layout", LAYOUTS[:-1], ids=lambda f: f.__name__)
def test_layouts(name: str, collection: Collection, layout: Any) -> None:
    """All operands laid out otherwise, the first, the second."""
    subject = collection.subjects[name]
    for places in ("", "0", "1"):
        subject.judge(moved(subject.inputs(), layout, places))
        if name in ELASTIC:
            half = moved(shaped(5, 6, 16, torch.bfloat16), layout, places)
            subject.judge(half, torch.bfloat16)


def test_numbers_of_the_model_are_live(collection: Collection) -> None:
    def change(model: Any) -> None:
        model.fill = -2.5

    subject = collection.subjects["paddings"]
    subject.judge(subject.inputs(), change=change)


def test_too_small(collection: Collection) -> None:
    """Where PyTorch refuses to pad, so does the solution."""
    mine, theirs = collection.subjects["paddings"].models()
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        theirs(*shaped(5, 6, 3))
    with pytest.raises(RuntimeError, match="cannot pad a dimension of 3 elements with"):
        mine(*shaped(5, 6, 3))


# --- memory --------------------------------------------------------------------------------------

RUN_SMALL = """
right, wrong = models
for dtype in (torch.float32, torch.bfloat16):
    for n, h, w in ((1, 1, 1), (3, 8, 16), (2, 5, 9), (1, 7, 64)):
        x = torch.randn(n, h, w + 1).to(dtype)
        for x in (x, x[..., :w], x[..., 1:], x.mT, x[:1].expand(2, -1, -1), x[:, -1:], x[:0]):
            right(x)
print("clean", flush=True)
wrong(torch.randn(1, 8, 16))
print("not seen")
"""


def test_address_sanitizer(collection: Collection) -> None:
    """No access outside of exactly sized buffers, and one planted access is seen."""
    extension = build(collection.texts, collection.cache, address=True)
    cpu.check_addresses(RUN_SMALL, extension, [collection.texts[name] for name in ADDRESS])


def test_planted_misaligned_pack_is_seen(collection: Collection) -> None:
    """Rows of whole packs whose distance is no multiple of one."""
    x = torch.randn(3, 8, 9)[..., :8]
    for name in ("flip", "flip/alignment"):
        collection.subjects[name].judge([x.contiguous()])
    collection.subjects["flip"].judge([x])
    with pytest.raises(RuntimeError, match=r"misaligned .* in a kernel"):
        collection.subjects["flip/alignment"].judge([x])


@pytest.mark.parametrize("shape", [(8, 16), (2, 3, 8, 16)])
def test_another_rank(collection: Collection, shape: tuple[int, ...]) -> None:
    """Dimensions count from the side from which the reference counts them."""
    collection.subjects["flip"].judge([torch.randn(shape)])
    with pytest.raises(IndexError, match="out of range"):
        collection.subjects["flip"].judge([torch.randn(5)])


def test_names_that_the_templates_use(tmp_path: Path) -> None:
    """No operand is called like a function, a map, or what is made of another operand."""
    names = ("maps", "padded", "flipped", "inside", "coordinate", "x_like", "x_pack")
    given = Inputs(dict.fromkeys((*names, "x"), "torch.randn(n, 8)"), n=3)
    text = given.text(f"x.flip(0) * 2 + {' + '.join(names)} + x")
    subject = planned(text, tmp_path / "reference.py")
    for step in subject.plan.kernels:
        own = [o.value for o in kernel(step).inputs]
        assert not {"maps", "padded", "flipped", "inside", "coordinate"} & {*own}
        made = {value + suffix for value in own for suffix in ("_like", "_pack")}
        assert not made & {*own}


# --- nvcc ----------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("text", [MOVED, PADDED], ids=["moves", "places"])
def test_nvcc(text: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """No warning, nothing in local memory, and half the threads at least."""
    assert pytestconfig.cache is not None
    subject = planned(text, tmp_path / "reference.py")
    cuda = asked(render(subject.ref, subject.plan))["cuda_sources"]
    result = compiled(cuda, "90", "c++17", pytestconfig.cache.mkdir("nvcc"))
    assert result.problem == ""
    assert not ptx_faults(result, cuda)
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", result.log)
    assert set(spilled) == {("0", "0")}, result.log
    assert max(map(int, re.findall(r"Used (\d+) registers", result.log))) <= 64
