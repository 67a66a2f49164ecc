"""A kernel's maths for a reader: one formula a result, in terms of what the kernel reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from modelnew import ops
from modelnew.ir import Arg, Contraction, Joined, Live, Node, Pointwise, Ref
from modelnew.joins import join_dim

WIDTH = 100
# What the steps that are kernels of ours are called.
KINDS = {Pointwise: "kernel", Joined: "kernels", Contraction: "product"}
DEPTH = 9  # deeper, a formula names the kernel's own intermediate values


def formula(step: Pointwise) -> tuple[str, ...]:
    """One comment line a result: what it is in terms of what the kernel reads."""
    nodes = {node.result: node for node in step.body.statements}
    if len(nodes) == 1 and (plain := _plain_expression(step.body.statements[0])):
        return (f"{step.body.results[0]} = {plain}",)
    lines: list[str] = []
    for result in step.body.results:
        stop = set(step.body.results) - {result}
        text = f"{result} = {_formula_of(result, nodes, stop, DEPTH)}"
        lines += textwrap.wrap(text, WIDTH - 4, subsequent_indent="    ")
    return tuple(lines)


def _plain_expression(node: Node) -> str | None:
    """The C expression of a row that calls nothing, for a reader."""
    op = ops.find(node)
    assert op is not None
    if not isinstance(op.expr, str) or "(" in op.expr:
        return None
    texts = {name: _shown(value) for name, value in op.values(node).items() if value is not None}
    return re.sub(r"(?<=\d)\.0f\b|(?<=\d)f\b", "", op.text(node, texts))


def _shown(value: Arg) -> str:
    """A leaf argument for a reader: no prefix, no suffix."""
    match value:
        case Ref():
            return value.name
        case Live():
            return value.text.removeprefix("self.")
        case int() | float():
            return f"{value:g}"
    return str(value)


def joined_formula(step: Joined) -> tuple[str, ...]:
    """The formulas of the parts of a concatenation, and the order in which they lie."""
    parts = ", ".join(step.node.reads)
    whole = f"{step.node.result} = {parts} along dimension {join_dim(step.node)}"
    return (*(line for part in step.parts for line in formula(part)), whole)


def step_formula(step: Pointwise | Joined | Contraction) -> tuple[str, ...]:
    """What the kernels of a step compute, for a reader."""
    match step:
        case Pointwise():
            return formula(step)
        case Joined():
            return joined_formula(step)
        case Contraction():
            return contraction_formula(step)


def contraction_formula(step: Contraction) -> tuple[str, ...]:
    """The product, then the formulas of what follows it."""
    left, right = (tensor.name for tensor in step.operands)
    turned = ".T" if step.node.packet == "linear" else ""
    product, bare = f"{left} @ {right}{turned}", step.epilogue.body.results
    nodes = step.epilogue.body.statements
    if len(nodes) == 1 and nodes[0].packet == "clone":
        return (f"{bare[0]} = {product}",)
    return f"{step.node.result} = {product}", *formula(step.epilogue)


def shortened(lines: Sequence[str]) -> str:
    """Formulas on one line, cut where a table would overflow."""
    text = "; ".join(" ".join(line.split()) for line in lines)
    return text if len(text) <= 60 else text[:57] + "..."


def _formula_of(name: str, nodes: Mapping[str, Node], stop: set[str], depth: int) -> str:
    if name not in nodes or name in stop or depth == 0:
        return name
    node = nodes[name]
    op = ops.find(node)
    assert op is not None
    infix = _is_infix(node)

    def text(value: Arg) -> str:
        if not isinstance(value, Ref):
            return _shown(value)
        inner = _formula_of(value.name, nodes, stop, depth - 1)
        below = nodes.get(value.name) if inner != value.name else None
        return f"({inner})" if infix and below and _is_infix(below) else inner

    if infix:
        texts = {n: text(value) for n, value in op.values(node).items() if value is not None}
        return re.sub(r"\b[a-z]\b", lambda match: texts[match[0]], op.formula or "")
    used = ops.used_values(node) if op.channel else [a.value for a in node.args if not a.default]
    shown = [value for value in used if value is not None]
    return f"{op.name}({', '.join(map(text, shown))})"


def _is_infix(node: Node) -> bool:
    """Whether a reader's formula of the node is the row's own, with operands around a sign."""
    op = ops.find(node)
    extra = [a for a in node.args if not a.default and not isinstance(a.value, Ref)]
    return bool(op and op.formula) and all(a.name in ("other", "self") for a in extra)
