"""Products with their epilogues, run end to end on the CPU: every kernel of a product as it stands,
but for the instructions of tensor cores, copy engine and barriers, which cpu_runtime/hopper.h does.

Values are judged as on a GPU: at most twice PyTorch's own error against float64. What this cannot
show: what the hardware does otherwise than its description, time, and memory that asynchronous
copies reach late.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import contracted
import cpu
import multiplied
import pytest
import torch
from contracted import CASES, made
from multiplied import Models, groups, loading
from torch import Tensor, nn

from modelnew.measure.nested import cast
from modelnew.render import Options

# Those that run in half types as well.
HALF = ("linear", "raw")

# Faults planted in two copies of "bare", each in two kernels: (text, its replacement), and the form
# that shows it.
MISTAKES: Mapping[str, tuple[int, tuple[str, str], str]] = {
    "product": (0, ("if (stage == kStages) stage = 0, parity ^= 1;", "stage %= kStages;"), "packs"),
    "narrow": (0, ("made.hi[s][h * 2 + kRow] =", "made.hi[s][h * 2] ="), "few rows"),
    "add_parts": (1, ("part * count + i", "(part > 1) * count + i"), "parts"),
    "exact": (1, ("const int m = threadIdx.x / 16 * 4,", "const int m = threadIdx.x / 32 * 8,"),
              "special"),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> Mapping[str, str]:
    # Of half types, for which the pointwise kernels alone are there, one case is enough.
    found = {
        name: made(name, Options().dtypes if name in HALF else ("float32",)).for_small
        for name in CASES
    }
    for number, change, _ in MISTAKES.values():
        text = found.setdefault(f"mistakes {number}", found["bare"])
        assert change[0] in text
        found[f"mistakes {number}"] = text.replace(*change)
    found["a small workspace"] = found["bare"].replace(
        "return arena.used;", "return arena.used - 1024;"
    )
    assert found["a small workspace"] != found["bare"]
    return found


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("solutions_on_cpu")


@pytest.fixture(scope="module")
def extension(texts: Mapping[str, str], cache: Path) -> Path:
    return cpu.build(groups(texts), cache, brief={1, 2, 3})


@pytest.fixture(scope="module")
def models(texts: Mapping[str, str], cache: Path, extension: Path) -> Models:
    return loading(texts, cache, extension)


def judge(name: str, mine: nn.Module, inputs: Sequence[Any]) -> None:
    multiplied.judge(made(name), mine, inputs)


# --- epilogues -----------------------------------------------------------------------------------


# Ragged, in whole packs, and of several tiles.
@pytest.mark.parametrize("sizes", [(37, 69, 53), (140, 172, 156)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_epilogue(name: str, sizes: tuple[int, int, int], models: Models) -> None:
    judge(name, models(name), contracted.inputs(name, *sizes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_other_dtypes(name: str, dtype: torch.dtype, models: Models) -> None:
    """Those are PyTorch's product, with the kernel behind it."""
    inputs = cast(contracted.inputs(name, 37, 69, 53), dtype)
    judge(name, copy.deepcopy(models(name)).to(dtype), inputs)


@torch.no_grad()
def test_training(models: Models) -> None:
    """The dropout between a product and what follows draws what PyTorch draws."""
    mine, theirs = models("modes").train(), made("modes").ref.namespace["Model"]().train()
    inputs = contracted.inputs("modes", 37, 69, 53)
    found = []
    for model in (mine, theirs):
        torch.manual_seed(3)
        found.append(model(*inputs))
    torch.testing.assert_close(*found)
    assert (found[0] == 0).float().mean() > 0.4


# --- forms ---------------------------------------------------------------------------------------


def sized(rows: int, k: int, columns: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(rows, k), torch.randn(k, columns)]


def turned(*which: int, of: tuple[int, int, int]) -> Callable[[], list[Tensor]]:
    """With operands whose rows lie where columns would."""

    def draw() -> list[Tensor]:
        return [x.T.contiguous().T if i in which else x for i, x in enumerate(sized(*of)())]

    return draw


def special() -> list[Tensor]:
    """Rows and columns that pairs of halves do not hold, beside some that they do."""
    x, w = sized(150, 64, 300)()
    x[3, 5], x[20, 7], x[40, 8] = math.inf, math.nan, -math.inf
    x[50] = 0
    x[60] = 1e-41
    x[70, ::2] *= 2.0**-30
    x[80, ::3] *= 2.0**40
    w[9, 130], w[11, 250] = math.inf, math.nan
    w[:, 70] = 0
    w[::2, 90] *= 2.0**-25
    return [x, w]


# Of k below 256 every product splits both operands; of more, the longer one on its way in, where it
# lies so that the copy engine can bring it.
FORMS: Mapping[str, Callable[[], list[Tensor]]] = {
    "odd": sized(140, 193, 267),
    "packs": turned(1, of=(140, 193, 268)),
    "both across": turned(0, of=(142, 66, 266)),
    "few rows": turned(1, of=(20, 256, 140)),
    "few rows, across": sized(20, 260, 140),
    "more rows": turned(1, of=(150, 256, 261)),
    "more rows, across": sized(150, 258, 264),
    "few columns": sized(140, 264, 20),
    "few columns, across": turned(0, of=(140, 257, 21)),
    "more columns": turned(1, of=(264, 256, 150)),
    "few, odd": sized(17, 70, 19),
    "small": sized(1, 1, 1),
    "parts": sized(20, 1200, 40),
    "parts, odd": turned(1, of=(21, 1201, 41)),
    "parts across": turned(0, of=(21, 1090, 41)),
    "clusters": turned(0, of=(36, 2100, 40)),
    "offset": lambda: [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
                       for x in sized(40, 300, 48)()],
    "steps": lambda: [torch.randn(40, 128)[:, ::2], torch.randn(64, 96)[:, ::2]],
    "window": lambda: [torch.randn(40, 300)[:, 4:268], torch.randn(264, 72)[:, 8:56]],
    "the same row": lambda: [torch.randn(1, 264).expand(140, 264), torch.randn(264, 20)],
    "the same k": lambda: [torch.randn(140, 1).expand(140, 264), torch.randn(264, 20)],
    "overlapping": lambda: [torch.randn(900).as_strided((140, 264), (4, 1)), torch.randn(264, 20)],
    "special": special,
    "special, long": lambda: [special()[0].repeat(1, 4), special()[1].repeat(4, 1)[:, 60:99]],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str, models: Models) -> None:
    torch.manual_seed(2)
    judge("bare", models("bare"), FORMS[form]())


@pytest.mark.parametrize("shape", [(3, 20, 260, 36), (2, 20, 1100, 36), (2, 133, 67, 129)])
def test_batches(shape: tuple[int, int, int, int], models: Models) -> None:
    batches, rows, k, columns = shape
    torch.manual_seed(2)
    a, b = torch.randn(batches, rows, k), torch.randn(batches, k, columns)
    judge("batches", models("batches"), [torch.rand(rows, columns) > 0.5, a, b])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_seen(mistake: str, models: Models) -> None:
    number, _, form = MISTAKES[mistake]
    torch.manual_seed(2)
    with pytest.raises((AssertionError, RuntimeError)):
        judge("bare", models(f"mistakes {number}"), FORMS[form]())


def test_addresses(texts: Mapping[str, str], cache: Path) -> None:
    """Under AddressSanitizer nothing is read or written outside operands, results and workspace."""
    script = """
for n, k, m, rows in [(37, 67, 41, 0), (20, 257, 36, 1), (140, 258, 19, 0), (20, 1090, 40, 1)]:
    w = torch.randn(m, k).T if rows else torch.randn(k, m)
    x = torch.randn(n, k)
    x[3, 5] = float("inf")
    models[0](x, w)
print("clean", flush=True)
models[1](x, w)
print("not seen")
"""
    (right,), (wrong,), *_ = groups(texts)
    extension = cpu.build(groups(texts), cache, address={0, 1}, brief={0, 1, 2, 3})
    cpu.check_addresses(script, extension, [right, wrong])
