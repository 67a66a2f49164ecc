import torch
from torch import nn


class Model(nn.Module):
    """Clamp between a lower bound a column and an upper bound a row.

    y[i, j] = min(max(x[i, j], lower[j]), upper[i, 0])

    x and y: [rows, cols]; lower: [cols]; upper: [rows, 1].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, lower, upper)


rows = 16384
cols = 8192


def get_inputs() -> list[torch.Tensor]:
    # lower is in [-1.5, -0.5) and upper in [0.5, 1.5), so lower < upper everywhere.
    lower = torch.rand(cols) - 1.5
    upper = torch.rand(rows, 1) + 0.5
    return [torch.randn(rows, cols), lower, upper]


def get_init_inputs() -> list:
    return []
