import torch
from torch import nn


class Model(nn.Module):
    """A gate in half precision and a mask of bytes over float32: y = x * gate + mask.

    x and y: [rows, cols], float32; gate: [rows, cols], float16; mask: [rows, cols], int8.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, gate: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * gate + mask


rows = 16384
cols = 8192


def get_inputs() -> list[torch.Tensor]:
    mask = torch.randint(-1, 2, (rows, cols), dtype=torch.int8)
    return [torch.randn(rows, cols), torch.randn(rows, cols).half(), mask]


def get_init_inputs() -> list:
    return []
