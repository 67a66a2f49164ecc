"""Hard inputs made from a reference's own: other sizes, other layouts, special values.

The own inputs are kept as templates (shape, dtype and a sample of the values), so that nothing
large stays allocated. A Sizing maps shapes to shapes by a size -> size map, the same for every
input, so that dimensions which must agree still agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelnew.measure.nested import map_tensors, tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of inputs that are tried
SAMPLE = 1 << 16  # values kept of each own input
FILL_CHUNK = 1 << 26  # elements drawn at a time, so that index tensors stay small
ELEMENT_LIMIT = {"cuda": 1 << 27, "cpu": 1 << 22}  # largest tensor of a variant

# Sizes by rank, ascending as the own sizes are, so that a kernel stays smaller than its image.
# "odd" leaves a remainder after every vector width, "prime" also after every tile; inner sizes of
# "mid" are multiples of 16, so that the vector path runs. Products stay in the millions.
TABLES: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "odd": {1: (1031,), 2: (37, 129, 1031), 3: (5, 37, 129), 4: (5, 19, 37, 67),
            5: (3, 5, 13, 17, 21)},
    "prime": {1: (257,), 2: (7, 53, 257), 3: (3, 17, 101), 4: (3, 7, 23, 41),
              5: (2, 3, 11, 13, 17)},
    "mid": {1: (4096,), 2: (64, 256, 512), 3: (16, 64, 128), 4: (16, 32, 48, 64),
            5: (16, 16, 32, 32, 48)},
}  # fmt: skip
# Where only the first dimension may change: the others keep their possibly large sizes.
FIRST = {"odd": (37, 5, 3), "prime": (53, 7, 2), "mid": (64, 16, 4), "ones": (1,)}
MODES = ("all", "keep channels", "keep last", "first")


@dataclass(frozen=True)
class Template:
    """What is kept of an own input tensor; `sample` is one-dimensional, empty when it was."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sample: Tensor


@dataclass(frozen=True)
class Sizing:
    """A change of shapes. Which dimensions change depends on the mode:

    all; all but the second (channels); all but the last; only those first dimensions that are as
    large as the first input's. "scalar" gives 0-dim tensors, "own" changes nothing.
    """

    mode: str
    sizes: Mapping[int, int] = field(default_factory=dict)

    def __call__(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        match self.mode:
            case "scalar":
                return ()
            case "own":
                return shape
        return tuple(
            self.sizes.get(size, size) if _changes(self.mode, i, len(shape)) else size
            for i, size in enumerate(shape)
        )

    def then(self, other: Sizing) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """This sizing followed by another."""
        return lambda shape: other(self(shape))


Shape = Callable[[tuple[int, ...]], tuple[int, ...]]


def _changes(mode: str, position: int, rank: int) -> bool:
    match mode:
        case "keep channels":
            return position != 1
        case "keep last":
            return position != rank - 1 or rank == 1
        case "first":
            return position == 0
        case _:
            return True


def templates(inputs: Any) -> Any:
    """The inputs with every tensor replaced by its template."""

    def keep(tensor: Tensor) -> Template:
        flat = tensor.reshape(-1)
        step = max(1, flat.numel() // SAMPLE)
        return Template(tuple(tensor.shape), tensor.dtype, flat[::step][:SAMPLE].clone())

    return map_tensors(keep, inputs)


def listed(tree: Any) -> list[Template]:
    """The templates of a nested value, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [template for item in tree for template in listed(item)]
    return [tree] if isinstance(tree, Template) else []


def sizings(kind: str, tree: Any, device: torch.device) -> Iterator[Sizing]:
    """The sizings of `kind` to try, the most thorough first; too large ones are left out."""
    shapes = [t.shape for t in listed(tree)]
    ranked = [shape for shape in shapes if shape]
    if not ranked:
        return
    first, rank = ranked[0][0], max(len(shape) for shape in ranked)
    if kind == "empty":
        yield from (Sizing(mode, {first: 0}) for mode in ("first", "all"))
        return
    for mode in MODES:
        sizes = sorted(
            {
                size
                for shape in ranked
                for i, size in enumerate(shape)
                if size > 1 and _changes(mode, i, len(shape))
            }
        )
        for sizing in _of_mode(kind, mode, sizes, rank, first):
            small = all(_numel(sizing(s)) <= ELEMENT_LIMIT[device.type] for s in shapes)
            if small or sizing.sizes == {first: FIRST[kind][-1]}:
                yield sizing


def _of_mode(kind: str, mode: str, sizes: list[int], rank: int, first: int) -> Iterator[Sizing]:
    match kind:
        case "ones":
            yield Sizing(mode, {first: 1} if mode == "first" else dict.fromkeys(sizes, 1))
        case _ if mode == "first":
            yield from (Sizing(mode, {first: size}) for size in FIRST[kind])
        case _:
            table = TABLES[kind][min(rank, 5)]
            for scaled in (table, tuple(2 * t + t % 2 for t in table)):
                yield Sizing(mode, dict(zip(sizes, _extended(scaled, len(sizes)), strict=True)))


def _extended(table: tuple[int, ...], count: int) -> list[int]:
    """`count` ascending sizes; with fewer wanted than listed, the later ones are left out."""
    step = 16 if table[-1] % 16 == 0 else 2
    extra = max(0, count - len(table))
    return [*table[:count], *(table[-1] + step * (i + 1) for i in range(extra))]


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


# --- values --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filling:
    """How floating inputs are drawn.

    "normal", "own" (resampled), or of both signs and uniform in their logarithm: "magnitudes",
    "near zero", "tiny".
    """

    values: str
    dtype: torch.dtype
    device: torch.device
    seed: int = 0


def make(tree: Any, shape: Shape, filling: Filling) -> Any:
    """Dense inputs of the given shapes; integers are own values cut to the smallest dimension.

    An index or class label must stay below the size it counts into, otherwise the reference
    itself stops the device.
    """
    generator = torch.Generator(filling.device).manual_seed(filling.seed)
    floats = [t for t in listed(tree) if t.dtype.is_floating_point]
    changed = any(shape(t.shape) != t.shape for t in floats)
    smallest = min((s for t in floats for s in shape(t.shape)), default=1)
    bound = max(smallest, 1) if changed else None

    def build(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: build(value) for key, value in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(build(value) for value in item)
        if isinstance(item, Template):
            return _filled(item, shape(item.shape), filling, generator, bound)
        return item

    return build(tree)


def _filled(
    template: Template, shape: tuple[int, ...], filling: Filling, generator: torch.Generator,
    bound: int | None,
) -> Tensor:  # fmt: skip
    floating = template.dtype.is_floating_point
    dtype = filling.dtype if floating else template.dtype
    out = torch.empty(shape, dtype=dtype, device=filling.device)
    flat = out.view(-1)
    for start in range(0, flat.numel(), FILL_CHUNK):
        part = flat[start : start + FILL_CHUNK]
        if floating and filling.values != "own":
            part.copy_(_draw(filling, part.numel(), generator))
        elif template.sample.numel():
            part.copy_(_resample(template.sample.to(filling.device), part.numel(), generator))
        else:
            part.zero_()
    integral = not floating and not dtype.is_complex and dtype != torch.bool
    return out.remainder_(bound) if integral and bound is not None else out


def _draw(filling: Filling, count: int, generator: torch.Generator) -> Tensor:
    def uniform() -> Tensor:
        return torch.rand(count, device=filling.device, generator=generator, dtype=torch.float64)

    match filling.values:
        case "magnitudes":  # 1e-3 to 1e4, both signs
            low, high = -3.0, 4.0
        case "near zero":
            low, high = -6.0, 0.0
        case "tiny":  # all the subnormal range: nothing larger hides a flush to zero
            info = torch.finfo(filling.dtype)
            least, most = info.smallest_normal * info.eps, info.smallest_normal * 10
            low, high = math.log10(least), math.log10(most)
        case _:
            dtype = filling.dtype
            return torch.randn(count, dtype=dtype, device=filling.device, generator=generator)
    size = torch.pow(10.0, low + (high - low) * uniform())
    return torch.where(uniform() < 0.5, -size, size)


def _resample(sample: Tensor, count: int, generator: torch.Generator) -> Tensor:
    place = torch.randint(
        sample.numel(), (count,), device=sample.device, generator=generator, dtype=torch.int64
    )
    return sample[place]


def specials(dtype: torch.dtype) -> dict[str, float]:
    """Values at the edges of a floating dtype, by name."""
    info = torch.finfo(dtype)
    return {
        "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "-0.0": -0.0, "0.0": 0.0,
        "denormal": info.smallest_normal * info.eps, "-denormal": -info.smallest_normal / 4,
        "largest": info.max, "lowest": info.min, "smallest normal": info.smallest_normal,
        "1": 1.0, "-1": -1.0,
    }  # fmt: skip


def sprinkle(tensor: Tensor, values: list[float]) -> Tensor:
    """A copy with `values` in turn at odd distances, so at every index modulo 16.

    Few positions, so that rows of a reduction without a special value remain.
    """
    out = tensor.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1)
    stride = max(3, flat.numel() // 37 | 1)
    place = torch.arange(0, flat.numel(), stride, device=out.device)
    choice = torch.tensor(values, dtype=out.dtype, device=out.device)
    flat[place] = choice[torch.arange(place.numel(), device=out.device) % len(values)]
    return out


def block(tensor: Tensor, value: float) -> Tensor:
    """A copy whose first quarter is `value`: whole rows, whole leading slices."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    out.view(-1)[: out.numel() // 4] = value
    return out


# --- layouts -------------------------------------------------------------------------------------


def offset(x: Tensor) -> Tensor:
    """The same values one element into their storage: no 16-byte access is aligned."""
    return _into(torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape), x)


def transposed(x: Tensor) -> Tensor:
    """The same values with the storage order of the last two dimensions swapped."""
    return x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced_last(x: Tensor) -> Tensor:
    """The same values as every second element of the last dimension of a larger tensor."""
    if x.dim() < 1:
        return x
    return _into(x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7)[..., ::2], x)


def sliced_first(x: Tensor) -> Tensor:
    """The same values as every second slice of the first dimension of a larger tensor."""
    if x.dim() < 2:
        return x
    return _into(x.new_full((2 * x.shape[0], *x.shape[1:]), 7)[::2], x)


def expanded(x: Tensor) -> Tensor:
    """The first slice repeated with stride 0."""
    return x if x.dim() < 2 else x[:1].clone().expand(x.shape)


def channels_last(x: Tensor) -> Tensor:
    """The same values in channels_last order, of 4-D and 5-D tensors."""
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last_3d) if x.dim() == 5 else x


def _into(view: Tensor, x: Tensor) -> Tensor:
    view.copy_(x)
    return view


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "offset": offset,
    "transposed": transposed,
    "sliced last": sliced_last,
    "sliced first": sliced_first,
    "expanded": expanded,
    "channels_last": channels_last,
}


def laid_out(inputs: Any, layout: Callable[[Tensor], Tensor]) -> Any | None:
    """Every tensor in another layout; None when the layout changes none of them."""
    before = tensors(inputs)
    after = map_tensors(layout, inputs)
    return after if any(a is not b for a, b in zip(tensors(after), before, strict=True)) else None


def partly(inputs: Any, layout: Callable[[Tensor], Tensor], dense: int) -> Any | None:
    """Floating tensor number `dense` as it is, the others in the layout; None without others."""
    floats = [x for x in tensors(inputs) if x.is_floating_point()]
    if len(floats) < 2:
        return None
    kept = floats[dense]
    return map_tensors(lambda x: x if x is kept or not x.is_floating_point() else layout(x), inputs)
