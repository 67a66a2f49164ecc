import torch
from torch import nn


class Model(nn.Module):
    """Diagonal matrix times matrix: C = diag(A) @ B, that is C[i, j] = A[i] * B[i, j].

    A: [rows], the diagonal; B and C: [rows, cols].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return A.unsqueeze(1) * B


rows = 4096
cols = 4096


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(rows), torch.randn(rows, cols)]


def get_init_inputs() -> list:
    return []
