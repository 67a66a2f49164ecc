import torch
from torch import nn


class Model(nn.Module):
    """Pairwise similarity of positions: y[i, j] = exp(-(a[i] - b[j])^2).

    a: [rows]; b: [cols]; y: [rows, cols].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-((a.unsqueeze(1) - b) ** 2))


rows = 32768
cols = 16384


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows), torch.randn(cols)]


def get_init_inputs() -> list:
    return []
