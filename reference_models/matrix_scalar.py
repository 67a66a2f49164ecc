import torch
from torch import nn


class Model(nn.Module):
    """Matrix times scalar: C = A * s, elementwise.

    A and C: [rows, cols]; s: a Python float, given at each call.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, A: torch.Tensor, s: float) -> torch.Tensor:
        return A * s


rows = 65536
cols = 16384
s = 3.14


def get_inputs() -> list:
    return [torch.randn(rows, cols), s]


def get_init_inputs() -> list:
    return []
