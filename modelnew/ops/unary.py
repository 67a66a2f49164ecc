"""Operators of one operand that the CUDA maths library has."""

from __future__ import annotations

from modelnew.ir import Literal
from modelnew.ops import Op, Values


def _plain_copy(values: Values) -> bool:
    """clone without a memory format of its own: the result has the operand's strides."""
    chosen = values.get("memory_format")
    return chosen is None or chosen == Literal("torch.preserve_format")


def _whole(values: Values) -> bool:
    return values.get("decimals", 0) == 0


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
    Op("tanh", "x", "tanh_expf(x)"),
    Op("erf", "x", "erff(x)", domain=(-5.0, 5.0)),
    Op("erfc", "x", "erfcf(x)", domain=(-5.0, 5.0)),
    Op("floor", "x", "floorf(x)"),
    Op("ceil", "x", "ceilf(x)"),
    Op("trunc", "x", "truncf(x)"),
    Op("round", "x decimals", "nearbyintf(x)", accepts=_whole),
    Op("frac", "x", "x - truncf(x)"),
    Op("sign", "x", "float((0.0f < x) - (x < 0.0f))"),
)
