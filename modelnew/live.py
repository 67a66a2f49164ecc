"""Finds which constants of a trace are attributes of the model, so that they can stay live.

An attribute such as `self.negative_slope` reaches the traced graph as a plain number. To learn
where a number came from, a second trace runs with every float attribute replaced by a LiveFloat:
a float near the original whose digits are found nowhere else. Arithmetic on it records the text of
the expression beside its result, so a number in the second graph names the expression that made
it. A comparison answers as the original would and is recorded as a condition of the graph; a
conversion to an integer makes the digits part of the graph, so they cannot stay live.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)


@dataclass
class LiveTable:
    """What one trace saw.

    `texts` gives the expression for each sentinel value, `conditions` the comparisons that were
    made and how they came out, `observed` the attributes whose digits the graph may depend on.
    """

    texts: dict[float, str] = field(default_factory=dict)
    conditions: dict[str, bool] = field(default_factory=dict)
    observed: set[str] = field(default_factory=set)
    count: int = 0

    def sentinel(self, original: float, text: str) -> LiveFloat:
        """A LiveFloat for the number that `text` reads, which must be finite."""
        self.count += 1
        # Towards zero, so that a probability stays one; the count keeps sentinels apart.
        shift = (self.count * 1.0e-6 + 1.234567e-7) / math.pi
        value = original * (1.0 - shift) if original else shift * 1.0e-3
        return self.make(value, original, text, frozenset([text]))

    def read_as(self, number: Any, dtype: str) -> str | None:
        """The expression that made `number`, which was read from a tensor of `dtype`."""
        if dtype == "float32":
            rounded = {struct.unpack("f", struct.pack("f", v))[0]: t for v, t in self.texts.items()}
            return rounded.get(number)
        return self.texts.get(number) if dtype == "float64" else None

    def make(self, value: float, original: float, text: str, roots: frozenset[str]) -> LiveFloat:
        live = LiveFloat(value)
        live.original, live.text, live.roots, live.table = original, text, roots, self
        self.texts[value] = text
        return live


def _parts(value: Any) -> tuple[float, float, str, frozenset[str]]:
    if isinstance(value, LiveFloat):
        return float(value), value.original, value.text, value.roots
    return value, value, repr(value), frozenset()


def _binary(symbol: str, apply: Callable[[Any, Any], Any], reflected: bool) -> Any:
    def method(self: LiveFloat, other: object) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        a, original_a, text_a, roots_a = _parts(left)
        b, original_b, text_b, roots_b = _parts(right)
        value, original = apply(a, b), apply(original_a, original_b)
        if not isinstance(value, float) or not math.isfinite(value):
            self.table.observed |= roots_a | roots_b
            return original
        text = f"({text_a} {symbol} {text_b})"
        return self.table.make(value, original, text, roots_a | roots_b)

    return method


def _comparison(symbol: str, apply: Callable[[Any, Any], Any]) -> Any:
    """Answers for the original, and records the condition for the generated file to check."""

    def method(self: LiveFloat, other: object) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        _, original, text, _ = _parts(other)
        held = bool(apply(self.original, original))
        if isinstance(other, LiveFloat) or not _asked_by_torch():
            self.table.conditions[f"({self.text} {symbol} {text})"] = held
        return held

    return method


def _asked_by_torch() -> bool:
    """Whether torch's own Python code compares, as in `if p < 0.0 or p > 1.0: raise`.

    With a plain number that is such a check of an argument, which the operator makes once more.
    """
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


def _unary(pattern: str, apply: Callable[[Any], Any]) -> Any:
    def method(self: LiveFloat) -> LiveFloat:
        text = pattern.format(self.text)
        return self.table.make(apply(float(self)), apply(self.original), text, self.roots)

    return method


def _observed(apply: Callable[..., Any]) -> Any:
    """A method that answers with the original and so makes its digits part of the graph."""

    def method(self: LiveFloat, *others: object) -> Any:
        plain = [_parts(other) for other in others]
        self.table.observed |= self.roots.union(*(roots for _, _, _, roots in plain))
        return apply(self.original, *(original for _, original, _, _ in plain))

    return method


def _truth(self: LiveFloat) -> bool:
    self.table.conditions[f"bool({self.text})"] = bool(self.original)
    return bool(self.original)


class LiveFloat(float):
    """A float that knows the Python text which reads it; see the module's docstring."""

    original: float
    text: str
    roots: frozenset[str]
    table: LiveTable

    __add__, __radd__ = _binary("+", operator.add, False), _binary("+", operator.add, True)
    __sub__, __rsub__ = _binary("-", operator.sub, False), _binary("-", operator.sub, True)
    __mul__, __rmul__ = _binary("*", operator.mul, False), _binary("*", operator.mul, True)
    __truediv__ = _binary("/", operator.truediv, False)
    __rtruediv__ = _binary("/", operator.truediv, True)
    __pow__, __rpow__ = _binary("**", operator.pow, False), _binary("**", operator.pow, True)
    __neg__, __abs__ = _unary("(-{})", operator.neg), _unary("abs({})", abs)
    __lt__, __le__ = _comparison("<", operator.lt), _comparison("<=", operator.le)
    __gt__, __ge__ = _comparison(">", operator.gt), _comparison(">=", operator.ge)
    __eq__, __ne__ = _comparison("==", operator.eq), _comparison("!=", operator.ne)
    __bool__, __int__, __round__ = _truth, _observed(int), _observed(round)
    __floor__, __ceil__, __trunc__ = (_observed(f) for f in (math.floor, math.ceil, math.trunc))
    __floordiv__, __mod__ = _observed(operator.floordiv), _observed(operator.mod)
    is_integer = _observed(float.is_integer)

    def __hash__(self) -> int:
        return hash(float(self))

    def __float__(self) -> float:
        return float.__add__(self, 0.0)
