"""Operators of one operand that the CUDA maths library has."""

from __future__ import annotations

from modelnew.ir import Literal
from modelnew.ops import Op, Texts, Values, float_literal


def _plain_copy(values: Values) -> bool:
    """clone without a memory format of its own: the result has the operand's strides."""
    chosen = values.get("memory_format")
    return chosen is None or chosen == Literal("torch.preserve_format")


def _round(values: Values, texts: Texts) -> str:
    """UnaryOpsKernel.cu, round_decimals_kernel_cuda: a power of ten in the operands' own type."""
    decimals = values.get("decimals") or 0
    assert isinstance(decimals, int)
    if decimals == 0:
        return "nearbyintf(x)"
    power = float_literal(10.0 ** abs(decimals))
    return f"nearbyintf(x {'/*'[decimals > 0]} {power}) {'*/'[decimals > 0]} {power}"


def _known_decimals(values: Values) -> bool:
    decimals = values.get("decimals", 0)
    return isinstance(decimals, int) and abs(decimals) <= 38


_POSITIVE = (1.0e-6, 50.0)

ROWS = (
    Op("clone", "x memory_format", "x", accepts=_plain_copy, formula="x"),
    Op("abs", "x", "fabsf(x)"),
    Op("neg", "x", "-x", formula="-x"),
    Op("square", "x", "x * x"),
    Op("reciprocal", "x", "1.0f / x"),
    Op("sqrt", "x", "sqrtf(x)", domain=_POSITIVE),
    Op("rsqrt", "x", "rsqrtf(x)", domain=_POSITIVE),
    Op("exp", "x", "expf(x)"),
    Op("exp2", "x", "exp2f(x)"),
    Op("expm1", "x", "expm1f(x)"),
    Op("log", "x", "logf(x)", domain=_POSITIVE),
    Op("log2", "x", "log2f(x)", domain=_POSITIVE),
    Op("log10", "x", "log10f(x)", domain=_POSITIVE),
    Op("log1p", "x", "log1pf(x)", domain=(-0.999, 50.0)),
    Op("sin", "x", "sinf(x)"),
    Op("cos", "x", "cosf(x)"),
    Op("tan", "x", "tanf(x)"),
    Op("asin", "x", "asinf(x)", domain=(-1.0, 1.0)),
    Op("acos", "x", "acosf(x)", domain=(-1.0, 1.0)),
    Op("atan", "x", "atanf(x)"),
    Op("sinh", "x", "sinhf(x)"),
    Op("cosh", "x", "coshf(x)"),
    Op("tanh", "x", "tanh_expf(x)"),
    Op("asinh", "x", "asinhf(x)"),
    Op("acosh", "x", "acoshf(x)", domain=(1.0, 50.0)),
    Op("atanh", "x", "atanhf(x)", domain=(-1.0, 1.0)),
    Op("erf", "x", "erff(x)", domain=(-5.0, 5.0)),
    Op("erfc", "x", "erfcf(x)", domain=(-5.0, 5.0)),
    Op("floor", "x", "floorf(x)"),
    Op("ceil", "x", "ceilf(x)"),
    Op("trunc", "x", "truncf(x)"),
    Op("round", "x decimals", _round, accepts=_known_decimals, attrs={"decimals": 0}),
    Op("special_round", "x decimals", _round, accepts=_known_decimals, attrs={"decimals": 0}),
    Op("frac", "x", "x - truncf(x)"),
    Op("sign", "x", "float((0.0f < x) - (x < 0.0f))"),
    Op("sgn", "x", "float((0.0f < x) - (x < 0.0f))"),
    Op("angle", "x", "x != x ? x : x < 0.0f ? 3.14159274f : 0.0f"),
    Op("deg2rad", "x", "x * 0.0174532924f", formula="x * 0.0174532924"),
    Op("rad2deg", "x", "x * 57.2957802f", formula="x * 57.2957802"),
)
