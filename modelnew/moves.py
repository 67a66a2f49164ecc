"""Operators that only move elements, by a rule for each dimension: flip, roll and pad.

A kernel reads such a result from the operand itself (see templates/device/moved.cuh), so that
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modelnew.ir import Arg, Node

_REFLECTED = tuple(f"reflection_pad{n}d" for n in (1, 2, 3))
_REPLICATED = tuple(f"replication_pad{n}d" for n in (1, 2, 3))
# Those and others that move elements, as they are called by themselves.
COPIES = (
    "cat", "clone", "constant_pad_nd", "contiguous", "gather", "index", "index_select", "pad",
    "pixel_shuffle", "pixel_unshuffle", "repeat", "repeat_interleave", "stack", "take_along_dim",
    "tile", "tril", "triu",
)  # fmt: skip

SAME_SIZE = ("flipped", "rolled")
_MODES = {"reflect": "reflected", "replicate": "clamped", "circular": "wrapped"}


@dataclass(frozen=True)
class Move:
    """How the elements along a dimension are those of the operand: `rule` is a function of
    device/moved.cuh, `first` its number, `grown` how many more there are. `dim` counts from the
    side from which the reference counts it: at run time there may be more dimensions, or fewer."""

    dim: int
    rule: str = ""
    first: int = 0
    grown: int = 0


@dataclass(frozen=True)
class Mapped:
    """A dimension along which an operand's elements are moved, or a step depends on where it is:
    map number `number`, by coordinates that are operand number `index`. On the host they are `name`
    and those of a tensor like `like`."""

    move: Move
    number: int
    index: int
    name: str
    like: str

    @property
    def coordinate(self) -> str:
        return f"{self.name}.at(v)"

    @property
    def map(self) -> str:
        return f"maps.at[{self.number}]"

    @property
    def text(self) -> str:
        return f"{self.move.rule}({self.coordinate}, {self.map})"

    @property
    def inside(self) -> str:
        """C++ that makes the map of a step; "" where it needs none."""
        move = self.move
        given = f"{self.like}, {move.dim}, {move.first}, {move.grown}"
        return f"inside({given})" if move.rule else ""

    def made(self, value: str) -> str:
        """C++ that makes the map for the operand `value`."""
        move = self.move
        match move.rule:
            case "flipped":
                return f"flipped({value}, {move.dim})"
            case "rolled":
                return f"rolled({value}, {move.dim}, {move.first})"
        most = max(move.first, move.grown - move.first)
        least = {"reflected": most + 1, "wrapped": most, "padding": 0}.get(move.rule, min(most, 1))
        return f"padded({value}, {move.dim}, {move.first}, {least})"


def moves(node: Node) -> tuple[Move, ...]:
    """What `node` moves; empty for one that does something else, or not by constant numbers."""
    if len(node.outputs) != 1 or len(node.reads) != 1:
        return ()
    found, rank = tuple(_moves(node)), len(node.outputs[0].shape)
    adds = all(map(_adds, found))
    own = rank > 0 and len({move.dim % rank for move in found}) == len(found)
    return found if adds and own else ()


def _adds(move: Move) -> bool:
    """Whether it takes no elements away."""
    return move.rule in SAME_SIZE or 0 <= move.first <= move.grown


def _moves(node: Node) -> Iterator[Move]:
    match node.op:
        case "aten.flip.default":
            for dim in _integers(node.value("dims")):
                yield Move(dim, "flipped")
        case "aten.roll.default":
            shifts, dims = (_integers(node.value(name)) for name in ("shifts", "dims"))
            if len(shifts) == len(dims):
                for shift, dim in zip(shifts, dims, strict=True):
                    yield Move(dim, "rolled", shift)
        case "aten.pad.default":
            mode = node.value("mode")
            if isinstance(mode, str) and mode in _MODES:
                yield from _padded(_MODES[mode], _integers(node.value("pad")))
        case "modelnew.padding.default":
            yield from padding(node.value("pad"))
        case _ if node.packet in _REFLECTED:
            yield from _padded("reflected", _integers(node.value("padding")))
        case _ if node.packet in _REPLICATED:
            yield from _padded("clamped", _integers(node.value("padding")))


def padding(pad: Arg) -> tuple[Move, ...]:
    """The dimensions along which a padding with one value adds elements; empty where it takes
    some away or where its amounts are no constants."""
    found = tuple(_padded("padding", _integers(pad)))
    return tuple(move for move in found if move.grown) if all(map(_adds, found)) else ()


def _padded(rule: str, amounts: tuple[int, ...]) -> Iterator[Move]:
    for number, (left, right) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        yield Move(-1 - number, rule, left, left + right)


def _integers(value: Arg) -> tuple[int, ...]:
    """Constant integers; none where one is something else."""
    items = value if isinstance(value, tuple) else (value,)
    integers = tuple(item for item in items if type(item) is int)
    return integers if len(integers) == len(items) else ()
