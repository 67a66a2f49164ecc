"""Writes a library call as people write it, where that reaches the very same ATen overload.

`torch.ops.aten.unsqueeze.default(x, 1)` is always right, but goes through the operator registry:
8 us on the CPU that `x.unsqueeze(1)` does not take, and 70 us when its code is not in the caches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelnew.ir import Arg, Graph, Literal, Live, Node, Ref, Tensor
from modelnew.record import run_or_shape

# By operator and the kinds of its arguments: the front part of the call, `torch.cat` or `.view`.
Fronts: TypeAlias = dict[tuple[Any, ...], str]


def call_line(node: Node, graph: Graph, fronts: Fronts) -> str:
    """The statement that runs `node` inside ModelNew.forward.

    `fronts` is empty for a graph's first call and remembers what the others have in common: asking
    PyTorch takes 10 ms. It serves one graph, so that a file does not depend on those before it.
    """
    args, by_name = _split(node)
    texts = [python_text(value, graph.bindings) for value in args]
    named = {name: python_text(value, graph.bindings) for name, value in by_name.items()}
    if node.own:  # a helper in the file
        found = ", ".join(tensor.name for tensor in node.outputs)
        return f"{found} = _{node.packet}({', '.join(texts)})"
    if (spelled := _spelled(node, graph, texts, named)) is not None:
        return f"{node.result} = {spelled}"
    kinds = [_kind(value, graph.tensors) for value in (*args, *by_name.values())]
    key = (node.op, *by_name, *kinds)
    if key not in fronts:
        fronts[key] = _front(node, graph.tensors)
    front = fronts[key]
    if front.startswith("."):
        front = texts.pop(0) + front
    given = [*texts, *(f"{name}={text}" for name, text in named.items())]
    call = f"{front}({', '.join(given)})"
    return f"{node.result} = {call}" if node.binds else call


def python_text(value: Arg, bindings: Mapping[str, str]) -> str:
    """An argument as Python text that is right inside ModelNew.forward."""
    match value:
        case Ref():
            return bindings.get(value.name, value.name)
        case Live() | Literal():
            return value.text
        case tuple():
            return "[" + ", ".join(python_text(item, bindings) for item in value) + "]"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
    return repr(value)


def _spelled(
    node: Node, graph: Graph, texts: Sequence[str], named: Mapping[str, str]
) -> str | None:
    """The call where Python has another way to write it than a function of the operator's name."""
    match node.op:
        case "python.getitem.int":
            return f"{texts[0]}[{texts[1]}]"
        case "aten.contiguous.default" if len(texts) == 1 and not named:
            return f"{texts[0]}.contiguous()"
        case "aten.slice.Tensor" if all(isinstance(a.value, int) for a in node.args[1:]):
            return _slice_text(node, graph, texts[0])
        case "aten.to.dtype_layout" if len(texts) == 1 and list(named) == ["device"]:
            return f"{texts[0]}.to({named['device']})"
        case "aten.einsum.default":  # it chooses the order of the products by itself
            operands = node.value("tensors")
            assert isinstance(operands, tuple)
            given = (python_text(operand, graph.bindings) for operand in operands)
            return f"torch.einsum({', '.join([texts[0], *given])})"
    return None


def _slice_text(node: Node, graph: Graph, operand: str) -> str:
    """A slice as an index: `x[:, 1::2]`."""
    base, dim, start, end, step = (argument.value for argument in node.args)
    assert isinstance(base, Ref)
    assert isinstance(dim, int)
    rank = len(graph.tensors[base.name].shape)
    first = "" if start == 0 else start
    last = "" if end == sys.maxsize else end
    every = "" if step == 1 else f":{step}"
    index = ":, " * (dim % rank) + f"{first}:{last}{every}"
    return f"{operand}[{index}]"


def _split(node: Node) -> tuple[list[Arg], dict[str, Arg]]:
    """What is given by position and what by name; defaults are left out."""
    args: list[Arg] = []
    by_name: dict[str, Arg] = {}
    skipped = False
    for argument in node.args:
        if argument.default:
            skipped = True
        elif skipped or argument.keyword:
            by_name[argument.name] = argument.value
        else:
            args.append(argument.value)
    return args, by_name


def _front(node: Node, tensors: Mapping[str, Tensor]) -> str:
    found = (front for front, function in _forms(node) if _reaches(function, node, tensors))
    return next(found, f"torch.ops.{node.op}")


def _kind(value: Arg, tensors: Mapping[str, Tensor]) -> Any:
    """What PyTorch's choice of an overload can depend on."""
    match value:
        case Ref():
            return "tensor" if len(tensors[value.name].shape) else "0-dim tensor"
        case tuple():
            return tuple(_kind(item, tensors) for item in value[:1])
    return type(value)


def _forms(node: Node) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions and methods of the operator's name that are bound without Python around."""
    name = node.packet
    candidates: list[tuple[str, Any, type]] = [
        (f"nn.functional.{name}", torch.nn.functional, BuiltinFunctionType),
        (f"torch.{name}", torch, BuiltinFunctionType),
    ]
    if name.startswith("linalg_"):
        short = name.removeprefix("linalg_")
        candidates.append((f"torch.linalg.{short}", torch.linalg, BuiltinFunctionType))
    if node.args and node.args[0].name == "self" and not node.args[0].default:
        candidates.insert(1, (f".{name}", torch.Tensor, MethodDescriptorType))
    for front, space, kind in candidates:
        own = front.rpartition(".")[2]
        if isinstance(getattr(space, own, None), kind):
            yield front, getattr(space, own)


def _reaches(function: Callable[..., Any], node: Node, tensors: Mapping[str, Tensor]) -> bool:
    """Whether PyTorch takes this call to the node's overload, each argument in its place."""
    args, by_name = _split(node)
    names = list(dict.fromkeys(node.reads))
    stand_ins = [
        torch.empty(tensors[n].shape, dtype=getattr(torch, tensors[n].dtype), device="meta")
        for n in names
    ]

    def call(*given: torch.Tensor) -> Any:
        values = dict(zip(names, given, strict=True))
        keywords = {name: _value(value, values) for name, value in by_name.items()}
        return function(*(_value(value, values) for value in args), **keywords)

    seen = _Seen()
    try:
        with torch.inference_mode(), seen:
            call(*stand_ins)
    except Exception:
        return False
    if [str(func) for func, _, _ in seen.calls] != [node.op]:
        return False
    ((func, given, keywords),) = seen.calls
    values = dict(zip(names, stand_ins, strict=True))
    for index, (argument, spec) in enumerate(zip(node.args, func._schema.arguments, strict=True)):
        default = keywords.get(spec.name, spec.default_value)
        arrived = given[index] if index < len(given) else default
        if not _same(arrived, _value(argument.value, values)):
            return False
    return True


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls that arrive at PyTorch's dispatcher; see record.py."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Mapping[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return run_or_shape(func, args, kwargs or {})


def _same(given: Any, expected: Any) -> bool:
    if isinstance(given, torch.Tensor) or isinstance(expected, torch.Tensor):
        return given is expected
    if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(map(_same, given, expected))
    return bool(given == expected) or (expected is None and given is False)


def _value(value: Arg, tensors: Mapping[str, Any]) -> Any:
    """The argument itself, on the device of the stand-ins."""
    match value:
        case Ref():
            return tensors[value.name]
        case Live():
            return value.value
        case Literal():
            is_device = value.text.endswith(".device") or value.text.startswith("torch.device(")
            if ".dtype" in value.text:  # of a tensor, read at the call: any will do here
                return torch.float32
            return torch.device("meta") if is_device else eval(value.text, {"torch": torch})
        case tuple():
            return [_value(item, tensors) for item in value]
    return value
