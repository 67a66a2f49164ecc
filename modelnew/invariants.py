"""What must hold of a Graph and of a Plan, checked after the stage that made it.

A failure here is a bug of modelnew, so it is an AssertionError and not a message to the user.
"""

from __future__ import annotations

from modelnew import ops
from modelnew.ir import (
    Access,
    Contraction,
    Graph,
    Joined,
    Plan,
    Pointwise,
    kernels_of,
    step_reads,
    step_writes,
)


def check_graph(graph: Graph) -> None:
    """Every value is defined once and before its use, and every tensor has a type."""
    defined = set(graph.bindings)
    for name in graph.bindings:
        _require(name in graph.tensors, f"{name} has no type")
    for node in graph.nodes:
        missing = [name for name in node.reads if name not in defined]
        _require(not missing, f"{node.result} reads {missing} before they are defined")
        _require(node.result not in defined, f"{node.result} is defined twice")
        defined.add(node.result)
        _require(
            all(tensor.name in graph.tensors for tensor in node.outputs),
            f"{node.result} has an output without a type",
        )
    _require(set(graph.results) <= defined, "the result is not defined")
    if graph.other is not None:
        check_graph(graph.other)


def check_plan(plan: Plan) -> None:
    """The steps run in order, each kernel is well formed, and what is returned is made."""
    defined = set(plan.graph.bindings)
    forms: dict[str, object] = {}
    for kernel in (kernel for step in plan.steps for kernel in kernels_of(step)):
        ops_of = [node.op for node in kernel.body.statements]
        form = (ops_of, len(kernel.reads), len(kernel.scalars))
        _require(forms.setdefault(kernel.name, form) == form, "two kernels have one name")
    for step in plan.steps:
        if isinstance(step, Contraction):
            alike: object = (step.node.op, step.epilogue.name)
            _require(forms.setdefault(step.name, alike) == alike, "two products have one name")
        missing = [name for name in step_reads(step) if name not in defined]
        _require(not missing, f"a step reads {missing} before they are made")
        for kernel in kernels_of(step):
            _check_pointwise(kernel)
        if isinstance(step, Joined):
            made = [name for part in step.parts for name in part.body.results]
            _require(sorted(made) == sorted(step.node.reads), f"{step.name} has other parts")
        if isinstance(step, Contraction):
            _check_contraction(step)
            _require(step.node.result not in defined, f"{step.name} makes its product twice")
        defined.update(step_writes(step))
    _require(set(plan.graph.results) <= defined, "the result is never made")
    if plan.other is not None:
        check_plan(plan.other)


def _check_pointwise(step: Pointwise) -> None:
    """SSA order, one shape for all results, every operand used, every statement has a row."""
    inside = {access.tensor.name for access in step.reads}
    used: set[str] = set()
    for node in step.body.statements:
        _require(ops.find(node) is not None, f"{node.op} has no row")
        _require(set(node.reads) <= inside, f"{node.result} reads what {step.name} has not")
        _require(node.result not in inside, f"{node.result} is set twice in {step.name}")
        used.update(node.reads)
        inside.add(node.result)
    _require(bool(step.reads), f"{step.name} reads no tensor")
    _require({access.tensor.name for access in step.reads} <= used, f"{step.name} reads in vain")
    _require(step.body.results == step_writes(step), f"{step.name} writes other values")
    shapes = {tensor.shape for tensor in step.writes}
    _require(len(shapes) == 1, f"{step.name} writes results of shapes {shapes}")


def _check_contraction(step: Contraction) -> None:
    """The epilogue reads the product as it is, has its shape, and keeps to no layout."""
    (product,) = step.node.outputs
    names = tuple(tensor.name for tensor in step.operands)
    _require(step.node.reads == names, f"{step.name} multiplies other tensors")
    plain = Access(product) in step.epilogue.reads
    _require(plain and not step.epilogue.layout, f"{step.name} does not follow its product")
    shapes = {tensor.shape for tensor in step.epilogue.writes}
    _require(shapes == {product.shape}, f"{step.name} writes results of shapes {shapes}")


def _require(held: bool, message: str) -> None:
    if not held:
        raise AssertionError(f"modelnew made an invalid plan: {message}")
