"""Operators with operands that hold one value a channel or a row."""

from __future__ import annotations

from modelnew.ops import Op, Texts, Values


def _batch_norm(values: Values, texts: Texts) -> str:
    """batch_norm_transform_input_kernel of aten/src/ATen/native/cuda/Normalization.cuh; without a
    bias it adds 0, which gives a zero its sign."""
    weight = "weight * " if "weight" in texts else ""
    return f"{weight}(x - mean) * rsqrtf(var + eps) + {'bias' if 'bias' in texts else '0.0f'}"


def _normalized(values: Values, texts: Texts) -> str:
    """layer_norm_kernel.cu and group_norm_kernel.cu of aten/src/ATen/native/cuda where the
    statistics are known."""
    weight = " * weight" if "weight" in texts else ""
    bias = " + bias" if "bias" in texts else ""
    return f"(x - mean) * rsqrtf(var + eps){weight}{bias}"


def _part(name: str, *, channel: tuple[str, ...] = (), same: tuple[str, ...] = ()) -> Op:
    """What is left of a normalization; see modelnew/statistics.py."""
    return Op(name, "x mean var weight bias eps", _normalized, channel=channel, same=same,
              single=("mean", "var"), dense_result=True)  # fmt: skip


def _uses_running_statistics(values: Values) -> bool:
    return values["training"] is False and values["mean"] is not None and values["var"] is not None


ROWS = (
    Op("batch_norm", "x weight bias mean var training momentum eps cudnn", _batch_norm,
       channel=("weight", "bias", "mean", "var"), accepts=_uses_running_statistics,
       refusal="needs the statistics of the batch", domain=(0.0, 20.0),
       attrs={"training": False, "momentum": 0.1, "eps": 1e-3, "cudnn": False}),
    # The bias of a convolution; `plan` takes it out of the call where a kernel follows.
    # A value in another memory layout; see modelnew/layout.py.
    Op("as_contiguous", "x", "x"),
    Op("as_channels_last", "x", "x"),
    _part("group_normalized", channel=("weight", "bias")),
    _part("instance_normalized", channel=("weight", "bias")),
    _part("layer_normalized", same=("weight", "bias")),
    Op("channel_bias", "x b", "x + b", channel=("b",), formula="x + b"),
)  # fmt: skip
