"""Verifies a solution against its reference, in a process of its own: one row, many checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from modelnew.files import REAL, algebra_lines
from modelnew.ir import ModelNewError
from modelnew.measure import checks
from modelnew.measure.child import Json, Report, describe
from modelnew.measure.gate import Verdict, degenerate
from modelnew.measure.jobs import GROUPS
from modelnew.measure.load import (
    Files,
    facts,
    failure,
    lacks_memory,
    load_files,
    own_inputs,
    resolve,
)
from modelnew.measure.nested import cast, map_tensors, tensors, twin
from modelnew.measure.subject import (
    Arguments,
    DeviceLost,
    Recorder,
    ReferenceLost,
    Skip,
    Subject,
    build_subject,
    forward,
)
from modelnew.measure.truth import judge, reference_runs
from modelnew.measure.turn import hold
from modelnew.measure.variants import (
    DTYPES,
    LAYOUTS,
    Filling,
    Shape,
    Sizing,
    block,
    laid_out,
    listed,
    make,
    partly,
    sizings,
    sliced_last,
    specials,
    sprinkle,
    templates,
)

OWN = Sizing("own")
LARGE_FREE_BYTES = 60 * 10**9
LARGE_ELEMENTS = 1 << 31
LARGE_EXTRA = 1031  # rows beyond 2^31 elements
LARGE_TOTAL = 3 * LARGE_ELEMENTS  # of all inputs together


@dataclass
class _Plan:
    """What the groups of checks share: files, own inputs as templates, sizings found so far."""

    files: Files
    device: torch.device
    seeds: int
    large: bool
    alone: bool
    recorder: Recorder
    init_inputs: Any = ()
    tree: Any = ()
    fill: str = "normal"
    found: dict[tuple[str, bool], Sizing | None] = field(default_factory=dict)
    degenerate: list[str] = field(default_factory=list)
    real: bool = False  # whether the solution is right in real arithmetic alone: no infinities

    @property
    def arguments(self) -> Arguments:
        return Arguments(tuple(self.init_inputs))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [template.shape for template in listed(self.tree)]

    def filling(self, dtype: torch.dtype = torch.float32, values: str = "") -> Filling:
        return Filling(values or self.fill, dtype, self.device)

    def inputs(self, shape: Shape, dtype: torch.dtype = torch.float32, values: str = "") -> Any:
        return make(self.tree, shape, self.filling(dtype, values))

    def sizing(self, kind: str, subject: Subject, *, both: bool = False) -> Sizing | None:
        """The first sizing of the kind that the reference takes, with `both` the solution too."""
        key = kind, both
        if key not in self.found:
            choices = sizings(kind, self.tree, self.device)
            self.found[key] = next(
                (s for s in choices if checks.accepts(subject, self.inputs(s), both=both)), None
            )
        return self.found[key]

    def middle(self, subject: Subject) -> Shape:
        """A mid-size shape that both models take; the own one when there is none."""
        return self.sizing("mid", subject, both=True) or OWN


def child(payload: Json, report: Report) -> Json:
    """Runs all checks of the payload's groups; called in the child process.

    The answer has status ok, wrong or error (cannot be loaded, or nothing could be compared) or
    crashed (the device was lost); `checks` (name, dtype, input shapes, status, errors, ratio of
    error to allowed error, message, where the truth was computed); `complete`, whether every
    group of checks ran; `degenerate`, what makes the task's own output no test of anything;
    `starved`, whether memory was lacking while others shared the GPU. Status "lost" with
    `reference_lost` names the check in which the reference itself lost the device: the child can
    be run again with it in "barred".
    """
    alone = payload.get("alone", True)
    try:
        files = load_files(
            Path(payload["reference"]), Path(payload["solution"]), payload["overrides"]
        )
        with hold(payload.get("lock"), report, alone=alone):
            return _checked(files, payload, report)
    except Exception as error:
        return failure(error, alone=alone)


def _checked(files: Files, payload: Json, report: Report) -> Json:
    device = resolve(payload["device"])
    about = {**facts(device), "load_seconds": round(files.load_seconds, 3)}
    report({"facts": about})
    recorder = Recorder(report, device, barred=payload.get("barred", ()))
    alone = payload.get("alone", True)
    plan = _Plan(files, device, payload["seeds"], payload["large"], alone, recorder)
    lines = algebra_lines(Path(payload["solution"]))
    plan.real = any(line.endswith(REAL) for line in lines)
    status, message = _run_groups(plan, payload["groups"])
    lost = {"reference_lost": recorder.started} if status == "lost" else {}
    return {
        **lost,
        **about, "status": status, "message": message, "checks": recorder.checks,
        "complete": status == "ok" and list(payload["groups"]) == list(GROUPS),
        "degenerate": plan.degenerate, "truth": recorder.truths(),
        "starved": recorder.starved and not alone,
    }  # fmt: skip


def _run_groups(plan: _Plan, groups: list[str]) -> tuple[str, str]:
    """Runs the groups; returns the row's status and message."""
    recorder = plan.recorder
    try:
        plan.init_inputs = plan.files.get_init_inputs()
        plan.tree = templates(own_inputs(plan.files, 0, plan.device))
        if "state" in groups:
            step = partial(checks.state, plan.files, plan.arguments)
            recorder.run("state", step, must_answer=True)
        if "own" in groups:
            _own(plan)
        chosen = [call for name, call in _VARIED.items() if name in groups]
        for subject in _moved(plan) if chosen else ():
            for call in chosen:
                call(plan, subject)
    except ReferenceLost as error:
        return "lost", f"the reference loses the device during {recorder.started!r}: {error}"
    except DeviceLost as error:
        last = recorder.started or "the start"
        return "crashed", f"during {last!r}: {error}"
    except Exception as error:
        recorder.starved |= lacks_memory(error)
        return "error", describe(error)
    wrong = [check for check in recorder.checks if check["status"] == "wrong"]
    if wrong:
        return "wrong", f"{wrong[0]['name']} {wrong[0]['dtype']}: {wrong[0]['message']}"
    return "ok", ""


def _built(plan: _Plan, dtype: torch.dtype, *, perturb: bool) -> Subject | None:
    """The subject in `dtype`; building it is a check of its own."""
    holder: list[Subject] = []

    def build() -> Verdict:
        made = build_subject(plan.files, dtype, plan.device, plan.arguments, perturb=perturb)
        holder.append(replace(made, alone=plan.alone))
        return Verdict(True)

    name = "build, moved weights" if perturb else "build"
    plan.recorder.run(name, build, dtype=dtype, must_answer=dtype == torch.float32)
    return holder[0] if holder else None


def _judged(
    plan: _Plan, name: str, subject: Subject, inputs: Any, must_answer: bool = False
) -> str:
    call = partial(judge, subject, inputs)
    return plan.recorder.run(
        name, call, dtype=subject.dtype, inputs=inputs, must_answer=must_answer
    )


def _skipped(plan: _Plan, name: str, subject: Subject, why: str) -> None:
    def skip() -> Verdict:
        raise Skip(why)

    plan.recorder.run(name, skip, dtype=subject.dtype)


def _own(plan: _Plan) -> None:
    """Own inputs in float32 for every seed, then in the half types."""
    for dtype in DTYPES:
        subject = _built(plan, dtype, perturb=False)
        if subject is None:
            continue
        for seed in range(plan.seeds if dtype == torch.float32 else 1):
            inputs = cast(own_inputs(plan.files, seed, plan.device), dtype)
            single = dtype == torch.float32
            status = _judged(plan, f"own seed {seed}", subject, inputs, single)
            if single and status == "skipped":
                raise ModelNewError(f"own inputs: {plan.recorder.checks[-1]['message']}")
            if single and seed == 0:
                plan.degenerate = _degenerate(plan, subject, inputs)
                _on_own_inputs(plan, subject, inputs)
            del inputs


def _degenerate(plan: _Plan, subject: Subject, inputs: Any) -> list[str]:
    """What makes the task's own output no test, from two draws of its inputs."""
    outputs = []
    for given in (inputs, None):
        drawn = own_inputs(plan.files, 1, plan.device) if given is None else given
        drawn = map_tensors(twin, drawn)
        outputs.append(forward(subject, subject.reference, drawn)["output"])
    return degenerate(*outputs)


def _on_own_inputs(plan: _Plan, subject: Subject, inputs: Any) -> None:
    """What needs the real size: races, writes into the inputs."""
    for name, check in (("repeatable", checks.repeatable), ("untouched", checks.untouched)):
        plan.recorder.run(
            f"{name}, own inputs", partial(check, subject, inputs), dtype=torch.float32,
            inputs=inputs, must_answer=True,
        )  # fmt: skip


def _moved(plan: _Plan) -> Iterator[Subject]:
    """The subject with moved weights in each dtype that can be built, float32 first."""
    for dtype in DTYPES:
        subject = _built(plan, dtype, perturb=True)
        if subject is not None:
            if dtype == torch.float32:
                plan.fill = _chosen_fill(plan, subject)
            yield subject


def _chosen_fill(plan: _Plan, subject: Subject) -> str:
    """Normal values where the reference is mostly finite with them, else its own values."""
    try:
        own, _ = reference_runs(subject, plan.inputs(plan.middle(subject)))
    except Skip:
        return "own"
    except Exception as error:  # float64 needs twice what the reference took
        if not (lacks_memory(error) and subject.alone):
            raise
        return "normal"
    results = [x for x in tensors(own["output"]) if x.is_floating_point() and x.numel()]
    finite = (float(torch.isfinite(x).double().mean()) for x in results)
    return "own" if any(share < 0.5 for share in finite) else "normal"


# --- groups of varied inputs ---------------------------------------------------------------------


def _sizes(plan: _Plan, subject: Subject) -> None:
    single = subject.dtype == torch.float32
    for kind in ("odd", "prime", "ones", "empty") if single else ("odd",):
        sizing = plan.sizing(kind, subject)
        if sizing is None:
            _skipped(plan, f"sizes {kind}", subject, "the reference takes no such shape")
            continue
        for values in ("normal", "own") if kind == "odd" else (plan.fill,):
            name = f"sizes {kind} ({sizing.mode}), {values} values"
            _judged(plan, name, subject, plan.inputs(sizing, subject.dtype, values))
    if not single:
        return
    ranked = [shape for shape in plan.shapes if shape]
    last = Sizing("all", {ranked[0][-1]: 0}) if ranked else OWN
    for name, shape in (("0-dim", Sizing("scalar")), ("empty last", last)):
        inputs = plan.inputs(shape)
        if checks.accepts(subject, inputs):
            _judged(plan, f"sizes {name}", subject, inputs)
        else:
            _skipped(plan, f"sizes {name}", subject, "the reference takes no such shape")


def _layouts(plan: _Plan, subject: Subject) -> None:
    shape = plan.middle(subject)
    single = subject.dtype == torch.float32
    for name, layout in LAYOUTS.items():
        if single or name == "offset":
            inputs = laid_out(plan.inputs(shape, subject.dtype), layout)
            if inputs is not None:
                _judged(plan, f"layout {name}", subject, inputs)
    for dense, name in ((0, "first"), (-1, "last")) if single else ():
        inputs = partly(plan.inputs(shape), sliced_last, dense)
        if inputs is not None:
            _judged(plan, f"layout {name} input dense, others sliced", subject, inputs)


def _values(plan: _Plan, subject: Subject) -> None:
    shape = plan.middle(subject)
    for values in ("magnitudes", "near zero", "tiny"):
        _judged(plan, f"values {values}", subject, plan.inputs(shape, subject.dtype, values))
    dense = plan.inputs(shape, subject.dtype)
    for place, name in enumerate(checks.names(dense)):
        for label, change in _changes(subject.dtype, plan.real):
            check = f"values {label} in input {name}"
            if plan.real and "inf" in label:  # 2 inf - inf is NaN, and (2 - 1) inf is not
                _skipped(plan, check, subject, "algebra holds for numbers, not for infinities")
            else:
                _judged(plan, check, subject, _with(dense, place, change))


def _changes(
    dtype: torch.dtype, real: bool
) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    values = specials(dtype)
    for label, value in values.items():
        yield label, partial(sprinkle, values=[value])
    together = [value for label, value in values.items() if not (real and "inf" in label)]
    yield "all of them", partial(sprinkle, values=together)
    for label in ("-inf", "nan"):
        yield f"block of {label}", partial(block, value=values[label])


def _with(inputs: Any, place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The inputs with floating tensor number `place` changed."""
    chosen = [x for x in tensors(inputs) if x.is_floating_point()][place]
    return map_tensors(lambda x: change(x) if x is chosen else x, inputs)


def _behaviour(plan: _Plan, subject: Subject) -> None:
    if subject.dtype != torch.float32:
        return
    shape = plan.middle(subject)
    inputs = plan.inputs(shape)
    other = make(plan.tree, shape, replace(plan.filling(), seed=1))
    steps: tuple[tuple[str, Callable[[], Verdict]], ...] = (
        ("train()", partial(checks.modes, subject, inputs, True)),
        ("eval()", partial(checks.modes, subject, inputs, False)),
        ("repeatable", partial(checks.repeatable, subject, inputs)),
        ("untouched", partial(checks.untouched, subject, inputs)),
        ("poisoned memory", partial(checks.poisoned, subject, inputs)),
        ("backward", partial(checks.backward, subject, inputs)),
        ("other stream", partial(checks.other_stream, subject, inputs)),
        ("CUDA graph", partial(checks.graph, subject, inputs, other)),
        ("other GPU", partial(checks.other_gpu, subject, inputs)),
    )
    for name, step in steps:
        plan.recorder.run(name, step, dtype=torch.float32, inputs=inputs)


def _constructor(plan: _Plan, subject: Subject) -> None:
    if subject.dtype != torch.float32:
        return
    choices = list(sizings("mid", plan.tree, plan.device))
    small = next((s for s in reversed(choices) if s.mode == "first"), OWN)
    for change in checks.changes(plan.files, plan.init_inputs):
        followed = small.then(Sizing("all", {int(change.old): int(change.new)}))
        inputs = [plan.inputs(shape) for shape in (plan.middle(subject), small, followed)]
        plan.recorder.run(
            f"constructor {change.name}: {change.old!r} to {change.new!r}",
            partial(checks.constructor, plan.files, plan.device, change, inputs),
            dtype=torch.float32,
        )


def _large(plan: _Plan, subject: Subject) -> None:
    """More than 2^31 elements in float16, along the first dimension of the largest input."""
    if subject.dtype != torch.float16:
        return
    for kind in ("mid", "odd"):
        shape, note = _large_shape(plan, kind, subject)
        name = f"large, {kind} rows"
        if shape is None:
            _skipped(plan, name, subject, note)
            continue
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(plan.device)[0] < LARGE_FREE_BYTES:
            plan.recorder.starved = True
            _skipped(plan, name, subject, "needs 60 GB of free device memory")
            continue
        call = partial(_judge_made, plan, subject, shape)
        plan.recorder.run(f"{name} {note}", call, dtype=torch.float16)
        torch.cuda.empty_cache()


def _judge_made(plan: _Plan, subject: Subject, shape: Shape) -> Verdict:
    return judge(subject, plan.inputs(shape, subject.dtype))


def _large_shape(plan: _Plan, kind: str, subject: Subject) -> tuple[Shape | None, str]:
    """The shapes and their text, or None and why not."""
    if not plan.large or plan.device.type != "cuda":
        return None, "needs a CUDA device" if plan.large else "not asked for"
    sizing = plan.sizing(kind, subject)
    if sizing is None or sizing.mode != "all":
        return None, "the reference does not take other sizes in every dimension"
    shapes = [torch.Size(sizing(shape)) for shape in plan.shapes]
    biggest = max(shapes, key=torch.Size.numel)
    rows = -(-LARGE_ELEMENTS // biggest[1:].numel()) + LARGE_EXTRA
    shape = sizing.then(Sizing("all", {biggest[0]: rows}))
    scaled = [torch.Size(shape(own)) for own in plan.shapes]
    if sum(size.numel() for size in scaled) > LARGE_TOTAL:
        return None, "the inputs together would be too large"
    return shape, str([list(size) for size in scaled])


_VARIED: Mapping[str, Callable[[_Plan, Subject], None]] = {
    "sizes": _sizes,
    "layouts": _layouts,
    "values": _values,
    "behaviour": _behaviour,
    "constructor": _constructor,
    "large": _large,
}
