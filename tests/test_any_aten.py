"""Whatever ATen has: models of calls that no kernel replaces, interpreted against the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from torch.utils._pytree import tree_leaves, tree_structure

from modelnew.interpret import interpret
from modelnew.pipeline import generate
from modelnew.render import Options

X = "torch.randn(4, 6, n)"

# forward's body, get_inputs, __init__
MODELS = {
    "conv1d": ("return self.m(x)", X, "self.m = nn.Conv1d(6, 4, 3, padding='same')"),
    "conv transpose": (
        "return self.m(x)",
        "torch.randn(2, 6, 5, n)",
        "self.m = nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2)",
    ),
    "conv3d": (
        "return self.m(x)", "torch.randn(2, 4, 5, 5, n)", "self.m = nn.Conv3d(4, 2, 3, dilation=2)",
    ),
    "unbatched": ("return self.m(x)", "torch.randn(6, 5, n)", "self.m = nn.Conv2d(6, 4, 3)"),
    "padding mode": (
        "return self.m(x)",
        "torch.randn(2, 6, 5, n)",
        "self.m = nn.Conv2d(6, 4, 3, padding=1, padding_mode='circular')",
    ),
    "einsum": ("return torch.einsum('bij,bkj->bik', x, x)", X, ""),
    "matmul": ("return x @ x.transpose(1, 2), torch.bmm(x, x.mT), torch.mv(x[0], x[1, 0])", X, ""),
    "attention": (
        "return F.scaled_dot_product_attention(x, x, x, is_causal=True)",
        "torch.randn(2, 3, 5, n)",
        "",
    ),
    "attention with dropout": (
        "return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)",
        "torch.randn(2, 3, 5, n)",
        "",
    ),
    "multihead": (
        "return self.m(x, x, x)", "torch.randn(5, 4, 8)", "self.m = nn.MultiheadAttention(8, 2)",
    ),
    "encoder": (
        "return self.m(x)",
        "torch.randn(5, 4, 8)",
        "layer = nn.TransformerEncoderLayer(8, 2, 16)\n"
        "self.m = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)",
    ),
    "lstm": (
        "y, (h, c) = self.m(x)\nreturn {'y': y, 'state': [h, c]}",
        X,
        "self.m = nn.LSTM(n, 5, 2, batch_first=True, dropout=0.5)",
    ),
    "lstm with projections": (
        "return self.m(x)", X, "self.m = nn.LSTM(n, 5, bidirectional=True, proj_size=3)",
    ),
    "gru": ("return self.m(x)", X, "self.m = nn.GRU(n, 5, bidirectional=True)"),
    "rnn": (
        "return self.m(x, h)",
        f"{X}, torch.randn(1, 6, 5)",
        "self.m = nn.RNN(n, 5, nonlinearity='relu')",
    ),
    "lstm cell": ("return self.m(x[0])", X, "self.m = nn.LSTMCell(n, 5)"),
    "embedding": (
        "return self.m(torch.argsort(x[0, :, 0])), self.b(torch.argsort(x[0, :, 0])[None])",
        X,
        "self.m, self.b = nn.Embedding(6, 5), nn.EmbeddingBag(6, 5)",
    ),
    "sort and topk": ("return torch.sort(x, 1), torch.topk(x, 2).values, x.median(0)", X, ""),
    "index_put": (
        "y = x.clone()\ny[:, 1] = 0\ny[x > 1] = 2.0\n"
        "return y.index_put((torch.argmax(x, 0),), x[0], accumulate=True)",
        X,
        "",
    ),
    "scatter": (
        "i = torch.argsort(x, 1)\nreturn torch.zeros_like(x).scatter_add(1, i, x), x.gather(1, i)",
        X,
        "",
    ),
    "fft": ("return torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])", X, ""),
    "fold": (
        "return F.fold(F.unfold(x, 3), x.shape[2:], 3)", "torch.randn(2, 3, 6, n)", "",
    ),
    "interpolate": (
        "return F.interpolate(x, scale_factor=2), F.pixel_shuffle(x, 2)",
        "torch.randn(2, 4, 6, n)",
        "",
    ),
    "grid": (
        "grid = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), x.shape, align_corners=False)\n"
        "return F.grid_sample(x, grid, align_corners=False)",
        "torch.randn(2, 4, 6, n)",
        "",
    ),
    "pooling": (
        "return F.max_pool2d(x, 2, return_indices=True), F.lp_pool2d(x, 2, 2), "
        "F.adaptive_max_pool2d(x, 3)",
        "torch.randn(2, 4, 6, n)",
        "",
    ),
    "losses": (
        "t = torch.argmax(x, 1)\nreturn F.cross_entropy(x, t), F.huber_loss(x, x * 2), "
        "F.triplet_margin_loss(x, x + 1, x - 1)",
        X,
        "",
    ),
    "norms": (
        "return self.a(x), self.b(x), F.instance_norm(x), F.normalize(x), "
        "F.local_response_norm(x, 2)",
        X,
        "self.a, self.b = nn.LayerNorm(n), nn.GroupNorm(2, 6)",
    ),
    "scans": (
        "return x.cumsum(1), x.flip(1).cumprod(1), torch.logcumsumexp(x, 2), x.cummax(0)",
        X,
        "",
    ),
    "linalg": (
        "return torch.linalg.solve(x[:, :6, :6] + 5 * torch.eye(6), x), torch.linalg.norm(x)",
        X,
        "",
    ),
    "random in order": (
        "a = F.dropout(x, 0.5)\nb = torch.rand_like(x)\nreturn a * b, torch.bernoulli(b), "
        "torch.randperm(6), torch.normal(x, 1.0), F.gumbel_softmax(x)",
        X,
        "",
    ),
    "in place on a view": (
        "y = x.clone()\n"
        "y[:, 0].mul_(2).add_(1)\n"
        "y.t_() if y.dim() == 2 else 0\n"
        "return y",
        X,
        "",
    ),
    "in place on an input's view": ("x[:, 0] += 1\nx.view(-1)[:3].zero_()\nreturn x * 2", X, ""),
    "half": ("return x.half().float(), x.to(torch.float64).sum(), x.bfloat16()", X, ""),
    "integers": ("return torch.argmax(x, 1) // 2 + 1, (x > 0).sum(), torch.arange(5) % 3", X, ""),
    "meshgrid": (
        "return torch.meshgrid(x[0, 0], x[0, 1], indexing='ij'), torch.linspace(0, 1, 5)",
        X,
        "",
    ),
    "split and stack": (
        "a, b = x.chunk(2, 1)\n"
        "return torch.stack([b, a]), x.unbind(1)[2], torch.cat([a, b], -1)",
        X,
        "",
    ),
    "optional": ("return None, x if h is None else h", X, ""),
    "complex": (
        "z = torch.view_as_complex(x[..., :2].contiguous())\n"
        "return z.abs(), torch.view_as_real(z * z)",
        X,
        "",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODELS)
def test_calls_give_what_the_model_gives(name: str, tmp_path: Path) -> None:
    forward, inputs, init = MODELS[name]
    arguments = "self, x, h=None" if name in ("rnn", "optional") else "self, x"
    body = "\n    ".join([f"def forward({arguments}):", *forward.splitlines()])
    text = references.reference_text(body, inputs, init or "self.n = n", n=9)
    path = tmp_path / "model.py"
    path.write_text(text)
    made = generate(path, {}, Options())
    namespace = references.namespace(text)
    torch.manual_seed(0)
    model = namespace["Model"]()

    def interpreted(x: torch.Tensor, *more: torch.Tensor) -> Any:
        return interpret(made.plan, model, {"x": x, "h": more[0] if more else None})

    for mode in (True, False):
        model.train(mode)
        given = namespace["get_inputs"]()
        results, states = [], []
        for run in (model, interpreted):
            torch.manual_seed(1)
            with torch.no_grad():
                results.append(run(*copy.deepcopy(given)))
            states.append(torch.random.get_rng_state())
        assert tree_structure(results[0]) == tree_structure(results[1])
        for theirs, mine in zip(*map(tree_leaves, results), strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs, equal_nan=True)
        assert torch.equal(*states), "random numbers are drawn in another order"
