"""Every row of the operator registry, compiled for the host and judged by its ATen operator.

The rows' expressions and the functions of templates/device are compiled by g++ as one unit, with
contraction to fused multiply-adds as nvcc does it. Truth is the ATen operator in float64; the
allowance is its own float32 result on the CPU. What this cannot show:
that CUDA's maths functions are as exact as glibc's, and code under `#if __CUDA_ARCH__`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
import random
import re
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from opinfo import published

from modelnew import ops
from modelnew.contexts import MASK_READ
from modelnew.emit import _c_text
from modelnew.ir import Argument, Graph, Live, Node, Ref, Tensor
from modelnew.ops import Op, activations, arithmetic, float_literal
from modelnew.products import KINDS
from modelnew.render import device_functions, device_text

Array: TypeAlias = "np.ndarray[Any, Any]"

# --- cases: an overload of an operator with its constant arguments -------------------------------

# Values of constant arguments beside the row's own and the schema's, where the formula branches.
VARIANTS: Mapping[tuple[str, str], Sequence[Any]] = {
    ("add", "alpha"): [-2.0],
    ("sub", "alpha"): [-2.0],
    ("clamp", "lower"): [None, -1.5],
    ("clamp", "upper"): [None, 2.0],
    ("div", "rounding_mode"): [None, "floor", "trunc"],
    ("div", "y"): [-0.3],
    ("elu", "input_scale"): [-0.5],
    ("elu", "alpha"): [-0.4],
    ("gelu", "approximate"): ["none", "tanh"],
    ("gt", "y"): [0.0, -1.0],
    ("hardshrink", "lambda"): [0.0, -0.25],
    ("hardtanh", "upper"): [6.0],
    ("leaky_relu", "negative_slope"): [0.0, -0.3, 2.0],
    ("lerp", "weight"): [0.5, 0.8, 1.5, -0.4],
    ("pow", "x"): [2.0, 0.3],
    ("pow", "y"): [-3.3, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0],
    ("logit", "eps"): [-1.0, 0.0],
    ("nan_to_num", "nan"): [None],
    ("polygamma", "n"): [0],
    ("round", "decimals"): [3, -2],
    ("rrelu", "upper"): [0.7],
    ("special_round", "decimals"): [3, -2],
    ("softplus", "beta"): [1.0, -0.8, 3.0],
    ("softplus", "threshold"): [5.0, 20.0],
    ("softshrink", "lambda"): [0.0, 2.0],
    ("threshold", "threshold"): [-0.5],
}
SCALAR = 0.75  # where neither row nor schema names a value
# Rows whose tensor operands are masks.
MASKS = ("mask", "other_mask")
# Rows for which PyTorch's CPU and CUDA kernels give zeros of different signs; we follow CUDA.
ZERO_SIGN_OF_THE_GPU = ("elu", "fmax", "fmin", "relu", "relu6", "softshrink")

# Units of the last place that a row may be off by, 2 for all others or twice PyTorch's own error:
# its CPU kernels have exponentials to half a unit, CUDA's, in its kernels there, to one or two.
WIDER: Mapping[str, float] = {"erfc": 2.5, "log_sigmoid": 2.6, "mish": 3.4, "silu": 2.7,
                               "softplus": 3.0}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A node of one row, with the names of its tensor operands and of its live numbers."""

    row: Op
    node: Node
    tensors: tuple[str, ...]
    live: tuple[str, ...]
    graph: Graph

    @property
    def name(self) -> str:
        values = {n: _plain(v) for n, v in self.row.values(self.node).items()}
        given = [
            f"{n}={v:.4g}" if type(v) is float else f"{n}={v}"
            for n, v in values.items()
            if v != "Ref"
        ]
        live = [f"{name} live" for name in self.live]
        return " ".join([self.node.op.removeprefix("aten."), *given, *live])

    @property
    def expression(self) -> str:
        """The C text, each tensor and live number under the row's own name for it."""
        names = {name: name for name in self.tensors}
        live = {f"self.{name}": f"{name}_" for name in self.live}
        texts = {
            name: _c_text(value, names, live)
            for name, value in self.row.values(self.node).items()
            if value is not None and not isinstance(value, str)
        }
        return self.row.text(self.node, texts)

    @property
    def numbers(self) -> list[float]:
        values = (_plain(v) for v in self.row.values(self.node).values())
        return [float(v) for v in values if type(v) in (int, float)]

    def call(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The ATen operator itself."""
        positional: list[Any] = []
        by_name: dict[str, Any] = {}
        for argument in self.node.args:
            given = argument.value
            value = operands[given.name] if isinstance(given, Ref) else _plain(given)
            if argument.keyword:
                by_name[argument.name] = value
            else:
                positional.append(value)
        _, packet, overload = self.node.op.split(".")
        shape = positional[0].shape if isinstance(positional[0], torch.Tensor) else None
        if self.row.channel:  # each value is a channel of its own
            positional[0] = positional[0].reshape(1, -1)
            positional = [v.reshape(-1) if v is not positional[0] and isinstance(v, torch.Tensor)
                          else v for v in positional]  # fmt: skip
        result: torch.Tensor = getattr(getattr(torch.ops.aten, packet), overload)(
            *positional, **by_name
        )
        return result.reshape(shape) if self.row.channel else result


def _plain(value: Any) -> Any:
    match value:
        case Live():
            return value.value
        case Ref():
            return "Ref"
    return value


def schemas(row: Op) -> Iterator[tuple[str, Any]]:
    """The overloads that take a tensor and return one."""
    packet = getattr(torch.ops.aten, row.name)
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        returns = [str(r.type) for r in schema.returns]
        kinds = [str(a.type) for a in schema.arguments]
        if returns == ["Tensor"] and "Tensor" in kinds and not any(
            a.is_out for a in schema.arguments
        ):  # fmt: skip
            yield overload, schema


def candidates(row: Op, name: str, argument: Any) -> list[Any]:
    """Values of one argument, the first of which stands in all cases of the other arguments."""
    kind = str(argument.type)
    if kind == "Tensor":
        return [Ref(name)]
    if kind == "Optional[Tensor]":
        return [Ref(name), None]
    found = list(VARIANTS.get((row.name, name), ()))
    if row.attrs is not None and name in row.attrs:
        found.insert(0, row.attrs[name])
    if argument.has_default_value():
        default = argument.default_value
        found.append(float(default) if type(default) is int and "int" not in kind else default)
    if not found:
        found = [SCALAR] if kind in ("number", "float", "Scalar") else [None, 0]
    # As float32 has them: what rounding a constant costs is no error of the expression.
    rounded = [float(np.float32(v)) if type(v) is float else v for v in found]
    return list(dict.fromkeys(rounded))


def cases_of(row: Op) -> Iterator[Case]:
    for overload, schema in schemas(row):
        named = list(zip(row.names, schema.arguments, strict=False))
        choices = [candidates(row, name, argument) for name, argument in named]
        full = list(itertools.product(*choices))
        if len(full) > 24:  # one argument at a time
            first = [values[0] for values in choices]
            full = [
                (*first[:i], value, *first[i + 1 :])
                for i, values in enumerate(choices)
                for value in values
            ]
        for values in dict.fromkeys(full):
            yield from made(row, overload, schema, values)


def made(row: Op, overload: str, schema: Any, values: Sequence[Any]) -> Iterator[Case]:
    """The case with these argument values, and the one with its numbers live."""
    live = [
        Live(f"self.{name}", value) if type(value) is float else value
        for name, value in zip(row.names, values, strict=False)
    ]
    for chosen in (values, live) if live != list(values) else (values,):
        case = built(row, overload, schema, chosen)
        if case is not None and ops.why_not(case.node, case.graph) is None:
            yield case


def built(row: Op, overload: str, schema: Any, values: Sequence[Any]) -> Case | None:
    arguments = tuple(
        Argument(a.name, values[i] if i < len(values) else a.default_value, i >= len(values),
                 a.kwarg_only)
        for i, a in enumerate(schema.arguments)
    )  # fmt: skip
    tensors = tuple(value.name for value in values if isinstance(value, Ref))
    live = tuple(value.text.removeprefix("self.") for value in values if isinstance(value, Live))
    types = {n: Tensor(n, (1, 4), "bool" if n in MASKS else "float32") for n in tensors}
    node = Node(f"aten.{row.name}.{overload}", "result", arguments, ())
    case = Case(row, node, tensors, live, Graph({}, {}, (), (), Ref("result")))
    try:
        result = case.call(
            {n: torch.ones((), dtype=getattr(torch, t.dtype)) for n, t in types.items()}
        )
    except (RuntimeError, TypeError):  # ATen does not take these arguments
        return None
    output = Tensor("result", (1, 4), str(result.dtype).removeprefix("torch."))
    types["result"] = output
    node = Node(node.op, "result", arguments, (output,))
    graph = Graph(types, {n: n for n in tensors}, tensors, (node,), Ref("result"))
    return Case(row, node, tensors, live, graph)


# Rows of operators that ATen does not have: steps of our own; see tests/test_modes.py.
OWN = (
    "as_channels_last", "as_contiguous", "channel_bias", "group_normalized", "instance_normalized",
    "layer_normalized", "lower_triangle", "padded", "upper_triangle",
)  # fmt: skip
ROWS = {name: row for name, row in ops.REGISTRY.items() if name not in OWN}
CASES = {case.name: case for row in ROWS.values() for case in cases_of(row)}

# --- the unit ------------------------------------------------------------------------------------

# What nvcc would provide.
PRELUDE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>
#define __device__
#define __forceinline__ inline
using T = float;
struct __half {};
struct __nv_bfloat16 {};
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
"""
# Functions of CUDA that the host's library lacks, in double and rounded: exact for a judgement of
# the expressions around them.
PRELUDE += """\
static inline double half_turns(double x) { return M_PI * (x - 2.0 * rint(x / 2.0)); }
#define lgammaf(x) float(lgamma(double(x)))
static inline float sinpif(float x) { return x == rintf(x) ? 0.0f * x : sin(half_turns(x)); }
static inline float cospif(float x) { return cos(half_turns(x)); }
static double quantile(double p) {  // of the normal distribution, by bisection
    if (!(p > 0.0 && p < 1.0)) return p == 0.0 ? -INFINITY : p == 1.0 ? INFINITY : NAN;
    double low = -15.0, high = 9.0;
    for (int i = 0; i < 64; ++i) {
        const double x = 0.5 * (low + high);
        (0.5 * erfc(-x * M_SQRT1_2) < p ? low : high) = x;
    }
    return low;
}
static inline float normcdfinvf(float p) { return p == 0.5f ? 0.0f : float(quantile(p)); }
static float erfinvf(float y) {  // by bisection for |y|, which erf is near 0 and erfc far out
    const double size = fabs(double(y));
    if (!(size < 1.0)) return size == 1.0 ? copysignf(INFINITY, y) : NAN;
    double low = 0.0, high = 6.0;
    if (size < 1e-4) return y / M_2_SQRTPI;
    for (int i = 0; i < 64; ++i) {
        const double x = 0.5 * (low + high);
        (erf(x) < size ? low : high) = x;
    }
    return copysignf(low, y);
}
"""
# g++ contracts from -O2 on.
FLAGS = ("-O2", "-mfma", "-ffp-contract=fast")
# The order of the operands of every compiled case.
OPERANDS = (
    "x", "y", "z", "mask", "other_mask", "lower", "upper", "weight", "value", "bias", "mean", "var",
)  # fmt: skip


def unit(cases: Sequence[Case]) -> str:
    calls = [c for case in cases for c in re.findall(r"(\w+)\(", case.expression)]
    parts = [PRELUDE, *map(device_text, device_functions(calls))]
    for number, case in enumerate(cases):
        reads = [
            f"        const {'bool' if n in MASKS else 'float'} {n} = in[{OPERANDS.index(n)}][i];\n"
            for n in case.tensors
        ]
        # Volatile, since a GPU thread forms no product ahead of a loop either.
        scalars = [f"        const float {n}_ = live[{i}];\n" for i, n in enumerate(case.live)]
        parts.append(
            f'extern "C" void case_{number}(const float* const* in, float* out, long n,'
            f" const volatile float* live) {{\n    for (long i = 0; i < n; ++i) {{\n"
            f"{''.join([*reads, *scalars])}"
            f"        const {case.row.result} result = {case.expression};\n"
            f"        out[i] = result;\n    }}\n}}\n"
        )
    return "\n".join(parts)


@dataclass(frozen=True)
class Library:
    """The compiled unit."""

    handle: ctypes.CDLL
    numbers: Mapping[str, int]

    def run(self, case: Case, operands: Mapping[str, Array]) -> Array:
        count = len(next(iter(operands.values())))
        held = {n: np.ascontiguousarray(a, dtype=np.float32) for n, a in operands.items()}
        pointer = ctypes.c_void_p * len(OPERANDS)
        given = pointer(*(held[n].ctypes.data if n in held else None for n in OPERANDS))
        live = np.array([case_value(case, name) for name in case.live] or [0], dtype=np.float32)
        out = np.full(count, np.nan, dtype=np.float32)
        function = getattr(self.handle, f"case_{self.numbers[case.name]}")
        function(
            given, ctypes.c_void_p(out.ctypes.data), ctypes.c_long(count),
            ctypes.c_void_p(live.ctypes.data),
        )  # fmt: skip
        return out


def case_value(case: Case, name: str) -> float:
    return float(_plain(case.row.values(case.node)[name]))


def compiled(cases: Sequence[Case], folder: Path) -> Library:
    source, target = folder / "rows.cpp", folder / "rows.so"
    source.write_text(unit(cases), encoding="ascii")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", *FLAGS, source, "-o", target]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"g++ refuses:\n{done.stderr[:4000]}"
    return Library(ctypes.CDLL(str(target)), {case.name: i for i, case in enumerate(cases)})


needs_fma = pytest.mark.skipif(
    not re.search(r"\bfma\b", Path("/proc/cpuinfo").read_text()),
    reason="this CPU has no fused multiply-add",
)


def refused(cases: Sequence[Case], folder: Path) -> dict[str, str]:
    """Cases whose text g++ does not take, each with its first error."""
    source = folder / "check.cpp"
    problems: dict[str, str] = {}
    source.write_text(unit(cases), encoding="ascii")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-fmax-errors=0", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = source.read_text().splitlines()
    for number, message in re.findall(r"check\.cpp:(\d+):\d+: error: (.*)", done.stderr):
        before = [re.search(r"void case_(\d+)", line) for line in lines[: int(number)]]
        marks = [match for match in before if match]
        assert marks, f"the device functions do not compile: {message}"
        problems.setdefault(cases[int(marks[-1][1])].name, message)
    return problems


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return refused(list(CASES.values()), tmp_path_factory.mktemp("syntax"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, broken: Mapping[str, str]) -> Library:
    sound = [case for name, case in CASES.items() if name not in broken]
    return compiled(sound, tmp_path_factory.mktemp("rows"))


# --- points --------------------------------------------------------------------------------------

TINY = float(np.finfo(np.float32).tiny)
MAX = float(np.finfo(np.float32).max)
SPECIAL = [
    0.0, 1e-45, 3e-45, TINY / 3, TINY, 1e-30, 1e-8, 6e-8, 1.2e-7, 1e-4, 0.5, 1.0, 2.0, 3.0, 6.0,
    10.0, 20.0, 30.0, 88.0, 88.722, 88.73, 89.5, 104.0, 127.9, 128.1, 1e4, 16777216.5, 1e10, 1e19,
    2e19, 1e30, MAX / 4, MAX, math.inf,
]  # fmt: skip


@cache
def literals(expression: str) -> tuple[float, ...]:
    """The numbers in an expression and in the device functions that it calls."""
    names = device_functions(re.findall(r"(\w+)\(", expression))
    text = "\n".join([expression, *map(device_text, names)])
    text = re.sub(r"//.*", "", text)
    return tuple(float(n) for n in re.findall(r"(?<![\w.])(\d+\.\d*(?:e[-+]?\d+)?)f", text))


def points(case: Case) -> Array:
    """Dense around 0 and in the domain, every branch point with its neighbours, and extremes."""
    low, high = case.row.domain
    dense = np.linspace(low, high, 4001)
    near = np.logspace(-44, math.log10(max(abs(low), abs(high))), 3001)
    branch = np.array([*literals(case.expression), *case.numbers, *SPECIAL, low, high])
    with np.errstate(over="ignore"):
        around = [branch.astype(np.float32)]
        for towards in (np.float32(-np.inf), np.float32(np.inf)):
            step = around[0]
            for _ in range(4):
                step = np.nextafter(step, towards)
                around.append(step)
    parts = np.concatenate([dense, near, *around])
    both = np.concatenate([parts, -parts, [np.nan]])
    if low >= 0:  # the domain is dense on one side, but answers for the other too
        both = np.concatenate([parts, -np.array(SPECIAL), [-1.0, -0.5, np.nan]])
    return np.unique(both.astype(np.float32))


def operands(case: Case) -> dict[str, Array]:
    """Values of every operand: all points for one, all pairs of some for several, and PyTorch's."""
    rng = np.random.default_rng(0)
    values = [n for n in case.tensors if n not in MASKS]
    first = points(case)
    if not values:
        given = {}
    elif len(values) == 1:
        given = {values[0]: np.append(first, np.float32(-0.0))}
    else:
        some = np.array(
            [*SPECIAL, *(-x for x in SPECIAL), math.nan, 0.3, -0.7, 1.5, -2.5, 3.3], np.float32
        )
        some = some if len(values) == 2 else some[::3]
        if case.row.channel:  # ATen's CPU kernel multiplies out, which overflows elsewhere
            some = np.array([0.0, 0.25, 1.0, 9.0], np.float32)
        grid = np.meshgrid(*[some] * len(values))
        low, high = case.row.domain
        drawn = [rng.uniform(low, high, 20000) for _ in values]
        given = {
            n: np.concatenate([g.ravel(), d]).astype(np.float32)
            for n, g, d in zip(values, grid, drawn, strict=True)
        }
    more = published(case.row.name, len(values)) if values and not case.row.channel else ()
    for name, array in zip(values, more, strict=False):
        given[name] = np.concatenate([given[name], array])
    count = len(next(iter(given.values()), range(64)))
    for name in case.tensors:
        if name in MASKS:
            given[name] = (rng.random(count) < 0.5).astype(np.float32)
    if case.node.op == "aten.masked_fill.Tensor":
        given["value"] = np.full(count, 0.75, dtype=np.float32)
    return given


def reference(case: Case, given: Mapping[str, Array], dtype: torch.dtype) -> Array:
    tensors = {
        n: torch.from_numpy(a).to(torch.bool if n in MASKS else dtype) for n, a in given.items()
    }
    if case.node.op == "aten.masked_fill.Tensor":
        tensors["value"] = tensors["value"][0]
    return np.asarray(case.call(tensors).to(torch.float64))


# Where ATen's float64 form loses digits or misses a pole.
TRUTHS: Mapping[str, Callable[[torch.Tensor, Array], torch.Tensor]] = {
    "sinc": lambda x, aten: torch.where(
        x.abs() < 1,
        torch.from_numpy(aten),
        torch.where(x == x.trunc(), 0.0, torch.sin(math.pi * torch.remainder(x, 2)))
        / (math.pi * x),
    ),
    "special_ndtr": lambda x, _: torch.special.erfc(x * -math.sqrt(0.5)) / 2,
    "polygamma": lambda x, aten: torch.where(
        (x <= 0) & (x == x.trunc()) & (torch.from_numpy(aten) > 0), math.inf, torch.from_numpy(aten)
    ),
}


def true(case: Case, given: Mapping[str, Array]) -> Array:
    """The operator in float64, by a form that keeps its digits where ATen's own has 1 - 1 in it."""
    if case.row.name == "gelu":
        x = torch.from_numpy(given[case.tensors[0]]).double()
        if case.row.values(case.node)["approximate"] == "none":
            found = x * torch.special.erfc(x * -math.sqrt(0.5)) / 2
        else:
            found = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return np.asarray(found)
    if case.row.name in TRUTHS:
        x = torch.from_numpy(given["x"]).double()
        found = TRUTHS[case.row.name](x, reference(case, given, torch.float64))
        return np.asarray(found)
    return reference(case, given, torch.float64)


# --- the judgement -------------------------------------------------------------------------------


def ulps(found: Array, truth: Array) -> Array:
    """Distance in units of the last place of a float32 near `truth`."""
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(truth)))
        distance: Array = np.abs(found - truth) / np.exp2(exponent - 23)
    return distance


def in_their_order(case: Case, given: Mapping[str, Array]) -> Array:
    """The operator in float32, of several products the one first that PyTorch's CUDA kernels form
    first: the CPU's addcmul begins with value * y, which overflows elsewhere."""
    if case.row.name == "addcmul" and case_value(case, "value") != 1:
        x, y, z = (np.broadcast_to(given[n], given["x"].shape) for n in "xyz")
        with np.errstate(all="ignore"):
            return (x + np.float32(case_value(case, "value")) * (y * z)).astype(np.float64)
    return reference(case, given, torch.float32)


def judge(case: Case, given: Mapping[str, Array], mine: Array) -> list[str]:
    found = mine.astype(np.float64)
    theirs = in_their_order(case, given)
    truth = true(case, given)

    def at(i: int) -> str:
        place = ", ".join(f"{n}={float(a[i])!r}" for n, a in given.items())
        return (
            f"{place}: {float(mine[i])!r}, PyTorch {float(theirs[i])!r}, true {float(truth[i])!r}"
        )

    with np.errstate(all="ignore"):
        # PyTorch itself may overflow where the true result is finite: then either is right.
        rounded = truth.astype(np.float32).astype(np.float64)
        size = np.abs(truth)
        # Next to the largest float both may round to it or to infinity.
        edge = (size > MAX * (1 - 2.0**-21)) & np.isfinite(truth)
        below = size < TINY
        rules = {
            "NaN": differs(np.isnan, found, theirs) & differs(np.isnan, found, truth),
            "infinity": differs(infinite, found, theirs)
            & differs(infinite, found, rounded) & ~edge,
            "a result below the normal range": below & ~(np.abs(found) <= TINY * 1.01)
            & (np.abs(theirs) <= TINY * 1.01),
            "sign of zero": (found == 0) & (theirs == 0) & (truth == 0)
            & differs(np.signbit, found, theirs) & differs(np.signbit, found, truth)
            & (case.row.name not in ZERO_SIGN_OF_THE_GPU),
        }  # fmt: skip
    faults = [
        f"{rule} at {int(wrong.sum())} points: {at(int(np.argmax(wrong)))}"
        for rule, wrong in rules.items()
        if wrong.any()
    ]
    normal = np.isfinite(truth) & ~below & ~edge & np.isfinite(found)
    own, his = ulps(found, truth)[normal], ulps(theirs, truth)[normal]
    his = np.where(np.isfinite(his), his, 0.0)
    bins = [slice(None)] if len(given) > 1 else slices(len(own), 64)
    for part in bins:
        limit = max(WIDER.get(case.row.name, 2.0), 2.0 * his[part].max(initial=0.0))
        worst = int(np.argmax(own[part])) if own[part].size else 0
        if own[part].size and own[part][worst] > limit:
            i = int(np.flatnonzero(normal)[part][worst])
            faults.append(f"{own[part][worst]:.1f} ulp, {limit:.1f} allowed, at {at(i)}")
    return faults


def infinite(values: Array) -> Array:
    return np.where(np.isinf(values), np.sign(values), 0)


def differs(pattern: Callable[[Array], Array], left: Array, right: Array) -> Array:
    found: Array = pattern(left) != pattern(right)
    return found


def slices(count: int, parts: int) -> list[slice]:
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", CASES)
def test_expression_compiles(name: str, broken: Mapping[str, str]) -> None:
    assert name not in broken, f"{CASES[name].expression}: {broken[name]}"


@needs_fma
@pytest.mark.parametrize("name", CASES)
def test_row(name: str, library: Library, broken: Mapping[str, str]) -> None:
    if name in broken:
        pytest.skip("does not compile")
    case = CASES[name]
    given = operands(case)
    faults = judge(case, given, library.run(case, given))
    assert not faults, "\n".join([case.expression, *faults])


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_case(row: str) -> None:
    mine = [case for case in CASES.values() if case.row.name == row]
    assert mine, f"no overload of aten.{row} can be called with the row's attrs"
    names = {name for case in mine for name in case.row.values(case.node)}
    assert set(ops.REGISTRY[row].attrs or {}) <= names, "an attr that no case uses"


@pytest.mark.parametrize("row", ROWS)
def test_parameters_follow_the_schema(row: str) -> None:
    """Arguments are bound by position, so a row must not skip one of the schema."""
    op = ops.REGISTRY[row]
    assert all(len(op.names) >= 1 for _ in schemas(op))
    longest = max(len(schema.arguments) for _, schema in schemas(op))
    accepted = {len(schema.arguments) for _, schema in schemas(op)}
    assert len(op.names) in accepted, f"{len(op.names)} names for {longest} arguments"


# --- the test itself sees faults -----------------------------------------------------------------

PLANTED: Mapping[str, Op] = {
    "NaN": Op("relu", "x", "fmaxf(x, 0.0f)"),
    "infinity": Op("sigmoid", "x", "expf(x) / (1.0f + expf(x)) + 0.0f * x"),
    "sign of zero": Op("floor", "x", "floorf(x) + 0.0f"),
    "ulp": Op("expm1", "x", "expf(x) - 1.0f"),
    "ulp of gelu": Op("gelu", "x approximate", "0.5f * x * (1.0f + tanhf(0.79788456f * x))"),
    "a branch": Op(
        "threshold", "x threshold value", "x < threshold ? value : x",
        attrs={"threshold": 0.5, "value": -2.0},
    ),
    "an attribute": Op(
        "leaky_relu", "x negative_slope", "x > 0.0f ? x : x * 0.01f",
        attrs={"negative_slope": 0.02},
    ),
    "two operands": Op("maximum", "x y", "fmaxf(x, y)"),
    "the order": Op("sub", "x y alpha", "y - alpha * x", attrs={"alpha": 0.7}),
}  # fmt: skip


@needs_fma
@pytest.mark.parametrize("planted", PLANTED)
def test_planted_fault_is_seen(planted: str, tmp_path: Path) -> None:
    cases = list(cases_of(PLANTED[planted]))
    unique = list({case.name: case for case in cases}.values())
    library = compiled(unique, tmp_path)
    verdicts = [judge(c, operands(c), library.run(c, operands(c))) for c in unique]
    assert any(verdicts)


def test_planted_syntax_error_is_seen(tmp_path: Path) -> None:
    wrong = Op("exp", "x", "expf(x) +")
    cases = [*cases_of(ops.REGISTRY["log"]), *cases_of(wrong), *cases_of(ops.REGISTRY["sin"])]
    assert list(refused(cases, tmp_path)) == ["exp.default"]


def test_a_row_without_a_case_is_seen() -> None:
    assert list(cases_of(Op("sort", "x", "x"))) == []


# --- the registry --------------------------------------------------------------------------------


def test_two_rows_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "ROWS", (*activations.ROWS, arithmetic.ROWS[0]))
    with pytest.raises(ValueError, match="add has two rows"):
        ops._registry()


def test_lookup_of_in_place_and_unknown_operators() -> None:
    def node(op: str) -> Node:
        return Node(op, "r", (), ())

    assert ops.find(node("aten.relu_.default")) is ops.REGISTRY["relu"]
    assert ops.find(node("aten.relu.default")) is ops.REGISTRY["relu"]
    assert ops.find(node("aten.sort.default")) is None


def test_every_device_function_is_used_and_ascii() -> None:
    folder = Path(__file__).resolve().parent.parent / "templates" / "device"
    calls = [c for case in CASES.values() for c in re.findall(r"(\w+)\(", case.expression)]
    used = {*device_functions([*calls, MASK_READ]), "storage", "pack", "run", "tile"}
    used |= {"single", "broadcast", "moved", "parts", "run_packs"}
    used |= {header for kind in KINDS.values() for header in kind.headers}
    assert {path.stem for path in folder.glob("*.cuh")} <= used
    for path in folder.glob("*.cuh"):
        assert path.read_bytes().isascii()


@pytest.mark.parametrize(
    ("dtypes", "output", "reason"),
    [
        (("float32", "float64"), "float64", "operands of float32, float64"),
        (("float32", "float32"), "float64", "a result of float64"),
        (("int64", "int64"), "int64", "a result of int64"),
        (("complex64", "float32"), "complex64", "operands of complex64"),
        (("int32", "int32"), "float32", "operands of int32"),
        (("float16", "int8"), "float16", None),
        (("bfloat16", "float32"), "float32", None),
    ],
)
def test_dtypes_that_a_kernel_takes(
    dtypes: tuple[str, str], output: str, reason: str | None
) -> None:
    tensors = {n: Tensor(n, (4,), d) for n, d in zip("xy", dtypes, strict=True)}
    arguments = (
        Argument("self", Ref("x")), Argument("other", Ref("y")), Argument("alpha", 1, True, True)
    )  # fmt: skip
    node = Node("aten.add.Tensor", "r", arguments, (Tensor("r", (4,), output),))
    graph = Graph(tensors, {}, (), (node,), Ref("r"))
    found = ops.why_not(node, graph)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


# --- literals ------------------------------------------------------------------------------------


def single(value: float) -> float:
    try:
        found: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return found


def bits(value: float) -> bytes:
    return struct.pack("f", value)


def drawn_floats() -> list[float]:
    rng = random.Random(0)
    patterns = [rng.getrandbits(32) for _ in range(4000)]
    singles = [struct.unpack("f", struct.pack("I", p))[0] for p in patterns]
    near = [2.0**e * f for e in range(-149, 128) for f in (1, 1 + 2**-23, 1 - 2**-24)]
    doubles = [rng.uniform(-10, 10) for _ in range(1000)] + [
        rng.gauss(0, 1e-40) for _ in range(200)
    ]
    known = [
        0.0,
        -0.0,
        1.0,
        1e-5,
        0.1,
        1 / 3,
        0.7978845608,
        16777217.0,
        1e10,
        123456789.0,
        MAX,
        -MAX,
    ]
    found = [*singles, *near, *doubles, *known]
    return [value for value in found if not math.isnan(value) and math.isfinite(single(value))]


def test_float_literal_round_trips() -> None:
    for value in drawn_floats():
        text = float_literal(value)
        assert re.fullmatch(r"-?(\d+\.\d*|\d+(\.\d+)?e[-+]?\d+)f", text), text
        assert bits(float(text[:-1])) == bits(single(value)), (value, text)
        digits = len(re.sub(r"e.*|\D", "", text).strip("0"))
        shortest = np.format_float_scientific(np.float32(value), unique=True, trim="-")
        least = len(re.sub(r"e.*|\D", "", shortest).strip("0"))
        assert digits <= least + 1, f"{text} is longer than {shortest}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, "INFINITY"),
        (-math.inf, "-INFINITY"),
        (1e39, "INFINITY"),
        (-1e300, "-INFINITY"),
        (math.nan, "NAN"),
        (1.0, "1.0f"),
        (-0.0, "-0.0f"),
        (1e-5, "1e-05f"),
        (2.0**24 + 1, "16777216.0f"),
        (1e-60, "0.0f"),
    ],
)
def test_special_literals(value: float, text: str) -> None:
    found = float_literal(value)
    if found.endswith("f"):
        assert bits(float(found[:-1])) == bits(float(text[:-1]))
    else:
        assert found == text
