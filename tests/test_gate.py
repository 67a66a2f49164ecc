"""The gate: what counts as right against float64 truth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from modelnew.measure import gate


def judged(y: Any, r: Any, t: Any, dtype: torch.dtype = torch.float32) -> gate.Verdict:
    y, r = (torch.as_tensor(x, dtype=dtype) for x in (y, r))
    return gate.compare(y, r, torch.as_tensor(t, dtype=torch.float64))


def test_error_is_allowed_relative_to_the_references_own() -> None:
    truth = torch.linspace(1, 2, 1000, dtype=torch.float64)
    near = judged(truth * (1 + 1.9e-5), truth * (1 + 1e-5), truth)
    assert near.ok
    assert near.ratio == pytest.approx(0.95, abs=0.02)
    far = judged(truth * (1 + 2.2e-5), truth * (1 + 1e-5), truth)
    assert not far.ok
    assert far.ratio > 1
    assert "reference" in far.message


def test_one_bad_element_among_many_is_found_elementwise() -> None:
    truth = torch.linspace(1, 2, 100_000, dtype=torch.float64)
    bent = truth.float()
    bent[777] *= 1 + 1e-5
    verdict = gate.compare(bent, truth.float(), truth)
    assert not verdict.ok
    assert "elementwise" in verdict.message
    assert "[777]" in verdict.message


def test_a_common_bias_is_found_normwise() -> None:
    truth = torch.linspace(1, 2, 100_000, dtype=torch.float64)
    verdict = judged(truth * (1 + 3.5e-7), truth, truth)
    assert not verdict.ok
    assert "normwise" in verdict.message


@pytest.mark.parametrize(
    ("y", "r", "t", "dtype", "ok"),
    [
        ([math.nan], [math.nan], [math.nan], torch.float32, True),
        ([0.0], [math.nan], [math.nan], torch.float32, False),
        ([math.inf], [-math.inf], [-math.inf], torch.float32, False),
        ([math.nan], [1.0], [1.0], torch.float32, False),
        ([0.0], [-0.0], [-0.0], torch.float32, False),
        ([0.0], [-0.0], [-1e-60], torch.float32, True),  # underflow: its sign binds nobody
        ([3.0], [math.inf], [3.0], torch.float16, True),  # the reference overflows on the way
        ([math.nan], [math.inf], [7e4], torch.float16, False),
        ([math.inf], [65504.0], [7e4], torch.float16, True),  # as the truth, rounded
        ([math.nan], [0.0], [3.0], torch.float32, True),  # the reference has lost every digit
        ([2.0], [2.0], [2.5], torch.float32, True),
        # Within the last rounding of the largest number both that and infinity are right.
        ([65504.0], [math.inf], [65528.4], torch.float16, True),
        ([math.inf], [65504.0], [65510.0], torch.float16, True),
        ([-math.inf], [65504.0], [65510.0], torch.float16, False),
        ([1.0], [math.inf], [65528.4], torch.float16, False),
        ([65504.0], [math.inf], [7e4], torch.float16, False),
    ],
)
def test_non_finite_results_and_zero_signs(
    y: list[float], r: list[float], t: list[float], dtype: torch.dtype, ok: bool
) -> None:
    assert judged(y, r, t, dtype).ok is ok


def test_integers_are_exact_up_to_ties() -> None:
    r, t = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert gate.compare(torch.tensor([1, 2, 4]), r, t).ok
    verdict = gate.compare(torch.tensor([1, 5, 3]), r, t)
    assert not verdict.ok
    assert "[1]" in verdict.message


def test_metadata_is_compared_but_not_strides_that_do_not_matter() -> None:
    a = torch.zeros(3, 1, 4)
    b = torch.as_strided(torch.zeros(12), (3, 1, 4), (4, 77, 1))
    assert gate.compare(a, b, b.double()).ok
    assert "dtype" in gate.compare(a.double(), b, b.double()).message
    assert "strides" in gate.compare(a.mT.contiguous().mT, torch.zeros(3, 2, 4)[:, :1], a).message
    assert "structure" in gate.compare((a, a), [a], [a]).message
    assert gate.compare({"a": [a]}, {"a": [a]}, {"a": [a]}).ok


def test_where_the_reference_has_no_digit_errors_are_absolute() -> None:
    """Rounded to the root of hardswish the reference answers 0: its relative error is only 1."""
    exact = torch.linspace(-3.1, -2.9, 1 << 16, dtype=torch.float64)
    exact = torch.cat([exact, torch.full((1 << 10,), 2.0, dtype=torch.float64)])
    truth = nn.functional.hardswish(exact)
    reference = nn.functional.hardswish(exact.bfloat16())
    off = 1e-3 * torch.rand(exact.shape, generator=torch.Generator().manual_seed(0))
    better = nn.functional.hardswish(exact.float() + off).bfloat16()
    assert gate.compare(better, reference, truth).ok
    assert (better.double() - truth).norm() < (reference.double() - truth).norm()
    below = truth.abs() < 0.02
    worse = torch.where(below, better.double() + 0.02, better.double()).bfloat16()
    assert gate.compare(worse, reference, truth).ratio > 1
    worse = torch.where(below, better, better * 1.5)
    assert not gate.compare(worse, reference, truth).ok


def test_chunks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(40, 50, dtype=torch.float64, generator=generator)
    bent = truth.float() * (1 + 1e-5 * torch.rand(40, 50, generator=generator))
    whole = gate.compare(bent.t(), truth.float().t(), truth.t())
    monkeypatch.setattr(gate, "CHUNK", 77)
    parts = gate.compare(bent.t(), truth.float().t(), truth.t())
    assert parts.ratio == pytest.approx(whole.ratio, rel=1e-12)
    assert parts.message == whole.message


def test_an_appeal_pools_the_draws() -> None:
    truth = torch.linspace(1, 2, 1000, dtype=torch.float64)

    def draw(error: float, own: float) -> gate.Verdict:
        return judged(truth * (1 + error), truth * (1 + own), truth)

    lucky = [draw(3e-5, 1e-5), draw(1e-5, 3e-5), draw(2e-5, 2e-5)]
    assert not lucky[0].ok
    verdict = gate.pooled(lucky)
    assert verdict.ok
    assert verdict.message == ""
    assert verdict.ratio == pytest.approx(0.5, abs=0.02)
    worse = [draw(own * 2.5, own) for own in (1e-5, 2e-5, 3e-5)]
    verdict = gate.pooled(worse)
    assert not verdict.ok
    assert verdict.ratio == pytest.approx(1.25, abs=0.02)
    assert "the median of 3 draws" in verdict.message
    wild = judged([math.nan], [1.0], [1.0])
    assert not gate.pooled([lucky[1], wild]).ok
    other = gate.compare(torch.zeros(3), torch.zeros(4), torch.zeros(4))
    assert gate.pooled([lucky[0], other]) is other


@pytest.mark.parametrize(("worse", "wrong"), [(1, (0, 3)), (4, (90, 100))])
def test_an_appeal_knows_luck(worse: float, wrong: tuple[int, int]) -> None:
    """Of 100 outputs of 100 values around zero, with as large errors as the reference's or more."""
    generator = torch.Generator().manual_seed(4)

    def noise() -> torch.Tensor:
        return torch.randn(100, dtype=torch.float64, generator=generator)

    def draw() -> gate.Verdict:
        truth = noise()
        return judged(truth + 1e-3 * worse * noise(), truth + 1e-3 * noise(), truth)

    found = sum(not gate.pooled([draw() for _ in range(16)]).ok for _ in range(100))
    assert wrong[0] <= found <= wrong[1]
