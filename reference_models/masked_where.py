import torch
from torch import nn


class Model(nn.Module):
    """Scale where the mask holds, a constant elsewhere: y = x * scale if mask else fill.

    x and y: [rows, cols]; mask: [rows, cols], bool.
    """

    def __init__(self, scale: float = 0.7, fill: float = -10000.0) -> None:
        super().__init__()
        self.scale = scale
        self.fill = fill

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x * self.scale, self.fill)


rows = 16384
cols = 8192
scale = 0.7
fill = -10000.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows, cols), torch.rand(rows, cols) > 0.5]


def get_init_inputs() -> list[float]:
    return [scale, fill]
