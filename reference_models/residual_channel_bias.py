import torch
from torch import nn


class Model(nn.Module):
    """Bias a channel, ReLU, and a scaled residual: y = relu(x + bias) + scale * residual.

    x, residual and y: [batch_size, channels, height, width] (NCHW);
    bias: [channels, 1, 1].
    """

    def __init__(self, channels: int, scale: float = 0.3) -> None:
        super().__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bias) + residual * self.scale


batch_size = 64
channels = 128
height = 112
width = 112
scale = 0.3


def get_inputs() -> list[torch.Tensor]:
    shape = (batch_size, channels, height, width)
    return [torch.randn(shape), torch.randn(shape)]


def get_init_inputs() -> list:
    return [channels, scale]
