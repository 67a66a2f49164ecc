import torch
from torch import nn


class Model(nn.Module):
    """Divide each row by its own number: y[i, j] = x[i, j] / (norm[i] + 1).

    x and y: [rows, cols]; norm: [rows, 1].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return x / (norm + 1.0)


rows = 16384
cols = 8192


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows, cols), torch.rand(rows, 1)]


def get_init_inputs() -> list:
    return []
