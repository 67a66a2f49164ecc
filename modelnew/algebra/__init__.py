"""Rewrites a Graph by algebra, Graph -> Graph: off unless asked for, and marked in the file.

What is the same in real arithmetic, though its rounding differs: a sum, a mean or an average pool
of a product is a product of sums, means or pools; a reduction over a dimension of size 1 is its
operand. What is the same bit for bit, NaN and infinities included (see ranges.py): a clip of what
is inside its bounds, and the like. A rewrite is refused where the graph alone does not prove one
of its conditions; a result that can only be NaN or one constant is never made that constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modelnew import ops
from modelnew.algebra.convolutions import convolution
from modelnew.algebra.edit import Edit, Facts, Refused, require
from modelnew.algebra.products import dims_text, from_the_last, of_product, origins
from modelnew.ir import Graph, Guard, Node, Ref, refs_in
from modelnew.products import PRODUCTS


def rewrite(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph with every rewrite that applies, and a line for a reader on each of them."""
    lines: list[str] = []
    while (found := _first(graph)) is not None:
        graph, line = found
        lines.append(line)
    if graph.other is not None:
        other, more = rewrite(graph.other)
        graph = replace(graph, other=other)
        lines += [line for line in more if line not in lines]
    return graph, tuple(lines)


def _first(graph: Graph) -> tuple[Graph, str] | None:
    facts = Facts(graph)
    used = facts.results.union(facts.uses)
    for node in (node for node in graph.nodes if node.result in used):
        for rule in (_same, _over_one, _of_product):
            edit = Edit(facts, node)
            try:
                return edit.finished(*rule(edit, node))
            except Refused:
                continue
    return None


# --- the same bit for bit -------------------------------------------------------------------


def _same(edit: Edit, node: Node) -> tuple[str, str]:
    found = edit.facts.ranges.same_as(node)
    require(found)
    assert found is not None
    value, why = found
    old, new = edit.facts.tensor(node.result), edit.facts.tensor(value)
    require((old.shape, old.dtype) == (new.shape, new.dtype) and old.dtype in ops.FLOATS)
    require(edit.facts.can_stand_for(value, node.result))
    return value, f"{node.result}: {why} is {value}, bit for bit"


def _of_product(edit: Edit, node: Node) -> tuple[str, str]:
    return of_product(edit, node, convolution)


# --- reductions over dimensions of size 1 ---------------------------------------------------

# Reductions, and scans, that give back a single number as it is: log(exp(x - x)) + x is x, and
# infinities and NaN too come back as PyTorch's logsumexp has them.
OF_ONE = ("sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "cumsum", "cumprod")


def _over_one(edit: Edit, node: Node) -> tuple[str, str]:
    """A reduction over dimensions of size 1 is its operand, without them unless keepdim."""
    facts, source = edit.facts, node
    if node.op == "python.getitem.int":  # max and min over a dimension give places too
        require(node.value("index") == 0 and node.reads[0] in facts.nodes)
        source = facts.nodes[node.reads[0]]
        require(source.packet in ("max", "min"))
    values = {argument.name: argument.value for argument in source.args}
    require(
        source.packet in OF_ONE and len(node.outputs) == 1 and values.get("dim") not in (None, ())
    )
    require(values.get("dtype") is None)
    operand = source.reads[0]
    dims = from_the_last(values["dim"], len(facts.tensor(operand).shape))
    for dim in dims:
        _of_size_one(edit, operand, dim)
    new, old = facts.tensor(operand), facts.tensor(node.result)
    require(new.dtype == old.dtype and new.dtype in ops.FLOATS)
    require(facts.can_stand_for(operand, node.result))
    line = f"{source.result}: {source.packet} over {dims_text(dims, new)} of size 1 is its operand"
    if len(new.shape) != len(old.shape):
        places = tuple(sorted(len(new.shape) + dim for dim in dims))
        operand = edit.call(node.result, "squeeze.dims", Ref(operand), places)
    return operand, line


def _of_size_one(edit: Edit, name: str, dim: int) -> None:
    """Refuses unless the dimension has size 1 at every call; pins an input that may differ."""
    facts = edit.facts
    shape, node = facts.tensor(name).shape, facts.nodes.get(name)
    require(len(shape) >= -dim and shape[dim] == 1)
    if name in facts.static:
        return
    if node is None:
        place = len(shape) + dim
        edit.pins.append(Guard(f"{facts.graph.bindings[name]}.shape[{place}:{place + 1}]", "(1,)"))
        return
    for operand, place in _origins_of_size(facts, node, dim):
        _of_size_one(edit, operand, place)


def _origins_of_size(facts: Facts, node: Node, dim: int) -> Iterator[tuple[str, int]]:
    """The operands' dimensions that all have to be 1 for the result's to be; none where it is."""
    values = {argument.name: argument.value for argument in node.args}
    rank, operand = len(node.outputs[0].shape), node.reads[0]
    if node.op == "python.getitem.int":
        node = facts.nodes[operand]
        values, operand = {a.name: a.value for a in node.args}, node.reads[0]
        require(node.packet in ("max", "min"))
    if node.packet in PRODUCTS:
        argument, place = origins(facts, node).get(dim, ("", 0))
        require(argument)
        yield from ((ref, place) for ref in refs_in(values[argument]))
    elif node.packet in OF_ONE:
        require(values.get("keepdim"))
        if dim not in from_the_last(values["dim"], rank):
            yield operand, dim
    elif node.packet == "unsqueeze":
        (place,) = from_the_last(values["dim"], rank)
        if dim != place:
            yield operand, dim + (dim < place)
    elif node.packet.startswith("adaptive_avg_pool"):
        sizes = values["output_size"]
        require(isinstance(sizes, tuple) and len(sizes) >= -dim and sizes[dim] == 1)
    else:
        require(ops.find(node) is not None or node.packet in ("to", "detach"))
        for name in node.reads:
            if len(facts.tensor(name).shape) >= -dim:
                yield name, dim
