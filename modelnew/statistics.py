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
        made = [node]
        if node.op == "aten.layer_norm.default":
            shape, row = graph.tensors[node.reads[0]].shape, node.value("normalized_shape")
            assert isinstance(row, tuple)
            outer = shape[: len(shape) - len(row)]
            if _pays(math.prod(outer), math.prod(shape[len(outer) :])):
                made = _parts(node, (*outer, *[1] * len(row)), tuple(range(-len(row), 0)))
        tensors.update((tensor.name, tensor) for part in made for tensor in part.outputs)
        nodes += made
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _pays(rows: int, length: int) -> bool:
    return rows * length >= WORTH and (length <= SHORT or rows <= FEW)


def _parts(node: Node, shape: tuple[int, ...], dims: tuple[int, ...]) -> list[Node]:
    """The same result in steps; the statistics, of `shape`, are float32 whatever the dtype."""
    name, (made,), x = node.result, node.outputs, node.reads[0]
    single, both = Tensor(f"{name}_operand", made.shape, "float32"), f"{name}_rows"
    statistics = [Tensor(f"{name}_{kind}", shape, "float32") for kind in ("var", "mean")]
    converted = (
        Argument("self", Ref(x)), Argument("dtype", Literal("torch.float32")),
        Argument("non_blocking", False, default=True), Argument("copy", False, default=True),
        Argument("memory_format", None, default=True, keyword=True),
    )  # fmt: skip
    reduced = (
        Argument("self", Ref(single.name)), Argument("dim", dims),
        Argument("correction", 0, keyword=True), Argument("keepdim", True, keyword=True),
    )  # fmt: skip
    normalized = (
        Argument("x", Ref(x)),
        *(Argument(kind, Ref(f"{name}_{kind}")) for kind in ("mean", "var")),
        *(replace(a, default=False) for a in node.args if a.name in ("weight", "bias", "eps")),
    )
    parts = [
        Node("aten.to.dtype", single.name, converted, (single,), views=(x,)),
        Node("aten.var_mean.correction", both, reduced, ()),
        *(
            Node(
                "python.getitem.int",
                tensor.name,
                (Argument("self", Ref(both)), Argument("index", index)),
                (tensor,),
                views=(both,),
            )
            for index, tensor in enumerate(statistics)
        ),
        Node("modelnew.normalized.default", name, normalized, node.outputs),
    ]
    return [replace(part, source=node.source) for part in parts]
