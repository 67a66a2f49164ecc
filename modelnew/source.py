"""Copies from the reference's source what ModelNew's constructor needs, ready to stand alone.

Globals get an underscore (a harness executes both files into one namespace), docstrings and
annotations go, and `forward` is left out everywhere: the graph replaces it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modelnew.ir import ModelNewError

KEPT_NAMES = ("Model", "get_inputs", "get_init_inputs")


@dataclass(frozen=True)
class Constructor:
    """Text of the imports, the helper definitions, and the body of `class ModelNew`.

    `bases` is the class line's bases, `members` the methods and attributes that construction
    needs, `__init__` first; `signature` is forward's, without annotations.
    """

    imports: tuple[str, ...]
    definitions: tuple[str, ...]
    bases: str
    members: tuple[str, ...]
    signature: str


def constructor(tree: ast.Module, path: str) -> Constructor:
    """The constructor of `class Model` in `tree`. Raises ModelNewError when it has none there."""
    top = _definitions(tree)
    model = top.get("Model")
    if not isinstance(model, ast.ClassDef):
        raise ModelNewError(f"{path}: Model is not a class statement of this file: define it here")
    members = _members(model)
    forward = _inherited(model, "forward", top)
    if forward is None:
        raise ModelNewError(f"{path}:{model.lineno}: class Model defines no forward")
    renames = {name: f"_{name.lstrip('_')}" for name in top if name not in KEPT_NAMES}
    imports = _imports(tree)
    wanted, used = _needed([*members, *model.bases], top, imports)
    definitions = [top[name] for name in top if name in wanted]
    clean = _Cleaner({**renames, "Model": "ModelNew"})
    return Constructor(
        imports=tuple(dict.fromkeys(imports[name] for name in imports if name in used)),
        definitions=tuple(ast.unparse(clean.visit(_without_forward(d))) for d in definitions),
        bases=", ".join(ast.unparse(clean.visit(base)) for base in model.bases),
        members=tuple(ast.unparse(clean.visit(member)) for member in members),
        signature=_signature(forward),
    )


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Top-level functions, classes and assigned names, in the file's order."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    """The import statement that binds each name."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                single = (
                    ast.Import([alias])
                    if isinstance(node, ast.Import)
                    else ast.ImportFrom(node.module, [alias], node.level)
                )
                found[name] = ast.unparse(single)
    return found


def _method(model: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for node in model.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def _inherited(
    model: ast.ClassDef, name: str, top: Mapping[str, ast.stmt]
) -> ast.FunctionDef | None:
    """The method of a class of this file, looked up in its bases of this file too."""
    found = _method(model, name)
    for base in model.bases:
        parent = top.get(base.id) if isinstance(base, ast.Name) else None
        if found is None and isinstance(parent, ast.ClassDef):
            found = _inherited(parent, name, top)
    return found


def _members(model: ast.ClassDef) -> list[ast.stmt]:
    """Class attributes, `__init__`, and the methods it calls, directly or not."""
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}
    attributes = [n for n in model.body if isinstance(n, ast.Assign | ast.AnnAssign)]
    wanted: dict[str, ast.FunctionDef] = {}
    stack = ["__init__"]
    while stack:
        name = stack.pop()
        if name in methods and name not in wanted and name != "forward":
            wanted[name] = methods[name]
            stack += [n.attr for n in ast.walk(methods[name]) if isinstance(n, ast.Attribute)]
    return [*attributes, *wanted.values()]


def _without_forward(node: ast.stmt) -> ast.stmt:
    if not isinstance(node, ast.ClassDef):
        return node
    bare = copy.copy(node)
    bare.body = [n for n in node.body if getattr(n, "name", "") != "forward"]
    return bare


def _needed(
    roots: list[ast.stmt | ast.expr], top: Mapping[str, ast.stmt], imports: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """Top-level definitions and imports that `roots` need, definitions followed into."""
    wanted: set[str] = set()
    used: set[str] = set()
    stack: list[ast.AST] = list(roots)
    while stack:
        for name in _global_names(stack.pop()):
            if name in imports:
                used.add(name)
            elif name in top and name not in wanted and name not in KEPT_NAMES:
                wanted.add(name)
                stack.append(_without_forward(top[name]))
    return wanted, used


def _global_names(node: ast.AST) -> Iterator[str]:
    """Names that a node reads and that no enclosing function of it binds."""
    finder = _GlobalNames()
    finder.visit(node)
    yield from finder.found


class _Scoped(ast.NodeTransformer):
    """Walks code knowing which names are local to the functions around it."""

    def __init__(self) -> None:
        self.local: list[set[str]] = []

    def is_local(self, name: str) -> bool:
        return any(name in scope for scope in self.local)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        self._defaults(node.args)
        self.local.append(_bound_names(node))
        node.body = [self.visit(statement) for statement in node.body]
        self.local.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._defaults(node.args)
        self.local.append(_bound_names(node))
        node.body = self.visit(node.body)
        self.local.pop()
        return node

    def _defaults(self, args: ast.arguments) -> None:
        args.defaults = [self.visit(d) for d in args.defaults]
        args.kw_defaults = [None if d is None else self.visit(d) for d in args.kw_defaults]


class _GlobalNames(_Scoped):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and not self.is_local(node.id):
            self.found[node.id] = None
        return node


class _Cleaner(_Scoped):
    """Renames globals, drops docstrings and annotations, replaces the empty statement."""

    def __init__(self, renames: Mapping[str, str]) -> None:
        super().__init__()
        self.renames = renames

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id if self.is_local(node.id) else self.renames.get(node.id, node.id)
        return ast.copy_location(ast.Name(name, node.ctx), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node = super().visit_FunctionDef(node)  # type: ignore[assignment]
        node.returns = None
        for arg in _all_args(node.args):
            arg.annotation = None
        node.body = _body(node.body)
        if not self.local:
            node.name = self.renames.get(node.name, node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        name = self.renames.get(node.name, node.name)
        self.local.append(set())  # methods are attributes of the class, not globals
        node = self.generic_visit(node)  # type: ignore[assignment]
        self.local.pop()
        node.name, node.body = name, _body(node.body)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if node.value is None:
            return ast.Expr(ast.Constant(...))
        return ast.fix_missing_locations(
            ast.copy_location(ast.Assign([node.target], node.value), node)
        )

    def visit_Pass(self, node: ast.Pass) -> ast.AST:
        return ast.copy_location(ast.Expr(ast.Constant(...)), node)


def _body(body: list[ast.stmt]) -> list[ast.stmt]:
    """Without its docstring, and never empty."""
    first = body[0] if body else None
    value = first.value if isinstance(first, ast.Expr) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        body = body[1:]
    return body or [ast.Expr(ast.Constant(...))]


def _all_args(args: ast.arguments) -> list[ast.arg]:
    extra = [a for a in (args.vararg, args.kwarg) if a is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]


def _bound_names(node: ast.FunctionDef | ast.Lambda) -> set[str]:
    names = {arg.arg for arg in _all_args(node.args)}
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, ast.FunctionDef | ast.ClassDef) and child is not node:
            names.add(child.name)
    return names


def _signature(forward: ast.FunctionDef) -> str:
    """forward's arguments with their defaults, without annotations."""
    args = copy.deepcopy(forward.args)
    for arg in _all_args(args):
        arg.annotation = None
    return ast.unparse(args)
