"""Library calls are written as people write them, and only where PyTorch then runs the same."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from references import reference_text

from modelnew import library, pipeline
from modelnew.ir import Argument, Graph, Literal, Node, Ref, Tensor
from modelnew.measure.load import execute_reference, execute_solution
from modelnew.render import options

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
    "x.to(x.device)": node("aten.to.dtype_layout", X, device=Literal("x.device")),
    "torch.einsum('ij,jk->ik', x, self.linear.weight)": node(
        "aten.einsum.default", "ij,jk->ik", (X, W), path=(0, 1)
    ),
    "x.contiguous()": node("aten.contiguous.default", X),
    "x[:, :4:2]": node("aten.slice.Tensor", X, 1, 0, 4, 2),
    "x[1:]": node("aten.slice.Tensor", X, 0, 1, sys.maxsize, 1),
    "image[:, :, :, -3:-1]": node("aten.slice.Tensor", IMAGE, -1, -3, -1, 1),
    "torch.linalg.vector_norm(x, dim=[1], keepdim=True)": node(
        "aten.linalg_vector_norm.default", X, dim=(1,), keepdim=True
    ),
    "torch._foreach_add_([x, x], 1)": node("aten._foreach_add_.Scalar", (X, X), 1),
    "x.unsqueeze(1)": node("aten.unsqueeze.default", X, 1),
    "x.softmax(-1)": node("aten.softmax.int", X, -1),
    "x.sum([1], True)": node("aten.sum.dim_IntList", X, (1,), True),
    "x.to(torch.float16)": node("aten.to.dtype", X, Literal("torch.float16")),
    "x.expand([3, 4, 8])": node("aten.expand.default", X, (3, 4, 8)),
    "torch.zeros([4], device=x.device)": node(
        "aten.zeros.default", (4,), device=Literal("x.device")
    ),
}
# A Python number becomes a tensor; of pooling there is a Python function alone.
KEPT = (
    node("aten.add.Scalar", X, 2.0),
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


# Modules that leave out what their operator may do without: an argument that is None and one that
# is not given are two things.
WITHOUT = {
    "nn.InstanceNorm1d(6)": "torch.randn(4, 6, 10)",
    "nn.InstanceNorm2d(6, track_running_stats=True)": "torch.randn(4, 6, 5, 5)",
    "nn.BatchNorm1d(6, affine=False, track_running_stats=False)": "torch.randn(4, 6)",
    "nn.BatchNorm2d(6, affine=False, track_running_stats=False)": "torch.randn(4, 6, 5, 5)",
    "nn.LayerNorm(6, elementwise_affine=False)": "torch.randn(4, 6)",
    "nn.GroupNorm(2, 6, affine=False)": "torch.randn(4, 6, 5)",
    "nn.RMSNorm(6, elementwise_affine=False)": "torch.randn(4, 6)",
    "nn.Linear(6, 3, bias=False)": "torch.randn(4, 6)",
    "nn.Bilinear(6, 6, 3, bias=False)": "torch.randn(4, 6), torch.randn(4, 6)",
    "nn.Conv2d(6, 3, 3, bias=False)": "torch.randn(4, 6, 5, 5)",
    "nn.ConvTranspose2d(6, 3, 3, bias=False)": "torch.randn(4, 6, 5, 5)",
    "nn.CrossEntropyLoss()": "torch.randn(4, 6), torch.tensor([0, 5, 2, 1])",
    "nn.Embedding(6, 3)": "torch.tensor([0, 5, 2, 1])",
    "nn.AvgPool2d(2)": "torch.randn(4, 6, 5, 5)",
}


@pytest.mark.parametrize("module", WITHOUT)
def test_calls_without_optional_arguments_run(module: str, tmp_path: Path) -> None:
    count = WITHOUT[module].count("torch.")
    names = ", ".join(["x", "y"][:count])
    init, forward = (
        f"self.layer = {module}",
        f"def forward(self, {names}): return self.layer({names})",
    )
    paths = tmp_path / "model.py", tmp_path / "new.py"
    paths[0].write_text(reference_text(forward, WITHOUT[module], init))
    made = pipeline.generate(paths[0], {}, options("float32", "h200"))
    assert not made.plan.kernels, "the whole model is library calls, which run on the CPU"
    paths[1].write_text(made.text)
    reference: Any = execute_reference(paths[0], {})
    solution: Any = execute_solution(paths[1])
    results = []
    for model in (reference.Model, solution.ModelNew):
        torch.manual_seed(0)
        results.append(model()(*reference.get_inputs()))
    assert torch.equal(*results)
