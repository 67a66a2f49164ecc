"""The operator registry: one row holds all that is known about a pointwise operator.

A row's `expr` is a C expression over the operator's arguments, named in `params` in the order of
the ATen schema, over float values: arithmetic is float32 whatever the storage type. Where the
formula depends on a constant argument, `expr` is a function of the bound arguments. The reference
of a row's test is the ATen operator itself, on values drawn from `domain`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from modelnew.ir import Arg, Graph, Literal, Live, Node, Ref, Tensor
from modelnew.moves import Move

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")

# The C text of each parameter, by name; a parameter that the call leaves None is absent.
Texts: TypeAlias = Mapping[str, str]
Values: TypeAlias = Mapping[str, Arg]
Expression: TypeAlias = Callable[[Values, Texts], str]


@dataclass(frozen=True)
class Op:
    """One operator.

    `result` is "float" or "bool". A function `f` that `expr` calls and that CUDA does not have
    is templates/device/f.cuh. `domain` bounds the values that its tests draw, `attrs` gives test
    values for scalar arguments. `accepts` says which constant arguments the row covers.
    `dense_result` marks what PyTorch lays out densely whatever its operands' strides. `channel`
    names the parameters that hold one value a channel: they lie along the second dimension of x.
    `single` names those that are float32 whatever the dtype of x, `same` those that must be of x's.
    `placed` gives the dimensions on which the result depends by where it is. `refusal` says why a
    call that `accepts` does not cover is none for a kernel.
    """

    name: str
    params: str
    expr: str | Expression
    result: str = "float"
    domain: tuple[float, float] = (-20.0, 20.0)
    attrs: Mapping[str, float | str | bool | None] | None = None
    accepts: Callable[[Values], bool] | None = None
    dense_result: bool = False
    formula: str | None = None
    channel: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    placed: Callable[[Values], tuple[Move, ...]] | None = None
    refusal: str = "constant arguments that its row does not cover"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.params.split())

    @property
    def uniform(self) -> bool:
        """Whether an element of the result is the same wherever it is, and lies as operands do."""
        placed = self.channel or self.single or self.same or self.placed
        return not (placed or self.dense_result)

    def values(self, node: Node) -> Values:
        """The node's arguments under the row's own names."""
        return {name: arg.value for name, arg in zip(self.names, node.args, strict=False)}

    def text(self, node: Node, texts: Texts) -> str:
        """The C expression of `node`, each parameter replaced by its text."""
        values = self.values(node)
        expr = self.expr if isinstance(self.expr, str) else self.expr(values, texts)

        def replaced(match: re.Match[str]) -> str:
            text = texts.get(match[0], match[0])
            signed = text.startswith("-") and expr[: match.start()].endswith("-")
            return f"({text})" if signed else text

        return re.sub(r"\b[A-Za-z_]\w*\b", replaced, expr)


def used_values(node: Node) -> list[Arg]:
    """The arguments that the expression of `node` names."""
    op = find(node)
    assert op is not None
    values = {name: value for name, value in op.values(node).items() if value is not None}
    texts = {name: name for name, value in values.items() if not isinstance(value, str)}
    named = re.findall(r"\w+", op.text(node, texts))
    return [value for name, value in values.items() if name in named]


def operands(node: Node, role: str) -> tuple[str, ...]:
    """The tensors that `node` reads in a role: "channel", "single" or "same"; see Op."""
    op = find(node)
    names = () if op is None else getattr(op, role)
    values = op.values(node) if op and names else {}
    return tuple(v.name for name in names if isinstance(v := values[name], Ref))


def placed(node: Node) -> tuple[Move, ...]:
    """The dimensions on which the result of `node` depends by where an element is."""
    op = find(node)
    return op.placed(op.values(node)) if op and op.placed else ()


def float_literal(value: float) -> str:
    """The shortest C literal that is `value` rounded to float32."""
    if math.isnan(value):
        return "NAN"
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if math.isinf(single):
        return "INFINITY" if single > 0 else "-INFINITY"
    for digits in range(1, 10):
        text = f"{single:.{digits}g}"
        if struct.unpack("f", struct.pack("f", float(text)))[0] == single:
            break
    if "e" in text or "." in text:
        return text + "f"
    return text + ".0f"


def find(node: Node) -> Op | None:
    """The row for a node; an in-place call has its functional operator's row."""
    packet = node.packet
    return REGISTRY.get(packet) or REGISTRY.get(packet.removesuffix("_"))


def why_not(node: Node, graph: Graph) -> str | None:
    """Why `node` cannot be part of a pointwise kernel, or None when it can."""
    op = find(node)
    if op is None:
        return "no pointwise operator"
    if node.mutates:
        return "writes in place to what something else may see"
    if len(node.outputs) != 1:
        return "writes into given tensors"
    (output,) = node.outputs
    operands = [graph.tensors[name] for name in node.reads if name in graph.tensors]
    if reason := _dtype_reason(op, output, operands):
        return reason
    if op.channel and len(output.shape) < 2:
        return "one value a channel of a tensor without channels"
    values = op.values(node)
    if len(node.args) > len(op.names) and any(not a.default for a in node.args[len(op.names) :]):
        return "an argument that its row does not know"
    if op.accepts is not None and not op.accepts(values):
        return op.refusal
    if not all(_scalar_or_tensor(value) for value in values.values()):
        return "an argument that is no number"
    return None


def _scalar_or_tensor(value: Arg) -> bool:
    if isinstance(value, tuple):  # an argument that decides the expression
        return not any(isinstance(item, Ref) for item in value)
    return value is None or isinstance(value, Ref | Live | Literal | bool | int | float | str)


def _dtype_reason(op: Op, output: Tensor, operands: list[Tensor]) -> str | None:
    allowed = (*FLOATS, *INTEGERS, "bool")
    dtypes = [tensor.dtype for tensor in operands]
    if any(dtype not in allowed for dtype in dtypes):
        return "operands of " + ", ".join(sorted(set(dtypes)))
    wanted = FLOATS if op.result == "float" else ("bool",)
    if output.dtype not in wanted:
        return f"a result of {output.dtype}"
    exact = all(dtype == "bool" for dtype in dtypes)
    if not any(dtype in FLOATS for dtype in dtypes) and not (exact and op.result == "bool"):
        return "operands of " + ", ".join(sorted(set(dtypes)))
    return None


def _registry() -> dict[str, Op]:
    from modelnew.ops import activations, arithmetic, channels, logic, places, special, unary

    rows: dict[str, Op] = {}
    for module in (arithmetic, unary, activations, logic, special, channels, places):
        for row in module.ROWS:
            if row.name in rows:
                raise ValueError(f"operator {row.name} has two rows")
            rows[row.name] = row
    return rows


REGISTRY: Mapping[str, Op] = _registry()
