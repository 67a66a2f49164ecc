"""A plan as a page of text."""

from __future__ import annotations

from modelnew import summary, tune
from modelnew.formula import KINDS, contraction_formula, formula
from modelnew.ir import Contraction, Guard, Joined, Library, Plan, Pointwise, kernels_of
from modelnew.products import sizes
from modelnew.reference import Reference


def explain(ref: Reference, plan: Plan) -> str:
    """The plan of one reference under its file's name."""
    return f"{ref.path}\n\n{page(plan)}"


def page(plan: Plan) -> str:
    """A plan: its steps, what each kernel computes, what was held fixed, in both modes."""
    lines = [f"  algebra: {line}" for line in plan.graph.algebra]
    lines += [""] if lines else []
    if not plan.kernels:
        lines += ["  no kernel was generated: every step is a call of PyTorch's own operators", ""]
    for made in plan.modes:
        lines += [f"  {summary.mode_text(made)}", ""] if plan.other else []
        lines += [*_steps(made), "", *_held(made), ""]
    return "\n".join(line.rstrip() for line in lines[:-1]) + "\n"


def _steps(plan: Plan) -> list[str]:
    """The table of the steps, each kernel's maths, and why each library call is one."""
    lines = [*summary.rows(plan)]
    calls: dict[tuple[str, str], list[str]] = {}
    uses: dict[str, list[Pointwise]] = {}
    products: dict[str, list[Contraction]] = {}
    for step in plan.steps:
        match step:
            case Pointwise() | Joined():
                for kernel in kernels_of(step):
                    uses.setdefault(kernel.name, []).append(kernel)
            case Contraction():
                products.setdefault(step.name, []).append(step)
            case Library():
                where = step.node.source.text if step.node.source else ""
                calls.setdefault((step.node.op, step.why), []).append(where)
    for steps in uses.values():
        lines += ["", *_kernel(steps[0], len(steps))]
    for same in products.values():
        lines += ["", *_product(same[0], len(same))]
    for (op, why), places in calls.items():
        lines += ["", f"  PyTorch {op}: {why}"]
        lines += [
            f"    {n} x {where}" if n > 1 else f"    {where}" for where, n in _counted(places)
        ]
    return lines


def _counted(places: list[str]) -> list[tuple[str, int]]:
    """Each line of the reference with how often it makes the call."""
    return [(where, places.count(where)) for where in dict.fromkeys(places) if where]


def _kernel(step: Pointwise, count: int) -> list[str]:
    """What a kernel computes, for the first of the steps that it does."""
    launch, packs = tune.pointwise(tune.TARGETS["h200"]), tune.packs(step)
    amount = "one pack" if packs == 1 else f"{packs} packs"
    lines = [
        _heading(step, count),
        *(f"    {line}" for line in formula(step)),
        _reads(step),
        f"    {amount} of {launch.vec_bytes} bytes a thread, {launch.threads} threads a block; "
        "single elements where a layout forbids packs",
    ]
    if step.layout:
        lines.append(
            f"    writes {step.layout}; what lies otherwise is read by tiles through shared memory"
        )
    return lines


def _product(step: Contraction, count: int) -> list[str]:
    """A product and what follows it, for the first of the steps that one kernel does."""
    return [
        _heading(step, count),
        *(f"    {line}" for line in contraction_formula(step)),
        f"    {sizes(step)}, {step.kind}",
        _reads(step),
    ]


def _heading(step: Pointwise | Contraction, count: int) -> str:
    times = f", {count} times; the first:" if count > 1 else ""
    return f"  {KINDS[type(step)]} {step.name}{times}"


def _reads(step: Pointwise | Contraction) -> str:
    tensors = (access.tensor for access in step.reads)
    return "    reads " + ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in tensors)


def _held(plan: Plan) -> list[str]:
    """What the file checks at run time because the graph depends on it."""
    graph = plan.graph
    kernels = (kernel for step in plan.steps for kernel in kernels_of(step))
    live = sorted({s.text for step in kernels for s in step.scalars})
    lines = [f"  live: {', '.join(live)}"] if live else []
    for label, guards in (("constructor", graph.arguments), ("forward", graph.pins)):
        if guards:
            lines.append(f"  fixed in {label}: {', '.join(map(_guard, guards))}")
    return lines


def _guard(guard: Guard) -> str:
    one_size = guard.label != guard.text
    return f"{guard.label} = {guard.value.strip('(,)') if one_size else guard.value}"
