"""Judges a solution's output against float64 truth and the reference's own error.

For each floating output, over the elements where all three are finite, with y the solution's
output, r the reference's in the tested dtype and t the reference's in float64:

- elementwise: e(y) = max |y - t| / max(|t|, 2^-10 rms(t), smallest normal of the dtype);
- normwise:    n(y) = ||y - t|| / ||t||.

y is right when e(y) <= 2 e(r) + 4 eps and n(y) <= 2 n(r) + 2 eps. 4 eps over the smallest normal
is four subnormal ulp, so no separate allowance for subnormal results is needed. Of an output of
few elements the reference's error is one lucky draw rather than a class, so there the second
bound is as wide as the first. Where the reference has lost every digit (relative error above one
half: hardswish near -3 in bfloat16, which rounds to the root and answers 0), the largest such |t|
takes the place of 2^-10 rms(t) if it is larger: below it, errors count as absolute, everyone's.
A row's `ratio` is error over allowed error, at most 1 when right.

NaN, signed infinities and the sign of float32's exact zeros must be the reference's. Where the
reference overflows on the way and the truth is finite in the dtype, nothing is compared; where a
result is non-finite exactly as the truth rounded to the dtype is, it is right; within rounding of
the dtype's largest number both that and infinity are; and where the reference has lost every digit
its finiteness binds nobody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from modelnew.measure.nested import leaves

CHUNK = 1 << 25  # elements compared at a time: about ten float64 temporaries of 268 MB
FEW = 64  # outputs of fewer elements get the elementwise allowance in the normwise bound
LOST = 0.5  # relative error above which the reference has no correct digit


@dataclass(frozen=True)
class Metric:
    """One error of one output: ours, the reference's, and what is allowed beside twice that."""

    error: float
    own: float
    slack: float

    @property
    def allowed(self) -> float:
        return 2 * self.own + self.slack

    @property
    def ratio(self) -> float:
        return self.error / self.allowed


METRIC = tuple(field.name for field in fields(Metric))


@dataclass(frozen=True)
class Verdict:
    """The outcome of one comparison; errors are of the metric nearest to its limit."""

    ok: bool
    error: float = 0.0
    reference_error: float = 0.0
    ratio: float = 0.0
    message: str = ""
    truth: str = ""  # where the truth was computed
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """The comparison of one chunk; indices are flat, -1 where nothing is wrong."""

    pattern: int
    zero_sign: int
    worst: int
    error: float
    reference_error: float
    square: float
    reference_square: float
    lost: float  # the largest |t| of which the reference has no digit, 0 where it has all


def compare(found: Any, reference: Any, truth: Any) -> Verdict:
    """Judges nested outputs leaf by leaf; the first wrong leaf, else the one nearest its limit."""
    mine, theirs, true = (list(leaves(x)) for x in (found, reference, truth))
    if [name for name, _ in mine] != [name for name, _ in theirs]:
        names = [", ".join(name or "one value" for name, _ in x) for x in (mine, theirs)]
        return Verdict(False, message=f"structure: returns {names[0]}; the reference {names[1]}")
    verdicts = [
        _leaf(name, y, r, t) for (name, y), (_, r), (_, t) in zip(mine, theirs, true, strict=True)
    ]
    every = {key: metric for verdict in verdicts for key, metric in verdict.metrics.items()}
    return replace(worst(verdicts), metrics=every)


def pooled(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over several draws of one check: median error against median own error.

    An error is a maximum of rounding errors, which are as good as random. Where the reference's
    was small by luck, more draws show it; a solution that is worse stays worse. An error relative
    to a value near zero has no mean, and the largest of several draws is as much luck as one: by
    the largest of 8, of two equal programs with 100 results 7 % were wrong after all, and of those
    with three times the error 46 % right; by the median of 16 it is 3 % and 36 % (simulated).
    """
    lost = [v for v in verdicts if not v.ok and not 1 < v.ratio < math.inf]  # no rounding error
    if lost:
        return lost[0]
    best = Verdict(True, truth=verdicts[0].truth)
    for key in verdicts[0].metrics:
        draws = [verdict.metrics[key] for verdict in verdicts if key in verdict.metrics]
        metric = Metric(
            *(statistics.median(getattr(draw, name) for draw in draws) for name in METRIC)
        )
        if metric.ratio > best.ratio:
            best = Verdict(
                metric.ratio <= 1, metric.error, metric.own, metric.ratio,
                f"{key} error {metric.error:.3g}, allowed {metric.allowed:.3g}, the median of "
                f"{len(draws)} draws", verdicts[0].truth, verdicts[0].metrics,
            )  # fmt: skip
    return replace(best, message="") if best.ok else best


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first wrong verdict, else the one with the largest ratio."""
    best = Verdict(True)
    for verdict in verdicts:
        if not verdict.ok:
            return verdict
        if verdict.ratio >= best.ratio:
            best = verdict
    return best


def _leaf(name: str, y: Any, r: Any, t: Any) -> Verdict:
    name = name or "output"
    if not isinstance(r, Tensor):
        same = type(y) is type(r) and (y == r or (y != y and r != r))
        return Verdict(bool(same), message="" if same else f"{name}: {y!r}, reference {r!r}")
    complaint = _metadata(y, r)
    if complaint:
        return Verdict(False, message=f"{name}: {complaint}")
    if r.numel() == 0:
        return Verdict(True)
    if r.is_complex():
        y, r, t = (torch.view_as_real(x.resolve_conj()) for x in (y, r, t))
    if r.is_floating_point():
        return _floats(name, y, r, t)
    return _integers(name, y, r, t)


def _metadata(y: Any, r: Tensor) -> str:
    """What differs in type, dtype, device, shape or strides, or nothing."""
    if not isinstance(y, Tensor):
        return f"is a {type(y).__name__}, the reference's a tensor"
    if y.dtype != r.dtype:
        return f"dtype {y.dtype}, reference {r.dtype}"
    if y.device != r.device:
        return f"device {y.device}, reference {r.device}"
    if y.shape != r.shape:
        return f"shape {tuple(y.shape)}, reference {tuple(r.shape)}"
    matter = [i for i, size in enumerate(r.shape) if size != 1] if r.numel() else []
    if any(y.stride(i) != r.stride(i) for i in matter):
        return f"strides {y.stride()}, reference {r.stride()} at shape {tuple(r.shape)}"
    return ""


def _integers(name: str, y: Tensor, r: Tensor, t: Tensor) -> Verdict:
    """Indices and flags: the reference's value, or the truth's (ties broken by rounding)."""
    wrong = (y != r) & (y != t)
    count = int(wrong.sum())
    if count == 0:
        return Verdict(True)
    where = int(wrong.flatten().to(torch.int8).argmax())
    text = f"{name}: {count} elements differ, {_element(where, y, r, t)}"
    return Verdict(False, message=text, ratio=math.inf)


def _floats(name: str, y: Tensor, r: Tensor, t: Tensor) -> Verdict:
    shown = (y, r, t)
    y, r, t = (x.reshape(-1) for x in shown)
    norm, floor = _scale(r, t)
    parts = _chunks(y, r, t, floor)
    for kind in ("pattern", "zero_sign"):
        bad = max(getattr(part, kind) for part in parts)
        if bad >= 0:
            what = "NaN or infinity" if kind == "pattern" else "sign of zero"
            text = f"{name}: {what} differs: {_element(bad, *shown)}"
            return Verdict(False, message=text, ratio=math.inf)
    lost = max(part.lost for part in parts)
    if lost > floor:
        parts = _chunks(y, r, t, lost)
    eps = torch.finfo(r.dtype).eps
    top = max(parts, key=lambda part: part.error)
    metrics = {
        f"{name}: elementwise": Metric(
            top.error, max(part.reference_error for part in parts), 4 * eps
        ),
        f"{name}: normwise": Metric(
            math.sqrt(sum(part.square for part in parts)) / norm,
            math.sqrt(sum(part.reference_square for part in parts)) / norm,
            (2 if y.numel() >= FEW else 4) * eps,
        ),
    }
    key, metric = max(metrics.items(), key=lambda item: item[1].ratio)
    message = ""
    if metric.ratio > 1:
        allowed = f"{key} error {metric.error:.3g}, allowed {metric.allowed:.3g}"
        message = f"{allowed}; worst: {_element(top.worst, *shown)}"
    return Verdict(
        metric.ratio <= 1, metric.error, metric.own, metric.ratio, message, metrics=metrics
    )


def _scale(r: Tensor, t: Tensor) -> tuple[float, float]:
    """||t|| and the floor of the elementwise denominator, over what is finite in r and t."""
    square, count = 0.0, 0
    for start in range(0, t.numel(), CHUNK):
        part, own = t[start : start + CHUNK].double(), r[start : start + CHUNK]
        use = torch.isfinite(part) & torch.isfinite(own)
        square += float(torch.where(use, part, 0.0).square().sum())
        count += int(use.sum())
    tiny = float(torch.finfo(r.dtype).smallest_normal)
    rms = math.sqrt(square / max(count, 1))
    return max(math.sqrt(square), tiny), max(rms * 2.0**-10, tiny)


def _chunks(y: Tensor, r: Tensor, t: Tensor, floor: float) -> list[_Part]:
    return [
        _chunk(i, y[i : i + CHUNK], r[i : i + CHUNK], t[i : i + CHUNK], floor)
        for i in range(0, y.numel(), CHUNK)
    ]


def _chunk(start: int, y: Tensor, r: Tensor, t: Tensor, floor: float) -> _Part:
    t = t.double()
    rounded = _codes(t.to(r.dtype))
    code_y, code_r = _codes(y), _codes(r)
    use = (code_y == 0) & (code_r == 0) & torch.isfinite(t)
    scale = t.abs().clamp(min=floor)
    distance = torch.where(use, (y.double() - t).abs(), 0.0)
    own = torch.where((code_r == 0) & torch.isfinite(t), (r.double() - t).abs(), 0.0)
    overflow = (code_r != 0) & (rounded == 0)
    lost = own / scale > LOST
    pattern = (code_y != code_r) & (code_y != rounded) & ~overflow & ~lost & ~_at_edge(y, code_y, t)
    # In a half type a sum that cancels, or underflows, may be a tiny number of either sign in the
    # float32 of a fused kernel: the sign of its zero is then no property of the reference.
    exact = r.dtype not in (torch.float16, torch.bfloat16)
    zero = (y == 0) & (r == 0) & (t == 0) & (torch.signbit(y) != torch.signbit(r)) & exact
    own = torch.where(use, own, 0.0)
    relative = torch.where(use, distance / scale, 0.0)
    place = int(relative.argmax())
    return _Part(
        _first(pattern, start),
        _first(zero, start),
        start + place,
        float(relative[place]),
        float((own / scale).nan_to_num(0.0).max()),
        float(distance.square().sum()),
        float(own.square().sum()),
        float(torch.where(use & lost, t.abs(), 0.0).max()),
    )


def _at_edge(y: Tensor, code: Tensor, t: Tensor) -> Tensor:
    """Where the last rounding decides between the dtype's largest number and infinity."""
    info = torch.finfo(y.dtype)
    edge = (t.abs() / info.max - 1).abs() <= 4 * info.eps
    close = (code == 0) & ((y.double() - t).abs() <= 8 * info.eps * t.abs())
    return edge & (close | (code == torch.where(t > 0, 2, 3)))


def _codes(x: Tensor) -> Tensor:
    """0 for finite, 1 for NaN, 2 for infinity, 3 for minus infinity."""
    infinite = torch.isposinf(x).to(torch.int8) * 2 + torch.isneginf(x).to(torch.int8) * 3
    return infinite + torch.isnan(x).to(torch.int8)


def _first(mask: Tensor, start: int) -> int:
    return start + int(mask.to(torch.int8).argmax()) if bool(mask.any()) else -1


def _element(flat: int, y: Tensor, r: Tensor, t: Tensor) -> str:
    """One element for a message: its place and the three values."""
    place, rest = [], flat
    for size in reversed(y.shape):
        place.append(rest % size)
        rest //= size
    index = tuple(reversed(place))
    mine, own, true = (x[index].item() for x in (y, r, t))
    return f"at {list(index)} of {list(y.shape)}: {mine!r}, reference {own!r}, float64 {true!r}"


# --- tasks whose output proves nothing -----------------------------------------------------------

TOLERANCE = 1e-4  # absolute and relative: what KernelBench allows in float32


def degenerate(first: Any, second: Any) -> list[str]:
    """Why a wrong solution would satisfy KernelBench's tolerance; nothing for a sound task.

    `first` and `second` are the reference's outputs for two draws of the inputs.
    """
    pairs = [
        (a, b)
        for (_, a), (_, b) in zip(leaves(first), leaves(second), strict=True)
        if isinstance(a, Tensor) and a.numel() and a.shape == b.shape
    ]
    if not pairs:
        return []
    several = [a for a, _ in pairs if a.numel() > 1]
    middles = [(float(a.min()) + float(a.max())) / 2 for a in several]
    found = {
        "every output is within the tolerance of zero": all(_near(a, 0.0) for a, _ in pairs),
        "every output is within the tolerance of one constant": bool(several)
        and all(map(_near, several, middles)),
        "the output does not depend on the inputs' values": all(_near(a, b) for a, b in pairs),
    }
    return [text for text, holds in found.items() if holds]


def _near(y: Tensor, other: Tensor | float) -> bool:
    """KernelBench's comparison of `y` with what a solution might answer instead."""
    y = y.reshape(-1)
    answer = other.reshape(-1) if isinstance(other, Tensor) else y.new_tensor(other).expand_as(y)
    for start in range(0, y.numel(), CHUNK):
        mine, its = (x[start : start + CHUNK].double() for x in (y, answer))
        if not bool(((mine - its).abs() <= TOLERANCE + TOLERANCE * its.abs()).all()):
            return False
    return True
