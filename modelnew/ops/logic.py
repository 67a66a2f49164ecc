"""Comparisons, logical operators and selections by a mask."""

from __future__ import annotations

from modelnew.ops import Op

ROWS = (
    Op("gt", "x y", "x > y", result="bool", formula="x > y"),
    Op("ge", "x y", "x >= y", result="bool", formula="x >= y"),
    Op("lt", "x y", "x < y", result="bool", formula="x < y"),
    Op("le", "x y", "x <= y", result="bool", formula="x <= y"),
    Op("eq", "x y", "x == y", result="bool", formula="x == y"),
    Op("ne", "x y", "x != y", result="bool", formula="x != y"),
    Op("isnan", "x", "x != x", result="bool"),
    Op("logical_not", "x", "!x", result="bool"),
    Op("logical_and", "x y", "x && y", result="bool"),
    Op("logical_or", "x y", "x || y", result="bool"),
    Op("where", "mask x y", "mask ? x : y"),
    Op("masked_fill", "x mask value", "mask ? value : x", attrs={"value": -2.0}, dense_result=True),
)
