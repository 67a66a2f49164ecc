"""How values lie in memory at the traced sizes, and what of a kernel lies across its results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from modelnew import ops
from modelnew.interpret import call
from modelnew.ir import Arg, Graph, Live, Node, Pointwise

# Views that may put another dimension last.
PERMUTING = (
    "adjoint", "mT", "moveaxis", "movedim", "numpy_T", "permute", "swapaxes", "swapdims", "t",
    "transpose",
)  # fmt: skip


class Strides:
    """The strides of the values of a graph, as far as views and pointwise operators decide them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def across(self, step: Pointwise, joined: str | None) -> tuple[str, ...]:
        """What the kernel reads along another dimension than that along which it writes: its
        results, or their places in the concatenation `joined`."""
        shape = step.writes[0].shape
        inner = self.inner(joined or step.writes[0].name)
        if step.layout or inner is None:
            return ()
        whole = [access.tensor.name for access in step.reads if access.tensor.shape == shape]
        return tuple(name for name in whole if self._values[name].stride()[inner] > 1)

    def inner(self, name: str) -> int | None:
        """The dimension along which a value is dense; None where all are along the last."""
        if not self._matter:
            return None
        value = self._values[name]
        dense = [d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d) == 1]
        return dense[-1] if dense else None

    @property
    def _matter(self) -> bool:
        nodes = self.graph.nodes
        return bool(self.graph.strides) or any(node.packet in PERMUTING for node in nodes)

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        return values_of(self.graph)


def values_of(graph: Graph) -> dict[str, Any]:
    """A tensor without memory for every value, or several; library calls give contiguous ones."""
    values: dict[str, Any] = {}
    for name, tensor in graph.tensors.items():
        values[name] = torch.empty(tensor.shape, dtype=_dtype(tensor.dtype), device="meta")
        if name in graph.strides:
            values[name] = values[name].as_strided(tensor.shape, graph.strides[name])
    for node in graph.nodes:
        if node.views or ops.why_not(node, graph) is None:
            found = result_of(node, values)
            if isinstance(found, torch.Tensor | list | tuple):
                values[node.result] = found
    return values


def result_of(node: Node, values: Mapping[str, Any]) -> Any:
    """What a call gives for tensors without memory; None where PyTorch cannot say, and for an item
    of a library call's list, which has no value here."""
    if any(name not in values for name in node.reads):
        return None
    try:
        return call(node.with_values(map(_traced, node.values)), values, {"torch": torch})
    except (NameError, NotImplementedError, RuntimeError, TypeError):  # a device is none here
        return None


def _traced(value: Arg) -> Arg:
    """A live number as the integer that it was in the trace."""
    if isinstance(value, tuple):
        return tuple(map(_traced, value))
    return int(value.value) if isinstance(value, Live) else value


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
