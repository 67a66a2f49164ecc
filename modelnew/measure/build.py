"""The build step: compiles a solution and reads the reference's plan, on the CPU alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from modelnew.explain import page
from modelnew.ir import Contraction, Library, ModelNewError, Plan
from modelnew.measure.child import Json, Report, describe
from modelnew.measure.load import execute_solution
from modelnew.pipeline import planned
from modelnew.products import PRODUCTS

MULTIPLYING = {*PRODUCTS, "einsum", "dot"}


def child(payload: Json, report: Report) -> Json:
    """Compiles the solution and describes the reference; called in the child process.

    The plan serves the roofline and the report. A reference that this generator cannot plan may
    still be measured beside a solution from elsewhere: "plan" is then None and `plan_message`
    says why.
    """
    algebra = payload.get("algebra", False)
    about = describe_plan(Path(payload["reference"]), payload["overrides"], algebra=algebra)
    report({"started": "build"})
    begin = time.perf_counter()
    try:
        execute_solution(Path(payload["solution"]))
    except Exception as error:
        return {**about, "status": "error", "message": describe(error)}
    seconds = round(time.perf_counter() - begin, 3)
    return {**about, "status": "ok", "message": "", "build_seconds": seconds}


def describe_plan(reference: Path, overrides: Mapping[str, str], *, algebra: bool = False) -> Json:
    """What the plan says of a task: its text, least bytes moved, kind, number of kernels."""
    try:
        _, plan = planned(reference, overrides, algebra=algebra)
    except Exception as error:
        blank = dict.fromkeys(("plan", "bytes_moved", "kind", "kernels"))
        message = str(error) if isinstance(error, ModelNewError) else describe(error)
        return {**blank, "plan_message": message}
    return {
        "plan": page(plan), "bytes_moved": plan.bytes, "kind": kind(plan),
        "kernels": len(plan.kernels), "plan_message": "",
    }  # fmt: skip


def kind(plan: Plan) -> str:
    """The kind of region that dominates the task, and whether kernels of ours are beside it."""
    library = (step.node for step in plan.steps if isinstance(step, Library))
    calls = {node.packet for node in library if not node.views}
    calls |= {step.node.packet for step in plan.steps if isinstance(step, Contraction)}
    if any("conv" in call for call in calls):
        main = "convolution"
    elif calls & MULTIPLYING:
        main = "product"
    elif calls:
        main = "library"
    else:
        return "pointwise"
    return f"{main} + pointwise" if plan.kernels else main
