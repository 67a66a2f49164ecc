"""Turns a Plan into the contexts of the templates: names, C expressions, layouts."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelnew import ops, tune
from modelnew.contexts import (
    C_TYPES,
    HALF_TYPE,
    MASK_READ,
    MASK_TYPE,
    TOLD,
    Factors,
    Join,
    Kernel,
    Module,
    Operand,
    Scalar,
    Statement,
)
from modelnew.contractions import bias, triangle
from modelnew.formula import contraction_formula, formula
from modelnew.ir import Arg, Contraction, Joined, Live, Node, Plan, Pointwise, Ref, Tensor
from modelnew.joins import join_dim
from modelnew.layout import CHANNELS_LAST
from modelnew.moves import Mapped, Move, moves
from modelnew.products import KINDS, width

# Names that the kernel templates use, and C++ words that are legal Python names.
RESERVED = frozenset([
    "H", "T", "M", "kVec", "ops", "begin", "end", "i", "v", "offset", "next", "left", "stream",
    "alike", "channels_last", "dtype", "format", "guard", "half_type", "iter", "launch", "like",
    "mask_type", "number", "one_type", "out", "promoted", "unify", "auto", "bool", "case", "catch",
    "char", "class",
    "const", "constexpr", "default", "delete", "do", "double", "enum", "explicit", "extern",
    "float", "friend", "goto", "inline", "int", "long", "mutable", "namespace", "new", "operator",
    "private", "protected", "public", "register", "short", "signed", "sizeof", "static", "struct",
    "switch", "template", "this", "throw", "typedef", "typename", "union", "unsigned", "using",
    "virtual", "void", "volatile", "xor",
    # What function bodies call or declare with.
    "Along", "Factors", "INFINITY", "Maps", "Operands", "Pack", "along_channels", "empty_alike",
    "empty_as", "empty_in", "format_of", "has_piece", "int64_t", "kAtOnce", "kThreads", "load",
    "locate", "operands", "pack_at", "store", "to_float", "type_of_masks",
    *(name for kind in KINDS.values() for name in (kind.factors, kind.workspace)),
    # Of moved elements, their rules among them.
    "maps", "along", "coordinate", "map_of", "moved_like", "unmoved", "inside", "is_inside",
    "load_moved",
    "flipped", "rolled", "padded", "padding", "reflected", "clamped", "wrapped",
])  # fmt: skip
# What the templates put behind an operand's name for what they make of it.
SUFFIXES = ("", "_like", "_pack", "_dtype")
# Further ones of those that go by tiles.
TILED = ("Cell", "Extent", "Tiles", "tiles", "extent", "cell", "load_staged", "stage", "cell_at")
# Further ones of products.
MULTIPLIED = ("factors", "problem", "pieces", "workspace", "marked", "multiply")
# Further ones of those that write a concatenation.
JOINED = ("empty_joined", "places", "places_in")


def module(plan: Plan) -> Module:
    """What the file of `plan` compiles."""
    kernels: dict[str, Pointwise | Contraction] = {}
    joins: dict[str, Joined] = {}
    called = set()
    for step in (step for made in plan.modes for step in made.steps):
        match step:
            case Pointwise() | Contraction():
                kernels[step.name] = step
                called.add(step.name)
            case Joined():
                joins[step.name] = step
                kernels |= {part.name: part for part in step.parts}
    contexts = (kernel(k) if isinstance(k, Pointwise) else contraction(k) for k in kernels.values())
    return Module(tuple(contexts), frozenset(called), tuple(map(join, joins.values())))


@dataclass
class _Scope:
    """The C names of one host function: of its numbers, by their Python text, and its values."""

    names: _Names
    live: dict[str, str]
    values: dict[str, str]


def _scope(step: Pointwise | Joined | Contraction, reserved: Iterable[str]) -> _Scope:
    names = _Names(reserved)
    live = {s.text: names.fresh(_scalar_name(s.text)) for s in step.scalars}
    values = {access.tensor.name: names.fresh(access.tensor.name) for access in step.reads}
    return _Scope(names, live, values)


def join(step: Joined) -> Join:
    """The template context of one concatenation."""
    scope = _scope(step, JOINED)
    value = scope.names.fresh(step.node.result)
    parts = tuple(kernel(part, scope) for part in step.parts)
    outputs = {o.value: o for part in parts for o in part.outputs}
    places = tuple(outputs[scope.values[name]] for name in step.node.reads)
    return Join(step.name, value, join_dim(step.node), parts, places)


def contraction(step: Contraction) -> Kernel:
    """The template context of a product with its epilogue: that of a kernel which reads it."""
    scope = _scope(step, MULTIPLIED + (TILED if step.epilogue.across else ()))
    product = scope.names.fresh(step.node.result)
    scope.values[step.node.result] = product
    first, second = (scope.values[tensor.name] for tensor in step.operands)
    added = bias(step)
    factors = Factors(
        KINDS[step.kind], product, first, second, step.node.packet, triangle(step),
        scope.values[added] if added else None, width(step),
        len(step.operands[1].shape) == 1,
    )  # fmt: skip
    made = kernel(replace(step.epilogue, name=step.name), scope)
    return replace(made, factors=factors, formula=contraction_formula(step))


def kernel(step: Pointwise, scope: _Scope | None = None) -> Kernel:
    """The template context of one Pointwise region; `scope` is that of what it is a part of."""
    scope = scope or _scope(step, TILED if step.layout or step.across else ())
    names, live, values = scope.names, scope.live, scope.values
    calls: dict[str, None] = {}
    statements, dense = [], False
    maps = _maps(step, values, names)
    for node in step.body.statements:
        op = ops.find(node)
        assert op is not None
        texts = {
            name: _c_text(value, values, live)
            for name, value in op.values(node).items()
            if value is not None and not isinstance(value, str)
        }
        values[node.result] = names.fresh(node.result)
        placed = _placed(node, values[node.result], maps, names)
        for where in placed:
            texts[f"at_{-where.move.dim}"] = where.coordinate
            texts[f"map_{-where.move.dim}"] = where.map
        expr = op.text(node, texts)
        ctype = "bool" if op.result == "bool" else "float"
        statements.append(Statement(ctype, values[node.result], expr, placed))
        calls.update((call, None) for call in re.findall(r"(\w+)\(", expr))
        dense = dense or op.dense_result
    lines, layout_of = _layouts(step, values)
    single = {name for node in step.body.statements for name in ops.operands(node, "single")}
    staged, numbers, halves = _staged(step, single), _numbers(step), _halves(step, single)
    if numbers:
        calls[MASK_READ] = None
    outputs = tuple(
        _operand(i, tensor, values, leaves=_leaves_of(step, tensor.name, values, numbers, single),
                 layout=layout_of[tensor.name], output=True)
        for i, tensor in enumerate(step.writes)
    )  # fmt: skip
    inputs = tuple(
        _operand(
            len(outputs) + i,
            access.tensor,
            values,
            behind=access.behind,
            staged=access.tensor.name in staged,
            number=access.tensor.name in numbers,
            single=single,
            half=access.tensor.name in halves,
            maps=maps.of_reads.get(access.tensor.name, ()),
        )
        for i, access in enumerate(step.reads)
    )
    scalars = tuple(Scalar(live[s.text], s.text) for s in step.scalars)
    like = tuple(values.get(t.name) or names.fresh(t.name) for t in step.like)
    return Kernel(
        step.name, formula(step), outputs, inputs, scalars, tuple(statements), tuple(calls), lines,
        _format(step, like), like, dense, _same(step, values), tune.packs(step),
    )  # fmt: skip


def _same(step: Pointwise, values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Operands that must have the dtype of another one."""
    given = {access.tensor.name for access in step.reads}
    pairs = [(name, node.reads[0]) for node in step.body.statements
             for name in ops.operands(node, "same") if {name, node.reads[0]} <= given]  # fmt: skip
    return tuple((values[name], values[x]) for name, x in dict.fromkeys(pairs))


def _format(step: Pointwise, like: Sequence[str]) -> str:
    """C++ for the memory format that a region is told to write, "" where it is told none."""
    if step.layout == CHANNELS_LAST:
        volume = len(step.writes[0].shape) == 5
        last = f"at::MemoryFormat::ChannelsLast{'3d' if volume else ''}"
        return f"{TOLD} ? {last} : at::MemoryFormat::Contiguous"
    if like:
        return f"format_of({{{', '.join(like)}}})"
    return "at::MemoryFormat::Contiguous" if step.layout else ""


def _layouts(step: Pointwise, values: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """C++ lines that retrace how the reference lays out its steps, and each value's layout.

    Where the region is told its layout, only the shape matters, and the inputs decide it.
    """
    if step.layout:
        shaped = {t.name: _inputs_of(step, t.name) for t in step.writes}
        texts = {name: ", ".join(values[t.name] for t in used) for name, used in shaped.items()}
        return (), {name: f"{{{text}}}" for name, text in texts.items()}
    carried = {
        access.tensor.name: values[access.tensor.name] + ("_like" if access.node else "")
        for access in step.reads
    }
    inputs = set(carried)
    lines = []
    for node in step.body.statements:
        op = ops.find(node)
        assert op is not None
        operands = list(dict.fromkeys(node.reads))
        fixed = op.dense_result or op.placed
        if len(operands) == 1 and operands[0] not in inputs and not fixed:
            carried[node.result] = carried[operands[0]]  # one dense operand: its strides
            continue
        name = f"{values[node.result]}_like"
        dense = ".contiguous()" if op.dense_result else ""
        given = ", ".join(carried[operand] for operand in operands)
        lines.append(f"const at::Tensor {name} = like({{{given}}}){dense};")
        carried[node.result] = name
    return tuple(lines), carried


class _Names:
    """Hands out C identifiers that are all different."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        self.taken = {*RESERVED, *more}

    def fresh(self, name: str) -> str:
        while keyword.iskeyword(name) or not self.taken.isdisjoint(_with_suffixes(name)):
            name += "_"
        self.taken.update(_with_suffixes(name))
        return name


def _with_suffixes(name: str) -> list[str]:
    return [name + suffix for suffix in SUFFIXES]


def _scalar_name(text: str) -> str:
    name = re.sub(r"\W+", "_", text.removeprefix("self.")).strip("_").removeprefix("self_")
    return name if name.isidentifier() else f"scalar_{name}"


def _operand(
    index: int, tensor: Tensor, values: Mapping[str, str], leaves: str = "", layout: str = "",
    output: bool = False, staged: bool = False, behind: int = 0, number: bool = False,
    single: Collection[str] = (), half: bool = False, maps: tuple[Mapped, ...] = (),
) -> Operand:  # fmt: skip
    ctype = "T" if _follows(tensor, single) else C_TYPES[tensor.dtype]
    ctype = MASK_TYPE if number else HALF_TYPE if half else ctype
    return Operand(
        index,
        values[tensor.name],
        ctype,
        output,
        tensor.dtype,
        leaves,
        layout,
        staged,
        behind,
        maps,
    )


@dataclass
class _Maps:
    """The maps of a kernel as they are numbered: by operand, those of its moved elements."""

    index: int
    number: int = 0
    of_reads: dict[str, tuple[Mapped, ...]] = field(default_factory=dict)

    def add(self, move: Move, value: str, names: _Names) -> Mapped:
        dim = f"dim_{move.dim}" if move.dim >= 0 else str(-move.dim)
        name = names.fresh(f"{value}_along_{dim}")
        made = Mapped(move, self.number, self.index, name, f"{value}_like")
        self.index, self.number = self.index + 1, self.number + bool(move.rule)
        return made

    def again(self, mapped: Mapped, like: str) -> Mapped:
        """A map of its own for coordinates that are there already."""
        self.number += 1
        return replace(mapped, number=self.number - 1, like=like)


def _maps(step: Pointwise, values: Mapping[str, str], names: _Names) -> _Maps:
    """The maps of what a kernel reads; coordinates are operands behind those in memory."""
    maps = _Maps(len(step.writes) + len(step.reads))
    for access in step.reads:
        given = moves(access.node) if access.node else ()
        value = values[access.tensor.name]
        maps.of_reads[access.tensor.name] = tuple(maps.add(m, value, names) for m in given)
    return maps


def _placed(node: Node, value: str, maps: _Maps, names: _Names) -> tuple[Mapped, ...]:
    """The coordinates that a step needs; those of what has been padded are those of the result."""
    op = ops.find(node)
    given = op.placed(op.values(node)) if op and op.placed else ()
    known = {m.move.dim: m for m in maps.of_reads.get(node.reads[0], ())}
    shared = node.packet == "padded" and all(move.dim in known for move in given)
    return tuple(
        maps.again(known[move.dim], f"{value}_like") if shared else maps.add(move, value, names)
        for move in given
    )


def _staged(step: Pointwise, single: Collection[str]) -> tuple[str, ...]:
    """The inputs that the kernel which goes by tiles may stage, those as large as the results.

    They are all such inputs where the region is told a layout, else those that lie across. Packs
    have 16 bytes at most. Shared memory holds six tiles of a half type, so code for more would only
    cost registers.
    """
    whole = [a.tensor for a in step.reads if a.tensor.shape == step.writes[0].shape]
    moved = [t.name for t in whole if _follows(t, single) or t.dtype == "bool"]
    return tuple(name for name in moved if step.layout or name in step.across)[:6]


def _halves(step: Pointwise, single: Collection[str]) -> frozenset[str]:
    """The inputs of one half type beside float32 ones; to convert one would be a pass over it."""
    floats = [a.tensor for a in step.reads if _follows(a.tensor, single)]
    half = next((t.dtype for t in floats if t.dtype != "float32"), None)
    mixed = any(t.dtype == "float32" for t in floats)
    return frozenset(t.name for t in floats if mixed and t.dtype == half)


def _numbers(step: Pointwise) -> frozenset[str]:
    """The masks that are read as numbers alone, as in x * mask.

    Harnesses that cast every input to the dtype under test give them as floating tensors, which the
    reference takes as well.
    """
    masks = {access.tensor.name for access in step.reads if access.tensor.dtype == "bool"}
    for node in step.body.statements:
        op = ops.find(node)
        assert op is not None
        condition = op.values(node).get("mask")
        as_bool = node.reads if op.result == "bool" else [getattr(condition, "name", None)]
        masks -= set(as_bool)
    return frozenset(masks - set(step.body.results))


def _follows(tensor: Tensor, single: Collection[str]) -> bool:
    """Whether a tensor is of the dtype that the kernel runs in, "T"."""
    return tensor.dtype in ops.FLOATS and tensor.name not in single


def _leaves_of(
    step: Pointwise, result: str, values: Mapping[str, str], numbers: Collection[str],
    single: Collection[str],
) -> str:  # fmt: skip
    """The floating inputs that one result depends on: they decide its dtype."""
    used = _inputs_of(step, result)
    leaves = [t.name for t in used if _follows(t, single) or t.name in numbers]
    return ", ".join(values[name] for name in leaves)


def _inputs_of(step: Pointwise, result: str) -> list[Tensor]:
    """The inputs that one result depends on."""
    nodes = {node.result: node for node in step.body.statements}
    needed, stack = set(), [result]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += nodes[name].reads if name in nodes else ()
    return [access.tensor for access in step.reads if access.tensor.name in needed]


def _c_text(value: Arg, values: Mapping[str, str], live: Mapping[str, str]) -> str:
    match value:
        case Ref():
            return values[value.name]
        case Live():
            return live.get(value.text, "")  # none where the expression does not name it
        case bool():
            return "true" if value else "false"
        case int() | float():
            return ops.float_literal(float(value))
    return ""
