import torch
from torch import nn


class Model(nn.Module):
    """A sum with a transposed operand: y = relu(x + z^T).

    x and y: [rows, cols]; z: [cols, rows].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + z.T)


rows = 16384
cols = 8192


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows, cols), torch.randn(cols, rows)]


def get_init_inputs() -> list:
    return []
