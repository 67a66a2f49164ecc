"""Moves concatenations behind pointwise operators: f(cat(a, b)) becomes cat(f(a), f(b)).

Kernels write the parts of a concatenation straight to their places (see ir.Joined), so nothing is
copied together. What else f reads is taken apart as the concatenation is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from modelnew import ops
from modelnew.ir import Arg, Argument, Graph, Node, Ref, Tensor, users_of
from modelnew.names import renamed, unused

# What all parts read travels with one launch, in 4 KB (contexts.Join.merged); more parts, each with
# a launch of its own, would cost the host more than the copy that they save. Not measured.
MAX_PARTS = 8


@dataclass(frozen=True)
class _Parts:
    """A concatenation along `dim` of the values `names`; `sizes` are values in memory that are as
    long as they are, for those that are not there."""

    dim: int
    names: tuple[str, ...]
    sizes: tuple[str, ...]


def is_join(node: Node, graph: Graph) -> bool:
    """Whether kernels can write the operands of `node` next to each other."""
    if node.op != "aten.cat.default":
        return False
    tensors = [graph.tensors[name] for name in node.reads]
    floats = all(tensor.dtype in ops.FLOATS for tensor in tensors)
    ranks = {len(tensor.shape) for tensor in tensors}
    alone = len(set(node.reads)) == len(node.reads)
    return floats and alone and len(ranks) == 1 and 0 not in ranks and len(tensors) <= MAX_PARTS


def join_dim(node: Node) -> int:
    """The dimension along which a concatenation's operands follow each other."""
    dim = node.value("dim")
    assert isinstance(dim, int)
    return dim % len(node.outputs[0].shape)


def with_joins_late(graph: Graph) -> Graph:
    """`graph` with its concatenations behind the pointwise operators that alone use them."""
    if not any(node.packet in ("cat", "stack") for node in graph.nodes):
        return graph
    return _Walk(graph).walked()


class _Walk:
    """The graph from its start on: `made` has the nodes up to the present one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = replace(graph, tensors=dict(graph.tensors))
        self.made: list[Node] = []
        self.makers: dict[str, Node] = {}
        self.taken = {*graph.tensors, *(node.result for node in graph.nodes)}
        self.parts: dict[str, _Parts] = {}
        self.users = users_of(graph)

    def walked(self) -> Graph:
        for node in self.graph.nodes:
            if node.op == "aten.stack.default" and self._gains(node):
                node = self._stack_as_cat(node)
            node = self._flattened(node)
            split = self._split_of(node)
            for step in [node] if split is None else self._in_parts(node, split):
                self._append(step)
            if is_join(self.made[-1], self.graph):
                self._note(self.made[-1], split)
        return replace(self.graph, nodes=tuple(self.made))

    def _append(self, node: Node) -> None:
        if node.mutates:
            self.parts = {}
        self.made.append(node)
        self.makers[node.result] = node
        tensors = self.graph.tensors
        assert isinstance(tensors, dict)
        tensors.update((tensor.name, tensor) for tensor in node.outputs)

    def _is_pointwise(self, node: Node) -> bool:
        op = ops.find(node)
        return op is not None and op.uniform and ops.why_not(node, self.graph) is None

    # --- concatenations ---------------------------------------------------------------------

    def _gains(self, node: Node) -> bool:
        """Whether a kernel makes an operand of `node`, or uses its result."""
        users = self.users.get(node.result, [])
        return any(map(self._is_computed, node.reads)) or (
            bool(users) and all(map(self._is_pointwise, users))
        )

    def _is_computed(self, name: str) -> bool:
        """Whether `name` is a pointwise operator's result, or a view of one."""
        maker = self.makers.get(name)
        if maker is None:
            return False
        return any(map(self._is_computed, maker.views)) or self._is_pointwise(maker)

    def _stack_as_cat(self, node: Node) -> Node:
        """stack as the concatenation of operands with one more dimension."""
        dim = join_dim(node)
        names = []
        for name in node.reads:
            tensor = self.graph.tensors[name]
            shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
            made = Tensor(unused(f"{name}_unsqueeze", self.taken), shape, tensor.dtype)
            args = (Argument("self", Ref(name)), Argument("dim", dim))
            self._append(_view("aten.unsqueeze.default", made, args, node))
            names.append(made.name)
        args = (Argument("tensors", tuple(map(Ref, names))), Argument("dim", dim))
        return replace(node, op="aten.cat.default", args=args)

    def _flattened(self, node: Node) -> Node:
        """A concatenation with the operands of those along the same dimension that only it uses."""
        if not is_join(node, self.graph):
            return node
        operands: list[str] = []
        for name in node.reads:
            maker = self.makers.get(name)
            inner = maker if maker and is_join(maker, self.graph) else None
            alone = len(self.users.get(name, ())) == 1 and name not in self.graph.results
            if inner and alone and join_dim(inner) == join_dim(node):
                operands += inner.reads
            else:
                operands.append(name)
        value = tuple(map(Ref, operands))
        flat = node.with_values([value, *node.values[1:]])
        return flat if is_join(flat, self.graph) else node

    def _note(self, node: Node, split: _Parts | None) -> None:
        """Remembers the parts of a concatenation whose result kernels alone use."""
        dim = join_dim(node)
        sizes = split.sizes if split else tuple(self._as_long(name, dim) for name in node.reads)
        users = self.users.get(node.result, [])
        alone = users and node.result not in self.graph.results
        if alone and "" not in sizes and all(map(self._is_pointwise, users)):
            self.parts[node.result] = _Parts(dim, node.reads, sizes)

    def _as_long(self, name: str, dim: int) -> str:
        """A value in memory that is as long as `name` along `dim`; "" where there is none."""
        tensor, maker = self.graph.tensors[name], self.makers.get(name)
        if maker is None or not self._is_pointwise(maker):
            return name
        for operand in maker.reads:
            shape = self.graph.tensors[operand].shape
            alike = len(shape) == len(tensor.shape) and shape[dim] == tensor.shape[dim]
            if alike and (found := self._as_long(operand, dim)):
                return found
        return ""

    # --- what uses them ---------------------------------------------------------------------

    def _split_of(self, node: Node) -> _Parts | None:
        """The parts in which a pointwise node is to be computed, None for it as a whole."""
        splits = [self.parts[name] for name in node.reads if name in self.parts]
        if not splits or not self._is_pointwise(node):
            return None
        first = next(name for name in node.reads if self.graph.tensors[name].shape)
        same = len({(split.dim, split.sizes) for split in splits}) == 1
        shape = self.graph.tensors[node.result].shape
        # PyTorch lays a result out as the first operand lies.
        leads = first in self.parts and self.graph.tensors[first].shape == shape
        return splits[0] if same and leads else None

    def _in_parts(self, node: Node, split: _Parts) -> Iterable[Node]:
        """`node` for each part, and the concatenation of the results."""
        names: list[str] = []
        for at in range(len(split.names)):
            parts: dict[str, str] = {}
            for operand in dict.fromkeys(node.reads):
                parts[operand] = self._part(operand, split, at, node)
            shape = list(node.outputs[0].shape)
            like = self.graph.tensors[split.names[at]].shape
            shape[split.dim] = like[split.dim]
            made = Tensor(
                unused(f"{node.result}_{at}", self.taken), tuple(shape), node.outputs[0].dtype
            )
            names.append(made.name)
            yield replace(renamed(node, parts), result=made.name, outputs=(made,))
        args = (Argument("tensors", tuple(map(Ref, names))), Argument("dim", split.dim))
        yield replace(node, op="aten.cat.default", args=args)

    def _part(self, operand: str, split: _Parts, at: int, node: Node) -> str:
        """The name of an operand's part number `at`."""
        if operand in self.parts:
            return self.parts[operand].names[at]
        tensor, whole = self.graph.tensors[operand], node.outputs[0].shape
        dim = split.dim - len(whole) + len(tensor.shape)
        if dim < 0 or (tensor.shape[dim] == 1 and self._is_own(operand)):
            return operand
        shape = list(tensor.shape)
        if tensor.shape[dim] > 1:
            shape[dim] = self.graph.tensors[split.names[at]].shape[split.dim]
        made = Tensor(unused(f"{operand}_part", self.taken), tuple(shape), tensor.dtype)
        sizes: Arg = tuple(map(Ref, split.sizes))
        values = (Ref(operand), dim - len(tensor.shape), sizes, at)
        names = ("self", "dim", "like", "at")
        args = tuple(Argument(n, v) for n, v in zip(names, values, strict=True))
        self._append(_view("modelnew.part.default", made, args, node))
        return made.name

    def _is_own(self, name: str) -> bool:
        """Whether a value is the model's own, of the size that it had in the trace."""
        return self.graph.bindings.get(name, "").startswith("self.")


def _view(op: str, made: Tensor, args: tuple[Argument, ...], node: Node) -> Node:
    (base, *_) = args
    assert isinstance(base.value, Ref)
    return Node(op, made.name, args, (made,), views=(base.value.name,), source=node.source)


def with_own_parts(graph: Graph) -> Graph:
    """`graph` with the last operator of each part for the concatenation alone.

    A value that other kernels compute as well they compute again: that takes no memory traffic.
    """
    users = users_of(graph)
    makers: dict[str, Node] = {}
    nodes: list[Node] = []
    tensors = dict(graph.tensors)

    def by_kernels(name: str) -> bool:
        pointwise = all(ops.why_not(n, graph) is None or is_join(n, graph) for n in users[name])
        maker = makers.get(name)
        return bool(pointwise and maker and ops.why_not(maker, graph) is None)

    for node in graph.nodes:
        names: dict[str, str] = {}
        if node.mutates:
            makers.clear()
        makers[node.result] = node
        if is_join(node, graph):
            for name in node.reads:
                if len(users[name]) > 1 and name not in graph.results and by_kernels(name):
                    names[name] = f"{name}_in_{node.result}"
                    made = replace(tensors[name], name=names[name])
                    tensors[made.name] = made
                    nodes.append(replace(makers[name], result=made.name, outputs=(made,)))
        nodes.append(renamed(node, names))
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def parts_of(graph: Graph) -> Mapping[str, str]:
    """By value that nothing else needs, the concatenation whose part it is."""
    return {
        name: using[0].result
        for name, using in users_of(graph).items()
        if len(using) == 1 and name not in graph.results and is_join(using[0], graph)
    }
