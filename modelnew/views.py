"""Moves views ahead of pointwise operators: view(f(a, b)) becomes f(view(a), view(b)).

A view between two pointwise operators would end a kernel: the first writes its result, the second
reads it through the view. Taken of what is in memory already, views cost no kernel and no copy, and
all the maths is one region. A value that is needed in memory anyway is read there, through its
views as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from modelnew import ops
from modelnew.ir import Argument, Graph, Node, Ref, Tensor
from modelnew.joins import is_join
from modelnew.moves import moves
from modelnew.names import renamed, unused
from modelnew.strides import Lying, result_of

# Views that strides alone give, of any tensor.
STRIDED = (
    "adjoint", "broadcast_to", "chunk", "diagonal", "expand", "expand_as", "mT", "moveaxis",
    "movedim", "narrow", "numpy_T", "part", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose",
    "unbind", "unfold", "unsqueeze",
)  # fmt: skip
# Those that depend on how the tensor lies: of one that is expanded some would be a copy.
RESHAPING = ("flatten", "reshape", "reshape_as", "unflatten", "unsafe_view", "view", "view_as")
# Views that are of no use to a dimension of size 1 which broadcasts, or give it another meaning.
RESIZING = ("diagonal", "slice", "squeeze", "tensor_split", *RESHAPING)
# By view that a dense result always has, the one that any operand has, if need be as a copy.
OF_ANY = {"unsafe_view": "reshape", "view": "reshape", "view_as": "reshape_as"}
ITEM = "python.getitem.int"


def with_views_early(graph: Graph) -> Graph:
    """`graph` with its views ahead of the pointwise operators between which they stand."""
    moved = any(map(is_view, graph.nodes))
    while moved:  # a view of what a view gave moves once that has gone all its way
        sweep = _Sweep(graph)
        for node in reversed(graph.nodes):
            sweep.visit(node)
        nodes, moved = tuple(sweep.nodes), sweep.moved
        graph = _without_twins(replace(graph, tensors=sweep.tensors, nodes=nodes))
    return graph


def is_view_of(node: Node, name: str) -> bool:
    """Whether `node` is a view of `name` that can be taken of any tensor of its shape, or moves its
    elements, which kernels do as they read."""
    return is_view(node) and (node.views or node.reads) == (name,)


def is_view(node: Node) -> bool:
    known = node.packet in (*STRIDED, *RESHAPING) and node.op != "aten.view.dtype"
    return known or bool(moves(node))


@dataclass
class _Sweep:
    """One pass over a graph from its end on; `nodes` are those that there are by now."""

    graph: Graph
    moved: bool = False

    def __post_init__(self) -> None:
        self.tensors = dict(self.graph.tensors)
        self.taken = {*self.tensors, *(node.result for node in self.graph.nodes)}
        self.results = set(self.graph.results)
        self.makers = {node.result: node for node in self.graph.nodes}
        self.readers: dict[str, list[Node]] = {}
        self.nodes = list(self.graph.nodes)
        self._read(reversed(self.nodes))

    def visit(self, node: Node) -> None:
        """Moves the views of a node ahead of it; what has no other use is gone then."""
        if self._moves(node) and not self._waits(node):
            for view in self._views_of(node.result):
                self._move(view, node)
            if not self.readers[node.result]:
                self._exchange(node, [])

    def _read(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for name in dict.fromkeys(node.reads):
                self.readers.setdefault(name, []).append(node)

    def _views_of(self, name: str) -> list[Node]:
        return [reader for reader in self.readers.get(name, ()) if is_view_of(reader, name)]

    def _moves(self, node: Node) -> bool:
        """Whether views of this value, and nothing but pointwise operators, need it."""
        op = ops.find(node)
        views = self._views_of(node.result)
        if op is None or not op.uniform or not views or not self._is_pointwise(node):
            return False
        if not self._feeds_kernels(node.result):
            return False
        between = self.nodes[self._place(node) : max(map(self._place, views))]
        if any(n.mutates for n in between):
            return False
        return all(self._views_all_operands(view, node) for view in views)

    def _waits(self, node: Node) -> bool:
        """Whether what its operands are as large as is itself yet to be moved."""
        like = self._as_large(node)
        while like is not None and (maker := self.makers.get(like)) is not None:
            if self._moves(maker):
                return True
            like = maker.views[0] if maker.views else None
        return False

    def _feeds_kernels(self, name: str) -> bool:
        """Whether all that reads a value, through views or not, is done by kernels."""
        readers = self.readers.get(name, ())
        if name in self.results or not readers:
            return False
        return all(map(partial(self._is_kernels, name), readers))

    def _is_kernels(self, name: str, reader: Node) -> bool:
        if moves(reader):  # parts of a concatenation do not read moved elements in place
            following = self.readers.get(reader.result, ())
            return not any(is_join(user, self._now()) for user in following)
        if reader.op == ITEM or is_view_of(reader, name):
            return self._feeds_kernels(reader.result)
        return self._is_pointwise(reader) or is_join(reader, self._now())

    def _now(self) -> Graph:
        return replace(self.graph, tensors=self.tensors)

    def _is_pointwise(self, node: Node) -> bool:
        return ops.why_not(node, self._now()) is None

    def _views_all_operands(self, view: Node, node: Node) -> bool:
        """Whether the view of each operand is one, once they are as large as the result."""
        shape = self.tensors[node.result].shape
        if not shape or self._as_large(node) is None:
            return False
        if view.packet not in RESHAPING:
            return True
        # Of one operand that lies otherwise it may be a copy: there is one now, of the result.
        target = self.tensors[view.result].shape
        copied = [name for name in self._operands(node) if not self._reshapes(name, shape, target)]
        return not copied or (len(copied) == 1 and self._is_dense(copied[0], shape))

    def _reshapes(self, name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
        """Whether a value, expanded to `shape`, has a view of shape `target` as it lies."""
        try:
            self._lies(name).expand(shape).view(target)
        except RuntimeError:
            return False
        return True

    def _is_dense(self, name: str, shape: tuple[int, ...]) -> bool:
        value = self._lies(name)
        return value.shape == shape and 0 not in value.stride()

    def _lies(self, name: str) -> Any:
        """A tensor without memory that lies as a value does at the traced sizes, or several."""
        if name in self.lying:
            return self.lying[name]
        node = self.makers[name]  # made since
        found = result_of(node, {read: self._lies(read) for read in node.reads})
        if found is None and name in self.tensors:
            found = torch.empty(self.tensors[name].shape, device="meta")
        self.lying.known[name] = found
        return found

    @cached_property
    def lying(self) -> Lying:
        return Lying(self.graph)

    def _as_large(self, node: Node) -> str | None:
        """A value in memory below `node` that has the shape of its result."""
        for name in self._operands(node):
            if self.tensors[name].shape == self.tensors[node.result].shape:
                found = self._origin(name)
                if found is not None:
                    return found
        return None

    def _origin(self, name: str) -> str | None:
        """A value in memory that has the shape of `name`: itself, or one from which it is made."""
        maker = self.makers.get(name)
        inside = maker is not None and self._is_pointwise(maker)
        return self._as_large(maker) if maker and inside else name

    def _operands(self, node: Node) -> list[str]:
        """The operands that have dimensions; one of none is the same everywhere."""
        return [name for name in dict.fromkeys(node.reads) if self.tensors[name].shape]

    def _move(self, view: Node, node: Node) -> None:
        """Puts the view of each operand of `node` in the place of `view`, and `node` behind."""
        made: list[Node] = []
        viewed = {name: self._viewed(view, node, name, made) for name in self._operands(node)}
        self.moved = True
        if view.outputs:
            self._exchange(view, [*made, self._behind(view, node, viewed)])
            return
        for item in list(self.readers[view.result]):
            again = [self._again(item, viewed[name], self.tensors[name]) for name in viewed]
            items = {name: new.result for name, new in zip(viewed, again, strict=True)}
            self._exchange(item, [*again, self._behind(item, node, items)])
        self._exchange(view, made)

    def _behind(self, view: Node, node: Node, names: dict[str, str]) -> Node:
        """The same as `node` of views of its operands; its result is that of `view`."""
        return replace(renamed(node, names), result=view.result, outputs=view.outputs)

    def _viewed(self, view: Node, node: Node, name: str, made: list[Node]) -> str:
        """The name of the view of one operand, whose nodes are put into `made`."""
        shape = self.tensors[node.result].shape
        tensor = self.tensors[name]
        like = self._as_large(node)
        assert like is not None
        # Of several inputs one may broadcast that did not in the trace.
        resizing = view.packet in RESIZING or bool(moves(view))
        open_size = resizing and len(self.graph.inputs) > 1
        if tensor.shape != shape or (open_size and self._origin(name) != like):
            grown = Tensor(unused(f"{name}_expand_as", self.taken), shape, tensor.dtype)
            args = (Argument("self", Ref(name)), Argument("other", Ref(like)))
            made.append(Node("aten.expand_as.default", grown.name, args, (grown,), views=(name,),
                             source=node.source))  # fmt: skip
            self.tensors[grown.name] = grown
            name = grown.name
        made.append(self._again(view, name, tensor))
        return made[-1].result

    def _again(self, node: Node, name: str, tensor: Tensor) -> Node:
        """The same view of the value `name`, which has the dtype of `tensor`."""
        what = node.value("index") if node.op == ITEM else node.packet
        result = unused(f"{name}_{what}", self.taken)
        outputs = tuple(Tensor(result, t.shape, tensor.dtype) for t in node.outputs)
        self.tensors.update((t.name, t) for t in outputs)
        made = _of_any(renamed(node, {node.reads[0]: name}))
        return replace(made, result=result, outputs=outputs)

    def _exchange(self, old: Node, new: Sequence[Node]) -> None:
        at = self._place(old)
        self.nodes[at : at + 1] = new
        self.makers.update((node.result, node) for node in new)
        for name in dict.fromkeys(old.reads):
            self.readers[name] = [node for node in self.readers[name] if node is not old]
        self._read(new)

    def _place(self, node: Node) -> int:
        return next(i for i, n in enumerate(self.nodes) if n is node)


def _of_any(view: Node) -> Node:
    """The same view of a value that may lie anyhow, where the reference has it of a dense one."""
    packet = OF_ANY.get(view.packet)
    if packet is None:
        return view
    args = tuple(replace(a, name="shape") if a.name == "size" else a for a in view.args)
    return replace(view, op=f"aten.{packet}.default", args=args)


def _without_twins(graph: Graph) -> Graph:
    """`graph` with each of the same views of one value taken once."""
    names: dict[str, str] = {}
    known: dict[Any, str] = {}
    nodes = []
    for node in graph.nodes:
        node = renamed(node, names)
        if node.mutates:
            known = {}
        if is_view(node) or node.op == ITEM:
            first = known.setdefault((node.op, node.values), node.result)
            if first != node.result and node.result not in graph.results:
                names[node.result] = first
                continue
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
