"""Algebra: what is rewritten and what is not, and that both graphs give the same answer."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from click.testing import CliRunner
from planted import examine
from torch import nn

import generate
from modelnew import invariants
from modelnew.algebra import rewrite
from modelnew.algebra.convolutions import Convolution
from modelnew.algebra.ranges import BOUNDED, DAMPED, Range
from modelnew.files import REAL, algebra_lines
from modelnew.interpret import interpret
from modelnew.ir import Graph, Library, Node, Plan, Ref
from modelnew.measure import jobs, report
from modelnew.plan import plan
from modelnew.reference import load
from modelnew.trace import trace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Subject:
    """A model, its graph before and after, and what was said of each rewrite."""

    space: dict[str, Any]
    before: Graph
    after: Graph
    lines: tuple[str, ...]

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = self.space["Model"](*self.space["get_init_inputs"]())
        return made.to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [x.to(dtype) for x in self.space["get_inputs"]()]

    def both(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        return run(self.before, model, inputs), run(self.after, model, inputs)


def run(graph: Graph, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """The graph's answer, each node by PyTorch's own operator."""
    steps = tuple(Library(node, "") for node in graph.nodes)
    with torch.no_grad():
        return interpret(Plan(graph, steps), model, dict(zip(graph.inputs, inputs, strict=True)))


@pytest.fixture
def subject(tmp_path: Path) -> Callable[..., Subject]:
    def make(forward: str, inputs: str = "torch.randn(3, 5)", init: str = "") -> Subject:
        names = re.findall(r"torch\.rand", inputs)
        arguments = ", ".join(["x", "y", "z"][: len(names)])
        text = f"def forward(self, {arguments}):\n    return {forward}"
        path = tmp_path / "model.py"
        path.write_text(references.reference_text(text, inputs, init))
        graph = trace(load(path))
        after, lines = rewrite(graph)
        invariants.check_graph(after)
        invariants.check_plan(plan(after))
        return Subject(references.namespace(path.read_text()), graph, after, lines)

    return make


Make = Callable[..., Subject]


def packets(graph: Graph) -> list[str]:
    return [node.packet for node in graph.nodes]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# --- linear functionals of products --------------------------------------------------------------

LINEAR = "self.layer = nn.Linear(5, 6)"
STATE = f"""
{LINEAR}
self.w = nn.Parameter(torch.randn(6, 5))
self.t = nn.Parameter(torch.randn(6))
self.one = nn.Parameter(torch.randn(1))
self.number = nn.Parameter(torch.tensor(1.5))
self.scale = 1.5
"""
SMALL = "torch.randn(3, 5)"
DEEP = "torch.randn(2, 3, 5)"

# (forward, inputs): each is rewritten, down to a product of at least one summed operand.
PRODUCTS = [
    ("self.layer(x).sum(1, keepdim=True)", SMALL),
    ("self.layer(x).sum(dim=-1)", SMALL),
    ("self.layer(x).mean(-1, keepdim=True)", SMALL),
    ("self.layer(x).sum(0)", SMALL),
    ("self.layer(x).mean(0, keepdim=True)", SMALL),
    ("self.layer(x).sum()", SMALL),
    ("self.layer(x).mean((0, 1), keepdim=True)", SMALL),
    ("self.layer(x).sum((0, 1))", DEEP),
    ("self.layer(x).sum((0, 2), keepdim=True)", DEEP),
    ("self.layer(x).mean(1)", DEEP),
    ("F.linear(x, self.w).sum(1)", SMALL),
    ("(x @ self.w.T).mean(1)", SMALL),
    ("(x @ self.w.T).sum(0)", SMALL),
    ("(x @ self.w.T).sum(0)", DEEP),
    ("(x @ self.w.T).sum((1, 2), keepdim=True)", DEEP),
    ("torch.mm(x, self.w.t()).sum(1)", SMALL),
    ("torch.mm(x, self.w.t()).sum(0)", SMALL),
    ("torch.bmm(x, y).sum(2)", f"{DEEP}, torch.randn(2, 5, 4)"),
    ("torch.bmm(x, y).mean(1, keepdim=True)", f"{DEEP}, torch.randn(2, 5, 4)"),
    ("torch.bmm(x, y).sum((1, 2))", f"{DEEP}, torch.randn(2, 5, 4)"),
    ("torch.addmm(self.t, x, self.w.t(), beta=0.5, alpha=2.0).sum(1)", SMALL),
    ("torch.addmm(self.t, x, self.w.t(), beta=0.5, alpha=2.0).sum(0)", SMALL),
    ("torch.addmm(self.one, x, self.w.t(), beta=0.5, alpha=2.0).sum(1)", SMALL),
    ("torch.baddbmm(self.number, x, y).sum(2)", f"{DEEP}, torch.randn(2, 5, 4)"),
    ("((self.layer(x) * 2 - 1) / 3).sum(1, keepdim=True)", SMALL),
    ("(1 - self.layer(x)).mean(1)", SMALL),
    ("(3 - self.layer(x)).sum(0)", SMALL),
    ("(-self.layer(x) * self.scale + self.scale).sum(1)", SMALL),
    ("(self.layer(x) * self.scale + self.scale).sum(0)", SMALL),
    ("torch.sub(self.layer(x), self.t, alpha=2).mean(1)", SMALL),
    ("torch.add(self.layer(x), self.t, alpha=2).sum((0, 1))", SMALL),
    ("(self.t - self.layer(x)).sum(1)", SMALL),
    ("(self.layer(x) * self.one - self.number).sum(1)", SMALL),
    ("(self.layer(x) * self.t).sum(0)", SMALL),
    ("(self.layer(x) * y).sum(1)", f"{SMALL}, torch.randn(())"),
    ("(self.layer(x) + y).mean(1)", f"{SMALL}, torch.randn(3, 6)"),
    ("(self.layer(x) + y).mean(1)", f"{SMALL}, torch.randn(3, 1)"),
    ("self.layer(torch.tanh(x)).mean(0) + 1", SMALL),
    ("self.layer(self.layer(x) @ self.w).mean(0)", SMALL),
    ("F.avg_pool1d(self.layer(x), 2)", SMALL),
    ("F.avg_pool1d(self.layer(x), 3, stride=1)", SMALL),
    ("F.avg_pool1d(self.layer(x), 2, padding=1)", SMALL),
    ("F.avg_pool1d(self.layer(x), 4, stride=3, ceil_mode=True)", SMALL),
    ("F.avg_pool1d(self.layer(x) * 2 + self.t, 2, padding=1, count_include_pad=False)", SMALL),
    ("F.avg_pool1d((self.layer(x) * 2).unsqueeze(1), 2).squeeze(1) + 1", SMALL),
    ("F.avg_pool1d(self.layer(x) + 1, 2)", DEEP),
    ("F.adaptive_avg_pool1d(self.layer(x), 4)", SMALL),
    ("F.adaptive_avg_pool1d(self.layer(x), 1)", SMALL),
    ("F.avg_pool1d(x @ self.w.T, 2)", SMALL),
]


@pytest.mark.parametrize(("forward", "inputs"), PRODUCTS)
def test_products(forward: str, inputs: str, subject: Make) -> None:
    made = subject(forward, inputs, STATE)
    assert made.lines
    assert "product" in made.lines[0]
    close(*reversed(made.both(made.model(), made.inputs())))
    expected = made.model()(*made.inputs())
    close(run(plan(made.after).graph, made.model(), made.inputs()), expected)


@pytest.mark.parametrize(("forward", "inputs"), PRODUCTS)
def test_products_of_another_batch(forward: str, inputs: str, subject: Make) -> None:
    """Counts of what is summed are read at the call; what broadcasts may do so elsewhere."""
    made = subject(forward, inputs, STATE)
    pinned = {guard.text for guard in made.after.pins}
    if not {"x.shape[0:1]", "y.shape[0:1]"} & pinned:
        given = [x if x.dim() == 0 else torch.cat([x, 2 * x], 0) for x in made.inputs()]
        close(*reversed(made.both(made.model(), given)))


@pytest.mark.parametrize(("forward", "inputs"), PRODUCTS)
def test_products_in_half_precision(forward: str, inputs: str, subject: Make) -> None:
    """The dtype is that of the model at the call, the sums are formed in float32."""
    made = subject(forward, inputs, STATE)
    for dtype in (torch.float16, torch.bfloat16):
        expected, found = made.both(made.model(dtype), made.inputs(dtype))
        assert (found.dtype, found.shape, found.stride()) == (
            expected.dtype, expected.shape, expected.stride(),
        )  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.15)


def test_no_large_product_is_left(subject: Make) -> None:
    made = subject("self.layer(x).sum(1, keepdim=True) * 2", SMALL, LINEAR)
    (linear,) = [node for node in made.after.nodes if node.packet == "linear"]
    assert linear.outputs[0].shape == (3, 1)
    assert packets(made.after)[-2:] == ["to", "mul"]


def test_sums_of_many_weights_hold_in_half_precision(subject: Make) -> None:
    """The mean of these is less than what float16 resolves, the sum of those more than it holds."""
    init = "self.a, self.b = (nn.Linear(64, 4096, bias=False) for _ in range(2))"
    made = subject("self.a(x).mean(1), self.b(x / 65536).sum(1)", "torch.rand(2, 64) * 60", init)
    assert len(made.lines) == 2
    model = made.model(torch.float16)
    model.a.weight.data.zero_()
    model.a.weight.data[:1].uniform_(0.01, 0.03)
    model.b.weight.data.uniform_(25, 30)
    x = made.inputs(torch.float16)[0]
    found = run(made.after, model, [x])
    truth = run(made.before, model.double(), [x.double()])
    for mine, right in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=2e-3, atol=0)


# (forward, inputs): none of these may be rewritten.
REFUSED = [
    ("torch.relu(self.layer(x)).sum(1)", SMALL),
    ("self.layer(x).sum(1, dtype=torch.float64)", SMALL),
    ("(self.layer(x) * self.t).sum(1)", SMALL),
    ("(self.layer(x) * self.layer(x)).sum(1)", SMALL),
    ("(2 / self.layer(x)).sum(1)", SMALL),
    ("torch.div(self.layer(x), 2, rounding_mode='floor').sum(1)", SMALL),
    ("(self.layer(x) + y).sum(1)", f"{SMALL}, torch.randn(3, 6)"),
    ("(self.layer(x) * y).sum(1)", f"{SMALL}, torch.randn(3, 1)"),
    ("torch.bmm(x, y).sum(0)", f"{DEEP}, torch.randn(2, 5, 4)"),
    ("[(z := self.layer(x)), z.sum(1)]", SMALL),
    ("[(z := self.layer(x)).sum(1), z.mean(1)]", SMALL),
    ("torch.relu(self.layer(x).tanh_()).sum(1)", SMALL),
    ("(self.layer(x).add_(1)).sum(1)", SMALL),
    ("self.layer(x).amax(1)", SMALL),
    ("(x @ torch.tanh(x).T).sum((0, 1, 2))", DEEP.replace("2, 3, 5", "1, 5, 5")),
    ("(torch.tanh(x) @ torch.tanh(y)).sum(1)", f"{SMALL}, torch.randn(5, 4)"),
    ("F.avg_pool1d(self.layer(x) + 1, 2, padding=1)", SMALL),
    ("F.max_pool1d(self.layer(x), 2)", SMALL),
    ("(self.layer(torch.tanh(x)) + 1).sum(0)", SMALL),
]


@pytest.mark.parametrize(("forward", "inputs"), REFUSED)
def test_refused(forward: str, inputs: str, subject: Make) -> None:
    made = subject(forward, inputs, STATE)
    assert made.lines == ()
    assert made.after == made.before


def test_what_is_written_in_place_meanwhile_is_refused(subject: Make) -> None:
    """The product would be computed later, after the write."""
    made = subject("((h := self.layer(x)), x.add_(1), h.sum(1))[2]", SMALL, LINEAR)
    assert made.lines == ()


# --- convolutions --------------------------------------------------------------------------------


def convolution(kind: str, **changes: Any) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in changes.items())
    return f"self.layer = nn.{kind}(4, 3, {arguments})"


def geometries() -> Iterator[tuple[str, bool]]:
    """Constructor texts, and whether what is transposed."""
    for k, s, p, d in itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1), (1, 2)):
        yield convolution("Conv1d", kernel_size=k, stride=s, padding=p, dilation=d), False
        for extra in range(max(s, d) if p else 1):
            yield convolution(
                "ConvTranspose1d", kernel_size=k, stride=s, padding=p, dilation=d,
                output_padding=extra,
            ), True  # fmt: skip


def test_every_tap_meets_what_it_meets(subject: Make) -> None:
    """The slices against a search over all outputs and inputs, sizes down to 1."""
    for k, s, p, d, extra, transposed in itertools.product(
        range(1, 5), range(1, 4), range(5), range(1, 3), range(2), (False, True)
    ):
        each = Convolution(
            Node("", "", (), ()), transposed, (k,), (s,), (p,), (d,), (extra * transposed,)
        )
        for size in range(1, 9):
            extent = each.extent(0, size)
            assert isinstance(extent, int)
            for tap, (start, end, step) in enumerate(each.taps(0)):
                inputs, outputs = (size, extent) if transposed else (extent, size)
                met = [
                    (i if transposed else i * s - p + tap * d)
                    for i in range(max(inputs, 0))
                    if 0 <= i * s - p + tap * d < outputs
                ]
                taken = list(range(size))[start : end or None : step]
                assert met == taken or extent <= 0, (each, size, tap)


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_and_means_of_all_outputs(transposed: bool, subject: Make) -> None:
    texts = [text for text, turned in geometries() if turned == transposed]
    for index, text in enumerate(texts):
        kind = ("sum", "mean")[index % 2]
        made = subject(f"self.layer(x).{kind}(2)", "torch.randn(2, 4, 9)", text)
        assert len(made.lines) == 1, text
        for size in (9, 10, 14):
            given = [torch.randn(3, 4, size, dtype=torch.float64)]
            close(*reversed(made.both(made.model(), given)))


IMAGES = [
    ("self.layer(x).mean((2, 3), keepdim=True)", "ConvTranspose2d"),
    ("(self.layer(x) * 0.5 + self.c).mean((2, 3))", "ConvTranspose2d"),
    ("F.adaptive_avg_pool2d(self.layer(x), 1)", "ConvTranspose2d"),
    ("F.adaptive_avg_pool2d(self.layer(x) - self.c, (1, 1))", "Conv2d"),
    ("self.layer(x).sum((-1, -2))", "Conv2d"),
    ("self.layer(x).mean(3, keepdim=True)", "Conv2d"),
    ("self.layer(x).mean(2)", "ConvTranspose2d"),
    ("(self.layer(x) + 2).sum(2, keepdim=True)", "Conv2d"),
    ("(self.layer(x) / 2).sum(3)", "ConvTranspose2d"),
]


@pytest.mark.parametrize(("forward", "kind"), IMAGES)
@pytest.mark.parametrize("more", [{}, {"stride": "(1, 2)", "padding": "(1, 2)", "bias": False}])
def test_images(forward: str, kind: str, more: dict[str, Any], subject: Make) -> None:
    init = convolution(kind, kernel_size="(3, 5)", **more)
    init += "\nself.c = nn.Parameter(torch.randn(3, 1, 1))"
    made = subject(forward, "torch.randn(2, 4, 8, 9)", init)
    assert len(made.lines) == 1
    for shape in ((2, 4, 8, 9), (1, 4, 5, 12)):
        given = [torch.randn(shape, dtype=torch.float64)]
        expected, found = made.both(made.model(), given)
        close(found, expected)
        given = [given[0].contiguous(memory_format=torch.channels_last)]
        expected, found = made.both(made.model(), given)
        dims = [dim for dim, size in enumerate(expected.shape) if size > 1]
        assert [found.stride(d) for d in dims] == [expected.stride(d) for d in dims]
    expected, found = made.both(made.model(torch.bfloat16), [given[0].bfloat16()])
    assert found.dtype == expected.dtype == torch.bfloat16


@pytest.mark.parametrize("dims", ["2", "3", "(2, 4)", "(3, 4)", "(2, 3, 4)"])
@pytest.mark.parametrize("kind", ["Conv3d", "ConvTranspose3d"])
def test_volumes(kind: str, dims: str, subject: Make) -> None:
    init = convolution(kind, kernel_size=3, padding=1, stride="(1, 2, 1)")
    made = subject(f"self.layer(x).mean({dims})", "torch.randn(2, 4, 5, 6, 7)", init)
    assert len(made.lines) == 1
    close(*reversed(made.both(made.model(), made.inputs())))
    left = [node.packet for node in made.after.nodes if "conv" in node.packet]
    assert left == ([] if dims == "(2, 3, 4)" else ["_convolution"])


@pytest.mark.parametrize(
    "forward",
    [
        "self.layer(torch.relu(x)).mean((2, 3))",  # how many outputs is not known
        "self.layer(x).mean(1)",
        "self.layer(x).mean((1, 2, 3))",
        "F.conv2d(x, self.layer.weight.repeat(1, 1, 1, 1), groups=1, padding='same').mean(2)",
        "F.conv2d(x, y).mean((2, 3))",
        "F.adaptive_avg_pool2d(self.layer(x), 2)",
    ],
)
def test_refused_convolutions(forward: str, subject: Make) -> None:
    more = ", torch.randn(3, 4, 3, 3)" if "y" in forward else ""
    init = convolution("Conv2d", kernel_size=3)
    assert subject(forward, f"torch.randn(2, 4, 8, 9){more}", init).lines == ()


def test_grouped_convolutions_are_refused(subject: Make) -> None:
    init = "self.layer = nn.Conv2d(4, 4, 3, groups=2)"
    assert subject("self.layer(x).mean((2, 3))", "torch.randn(2, 4, 8, 9)", init).lines == ()


@pytest.mark.parametrize("window", ["2", "(2, 3)", "4, stride=3", "3, stride=2"])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_average_pools_of_convolutions(window: str, padding: int, subject: Make) -> None:
    init = convolution("Conv2d", kernel_size="(3, 4)", padding=padding)
    made = subject(f"F.avg_pool2d(self.layer(x), {window})", "torch.randn(2, 4, 11, 14)", init)
    assert len(made.lines) == 1
    assert packets(made.after)[-1] == "_convolution"
    for sizes in itertools.product((9, 10, 11, 12), repeat=2):
        given = [torch.randn(2, 4, *sizes, dtype=torch.float64)]
        close(*reversed(made.both(made.model(), given)))


def test_other_pools_of_convolutions_are_refused(subject: Make) -> None:
    windows = ("3, stride=1", "2, padding=1", "2, ceil_mode=True", "2, divisor_override=3")
    for kind, window in itertools.product(("ConvTranspose2d", "Conv2d"), windows):
        init = convolution(kind, kernel_size=3, stride=2 if "T" in kind else 1)
        forward = f"F.avg_pool2d(self.layer(x), {window})"
        assert subject(forward, "torch.randn(2, 4, 8, 9)", init).lines == (), (kind, window)


def test_average_pools_of_transposed_convolutions(subject: Make) -> None:
    rewritten = 0
    for k, s, p in itertools.product((1, 2, 3, 4, 5), (2, 3), (0, 1, 2)):
        for extra in range(s):
            init = convolution(
                "ConvTranspose1d", kernel_size=k, stride=s, padding=p, output_padding=extra
            )
            made = subject(f"F.avg_pool1d(self.layer(x) * 2, {s})", "torch.randn(2, 4, 9)", init)
            rewritten += len(made.lines)
            for size in (6, 9):
                given = [torch.randn(3, 4, size, dtype=torch.float64)]
                close(*reversed(made.both(made.model(), given)))
    assert rewritten > 20


# --- dimensions of size 1 ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [
        "torch.max(self.layer(x).amax(1, keepdim=True), dim=1, keepdim=True)[0]",
        "torch.min(self.layer(x).amax(1, keepdim=True), dim=1)[0]",
        "self.layer(x).amax(1, keepdim=True).mean(1)",
        "self.layer(x).amax(1, keepdim=True).logsumexp(1, keepdim=True)",
        "(self.layer(x).amax(1, keepdim=True) * 2 - self.one).sum(1, keepdim=True)",
        "self.layer(x).unsqueeze(1).sum(1)",
        "self.layer(x).unsqueeze(1).unsqueeze(1).amax((1, 2), keepdim=True)",
        "F.linear(x, self.w[:1]).tanh().prod(1)",
        "torch.tanh(F.linear(x, self.w[:1])).cumsum(1)",
    ],
)
def test_of_size_one(forward: str, subject: Make) -> None:
    made = subject(f"{forward} * 2", SMALL, STATE)
    assert len(made.lines) == 1
    assert "of size 1 is its operand" in made.lines[0]
    assert made.after.pins == made.before.pins
    given = made.inputs(torch.float32)
    given[0][0, 0], given[0][1] = math.nan, math.inf
    expected, found = made.both(made.model(torch.float32), given)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_an_input_of_size_one_is_pinned(subject: Make) -> None:
    made = subject("torch.tanh(x * 2).mean(1)", "torch.randn(3, 1)")
    assert len(made.lines) == 1
    assert [(g.text, g.value) for g in made.after.pins][-1] == ("x.shape[1:2]", "(1,)")


@pytest.mark.parametrize(
    "forward",
    [
        "torch.softmax(x, 1)",  # 1, but NaN where x is NaN or infinite
        "x - x.mean(1, keepdim=True)",  # 0 likewise: the mean alone goes
        "x.view(-1, 1).sum(1)",
        "x.sum(1, dtype=torch.float64)",
        "x.mean(1)",  # the result would be the input itself
        "[x.tanh()] * 2 + [x.tanh().sum((0, 1))]",
        "x.std(1)",
        "torch.max(x.tanh(), 1)[1]",
    ],
)
def test_refused_of_size_one(forward: str, subject: Make) -> None:
    made = subject(forward, "torch.randn(3, 1)")
    if "- x.mean" not in forward:
        assert made.lines == ()
    given = [torch.tensor([[math.nan], [math.inf], [-math.inf]])]
    expected, found = made.both(made.model(), given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_chain_of_level_2_task_18(subject: Make) -> None:
    forward = (
        "torch.max(self.layer(x).sum(1, keepdim=True), dim=1, keepdim=True)[0]"
        ".mean(1, keepdim=True).logsumexp(1, keepdim=True).logsumexp(1, keepdim=True)"
    )
    made = subject(forward, SMALL, LINEAR)
    assert len(made.lines) == 5
    close(*reversed(made.both(made.model(), made.inputs())))
    kept = [step.node.packet for step in plan(made.after).steps if isinstance(step, Library)]
    assert set(kept) == {"to", "unflatten", "sum", "linear"}


# --- the same bit for bit ------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, 1e-45, -1e-45]
SPECIAL += [1e-40, 6e-8, -6e-8, 6e-5, 3.4e38, -3.4e38, 65504.0, 1.5, 2.5, 0.1, 0.7, -0.7, 20.0]


def sweep(dtype: torch.dtype) -> torch.Tensor:
    """Special values, all of a half dtype, or random bits of float32; as many as whole vectors."""
    torch.manual_seed(2)
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31 - 1, (1 << 15,), dtype=torch.int32)
        return torch.cat([torch.tensor(SPECIAL), bits.view(dtype), torch.randn(1 << 15) * 4])
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits; of NaN there is one."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    nan = torch.isnan(found)
    ints = {4: torch.int32, 2: torch.int16}[found.element_size()]
    bits = [torch.where(nan, 0, x.contiguous().view(ints)) for x in (found, expected)]
    return torch.equal(nan, torch.isnan(expected)) and torch.equal(*bits)


EXACT = [
    "torch.tanh(x).clamp(-1, 1)",
    "F.hardtanh(torch.tanh(x))",
    "torch.sigmoid(x).clamp(0.0, 1.0)",
    "torch.sigmoid(x).clamp(min=-0.5)",
    "torch.sigmoid(x).clamp_max(1)",
    "F.relu(torch.sigmoid(x))",
    "F.relu(torch.exp(x))",
    "F.relu(x.abs())",
    "F.relu6(torch.sigmoid(x))",
    "F.relu(F.relu(x))",
    "F.relu6(F.relu6(x))",
    "F.hardtanh(x, -2.0, 2.0).clamp(-2.5, 3)",
    "x.clamp(-0.1, 0.7).clamp(-0.1, 0.7)",
    "x.clamp(0.1, 0.7).clamp(0.1, 0.8)",
    "x.clamp(min=3.0, max=1.0).clamp(0.5, 2)",
    "F.hardtanh(F.gelu(torch.tanh(x)))",
    "F.hardtanh(F.gelu(torch.tanh(x), approximate='tanh'))",
    "F.silu(F.relu6(x)).clamp(-1, 6)",
    "F.mish(torch.sigmoid(x)).clamp(-1, 1)",
    "F.leaky_relu(F.relu(x))",
    "F.leaky_relu(torch.sigmoid(x), 0.2)",
    "F.threshold(torch.sigmoid(x), -0.5, 7.0)",
    "torch.abs(torch.abs(x))",
    "torch.abs(torch.sigmoid(x))",
    "torch.abs(torch.square(x))",
    "torch.floor(torch.floor(x))",
    "torch.sign(torch.sign(x))",
    "-(-torch.tanh(x))",
    "torch.tanh(x) * 1",
    "torch.tanh(x) / 1.0",
    "torch.tanh(x) ** 1",
    "torch.tanh(x) - 0",
    "torch.tanh(x) + (-0.0)",
    "torch.sigmoid(x) + 0",
    "x.abs() + 0.0",
    "F.dropout(torch.tanh(x), 0.0, True)",
    "F.dropout(torch.tanh(x), 0.5, False)",
    "torch.nan_to_num(torch.sigmoid(torch.nan_to_num(x)))",
    "F.hardsigmoid(x).clamp(0, 1)",
    "F.hardtanh(torch.tanh(x).reshape(2, -1).unsqueeze(0))",
    "torch.tanh(x).reshape(2, -1).max(0)[0].clamp(-1, 1)",
    "F.max_pool1d(torch.tanh(x).reshape(1, 2, -1), 2).clamp(-1, 1)",
]


@pytest.mark.parametrize("forward", EXACT)
def test_bit_for_bit(forward: str, subject: Make) -> None:
    made = subject(f"{forward} + y", "torch.randn(64), torch.randn(())")
    assert len(made.lines) == 1
    assert "bit for bit" in made.lines[0]
    alone = subject(f"torch.sigmoid(y), {forward}", "torch.randn(64), torch.randn(1)")
    for dtype in DTYPES:
        x = sweep(dtype)
        x = x[: len(x) // 64 * 64]
        y = torch.zeros(1, dtype=dtype)
        expected, found = alone.both(alone.model(), [x, y])
        assert same_bits(found[1], expected[1]), dtype
        expected, found = made.both(made.model(), [x, y[0]])
        assert same_bits(found, expected), dtype


@pytest.mark.parametrize(
    "forward",
    [
        "torch.tanh(x).clamp(-0.9, 1)",
        "torch.sigmoid(x).clamp(0, 0.999)",
        "torch.sin(x).clamp(-1, 1)",
        "F.relu(torch.tanh(x))",
        "F.relu(F.relu(x) + (-0.0) * y)",
        "F.gelu(x).clamp(-1, 1)",
        "x.clamp(0.1, 0.7).clamp(0.2, 0.7)",
        "torch.tanh(x) + 0",  # -0 would become 0
        "torch.tanh(x) - (-0.0)",
        "torch.abs(F.relu(x))",  # relu may keep -0
        "torch.nan_to_num(torch.sigmoid(x))",
        "torch.nan_to_num(torch.nan_to_num(x, nan=float('nan')).sigmoid())",
        "F.leaky_relu(F.relu(x), -0.1)",
        "F.leaky_relu(F.relu(x), float('inf'))",
        "torch.tanh(x) * self.scale",  # 1 now, and another number when it is set
        "torch.tanh(x).clamp(-self.scale, self.scale)",
        "torch.div(torch.tanh(x), 1, rounding_mode='floor')",
        "torch.add(torch.tanh(x), 0, alpha=float('inf'))",
        "F.dropout(x, 0.5, True)",
        "torch.round(torch.round(x, decimals=1), decimals=1)",
        "torch.clamp(torch.tanh(x), y, y)",
        "x * 1",  # the result would be the input itself
        "F.threshold(F.relu(x), 0.0, 7.0)",
        "[torch.tanh(x)] and [(t := torch.tanh(x)), t.clamp(-1, 1)]",  # two results, one memory
    ],
)
def test_not_bit_for_bit(forward: str, subject: Make) -> None:
    made = subject(forward + (" + y" if "y" not in forward and forward[0] not in "x[" else ""),
                   "torch.randn(64), torch.randn(())", "self.scale = 1.0")  # fmt: skip
    assert made.lines == ()


def test_values_written_in_place_are_not_known(subject: Make) -> None:
    forward = "((t := torch.sigmoid(x)), t.mul_(9), t.clamp(0, 1) + 1)[2]"
    assert subject(forward, "torch.randn(64)").lines == ()
    forward = "((t := torch.sigmoid(x)), (c := t.clamp(0, 1)), t.mul_(9), c + 1)[3]"
    assert subject(forward, "torch.randn(64)").lines == ()


@pytest.mark.parametrize("name", [*BOUNDED, *DAMPED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_hold(name: str, dtype: torch.dtype) -> None:
    """Over every value of the half dtypes; a row that says no NaN or no -0 makes none."""
    found = BOUNDED.get(name, Range(DAMPED.get(name, 0.0)))
    function = getattr(torch, name, None) or getattr(nn.functional, name)
    x = sweep(dtype)
    y = function(x) if name != "softmax" else function(x[: len(x) // 8 * 8].reshape(-1, 8), 1)
    numbers = y[~y.isnan()].double()
    assert numbers.min() >= found.low
    assert numbers.max() <= found.high
    if not found.nan:
        assert torch.equal(y.isnan(), x.isnan())
    if not found.minus:
        assert not (torch.signbit(y) & (y == 0)).any()
    if name in DAMPED:
        # PyTorch's gelu for AVX-512 doubles x on the way, its GPU code does not.
        below = x <= torch.finfo(dtype).max / 2
        assert (y <= x.clamp(min=0))[below & ~y.isnan()].all()


# --- the whole way -------------------------------------------------------------------------------


def test_rewrites_are_the_same_every_time_and_end(subject: Make) -> None:
    made = subject("self.layer(x).sum(1, keepdim=True).logsumexp(1)", SMALL, LINEAR)
    assert rewrite(made.before) == (made.after, made.lines)
    assert rewrite(made.after) == (made.after, ())


def test_long_and_doubling_graphs_end(subject: Make) -> None:
    text = "x"
    for _ in range(60):
        text = f"((t := {text}) + t)"
    assert subject(f"{text}.sum(1)").lines == ()
    made = subject("torch.relu(x)" + " * 2 + 1" * 150 + " + self.layer(x).sum()", SMALL, LINEAR)
    assert len(made.lines) == 1


def test_both_modes_are_rewritten(subject: Make) -> None:
    init = f"{LINEAR}\nself.drop = nn.Dropout(0.5)"
    made = subject("self.drop(torch.tanh(x)) + self.layer(x).sum()", SMALL, init)
    others = [graph for graph in (made.after, made.after.other) if graph is not None]
    assert len(others) == 2
    assert ["dropout" in packets(graph) for graph in others] == [True, False]
    assert len(made.lines) == 2


TASK = references.reference_text(
    "def forward(self, x):\n    return self.layer(x).mean(1, keepdim=True) * 2",
    "torch.randn(3, n)", "self.layer = nn.Linear(64, 8)",
)  # fmt: skip


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


def cli(*arguments: object) -> str:
    done = CliRunner().invoke(generate.main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_render_marks_the_file(task: Path, tmp_path: Path) -> None:
    plain, rewritten = tmp_path / "plain", tmp_path / "rewritten"
    cli("render", task, "-o", plain)
    cli("render", task, "-o", rewritten, "--algebra")
    text = (rewritten / "task.py").read_text()
    assert "# Algebra: mean over dim 1 of linear is the product of x and the mean of" in text
    assert algebra_lines(plain / "task.py") == []
    (line,) = algebra_lines(rewritten / "task.py")
    assert line.endswith(REAL)
    cli("render", task, "-o", rewritten, "--algebra", "--check")
    task.write_text(TASK.replace(".mean(1, keepdim=True)", ""))
    cli("render", task, "-o", plain)
    cli("render", task, "-o", rewritten, "--algebra")
    assert (plain / "task.py").read_bytes() == (rewritten / "task.py").read_bytes()


def test_explain_tells_of_it(task: Path) -> None:
    assert "  algebra: mean over dim 1 of linear is" in cli("explain", task, "--algebra")
    assert "algebra" not in cli("explain", task)


def test_rows_tell_of_it(task: Path, tmp_path: Path) -> None:
    for flags in ([], ["--algebra"]):
        cli("render", task, "-o", tmp_path / "out", *flags)
        job = jobs.Job("bench", task, tmp_path / "out" / "task.py", jobs.bench_options())
        row = jobs.row(job, {}, {"status": "ok"})
        assert row["algebra"] is bool(flags)


def row(name: str, ours: float, algebra: bool) -> dict[str, Any]:
    milliseconds = {"solution": ours, "eager": 2.0}
    return {
        "task": "bench", "reference": f"level2/{name}.py", "status": "ok", "sha256": f"{algebra}",
        "milliseconds": milliseconds, "algebra": algebra,
    }  # fmt: skip


def test_the_report_counts_them_apart() -> None:
    rows = [row("a", 1.0, False), row("a", 0.01, True), row("b", 0.5, False)]
    results = report.Summary(report.merge(rows))
    assert [task.name for task in results.tasks] == [
        "level2/a.py", "level2/a.py (algebra)", "level2/b.py",
    ]  # fmt: skip
    assert results.geomean("eager") == pytest.approx(math.sqrt(8.0))
    assert results.with_algebra is not None
    assert results.with_algebra.geomean("eager") == pytest.approx(200.0)
    assert results.counts["algebra"] == 1
    text = report.markdown(rows)
    assert "Rendered with algebra, and counted in this table alone" in text
    assert "algebra" not in report.markdown(rows[:1])


def test_refs_of_results_are_renamed(subject: Make) -> None:
    made = subject("{'a': [self.layer(x).sum(1, keepdim=True)], 'b': x * 2}", SMALL, LINEAR)
    output = made.after.output
    assert not isinstance(output, Ref)
    assert [name in packets_of(made.after) for name in made.after.results] == [True, True]


def packets_of(graph: Graph) -> set[str]:
    return {node.result for node in graph.nodes}


def test_verify_leaves_infinities_out_where_arithmetic_is_real(task: Path, tmp_path: Path) -> None:
    """A row with one infinity sums infinities of both signs in the reference, which is NaN."""
    reference = TASK.replace(" * 2", "")  # no kernel is left, so that it runs on the CPU
    task.write_text(reference)
    cli("render", task, "-o", tmp_path / "out", "--algebra")
    text = (tmp_path / "out" / "task.py").read_text()
    assert "load_inline" not in text
    row = examine(tmp_path, reference, text, "values")
    assert row["status"] == "ok", row["message"]
    left_out = [c["name"] for c in row["checks"] if "algebra" in c["message"]]
    assert len(left_out) == 9
    assert all("inf" in name for name in left_out)
    row = examine(tmp_path, reference, text.replace("# Algebra", "# algebra"), "values")
    assert row["status"] == "wrong"
