"""What the tests of products share that run solutions on the CPU: loading and judging them, and
their host code with torch's own headers."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cpu
import torch
from contracted import Made
from test_on_cpu import memory
from torch import nn

from modelnew.measure.nested import cast, tensors

Models = Callable[[str], nn.Module]


def groups(texts: Mapping[str, str], bare: str = "bare") -> list[list[str]]:
    """Texts that are compiled together: `bare` and its copy with a small workspace, which are run
    under AddressSanitizer, alone; the others by halves."""
    first = [texts[bare], texts["a small workspace"]]
    others = [text for text in texts.values() if text not in first]
    return [first[:1], first[1:], others[::2], others[1::2]]


def loading(texts: Mapping[str, str], cache: Path, extension: Path) -> Models:
    """What gives the model of each of `texts`, whose kernels `extension` has."""

    def load(name: str) -> nn.Module:
        space = cpu.load_on_cpu(texts[name], cache, extension)
        model: nn.Module = space["ModelNew"]()
        return model.eval()

    return load


@torch.no_grad()
def judge(made: Made, mine: nn.Module, inputs: Sequence[Any]) -> None:
    """That a solution gives what its reference does, in value, dtype, shape and strides.

    Where a result is a sum in which all cancels, ours and theirs err by as much as in others, so an
    error is one of the largest result. NaN and infinities are where theirs are.
    """
    theirs: nn.Module = made.ref.namespace["Model"]().eval()
    own, truth = theirs(*inputs), copy.deepcopy(theirs).double()(*cast(inputs, torch.float64))
    before = memory(inputs)
    found = mine(*inputs)
    assert all(map(torch.equal, memory(inputs), before)), "an input is changed"
    for y, near, true in zip(*map(tensors, (found, own, truth)), strict=True):
        assert (y.dtype, y.shape, y.stride()) == (near.dtype, near.shape, near.stride())
        ulp = torch.finfo(near.dtype).eps if near.is_floating_point() else 0.0
        true = true.to(near.dtype).double()  # what overflows, and masks
        y, near = y.double(), near.double()
        finite = near.isfinite()
        assert torch.equal(y[~finite].nan_to_num(), near[~finite].nan_to_num())
        assert torch.equal(y.isnan(), near.isnan())
        y, near, true = (x[finite] for x in (y, near, true))
        allowed = 2 * (near - true).abs().max() + 2 * ulp * true.abs().max()
        assert (y - true).abs().max() <= allowed, f"{(y - true).abs().max():.3g} of {allowed:.3g}"


def host_problems(sources: Iterable[object], folder: Path) -> list[str]:
    """What g++ has to say of host code with torch's own headers, of each in turn."""
    # torch's own build writes this header.
    header = folder / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n")
    flags = [f"-isystem{folder}" for folder in (folder, *cpu.include_folders())]
    flags += ["-std=c++17", "-fsyntax-only", "-Wall", "-Werror"]

    def problem(numbered: tuple[int, object]) -> str:
        number, text = numbered
        source = folder / f"{number}.cpp"
        source.write_text(str(text))
        command = ["g++", *flags, str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr[:4000]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(problem, enumerate(sources)))
