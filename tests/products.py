"""How fast and how exact products of generated files are, beside PyTorch's.

    python tests/products.py --json benchmarks/products.json    on a machine with a Hopper GPU

Files for `a @ b`, by kind, and one for a linear layer with GELU are generated and run at every
size. TF32 is left out where PyTorch multiplies the same way without. Times are medians of rounds in
which the candidates take turns, each for a while, so that the chip's clock is the one it holds;
nothing is kept between calls. Errors are relative Frobenius norms against float64. Beside the JSON
a table in Markdown is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from modelnew.pipeline import generate  # noqa: E402
from modelnew.render import Options  # noqa: E402

Call: TypeAlias = Callable[..., torch.Tensor]

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, {names}):
        return {formula}


def get_inputs():
    return [{drawn}]


def get_init_inputs():
    return []
"""
LAYER = "nn.functional.gelu(nn.functional.linear(a, b, c))"

# M, K, N and how the operands lie: T where neighbours in memory are of one k.
SIZES = [
    (1024, 8192, 8192, "NT"), (4096, 4096, 4096, "NN"), (4096, 4096, 4096, "NT"),
    (4096, 4096, 4096, "TN"), (4096, 4096, 4096, "TT"), (2048, 16384, 2048, "NT"),
    (1000, 8100, 8190, "NT"), (128, 8192, 8192, "NT"), (512, 8192, 8192, "NT"),
    (256, 524288, 256, "NN"),
]  # fmt: skip
BATCHED = (128, 512, 1024, 2048)
# Of float16, lines that do not begin at multiples of 16 bytes; and float32 by few columns.
RAGGED = [(1000, 8100, 8190, "NN"), (1000, 8100, 8190, "NT")]
THIN = [
    (2048, 1 << 20, 1, "NN"), (8192, 8192, 1, "NN"), (32768, 32768, 1, "TN"), (8192, 8192, 4, "NN"),
    (8192, 8192, 4, "TN"),
]  # fmt: skip
# What files are generated for.
SQUARE = "torch.rand(2048, 2048), torch.rand(2048, 2048)"
HALF = "torch.rand(4100, 4100).half(), torch.rand(4100, 4100).half()"


def by_few(columns: int) -> str:
    return f"torch.rand(8192, 8192), torch.rand(8192, {columns})"


def compiled(formula: str, names: str, drawn: str = SQUARE) -> Call:
    """The function that a file for the formula of such inputs calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.py"
        path.write_text(MODEL.format(formula=formula, names=names, drawn=drawn))
        solution = path.with_name(f"{path.stem}_new.py")
        solution.write_text(generate(path, {}, Options()).text)
        spec = importlib.util.spec_from_file_location(solution.stem, solution)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    (name,) = (name for name in dir(module._cuda) if name.endswith("_forward"))
    function: Call = getattr(module._cuda, name)
    return function


def timed(calls: Mapping[str, Call], seconds: float, rounds: int = 3) -> dict[str, float]:
    """Milliseconds a call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            count = max(3, int(seconds * 1000 / found[name][0])) if number else 3
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / count)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def with_tf32(call: Call) -> Call:
    def run() -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return run


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def laid(x: torch.Tensor, across: bool) -> torch.Tensor:
    return x.mT.contiguous().mT if across else x


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    """A row a size: what it is, milliseconds and errors by candidate."""
    product = compiled("a @ b", "a, b")
    layer = compiled(LAYER, "a, b, c", f"{SQUARE}, torch.rand(2048)")
    halves = compiled("a @ b", "a, b", HALF)
    thin = {columns: compiled("a @ b", "a, b", by_few(columns)) for columns in (1, 4)}
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    def row(
        name: str, a: torch.Tensor, b: torch.Tensor, ours: Call = product, tf32: bool = True
    ) -> dict[str, Any]:
        calls: dict[str, Call] = {"modelnew": lambda: ours(a, b), "PyTorch": lambda: a @ b}
        if tf32:
            calls["TF32"] = with_tf32(lambda: a @ b)
        truth = a.double() @ b.double()
        errors = {name: error(call(), truth) for name, call in calls.items()}
        del truth
        return {"product": name, "milliseconds": timed(calls, seconds), "errors": errors}

    m, k, n, _ = SIZES[0]
    x, weight, bias = draw(m, k), draw(n, k) / k**0.5, draw(n)
    calls = {
        "modelnew": lambda: layer(x, weight, bias),
        "PyTorch": lambda: F.gelu(F.linear(x, weight, bias)),
        "TF32": with_tf32(lambda: F.gelu(F.linear(x, weight, bias))),
    }
    truth = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    errors = {name: error(call(), truth) for name, call in calls.items()}
    name = f"{m} x {k} x {n}, bias and GELU"
    yield {"product": name, "milliseconds": timed(calls, seconds), "errors": errors}
    for m, k, n, layout in SIZES:
        a, b = draw(m, k), draw(n, k).mT / k**0.5
        a, b = laid(a, layout[0] == "T"), laid(b, layout[1] == "T")
        yield row(f"{m} x {k} x {n}, {layout}", a, b)
    batches, m, k, n = BATCHED
    yield row(f"{batches} times {m} x {k} x {n}, NN", draw(batches, m, k), draw(batches, k, n))
    for m, k, n, layout in RAGGED:
        a, b = draw(m, k).half(), laid((draw(k, n) / k**0.5).half(), layout[1] == "T")
        yield row(f"{m} x {k} x {n}, {layout}, float16", a, b, halves, tf32=False)
    for m, k, n, layout in THIN:
        a, b = laid(draw(m, k), layout[0] == "T"), draw(k, n) / k**0.5
        yield row(f"{m} x {k} x {n}, {layout}", a, b, thin[n], tf32=False)
        del a


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| product | ms | PyTorch | TF32 | times PyTorch | error | PyTorch | TF32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        times, errors = row["milliseconds"], row["errors"]
        names = ("modelnew", "PyTorch", "TF32")
        cells = [row["product"], *(f"{times[n]:.3f}" if n in times else "" for n in names)]
        cells += [f"{times['PyTorch'] / times['modelnew']:.2f}"]
        cells += [f"{errors[n]:.1e}" if n in errors else "" for n in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each candidate a round")
    given = parser.parse_args()
    found = []
    for row in rows(given.seconds):
        found.append(row)
        print(json.dumps(row), flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
             "cuda": torch.version.cuda, "rows": found}  # fmt: skip
    given.json.write_text(json.dumps(about, indent=1) + "\n")
    given.json.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
