"""A plan as a page of text."""

from __future__ import annotations

from modelnew import render, tune
from modelnew.formula import formula
from modelnew.ir import Guard, Library, Plan, Pointwise
from modelnew.reference import Reference


def explain(ref: Reference, plan: Plan) -> str:
    """The plan of one reference under its file's name."""
    return f"{ref.path}\n\n{page(plan)}"


def page(plan: Plan) -> str:
    """A plan: its steps, what each kernel computes, what was held fixed."""
    lines = [*render.rows(plan)]
    for step in plan.steps:
        match step:
            case Pointwise():
                lines += ["", *_kernel(step)]
            case Library():
                where = f" ({step.node.source.text})" if step.node.source else ""
                lines += ["", f"  PyTorch {step.node.op}: {step.why}{where}"]
    lines += ["", *_held(plan)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _kernel(step: Pointwise) -> list[str]:
    launch = tune.pointwise(step, tune.TARGETS["h200"])
    reads = ", ".join(f"{a.tensor.name} {a.tensor.dtype}{list(a.tensor.shape)}" for a in step.reads)
    return [
        f"  kernel {step.name}",
        *(f"    {line}" for line in formula(step)),
        f"    reads {reads}",
        f"    one pack of {launch.vec_bytes} bytes a thread, {launch.threads} threads a block; "
        "single elements where a layout forbids packs",
    ]


def _held(plan: Plan) -> list[str]:
    """What the file checks at run time because the graph depends on it."""
    graph = plan.graph
    live = sorted({s.text for step in plan.kernels for s in step.scalars})
    lines = [f"  live: {', '.join(live)}"] if live else []
    for label, guards in (("constructor", graph.arguments), ("forward", graph.pins)):
        if guards:
            lines.append(f"  fixed in {label}: {', '.join(map(_guard, guards))}")
    if graph.training is not None:
        lines.append(f"  fixed in forward: self.training = {graph.training}")
    return lines


def _guard(guard: Guard) -> str:
    one_size = guard.label != guard.text
    return f"{guard.label} = {guard.value.strip('(,)') if one_size else guard.value}"
