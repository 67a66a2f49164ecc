"""Judges a solution's output against float64 truth and the reference's own error.

For each floating output, over the elements where all three are finite, with y the solution's
output, r the reference's in the tested dtype and t the reference's in float64:

- elementwise: e(y) = max |y - t| / max(|t|, 2^-10 rms(t), smallest normal of the dtype);
- normwise:    n(y) = ||y - t|| / ||t||.

y is right when e(y) <= 2 e(r) + 4 eps and n(y) <= 2 n(r) + 2 eps. 4 eps over the smallest normal
is four subnormal ulp, so no separate allowance for subnormal results is needed. Of an output of
few elements the reference's error is one lucky draw rather than a class, so there the second
bound is as wide as the first. A row's `ratio` is error over allowed error, at most 1 when right.

NaN, signed infinities and the sign of float32's exact zeros must be the reference's. Where the
reference overflows on the way and the truth is finite in the dtype, nothing is compared; where a
result is non-finite exactly as the truth rounded to the dtype is, it is right; and where the
reference has lost every digit (error above one half) its finiteness binds nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelnew.measure.nested import leaves

CHUNK = 1 << 25  # elements compared at a time: about ten float64 temporaries of 268 MB
FEW = 64  # outputs of fewer elements get the elementwise allowance in the normwise bound
LOST = 0.5  # relative error above which the reference has no correct digit


@dataclass(frozen=True)
class Verdict:
    """The outcome of one comparison; errors are of the metric nearest to its limit."""

    ok: bool
    error: float = 0.0
    reference_error: float = 0.0
    ratio: float = 0.0
    message: str = ""


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


def compare(found: Any, reference: Any, truth: Any) -> Verdict:
    """Judges nested outputs leaf by leaf; the first wrong leaf, else the one nearest its limit."""
    mine, theirs, true = (list(leaves(x)) for x in (found, reference, truth))
    if [name for name, _ in mine] != [name for name, _ in theirs]:
        names = [", ".join(name or "one value" for name, _ in x) for x in (mine, theirs)]
        return Verdict(False, message=f"structure: returns {names[0]}; the reference {names[1]}")
    return worst(
        _leaf(name, y, r, t) for (name, y), (_, r), (_, t) in zip(mine, theirs, true, strict=True)
    )


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
    parts = [
        _chunk(i, y[i : i + CHUNK], r[i : i + CHUNK], t[i : i + CHUNK], floor)
        for i in range(0, y.numel(), CHUNK)
    ]
    for kind in ("pattern", "zero_sign"):
        bad = max(getattr(part, kind) for part in parts)
        if bad >= 0:
            what = "NaN or infinity" if kind == "pattern" else "sign of zero"
            text = f"{name}: {what} differs: {_element(bad, *shown)}"
            return Verdict(False, message=text, ratio=math.inf)
    eps = torch.finfo(r.dtype).eps
    top = max(parts, key=lambda part: part.error)
    pairs = (
        ("elementwise", top.error, max(part.reference_error for part in parts), 4 * eps),
        (
            "normwise",
            math.sqrt(sum(part.square for part in parts)) / norm,
            math.sqrt(sum(part.reference_square for part in parts)) / norm,
            (2 if y.numel() >= FEW else 4) * eps,
        ),
    )
    kind, error, own, slack = max(pairs, key=lambda pair: pair[1] / (2 * pair[2] + pair[3]))
    ratio = error / (2 * own + slack)
    message = ""
    if ratio > 1:
        allowed = f"{kind} error {error:.3g}, allowed {2 * own + slack:.3g}"
        message = f"{name}: {allowed}; worst: {_element(top.worst, *shown)}"
    return Verdict(ratio <= 1, error, own, ratio, message)


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
    pattern = (code_y != code_r) & (code_y != rounded) & ~overflow & ~lost
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
    )


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
