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
    def _values(self) -> Lying:
        return Lying(self.graph)


class Lying:
    """By name, a tensor without memory that lies as a value does, or several of a call that gives a
    list; those of library calls are contiguous. Only what is asked for is worked out."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {node.result: node for node in graph.nodes}
        self.known: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.graph.tensors or name in self.makers

    def __getitem__(self, name: str) -> Any:
        waiting = [name]  # a chain of operators may be longer than Python lets calls nest
        while waiting:
            last = waiting[-1]
            node = None if last in self.known else self._maker(last)
            below = [read for read in node.reads if read not in self.known] if node else []
            waiting += below
            if not below:
                waiting.pop()
                if last not in self.known:
                    self.known[last] = self._made(last, node)
        return self.known[name]

    def _maker(self, name: str) -> Node | None:
        """The view or pointwise operator that makes a value."""
        node = self.makers.get(name)
        known = node and (node.views or ops.why_not(node, self.graph) is None)
        return node if known else None

    def _made(self, name: str, node: Node | None) -> Any:
        found = result_of(node, self.known) if node else None
        if isinstance(found, torch.Tensor | list | tuple):
            return found
        tensor = self.graph.tensors.get(name)
        if tensor is None:  # the list that a library call gives
            return None
        value = torch.empty(tensor.shape, dtype=_dtype(tensor.dtype), device="meta")
        strides = self.graph.strides.get(name)
        return value if strides is None else value.as_strided(tensor.shape, strides)


def result_of(node: Node, values: Mapping[str, Any]) -> Any:
    """What a call gives for tensors without memory; None where PyTorch cannot say, and for an item
    of a library call's list, which has no value here."""
    if any(values[name] is None for name in node.reads):
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
