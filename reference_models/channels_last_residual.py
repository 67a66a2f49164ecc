import torch
from torch import nn


class Model(nn.Module):
    """A residual in another memory layout: y = relu(x) + residual.

    x and y: [batch_size, channels, height, width] in channels_last; residual: the same, contiguous.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + residual


batch_size = 64
channels = 128
height = 112
width = 112


def get_inputs() -> list[torch.Tensor]:
    shape = (batch_size, channels, height, width)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    return [x, torch.randn(shape)]


def get_init_inputs() -> list:
    return []
