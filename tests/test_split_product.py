"""The method by which products are float32 on tensor cores of float16, in PyTorch on the CPU.

Each row is scaled by a power of two and becomes pairs of float16, hi + lo; lo * hi, hi * lo and
hi * hi are added up in runs of 64, and the runs by float32 additions. Rows and columns that pairs
do not suit are multiplied in float32. Here a run is cut off twice, at its end; what tensor cores
cut off inside of it has to be measured. `test_products_on_cpu.py` holds the kernels against `split`
and `Reach`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

RUN = 64
# Of scaled elements, tiny ones have fewer bits than float32; see templates/device/split.cuh.
TINY, LARGE, MARGIN = 0.125, 16.0, 4
UNITS, MANY, ALWAYS = 4000, 1000, 8191
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


def few(tiny: Tensor, k: int) -> Tensor:
    return tiny <= max(4, k // 256)


def counts(x: Tensor) -> Tensor:
    """How many elements of a row are tiny but not 0, how many tiny or 0, and how many large, of
    those that have one of these among their 8 neighbours: [.., 3]."""
    size = (x * scale_of(x)).abs()
    eights = torch.nn.functional.pad(size, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    near = (eights < TINY).any(-1, keepdim=True).expand(eights.shape).flatten(-2)
    small = size < TINY
    large = (size >= LARGE) & near[..., : x.shape[-1]]
    return torch.stack([(small & (x != 0)).sum(-1), small.sum(-1), large.sum(-1)], -1)


@dataclass(frozen=True)
class Reach:
    """Of each row the least number of large elements that it is known to have, and the most small
    ones, in units. `part_k` is what k is padded to."""

    large: Tensor
    small: Tensor

    @classmethod
    def of(cls, x: Tensor, part_k: int = 0) -> Reach:
        k = x.shape[-1]
        tiny, small, large = counts(x).unbind(-1)
        unit = max(part_k, k) // UNITS + 1
        held = scale_of(x)[..., 0] > 0
        large = torch.where(few(tiny, k), ALWAYS, large // unit)
        small = ((small + unit - 1) // unit).clamp(max=MANY)
        return cls(torch.where(held, large, 0), torch.where(held, small, MANY))

    def head(self, x: Tensor) -> Tensor:
        """The 32 bits that a kernel keeps of a row: what undoes its scale, and its reach."""
        scale = scale_of(x)[..., 0]
        undo = torch.where(scale > 0, 1 / scale, 0.0).view(torch.int32)
        return undo | self.large.int() << 10 | self.small.int()


def suit(a: Tensor, b: Tensor) -> Tensor:
    """Whether pairs of each row and each column give float32's accuracy."""
    rows, columns = Reach.of(a), Reach.of(b)
    well = rows.large[:, None] > MARGIN * columns.small
    return well & (columns.large > MARGIN * rows.small[:, None])


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
    return torch.where(suit(a, b), by_pairs(a, b), in_order(a, b, 256))


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The root of the mean square against float64, each result by the norms of its row and column.

    With them a random sum of k would be 1 / sqrt(k), a positive one about 1.
    """
    norms = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    return float(((found.double() - a.double() @ b.double().T) / norms).square().mean().sqrt())


# --- what pairs hold -----------------------------------------------------------------------------


def test_a_pair_has_a_float32() -> None:
    """hi + lo is within 2^-22 of the element down to 2^-16 of the row's largest; below, it errs by
    2^-25 of what the largest is scaled to 2^14 by."""
    torch.manual_seed(0)
    for power in (-47, -3, 0, 20, 74):
        x = torch.randn(64, 256) * 2.0**power * 2.0 ** -torch.randint(0, 30, (64, 256))
        hi, lo, scale = split(x)
        back = (hi.double() + lo.double()) / scale.double()
        wrong = (back - x.double()).abs()
        within = x.abs() >= x.abs().amax(1, keepdim=True) * 2.0**-16
        assert within.any()
        assert (wrong[within] <= x.double().abs()[within] * 2.0**-22).all()
        small = (x * scale).abs() < TINY
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


# Rows, and which columns pairs of them suit: any, those without a small element, or none.
SUITED: Mapping[str, tuple[Callable[[], Tensor], str]] = {
    "normal numbers": (lambda: torch.randn(8, 512), "any"),
    "zeros": (lambda: torch.zeros(2, 512), "any"),
    "constants": (lambda: torch.full((2, 512), 3e-4), "any"),
    "a few tiny ones": (lambda: with_values(1e-20, 1e-41, -1e-7, 0.0), "any"),
    "an outlier": (lambda: with_values(100.0, -100.0), "any"),
    "half zeros": (lambda: torch.randn(8, 512).relu(), "any"),
    "scales of 2^+-40": (lambda: torch.randn(8, 512) * 2.0 ** torch.tensor([[40.0], [-40.0]] * 4),
                         "any"),
    "columns of 2^+-2": (lambda: opposing(2), "any"),
    "columns of 2^+-10": (lambda: opposing(10), "full"),
    "columns of 2^+-16": (lambda: opposing(16), "full"),
    "columns of 2^+-60": (lambda: opposing(60), "full"),
    "a large outlier": (lambda: with_values(1e5, -1e5), "full"),
    "a huge outlier": (lambda: with_values(1e9, -1e9), "full"),
    "tails toward 0": (lambda: torch.nn.functional.gelu(torch.randn(8, 512) * 3), "full"),
    "infinities": (lambda: with_values(torch.inf, -torch.inf), "none"),
    "NaN": (lambda: with_values(torch.nan), "none"),
    "NaN of the other sign": (lambda: with_values(-torch.nan), "none"),
    "denormals": (lambda: torch.full((2, 512), 1e-41), "none"),
    "small numbers": (lambda: torch.randn(2, 512) * 1e-30, "none"),
    "large numbers": (lambda: torch.randn(2, 512).abs().clamp(0.5) * 1e30, "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUITED)
def test_suited(name: str) -> None:
    torch.manual_seed(0)
    draw, expected = SUITED[name]
    x = draw()
    full = torch.rand(4, 512) + 1
    mostly_zero = torch.zeros(4, 512)
    mostly_zero[:, ::8] = 1
    assert bool((suit(x, full) == (expected != "none")).all())
    assert bool((suit(full, x) == (expected != "none")).all())
    assert bool((suit(x, mostly_zero) == (expected == "any")).all())
    tails = opposing(16).roll(1, 1)  # tiny where the other's are large
    assert not suit(x, tails).any() or expected == "any"


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


# Whether pairs suit all of it, or nothing, and how it is drawn.
INPUTS: Mapping[str, tuple[str, Callable[[int], tuple[Tensor, Tensor]]]] = {
    "linear layer": ("all", linear),
    "positive": ("all", lambda k: (torch.rand(64, k), torch.rand(96, k))),
    "randn": ("all", lambda k: (torch.randn(64, k), torch.randn(96, k))),
    "lognormal": ("all", lambda k: (torch.randn(64, k).exp(), torch.randn(96, k).exp())),
    "outliers": ("all", with_outliers),
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
    share = float(suit(a, b).float().mean())
    assert share == {"all": 1, "nothing": 0}[expected]
    found = error(product(a, b), a, b)
    assert found <= max(error(in_order(a, b), a, b), 3 * rounded)
    hi = [pair[0].float() / pair[2] for pair in (split(a), split(b))]
    assert error(in_order(hi[0], hi[1]), a, b) > 10 * found


# What layers hand on, whose tails toward 0 are long.
TAILS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.nn.functional.gelu(x * 3),
    "silu": lambda x: torch.nn.functional.silu(x * 6),
    "lognormal": lambda x: (x * 3).exp(),
    "softmax": lambda x: torch.softmax(x * 4, 1),
    "cube": lambda x: x**3,
    "opposing": lambda x: x * 2.0 ** (torch.arange(x.shape[1]) % 2 * 32.0 - 16),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails_by_weights_are_multiplied_by_pairs(name: str) -> None:
    """Nothing of it is left to plain float32, on either side, and the error is less than its."""
    torch.manual_seed(0)
    a, b = TAILS[name](torch.randn(64, 1024)), torch.randn(96, 1024)
    assert (counts(a)[:, 0] > 4).any()
    for pair in ((a, b), (b, a)):
        assert suit(*pair).all()
        assert error(by_pairs(*pair), *pair) <= 0.3 * error(in_order(*pair), *pair)


@pytest.mark.parametrize("power", [16, 20])
def test_what_is_not_suited_would_be_wrong(power: int) -> None:
    """`suit` is needed: by pairs the error would be a thousand times that of float32."""
    torch.manual_seed(0)
    a, b = opposed(power)(512)
    assert error(by_pairs(a, b), a, b) > 1000 * error(in_order(a, b), a, b)


@pytest.mark.parametrize("power", range(1, 21))
def test_opposing_scales(power: int) -> None:
    """From the first power on for which pairs err more than float32, they are not said to suit;
    with those that suit, the product is right, also where few of k are large."""
    torch.manual_seed(power)
    for share in (0.5, 0.02):
        scales = 2.0 ** ((torch.rand(2048) < share) * 2.0 * power - power)
        a, b = torch.randn(64, 2048) * scales, torch.randn(96, 2048) / scales
        assert error(product(a, b), a, b) <= error(in_order(a, b), a, b)


def test_a_spike_is_not_trusted_to_meet_a_large_one() -> None:
    """A row of a spike and ordinary numbers, which pairs lose, by a column with 0 at the spike."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 512), torch.randn(8, 512)
    a[:, 77], b[:, 77] = 1e9, 0
    right = a.double() @ b.double().T
    apart = (by_pairs(a, b) - right).norm() / right.norm()
    assert apart > 1e-5
    assert not suit(a, b).any()
    b[:, 77] = 1
    assert suit(a, b).all()


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
