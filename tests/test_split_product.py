"""The method by which products are float32 on tensor cores of float16, in PyTorch on the CPU.

Each row is scaled by a power of two and becomes pairs of float16, hi + lo; lo * hi, hi * lo and
hi * hi are added up in runs of 64, and the runs by float32 additions. Rows that pairs do not hold
are multiplied in float32. Here a run is cut off twice, at its end; what tensor cores cut off inside
of it has to be measured. `test_products_on_cpu.py` holds the kernels against `split` and `held`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

RUN = 64
FULL = 0.5  # below which a scaled element has fewer bits than float32
# The biased exponents between which a row's largest magnitude has a scale.
LOWEST, HIGHEST = 79, 203


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Others would only wait for each other at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def scale_of(x: Tensor) -> Tensor:
    """What brings each row's largest magnitude to [2^14, 2^15), [.., 1]; 0 where nothing can."""
    largest = x.abs().view(torch.int32).amax(-1, keepdim=True)  # in the order of magnitudes
    exponent = largest >> 23
    scale = ((268 - exponent) << 23).view(torch.float32)
    scale = torch.where((exponent < LOWEST) | (exponent > HIGHEST), 0.0, scale)
    return torch.where(largest == 0, 1.0, scale)


def allowed(k: int) -> int:
    return max(4, k // 256)


def held(x: Tensor) -> Tensor:
    """Whether pairs hold each row."""
    scale = scale_of(x)
    poor = ((x * scale).abs() < FULL) & (x != 0)
    return (scale[..., 0] > 0) & (poor.sum(-1) <= allowed(x.shape[-1]))


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of float16, and the scale."""
    scale = scale_of(x)
    scaled = x * scale
    hi = scaled.half()
    lo = (scaled - hi.float()).half()
    return hi, lo, scale


def toward_zero(x: Tensor) -> Tensor:
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), near.nextafter(torch.tensor(0.0)), near)


def by_pairs(a: Tensor, b: Tensor) -> Tensor:
    (a_hi, a_lo, a_scale), (b_hi, b_lo, b_scale) = split(a), split(b)
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(0, a.shape[1], RUN):
        x, x_low, y, y_low = (t[:, k : k + RUN].double() for t in (a_hi, a_lo, b_hi, b_lo))
        small = toward_zero(x_low @ y.T + x @ y_low.T)
        total += toward_zero(small.double() + x @ y.T)
    return total * (1 / a_scale) * (1 / b_scale).T


def in_order(a: Tensor, b: Tensor, run: int = 1 << 30) -> Tensor:
    """A float32 product, sums added up one behind the other in runs of so many."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], run):
        sums = torch.zeros_like(total)
        both = (t[:, start : start + run].T.contiguous() for t in (a, b))
        for x, y in zip(*both, strict=True):
            sums.addr_(x, y)
        total += sums
    return total


def product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] by [N, K] as the kernels have it."""
    well = held(a)[:, None] & held(b)
    return torch.where(well, by_pairs(a, b), in_order(a, b, 256))


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The root of the mean square against float64, each result by the norms of its row and column.

    With them a random sum of k would be 1 / sqrt(k), a positive one about 1.
    """
    norms = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    return float(((found.double() - a.double() @ b.double().T) / norms).square().mean().sqrt())


# --- what pairs hold -----------------------------------------------------------------------------


def test_a_pair_has_a_float32() -> None:
    """hi + lo is within 2^-22 of the element down to 2^-15 of the row's largest; below, it errs by
    2^-25 of what the largest is scaled to 2^14 by."""
    torch.manual_seed(0)
    for power in (-47, -3, 0, 20, 74):
        x = torch.randn(64, 256) * 2.0**power * 2.0 ** -torch.randint(0, 30, (64, 256))
        hi, lo, scale = split(x)
        back = (hi.double() + lo.double()) / scale.double()
        wrong = (back - x.double()).abs()
        within = x.abs() >= x.abs().amax(1, keepdim=True) * 2.0**-15
        assert within.any()
        assert (wrong[within] <= x.double().abs()[within] * 2.0**-22).all()
        small = (x * scale).abs() < FULL
        assert small.any()
        assert (wrong * scale.double() <= 2.0**-25)[small].all()


def test_a_scale_is_a_power_of_two() -> None:
    """It brings the largest to [2^14, 2^15); what undoes it and another's neither overflow nor
    vanish, multiplied with each other. Beyond, there is none."""
    exponents = torch.arange(-149, 128)
    largest = torch.ldexp(torch.ones(len(exponents)), exponents).unsqueeze(1)
    for x in (largest, largest * 1.5, (largest.double() * (2 - 2.0**-23)).float()):
        x = x[x.isfinite()].unsqueeze(1)
        scale = scale_of(x).double()
        has = scale > 0
        assert has.sum() == HIGHEST - LOWEST + 1
        assert torch.equal(scale[has].frexp().mantissa, torch.full((int(has.sum()),), 0.5).double())
        scaled = (x * scale)[has]
        assert ((scaled >= 2.0**14) & (scaled < 2.0**15)).all()
        undone = (1 / scale[has]).float()
        assert (undone.max() ** 2).isfinite()
        assert undone.min() ** 2 >= torch.finfo(torch.float32).tiny
    assert float(scale_of(torch.zeros(1, 4))) == 1


def opposing(power: int) -> Tensor:
    """Rows with columns of two scales, the one 2^(2 power) of the other."""
    x = torch.randn(8, 512)
    x[:, ::2] *= 2.0**power
    x[:, 1::2] *= 2.0**-power
    return x


def with_values(*values: float) -> Tensor:
    x = torch.randn(8, 512)
    for n, value in enumerate(values):
        x[n, 77] = value
    return x[: len(values)]


# Rows, and whether pairs hold them.
HELD: Mapping[str, tuple[Callable[[], Tensor], bool]] = {
    "normal numbers": (lambda: torch.randn(8, 512), True),
    "zeros": (lambda: torch.zeros(2, 512), True),
    "constants": (lambda: torch.full((2, 512), 3e-4), True),
    "a few small ones": (lambda: with_values(1e-20, 1e-41, -1e-7, 0.0), True),
    "an outlier": (lambda: with_values(100.0, -100.0), True),
    "a large outlier": (lambda: with_values(1e4, -1e4), False),
    "scales of 2^+-40": (lambda: torch.randn(8, 512) * 2.0 ** torch.tensor([[40.0], [-40.0]] * 4),
                         True),
    "columns of 2^+-2": (lambda: opposing(2), True),
    "columns of 2^+-10": (lambda: opposing(10), False),
    "columns of 2^+-16": (lambda: opposing(16), False),
    "columns of 2^+-20": (lambda: opposing(20), False),
    "columns of 2^+-60": (lambda: opposing(60), False),
    "a huge outlier": (lambda: with_values(1e9, -1e9), False),
    "infinities": (lambda: with_values(torch.inf, -torch.inf), False),
    "NaN": (lambda: with_values(torch.nan), False),
    "NaN of the other sign": (lambda: with_values(-torch.nan), False),
    "denormals": (lambda: torch.full((2, 512), 1e-41), False),
    "small numbers": (lambda: torch.randn(2, 512) * 1e-30, False),
    "large numbers": (lambda: torch.randn(2, 512).abs().clamp(0.5) * 1e30, False),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_held(name: str) -> None:
    torch.manual_seed(0)
    draw, expected = HELD[name]
    assert bool((held(draw()) == expected).all())


# --- the error of a product ----------------------------------------------------------------------


def linear(k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(64, k), (torch.rand(96, k) * 2 - 1) / k**0.5


def scaled(k: int) -> tuple[Tensor, Tensor]:
    powers = torch.randint(-40, 41, (160, 1)).float()
    return torch.randn(64, k) * 2.0 ** powers[:64], torch.randn(96, k) * 2.0 ** powers[64:]


def with_outliers(k: int) -> tuple[Tensor, Tensor]:
    """Columns of an activation that are twenty times the others."""
    a, b = linear(k)
    a[:, ::64] *= 20
    return a, b


def opposed(power: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Columns of the one as much larger as those of the other are smaller."""

    def draw(k: int) -> tuple[Tensor, Tensor]:
        powers = 2.0 ** (torch.randint(0, 2, (k,)) * 2.0 * power - power)
        return torch.randn(64, k) * powers, torch.randn(96, k) / powers

    return draw


# Whether pairs hold all of it, most or nothing, and how it is drawn.
INPUTS: Mapping[str, tuple[str, Callable[[int], tuple[Tensor, Tensor]]]] = {
    "linear layer": ("all", linear),
    "positive": ("all", lambda k: (torch.rand(64, k), torch.rand(96, k))),
    "randn": ("all", lambda k: (torch.randn(64, k), torch.randn(96, k))),
    "lognormal": ("all", lambda k: (torch.randn(64, k).exp(), torch.randn(96, k).exp())),
    "outliers": ("most", with_outliers),
    "row scales": ("all", scaled),
    "constants": ("all", lambda k: (torch.full((64, k), 0.1), torch.full((96, k), 1 / 3))),
    "opposing 2^+-2": ("all", opposed(2)),
    "opposing 2^+-16": ("nothing", opposed(16)),
    "opposing 2^+-20": ("nothing", opposed(20)),
}


@pytest.mark.parametrize("k", [64, 500, 2048])
@pytest.mark.parametrize("name", INPUTS)
def test_error(name: str, k: int) -> None:
    """It is at most that of a float32 product, or of one rounding of the result. With hi alone it
    would be ten times as large at least: the test tells them apart."""
    torch.manual_seed(k)
    expected, draw = INPUTS[name]
    a, b = draw(k)
    rounded = error((a.double() @ b.double().T).float(), a, b)
    share = float((held(a)[:, None] & held(b)).float().mean())
    assert {"all": share == 1, "most": share > 0.9, "nothing": share == 0}[expected], share
    found = error(product(a, b), a, b)
    assert found <= max(error(in_order(a, b), a, b), 3 * rounded)
    hi = [pair[0].float() / pair[2] for pair in (split(a), split(b))]
    assert error(in_order(hi[0], hi[1]), a, b) > 10 * found


def test_one_side_alone_errs_no_more() -> None:
    """Rows that pairs do not hold, by columns of ordinary numbers: by pairs the error would be that
    of float32 too. Only where what is small in a row meets what is large in a column is it not."""
    torch.manual_seed(0)
    for a in (
        torch.nn.functional.gelu(torch.randn(64, 512) * 3), opposed(16)(512)[0],
        (torch.randn(64, 512) * 3).exp(), torch.softmax(torch.randn(64, 512) * 4, 1),
    ):  # fmt: skip
        b = torch.randn(96, 512)
        assert not held(a).any()
        assert error(by_pairs(a, b), a, b) <= error(in_order(a, b), a, b)


@pytest.mark.parametrize("power", [16, 20])
def test_what_is_not_held_would_be_wrong(power: int) -> None:
    """`held` is needed: by pairs the error would be a thousand times that of float32."""
    torch.manual_seed(0)
    a, b = opposed(power)(512)
    assert error(by_pairs(a, b), a, b) > 1000 * error(in_order(a, b), a, b)


@pytest.mark.parametrize("drop", ["lo", "cross"])
def test_a_planted_mistake_is_seen(drop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a method that loses half of its terms, the error is not that of float32."""

    right = split

    def lossy(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hi, lo, scale = right(x)
        return hi, lo * (0 if drop == "lo" or x.shape[0] == 64 else 1), scale

    torch.manual_seed(0)
    a, b = linear(500)
    monkeypatch.setattr(sys.modules[__name__], "split", lossy)
    assert error(product(a, b), a, b) > 10 * error(in_order(a, b), a, b)
