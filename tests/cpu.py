"""Runs solution files end to end on the CPU: their own kernels, launchers, host code and class.

The C++ and CUDA text that a file hands to load_inline is compiled by g++ against the stand-in
headers of tests/cpu_runtime. Three things are changed in it: `kernel<<<...>>>(...)` becomes a call
that runs the threads one after another, `__shared__` variables become memory that each block has
anew, and `is_cuda()` becomes `is_cpu()`. In a file with `__syncthreads` a thread that waits there,
or for its warp, leaves its turn to the others. A product's functions in assembly are those of
cpu_runtime/hopper.h, which do what the tensor cores and the copy engine do. Kernels are built with
UndefinedBehaviorSanitizer, so that a misaligned access or an index out of bounds raises.

torch's headers cost g++ about 15 s whatever follows them, so all files of a run are built together,
each in its own namespace. Objects are kept under the hash of all that they are made from.
What this cannot show: threads that meet in memory at one moment, and an `#include` that is missing.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import cpp_extension

from modelnew.doctor import find_nvcc
from modelnew.measure.nested import tensors

RUNTIME = Path(__file__).resolve().parent / "cpu_runtime"
CHECKS = "alignment,bounds,bool,enum,integer-divide-by-zero,null,shift,signed-integer-overflow"
KERNEL_FLAGS = ("-O1", f"-fsanitize={CHECKS}")
ADDRESS_FLAGS = ("-fsanitize=address",)

_LAUNCH = re.compile(r"(\w+)<<<(.+?),\s*(\w+),\s*([\w.]+|\w+<\w+>),\s*stream>>>\(")
_SHARED_ARRAY = re.compile(r"\bextern __shared__ ([\w:]+) (\w+)\[\];")
_SHARED_VARIABLES = re.compile(r"\b__shared__ (\w+) (\w+(?:\[[^;,]+\])+), (\w+(?:\[[^;,]+\])+);")
_SHARED_VARIABLE = re.compile(
    r"\b__shared__ (?:alignas\(16\) )?([\w:<>, ]+?) (\w+)((?:\[[^\]]+\])*);"
)
IN_ASSEMBLY = (
    "cluster_sync", "of_block", "barrier_init", "barrier_expect", "barrier_arrive", "barrier_wait",
    "copy_pieces", "copy_box", "multiply", "begin_multiplying", "commit_multiplying",
    "finish_multiplying", "pin", "shared_address", "larger_of", "multiply_halves",
    "finish_previous",
)  # fmt: skip
_PRODUCT = re.compile(r"\brun_\w*product\(")  # in the text of a file with one
_INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)

Namespace = dict[str, Any]


@dataclass(frozen=True)
class Sources:
    """What one solution file asks load_inline to build."""

    cpp: str
    cuda: str
    functions: tuple[str, ...]

    @property
    def name(self) -> str:
        return "s_" + _digest([self.cpp, self.cuda, *self.functions])


def sources(text: str) -> Sources | None:
    """What `text` asks load_inline to build; None when it has no kernels."""
    asked: list[Sources] = []

    def record(*, cpp_sources: str, cuda_sources: str, functions: list[str], **_: Any) -> None:
        asked.append(Sources(cpp_sources, cuda_sources, tuple(functions)))

    _execute(text, record)
    return asked[0] if asked else None


def build(
    groups: Sequence[Iterable[str]], folder: Path, *, address: Collection[int] = (),
    brief: Collection[int] = (),
) -> Path:  # fmt: skip
    """One extension with the kernels of all texts, those of a group in one translation unit.

    The groups whose numbers are in `address` are built with AddressSanitizer too. Those of `brief`
    run so little that it does not pay to optimize them.
    """
    seen: dict[str, Sources] = {}
    units: list[tuple[str, Sequence[str]]] = []
    for number, group in enumerate(groups):
        found = {s.name: s for s in map(sources, group) if s is not None and s.name not in seen}
        seen |= found
        flags = (*KERNEL_FLAGS, *(ADDRESS_FLAGS if number in address else ()))
        flags = ("-O0", *flags[1:]) if number in brief else flags
        units.append((kernel_unit(list(found.values())), flags))
    units.insert(0, (_host_unit(list(seen.values())), ("-O0",)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda unit: _object(*unit, folder), units))
    return _linked(objects, ADDRESS_FLAGS if address else (), folder)


def load_on_cpu(text: str, folder: Path, extension: Path | None = None) -> Namespace:
    """Executes a solution file and returns its globals.

    `extension` is what `build` gave for a collection that `text` is part of; without it the file
    is built alone.
    """
    asked = sources(text)
    if asked is None:
        return _execute(text, None)
    module = _imported(extension or build([[text]], folder))
    return _execute(text, lambda **_: getattr(module, asked.name))


def check_addresses(script: str, extension: Path, texts: Sequence[str]) -> None:
    """Runs `script` under AddressSanitizer; skips the test where g++ has no shared library of it.

    The script finds the models of `texts`, whose kernels `extension` has, in the list `models`. It
    prints "clean", makes a planted access that must be seen, and prints "not seen".
    """
    answer = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    library = Path(answer.stdout.strip())
    if not library.is_absolute():
        pytest.skip("g++ has no shared libasan")
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.py" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", _MODELS + script, f"{here}:{here.parent}", extension, *files],
            env={
                **os.environ, "LD_PRELOAD": str(library.resolve()),
                "ASAN_OPTIONS": "detect_leaks=0",
            },
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    said = done.stdout + done.stderr
    assert said.startswith("clean"), said[-4000:]
    assert "not seen" not in said, said[-4000:]
    assert "ERROR: AddressSanitizer: heap-" in said, said[
        -4000:
    ]  # overflow, or into what was freed


_MODELS = """
import sys, torch
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
import cpu
extension, *texts = map(Path, sys.argv[2:])
models = [cpu.load_on_cpu(t.read_text(), t.parent, extension)["ModelNew"]() for t in texts]
"""


def unsigned_zeros(tree: Any) -> Any:
    """`tree` with its zeros made positive: PyTorch's CPU and CUDA kernels disagree about them."""
    for x in tensors(tree):
        if x.is_floating_point():
            x[x == 0] = 0
    return tree


def _execute(text: str, load_inline: Callable[..., Any] | None) -> Namespace:
    namespace: Namespace = {"__name__": "solution"}
    with mock.patch.object(cpp_extension, "load_inline", load_inline):
        exec(compile(text, "<solution>", "exec"), namespace)
    return namespace


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _host_unit(every: Sequence[Sources]) -> str:
    """The host wrappers with their bindings, a submodule for each file."""
    lines = [
        line
        for s in every
        for function in s.functions
        for line in [f'    bind({s.name}, "{function}", &{s.name}::{function});']
    ]
    bodies = [(s.name, s.cpp.replace("is_cuda()", "is_cpu()")) for s in every]
    return "\n".join(
        [
            _in_namespaces(bodies),
            "PYBIND11_MODULE(TORCH_EXTENSION_NAME, root) {",
            "    auto bind = [](pybind11::module& m, const char* name, auto function) {",
            "        m.def(name, torch::wrap_pybind_function(function), name);",
            "    };",
            *(f'    pybind11::module {s.name} = root.def_submodule("{s.name}");' for s in every),
            *lines,
            "}\n",
        ]
    )


def kernel_unit(every: Sequence[Sources], more: str = "") -> str:
    """The kernels with their launchers, and `more` code behind those of each file."""
    bodies = [(s.name, _on_cpu(s.cuda) + more) for s in every]
    assert not any("<<<" in body for _, body in bodies), "a launch of a form that is not known here"
    header = "hopper.h" if any("__grid_constant__" in s.cuda for s in every) else "cuda_on_cpu.h"
    return f"#include <{header}>\n" + _in_namespaces(bodies)


def _on_cpu(cuda: str) -> str:
    """Launches and shared memory as calls of tests/cpu_runtime."""
    launch = "launch_blocks" if "__syncthreads()" in cuda else "launch_threads"
    kernel = r"\1"
    if _PRODUCT.search(cuda):
        cuda = _without_assembly(cuda)
        cuda = _SHARED_VARIABLES.sub(r"__shared__ \1 \2; __shared__ \1 \3;", cuda)
        kernel = r"[&](const auto&... a) { \1(a...); }"  # a template's arguments are deduced
    cuda = _LAUNCH.sub(rf"cpu_runtime::{launch}({kernel}, \2, \3, \4, ", cuda)
    memory = "cpu_runtime::fibers->dynamic_memory()"
    cuda = _SHARED_ARRAY.sub(rf"\1* const \2 = static_cast<\1*>({memory});", cuda)
    memory = r"cpu_runtime::fibers->variable(&\2_place, sizeof(\2_type))"
    variable = rf"auto& \2 = *static_cast<\2_type*>({memory});"
    return _SHARED_VARIABLE.sub(
        rf"using \2_type = \1\3; static const char \2_place = 0; {variable}", cuda
    )


def _without_assembly(cuda: str) -> str:
    """With what cpu_runtime/hopper.h has for the functions of a product that are in assembly."""
    for name in IN_ASSEMBLY:
        head = rf"^(?:template <[^>]*>\n)?__device__ inline \w+ {name}\("
        cuda, count = re.subn(rf"{head}[^{{]*{{([^\n]*|.*?^)}}\n", "", cuda, flags=re.M | re.S)
        assert count or not re.search(rf"\b{name}\(", cuda), f"no function {name}"
    cuda = re.sub(r"\basm volatile\(\"(setmaxnreg|fence)\.[^;]*;\"[^;]*\);", ";", cuda)
    cuda = re.sub(r"^#if (defined\(__CUDA_ARCH_FEAT_SM90_ALL\)|__CUDA_ARCH__ >= 900)$", "#if 1",
                  cuda, flags=re.M)  # fmt: skip
    assert "asm volatile" not in cuda, "assembly that is not known here"
    return cuda


def _in_namespaces(bodies: Sequence[tuple[str, str]]) -> str:
    includes = dict.fromkeys(line for _, body in bodies for line in _INCLUDE.findall(body))
    spaces = [f"namespace {name} {{\n{_INCLUDE.sub('', body)}}}" for name, body in bodies]
    return "\n".join([*includes, *spaces, ""])


@cache
def _toolkit() -> Path:
    """The toolkit's folder, asked of nvcc itself: the one on PATH may be a script elsewhere."""
    nvcc = find_nvcc()
    assert nvcc is not None, "no CUDA toolkit, whose headers are needed: see generate.py doctor"
    done = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=True)
    top = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    assert top is not None, done.stderr
    return Path(top[1])


def include_folders() -> list[str]:
    """Where the headers are that a solution is compiled with."""
    python = sysconfig.get_path("include")
    return [*cpp_extension.include_paths(), python, str(_toolkit() / "include")]


def _include_flags() -> list[str]:
    return [f"-I{RUNTIME}", *(f"-isystem{folder}" for folder in include_folders())]


def _object(text: str, flags: Sequence[str], folder: Path) -> Path:
    headers = [path.read_text() for path in sorted(RUNTIME.rglob("*.h"))]
    name = _digest([text, *flags, *headers, torch.__version__])
    target = folder / f"{name}.o"
    if not target.exists():
        source = folder / f"{name}.cpp"
        source.write_text(text)
        module = "-DTORCH_EXTENSION_NAME=solutions_on_cpu"
        own = ["-std=c++20", "-fPIC", "-Wall", "-Wno-unknown-pragmas", module, *flags]
        _compile(["-c", *own, *_include_flags(), str(source)], target)
    return target


def library(text: str, folder: Path) -> Path:
    """A library of C++ that needs nothing of torch's, for ctypes."""
    compiled = _object(text, KERNEL_FLAGS, folder)
    target = compiled.with_suffix(".so")
    if not target.exists():
        _compile(["-shared", str(compiled)], target)
    return target


def _linked(objects: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    target = folder / f"{_digest([path.name for path in objects])}.so"
    if not target.exists():
        folders = [f"-L{folder}" for folder in cpp_extension.library_paths()]
        libraries = ["-ltorch_python", "-ltorch_cpu", "-lc10"]
        _compile(["-shared", *flags, *map(str, objects), *folders, *libraries], target)
    return target


def _compile(arguments: Sequence[str], target: Path) -> None:
    half = target.with_suffix(f".{os.getpid()}{target.suffix}")
    done = subprocess.run(
        ["g++", *arguments, "-o", str(half)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"g++ refuses:\n{done.stderr[:4000]}"
    half.replace(target)


def _imported(path: Path) -> ModuleType:
    # pybind11 gives what was loaded before under a full name; Python wants the last part of it.
    name = f"{path.stem}.solutions_on_cpu"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
