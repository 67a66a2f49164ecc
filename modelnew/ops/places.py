"""Operators whose result depends on where an element is; see modelnew/places.py.

In an expression `at_1` is the coordinate along the last dimension, `map_1` what is known of it.
"""

from __future__ import annotations

from modelnew.moves import Move, padding
from modelnew.ops import Op, Texts, Values

_MATRIX = (Move(-2), Move(-1))


def _lower(values: Values, texts: Texts) -> str:
    return f"at_1 - at_2 <= {values['diagonal']} ? x : 0.0f"


def _upper(values: Values, texts: Texts) -> str:
    return f"at_1 - at_2 >= {values['diagonal']} ? x : 0.0f"


def _padded(values: Values, texts: Texts) -> str:
    inside = [f"is_inside(at_{-m.dim}, map_{-m.dim})" for m in padding(values["pad"])]
    return f"{' && '.join(inside)} ? x : value"


def _matrix(values: Values) -> tuple[Move, ...]:
    return _MATRIX


ROWS = (
    Op("lower_triangle", "x diagonal", _lower, placed=_matrix, dense_result=True),
    Op("upper_triangle", "x diagonal", _upper, placed=_matrix, dense_result=True),
    Op("padded", "x pad value", _padded, placed=lambda values: padding(values["pad"])),
)
