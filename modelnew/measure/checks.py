"""Checks of behaviour: state, streams, graphs, repeatability, memory, gradients, constructor."""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelnew.measure.child import describe
from modelnew.measure.gate import Verdict, compare, worst
from modelnew.measure.load import Files, construct, lacks_memory
from modelnew.measure.nested import leaves, map_tensors, same_bits, tensors, twin
from modelnew.measure.subject import (
    RUN_SEED,
    Arguments,
    Skip,
    Subject,
    build_reference,
    build_subject,
    check_device,
    forward,
    refusal,
)
from modelnew.measure.truth import judge, judge_output, own_run, reference_runs, upcast

DELAY_CYCLES = 50_000_000  # about 30 ms of an otherwise idle stream
REPEATS = 3

_cuda: Any = torch.cuda  # parts of it are untyped, other parts from one release to the next


def state(files: Files, arguments: Arguments) -> Verdict:
    """The same seed gives the same state; states load both ways; ModelNew can be copied."""
    host = torch.device("cpu")
    reference = construct(files.reference, host, arguments.args, arguments.kwargs)
    solution = construct(files.solution, host, arguments.args, arguments.kwargs)
    mine, theirs = solution.state_dict(), reference.state_dict()
    if list(mine) != list(theirs):
        text = f"state_dict keys {list(mine)}, reference {list(theirs)}"
        return Verdict(False, message=text)
    for name, value in theirs.items():
        if isinstance(value, Tensor) and not same_bits(mine[name], value):
            text = f"{name}: the same seed gives other values, shape {tuple(mine[name].shape)}"
            return Verdict(False, message=f"{text}, reference {tuple(value.shape)}")
    trained = [
        [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        for model in (solution, reference)
    ]
    if trained[0] != trained[1]:
        return Verdict(False, message=f"trainable {trained[0]}, reference {trained[1]}")
    solution.load_state_dict(theirs, strict=True)
    reference.load_state_dict(mine, strict=True)
    copied = copy.deepcopy(solution).state_dict()
    same = all(same_bits(copied[n], v) for n, v in mine.items() if isinstance(v, Tensor))
    return Verdict(same, message="" if same else "copy.deepcopy changes the state")


def repeatable(subject: Subject, inputs: Any) -> Verdict:
    """The same call gives the same bits; Skip where the reference's own differ."""

    def differs(model: nn.Module) -> str:
        first = tensors(forward(subject, model, map_tensors(twin, inputs)))
        for _ in range(REPEATS - 1):
            again = tensors(forward(subject, model, map_tensors(twin, inputs)))
            for a, b in zip(first, again, strict=True):
                if not same_bits(a, b):
                    return f"{int((a != b).sum())} of {a.numel()} elements differ between calls"
        return ""

    message = differs(subject.solution)
    if message and differs(subject.reference):
        raise Skip(f"the reference is not repeatable either; {message}")
    return Verdict(not message, message=message)


def untouched(subject: Subject, inputs: Any) -> Verdict:
    """Inputs and parameters are bitwise as before, or as the reference itself leaves them."""
    given = map_tensors(twin, inputs)
    parameters = {n: p.detach().clone() for n, p in subject.solution.named_parameters()}
    forward(subject, subject.solution, given)
    for name, parameter in subject.solution.named_parameters():
        if not same_bits(parameter.detach(), parameters[name]):
            return Verdict(False, message=f"parameter {name} is changed by the call")
    changed = [
        i
        for i, (a, b) in enumerate(zip(tensors(given), tensors(inputs), strict=True))
        if not same_bits(a, b)
    ]
    if not changed:
        return Verdict(True)
    theirs = map_tensors(twin, inputs)
    forward(subject, subject.reference, theirs)
    same = all(same_bits(tensors(given)[i], tensors(theirs)[i]) for i in changed)
    return Verdict(same, message="" if same else f"input {changed[0]} is changed by the call")


def poisoned(subject: Subject, inputs: Any) -> Verdict:
    """Every element is written: outputs are allocated from memory that is full of NaN.

    Freed blocks of the outputs' sizes catch any allocation from PyTorch's cache; PyTorch's own
    filling of uninitialised tensors catches at::empty on every device.
    """
    own, truth = reference_runs(subject, inputs)
    if subject.device.type == "cuda":
        sizes = [x.numel() * x.element_size() for x in tensors(own)]
        blocks = [
            torch.full((size,), 255, dtype=torch.uint8, device=subject.device)
            for size in sizes * 2
            if size
        ]
        del blocks
    first = compare(forward(subject, subject.solution, inputs), own, truth)
    with _empty_is_nan():  # the setting makes cuDNN choose other algorithms: for both alike
        filled = forward(subject, subject.solution, inputs)
        own = own_run(subject, inputs)
    verdict = worst([first, compare(filled, own, truth)])
    prefix = "" if verdict.ok else "with poisoned memory: "
    return Verdict(
        verdict.ok, verdict.error, verdict.reference_error, verdict.ratio, prefix + verdict.message
    )


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """torch.empty fills with NaN; only the memory setting is wanted, so nothing may refuse."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warns)


def other_stream(subject: Subject, inputs: Any) -> Verdict:
    """On a non-default stream whose input arrives late; read after that stream's end only."""
    _need_cuda(subject)
    own, truth = reference_runs(subject, inputs)
    late = map_tensors(torch.zeros_like, inputs)
    stream = _cuda.Stream(subject.device)
    torch.cuda.synchronize(subject.device)
    with torch.no_grad(), torch.cuda.stream(stream):
        subject.solution(*late)  # so that no allocation waits for the device below
    stream.synchronize()
    subject.solution.load_state_dict(subject.buffers, strict=False)
    torch.manual_seed(RUN_SEED)
    torch.cuda.synchronize(subject.device)
    with torch.no_grad(), torch.cuda.stream(stream):
        _cuda._sleep(DELAY_CYCLES)
        for target, source in zip(tensors(late), tensors(inputs), strict=True):
            target.copy_(source)
        output = subject.solution(*late)
    stream.synchronize()
    verdict = judge_output(subject, inputs, output, own, truth)
    check_device(subject.device)
    return verdict


def graph(subject: Subject, inputs: Any, changed: Any) -> Verdict:
    """Captured in a CUDA graph with `inputs`, replayed with the contents of `changed`."""
    _need_cuda(subject)
    own, truth = reference_runs(subject, changed)
    static = map_tensors(torch.clone, inputs)
    # The reference first: a capture that failed may leave the allocator unfit for another.
    try:
        _captured(subject, subject.reference, map_tensors(torch.clone, inputs))
    except Exception as error:
        check_device(subject.device)
        if lacks_memory(error):
            raise
        raise Skip(f"the reference cannot be captured: {describe(error)}") from error
    try:
        replay, output = _captured(subject, subject.solution, static)
    except Exception as error:
        check_device(subject.device)
        if refusal(error) or lacks_memory(error):
            raise
        return Verdict(False, message=f"cannot be captured: {describe(error)}")
    subject.solution.load_state_dict(subject.buffers, strict=False)
    torch.manual_seed(RUN_SEED)
    for target, source in zip(tensors(static), tensors(changed), strict=True):
        target.copy_(source)
    replay.replay()
    torch.cuda.synchronize(subject.device)
    return judge_output(subject, changed, output, own, truth)


def other_gpu(subject: Subject, inputs: Any) -> Verdict:
    """On the second visible GPU while the first is current."""
    _need_cuda(subject)
    if torch.cuda.device_count() < 2:
        raise Skip("needs two visible GPUs")
    current = torch.cuda.current_device()
    other = torch.device("cuda", 1 - current)
    reference, solution, truth = (
        copy.deepcopy(model).to(other)
        for model in (subject.reference, subject.solution, subject.truth)
    )
    buffers = {name: value.to(other) for name, value in subject.buffers.items()}
    moved = Subject(reference, solution, truth, buffers, subject.dtype, other)
    verdict = judge(moved, map_tensors(lambda x: x.to(other), inputs))
    if torch.cuda.current_device() != current:
        return Verdict(False, message="the call leaves another GPU current")
    return verdict


def _captured(subject: Subject, model: nn.Module, inputs: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    current = torch.cuda.current_stream(subject.device)
    side = _cuda.Stream(subject.device)
    side.wait_stream(current)
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            model(*inputs)
    current.wait_stream(side)
    torch.cuda.synchronize(subject.device)
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(captured):
            output = model(*inputs)
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own stream current
    return captured, output


def _need_cuda(subject: Subject) -> None:
    if subject.device.type != "cuda":
        raise Skip("needs a CUDA device")


def modes(subject: Subject, inputs: Any, training: bool) -> Verdict:
    """Training or evaluation mode, left as it was built."""
    before = subject.reference.training
    subject.train(training)
    try:
        return judge(subject, inputs)
    finally:
        subject.train(before)


# --- gradients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Traced:
    """An output with the leaves that gradients can reach."""

    outputs: list[Tensor]
    leaves: list[Tensor]


def backward(subject: Subject, inputs: Any) -> Verdict:
    """A backward raises, or gives the reference's gradients; never silently none."""
    try:
        theirs = _traced(subject.reference, inputs)
    except Exception as error:
        if lacks_memory(error):
            raise
        raise Skip(f"the reference refuses: {describe(error)}") from error
    if not any(x.requires_grad for x in theirs.outputs):
        raise Skip("the reference's outputs do not require a gradient")
    mine = _traced(subject.solution, inputs)
    for a, b in zip(mine.outputs, theirs.outputs, strict=True):
        if b.requires_grad and not a.requires_grad:
            text = "silently no gradient: an output does not require one, the reference's does"
            return Verdict(False, message=text)
    try:
        _backward(mine)
    except RuntimeError as error:
        if lacks_memory(error):
            raise
        return Verdict(True, message=f"refused: {describe(error)}")
    _backward(theirs)
    if any((a.grad is None) != (b.grad is None) for a, b in _both(mine, theirs)):
        return Verdict(False, message="silently no gradient for an input or a parameter")
    if _near(mine, theirs):
        return Verdict(True, message="differentiable")
    true = _traced(subject.truth, map_tensors(upcast, inputs))
    _backward(true)
    if not _near(theirs, true):  # a maximum's gradient goes elsewhere by one rounding
        raise Skip("the reference's own gradient is not the float64 one")
    return Verdict(False, message="the gradient is not the reference's")


def _both(one: _Traced, other: _Traced) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(one.leaves, other.leaves, strict=True)


def _near(one: _Traced, other: _Traced) -> bool:
    """Whether all gradients agree to a hundredth of the largest."""
    for a, b in _both(one, other):
        if a.grad is not None and b.grad is not None:
            scale = float(b.grad.abs().max()) if b.grad.numel() else 0.0
            near = {"rtol": 1e-2, "atol": 1e-2 * scale}
            if not torch.allclose(a.grad.to(b.grad.dtype), b.grad, **near, equal_nan=True):
                return False
    return True


def _traced(model: nn.Module, inputs: Any) -> _Traced:
    given = map_tensors(lambda x: twin(x).requires_grad_() if x.is_floating_point() else x, inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(RUN_SEED)
    with torch.enable_grad():
        output = model(*given)
    outputs = [x for x in tensors(output) if x.is_floating_point()]
    return _Traced(outputs, [*(x for x in tensors(given) if x.requires_grad), *parameters])


def _backward(traced: _Traced) -> None:
    total = sum(x.sum() for x in traced.outputs if x.requires_grad)
    assert isinstance(total, Tensor)
    total.backward()  # type: ignore[no-untyped-call]


# --- constructor ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One numeric constructor argument with another value."""

    name: str
    old: float
    new: float
    arguments: Arguments


def changes(files: Files, init_inputs: Any) -> list[Change]:
    """Every int or float argument or default of Model.__init__, changed."""
    signature = inspect.signature(files.reference)
    bound = signature.bind(*init_inputs)
    bound.apply_defaults()
    found = []
    for name, old in list(bound.arguments.items()):
        if type(old) not in (int, float) or (type(old) is float and not math.isfinite(old)):
            continue
        new = old + 1 if type(old) is int else old * 1.5 + 0.125
        bound.arguments[name] = new
        found.append(Change(name, old, new, Arguments(bound.args, dict(bound.kwargs))))
        bound.arguments[name] = old
    return found


def constructor(files: Files, device: torch.device, change: Change, choices: list[Any]) -> Verdict:
    """With another argument the results agree, or ModelNew's error names the argument.

    `choices` are inputs to try in turn; Skip when the reference takes none of them.
    """
    try:
        reference = build_reference(files, torch.float32, device, change.arguments, True)
    except Exception as error:
        if lacks_memory(error):
            raise
        raise Skip(f"the reference cannot be built: {describe(error)}") from error
    inputs = next((x for x in choices if _accepts(reference, x, device)), None)
    if inputs is None:
        raise Skip("the reference does not run with it")
    del reference
    try:
        subject = build_subject(files, torch.float32, device, change.arguments, perturb=True)
        verdict = judge(subject, inputs)
    except Skip:
        raise
    except Exception as error:
        check_device(device)
        if lacks_memory(error):
            raise
        named = re.search(rf"\b{re.escape(change.name)}\b", str(error)) is not None
        text = describe(error) if named else f"the error does not name it: {describe(error)}"
        return Verdict(named, message=f"{change.name}={change.new!r}: {text}")
    text = "" if verdict.ok else f"{change.name}={change.new!r} is ignored or wrong: "
    return Verdict(
        verdict.ok, verdict.error, verdict.reference_error, verdict.ratio, text + verdict.message
    )


def _accepts(model: nn.Module, inputs: Any, device: torch.device, alone: bool = True) -> bool:
    """Whether the model takes the inputs; lack of memory is no answer while others take it."""
    try:
        with torch.no_grad():
            model(*map_tensors(twin, inputs))
    except Exception as error:
        if lacks_memory(error) and not alone:
            raise
        check_device(device)
        return False
    check_device(device)
    return True


def accepts(subject: Subject, inputs: Any, *, both: bool = False) -> bool:
    """Whether the reference takes the inputs, and with `both` that the solution does not refuse.

    With integer inputs the reference is asked on the CPU first: an index out of range raises
    there, while on a GPU it stops the device for good.
    """
    integral = any(not x.is_floating_point() for x in tensors(inputs))
    if integral and subject.device.type == "cuda":
        host = torch.device("cpu")
        model = copy.deepcopy(subject.reference).to(host)
        if not _accepts(model, map_tensors(lambda x: x.to(host), inputs), host):
            return False
    if not _accepts(subject.reference, inputs, subject.device, subject.alone):
        return False
    return not both or not _refused(subject, inputs)


def _refused(subject: Subject, inputs: Any) -> bool:
    try:
        with torch.no_grad():
            subject.solution(*map_tensors(twin, inputs))
    except Exception as error:
        check_device(subject.device)
        return refusal(error)
    return False


def names(tree: Any) -> list[str]:
    """The places of the floating tensors of a nested input, for check names."""
    found = []
    for name, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found.append(name.strip("[]").replace("][", "."))
    return found
