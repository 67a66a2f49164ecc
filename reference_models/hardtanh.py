import torch
from torch import nn


class Model(nn.Module):
    """Hard tanh: y = min(max(x, min_val), max_val), elementwise.

    x and y: [batch_size, dim].
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__()
        self.min_val = min_val
        self.max_val = max_val

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.hardtanh(x, min_val=self.min_val, max_val=self.max_val)


batch_size = 4096
dim = 393216
min_val = -1.0
max_val = 1.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, dim)]


def get_init_inputs() -> list[float]:
    return [min_val, max_val]
