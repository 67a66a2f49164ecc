"""Constructs a solution's ModelNew under fake tensors, to prove that its constructor is a copy."""

from __future__ import annotations

import ast
import hashlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from modelnew.ir import ModelNewError
from modelnew.reference import Reference

FILE = "<solution>"


def rehearse(ref: Reference, text: str) -> None:
    """Raises ModelNewError unless ModelNew starts as the reference's model did, same weights too.

    The kernels are not built: nothing in a constructor may call them.
    """
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not _builds(node)]
    code = compile(tree, FILE, "exec", dont_inherit=True)
    namespace: dict[str, Any] = {"__name__": "_solution"}
    try:
        ref.values.run(lambda: exec(code, namespace), any_seed=True)
        model = ref.construct(namespace["ModelNew"], *ref.init_inputs)
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
        line = text.splitlines()[(lines[-1] or 1) - 1].strip() if lines else ""
        raise ModelNewError(
            f"{_where(ref)}: the constructor does not stand alone: {type(error).__name__}: {error} "
            f"(in `{line}`): keep what it needs in functions and constants of this file"
        ) from error
    for mine, theirs in zip(_facts(ref, model), _facts(ref, ref.model), strict=False):
        if mine != theirs:
            raise ModelNewError(
                f"{_where(ref)}: the constructor, copied, makes another model: {mine:.200} is no "
                f"{theirs:.200}: keep what it needs in functions and constants of this file"
            )


def _builds(node: ast.stmt) -> bool:
    """Whether a statement is one that builds the extension."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "torch.utils.cpp_extension"
    return isinstance(node, ast.Assign) and "load_inline" in ast.dump(node.value)


def _where(ref: Reference) -> str:
    init = getattr(ref.namespace["Model"].__init__, "__code__", None)
    own = init is not None and init.co_filename == str(ref.path)
    return f"{ref.path}:{init.co_firstlineno}" if own and init else str(ref.path)


def _facts(ref: Reference, model: torch.nn.Module) -> Iterator[str]:
    """All that must be the same of the two models, one fact after the other."""
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module).__name__ if type(module).__module__.startswith("torch.") else "module"
        yield f"{path or 'Model'}: a {kind}, {'training' if module.training else 'evaluating'}"
        names = [name for name in vars(module) if not name.startswith("_")]
        yield f"{path or 'Model'}: with {', '.join(names)}"
    seen: dict[int, str] = {}
    for name, tensor in [*model.state_dict(keep_vars=True).items(), *model.named_buffers()]:
        if not isinstance(tensor, torch.Tensor):
            continue
        first = seen.setdefault(id(tensor), name)
        yield f"{name}: {first} of {tensor.dtype}{list(tensor.shape)}, {tensor.requires_grad}"
        value = ref.values.of(tensor)
        if value is not None:
            yield f"{name} = {_digits(value)}"
    yield "nothing more"


def _digits(value: torch.Tensor) -> str:
    """A value as text that no other value has, short for a large one."""
    if value.numel() <= 16:
        return str(value.tolist())
    return hashlib.sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
