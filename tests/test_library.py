"""Library calls are written as people write them, and only where PyTorch then runs the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from modelnew import library
from modelnew.ir import Argument, Graph, Literal, Node, Ref, Tensor

TENSORS = {
    "x": Tensor("x", (4, 8), "float32"),
    "w": Tensor("w", (8, 8), "float32"),
    "b": Tensor("b", (8,), "float32"),
    "image": Tensor("image", (2, 8, 9, 9), "float32"),
    "kernel": Tensor("kernel", (8, 8, 3, 3), "float32"),
    "mask": Tensor("mask", (4, 8), "bool"),
}
X, W, B, IMAGE, KERNEL = (Ref(name) for name in ("x", "w", "b", "image", "kernel"))


def node(op: str, *given: object, **by_name: object) -> Node:
    """The call of `op`, arguments that are not given at their defaults."""
    _, packet, overload = op.split(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
    arguments = []
    for index, spec in enumerate(schema.arguments):
        is_given = index < len(given) or spec.name in by_name
        value = given[index] if index < len(given) else by_name.get(spec.name, spec.default_value)
        arguments.append(Argument(spec.name, value, not is_given, spec.kwarg_only))
    return Node(op, "r", tuple(arguments), (Tensor("r", (), "float32"),))


def line(call: Node) -> str:
    bindings = {"w": "self.linear.weight"}
    return library.call_line(call, Graph(TENSORS, bindings, ("x",), (call,), Ref("r")), {})


WRITTEN: Mapping[str, Node] = {
    "nn.functional.linear(x, self.linear.weight, b)": node("aten.linear.default", X, W, B),
    "nn.functional.conv2d(image, kernel, stride=[2, 2])": node(
        "aten.conv2d.default", IMAGE, KERNEL, stride=(2, 2)
    ),
    "torch.group_norm(image, 4, b, b, 1e-05)": node(
        "aten.group_norm.default", IMAGE, 4, B, B, 1e-5
    ),
    "torch.cat([x, x], 1)": node("aten.cat.default", (X, X), 1),
    "torch.where(mask, x, x)": node("aten.where.self", Ref("mask"), X, X),
    "x.unsqueeze(1)": node("aten.unsqueeze.default", X, 1),
    "x.softmax(-1)": node("aten.softmax.int", X, -1),
    "x.sum([1], True)": node("aten.sum.dim_IntList", X, (1,), True),
    "x.to(torch.float16)": node("aten.to.dtype", X, Literal("torch.float16")),
    "x.expand([3, 4, 8])": node("aten.expand.default", X, (3, 4, 8)),
    "torch.zeros([4], device=x.device)": node(
        "aten.zeros.default", (4,), device=Literal("x.device")
    ),
}
# A Python number becomes a tensor, `contiguous` asks before it calls, `slice` has no method.
KEPT = (
    node("aten.add.Scalar", X, 2.0),
    node("aten.contiguous.default", X),
    node("aten.slice.Tensor", X, 1, 0, 4, 2),
    node("aten.adaptive_avg_pool2d.default", IMAGE, (3, 3)),
)


@pytest.mark.parametrize("text", WRITTEN)
def test_written_as_people_write_it(text: str) -> None:
    assert line(WRITTEN[text]) == f"r = {text}"


@pytest.mark.parametrize("call", KEPT, ids=lambda call: call.op)
def test_the_operator_itself_where_no_function_reaches_it(call: Node) -> None:
    assert line(call).startswith(f"r = torch.ops.{call.op}(")


def test_a_call_that_goes_elsewhere_is_seen() -> None:
    sub = node("aten.sub.Tensor", X, Ref("b"))
    cases = {
        torch.sub: True,
        lambda a, b: torch.sub(b, a): False,
        lambda a, b: torch.sub(a, b, alpha=2): False,
        lambda a, b: torch.add(a, b): False,
        lambda a, b: torch.sub(a, b).neg(): False,
        lambda a, b: torch.sub(a, b, 1, 2): False,
    }
    for function, expected in cases.items():
        assert library._reaches(function, sub, TENSORS) is expected


def test_a_0_dim_tensor_is_asked_for_anew() -> None:
    """PyTorch may take one for a number, so what holds for a matrix need not hold for it."""
    tensors = {**TENSORS, "s": Tensor("s", (), "float32")}
    kinds = [library._kind(Ref(n), tensors) for n in "xs"]
    assert kinds[0] != kinds[1]
    calls = [node("aten.clamp.Tensor", X, max=Ref(name)) for name in ("b", "s")]
    fronts: library.Fronts = {}
    for call in calls:
        library.call_line(call, Graph(tensors, {}, ("x",), (call,), Ref("r")), fronts)
    assert len(fronts) == 2, "given by name it is as good a number"
