"""Evaluates a Plan with PyTorch on the CPU: the twin of `emit` that proves the planner.

A kernel's Body runs as the ATen operators that its statements stand for, so a result that differs
from the reference's is a fault of the plan, not of an expression.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from modelnew.ir import Arg, Library, Literal, Live, Node, Output, Plan, Pointwise, Ref


def interpret(plan: Plan, model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The plan's result for forward's arguments `inputs`, by name.

    Each text of the plan (`self.linear.weight`, `x.shape[0]`) is read from `model` and `inputs`.
    """
    scope = {"self": model, "torch": torch, **inputs}
    values = {name: _read(text, scope) for name, text in plan.graph.bindings.items()}
    for step in plan.steps:
        match step:
            case Pointwise():
                inside = {a.tensor.name: values[a.tensor.name] for a in step.reads}
                for node in step.body.statements:
                    inside[node.result] = _call(node, inside, scope)
                values.update((name, inside[name]) for name in step.body.results)
            case Library():
                values[step.node.result] = _call(step.node, values, scope)
    return _output(plan.graph.output, values)


def _read(text: str, scope: Mapping[str, Any]) -> Any:
    return eval(text, dict(scope))  # the text is the plan's own, made by `trace`


def _call(node: Node, values: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    if node.op == "python.getitem.int":
        base, index = (_value(argument.value, values, scope) for argument in node.args)
        return operator.getitem(base, index)
    given = [argument for argument in node.args if not argument.default or not argument.keyword]
    args = [_value(a.value, values, scope) for a in given if not a.keyword]
    kwargs = {a.name: _value(a.value, values, scope) for a in given if a.keyword}
    namespace, packet, overload = node.op.split(".")
    call = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return call(*args, **kwargs)


def _value(value: Arg, values: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    match value:
        case Ref():
            return values[value.name]
        case Live() | Literal():
            return _read(value.text, scope)
        case tuple():
            return [_value(item, values, scope) for item in value]
    return value


def _output(output: Ref | Output | None, values: Mapping[str, Any]) -> Any:
    if output is None:
        return None
    if isinstance(output, Ref):
        return values[output.name]
    items = [_output(item, values) for item in output.items]
    match output.kind:
        case "dict":
            return dict(zip(output.keys, items, strict=True))
        case "tuple":
            return tuple(items)
    return items
