import torch
from torch import nn


class Model(nn.Module):
    """Leaky ReLU: y = x where x > 0, else negative_slope * x, elementwise.

    x and y: [batch_size, dim].
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(x, negative_slope=self.negative_slope)


batch_size = 4096
dim = 393216


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, dim)]


def get_init_inputs() -> list[float]:
    return []
