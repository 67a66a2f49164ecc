"""Triangles and constant padding as steps of a kernel, where another one is beside them.

By themselves they stay PyTorch's calls: its triangles do not read what they leave out. A triangle
of a product of ours is a step of that product's kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from modelnew import ops
from modelnew.ir import Argument, Graph, Node, Ref, users_of
from modelnew.joins import is_join
from modelnew.moves import padding

_TRIANGLES = {"aten.tril.default": "lower_triangle", "aten.triu.default": "upper_triangle"}


def with_places(graph: Graph, products: Collection[str] = ()) -> Graph:
    """`graph` with those triangles and paddings that a kernel can take in as steps of ours; the
    `products` named are made by kernels."""
    users = users_of(graph)
    makers = {node.result: node for node in graph.nodes}
    nodes: list[Node] = []
    tensors = dict(graph.tensors)
    for node in graph.nodes:
        using = users.get(node.result, ())
        beside = bool(node.reads) and (
            _is_computed(node.reads[0], makers, graph)
            or any(ops.why_not(user, graph) is None for user in using)
            or (node.op in _TRIANGLES and node.reads[0] in products)
        )
        part = any(is_join(user, graph) for user in using)
        made = _placed(node) if beside and not part and _is_floating(node) else [node]
        tensors.update((tensor.name, tensor) for step in made for tensor in step.outputs)
        nodes += made
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _is_floating(node: Node) -> bool:
    return len(node.outputs) == 1 and node.outputs[0].dtype in ops.FLOATS


def _is_computed(name: str, makers: Mapping[str, Node], graph: Graph) -> bool:
    """Whether a value is a pointwise operator's, or a view of one."""
    maker = makers.get(name)
    while maker is not None and maker.views:
        maker = makers.get(maker.views[0])
    return maker is not None and ops.why_not(maker, graph) is None


def _placed(node: Node) -> list[Node]:
    if (name := _TRIANGLES.get(node.op)) and type(node.value("diagonal")) is int:
        return [replace(node, op=f"modelnew.{name}.default")]
    constant = node.op == "aten.constant_pad_nd.default" or (
        node.op == "aten.pad.default" and node.value("mode") == "constant"
    )
    if not constant or not padding(node.value("pad")):
        return [node]
    (made,) = node.outputs
    grown = replace(made, name=f"{made.name}_padding")
    x, pad = node.args[0], Argument("pad", node.value("pad"))
    value = Argument("value", 0 if node.value("value") is None else node.value("value"))
    return [
        replace(node, op="modelnew.padding.default", args=(x, pad), result=grown.name,
                outputs=(grown,)),
        replace(node, op="modelnew.padded.default",
                args=(Argument("self", Ref(grown.name)), pad, value)),
    ]  # fmt: skip
