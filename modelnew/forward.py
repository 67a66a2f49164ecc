"""Writes the body of ModelNew.forward: one line a step of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from modelnew.contexts import Kernel
from modelnew.formula import WIDTH
from modelnew.ir import Contraction, Joined, Library, Output, Plan, Pointwise, Ref
from modelnew.layout import AT_TRACED_SIZES, CHANNELS_LAST
from modelnew.library import Fronts, call_line
from modelnew.lifetimes import frees
from modelnew.shortcuts import with_shortcuts


def forward_lines(plan: Plan, kernels: Mapping[str, Kernel]) -> list[str]:
    """The body of forward in the plan's mode: one line a step. `kernels` are those by name."""
    bindings = dict(plan.graph.bindings)
    fronts: Fronts = {}
    lines = [f"{AT_TRACED_SIZES} = {plan.condition}"] if plan.condition else []
    told = AT_TRACED_SIZES if plan.condition else "True"
    for step, unused in zip(plan.steps, frees(plan.graph, plan.steps), strict=True):
        lines += [f"del {names.strip(', ')}" for names in wrap(", ".join(unused), WIDTH - 12)]
        match step:
            case Pointwise():
                lines.append(_kernel_call(step, kernels[step.name], bindings, told))
            case Joined() | Contraction():
                lines.append(_call(step, bindings))
            case Library():
                lines.append(call_line(step.node, plan.graph, fronts))
    for text, ref in plan.graph.assigned:
        lines.append(f"{text} = {_result_text(ref, bindings)}")
    lines.append(f"return {_result_text(plan.graph.output, bindings)}")
    return with_shortcuts(lines, bindings.values())


def _call(step: Joined | Contraction, bindings: Mapping[str, str]) -> str:
    results = step.epilogue.body.results if isinstance(step, Contraction) else (step.node.result,)
    tensors = [bindings.get(access.base, access.base) for access in step.reads]
    return _run(step, tensors, results)


def _kernel_call(step: Pointwise, k: Kernel, bindings: Mapping[str, str], told: str) -> str:
    read = [access.base for access in step.reads]
    more = [tensor.name for tensor in step.like if tensor.name not in read]
    tensors = [bindings.get(name, name) for name in (*read, *more)]
    tensors += [told] if step.layout == CHANNELS_LAST else []
    return _run(step, tensors, step.body.results)


def _run(
    step: Pointwise | Joined | Contraction, tensors: Sequence[str], results: Sequence[str]
) -> str:
    """The line that runs a step's function."""
    numbers = [scalar.text for scalar in step.scalars]
    args = ", ".join([f"_cuda.{step.name}_forward", *tensors, *numbers])
    return f"{', '.join(results)} = _run({args})"


def _result_text(output: Ref | Output | None, bindings: Mapping[str, str]) -> str:
    if output is None:
        return "None"
    if isinstance(output, Ref):
        return bindings.get(output.name, output.name)
    items = [_result_text(item, bindings) for item in output.items]
    match output.kind:
        case "dict":
            pairs = zip(output.keys, items, strict=True)
            return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
        case "list":
            return "[" + ", ".join(items) + "]"
        case kind if kind != "tuple":
            return f"{kind}(({', '.join(items)},))"
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
