import torch
from torch import nn


class Model(nn.Module):
    """Attention weights of a linear recurrence: exp(a_i - b_j) at and below the diagonal, else 0.

    a and b: [heads, length]; y: [heads, length, length].
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tril(torch.exp(a.unsqueeze(-1) - b.unsqueeze(-2)))


heads = 64
length = 2048


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(heads, length) - 1.0, torch.rand(heads, length)]


def get_init_inputs() -> list:
    return []
