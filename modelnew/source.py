"""Copies from the reference's source what ModelNew's constructor needs, ready to stand alone.

Globals get an underscore (a harness executes both files into one namespace), docstrings and
annotations go, and so do the methods that construction does not need: the graph replaces them.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelnew.ir import ModelNewError
from modelnew.reference import MODULE, Reference, imports_well
from modelnew.scope import Renamer, all_args, bound_names, global_names, identifiers, root_name

# Globals that the rest of a solution file defines.
RESERVED = frozenset([
    "_SHARED", "_CUDA", "_CPP", "_cuda", "_NoBackward", "_run", "_check", "_check_modes",
    "_group_statistics", "_row_statistics", "_part", "_padding", "_architectures",
])  # fmt: skip
BY_NAME = frozenset({"globals", "eval", "exec", "__import__"})


@dataclass(frozen=True)
class Constructor:
    """Text of the imports, the helper definitions, and the body of `class ModelNew`.

    `head` is the class statement's line, `members` the methods and attributes that construction
    needs, `signature` forward's, without annotations. `init` is the `__init__` that is called: a
    member, or one that calls what is inherited; "" where there is none. `early` says that it
    changes its arguments or may return early; `where` is the file and line of class Model.
    """

    imports: tuple[str, ...]
    definitions: tuple[str, ...]
    head: str
    members: tuple[str, ...]
    signature: str
    init: str
    early: bool
    where: str

    def guarded(self, checks: Sequence[str]) -> tuple[str, ...]:
        """`members` with `checks`, which are lines of code, in `__init__`."""
        if not checks:
            return self.members
        if not self.init:
            raise ModelNewError(
                f"{self.where}: class Model gets its __init__ from a decorator: write it out"
            )
        lines = self.init.splitlines()
        start = 1 + next(n for n, line in enumerate(lines) if line.startswith("def "))
        at = start if self.early else len(lines)
        text = "\n".join([*lines[:at], *(f"    {check}" for check in checks), *lines[at:]])
        if self.init not in self.members:
            return (text, *self.members)
        return tuple(text if member == self.init else member for member in self.members)


def constructor(ref: Reference) -> Constructor:
    """The constructor of the reference's Model. Raises ModelNewError when it cannot be copied."""
    return _Copier(ref).constructor()


class _Copier:
    """Holds the file's statements, and what is found to be needed of them."""

    def __init__(self, ref: Reference) -> None:
        self.ref = ref
        tree = _Plain(self._is_module).visit(copy.deepcopy(ref.tree))
        executed = list(_executed(tree.body))
        self.imports = _imports(executed)
        statements = [s for s in executed if not isinstance(s, ast.Import | ast.ImportFrom)]
        definitions = [s for s in statements if isinstance(s, ast.FunctionDef | ast.ClassDef)]
        self.top = {s.name: s for s in definitions}
        self.model = self._model_statement()
        self.binds = [(s, self._bound(s)) for s in statements if s is not self.model]
        self.wanted: set[str] = set()
        self.mentioned: set[str] = set()  # attributes that the needed code reads

    def constructor(self) -> Constructor:
        forward = self._arguments("forward")
        inherited = self._inherited_init()
        extra: list[ast.stmt] = [_function("forward", forward), *inherited]
        wanted = self._close(extra)
        names = list(dict.fromkeys(n for s, binds in self.binds if s in wanted for n in binds))
        model, *needed = map(self._trimmed, [self.model, *wanted])
        self._check([model, *needed])
        clean = Renamer(self._renames(names, [model, *needed, *extra]))
        imports = [t for name, texts in self.imports.items() if name in self.wanted for t in texts]
        for statement in [model, *needed, *extra]:
            clean.visit(statement)
        own = [s for s in model.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
        init = next(iter([*own, *inherited]), None)
        return Constructor(
            imports=tuple(dict.fromkeys(imports)),
            definitions=tuple(ast.unparse(statement) for statement in needed),
            head=_head(model),
            members=tuple(ast.unparse(member) for member in _body(model.body, empty=False)),
            signature=ast.unparse(forward),
            init=ast.unparse(init) if init else "",
            early=init is not None and self._early(init),
            where=self._at(model),
        )

    def _at(self, node: Any) -> str:
        return f"{self.ref.path}:{node.lineno}"

    def _is_module(self, name: str) -> bool:
        found = self.ref.namespace.get(name)
        return isinstance(found, type) and issubclass(found, torch.nn.Module)

    def _model_statement(self) -> ast.ClassDef:
        model = self.ref.namespace["Model"]
        found = self.top.get(getattr(model, "__qualname__", ""))
        if not isinstance(model, type) or not isinstance(found, ast.ClassDef):
            raise ModelNewError(
                f"{self.ref.path}: Model is not a class statement of this file: define it here"
            )
        return found

    def _bound(self, statement: ast.stmt) -> list[str]:
        """Names of the file that a statement defines or changes, by what it calls too."""
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names = {statement.name}
            run: list[ast.AST] = [*statement.decorator_list]
        else:
            names, run = bound_names([statement]) | _changed(statement), [statement]
        for name in sorted({n.id for r in run for n in ast.walk(r) if isinstance(n, ast.Name)}):
            function = self.top.get(name)
            if isinstance(function, ast.FunctionDef):
                local = {arg.arg for arg in all_args(function.args)} | bound_names(function.body)
                names |= _changed(function) - local
        return sorted(names - self.imports.keys())

    def _close(self, extra: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The statements that Model and `extra` need, in the file's order."""
        while True:
            needed = [s for s, binds in self.binds if self.wanted.intersection(binds)]
            parts = [*map(self._trimmed, [self.model, *needed]), *extra]
            names, mentioned = global_names(parts), set(_mentioned(parts))
            if names <= self.wanted and mentioned <= self.mentioned:
                return needed
            self.wanted |= names
            self.mentioned |= mentioned

    def _trimmed(self, statement: Any) -> Any:
        """A class of modules without the methods that nothing in the constructor calls."""
        if not isinstance(statement, ast.ClassDef) or not self._is_module(statement.name):
            return statement
        bare = copy.copy(statement)
        bare.body = [s for s in statement.body if self._is_needed(s, statement)]
        return bare

    def _is_needed(self, statement: ast.stmt, owner: ast.ClassDef) -> bool:
        name = statement.name if isinstance(statement, ast.FunctionDef) else "__init__"
        if name == "forward":
            called = owner.name in self.ref.called or "forward" in self.mentioned
            return owner is not self.model and called
        if name in self.mentioned or (name.startswith("__") and name.endswith("__")):
            return True
        # What a library's class may call: reset_parameters, train, extra_repr.
        bases = self.ref.namespace[owner.name].__mro__
        return any(base.__module__ != MODULE and name in vars(base) for base in bases)

    def _check(self, parts: Sequence[ast.AST]) -> None:
        """Raises ModelNewError for what cannot be copied."""
        model, name = self.model, self.model.name
        for statement, binds in self.binds:
            if name in binds and not isinstance(statement, ast.ClassDef):
                raise ModelNewError(
                    f"{self._at(statement)}: changes class {name} after it is made: do that in it"
                )
        for node in (node for part in parts for node in ast.walk(part)):
            match node:
                case ast.Name(id=called) if called in BY_NAME:
                    raise ModelNewError(
                        f"{self._at(node)}: {called} finds names that are others in the solution: "
                        "name what is meant"
                    )
                case ast.Attribute(value=ast.Name(id="self"), attr="forward"):
                    if node in ast.walk(self._trimmed(model)):
                        raise ModelNewError(
                            f"{self._at(node)}: the constructor uses self.forward, which ModelNew "
                            "replaces by kernels: call the layers that are needed instead"
                        )

    def _renames(self, names: Sequence[str], parts: Sequence[ast.AST]) -> dict[str, str]:
        """A free name with an underscore for each of `names`, and ModelNew's."""
        model = {self.model.name: "ModelNew", "Model": "ModelNew"}
        names = [name for name in names if name not in model]
        taken = {*identifiers(parts), *self.imports} - {*names} | RESERVED | {*dir(builtins)}
        renames: dict[str, str] = {}
        for name in sorted(names, key=lambda name: not name.startswith("_")):  # these stay
            new = f"_{name.lstrip('_')}"
            while new in taken:
                new += "_"
            taken.add(new)
            renames[name] = new
        return {**renames, **model}

    def _early(self, init: ast.FunctionDef) -> bool:
        changed = bound_names(init.body) & {arg.arg for arg in all_args(init.args)}
        returns = any(isinstance(node, ast.Return) for node in ast.walk(init))
        mutable = any(isinstance(v, list | dict | set) for v in self.ref.arguments().values())
        return bool(changed) or returns or mutable

    def _arguments(self, name: str) -> ast.arguments:
        """A method's parameters without annotations, looked up as Python does."""
        mro = self.ref.namespace["Model"].__mro__
        owner = next((cls for cls in mro if name in vars(cls)), object)
        statement = self.top.get(owner.__qualname__)
        if owner.__module__ == MODULE and isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, ast.FunctionDef) and member.name == name:
                    return copy.deepcopy(member.args)
        if owner in (torch.nn.Module, object):
            raise ModelNewError(f"{self._at(self.model)}: class Model defines no {name}")
        signature = inspect.signature(getattr(owner, name))
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
        try:
            return _parsed(f"def {name}{text}: ...").args
        except SyntaxError:
            raise ModelNewError(
                f"{self._at(self.model)}: {name} is inherited with defaults that have no text: "
                f"define it in class Model: {text}"
            ) from None

    def _inherited_init(self) -> list[ast.FunctionDef]:
        """An `__init__` that calls the one that Model inherits, where it inherits one."""
        model = self.ref.namespace["Model"]
        if "__init__" in vars(model) or model.__init__ is torch.nn.Module.__init__:
            return []
        args = self._arguments("__init__")
        _, *plain = [a.arg for a in (*args.posonlyargs, *args.args)]
        given = [*plain, *([f"*{args.vararg.arg}"] if args.vararg else [])]
        given += [f"{a.arg}={a.arg}" for a in args.kwonlyargs]
        given += [f"**{args.kwarg.arg}"] if args.kwarg else []
        call = f"super().__init__({', '.join(given)})"
        return [_parsed(f"def __init__({ast.unparse(args)}):\n    {call}")]


def _parsed(text: str) -> ast.FunctionDef:
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    return function


def _function(name: str, args: ast.arguments) -> ast.FunctionDef:
    """A function of these very parameters, so that what is done to it is done to them."""
    function = _parsed(f"def {name}(): ...")
    function.args = args
    return function


def _head(model: ast.ClassDef) -> str:
    empty = copy.copy(model)
    empty.body = [ast.Expr(ast.Constant(...))]
    return ast.unparse(empty).rsplit("\n", 1)[0]


def _mentioned(parts: Iterable[ast.AST]) -> Iterator[str]:
    """Attributes that code reads or sets, by a text too: getattr(self, "build")."""
    for node in (node for part in parts for node in ast.walk(part)):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name


def _changed(statement: ast.AST) -> set[str]:
    """Names whose objects code changes: `x` in x[0] = 1, x.size = 1 and x.append(1)."""
    found = set()
    for node in ast.walk(statement):
        match node:
            case (
                ast.Attribute(ctx=ast.Store() | ast.Del())
                | ast.Subscript(ctx=ast.Store() | ast.Del())
            ):
                found.add(root_name(node))
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
                found.add(root_name(method))
    return {name for name in found if name}


# --- statements -----------------------------------------------------------------------------------


def _executed(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module; of `try: import`, those of the branch that is taken here."""
    for node in body:
        match node:
            case ast.Try(body=tried, handlers=[handler, *_]) if any(map(_is_import, tried)):
                well = all(imports_well(n) for n in tried if _is_import(n))
                yield from _executed([*tried, *node.orelse] if well else handler.body)
                yield from _executed(node.finalbody)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _executed(node.orelse)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                continue
            case _:
                yield node


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _imports(statements: Iterable[ast.stmt]) -> dict[str, list[str]]:
    """The import statements that bind each name; `from x import *` as one for each name of x."""
    found: dict[str, list[str]] = {}
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                before = [] if alias.asname else found.get(name, [])  # import a.b; import a.c
                found[name] = [*before, ast.unparse(ast.Import([alias]))]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in _named(node):
                single = ast.ImportFrom(node.module, [alias], node.level)
                found[alias.asname or alias.name] = [ast.unparse(single)]
    return found


def _named(node: ast.ImportFrom) -> list[ast.alias]:
    if [alias.name for alias in node.names] != ["*"]:
        return node.names
    module = sys.modules[str(node.module)]
    public = [name for name in vars(module) if not name.startswith("_")]
    return [ast.alias(name) for name in getattr(module, "__all__", public)]


class _Plain(ast.NodeTransformer):
    """Drops docstrings, annotations and the empty statement."""

    def __init__(self, is_module: Callable[[str], bool]) -> None:
        self.is_module = is_module

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        for arg in all_args(node.args):
            arg.annotation = None
        node.body = _body(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # Annotations are the fields of a dataclass or a NamedTuple.
        fields = bool(node.decorator_list) or not self.is_module(node.name)
        body = [_field(s) if fields and isinstance(s, ast.AnnAssign) else s for s in node.body]
        node.body = _body(
            [s if isinstance(s, ast.AnnAssign) and fields else self.visit(s) for s in body]
        )
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Expr(ast.Constant(...)), node)
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Expr(ast.Constant(...)), node) if text else node

    def visit_Pass(self, node: ast.Pass) -> ast.AST:
        return ast.copy_location(ast.Expr(ast.Constant(...)), node)


def _field(node: ast.AnnAssign) -> ast.stmt:
    """A field whose annotation needs nothing of the file; a class variable is an assignment."""
    parts = list(ast.walk(node.annotation))
    names = {p.id for p in parts if isinstance(p, ast.Name)}
    names |= {p.attr for p in parts if isinstance(p, ast.Attribute)}
    texts = [p for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    if "ClassVar" in names and node.value is not None:
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)
    if texts or not (names <= set(dir(builtins)) or names & {"InitVar", "KW_ONLY"}):
        node.annotation = ast.copy_location(ast.Name("object", ast.Load()), node)
    return node


def _body(body: list[ast.stmt], empty: bool = True) -> list[ast.stmt]:
    """Without statements that do nothing; with one if there is no other, unless it may be empty."""
    kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return kept or ([ast.Expr(ast.Constant(...))] if empty else [])
