"""Linear functionals of convolutions over their spatial dimensions.

Along one dimension, with stride s, padding p and dilation d, a convolution's output o and its input
i meet at tap k of the kernel where i = o s - p + k d; for a transposed convolution o and i change
places. A sum over all outputs therefore takes for every tap the sum of the inputs that meet it
inside the output: a slice of the input, whose start, end and step depend on the tap alone. With
these sums as channels what is left is a convolution without that dimension, or a product where
none is left. Inputs that padding crops from one tap's slice stay in another's: no border is lost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelnew.algebra.edit import Facts, require
from modelnew.algebra.products import Reducer, spread
from modelnew.ir import Arg, Live, Node, Ref

WHOLE = (0, 0, 1)  # the slice that is the whole dimension


@dataclass(frozen=True)
class Convolution:
    """A convolution node's numbers, one for each spatial dimension."""

    node: Node
    transposed: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]  # output_padding

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def taps(self, dim: int) -> list[tuple[int, int, int]]:
        """For each tap the slice of the inputs that it meets: start, end from the end, step.

        An output 0 <= o < O and an input 0 <= i < I meet at i = o s - p + k d; O is such that the
        last output's last tap is the last input that a whole stride reaches. Transposed: o = i s -
        p + k d, and O = (I - 1) s - 2 p + d (K - 1) + output_padding + 1.
        """
        s, p, d = self.stride[dim], self.padding[dim], self.dilation[dim]
        last = self.kernel[dim] - 1
        found = []
        for k in range(last + 1):
            first = max(0, -((k * d - p) // s))  # the least index whose partner is not below 0
            if self.transposed:
                end = min(0, (d * (last - k) + self.extra[dim] - p) // s)
                found.append((first, end, 1))
            else:
                found.append((first * s - p + k * d, min(0, p - d * (last - k)), s))
        return found

    def extent(self, dim: int, size: Arg) -> Arg:
        """The output's size for an input's, a number or Live."""
        s, p, d = self.stride[dim], self.padding[dim], self.dilation[dim]
        reach = d * (self.kernel[dim] - 1) + 1
        if self.transposed:
            return _shifted(_scaled(size, s), reach + self.extra[dim] - 2 * p - s)
        if s == 1:
            return _shifted(size, 2 * p - reach + 1)
        inner = _shifted(size, 2 * p - reach)
        if isinstance(inner, Live):
            return Live(f"({inner.text} // {s} + 1)", float(inner.value // s + 1))
        return None if inner is None else int(inner) // s + 1  # type: ignore[arg-type]


def _scaled(size: Arg, factor: int) -> Arg:
    if isinstance(size, Live) and factor != 1:
        return Live(f"{size.text} * {factor}", size.value * factor)
    return size * factor if isinstance(size, int) else size


def _shifted(size: Arg, by: int) -> Arg:
    if isinstance(size, Live) and by:
        return Live(f"({size.text} {'-' if by < 0 else '+'} {abs(by)})", size.value + by)
    return size + by if isinstance(size, int) else size


def read(facts: Facts, node: Node) -> Convolution:
    """A convolution of one group whose kernel has the shape that the model gave it."""
    found = re.fullmatch(r"aten\.conv(_transpose)?(\d)d\.(default|input)", node.op)
    require(found)
    assert found is not None
    count, values = int(found[2]), {argument.name: argument.value for argument in node.args}
    require(values["groups"] == 1)
    operands = [values["input"], values["weight"]]
    shapes = [facts.tensor(o.name).shape for o in operands if isinstance(o, Ref)]
    require(all(len(shape) == count + 2 for shape in shapes))
    require(isinstance(operands[1], Ref) and operands[1].name in facts.static)
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, extra = (spread(values.get(name, 0), count) for name in names)
    return Convolution(node, bool(found[1]), shapes[1][2:], stride, padding, dilation, extra)


def convolution(reducer: Reducer, node: Node) -> str:
    """The reducer's functional of a convolution's result."""
    found = read(reducer.facts, node)
    require(min(reducer.how.dims) >= -found.rank)
    return _pooled(reducer, found) if reducer.how.kind == "pool" else _summed(reducer, found)


# --- sums and means -------------------------------------------------------------------------


def _summed(reducer: Reducer, given: Convolution) -> str:
    edit, node = reducer.edit, given.node
    source, kernel = node.reads[:2]
    dims = sorted(given.rank + dim for dim in reducer.how.dims)
    reducer.choose_dtypes((kernel, source), exact=len(dims) == given.rank)
    for dim in dims:
        size = reducer.facts.size(source, dim - given.rank)
        reducer.sizes[dim - given.rank] = given.extent(dim, size)
    taps = {dim: given.taps(dim) for dim in dims}
    full = [dim for dim in dims if set(taps[dim]) == {WHOLE}]
    value = _tap_sums(reducer, source, full, {d: t for d, t in taps.items() if d not in full})
    if reducer.how.kind == "mean":
        count = reducer.count(reducer.how.dims)
        call = reducer.in_wide if value in reducer.made_wide else edit.call
        value = call(f"{source}_mean", "div.Tensor", Ref(value), count)
    weight = _summed_over(reducer, kernel, full) if full else kernel
    weight = _beside_channels(reducer, given, weight, dims)
    bias: Arg = {argument.name: argument.value for argument in node.args}["bias"]
    if isinstance(bias, Ref) and reducer.how.kind == "sum":
        name, count = reducer.widened(bias.name), reducer.count(reducer.how.dims)
        bias = Ref(reducer.in_wide(f"{bias.name}_sum", "mul.Tensor", Ref(name), count))
    result = reducer.narrowed(_left_over(reducer, given, (value, weight, bias), dims))
    for dim in dims:
        result = edit.call(f"{node.result}_keepdim", "unsqueeze", Ref(result), 2 + dim)
    return result


def _summed_over(reducer: Reducer, name: str, dims: Sequence[int], large: bool = False) -> str:
    """The sum over spatial dimensions, kept with size 1.

    PyTorch sums into float64 from a copy, so a large tensor is summed in float32 along one of them.
    """
    places, call = tuple(2 + dim for dim in dims), reducer.edit.call
    base, op = f"{name}_sum", "sum.dim_IntList"
    if large:
        name = call(base, op, Ref(name), places[-1:], True, dtype=reducer.single)
        places = places[:-1]
    if not places:
        return name
    return reducer.in_wide(base, op, Ref(name), places, True, dtype=reducer.wide)


def _tap_sums(
    reducer: Reducer, source: str, full: list[int], taps: dict[int, list[tuple[int, int, int]]]
) -> str:
    """The sums of the input, one channel after the other for each tap: [N, taps C, 1 or size].

    Concatenated along the channels, a layout with the channels last stays one.
    """
    edit = reducer.edit
    value = _summed_over(reducer, source, full, large=True) if full else source
    for dim in sorted(taps, reverse=True):
        sums: dict[tuple[int, int, int], str] = {}
        for start, end, step in taps[dim]:
            part, bounds = value, (2 + dim, start or None, end or None, step)
            if (start, end, step) in sums:
                continue
            if (start, end, step) != WHOLE:
                part = edit.call(f"{source}_part", "slice.Tensor", Ref(value), *bounds)
            sums[start, end, step] = _summed_over(reducer, part, [dim], large=value == source)
        call = reducer.in_wide if reducer.made_wide.issuperset(sums.values()) else edit.call
        value = call(f"{source}_taps", "cat", tuple(Ref(sums[tap]) for tap in taps[dim]), 1)
    return value


def _beside_channels(reducer: Reducer, given: Convolution, weight: str, dims: list[int]) -> str:
    """The kernel with its taps along `dims` as input channels, in the order of _tap_sums.

    From [O, C, ...], transposed [C, O, ...], to the same without `dims`; to [O, C] where no
    spatial dimension is left.
    """
    edit, node = reducer.edit, given.node
    inner, outer = (0, 1) if given.transposed else (1, 0)
    taps = [2 + dim for dim in dims]
    rest = [2 + dim for dim in range(given.rank) if dim not in dims]
    first = given.transposed and bool(rest)
    order = [*taps, inner, outer, *rest] if first else [outer, *taps, inner, *rest]
    span = (0, len(taps)) if first else (1, 1 + len(taps))
    call = reducer.in_wide if weight in reducer.made_wide else edit.call
    weight = call(f"{node.result}_order", "permute", Ref(weight), tuple(order))
    return call(f"{node.result}_kernel", "flatten.using_ints", Ref(weight), *span)


def _left_over(
    reducer: Reducer, given: Convolution, operands: tuple[str, str, Arg], dims: list[int]
) -> str:
    """The product, or the convolution over the dimensions that are left: [N, O, ...]."""
    edit, node, (value, weight, bias) = reducer.edit, given.node, operands
    rest = [dim for dim in range(given.rank) if dim not in dims]
    source = node.reads[0]
    call = reducer.in_wide if value in reducer.made_wide else edit.call
    if rest:
        places = tuple(2 + dim for dim in dims)
        flat = call(f"{source}_flat", "squeeze.dims", Ref(value), places)
        reducer.line = f"{node.result} is a convolution of sums of {source}"
    else:
        flat = call(f"{source}_flat", "flatten.using_ints", Ref(value), 1)
        reducer.line = f"{node.result} is the product of sums of {source} and of {node.reads[1]}"
    each: list[Arg] = [Ref(reducer.widened(name)) for name in (flat, weight)]
    each += [Ref(reducer.widened(bias.name))] if isinstance(bias, Ref) else [None]
    if not rest:
        return edit.call(f"{node.result}_sums", "linear", *each)
    numbers = (given.stride, given.padding, given.dilation, given.extra)
    return _convolved(reducer, given, each, [tuple(n[dim] for dim in rest) for n in numbers])


def _convolved(
    reducer: Reducer, given: Convolution, operands: Sequence[Arg], numbers: Sequence[Arg]
) -> str:
    """A convolution of float32 operands in float32; `numbers` are stride, padding, dilation, extra.

    PyTorch's default is TF32 where cuDNN has it, and cuDNN has it for one shape and not for
    another: the reference may run in float32 where a convolution of another shape would not.
    The result of a transposed one of rank 3 is contiguous, in the reference as well as here.
    """
    edit, (stride, padding, dilation, extra) = reducer.edit, numbers
    flags = [
        edit.literal(f"torch.backends.cudnn.{name}", value)
        for name, value in (("benchmark", False), ("deterministic", False), ("enabled", True))
    ]
    transposed = given.transposed and extra is not None
    made = edit.call(
        f"{given.node.result}_sums", "_convolution", *operands, stride, padding, dilation,
        transposed, extra if transposed else (0,), 1, *flags, False,
    )  # fmt: skip
    if given.transposed and given.rank == 3:
        made = edit.call(f"{given.node.result}_contiguous", "contiguous", Ref(made))
    return made


# --- average pools --------------------------------------------------------------------------


def _pooled(reducer: Reducer, given: Convolution) -> str:
    """An average pool of P outputs each s' is a convolution with means of the kernel.

    With stride 1 the mean over q < P of sum_k w[k] x[j s' + q + k - p] is that over m of
    v[m] x[j s' + m - p] with v[m] the mean over q of w[m - q], K + P - 1 taps, and stride s'. The
    pool and the convolution leave out the same incomplete window at the end.
    """
    how, values = reducer.how, reducer.how.values
    require(how.keeps_constants and len(how.dims) == given.rank and set(given.dilation) == {1})
    window = spread(values["kernel_size"], given.rank)
    step = spread(values["stride"] or values["kernel_size"], given.rank)
    edit, (source, kernel) = reducer.edit, given.node.reads[:2]
    bias = {argument.name: argument.value for argument in given.node.args}["bias"]
    reducer.line = f"{given.node.result} is a convolution with means of {kernel}"
    ones = (1,) * given.rank
    if given.transposed:
        require(window == step == given.stride)
        pads, padding = _means(given)
        means = edit.call(f"{kernel}_padded", "constant_pad_nd", Ref(kernel), pads)
        means = edit.call(f"{kernel}_means", f"avg_pool{given.rank}d", Ref(means), window, window)
        means = edit.call(f"{kernel}_flip", "flip", Ref(means), tuple(range(2, 2 + given.rank)))
        means = edit.call(f"{kernel}_turned", "transpose.int", Ref(means), 0, 1)
        numbers: Sequence[Arg] = (ones, padding, ones, None)
    else:
        longer = [k + p - 1 for k, p in zip(given.kernel, window, strict=True)]
        paid = math.prod(longer) < math.prod(given.kernel) * math.prod(step)
        require(given.stride == ones and paid)
        pads = tuple(p - 1 for p in reversed(window) for _ in range(2))
        means = edit.call(f"{kernel}_padded", "constant_pad_nd", Ref(kernel), pads)
        means = edit.call(f"{kernel}_means", f"avg_pool{given.rank}d", Ref(means), window, ones)
        numbers = (step, given.padding, ones, None)
    return _convolved(reducer, given, (Ref(source), Ref(means), bias), numbers)


def _means(given: Convolution) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A transposed convolution of stride s pooled by s as a plain one of stride 1.

    The mean over q < s of sum_i w[j s + q + p - i s] x[i] is sum_m v[m] x[j - m], v[m] the mean
    over q of w[m s + q + p], w being 0 outside its taps: low <= m <= high. Gives how far the
    kernel is padded for its means, last dimension first, and the padding of the convolution with
    v in reverse, which is `high`. It must have as many outputs as the pool: I + low + high are
    (I s + K + output_padding - 2 p - s) // s.
    """
    pads: list[int] = []
    padding = []
    for k, s, p, extra in zip(given.kernel, given.stride, given.padding, given.extra, strict=True):
        low, high = -((p + s - 1) // s), (k - 1 - p) // s
        require(high >= 0 and low + high == (k + extra - 2 * p - s) // s)
        before = -(low * s + p)
        pads = [before, (high - low + 1) * s - k - before, *pads]
        padding.append(high)
    return tuple(pads), tuple(padding)
