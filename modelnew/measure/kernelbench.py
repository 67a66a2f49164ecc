"""KernelBench's own verdict on the same files: its evaluation and its static checker."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import types
from pathlib import Path
from typing import Any

import torch

from modelnew.measure.child import Json, Report
from modelnew.measure.load import failure
from modelnew.measure.turn import hold

TRIALS = 5
# What its evaluation imports for its language models and has no use for here.
UNUSED = ("openai", "litellm", "dotenv", "pydantic", "requests")


class _Record:
    """Stands in for pydantic.BaseModel: class attributes are defaults, arguments replace them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def child(payload: Json, report: Report) -> Json:
    """Evaluates the files in a KernelBench checkout's own way; called in the child process.

    Status ok when it gave a verdict: `compiled`, `correct`, `message` (why not), `checker_errors`
    and `checker_warnings` of its static checker, and of a wrong one `reference_correct`: whether
    the reference passes as its own solution, which random models and integer inputs do not.
    `starved` when memory was lacking while others shared the GPU.
    """
    alone = payload.get("alone", True)
    try:
        evaluate, check = _imported(Path(payload["kernelbench"]))
        reference, solution = (
            Path(payload[name]).read_text(encoding="utf-8") for name in ("reference", "solution")
        )
        with hold(payload.get("lock"), report, alone=alone):
            answer = _evaluated(evaluate, check, reference, solution, payload["device"])
        lacking = "out of memory" in answer["message"]  # it is caught there, and counts as wrong
        return {**answer, "starved": lacking and not alone}
    except Exception as error:
        return failure(error, alone=alone)


def _evaluated(evaluate: Any, check: Any, reference: str, solution: str, device: str) -> Json:
    def verdict(text: str) -> Any:
        return evaluate(
            reference, text, num_correct_trials=TRIALS, measure_performance=False,
            device=torch.device(device, 0), backend="cuda", precision=torch.float32,
        )  # fmt: skip

    _, errors, warnings = check(solution, backend="cuda", precision="fp32")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # Its inputs are drawn on the GPU: on the CPU that takes longer than all the rest.
        torch.set_default_device(device)
        result = verdict(solution)
        if result is None:
            return {"status": "error", "message": f"no verdict: {printed.getvalue()[-500:]}"}
        found: Json = {"correct": bool(result.correctness), "message": ""}
        if not found["correct"]:
            same = verdict(f"{reference}\nModelNew = Model\n")
            found["reference_correct"] = same is not None and bool(same.correctness)
            found["message"] = str(result.metadata)[-1500:]
    return {
        "status": "ok", "compiled": bool(result.compiled), **found,
        "checker_errors": list(errors), "checker_warnings": list(warnings),
    }  # fmt: skip


def _imported(folder: Path) -> tuple[Any, Any]:
    """Its `eval_kernel_against_ref` and `validate_kernel_static`, from the checkout in `folder`."""
    sources = folder / "src"
    if not (sources / "kernelbench" / "eval.py").exists():
        raise FileNotFoundError(f"{folder}: no checkout of KernelBench (src/kernelbench/eval.py)")
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            stand_in = types.ModuleType(name)
            stand_in.__dict__.update(
                BaseModel=_Record, OpenAI=object, completion=None, load_dotenv=lambda *_, **__: None
            )
            sys.modules[name] = stand_in
    sys.path.insert(0, str(sources))
    evaluation = importlib.import_module("kernelbench.eval")
    checker = importlib.import_module("kernelbench.kernel_static_checker")
    return evaluation.eval_kernel_against_ref, checker.validate_kernel_static
