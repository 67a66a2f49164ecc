import torch
from torch import nn


class Model(nn.Module):
    """A bias a channel and a SiLU over images in channels_last: y = silu(x + bias).

    x and y: [batch_size, channels, height, width] in channels_last; bias: [channels, 1, 1].
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x + self.bias)


batch_size = 64
channels = 128
height = 112
width = 112


def get_inputs() -> list[torch.Tensor]:
    x = torch.randn(batch_size, channels, height, width)
    return [x.contiguous(memory_format=torch.channels_last)]


def get_init_inputs() -> list:
    return [channels]
