"""Finds what a trace depends on: attributes that can stay live, and arguments that cannot.

A traced graph holds plain numbers. Which of them came from an attribute, from an input's size or
from a constructor argument is learnt by tracing again with that one thing changed and comparing:
a number that follows the change stays live, a graph that changes in another way is guarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from modelnew.compare import equal, same_operators
from modelnew.ir import Arg, Graph, Guard, Literal, Live, ModelNewError, Node
from modelnew.live import LiveTable
from modelnew.reference import Reference, attribute_text
from modelnew.sizes import Sizes, TraceOnce, with_batch

if TYPE_CHECKING:
    from modelnew.trace import Leaf

# For each numeric constructor argument: the texts of the numeric attributes that follow it, and
# whether nothing else does.
Changes: TypeAlias = Mapping[str, tuple[set[str], bool]]


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
    probe = Sizes(ref, base, trace_once, leaves)
    free = probe.free(like)
    batch = probe.batch(free)
    sizes = tuple(probe.pins(free, batch))
    return replace(
        base,
        nodes=_with_dtypes(ref, base, trace_once, leaves, with_batch(found.nodes, batch)),
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


# --- dtypes ---------------------------------------------------------------------------------


def _with_dtypes(
    ref: Reference,
    base: Graph,
    trace_once: TraceOnce,
    leaves: Sequence[Leaf],
    nodes: tuple[Node, ...],
) -> tuple[Node, ...]:
    """`nodes` that ask an input for its dtype where forward does: `torch.zeros(3, dtype=x.dtype)`.

    Learnt from a trace in float16, which is made only where some call names the dtype at all.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    floating = [leaf for leaf in tensors if leaf.value.is_floating_point()]
    own = {Literal(str(leaf.value.dtype)) for leaf in floating}
    named = (value for node in base.nodes for value in node.values)
    if not any(value in own for value in named if isinstance(value, Literal)):
        return nodes
    half, live = Literal("torch.float16"), Literal(f"{floating[0].text}.dtype")
    with ref.fake_mode:
        given = [
            replace(leaf, value=leaf.value.half()) if leaf in floating else leaf for leaf in leaves
        ]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)  # fake parameters cannot change theirs afterwards
    try:
        model = ref.build(*ref.init_inputs)
    except Exception:  # the constructor needs its own: what is asked for stays unknown
        return nodes
    finally:
        torch.set_default_dtype(usual)
    try:
        probe = trace_once(model, given, None)
    except ModelNewError:
        return nodes
    if not same_operators(probe, base):
        return nodes
    asking = []
    for node, plain, theirs in zip(nodes, base.nodes, probe.nodes, strict=True):
        triples = zip(node.values, plain.values, theirs.values, strict=True)
        asking.append(
            node.with_values(live if a in own and b == half else value for value, a, b in triples)
        )
    return tuple(asking)


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
