import torch
from torch import nn


class Model(nn.Module):
    """Scale and shift a column, and a sigmoid: y = sigmoid(x * scale + shift).

    x and y: [rows, cols]; scale and shift: [cols].
    """

    def __init__(self, cols: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(cols))
        self.shift = nn.Parameter(torch.randn(cols))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * self.scale + self.shift)


rows = 16384
cols = 8192


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows, cols)]


def get_init_inputs() -> list:
    return [cols]
