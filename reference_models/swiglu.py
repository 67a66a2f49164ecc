import torch
from torch import nn


class Model(nn.Module):
    """The gate of SwiGLU: y = silu(a) * b, where a and b are the halves of x.

    x: [rows, 2 * cols]; y: [rows, cols].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return nn.functional.silu(a) * b


rows = 16384
cols = 8192


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows, 2 * cols)]


def get_init_inputs() -> list:
    return []
