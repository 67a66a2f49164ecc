"""Products of generated files on a GPU of any kind: errors beside PyTorch's own and float64, over
shapes, layouts and distributions, of float32 such as pairs of float16 suit and do not.

    python -m pytest -m gpu tests/test_products_on_gpu.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from products import HALF, by_few, compiled, laid
from torch import Tensor
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
Draw = Callable[..., Tensor]


@pytest.fixture(scope="module")
def product() -> Draw:
    """That of a file for `a @ b`."""
    return compiled("a @ b", "a, b")


@pytest.fixture(scope="module")
def halves() -> Draw:
    """The same for float16 where kernels of ours multiply it."""
    return compiled("a @ b", "a, b", HALF)


@pytest.fixture(scope="module")
def by_four() -> Draw:
    """The same for four columns at most."""
    return compiled("a @ b", "a, b", by_few(4))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda")


def weights(*shape: int) -> Tensor:
    """Of a linear layer, [.., k, n]."""
    return (uniform(*shape) * 2 - 1) / shape[-2] ** 0.5


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The root of the mean square against float64, each result by the norms of its row and column:
    those of all that is finite."""
    a, b = a.double(), b.double()
    norms = a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True)
    wrong = (found.double() - a @ b).abs() / norms.clamp(min=1e-300)
    return float(wrong[wrong.isfinite()].square().mean().sqrt())


def assert_exact(product: Draw, a: Tensor, b: Tensor) -> None:
    """At most PyTorch's error within what draws differ by, or that of a few roundings of the result
    where most terms are 0; what is not finite is so where PyTorch's is; twice the same; nothing is
    read that was not written."""
    poison = torch.full((1 << 26,), torch.nan, device="cuda")
    del poison
    found, torchs = product(a, b), a @ b
    assert found.shape == torchs.shape
    nan, infinite = torchs.isnan(), torchs.isinf()
    assert torch.equal(found.isnan() | found.isinf(), nan | infinite)
    assert torch.equal(found.view(torch.int32)[~nan], product(a, b).view(torch.int32)[~nan])
    if found.isfinite().any():
        rounded = error((a.double() @ b.double()).float(), a, b)
        ours, theirs = error(found, a, b), error(torchs, a, b)
        assert ours <= max(1.1 * theirs, 7 * rounded), (ours, theirs, rounded)


# Batches, M, K, N: such as kernels of ours take, by their forms.
SHAPES = [
    (1, 1024, 1024, 1024), (1, 1000, 1111, 1013), (1, 2048, 300, 2048), (1, 4096, 64, 4096),
    (1, 4099, 65, 4001), (1, 3000, 100, 4100), (1, 1024, 8192, 1024), (1, 128, 8192, 2048),
    (1, 100, 8100, 2050), (1, 2048, 8192, 128), (1, 4100, 4097, 99), (1, 16, 65536, 1025),
    (1, 512, 2048, 2048), (1, 300, 4096, 1111), (1, 2050, 2048, 400), (1, 513, 2049, 1025),
    (1, 256, 131072, 256), (1, 129, 200001, 65), (1, 33, 524288, 70), (1, 2000, 20000, 72),
    (16, 512, 512, 512), (7, 300, 1023, 511), (32, 128, 1024, 512), (3, 1025, 640, 1030),
    (5, 1024, 700, 90), (300, 130, 190, 200), (1, 7001, 2048, 17), (1, 17, 4096, 20001),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int], layout: str, product: Draw) -> None:
    batches, m, k, n = shape
    many = [batches] if batches > 1 else []
    for draws in ((normal, weights), (uniform, uniform)):
        a, b = draws[0](*many, m, k), draws[1](*many, k, n)
        assert_exact(product, laid(a, layout[0] == "T"), laid(b, layout[1] == "T"))


def test_whole_numbers_are_exact(product: Draw) -> None:
    for m, k, n in ((1024, 1024, 1024), (128, 8192, 2048), (2048, 4096, 100)):
        a, b = (torch.randint(-8, 9, s, device="cuda").float() for s in ((m, k), (k, n)))
        assert torch.equal(product(a, b), (a.double() @ b.double()).float())


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": lambda x: F.gelu(x * 3),
    "silu": lambda x: F.silu(x * 6),
    "softplus": lambda x: F.softplus(x * 8),
    "sigmoid": lambda x: torch.sigmoid(x * 8),
    "softmax": lambda x: torch.softmax(x * 4, -1),
    "cube": lambda x: x**3,
    "lognormal": torch.exp,
    "wide lognormal": lambda x: (x * 3).exp(),
    "mask": lambda x: (x > 1).float(),
    "dropout": lambda x: F.dropout(x, 0.9),
    "outliers": lambda x: torch.cat([x[..., :20] * 100, x[..., 20:]], -1),
    "spikes": lambda x: torch.where(x > 4, x * 1e9, x),
    "spikes among zeros": lambda x: torch.where(x > 4, x * 1e9, F.relu(x)),
    "row scales": lambda x: x * 2.0 ** torch.randint(-40, 41, (x.shape[-2], 1), device="cuda"),
    "constants": lambda x: torch.full_like(x, 0.1),
    "denormals": lambda x: x * 1e-40,
    "small": lambda x: x * 1e-30,
    "large": lambda x: x * 1e16,
    "zeros": lambda x: torch.zeros_like(x),
}

# M, K, N: one of each form.
FORMS = [(1024, 1536, 1280), (200, 4096, 1500), (1500, 4096, 100), (160, 65536, 150)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, form: tuple[int, int, int], product: Draw) -> None:
    """On either side by weights, on both, and by rows that are half zeros."""
    m, k, n = form
    change = ACTIVATIONS[name]
    a, b = normal(m, k), weights(k, n)
    changed, other = change(a), change(normal(n, k)).mT
    for pair in ((changed, b), (a, other), (changed, other), (changed, F.relu(b)),
                 (F.relu(a), other)):  # fmt: skip
        assert_exact(product, *pair)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("power", [2, 4, 6, 8, 9, 10, 11, 12, 14, 16, 20, 40])
def test_opposing_scales(power: int, form: tuple[int, int, int], product: Draw) -> None:
    """What is large in the one meets what is small in the other: all of k, or a few."""
    m, k, n = form
    for share in (0.5, 0.01):
        chosen = uniform(k) < share
        scales = torch.where(chosen, 2.0**power, 2.0**-power)
        a, b = normal(m, k) * scales, normal(k, n) / scales[:, None]
        assert_exact(product, a, b)
        assert_exact(product, a, F.relu(b))
        assert_exact(product, a.clamp(-0.5, 0.5), b)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_not_finite(form: tuple[int, int, int], product: Draw) -> None:
    m, k, n = form
    for value, (row, column) in itertools.product(
        (torch.inf, -torch.inf, torch.nan), ((3, k - 1), (m - 1, 0))
    ):
        a, b = normal(m, k), normal(k, n)
        a[row, column] = value
        assert_exact(product, a, b)
        b[column, n - 1] = -value
        assert_exact(product, a, b)
        b[column, 5] = 0.0
        assert_exact(product, a, b)
        assert_exact(product, normal(m, k), b)


# M, K, N, by lines of an odd number of elements, of a multiple of 2, of 4, and of 8, which are
# PyTorch's.
RAGGED = [(4099, 4101, 4103), (1000, 8100, 8190), (200, 40002, 4999), (8190, 700, 8100),
          (4096, 4096, 4096)]  # fmt: skip


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_halves(shape: tuple[int, int, int], layout: str, halves: Draw) -> None:
    m, k, n = shape
    for dtype in (torch.float16, torch.bfloat16):
        for draw in (normal, uniform):
            a = laid(draw(m, k).to(dtype), layout[0] == "T")
            b = laid(weights(k, n).to(dtype), layout[1] == "T")
            found = halves(a, b)
            assert torch.equal(found, halves(a, b))
            assert error(found, a, b) <= 1.01 * error(a @ b, a, b)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(8192, 8192), (777, 1001), (16, 1 << 20), (130, 100003),
                                   (1 << 18, 64), (40000, 8000)], ids=str)  # fmt: skip
def test_thin(shape: tuple[int, int], columns: int, across: bool, by_four: Draw) -> None:
    m, k = shape
    for a, b in ((normal(m, k), weights(k, columns)), (uniform(m, k), uniform(k, columns))):
        assert_exact(by_four, laid(a, across), b)
        assert_exact(by_four, b.mT, laid(a, across).mT)
    a[3, 5], a[7, 9], b[20, 0] = torch.inf, torch.nan, -torch.inf
    assert_exact(by_four, laid(a, across), b)
