"""Linear functionals of products: a sum, a mean or a pool of x w^T is a product of sums.

The functional f acts on some dimensions of y = x w^T + b, each of which comes from x or from w
alone. As f is linear and the product is linear in w, f(a y + t) = a (x f(w)^T + f(b)) + f(t) where
f is over the dimension that w gives, a is constant along it, and alike for x: exact in real
arithmetic, and as many times cheaper as there are elements that f takes together. The sums are
formed anew at every call, in float32 or float64: in half precision a sum of many weights
overflows and a mean of many vanishes. Infinities are no real numbers: where the reference adds
infinities of both signs, a product of sums may be one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from modelnew import ops
from modelnew.algebra.edit import Edit, Facts, require
from modelnew.algebra.ranges import number
from modelnew.files import REAL
from modelnew.ir import Arg, Live, Node, Ref, Tensor, refs_in
from modelnew.products import PRODUCTS

SCALES = ("mul", "div", "neg")  # f(a y) = a f(y)
SHIFTS = ("add", "sub", "rsub")  # f(y + t) = f(y) + f(t)
LAYOUTS = ("unsqueeze", "squeeze")  # of dimensions before those that f is over
TURNS = ("t", "numpy_T")  # the transpose of a matrix
POOLS = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d")
LONGEST = 32  # operators between the product and the functional: more are not looked through
OfConvolution: TypeAlias = "Callable[[Reducer, Node], str]"


@dataclass(frozen=True)
class Functional:
    """A linear function of a tensor: "sum", "mean" or "pool" over `dims`, -1 for the last."""

    kind: str
    dims: tuple[int, ...]
    node: Node

    @property
    def values(self) -> Mapping[str, Arg]:
        return {argument.name: argument.value for argument in self.node.args}

    @property
    def keeps_constants(self) -> bool:
        """Whether it gives c where the tensor is c everywhere: no padding counts as a zero."""
        names = ("padding", "ceil_mode", "divisor_override")
        given = [self.values.get(name) for name in names]
        pads = any(any(v) if isinstance(v, tuple) else v for v in given)
        return self.kind != "sum" and not pads


def functional(facts: Facts, node: Node) -> Functional:
    """What a node computes as a Functional of its first operand."""
    require(node.reads and len(node.outputs) == 1 and not node.mutates)
    rank = len(facts.tensor(node.reads[0]).shape)
    values = {argument.name: argument.value for argument in node.args}
    if node.packet in ("sum", "mean"):
        require(values["dtype"] is None)
        dims = from_the_last(values.get("dim") or tuple(range(rank)), rank)
        return Functional(node.packet, dims, node)
    require("avg_pool" in node.packet)
    spatial = tuple(range(-int(node.packet[-2]), 0))
    if node.packet.startswith("adaptive") and set(spread(values["output_size"], 1)) == {1}:
        return Functional("mean", spatial, node)
    require(node.packet in POOLS)
    return Functional("pool", spatial, node)


def from_the_last(dims: Arg, rank: int) -> tuple[int, ...]:
    """Dimensions of a tensor of that rank as -1 for the last, and so on."""
    items = dims if isinstance(dims, tuple) else (dims,)
    whole = [item for item in items if isinstance(item, int)]
    require(len(whole) == len(items))
    return tuple(dim - rank if dim >= 0 else dim for dim in whole)


def spread(value: Arg, count: int) -> tuple[int, ...]:
    """An argument that gives one integer for all of `count` dimensions, or one for each."""
    items = value if isinstance(value, tuple) else (value,)
    numbers = tuple(item for item in items if isinstance(item, int))
    require(len(numbers) == len(items))
    return numbers * count if len(numbers) == 1 else numbers


def dims_text(dims: Sequence[int], tensor: Tensor) -> str:
    """Dimensions for a reader: "dims 2, 3"."""
    places = sorted(len(tensor.shape) + dim for dim in dims)
    return f"dim{'s' * (len(places) > 1)} {', '.join(map(str, places))}"


def origins(facts: Facts, node: Node) -> Mapping[int, tuple[str, int]]:
    """For each dimension of a product's result the operand that gives it, and its dimension there.

    (x @ w)[..., m, n] has m from x and n from w, and the dimensions before from x where w is a
    matrix, from w where x is. A batch dimension that both have is missing.
    """
    left, right, _ = PRODUCTS[node.packet]
    names = [name for side in (left, right) for name in refs_in(node.value(side))]
    ranks = [len(facts.tensor(name).shape) for name in names]
    if node.packet == "linear":
        found = {-1: (right, -2)} if ranks[1] == 2 else {}
        return found | {dim: (left, dim) for dim in range(-ranks[0], -1)}
    if min(ranks) < 2:
        return {}
    found = {-1: (right, -1), -2: (left, -2)}
    batched = left if ranks[1] == 2 else right if ranks[0] == 2 else None
    if batched:
        found |= {dim: (batched, dim) for dim in range(-max(ranks), -2)}
    return found


def of_product(edit: Edit, node: Node, convolution: OfConvolution) -> tuple[str, str]:
    """The functional that `node` computes, taken into the product that its operand comes from."""
    facts = edit.facts
    how = functional(facts, node)
    old, operand = facts.tensor(node.result), facts.tensor(node.reads[0])
    require(old.dtype in ops.FLOATS and old.dtype == operand.dtype)
    reducer = Reducer(edit, how, convolution)
    value = reducer.of(operand.name)
    rank = len(edit.tensors[value].shape)
    if len(old.shape) != rank:
        places = tuple(sorted(rank + dim for dim in how.dims))
        value = edit.call(node.result, "squeeze.dims", Ref(value), places)
    require((edit.tensors[value].shape, edit.tensors[value].dtype) == (old.shape, old.dtype))
    place = dims_text(how.dims, operand)
    return value, f"{node.packet} over {place} of {reducer.line}, {REAL}"


def times(left: Arg, right: Arg) -> Arg:
    """The product of two numbers, one of which may be Live."""
    pair = left, right
    values = [item.value if isinstance(item, Live) else number(item) for item in pair]
    require(None not in values)
    product = (values[0] or 0.0) * (values[1] or 0.0)
    if not any(isinstance(item, Live) for item in pair):
        return product
    texts = [item.text if isinstance(item, Live) else repr(item) for item in pair]
    return Live(f"({texts[0]} * {texts[1]})", product)


class Reducer:
    """Takes one Functional through the operators before it to the product they start from.

    Every value on the way is made anew, each reduced dimension kept with size 1.
    """

    def __init__(self, edit: Edit, how: Functional, convolution: OfConvolution) -> None:
        self.edit, self.facts, self.how = edit, edit.facts, how
        self.convolution = convolution
        self.sizes: dict[int, Arg] = {}  # of y along each of how.dims, None where unknown
        self.made_wide: set[str] = set()
        self.line = ""

    def of(self, name: str) -> str:
        """The functional of a value."""
        node = self.edit.take(name)
        if node.packet in PRODUCTS:
            return self._product(node)
        if node.packet.startswith("conv"):
            return self.convolution(self, node)
        if node.packet in LAYOUTS:
            rank = max(len(self.facts.tensor(n).shape) for n in (name, node.reads[0]))
            require("dim" in {argument.name for argument in node.args})
            require(max(from_the_last(node.value("dim"), rank)) < min(self.how.dims))
            return self.edit.again(node, {"self": Ref(self.of(node.reads[0]))})
        return self._arithmetic(node)

    def _arithmetic(self, node: Node) -> str:
        values = {argument.name: argument.value for argument in node.args}
        require(node.packet in SCALES + SHIFTS and "rounding_mode" not in values)
        sides = {n: v for n, v in values.items() if n in ("self", "other")}
        carriers = [n for n, v in sides.items() if isinstance(v, Ref) and self._leads(v.name)]
        require(carriers and (node.packet != "div" or carriers[0] == "self"))
        carrier = sides.pop(carriers[0])
        assert isinstance(carrier, Ref)
        require(self.facts.tensor(carrier.name).shape == node.outputs[0].shape)
        changed: dict[str, Arg] = {carriers[0]: Ref(self.of(carrier.name))}
        for name, value in sides.items():
            if node.packet in SHIFTS:
                new = self.of_constant(value)
                if isinstance(new, Ref) and new != value:
                    new = Ref(self.narrowed(new.name))
                changed[name] = new
            else:
                require(not isinstance(value, Ref) or self._is_constant(value.name))
        return self.edit.again(node, changed)

    def _leads(self, name: str, limit: int = LONGEST) -> bool:
        """Whether a value comes from a product through such operators, each used once."""
        node = self.facts.nodes.get(name)
        if node is None or self.facts.uses[name] != 1 or limit == 0:
            return False
        if node.packet in PRODUCTS or node.packet.startswith("conv"):
            return True
        through = node.packet in SCALES + SHIFTS + LAYOUTS
        return through and any(self._leads(read, limit - 1) for read in node.reads)

    def _reaching(self, name: str) -> list[int]:
        """Those of the functional's dimensions that a value broadcast against y has."""
        rank = len(self.facts.tensor(name).shape)
        return [dim for dim in self.how.dims if -dim <= rank]

    def _is_constant(self, name: str) -> bool:
        """Whether a value is constant along the functional's dimensions, at every call."""
        shape, dims = self.facts.tensor(name).shape, self._reaching(name)
        return not dims or (name in self.facts.static and all(shape[dim] == 1 for dim in dims))

    def of_constant(self, value: Arg) -> Arg:
        """The functional of a number, or of a tensor that is broadcast to y's shape.

        A tensor that is not itself the answer is computed in the wide dtype.
        """
        if not isinstance(value, Ref):
            require(self.how.keeps_constants or self.how.kind == "sum")
            return value if self.how.keeps_constants else times(value, self.count(self.how.dims))
        name, shape = value.name, self.facts.tensor(value.name).shape
        # A mean over a dimension of size 1 does nothing, so that it is right for either size; how
        # often a sum counts a value must be known.
        own = [d for d in self._reaching(name) if name not in self.facts.static or shape[d] != 1]
        require(self.how.kind == "mean" or name in self.facts.static)
        if own:
            name = self.reduced(name, own)
        elif self.how.kind == "pool":
            require(self.how.keeps_constants)
        rest = [dim for dim in self.how.dims if dim not in own]
        if self.how.kind == "sum" and rest:
            value = Ref(name if own else self.widened(name))
            name = self.in_wide(f"{name}_times", "mul.Tensor", value, self.count(rest))
        return Ref(name)

    def count(self, dims: Sequence[int]) -> Arg:
        """How many elements of y a sum over `dims` takes together."""
        total: Arg = 1
        for dim in dims:
            total = self.sizes[dim] if total == 1 else times(total, self.sizes[dim])
        require(total is not None)
        return total

    def choose_dtypes(self, names: Sequence[str], exact: bool) -> None:
        """The dtype of the reference's product, and the wide one in which its sums are formed.

        The first is that of an operand that is bound to a name, as it is at the call. The wide one
        is float32 or more, and with `exact` float64: the largest numbers that forward is given
        overflow together where the reference's own sums need not, and one row of a product rounds
        once where the reference averages the errors of many.
        """
        texts = [self.facts.graph.bindings.get(self.facts.base(name), "") for name in names]
        text = next((t for t in texts if t and not t.startswith("torch.")), None)
        require(text)
        dtype: torch.dtype = getattr(torch, self.facts.tensor(names[0]).dtype)
        promoted = torch.promote_types(dtype, torch.float32)
        self.narrow = self.edit.literal(f"{text}.dtype", dtype)
        single = f"torch.promote_types({text}.dtype, torch.float32)"
        self.single = self.edit.literal(single, promoted)
        double = self.edit.literal("torch.float64", torch.float64)
        self.wide = double if exact else self.single

    def widened(self, name: str) -> str:
        """The value in the wide dtype."""
        if name in self.made_wide:
            return name
        return self.in_wide(f"{name}_wide", "to.dtype", Ref(name), self.wide)

    def in_wide(self, base: str, op: str, *given: Arg, **named: Arg) -> str:
        """A call whose result has the wide dtype."""
        made = self.edit.call(base, op, *given, **named)
        self.made_wide.add(made)
        return made

    def narrowed(self, name: str) -> str:
        return self.edit.call(f"{name}_cast", "to.dtype", Ref(name), self.narrow)

    def reduced(self, name: str, dims: Sequence[int]) -> str:
        """The functional of an operand over its own dimensions, in the wide dtype.

        PyTorch sums into float64 from a copy: level 2's 18 took 0.52 ms with one of its weights,
        0.17 with float32 sums of 64 each. 16 lose fewer bits, as few as the reference's mean does.
        """
        if self.how.kind == "pool":
            require(len(dims) == 1)
            return self._pooled(name, dims[0])
        node = self.facts.nodes.get(name)
        matrix = len(self.edit.tensors[name].shape) == 2 and name in self.facts.static
        if node is not None and node.packet in TURNS and matrix:
            # Rows of the matrix itself are read one after the other, those of its view far apart.
            inner = Ref(self.reduced(node.reads[0], [-3 - dim for dim in dims]))
            rest = (argument.value for argument in node.args[1:])
            return self.in_wide(f"{name}_turned", node.op.removeprefix("aten."), inner, *rest)
        op = {"sum": "sum.dim_IntList", "mean": "mean.dim"}[self.how.kind]
        rank = len(self.edit.tensors[name].shape)
        places = tuple(sorted(rank + dim for dim in dims))
        base = f"{name}_{self.how.kind}"
        size = self.edit.tensors[name].shape[dims[0]]
        block = min(size & -size, 16)  # a power of 2 that divides the size
        if name in self.facts.static and len(dims) == 1 < rank and block > 1:
            blocks = (size // block, block)
            name = self.edit.call(f"{name}_blocks", "unflatten.int", Ref(name), *places, blocks)
            along = (places[0] + 1,)
            name = self.edit.call(f"{base}s", op, Ref(name), along, False, dtype=self.single)
        return self.in_wide(base, op, Ref(name), places, True, dtype=self.wide)

    def _pooled(self, name: str, dim: int) -> str:
        """The pool along one dimension of a vector or a matrix of the model's own."""
        require(name in self.facts.static)
        rank, call = len(self.facts.tensor(name).shape), self.edit.call
        require(rank <= 2)
        base, value = f"{name}_pool", self.widened(name)
        if rank == 1:  # a column
            value, dim = call(f"{name}_column", "unsqueeze", Ref(value), 1), -2
        other = self.edit.tensors[value].shape[-1 if dim == -2 else -2]

        def both(given: Arg, across: int) -> Arg:
            (along,) = spread(given, 1)
            return (along, across) if dim == -2 else (across, along)

        values, image = self.how.values, call(f"{name}_image", "unsqueeze", Ref(value), 0)
        if self.how.node.packet.startswith("adaptive"):
            size = both(values["output_size"], other)
            value = call(base, "adaptive_avg_pool2d", Ref(image), size)
        else:
            value = call(
                base, "avg_pool2d", Ref(image), both(values["kernel_size"], 1),
                both(values["stride"] or values["kernel_size"], 1), both(values["padding"], 0),
                values["ceil_mode"], values["count_include_pad"],
            )  # fmt: skip
        value = self.in_wide(f"{name}_matrix", "squeeze.dim", Ref(value), 0)
        if rank == 1:
            value = self.in_wide(f"{name}_vector", "squeeze.dim", Ref(value), 1)
        return value

    def _product(self, node: Node) -> str:
        left, right, added = PRODUCTS[node.packet]
        values = {argument.name: argument.value for argument in node.args}
        names = {side: next(refs_in(values[side])) for side in (left, right)}
        origin, own = origins(self.facts, node), {left: list[int](), right: list[int]()}
        for dim in self.how.dims:
            side, place = origin.get(dim, ("", 0))
            require(side)
            own[side].append(place)
            self.sizes[dim] = self.facts.size(names[side], place)
        self.choose_dtypes((names[right], names[left]), exact=self.how.kind != "pool")
        changed: dict[str, Arg] = {
            side: Ref(self.reduced(name, own[side]) if own[side] else self.widened(name))
            for side, name in names.items()
        }
        if added and values[added] is not None:
            bias = self.of_constant(values[added])
            assert isinstance(bias, Ref)
            changed[added] = Ref(self.widened(bias.name))
        bases = {side: self.facts.base(name) for side, name in names.items()}
        texts = [f"the {self.how.kind} of {bases[s]}" if own[s] else bases[s] for s in names]
        self.line = f"{node.result} is the product of {' and '.join(texts)}"
        return self.narrowed(self.edit.again(node, changed))
