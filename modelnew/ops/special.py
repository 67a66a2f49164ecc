"""Special functions. Those that CUDA's maths library has at PyTorch's accuracy are calls of it."""

from __future__ import annotations

from modelnew.ops import Op, Texts, Values

_POSITIVE = (1.0e-6, 50.0)
_UNIT = (0.0, 1.0)


def _logit(values: Values, texts: Texts) -> str:
    eps = values["eps"]
    plain = eps is None or (isinstance(eps, int | float) and eps < 0)
    return "logitf(x)" if plain else "logit_clampedf(x, eps)"


def _nan_to_num(values: Values, texts: Texts) -> str:
    """Infinities become the largest numbers of the storage type where the call names none."""
    nan, high, low = (name if name in texts else None for name in ("nan", "posinf", "neginf"))
    return f"nan_to_numf(x, {nan or '0.0f'}, {high or 'largest(T())'}, {low or '-largest(T())'})"


def _polygamma(values: Values, texts: Texts) -> str:
    return "trigammaf(x)" if values["n"] == 1 else "digammaf(x)"


def _low_order(values: Values) -> bool:
    return type(values["n"]) is int and values["n"] in (0, 1)


ROWS = (
    Op("logit", "x eps", _logit, domain=_UNIT, attrs={"eps": 0.1}),
    Op("nan_to_num", "x nan posinf neginf", _nan_to_num,
       attrs={"nan": 0.5, "posinf": 3.0, "neginf": -2.0}),
    Op("sinc", "x", "fabsf(x) < 1e-4f ? 1.0f : sinpif(x) / (3.14159274f * x)"),
    Op("erfinv", "x", "erfinvf(x)", domain=(-1.0, 1.0)),
    Op("special_erfcx", "x", "erfcx_scaledf(x)", domain=(-9.0, 20.0)),
    Op("special_ndtr", "x", "normal_cdff(x)", domain=(-14.0, 10.0)),
    Op("special_log_ndtr", "x", "log_normal_cdff(x)"),
    Op("special_ndtri", "x", "normcdfinvf(x)", domain=_UNIT),
    Op("special_entr", "x",
       "x > 0.0f ? -x * logf(x) : x == 0.0f ? 0.0f : x < 0.0f ? -INFINITY : x"),
    Op("lgamma", "x", "lgammaf(x)"),
    Op("digamma", "x", "digammaf(x)"),
    Op("polygamma", "n x", _polygamma, attrs={"n": 1}, accepts=_low_order,
       refusal="a derivative of digamma beyond the first"),
    Op("i0", "x", "bessel_i0f(x, false)"),
    Op("special_i0e", "x", "bessel_i0f(x, true)"),
    Op("special_i1", "x", "bessel_i1f(x, false)"),
    Op("special_i1e", "x", "bessel_i1f(x, true)"),
    Op("special_modified_bessel_i0", "x", "bessel_i0f(x, false)"),
    Op("special_modified_bessel_i1", "x", "bessel_i1f(x, false)"),
    Op("special_modified_bessel_k0", "x", "bessel_k0f(x, false)", domain=_POSITIVE),
    Op("special_modified_bessel_k1", "x", "bessel_k1f(x, false)", domain=_POSITIVE),
    Op("special_scaled_modified_bessel_k0", "x", "bessel_k0f(x, true)", domain=_POSITIVE),
    Op("special_scaled_modified_bessel_k1", "x", "bessel_k1f(x, true)", domain=_POSITIVE),
    # PyTorch has NaN at an infinity, CUDA 0.
    Op("special_spherical_bessel_j0", "x",
       "x == 0.0f ? 1.0f : fabsf(x) == INFINITY ? 0.0f : sinf(x) / x"),
)  # fmt: skip
