"""Renders a Plan to the text of a solution file, and checks that text."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from modelnew import contexts, emit, tune
from modelnew.folding import fold
from modelnew.forward import forward_lines
from modelnew.ir import Guard, ModelNewError, Plan
from modelnew.ops import FLOATS
from modelnew.products import Kind
from modelnew.reference import Reference
from modelnew.source import Constructor, constructor
from modelnew.summary import header, mode_text

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

C_INCLUDES = ("cuda_bf16.h", "cuda_fp16.h", "math.h")
HOST_INCLUDES = (
    "c10/cuda/CUDAException.h",
    "c10/cuda/CUDAGuard.h",
    "c10/cuda/CUDAStream.h",
    "torch/csrc/Exceptions.h",
    "torch/csrc/utils/pybind.h",
)

# Words that checkers of benchmark harnesses refuse anywhere outside `#` and `//` comments.
BANNED = (
    r"\btry\s*:", r"\bexcept\s*:", r"\bexcept\s+\w+", r"\bpass\b", r"threading", r"multiprocessing",
    r"concurrent\.futures", r"_make_subclass", r"```", r"__file__", r"from __future__",
    r"torch\.cuda\.Stream", r"PYBIND11_MODULE", r"use_fast_math", r"-std=", r"gridDim\.[yz]",
    r"blockIdx\.[yz]", r"\.contiguous\(\)\s*\.data_ptr", r"cudaMalloc\b", r"Synchronize\(",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How to render: dtypes to instantiate kernels for, and the GPU that heuristics tune for."""

    dtypes: tuple[str, ...] = FLOATS
    target: str = "h200"


@dataclass(frozen=True)
class File:
    """The context of solution.py.jinja."""

    header: tuple[str, ...]
    imports: tuple[str, ...]
    definitions: tuple[str, ...]
    compiled: bool
    hopper: bool
    shared: str
    cuda: str
    cpp: str
    extension: str
    functions: str
    checks: bool
    modes: bool
    helpers: frozenset[str]
    model: str


def options(dtypes: str, target: str) -> Options:
    """Options from the command line's texts. Raises ModelNewError naming what is known."""
    names = tuple(name.strip() for name in dtypes.split(",") if name.strip())
    unknown = [name for name in names if name not in FLOATS]
    if unknown or not names:
        raise ModelNewError(f"--dtypes {dtypes}: choose among {', '.join(FLOATS)}")
    tune.target(target)
    return Options(tuple(dict.fromkeys(names)), target)


def render(ref: Reference, plan: Plan, chosen: Options | None = None) -> str:
    """The solution file's text. Raises ModelNewError when it would break a rule of section 3."""
    chosen = chosen or Options()
    made = emit.module(plan)
    source = constructor(ref)
    shared, cuda, cpp = "", "", ""
    if made.kernels:
        shared = _shared(made)
        cuda, cpp = fold(_cuda(made, chosen)), fold(_cpp(made, chosen))
    digest = hashlib.sha256((shared + cuda + cpp).encode()).hexdigest()[:12]
    stem = re.sub(r"\W|^(?=\d)", "_", ref.path.stem)
    model = fold(_model(plan, made, source))
    names = ", ".join(f'"{name}"' for name in made.functions)
    file = File(
        header=tuple(header(ref, plan)),
        imports=tuple(_imports(source, bool(made.kernels))),
        definitions=source.definitions,
        compiled=bool(made.kernels),
        hopper=_hopper(made),
        shared=shared,
        cuda=cuda,
        cpp=cpp,
        extension=f"{stem}_{digest}",
        functions=fold(f"    functions=[{names}],"),
        checks="_check(" in model,
        modes="_check_modes(" in model,
        helpers=frozenset(re.findall(r"\b_\w+_statistics\b|\b_pa(?:rt|dding)\b", model)),
        model=model,
    )
    text = _environment().get_template("solution.py.jinja").render(f=file)
    lint(text, ref)
    return text


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def device_text(name: str) -> str:
    """The text of one file of templates/device, without what it says to clang-format alone."""
    text = (TEMPLATES / "device" / f"{name}.cuh").read_text(encoding="ascii")
    return re.sub(r"^ *// clang-format (on|off)\n", "", text, flags=re.MULTILINE)


def device_functions(calls: Sequence[str]) -> list[str]:
    """Those of `calls` that templates/device defines, each after the functions it calls itself."""
    found: dict[str, None] = {}
    for name in calls:
        if (TEMPLATES / "device" / f"{name}.cuh").exists():
            inner = re.findall(r"(\w+)\(", device_text(name))
            found.update(dict.fromkeys(device_functions([i for i in inner if i != name])))
            found[name] = None
    return list(found)


def _shared(made: contexts.Module) -> str:
    template = _environment().get_template("operands.h.jinja")
    return template.render(
        operands=max(k.count for k in made.kernels),
        broadcast=_broadcast(made),
        tiled=_tiled(made.kernels),
        moved=any(k.by_place for k in made.kernels),
        kinds=made.kinds,
        hopper=_hopper(made),
    )


def _broadcast(made: contexts.Module) -> bool:
    """Whether a kernel has several operands to bring together; with one input all is simpler.

    Tiles are cut for several, so one that converts layouts counts as one.
    """
    return bool(made.joins or made.products) or any(
        k.format or k.tiled or k.by_place or k.count > 2 or {o.ctype for o in k.operands} != {"T"}
        for k in made.kernels
    )


def _hopper(made: contexts.Module) -> bool:
    """Whether a kernel has instructions that only sm_90a knows."""
    return any("hopper" in kind.headers for kind in made.kinds)


def _tiled(kernels: Sequence[contexts.Kernel]) -> bool:
    return any(k.tiled for k in kernels)


def _cuda(made: contexts.Module, options: Options) -> str:
    kernels = made.kernels
    launch = tune.pointwise(tune.target(options.target))
    functions = device_functions([call for k in kernels for call in k.calls])
    broadcast = _broadcast(made)
    space = "broadcast" if broadcast else "single"
    more = ["tile"] if _tiled(kernels) else []
    more += ["run_packs"] if any(k.packs > 1 for k in made.launched) else []
    more += ["moved"] if any(k.by_place for k in kernels) else []
    more += ["parts"] if any(j.merged for j in made.joins) else []
    more += dict.fromkeys(header for kind in made.kinds for header in kind.headers)
    template = _environment().get_template("pointwise.cu.jinja")
    contraction = _environment().get_template("contraction.cu.jinja")
    dtypes = [contexts.dtype(name, launch.vec_bytes) for name in options.dtypes]
    includes = (*C_INCLUDES, "utility") if _tiled(kernels) else C_INCLUDES
    includes = ("cuda.h", *includes) if _hopper(made) else includes
    parts = [
        "".join(f"#include <{name}>\n" for name in includes),
        f"constexpr int kThreads = {launch.threads};\n",
        *map(device_text, ["storage", "pack", space, "run", *more, *functions]),
        *(template.render(k=k, dtypes=dtypes, broadcast=broadcast) for k in made.launched),
        *_joined(made, dtypes),
        *(
            contraction.render(k=k.epilogue, dtypes=dtypes, broadcast=broadcast)
            for k in made.products
        ),
    ]
    return "\n".join(parts)


def _joined(made: contexts.Module, dtypes: Sequence[contexts.Dtype]) -> Iterator[str]:
    """The kernels that write the parts of a concatenation by one launch."""
    template = _environment().get_template("joined.cu.jinja")
    known: set[str] = set()
    for j in made.joins:
        if j.merged:
            parts = [k for name, k in {k.name: k for k in j.parts}.items() if name not in known]
            known.update(k.name for k in parts)
            yield template.render(j=j, parts=parts, dtypes=dtypes, broadcast=True)


def _cpp(made: contexts.Module, options: Options) -> str:
    dtypes = [contexts.dtype(name, 16) for name in options.dtypes]
    template = _environment().get_template("pointwise.cpp.jinja")
    broadcast = _broadcast(made)
    kernels = made.kernels
    written = [k for k in made.launched if k.name not in made.called]
    joined = _environment().get_template("joined.cpp.jinja")
    supported = " || ".join(f"dtype == {d.at_type}" for d in dtypes)
    host = _environment().get_template("host.cpp.jinja")
    told = any(k.format for k in kernels)
    moved = any(k.by_place for k in kernels)
    retraced = not all(k.format for k in kernels)
    multiplied = {k.factors.call.removeprefix("at::") for k in kernels if k.factors}
    multiplied |= {"full" for k in kernels if k.factors and k.factors.bias}
    used = _host_includes(broadcast, retraced, moved, multiplied)
    parts = [
        "".join(f"#include <{name}>\n" for name in used),
        host.render(
            broadcast=broadcast,
            told=told,
            channels=any(k.channel_inputs for k in kernels),
            like=any(k.like for k in kernels),
            retraced=retraced,
            joined=bool(made.joins),
            moved=moved,
            merged=any(j.merged for j in made.joins),
            halves=any(k.halves for k in kernels),
            several=any(k.promoted for k in made.wrapped),
            numbers=any(k.numbers for k in kernels),
            dtypes=dtypes,
            supported=supported,
        ),
        *_factors(made.kinds),
        *(template.render(k=k, broadcast=broadcast) for k in made.wrapped),
        *(f"{k.launch_signature};\n" for k in written),
        *(joined.render(j=j) for j in made.joins),
    ]
    return "\n".join(parts)


def _factors(kinds: Sequence[Kind]) -> Iterator[str]:
    """What the wrappers of products share, and what those of each kind do."""
    if kinds:
        sides = {kind.side for kind in kinds}
        yield _environment().get_template("factors.cpp.jinja").render(sides=sides)
    for kind in kinds:
        dtypes = [contexts.dtype(name, 16) for name in kind.dtypes]
        yield _environment().get_template(kind.host).render(kind=kind, dtypes=dtypes)


def _host_includes(
    broadcast: bool, retraced: bool, moved: bool, multiplied: Collection[str]
) -> tuple[str, ...]:
    """Headers of the host code; results of a single input are made by the iterator alone."""
    used = {
        "ATen/TensorIterator.h": True,
        "ATen/native/TypeProperties.h": broadcast,
        "ATen/ops/empty.h": broadcast,
        "ATen/ops/empty_strided.h": broadcast and retraced,
        "ATen/ops/from_blob.h": moved or bool(multiplied),
        **{f"ATen/ops/{name}.h": True for name in sorted(multiplied)},
        "ATen/ops/zeros.h": moved,
    }
    return (*(name for name, needed in used.items() if needed), *HOST_INCLUDES)


def _imports(source: Constructor, with_kernels: bool) -> list[str]:
    own = [line for line in source.imports if line not in ("import torch",)]
    lines = ["import torch", *own]
    if with_kernels:
        lines.append("from torch.utils.cpp_extension import load_inline")
    return lines


# --- the class ------------------------------------------------------------------------------


def _model(plan: Plan, module: contexts.Module, source: Constructor) -> str:
    lines = source.head.splitlines()
    head = len(lines)
    checks = [line for guard in plan.graph.arguments for line in _argument_check(guard)]
    for member in source.guarded(checks):
        lines += ["", *("    " + line if line else line for line in member.splitlines())]
    if plan.other is None:
        lines += _forward("forward", source.signature, plan, module)
    else:
        given = ", ".join(_passed_on(source.signature))
        lines += [
            "",
            f"    def forward({source.signature}):",
            f"        _check_modes({', '.join(['self', *plan.graph.frozen])})",
            "        if self.training:",
            f"            return self._forward_in_training({given})",
            f"        return self._forward_in_evaluation({given})",
        ]
        for made in sorted(plan.modes, key=lambda made: not made.graph.training):
            name = f"_forward_{mode_text(made).replace(' ', '_')}"
            lines += _forward(name, source.signature, made, module)
    del lines[head]  # no empty line after the class statement
    return "\n".join(lines)


def _forward(name: str, signature: str, plan: Plan, module: contexts.Module) -> list[str]:
    """The method that runs one plan."""
    lines = ["", f"    def {name}({signature}):"]
    lines += [f"        {_check_line(guard)}" for guard in plan.graph.pins]
    return lines + ["        " + line for line in forward_lines(plan, module.by_name)]


def _passed_on(signature: str) -> list[str]:
    """The arguments of a method with this signature, as it passes them on to another."""
    (function,) = ast.parse(f"def f({signature}): ...").body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    plain = [arg.arg for arg in (*args.posonlyargs, *args.args)][1:]
    return plain + [f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs]


def _argument_check(guard: Guard) -> list[str]:
    """The check of a constructor argument; an object without a literal is compared by its repr."""
    try:
        ast.literal_eval(guard.value)
    except (ValueError, SyntaxError):
        known = "FakeTensor(" not in guard.value  # says nothing of a tensor's values
        text = json.dumps(guard.value)
        return [f'_check("{guard.label}", repr({guard.text}), {text})'] if known else []
    return [_check_line(guard)]


def _check_line(guard: Guard) -> str:
    return f'_check("{guard.label}", {guard.text}, {guard.value})'


# --- lint -----------------------------------------------------------------------------------


def lint(text: str, ref: Reference) -> None:
    """Raises ModelNewError when a rendered file breaks a rule that harnesses or readers rely on."""
    if found := re.search(r"\w*[^\x00-\x7f]+\w*", text):
        raise ModelNewError(
            f"{_where(ref, re.escape(found[0]))}: non-ASCII text {found[0]!r}: torch writes the "
            "source in the locale's encoding: spell it in ASCII"
        )
    bare = _bare(text)
    for pattern in BANNED:
        if found := re.search(pattern, bare):
            raise ModelNewError(
                f"{_where(ref, pattern)}: the file would contain {found[0]!r}, which harness "
                "checkers refuse: keep it out of the constructor and of what it uses"
            )
    for node in ast.parse(text).body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        for name in names:
            if not name.startswith("_") and name != "ModelNew":
                raise ModelNewError(f"{ref.path}: the file would define the global {name}")


def _bare(text: str) -> str:
    """Without comments, cut as KernelBench's checker cuts them."""
    return "\n".join(line.split("#")[0].split("//")[0] for line in text.splitlines())


def _where(ref: Reference, pattern: str) -> str:
    """The first line of the reference that a pattern is found in, as "file:line"."""
    for number, line in enumerate(_bare(ref.source).splitlines(), start=1):
        if re.search(pattern, line):
            return f"{ref.path}:{number}"
    return str(ref.path)
