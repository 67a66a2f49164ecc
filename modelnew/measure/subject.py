"""A reference and its solution side by side in one dtype, and the recorder of their checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modelnew.measure.child import Json, Report, describe
from modelnew.measure.gate import Verdict
from modelnew.measure.load import Files, construct, lacks_memory, synchronize
from modelnew.measure.nested import tensors

RUN_SEED = 1234


class Skip(Exception):
    """The check does not apply; the message says why."""


class DeviceLost(RuntimeError):
    """The device answers nothing any more: an illegal access or a device-side assertion."""


class ReferenceLost(DeviceLost):
    """The reference itself lost the device: that says nothing of the solution."""


@dataclass(frozen=True)
class Subject:
    """The models under test. `truth` is the reference upcast exactly from the tested dtype.

    `buffers` are restored before each run, so that runs do not depend on one another. `alone` says
    that no other process takes the device's memory: where it lacks, waiting would not help.
    """

    reference: nn.Module
    solution: nn.Module
    truth: nn.Module
    buffers: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    alone: bool = True

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
    truth = _upcast(construct(files.reference, device, arguments.args, arguments.kwargs), reference)
    return Subject(reference, solution, truth, buffers, dtype, device)


def _upcast(truth: nn.Module, reference: nn.Module) -> nn.Module:
    """`truth` in float64 with the reference's state.

    A copy would not do: functions that a constructor makes call the modules of the original.
    """
    truth.double().load_state_dict(reference.state_dict())
    with torch.no_grad():
        for name, buffer in reference.named_buffers():
            truth.get_buffer(name).copy_(buffer)
    return truth


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


def forward(subject: Subject, model: nn.Module, inputs: Any, *, seed: int = RUN_SEED) -> Json:
    """One call under a seed: {"output": ..., "<buffer>": ...}, device errors raised."""
    with torch.no_grad():
        if subject.buffers:
            model.load_state_dict(subject.buffers, strict=False)
        torch.manual_seed(seed)
        output = model(*inputs)
        state = model.state_dict() if subject.buffers else {}
        results: Json = {name: state[name].clone() for name in subject.buffers}
        results["output"] = output
        synchronize(subject.device)
    return results


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
    starved: bool = False  # memory was lacking
    barred: Collection[str] = ()  # checks in which the reference itself lost the device before

    def truths(self) -> dict[str, int]:
        """How many checks had their truth computed where."""
        return dict(Counter(c["truth"] for c in self.checks if c["truth"]))

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
            if self.started in self.barred:
                raise Skip("the reference itself loses the device")
            verdict = call()
            status = "ok" if verdict.ok else "wrong"
        except Skip as reason:
            status, verdict = "skipped", Verdict(True, message=str(reason))
        except DeviceLost:
            raise
        except Exception as error:
            check_device(self.device)
            lacking, refused = lacks_memory(error), not must_answer and refusal(error)
            self.starved |= lacking
            status = "skipped" if lacking or refused else "wrong"
            verdict = Verdict(False, message=("refused: " if refused else "") + describe(error))
        check = {
            "name": name, "dtype": kind, "shape": shapes, "status": status,
            "error": verdict.error, "reference_error": verdict.reference_error,
            "ratio": verdict.ratio, "message": verdict.message, "truth": verdict.truth,
        }  # fmt: skip
        self.checks.append(check)
        self.report({"check": check})
        return status


def refusal(error: Exception) -> bool:
    """Whether a solution's error says what it does not take, rather than that it failed.

    ValueError and NotImplementedError (TORCH_CHECK_VALUE, TORCH_CHECK_NOT_IMPLEMENTED in C++)
    say so by their type; RuntimeError and TypeError (TORCH_CHECK) by naming ModelNew.
    """
    if lacks_memory(error):
        return False
    if isinstance(error, ValueError | NotImplementedError):
        return True
    return isinstance(error, RuntimeError | TypeError) and "ModelNew" in str(error)
