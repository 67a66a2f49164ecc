"""Turns a Plan into the contexts of the templates: names, C expressions, signatures, calls."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from modelnew.library import Fronts, call_line

C_TYPES: Mapping[str, str] = {
    "bool": "bool", "uint8": "uint8_t", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t",
}  # fmt: skip
AT_TYPES: Mapping[str, str] = {
    "bool": "at::kBool", "uint8": "at::kByte", "int8": "at::kChar", "int16": "at::kShort",
    "int32": "at::kInt", "int64": "at::kLong",
}  # fmt: skip

# Names that the kernel templates use, and C++ words that are legal Python names.
RESERVED = frozenset(
    [
        "T",
        "kVec",
        "ops",
        "begin",
        "end",
        "i",
        "v",
        "offset",
        "stream",
        "dtype",
        "iter",
        "guard",
        "auto",
        "bool",
        "case",
        "catch",
        "char",
        "class",
        "const",
        "constexpr",
        "default",
        "delete",
        "do",
        "double",
        "enum",
        "explicit",
        "extern",
        "float",
        "friend",
        "goto",
        "inline",
        "int",
        "long",
        "mutable",
        "namespace",
        "new",
        "operator",
        "private",
        "protected",
        "public",
        "register",
        "short",
        "signed",
        "sizeof",
        "static",
        "struct",
        "switch",
        "template",
        "this",
        "throw",
        "typedef",
        "typename",
        "union",
        "unsigned",
        "using",
        "virtual",
        "void",
        "volatile",
        "xor",
    ]
)


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

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"

    @property
    def pack(self) -> str:
        return f"{self.value}_pack"

    @property
    def value_type(self) -> str:
        return "bool" if self.is_bool else "float"

    @property
    def read(self) -> str:
        element = f"{self.pack}.at[v]"
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
        return ", ".join(["ops", str(self.count), "stream", *(s.name for s in self.scalars)])

    @property
    def return_type(self) -> str:
        if len(self.outputs) == 1:
            return "at::Tensor"
        return f"std::tuple<{', '.join(['at::Tensor'] * len(self.outputs))}>"

    @property
    def forward_signature(self) -> str:
        tensors = [f"at::Tensor {o.value}" for o in self.inputs]
        parameters = ", ".join([*tensors, *(f"double {s.name}" for s in self.scalars)])
        return f"{self.return_type} {self.name}_forward({parameters})"

    @property
    def unify_arguments(self) -> str:
        entries = []
        for o in self.inputs:
            fixed = "" if o.ctype == "T" else f", {AT_TYPES[o.dtype]}"
            entries.append(f'{{"{o.value}", {o.value}{fixed}}}')
        return ", ".join(entries)

    @property
    def launch_arguments(self) -> str:
        return ", ".join(["ops", *(s.name for s in self.scalars), "stream"])

    @property
    def single_float_output(self) -> bool:
        return len(self.outputs) == 1 and not self.outputs[0].is_bool

    @property
    def float_outputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.outputs if not o.is_bool)

    @property
    def returned(self) -> str:
        """The results, each in the dtype that its own operands promote to."""
        results = [o.value if o.is_bool else f"{o.value}.to({o.value}_dtype)" for o in self.outputs]
        return results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"

    @property
    def first_input(self) -> str:
        return self.inputs[0].value

    @property
    def input_list(self) -> str:
        return ", ".join(o.value for o in self.inputs)

    @property
    def output_list(self) -> str:
        return ", ".join(o.value for o in self.outputs)


# --- kernels --------------------------------------------------------------------------------


def kernel(step: Pointwise) -> Kernel:
    """The template context of one Pointwise region."""
    names = _Names()
    live = {s.text: names.fresh(_scalar_name(s.text)) for s in step.scalars}
    values = {access.tensor.name: names.fresh(access.tensor.name) for access in step.reads}
    calls: dict[str, None] = {}
    statements = []
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
    lines, layout_of = _layouts(step, values)
    outputs = tuple(
        _operand(i, tensor, values, leaves=_leaves_of(step, tensor.name, values),
                 layout=layout_of[tensor.name], output=True)
        for i, tensor in enumerate(step.writes)
    )  # fmt: skip
    inputs = tuple(
        _operand(len(outputs) + i, access.tensor, values) for i, access in enumerate(step.reads)
    )
    scalars = tuple(Scalar(live[s.text], s.text) for s in step.scalars)
    return Kernel(
        step.name, formula(step), outputs, inputs, scalars, tuple(statements), tuple(calls), lines
    )


def _layouts(step: Pointwise, values: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """C++ lines that retrace how the reference lays out its steps, and each value's layout."""
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

    def __init__(self) -> None:
        self.taken = set(RESERVED)

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
    output: bool = False,
) -> Operand:  # fmt: skip
    ctype = "T" if tensor.dtype in ops.FLOATS else C_TYPES[tensor.dtype]
    return Operand(index, values[tensor.name], ctype, output, tensor.dtype, leaves, layout)


def _leaves_of(step: Pointwise, result: str, values: Mapping[str, str]) -> str:
    """The floating inputs that one result depends on: they decide its dtype."""
    nodes = {node.result: node for node in step.body.statements}
    needed, stack = set(), [result]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += nodes[name].reads if name in nodes else ()
    used = [a.tensor for a in step.reads if a.tensor.name in needed]
    return ", ".join(values[tensor.name] for tensor in used if tensor.dtype in ops.FLOATS)


def _c_text(value: Arg, values: Mapping[str, str], live: Mapping[str, str]) -> str:
    match value:
        case Ref():
            return values[value.name]
        case Live():
            return live[value.text]
        case bool():
            return "true" if value else "false"
        case int() | float():
            return ops.float_literal(float(value))
    return ""


# --- the model ------------------------------------------------------------------------------


def forward_lines(plan: Plan, kernels: Sequence[Kernel]) -> list[str]:
    """The body of ModelNew.forward: one line a step."""
    bindings = dict(plan.graph.bindings)
    stream = iter(kernels)
    fronts: Fronts = {}
    lines = []
    for step in plan.steps:
        match step:
            case Pointwise():
                lines.append(_kernel_call(step, next(stream), bindings))
            case Library():
                lines.append(call_line(step.node, plan.graph, fronts))
    return [*lines, f"return {_result_text(plan.graph.output, bindings)}"]


def _kernel_call(step: Pointwise, k: Kernel, bindings: Mapping[str, str]) -> str:
    tensors = [bindings.get(a.tensor.name, a.tensor.name) for a in step.reads]
    args = ", ".join([f"_cuda.{k.name}_forward", *tensors, *(s.text for s in k.scalars)])
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
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
