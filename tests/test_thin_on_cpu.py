"""Products of which one side has few rows or columns, with their epilogues, run end to end on the
CPU: every kernel as it stands.

Values are judged as on a GPU: at most twice PyTorch's own error against float64. What this cannot
show: time, and threads that meet in memory at one moment.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu
import multiplied
import pytest
import thinned
import torch
from multiplied import Models, groups, loading
from thinned import CASES, made
from torch import Tensor, nn

from modelnew.measure.nested import cast, tensors
from modelnew.render import Options

# Those that are called with half types as well, which PyTorch multiplies.
HALF = ("bare", "linear", "mv")

# Faults planted in copies of "bare": (text, its replacement), and the form that shows it.
MISTAKES: Mapping[str, tuple[tuple[str, str], str]] = {
    "a chunk that is overwritten": (
        ("if (from > 0) __syncthreads();", ""), "chunks"
    ),
    "a tail that is taken for whole": (
        ("if (k + u * step >= n) break;", ""), "odd"
    ),
    "a k that is taken twice": (
        ("if (k + u * groups >= n) break;", ""), "across"
    ),
    "rows beyond the last": (
        ("at.row + lane * kVec, p.large.rows - kVec", "at.row + lane * kVec, p.large.rows - 1"),
        "across",
    ),
    "a part that is left out": (("part = first;", "part = first + 1;"), "parts"),
    "a part of the thin side": (
        ("batch * p.small.batch_stride + k * p.small.k_stride",
         "batch * p.small.batch_stride"), "parts across"
    ),
    "a sum of one warp": (("w < warps; ++w", "w < 1; ++w"), "few rows"),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> Mapping[str, str]:
    found = {
        name: made(name, Options().dtypes if name in HALF else ("float32",)).for_small
        for name in CASES
    }
    bare = made("bare", ("float32",)).for_small
    for name, (change, _) in MISTAKES.items():
        assert change[0] in bare
        found[name] = bare.replace(*change)
    found["a small workspace"] = bare.replace(
        "count * p.parts * sizeof(float)", "count * (p.parts - 1) * sizeof(float)"
    )
    assert found["a small workspace"] != bare
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


@torch.no_grad()
def judge(name: str, mine: nn.Module, inputs: Sequence[Any]) -> None:
    """That a solution gives what its reference does, and the same again."""
    multiplied.judge(made(name), mine, inputs)
    for y, again in zip(tensors(mine(*inputs)), tensors(mine(*inputs)), strict=True):
        assert torch.equal(y.nan_to_num(), again.nan_to_num())


# --- epilogues -----------------------------------------------------------------------------------


# Ragged, in whole packs, and of several tiles; as many rows of the thin side as there may be, and
# fewer.
@pytest.mark.parametrize("sizes", [(37, 69, 0), (140, 172, 1), (264, 1056, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_epilogue(name: str, sizes: tuple[int, int, int], models: Models) -> None:
    n, k, less = sizes
    m = max(1, (CASES[name].m if less else CASES[name].width) - less)
    judge(name, models(name), thinned.inputs(name, n, k, min(m, 15)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(37, 69), (136, 1064)], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_other_dtypes(
    name: str, sizes: tuple[int, int], dtype: torch.dtype, models: Models
) -> None:
    inputs = cast(thinned.inputs(name, *sizes, CASES[name].m), dtype)
    judge(name, copy.deepcopy(models(name)).to(dtype), inputs)


def test_wider_than_traced(models: Models) -> None:
    """That is PyTorch's product."""
    judge("bare", models("bare"), [torch.randn(40, 50), torch.randn(50, 30)])
    judge("linear", models("linear"), thinned.inputs("linear", 40, 50, 9))


@torch.no_grad()
def test_promotion(models: Models) -> None:
    """Of half types beside float32, the reference multiplies in half and adds in float32."""
    few, v, long, y = thinned.inputs("linear", 40, 48, 5)
    few, v, long = (x.half() for x in (few, v, long))
    judge("linear", models("linear"), [few, v, long, y])


# --- forms ---------------------------------------------------------------------------------------


def sized(rows: int, k: int, columns: int = 3) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(rows, k), torch.randn(k, columns)]


def turned(*which: int, of: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    """With operands whose rows lie where columns would."""

    def draw() -> list[Tensor]:
        return [x.T.contiguous().T if i in which else x for i, x in enumerate(sized(*of)())]

    return draw


def special() -> list[Tensor]:
    x, w = sized(70, 260)()
    x[3, 5], x[20, 7], x[40, 8] = math.inf, math.nan, -math.inf
    w[9, 0], w[11, 1], w[5, 2] = math.inf, math.nan, 0
    return [x, w]


# Thin are columns, and rows where there are fewer of them.
FORMS: Mapping[str, Callable[[], list[Tensor]]] = {
    "along": sized(140, 264),
    "odd": sized(140, 267),
    "across": turned(0, of=(140, 265)),
    "odd across": turned(0, of=(141, 265)),
    "thin across": turned(1, of=(140, 264)),
    "both across": turned(0, 1, of=(140, 264)),
    "chunks": sized(200, 2500),
    "chunks across": turned(0, of=(772, 2100)),
    "short": sized(500, 8),
    "few rows": sized(5, 3000, 2),
    "few rows across": turned(0, of=(8, 900, 2)),
    "rows before columns": sized(3, 400, 150),
    "rows before columns, turned": turned(1, of=(2, 400, 150)),
    "parts": sized(16, 40000),
    "parts, odd": sized(17, 20001),
    "parts across": turned(0, of=(16, 20000)),
    "small": sized(1, 1, 1),
    "one row": sized(1, 260, 1),
    "offset": lambda: [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
                       for x in sized(40, 300)()],
    "steps": lambda: [torch.randn(40, 128)[:, ::2], torch.randn(64, 6)[:, ::2]],
    "window": lambda: [torch.randn(40, 300)[:, 4:268], torch.randn(264, 72)[:, 8:11]],
    "window across": lambda: [torch.randn(264, 300)[:, 4:144].T, torch.randn(264, 2)],
    "the same row": lambda: [torch.randn(1, 264).expand(140, 264), torch.randn(264, 3)],
    "the same k": lambda: [torch.randn(140, 1).expand(140, 264), torch.randn(264, 3)],
    "overlapping": lambda: [torch.randn(900).as_strided((140, 264), (4, 1)), torch.randn(264, 2)],
    "special": special,
    "special across": lambda: [special()[0].T.contiguous().T, special()[1]],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str, models: Models) -> None:
    torch.manual_seed(2)
    judge("bare", models("bare"), FORMS[form]())


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", [(3, 20, 260), (2, 9, 21000), (5, 40, 33)], ids=str)
def test_batches(shape: tuple[int, int, int], across: bool, models: Models) -> None:
    batches, rows, k = shape
    torch.manual_seed(2)
    a, b = torch.randn(batches, rows, k), torch.randn(batches, k, 3)
    if across:
        a = a.mT.contiguous().mT
    judge("baddbmm", models("baddbmm"), [a, b, torch.randn(3)])


def test_vectors_that_lie_otherwise(models: Models) -> None:
    torch.manual_seed(2)
    x, u = torch.randn(40, 264), torch.randn(264, 3)[:, 1]
    judge("mv", models("mv"), [x, u])
    judge("mv", models("mv"), [x, torch.randn(1).expand(264)])
    judge("vector first", models("vector first"), [u, x.T])
    judge("vector of batches", models("vector of batches"), [u, torch.randn(3, 50, 264).mT])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_seen(mistake: str, models: Models) -> None:
    torch.manual_seed(2)
    with pytest.raises((AssertionError, RuntimeError)):
        judge("bare", models(mistake), FORMS[MISTAKES[mistake][1]]())


def test_addresses(texts: Mapping[str, str], cache: Path) -> None:
    """Under AddressSanitizer nothing is read or written outside operands, results and workspace."""
    script = """
for n, k, m, across in [(37, 67, 4, 0), (20, 257, 3, 1), (140, 4500, 2, 0), (16, 21000, 3, 0),
                        (18, 20000, 3, 1), (8, 20000, 3, 1), (3, 300, 50, 0), (7, 9, 1, 1)]:
    x = torch.randn(k, n).T if across else torch.randn(n, k)
    w = torch.randn(k, m)
    models[0](x, w)
print("clean", flush=True)
models[1](x.new_zeros(16, 40000), x.new_zeros(40000, 3))
print("not seen")
"""
    (right,), (wrong,), *_ = groups(texts)
    extension = cpu.build(groups(texts), cache, address={0, 1}, brief={0, 1, 2, 3})
    cpu.check_addresses(script, extension, [right, wrong])
