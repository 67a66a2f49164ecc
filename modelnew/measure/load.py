"""Executes a reference and a solution, and builds models and inputs from them."""

from __future__ import annotations

import ast
import re
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelnew.ir import ModelNewError
from modelnew.measure.child import Json, describe
from modelnew.measure.nested import map_tensors
from modelnew.reference import parse


@dataclass(frozen=True)
class Files:
    """A reference and its solution, executed: constructors and input functions."""

    reference: Callable[..., nn.Module]
    solution: Callable[..., nn.Module]
    get_inputs: Callable[[], Any]
    get_init_inputs: Callable[[], Any]
    load_seconds: float


def load_files(reference: Path, solution: Path, overrides: Mapping[str, str]) -> Files:
    """Executes both files; the solution's import (`load_seconds`) compiles what is not built yet.

    Raises ModelNewError naming the file when one cannot be executed or lacks what it must define.
    """
    model = execute_reference(reference, overrides)
    begin = time.perf_counter()
    new = execute_solution(solution)
    seconds = time.perf_counter() - begin
    init_inputs = getattr(model, "get_init_inputs", list)
    return Files(model.Model, new.ModelNew, model.get_inputs, init_inputs, seconds)


def execute_reference(path: Path, overrides: Mapping[str, str]) -> types.ModuleType:
    """Executes the reference file, its module constants replaced by `overrides`."""
    module = _execute(parse(path, overrides)[1], path, "modelnew_measured_reference")
    _must_define(module, path, "Model", "get_inputs")
    return module


def execute_solution(path: Path) -> types.ModuleType:
    """Executes the solution file, which compiles its kernels where that was not done before."""
    module = _execute(parse(path, {})[1], path, "modelnew_measured_solution")
    _must_define(module, path, "ModelNew")
    return module


def _must_define(module: types.ModuleType, path: Path, *names: str) -> None:
    missing = [name for name in names if not callable(getattr(module, name, None))]
    if missing:
        raise ModelNewError(f"{path}: defines no {', '.join(missing)}")


def _execute(tree: ast.Module, path: Path, name: str) -> types.ModuleType:
    """Executes as harnesses do, by exec and without `__file__`.

    The module is listed in sys.modules, where copy, pickle and torch.compile look it up.
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ModelNewError(f"{path}: import: {describe(error)}") from error
    return module


def construct(
    make: Callable[..., nn.Module], device: torch.device, args: Any, kwargs: Mapping[str, Any]
) -> nn.Module:
    """Builds a model under the fixed seed, its parameters created on `device`."""
    torch.manual_seed(0)
    with device:
        model = make(*args, **kwargs)
    return model.to(device)


def own_inputs(files: Files, seed: int, device: torch.device) -> list[Any]:
    """The reference's `get_inputs()` under `seed`."""
    return draw_inputs(files.get_inputs, seed, device)


def draw_inputs(get_inputs: Callable[[], Any], seed: int, device: torch.device) -> list[Any]:
    """`get_inputs()` under `seed`, drawn on `device` where the file's code allows it."""
    torch.manual_seed(seed)
    try:
        with device:
            inputs = get_inputs()
    except RuntimeError:  # a generator or a buffer of the file's own that lives on the CPU
        inputs = get_inputs()
    return [map_tensors(lambda t: t.to(device), x) for x in inputs]


def resolve(name: str) -> torch.device:
    """The device of that name with its index, so that it equals the tensors' own."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that its errors are raised where they were caused."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lacks_memory(error: BaseException) -> bool:
    """Whether the device's memory did not suffice: PyTorch's allocator, CUDA or a library says so.

    What CUDA itself allocates, such as a context or a kernel's code, fails as AcceleratorError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    said = re.search(r"out of memory|STATUS_ALLOC_FAILED", str(error))
    return isinstance(error, RuntimeError) and said is not None


def failure(error: Exception, *, alone: bool) -> Json:
    """The answer of a child that an error ended; `starved` where others took the memory."""
    starved = lacks_memory(error) and not alone
    return {"status": "error", "message": describe(error), "starved": starved}


def facts(device: torch.device) -> Json:
    """What a row says about the machine: device name, torch and CUDA versions."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if on_gpu else None,
    }
