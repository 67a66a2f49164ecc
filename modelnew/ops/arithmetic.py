"""Operators of arithmetic over two or three operands, and their scalar forms."""

from __future__ import annotations

from modelnew.ir import Arg, Live
from modelnew.ops import Expression, Op, Texts, Values, float_literal


def _scaled(sign: str, x: str = "x", y: str = "y") -> Expression:
    """x + alpha * y and the like, rounded once as PyTorch's own kernel is: the product alone may
    overflow. That of two constants is formed here, in float64."""

    def expr(values: Values, texts: Texts) -> str:
        given, alpha = values[y], values["alpha"]
        if alpha == 1:
            return f"{x} {sign} {y}"
        if isinstance(given, int | float) and isinstance(alpha, int | float):
            return f"{x} {sign} {float_literal(float(given) * float(alpha))}"
        return f"fmaf({'-' if sign == '-' else ''}alpha, {y}, {x})"

    return expr


def _div(values: Values, texts: Texts) -> str:
    match values.get("rounding_mode"):
        case "floor":
            return "floor_dividef(x, y)"
        case "trunc":
            return "truncf(x / y)"
    return "x / y"


# The exponents for which PyTorch itself does not call pow (PowKernel.cu, pow_tensor_scalar).
_POWERS: dict[float, str] = {
    0.5: "sqrtf(x)",
    2.0: "x * x",
    3.0: "x * x * x",
    -0.5: "rsqrtf(x)",
    -1.0: "1.0f / x",
    -2.0: "1.0f / (x * x)",
}


def _pow(values: Values, texts: Texts) -> str:
    exponent = values["y"]
    if isinstance(exponent, int | float) and float(exponent) in _POWERS:
        return _POWERS[float(exponent)]
    return "pow_scalarf(x, y)" if isinstance(exponent, Live) else "powf(x, y)"


def _unit(values: Values, name: str) -> bool:
    value: Arg = values[name]
    return value == 1


def _addcmul(values: Values, texts: Texts) -> str:
    """PyTorch's kernel, too, rounds once where the value is 1, as it asks at every call."""
    scaled = "x + value * (y * z)"
    if isinstance(values["value"], Live):
        return f"value == 1.0f ? fmaf(y, z, x) : {scaled}"
    return "x + y * z" if _unit(values, "value") else scaled


def _addcdiv(values: Values, texts: Texts) -> str:
    return "x + y / z" if _unit(values, "value") else "x + value * (y / z)"


def _clamp(values: Values, texts: Texts) -> str:
    inner = "x" if "lower" not in texts else "maximumf(x, lower)"
    return inner if "upper" not in texts else f"minimumf({inner}, upper)"


_XLOGY = "y == y && x == 0.0f ? 0.0f : x * logf(y)"

ROWS = (
    Op("add", "x y alpha", _scaled("+"), attrs={"alpha": 0.75}, formula="x + y"),
    Op("sub", "x y alpha", _scaled("-"), attrs={"alpha": 0.75}, formula="x - y"),
    Op("rsub", "x y alpha", _scaled("-", "y", "x"), attrs={"alpha": 0.75}, formula="y - x"),
    Op("mul", "x y", "x * y", formula="x * y"),
    Op("div", "x y rounding_mode", _div, formula="x / y"),
    Op("floor_divide", "x y", "floor_dividef(x, y)"),
    Op("fmod", "x y", "fmodf(x, y)"),
    Op("remainder", "x y", "floor_modf(x, y)"),
    Op("pow", "x y", _pow, domain=(1.0e-3, 8.0), attrs={"y": 2.5}),
    Op("maximum", "x y", "maximumf(x, y)"),
    Op("minimum", "x y", "minimumf(x, y)"),
    Op("fmax", "x y", "fmaxf(x, y)"),
    Op("fmin", "x y", "fminf(x, y)"),
    Op("atan2", "x y", "atan2f(x, y)"),
    Op("hypot", "x y", "hypotf(x, y)"),
    Op("copysign", "x y", "copysignf(x, y)"),
    # StepKernel.cu: a NaN in x gives 0.
    Op("heaviside", "x y", "x == 0.0f ? y : x > 0.0f ? 1.0f : 0.0f"),
    Op("ldexp", "x y", "x * powf(2.0f, y)", domain=(-20.0, 20.0)),
    Op("logaddexp", "x y", "logaddexpf(x, y)"),
    Op("logaddexp2", "x y", "logaddexp2f(x, y)"),
    Op("xlogy", "x y", _XLOGY, domain=(1.0e-3, 20.0)),
    Op("special_xlogy", "x y", _XLOGY, domain=(1.0e-3, 20.0)),
    Op("special_xlog1py", "x y", "y == y && x == 0.0f ? 0.0f : x * log1pf(y)",
       domain=(-0.999, 20.0)),
    Op("clamp", "x lower upper", _clamp,
       attrs={"lower": -1.5, "upper": 2.0}),
    Op("clamp_min", "x lower", "maximumf(x, lower)", attrs={"lower": -1.5}),
    Op("clamp_max", "x upper", "minimumf(x, upper)", attrs={"upper": 1.5}),
    Op("addcmul", "x y z value", _addcmul, attrs={"value": 0.7}),
    Op("addcdiv", "x y z value", _addcdiv, attrs={"value": 0.7}),
    Op("lerp", "x y weight", "lerpf(x, y, weight)", attrs={"weight": 0.3}),
)  # fmt: skip
