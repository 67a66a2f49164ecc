"""Operators of floating tensors, element by element, that have no row, and why.

The names are those of PyTorch's OpInfo lists (torch.testing._internal) or of torch.nn.functional. A
call of one of them is a library call; one that PyTorch composes of other operators is traced as
those.
"""

from __future__ import annotations

from collections.abc import Mapping

_BY_REASON: Mapping[str, str] = {
    "composed of operators that have rows":
        "nn.functional.softsign nn.functional.tanhshrink __radd__ __rdiv__ __rmod__ __rmul__ "
        "__rpow__ __rsub__",
    "a conversion or a constant: nothing is computed":
        "bfloat16 bool byte char double fill float half int isreal long short",
    "complex numbers":
        "cdouble cfloat chalf complex conj conj_physical polar real",
    "a result in float64":
        "float_power",
    "two results":
        "frexp",
    "a step to the next number of the storage type, which float32 arithmetic does not have":
        "nextafter",
    "the caller's own CUDA, compiled at run time":
        "jiterator_binary jiterator_binary_return_by_ref jiterator_unary",
    "values that meet along a dimension":
        "mvlgamma nn.functional.glu nn.functional.log_softmax nn.functional.softmax "
        "nn.functional.softmin",
    "no short formula at float32 accuracy":
        "igamma igammac special.airy_ai special.zeta",
    "CUDA's own functions err more than twice as far as PyTorch's formula":
        "special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1",
    "a recurrence as long as its degree":
        "special.chebyshev_polynomial_t special.chebyshev_polynomial_u "
        "special.chebyshev_polynomial_v special.chebyshev_polynomial_w "
        "special.hermite_polynomial_h special.hermite_polynomial_he "
        "special.laguerre_polynomial_l special.legendre_polynomial_p "
        "special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u "
        "special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w",
}  # fmt: skip


def _left_out() -> dict[str, str]:
    reasons: dict[str, str] = {}
    for reason, names in _BY_REASON.items():
        for name in names.split():
            if name in reasons:
                raise ValueError(f"operator {name} is left out twice")
            reasons[name] = reason
    return reasons


LEFT_OUT: Mapping[str, str] = _left_out()
