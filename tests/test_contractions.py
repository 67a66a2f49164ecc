"""The files of products with every kind of epilogue (contracted.py): their text, and what nvcc
makes of it. Values are judged in test_contractions_on_cpu.py, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_solutions as solutions
import torch
from contracted import EVERY, made
from multiplied import host_problems
from test_solutions import Built, compiled, needs_nvcc, oldest_arch

from modelnew.folding import fold
from modelnew.formula import WIDTH
from modelnew.ir import Contraction, Library

# What nvcc compiles for a Hopper GPU, and of that also for the oldest: these have every kind of
# operand and of result. Those left out are simpler, and tests/test_solutions.py has one of them.
HOPPER = ("number", "half", "outputs", "moved", "half number", "both kinds")
OLDEST = ("moved", "half bare")


# --- text ----------------------------------------------------------------------------------------


def keywords(name: str) -> Mapping[str, object]:
    return solutions.asked(made(name).text)


def cuda_of(name: str) -> str:
    text = keywords(name)["cuda_sources"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", EVERY)
def test_text(name: str) -> None:
    """It keeps the rules for solutions, and no string is broken."""
    text = made(name).text
    assert not solutions.text_faults(text)
    assert not solutions.extension_faults(keywords(name))
    code = [re.sub(r"//.*", "", line) for line in str(keywords(name)["cpp_sources"]).splitlines()]
    assert not [line for line in code if line.count('"') % 2]


@pytest.mark.parametrize("name", EVERY)
def test_kernels(name: str) -> None:
    """Each product is a kernel's, one where they are alike, and has as many epilogues as dtypes
    of masks and half operands ask for."""
    case, given = EVERY[name], made(name)
    steps = [step for plan in given.plan.modes for step in plan.steps]
    contractions = [step for step in steps if isinstance(step, Contraction)]
    assert len(contractions) == case.kernels
    assert not [s for s in steps if isinstance(s, Library) and not s.node.views
                and s.node.packet != "dropout"]  # fmt: skip
    names = {step.name for step in contractions}
    cuda = cuda_of(name)
    assert len(re.findall(r"^struct \w+_epilogue \{", cuda, re.M)) == len(names)
    assert sum(solutions.products_of(cuda).values()) == case.epilogues


def test_a_string_is_not_folded() -> None:
    """A message with commas stays whole on a line of its own, however long."""
    message = f'"{"some words, " * 9}"'
    line = f'    TORCH_CHECK(first.sizes() == second.sizes(), {message}, first.sizes(), ": again");'
    pieces = fold(line).split("\n")
    assert [message in piece for piece in pieces] == [False, True]
    assert len(pieces[0]) <= WIDTH


def test_architectures_are_asked_for_where_a_product_is() -> None:
    """A file without products leaves them to torch."""
    assert keywords("bare")["extra_cuda_cflags"] == ["-O3", *solutions.GENCODE]
    assert solutions.extension("relu")["extra_cuda_cflags"] == ["-O3"]
    text = made("bare").text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        space: dict[str, object] = {"torch": torch}
        found = solutions.ARCHITECTURES.search(text)
        assert found is not None
        exec(f"{found[0]}flags = _architectures()", space)
    assert space["flags"] == [], "none, where the machine has no GPU: torch knows which then"


# --- nvcc ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("nvcc")


# Faults planted in the text of a case: ptxas says that it orders tensor instructions one behind the
# other, or keeps registers in memory.
PLANTED: Mapping[str, tuple[str, str, str, str]] = {
    "a sum that is read too early": (
        "bare", "                finish_multiplying();\n                pin(run);\n", "",
        "serialized: ",
    ),
    "a half product's": (
        "half bare", "    finish_multiplying();\n    pin(sum);\n", "", "serialized: ",
    ),
}  # fmt: skip


def planted(name: str) -> str:
    case, old, new, _ = PLANTED[name]
    cuda = cuda_of(case)
    assert old in cuda
    return cuda.replace(old, new)


@pytest.fixture(scope="module")
def built(folder: Path) -> Mapping[str, Built]:
    """Two compilers at a time."""
    jobs = {name: (cuda_of(name), "90a") for name in HOPPER}
    jobs |= {f"{name}, oldest": (cuda_of(name), oldest_arch()) for name in OLDEST}
    jobs |= {name: (planted(name), "90a") for name in PLANTED}
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda job: compiled(job[0], job[1], "c++17", folder), jobs.values())
        return dict(zip(jobs, found, strict=True))


@needs_nvcc
@pytest.mark.parametrize("name", HOPPER)
def test_nvcc(name: str, built: Mapping[str, Built]) -> None:
    """Without a word, a register in memory, an inexact instruction, or tensor instructions one
    behind the other."""
    cuda = cuda_of(name)
    assert built[name].problem == ""
    assert not solutions.ptx_faults(built[name], cuda)
    assert not solutions.log_faults(built[name], cuda)


@needs_nvcc
@pytest.mark.parametrize("name", OLDEST)
def test_nvcc_for_the_oldest_gpu(name: str, built: Mapping[str, Built]) -> None:
    """There the kernels that need Hopper are empty."""
    result = built[f"{name}, oldest"]
    assert not solutions.warnings_of(result.problem)
    assert not solutions.empty_faults(result.ptx)
    assert not solutions.log_faults(result, cuda_of(name))


@needs_nvcc
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_seen(name: str, built: Mapping[str, Built]) -> None:
    faults = solutions.log_faults(built[name], planted(name))
    assert any(PLANTED[name][3] in fault for fault in faults), faults


# --- the host code with torch's own headers ------------------------------------------------------


def test_host_code(tmp_path: Path) -> None:
    """It includes all that it uses, for each of PyTorch's products that it may fall back to."""
    sources = [keywords(name)["cpp_sources"] for name in ("bare", "linear", "half bare")]
    assert host_problems(sources, tmp_path) == [""] * 3
