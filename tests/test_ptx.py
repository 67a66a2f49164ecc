"""Every row of the operator registry as nvcc compiles it: nothing slow or inexact in the PTX.

Each row's expressions become kernels by the same templates as a solution's, in float32, float16
and bfloat16, for packs and for single elements. The rules are those for committed solutions
(test_solutions.ptx_faults); here every operator meets them, not only those that some reference
uses. What this cannot show: values, which test_registry.py judges on the CPU and accuracy.py on a
GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import test_registry as registry
import test_solutions as solutions
from accuracy import code
from test_solutions import Built, needs_nvcc

from modelnew import contexts, emit, folding, ops, render
from modelnew.ir import Access, Argument, Body, Live, Node, Pointwise, Ref, Tensor
from modelnew.ops import Op

# CUDA's own functions are made of approximate instructions, whose results they correct, some with
# the ftz of a factor that is never below the normal range. What each brings is read from its
# compiled text, so that the rows that call it may have just that: see `alone`. Not here: __expf and
# its like, which keep the error, and functions of double.
LIBRARY = (
    "acosf(x)", "acoshf(x)", "asinf(x)", "asinhf(x)", "atan2f(x, y)", "atanf(x)", "atanhf(x)",
    "cbrtf(x)", "cosf(x)", "coshf(x)", "cospif(x)", "cyl_bessel_i0f(x)", "cyl_bessel_i1f(x)",
    "erfcf(x)", "erfcinvf(x)", "erfcxf(x)", "erff(x)", "erfinvf(x)", "exp10f(x)", "exp2f(x)",
    "expf(x)", "expm1f(x)", "fmodf(x, y)", "hypotf(x, y)", "lgammaf(x)",
    "log10f(x)", "log1pf(x)", "log2f(x)", "logf(x)", "normcdff(x)", "normcdfinvf(x)",
    "powf(x, y)", "rcbrtf(x)", "remainderf(x, y)", "rhypotf(x, y)", "rsqrtf(x)", "sinf(x)",
    "sinhf(x)", "sinpif(x)", "sqrtf(x)", "tanf(x)", "tanhf(x)", "tgammaf(x)",
)  # fmt: skip
# Rows of operators that give the other operand where one is NaN, as max.f32 and min.f32 do.
PASSES_OVER_NAN = ("fmax", "fmin")
# Device functions with double precision, and with what its library keeps in memory and calls: two
# terms of digamma cancel below 0.
IN_DOUBLE = frozenset(["digammaf"])
# Device functions of one instruction: two exact ones, and two that state their error and what they
# flush, which their callers bear.
ASSEMBLY = ("maximumf", "minimumf", "power_of_twof", "reciprocalf")
# What begins with two underscores is inexact or meant for other things, but for these.
INTRINSICS = ("__int_as_float", "__float_as_int", "__uint_as_float", "__float_as_uint")

# --- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A kernel of one row: the case it was made from, and the template's context."""

    row: str
    case: str
    kernel: contexts.Kernel


def subject(row: str, case: str, node: Node, tensors: Mapping[str, Tensor], name: str) -> Subject:
    op = ops.find(node)
    assert op is not None
    reads = tuple(Access(tensors[n], 2 if n in op.channel else 0) for n in node.reads)
    live = {v.text: v for v in ops.used_values(node) if isinstance(v, Live)}
    body = Body((node,), (node.result,))
    step = Pointwise(name, reads, tuple(live.values()), body, node.outputs)
    return Subject(row, case, emit.kernel(step))


def without_numbers(kernel: contexts.Kernel) -> tuple[object, ...]:
    """A kernel but for its name, its constants and live numbers."""
    number = r"(?<![\w.])\d+(?:\.\d*)?(?:e[-+]?\d+)?f\b"
    number = "|".join([number, *(rf"\b{scalar.name}\b" for scalar in kernel.scalars)])
    (statement,) = kernel.statements
    text = re.sub(r"\(-#\)|-#", "#", re.sub(number, "#", statement.expr))
    return (text, statement.ctype, *((o.value, o.ctype, o.is_bool) for o in kernel.inputs))


def own_node(row: Op) -> tuple[Node, dict[str, Tensor]]:
    """The call of an operator that ATen does not have: all its operands, and its number."""
    tensors = {n: Tensor(n, (4,), "float32") for n in row.names if n != "eps"}
    output = Tensor("result", (4,), "float32")
    arguments = tuple(Argument(n, Ref(n) if n in tensors else 1e-5) for n in row.names)
    return Node(f"modelnew.{row.name}.default", "result", arguments, (output,)), tensors


# What depends on where an element is needs coordinates: test_moves.py compiles it.
ROWS = {name: row for name, row in ops.REGISTRY.items() if not row.placed}


def subjects() -> list[Subject]:
    """Of each row the kernels that differ in more than numbers; rows of one text share them."""
    calls = [(c.row.name, c.name, c.node, c.graph.tensors) for c in registry.CASES.values()]
    own = [ROWS[name] for name in registry.OWN if name in ROWS]
    calls += [(row.name, row.name, *own_node(row)) for row in own]
    kernels: dict[tuple[object, ...], contexts.Kernel] = {}
    found: dict[tuple[str, str], Subject] = {}
    for number, call in enumerate(calls):
        made = subject(*call, f"row_{number}")
        kernel = kernels.setdefault(without_numbers(made.kernel), made.kernel)
        found.setdefault((made.row, kernel.name), Subject(made.row, made.case, kernel))
    return list(found.values())


SUBJECTS = subjects()


def module(given: Sequence[Subject]) -> contexts.Module:
    kernels = tuple(s.kernel for s in given)
    return contexts.Module(kernels, frozenset(kernel.name for kernel in kernels), ())


def unit(given: Sequence[Subject]) -> str:
    """The CUDA text of these kernels as one file has them."""
    made = module(given)
    return folding.fold(render._shared(made) + render._cuda(made, render.Options()))


def text_of(s: Subject, cuda: str) -> str:
    """The kernel and the device functions that it calls."""
    at = cuda.index(f"{s.kernel.name}_kernel(const")
    start = cuda.rindex("template <typename T", 0, at)
    end = cuda.index("\n}\n", cuda.index(f"cudaError_t {s.kernel.name}_launch(")) + 3
    functions = render.device_functions(s.kernel.calls)
    return code("\n".join([*map(render.device_text, functions), cuda[start:end]]))


# --- the lint ------------------------------------------------------------------------------------


def inexact(body: str) -> frozenset[str]:
    """What of a kernel's PTX a rule is against."""
    found = {i for i in solutions.INSTRUCTION.findall(body)
             if re.search(r"\.(ftz|approx|full|f64)\b", i)}  # fmt: skip
    return frozenset(found | ({".local"} if ".local" in body else set()))


def alone(folder: Path) -> Mapping[str, frozenset[str]]:
    """What each function of CUDA's brings where nothing else is in a kernel."""
    cuda = "".join(
        f'extern "C" __global__ void k_{call.split("(")[0]}(float* p, float x, float y)'
        f" {{ *p = {call}; }}\n" for call in LIBRARY
    )  # fmt: skip
    result = solutions.compiled(cuda, "90", "c++17", folder)
    assert not result.problem
    entries = solutions.ENTRY.findall(result.ptx)
    return {name.removeprefix("k_"): inexact(body) for name, body in entries}


def narrow_index(body: str) -> list[str]:
    """32-bit products and sums that the number of the block goes into, which pass 2^31."""
    tainted, found = {"%ctaid.x"}, []
    for line in body.splitlines():
        match = re.match(r"\s*([a-z][\w.]+)\s+(%\w+),\s*(.*);", line)
        if match is None or not tainted & set(re.findall(r"%[\w.]+", match[3])):
            continue
        instruction, target, _ = match.groups()
        if re.match(r"(mul\.lo|mad\.lo|shl|add|sub|or)\.[sub]32\b", instruction):
            found.append(f"32-bit index: {line.strip()}")
        if re.match(r"(mov|mul\.lo|mad\.lo|shl|add|sub|or)\.[sub]32\b", instruction):
            tainted.add(target)
    return found


def spills(log: str) -> dict[str, Sequence[str]]:
    """By kernel, the bytes of its stack frame, of stores and loads of spilled registers, and how
    many registers it has."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    return {name: rest for name, *rest in re.findall(pattern, log, re.DOTALL)}


def spill_faults(kernel: str, amounts: Sequence[str], text: str, framed: bool) -> Iterator[str]:
    frame, stores, loads, registers = amounts
    if (stores, loads) != ("0", "0") or (frame != "0" and not framed):
        yield f"{kernel}: {frame} bytes stack, {stores} and {loads} bytes spilled"
    # 1024 threads fit a multiprocessor, or 768 that have six packs under way each.
    if int(registers) > (80 if text.count("= load<") >= 6 else 64):
        yield f"{kernel}: {registers} registers"


def excused(
    fault: str, s: Subject, called: frozenset[str], library: Mapping[str, frozenset[str]]
) -> bool:
    """Whether the row, or a function that it calls, may have what a rule is against."""
    kind, _, instruction = fault.partition(": ")
    if kind == "loses NaN":
        return s.row in PASSES_OVER_NAN
    if IN_DOUBLE & called and (kind == ".local" or ".f64" in instruction):
        return True
    return any({kind, instruction} & library.get(call, frozenset()) for call in called)


def faults_of(
    s: Subject, text: str, mine: Mapping[str, str], library: Mapping[str, frozenset[str]]
) -> list[str]:
    """All that is wrong with one kernel, of which `mine` has the six forms in PTX."""
    ptx = "\n".join(f".entry {n}({body}\n}}" for n, body in mine.items())
    called = frozenset(re.findall(r"\b(\w+)\(", text))
    faults = solutions.ptx_faults(Built(ptx, "", ""), text)
    found = [fault for fault in faults if not excused(fault, s, called, library)]
    odd = {call for call in called if call.startswith("__")}
    found += [f"intrinsic: {call}" for call in sorted(odd - {*INTRINSICS, "__launch_bounds__"})]
    for kernel, body in mine.items():
        found += [f"{kernel}: {fault}" for fault in narrow_index(body)]
        if re.search(r"^\s*call\b", body, re.MULTILINE) and not IN_DOUBLE & called:
            found.append(f"{kernel}: calls a function")
    return found


def assembly(s: Subject) -> list[str]:
    """Instructions by name, beside those of the functions that are known to have one."""
    functions = [f for f in render.device_functions(s.kernel.calls) if f not in ASSEMBLY]
    texts = {f: render.device_text(f) for f in functions}
    texts |= {statement.name: statement.expr for statement in s.kernel.statements}
    return [
        f"assembly: {name}" for name, text in texts.items() if re.search(r"\basm\b", code(text))
    ]


def refused(given: Sequence[Subject], cuda: str, problem: str) -> dict[str, list[str]]:
    """The first error of each kernel that nvcc does not take; of all where it is in none."""
    lines = cuda.splitlines()
    found: dict[str, list[str]] = {}
    for number, message in re.findall(r"x\.cu\((\d+)\): (.*)", problem):
        before = "\n".join(lines[: int(number)])
        names = re.findall(r"^(row_\d+)_kernel\(const", before, re.MULTILINE)
        if names:
            found.setdefault(names[-1], [message])
    return found or {s.kernel.name: [problem] for s in given}


def examine(given: Sequence[Subject], cuda: str, folder: Path) -> dict[str, list[str]]:
    """The faults of each kernel of one file, under its name."""
    result = solutions.compiled(cuda, "90", "c++17", folder)
    if result.problem:
        return refused(given, cuda, result.problem)
    library, amounts, found = alone(folder), spills(result.log), {}
    entries = solutions.ENTRY.findall(result.ptx)
    for s in given:
        text, name = text_of(s, cuda), f"{s.kernel.name}_kernel"
        mine = {kernel: body for kernel, body in entries if f"{len(name)}{name}I" in kernel}
        found[s.kernel.name] = faults_of(s, text, mine, library) + assembly(s)
        for kernel, body in mine.items():
            # Memory of its own is a fault above, or CUDA's.
            framed = ".local" in body or re.search(r"^\s*call\b", body, re.MULTILINE) is not None
            found[s.kernel.name] += spill_faults(kernel, amounts[kernel], text, framed)
    return found


def files(given: Sequence[Subject]) -> list[list[Subject]]:
    """Four files of about the same work: those of one operand have simpler code around them."""
    given = list({s.kernel.name: s for s in reversed(given)}.values())
    several = [s for s in given if render._broadcast(module([s]))]
    single = [s for s in given if s not in several]
    parts = [part[i::2] for part in (several, single) for i in range(2)]
    return [part for part in parts if part]


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("nvcc")


@pytest.fixture(scope="module")
def faults(folder: Path) -> Mapping[str, list[str]]:
    """Of every kernel, two compilers at a time."""
    alone(folder)
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda part: examine(part, unit(part), folder), files(SUBJECTS))
        return {name: found for part in parts for name, found in part.items()}


@needs_nvcc
@pytest.mark.parametrize("row", ROWS)
def test_row(row: str, faults: Mapping[str, list[str]]) -> None:
    mine = [s for s in SUBJECTS if s.row == row]
    assert mine, "no case of this row is compiled"
    found = {s.case: faults[s.kernel.name] for s in mine if faults.get(s.kernel.name)}
    assert not found, "\n".join(f"{case}: {fault}" for case in found for fault in found[case])


# --- the lint itself sees faults -----------------------------------------------------------------

ARRAY = "[](float v, int i) { float own[16]; for (int k = 0; k < 16; ++k) own[k] = sqrtf(v * k);" \
        " return own[i & 15] + own[i >> 7 & 15]; }(x, int(x))"  # fmt: skip
ASM = '[](float v) { asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v)); return expf(v); }(x)'
# Expressions over x, and the fault that each has.
PLANTED: Mapping[str, tuple[str, str]] = {
    "an intrinsic": ("__expf(x)", "inexact: ex2.approx.f32"),
    "an intrinsic by its name": ("__expf(x)", "intrinsic: __expf"),
    "an intrinsic beside the function": ("expf(x) + __expf(x)", "inexact: ex2.approx.f32"),
    "a fast division": ("__fdividef(x, 3.1f + x)", "inexact: div.approx"),
    "the instruction of another function": ("exp2f(x) + __tanf(x)", "inexact: sin.approx"),
    "an instruction by its name": (ASM, "assembly: "),
    "a plain maximum": ("fmaxf(x, 0.0f)", "loses NaN: max.f32"),
    "a plain minimum": ("minimumf(x, 1.0f) + fminf(x, 0.3f)", "loses NaN: min.f32"),
    "double precision": ("x * 0.1", "double precision: "),
    "a function of double": ("exp(double(x))", "double precision: "),
    "an array in memory": (ARRAY, ".local: "),
    "an array beside a function that has none": (f"{ARRAY} + expf(x)", ".local: "),
    "no C": ("expf(x", "expected a"),
}
# Changes of the text around an expression.
CHANGED: Mapping[str, tuple[str, str, str]] = {
    "single accesses": (
        "struct alignas(kVec * sizeof(T)) Pack", "struct Pack", "accesses ld of 16 bytes for 1",
    ),
    "a narrow index": (
        "(int64_t(blockIdx.x) * kThreads + threadIdx.x) * kVec",
        "int(blockIdx.x * kThreads + threadIdx.x) * kVec",
        "32-bit index: ",
    ),
}  # fmt: skip


def planted(name: str, expr: str) -> Subject:
    tensors = {n: Tensor(n, (4,), "float32") for n in ("x", "result")}
    node = Node("aten.planted.default", "result", (Argument("x", Ref("x")),), (tensors["result"],))
    with mock.patch.dict(ops.REGISTRY, {"planted": Op("planted", "x", expr, formula="x")}):
        return subject("planted", name, node, tensors, "row_0")


@cache
def planted_faults(expr: str, old: str, new: str, folder: Path) -> list[str]:
    s = planted("planted", expr)
    cuda = unit([s])
    assert old in cuda
    return examine([s], cuda.replace(old, new), folder)["row_0"]


@needs_nvcc
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_seen(name: str, folder: Path) -> None:
    expr, fault = PLANTED[name]
    found = planted_faults(expr, "", "", folder)
    assert any(fault in message for message in found), found


@needs_nvcc
@pytest.mark.parametrize("name", CHANGED)
def test_planted_change_is_seen(name: str, folder: Path) -> None:
    old, new, fault = CHANGED[name]
    assert planted_faults("-x", "", "", folder) == []
    found = planted_faults("-x", old, new, folder)
    assert any(fault in message for message in found), found


@needs_nvcc
def test_a_broken_row_is_named(folder: Path) -> None:
    """Its neighbours in the file are not."""
    wrong = planted("wrong", "expf(x")
    cuda = unit([*SUBJECTS[1:2], wrong])
    assert list(examine([*SUBJECTS[1:2], wrong], cuda, folder)) == ["row_0"]


def test_spills_are_seen() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas info    : Function properties for k\n"
        "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
        "ptxas info    : Used {} registers, used 0 barriers\n"
    )
    for amounts, framed, expected in [
        ((0, 0, 0, 64), False, 0),
        ((32, 0, 0, 40), True, 0),
        ((32, 0, 0, 40), False, 1),
        ((32, 8, 8, 40), True, 1),
        ((0, 0, 0, 66), False, 1),
    ]:
        assert (
            len(list(spill_faults("k", spills(log.format(*amounts))["k"], "", framed))) == expected
        )


def test_every_row_has_a_kernel() -> None:
    assert {s.row for s in SUBJECTS} == set(ROWS)
