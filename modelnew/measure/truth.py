"""What a solution is judged against: the reference's own run, and its float64 truth.

The truth runs on the subject's device. Where that lacks the memory, it runs there in slices along
the batch, when float64 itself shows that the model treats them one by one; otherwise on the CPU.
A verdict says which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modelnew.measure.child import Json, describe
from modelnew.measure.gate import Verdict, compare, pooled, worst
from modelnew.measure.load import lacks_memory
from modelnew.measure.nested import map_tensors, same_bits, tensors, twin
from modelnew.measure.subject import (
    DeviceLost,
    ReferenceLost,
    Skip,
    Subject,
    check_device,
    forward,
)

APPEAL = 16.0  # error over allowed error from which one draw is enough
DRAWS = 16
SEPARABLE = 1e-9  # relative; float64 runs of one slice differ by 1e-14 with the algorithm chosen
PROBE_ROWS = 4

Part = Callable[[Any], Any]


def judge(subject: Subject, inputs: Any) -> Verdict:
    """Runs reference, truth and solution on the inputs and compares; Skip without a truth.

    A verdict that is wrong by little is appealed: see `gate.pooled`. The parameters are shaken
    too: with tiny inputs all rounding is theirs, and inputs alone would draw the same each time.
    """
    verdict = _judged(subject, inputs)
    if verdict.ok or not 1 < verdict.ratio < APPEAL:
        return verdict
    verdicts = [verdict]
    for _ in range(DRAWS - 1):
        with _shaken_parameters(subject):
            verdicts.append(_judged(subject, map_tensors(_shaken, inputs)))
    return pooled(verdicts)


def judge_output(subject: Subject, inputs: Any, output: Any, own: Json, truth: Json) -> Verdict:
    """Compares what a call in special circumstances returned.

    Where a plain call gives the same bits, the circumstances changed nothing: that one is judged,
    and may be appealed.
    """
    verdict = compare({"output": output}, {"output": own["output"]}, {"output": truth["output"]})
    if verdict.ok or not 1 < verdict.ratio < APPEAL:
        return verdict
    plain = tensors(forward(subject, subject.solution, map_tensors(twin, inputs))["output"])
    same = all(same_bits(a, b) for a, b in zip(plain, tensors(output), strict=True))
    return judge(subject, inputs) if same else verdict


@contextmanager
def _shaken_parameters(subject: Subject) -> Iterator[None]:
    """All three models with other parameters, the reference's shaken; then as they were."""
    models = (subject.reference, subject.solution, subject.truth)
    before = copy.deepcopy(subject.reference.state_dict())
    with torch.no_grad():
        for parameter in subject.reference.parameters():
            parameter.copy_(_shaken(parameter))
    for model in models[1:]:
        model.load_state_dict(subject.reference.state_dict())
    try:
        yield
    finally:
        for model in models:
            model.load_state_dict(before)


def _shaken(tensor: Tensor) -> Tensor:
    """The tensor in its layout, floats moved by up to 4 eps and at least 2^-9: other roundings.

    What would overflow stays as it is.
    """
    copied = twin(tensor)
    if tensor.is_floating_point():
        storage: Any = copied.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        size = max(2.0**-9, 4 * torch.finfo(tensor.dtype).eps)
        moved = flat * (1 + size * torch.rand_like(flat))
        flat.copy_(torch.where(moved.isfinite(), moved, flat))
    return copied


def _judged(subject: Subject, inputs: Any) -> Verdict:
    own = own_run(subject, inputs)
    try:
        truth = _truth_run(subject, inputs)
    except Exception as error:
        if not (lacks_memory(error) and subject.alone):
            raise _no_truth(subject, error) from error
        torch.cuda.empty_cache()
    else:
        verdict = compare(forward(subject, subject.solution, inputs), own, truth)
        return replace(verdict, truth="GPU" if subject.device.type == "cuda" else "CPU")
    return _judged_in_parts(subject, inputs, own)


def reference_runs(subject: Subject, inputs: Any) -> tuple[Json, Json]:
    """The reference's results in the tested dtype and in float64; Skip when it refuses."""
    own = own_run(subject, inputs)
    try:
        return own, _truth_run(subject, inputs)
    except Exception as error:
        raise _no_truth(subject, error) from error


def own_run(subject: Subject, inputs: Any) -> Json:
    """The reference's results in the tested dtype; Skip when it refuses."""
    try:
        return forward(subject, subject.reference, map_tensors(twin, inputs))
    except Exception as error:
        if lacks_memory(error):
            raise
        _must_be_alive(subject)
        raise Skip(f"the reference refuses: {describe(error)}") from error


def _must_be_alive(subject: Subject) -> None:
    """After an error of the reference, in the tested dtype or in float64."""
    try:
        check_device(subject.device)
    except DeviceLost as lost:
        raise ReferenceLost(str(lost)) from lost


def _no_truth(subject: Subject, error: Exception) -> Exception:
    """What to raise where float64 fails."""
    if lacks_memory(error):
        return error
    _must_be_alive(subject)
    return Skip(f"no float64 truth: {describe(error)}")


def _truth_run(subject: Subject, inputs: Any) -> Json:
    """The reference in float64; where that fails, what forward itself makes is float64 too."""
    with _dropout_drawn_in(subject.dtype):
        try:
            return forward(subject, subject.truth, map_tensors(upcast, inputs))
        except Exception as error:
            if lacks_memory(error):
                raise
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return forward(subject, subject.truth, map_tensors(upcast, inputs))
        finally:
            torch.set_default_dtype(usual)


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float64, integers copied."""
    return tensor.double() if tensor.is_floating_point() else twin(tensor)


@contextmanager
def _dropout_drawn_in(dtype: torch.dtype) -> Iterator[None]:
    """Float64 runs draw dropout masks in the tested dtype: PyTorch's mask depends on it."""
    original = nn.functional.dropout

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0 < p < 1:
            return original(input, p, training, inplace)
        kept = original(torch.ones_like(input, dtype=dtype), p) != 0
        result = input * kept / (1 - p)
        return input.copy_(result) if inplace else result

    nn.functional.dropout = dropout
    try:
        yield
    finally:
        nn.functional.dropout = original


# --- where the device lacks the memory -----------------------------------------------------------


def _judged_in_parts(subject: Subject, inputs: Any, own: Json) -> Verdict:
    """The verdict by slices of the batch, the fewest that fit; on the CPU where none do."""
    rows = next((x.shape[0] for x in tensors(inputs) if x.dim()), 0)
    found = forward(subject, subject.solution, inputs)
    count = 4
    separable = rows > 1 and _separable(subject, inputs, rows)
    while separable and count // 2 < rows:
        try:
            verdicts = [
                compare(part(found), part(own), _truth_run(subject, part(inputs)))
                for part in _slices(rows, min(count, rows))
            ]
        except Exception as error:
            if not lacks_memory(error):
                raise
            torch.cuda.empty_cache()
            count *= 2
            continue
        return replace(worst(verdicts), truth="GPU, by slices")
    return replace(_judged_on_cpu(subject, inputs, own, found), truth="CPU")


def _slices(rows: int, count: int) -> Iterator[Part]:
    """Functions that take the first, second, ... slice of every tensor with `rows` rows."""
    size = -(-rows // count)
    for start in range(0, rows, size):
        yield _slice(rows, start, min(start + size, rows))


def _slice(rows: int, start: int, stop: int) -> Part:
    def cut(tensor: Tensor) -> Tensor:
        whole = not tensor.dim() or tensor.shape[0] != rows
        return tensor if whole else tensor[start:stop]

    return lambda tree: map_tensors(cut, tree)


def _separable(subject: Subject, inputs: Any, rows: int) -> bool:
    """Whether the first rows give the same in one run as in two, in float64.

    Batch statistics, random masks and whatever else joins rows differ far more than SEPARABLE.
    """
    if subject.buffers and subject.reference.training:
        return False
    probe = min(PROBE_ROWS, rows)
    few = _slice(rows, 0, probe)(inputs)
    try:
        whole = tensors(_truth_run(subject, few)["output"])
        for part in _slices(probe, 2):
            halves = tensors(_truth_run(subject, part(few))["output"])
            for a, b in zip(halves, map(part, whole), strict=True):
                near = SEPARABLE * float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())
                if a.shape != b.shape or not torch.allclose(
                    a, b, rtol=SEPARABLE, atol=near, equal_nan=True
                ):
                    return False
    except Exception as error:
        if not lacks_memory(error):
            raise
        return False
    return all(x.dim() and x.shape[0] == probe for x in whole)


def _judged_on_cpu(subject: Subject, inputs: Any, own: Json, found: Json) -> Verdict:
    """The verdict with the truth computed on the CPU, whose generator is another."""
    again = tensors(forward(subject, subject.reference, map_tensors(twin, inputs), seed=1))
    if any(not torch.equal(a, b) for a, b in zip(tensors(own), again, strict=True)):
        raise Skip("no float64 truth: not enough memory on the GPU, and the model is random")
    del again
    host = torch.device("cpu")
    there = replace(
        subject, truth=copy.deepcopy(subject.truth).to(host), device=host,
        buffers={name: value.to(host) for name, value in subject.buffers.items()},
    )  # fmt: skip
    mine, theirs, given = (map_tensors(lambda x: x.to(host), x) for x in (found, own, inputs))
    try:
        truth = _truth_run(there, given)
    except Exception as error:
        raise _no_truth(subject, error) from error
    return compare(mine, theirs, truth)
