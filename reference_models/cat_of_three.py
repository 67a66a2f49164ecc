import torch
from torch import nn


class Model(nn.Module):
    """Three branches next to each other: y = [relu(a), b * scale, c] along the columns.

    a, b and c: [rows, cols]; y: [rows, 3 * cols].
    """

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(a), b * self.scale, c], dim=1)


rows = 16384
cols = 4096


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows, cols) for _ in range(3)]


def get_init_inputs() -> list:
    return []
