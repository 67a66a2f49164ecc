"""The committed solutions: fresh, deterministic, within the rules of harnesses, compiled by nvcc.

Values are judged elsewhere (test_on_cpu.py, and `generate.py verify` on a GPU). The host code of
every file is compiled against torch's headers there too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from torch.utils import cpp_extension

from modelnew.doctor import find_nvcc
from modelnew.measure import ledger
from modelnew.pipeline import generate
from modelnew.render import Options

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "reference_models"
SOLUTIONS = ROOT / "solutions"
NAMES = sorted(path.stem for path in SOLUTIONS.glob("*.py"))

each = pytest.mark.parametrize("name", NAMES)


@cache
def solution(name: str) -> str:
    return (SOLUTIONS / f"{name}.py").read_bytes().decode("ascii")


@cache
def extension(name: str) -> Mapping[str, Any]:
    """What the file hands to load_inline; empty when it has no kernels."""
    return asked(solution(name))


def asked(text: str) -> Mapping[str, Any]:
    calls: list[Mapping[str, Any]] = []

    def record(*positional: object, **keywords: Any) -> None:
        assert not positional, "load_inline is called by name"
        calls.append(keywords)

    with mock.patch.object(cpp_extension, "load_inline", record):
        exec(compile(text, "<solution>", "exec"), {"__name__": "solution"})
    assert len(calls) <= 1, "one extension a file"
    return calls[0] if calls else {}


WITH_KERNELS = [name for name in NAMES if extension(name)]


# --- fresh and deterministic ---------------------------------------------------------------------


def test_every_reference_has_its_solution_and_no_other_is_there() -> None:
    assert [path.stem for path in sorted(MODELS.glob("*.py"))] == NAMES
    strays = [p.name for p in SOLUTIONS.iterdir() if p.suffix != ".py" and p.name != ledger.NAME]
    assert set(strays) <= {"__pycache__"}


@each
def test_solution_is_what_the_generator_renders(name: str) -> None:
    reference = MODELS / f"{name}.py"
    first, second = (generate(reference, {}, Options()).text for _ in range(2))
    assert first == second, "two renders in a row differ"
    assert first == solution(name), "stale: make all"


def test_text_depends_on_no_hash_seed_path_or_folder(tmp_path: Path) -> None:
    """Another seed, another place of the references, another working directory."""
    elsewhere = tmp_path / "some where"
    elsewhere.mkdir()
    for path in MODELS.glob("*.py"):
        (elsewhere / path.name).write_bytes(path.read_bytes())

    def run(number: int) -> dict[str, bytes]:
        out = tmp_path / f"out{number}"
        place = (MODELS, elsewhere)[number]
        done = subprocess.run(
            [sys.executable, ROOT / "generate.py", "render", place, "-o", out],
            env={**os.environ, "PYTHONHASHSEED": str(number + 1), "TZ": f"UTC{number}"},
            cwd=(ROOT, tmp_path)[number],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return {path.stem: path.read_bytes() for path in out.glob("*.py")}

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert sorted(first) == NAMES
    for name in NAMES:
        assert first[name] == second[name] == solution(name).encode(), name


def test_leaky_relu_is_short() -> None:
    assert len(solution("leaky_relu").splitlines()) < 220


def test_every_solution_ran_on_a_gpu() -> None:
    """Fails until `generate.py verify` has run on a GPU and its verified.json is committed."""
    missing = [path.name for path in ledger.unverified(SOLUTIONS)]
    assert not missing, f"not verified on a GPU: {', '.join(missing)}: make verify"


# --- rules for the text --------------------------------------------------------------------------

# KernelBench's static checker, from PITFALLS.md: errors in a line cut at its first # and //.
REFUSED = {
    "try": r"\btry\s*:",
    "except": r"\bexcept\s*:|\bexcept\s+\w+",
    "pass": r"\bpass\b",
    "patched timer": r"(torch\.cuda\.(Event(\.\w+)?|synchronize)|time\.(time|perf_counter))\s*=[^=]"
    r"|\.(record|elapsed_time)\s*=[^=]",
    "threads": r"\bthreading\b|\bmultiprocessing\b|\bconcurrent\.futures\b",
    "lazy tensors": r"_make_subclass|class\s+\w+\(.*\bTensor\b.*\)|torch\.Tensor\.__new__",
    "streams": r"torch\.cuda\.[Ss]tream\s*\(|StreamContext|cudaStreamCreate",
}
# Warnings there: a harness that runs in strict mode refuses them as well.
LAYERS = "Module|Parameter|ParameterList|ParameterDict|ModuleList|ModuleDict|init"
WARNED = {
    "torch layers": rf"\btorch\.nn\.(?!({LAYERS})\b)\w+",
    "torch operators": r"\bF\.\w+\(|\btorch\.(nn\.functional\.\w+|matmul|mm|bmm|addmm|einsum|relu"
    r"|sigmoid|tanh|softmax|conv\w+|sum|mean|max|min|exp|add|mul|where|clamp)\(",
    "casts to half": r"\.half\(\)|\.to\(torch\.(float16|bfloat16)\)|\.bfloat16\(\)",
}
# What a file must not contain anywhere, comments included.
NOWHERE = {
    "cut by harnesses": r"```",
    "no __file__ under exec": r"\b__file__\b",
    "exec has no future": r"from __future__",
    "no source under exec": r"inspect\.getsource",
    "reference's names": r"^\s*(class Model|def get_inputs|def get_init_inputs)\b",
    "binding by hand": r"PYBIND11_MODULE",
    "fast maths": r"fast_math|--ftz|-prec-(div|sqrt)",
    "standard flag": r"-std=",
    "architecture flag": r"-arch\b|-gencode|sm_\d\d\"|compute_\d\d",
    "y and z": r"(gridDim|blockIdx)\.[yz]|dim3",
    "dangling pointer": r"\.contiguous\(\)\s*\.\s*(mutable_)?(const_)?data_ptr",
    "memory in forward": r"cudaMalloc|cudaFree|cudaMemcpy\b",
    "synchronisation": r"[sS]ynchronize\s*\(|\.item\(\)|\.cpu\(\)",
    "float atomics": r"\batomic\w+\(",
    "intrinsics": r"\b__(exp|exp10|log|log2|log10|sin|cos|tan|pow|fdivide|tanh)f\(",
    "default stream": r"<<<[^>]*>>>(?<!stream>>>)",
    "absolute path": r"(?<![\w.])/(root|home|work|tmp|usr|Users)/",
    "a date": r"\b20\d\d-\d\d-\d\d\b",
    "lax pointer": r"\bdata_ptr<[^>]*>\(\)\s*\+",
}


def bare(text: str) -> str:
    return "\n".join(line.split("#")[0].split("//")[0] for line in text.splitlines())


def found(rules: Mapping[str, str], text: str) -> dict[str, str]:
    hits = {rule: re.search(pattern, text, re.MULTILINE) for rule, pattern in rules.items()}
    return {rule: hit[0] for rule, hit in hits.items() if hit}


def text_faults(text: str) -> list[str]:
    """Everything in the text of a file that harnesses or readers would trip over."""
    faults = [] if text.isascii() else ["not ASCII"]
    hits = found({**REFUSED, **WARNED}, bare(text)) | found(NOWHERE, text)
    faults += [f"{rule}: {hit!r}" for rule, hit in hits.items()]
    faults += [f"global {name}" for name in global_names(ast.parse(text))]
    faults += ["tab"] * ("\t" in text) + ["carriage return"] * ("\r" in text)
    faults += ["space at a line's end"] * bool(re.search(r" $", text, re.MULTILINE))
    faults += ["no newline at the end"] * (not text.endswith("\n") or text.endswith("\n\n"))
    return faults


def global_names(tree: ast.Module) -> Iterator[str]:
    """Globals without an underscore, other than ModelNew and imports."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign() | ast.AnnAssign() | ast.For() | ast.With() | ast.If():
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                names = [n.id for n in stored if isinstance(n.ctx, ast.Store)]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_") and name != "ModelNew")


def extension_faults(keywords: Mapping[str, Any]) -> list[str]:
    """Everything wrong in what is handed to load_inline."""
    cpp, cuda = keywords["cpp_sources"], keywords["cuda_sources"]
    flags = [*keywords.get("extra_cuda_cflags", []), *keywords.get("extra_cflags", [])]
    names = re.findall(r"(\w+)_kernel\(", cuda)
    headers = re.findall(r"#include .*", cuda)
    heavy = re.findall(r"#include <torch/(?:extension|all)\.h>", cpp)
    lists = [key for key in ("cpp_sources", "cuda_sources") if not isinstance(keywords[key], str)]
    # A block's number has 32 bits; it is an index once it is multiplied.
    narrow = re.findall(r".*(?<!int64_t\()(?<!unsigned block = )blockIdx\.x.*", cuda)
    faults = [
        *(f"header in the CUDA part: {h}" for h in headers if re.search("torch|ATen|c10", h)),
        *(f"heavy header: {header}" for header in heavy),
        *(f"flag {flag}" for flag in flags if re.search("arch|std|fast", flag)),
        *(f"list of sources: {key}" for key in lists),
        *(f"two kernels {name}" for name in sorted({n for n in names if names.count(n) > 1})),
        *(f"32-bit index: {line}" for line in narrow),
    ]
    if keywords.get("no_implicit_headers") is not True:
        faults.append("implicit headers")
    if not re.search(r"_[0-9a-f]{12}$", keywords["name"]):
        faults.append("a name without a hash of its content")
    if "__global__" not in cuda:
        faults.append("no kernel")
    if re.search(r"uint32_t rest = i\b", cuda) and "with_32bit_indexing()" not in cpp:
        faults.append("a 32-bit index that the host does not keep small")
    if not re.search(r"CUDAGuard guard\(.*\n(.*\n){0,3}?", cpp):
        faults.append("no device guard")
    if "getCurrentCUDAStream()" not in cpp:
        faults.append("another stream than the current one")
    if "cudaGetLastError()" not in cuda or "C10_CUDA_CHECK(" not in cpp:
        faults.append("launch errors are not checked")
    if any(f"{function}(" not in cpp for function in keywords["functions"]):
        faults.append("a function that is not defined")
    return faults


@each
def test_text_keeps_the_rules(name: str) -> None:
    assert not text_faults(solution(name))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_extension_keeps_the_rules(name: str) -> None:
    assert not extension_faults(extension(name))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_extension_name_changes_with_the_source(name: str) -> None:
    """Two files of one name but different kernels must not share torch's build folder."""
    other = generate(MODELS / f"{name}.py", {}, Options(dtypes=("float32",))).text
    assert asked(other)["name"] != extension(name)["name"]


def test_globals_leave_those_of_the_reference_alone() -> None:
    """KernelBench executes both files in one namespace."""
    for name in NAMES:
        space: dict[str, Any] = {"__name__": "both"}
        exec(compile((MODELS / f"{name}.py").read_text(), name, "exec"), space)
        before = dict(space)
        with mock.patch.object(cpp_extension, "load_inline", return_value=None):
            exec(compile(solution(name), "<string>", "exec"), space)
        changed = [key for key in before if space[key] is not before[key]]
        assert not [key for key in changed if key != "__builtins__"], name
        own = set(space) - set(before) - {"ModelNew", "__builtins__"}
        modules = {key for key in own if isinstance(space[key], ModuleType)}
        public = {key for key in own - modules if not key.startswith("_")}
        assert public <= {"load_inline"}, name


PLANTED: Sequence[tuple[str, str, str]] = [
    ("int64_t(blockIdx.x)", "blockIdx.x", "32-bit index"),
    ("int64_t(blockIdx.x)", "int64_t(blockIdx.y)", "y and z"),
    ('extra_cuda_cflags=["-O3"]', 'extra_cuda_cflags=["-O3", "-arch=sm_90"]', "flag -arch"),
    ('extra_cuda_cflags=["-O3"]', 'extra_cuda_cflags=["--use_fast_math"]', "fast maths"),
    ("#include <math.h>", "#include <torch/types.h>", "header in the CUDA part"),
    ("#include <ATen/TensorIterator.h>", "#include <torch/extension.h>", "heavy header"),
    ("no_implicit_headers=True", "no_implicit_headers=False", "implicit headers"),
    ("class _NoBackward", "class NoBackward", "global NoBackward"),
    ("_SHARED", "SHARED", "global SHARED"),
    ('"""Makes a gradient', '"""Does not pass a gradient', "pass: 'pass'"),
    ("import torch\n", "import torch\nimport threading\n", "threads"),
    ("    return kernel(*args)\n", "    return kernel(*args)  # \u00e9\n", "not ASCII"),
    ("kThreads, 0, stream>>>", "kThreads>>>", "default stream"),
    ("x : x * negative_slope", "x : x * __expf(negative_slope)", "intrinsics"),
    ("const c10::cuda::CUDAGuard guard(x.device());", "", "no device guard"),
    ("_5693f29f4ea4", "", "without a hash"),
    ("return cudaGetLastError();", "return cudaSuccess;", "launch errors"),
]


@pytest.mark.parametrize(("old", "new", "fault"), PLANTED)
def test_planted_faults_are_seen(old: str, new: str, fault: str) -> None:
    text = re.sub(r'(name="leaky_relu)_\w+"', r'\1_5693f29f4ea4"', solution("leaky_relu"))
    assert old in text
    text = text.replace(old, new)
    faults = [*text_faults(text), *extension_faults(asked(text))]
    assert any(fault in message for message in faults), faults


# --- nvcc ----------------------------------------------------------------------------------------

NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(
    NVCC is None,
    reason="no nvcc: pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*' brings one",
)
# What torch's cpp_extension passes whatever the file asks for.
TORCH_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
# Approximate instructions, and the calls of the CUDA text that bring them (nvcc 13.0, each
# function compiled alone). Everything else, log and sqrt and division too, is IEEE or polynomial.
# - ex2.approx (2 ulp): the core of the exponentials. expf, erff and erfcf give the .ftz form a
#   reduced argument, for which only a result below 2^-126 would differ; power_of_twof says so.
# - rcp.approx.ftz (1 ulp): reciprocalf takes arguments from 1 on alone, and adds its result to
#   larger numbers where it may be flushed. erfcf, powf and fmodf divide normal numbers by it and
#   correct the quotient or bound its share of the error.
# - div.approx: the first guess of fmodf, which is exact in the end.
# - rsqrt.approx (2 ulp): CUDA's own rsqrtf, which PyTorch's kernels call as well.
ALLOWED: Mapping[str, str] = {
    "ex2.approx.f32": r"\b(exp2f|expm1f)\(",
    "ex2.approx.ftz.f32": r"\b(expf|erff|erfcf|power_of_twof)\(",
    "rcp.approx.ftz.f32": r"\b(reciprocalf|erfcf|powf|fmodf)\(",
    "div.approx.f32": r"\bfmodf\(",
    "rsqrt.approx.f32": r"\brsqrtf\(",
}
# Their reduction of huge arguments (Payne and Hanek) keeps an array in local memory.
LOCAL = r"\b(sinf|cosf|tanf)\("
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)\s[^;]*;", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+(\w+)\((.*?)\n\}", re.DOTALL)


@dataclass(frozen=True)
class Built:
    """nvcc's answer: the PTX, what ptxas -v printed, and all warnings and errors."""

    ptx: str
    log: str
    problem: str


def nvcc(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert NVCC is not None
    command = [str(NVCC), *arguments, source.name]
    return subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)


@cache
def nvcc_version() -> str:
    assert NVCC is not None
    return subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True).stdout


def compiled(cuda: str, arch: str, standard: str, folder: Path) -> Built:
    """PTX and machine code of a CUDA text; kept under the hash of all that they depend on."""
    flags = [*TORCH_FLAGS, "-O3", f"-std={standard}"]
    key = hashlib.sha256("\0".join([cuda, arch, *flags, nvcc_version()]).encode()).hexdigest()[:24]
    kept = folder / f"{key}.json"
    if kept.exists():
        return Built(**json.loads(kept.read_text()))
    work = folder / f"{key}.{os.getpid()}"
    work.mkdir(exist_ok=True)
    source, ptx = work / "x.cu", work / "x.ptx"
    source.write_text(cuda, encoding="ascii")
    first = nvcc(source, f"-arch=compute_{arch}", "-ptx", *flags, "-o", ptx.name)
    built = Built("", "", first.stderr)
    if first.returncode == 0:
        second = nvcc(ptx, f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", "-o", "x.cubin")
        problem = first.stderr if second.returncode == 0 else second.stderr
        built = Built(ptx.read_text(), second.stderr, problem)
    for path in work.iterdir():
        path.unlink()
    work.rmdir()
    if not built.problem:
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(vars(built)))
        half.replace(kept)
    return built


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("nvcc")


@pytest.fixture(scope="session")
def built(folder: Path) -> Mapping[str, Built]:
    """Every solution for sm_90, two compilers at a time."""

    def build(name: str) -> Built:
        return compiled(extension(name)["cuda_sources"], "90", "c++17", folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(WITH_KERNELS, pool.map(build, WITH_KERNELS), strict=True))


@needs_nvcc
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_nvcc_takes_it_without_a_word(name: str, built: Mapping[str, Built]) -> None:
    assert built[name].problem == ""


def ptx_faults(built: Built, cuda: str) -> list[str]:
    """What is slow or inexact in the PTX of one file."""
    instructions = set(INSTRUCTION.findall(built.ptx))
    local = re.findall(r".*\.local\b.*", built.ptx)
    faults = [] if re.search(LOCAL, cuda) else [f".local: {line}" for line in local]
    for instruction in sorted(instructions):
        if re.match(r"(min|max)\.(ftz\.)?f", instruction):
            faults.append(f"loses NaN: {instruction}")
        if re.search(r"\.(ftz|approx|full)\b", instruction):
            call = ALLOWED.get(instruction)
            if call is None or not re.search(call, cuda):
                faults.append(f"inexact: {instruction}")
        if re.search(r"\.f64\b", instruction):
            faults.append(f"double precision: {instruction}")
    kernels = dict(ENTRY.findall(built.ptx))
    # Those of a concatenation do both widths; one that reads a half type beside float32, both.
    wanted = 6 * cuda.count("__global__") - 3 * cuda.count("(const Parts<")
    wanted += 2 * len(re.findall(r"typename H, int kVec>\n__global__", cuda))
    if len(kernels) != wanted:
        faults.append(f"{len(kernels)} kernels, not one a dtype and width")
    for kernel, body in kernels.items():
        faults += [f"{kernel}: {fault}" for fault in pack_faults(kernel, body, cuda)]
    return faults


def pack_faults(kernel: str, body: str, cuda: str) -> Iterator[str]:
    """A vector kernel moves each floating operand by accesses of 16 bytes."""
    width = re.search(r"Li(\d+)E", kernel)
    assert width is not None, kernel
    if width[1] == "1":
        return
    name = next(n for n in re.findall(r"\b(\w+_kernel)\(const", cuda) if f"{len(n)}{n}I" in kernel)
    text = cuda[cuda.index(f"{name}(const") :].split("\n}\n")[0]
    loads = text.count("load<T, kVec>")
    stores = text.count("pack_at<T, kVec>")
    for kind, wanted in (("ld", loads), ("st", stores)):
        wide = re.findall(rf"\b{kind}\.global(?:\.nc)?\.v4\.(?:f32|u32|b32)\b", body)
        if len(wide) < wanted:
            yield f"{len(wide)} accesses {kind} of 16 bytes for {wanted} operands"
    if not loads and not re.search(r"\bst\.global\.v", body):
        yield "no vector access at all"


@needs_nvcc
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_ptx(name: str, built: Mapping[str, Built]) -> None:
    assert not ptx_faults(built[name], extension(name)["cuda_sources"])


@needs_nvcc
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_nothing_spills(name: str, built: Mapping[str, Built]) -> None:
    log = built[name].log
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    assert len(spilled) == len(ENTRY.findall(built[name].ptx))
    assert all(amounts == ("0", "0", "0") for amounts in spilled), log
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    # 1024 threads fit a multiprocessor, or 768 that have six packs under way each.
    kernels = extension(name)["cuda_sources"].split("__global__")
    many = max(len(re.findall(r"= load(?:_staged)?<", kernel)) for kernel in kernels) >= 6
    assert max(registers) <= (80 if many else 64)


def oldest_arch() -> str:
    assert NVCC is not None
    command = [str(NVCC), "--list-gpu-arch"]
    listed: str = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[str] = re.findall(r"compute_(\d+)\b", listed)
    return min(found, key=int)


@needs_nvcc
@pytest.mark.parametrize("name", ["hardtanh", "residual_channel_bias"])
@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_oldest_gpu_and_newest_standard(name: str, standard: str, folder: Path) -> None:
    """sm_70 with an nvcc that still has it, sm_75 from CUDA 13 on."""
    result = compiled(extension(name)["cuda_sources"], oldest_arch(), standard, folder)
    assert result.problem == ""
    assert ".local" not in result.ptx


STATEMENT = "const float hardtanh = "
WORK_ARRAY = """\
    float own[64];
    for (int k = 0; k < 64; ++k) own[k] = sqrtf(float(k * begin));
    if (own[i & 63] > 9.0f + own[begin & 63]) return;
"""
# Changes of the CUDA text of hardtanh, and the fault that each brings.
CHANGES: Mapping[str, tuple[str, str, str]] = {
    "a plain maximum": (STATEMENT, f"{STATEMENT}fmaxf(x, 0.3f) + ", "loses NaN: max.f32"),
    "an intrinsic": (STATEMENT, f"{STATEMENT}__expf(x) + ", "inexact: ex2.approx.f32"),
    "a fast division": (STATEMENT, f"{STATEMENT}__fdividef(x, 3.1f + x) + ", "inexact: div."),
    "double precision": (STATEMENT, f"{STATEMENT}x * 0.1 + ", "double precision"),
    "an array in memory": (
        "    const auto x_pack", f"{WORK_ARRAY}    const auto x_pack", ".local"
    ),
    "single accesses": (
        "struct alignas(kVec * sizeof(T)) Pack", "struct Pack", "accesses ld of 16 bytes for 1"
    ),
}  # fmt: skip


@needs_nvcc
@pytest.mark.parametrize("change", CHANGES)
def test_planted_faults_are_seen_in_ptx(change: str, folder: Path) -> None:
    old, new, fault = CHANGES[change]
    right = extension("hardtanh")["cuda_sources"]
    cuda = right.replace(old, new)
    assert cuda != right
    result = compiled(cuda, "90", "c++17", folder)
    assert result.ptx, result.problem
    faults = ptx_faults(result, cuda)
    assert any(fault in message for message in faults), faults
