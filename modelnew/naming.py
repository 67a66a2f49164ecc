"""Names the kernels of a plan: one name for all that are alike but for the names in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from modelnew.ir import Arg, Contraction, Joined, Live, Node, Pointwise, Ref, Step
from modelnew.joins import join_dim
from modelnew.moves import moves
from modelnew.products import width


def named(steps: Sequence[Step], names: dict[Any, str]) -> tuple[Step, ...]:
    """Names each kernel after its operators, another one of that name with a number.

    `names` has the kernels that exist already, by what a kernel is but for the names in it.
    """

    def name_of(signature: Any, name: str) -> str:
        like_it = sum(re.fullmatch(rf"{name}(_\d+)?", known) is not None
                      for known in names.values())  # fmt: skip
        return names.setdefault(signature, name if like_it == 0 else f"{name}_{like_it + 1}")

    def kernel(step: Pointwise) -> Pointwise:
        return replace(step, name=name_of(_signature(step), _kernel_name(step.body.statements)))

    found: list[Step] = []
    for step in steps:
        match step:
            case Pointwise():
                step = kernel(step)
            case Joined():
                step = replace(step, parts=tuple(map(kernel, step.parts)))
                step = replace(step, name=name_of(_join_signature(step), "cat"))
            case Contraction():
                step = replace(step, epilogue=kernel(step.epilogue))
                name = _kernel_name([step.node, *_maths(step)])
                step = replace(step, name=name_of(_contraction_signature(step), name))
        found.append(step)
    return tuple(found)


def _join_signature(step: Joined) -> Any:
    """All of a concatenation but the names of its values and the texts of its numbers."""
    reads = {access.tensor.name: i for i, access in enumerate(step.reads)}
    numbers = {scalar.text: i for i, scalar in enumerate(step.scalars)}
    places = {name: i for i, name in enumerate(step.node.reads)}
    parts = tuple(
        (
            part.name,
            tuple(reads[access.tensor.name] for access in part.reads),
            tuple(numbers[scalar.text] for scalar in part.scalars),
            tuple(places[name] for name in part.body.results),
        )
        for part in step.parts
    )
    return join_dim(step.node), len(step.node.outputs[0].shape), parts


def _contraction_signature(step: Contraction) -> Any:
    """All of a product and its epilogue but the names of values, the texts of numbers, the sizes.

    Dimensions are counted: a matrix takes rows of any number of dimensions.
    """
    reads = {access.tensor.name: i for i, access in enumerate(step.reads)}
    ranks = tuple((reads[tensor.name], len(tensor.shape)) for tensor in step.operands)
    inside = tuple(reads.get(access.tensor.name, "product") for access in step.epilogue.reads)
    return "product", step.kind, width(step), step.node.op, ranks, step.epilogue.name, inside


def _maths(step: Contraction) -> list[Node]:
    """What an epilogue does but for writing the product as it is."""
    product = step.node.result
    nodes = step.epilogue.body.statements
    return [n for n in nodes if not (n.packet == "clone" and n.reads == (product,))]


def _signature(step: Pointwise) -> Any:
    """All of a kernel but the names of its values, the texts of its numbers and its sizes."""
    names = {access.tensor.name: f"read {i}" for i, access in enumerate(step.reads)}
    numbers = {scalar.text: f"number {i}" for i, scalar in enumerate(step.scalars)}

    def plain(value: Arg) -> Any:
        match value:
            case Ref():
                return names[value.name]
            case Live():
                return numbers.get(value.text)
            case tuple():
                return tuple(map(plain, value))
        return (type(value), value)

    statements = []
    for i, node in enumerate(step.body.statements):
        statements.append((node.op, *(plain(argument.value) for argument in node.args)))
        names[node.result] = f"value {i}"
    shape = step.writes[0].shape
    reads = [
        (a.tensor.dtype, a.behind, a.tensor.shape == shape, a.node and moves(a.node))
        for a in step.reads
    ]
    return (
        tuple(reads),
        tuple(statements),
        tuple((names[tensor.name], tensor.dtype) for tensor in step.writes),
        (step.layout, len(shape) if step.layout else 0, *(names[name] for name in step.across)),
        tuple(names.get(tensor.name, "other") for tensor in step.like),
    )


def _kernel_name(nodes: Sequence[Node]) -> str:
    packets = [node.packet.removesuffix("_") for node in nodes]
    if len(packets) > 6:
        packets = [*packets[:2], "to", packets[-1]]
    return "_".join(packets).strip("_")
