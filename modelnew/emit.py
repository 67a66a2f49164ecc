"""Turns a Plan into the contexts of the templates: names, C expressions, signatures, calls."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from modelnew import ops
from modelnew.formula import WIDTH, formula
from modelnew.ir import (
    DTYPE_BYTES,
    Arg,
    Library,
    Live,
    Output,
    Plan,
    Pointwise,
    Ref,
    Tensor,
)
from modelnew.layout import AT_TRACED_SIZES, CHANNELS_LAST
from modelnew.library import Fronts, call_line
from modelnew.lifetimes import frees
from modelnew.shortcuts import with_shortcuts

C_TYPES: Mapping[str, str] = {
    "bool": "bool", "uint8": "uint8_t", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t", "float32": "float",
}  # fmt: skip
AT_TYPES: Mapping[str, str] = {
    "bool": "at::kBool", "uint8": "at::kByte", "int8": "at::kChar", "int16": "at::kShort",
    "int32": "at::kInt", "int64": "at::kLong", "float32": "at::kFloat",
}  # fmt: skip

# The type parameter of masks that take part in arithmetic, and what reads them as floats.
MASK_TYPE, MASK_READ = "M", "number"

# The parameter of a wrapper that says whether its results are to lie in channels_last.
TOLD = "channels_last"

# Names that the kernel templates use, and C++ words that are legal Python names.
RESERVED = frozenset([
    "T", "M", "kVec", "ops", "begin", "end", "i", "v", "offset", "next", "left", "stream",
    "alike", "channels_last", "dtype", "format", "guard", "iter", "launch", "like", "mask_type",
    "number", "out", "promoted", "unify", "auto", "bool", "case", "catch", "char", "class",
    "const", "constexpr", "default", "delete", "do", "double", "enum", "explicit", "extern",
    "float", "friend", "goto", "inline", "int", "long", "mutable", "namespace", "new", "operator",
    "private", "protected", "public", "register", "short", "signed", "sizeof", "static", "struct",
    "switch", "template", "this", "throw", "typedef", "typename", "union", "unsigned", "using",
    "virtual", "void", "volatile", "xor",
])  # fmt: skip
# Further ones of those that go by tiles.
TILED = ("tiles", "extent", "cell", "locate", "load", "load_staged", "stage", "cell_at", "pack_at")


@dataclass(frozen=True)
class Dtype:
    """A dtype that the file is generated for; `vec` elements of it are one vector access."""

    name: str
    ctype: str
    code: str
    at_type: str
    vec: int


def dtype(name: str, vec_bytes: int) -> Dtype:
    ctype, code, at_type = _DTYPES[name]
    return Dtype(name, ctype, code, at_type, vec_bytes // DTYPE_BYTES[name])


_DTYPES: Mapping[str, tuple[str, str, str]] = {
    "float32": ("float", "kFloat32", "at::kFloat"),
    "float16": ("__half", "kFloat16", "at::kHalf"),
    "bfloat16": ("__nv_bfloat16", "kBfloat16", "at::kBFloat16"),
}


@dataclass(frozen=True)
class Operand:
    """One tensor of a kernel, and the C text that moves it."""

    index: int
    value: str
    ctype: str
    output: bool
    dtype: str
    leaves: str = ""
    layout: str = ""
    staged: bool = False
    behind: int = 0

    @property
    def is_number(self) -> bool:
        """Whether it is a mask that takes part in arithmetic; see _numbers."""
        return self.ctype == MASK_TYPE

    @property
    def tile_load(self) -> str:
        """The device function that reads it in a kernel that goes by tiles."""
        return "load_staged" if self.staged else "load"

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"

    @property
    def at_type(self) -> str:
        return "at::kBool" if self.is_bool else "dtype"

    @property
    def pack(self) -> str:
        return f"{self.value}_pack"

    @property
    def value_type(self) -> str:
        return "bool" if self.is_bool and not self.is_number else "float"

    @property
    def read(self) -> str:
        element = f"{self.pack}.at[v]"
        if self.is_number:
            return f"{MASK_READ}({element})"
        if self.is_bool:
            return element
        return f"to_float({element})" if self.ctype == "T" else f"static_cast<float>({element})"

    @property
    def write(self) -> str:
        if self.is_bool:
            return f"{self.pack}.at[v] = {self.value};"
        return f"store({self.pack}.at[v], {self.value});"


@dataclass(frozen=True)
class Statement:
    ctype: str
    name: str
    expr: str


@dataclass(frozen=True)
class Scalar:
    """A live number: its name in C and the Python text that reads it."""

    name: str
    text: str


@dataclass(frozen=True)
class Kernel:
    """The context of pointwise.cu.jinja and pointwise.cpp.jinja."""

    name: str
    formula: tuple[str, ...]
    outputs: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    scalars: tuple[Scalar, ...]
    statements: tuple[Statement, ...]
    calls: tuple[str, ...]
    layout_lines: tuple[str, ...]
    format: str = ""
    like: tuple[str, ...] = ()
    dense: bool = False
    same: tuple[tuple[str, str], ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.outputs + self.inputs

    @property
    def count(self) -> int:
        return len(self.operands)

    @property
    def float_parameters(self) -> str:
        return "".join(f", float {s.name}" for s in self.scalars)

    @property
    def launch_signature(self) -> str:
        floats = self.float_parameters
        start = f"cudaError_t {self.name}_launch("
        items = f"const Operands& ops{floats}, cudaStream_t stream)"
        return start + items if len(start + items) <= WIDTH - 2 else f"{start}\n    {items}"

    @property
    def run_arguments(self) -> str:
        return ", ".join([str(self.count), "stream", *(s.name for s in self.scalars)])

    @property
    def tiled(self) -> bool:
        """Whether it also has a kernel that goes by tiles."""
        return any(o.staged for o in self.inputs)

    @property
    def run_tiled_arguments(self) -> str:
        staged = "".join("01"[o.staged] for o in reversed(self.operands))
        roles = f"Roles{{{len(self.outputs)}, {self.count}, 0b{staged}}}"
        return ", ".join(["ops", roles, "stream", *(s.name for s in self.scalars)])

    @property
    def more_like(self) -> tuple[str, ...]:
        """Tensors that the kernel does not read, for the layout of its results alone."""
        read = {o.value for o in self.inputs}
        return tuple(name for name in self.like if name not in read)

    @property
    def is_copy(self) -> bool:
        """Whether it does nothing but change the layout of its one operand."""
        return (
            bool(self.format)
            and len(self.inputs) == len(self.statements) == 1
            and (self.statements[0].expr == self.inputs[0].value)
        )

    def allocate(self, output: Operand) -> str:
        """C++ that makes a result."""
        made_for = f"{output.layout}, {output.at_type}"
        device = f"{self.first_input}.device()"
        if self.format:
            return f"empty_in(format, {made_for}, {device})"
        return f"empty_as({made_for}, {device})"

    @property
    def return_type(self) -> str:
        if len(self.outputs) == 1:
            return "at::Tensor"
        return f"std::tuple<{', '.join(['at::Tensor'] * len(self.outputs))}>"

    @property
    def forward_signature(self) -> str:
        tensors = [f"at::Tensor {o.value}" for o in self.inputs]
        tensors += [f"const at::Tensor& {name}" for name in self.more_like]
        tensors += [f"bool {TOLD}"] if self.format.startswith(TOLD) else []
        parameters = ", ".join([*tensors, *(f"double {s.name}" for s in self.scalars)])
        return f"{self.return_type} {self.name}_forward({parameters})"

    @property
    def numbers(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.is_number)

    def types(self, ctype: str) -> tuple[tuple[str, str], ...]:
        """The type arguments for the storage type `ctype`, each with its condition in C."""
        if not self.numbers:
            return (("", ctype),)
        is_bool = f"ops.bytes[{self.numbers[0].index}] == 1"
        return ((is_bool, f"{ctype}, bool"), ("", f"{ctype}, {ctype}"))

    @property
    def unify_arguments(self) -> str:
        entries = []
        for o in self.inputs:
            fixed = "" if o.ctype == "T" else f", {AT_TYPES[o.dtype]}"
            fixed = ", mask_type" if o.is_number else fixed
            entries.append(f'{{"{o.value}", {o.value}{fixed}}}')
        return ", ".join(entries)

    @property
    def launch_arguments(self) -> str:
        return ", ".join(["ops", *(s.name for s in self.scalars), "stream"])

    @property
    def promoted(self) -> tuple[Operand, ...]:
        """The results whose dtype may be another than that which all inputs promote to."""
        return tuple(o for o in self.outputs if not o.is_bool) if len(self.outputs) > 1 else ()

    @property
    def returned(self) -> str:
        """The results, each in the dtype that its own operands promote to."""
        own = self.promoted
        results = [f"{o.value}.to({o.value}_dtype)" if o in own else o.value for o in self.outputs]
        return results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"

    @property
    def channel_inputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.behind)

    @property
    def first_input(self) -> str:
        return next((o.value for o in self.inputs if not o.behind), self.inputs[0].value)

    @property
    def input_list(self) -> str:
        return ", ".join(o.value for o in self.inputs)

    @property
    def output_list(self) -> str:
        return ", ".join(o.value for o in self.outputs)


# --- kernels --------------------------------------------------------------------------------


def kernel(step: Pointwise) -> Kernel:
    """The template context of one Pointwise region."""
    names = _Names(TILED if step.layout else ())
    live = {s.text: names.fresh(_scalar_name(s.text)) for s in step.scalars}
    values = {access.tensor.name: names.fresh(access.tensor.name) for access in step.reads}
    calls: dict[str, None] = {}
    statements, dense = [], False
    for node in step.body.statements:
        op = ops.find(node)
        assert op is not None
        texts = {
            name: _c_text(value, values, live)
            for name, value in op.values(node).items()
            if value is not None and not isinstance(value, str)
        }
        values[node.result] = names.fresh(node.result)
        expr = op.text(node, texts)
        ctype = "bool" if op.result == "bool" else "float"
        statements.append(Statement(ctype, values[node.result], expr))
        calls.update((call, None) for call in re.findall(r"(\w+)\(", expr))
        dense = dense or op.dense_result
    lines, layout_of = _layouts(step, values)
    single = {name for node in step.body.statements for name in ops.operands(node, "single")}
    staged, numbers = _staged(step, single), _numbers(step)
    if numbers:
        calls[MASK_READ] = None
    outputs = tuple(
        _operand(i, tensor, values, leaves=_leaves_of(step, tensor.name, values, numbers, single),
                 layout=layout_of[tensor.name], output=True)
        for i, tensor in enumerate(step.writes)
    )  # fmt: skip
    inputs = tuple(
        _operand(
            len(outputs) + i,
            access.tensor,
            values,
            behind=access.behind,
            staged=access.tensor.name in staged,
            number=access.tensor.name in numbers,
            single=single,
        )
        for i, access in enumerate(step.reads)
    )
    scalars = tuple(Scalar(live[s.text], s.text) for s in step.scalars)
    like = tuple(values.get(t.name) or names.fresh(t.name) for t in step.like)
    return Kernel(
        step.name, formula(step), outputs, inputs, scalars, tuple(statements), tuple(calls), lines,
        _format(step, like), like, dense, _same(step, values),
    )  # fmt: skip


def _same(step: Pointwise, values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Operands that must have the dtype of another one."""
    given = {access.tensor.name for access in step.reads}
    pairs = [(name, node.reads[0]) for node in step.body.statements
             for name in ops.operands(node, "same") if {name, node.reads[0]} <= given]  # fmt: skip
    return tuple((values[name], values[x]) for name, x in dict.fromkeys(pairs))


def _format(step: Pointwise, like: Sequence[str]) -> str:
    """C++ for the memory format that a region is told to write, "" where it is told none."""
    if step.layout == CHANNELS_LAST:
        volume = len(step.writes[0].shape) == 5
        last = f"at::MemoryFormat::ChannelsLast{'3d' if volume else ''}"
        return f"{TOLD} ? {last} : at::MemoryFormat::Contiguous"
    if like:
        return f"format_of({{{', '.join(like)}}})"
    return "at::MemoryFormat::Contiguous" if step.layout else ""


def _layouts(step: Pointwise, values: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """C++ lines that retrace how the reference lays out its steps, and each value's layout.

    Where the region is told its layout, only the shape matters, and the inputs decide it.
    """
    if step.layout:
        shaped = {t.name: _inputs_of(step, t.name) for t in step.writes}
        texts = {name: ", ".join(values[t.name] for t in used) for name, used in shaped.items()}
        return (), {name: f"{{{text}}}" for name, text in texts.items()}
    carried = {access.tensor.name: values[access.tensor.name] for access in step.reads}
    inputs = set(carried)
    lines = []
    for node in step.body.statements:
        op = ops.find(node)
        assert op is not None
        operands = list(dict.fromkeys(node.reads))
        if len(operands) == 1 and operands[0] not in inputs and not op.dense_result:
            carried[node.result] = carried[operands[0]]  # one dense operand: its strides
            continue
        name = f"{values[node.result]}_like"
        dense = ".contiguous()" if op.dense_result else ""
        given = ", ".join(carried[operand] for operand in operands)
        lines.append(f"const at::Tensor {name} = like({{{given}}}){dense};")
        carried[node.result] = name
    return tuple(lines), carried


class _Names:
    """Hands out C identifiers that are all different."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        self.taken = {*RESERVED, *more}

    def fresh(self, name: str) -> str:
        while name in self.taken or keyword.iskeyword(name):
            name += "_"
        self.taken.add(name)
        return name


def _scalar_name(text: str) -> str:
    name = re.sub(r"\W+", "_", text.removeprefix("self.")).strip("_").removeprefix("self_")
    return name if name.isidentifier() else f"scalar_{name}"


def _operand(
    index: int, tensor: Tensor, values: Mapping[str, str], leaves: str = "", layout: str = "",
    output: bool = False, staged: bool = False, behind: int = 0, number: bool = False,
    single: Collection[str] = (),
) -> Operand:  # fmt: skip
    ctype = "T" if _follows(tensor, single) else C_TYPES[tensor.dtype]
    ctype = MASK_TYPE if number else ctype
    return Operand(
        index, values[tensor.name], ctype, output, tensor.dtype, leaves, layout, staged, behind
    )


def _staged(step: Pointwise, single: Collection[str]) -> tuple[str, ...]:
    """The inputs that the kernel which goes by tiles may stage, those as large as the results.

    Their packs have 16 bytes at most. Shared memory holds six tiles of a half type, so code for
    more would only cost registers.
    """
    whole = [a.tensor for a in step.reads if a.tensor.shape == step.writes[0].shape]
    moved = [t.name for t in whole if _follows(t, single) or t.dtype == "bool"]
    return tuple(moved[:6]) if step.layout else ()


def _numbers(step: Pointwise) -> frozenset[str]:
    """The masks that are read as numbers alone, as in x * mask.

    Harnesses that cast every input to the dtype under test give them as floating tensors, which the
    reference takes as well.
    """
    masks = {access.tensor.name for access in step.reads if access.tensor.dtype == "bool"}
    for node in step.body.statements:
        op = ops.find(node)
        assert op is not None
        condition = op.values(node).get("mask")
        as_bool = node.reads if op.result == "bool" else [getattr(condition, "name", None)]
        masks -= set(as_bool)
    return frozenset(masks - set(step.body.results))


def _follows(tensor: Tensor, single: Collection[str]) -> bool:
    """Whether a tensor is of the dtype that the kernel runs in, "T"."""
    return tensor.dtype in ops.FLOATS and tensor.name not in single


def _leaves_of(
    step: Pointwise, result: str, values: Mapping[str, str], numbers: Collection[str],
    single: Collection[str],
) -> str:  # fmt: skip
    """The floating inputs that one result depends on: they decide its dtype."""
    used = _inputs_of(step, result)
    leaves = [t.name for t in used if _follows(t, single) or t.name in numbers]
    return ", ".join(values[name] for name in leaves)


def _inputs_of(step: Pointwise, result: str) -> list[Tensor]:
    """The inputs that one result depends on."""
    nodes = {node.result: node for node in step.body.statements}
    needed, stack = set(), [result]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += nodes[name].reads if name in nodes else ()
    return [access.tensor for access in step.reads if access.tensor.name in needed]


def _c_text(value: Arg, values: Mapping[str, str], live: Mapping[str, str]) -> str:
    match value:
        case Ref():
            return values[value.name]
        case Live():
            return live.get(value.text, "")  # none where the expression does not name it
        case bool():
            return "true" if value else "false"
        case int() | float():
            return ops.float_literal(float(value))
    return ""


# --- the model ------------------------------------------------------------------------------


def forward_lines(plan: Plan, kernels: Sequence[Kernel]) -> list[str]:
    """The body of forward in the plan's mode: one line a step."""
    bindings = dict(plan.graph.bindings)
    by_name = {kernel.name: kernel for kernel in kernels}
    fronts: Fronts = {}
    lines = [f"{AT_TRACED_SIZES} = {plan.condition}"] if plan.condition else []
    told = AT_TRACED_SIZES if plan.condition else "True"
    for step, unused in zip(plan.steps, frees(plan.graph, plan.steps), strict=True):
        lines += [f"del {names.strip(', ')}" for names in wrap(", ".join(unused), WIDTH - 12)]
        match step:
            case Pointwise():
                lines.append(_kernel_call(step, by_name[step.name], bindings, told))
            case Library():
                lines.append(call_line(step.node, plan.graph, fronts))
    for text, ref in plan.graph.assigned:
        lines.append(f"{text} = {_result_text(ref, bindings)}")
    lines.append(f"return {_result_text(plan.graph.output, bindings)}")
    return with_shortcuts(lines, bindings.values())


def _kernel_call(step: Pointwise, k: Kernel, bindings: Mapping[str, str], told: str) -> str:
    read = [access.tensor.name for access in step.reads]
    more = [tensor.name for tensor in step.like if tensor.name not in read]
    tensors = [bindings.get(name, name) for name in (*read, *more)]
    tensors += [told] if step.layout == CHANNELS_LAST else []
    numbers = [scalar.text for scalar in step.scalars]
    args = ", ".join([f"_cuda.{k.name}_forward", *tensors, *numbers])
    return f"{', '.join(step.body.results)} = _run({args})"


def _result_text(output: Ref | Output | None, bindings: Mapping[str, str]) -> str:
    if output is None:
        return "None"
    if isinstance(output, Ref):
        return bindings.get(output.name, output.name)
    items = [_result_text(item, bindings) for item in output.items]
    match output.kind:
        case "dict":
            pairs = zip(output.keys, items, strict=True)
            return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
        case "list":
            return "[" + ", ".join(items) + "]"
        case kind if kind != "tuple":
            return f"{kind}(({', '.join(items)},))"
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
