"""Finds what a trace depends on: attributes that can stay live, sizes and arguments that cannot.

A traced graph holds plain numbers. Which of them came from an attribute, from an input's size or
from a constructor argument is learnt by tracing again with that one thing changed and comparing:
a number that follows the change stays live, a graph that changes in another way is guarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from modelnew.compare import equal, same_calls
from modelnew.ir import Arg, Graph, Guard, Live, ModelNewError, Node
from modelnew.live import LiveTable
from modelnew.reference import Reference, attribute_text

if TYPE_CHECKING:
    from modelnew.trace import Leaf

# For each numeric constructor argument: the texts of the numeric attributes that follow it, and
# whether nothing else does.
Changes: TypeAlias = Mapping[str, tuple[set[str], bool]]
# Traces a model on other leaves; given a graph, it may end at the first call that is another one.
TraceOnce: TypeAlias = "Callable[[torch.nn.Module, Sequence[Leaf], Graph | None], Graph]"


def argument_changes(ref: Reference) -> Changes:
    """What another value of each numeric constructor argument changes in the model."""
    return {
        name: _changes(ref, name, _perturbed(value))
        for name, value in ref.arguments().items()
        if _is_number(value)
    }


def specialize(
    ref: Reference,
    base: Graph,
    trace_once: TraceOnce,
    leaves: Sequence[Leaf],
    changes: Changes,
    like: Graph | None = None,
) -> Graph:
    """`base` with Live numbers, and guards for everything else that it was traced for.

    `like` is another mode's graph: where its sizes are free, they are tried first to be free here.
    """
    found = _with_live(ref, base, trace_once, leaves, _scalar_attributes(ref, changes))
    numbers = tuple(
        Guard(leaf.text, repr(leaf.value))
        for leaf in leaves
        if not isinstance(leaf.value, torch.Tensor) and leaf.text in found.baked
    )
    probe = _Sizes(ref, base, trace_once, leaves)
    free = probe.free(like)
    batch = probe.batch(free)
    sizes = tuple(probe.pins(free, batch))
    return replace(
        base,
        nodes=_with_sizes(found.nodes, batch),
        numbers=found.numbers,
        bindings={**base.bindings, **found.bindings},
        arguments=tuple(_argument_guards(ref, changes, found.baked)),
        pins=numbers + tuple(_attribute_pins(ref, found.baked)) + found.conditions + sizes,
    )


# --- attributes -----------------------------------------------------------------------------


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """(text, name, module) of each plain attribute of each module of `model`."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            plain = not name.startswith("_") and name != "training"
            if plain and not isinstance(value, torch.Tensor):
                full = f"{path}.{name}" if path else name
                yield attribute_text(full), name, module


def _values(model: torch.nn.Module) -> dict[str, Any]:
    return {text: vars(module)[name] for text, name, module in _attributes(model)}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _perturbed(value: Any) -> float:
    return float(value) * 0.9375 if value else 0.0625


def _changes(ref: Reference, name: str, value: Any) -> tuple[set[str], bool]:
    """What another value of one constructor argument changes in the model.

    Returns the texts of the numeric attributes that differ, and whether nothing else does:
    parameter shapes, module types and every other attribute are the same.
    """
    arguments = ref.arguments()
    try:
        model = ref.build(**{**arguments, name: value})
    except Exception:  # the constructor refuses it: this argument is no plain number
        return set(), False
    mine, theirs = _values(ref.model), _values(model)
    shapes = [
        [(key, tuple(tensor.shape)) for key, tensor in each.state_dict().items()]
        for each in (ref.model, model)
    ]
    types = [[(key, type(m)) for key, m in each.named_modules()] for each in (ref.model, model)]
    if shapes[0] != shapes[1] or types[0] != types[1] or mine.keys() != theirs.keys():
        return set(), False
    differ = {text for text in mine if not equal(mine[text], theirs[text])}
    return differ, all(_is_number(mine[t]) and _is_number(theirs[t]) for t in differ)


def _scalar_attributes(ref: Reference, changes: Changes) -> set[str]:
    """Texts of the attributes that may stay live.

    Every float is a candidate, and an int that follows a constructor argument for which a float
    can stand in: `Model(scale=2)` is a scalar, the 2 of a kernel size is not.
    """
    following = set().union(*(differ for differ, only in changes.values() if only))
    return {
        text
        for text, value in _values(ref.model).items()
        if _is_number(value) and (type(value) is float or text in following)
    }


@dataclass(frozen=True)
class _Found:
    """Nodes and constants with Live numbers, the texts of numbers that stay constants, conditions
    that held. `bindings` are those of constants that a Live number makes."""

    nodes: tuple[Node, ...]
    numbers: Mapping[str, Arg]
    baked: frozenset[str]
    conditions: tuple[Guard, ...] = ()
    bindings: Mapping[str, str] = field(default_factory=dict)


def _with_live(
    ref: Reference,
    base: Graph,
    trace_once: TraceOnce,
    leaves: Sequence[Leaf],
    scalars: set[str],
) -> _Found:
    inputs = {leaf.text for leaf in leaves if not isinstance(leaf.value, torch.Tensor)}
    floats = {leaf.text for leaf in leaves if type(leaf.value) is float}
    for candidates in (scalars | floats, floats):
        table = LiveTable()
        model = ref.build(*ref.init_inputs)
        for text, name, module in list(_attributes(model)):
            if text in candidates:
                vars(module)[name] = table.sentinel(vars(module)[name], text)
        given = [
            replace(leaf, value=table.sentinel(leaf.value, leaf.text))
            if leaf.text in candidates and _is_number(leaf.value)
            else leaf
            for leaf in leaves
        ]
        try:
            probe = trace_once(model, given, None)
        except ModelNewError:
            continue
        matched = match_nodes(base.nodes, probe.nodes, table)
        if matched is None or (probe.output, probe.assigned) != (base.output, base.assigned):
            continue
        nodes, unknown = matched
        numbers, bindings, odd = _match_constants(base, probe, table)
        baked = (scalars | floats) if unknown or odd else table.observed | (scalars - candidates)
        conditions = tuple(Guard(text, repr(held)) for text, held in table.conditions.items())
        return _Found(nodes, numbers, frozenset(baked | (inputs - floats)), conditions, bindings)
    return _Found(base.nodes, base.numbers, frozenset(scalars | inputs))


def _match_constants(
    base: Graph, probe: Graph, table: LiveTable
) -> tuple[dict[str, Arg], dict[str, str], bool]:
    """The constants that forward makes, with each number that differs in `probe` made Live.

    Returns the numbers, the texts of those that are Live, and whether some other constant differs.
    """
    numbers: dict[str, Arg] = dict(base.numbers)
    texts: dict[str, str] = {}
    if base.bindings.keys() != probe.bindings.keys():
        return numbers, texts, True
    odd = False
    for name, text in base.bindings.items():
        if probe.bindings[name] == text:
            # Few digits hide a number that differs by little.
            half = base.tensors[name].dtype in ("float16", "bfloat16")
            odd = odd or (half and text.startswith("torch.tensor("))
            continue
        live = table.read_as(probe.numbers.get(name), base.tensors[name].dtype)
        number = base.numbers.get(name)
        if live is None or not isinstance(number, int | float) or isinstance(number, bool):
            odd = True
            continue
        numbers[name] = Live(live, float(number))
        texts[name] = text.replace(f"({number!r},", f"({live},", 1)
    return numbers, texts, odd


def match_nodes(
    base: Sequence[Node], probe: Sequence[Node], table: LiveTable
) -> tuple[tuple[Node, ...], bool] | None:
    """`base` with each number that differs in `probe` made Live; None if more than numbers differ.

    The flag says that some number differs although no recorded expression gives it.
    """
    if len(base) != len(probe):
        return None
    nodes, unknown = [], False
    for left, right in zip(base, probe, strict=True):
        if left.op.rsplit(".", 1)[0] != right.op.rsplit(".", 1)[0]:
            return None
        if [a.name for a in left.args] != [a.name for a in right.args]:
            return None
        args = []
        for mine, theirs in zip(left.args, right.args, strict=True):
            merged = _merge(mine.value, theirs.value, table)
            if merged is _Mismatch:
                return None
            unknown = unknown or merged is _Unknown
            value = mine.value if merged is _Unknown else merged
            args.append(replace(mine, value=value, default=mine.default and theirs.default))
        nodes.append(replace(left, args=tuple(args)))
    return tuple(nodes), unknown


class _Mismatch:
    """Marks arguments of another kind."""


class _Unknown:
    """Marks a number that changed although no recorded expression gives it."""


def _merge(mine: Any, theirs: Any, table: LiveTable) -> Any:
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        items = [_merge(a, b, table) for a, b in zip(mine, theirs, strict=True)]
        for marker in (_Mismatch, _Unknown):
            if marker in items:
                return marker
        return tuple(items)
    if equal(mine, theirs):
        return mine
    if type(theirs) is float and type(mine) in (int, float):
        text = table.texts.get(theirs)
        return Live(text, float(mine)) if text else _Unknown
    return _Mismatch


def _attribute_pins(ref: Reference, baked: frozenset[str]) -> Iterator[Guard]:
    """A guard for each number of the user's own modules that the graph holds as a constant."""
    for text, name, module in sorted(_attributes(ref.model), key=lambda found: found[0]):
        value = vars(module)[name]
        own = not type(module).__module__.startswith("torch.")
        if text in baked and own and _is_number(value):
            yield Guard(text, repr(value))


# --- constructor arguments ------------------------------------------------------------------


def _argument_guards(ref: Reference, changes: Changes, baked: frozenset[str]) -> Iterator[Guard]:
    """A guard for every constructor argument that is not proven live or without effect."""
    for name, value in ref.arguments().items():
        differ, only = changes.get(name, (set(), False))
        if only and not differ & baked:
            continue
        text = repr(value)
        if "<" in text or isinstance(value, torch.Tensor):
            continue  # an object without a literal form cannot be compared in the file
        yield Guard(name, text)


# --- sizes ----------------------------------------------------------------------------------


Place: TypeAlias = "tuple[str, int]"


@dataclass(frozen=True)
class _Batch:
    """Places whose size the calls follow, and the nodes with each number that does made Live."""

    places: tuple[Place, ...] = ()
    nodes: tuple[Node, ...] = ()


class _Sizes:
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

    def pins(self, free: set[Place], batch: _Batch) -> Iterator[Guard]:
        """A guard for each size that calls depend on, or might; all of a batch are to be equal."""
        pinned = [p for p in self.places if p not in free and p not in batch.places[:1]]
        for text, _ in batch.places[:1]:
            if all(text != other for other, _ in pinned):
                yield Guard(f"{text}.ndim", str(self.rank[text]))
        for place in pinned:
            same = _size_text(batch.places[0]) if place in batch.places else None
            yield Guard(_size_text(place), same or f"({self.places[place]},)")

    def free(self, like: Graph | None) -> set[Place]:
        """The places whose size changes no call; `like` is another mode's graph."""
        hint = None
        if like is not None:
            pinned = {guard.text for guard in like.pins}
            hint = {place for place in self.places if _size_text(place) not in pinned}
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

    def batch(self, free: set[Place]) -> _Batch:
        """The first dimensions, where calls depend on their size only by multiples of it, as
        `x.view(x.size(0), -1)` does."""
        places = tuple(place for place in self.places if place[1] == 0 and place not in free)
        size = self.places[places[0]] if places else 0
        places = tuple(place for place in places if self.places[place] == size)
        if size == 0:
            return _Batch()
        other = 2 * size + 3
        sizes = {place: n + (place in free and n > 1) for place, n in self.places.items()}
        sizes |= dict.fromkeys(places, other)
        _broadcast_ones(self.places, sizes, self.rank)
        probe = self._trace(sizes)
        if probe is None or not _alike(probe, self.base):
            return _Batch()
        text = f"{places[0][0]}.shape[0]"
        nodes = []
        for node, theirs in zip(self.base.nodes, probe.nodes, strict=True):
            pairs = zip(node.args, theirs.args, strict=True)
            followed = [_follow(a.value, b.value, size, other, text) for a, b in pairs]
            if _Mismatch in followed:
                return _Batch()
            args = zip(node.args, followed, strict=True)
            nodes.append(replace(node, args=tuple(replace(a, value=value) for a, value in args)))
        fewer = max(1, size - 1)
        expected = replace(self.base, nodes=_at_size(nodes, size, fewer))
        probe = self._trace({**self.places, **dict.fromkeys(places, fewer)}, expected)
        follows = expected.nodes != self.base.nodes or size == 1
        return (
            _Batch(places, tuple(nodes))
            if follows and probe is not None and same_calls(probe, expected)
            else _Batch()
        )

    def _same(self, groups: Sequence[frozenset[Place]], grow: bool) -> bool:
        """Whether larger or smaller sizes in these places give the same calls."""
        sizes = dict(self.places)
        for number, group in enumerate(groups):
            for place in group:
                size = self.places[place]
                sizes[place] = size + 1 + number if grow and size > 1 else max(1, size - 1)
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


def _size_text(place: Place) -> str:
    text, dim = place
    return f"{text}.shape[{dim}:{dim + 1}]"


def _follow(mine: Any, theirs: Any, size: int, other: int, text: str) -> Any:
    """The argument `mine`, `theirs` where the size that `text` reads is `other`: Live if it is the
    same multiple of both sizes."""
    if equal(mine, theirs):
        return mine
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        items = [_follow(a, b, size, other, text) for a, b in zip(mine, theirs, strict=True)]
        return _Mismatch if _Mismatch in items else tuple(items)
    if type(mine) is type(theirs) is int and mine % size == 0:
        factor = mine // size
        if theirs == factor * other:
            return Live(text if factor == 1 else f"{text} * {factor}", mine)
    return _Mismatch


def _alike(left: Graph, right: Graph) -> bool:
    """Whether two traces call the same operators and differ in arguments alone."""
    calls = [
        [(n.op, tuple(a.name for a in n.args)) for n in graph.nodes] for graph in (left, right)
    ]
    return calls[0] == calls[1] and same_calls(replace(left, nodes=()), replace(right, nodes=()))


def _with_sizes(nodes: tuple[Node, ...], batch: _Batch) -> tuple[Node, ...]:
    """`nodes` with the Live sizes of the batch's nodes, the same ones."""
    if not batch.nodes:
        return nodes

    def merged(value: Any, sized: Any) -> Any:
        if isinstance(sized, tuple) and isinstance(value, tuple):
            return tuple(map(merged, value, sized))
        return sized if isinstance(sized, Live) else value

    pairs = zip(nodes, batch.nodes, strict=True)
    return tuple(
        replace(node, args=tuple(
            replace(a, value=merged(a.value, b.value))
            for a, b in zip(node.args, sized.args, strict=True)
        ))
        for node, sized in pairs
    )  # fmt: skip


def _at_size(nodes: Sequence[Node], traced: int, size: int) -> tuple[Node, ...]:
    """`nodes` with each Live size as the number that it is for another size."""

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(number, value))
        return int(value.value) // traced * size if isinstance(value, Live) else value

    return tuple(
        replace(node, args=tuple(replace(a, value=number(a.value)) for a in node.args))
        for node in nodes
    )


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
    """Gives a dimension of size 1 the new size of what it is broadcast against."""
    for (text, dim), size in places.items():
        if size == 1:
            axis = dim - rank[text]
            partners = [
                sizes[t, d] for (t, d), s in places.items() if d - rank[t] == axis and s > 1
            ]
            sizes[text, dim] = partners[0] if partners else 1


def _resized(ref: Reference, leaf: Leaf, sizes: Mapping[Place, int]) -> Leaf:
    if not isinstance(leaf.value, torch.Tensor):
        return leaf
    shape = [sizes[leaf.text, dim] for dim in range(leaf.value.dim())]
    with ref.fake_mode:
        return replace(leaf, value=leaf.value.new_empty(shape))
