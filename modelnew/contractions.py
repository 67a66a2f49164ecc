"""Takes products apart, Graph -> Graph, and gives them their epilogues among the steps of a plan.

A product that carries a bias or scales becomes the bare product and pointwise nodes, so that all
that follows it is maths of one kind. The product is their first operand: PyTorch gives a result the
strides of the first, and the bare product lies as the whole call's result does.

A kernel can be the epilogue of a product where nothing else that it waits for waits for the
product: with y = p * p.sum() the sum has to be there before y is, and after p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelnew.ir import (
    Access,
    Arg,
    Argument,
    Body,
    Contraction,
    Graph,
    Library,
    Live,
    Node,
    Pointwise,
    Ref,
    Step,
    Tensor,
    step_reads,
    step_writes,
)
from modelnew.names import renamed, unused, with_results
from modelnew.ops import FLOATS, operands
from modelnew.products import (
    BARE,
    EINSUM,
    PRODUCTS,
    Kind,
    choice,
    is_product,
    operands_of,
    product_of,
    taken,
)
from modelnew.steps import clone, copy, map_operands, random_order, waits_for

# Steps that keep one triangle of a matrix: see `triangle`.
TRIANGLES = {"lower_triangle": 1, "upper_triangle": -1}
SUMS = ("add", "sub", "rsub")
# What the names end with of what a call adds to its product, and of a product times alpha.
BIASED, SCALED = "biased", "scaled"

# --- products by themselves -----------------------------------------------------------------


def with_products_apart(graph: Graph) -> Graph:
    """`graph` with each product that is to be a Contraction by itself, and pointwise nodes for what
    is added to it and how it is scaled."""
    tensors = dict(graph.tensors)
    known = replace(graph, tensors=tensors)
    names: dict[str, str] = {}
    reserved = {*tensors, *(node.result for node in graph.nodes)}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = renamed(node, names)
        parts = _parts(node, reserved) if taken(node, known) else [node]
        tensors.update((tensor.name, tensor) for part in parts for tensor in part.outputs)
        if len(parts) > 1:
            names[node.result] = parts[-1].result
        nodes += parts
    return with_results(replace(known, nodes=tuple(nodes)), names)


def _parts(node: Node, reserved: set[str]) -> list[Node]:
    """The bare product under the call's name, and what is done to it."""
    names = operands_of(node)
    assert names is not None
    operands = tuple(map(Ref, names))
    if node.op == EINSUM:
        return [_as(node, "matmul", operands)]
    added = PRODUCTS[node.packet][2]
    bias = node.value(added) if added else None
    if node.op == "aten.linear.default":
        bare = tuple(replace(a, value=None, default=True) if a.name == "bias" else a
                     for a in node.args)  # fmt: skip
        parts = [replace(node, args=bare)]
        return [*parts, _plus(node, parts[0], bias, 1, reserved)] if bias is not None else parts
    if added is None:
        return [node]
    alpha, beta = node.value("alpha"), node.value("beta")
    parts = [_as(node, BARE[node.packet], operands)]
    if alpha != 1:
        args = [Argument("self", Ref(node.result)), Argument("other", alpha)]
        parts.append(_pointwise(node, "aten.mul.Tensor", SCALED, reserved, args))
    if isinstance(beta, Live) or beta != 0:  # times 0 what is added counts for nothing, NaN too
        parts.append(_plus(node, parts[-1], bias, beta, reserved))
    return parts


def _as(node: Node, packet: str, operands: Sequence[Arg]) -> Node:
    """The product of two operands by another operator."""
    pairs = zip(PRODUCTS[packet][:2], operands, strict=True)
    return replace(
        node,
        op=f"aten.{packet}.default",
        args=tuple(Argument(name, value) for name, value in pairs),
    )


def _plus(node: Node, product: Node, other: Arg, times: Arg, reserved: set[str]) -> Node:
    args = [
        Argument("self", Ref(product.result)),
        Argument("other", other),
        Argument("alpha", times, times == 1, keyword=True),
    ]
    return _pointwise(node, "aten.add.Tensor", BIASED, reserved, args)


def _pointwise(
    node: Node, op: str, suffix: str, reserved: set[str], args: Sequence[Argument]
) -> Node:
    """A step behind a product, whose result is as its is."""
    made = replace(node.outputs[0], name=unused(f"{node.result}_{suffix}", reserved))
    return Node(op, made.name, tuple(args), (made,), source=node.source)


# --- products with what follows them --------------------------------------------------------


def with_contractions(
    graph: Graph, steps: Sequence[Step], epochs: Mapping[str, int], most: int
) -> tuple[Graph, list[Step]]:
    """The steps with a Contraction for each product that is worth one, and the graph with the
    values that those make in passing. A kernel has at most so many operands."""
    work = _Work(graph, list(steps), epochs, most)
    for step in steps:
        if isinstance(step, Library) and is_product(step.node):
            match choice(step.node, graph):
                case Kind() as kind:
                    work.contract(step, kind.name)
                case why:
                    work.exchange([step], replace(step, why=why))
    return replace(graph, tensors=work.tensors), work.steps


def triangle(step: Contraction) -> tuple[int, int] | None:
    """What of the product matters, where that is a triangle: 1 for what is at most so many columns
    right of the diagonal, -1 for what is at least so many."""
    found: set[tuple[int, int]] = set()
    made_of_it = {step.node.result}
    for node in step.epilogue.body.statements:
        if made_of_it.isdisjoint(node.reads):
            continue
        diagonal = node.value("diagonal") if node.packet in TRIANGLES else None
        if isinstance(diagonal, int):
            found.add((TRIANGLES[node.packet], diagonal))
        else:
            made_of_it.add(node.result)
    whole = not made_of_it.isdisjoint(step.epilogue.body.results)
    return found.pop() if len(found) == 1 and not whole else None


def bias(step: Contraction) -> str | None:
    """The row that the call which was taken apart added to its product: where PyTorch multiplies,
    its call takes the row in. A product of half types would be rounded without it and lose what
    cancels, and autocast makes a half type of both. Where a tensor from memory is added next, the
    reference itself rounds ahead of a sum, and promotes the result.
    """
    product, statements = step.node.result, step.epilogue.body.statements
    after = [node for node in statements if product in node.reads]
    if len(after) != 1 or not after[0].result.startswith(f"{product}_{BIASED}"):
        return None
    (add,) = after
    given = {a.tensor.name: a for a in step.epilogue.reads if a.tensor.name != product}
    other = given.get(add.reads[-1])
    if other is None or other.node or other.tensor.shape != step.node.outputs[0].shape[-1:]:
        return None
    sums = [node for node in statements if node.packet in SUMS and add.result in node.reads]
    summed = any(not given.keys().isdisjoint(node.reads) for node in sums)
    again = sum(other.tensor.name in node.reads for node in statements) > 1
    plain = add.value("self") == Ref(product) and add.value("alpha") == 1
    return other.tensor.name if plain and not (summed or again) else None


@dataclass
class _Work:
    """The steps as they are by now."""

    graph: Graph
    steps: list[Step]
    epochs: Mapping[str, int]
    most: int

    def __post_init__(self) -> None:
        self.tensors = dict(self.graph.tensors)
        self.reserved = {*self.tensors, *(node.result for node in self.graph.nodes)}
        self.after = random_order(self.graph)

    def exchange(self, old: Sequence[Step], new: Step) -> None:
        self.steps = [step for step in self.steps if not any(step is o for o in old)] + [new]

    def contract(self, step: Library, kind: str) -> None:
        """Puts a Contraction in the place of a product and of the kernel that is its epilogue."""
        (product,) = step.node.outputs
        kernel = next((k for k in self.steps if self._follows(k, step.node)), None)
        found = product_of(step.node, self.tensors)
        assert found is not None
        operands, node = (found.left, found.right), step.node
        if isinstance(kernel, Pointwise):
            others = [s for s in self.steps if s is not kernel and product.name in step_reads(s)]
            if not others and product.name not in self.graph.results:
                epilogue = _in_memory(kernel, operands)
                self.exchange([step, kernel], Contraction("", kind, node, operands, epilogue))
                return
        # The name is that of what is in memory, for those that read it there.
        inner = replace(product, name=unused(f"{product.name}_product", self.reserved))
        self.tensors[inner.name] = inner
        node = replace(node, result=inner.name, outputs=(inner,))
        if isinstance(kernel, Pointwise):
            epilogue = _with_product(_in_memory(kernel, operands), inner, product)
            self.exchange([step, kernel], Contraction("", kind, node, operands, epilogue))
        else:
            epilogue = copy(inner, product)
            self.exchange([step], Contraction("", kind, node, operands, epilogue))

    def _follows(self, step: Step, node: Node) -> bool:
        """Whether a step is a kernel that can be the epilogue of a product."""
        if not isinstance(step, Pointwise) or step.layout or node.result not in step_reads(step):
            return False
        reads = [access for access in step.reads if access.base == node.result]
        plain = all(access.node is None and not access.behind for access in reads)
        shape = node.outputs[0].shape
        alike = {tensor.shape for tensor in step.writes} == {shape}
        same = self.epochs[step.body.results[0]] == self.epochs[node.result]
        same &= _keeps_dtype(step, node.outputs[0])
        # The two operands and the product, if it is written, for the product that is read.
        moved = [access.node for access in step.reads if access.node]
        given = len(step.reads) + len(step.writes) + map_operands(moved, step.body.statements)
        fits = given + 2 <= self.most
        return plain and alike and same and fits and not self._needs(step, node.result)

    def _needs(self, kernel: Pointwise, product: str) -> bool:
        """Whether something else that the kernel waits for waits for the product."""
        makers = {name: step for step in self.steps for name in step_writes(step)}
        stack = [name for name in step_reads(kernel) if name != product]
        seen: set[str] = set()
        while stack:
            name = stack.pop()
            if name == product:
                return True
            if name in makers and name not in seen:
                seen.add(name)
                stack += waits_for(makers[name], self.after)
        return False


def _keeps_dtype(step: Pointwise, product: Tensor) -> bool:
    """Whether what a kernel reads beside a product leaves it its dtype: nothing converts what is
    not in memory."""
    single = {name for node in step.body.statements for name in operands(node, "single")}
    read = [access.tensor for access in step.reads if access.tensor.name not in single]
    floats = {tensor.dtype for tensor in read if tensor.dtype in FLOATS and tensor.shape}
    return product.dtype == "float32" or floats == {product.dtype}


def _in_memory(step: Pointwise, operands: Sequence[Tensor]) -> Pointwise:
    """The kernel reading moved elements that are in memory from there, as the product does."""
    names = [tensor.name for tensor in operands]
    reads = tuple(replace(a, node=None) if a.tensor.name in names else a for a in step.reads)
    return replace(step, reads=reads)


def _with_product(step: Pointwise, inner: Tensor, product: Tensor) -> Pointwise:
    """The kernel reading the product as `inner`, and writing it as well."""

    def place(access: Access) -> Access:
        return replace(access, tensor=inner) if access.tensor.name == product.name else access

    body = Body((clone(inner, product), *step.body.statements), (*step.body.results, product.name))
    across = tuple(inner.name if name == product.name else name for name in step.across)
    return replace(
        step, reads=tuple(map(place, step.reads)), body=body, across=across,
        writes=(*step.writes, product),
    )  # fmt: skip
