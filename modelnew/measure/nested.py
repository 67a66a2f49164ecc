"""Tensors in nested lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` (tensors in lists, tuples and dicts) with `change` applied to each tensor."""
    match tree:
        case torch.Tensor():
            return change(tree)
        case dict():
            return {key: map_tensors(change, value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(map_tensors(change, value) for value in tree))
        case list() | tuple():
            return type(tree)(map_tensors(change, value) for value in tree)
        case _:
            return tree


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating tensors in `dtype`."""
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested value with its place, as ("output[0]['mean']", leaf)."""
    match tree:
        case dict():
            for key, value in tree.items():
                yield from leaves(value, f"{name}[{key!r}]" if name else str(key))
        case list() | tuple():
            for index, value in enumerate(tree):
                yield from leaves(value, f"{name}[{index}]")
        case _:
            yield name, tree


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and storage offset, gaps and overlaps included."""
    storage: Any = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage.clone(), tensor.storage_offset(), tensor.size(), tensor.stride())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality of two tensors, NaN payloads and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0 or a.dtype == torch.bool:
        return torch.equal(a, b)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size(), torch.uint8)
    bits = [x.contiguous().flatten().view(word) for x in (a, b)]
    return torch.equal(bits[0], bits[1])
