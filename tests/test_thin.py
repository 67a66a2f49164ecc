"""The files of products with few rows or columns (thinned.py): their text, and what nvcc makes of
it. Values are judged in test_thin_on_cpu.py, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_solutions as solutions
from multiplied import host_problems
from test_solutions import Built, compiled, needs_nvcc, oldest_arch
from thinned import CASES, made

from modelnew import products
from modelnew.explain import page
from modelnew.ir import Contraction, Library
from modelnew.products import KINDS, THIN

# What nvcc compiles: every width, masks and half operands, and one for the oldest GPU.
COMPILED = ("mv", "half", "bare", "outputs", "addmm")
OLDEST = "addmm"


def keywords(name: str) -> Mapping[str, object]:
    return solutions.asked(made(name).text)


def cuda_of(name: str) -> str:
    text = keywords(name)["cuda_sources"]
    assert isinstance(text, str)
    return text


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    """It keeps the rules for solutions, asks for no architecture, and every product is a kernel's
    of its width."""
    text, case = made(name).text, CASES[name]
    assert not solutions.text_faults(text)
    assert not solutions.extension_faults(keywords(name))
    assert keywords(name)["extra_cuda_cflags"] == ["-O3"]
    steps = [step for plan in made(name).plan.modes for step in plan.steps]
    contractions = [step for step in steps if isinstance(step, Contraction)]
    assert contractions
    assert {step.kind for step in contractions} == {THIN}
    assert not [s for s in steps if isinstance(s, Library) and not s.node.views]
    assert set(map(products.width, contractions)) == {case.width}
    widths = re.findall(r"return run_thin<(\d+)>", cuda_of(name))
    assert set(widths) == {str(case.width)}
    assert len(widths) == {"half": 2, "two": 3}.get(name, 1)
    assert "cuda.h" not in re.findall(r"#include <(.*)>", cuda_of(name))


@pytest.mark.parametrize("name", CASES)
def test_explained(name: str) -> None:
    """By `explain` and by the header of the file."""
    shown = page(made(name).plan)
    assert re.search(r"^    \[.*\] x \[.*\], thin$", shown, re.M)
    assert "few rows or columns" in made(name).text.split("import torch")[0]
    assert "two float16 each" not in made(name).text


def test_kinds_side_by_side() -> None:
    """No product is for both: each row for what it says."""
    split, thin = KINDS["split"].limits, KINDS[THIN].limits
    assert thin.most is not None
    assert thin.most < split.lines


# --- nvcc ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("nvcc")


def too_many_registers() -> str:
    """A fault: so many rows a thread that they do not fit in registers."""
    cuda, old = cuda_of("addmm"), "constexpr int kThinRows = 4;"
    assert old in cuda
    return cuda.replace(old, "constexpr int kThinRows = 16;")


@pytest.fixture(scope="module")
def built(folder: Path) -> Mapping[str, Built]:
    """Two compilers at a time."""
    jobs = {name: (cuda_of(name), "90") for name in COMPILED}
    jobs["oldest"] = (cuda_of(OLDEST), oldest_arch())
    jobs["faulty"] = (too_many_registers(), "90")
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda job: compiled(job[0], job[1], "c++17", folder), jobs.values())
        return dict(zip(jobs, found, strict=True))


@needs_nvcc
@pytest.mark.parametrize("name", COMPILED)
def test_nvcc(name: str, built: Mapping[str, Built]) -> None:
    """Without a word, a register in memory, an inexact instruction, or loads one by one."""
    cuda = cuda_of(name)
    assert built[name].problem == ""
    assert not solutions.ptx_faults(built[name], cuda)
    assert not solutions.log_faults(built[name], cuda)


@needs_nvcc
def test_nvcc_for_the_oldest_gpu(built: Mapping[str, Built]) -> None:
    """There the kernels are the same."""
    assert built["oldest"].problem == ""
    assert not solutions.ptx_faults(built["oldest"], cuda_of(OLDEST))
    assert not solutions.log_faults(built["oldest"], cuda_of(OLDEST))


@needs_nvcc
def test_planted_faults_are_seen(built: Mapping[str, Built]) -> None:
    assert solutions.log_faults(built["faulty"], too_many_registers())
    cuda, ptx = cuda_of("mv"), built["mv"].ptx
    entries = dict(solutions.ENTRY.findall(ptx))
    assert not solutions.thin_faults(entries)
    single = {name: body.replace(".v4.", ".") for name, body in entries.items()}
    assert len(solutions.thin_faults(single)) == 2
    assert len(solutions.product_faults(dict(list(entries.items())[:-1]), cuda)) >= 1


# --- the host code with torch's own headers ------------------------------------------------------


def test_host_code(tmp_path: Path) -> None:
    """It includes all that it uses, for each of PyTorch's products that it may fall back to."""
    sources = [keywords(name)["cpp_sources"] for name in ("linear", "bmm", "addmv")]
    assert host_problems(sources, tmp_path) == [""] * 3
