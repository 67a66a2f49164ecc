"""Plans: which regions are made, that they run in order, and that they give the model's answer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import references
import torch
from torch import nn

from modelnew import emit, invariants
from modelnew import interpret as interpreting
from modelnew.formula import formula
from modelnew.forward import forward_lines
from modelnew.interpret import interpret
from modelnew.ir import (
    Graph,
    Joined,
    Library,
    Output,
    Plan,
    Pointwise,
    Ref,
    Tensor,
    refs_in,
    step_reads,
    step_writes,
)
from modelnew.plan import MAX_OPERANDS, plan
from modelnew.reference import load
from modelnew.trace import trace

MODELS = Path(__file__).resolve().parent.parent / "reference_models"
NAMES = sorted(path.stem for path in MODELS.glob("*.py"))


def reference_text(forward: str, inputs: str = "torch.randn(3, n)", init: str = "") -> str:
    return references.reference_text(forward, inputs, init, n=7)


TWO = "torch.randn(3, n), torch.randn(3, n)"
MANY = [f"a{i}" for i in range(130)]

TEXTS: Mapping[str, str] = {
    "chain": reference_text(
        """
        def forward(self, x):
            for i in range(120):
                x = torch.tanh(x) * 1.01 + i
            return x
        """
    ),
    "doubling": reference_text(
        """
        def forward(self, x):
            for _ in range(14):
                x = x * torch.sigmoid(x)
            return x
        """
    ),
    "linear_between": reference_text(
        """
        def forward(self, x):
            return torch.relu(self.linear(torch.sigmoid(x) * x) + 1)
        """,
        init="self.linear = nn.Linear(7, 7)",
    ),
    "residual": reference_text(
        """
        def forward(self, x):
            h = F.gelu(x) * 2
            return torch.tanh(h + self.linear(h))
        """,
        init="self.linear = nn.Linear(7, 7)",
    ),
    "residuals": reference_text(
        """
        def forward(self, x):
            for layer in self.layers:
                x = x + F.silu(layer(x * 0.5))
            return x, x * 2
        """,
        init="self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))",
    ),
    "outputs": reference_text(
        """
        def forward(self, x, y):
            s = x + y
            return s, s * 2, torch.relu(x), s > 0
        """,
        TWO,
    ),
    "cycle_bait": reference_text(
        """
        def forward(self, x):
            a = torch.exp(x)
            b = a.sum(1, keepdim=True)
            return a, a / b, x + 1
        """
    ),
    "bias": reference_text(
        """
        def forward(self, x):
            return x + torch.exp(self.bias * 2)
        """,
        init="self.bias = nn.Parameter(torch.randn(7))",
    ),
    "shared_bias": reference_text(
        """
        def forward(self, x, y):
            b = torch.exp(self.bias)
            return x + b, y * b
        """,
        "torch.randn(3, n), torch.randn(5, n)",
        "self.bias = nn.Parameter(torch.randn(7))",
    ),
    "shared_and_returned": reference_text(
        """
        def forward(self, x, y):
            b = torch.exp(self.bias)
            return b, x + b, y * b
        """,
        "torch.randn(3, n), torch.randn(5, n)",
        "self.bias = nn.Parameter(torch.randn(7))",
    ),
    "many": reference_text(
        f"""
        def forward(self, {", ".join(MANY)}):
            return {" + ".join(f"{a} * {i + 1}" for i, a in enumerate(MANY))}
        """,
        "*(torch.randn(2, n) for _ in range(130))",
    ),
    "many_outputs": reference_text(
        """
        def forward(self, x):
            return [torch.relu(x) * i for i in range(60)]
        """
    ),
    "in_place": reference_text(
        """
        def forward(self, x):
            y = self.linear(x)
            y += 1
            F.relu_(y)
            y.mul_(y)
            return y
        """,
        init="self.linear = nn.Linear(7, 7)",
    ),
    "in_place_of_a_step": reference_text(
        """
        def forward(self, x):
            y = x * 2
            z = y
            y.add_(1)
            return z + y
        """
    ),
    "in_place_input": reference_text(
        """
        def forward(self, x, y):
            a = x * 2
            x.add_(1)
            b = x * 2
            return a + y, b + y
        """,
        TWO,
    ),
    "in_place_view": reference_text(
        """
        def forward(self, x):
            y = x * 2
            first = y[:, 0]
            before = y + 1
            first.mul_(3)
            return before, y + 1
        """
    ),
    "assignment": reference_text(
        """
        def forward(self, x):
            y = torch.relu(x)
            y[:, 1:3] = 0
            y[0] = x[1]
            return y + 1
        """
    ),
    "in_place_buffer": reference_text(
        """
        def forward(self, x):
            old = self.count * 1.0
            self.count.add_(1)
            return x + old, x + self.count
        """,
        init='self.register_buffer("count", torch.zeros(1))',
    ),
    "moved": reference_text(
        """
        def forward(self, x, h):
            return torch.cat([x, h.to(x.device)], 1) * 2, h.to(torch.float32)
        """,
        "torch.randn(3, 8), torch.randn(3, 8)",
    ),
    "dtype_of_an_input": reference_text(
        """
        def forward(self, x):
            ones = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
            fixed = torch.full((3,), 2.0, dtype=torch.float32)
            return x + ones, fixed, torch.cumsum(x, 1, dtype=x.dtype), self.layer(x).to(x.dtype)
        """,
        "torch.randn(3, 8)",
        "self.layer = nn.Linear(8, 2)",
    ),
    "batch": reference_text(
        """
        def forward(self, x, y):
            b, t, c = x.shape
            h = x.view(b, t, 2, -1).transpose(1, 2).reshape(b * 2, t, -1)
            h = torch.bmm(h, torch.ones(b * 2, c // 2, 3)) / b
            return (h * y.view(y.size(0), 1, 1).repeat(2, 1, 1)).view(b, -1), torch.zeros(b, 4)
        """,
        "torch.randn(5, 3, 8), torch.randn(5)",
    ),
    "counters": reference_text(
        """
        def forward(self, x):
            for count in (self.a, self.b, self.c, self.c, self.d, self.e, self.f):
                count.add_(1)
            self.g.add_(2)
            return x * self.d + 1, self.e
        """,
        init="""
        for name in "abcdefg":
            self.register_buffer(name, torch.tensor(1 if name < "f" else 2))
        """,
    ),
    "places": reference_text(
        """
        def forward(self, x):
            both, values, none = torch.max(x, 1), x.min(dim=-1, keepdim=True)[0], x.max(0)
            return both, values * 2, none.values, x.min(0).indices, (x > 0).max(1)[0]
        """,
        "torch.randn(n, 8, 4).where(torch.rand(n, 8, 4) < 0.9, float('nan'))",
    ),
    "in_place_promoted": reference_text(
        """
        def forward(self, x, y):
            z = x * 2
            z.add_(y)
            return z * 3
        """,
        "torch.randn(3, n).half(), torch.randn(3, n)",
    ),
    "in_place_chunk": reference_text(
        """
        def forward(self, x):
            y = x * 2
            a, b = y.chunk(2, 1)
            a.add_(b[:, :3].sum())
            return y * 1
        """
    ),
    "in_place_unbound": reference_text(
        """
        def forward(self, x):
            y = torch.sigmoid(x)
            rows = y.unbind(0)
            rows[1].mul_(2)
            return y + 1, rows[0] * 3
        """
    ),
    "in_place_comparison": reference_text(
        """
        def forward(self, x):
            y = x * 2
            y.gt_(0)
            return y * 3
        """
    ),
    "in_place_after_dropout": reference_text(
        """
        def forward(self, x):
            y = x * 2
            z = F.dropout(y, 0.5, self.training)
            z.add_(1)
            return y + z
        """
    ),
    "in_place_after_type_as": reference_text(
        """
        def forward(self, x, y):
            a = x * 2
            b = a.type_as(y)
            b.add_(1)
            return a + b
        """,
        TWO,
    ),
    "in_place_after_einsum": reference_text(
        """
        def forward(self, x):
            a = x * 2
            b = torch.einsum("ij->ji", a)
            b.add_(1)
            return a + 1
        """
    ),
    "in_place_constant": reference_text(
        """
        def forward(self, x):
            c = torch.tensor([1.0, 2.0, 3.0])
            c += 1
            c.mul_(2)
            return x * c[:, None], c
        """
    ),
    "random_in_fused_order": reference_text(
        """
        def forward(self, x, y):
            a = torch.relu(x)
            r = F.rrelu(a - 1, training=True)
            d = F.dropout(y, 0.5, True)
            return a, r, d, x * d
        """,
        TWO,
    ),
    "random_unused": reference_text(
        """
        def forward(self, x):
            F.rrelu(x, training=True)
            return torch.rand_like(x) + 1
        """
    ),
    "dropout": reference_text(
        """
        def forward(self, x, y):
            a = F.dropout(torch.tanh(x * y), 0.5, self.training)
            b = F.dropout(x, 0.3, self.training)
            return a + b
        """,
        TWO,
    ),
    "random": reference_text(
        """
        def forward(self, x):
            a = torch.rand_like(torch.relu(x) + 1)
            unused = torch.rand_like(x)
            b = torch.randn_like(x)
            c = torch.rand_like(b * x)
            return c + 2, b * a
        """
    ),
    "dead": reference_text(
        """
        def forward(self, x):
            unused = torch.exp(x).sum() + torch.cumsum(x, 1)
            dead = torch.sin(x)
            return x + 1
        """
    ),
    "names": reference_text(
        """
        def forward(self, x, y, z):
            return x * 2 + 1, y * 2 + 1, z * 2 + 1
        """,
        "torch.randn(3, n), torch.randn(5, n), torch.randn(2, n)",
    ),
    "views": reference_text(
        """
        def forward(self, x):
            y = torch.relu(x).t().reshape(-1, 3)
            return (y * 2)[1:], y.unsqueeze(0) + 1, x.detach() * x.expand(2, 3, 7)
        """
    ),
    "norms": reference_text(
        """
        def forward(self, x):
            y = F.relu(self.norm(self.conv(x)))
            return F.softmax(y.flatten(1) * 0.5, 1) + 1
        """,
        "torch.randn(2, 3, 9, 9)",
        "self.conv = nn.Conv2d(3, 4, 3)\nself.norm = nn.BatchNorm2d(4)",
    ),
    "masks": reference_text(
        """
        def forward(self, x, mask):
            low = (x < 0) & (x > -1)
            y = torch.where(mask, x, x.masked_fill(low.logical_or(mask), -1.0))
            return y.clamp(min=-0.5), low, ~mask
        """,
        "torch.randn(3, n), torch.rand(n) > 0.5",
    ),
    "dtypes": reference_text(
        """
        def forward(self, x, k):
            y = x.double() * 2
            return y.float() + k, k * 2, (x + k).to(torch.float16) * 3
        """,
        "torch.randn(3, n), torch.arange(n)",
    ),
    "containers": reference_text(
        """
        def forward(self, x, state):
            h = torch.tanh(x + state["h"])
            return {"h": h, "rest": [h * 2, (x, None)], "same": h}
        """,
        'torch.randn(3, n), {"h": torch.randn(3, n), "c": [torch.randn(2)]}',
    ),
    "recurrent": reference_text(
        """
        def forward(self, x):
            h = torch.zeros(3, 7)
            for step in range(4):
                z = torch.sigmoid(self.gate(x) + h)
                h = z * h + (1 - z) * torch.tanh(self.cell(h))
            return h
        """,
        init="self.gate = nn.Linear(7, 7)\nself.cell = nn.Linear(7, 7)",
    ),
    "attention": reference_text(
        """
        def forward(self, q, k, v):
            scores = q @ k.transpose(-2, -1) / 7 ** 0.5
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
            return F.softmax(scores, -1) @ v * self.scale
        """,
        "*(torch.randn(2, 5, n) for _ in range(3))",
        "self.scale = 0.7",
    ),
    "passed_on": reference_text(
        """
        def forward(self, x, y):
            return y, x, self.weight, x
        """,
        TWO,
        "self.weight = nn.Parameter(torch.randn(2))",
    ),
}


@dataclass(frozen=True)
class Subject:
    """A model with real parameters and inputs, and the plan of its reference."""

    plan: Plan
    graph: Graph
    make: Callable[[], nn.Module]
    draw: Callable[[], list[Any]]

    def both(
        self, train: bool = True
    ) -> tuple[Any, Any, list[Any], list[Any], nn.Module, nn.Module]:
        """The plan's answer and the model's, from equal inputs, states and random draws."""
        torch.manual_seed(0)
        theirs = self.make().train(train)
        mine = copy.deepcopy(theirs)
        given = self.draw()
        own = copy.deepcopy(given)
        names = list(inspect.signature(theirs.forward).parameters)
        torch.manual_seed(1)
        expected = theirs(*given)
        torch.manual_seed(1)
        found = interpret(self.plan, mine, dict(zip(names, own, strict=False)))
        return found, expected, own, given, mine, theirs


def small(path: Path) -> dict[str, str]:
    """Small odd values, different ones, for the sizes among a file's constants."""
    space = references.namespace(path.read_text())
    names = [name for name, value in space.items() if type(value) is int]
    return {name: str(2 * i + 3) for i, name in enumerate(names)}


def subject_of(path: Path, overrides: Mapping[str, str]) -> Subject:
    graph = trace(load(path, overrides))
    made = plan(graph)
    invariants.check_graph(graph)
    invariants.check_plan(made)
    space = references.namespace(path.read_text())
    space.update({name: int(value) for name, value in overrides.items()})
    return Subject(
        made, graph, lambda: space["Model"](*space["get_init_inputs"]()), space["get_inputs"]
    )


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    folder = tmp_path_factory.mktemp("plans")

    @cache
    def get(name: str) -> Subject:
        if name in NAMES:
            path = MODELS / f"{name}.py"
            return subject_of(path, small(path))
        path = folder / f"{name}.py"
        path.write_text(TEXTS[name])
        return subject_of(path, {})

    return get


Get = Callable[[str], Subject]


def same(found: Any, expected: Any) -> bool:
    """Equal structure, dtypes, shapes, strides and bits."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and found.stride() == expected.stride()
            and torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))
            and torch.equal(found != found, expected != expected)
        )
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return (
            type(found) is type(expected)
            and len(found) == len(expected)
            and all(map(same, found, expected))
        )
    return bool(found == expected)


# --- the answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *TEXTS])
def test_plan_gives_the_models_answer(name: str, subject: Get) -> None:
    found, expected, own, given, mine, theirs = subject(name).both()
    assert same(found, expected)
    assert same(own, given), "an input was changed that the model leaves, or the other way round"
    assert same(dict(mine.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize("name", [*NAMES, *TEXTS])
def test_plan_of_one_mode_says_so(name: str, subject: Get) -> None:
    """A plan that names no mode is right in both."""
    made = subject(name)
    if made.graph.training is None:
        found, expected, *_ = made.both(train=False)
        assert same(found, expected)
    else:
        assert name in ("dropout", "in_place_after_dropout", "norms", "residual_block")


def test_counters_that_nothing_else_reads_move_at_once(subject: Get) -> None:
    made = subject("counters")
    together = [s.node for s in made.plan.steps if isinstance(s, Library) and s.node.mutates]
    assert [len(node.mutates) for node in together] == [1, 1, 1, 1, 1, 3]
    *_, mine, theirs = made.both()
    assert same(mine.state_dict(), theirs.state_dict())
    assert mine.state_dict()["c"] == 3


def test_the_places_of_extremes_are_sought_where_they_are_needed(subject: Get) -> None:
    steps = subject("places").plan.steps
    calls = [s.node.packet for s in steps if isinstance(s, Library) and not s.node.views]
    assert calls == ["max", "amin", "amax", "min", "amax"]


def test_a_move_to_a_device_keeps_whatever_dtype_there_is(subject: Get) -> None:
    made = subject("moved")
    x, h = torch.randn(3, 8).half(), torch.randn(3, 8).half()
    assert same(interpret(made.plan, made.make(), {"x": x, "h": h}), made.make()(x, h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_of_an_input_is_asked_for(dtype: torch.dtype, subject: Get) -> None:
    made = subject("dtype_of_an_input")
    model, x = made.make().to(dtype), torch.randn(3, 8).to(dtype)
    assert same(interpret(made.plan, model, {"x": x}), model(x))


@pytest.mark.parametrize("batch", [1, 2, 5, 12])
def test_a_plan_serves_other_batches(batch: int, subject: Get) -> None:
    made = subject("batch")
    model = made.make()
    x, y = torch.randn(batch, 3, 8), torch.randn(batch)
    assert same(interpret(made.plan, model, {"x": x, "y": y}), model(x, y))


@pytest.mark.parametrize("name", NAMES)
def test_references_leave_no_pointwise_call_to_pytorch(name: str, subject: Get) -> None:
    made = subject(name).plan
    left = {s.node.packet for s in made.steps if isinstance(s, Library) and not s.node.views}
    counted = {"_foreach_add_"} if made.other else set()  # batch normalization counts its batches
    assert left <= {"linear", "conv2d", "batch_norm", *counted}
    assert sum(not isinstance(step, Library) for step in made.steps) == 1 or made.other


def answer_of_the_text(made: Plan, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the lines of ModelNew.forward return, its kernels taken from `interpret`."""
    steps = [s for each in made.modes for s in each.steps if not isinstance(s, Library)]
    calls = {f"{s.name}_forward": partial(run_step, made, s, model, inputs) for s in steps}
    space: dict[str, Any] = {"torch": torch, "nn": nn, "_cuda": SimpleNamespace(**calls)}
    space["_run"] = lambda call, *args: call(*args)
    helpers = {"_part", "_padding"}
    space |= {name: partial(interpreting._own, name.removeprefix("_")) for name in helpers}
    lines = [f"    {line}" for line in forward_lines(made, emit.module(made).by_name)]
    exec("\n".join([f"def forward({', '.join(['self', *inputs])}):", *lines]), space)
    return space["forward"](model, *inputs.values())


def run_step(
    made: Plan, step: Pointwise | Joined, model: nn.Module, inputs: Mapping[str, Any], *args: Any
) -> Any:
    """One region on the tensors that the text hands to it."""
    names = [access.base for access in step.reads]
    assert len(args) == len(names) + len(step.scalars)
    given = dict(zip(names, args, strict=False))
    state = {name: f"given[{name!r}]" for name in names}
    output = Output("tuple", tuple(Ref(name) for name in step_writes(step)))
    alone = Plan(replace(made.graph, bindings=state, output=output), (step,))
    results = interpret(alone, model, {**inputs, "given": given})
    return results if len(results) > 1 else results[0]


@pytest.mark.parametrize("name", [*NAMES, *TEXTS])
def test_text_of_forward_gives_the_models_answer(name: str, subject: Get) -> None:
    """The same by the lines that the solution has: each binding is read where it stands."""
    made = subject(name)
    torch.manual_seed(0)
    theirs = made.make()
    mine = copy.deepcopy(theirs)
    given = made.draw()
    own = copy.deepcopy(given)
    torch.manual_seed(1)
    expected = theirs(*given)
    torch.manual_seed(1)
    names = list(inspect.signature(theirs.forward).parameters)
    found = answer_of_the_text(made.plan, mine, dict(zip(names, own, strict=False)))
    assert same(found, expected)
    assert same(own, given)
    assert same(dict(mine.state_dict()), dict(theirs.state_dict()))


def test_formulas_stay_short(subject: Get) -> None:
    """Each step uses the last one twice: written out in full, the formula doubles at each."""
    (kernel,) = subject("doubling").plan.kernels
    assert sum(map(len, formula(kernel))) < 20_000


# --- regions -------------------------------------------------------------------------------------


def shape_of(made: Plan) -> list[str]:
    """The steps in order: "kernel" or the operator of a library call."""
    return ["kernel" if isinstance(s, Pointwise) else s.node.packet for s in made.steps]


def kernel_writing(made: Plan, name: str) -> Pointwise:
    (step,) = (k for k in made.kernels if name in step_writes(k))
    return step


def test_a_chain_of_any_length_is_one_region(subject: Get) -> None:
    made = subject("chain").plan
    assert shape_of(made) == ["kernel"]
    (kernel,) = made.kernels
    assert len(kernel.body.statements) == 360
    assert step_reads(kernel) == ("x",)
    assert len(kernel.name) < 60


def test_regions_end_at_library_calls(subject: Get) -> None:
    made = subject("linear_between").plan
    assert shape_of(made) == ["kernel", "linear", "kernel"]
    assert [len(k.body.statements) for k in made.kernels] == [2, 2]


def test_a_value_needed_on_both_sides_is_written_once(subject: Get) -> None:
    made = subject("residual").plan
    assert shape_of(made) == ["kernel", "linear", "kernel"]
    first, last = made.kernels
    (shared,) = step_writes(first)
    assert shared in step_reads(last), "it is read back, not computed again"
    assert [node.packet for node in last.body.statements] == ["add", "tanh"]
    written = [name for k in made.kernels for name in step_writes(k)]
    assert len(written) == len(set(written))


def test_residuals_around_library_calls_make_no_cycle(subject: Get) -> None:
    made = subject("residuals").plan
    shape = shape_of(made)
    assert shape.count("linear") == 3
    assert shape.count("kernel") == 4, shape
    assert shape[0] == shape[-1] == "kernel"


def test_several_outputs_in_one_kernel(subject: Get) -> None:
    made = subject("outputs").plan
    assert shape_of(made) == ["kernel"]
    (kernel,) = made.kernels
    assert [t.dtype for t in kernel.writes] == ["float32"] * 3 + ["bool"]
    assert step_reads(kernel) == ("x", "y")


def test_outputs_on_two_sides_of_a_library_call_are_two_kernels(subject: Get) -> None:
    made = subject("cycle_bait").plan
    assert shape_of(made) == ["kernel", "sum", "kernel"]
    first, last = made.kernels
    assert [node.packet for node in last.body.statements] == ["div"]
    assert {node.packet for node in first.body.statements} == {"exp", "add"}


def test_broadcast_producers_are_inlined(subject: Get) -> None:
    (kernel,) = subject("bias").plan.kernels
    assert [node.packet for node in kernel.body.statements] == ["mul", "exp", "add"]
    assert [access.tensor.shape for access in kernel.reads] == [(3, 7), (7,)]
    assert [tensor.shape for tensor in kernel.writes] == [(3, 7)]


def test_a_small_shared_value_is_computed_twice_rather_than_written(subject: Get) -> None:
    made = subject("shared_bias").plan
    assert shape_of(made) == ["kernel", "kernel"]
    assert all("exp" in [n.packet for n in k.body.statements] for k in made.kernels)
    assert all(len(k.writes) == 1 for k in made.kernels)


def test_a_shared_value_that_is_written_anyway_is_read(subject: Get) -> None:
    made = subject("shared_and_returned").plan
    assert len(made.kernels) == 3
    assert sum("exp" in [n.packet for n in k.body.statements] for k in made.kernels) == 1


@pytest.mark.parametrize("name", ["many", "many_outputs"])
def test_too_many_operands_are_split(name: str, subject: Get) -> None:
    made = subject(name).plan
    assert all(isinstance(step, Pointwise) for step in made.steps)
    assert max(len(k.reads) + len(k.writes) for k in made.kernels) <= MAX_OPERANDS
    # No more parts than needed: each but the last is nearly full.
    assert len(made.kernels) <= (4 if name == "many" else 2)


def test_dead_code_is_dropped(subject: Get) -> None:
    made = subject("dead").plan
    assert shape_of(made) == ["kernel"]
    assert [node.packet for node in made.kernels[0].body.statements] == ["add"]


def test_kernel_names_are_different_identifiers(subject: Get) -> None:
    made = subject("names").plan
    steps = [step.name for step in made.steps if isinstance(step, Pointwise)]
    assert (steps, len(made.kernels)) == (["mul_add"] * 3, 1), "one kernel for all that are alike"
    for name in [*NAMES, *TEXTS]:
        names = [k.name for k in subject(name).plan.kernels]
        assert len(set(names)) == len(names)
        assert all(n.isidentifier() for n in names)


def test_results_that_are_no_kernels_values(subject: Get) -> None:
    assert subject("passed_on").plan.steps == ()


# --- calls in place ------------------------------------------------------------------------------


def test_in_place_on_private_values_becomes_functional(subject: Get) -> None:
    made = subject("in_place").plan
    assert shape_of(made) == ["linear", "kernel"]
    ops = [node.op for node in made.kernels[0].body.statements]
    assert [op.split(".")[1] for op in ops] == ["add", "relu", "mul"]
    assert shape_of(subject("in_place_of_a_step").plan) == ["kernel"]


def position(made: Plan, packet: str) -> int:
    return shape_of(made).index(packet)


def test_in_place_on_an_input_keeps_its_place(subject: Get) -> None:
    made = subject("in_place_input").plan
    at = position(made, "add_")
    first, second = made.steps[at - 1], made.steps[at + 1]
    assert isinstance(first, Pointwise)
    assert isinstance(second, Pointwise)
    assert "x" in step_reads(first), "x * 2 has to be formed before x changes"
    assert "x" in step_reads(second)


@pytest.mark.parametrize(
    ("name", "packets"),
    [
        ("in_place_view", {"mul_"}),
        ("in_place_chunk", {"add_"}),
        ("in_place_unbound", {"mul_"}),
        ("in_place_buffer", {"add_"}),
        ("assignment", {"copy_", "fill_"}),
    ],
)
def test_in_place_on_viewed_values_stays(name: str, packets: set[str], subject: Get) -> None:
    assert packets & set(shape_of(subject(name).plan))


# --- random calls --------------------------------------------------------------------------------


def test_random_calls_keep_their_order_and_number(subject: Get) -> None:
    drawn = [p for p in shape_of(subject("random").plan) if "rand" in p]
    assert drawn == ["rand_like", "rand_like", "randn_like", "rand_like"]
    rates = [
        step.node.value("p")
        for step in subject("dropout").plan.steps
        if isinstance(step, Library) and step.node.packet == "dropout"
    ]
    assert rates == [0.5, 0.3]


# --- traffic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *TEXTS])
def test_nothing_is_written_that_nobody_reads(name: str, subject: Get) -> None:
    made = subject(name).plan
    read = {n for step in made.steps for n in step_reads(step)} | set(refs_in(made.graph.output))
    read |= {n for step in made.steps if isinstance(step, Joined) for n in step.node.reads}
    for kernel in made.kernels:
        assert set(step_writes(kernel)) <= read, kernel.name
        reads = step_reads(kernel)
        assert len(reads) == len(set(reads))


def test_bytes(subject: Get) -> None:
    made = subject("bias").plan
    assert made.kernels[0].bytes == 4 * (21 + 7 + 21)
    assert made.bytes == 4 * (21 + 7 + 21)


# --- invariants see faults -----------------------------------------------------------------------


def graph_faults(graph: Graph) -> Mapping[str, tuple[Graph, str]]:
    first, *rest = graph.nodes
    nameless = {k: v for k, v in graph.tensors.items() if k != "x"}
    typeless = replace(first, outputs=(Tensor("unknown", (1,), "float32"),))
    return {
        "order": (replace(graph, nodes=(*rest, first)), "before they are defined"),
        "twice": (replace(graph, nodes=(first, *graph.nodes)), "defined twice"),
        "type": (replace(graph, tensors=nameless), "x has no type"),
        "output type": (replace(graph, nodes=(typeless, *rest)), "output without a type"),
        "result": (replace(graph, output=Ref("elsewhere")), "result is not defined"),
    }


def plan_faults(made: Plan) -> Mapping[str, tuple[Plan, str]]:
    first, call, last = made.steps
    assert isinstance(first, Pointwise)
    assert isinstance(last, Pointwise)

    def with_last(**changes: Any) -> Plan:
        return replace(made, steps=(first, call, replace(last, **changes)))

    body = last.body
    start, *others = body.statements
    other = Tensor("extra", (3, 9), "float32")
    return {
        "order": (replace(made, steps=(last, first, call)), "before they are made"),
        "missing": (replace(made, steps=(first, call)), "result is never made"),
        "name": (with_last(name=first.name), "two kernels have one name"),
        "vain read": (with_last(reads=(*last.reads, first.reads[0])), "reads in vain"),
        "no read": (with_last(reads=()), "reads what"),
        "writes": (with_last(writes=()), "writes other values"),
        "unknown operator": (
            with_last(body=replace(body, statements=(replace(start, op="aten.sort.default"),))),
            "has no row",
        ),
        "statements": (with_last(body=replace(body, statements=tuple(others))), "reads"),
        "twice": (
            with_last(body=replace(body, statements=(start, *body.statements))), "set twice"
        ),
        "shapes": (
            with_last(
                body=replace(body, results=(*body.results, "extra")), writes=(*last.writes, other)
            ),
            "results of shapes",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["order", "twice", "type", "output type", "result"])
def test_check_graph_sees(fault: str, subject: Get) -> None:
    graph = subject("residual").graph
    invariants.check_graph(graph)
    broken, message = graph_faults(graph)[fault]
    with pytest.raises(AssertionError, match=message):
        invariants.check_graph(broken)


@pytest.mark.parametrize(
    "fault",
    [
        "order",
        "missing",
        "name",
        "vain read",
        "no read",
        "writes",
        "unknown operator",
        "statements",
        "twice",
        "shapes",
    ],
)
def test_check_plan_sees(fault: str, subject: Get) -> None:
    made = subject("residual").plan
    invariants.check_plan(made)
    broken, message = plan_faults(made)[fault]
    with pytest.raises(AssertionError, match=message):
        invariants.check_plan(broken)


def test_plan_is_the_same_every_time(subject: Get) -> None:
    for name in ("residuals", "many", "outputs", "dropout"):
        assert plan(subject(name).graph) == subject(name).plan
