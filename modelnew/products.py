"""Matrix products that the region Contraction can have, and why others stay PyTorch's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from modelnew.ir import Contraction, Graph, Node, Ref, Tensor

# What `--matmul` chooses among: own kernels for products, or PyTorch's.
SPLIT, LIBRARY = "split", "library"
HALF, THIN = "half", "thin"

# By product: the operands that are multiplied, and what is added.
PRODUCTS: Mapping[str, tuple[str, str, str | None]] = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("self", "other", None),
    "mm": ("self", "mat2", None),
    "bmm": ("self", "mat2", None),
    "addmm": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "mv": ("self", "vec", None),
    "addmv": ("mat", "vec", "self"),
}
# By product that something is added to, the one without.
BARE: Mapping[str, str] = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}
EINSUM = "aten.einsum.default"


@dataclass(frozen=True)
class Limits:
    """The least that a product has to have for its kernels to be faster than PyTorch's: rows and
    columns, each, depth, and multiplications, those by a `vector` apart. And the `most` rows or
    columns. Where lines of both operands begin at multiples of `aligned` elements, PyTorch's
    kernels are faster whatever the size. `gain` estimates how many times as fast ours are, which
    has to be 1.2 at least: padding and splitting may cost more than they save.
    """

    lines: int
    depth: int
    work: int
    vector: int = 0
    most: int | None = None
    aligned: int | None = None
    gain: Callable[[Product], float] | None = None

    def why_not(self, product: Product) -> str | None:
        if self.most is not None and product.thinner > self.most:
            return "a product with many rows and columns"
        if product.thinner < self.lines or product.depth < self.depth:
            return "a thin product: PyTorch's is faster"
        work = product.batches * product.rows * product.columns * product.depth
        if work < (self.vector if product.thinner == 1 else self.work):
            return "a small product: PyTorch's is faster"
        if self.aligned and not any(size % self.aligned for size in product.lines):
            return "an aligned product: PyTorch's is faster"
        if self.gain is not None and self.gain(product) < 1.2:
            return "a product with much padding: PyTorch's is faster"
        return None


@dataclass(frozen=True)
class Kind:
    """A way to multiply in kernels of ours, for operands and results that are all of one of
    `dtypes`; `about` says how it does, for the reader of a file.

    `headers` are its files of templates/device in their order, with `run`, which launches a product
    with its epilogue, and `workspace`, which says how much memory that takes. `host` is the
    template of its host code, with `factors`, which says whether operands are multiplied so, and
    `side`, the function which lays one out for the kernels.
    """

    name: str
    dtypes: tuple[str, ...]
    limits: Limits
    about: tuple[str, ...]
    headers: tuple[str, ...]
    run: str
    workspace: str
    factors: str
    side: str = "side_of"
    host: str = "factors_of.cpp.jinja"
    is_generic: bool = False  # whether `run` has a type parameter, that of the operands


def _is_narrow(product: Product) -> bool:
    """Whether only the operand with fewer lines is split by a pass of its own."""
    return product.thinner <= 512 and product.depth >= 256


def split_tiles(product: Product) -> tuple[int, bool]:
    """How many tiles a split product has where its lines begin at multiples of 16 bytes, as form_of
    of device/contract.cuh: of 128 x 256 results, or whether of 128 x 128."""
    rows, columns = product.rows, product.columns
    small = _is_narrow(product) and product.thinner <= 128
    if _is_narrow(product):
        rows, columns = max(rows, columns), product.thinner
    return product.batches * -(-rows // 128) * -(-columns // (128 if small else 256)), small


def split_gain(product: Product) -> float:
    """About how many times as fast as PyTorch's a split product is on an H200 that it fills.

    A multiprocessor takes 1.25 us for 32 k of a tile, 0.9 of a small one, and 6 or 3 us to write
    it; splitting goes at the speed of memory. cuBLAS multiplies at 49 TFLOP/s, and writes after
    that. This says 1.8 for 1.8 measured of [32768, 64] x [64, 32768], 3.1 for 2.5 of [128, 8192] x
    [8192, 8192], 3.7 for 3.0 of 128 times [512, 1024] x [1024, 2048], and 0.7 and 0.3 of
    [204800, 512] x [512, 32] and 2048 times [32, 100] x [100, 512], which together took 1.9 ms for
    PyTorch's 1.1.
    """
    tiles, small = split_tiles(product)
    pieces = -(-product.depth // 64) * 2
    tile = pieces * 0.9e-6 + 3e-6 if small else pieces * 1.25e-6 + 6e-6
    lines = product.thinner if _is_narrow(product) else product.rows + product.columns
    split = product.batches * lines * product.depth * 8 / 3.8e12
    results = product.batches * product.rows * product.columns
    cublas = results * product.depth * 2 / 49e12 + results * 4 / 4.2e12
    return cublas / (tiles * tile / 132 + split)


# What those have that run on Hopper's tensor cores, and what they say of other GPUs.
TENSOR_CORES = ("hopper", "tensor_cores", "places", "k_parts")
ELSEWHERE = (
    "Other GPUs, dtypes and small products take PyTorch's product, with the same kernel behind it."
)
# The first that is worth it is taken.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            SPLIT,
            ("float32",),
            # Of fewer rows or columns, most of a tile would be padding. [32768, 64] x [64, 32768]
            # takes 2.72 ms for cuBLAS's 4.03 (H200), where results are most of the traffic; with 32
            # for 64 it takes 2.71 for 2.56. Below about 1024^3 the launches dominate: 512^3 is
            # better left to cuBLAS.
            Limits(lines=16, depth=48, work=1 << 30, gain=split_gain),
            about=(
                "Products are float32: operands are split into two float16 each, hi + lo, scaled",
                "by a power of two, and tensor cores add up lo*hi, hi*lo and hi*hi in runs of 64",
                "at most, joined by float32 additions. Their error against float64 was that of",
                "cuBLAS's float32 at most in what was measured on an H200 (a linear layer of 8192:",
                "1.8e-7 for 1.2e-6), and up to twice that where most terms are 0. What float16",
                "cannot hold is multiplied again in float32.",
                ELSEWHERE,
            ),
            headers=(*TENSOR_CORES, "split", "product", "narrow", "exact", "contract"),
            run="run_product",
            workspace="workspace_bytes",
            factors="factors_of",
        ),
        Kind(
            HALF,
            ("float16", "bfloat16"),
            # cuBLAS takes 0.59 ms for 1000 x 8100 x 8190 (NN, H200), 0.67 (NT), these kernels 0.38
            # and 0.47. Where lines begin at multiples of 16 bytes it is faster: 8192^3 1.67 for
            # 1.74, 4096^3 0.22 for 0.24, fewer rows 0.04 for 0.05.
            Limits(lines=128, depth=512, work=1 << 35, aligned=8),
            about=(
                "Products of float16 and bfloat16 are added up in float32 by tensor cores, and",
                "are not rounded before what follows them.",
                ELSEWHERE,
            ),
            headers=(*TENSOR_CORES, "half"),
            run="run_half_product",
            workspace="half_workspace_bytes",
            factors="half_factors_of",
            side="aligned_side_of",
            is_generic=True,
        ),
        Kind(
            THIN,
            ("float32",),
            # [8192, 8192] by 1 and 4 columns takes 0.073 and 0.100 ms for PyTorch's 0.089 and 0.137
            # (H200), by 8 it took 0.150 for 0.137; [2048, 2048] by 1 and 4 0.012 and 0.017 for
            # 0.011 and 0.046; [16384, 16384] of float16 by 4 0.315 for 0.173.
            Limits(lines=1, depth=32, work=1 << 20, vector=1 << 24, most=4),
            about=(
                "Products of which one side has few rows or columns are added up in float32, in an",
                "order that is always the same. Those of other dtypes, and wider ones than traced,",
                "take PyTorch's product, with the same kernel behind it.",
            ),
            headers=("thin",),
            run="run_thin",
            workspace="thin_workspace_bytes",
            factors="thin_factors",
            host="thin.cpp.jinja",
        ),
    )
}


@dataclass(frozen=True)
class Product:
    """A product of `left`, [..., M, K], and `right`: [K, N] or as many of them as of left, and
    [N, K] where it is `transposed`. What is before [M, K] is rows too where right is a matrix. A
    vector, [K], is a matrix of one row or column, and as left one for all matrices of right."""

    left: Tensor
    right: Tensor
    transposed: bool = False

    @property
    def batches(self) -> int:
        return math.prod(self.right.shape[:-2])

    @property
    def rows(self) -> int:
        folded = len(self.right.shape) <= 2
        return math.prod(self.left.shape[:-1] if folded else self.left.shape[-2:-1])

    @property
    def depth(self) -> int:
        return self.left.shape[-1]

    @property
    def columns(self) -> int:
        return math.prod(self.right.shape[-2:-1] if self.transposed else self.right.shape[-2:][1:])

    @property
    def lines(self) -> tuple[int, int]:
        """The lengths of both operands' lines where neighbours in their last dimension are
        neighbours in memory."""
        return self.depth, self.depth if self.transposed else self.columns

    @property
    def thinner(self) -> int:
        """Rows or columns, of whichever there are fewer."""
        return min(self.rows, self.columns)

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
    ranks = len(left.shape), len(right.shape)
    alike = ranks[1] <= 2 or ranks[0] == 1 or right.shape[:-2] == left.shape[:-2]
    if not all(ranks) or sum(ranks) < 3 or not alike:
        return None
    found = Product(left, right, node.op == "aten.linear.default")
    last = found.transposed or ranks[1] == 1
    inner = right.shape[-1 if last else -2]  # of einsum, 1 would be broadcast
    return found if inner == found.depth else None


def sizes(step: Contraction) -> str:
    """The sizes of what a step multiplies, for a reader."""
    return _product(step).sizes


def width(step: Contraction) -> int:
    """For how many rows of the thinner side the kernels of a step are made, a power of two; 0 where
    they take any number."""
    return 1 << (_product(step).thinner - 1).bit_length() if step.kind == THIN else 0


def _product(step: Contraction) -> Product:
    return Product(*step.operands, transposed=step.node.packet == "linear")


def why_not(node: Node, graph: Graph) -> str | None:
    """Why a product stays PyTorch's call, None for one that is to be a Contraction."""
    found = choice(node, graph)
    return found if isinstance(found, str) else None


def choice(node: Node, graph: Graph) -> Kind | str:
    """The kind of kernels for a product, or why it stays PyTorch's call."""
    found = product_of(node, graph.tensors)
    dtypes = {graph.tensors[name].dtype for name in node.reads if name in graph.tensors}
    dtypes.update(tensor.dtype for tensor in node.outputs)
    kinds = [kind for kind in KINDS.values() if len(dtypes) == 1 and dtypes <= {*kind.dtypes}]
    if not kinds:
        return f"a product of {', '.join(sorted(dtypes - {'float32'}))}"
    if found is None:
        ranks = [len(graph.tensors[name].shape) for name in node.reads]
        why = "a product of two vectors" if max(ranks) < 2 else "operands that broadcast"
        return "an einsum that is no plain product" if node.op == EINSUM else why
    if reason := _why_not_added(node, graph):
        return reason
    reasons = [kind.limits.why_not(found) for kind in kinds]
    return kinds[reasons.index(None)] if None in reasons else reasons[0] or ""


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
