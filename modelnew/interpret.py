"""Evaluates a Plan with PyTorch on the CPU: the twin of `emit` that proves the planner.

A kernel's Body runs as the ATen operators that its statements stand for, so a result that differs
from the reference's is a fault of the plan, not of an expression.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from modelnew.ir import (
    Arg,
    Contraction,
    Joined,
    Library,
    Literal,
    Live,
    Node,
    Output,
    Plan,
    Pointwise,
    Ref,
)
from modelnew.layout import AT_TRACED_SIZES, CHANNELS_LAST, CONTIGUOUS
from modelnew.moves import padding


def interpret(plan: Plan, model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The plan's result for forward's arguments `inputs`, by name.

    Each text of the plan (`self.linear.weight`, `x.shape[0]`) is read from `model` and `inputs`.
    """
    if plan.other is not None and plan.graph.training != model.training:
        plan = plan.other
    scope = {"self": model, "torch": torch, **inputs}
    scope[AT_TRACED_SIZES] = _read(plan.condition or "True", scope)
    values = {name: _read(text, scope) for name, text in plan.graph.bindings.items()}
    for step in plan.steps:
        match step:
            case Pointwise():
                values |= _results(step, values, scope)
            case Joined():
                made = dict(values)
                for part in step.parts:
                    made |= _results(part, values, scope)
                values[step.node.result] = call(step.node, made, scope)
            case Contraction():
                product = call(step.node, values, scope)
                values |= _results(step.epilogue, {**values, step.node.result: product}, scope)
            case Library():
                found = values[step.node.result] = call(step.node, values, scope)
                if len(step.node.outputs) > 1:
                    values |= zip((t.name for t in step.node.outputs), found, strict=True)
    for text, ref in plan.graph.assigned:
        exec(f"{text} = value", {**scope, "value": values[ref.name]})
    return _output(plan.graph.output, values)


def _results(step: Pointwise, values: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    """What a kernel makes, by name."""
    inside = {
        a.tensor.name: call(a.node, values, scope) if a.node else values[a.base] for a in step.reads
    }
    for node in step.body.statements:
        inside[node.result] = call(node, inside, scope)
    like = [values[tensor.name] for tensor in step.like]
    told = step.layout
    if told == CHANNELS_LAST and not scope[AT_TRACED_SIZES]:
        told = CONTIGUOUS
    return {name: _laid(inside[name], told, like) for name in step.body.results}


def _read(text: str, scope: Mapping[str, Any]) -> Any:
    return eval(text, dict(scope))  # the text is the plan's own, made by `trace`


def call(node: Node, values: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    """The result of a node, whose texts are read in `scope`."""
    if node.op == "python.getitem.int":
        base, index = (_value(argument.value, values, scope) for argument in node.args)
        return operator.getitem(base, index)
    if node.own:
        return _own(node.packet, *(_value(argument.value, values, scope) for argument in node.args))
    given = [argument for argument in node.args if not argument.default or not argument.keyword]
    args = [_value(a.value, values, scope) for a in given if not a.keyword]
    kwargs = {a.name: _value(a.value, values, scope) for a in given if a.keyword}
    namespace, packet, name = node.op.split(".")
    overload = getattr(getattr(getattr(torch.ops, namespace), packet), name)
    for index, spec in enumerate(overload._schema.arguments[: len(args)]):
        if str(spec.type) == "Tensor" and not isinstance(args[index], torch.Tensor):
            args[index] = torch.tensor(args[index])  # a constant, which a kernel takes as a number
    return overload(*args, **kwargs)


def _own(packet: str, x: torch.Tensor, *others: Any) -> Any:
    """An operator that ATen does not have."""
    match packet:
        case "channel_bias":
            return x + others[0].view(-1, *[1] * (x.dim() - 2))
        case "group_statistics":
            groups = others[0] if others else x.shape[1]
            rows = x.reshape(x.shape[0], groups, -1)
            shape = (x.shape[0], x.shape[1], *[1] * (x.dim() - 2))
            found = torch.var_mean(rows, 2, correction=0)[::-1]
            return [t.repeat_interleave(x.shape[1] // groups, 1).view(shape) for t in found]
        case "row_statistics":
            return torch.var_mean(x, [*range(-others[0], 0)], correction=0, keepdim=True)[::-1]
        case _ if packet.endswith("_normalized"):
            mean, var, weight, bias, eps = others
            behind = [1] * (0 if packet == "layer_normalized" else x.dim() - 2)
            made = (x - mean) * (var + eps).rsqrt()
            made = made if weight is None else made * weight.view(*weight.shape, *behind)
            return made if bias is None else made + bias.view(*bias.shape, *behind)
        case "lower_triangle" | "upper_triangle":
            return (torch.tril if packet == "lower_triangle" else torch.triu)(x, others[0])
        case "padding":
            return torch.nn.functional.pad(x, others[0])
        case "padded":
            inside = [slice(None)] * x.dim()
            for move in padding(tuple(others[0])):
                inside[move.dim] = slice(move.first, x.shape[move.dim] - move.grown + move.first)
            made = torch.full_like(x, others[1])
            made[tuple(inside)] = x[tuple(inside)]
            return made
        case "part":
            dim, like, at = others
            sizes = [t.shape[dim] for t in like]
            return x if x.shape[dim] == 1 else x.narrow(dim, sum(sizes[:at]), sizes[at])
        case "as_channels_last" | "as_contiguous":
            return x
    raise AssertionError(f"no operator {packet}")


def _laid(x: torch.Tensor, layout: str, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result in the layout that the kernel is told to write."""
    if layout == CHANNELS_LAST:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last)
    if layout == CONTIGUOUS:
        formats = (suggest_memory_format(tensor) for tensor in like)
        others = (f for f in formats if f != torch.contiguous_format)
        return x.contiguous(memory_format=next(others, torch.contiguous_format))
    return x


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
        case "list":
            return items
    return _read(output.kind, {"torch": torch})(tuple(items))
