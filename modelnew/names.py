"""Renames values in nodes and in what a graph returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelnew.ir import Arg, Graph, Node, Output, Ref


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """`node` with the values that it reads under their new names."""
    args = tuple(replace(a, value=_renamed(a.value, names)) for a in node.args)
    mutates = tuple(names.get(name, name) for name in node.mutates)
    views = tuple(names.get(name, name) for name in node.views)
    return replace(node, args=args, mutates=mutates, views=views)


def unused(name: str, taken: set[str]) -> str:
    """`name`, with a number where it is taken; it is taken from now on."""
    count, free = 1, name
    while free in taken:
        count, free = count + 1, f"{name}_{count}"
    taken.add(free)
    return free


def with_results(graph: Graph, names: Mapping[str, str]) -> Graph:
    """`graph` with what it returns and leaves behind under its new names."""
    assigned = tuple((text, Ref(names.get(ref.name, ref.name))) for text, ref in graph.assigned)
    return replace(graph, output=_renamed_output(graph.output, names), assigned=assigned)


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    match arg:
        case Ref():
            return Ref(names.get(arg.name, arg.name))
        case tuple():
            return tuple(_renamed(item, names) for item in arg)
    return arg


def _renamed_output(output: Ref | Output, names: Mapping[str, str]) -> Ref | Output:
    if isinstance(output, Ref):
        return Ref(names.get(output.name, output.name))
    items = tuple(None if i is None else _renamed_output(i, names) for i in output.items)
    return replace(output, items=items)
