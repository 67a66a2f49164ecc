import torch
from torch import nn


class Model(nn.Module):
    """Linear layer followed by a chain of activations, all of them elementwise.

    z = x @ weight^T + bias + add_value
    y = hardtanh(gelu(tanh(sigmoid(z) * z)), -1, 1), with the exact (erf) GELU

    x: [batch_size, in_features]; weight: [out_features, in_features];
    bias and add_value: [out_features]; y: [batch_size, out_features].
    """

    def __init__(
        self, in_features: int, out_features: int, add_value_shape: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.add_value = nn.Parameter(torch.randn(add_value_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = x + self.add_value
        x = torch.sigmoid(x) * x
        x = torch.tanh(x)
        x = nn.functional.gelu(x)
        return nn.functional.hardtanh(x, min_val=-1, max_val=1)


batch_size = 1024
in_features = 8192
out_features = 8192


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, in_features)]


def get_init_inputs() -> list:
    return [in_features, out_features, (out_features,)]
