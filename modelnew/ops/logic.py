"""Comparisons, logical operators and selections by a mask."""

from __future__ import annotations

from modelnew.ops import Op, Texts, Values


def _isclose(values: Values, texts: Texts) -> str:
    """isclose of aten/src/ATen/native/TensorCompare.cpp: equal, or apart by a finite distance."""
    near = "x == y || (fabsf(x - y) < INFINITY && fabsf(x - y) <= atol + fabsf(rtol * y))"
    return f"{near} || (x != x && y != y)" if values["equal_nan"] else near


def _known_nan(values: Values) -> bool:
    return isinstance(values["equal_nan"], bool)


ROWS = (
    Op("gt", "x y", "x > y", result="bool", formula="x > y"),
    Op("ge", "x y", "x >= y", result="bool", formula="x >= y"),
    Op("lt", "x y", "x < y", result="bool", formula="x < y"),
    Op("le", "x y", "x <= y", result="bool", formula="x <= y"),
    Op("eq", "x y", "x == y", result="bool", formula="x == y"),
    Op("ne", "x y", "x != y", result="bool", formula="x != y"),
    Op("isnan", "x", "x != x", result="bool"),
    Op("isinf", "x", "fabsf(x) == INFINITY", result="bool"),
    Op("isposinf", "x", "x == INFINITY", result="bool"),
    Op("isneginf", "x", "x == -INFINITY", result="bool"),
    Op("isfinite", "x", "fabsf(x) < INFINITY", result="bool"),
    Op("signbit", "x", "__float_as_int(x) < 0", result="bool"),
    Op("isclose", "x y rtol atol equal_nan", _isclose, result="bool",
       attrs={"rtol": 0.25, "atol": 0.5, "equal_nan": False}, accepts=_known_nan),
    Op("logical_not", "x", "!x", result="bool"),
    Op("logical_and", "x y", "x && y", result="bool"),
    Op("logical_or", "x y", "x || y", result="bool"),
    Op("logical_xor", "x y", "!x != !y", result="bool"),
    # Of masks alone: the result of integers is no bool.
    Op("bitwise_not", "mask", "!mask", result="bool"),
    Op("bitwise_and", "mask other_mask", "mask && other_mask", result="bool"),
    Op("bitwise_or", "mask other_mask", "mask || other_mask", result="bool"),
    Op("bitwise_xor", "mask other_mask", "mask != other_mask", result="bool"),
    Op("where", "mask x y", "mask ? x : y"),
    Op("masked_fill", "x mask value", "mask ? value : x", attrs={"value": -2.0}, dense_result=True),
)  # fmt: skip
