"""A reference and its solution side by side in one dtype, and the recorder of their checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modelnew.measure.child import Json, Report, describe
from modelnew.measure.gate import Verdict, compare
from modelnew.measure.load import Files, construct, synchronize
from modelnew.measure.nested import map_tensors, tensors, twin

RUN_SEED = 1234


class Skip(Exception):
    """The check does not apply; the message says why."""


class DeviceLost(RuntimeError):
    """The device answers nothing any more: an illegal access or a device-side assertion."""


@dataclass(frozen=True)
class Subject:
    """The models under test. `truth` is the reference upcast exactly from the tested dtype.

    `buffers` are restored before each run, so that runs do not depend on one another.
    """

    reference: nn.Module
    solution: nn.Module
    truth: nn.Module
    buffers: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device

    def train(self, mode: bool) -> None:
        """Puts all three in training or evaluation mode."""
        for model in (self.reference, self.solution, self.truth):
            model.train(mode)


@dataclass(frozen=True)
class Arguments:
    """Constructor arguments in the reference's order and by name."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def build_reference(
    files: Files, dtype: torch.dtype, device: torch.device, arguments: Arguments, perturb: bool
) -> nn.Module:
    """The reference in `dtype`; perturbed so that weights of one and zero biases are seen too."""
    model = construct(files.reference, device, arguments.args, arguments.kwargs)
    if perturb:
        _perturb(model)
    return model.to(dtype)


def build_subject(
    files: Files, dtype: torch.dtype, device: torch.device, arguments: Arguments, *, perturb: bool
) -> Subject:
    """Builds reference and solution with the same arguments and the reference's state."""
    reference = build_reference(files, dtype, device, arguments, perturb)
    solution = construct(files.solution, device, arguments.args, arguments.kwargs).to(dtype)
    state = reference.state_dict()
    solution.load_state_dict(state)
    parameters = {name for name, _ in reference.named_parameters(remove_duplicate=False)}
    buffers = {
        name: value.clone()
        for name, value in state.items()
        if name not in parameters and isinstance(value, Tensor)
    }
    truth = copy.deepcopy(reference).double()
    return Subject(reference, solution, truth, buffers, dtype, device)


def _perturb(model: nn.Module) -> None:
    """Moves parameters by a tenth of their size and adds up to 0.1 to buffers (variances > 0)."""
    torch.manual_seed(RUN_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                size = float(parameter.double().square().mean().sqrt()) or 1.0
                parameter.add_(torch.randn_like(parameter), alpha=0.1 * size)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer), alpha=0.1)


# --- running -------------------------------------------------------------------------------------


def forward(subject: Subject, model: nn.Module, inputs: Any) -> Json:
    """One call under the run seed: {"output": ..., "<buffer>": ...}, device errors raised."""
    with torch.no_grad():
        if subject.buffers:
            model.load_state_dict(subject.buffers, strict=False)
        torch.manual_seed(RUN_SEED)
        output = model(*inputs)
        state = model.state_dict() if subject.buffers else {}
        results: Json = {name: state[name].clone() for name in subject.buffers}
        results["output"] = output
        synchronize(subject.device)
    return results


def reference_runs(subject: Subject, inputs: Any) -> tuple[Json, Json]:
    """The reference's results in the tested dtype and in float64; Skip when it refuses."""
    try:
        own = forward(subject, subject.reference, map_tensors(twin, inputs))
    except Exception as error:
        check_device(subject.device)
        raise Skip(f"the reference refuses: {describe(error)}") from error
    try:
        with _dropout_drawn_in(subject.dtype):
            truth = forward(subject, subject.truth, map_tensors(_upcast, inputs))
    except Exception as error:
        check_device(subject.device)
        raise Skip(f"no float64 truth: {describe(error)}") from error
    return own, truth


def judge(subject: Subject, inputs: Any) -> Verdict:
    """Runs all three on the inputs and compares."""
    own, truth = reference_runs(subject, inputs)
    return compare(forward(subject, subject.solution, inputs), own, truth)


def _upcast(tensor: Tensor) -> Tensor:
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


def check_device(device: torch.device) -> None:
    """Raises DeviceLost when the device reports an error that no later call survives."""
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceLost(describe(error)) from error


# --- recording -----------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Collects the checks of one solution and reports each when it starts and ends."""

    report: Report
    device: torch.device
    checks: list[Json] = field(default_factory=list)
    started: str = ""

    def run(
        self, name: str, call: Callable[[], Verdict], *, dtype: torch.dtype | None = None,
        inputs: Any = None, must_answer: bool = False,
    ) -> str:  # fmt: skip
        """Runs one check and returns its status: ok, wrong or skipped.

        A solution may refuse an input with a clear error (see `refusal`): "skipped", its message
        beginning with "refused". Own float32 inputs it must answer (`must_answer`).
        """
        shapes = [list(x.shape) for x in tensors(inputs)]
        kind = str(dtype).removeprefix("torch.") if dtype is not None else ""
        self.started = f"{name} {kind}".strip()
        self.report({"started": self.started})
        try:
            verdict = call()
            status = "ok" if verdict.ok else "wrong"
        except Skip as reason:
            status, verdict = "skipped", Verdict(True, message=str(reason))
        except DeviceLost:
            raise
        except torch.OutOfMemoryError as error:
            status, verdict = "skipped", Verdict(True, message=describe(error))
        except Exception as error:
            check_device(self.device)
            refused = not must_answer and refusal(error)
            status = "skipped" if refused else "wrong"
            verdict = Verdict(False, message=("refused: " if refused else "") + describe(error))
        check = {
            "name": name, "dtype": kind, "shape": shapes, "status": status,
            "error": verdict.error, "reference_error": verdict.reference_error,
            "ratio": verdict.ratio, "message": verdict.message,
        }  # fmt: skip
        self.checks.append(check)
        self.report({"check": check})
        return status


def refusal(error: Exception) -> bool:
    """Whether a solution's error says what it does not take, rather than that it failed.

    ValueError and NotImplementedError (TORCH_CHECK_VALUE, TORCH_CHECK_NOT_IMPLEMENTED in C++)
    say so by their type; RuntimeError and TypeError (TORCH_CHECK) by naming ModelNew.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, ValueError | NotImplementedError):
        return True
    return isinstance(error, RuntimeError | TypeError) and "ModelNew" in str(error)
