"""Which pointwise nodes give back their operand bit for bit, proven from the values it can have.

A Range is an interval with what an interval cannot say: whether NaN and whether -0 may be among
the values. Bounds are exact in float64; every other dtype rounds monotonically, so that what is
inside them stays inside when both are rounded. A result that may be NaN is no obstacle where the
node passes NaN on, as PyTorch's relu, clamp and their like do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from modelnew.ir import Arg, Graph, Node
from modelnew.ops import FLOATS

INF = math.inf


@dataclass(frozen=True)
class Range:
    """Every value is in [low, high], or NaN where `nan`, or -0 (if 0 is inside) where `minus`."""

    low: float = -INF
    high: float = INF
    nan: bool = True
    minus: bool = True

    def above(self, bound: float) -> bool:
        """Whether max(x, bound) is x for every x but NaN, the sign of zero included."""
        return self.low > bound or (self.low == bound and (bound != 0 or not self.minus))

    def below(self, bound: float) -> bool:
        """Whether min(x, bound) is x for every x but NaN, the sign of zero included."""
        return self.high < bound or (self.high == bound and bound != 0)


ANY = Range()

# By operator: its results for any operand; `nan` says that it makes NaN of numbers. Each formula
# keeps its bound in floating point too (1 / (1 + exp(-x)), 1 - 2 / (1 + exp(2 x))); sine, cosine
# and erf are not here, since an error of an ulp may take them past 1.
BOUNDED: Mapping[str, Range] = {
    "sigmoid": Range(0.0, 1.0, nan=False, minus=False),
    "hardsigmoid": Range(0.0, 1.0, nan=False, minus=False),
    "tanh": Range(-1.0, 1.0, nan=False),
    "softmax": Range(0.0, 1.0, minus=False),
    "exp": Range(0.0, INF, nan=False, minus=False),
    "exp2": Range(0.0, INF, nan=False, minus=False),
    "abs": Range(0.0, INF, nan=False, minus=False),
    "square": Range(0.0, INF, nan=False, minus=False),
    "sqrt": Range(0.0, INF),
}

# x times a factor in [0, 1]: never above max(x, 0), never below the figure, which lies under the
# function's least value (-0.17, -0.28 and -0.31) by far more than any rounding. At -inf: NaN.
DAMPED: Mapping[str, float] = {"gelu": -0.25, "silu": -0.375, "mish": -0.375}

# Operators that hand on values of their first operand, and no others.
PASSING = (
    "clone", "detach", "view", "reshape", "flatten", "squeeze", "unsqueeze", "max_pool1d",
    "max_pool2d", "max_pool3d", "amax", "amin",
)  # fmt: skip

# Operators f with f(f(x)) = f(x) for every x, the other arguments being the same.
IDEMPOTENT = (
    "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "abs", "floor", "ceil",
    "trunc", "sign", "nan_to_num",
)  # fmt: skip

UNITS: Mapping[str, float] = {"mul": 1.0, "div": 1.0, "pow": 1.0}


def number(value: Arg) -> float | None:
    """The value of a literal number; a Live one may be another at the next call."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def bounds(node: Node) -> tuple[float, float] | None:
    """The literal bounds between which a node clips its operand, None for any other node."""
    values = {argument.name: argument.value for argument in node.args}
    match node.packet:
        case "relu":
            return 0.0, INF
        case "relu6":
            return 0.0, 6.0
        case "hardtanh":
            given = values["min_val"], values["max_val"]
        case "clamp" | "clamp_min" | "clamp_max":
            given = values.get("min"), values.get("max")
        case _:
            return None
    low, high = (
        default if value is None else number(value)
        for value, default in zip(given, (-INF, INF), strict=True)
    )
    return None if low is None or high is None or math.isnan(low + high) else (low, high)


class Ranges:
    """The ranges of one graph's values; a value in `written` changes in place and is unknown."""

    def __init__(self, graph: Graph, written: frozenset[str]) -> None:
        self.written = written
        self.nodes = {node.result: node for node in graph.nodes}
        self.known: dict[str, Range] = {}
        for node in graph.nodes:
            floating = any(tensor.dtype in FLOATS for tensor in node.outputs)
            if node.reads and floating and node.result not in written:
                self.known[node.result] = self._range(node)

    def of(self, name: str) -> Range:
        """The range of a value by its name."""
        return self.known.get(name, ANY)

    def _range(self, node: Node) -> Range:
        inner = self.of(node.reads[0])
        if node.packet == "nan_to_num":
            return Range(nan=not _is_number(node.value("nan")))
        if found := BOUNDED.get(node.packet):
            return replace(found, nan=found.nan or inner.nan)
        if node.packet in DAMPED:
            return Range(DAMPED[node.packet], max(inner.high, 0.0))
        if clip := bounds(node):
            low, high = (min(max(x, clip[0]), clip[1]) for x in (inner.low, inner.high))
            return Range(low, high, inner.nan, inner.minus or 0.0 in clip)
        if node.packet in PASSING:
            return inner
        picked = self.nodes.get(node.reads[0])
        if node.op == "python.getitem.int" and node.value("index") == 0 and picked:
            # The values, not the places, of a maximum or a minimum over a dimension.
            extreme = picked.op in ("aten.max.dim", "aten.min.dim")
            return self.of(picked.reads[0]) if extreme else ANY
        return ANY

    def same_as(self, node: Node) -> tuple[str, str] | None:
        """The earlier value that a node's result is bit for bit, and why; None if none is known."""
        if not node.reads or len(node.outputs) != 1 or node.mutates:
            return None
        operand = node.reads[0]
        inner = self.nodes.get(operand)
        if inner and not {operand, node.result} & self.written:
            if (node.op, inner.op) == ("aten.neg.default",) * 2:
                return inner.reads[0], f"{node.packet} of {inner.packet}"
            repeated = node.op == inner.op and node.args[1:] == inner.args[1:]
            if repeated and node.packet in IDEMPOTENT and len(node.reads) == 1:
                return operand, f"{node.packet} of {inner.packet}"
        if why := self._redundant(node, self.of(operand)):
            return operand, why
        return None

    def _redundant(self, node: Node, given: Range) -> str | None:
        values = {argument.name: argument.value for argument in node.args}
        other = number(values.get("exponent", values.get("other")))
        inside = f"what is in [{given.low:g}, {given.high:g}]"
        match node.packet:
            case "dropout" | "alpha_dropout" | "feature_dropout":
                # PyTorch draws nothing from its generator for p = 0, and returns the operand.
                idle = values["train"] is False or number(values["p"]) == 0
                return "dropout that drops nothing" if idle else None
            case "mul" | "div" | "pow" if UNITS[node.packet] == other:
                return f"{node.packet} by 1" if values.get("rounding_mode") is None else None
            case "add" | "sub" if other == 0 and number(values["alpha"]) == 1:
                # -0 + 0 is 0: only -0 + -0 and -0 - 0 keep the sign, where -0 can be.
                minus = (math.copysign(1.0, other) < 0) == (node.packet == "add")
                safe = minus or not (given.minus and given.low <= 0 <= given.high)
                return f"{node.packet} of 0" if safe else None
            case "abs" if given.low >= 0 and not given.minus:
                return f"abs of {inside}"
            case "leaky_relu" if given.low >= 0:
                # x for x > 0, x times the slope for a zero of either sign.
                slope = number(values["negative_slope"])
                return f"leaky_relu of {inside}" if slope and 0 < slope < INF else None
            case "threshold":
                bound = number(values["threshold"])
                return f"threshold of {inside}" if bound is not None and given.low > bound else None
            case "nan_to_num" if not given.nan and given.low > -INF and given.high < INF:
                return f"nan_to_num of {inside}"
        if (clip := bounds(node)) and given.above(clip[0]) and given.below(clip[1]):
            return f"{node.packet} of {inside}"
        return None


def _is_number(value: Arg) -> bool:
    """Whether what nan_to_num puts in a NaN's place, 0 by default, is a number."""
    given = number(0.0 if value is None else value)
    return given is not None and not math.isnan(given)
