"""What the planner asks of steps and kernels, whatever region they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from modelnew import ops
from modelnew.ir import (
    Access,
    Argument,
    Body,
    Graph,
    Library,
    Node,
    Pointwise,
    Ref,
    Step,
    Tensor,
    step_reads,
)
from modelnew.moves import moves


def copy(tensor: Tensor, made: Tensor) -> Pointwise:
    """A kernel that copies `tensor` to `made`."""
    statement = clone(tensor, made)
    return Pointwise("", (Access(tensor),), (), Body((statement,), (made.name,)), (made,))


def random_order(graph: Graph) -> dict[str, tuple[str, ...]]:
    """For each random call the one before it, which has to stay before it."""
    names = [node.result for node in graph.nodes if node.random]
    return {after: (before,) for before, after in itertools.pairwise(names)}


def waits_for(step: Step, after: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The values that have to be there before a step; `after` is what random_order gives."""
    extra = after.get(step.node.result, ()) if isinstance(step, Library) else ()
    return (*step_reads(step), *extra)


def map_operands(moved: Iterable[Node], statements: Iterable[Node]) -> int:
    """What a kernel is given beside tensors: for each dimension along which it reads moved elements
    or a step depends on where an element is, one operand more, and a map, which is as long again.
    """
    return 2 * sum(map(len, (*map(moves, moved), *map(ops.placed, statements))))


def clone(tensor: Tensor, made: Tensor) -> Node:
    """The statement that makes `made` of `tensor` as it is."""
    args = (Argument("self", Ref(tensor.name)), Argument("memory_format", None, True, True))
    return Node("aten.clone.default", made.name, args, (made,))
