"""When two values, two calls or two traces are the same."""

from __future__ import annotations

from typing import Any

from modelnew.ir import Graph, Node


def equal(left: Any, right: Any) -> bool:
    """Whether two values are of one type and equal; what cannot be compared is not."""
    if left is right:
        return True
    try:
        return type(left) is type(right) and bool(left == right)
    except Exception:
        return False


def same_call(left: Node, right: Node) -> bool:
    """Whether two nodes are one call with the same arguments, whatever the shapes."""
    return left.op == right.op and left.result == right.result and left.values == right.values


def same_operators(left: Graph, right: Graph) -> bool:
    """Whether two traces call the same operators, on whatever arguments."""
    return [node.op for node in left.nodes] == [node.op for node in right.nodes]


def same_calls(left: Graph, right: Graph) -> bool:
    """Whether two traces make the same calls with the same arguments and constants, whatever the
    shapes."""
    return (
        same_ends(left, right)
        and len(left.nodes) == len(right.nodes)
        and all(map(same_call, left.nodes, right.nodes))
    )


def same_ends(left: Graph, right: Graph) -> bool:
    """Whether two traces read the same constants and leave the same results."""
    ends = [(graph.output, graph.assigned, graph.bindings) for graph in (left, right)]
    return ends[0] == ends[1]
