"""PyTorch's own lists of pointwise operators, and the values that its tests give them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from modelnew import ops
from modelnew.canonical import _under_one_name
from modelnew.ir import Node

Array: TypeAlias = "np.ndarray[Any, Any]"

MOST = 4000  # values of one operator


@cache
def floating() -> Mapping[str, Any]:
    """The OpInfos of operators that take float32, by name; those of torch._refs are the same."""
    from torch.testing._internal.common_methods_invocations import binary_ufuncs, unary_ufuncs

    found = (op for op in (*unary_ufuncs, *binary_ufuncs) if torch.float32 in op.dtypes)
    return {op.name: op for op in found if not op.name.startswith("_refs.")}


def packet(name: str) -> str:
    """ATen's name: special_i0e for special.i0e, log_sigmoid for nn.functional.logsigmoid."""
    plain = name.removeprefix("nn.functional.").replace(".", "_")
    return "log_sigmoid" if plain == "logsigmoid" else plain


def reached(name: str) -> set[str]:
    """The rows that calls of ATen's operator `name` come to."""
    overloads = getattr(torch.ops.aten, name).overloads() if hasattr(torch.ops.aten, name) else []
    nodes = (
        _under_one_name(Node(f"aten.{name}.{overload}", "r", (), ())) for overload in overloads
    )
    return {node.packet for node in nodes} & set(ops.REGISTRY)


@cache
def by_row() -> Mapping[str, Any]:
    return {row: op for name, op in floating().items() for row in reached(packet(name))}


def _generated(op: Any, count: int) -> Iterator[Any]:
    """PyTorch's generators of small, large and extremal values for one or two operands."""
    from torch.testing._internal.opinfo import core

    kind = {1: "unary", 2: "binary"}[count]
    for size in ("small_value", "large_value", "extremal_value"):
        make = getattr(core, f"generate_elementwise_{kind}_{size}_tensors")
        yield itertools.islice(make(op, device="cpu", dtype=torch.float32, requires_grad=False), 40)


@cache
def published(row: str, count: int) -> tuple[Array, ...]:
    """What PyTorch's tests give an operator of `count` operands, small, large and extremal values.

    For an operator that is not in the lists, and for one that has another number of tensors there,
    what they give abs or add. Without the package expecttest, which they need, nothing.
    """
    if count > 2 or importlib.util.find_spec("expecttest") is None:
        return ()
    op = by_row().get(row)
    if op is None or hasattr(op, "domain") != (count == 1):
        op = floating()["abs" if count == 1 else "add"]
    samples = itertools.chain(op.sample_inputs("cpu", torch.float32), *_generated(op, count))
    given = [[a for a in (s.input, *s.args) if isinstance(a, torch.Tensor)] for s in samples]
    whole = [torch.broadcast_tensors(*g) for g in given if len(g) == count]
    joined = [torch.cat([g[i].reshape(-1) for g in whole]) for i in range(count)]
    drawn = np.random.default_rng(0).permutation(len(joined[0]))[:MOST]
    return tuple(np.asarray(t.detach(), np.float32)[drawn] for t in joined)
