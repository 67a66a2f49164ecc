import torch
from torch import nn


class Model(nn.Module):
    """SiLU and a border of zeros: y = pad(silu(x)).

    x: [batch_size, channels, height, width]; y: one more row and column on each side.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(nn.functional.silu(x), (1, 1, 1, 1))


batch_size = 64
channels = 128
height = 112
width = 112


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, channels, height, width)]


def get_init_inputs() -> list:
    return []
