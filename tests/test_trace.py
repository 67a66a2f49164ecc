"""Traces: what stays live, what is guarded, what is pinned, and what is read from where."""

from __future__ import annotations

import ast
import logging
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from modelnew.invariants import check_graph
from modelnew.ir import Graph, Literal, Live, ModelNewError, Node, Output, Ref
from modelnew.reference import Reference, load
from modelnew.trace import trace

Trace = Callable[..., Graph]


def reference_text(
    forward: str, inputs: str, init: str, signature: str, arguments: str, before: str
) -> str:
    """A reference file; the first line of forward's body is line 9 plus those of `before`."""
    parts = [
        "import math",
        "import torch",
        "from torch import nn",
        *textwrap.dedent(before).strip("\n").splitlines(),
        f"class Model(nn.Module):\n    def __init__(self{signature}):\n        super().__init__()",
        *(f"        {line}" for line in textwrap.dedent(init).strip("\n").splitlines()),
        *(f"    {line}" for line in textwrap.dedent(forward).strip("\n").splitlines()),
        f"def get_inputs(): return [{inputs}]",
        f"def get_init_inputs(): return [{arguments}]",
    ]
    return "\n".join(parts) + "\n"


def body(expression: str) -> str:
    return f"def forward(self, x):\n    return {expression}"


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Reference]:
    def make(
        forward: str, inputs: str = "torch.randn(3, 7)", init: str = "", signature: str = "",
        arguments: str = "", before: str = "",
    ) -> Reference:  # fmt: skip
        path = tmp_path / "model.py"
        path.write_text(reference_text(forward, inputs, init, signature, arguments, before))
        return load(path)

    return make


@pytest.fixture
def traced(loaded: Callable[..., Reference]) -> Trace:
    def make(*args: Any, **kwargs: Any) -> Graph:
        graph = trace(loaded(*args, **kwargs))
        check_graph(graph)
        return graph

    return make


def lives(graph: Graph) -> dict[str, float]:
    """The text and the value of every live number."""
    found = [a.value for node in graph.nodes for a in node.args]
    return {v.text: v.value for v in found if isinstance(v, Live)}


def guards(graph: Graph) -> dict[str, str]:
    return {guard.text: guard.value for guard in graph.arguments}


def pins(graph: Graph) -> dict[str, str]:
    return {guard.text: guard.value for guard in graph.pins}


def pinned_sizes(graph: Graph) -> dict[str, int]:
    """Pins as one entry a dimension: `x.shape[0:2]` = (3, 4) is x.shape[0] = 3, x.shape[1] = 4."""
    found = {}
    for text, value in pins(graph).items():
        if text.endswith(".ndim"):
            continue
        match = re.fullmatch(r"(.*\.shape)\[(\d+)(:\d*)?\]", text)
        assert match is not None, text
        sizes = ast.literal_eval(value)
        for i, size in enumerate(sizes if isinstance(sizes, tuple) else (sizes,)):
            found[f"{match[1]}[{int(match[2]) + i}]"] = size
    return found


def numbers(node: Node) -> list[Any]:
    return [a.value for a in node.args if type(a.value) in (int, float)]


# --- live attributes -----------------------------------------------------------------------------

SCALE = {"init": "self.scale = scale", "signature": ", scale=0.3", "arguments": "0.3"}


@pytest.mark.parametrize(
    ("expression", "text", "value"),
    [
        ("x * self.scale", "self.scale", 0.3),
        ("x * (1.0 / self.scale)", "(1.0 / self.scale)", 1.0 / 0.3),
        ("x * -self.scale", "(-self.scale)", -0.3),
        ("x + (self.scale * 2 + 1)", "((self.scale * 2) + 1)", 1.6),
        ("x + abs(self.scale)", "abs(self.scale)", 0.3),
        ("x + (2 - self.scale)", "(2 - self.scale)", 1.7),
        ("x + self.scale ** 2", "(self.scale ** 2)", 0.09),
        ("x / self.scale", "self.scale", 0.3),
        ("torch.clamp(x, max=self.scale)", "self.scale", 0.3),
        ("nn.functional.leaky_relu(x, self.scale)", "self.scale", 0.3),
        ("torch.add(x, x, alpha=self.scale)", "self.scale", 0.3),
    ],
)
def test_live_expressions(traced: Trace, expression: str, text: str, value: float) -> None:
    graph = traced(body(expression), **SCALE)
    assert lives(graph) == {text: pytest.approx(value, rel=1e-12)}
    assert guards(graph) == pins(graph) == {}


@pytest.mark.parametrize("expression", ["x * -self.scale + 1.0", "(x - 2) * (1.0 / self.scale)"])
def test_the_text_reads_what_was_traced(loaded: Callable[..., Reference], expression: str) -> None:
    ref = loaded(body(expression), **SCALE)
    for text, value in lives(trace(ref)).items():
        assert eval(text, {"self": ref.model}) == value


def test_two_live_attributes_of_one_value_are_kept_apart(traced: Trace) -> None:
    init = "self.a = a\nself.b = b"
    graph = traced(
        body("x * self.a + self.b"), init=init, signature=", a=0.5, b=0.5", arguments="0.5, 0.5"
    )
    assert [type(v) for node in graph.nodes for v in numbers(node)] == [int]  # add's own alpha
    assert lives(graph) == {"self.a": 0.5, "self.b": 0.5}


@pytest.mark.parametrize("value", ["0.0", "1.0", "2.0", "-0.5", "1e-5", "1e30"])
def test_live_values_that_look_like_constants(traced: Trace, value: str) -> None:
    graph = traced(
        body("x * self.scale + 1.0"), init="self.scale = scale", signature=", scale",
        arguments=value,
    )  # fmt: skip
    assert lives(graph) == {"self.scale": float(value)}
    assert guards(graph) == {}


def test_one_tensor_given_twice_is_two_inputs(traced: Trace) -> None:
    """get_inputs() may give one tensor for both; a call gives two."""
    both = "def forward(self, x, y):\n    return torch.relu(x) * y"
    graph = traced(both, inputs="*[torch.rand(8)] * 2")
    assert graph.nodes[0].reads == ("x",)
    assert graph.nodes[1].reads[1:] == ("y",)


def test_live_attributes_of_submodules(traced: Trace) -> None:
    before = """
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale
            self.act = nn.LeakyReLU(scale / 2)
        def forward(self, x):
            return self.act(x * self.scale)
    """
    init = "self.layers = nn.Sequential(Scaled(0.5), Scaled(0.25))\nself.eps = 1e-5"
    graph = traced(body("self.layers(x) + self.eps"), init=init, before=before)
    assert lives(graph) == {
        "self.layers[0].scale": 0.5,
        "self.layers[0].act.negative_slope": 0.25,
        "self.layers[1].scale": 0.25,
        "self.layers[1].act.negative_slope": 0.125,
        "self.eps": 1e-5,
    }


def test_an_integer_argument_that_is_used_as_a_scalar_is_live(traced: Trace) -> None:
    graph = traced(
        body("x * self.scale"), init="self.scale = scale", signature=", scale", arguments="2"
    )
    assert lives(graph) == {"self.scale": 2.0}
    assert guards(graph) == {}


def test_float_arguments_of_forward_are_live(traced: Trace) -> None:
    graph = traced("def forward(self, x, p): return x * p + p / 2", "torch.randn(3, 7), 0.4")
    assert lives(graph) == {"p": 0.4, "(p / 2)": 0.2}
    assert graph.inputs == ("x",)
    assert pins(graph) == {}


def test_default_float_argument_of_forward_is_live(traced: Trace) -> None:
    assert lives(traced("def forward(self, x, p=0.4): return x * p")) == {"p": 0.4}


@pytest.mark.parametrize(
    ("kind", "value"), [("int", "2"), ("bool", "True"), ("str", "'sum'"), ("None", "None")]
)
def test_other_arguments_of_forward_are_pinned(traced: Trace, kind: str, value: str) -> None:
    graph = traced(
        "def forward(self, x, k): return x * 2 if k in (2, True, 'sum', None) else x",
        f"torch.randn(3, 7), {value}",
    )
    assert pins(graph) == {"k": value}, kind


# --- conditions ----------------------------------------------------------------------------------

BRANCH = "def forward(self, x):\n    if {}:\n        return x * self.scale\n    return x"


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("self.scale > 1", "(self.scale > 1)"),
        ("self.scale <= 0.3", "(self.scale <= 0.3)"),
        ("self.scale != 1.0", "(self.scale != 1.0)"),
        ("not self.scale", "bool(self.scale)"),
        ("2 > self.scale", "(self.scale < 2)"),
        ("self.scale * 2 > 1", "((self.scale * 2) > 1)"),
    ],
)
def test_conditions_are_recorded(traced: Trace, condition: str, text: str) -> None:
    graph = traced(BRANCH.format(condition), **SCALE)
    held = eval(text, {"self": type("Self", (), {"scale": 0.3})})
    assert pins(graph) == {text: repr(held)}
    taken = eval(condition, {"self": type("Self", (), {"scale": 0.3})})
    assert len(graph.nodes) == int(taken)


def test_hardtanh_records_its_own_condition(traced: Trace) -> None:
    init = "self.act = nn.Hardtanh(low, high)"
    graph = traced(body("self.act(x)"), init=init, signature=", low, high", arguments="-1.5, 2.0")
    assert lives(graph) == {"self.act.min_val": -1.5, "self.act.max_val": 2.0}
    assert pins(graph) == {"(self.act.min_val > self.act.max_val)": "False"}


def test_numbers_whose_digits_matter_are_guarded(traced: Trace) -> None:
    """math.sqrt reads the float itself: the result stays a constant, and right."""
    graph = traced(body("x * math.sqrt(self.scale)"), **SCALE)
    assert lives(graph) == {}
    assert guards(graph) == {"scale": "0.3"}
    assert numbers(graph.nodes[0]) == [] or graph.nodes[0].value("other") == 0.3**0.5
    assert graph.nodes[0].value("other") == pytest.approx(0.3**0.5, rel=1e-15)


@pytest.mark.parametrize(
    "expression", ["math.exp(self.scale)", "float(f'{self.scale:.3f}')", "torch.tensor(self.scale)"]
)
def test_other_ways_to_read_the_digits_are_guarded(traced: Trace, expression: str) -> None:
    graph = traced(body(f"x * {expression}"), **SCALE)
    text = repr(graph)
    assert "self.scale" in text or guards(graph) == {"scale": "0.3"}, "a stale constant"
    for node in graph.nodes:
        for number in numbers(node):
            assert number in (1, pytest.approx(0.3), pytest.approx(1.3498588075760032, rel=1e-14))


def test_an_attribute_that_forward_makes_a_tensor_of_stays_live(traced: Trace) -> None:
    init = "self.bound, self.scale = bound, scale"
    graph = traced(
        body("torch.minimum(x, torch.tensor(self.bound)) * self.scale"), init=init,
        signature=", bound, scale", arguments="0.5, 2.0",
    )  # fmt: skip
    assert guards(graph) == {}
    assert list(graph.numbers.values()) == [Live("self.bound", 0.5)]
    assert "torch.tensor(self.bound, dtype=torch.float32, device=x.device)" in (
        graph.bindings.values()
    )


def test_a_tensor_of_what_was_rounded_away_is_guarded(traced: Trace) -> None:
    graph = traced(body("x * torch.tensor(self.scale, dtype=torch.float16)"), **SCALE)
    assert guards(graph) == {"scale": "0.3"}


def test_a_size_that_forward_makes_a_tensor_of_is_pinned(traced: Trace) -> None:
    graph = traced(body("x * torch.tensor(float(x.shape[0]))"))
    assert pins(graph) == {"x.shape[0:1]": "(3,)"}


def test_a_mode_that_forward_makes_a_tensor_of_is_fixed(traced: Trace) -> None:
    graph = traced(body("x * torch.tensor(2.0 if self.training else 1.0)"))
    assert graph.training is True


@pytest.mark.parametrize("method", ["int(self.scale)", "round(self.scale)", "self.scale // 1"])
def test_integers_made_of_an_attribute_are_guarded(traced: Trace, method: str) -> None:
    graph = traced(
        body(f"x * ({method})"), init="self.scale = scale", signature=", scale", arguments="3.0"
    )
    assert lives(graph) == {}
    assert guards(graph) == {"scale": "3.0"}


def test_an_attribute_that_no_argument_sets_stays_live(traced: Trace) -> None:
    graph = traced(body("x * self.scale"), init="self.scale = 0.3")
    assert lives(graph) == {"self.scale": 0.3}


def test_a_baked_attribute_that_no_argument_sets_is_guarded_too(traced: Trace) -> None:
    """Attributes can be set after construction; the constant is then wrong without a check."""
    graph = traced(body("x * math.sqrt(self.scale)"), init="self.scale = 0.3")
    checked = {**guards(graph), **pins(graph)}
    assert any("scale" in text for text in checked), "model.scale = 0.5 is silently ignored"


# --- structural arguments ------------------------------------------------------------------------


def test_flag_and_sizes_are_guarded(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x):\n    y = self.conv(x)\n    return torch.relu(y) if self.act else y",
        "torch.randn(2, 3, 9, 9)",
        init="self.conv = nn.Conv2d(3, 4, kernel)\nself.act = act",
        signature=", kernel, act=True",
        arguments="3",
    )
    assert guards(graph) == {"kernel": "3", "act": "True"}
    assert lives(graph) == {}


@pytest.mark.parametrize(
    ("value", "guard"), [("'gelu'", "'gelu'"), ("None", "None"), ("(1, 2)", "(1, 2)")]
)
def test_arguments_of_other_types_are_guarded(traced: Trace, value: str, guard: str) -> None:
    graph = traced(
        body("x * 2"), init="self.kind = kind", signature=", kind", arguments=value
    )  # fmt: skip
    assert guards(graph) == {"kind": guard}


def test_an_argument_without_effect_is_free(traced: Trace) -> None:
    assert guards(traced(body("x * 2"), signature=", unused", arguments="5.0")) == {}


def test_integer_that_is_a_dimension_and_not_a_scalar(traced: Trace) -> None:
    graph = traced(body("x.sum(self.dim)"), init="self.dim = dim", signature=", dim", arguments="1")
    assert lives(graph) == {}
    assert guards(graph) == {"dim": "1"}


@pytest.mark.parametrize(
    ("module", "mode"),
    [("nn.Dropout(0.5)", True), ("nn.BatchNorm1d(7)", True), ("nn.ReLU()", None)],
)
def test_training_mode(traced: Trace, module: str, mode: bool | None) -> None:
    graph = traced(body("self.layer(x)"), init=f"self.layer = {module}")
    assert graph.training is mode
    assert (graph.other.training if graph.other else None) is (False if mode else None)


def test_a_part_that_is_frozen_is_checked(traced: Trace) -> None:
    """self.norm.eval() in the constructor is neither of the two modes; train() ends it."""
    init = "self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.5)\nself.norm.eval()"
    graph = traced(body("self.drop(self.norm(x))"), init=init)
    assert pins(graph)["self.norm.training"] == "False"


# --- what forward leaves behind ------------------------------------------------------------------


def test_tensors_that_forward_leaves_in_attributes(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x):\n    self.hidden = torch.tanh(x + self.hidden)\n"
        "    return self.hidden * 2",
        init="self.hidden = torch.zeros(3, 7)",
    )
    assert graph.assigned == (("self.hidden", Ref("tanh")),)
    assert graph.output == Ref("mul")


def test_a_buffer_that_forward_replaces(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x):\n    self.mean = self.mean * 0.9 + x.mean(0) * 0.1\n"
        "    return x - self.mean",
        init="self.register_buffer('mean', torch.zeros(7))",
    )
    assert graph.assigned == (("self.mean", Ref("add")),)


def test_a_counter_that_decides_nothing_is_let_go(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x):\n    self.calls += 1\n    return x * 2", init="self.calls = 0"
    )
    assert [node.op for node in graph.nodes] == ["aten.mul.Tensor"]


def test_a_counter_that_decides_the_result_is_refused(traced: Trace) -> None:
    with pytest.raises(ModelNewError, match=r"forward changes self\.calls"):
        traced(
            "def forward(self, x):\n    self.calls += 1\n    return x * self.calls",
            init="self.calls = 0",
        )


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "inputs", "pinned"),
    [
        ("x * 2", "torch.randn(3, 7)", {}),
        ("x * x.shape[1]", "torch.randn(3, 7)", {"x.shape[1]": 7}),
        ("x * x.shape[0]", "torch.randn(3, 7)", {}),
        ("x / len(x)", "torch.randn(3, 7)", {}),
        ("x * x.numel()", "torch.randn(3, 7)", {"x.shape[1]": 7}),
        ("x.view(x.size(0), -1)", "torch.randn(1, 7)", {}),
        ("x.view(1, -1)", "torch.randn(1, 7)", {}),
        ("x.view(-1, x.size(1)) * 2", "torch.randn(3, 1)", {"x.shape[1]": 1}),
        ("x * 2 if len(x) == 1 else x * 3", "torch.randn(1, 7)", {"x.shape[0]": 1}),
        ("x * (x.shape[0] + 1)", "torch.randn(3, 7)", {"x.shape[0]": 3}),
        ("x * (x.shape[0] // 2)", "torch.randn(4, 7)", {"x.shape[0]": 4}),
        ("x * min(x.shape[0], 3)", "torch.randn(3, 7)", {"x.shape[0]": 3}),
        ("x * max(x.shape[0], 3)", "torch.randn(3, 7)", {"x.shape[0]": 3}),
        ("sum([x] * len(x)) * len(x)", "torch.randn(3, 7)", {"x.shape[0]": 3}),
        ("x.sum(1, keepdim=True) + x", "torch.randn(3, 7)", {}),
        ("x.flatten(1) * 2", "torch.randn(3, 7, 5)", {}),
        ("x[:, :4]", "torch.randn(3, 7)", {}),
        ("x + torch.ones(7, device=x.device)", "torch.randn(3, 7)", {"x.shape[1]": 7}),
    ],
)
def test_sizes_that_the_graph_depends_on(
    traced: Trace, expression: str, inputs: str, pinned: Mapping[str, int]
) -> None:
    assert pinned_sizes(traced(body(expression), inputs)) == pinned


def test_view_pins_the_sizes_it_names(traced: Trace) -> None:
    """The second size might be another multiple of 8; a pin there is careful, not wrong."""
    found = pinned_sizes(traced(body("x.view(8, x.size(1), -1)"), "torch.randn(16, 3, 5)"))
    assert found["x.shape[1]"] == 3
    assert "x.shape[2]" not in found


def test_calls_follow_the_batch(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x, y): return x.view(len(x), 3, -1), y.repeat(2 * len(y), 1), x + 4",
        "torch.randn(4, 6), torch.randn(4, 6)",
    )
    texts = [a.value for node in graph.nodes for a in node.args if isinstance(a.value, tuple)]
    assert texts == [(Live("x.shape[0]", 4), 3, -1), (Live("x.shape[0] * 2", 4 * 2), 1)]
    assert pins(graph)["y.shape[0:1]"] == "x.shape[0:1]", "one batch, whichever is asked"
    assert "x.shape[0:1]" not in pins(graph)


def test_a_batch_that_is_asked_for_pins_the_rank_where_no_size_does(traced: Trace) -> None:
    assert pins(traced(body("x * len(x)"))) == {"x.ndim": "2"}


def test_a_branch_on_a_size_is_pinned(traced: Trace) -> None:
    """A threshold that no probe crosses still decides which graph is right."""
    for expression in ("x * 2 if x.shape[0] > 2 else x * 3", "len(x) * (x if len(x) > 2 else -x)"):
        graph = traced(body(expression))
        assert "x.shape[0]" in pinned_sizes(graph), "2 rows would silently be taken as 3"


def test_weights_pin_the_inner_size_alone(traced: Trace) -> None:
    graph = traced(body("self.layer(x)"), init="self.layer = nn.Linear(7, 5)")
    assert pinned_sizes(graph) == {"x.shape[1]": 7}


def test_sizes_that_belong_together_stay_free(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x, y, b): return x @ y + b",
        "torch.randn(3, 5), torch.randn(5, 9), torch.randn(9)",
    )
    assert pins(graph) == {}


def test_equal_sizes_with_different_roles(traced: Trace) -> None:
    graph = traced(body("x * x.shape[1]"), "torch.randn(4, 4)")
    assert "x.shape[1]" in pinned_sizes(graph)


def test_broadcast_sizes_stay_free(traced: Trace) -> None:
    graph = traced("def forward(self, x, y): return x + y", "torch.randn(3, 7), torch.randn(3, 1)")
    assert pins(graph) == {}


# --- what is read from where ---------------------------------------------------------------------


def test_parameters_buffers_and_constants(traced: Trace) -> None:
    init = """
    self.weight = nn.Parameter(torch.randn(7))
    self.layers = nn.ModuleList([nn.Linear(7, 7)])
    self.register_buffer("offset", torch.ones(7))
    self.plain = torch.zeros(7)
    """
    graph = traced(body("self.layers[0](x) * self.weight + self.offset - self.plain"), init=init)
    assert set(graph.bindings.values()) == {
        "x",
        "self.weight",
        "self.offset",
        "self.plain",
        "self.layers[0].weight",
        "self.layers[0].bias",
    }
    assert graph.inputs == ("x",)


def test_shared_parameters_are_read_in_one_place(traced: Trace) -> None:
    init = "self.a = nn.Linear(7, 7)\nself.b = nn.Linear(7, 7)\nself.b.weight = self.a.weight"
    graph = traced(body("self.b(self.a(x))"), init=init)
    weights = [text for text in graph.bindings.values() if text.endswith("weight")]
    first, second = (n.value("weight") for n in graph.nodes if n.packet == "linear")
    assert len(weights) in (1, 2)
    assert set(weights) <= {"self.a.weight", "self.b.weight"}
    assert len(weights) == 2 or first == second


def test_constants_made_in_forward(traced: Trace) -> None:
    graph = traced(body("x * torch.tensor(0.5) + torch.tensor([1.0, 2.0, 3.0])[:, None]"))
    texts = set(graph.bindings.values()) - {"x"}
    assert texts == {
        "torch.tensor(0.5, dtype=torch.float32, device=x.device)",
        "torch.tensor([1.0, 2.0, 3.0], dtype=torch.float32, device=x.device)",
    }


@pytest.mark.parametrize("value", ["float('inf')", "float('nan')", "-float('inf')"])
def test_constants_that_are_not_finite_are_python_text(traced: Trace, value: str) -> None:
    graph = traced(body(f"torch.maximum(x, torch.tensor({value}))"))
    (text,) = set(graph.bindings.values()) - {"x"}
    found = eval(text, {"torch": torch, "x": torch.zeros(1)})
    torch.testing.assert_close(found, torch.tensor(eval(value)), equal_nan=True)


def test_a_large_constant_is_refused(traced: Trace) -> None:
    with pytest.raises(ModelNewError, match=r"100 elements: register it as a buffer"):
        traced(body("x * torch.tensor([float(i) for i in range(100)])[:7]"))


def test_devices_and_dtypes_are_text(traced: Trace) -> None:
    graph = traced(body("x + torch.zeros(7, dtype=torch.float32)"))
    zeros = graph.nodes[0]
    assert zeros.value("dtype") == Literal("torch.float32")
    assert zeros.value("device") == Literal("x.device")


# --- containers ----------------------------------------------------------------------------------


def test_outputs_in_containers(traced: Trace) -> None:
    graph = traced(
        "def forward(self, x):\n    y = x * 2\n    return {'a': y, 'b': [y + 1, (x, None)]}"
    )
    match graph.output:
        case Output(
            "dict", (Ref(a), Output("list", (Ref(b), Output("tuple", (Ref(c), None))))), keys
        ):
            assert (a, b, c, keys) == ("mul", "add", "x", ("a", "b"))
        case other:
            pytest.fail(f"another structure: {other}")


def test_tuple_of_one_is_no_tensor(traced: Trace) -> None:
    assert traced(body("(x * 2,)")).output == Output("tuple", (Ref("mul"),))
    assert traced(body("x * 2")).output == Ref("mul")


def test_nested_inputs(traced: Trace) -> None:
    graph = traced(
        "def forward(self, xs, state):\n    return xs[0] + xs[1][0] * state['h']",
        "[torch.randn(3, 7), [torch.randn(3, 7)]], {'h': torch.randn(3, 7)}",
    )
    assert [graph.bindings[name] for name in graph.inputs] == ["xs[0]", "xs[1][0]", "state['h']"]
    assert all(name.isidentifier() for name in graph.inputs)


def test_names_are_identifiers_that_shadow_nothing(traced: Trace) -> None:
    graph = traced(
        "def forward(self, mul, torch_):\n    return mul * 2 * torch_",
        "torch.randn(3, 7), torch.randn(7)",
    )
    names = [*graph.bindings, *(node.result for node in graph.nodes)]
    assert len(set(names)) == len(names)
    assert not {"self", "torch", "nn"} & set(names)


# --- source lines, and no traces left ------------------------------------------------------------


def test_source_lines(traced: Trace, tmp_path: Path) -> None:
    graph = traced("def forward(self, x):\n    y = x * 2\n    z = torch.relu(y)\n    return z + y")
    found = [(n.source.line, n.source.text) for n in graph.nodes if n.source]
    assert found == [(8, "y = x * 2"), (9, "z = torch.relu(y)"), (10, "return z + y")]
    assert {n.source.file for n in graph.nodes if n.source} == {str(tmp_path / "model.py")}


def test_source_line_of_a_library_module_is_the_models(traced: Trace) -> None:
    graph = traced(body("self.layer(x)"), init="self.layer = nn.Sequential(nn.Linear(7, 5))")
    assert [n.source.text for n in graph.nodes if n.source] == ["return self.layer(x)"]


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_leaves_model_and_logging_as_they_were(
    loaded: Callable[..., Reference], fails: bool
) -> None:
    expression = "x * x.max().item()" if fails else "self.layer(x) * self.scale"
    ref = loaded(
        body(expression), init="self.layer = nn.BatchNorm1d(7)\nself.scale = 0.5",
    )  # fmt: skip
    attributes = {path: dict(vars(m)) for path, m in ref.model.named_modules()}
    keys = {path: {k: v for k, v in a.items() if k != "training"} for path, a in attributes.items()}
    modes = {path: m.training for path, m in ref.model.named_modules()}
    disabled, random = logging.root.manager.disable, torch.random.get_rng_state()
    grad = torch.is_grad_enabled()
    if fails:
        with pytest.raises(ModelNewError):
            trace(ref)
    else:
        trace(ref)
    assert {path: m.training for path, m in ref.model.named_modules()} == modes
    for path, module in ref.model.named_modules():
        now = {k: v for k, v in vars(module).items() if k != "training"}
        assert now.keys() == keys[path].keys()
        assert all(now[k] is keys[path][k] for k in now), path
    assert logging.root.manager.disable == disabled
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.is_grad_enabled() == grad


def test_a_logging_level_that_was_set_before_stays(loaded: Callable[..., Reference]) -> None:
    logging.disable(logging.INFO)
    try:
        trace(loaded(body("x * 2")))
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)


def test_modes_of_submodules_are_left_as_built(loaded: Callable[..., Reference]) -> None:
    """A constructor may freeze a part: self.norm.eval()."""
    ref = loaded(body("self.norm(x)"), init="self.norm = nn.BatchNorm1d(7)\nself.norm.eval()")
    trace(ref)
    assert ref.model.training
    assert not ref.model.get_submodule("norm").training


def test_traces_are_the_same_every_time(loaded: Callable[..., Reference]) -> None:
    ref = loaded(body("torch.tanh(x * self.scale) + self.scale"), **SCALE)
    first = trace(ref)
    assert trace(ref) == first
