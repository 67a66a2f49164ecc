"""How exact each row of the operator registry is on a GPU, beside PyTorch's own operator.

    python tests/accuracy.py --json benchmarks/accuracy.json    on a machine with an NVIDIA GPU
    python tests/accuracy.py --check                            anywhere

test_registry.py compiles the expressions for the host, so it cannot show what CUDA's functions and
approximate instructions are worth. Here every one of its cases becomes a kernel, compiled as a
solution's are, and runs over the same operands. Truth is the operator in float64 on the CPU; the
allowance is the error of the same operator of PyTorch's in float32 on the same GPU. The JSON has
one entry a row, for the case that comes nearest to what is allowed; beside it a table in Markdown
is written. tests/test_accuracy.py keeps both in step with the registry.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import test_registry as registry  # noqa: E402
import torch  # noqa: E402
from test_registry import MASKS, OPERANDS, TINY, Array, Case  # noqa: E402

from modelnew.doctor import find_nvcc  # noqa: E402
from modelnew.render import device_functions, device_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "accuracy.json"
COMMAND = "python tests/accuracy.py --json benchmarks/accuracy.json"
SLICES = 64
LARGEST = float(np.finfo(np.float32).max)
# Errors in an entry: over all results, in the slice of them that is nearest to its limit, and over
# results below the normal range. Each is ours and PyTorch's on the same GPU.
PARTS = ("overall", "slice", "below")

Entry = dict[str, Any]

# --- what an entry stands for --------------------------------------------------------------------


def code(text: str) -> str:
    """What nvcc compiles of a text for the GPU, without comments."""
    return re.sub(r"#else.*?(?=#endif)", "", re.sub(r"//.*", "", text), flags=re.DOTALL)


def functions_of(expressions: Sequence[str]) -> list[str]:
    """The device functions that expressions call, each after those that it calls itself."""
    return device_functions([c for text in expressions for c in re.findall(r"(\w+)\(", text)])


def digest(cases: Sequence[Case]) -> str:
    """The sha256 of a row's expressions and of the code that they call."""
    expressions = sorted({case.expression for case in cases})
    texts = [" ".join(code(device_text(name)).split()) for name in functions_of(expressions)]
    return hashlib.sha256("\0".join([*expressions, *texts]).encode()).hexdigest()


def rows(cases: Mapping[str, Case]) -> dict[str, list[Case]]:
    """The cases of each row, rows in alphabetical order."""
    found: dict[str, list[Case]] = {}
    for case in sorted(cases.values(), key=lambda case: case.row.name):
        found.setdefault(case.row.name, []).append(case)
    return found


# --- the gate ------------------------------------------------------------------------------------


def allowed(part: str, theirs: float) -> float:
    """The error in ulp that is right beside one of PyTorch's on the same GPU.

    A slice and the results below the normal range may have half as much more: there one operator
    may be at its worst where the other is not, and no bad region hides for all that.
    """
    return max(2.0, 2.0 * theirs) * (1.0 if part == "overall" else 1.5)


def gate(entry: Entry) -> list[str]:
    """What an entry has against it."""
    found = [
        f"{part}: {entry[part][0]:g} ulp, {allowed(part, entry[part][1]):g} allowed"
        for part in PARTS
        if not entry[part][0] <= allowed(part, entry[part][1])
    ]
    return [*entry["faults"], *found]


def nearness(entry: Entry) -> tuple[bool, float, float]:
    """How near an entry is to failing, for choosing the one that stands for its row."""
    shares = [entry[part][0] / allowed(part, entry[part][1]) for part in PARTS]
    return bool(gate(entry)), max(shares), entry["overall"][0]


# --- the judgement -------------------------------------------------------------------------------


def ulps(found: Array, truth: Array) -> Array:
    """Distance in units of the last place of a float32 at `truth`, 2^-149 below the normal range;
    0 where `found` is not finite, which other rules judge."""
    size = np.abs(truth)
    exponent = np.where(size < TINY, -126, np.frexp(size)[1] - 1)
    with np.errstate(all="ignore"):
        distance = np.abs(found - truth) / np.ldexp(1.0, exponent - 23)
    result: Array = np.where(np.isfinite(distance), distance, 0.0)
    return result


def disagreements(found: Array, theirs: Array, truth: Array) -> dict[str, Array]:
    """Where a result is of another kind than PyTorch's on the GPU and than the true one.

    As in test_registry.judge: where PyTorch's own float32 overflows, either is right.
    """
    differs, infinite = registry.differs, registry.infinite
    with np.errstate(all="ignore"):
        rounded = truth.astype(np.float32).astype(np.float64)
        zero = (found == 0) & (theirs == 0) & (truth == 0)
        return {
            "NaN": differs(np.isnan, found, theirs) & differs(np.isnan, found, truth),
            "infinity": differs(infinite, found, theirs) & differs(infinite, found, rounded)
            & ~edge(truth),
            "sign of zero": zero & differs(np.signbit, found, theirs)
            & differs(np.signbit, found, truth),
        }  # fmt: skip


def edge(truth: Array) -> Array:
    """Next to the largest float, where it and infinity are both right."""
    result: Array = (np.abs(truth) > LARGEST * (1 - 2.0**-21)) & np.isfinite(truth)
    return result


def place(given: Mapping[str, Array], i: int) -> str:
    return ", ".join(f"{name}={float(values[i]):.9g}" for name, values in given.items())


def sensitivity(case: Case, given: Mapping[str, Array], truth: Array) -> Array:
    """How many ulp of the result one ulp of each operand makes in all: large where terms cancel."""
    total = np.zeros(len(truth))
    for name in (n for n in case.tensors if n not in MASKS):
        with np.errstate(over="ignore"):
            moved = {**given, name: np.nextafter(given[name], np.float32(np.inf))}
        total += ulps(registry.true(case, moved), truth)
    return total


def slices(case: Case, given: Mapping[str, Array], truth: Array) -> list[Array]:
    """Places in the operands that are judged together, so that PyTorch's worst point excuses no
    other region: neighbours for one operand, and for several those of about one sensitivity."""
    values = [given[name] for name in case.tensors if name not in MASKS]
    key = values[0] if len(values) == 1 else sensitivity(case, given, truth)
    parts = np.array_split(np.argsort(key, kind="stable"), SLICES)
    return [part for part in parts if len(part)]


def measured(
    case: Case, given: Mapping[str, Array], mine: Array, cuda: Array, truth: Array, cpu: Array
) -> Entry:
    """The entry of one case: `mine` are its values, `cuda` and `cpu` those of PyTorch."""
    with np.errstate(invalid="ignore"):
        found = mine.astype(np.float64)
    kinds = disagreements(found, cuda, truth)
    size = np.abs(truth)
    judged = np.isfinite(truth) & np.isfinite(found) & ~edge(truth)
    errors = [ulps(values, truth) for values in (found, cuda, cpu)]
    own, his, host = (np.where(judged & (size >= TINY), error, 0.0) for error in errors)
    below = [float(error[judged & (size < TINY)].max(initial=0.0)) for error in errors[:2]]
    pairs = [[own[part].max(), his[part].max()] for part in slices(case, given, truth)]
    worst = int(np.argmax(own))
    return {
        "case": case.name,
        "expression": case.expression,
        "overall": rounded([own.max(), his.max()]),
        "cpu": rounded([host.max()])[0],
        "at": place(given, worst) if own[worst] else "",
        "slice": rounded(max(pairs, key=lambda pair: pair[0] / allowed("slice", pair[1]))),
        "below": rounded(below),
        "faults": [
            f"{kind} at {int(wrong.sum())} points, {place(given, int(np.argmax(wrong)))}:"
            f" {float(mine[int(np.argmax(wrong))])!r}"
            for kind, wrong in kinds.items() if wrong.any()
        ],
    }  # fmt: skip


def rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{float(value):.4g}") for value in values]


def failed(case: Case, problem: str) -> Entry:
    """The entry of a case that could not be measured."""
    nothing = {part: [0.0, 0.0] for part in PARTS}
    return {"case": case.name, "expression": case.expression, **nothing, "cpu": 0.0, "at": "",
            "faults": [problem]}  # fmt: skip


def row_entry(cases: Sequence[Case], entries: Sequence[Entry]) -> Entry:
    """The entry of a row: that of the case nearest to failing, with the faults of all."""
    chosen = max(entries, key=nearness)
    others = [f"{e['case']}: {fault}" for e in entries if e is not chosen for fault in gate(e)]
    return {**chosen, "faults": [*chosen["faults"], *others], "cases": len(cases),
            "sha256": digest(cases)}  # fmt: skip


# --- the kernels ---------------------------------------------------------------------------------

HEAD = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>

using T = float;  // the storage type, as in a solution's kernel

// Operands in a fixed order, and the values of live numbers.
struct Given {
    const float* at[%d];
    float live[%d];
};
"""
CASE = """\
__global__ void case_%(number)d(const Given given_, float* out_, int64_t count_) {
    const int64_t i_ = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i_ >= count_) return;
%(reads)s    const %(type)s result_ = %(expression)s;
    out_[i_] = result_;
}

extern "C" int run_%(number)d(const Given* given, float* out, int64_t count, cudaStream_t stream) {
    case_%(number)d<<<(count + 127) / 128, 128, 0, stream>>>(*given, out, count);
    return cudaGetLastError();
}
"""
MOST_LIVE = 8
# What nvcc would provide where g++ compiles the same text, to try this script without a GPU.
HOST = """
#define __global__ static inline
typedef void* cudaStream_t;
struct Place { int64_t x; };
static Place blockIdx, threadIdx;
static const Place blockDim = {1};
static int cudaGetLastError() { return 0; }
"""


class Given(ctypes.Structure):
    """What a kernel is given; as in HEAD."""

    _fields_ = (
        ("at", ctypes.c_void_p * len(OPERANDS)),
        ("live", ctypes.c_float * MOST_LIVE),
    )


def cuda_text(cases: Sequence[Case]) -> str:
    """One file with a kernel and its launcher for each case."""
    functions = functions_of([case.expression for case in cases])
    parts = [HEAD % (len(OPERANDS), MOST_LIVE), *map(device_text, functions)]
    for number, case in enumerate(cases):
        reads = [
            f"    const {'bool' if name in MASKS else 'float'} {name} ="
            f" given_.at[{OPERANDS.index(name)}][i_];\n"
            for name in case.tensors
        ]
        reads += [f"    const float {n}_ = given_.live[{i}];\n" for i, n in enumerate(case.live)]
        parts.append(CASE % {"number": number, "reads": "".join(reads),
                             "type": case.row.result, "expression": case.expression})  # fmt: skip
    return "\n".join(parts)


@dataclass(frozen=True)
class Library:
    """Compiled cases: a shared object for one kind of device."""

    path: Path
    cases: tuple[Case, ...]
    device: str

    def run(self, case: Case, given: Mapping[str, Array]) -> Array:
        """The values of a case, computed on the current device."""
        held = {name: torch.from_numpy(a).to(self.device) for name, a in given.items()}
        count = len(next(iter(given.values())))
        out = torch.full((count,), torch.nan, device=self.device)
        numbers = [registry.case_value(case, name) for name in case.live]
        pointers = (held[name].data_ptr() if name in held else None for name in OPERANDS)
        struct = Given(
            (ctypes.c_void_p * len(OPERANDS))(*pointers), (ctypes.c_float * MOST_LIVE)(*numbers)
        )
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        launch = getattr(ctypes.CDLL(str(self.path)), f"run_{self.cases.index(case)}")
        status = launch(
            ctypes.byref(struct), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(count),
            ctypes.c_void_p(stream),
        )  # fmt: skip
        if status:
            raise RuntimeError(f"the launch fails with CUDA error {status}")
        result: Array = out.cpu().numpy()  # waits for the kernel
        return result


@dataclass(frozen=True)
class Compiler:
    """What makes a library of a CUDA text."""

    device: str
    command: tuple[str, ...]
    folder: Path

    def build(self, cases: Sequence[Case]) -> tuple[list[Library], dict[str, str]]:
        """Libraries for all cases that it takes, and the errors of the others by their name.

        A text with an error in it is cut in halves, so that no case takes others along.
        """
        name = hashlib.sha256(repr([case.name for case in cases]).encode()).hexdigest()[:12]
        source, target = self.folder / f"{name}.cu", self.folder / f"{name}.so"
        text = cuda_text(cases)
        source.write_text(text if self.device == "cuda" else host_text(text), encoding="ascii")
        command = [*self.command, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return [Library(target, tuple(cases), self.device)], {}
        if len(cases) == 1:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            return [], {cases[0].name: f"does not compile: {(lines or ['no word'])[0][:300]}"}
        middle = len(cases) // 2
        halves = [self.build(part) for part in (cases[:middle], cases[middle:])]
        return halves[0][0] + halves[1][0], halves[0][1] | halves[1][1]

    def build_all(self, cases: Sequence[Case]) -> tuple[list[Library], dict[str, str]]:
        """The same for many cases, on all cores."""
        count = max(1, min(os.cpu_count() or 1, len(cases) // 8))
        libraries: list[Library] = []
        errors: dict[str, str] = {}
        with ThreadPoolExecutor(count) as pool:
            for built, refused in pool.map(self.build, (cases[i::count] for i in range(count))):
                libraries += built
                errors |= refused
        return libraries, errors


def host_text(text: str) -> str:
    """The same text for g++, a launch as a loop over its threads."""
    loop = r"for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) \1("
    text = re.sub(r"#include <cuda_\w+\.h>\n", "", text)
    return registry.PRELUDE + HOST + re.sub(r"\b(case_\d+)<<<.*?>>>\(", loop, text)


def compiler(device: str, folder: Path, arch: str = "") -> Compiler:
    """nvcc for the GPU `arch` as load_inline calls it for a solution, or g++ for the host."""
    if device == "cpu":
        command = ("g++", "-x", "c++", "-std=c++17", "-shared", "-fPIC", *registry.FLAGS)
        return Compiler(device, command, folder)
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    flags = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", target)
    return Compiler(device, (str(find_nvcc() or "nvcc"), *COMMON_NVCC_FLAGS, *flags), folder)


# --- the run -------------------------------------------------------------------------------------


class OnGpu(Case):
    """A case whose operator PyTorch runs on the GPU."""

    def call(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().call({name: tensor.cuda() for name, tensor in operands.items()}).cpu()


def measure(case: Case, library: Library) -> Entry:
    """The entry of one case; what goes wrong on the way is its fault."""
    try:
        given = registry.operands(case)
        cpu = registry.reference(case, given, torch.float32)
        truth = registry.true(case, given)
        there = OnGpu(**{field.name: getattr(case, field.name) for field in fields(case)})
        on_gpu = library.device == "cuda"
        cuda = registry.reference(there, given, torch.float32) if on_gpu else cpu
        return measured(case, given, library.run(case, given), cuda, truth, cpu)
    except Exception as error:
        return failed(case, f"{type(error).__name__}: {str(error)[:300]}")


def run(cases: Mapping[str, Case], device: str) -> Entry:
    """The results of all rows on one device."""
    start = time.perf_counter()
    arch = "".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else ""
    with tempfile.TemporaryDirectory() as folder:
        built, errors = compiler(device, Path(folder), arch).build_all(list(cases.values()))
        seconds = time.perf_counter() - start
        print(f"built {len(cases) - len(errors)} of {len(cases)} cases in {seconds:.0f} s",
              flush=True)  # fmt: skip
        owner = {case.name: library for library in built for case in library.cases}
        found: dict[str, Entry] = {}
        for name, mine in rows(cases).items():
            entries = [
                failed(case, errors[case.name]) if case.name in errors
                else measure(case, owner[case.name]) for case in mine
            ]  # fmt: skip
            found[name] = row_entry(mine, entries)
    print(f"measured {len(found)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "rows": found}


# --- files ---------------------------------------------------------------------------------------


def json_text(results: Entry) -> str:
    """A line for each row."""
    head = {name: value for name, value in results.items() if name != "rows"}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in results["rows"].items()]
    return json.dumps(head)[:-1] + ', "rows": {\n' + ",\n".join(lines) + "\n}}\n"


def shown(error: float) -> str:
    return f"{error:.2f}" if error < 1000 else f"{error:.1e}"


def table(results: Entry) -> str:
    """The Markdown of the results, a line for each row."""
    lines = [
        "# Accuracy of the operators",
        "",
        f"{results['device']}, PyTorch {results['torch'].split('+')[0]}, CUDA {results['cuda']}."
        " Written by `make accuracy`; tests/accuracy.py says how.",
        "The largest errors in units of the last place (ulp) of float64's result. Each row is its"
        " case that comes",
        "nearest to what is allowed: 2 ulp, or twice PyTorch's error on the GPU. Sums whose terms"
        " cancel lose digits",
        "in every implementation.",
        "",
        "| row | expression | ours | PyTorch CUDA | PyTorch CPU | worst at |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for name, entry in results["rows"].items():
        expression = entry["expression"].replace("|", "\\|")
        errors = " | ".join(shown(error) for error in (*entry["overall"], entry["cpu"]))
        lines.append(f"| {name} | `{expression}` | {errors} | {entry['at']} |")
    return "\n".join(lines) + "\n"


def write(results: Entry, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(results), encoding="ascii")
    path.with_suffix(".md").write_text(table(results), encoding="ascii")


def failures(results: Entry) -> dict[str, list[str]]:
    """By row, what is against it."""
    found = {name: gate(entry) for name, entry in results["rows"].items()}
    return {name: faults for name, faults in found.items() if faults}


def problems(cases: Mapping[str, Case], path: Path) -> Iterator[str]:
    """Why a file of results does not stand for these cases."""
    if not path.exists():
        yield f"{path.name} is missing: on a machine with an NVIDIA GPU, {COMMAND}"
        return
    results = json.loads(path.read_text())
    present = rows(cases)
    for name, mine in present.items():
        entry = results["rows"].get(name)
        if entry is None or entry["sha256"] != digest(mine):
            state = "not measured" if entry is None else "measured with another text"
            yield f"{name}: {state}: on a machine with an NVIDIA GPU, {COMMAND}"
    yield from (f"{name}: no row has this name" for name in results["rows"] if name not in present)
    for name, faults in failures(results).items():
        yield from (f"{name}: {fault}" for fault in faults)
    beside = path.with_suffix(".md")
    if not beside.exists() or beside.read_text() != table(results):
        yield f"{beside.name} is not what {path.name} gives: run the command again"


def summary(results: Entry) -> str:
    wrong = failures(results)
    lines = [f"  {name}: {fault}" for name, faults in wrong.items() for fault in faults]
    return "\n".join([f"{len(results['rows'])} rows, {len(wrong)} fail", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--json", type=Path, help="measure, and write the results here")
    parser.add_argument("--check", action="store_true", help="judge the committed results")
    trial = "cpu: try the script where no GPU is; what it writes are no results"
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=trial)
    parser.add_argument("--rows", help="only these, separated by commas; the file has only them")
    options = parser.parse_args(arguments)
    cases = registry.CASES
    if options.rows:
        names = options.rows.split(",")
        cases = {name: case for name, case in cases.items() if case.row.name in names}
    if options.check == (options.json is not None):
        parser.error("give one of --json FILE and --check")
    if options.check:
        found = list(problems(cases, RESULTS))
        print("\n".join(found) or f"{RESULTS.name} stands for the registry")
        return bool(found)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU")
    results = run(cases, options.device)
    write(results, options.json)
    print(summary(results))
    return bool(failures(results))


if __name__ == "__main__":
    sys.exit(main())
