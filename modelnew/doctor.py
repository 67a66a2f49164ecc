"""What this machine lacks to build and run a generated solution, and how to get it.

A solution is compiled by ``torch.utils.cpp_extension.load_inline`` when its file is loaded, and
what is missing then surfaces far from its cause. `diagnose` looks at the same places in the same
order as torch does and names the command that helps. It prints nothing, changes nothing, and
imports torch only when called, so that a broken torch is a finding instead of a traceback.
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Version = tuple[int, int]

_MIN_PYTHON: Version = (3, 11)
_MIN_TORCH: Version = (2, 11)
# The first GCC that knows -std=c++20, which torch 2.13 passes to every extension.
_MIN_GCC = 10
# The oldest driver branch for each CUDA major version; its minor versions need no newer one.
_MIN_DRIVER = {12: "525", 13: "580"}
# These five are needed together. nvcc alone pulls the newest nvvm, whose PTX an older ptxas
# refuses ("Unsupported .version"), and without cccl cuda_fp16.h lacks <nv/target>. The
# meta-package pins them to one release.
_TOOLKIT_WHEELS = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]"
# The wheels of CUDA 12 hold ptxas but no nvcc.
_FIRST_CUDA_WITH_NVCC_WHEEL = 13
# torch's last guess, after CUDA_HOME, CUDA_PATH and PATH.
_DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
_HEADER = "include/cuda_runtime.h"
# A build takes seconds, a minute at worst; a lock older than this has lost its process.
_STALE_LOCK_SECONDS = 600.0

# The names that torch.utils.cpp_extension expands; Kepler is left out, no nvcc since 12 has it.
_NAMED_ARCHES = {
    "Maxwell+Tegra": "5.3", "Maxwell": "5.0;5.2+PTX", "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2", "Volta": "7.0+PTX", "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7", "Ampere": "8.0;8.6+PTX", "Ada": "8.9+PTX", "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0", "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}  # fmt: skip
_ARCH = re.compile(r"([1-9]\d?)\.(\d)(a?)(\+PTX)?")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    name: what it is, unique within a diagnosis. ok: whether a solution can be built and run as
    far as this one is concerned. found: what the machine has, in words. advice: the command
    that helps, empty when `ok`. necessary: False when a solution can still build and run
    although `ok` is False.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    necessary: bool = True


class _Arch(NamedTuple):
    number: Version
    exact: bool
    ptx: bool

    def runs_on(self, gpu: Version) -> bool:
        """Machine code runs on later minor versions of its major, PTX on all later, "a" on none."""
        if self.exact:
            return self.number == gpu
        return self.number <= gpu and (self.ptx or self.number[0] == gpu[0])


@dataclass(frozen=True)
class _Torch:
    """What the installed torch says of itself; `version` is None when it cannot be imported."""

    version: str | None
    cuda: str | None = None
    gpus: tuple[tuple[str, Version], ...] = ()
    capabilities: tuple[Version, ...] = ()
    problem: str = ""

    @property
    def cuda_major(self) -> int | None:
        return int(self.cuda.split(".")[0]) if self.cuda else None


def diagnose() -> list[Finding]:
    """Everything that building and running a solution needs, one finding each, in build order.

    Raises nothing for a broken machine: whatever cannot be read is a finding with ok=False.
    """
    torch = _read_torch()
    home = _torch_cuda_home()
    return [
        _check_python(),
        _check_torch(torch),
        _check_driver(torch, _driver_cuda()),
        _check_gpu(torch),
        _check_nvcc(torch, home),
        _check_toolkit_files(torch, home),
        _check_compiler("C++ compiler", "CXX", None),
        _check_compiler("host compiler of nvcc", "CC", home),
        _check_python_headers(),
        _check_ninja(),
        _check_arch_list(torch, _nvcc_arches(home)),
        _check_cache(torch),
        _check_locks(torch),
    ]


def find_nvcc() -> Path | None:
    """The first nvcc that can be executed, or None.

    Looked for in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda and in site-packages/nvidia/cu13,
    where torch does not look: `diagnose` then tells to set CUDA_HOME.
    """
    return next(_nvccs(), None)


def valid_arch(text: str) -> bool:
    """Whether torch takes `text` as TORCH_CUDA_ARCH_LIST.

    Valid: X.Y, X.Ya (from 9.0a on), either with +PTX, and torch's names ("Hopper"), separated
    by one space or semicolon: torch splits at each and refuses an empty element. Not valid:
    90, sm_90, 12.0f, commas, a trailing separator.
    """
    return _parse_arches(text) is not None


def _parse_arches(text: str) -> list[_Arch] | None:
    arches = []
    for element in text.replace(" ", ";").split(";"):
        for number in _NAMED_ARCHES.get(element, element).split(";"):
            match = _ARCH.fullmatch(number)
            # Architecture-specific code starts with Hopper: nvcc has no compute_80a.
            if match is None or (match[3] and int(match[1]) < 9):
                return None
            arches.append(_Arch((int(match[1]), int(match[2])), bool(match[3]), bool(match[4])))
    return arches


def _run(*command: str) -> str | None:
    """Standard output and error of a command, or None when it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


def _read_torch() -> _Torch:
    try:
        import torch
    except (ImportError, OSError) as error:
        return _Torch(None, problem=str(error).splitlines()[0] if str(error) else repr(error))
    # torch warns, rather than raises, when the driver is too old or a GPU is unsupported.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gpus = tuple(
                (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
                for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
            )
            numbers = [re.match(r"sm_(\d+)(\d)", name) for name in torch.cuda.get_arch_list()]
            problem = str(caught[0].message).splitlines()[0] if caught else ""
        except RuntimeError as error:
            gpus, numbers, problem = (), [], str(error).splitlines()[0]
    capabilities = tuple((int(n[1]), int(n[2])) for n in numbers if n)
    return _Torch(str(torch.__version__), torch.version.cuda, gpus, capabilities, problem)


def _driver_cuda() -> Version | None:
    """The newest CUDA version that the installed driver supports, or None without a driver."""
    version = ctypes.c_int()
    try:
        # Needs no initialised device, and works where nvidia-smi is not installed (containers).
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else (version.value // 1000, version.value % 1000 // 10)


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _nvccs() -> Iterator[Path]:
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    candidates = [Path(home) / "bin/nvcc" for home in named if home]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(_DEFAULT_CUDA_HOME / "bin" / "nvcc")
    for folder in sys.path:
        # Newest first: cu14 before cu13.
        candidates += sorted(Path(folder or ".").glob("nvidia/cu*/bin/nvcc"), reverse=True)
    return (path for path in candidates if _executable(path))


def _torch_cuda_home() -> Path | None:
    """The folder that torch.utils.cpp_extension will take nvcc, headers and libcudart from."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(named)
    if on_path := shutil.which("nvcc"):
        return Path(on_path).parent.parent
    return _DEFAULT_CUDA_HOME if _DEFAULT_CUDA_HOME.exists() else None


def _nvcc_version(nvcc: Path) -> Version | None:
    match = re.search(r"release (\d+)\.(\d+)", _run(str(nvcc), "--version") or "")
    return (int(match[1]), int(match[2])) if match else None


def _nvcc_arches(home: Path | None) -> frozenset[Version]:
    """The compute capabilities that the toolkit can compile for; empty when unknown."""
    listed = (_run(str(home / "bin/nvcc"), "--list-gpu-arch") or "") if home else ""
    return frozenset((int(a), int(b)) for a, b in re.findall(r"compute_(\d+)(\d)\b", listed))


def _library_folder(home: Path) -> Path:
    """The folder that torch passes to the linker: lib64, or lib when only that exists."""
    return home / "lib" if not (home / "lib64").exists() else home / "lib64"


def _compiler(variable: str) -> list[str]:
    """The command behind CXX (torch's C++ part) or CC (torch hands it on to nvcc)."""
    return shlex.split(os.environ.get(variable, "")) or [{"CXX": "c++", "CC": "gcc"}[variable]]


def _compiler_version(command: list[str]) -> tuple[str, int] | None:
    """Its family, gcc or clang, and major version; None when it does not run."""
    banner = _run(*command, "--version") or ""
    if clang := re.search(r"clang version (\d+)", banner):
        return "clang", int(clang[1])
    number = re.match(r"\d+", _run(*command, "-dumpversion") or "") if banner else None
    return ("gcc", int(number[0])) if number else None


def _newest_accepted(home: Path, family: str) -> int | None:
    """The newest host compiler that this toolkit takes, as its own header states it."""
    try:
        text = (home / "include" / "crt" / "host_config.h").read_text(errors="replace")
    except OSError:
        return None
    pattern = r"__GNUC__\s*>\s*(\d+)" if family == "gcc" else r"__clang_major__\s*>=\s*(\d+)"
    limit = re.search(pattern, text)
    return int(limit[1]) - (family == "clang") if limit else None


def _cache_root(torch: _Torch) -> Path:
    """Where torch builds extensions: one folder each, with the lock of a build inside."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    accelerator = f"cu{torch.cuda.replace('.', '')}" if torch.cuda else "cpu"
    python = f"py{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
    return Path(cache) / "torch_extensions" / f"{python}_{accelerator}"


def _pip(*packages: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def _toolkit_advice(torch: _Torch) -> str:
    """Commands that give torch a complete toolkit of its own major version."""
    for nvcc in _nvccs():
        version = _nvcc_version(nvcc)
        if version is None or torch.cuda_major not in (None, version[0]):
            continue
        # nvcc may be a wrapper or a link far from its toolkit: only nvcc knows where that is.
        top = re.search(r"^#\$ TOP=(.+)$", _run(str(nvcc), "--dryrun", "x.cu") or "", re.M)
        homes = [nvcc.parent.parent, *([Path(top[1]).resolve()] if top else [])]
        for home in homes:
            if (home / _HEADER).is_file() and _executable(home / "bin/nvcc"):
                steps = [_cudart_fix(home), f"export CUDA_HOME={_quoted(home)}"]
                return " && ".join(filter(None, steps))
    return _install_advice(torch)


def _install_advice(torch: _Torch) -> str:
    major = torch.cuda_major or _FIRST_CUDA_WITH_NVCC_WHEEL
    if major < _FIRST_CUDA_WITH_NVCC_WHEEL:
        home = Path(f"/usr/local/cuda-{torch.cuda}")
        return f"install NVIDIA's CUDA toolkit {torch.cuda}, then: export CUDA_HOME={home}"
    home = Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{major}"
    install = _pip(f"{_TOOLKIT_WHEELS}=={torch.cuda or major}.*")
    link = f"ln -sf libcudart.so.{major} {_quoted(home / 'lib/libcudart.so')}"
    return f"{install} && {link} && export CUDA_HOME={_quoted(home)}"


def _cudart_fix(home: Path) -> str | None:
    """None when torch's -lcudart links, else the command for it; "" when there is none.

    The wheels hold libcudart.so.13 but not the plain name that the linker looks for.
    """
    # Distribution packages put it where the linker looks anyway; the compiler prints a full
    # path for a library that it finds and the bare name for one that it does not.
    printed = _run(*_compiler("CXX"), "-print-file-name=libcudart.so") or ""
    folder = _library_folder(home)
    if (folder / "libcudart.so").exists() or Path(printed.strip()).is_absolute():
        return None
    versioned = sorted(folder.glob("libcudart.so.*"))
    plain = _quoted(folder / "libcudart.so")
    return f"ln -sf {_quoted(versioned[0].name)} {plain}" if versioned else ""


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _check_python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= _MIN_PYTHON:
        return Finding("Python", True, found)
    return Finding("Python", False, found, "apt-get install python3.11 python3.11-venv (or newer)")


def _check_torch(torch: _Torch) -> Finding:
    wanted = f"torch>={_dotted(_MIN_TORCH)}"
    if torch.version is None:
        return Finding("torch", False, f"cannot be imported: {torch.problem}", _pip(wanted))
    number = re.match(r"(\d+)\.(\d+)", torch.version)
    if number is None or (int(number[1]), int(number[2])) < _MIN_TORCH:
        return Finding("torch", False, torch.version, _pip("--upgrade", wanted))
    if torch.cuda is None:
        # Without --force-reinstall pip keeps the present build: its version satisfies.
        advice = _pip("--force-reinstall", wanted)
        return Finding("torch", False, f"{torch.version}, a build without CUDA", advice)
    return Finding("torch", True, f"{torch.version}, built for CUDA {torch.cuda}")


def _check_driver(torch: _Torch, driver: Version | None) -> Finding:
    major = torch.cuda_major or _FIRST_CUDA_WITH_NVCC_WHEEL
    branch = _MIN_DRIVER.get(major, max(_MIN_DRIVER.values()))
    if driver is None:
        advice = f"install an NVIDIA driver of branch {branch} or newer; in a container: "
        advice += "start it with its GPUs, as in docker run --gpus all"
        return Finding("NVIDIA driver", False, "none (libcuda.so.1 cannot be loaded)", advice)
    found = f"supports CUDA {_dotted(driver)}"
    if torch.cuda_major is None or driver[0] >= torch.cuda_major:
        return Finding("NVIDIA driver", True, found)
    found += f", torch is built for CUDA {torch.cuda}"
    advice = f"update the driver to branch {branch} or newer, or install a torch build for "
    return Finding("NVIDIA driver", False, found, f"{advice}CUDA {driver[0]}")


def _check_gpu(torch: _Torch) -> Finding:
    if not torch.gpus:
        advice = "nvidia-smi must list a GPU; without one a solution can be built but not run"
        found = f"none visible{f': {torch.problem}' if torch.problem else ''}"
        if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            found += f" (CUDA_VISIBLE_DEVICES={hidden!r})"
            advice = "unset CUDA_VISIBLE_DEVICES"
        return Finding("GPU", False, found, advice)
    found = ", ".join(f"{gpu} ({_dotted(number)})" for gpu, number in torch.gpus)
    oldest = min(torch.capabilities, default=(0, 0))
    if all(number >= oldest for _, number in torch.gpus):
        return Finding("GPU", True, found)
    advice = f"this torch has kernels from compute capability {_dotted(oldest)} on: hide older "
    return Finding("GPU", False, found, f"{advice}GPUs with CUDA_VISIBLE_DEVICES")


def _check_nvcc(torch: _Torch, home: Path | None) -> Finding:
    if home is None or not _executable(home / "bin/nvcc"):
        found = f"none in {home}/bin" if home else "none in CUDA_HOME or on PATH"
        return Finding("nvcc", False, found, _toolkit_advice(torch))
    nvcc = home / "bin/nvcc"
    version = _nvcc_version(nvcc)
    if version is None:
        return Finding("nvcc", False, f"{nvcc} --version fails", _toolkit_advice(torch))
    found = f"{_dotted(version)} ({nvcc})"
    if torch.cuda_major in (None, version[0]):
        return Finding("nvcc", True, found)
    found += f", torch is built for CUDA {torch.cuda}"
    return Finding("nvcc", False, found, _toolkit_advice(torch))


def _check_toolkit_files(torch: _Torch, home: Path | None) -> Finding:
    name = "CUDA headers and libcudart"
    if home is None or not (home / _HEADER).is_file():
        found = f"no cuda_runtime.h in {home}/include" if home else "no CUDA folder"
        return Finding(name, False, found, _toolkit_advice(torch))
    fix = _cudart_fix(home)
    if fix is not None:
        found = f"no {_library_folder(home) / 'libcudart.so'}"
        return Finding(name, False, found, fix or _install_advice(torch))
    return Finding(name, True, str(home))


def _check_compiler(name: str, variable: str, home: Path | None) -> Finding:
    """`home` is the toolkit whose nvcc must accept the compiler; None for torch's C++ part."""
    command = _compiler(variable)
    version = _compiler_version(command)
    if version is None:
        advice = f"unset {variable}" if os.environ.get(variable) else "apt-get install g++"
        return Finding(name, False, f"{shlex.join(command)} does not run", advice)
    family, major = version
    found = f"{family} {major} ({shlex.join(command)})"
    wanted = _MIN_GCC if family == "gcc" and major < _MIN_GCC else None
    if home and (newest := _newest_accepted(home, family)):
        found += f", nvcc accepts {family} up to {newest}"
        if major > newest:
            wanted = _newest_accepted(home, "gcc")
    if wanted is None:
        return Finding(name, True, found)
    advice = f"apt-get install g++-{wanted} && export CC=gcc-{wanted} CXX=g++-{wanted}"
    return Finding(name, False, found, advice)


def _check_python_headers() -> Finding:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Finding("Python headers", True, str(header.parent))
    package = f"python{_dotted(sys.version_info[:2])}-dev"
    return Finding("Python headers", False, f"no {header}", f"apt-get install {package}")


def _check_ninja() -> Finding:
    on_path = shutil.which("ninja")
    if on_path and (version := _run(on_path, "--version")):
        return Finding("ninja", True, f"{version.strip()} ({on_path})")
    # A venv that is used by its full path, not activated, has ninja where torch never looks.
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if _executable(folder / "ninja"):
            advice = f'export PATH={_quoted(folder)}:"$PATH"'
            return Finding("ninja", False, f"{folder / 'ninja'}, which is not on PATH", advice)
    advice = f'{_pip("ninja")} && export PATH={_quoted(sysconfig.get_path("scripts"))}:"$PATH"'
    return Finding("ninja", False, "none on PATH that runs", advice)


def _check_arch_list(torch: _Torch, supported: frozenset[Version]) -> Finding:
    """`supported`: what nvcc can compile for; empty when unknown, which then checks nothing."""
    name = "TORCH_CUDA_ARCH_LIST"
    text = os.environ.get(name, "")
    capabilities = sorted({number for _, number in torch.gpus})
    advice = f'export {name}="{";".join(map(_dotted, capabilities)) or "9.0"}"'
    if not capabilities:
        advice += " (the compute capability of the GPU that will run the solution)"
    if text in ("", "native"):
        if not capabilities:
            found = "not set and no GPU to ask: building raises IndexError: list index out of range"
            return Finding(name, False, found, advice)
        found = "not set: torch asks the GPU"
        # torch compiles for what it knows itself when the GPU is newer, and adds PTX for it.
        newest = max(torch.capabilities, default=capabilities[-1])
        arches: list[_Arch] | None = [_Arch(min(newest, c), False, True) for c in capabilities]
    else:
        found, arches = text, _parse_arches(text)
    if arches is None:
        found = f"{text!r}: torch takes X.Y, X.Ya or either with +PTX, separated by one ; or space"
        return Finding(name, False, found, advice)
    if supported and any(arch.number not in supported for arch in arches):
        known = " ".join(map(_dotted, sorted(supported)))
        return Finding(name, False, f"{found}; nvcc compiles for {known} only", advice)
    missed = [c for c in capabilities if not any(arch.runs_on(c) for arch in arches)]
    if missed:
        return Finding(name, False, f"{found}: nothing in it runs on {_dotted(missed[0])}", advice)
    return Finding(name, True, found)


def _check_cache(torch: _Torch) -> Finding:
    root = _cache_root(torch)
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    advice = 'export TORCH_EXTENSIONS_DIR="$HOME/torch_extensions" (any folder you can write)'
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = f"{root} cannot be written ({existing} is in the way)"
        return Finding("extension cache", False, found, advice)
    return Finding("extension cache", True, str(root))


def _check_locks(torch: _Torch) -> Finding:
    """torch waits for ever, in silence, on the lock of a build whose process was killed."""
    name = "extension locks"
    stale = []
    for lock in sorted(_cache_root(torch).glob("*/lock")):
        # The build may end between the two calls.
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime > _STALE_LOCK_SECONDS:
                stale.append(lock)
    if not stale:
        return Finding(name, True, "none stale", necessary=False)
    found = f"{len(stale)} older than {_STALE_LOCK_SECONDS / 60:.0f} minutes: loading waits on it"
    advice = shlex.join(["rm", *map(str, stale)])
    return Finding(name, False, found, advice, necessary=False)
