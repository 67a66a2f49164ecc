"""Loads a reference file: executes it under fake tensors, so that nothing large is allocated."""

from __future__ import annotations

import ast
import hashlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modelnew.ir import ModelNewError

REQUIRED = ("Model", "get_inputs")


@dataclass(frozen=True)
class Reference:
    """A loaded reference: `model` and `inputs` hold fake tensors, `source` is the file's text."""

    path: Path
    source: str
    tree: ast.Module
    overrides: Mapping[str, str]
    namespace: Mapping[str, Any]
    fake_mode: FakeTensorMode
    model: torch.nn.Module
    inputs: tuple[Any, ...]
    init_inputs: tuple[Any, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def build(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Constructs Model(*args) under fake tensors, random state untouched outside."""
        with self.fake_mode:
            model: torch.nn.Module = self.namespace["Model"](*args, **kwargs)
        return model

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments by name, defaults included; *args and **kwargs left out."""
        signature = inspect.signature(self.namespace["Model"].__init__)
        bound = signature.bind(None, *self.init_inputs)
        bound.apply_defaults()
        kinds = {name: p.kind for name, p in signature.parameters.items()}
        skip = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = {name: v for name, v in bound.arguments.items() if kinds[name] not in skip}
        named.pop(next(iter(signature.parameters)))
        return named


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Reference:
    """Loads the reference at `path`, module constants replaced as `overrides` says.

    Raises ModelNewError with file, line and what to do when the file is not a usable reference.
    """
    overrides = dict(overrides or {})
    source, tree = parse(path, overrides)
    namespace: dict[str, Any] = {"__name__": "reference", "__file__": str(path)}
    mode = FakeTensorMode()
    with mode:
        with explained(path, "the file"):
            exec(compile(tree, str(path), "exec"), namespace)  # the file is the user's own code
        for name in REQUIRED:
            if not callable(namespace.get(name)):
                raise ModelNewError(
                    f"{path}: defines no {name}: a reference needs class Model, get_inputs() "
                    "and get_init_inputs()"
                )
        with explained(path, "get_inputs()"):
            inputs = _sequence(namespace["get_inputs"](), path, "get_inputs()")
        with explained(path, "get_init_inputs()"):
            give = namespace.get("get_init_inputs", list)
            init_inputs = _sequence(give(), path, "get_init_inputs()")
        with explained(path, "Model(*get_init_inputs())"):
            model = namespace["Model"](*init_inputs)
    if not isinstance(model, torch.nn.Module):
        raise ModelNewError(f"{path}: Model is not a torch.nn.Module")
    return Reference(path, source, tree, overrides, namespace, mode, model, inputs, init_inputs)


def parse(path: Path, overrides: Mapping[str, str]) -> tuple[str, ast.Module]:
    """A file's text and its syntax tree, module constants replaced as `overrides` says.

    Raises ModelNewError for a file that cannot be read or parsed, or that lacks a constant.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNewError(f"{path}: cannot be read: {error}") from None
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        line, text = getattr(error, "lineno", 1), (getattr(error, "text", "") or "").strip()
        raise ModelNewError(
            f"{path}:{line}: syntax error: {getattr(error, 'msg', error)}: {text!r}: "
            "correct the file"
        ) from None
    return source, _override(tree, overrides, path)


def _override(tree: ast.Module, overrides: Mapping[str, str], path: Path) -> ast.Module:
    """Replaces the value of every top-level `NAME = ...`; a name that is not there is an error."""
    constants: dict[str, list[ast.Assign]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants.setdefault(node.targets[0].id, []).append(node)
    for name, text in overrides.items():
        if name not in constants:
            known = ", ".join(constants) or "none"
            raise ModelNewError(f"{path}: --set {name}: no such module constant (has: {known})")
        try:
            value = ast.parse(text, mode="eval").body
        except SyntaxError:
            raise ModelNewError(f"{path}: --set {name}={text}: not a Python value") from None
        for node in constants[name]:
            node.value = ast.copy_location(value, node.value)
    return ast.fix_missing_locations(tree)


def _sequence(value: object, path: Path, what: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ModelNewError(
            f"{path}: {what} returns a {type(value).__name__}: return a list of arguments"
        )
    return tuple(value)


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """Turns an exception of the user's code into one message with the line of `path`."""
    try:
        yield
    except ModelNewError:
        raise
    except (Exception, SystemExit) as error:
        where, code = user_line(error, path)
        text = str(error).strip().splitlines()
        raise ModelNewError(
            f"{where}: {what} raises {type(error).__name__}: {text[0] if text else ''}"
            + (f" (in `{code}`)" if code else "")
        ) from error


def user_line(error: BaseException, path: Path) -> tuple[str, str]:
    """The innermost line of `path` in the error's traceback, as "file:line", and its text."""
    cause: BaseException | None = error
    while cause is not None:
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if frame.filename == str(path):
                return f"{path}:{frame.lineno}", frame.line or ""
        cause = cause.__cause__ or cause.__context__
    return str(path), ""


def attribute_text(path: str) -> str:
    """The text that reads a dotted path of a module: `net.0.weight` is `self.net[0].weight`."""
    text = "self"
    for part in path.split("."):
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f".{part}" if part.isidentifier() else f"[{part!r}]"
    return text
