"""One rewrite of a Graph in the making: what is known of the graph, and the nodes that are new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from modelnew import ops
from modelnew.algebra.ranges import Ranges
from modelnew.canonical import FRESH
from modelnew.ir import Arg, Argument, Graph, Guard, Literal, Live, Node, Ref, Tensor
from modelnew.names import renamed, with_results


class Refused(Exception):
    """A condition of a rewrite is not proven."""


def require(held: object) -> None:
    if not held:
        raise Refused


class Facts:
    """One graph's nodes by name, how often each value is used, and what is written in place."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = {node.result: node for node in graph.nodes}
        self.uses = Counter(name for node in graph.nodes for name in node.reads)
        self.results = frozenset(graph.results)
        self.written = self._written()
        self.ranges = Ranges(graph, self.written)
        # What has the shape of the model's own tensors, whatever forward is given.
        self.static = {name for name in graph.bindings if name not in graph.inputs}
        for node in graph.nodes:
            fixed = ops.find(node) or not any(isinstance(a.value, Live) for a in node.args)
            if fixed and node.reads and self.static.issuperset(node.reads):
                self.static.add(node.result)

    def _written(self) -> frozenset[str]:
        """Every value that may lie in memory that some node writes to in place."""
        written = {name for node in self.graph.nodes for name in node.mutates}
        count = -1
        while written and count != len(written):
            count = len(written)
            for node in self.graph.nodes:
                shared = node.views + node.mutates if self.is_fresh(node) else node.reads
                if written.intersection((node.result, *shared)):
                    written.update((node.result, *shared))
        return frozenset(written)

    def is_fresh(self, node: Node) -> bool:
        """Whether the result is memory of its own, but for what the schema says."""
        return ops.find(node) is not None or node.packet in (*FRESH, "matmul") or bool(node.views)

    def base(self, name: str) -> str:
        """The value whose memory `name` is a view of."""
        while (node := self.nodes.get(name)) is not None and (node.views or node.mutates):
            name = (*node.views, *node.mutates)[0]
        return name

    def tensor(self, name: str) -> Tensor:
        require(name in self.graph.tensors)  # what returns a tuple has no type of its own
        return self.graph.tensors[name]

    def size(self, name: str, dim: int) -> Arg:
        """One size, dimensions counted from the last: a number, Live text, or None if unknown."""
        shape = self.tensor(name).shape
        if name in self.static:
            return shape[dim]
        if name in self.graph.inputs:
            text = f"{self.graph.bindings[name]}.shape[{len(shape) + dim}]"
            return Live(text, float(shape[dim]))
        return None

    def can_stand_for(self, value: str, result: str) -> bool:
        """Whether nothing can tell `value` from `result`, whose elements are equal.

        Neither may be written in place, and a result of forward is memory of its own, dense where
        the operator that made it gave dense memory.
        """
        if {value, result} & self.written:
            return False
        if self.base(result) not in map(self.base, self.results):
            return True
        made = value
        while (node := self.nodes.get(made)) and node.packet in ("to", "detach", "alias"):
            made = node.reads[0]
        shared = {self.base(name) for name in self.results if name != result}
        fresh = node is not None and self.is_fresh(node) and not node.views
        return fresh and made not in shared


class Edit:
    """New nodes in the place of one node; PyTorch types them by running them on meta tensors."""

    def __init__(self, facts: Facts, node: Node) -> None:
        self.facts, self.node = facts, node
        self.tensors = dict(facts.graph.tensors)
        self.new: list[Node] = []
        self.gone = {node.result}
        self.pins: list[Guard] = []
        self.literals: dict[str, Any] = {}

    def take(self, name: str) -> Node:
        """The node that makes `name`, for this edit alone: it goes away with its one use."""
        facts = self.facts
        node = facts.nodes.get(name)
        require(node is not None and facts.uses[name] == 1 and name not in facts.results)
        assert node is not None
        require(not node.mutates and len(node.outputs) == 1 and name not in facts.written)
        self.gone.add(name)
        return node

    def call(self, base: str, op: str, *given: Arg, **named: Arg) -> str:
        """Adds a call of "aten.`op`", the result named after `base`; returns the result's name."""
        op = f"aten.{op}" if "." in op else f"aten.{op}.default"
        args = []
        for place, spec in enumerate(_schema(op)):
            default = _frozen(spec.default_value)
            value = given[place] if place < len(given) else named.get(spec.name, default)
            is_default = spec.has_default_value() and value == default
            args.append(Argument(spec.name, value, is_default, spec.kwarg_only))
        name, free = base, self.gone.difference(node.result for node in self.new)
        while (name in self.tensors or name in self.facts.nodes) and name not in free:
            name = f"{name}_"
        return self._add(Node(op, name, tuple(args), (), source=self.node.source))

    def literal(self, text: str, stand_in: Any) -> Literal:
        """An argument for `call`: what `text` reads at every call, `stand_in` while it is typed."""
        self.literals[text] = stand_in
        return Literal(text)

    def again(self, node: Node, changed: Mapping[str, Arg]) -> str:
        """Adds a node of `gone` once more under its own name, with other arguments."""
        args = []
        for argument in node.args:
            value = changed.get(argument.name, argument.value)
            same = value == argument.value
            args.append(replace(argument, value=value, default=argument.default and same))
        return self._add(replace(node, args=tuple(args), views=()))

    def _add(self, node: Node) -> str:
        require(not set(node.reads) & self.facts.written)
        keyword = {a.name: self._stand_in(a.value) for a in node.args if a.keyword}
        value = _operator(node.op)(
            *(self._stand_in(a.value) for a in node.args if not a.keyword), **keyword
        )
        tensor = Tensor(node.result, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        self.tensors[node.result] = tensor
        aliased = [s.alias_info is not None for s in _schema(node.op)]
        views = tuple(
            a.value.name
            for a, shares in zip(node.args, aliased, strict=True)
            if shares and isinstance(a.value, Ref)
        )
        self.new.append(replace(node, outputs=(tensor,), views=views))
        return node.result

    def _stand_in(self, value: Arg) -> Any:
        match value:
            case Ref():
                tensor = self.tensors[value.name]
                dtype = getattr(torch, tensor.dtype)
                return torch.empty(tensor.shape, dtype=dtype, device="meta")
            case Live():
                return value.value
            case Literal():
                require(value.text in self.literals)
                return self.literals[value.text]
            case tuple():
                return [self._stand_in(item) for item in value]
        return value

    def finished(self, value: str, line: str) -> tuple[Graph, str]:
        """The graph with the new nodes, `value` in the place of the node's result."""
        graph, nodes = self.facts.graph, list[Node]()
        names = {self.node.result: value}
        for node in graph.nodes:
            if node is self.node:
                nodes += self.new
            if node.result not in self.gone:
                nodes.append(renamed(node, names))
        dropped = self.gone.difference(node.result for node in nodes)
        tensors = {name: t for name, t in self.tensors.items() if name not in dropped}
        made = replace(
            with_results(graph, names), tensors=tensors, nodes=tuple(nodes),
            pins=tuple(dict.fromkeys((*graph.pins, *self.pins))),
        )  # fmt: skip
        return made, line


def _operator(op: str) -> Any:
    _, packet, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _schema(op: str) -> Sequence[Any]:
    arguments: Sequence[Any] = _operator(op)._schema.arguments
    return arguments


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
