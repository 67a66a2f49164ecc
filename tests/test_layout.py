"""Regions that convert layouts (`Pointwise.layout`), run on the CPU (see cpu.py) and by nvcc.

Whatever the layout of what they read, their results have the reference's values, in the layout
that they are told. Kernels that are broken on purpose show that the tests see what they should.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cpu
import pytest
import torch
from cpu import unsigned_zeros
from references import reference_text
from test_solutions import (
    ENTRY,
    asked,
    compiled,
    extension_faults,
    needs_nvcc,
    ptx_faults,
    text_faults,
)
from torch import Tensor, nn

from modelnew import invariants
from modelnew.interpret import interpret
from modelnew.ir import Plan, Pointwise
from modelnew.measure.gate import compare
from modelnew.measure.nested import map_tensors, tensors
from modelnew.measure.variants import channels_last
from modelnew.plan import plan
from modelnew.reference import Reference, load
from modelnew.render import Options, render
from modelnew.trace import trace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCES: Mapping[str, str] = {
    "live": reference_text(
        "def forward(self, x): return F.leaky_relu(x, self.slope)",
        "torch.randn(2, 8, n, n)",
        "self.slope = 0.25",
    ),
    "copy": reference_text("def forward(self, x): return x.clone()", "torch.randn(2, 8, n, n)"),
    "residual": reference_text(
        "def forward(self, x, bias, residual): return torch.relu(x + bias) + residual * 0.5",
        "torch.randn(2, 8, n, n), torch.randn(8, 1, 1), torch.randn(2, 8, n, n)",
    ),
    "several": reference_text(
        "def forward(self, x, y): return [x * 2 + y, {'mask': x > y}, torch.relu(y) * x]",
        "torch.randn(2, 8, n, n), torch.randn(2, 8, n, n)",
    ),
    "mask": reference_text(
        "def forward(self, x, mask, k): return torch.where(mask, x * k, -x)",
        "torch.randn(2, 8, n, n), torch.rand(2, 8, n, n) > 0.5, torch.arange(8 * n).view(8, 1, n)",
    ),
    # More than shared memory has room for, in float32.
    "five": reference_text(
        "def forward(self, a, b, c, d, e): return a + b * 2 + c * 3 + d * 4 + e * 5",
        ", ".join(["torch.randn(2, 8, n, n)"] * 5),
    ),
    "last": reference_text(
        "def forward(self, x, y): return torch.relu(x) - y",
        "torch.randn(2, 8, n, n), torch.randn(2, 8, n, n)",
    ),
}
# The layouts that regions are told, where it is not "contiguous".
TOLD = {"last": "channels_last"}
# What the files are rendered for: each dtype costs g++ seconds.
KINDS: Mapping[str, tuple[str, ...]] = {
    "live": ("float32", "bfloat16"),
    "residual": ("float32", "float16", "bfloat16"),
    "copy": ("float32",),
    "several": ("float32",),
    "mask": ("float16",),
    "five": ("float32",),
    "last": ("float32", "bfloat16"),
}
# Mistakes planted in the text for float32: (pattern, replacement).
MISTAKES: Mapping[str, tuple[str, str]] = {
    "copy/barrier": (r"    __syncthreads\(\);\n", "    if (extent.rows < 0) __syncthreads();\n"),
    "copy/some wait": (r"    __syncthreads\(\);\n", "    if (threadIdx.x != 7) __syncthreads();\n"),
    "copy/turn": (r"tiles\.turn\[o\] = .*;", "tiles.turn[o] = 0;"),
    "copy/alignment": (r"\[d\] != 1 \|\| address % .*\) return false;", "[d] != 1) return false;"),
    "copy/extent": (r"cell\.row < rows", "cell.row <= rows"),
}
# Those that also run under AddressSanitizer.
ADDRESS = ("copy", "copy/extent")

# Whole packs of every dtype, of float32 only, ragged; tiles that are full, cut, many, all shapes.
SHAPES = (
    (2, 64, 8, 8),
    (2, 64, 8, 9),
    (1, 65, 7, 9),
    (3, 3, 17, 19),
    (1, 3, 32, 36),
    (2, 8, 16, 16),
    (1, 4, 3, 4),
    (2, 136, 4, 8),
    (1, 260, 4, 4),
    (1, 520, 2, 4),
    (2, 16, 4, 4, 8),
    (1, 5, 3, 7, 5),
    (2, 1, 5, 6),
    (3, 70, 1, 1),
    (2, 20, 2, 1),
    (0, 4, 5, 6),
    (2, 0, 4, 4),
)

Layout = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A reference and the class rendered from it with its regions told a layout."""

    ref: Reference
    layout: str
    model_new: type[nn.Module]


def told_plan(ref: Reference) -> Plan:
    made = plan(trace(ref))
    layout = TOLD.get(ref.path.stem, "contiguous")
    steps = (replace(s, layout=layout) if isinstance(s, Pointwise) else s for s in made.steps)
    made = replace(made, steps=tuple(steps))
    invariants.check_plan(made)
    return made


@dataclass
class Collection:
    references: Mapping[str, Reference]
    plans: Mapping[str, Plan]
    texts: Mapping[str, str]
    folder: Path

    def build(self, *, address: bool = False) -> Path:
        first = [self.texts[name] for name in ADDRESS]
        others = [text for name, text in self.texts.items() if name not in ADDRESS]
        groups = [first, others[::2], others[1::2]]
        return cpu.build(groups, self.folder, address={0} if address else ())

    def subject(self, name: str) -> Subject:
        space = cpu.load_on_cpu(self.texts[name], self.folder, self.build())
        layout = TOLD.get(name, "contiguous")
        return Subject(self.references[name.split("/")[0]], layout, space["ModelNew"])


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Collection:
    folder = tmp_path_factory.mktemp("layouts")
    references = {}
    for name, text in REFERENCES.items():
        path = folder / f"{name}.py"
        path.write_text(text)
        references[name] = load(path)
    plans = {name: told_plan(ref) for name, ref in references.items()}
    texts = {
        name: render(ref, plans[name], Options(KINDS[name])) for name, ref in references.items()
    }
    for mistake, (right, wrong) in MISTAKES.items():
        name = mistake.split("/")[0]
        text = render(references[name], plans[name], Options(("float32",)))
        texts[mistake], count = re.subn(right, wrong, text, count=1)
        assert count == 1, f"the text has no place for the mistake {mistake}"
    assert pytestconfig.cache is not None
    return Collection(references, plans, texts, pytestconfig.cache.mkdir("solutions_on_cpu"))


@pytest.fixture(scope="module")
def subjects(collection: Collection) -> Mapping[str, Subject]:
    return {name: collection.subject(name) for name in collection.texts}


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def misaligned(x: Tensor) -> Tensor:
    """channels_last, one element past a pack's boundary."""
    like = channels_last(x)
    return like.new_empty(x.numel() + 1)[1:].as_strided(x.shape, like.stride()).copy_(x)


def some_channels(x: Tensor) -> Tensor:
    """channels_last, channels of a wider tensor."""
    if x.dim() < 4:
        return x
    wide = channels_last(torch.cat([x, x, x[:, :1]], 1))
    return wide[:, x.shape[1] :][:, : x.shape[1]].copy_(x) if x.numel() else x


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def every_other(x: Tensor) -> Tensor:
    """Dense along no dimension."""
    return torch.stack([x, x], -1)[..., 0]


def expanded(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape)


LAYOUTS: Sequence[Layout] = (
    contiguous,
    channels_last,
    misaligned,
    some_channels,
    transposed,
    every_other,
    expanded,
)
each = pytest.mark.parametrize("name", REFERENCES)
each_dtype = pytest.mark.parametrize(
    ("name", "dtype"), [(name, getattr(torch, dtype)) for name in KINDS for dtype in KINDS[name]]
)


def random_inputs(name: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Inputs of a reference in one shape. Only the first ones have all dimensions."""
    torch.manual_seed(len(shape) + shape[-1])
    full = lambda: torch.randn(*shape).to(dtype)  # noqa: E731
    count = {"live": 1, "copy": 1, "residual": 1, "several": 2, "mask": 1, "five": 5, "last": 2}[
        name
    ]
    inputs = [full() for _ in range(count)]
    if name == "residual":
        inputs += [torch.randn(shape[1], *([1] * len(shape[2:]))).to(dtype), full()]
    if name == "mask":
        inputs += [torch.rand(*shape) > 0.5, torch.arange(shape[-1])]
    return inputs


@torch.no_grad()
def judge(subject: Subject, inputs: Sequence[Tensor]) -> None:
    """Values as the reference has them, results in the right layout, inputs untouched."""
    theirs, mine = subject.ref.namespace["Model"](), subject.model_new()
    before = [x.clone() for x in inputs]
    found = mine(*inputs)
    assert all(map(torch.equal, inputs, before)), "an input is changed"
    wide = (x.double() if x.is_floating_point() else x for x in inputs)
    own, truth = (laid(theirs(*given), subject.layout) for given in (inputs, wide))
    verdict = compare(*map(unsigned_zeros, (found, own, truth)))
    layout = [(tuple(x.shape), x.stride(), x.dtype) for x in inputs]
    assert verdict.ok, f"{verdict.message} for {layout}"


def laid(tree: Any, layout: str) -> Any:
    """With the strides of fresh tensors."""
    kind = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}[layout]
    return map_tensors(
        lambda x: torch.empty(x.shape, dtype=x.dtype, memory_format=kind).copy_(x), tree
    )


# --- values --------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_last(
    name: str, subjects: Mapping[str, Subject], dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """And for results in channels_last the other way round."""
    if name == "last" and len(shape) != 4:
        return  # the layout of a result is that of its traced rank
    layout = contiguous if name == "last" else channels_last
    judge(subjects[name], [layout(x) for x in random_inputs(name, shape, dtype)])


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(
    name: str, subjects: Mapping[str, Subject], dtype: torch.dtype, layout: Layout
) -> None:
    """The first operand in one layout, the others in another."""
    for shape in ((1, 24, 8, 8), (2, 17, 3, 11), (1, 16, 3, 2, 8)):
        if name == "last" and len(shape) != 4:
            continue
        first, *rest = random_inputs(name, shape, dtype)
        for other in (contiguous, channels_last, misaligned) if rest else (contiguous,):
            judge(subjects[name], [layout(first), *map(other, rest)])


@pytest.mark.parametrize("name", ["residual", "mask", "five"])
def test_each_operand_in_a_layout_of_its_own(name: str, subjects: Mapping[str, Subject]) -> None:
    for shape in ((2, 16, 8, 8), (2, 7, 9, 9)):
        for turn in range(len(LAYOUTS)):
            inputs = random_inputs(name, shape, getattr(torch, KINDS[name][0]))
            chosen = [LAYOUTS[(turn + 2 * i) % len(LAYOUTS)] for i in range(len(inputs))]
            given = [f(x) if x.dim() > 3 else x for f, x in zip(chosen, inputs, strict=True)]
            judge(subjects[name], given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_operands(subjects: Mapping[str, Subject], dtype: torch.dtype) -> None:
    """Operands that lack some dimensions, and so are staged, filled in or gathered."""
    x, _, residual = random_inputs("residual", (2, 16, 8, 12), dtype)
    x, residual = channels_last(x), channels_last(residual)
    for shape in ((16, 1, 1), (1, 1, 12), (2, 1, 8, 1), (2, 16, 8, 12), (1, 16, 8, 12), ()):
        bias = torch.randn(shape).to(dtype)
        for given in (bias, channels_last(bias)):
            judge(subjects["residual"], [x, given, residual])
            judge(subjects["residual"], [given, x, residual[:1]])
            judge(subjects["residual"], [x[..., :1], given, residual])


@pytest.mark.parametrize("name", ["live", "five"])
def test_many_dimensions(name: str, subjects: Mapping[str, Subject]) -> None:
    """Up to eight that do not merge: each layout keeps its own order and leaves gaps."""
    for sizes in ((3, 4, 2, 9, 8), (2, 1, 2, 2, 3, 2, 24, 24), (24, 2, 24), (9, 80), (130, 70)):
        wide = torch.randn([2 * size for size in sizes[::-1]])[(slice(None, None, 2),) * len(sizes)]
        dense = torch.randn(*sizes[1:], sizes[0]).movedim(-1, 0)
        for x in (wide.permute(*range(len(sizes))[::-1]), dense, dense.mT.contiguous().mT):
            judge(subjects[name], [x] * (5 if name == "five" else 1))


@pytest.mark.parametrize("name", ["residual", "five"])
def test_dtypes_may_differ(name: str, subjects: Mapping[str, Subject]) -> None:
    for first in DTYPES[:2]:
        inputs = [channels_last(x) for x in random_inputs(name, (2, 12, 5, 8), torch.float32)]
        judge(subjects[name], [inputs[0].to(first), *inputs[1:]])


def test_scalar_is_live(subjects: Mapping[str, Subject]) -> None:
    model = subjects["live"].model_new()
    model.slope = 3.0
    x = channels_last(torch.randn(2, 9, 5, 4))
    with torch.no_grad():
        assert torch.equal(model(x), nn.functional.leaky_relu(x, 3.0).contiguous())


def test_results_of_one_shape_or_an_error(subjects: Mapping[str, Subject]) -> None:
    x = channels_last(torch.randn(2, 8, 4, 4))
    model = subjects["residual"].model_new()
    for bias in (torch.randn(7, 1, 1), torch.randn(3, 8, 4, 4)):
        with pytest.raises(RuntimeError, match=r"size|shape"):
            model(x, bias, x)
    for y in (torch.randn(1, 3), torch.randn(2, 8, 4, 5)):
        with pytest.raises(RuntimeError, match=r"size|shape"):
            subjects["several"].model_new()(x, y)


@each
def test_interpreter(name: str, collection: Collection) -> None:
    made = collection.plans[name]
    inputs = [channels_last(x) for x in random_inputs(name, (2, 8, 4, 6), torch.float32)]
    model = collection.references[name].namespace["Model"]()
    values = dict(zip(made.graph.inputs, inputs, strict=True))
    found = tensors(interpret(made, model, values))
    own = tensors(laid(model(*inputs), TOLD.get(name, "contiguous")))
    assert all(map(torch.equal, found, own))
    assert [x.stride() for x in found] == [x.stride() for x in own]


# --- the text ------------------------------------------------------------------------------------


def test_only_what_is_as_large_as_the_result_is_staged(collection: Collection) -> None:
    text = collection.texts["residual"]
    assert re.findall(r"stage<\w+, kVec, .*>\(tiles, (\d),", text) == ["1", "3"]
    assert "Roles{1, 4, 0b1010}" in text


@each
def test_text_keeps_the_rules(name: str, collection: Collection) -> None:
    text = collection.texts[name]
    assert not text_faults(text)
    assert not extension_faults(asked(text))
    folded = (line for line in text.splitlines() if ", " in line and not line.startswith("#"))
    assert max(map(len, folded)) <= 100


# --- the tests themselves ------------------------------------------------------------------------


def failure(subject: Subject, inputs: Sequence[Tensor]) -> str:
    try:
        judge(subject, inputs)
    except (AssertionError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("barrier", "NaN"),
        ("some wait", "never reach"),
        ("turn", "error"),
        ("alignment", "misaligned"),
    ],
)
def test_planted_mistakes_are_seen(
    mistake: str, message: str, subjects: Mapping[str, Subject]
) -> None:
    """And so what is given here goes by tiles."""
    for shape in ((1, 64, 8, 8), (2, 16, 5, 8), (1, 4, 64, 64)):
        inputs = [misaligned(x) for x in random_inputs("copy", shape, torch.float32)]
        assert not failure(subjects["copy"], inputs)
        found = failure(subjects[f"copy/{mistake}"], inputs)
        assert re.search(message, found), found


SUMS = """
#include <stdint.h>

template <int kCount>
__global__ void sums_kernel(const float* from, float* to, int unset) {
    __shared__ float part[kCount][2];
    part[threadIdx.x][1] = from[int64_t(blockIdx.x) * kCount + threadIdx.x];
    for (int half = kCount / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x][1] += part[threadIdx.x + half][1];
    }
    if (threadIdx.x == 0) to[blockIdx.x] = unset ? part[1][0] : part[0][1];
}

extern "C" void sums(const float* from, float* to, int unset, cudaStream_t stream) {
    const auto kernel = sums_kernel<64>;
    kernel<<<3, 64, 0, stream>>>(from, to, unset);
}
"""


def test_threads_work_together(collection: Collection) -> None:
    """Through an array of the block, in which each block finds NaN."""
    unit = cpu.kernel_unit([cpu.Sources("", SUMS, ("sums",))])
    kernels = cpu._object(unit, cpu.KERNEL_FLAGS, collection.folder)
    built = ctypes.CDLL(str(cpu._linked([kernels], (), collection.folder)))
    values, sums = torch.arange(192.0), torch.zeros(3)
    pointers = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(sums.data_ptr())
    built.sums(*pointers, 0, None)
    assert torch.equal(sums, values.view(3, 64).sum(1))
    built.sums(*pointers, 1, None)
    assert sums.isnan().all()


RUN = """
right, wrong = models
def last(x): return x.contiguous(memory_format=torch.channels_last)
for n, c, h, w in ((2, 65, 7, 9), (2, 64, 8, 8), (1, 3, 9, 31), (1, 8, 16, 64)):
    x = torch.randn(n, c, h, w)
    for x in (last(x), x.mT.contiguous().mT, last(x)[:, 1:], last(x)[..., 1:, :]):
        right(x)
print("clean", flush=True)
wrong(last(torch.randn(1, 5, 11, 13)))
print("not seen")
"""


def test_address_sanitizer(collection: Collection) -> None:
    """No access outside of exactly sized buffers, and one planted access is seen."""
    texts = [collection.texts[name] for name in ADDRESS]
    cpu.check_addresses(RUN, collection.build(address=True), texts)


# --- nvcc ----------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("name", ["several"])
def test_nvcc(name: str, collection: Collection, pytestconfig: pytest.Config) -> None:
    """No warning, nothing in local memory, packs on both sides, and half the threads at least."""
    assert pytestconfig.cache is not None
    text = render(collection.references[name], collection.plans[name])
    cuda = asked(text)["cuda_sources"]
    built = compiled(cuda, "90", "c++17", pytestconfig.cache.mkdir("nvcc"))
    assert built.problem == ""
    assert not ptx_faults(built, cuda)
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", built.log)
    assert set(spilled) == {("0", "0")}, built.log
    assert max(map(int, re.findall(r"Used (\d+) registers", built.log))) <= 64
    for kernel, body in ENTRY.findall(built.ptx):
        if "tiled" in kernel:
            assert re.search(r"ld\.global(\.nc)?\.v4", body)
            assert re.search(r"\bst\.shared\.", body)
            assert "Li1E" in kernel or re.search(r"ld\.shared\.v4", body)
