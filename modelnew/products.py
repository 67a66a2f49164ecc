"""Matrix products that the region Contraction can have, and why others stay PyTorch's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from modelnew.ir import Contraction, Graph, Node, Ref, Tensor

# What `--matmul` chooses among: own kernels for products, or PyTorch's.
SPLIT, LIBRARY = "split", "library"

# By product: the operands that are multiplied, and what is added.
PRODUCTS: Mapping[str, tuple[str, str, str | None]] = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("self", "other", None),
    "mm": ("self", "mat2", None),
    "bmm": ("self", "mat2", None),
    "addmm": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
}
EINSUM = "aten.einsum.default"

# Below about 1024^3 the launches dominate (H200): 512^3 is better left to cuBLAS.
WORTH = 1 << 30
# Rows and columns, each: of fewer, most of a tile would be padding.
LEAST = 16
# Depth: [32768, 64] x [64, 32768] takes 2.72 ms for cuBLAS's 4.03 (H200), where results are most of
# the traffic; with 32 it takes 2.71 for 2.56.
DEPTH = 48


@dataclass(frozen=True)
class Product:
    """A product of `left`, [..., M, K], and `right`: [K, N] or as many of them as of left, and
    [N, K] where it is `transposed`. What is before [M, K] is rows too where right is a matrix."""

    left: Tensor
    right: Tensor
    transposed: bool = False

    @property
    def batches(self) -> int:
        return math.prod(self.right.shape[:-2])

    @property
    def rows(self) -> int:
        folded = len(self.right.shape) == 2
        return math.prod(self.left.shape[:-1]) if folded else self.left.shape[-2]

    @property
    def depth(self) -> int:
        return self.left.shape[-1]

    @property
    def columns(self) -> int:
        return self.right.shape[-2 if self.transposed else -1]

    @property
    def sizes(self) -> str:
        """For a reader: "[M, K] x [K, N]", with the number of those in front where there are more
        than one."""
        many = [self.batches] if self.batches > 1 else []
        pairs = [*many, self.rows, self.depth], [*many, self.depth, self.columns]
        return f"{pairs[0]} x {pairs[1]}"


def product_of(node: Node, tensors: Mapping[str, Tensor]) -> Product | None:
    """What a call multiplies, whatever it does besides; None for one that is no such product."""
    names = operands_of(node)
    if names is None or len(node.outputs) != 1 or not all(name in tensors for name in names):
        return None
    left, right = (tensors[name] for name in names)
    alike = len(right.shape) == 2 or right.shape[:-2] == left.shape[:-2]
    if min(len(left.shape), len(right.shape)) < 2 or not alike:
        return None
    found = Product(left, right, node.op == "aten.linear.default")
    inner = right.shape[-1 if found.transposed else -2]  # of einsum, 1 would be broadcast
    return found if inner == found.depth else None


def sizes(step: Contraction) -> str:
    """The sizes of what a step multiplies, for a reader."""
    return Product(*step.operands, transposed=step.node.packet == "linear").sizes


def why_not(node: Node, graph: Graph) -> str | None:
    """Why a product stays PyTorch's call, None for one that is to be a Contraction."""
    found = product_of(node, graph.tensors)
    dtypes = {graph.tensors[name].dtype for name in node.reads if name in graph.tensors}
    dtypes.update(tensor.dtype for tensor in node.outputs)
    if dtypes != {"float32"}:
        return f"a product of {', '.join(sorted(dtypes - {'float32'}))}"
    if found is None:
        ranks = [len(graph.tensors[name].shape) for name in node.reads]
        why = "a product with a vector" if min(ranks) < 2 else "operands that broadcast"
        return "an einsum that is no plain product" if node.op == EINSUM else why
    if reason := _why_not_added(node, graph):
        return reason
    if min(found.rows, found.columns) < LEAST or found.depth < DEPTH:
        return "a thin product: PyTorch's is faster"
    if found.batches * found.rows * found.columns * found.depth < WORTH:
        return "a small product: PyTorch's is faster"
    return None


def is_product(node: Node) -> bool:
    """Whether a call is of an operator that multiplies matrices."""
    return _names(node) is not None or node.op == EINSUM


def taken(node: Node, graph: Graph) -> bool:
    """Whether a call is to be a Contraction, with pointwise nodes for what it adds."""
    return is_product(node) and why_not(node, graph) is None


def operands_of(node: Node) -> tuple[str, str] | None:
    """The names of the two tensors that are multiplied."""
    if node.op == EINSUM:
        return _of_einsum(node)
    names = _names(node)
    if names is None:
        return None
    left, right = (node.value(name) for name in names[:2])
    return (left.name, right.name) if isinstance(left, Ref) and isinstance(right, Ref) else None


def _names(node: Node) -> tuple[str, str, str | None] | None:
    """The row of PRODUCTS for a call that makes a result of its own."""
    return PRODUCTS.get(node.packet) if node.op == f"aten.{node.packet}.default" else None


def _of_einsum(node: Node) -> tuple[str, str] | None:
    """The operands of an einsum that is a matmul as it stands: "bijl,lk->bijk", "bij,bjk->bik"."""
    equation, tensors = node.value("equation"), node.value("tensors")
    assert isinstance(equation, str)
    terms = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation.replace(" ", ""))
    if terms is None or len(node.reads) != 2 or not isinstance(tensors, tuple):
        return None
    left, right, out = terms.groups()
    if any(len(set(term)) < len(term) for term in (left, right, out)) or len(right) < 2:
        return None
    batch, inner, column = right[:-2], right[-2], right[-1]
    before = left[:-1]  # of the rows, and of each batch
    plain = left[-1] == inner and column not in left and out == before + column
    rows = before[len(batch) :]
    batched = before.startswith(batch) and len(rows) == 1 if batch else bool(rows)
    first, second = (item for item in tensors if isinstance(item, Ref))
    return (first.name, second.name) if plain and batched else None


def _why_not_added(node: Node, graph: Graph) -> str | None:
    """Why what a call adds to the product is not a kernel's step."""
    _, _, added = _names(node) or (None, None, None)
    value = node.value(added) if added else None
    if not isinstance(value, Ref):
        return None
    if node.op == "aten.linear.default":
        alike = graph.tensors[value.name].shape == node.outputs[0].shape[-1:]
        return None if alike else "a bias of another shape"
    zero = node.value("alpha") == 0
    return "a product times zero, which PyTorch does not compute" if zero else None
