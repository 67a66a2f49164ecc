"""Takes normalizations apart: the statistics are a call, and what is left is pointwise.

A kernel does that together with what follows, which saves a pass over the tensor, and PyTorch's own
normalizations suit some shapes badly. The statistics come from helpers in the file (see
templates/solution.py.jinja): one var_mean in float32, whatever the dtype.

Not for batch normalization: its running statistics are to be as the reference's, with the overflow
and the infinities of cuDNN's sums too, and var_mean and batch_norm_update_stats give NaN for some,
the latter with errors of the mean three times cuDNN's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from modelnew.ir import Arg, Argument, Graph, Node, Ref, Tensor

# Where this pays, measured on an H200 in float32. layer_norm gives each row to a block of threads:
# short rows leave most of them idle and few rows most of the GPU ([16, 4194304] takes 8.4 ms, in
# parts 0.23; [256, 65536] 0.157 and 0.081; [131072, 128] 0.196 and 0.110). With rows of 192 it
# pays in float32 alone, for half types are converted before var_mean. group_norm and instance_norm
# take 1.2 to 1.5 times as long as the parts ([128, 64, 254, 254]: 2.55 and 2.59 ms, 1.65).
SHORT, FEW = 128, 256
WORTH = 1 << 22  # elements
# A channel's, at least: the statistics of groups are written out for each channel, which of
# [32768, 4096] makes two more tensors of its size (8.0 ms for a model that takes 7.6).
SPATIAL = 16


@dataclass(frozen=True)
class _Parts:
    """The helper that finds the statistics, its further arguments, the shape of what it gives."""

    helper: str
    given: tuple[Arg, ...]
    shape: tuple[int, ...]


def with_statistics_apart(graph: Graph) -> Graph:
    """Those normalizations of `graph` in parts that this makes faster."""
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    convolved = _convolved(graph)
    for node in graph.nodes:
        parts = None if node.result in convolved else _parts(graph, node)
        made = [node] if parts is None else _steps(node, parts)
        tensors.update((tensor.name, tensor) for step in made for tensor in step.outputs)
        nodes += made
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _convolved(graph: Graph) -> set[str]:
    """The values that a convolution's result depends on.

    cuDNN rounds its operands to TF32. Normalized values that differ from the reference's in their
    last bit are rounded to other neighbours, and outputs differ by 3e-4 where harnesses allow 1e-4.
    """
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if "conv" in node.packet or not found.isdisjoint(node.names):
            found.update(node.reads)
    return found


def _parts(graph: Graph, node: Node) -> _Parts | None:
    """How to take a call apart, None for one that stays as it is."""
    if node.packet not in ("instance_norm", "group_norm", "layer_norm"):
        return None
    shape = graph.tensors[node.reads[0]].shape
    if math.prod(shape) < WORTH:
        return None
    a_channel, size = (*shape[:2], *[1] * (len(shape) - 2)), math.prod(shape[2:])
    match node.packet:
        case "instance_norm" if node.value("running_mean") is None and size >= SPATIAL:
            return _Parts("group", (), a_channel)
        case "group_norm" if size >= SPATIAL:
            return _Parts("group", (node.value("num_groups"),), a_channel)
        case "layer_norm":
            row = node.value("normalized_shape")
            assert isinstance(row, tuple)
            outer = shape[: len(shape) - len(row)]
            pays = math.prod(row) <= SHORT or math.prod(outer) <= FEW  # type: ignore[arg-type]
            return _Parts("row", (len(row),), (*outer, *[1] * len(row))) if pays else None
    return None


def _steps(node: Node, parts: _Parts) -> list[Node]:
    """The same result in two steps."""
    name, x = node.result, Ref(node.reads[0])
    found = tuple(Tensor(f"{name}_{kind}", parts.shape, "float32") for kind in ("mean", "var"))
    affine = (node.value(key) for key in ("weight", "bias", "eps"))
    return [
        Node(
            f"modelnew.{parts.helper}_statistics.default",
            f"{name}_statistics",
            _arguments(x, *parts.given),
            found,
            source=node.source,
        ),
        Node(
            f"modelnew.{node.packet}alized.default",
            name,
            _arguments(x, *(Ref(tensor.name) for tensor in found), *affine),
            node.outputs,
            source=node.source,
        ),
    ]


def _arguments(*values: Arg) -> tuple[Argument, ...]:
    return tuple(Argument(f"_{at}", value) for at, value in enumerate(values))
