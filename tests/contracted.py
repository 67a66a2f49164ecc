"""References with products that are large enough for kernels of their own, and their solutions.

Each has one or a few products; together they have every kind of epilogue. What is multiplied comes
as an argument, so that a solution that is rendered for 1024 rows also takes few: see `for_small`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from references import reference_text
from torch import Tensor

from modelnew import invariants, ir
from modelnew.plan import plan
from modelnew.reference import Reference, load
from modelnew.render import Options, render
from modelnew.trace import trace

# By name: the text that draws an argument. A product is of [n, k] by [k, m].
GIVEN: Mapping[str, str] = {
    "x": "torch.randn(n, k)",
    "w": "torch.randn(k, m)",
    "v": "torch.randn(m, k)",
    "y": "torch.randn(n, m)",
    "row": "torch.randn(m)",
    "column": "torch.randn(n, 1)",
    "mask": "torch.rand(n, m) > 0.5",
    "half": "torch.randn(n, m).half()",
    "a": "torch.randn(2, n, k)",
    "b": "torch.randn(2, k, m)",
    "z": "torch.randn(2, n, m)",
    "square": "torch.randn(n, n)",
    "other": "torch.randn(n, n)",
}


def names_in(body: str, given: Iterable[str]) -> list[str]:
    return [name for name in given if re.search(rf"\b{name}\b", body)]


def forward_text(body: str, names: Iterable[str]) -> str:
    """A forward of statements, or of one expression."""
    lines = body if "return " in body else f"return {body}"
    indented = "\n".join(f"    {line.strip()}" for line in lines.strip().splitlines())
    return f"def forward(self, {', '.join(names)}):\n{indented}"


@dataclass(frozen=True)
class Case:
    """A forward of some of GIVEN, and how many product kernels and epilogues its file has."""

    body: str
    kernels: int
    epilogues: int
    init: str = ""
    dtype: str = "float32"
    n: int = 1024

    @property
    def names(self) -> list[str]:
        return names_in(self.body, GIVEN)

    @property
    def text(self) -> str:
        drawn = ", ".join(map(self.drawn, self.names))
        return (
            reference_text(forward_text(self.body, self.names), drawn, self.init, self.n)
            + "k, m = n + 32, n + 16\n"
        )

    def drawn(self, name: str) -> str:
        """The text that draws an argument."""
        text = GIVEN[name]
        whole = self.dtype == "float32" or not text.endswith(")") or name == "half"
        return text if whole else f"{text}.to(torch.{self.dtype})"


CASES: Mapping[str, Case] = {
    "bare": Case("torch.mm(x, w)", 1, 1),
    "linear": Case(
        "F.gelu(F.linear(x, v, row)) * self.scale + y", 1, 1, "self.scale = 0.75"
    ),
    "equal": Case("h = F.relu(square @ other)\nreturn F.relu(h @ other)", 2, 1),
    "number": Case("(x @ w) * mask * column + row", 1, 2),
    "half": Case("half + (x @ w) * 2", 1, 2),
    "outputs": Case("""
        p = torch.addmm(row, x, w, beta=2, alpha=0.5)
        return p, p > row, torch.where(p > 0, p, y), p.masked_fill(mask, float('-inf'))
    """, 1, 1),
    "batches": Case("torch.tril(torch.bmm(a, b), 3).masked_fill(mask, -1.0)", 1, 1),
    "raw": Case("""
        p = torch.einsum('bij,jk->bik', a, w)
        return p, torch.sigmoid(p)
    """, 1, 1),
    "moved": Case("torch.triu(x @ w + y.roll(1, 0) + column.flip(0), -5)", 1, 1),
    "modes": Case("F.dropout(x @ w + 1, 0.5, self.training).relu()", 2, 2),
}  # fmt: skip

# Of half types, in which products are worth kernels from another size on, and where lines do not
# begin at multiples of 16 bytes.
HALVES: Mapping[str, Case] = {
    "half bare": Case("torch.mm(x, w)", 1, 2, dtype="float16", n=4099),
    "half linear": Case("F.gelu(F.linear(x, v, row)) * self.scale + y", 1, 2, "self.scale = 0.75",
                        "bfloat16", 4099),
    "half number": Case("(x @ w) * mask * column + row", 1, 4, dtype="float16", n=4099),
    "half batches": Case("torch.tril(torch.bmm(a, b), 3).masked_fill(mask, -1.0)", 1, 2,
                         dtype="bfloat16", n=4099),
    "half raw": Case("p = torch.einsum('bij,jk->bik', a, w)\nreturn p, torch.sigmoid(p)", 1, 2,
                     dtype="float16", n=4099),
    "both kinds": Case("F.relu(x @ w), F.relu(half @ half.mT)", 2, 3, n=4099),
}  # fmt: skip
EVERY = {**CASES, **HALVES}


@dataclass(frozen=True)
class Made:
    """A reference with its plan and its solution's text."""

    ref: Reference
    plan: ir.Plan
    text: str

    @property
    def for_small(self) -> str:
        """With products of every size by its own kernels, and no checks of sizes, which are those
        that the graph was traced for where something might broadcast."""
        pattern = r"^(bool \w+_pays\([^{]*\) \{\n)(?:    .*\n)+"
        text, count = re.subn(pattern, r"\1    return true;\n", self.text, flags=re.MULTILINE)
        assert count >= 1, "the text does not say which products its kernels take"
        return re.sub(r"^ +_check\(.*\n", "", text, flags=re.MULTILINE)


@cache
def made(name: str, dtypes: Sequence[str] = Options().dtypes) -> Made:
    return made_of(name, EVERY[name].text, dtypes)


def made_of(name: str, text: str, dtypes: Sequence[str]) -> Made:
    """What is made of a reference with this text."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        ref = load(path)
        found = plan(trace(ref))
        invariants.check_plan(found)
        return Made(ref, found, render(ref, found, Options(tuple(dtypes))))


def inputs(name: str, n: int, k: int, m: int) -> list[Tensor]:
    """Those of get_inputs with other sizes, always the same."""
    case = EVERY[name]
    return drawn(map(case.drawn, case.names), n, k, m)


def drawn(texts: Iterable[str], n: int, k: int, m: int) -> list[Tensor]:
    """What the texts of arguments draw, always the same."""
    torch.manual_seed(1)
    space = {"torch": torch, "n": n, "k": k, "m": m}
    return [eval(text, space) for text in texts]
