"""Runs a solution's kernels once over hard shapes and layouts, for a tool that watches them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelnew.measure import checks
from modelnew.measure.child import Json, Report, describe
from modelnew.measure.load import load_files, own_inputs, resolve, synchronize
from modelnew.measure.nested import cast, tensors
from modelnew.measure.subject import Arguments, Subject, build_subject, refusal
from modelnew.measure.turn import hold
from modelnew.measure.variants import DTYPES, LAYOUTS, Filling, laid_out, make, sizings, templates

KINDS = ("odd", "prime", "ones", "mid")
OWN_LIMIT = 1 << 24  # elements of own inputs: a watched kernel is some hundred times slower


def child(payload: Json, report: Report) -> Json:
    """Calls the solution; called in the child process. Nothing is compared: the tool judges.

    `shapes` are the shapes of the inputs. Own inputs are run only where --set or the file keeps
    them small.
    """
    try:
        files = load_files(
            Path(payload["reference"]), Path(payload["solution"]), payload["overrides"]
        )
        with hold(payload.get("lock"), report, alone=payload.get("alone", True)):
            device = resolve(payload["device"])
            own = own_inputs(files, 0, device)
            arguments = Arguments(tuple(files.get_init_inputs()))
            shapes: list[Any] = []
            for dtype in DTYPES:
                subject = build_subject(files, dtype, device, arguments, perturb=False)
                for inputs in _inputs(own, subject):
                    shapes += _called(subject, inputs, report)
    except Exception as error:
        return {"status": "error", "message": describe(error)}
    if not shapes:
        return {"status": "skipped", "message": "own inputs are large: make them small by --set"}
    return {"status": "ok", "message": "", "shapes": shapes}


def _inputs(own: Any, subject: Subject) -> list[Any]:
    """Own inputs where small, then the hard sizes the reference takes, then layouts of one."""
    dtype = subject.dtype
    given = cast(own, dtype)
    small = sum(x.numel() for x in tensors(own)) <= OWN_LIMIT
    tree = templates(given)
    found = [given] if small else []
    for kind in KINDS:
        for sizing in sizings(kind, tree, subject.device):
            inputs = make(tree, sizing, Filling("normal", dtype, subject.device))
            few = sum(x.numel() for x in tensors(inputs)) <= OWN_LIMIT
            if few and checks.accepts(subject, inputs):
                found.append(inputs)
                break
    if found:
        varied = (laid_out(found[-1], layout) for layout in LAYOUTS.values())
        found += [inputs for inputs in varied if inputs is not None]
    return found


def _called(subject: Subject, inputs: Any, report: Report) -> list[Any]:
    shapes = [list(x.shape) for x in tensors(inputs)]
    report({"started": f"{subject.dtype} {shapes}"})
    try:
        with torch.no_grad():
            subject.solution(*inputs)
            synchronize(subject.device)
    except Exception as error:
        if not refusal(error):
            raise
        return []
    return [shapes]
