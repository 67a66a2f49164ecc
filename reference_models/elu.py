import torch
from torch import nn


class Model(nn.Module):
    """ELU: y = x where x > 0, else alpha * (exp(x) - 1), elementwise.

    x and y: [batch_size, dim].
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.elu(x, alpha=self.alpha)


batch_size = 4096
dim = 393216
alpha = 1.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, dim)]


def get_init_inputs() -> list[float]:
    return [alpha]
