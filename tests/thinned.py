"""References with products of which one side has few rows or columns, and their solutions.

What is multiplied comes as an argument, so that a solution that is rendered for large operands also
takes small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from contracted import Made, drawn, forward_text, made_of, names_in
from references import reference_text
from torch import Tensor

from modelnew.render import Options

# By name: the text that draws an argument, of n rows and of few, m.
GIVEN: Mapping[str, str] = {
    "x": "torch.randn(n, k)",
    "xs": "torch.randn(2, n, k)",
    "u": "torch.randn(k)",
    "w": "torch.randn(k, m)",
    "ws": "torch.randn(2, k, m)",
    "few": "torch.randn(m, k)",
    "fews": "torch.randn(2, m, k)",
    "wide": "torch.randn(k, n)",
    "wides": "torch.randn(2, k, n)",
    "v": "torch.randn(n, k)",
    "row": "torch.randn(m)",
    "long": "torch.randn(n)",
    "column": "torch.randn(n, 1)",
    "y": "torch.randn(m, n)",
    "z": "torch.randn(2, m, n)",
    "mask": "torch.rand(n, m) > 0.5",
    "half": "torch.randn(n, m).half()",
}


@dataclass(frozen=True)
class Case:
    """A forward of some of GIVEN, the m that it is rendered for, and the width of its kernels."""

    body: str
    m: int
    width: int
    init: str = ""

    @property
    def names(self) -> list[str]:
        return names_in(self.body, GIVEN)

    @property
    def text(self) -> str:
        given = ", ".join(GIVEN[name] for name in self.names)
        return (
            reference_text(forward_text(self.body, self.names), given, self.init, 4096)
            + f"k, m = n + 32, {self.m}\n"
        )


CASES: Mapping[str, Case] = {
    "bare": Case("x @ w", 3, 4),
    "mv": Case("torch.mv(x, u)", 1, 1),
    "vector first": Case("(u @ wide).relu()", 1, 1),
    "vector of batches": Case("u @ wides + 1", 1, 1),
    "batches by a vector": Case("(xs @ u) * 2", 1, 1),
    "linear": Case("F.gelu(F.linear(few, v, long)) * self.scale + y", 3, 4, "self.scale = 0.75"),
    "linear of a vector": Case("torch.tanh(F.linear(u, v, long))", 1, 1),
    "addmv": Case("torch.addmv(long, x, u, beta=2, alpha=0.5).relu()", 1, 1),
    "addmm": Case("torch.addmm(row, x, w).sigmoid()", 4, 4),
    "bmm": Case("torch.bmm(fews, wides) + z", 2, 2),
    "baddbmm": Case("torch.baddbmm(row, xs, ws, alpha=0.5)", 4, 4),
    "half": Case("half + (x @ w) * 2", 2, 2),
    "outputs": Case("""
        p = x @ w
        return p, p > row, torch.where(p > 0, p, column), p.masked_fill(mask, float('-inf'))
    """, 2, 2),
    "two": Case("h = torch.relu(few @ wide)\nreturn h @ v, few @ wide * column.T", 3, 4),
}  # fmt: skip


@cache
def made(name: str, dtypes: Sequence[str] = Options().dtypes) -> Made:
    return made_of(name, CASES[name].text, dtypes)


def inputs(name: str, n: int, k: int, m: int) -> list[Tensor]:
    """Those of get_inputs with other sizes, always the same."""
    return drawn((GIVEN[given] for given in CASES[name].names), n, k, m)
