"""Activation functions, each as PyTorch's CUDA kernel defines it (aten/src/ATen/native/cuda)."""

from __future__ import annotations

from modelnew.ops import Op, Texts, Values, float_literal


def _gelu(values: Values, texts: Texts) -> str:
    return "gelu_tanhf(x)" if values["approximate"] == "tanh" else "gelu_erff(x)"


def _elu(values: Values, texts: Texts) -> str:
    """expm1_negativef is right for x <= 0 alone: another input_scale may turn x over."""
    if values["input_scale"] == 1:
        return "eluf(x, alpha, scale)"
    return "x > 0.0f ? x * scale : expm1f(x * input_scale) * (alpha * scale)"


def _hardtanh(values: Values, texts: Texts) -> str:
    return "minimumf(maximumf(x, lower), upper)"


def _rrelu(values: Values, texts: Texts) -> str:
    """The slope is the middle of its range, formed here where both ends are constants."""
    lower, upper = values["lower"], values["upper"]
    if isinstance(lower, int | float) and isinstance(upper, int | float):
        return f"x > 0.0f ? x : x * {float_literal((lower + upper) / 2)}"
    return "x > 0.0f ? x : x * ((lower + upper) * 0.5f)"


def _evaluates(values: Values) -> bool:
    return values["training"] is False


ROWS = (
    # A zero of either sign gives +0 and a NaN stays, as fmaxf with a NaN check would.
    Op("relu", "x", "x <= 0.0f ? 0.0f : x"),
    Op("relu6", "x", "minimumf(x <= 0.0f ? 0.0f : x, 6.0f)"),
    Op("leaky_relu", "x negative_slope", "x > 0.0f ? x : x * negative_slope",
       attrs={"negative_slope": 0.01}),
    Op("rrelu", "x lower upper training generator", _rrelu, accepts=_evaluates,
       refusal="draws random numbers in training",
       attrs={"lower": 0.1, "upper": 0.4, "training": False}),
    Op("prelu", "x weight", "x > 0.0f ? x : weight * x", channel=("weight",), same=("weight",)),
    Op("threshold", "x threshold value", "x <= threshold ? value : x",
       attrs={"threshold": 0.5, "value": -2.0}),
    Op("hardtanh", "x lower upper", _hardtanh,
       attrs={"lower": -1.5, "upper": 2.0}),
    Op("elu", "x alpha scale input_scale", _elu,
       attrs={"alpha": 1.3, "scale": 1.1, "input_scale": 0.9}),
    Op("celu", "x alpha", "x > 0.0f ? x : alpha * expm1f(x / alpha)",
       attrs={"alpha": 1.3}),
    Op("selu", "x", "eluf(x, 1.67326319f, 1.05070102f)"),
    Op("sigmoid", "x", "sigmoidf(x)"),
    Op("log_sigmoid", "x", "minimumf(x, 0.0f) - log1p_unitf(expf(-fabsf(x)))"),
    Op("silu", "x", "siluf(x)"),
    Op("mish", "x", "mishf(x)"),
    Op("softplus", "x beta threshold", "softplusf(x, beta, threshold)",
       attrs={"beta": 1.5, "threshold": 20.0}),
    Op("gelu", "x approximate", _gelu, attrs={"approximate": "none"}),
    Op("hardsigmoid", "x", "minimumf(maximumf(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f)"),
    Op("hardswish", "x", "x * (minimumf(maximumf(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))"),
    Op("softshrink", "x lambda", "softshrinkf(x, lambda)",
       attrs={"lambda": 0.5}),
    Op("hardshrink", "x lambda", "x >= -lambda && x <= lambda ? 0.0f : x", attrs={"lambda": 0.5}),
)  # fmt: skip
