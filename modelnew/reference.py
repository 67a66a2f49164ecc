"""Loads a reference file: executes it under fake tensors, so that nothing large is allocated."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook

from modelnew.ir import ModelNewError
from modelnew.values import UNKNOWN, Values

REQUIRED = ("Model", "get_inputs")
MODULE = "_reference"  # the name of the module that a file is executed as


@dataclass(frozen=True)
class Reference:
    """A loaded reference: `model` and `inputs` hold fake tensors, `source` is the file's text.

    `called` names the classes of the file whose forward the constructor itself runs.
    """

    path: Path
    source: str
    tree: ast.Module
    overrides: Mapping[str, str]
    namespace: Mapping[str, Any]
    values: Values
    model: torch.nn.Module
    inputs: tuple[Any, ...]
    init_inputs: tuple[Any, ...]
    called: frozenset[str]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def fake_mode(self) -> FakeTensorMode:
        return self.values.fake_mode

    def build(self, *args: Any, **named: Any) -> torch.nn.Module:
        """Constructs Model(*args), or of arguments by name, under fake tensors.

        By name, variadic arguments are given as `arguments` gives them: sizes=(3, 4).
        """
        return self.construct(self.namespace["Model"], *args, **named)

    def construct(self, model: Any, /, *args: Any, **named: Any) -> torch.nn.Module:
        """The same of another class."""
        make = _constructing(model, self.values, args, named)
        made: torch.nn.Module = self.values.run(make, any_seed=True)  # load compares two seeds
        return made

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments by name, defaults and variadic ones included."""
        init = self.namespace["Model"].__init__
        if init is torch.nn.Module.__init__:
            return {}
        signature = inspect.signature(init)
        bound = signature.bind(None, *self.init_inputs)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])


def _constructing(
    model: Any, values: Values, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Callable[[], Any]:
    """A function that constructs a model of nothing but fake tensors."""
    if named:
        signature = inspect.signature(model.__init__)
        this = next(iter(signature.parameters))
        bound = inspect.BoundArguments(signature, {this: None, **named})
        args, named = bound.args[1:], bound.kwargs

    def make() -> Any:
        # A constructor may change the lists that it is given: it gets others each time.
        fresh_args, fresh_named = pytree.tree_map(lambda leaf: leaf, (args, dict(named)))
        made = model(*fresh_args, **fresh_named)
        for module in made.modules() if isinstance(made, torch.nn.Module) else ():
            for owner in (module._parameters, module._buffers, vars(module)):
                for name, value in owner.items():
                    owner[name] = values.fake(value)
        return made

    return make


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Reference:
    """Loads the reference at `path`, module constants replaced as `overrides` says.

    Raises ModelNewError with file, line and what to do when the file is not a usable reference.
    """
    overrides = dict(overrides or {})
    source, tree = parse(path, overrides)
    values = Values(path)
    namespace = _execute(path, tree, values)
    for name in REQUIRED:
        if not callable(namespace.get(name)):
            raise ModelNewError(
                f"{path}: defines no {name}: a reference needs class Model, get_inputs() "
                "and get_init_inputs()"
            )
    if not isinstance(namespace["Model"], type):
        raise ModelNewError(f"{path}: Model is not a class: define class Model in this file")
    with explained(path, "get_inputs()"):
        inputs = values.run(namespace["get_inputs"], any_seed=True)
    with explained(path, "get_init_inputs()"):
        init_inputs = values.run(namespace.get("get_init_inputs", list))
    inputs = _sequence(inputs, path, "get_inputs()")
    init_inputs = _sequence(init_inputs, path, "get_init_inputs()")
    called: set[str] = set()
    with explained(path, "Model(*get_init_inputs())"), _noting_calls(namespace, values, called):
        model = values.run(_constructing(namespace["Model"], values, init_inputs, {}))
    if not isinstance(model, torch.nn.Module):
        raise ModelNewError(f"{path}: Model is not a torch.nn.Module")
    return Reference(
        path, source, tree, overrides, namespace, values, model, inputs, init_inputs,
        frozenset(called),
    )  # fmt: skip


def _execute(path: Path, tree: ast.Module, values: Values) -> dict[str, Any]:
    """The globals of the file after it ran, the libraries that it imports being outside."""
    for node in tree.body:
        # Without the fake mode: a tensor that a library makes then belongs to no file. What
        # fails here fails again below, with its line.
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports_well(node)
    # dataclasses and typing look the module of a class up in sys.modules.
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    module.__file__, module.__package__ = str(path), ""
    code = compile(tree, str(path), "exec", dont_inherit=True)
    with explained(path, "the file"):
        values.run(lambda: exec(code, vars(module)))  # the file is the user's own code
    return vars(module)


def imports_well(statement: ast.stmt) -> bool:
    """Executes an import statement, and says whether it can be."""
    with suppress(Exception, SystemExit):
        exec(compile(ast.Module([statement], []), "<imports>", "exec", dont_inherit=True), {})
        return True
    return False


@contextmanager
def _noting_calls(namespace: Mapping[str, Any], values: Values, called: set[str]) -> Iterator[None]:
    """Notes the classes of the file whose modules are called."""

    def note(module: torch.nn.Module, args: Any) -> None:
        if type(module) is namespace["Model"]:
            raise ModelNewError(
                f"{values.line()}: the constructor calls the model itself, whose forward ModelNew "
                "replaces by kernels: call the layers that are needed instead"
            )
        owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
        if owner.__module__ == MODULE:
            called.add(owner.__qualname__)

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


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
            + _advice(error, path)
        ) from error


def _advice(error: BaseException, path: Path) -> str:
    if isinstance(error, UNKNOWN):
        return (
            ": it reads values of a tensor that are not known before the model runs, being on a "
            "GPU or of millions of elements: compute them with Python numbers or numpy"
        )
    if "UninitializedParameter" in str(error):
        return ": a lazy layer has no weights before it runs: use one that is given its size"
    name = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and name:
        if any((path.parent / near).exists() for near in (name, f"{name}.py")):
            return f": a solution is one file: copy what is needed of {name} into the reference"
        return "" if importlib.util.find_spec(name) else f": pip install {name}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return ": a solution is one file: copy what is needed into the reference"
    return ""


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
