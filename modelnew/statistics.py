"""Takes a normalization apart where PyTorch's own kernel suits its shape badly.

The statistics of the rows are a call of their own, and what is left is pointwise: a kernel does it,
together with what comes before the next call.
"""

from __future__ import annotations

import math
from dataclasses import replace

from modelnew.ir import Argument, Graph, Literal, Node, Ref, Tensor

# layer_norm gives each row to a block of 128 threads: short rows leave most of them idle and few
# rows most of the GPU. [16, 4194304] takes it 8.1 ms on an H200, torch.compile 0.36.
SHORT, FEW = 128, 128
WORTH = 1 << 22  # elements


def with_statistics_apart(graph: Graph) -> Graph:
    """Those layer_norm calls of `graph` as var_mean and a pointwise step that this makes faster."""
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "aten.layer_norm.default" and _pays(graph, node):
            parts = _parts(graph, node)
            tensors.update((made.name, made) for part in parts for made in part.outputs)
            nodes += parts
        else:
            nodes.append(node)
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _pays(graph: Graph, node: Node) -> bool:
    shape, row = graph.tensors[node.reads[0]].shape, node.value("normalized_shape")
    assert isinstance(row, tuple)
    length = math.prod(shape[len(shape) - len(row) :])
    count = math.prod(shape[: len(shape) - len(row)])
    return length * count >= WORTH and (length <= SHORT or count <= FEW)


def _parts(graph: Graph, node: Node) -> list[Node]:
    """The same result in steps; the statistics are float32 whatever the dtype, as PyTorch's are."""
    name, (made,), x = node.result, node.outputs, node.reads[0]
    row = node.value("normalized_shape")
    assert isinstance(row, tuple)
    rank, behind = len(made.shape), len(row)
    shape = (*made.shape[: rank - behind], *[1] * behind)

    def step(op: str, result: str, args: list[Argument], **more: object) -> Node:
        found = Node(op, result, tuple(args), (), source=node.source)
        return replace(found, **more)  # type: ignore[arg-type]

    def item(index: int, result: str) -> Node:
        args = [Argument("self", Ref(f"{name}_rows")), Argument("index", index)]
        outputs = (Tensor(result, shape, "float32"),)
        return step("python.getitem.int", result, args, outputs=outputs, views=(f"{name}_rows",))

    single = Tensor(f"{name}_operand", made.shape, "float32")
    dtype = Argument("dtype", Literal("torch.float32"))
    dims = tuple(range(-behind, 0))
    normalized = [
        Argument("x", Ref(x)), Argument("mean", Ref(f"{name}_mean")),
        Argument("var", Ref(f"{name}_var")),
        *(replace(a, default=False) for a in node.args if a.name in ("weight", "bias", "eps")),
    ]  # fmt: skip
    return [
        step(
            "aten.to.dtype",
            single.name,
            [
                Argument("self", Ref(x)), dtype, Argument("non_blocking", False, default=True),
                Argument("copy", False, default=True),
                Argument("memory_format", None, default=True, keyword=True),
            ],
            outputs=(single,),
            views=(x,),
        ),
        step(
            "aten.var_mean.correction",
            f"{name}_rows",
            [
                Argument("self", Ref(single.name)), Argument("dim", dims),
                Argument("correction", 0, keyword=True), Argument("keepdim", True, keyword=True),
            ],
        ),
        item(0, f"{name}_var"),
        item(1, f"{name}_mean"),
        step("modelnew.normalized.default", name, normalized, outputs=node.outputs),
    ]  # fmt: skip
