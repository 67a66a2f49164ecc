"""Operators of arithmetic over two or three operands, and their scalar forms."""

from __future__ import annotations

from modelnew.ir import Arg, Live
from modelnew.ops import Expression, Op, Texts, Values, float_literal


def _scaled(pattern: str) -> Expression:
    """x + alpha * y and the like; the product of two constants is formed here, in float64."""

    def expr(values: Values, texts: Texts) -> str:
        y, alpha = values["y"], values["alpha"]
        if alpha == 1:
            return pattern.format("y")
        if isinstance(y, int | float) and isinstance(alpha, int | float):
            return pattern.format(float_literal(float(y) * float(alpha)))
        return pattern.format("alpha * y")

    return expr


def _rsub(values: Values, texts: Texts) -> str:
    return "y - x" if values["alpha"] == 1 else "y - alpha * x"


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
    return "x + y * z" if _unit(values, "value") else "x + value * y * z"


def _addcdiv(values: Values, texts: Texts) -> str:
    return "x + y / z" if _unit(values, "value") else "x + value * (y / z)"


def _clamp(values: Values, texts: Texts) -> str:
    inner = "x" if "lower" not in texts else "maximumf(x, lower)"
    return inner if "upper" not in texts else f"minimumf({inner}, upper)"


ROWS = (
    Op("add", "x y alpha", _scaled("x + {}"), attrs={"alpha": 0.75}, formula="x + y"),
    Op("sub", "x y alpha", _scaled("x - {}"), attrs={"alpha": 0.75}, formula="x - y"),
    Op("rsub", "x y alpha", _rsub, attrs={"alpha": 0.75}, formula="y - x"),
    Op("mul", "x y", "x * y", formula="x * y"),
    Op("div", "x y rounding_mode", _div, formula="x / y"),
    Op("pow", "x y", _pow, domain=(1.0e-3, 8.0), attrs={"y": 2.5}),
    Op("maximum", "x y", "maximumf(x, y)"),
    Op("minimum", "x y", "minimumf(x, y)"),
    Op("clamp", "x lower upper", _clamp,
       attrs={"lower": -1.5, "upper": 2.0}),
    Op("clamp_min", "x lower", "maximumf(x, lower)", attrs={"lower": -1.5}),
    Op("clamp_max", "x upper", "minimumf(x, upper)", attrs={"upper": 1.5}),
    Op("addcmul", "x y z value", _addcmul, attrs={"value": 0.7}),
    Op("addcdiv", "x y z value", _addcdiv, attrs={"value": 0.7}),
    Op("lerp", "x y weight", "lerpf(x, y, weight)", attrs={"weight": 0.3}),
)  # fmt: skip
