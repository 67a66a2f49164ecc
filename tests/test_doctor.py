"""The doctor, on machines made of a temporary folder, a PATH and fake tools."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelnew import doctor
from modelnew.doctor import Finding, diagnose, find_nvcc, valid_arch

H200 = ("NVIDIA H200", (9, 0))
B200 = ("NVIDIA B200", (10, 0))
CUDA_TORCH = doctor._Torch("2.13.0", "13.0", (H200,), ((7, 5), (8, 0), (9, 0), (10, 0)))
VARIABLES = (
    "CC",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
)


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def write_compiler(path: Path, version: int, family: str = "gcc") -> Path:
    banner = "Debian clang version" if family == "clang" else path.name
    return write_script(
        path,
        f"""case "$1" in
        --version) echo "{banner} {version}.1.0" ;;
        -dumpversion) echo {version} ;;
        -print-file-name=*) echo "${{1#*=}}" ;;
        esac""",
    )


def write_toolkit(home: Path, version: str = "13.0") -> Path:
    """A CUDA folder as the installer lays it out; returns its nvcc."""
    for name, text in {
        "include/cuda_runtime.h": "",
        "include/crt/host_config.h": "#if __GNUC__ > 15\n#if (__clang_major__ >= 21) || 1\n",
        "lib64/libcudart.so": "",
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return write_script(
        home / "bin/nvcc",
        f"""case "$1" in
        --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
        --list-gpu-arch) echo compute_75; echo compute_90; echo compute_100 ;;
        --dryrun) echo '#$ TOP={home}/bin/..' >&2 ;;
        esac""",
    )


class Machine:
    """A machine that has everything; a test takes away or breaks what it is about."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.patch = patch
        self.bin = root / "bin"
        self.cuda = root / "cuda"
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("PATH", str(self.bin))
        patch.setenv("CUDA_HOME", str(self.cuda))
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(doctor, "_DEFAULT_CUDA_HOME", root / "default")
        patch.setattr(sys, "path", [str(root / "site-packages")])
        self.executable(root / "venv/bin/python")
        self.torch(CUDA_TORCH)
        self.driver((13, 0))
        write_toolkit(self.cuda)
        write_compiler(self.bin / "c++", 13)
        write_compiler(self.bin / "gcc", 13)
        write_script(self.bin / "ninja", "echo 1.13.0")

    def torch(self, torch: doctor._Torch) -> None:
        self.patch.setattr(doctor, "_read_torch", lambda: torch)

    def driver(self, version: tuple[int, int] | None) -> None:
        self.patch.setattr(doctor, "_driver_cuda", lambda: version)

    def executable(self, path: Path) -> None:
        """Make `path` the running interpreter, with scripts and packages around it."""
        folders = {
            "scripts": str(path.parent),
            "include": str(self.root / "include"),
            "purelib": str(self.root / "site-packages"),
        }
        self.patch.setattr(sys, "executable", str(path))
        self.patch.setattr(doctor.sysconfig, "get_path", folders.__getitem__)
        (self.root / "include").mkdir(exist_ok=True)
        (self.root / "include/Python.h").touch()

    def no_toolkit(self) -> None:
        self.patch.delenv("CUDA_HOME")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def finding(name: str) -> Finding:
    (found,) = [f for f in diagnose() if f.name == name]
    return found


def bad() -> dict[str, Finding]:
    return {f.name: f for f in diagnose() if not f.ok}


# Architectures.


@pytest.mark.parametrize(
    "text",
    [
        "7.0",
        "9.0",
        "9.0a",
        "9.0+PTX",
        "9.0a+PTX",
        "12.0",
        "12.1a",
        "8.0 9.0",
        "8.0;8.6;9.0+PTX",
        "8.0 8.6;9.0",
        "Hopper",
        "Ampere+Tegra",
        "Blackwell;9.0a",
    ],
)
def test_arch_accepted(text: str) -> None:
    assert valid_arch(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "90",
        "sm_90",
        "compute_90",
        "12.0f",
        "9.0A",
        "9.0b",
        "8.0a",
        "9",
        "9.",
        "9.0.0",
        "9.00",
        "9.0+ptx",
        "9.0PTX",
        "+PTX",
        "Hopper+PTX",
        "hopper",
        "8.0,9.0",
        "8.0; 9.0",
        "9.0;",
        " 9.0",
        "9.0\n",
    ],
)
def test_arch_refused(text: str) -> None:
    assert not valid_arch(text)


@pytest.mark.parametrize("text", ["9.0", "9.0a+PTX", "8.0 8.6;9.0", "Ampere+Tegra", "Blackwell"])
def test_torch_agrees_on_accepted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert cpp_extension._get_cuda_arch_flags()


@pytest.mark.parametrize(
    "text", ["90", "sm_90", "8.0a", "8.0,9.0", "8.0; 9.0", "9.0;", "Hopper+PTX", "hopper"]
)
def test_torch_agrees_on_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(ValueError, match="Unknown CUDA arch"):
        cpp_extension._get_cuda_arch_flags()


@pytest.mark.parametrize(
    ("text", "gpu", "ok"),
    [
        ("9.0", H200, True),
        ("9.0a", H200, True),
        ("Hopper", H200, True),
        ("7.5+PTX", H200, True),
        ("7.5;9.0", H200, True),
        ("7.5", H200, False),
        ("9.0a+PTX", B200, False),
        ("9.0+PTX", B200, True),
        ("10.0", H200, False),
    ],
)
def test_arch_list_must_run_on_the_gpu(
    text: str, gpu: tuple[str, tuple[int, int]], ok: bool, machine: Machine
) -> None:
    machine.torch(doctor._Torch("2.13.0", "13.0", (gpu,), CUDA_TORCH.capabilities))
    machine.patch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert finding("TORCH_CUDA_ARCH_LIST").ok == ok


def test_arch_list_that_nvcc_cannot_compile(machine: Machine) -> None:
    machine.patch.setenv("TORCH_CUDA_ARCH_LIST", "7.0;9.0")
    found = finding("TORCH_CUDA_ARCH_LIST")
    assert not found.ok
    assert "nvcc compiles for 7.5 9.0 10.0 only" in found.found
    assert found.advice == 'export TORCH_CUDA_ARCH_LIST="9.0"'


def test_arch_list_invalid(machine: Machine) -> None:
    machine.patch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    found = finding("TORCH_CUDA_ARCH_LIST")
    assert not found.ok
    assert "'sm_90'" in found.found
    assert found.advice == 'export TORCH_CUDA_ARCH_LIST="9.0"'


@pytest.mark.parametrize("text", [None, "", "native"])
def test_arch_list_unset_without_gpu(text: str | None, machine: Machine) -> None:
    if text is not None:
        machine.patch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert finding("TORCH_CUDA_ARCH_LIST").ok
    machine.torch(doctor._Torch("2.13.0", "13.0"))
    found = finding("TORCH_CUDA_ARCH_LIST")
    assert not found.ok
    assert "IndexError" in found.found
    assert found.advice.startswith('export TORCH_CUDA_ARCH_LIST="9.0"')


def test_arch_list_unset_on_a_gpu_newer_than_torch(machine: Machine) -> None:
    rubin = ("NVIDIA R200", (14, 0))
    machine.torch(doctor._Torch("2.13.0", "13.0", (rubin,), CUDA_TORCH.capabilities))
    assert finding("TORCH_CUDA_ARCH_LIST").ok


# The whole.


def test_complete_machine_has_nothing_to_say(machine: Machine) -> None:
    findings = diagnose()
    assert [f for f in findings if not f.ok or f.advice] == []
    assert len({f.name for f in findings}) == len(findings)


def test_bare_machine_names_everything(machine: Machine) -> None:
    machine.torch(doctor._Torch(None, problem="No module named 'torch'"))
    machine.driver(None)
    machine.no_toolkit()
    for tool in ("c++", "gcc", "ninja"):
        (machine.bin / tool).unlink()
    (machine.root / "include/Python.h").unlink()
    missing = bad()
    assert set(missing) == {
        "torch",
        "NVIDIA driver",
        "GPU",
        "nvcc",
        "CUDA headers and libcudart",
        "C++ compiler",
        "host compiler of nvcc",
        "Python headers",
        "ninja",
        "TORCH_CUDA_ARCH_LIST",
    }
    assert all(f.advice and f.found and f.necessary for f in missing.values())


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    findings = diagnose()
    assert all(f.ok or f.advice for f in findings)
    assert not any(f.ok and f.advice for f in findings)
    assert capsys.readouterr() == ("", "")
    assert dict(os.environ) == before


def test_importing_the_doctor_does_not_import_torch() -> None:
    code = "import sys, modelnew.doctor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Python, torch, driver, GPU.


def test_old_python(machine: Machine) -> None:
    machine.patch.setattr(sys, "version_info", (3, 10, 4))
    assert finding("Python") == Finding(
        "Python", False, "3.10.4", "apt-get install python3.11 python3.11-venv (or newer)"
    )


@pytest.mark.parametrize(
    ("version", "cuda", "advice"),
    [
        ("2.10.1", "12.8", "-m pip install --upgrade 'torch>=2.11'"),
        ("1.13.0+cu117", "11.7", "-m pip install --upgrade 'torch>=2.11'"),
        ("2.13.0+cpu", None, "-m pip install --force-reinstall 'torch>=2.11'"),
    ],
)
def test_unfit_torch(version: str, cuda: str | None, advice: str, machine: Machine) -> None:
    machine.torch(doctor._Torch(version, cuda))
    found = finding("torch")
    assert not found.ok
    assert version in found.found
    assert found.advice == f"{sys.executable} {advice}"


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = finding("torch")
    assert not found.ok
    assert "cannot be imported" in found.found


def test_python_path_with_a_space_is_quoted(machine: Machine) -> None:
    machine.executable(machine.root / "my venv/bin/python")
    machine.torch(doctor._Torch("2.10.0", "13.0"))
    assert finding("torch").advice.startswith(f"'{machine.root}/my venv/bin/python' -m pip")


@pytest.mark.parametrize(
    ("driver", "cuda", "ok"),
    [
        ((13, 0), "13.0", True),
        ((13, 0), "13.2", True),
        ((13, 1), "12.8", True),
        ((12, 9), "13.0", False),
        ((12, 2), None, True),
        (None, "13.0", False),
    ],
)
def test_driver(
    driver: tuple[int, int] | None, cuda: str | None, ok: bool, machine: Machine
) -> None:
    machine.driver(driver)
    machine.torch(doctor._Torch("2.13.0", cuda, (H200,)))
    found = finding("NVIDIA driver")
    assert found.ok == ok
    assert ok or "branch 580" in found.advice


def test_hidden_gpu(machine: Machine) -> None:
    machine.torch(doctor._Torch("2.13.0", "13.0"))
    assert "nvidia-smi" in finding("GPU").advice
    machine.patch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert finding("GPU").advice == "unset CUDA_VISIBLE_DEVICES"


def test_gpu_older_than_torch_supports(machine: Machine) -> None:
    machine.torch(doctor._Torch("2.13.0", "13.0", (("V100", (7, 0)), H200), ((7, 5), (9, 0))))
    found = finding("GPU")
    assert not found.ok
    assert "V100 (7.0)" in found.found
    assert "7.5" in found.advice


# nvcc and its toolkit.


def test_find_nvcc_order(machine: Machine) -> None:
    wheel = write_toolkit(machine.root / "site-packages/nvidia/cu13")
    default = write_toolkit(machine.root / "default")
    on_path = write_script(machine.bin / "nvcc", "")
    other = write_toolkit(machine.root / "other")
    machine.patch.setenv("CUDA_PATH", str(machine.root / "other"))
    assert find_nvcc() == machine.cuda / "bin/nvcc"
    for gone, following in [
        (machine.cuda / "bin/nvcc", other),
        (other, on_path),
        (on_path, default),
        (default, wheel),
        (wheel, None),
    ]:
        gone.unlink()
        assert find_nvcc() == following


def test_find_nvcc_skips_what_cannot_run(machine: Machine) -> None:
    (machine.cuda / "bin/nvcc").chmod(0o644)
    assert find_nvcc() is None


def test_no_nvcc_anywhere(machine: Machine) -> None:
    machine.no_toolkit()
    site = machine.root / "site-packages"
    assert bad()["nvcc"].advice == (
        f"{sys.executable} -m pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*' && "
        f"ln -sf libcudart.so.13 {site}/nvidia/cu13/lib/libcudart.so && "
        f"export CUDA_HOME={site}/nvidia/cu13"
    )


def test_no_nvcc_for_cuda_12(machine: Machine) -> None:
    machine.no_toolkit()
    machine.torch(doctor._Torch("2.11.0", "12.8", (H200,)))
    assert "CUDA toolkit 12.8" in bad()["nvcc"].advice
    assert "pip" not in bad()["nvcc"].advice


def test_wheel_that_torch_does_not_see(machine: Machine) -> None:
    machine.no_toolkit()
    home = machine.root / "site-packages/nvidia/cu13"
    write_toolkit(home)
    # As the wheels have it: lib instead of lib64, and no plain libcudart.so in it.
    (home / "lib64").rename(home / "lib")
    (home / "lib/libcudart.so").rename(home / "lib/libcudart.so.13")
    advice = (
        f"ln -sf libcudart.so.13 {home}/lib/libcudart.so",
        f"export CUDA_HOME={home}",
    )
    assert bad()["nvcc"].advice == " && ".join(advice)
    machine.patch.setenv("CUDA_HOME", str(home))
    missing = bad()
    assert set(missing) == {"CUDA headers and libcudart"}
    assert missing["CUDA headers and libcudart"].advice == advice[0]
    subprocess.run(advice[0], shell=True, check=True, env={"PATH": os.defpath})
    assert bad() == {}


def test_wrapper_on_path_hides_the_toolkit(machine: Machine) -> None:
    """torch takes the folder above PATH's nvcc for the toolkit, which a wrapper leaves."""
    machine.no_toolkit()
    write_script(machine.bin / "nvcc", f'exec {machine.cuda}/bin/nvcc "$@"')
    missing = bad()
    assert set(missing) == {"CUDA headers and libcudart"}
    assert missing["CUDA headers and libcudart"].advice == f"export CUDA_HOME={machine.cuda}"


def test_cuda_home_without_nvcc(machine: Machine) -> None:
    default = write_toolkit(machine.root / "default").parent.parent
    machine.patch.setenv("CUDA_HOME", str(machine.root / "nowhere"))
    found = bad()["nvcc"]
    assert str(machine.root / "nowhere") in found.found
    assert found.advice == f"export CUDA_HOME={default}"


@pytest.mark.parametrize(
    ("nvcc", "torch", "ok"),
    [
        ("13.0", "13.0", True),
        ("13.5", "13.0", True),
        ("12.9", "13.0", False),
        ("13.0", "12.8", False),
        ("12.8", "12.6", True),
        ("13.0", None, True),
    ],
)
def test_nvcc_major_version(nvcc: str, torch: str | None, ok: bool, machine: Machine) -> None:
    write_toolkit(machine.cuda, nvcc)
    machine.torch(doctor._Torch("2.13.0", torch, (H200,)))
    found = finding("nvcc")
    assert found.ok == ok
    assert nvcc in found.found
    assert ok or f"torch is built for CUDA {torch}" in found.found


def test_wrong_major_version_points_to_the_right_one(machine: Machine) -> None:
    write_toolkit(machine.cuda, "12.9")
    right = write_toolkit(machine.root / "default", "13.2").parent.parent
    assert bad()["nvcc"].advice == f"export CUDA_HOME={right}"


def test_nvcc_that_fails(machine: Machine) -> None:
    write_script(machine.cuda / "bin/nvcc", "exit 1")
    found = bad()["nvcc"]
    assert "fails" in found.found
    assert "pip install" in found.advice


def test_libcudart_where_the_compiler_looks(machine: Machine) -> None:
    (machine.cuda / "lib64/libcudart.so").unlink()
    assert set(bad()) == {"CUDA headers and libcudart"}
    write_script(machine.bin / "c++", 'case "$1" in -print*) echo /usr/lib/libcudart.so ;; esac')
    assert finding("CUDA headers and libcudart").ok


# Compilers, Python headers, ninja.


def test_gcc_newer_than_nvcc_accepts(machine: Machine) -> None:
    write_compiler(machine.bin / "gcc", 16)
    found = bad()["host compiler of nvcc"]
    assert found.found == "gcc 16 (gcc), nvcc accepts gcc up to 15"
    assert found.advice == "apt-get install g++-15 && export CC=gcc-15 CXX=g++-15"


def test_cc_chooses_what_nvcc_uses(machine: Machine) -> None:
    write_compiler(machine.bin / "gcc", 16)
    write_compiler(machine.bin / "gcc-15", 15)
    machine.patch.setenv("CC", "gcc-15")
    assert bad() == {}


@pytest.mark.parametrize(("version", "ok"), [(20, True), (21, False)])
def test_clang(version: int, ok: bool, machine: Machine) -> None:
    write_compiler(machine.bin / "clang", version, "clang")
    machine.patch.setenv("CC", "clang")
    assert finding("host compiler of nvcc").ok == ok


def test_cxx_with_a_launcher(machine: Machine) -> None:
    write_script(machine.bin / "ccache", 'exec "$@"')
    machine.patch.setenv("CXX", "ccache c++")
    assert finding("C++ compiler") == Finding("C++ compiler", True, "gcc 13 (ccache c++)")


def test_cxx_that_is_not_there(machine: Machine) -> None:
    machine.patch.setenv("CXX", "g++-99")
    assert bad()["C++ compiler"].advice == "unset CXX"


def test_cxx_too_old(machine: Machine) -> None:
    write_compiler(machine.bin / "c++", 9)
    assert bad()["C++ compiler"].advice.startswith("apt-get install g++-10")


def test_python_headers(machine: Machine) -> None:
    (machine.root / "include/Python.h").unlink()
    name = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    assert bad()["Python headers"].advice == f"apt-get install {name}"


def test_ninja_beside_the_interpreter(machine: Machine) -> None:
    (machine.bin / "ninja").rename(machine.bin / "nothing")
    folder = machine.root / "venv/bin"
    assert bad()["ninja"].advice == (
        f'{sys.executable} -m pip install ninja && export PATH={folder}:"$PATH"'
    )
    write_script(folder / "ninja", "echo 1.13.0")
    found = bad()["ninja"]
    assert "not on PATH" in found.found
    assert found.advice == f'export PATH={folder}:"$PATH"'
    machine.patch.setenv("PATH", f"{folder}:{machine.bin}")
    assert bad() == {}


# The cache of built extensions.


def test_cache_root_is_torchs(machine: Machine) -> None:
    from torch.utils import cpp_extension

    root = doctor._cache_root(doctor._Torch("2.13.0", "13.0"))
    assert root.parent == Path(cpp_extension.get_default_build_root())
    assert root.name.endswith("_cu130")
    machine.patch.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    assert doctor._cache_root(CUDA_TORCH) == Path("/elsewhere")


def test_cache_root_is_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = Path(cpp_extension._get_build_directory("name", verbose=False))
    assert built.parent == doctor._cache_root(doctor._read_torch())


def test_cache_behind_a_file(machine: Machine) -> None:
    (machine.root / "cache").touch()
    found = bad()["extension cache"]
    assert str(machine.root / "cache") in found.found
    assert found.advice.startswith('export TORCH_EXTENSIONS_DIR="$HOME/torch_extensions"')


def test_cache_that_cannot_be_written(machine: Machine) -> None:
    # Not by chmod: root, as which tests may run, writes anywhere.
    cache = machine.root / "cache"
    cache.mkdir()
    really = os.access
    machine.patch.setattr(
        os, "access", lambda path, mode: Path(path) != cache and really(path, mode)
    )
    assert set(bad()) == {"extension cache"}


def test_stale_lock(machine: Machine) -> None:
    machine.patch.setenv("TORCH_EXTENSIONS_DIR", str(machine.root))
    for name in ("leaky_relu_12ab", "softmax_34cd"):
        (machine.root / name).mkdir()
        (machine.root / name / "lock").touch()
    assert finding("extension locks").ok
    lock = machine.root / "leaky_relu_12ab/lock"
    hour_ago = time.time() - 3600
    os.utime(lock, (hour_ago, hour_ago))
    found = bad()["extension locks"]
    assert found.advice == f"rm {lock}"
    assert not found.necessary
