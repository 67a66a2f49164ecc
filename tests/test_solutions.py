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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from modelnew.measure import ledger
from modelnew.pipeline import generate
from modelnew.render import Options

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "reference_models"
SOLUTIONS = ROOT / "solutions"
NAMES = sorted(path.stem for path in SOLUTIONS.glob("*.py"))

each = pytest.mark.parametrize("name", NAMES)

# Those of the machine that a file is loaded on, where it asks for them.
GPUS = ((8, 6), (9, 0), (9, 0))
GENCODE = ("-gencode=arch=compute_86,code=sm_86", "-gencode=arch=compute_90a,code=sm_90a")


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

    with (
        mock.patch.object(cpp_extension, "load_inline", record),
        mock.patch.object(torch.cuda, "device_count", return_value=len(GPUS)),
        mock.patch.object(torch.cuda, "get_device_capability", side_effect=GPUS.__getitem__),
    ):
        exec(compile(text, "<solution>", "exec"), {"__name__": "solution"})
    assert len(calls) <= 1, "one extension a file"
    return calls[0] if calls else {}


def products_of(cuda: str) -> Mapping[str, int]:
    """What launches products with their epilogues in a CUDA text, and for how many epilogues."""
    return Counter(re.findall(r"\breturn (run_\w*product|run_thin)\b", cuda))


def has_product(cuda: str) -> bool:
    """Whether kernels of a CUDA text multiply matrices by tensor cores."""
    return bool(products_of(cuda).keys() - {"run_thin"})


WITH_KERNELS = [name for name in NAMES if extension(name)]
WITH_PRODUCT = [name for name in WITH_KERNELS if has_product(extension(name)["cuda_sources"])]


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
    "intrinsics": r"\b__(exp|exp10|log|log2|log10|sin|cos|tan|pow|fdivide|tanh)f\(",
    "default stream": r"<<<[^>]*>>>(?<!stream>>>)",
    "absolute path": r"(?<![\w.])/(root|home|work|tmp|usr|Users)/",
    "a date": r"\b20\d\d-\d\d-\d\d\b",
    "lax pointer": r"\bdata_ptr<[^>]*>\(\)\s*\+",
}


# Of what is in shared memory: the order in which threads come does not change what integers give.
INTEGER_ATOMIC = r"atomic(?:Add|Max|Min|Or|And)\(&?(\w+)\["
# The function that gives all flags for the GPUs of a machine; what it gives is judged by `asked`.
ARCHITECTURES = re.compile(r"^def _architectures\(\):\n(?:    .*\n)+", re.MULTILINE)


def atomic_faults(text: str) -> Iterator[str]:
    """Atomics whose result depends on the order of threads: all but those of shared integers."""
    for call in re.finditer(r"\b\w*atomic\w+\([^;]*", text):
        known = re.match(INTEGER_ATOMIC, call[0])
        kernel = text[text.rfind("__global__", 0, call.start()) : call.start()]
        integers = r"__shared__ (?:int|unsigned|uint32_t) [^;(]*\b{}\["
        if known is None or re.search(integers.format(known[1]), kernel) is None:
            yield f"float atomics: {call[0]!r}"
    for instruction in re.findall(r"\b(?:red|atom)\.[\w.:]+", text):
        yield f"float atomics: {instruction!r}"


def bare(text: str) -> str:
    return "\n".join(line.split("#")[0].split("//")[0] for line in text.splitlines())


def found(rules: Mapping[str, str], text: str) -> dict[str, str]:
    hits = {rule: re.search(pattern, text, re.MULTILINE) for rule, pattern in rules.items()}
    return {rule: hit[0] for rule, hit in hits.items() if hit}


def text_faults(text: str) -> list[str]:
    """Everything in the text of a file that harnesses or readers would trip over."""
    faults = [] if text.isascii() else ["not ASCII"]
    hits = found({**REFUSED, **WARNED}, bare(text))
    hits |= found(NOWHERE, ARCHITECTURES.sub("", text))
    faults += [f"{rule}: {hit!r}" for rule, hit in hits.items()]
    faults += atomic_faults(text)
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


def narrow_lines(cuda: str, cpp: str) -> Iterator[str]:
    """Lines that take a block's number, which has 32 bits, for an index of 32 bits.

    It is one once it is multiplied. As one of a number of ints that the host keeps small, divided
    or the rest of a division, it stays what it is.
    """
    tiles = "for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)"
    counted = "const int tiles = p.row_tiles * p.column_tiles * p.batches;"
    loops = "> INT32_MAX" in cpp and cuda.count(counted) >= 1
    for line in re.findall(r".*(?<!int64_t\()(?<!unsigned block = )blockIdx\.x.*", cuda):
        rest = line.replace(tiles, "") if loops else line
        if re.search(r"blockIdx\.x(?! % \w+| / \w+[,;])", rest):
            yield line


def extension_faults(keywords: Mapping[str, Any]) -> list[str]:
    """Everything wrong in what is handed to load_inline."""
    cpp, cuda = keywords["cpp_sources"], keywords["cuda_sources"]
    flags = [*keywords.get("extra_cuda_cflags", []), *keywords.get("extra_cflags", [])]
    # torch adds none of its own beside one: all that the machine needs, or none.
    architectures = [flag for flag in flags if "arch" in flag]
    names = re.findall(r"(\w+)_kernel\(", cuda)
    headers = re.findall(r"#include .*", cuda)
    heavy = re.findall(r"#include <torch/(?:extension|all)\.h>", cpp)
    lists = [key for key in ("cpp_sources", "cuda_sources") if not isinstance(keywords[key], str)]
    faults = [
        *(f"header in the CUDA part: {h}" for h in headers if re.search("torch|ATen|c10", h)),
        *(f"heavy header: {header}" for header in heavy),
        *(f"flag {flag}" for flag in flags if re.search("std|fast", flag)),
        *(f"flag {flag}" for flag in architectures if tuple(architectures) != GENCODE),
        *(f"list of sources: {key}" for key in lists),
        *(f"two kernels {name}" for name in sorted({n for n in names if names.count(n) > 1})),
        *(f"32-bit index: {line}" for line in narrow_lines(cuda, cpp)),
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


# Of the file with a product.
PLANTED_IN_PRODUCT: Sequence[tuple[str, str, str]] = [
    ("*_architectures()", '"-gencode=arch=compute_90a,code=sm_90a"', "architecture flag"),
    ('"a" * ((major, minor) == (9, 0))', '""', "flag -gencode=arch=compute_90,code=sm_90"),
    ("for major, minor in sorted(gpus)", "for major, minor in [max(gpus)]", "flag -gencode="),
    ("_architectures", "architectures", "global architectures"),
    ("int largest[kTurn], counted", "float largest[kTurn], counted", "float atomics"),
    ("atomicMax(&largest[column + c], ", "atomicExch(&largest[column + c], ", "float atomics"),
    ("p.wide[tile * kWarps + threadIdx.x / 32] = is_wide;",
     "atomicAdd(&p.partial[tile], float(is_wide));", "float atomics"),
    ('"fence.mbarrier_init.release.cluster;"', '"red.global.add.f32 [%0], %1;"', "float atomics"),
    ("> INT32_MAX", "> INT64_MAX", "32-bit index"),
    ("const int tiles = p.row_tiles", "const int tiles = 2 * p.row_tiles", "32-bit index"),
    ("blockIdx.x / kExactUnits;", "blockIdx.x / kExactUnits * kExactThreads;", "32-bit index"),
    ("(int64_t(blockIdx.x) * kSplitThreads", "(blockIdx.x * kSplitThreads", "32-bit index"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "fault"), PLANTED_IN_PRODUCT)
def test_planted_faults_are_seen_in_a_product(old: str, new: str, fault: str) -> None:
    text = solution(WITH_PRODUCT[0])
    assert old in text
    text = text.replace(old, new)
    faults = [*text_faults(text), *extension_faults(asked(text))]
    assert any(fault in message for message in faults), faults


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
# The kernels of products by what launches them: how many forms each has, and whether each epilogue
# has its own.
PRODUCT_KERNELS: Mapping[str, Mapping[str, tuple[int, bool]]] = {
    "run_product": {
        "is_for_sm90a_kernel": (1, False),
        "split_rows_kernel": (6, False),
        "split_columns_kernel": (3, False),
        "product_kernel": (1, True),
        "narrow_kernel": (2, True),
        "exact_kernel": (1, True),
        "add_parts_kernel": (2, True),
    },
    "run_half_product": {
        "is_for_sm90a_kernel": (1, False),
        "half_kernel": (1, True),
        "add_parts_kernel": (2, True),
    },
    "run_thin": {
        "thin_along_kernel": (2, True),
        "thin_across_kernel": (2, True),
        "add_thin_kernel": (1, True),
    },
}
# By kernel, its tensor instruction.
TENSOR_KERNELS: Mapping[str, str] = {
    "product_kernel": "m64n128k16.f32.f16.f16",
    "narrow_kernel": "m64n128k16.f32.f16.f16",
    "half_kernel": "m64n256k16.f32.",
}
FOR_SM90A = ("is_for_sm90a_kernel", "split_columns_kernel", *TENSOR_KERNELS)
# ptxas orders tensor instructions one behind the other where it finds a register in use.
SERIALIZED = re.compile(r".*(?:\bC75\d\d\b|\bserialized\b).*")
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)\s[^;]*;", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+(\w+)\((.*?)\n\}(?!\s*// end inline asm)", re.DOTALL)
THREADS = re.compile(r"\.entry\s+(\w+)\([^{]*\.maxntid (\d+)", re.DOTALL)
AMOUNTS = re.compile(r"Compiling entry function '(\w+)'(.*?Used \d+ registers)", re.DOTALL)


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


def hopper_of(cuda: str) -> str:
    """As what a Hopper GPU compiles a text: a product needs instructions that only sm_90a has."""
    return "90a" if has_product(cuda) else "90"


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
    """Every solution for a Hopper GPU, two compilers at a time."""

    def build(name: str) -> Built:
        cuda = extension(name)["cuda_sources"]
        return compiled(cuda, hopper_of(cuda), "c++17", folder)

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
        if re.match(r"(atom|red)\..*\.b?f\d", instruction):
            faults.append(f"float atomics: {instruction}")
    entries = dict(ENTRY.findall(built.ptx))
    kernels = {name: body for name, body in entries.items() if not kernel_of_product(name)}
    if products_of(cuda):
        faults += product_faults({k: b for k, b in entries.items() if k not in kernels}, cuda)
        faults += thin_faults(entries)
    # Those of a concatenation do both widths; one that reads a half type beside float32, both; one
    # that takes masks as numbers has them as bool or as numbers.
    own = cuda.count("__global__") - len(product_forms(cuda))
    wanted = 6 * own - 3 * cuda.count("(const Parts<")
    wanted += 2 * len(re.findall(r"typename H, int kVec>\n__global__", cuda))
    wanted += 6 * len(re.findall(r"typename M, int kVec>\n__global__", cuda))
    if len(kernels) != wanted:
        faults.append(f"{len(kernels)} kernels, not one a dtype and width")
    for kernel, body in kernels.items():
        faults += [f"{kernel}: {fault}" for fault in pack_faults(kernel, body, cuda)]
    return faults


def kernel_of_product(entry: str) -> str | None:
    """Which kernel of templates/device a mangled name is an instance of."""
    names = {name for kernels in PRODUCT_KERNELS.values() for name in kernels}
    return next((name for name in names if f"{len(name)}{name}" in entry), None)


def product_forms(cuda: str) -> Mapping[str, int]:
    """How many forms the file has of each kernel of its products."""
    found: dict[str, int] = {}
    for launcher, epilogues in products_of(cuda).items():
        for name, (forms, is_epilogue) in PRODUCT_KERNELS[launcher].items():
            found[name] = found.get(name, 0) + forms * epilogues if is_epilogue else forms
    return found


def thin_faults(entries: Mapping[str, str]) -> list[str]:
    """Kernels of thin products that do not have several loads by packs under way."""
    faults = []
    for entry, body in entries.items():
        by_packs = re.search(r"Li\d+ELi(\d+)E", entry)
        if (
            kernel_of_product(entry) in PRODUCT_KERNELS["run_thin"]
            and by_packs
            and by_packs[1] != "1"
        ):
            wide = re.findall(r"\bld\.global(?:\.nc)?\.v4\.(?:f32|u32|b32)\b", body)
            if len(wide) < 4:
                faults.append(f"{entry}: {len(wide)} loads of 16 bytes in a row")
    return faults


def product_faults(kernels: Mapping[str, str], cuda: str) -> list[str]:
    """What of the kernels of products is missing or slow: forms of each, tensor instructions."""
    found = Counter(map(kernel_of_product, kernels))
    faults = []
    for name, wanted in product_forms(cuda).items():
        if found[name] != wanted:
            faults.append(f"{name}: {found[name]} forms, not {wanted}")
    for entry, body in kernels.items():
        kernel = kernel_of_product(entry)
        if kernel in TENSOR_KERNELS:
            if f"wgmma.mma_async.sync.aligned.{TENSOR_KERNELS[kernel]}" not in body:
                faults.append(f"{entry}: no tensor instruction")
            if not re.search(r"\bst\.global\.v4\.(f32|u32|b32)\b", body):
                faults.append(f"{entry}: no vector access")
        if re.search(r"^\s*call\b", body, re.MULTILINE):
            faults.append(f"{entry}: calls a function")
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
    assert not log_faults(built[name], extension(name)["cuda_sources"])


def log_faults(built: Built, cuda: str) -> list[str]:
    """What ptxas tells of spilled registers, of too many, and of tensor instructions in a row."""
    kernels = dict(AMOUNTS.findall(built.log))
    faults = [f"serialized: {line}" for line in SERIALIZED.findall(built.log)]
    if kernels.keys() != dict(ENTRY.findall(built.ptx)).keys():
        faults.append(f"{len(kernels)} kernels in the log")
    threads = dict(THREADS.findall(built.ptx))
    # 1024 threads fit a multiprocessor, or 768 that have six packs under way each.
    loads = [len(re.findall(r"= load(?:_staged)?<", k)) for k in cuda.split("__global__")]
    most = 80 if max(loads) >= 6 else 64
    for name, text in kernels.items():
        spilled = re.findall(r"(\d+) bytes (?:stack frame|spill)", text)
        if spilled != ["0", "0", "0"]:
            faults.append(f"{name}: {', '.join(spilled)} bytes of stack, spilled, loaded again")
        (used,) = re.findall(r"Used (\d+) registers", text)
        if not kernel_of_product(name) and int(used) > most:
            faults.append(f"{name}: {used} registers")
        # Those of a product have as many as a block of theirs can.
        if int(threads.get(name, 1024)) * (-(-int(used) // 8) * 8) > 65536:
            faults.append(f"{name}: {used} registers, of which a block does not fit")
    return faults


def test_faults_are_seen_in_the_log() -> None:
    """Of a kernel of 128 threads of a file, and of a product's of 384."""
    ptx = ".visible .entry {0}(\n)\n.maxntid {1}, 1, 1\n{{\n}}\n"
    log = (
        "ptxas info    : Compiling entry function '{}' for 'sm_90a'\n"
        "ptxas info    : Function properties for {}\n"
        "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
        "ptxas info    : Used {} registers, used 0 barriers\n"
    )
    serialized = (
        "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources for the wgmma pipeline\n"
    )
    for name, threads, amounts, more, fault in [
        ("x_kernel", 128, (0, 0, 0, 64), "", ""),
        ("x_kernel", 128, (0, 0, 0, 65), "", "65 registers"),
        ("x_kernel", 128, (32, 0, 0, 40), "", "32, 0, 0 bytes"),
        ("x_kernel", 128, (0, 8, 8, 40), "", "0, 8, 8 bytes"),
        ("14product_kernel", 384, (0, 0, 0, 168), "", ""),
        ("14product_kernel", 384, (0, 0, 0, 169), "", "169 registers, of which"),
        ("14product_kernel", 384, (0, 8, 8, 168), "", "0, 8, 8 bytes"),
        ("14product_kernel", 384, (0, 0, 0, 168), serialized, "serialized: "),
    ]:
        text = log.format(name, name, *amounts) + more
        found = log_faults(Built(ptx.format(name, threads), text, ""), "")
        assert (len(found) == 1 and fault in found[0]) if fault else not found, found
    assert log_faults(Built(ptx.format("y_kernel", 128), "", ""), "") == ["0 kernels in the log"]


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


def empty_faults(ptx: str) -> list[str]:
    """What of kernels that need sm_90a is there for another GPU, and what of others is missing."""
    faults = []
    for entry, body in ENTRY.findall(ptx):
        code = [i for i in INSTRUCTION.findall(f"{body};") if i != "ret"]
        if (kernel_of_product(entry) in FOR_SM90A) != (not code):
            faults.append(f"{entry}: {len(code)} instructions")
    return faults


def warnings_of(problem: str) -> list[str]:
    """What nvcc complains of, but for constants that only kernels use which are empty there."""
    lines = [line for line in problem.splitlines() if re.search(r"warning|error", line)]
    unused = re.compile(r'warning #177-D: variable "k[A-Z]\w*" was declared but never referenced')
    return [line for line in lines if not unused.search(line) and not line.startswith("Remark:")]


def test_warnings_are_seen() -> None:
    unused = 'a.cu(5): warning #177-D: variable "{}" was declared but never referenced'
    other = "a.cu(5): error: expected a declaration"
    found = warnings_of("\n".join([unused.format("kTile"), unused.format("tile"), other]))
    assert found == [unused.format("tile"), other]


@needs_nvcc
@pytest.mark.parametrize("name", WITH_PRODUCT)
def test_product_for_the_oldest_gpu(name: str, folder: Path) -> None:
    """There what needs Hopper is empty, and the pointwise kernel behind PyTorch's product whole."""
    cuda = extension(name)["cuda_sources"]
    result = compiled(cuda, oldest_arch(), "c++20", folder)
    assert not warnings_of(result.problem)
    assert not empty_faults(result.ptx)
    assert not log_faults(result, cuda)
    assert len(empty_faults(compiled(cuda, "90a", "c++17", folder).ptx)) > len(FOR_SM90A)


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
