"""Finds which sizes of the inputs a trace depends on, and which of its numbers follow the batch.

The model is traced again on other sizes. Sizes that change no call are free. Where the size of the
first dimension changes numbers of calls, each by the same factor, those are read at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from modelnew.compare import equal, same_calls, same_ends, same_operators
from modelnew.ir import Graph, Guard, Live, ModelNewError, Node
from modelnew.reference import Reference

if TYPE_CHECKING:
    from modelnew.trace import Leaf

# Traces a model on other leaves; given a graph, it may end at the first call that is another one.
TraceOnce: TypeAlias = "Callable[[torch.nn.Module, Sequence[Leaf], Graph | None], Graph]"
Place: TypeAlias = "tuple[str, int]"


@dataclass(frozen=True)
class Batch:
    """Places whose size the calls follow, and the nodes with each number that does made Live."""

    places: tuple[Place, ...] = ()
    nodes: tuple[Node, ...] = ()


class Sizes:
    """Traces on other sizes, to learn what depends on them."""

    def __init__(
        self, ref: Reference, base: Graph, trace_once: TraceOnce, leaves: Sequence[Leaf]
    ) -> None:
        self.ref, self.base, self.trace_once, self.leaves = ref, base, trace_once, leaves
        tensors = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        self.rank = {leaf.text: leaf.value.dim() for leaf in tensors}
        self.places: dict[Place, int] = {
            (leaf.text, dim): size for leaf in tensors for dim, size in enumerate(leaf.value.shape)
        }

    def pins(self, free: set[Place], batch: Batch) -> Iterator[Guard]:
        """A guard for each size that calls depend on, or might; all of a batch are to be equal."""
        pinned = [p for p in self.places if p not in free and p not in batch.places[:1]]
        for text, _ in batch.places[:1]:
            if all(text != other for other, _ in pinned):
                yield Guard(f"{text}.ndim", str(self.rank[text]))
        for place in pinned:
            same = size_text(batch.places[0]) if place in batch.places else None
            yield Guard(size_text(place), same or f"({self.places[place]},)")

    def free(self, like: Graph | None) -> set[Place]:
        """The places whose size changes no call; `like` is another mode's graph."""
        hint = None
        if like is not None:
            pinned = {guard.text for guard in like.pins}
            hint = {place for place in self.places if size_text(place) not in pinned}
        by_value: dict[Any, set[Place]] = {}
        by_axis: dict[Any, set[Place]] = {}
        for (text, dim), size in self.places.items():
            by_value.setdefault(size, set()).add((text, dim))
            by_axis.setdefault((size, dim - self.rank[text]), set()).add((text, dim))
        splits = [[frozenset(g) for g in by.values()] for by in (by_axis, by_value)]
        for wanted in (hint, set(self.places)):
            for groups in splits if splits[0] != splits[1] else splits[:1]:
                parts = [group & wanted for group in groups if group & wanted] if wanted else []
                if parts and self._same(parts, True) and self._same(parts, False):
                    return set().union(*parts)
        return set().union(*_independent_groups(splits, self._same))

    def batch(self, free: set[Place]) -> Batch:
        """The first dimensions, where calls depend on their size only by multiples of it, as
        `x.view(x.size(0), -1)` does."""
        places = tuple(place for place in self.places if place[1] == 0 and place not in free)
        size = self.places[places[0]] if places else 0
        places = tuple(place for place in places if self.places[place] == size)
        if size == 0:
            return Batch()
        other = 2 * size + 3
        sizes = {place: n + (place in free) for place, n in self.places.items()}
        sizes |= dict.fromkeys(places, other)
        _broadcast_ones(self.places, sizes, self.rank)
        probe = self._trace(sizes)
        if probe is None or not (same_operators(probe, self.base) and same_ends(probe, self.base)):
            return Batch()
        text = f"{places[0][0]}.shape[0]"
        nodes = []
        for node, theirs in zip(self.base.nodes, probe.nodes, strict=True):
            pairs = zip(node.values, theirs.values, strict=True)
            followed = [_follow(a, b, size, other, text) for a, b in pairs]
            if _Differs in followed:
                return Batch()
            nodes.append(node.with_values(followed))
        near = size - 1 if size > 1 else 2
        expected = replace(self.base, nodes=_at_size(nodes, size, near))
        probe = self._trace({**self.places, **dict.fromkeys(places, near)}, expected)
        follows = expected.nodes != self.base.nodes
        if not follows or probe is None or not same_calls(probe, expected):
            return Batch()
        return Batch(places, tuple(nodes))

    def _same(self, groups: Sequence[frozenset[Place]], grow: bool) -> bool:
        """Whether larger or smaller sizes in these places give the same calls."""
        sizes = dict(self.places)
        for number, group in enumerate(groups):
            for place in group:
                size = self.places[place]
                sizes[place] = size + 1 + number if grow else max(1, size - 1)
        _broadcast_ones(self.places, sizes, self.rank)
        probe = self._trace(sizes, self.base)
        return probe is not None and same_calls(probe, self.base)

    def _trace(self, sizes: Mapping[Place, int], until: Graph | None = None) -> Graph | None:
        """The trace on these sizes, which may end at a call that `until` does not have; None where
        the model refuses them."""
        try:
            given = [_resized(self.ref, leaf, sizes) for leaf in self.leaves]
            return self.trace_once(self.ref.model, given, until)
        except ModelNewError:
            return None


def size_text(place: Place) -> str:
    """The Python text of a size, as a tuple of one: what pins of a graph compare."""
    text, dim = place
    return f"{text}.shape[{dim}:{dim + 1}]"


def _follow(mine: Any, theirs: Any, size: int, other: int, text: str) -> Any:
    """The argument `mine`, `theirs` where the size that `text` reads is `other`: Live if it is the
    same multiple of both sizes."""
    if equal(mine, theirs):
        return mine
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        items = [_follow(a, b, size, other, text) for a, b in zip(mine, theirs, strict=True)]
        return _Differs if _Differs in items else tuple(items)
    if type(mine) is type(theirs) is int and mine % size == 0:
        factor = mine // size
        if theirs == factor * other:
            return Live(text if factor == 1 else f"{text} * {factor}", mine)
    return _Differs


class _Differs:
    """Marks an argument that does not follow the batch."""


def with_batch(nodes: tuple[Node, ...], batch: Batch) -> tuple[Node, ...]:
    """`nodes` with the Live sizes of the batch's nodes, the same ones."""
    if not batch.nodes:
        return nodes

    def merged(value: Any, sized: Any) -> Any:
        if isinstance(sized, tuple) and isinstance(value, tuple):
            return tuple(map(merged, value, sized))
        return sized if isinstance(sized, Live) else value

    return tuple(
        node.with_values(map(merged, node.values, sized.values))
        for node, sized in zip(nodes, batch.nodes, strict=True)
    )


def _at_size(nodes: Sequence[Node], traced: int, size: int) -> tuple[Node, ...]:
    """`nodes` with each Live size as the number that it is for another size."""

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(number, value))
        return int(value.value) // traced * size if isinstance(value, Live) else value

    return tuple(node.with_values(map(number, node.values)) for node in nodes)


def _independent_groups(
    splits: Sequence[Sequence[frozenset[Place]]],
    same: Callable[[Sequence[frozenset[Place]], bool], bool],
) -> list[frozenset[Place]]:
    """Disjoint groups of places, as large as they come, that the graph does not depend on.

    One larger size a group costs a trace, so all are first tried that way; what is left is tried
    together, and one by one only if that fails.
    """
    unique = sorted(dict.fromkeys(g for groups in splits for g in groups), key=len, reverse=True)
    disjoint: list[frozenset[Place]] = []
    for group in unique:
        if not any(group & other for other in disjoint) and same([group], True):
            disjoint.append(group)
    larger = len(disjoint) < 2 or same(disjoint, True)
    if not disjoint or (larger and same(disjoint, False)):
        return disjoint
    kept: list[frozenset[Place]] = []
    for group in unique:
        clear = not any(group & other for other in kept)
        if clear and all(same([*kept, group], grow) for grow in (True, False)):
            kept.append(group)
    return kept


def _broadcast_ones(
    places: dict[Place, int], sizes: dict[Place, int], rank: dict[str, int]
) -> None:
    """Gives a dimension of size 1 the new size of what it is broadcast against, if anything."""
    for (text, dim), size in places.items():
        axis = dim - rank[text]
        others = (sizes[t, d] for (t, d), n in places.items() if d - rank[t] == axis and n > 1)
        if size == 1:
            sizes[text, dim] = next(others, sizes[text, dim])


def _resized(ref: Reference, leaf: Leaf, sizes: Mapping[Place, int]) -> Leaf:
    if not isinstance(leaf.value, torch.Tensor):
        return leaf
    shape = [sizes[leaf.text, dim] for dim in range(leaf.value.dim())]
    with ref.fake_mode:
        return replace(leaf, value=leaf.value.new_empty(shape))
