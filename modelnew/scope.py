"""Names in Python source: which are local, which a piece of code needs, and renaming the others."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that statements of one scope bind there, nested functions and classes left closed."""
    binds = _Binds()
    for node in nodes:
        binds.visit(node)
    return binds.names - binds.elsewhere


def global_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of the module that statements of it read, those in their functions included."""
    finder = _GlobalNames()
    for node in nodes:
        finder.visit(node)
    return finder.found


def root_name(node: ast.AST) -> str | None:
    """`table` for `table.rows[0].append`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def all_args(args: ast.arguments) -> list[ast.arg]:
    """Every parameter, variadic ones last."""
    extra = [a for a in (args.vararg, args.kwarg) if a is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]


class _Binds(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.elsewhere: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.names.add(node.name)

    visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Binds nothing outside."""

    def visit_ListComp(self, node: ast.AST) -> None:
        walrus = (n for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        self.names.update(n.target.id for n in walrus)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_alias(self, node: ast.alias) -> None:
        self.names.add(node.asname or node.name.split(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        self.names.update([node.name] if node.name else [])
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_ExceptHandler

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.names.update([node.rest] if node.rest else [])
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.elsewhere.update(node.names)


class Scoped(ast.NodeTransformer):
    """Walks code of a module knowing which names are local to what is around it."""

    def __init__(self) -> None:
        self.scopes: list[tuple[set[str], bool]] = []  # names, and whether it is a class's

    def is_local(self, name: str) -> bool:
        """Whether an enclosing function binds the name, or the class whose body this is."""
        inner = len(self.scopes) - 1
        return any(
            name in names and (not is_class or number == inner)
            for number, (names, is_class) in enumerate(self.scopes)
        )

    def _within(self, names: set[str], nodes: list[ast.stmt], is_class: bool = False) -> None:
        self.scopes.append((names, is_class))
        nodes[:] = [self.visit(node) for node in nodes]
        self.scopes.pop()

    def _visit_all(self, nodes: list[ast.expr]) -> list[ast.expr]:
        return [self.visit(node) for node in nodes]

    def _defaults(self, args: ast.arguments) -> None:
        args.defaults = self._visit_all(args.defaults)
        args.kw_defaults = [None if d is None else self.visit(d) for d in args.kw_defaults]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = self._visit_all(node.decorator_list)
        self._defaults(node.args)
        names = {arg.arg for arg in all_args(node.args)} | bound_names(node.body)
        self._within(names, node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = self._visit_all(node.decorator_list)
        node.bases = self._visit_all(node.bases)
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        self._within(bound_names(node.body), node.body, is_class=True)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._defaults(node.args)
        self.scopes.append(({arg.arg for arg in all_args(node.args)}, False))
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        first = node.generators[0]
        first.iter = self.visit(first.iter)  # in the scope around, unlike the rest
        names = bound_names(generator.target for generator in node.generators)
        iterated, first.iter = first.iter, ast.Constant(None)
        self.scopes.append((names, False))
        self.generic_visit(node)
        self.scopes.pop()
        first.iter = iterated
        return node

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]


class _GlobalNames(Scoped):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not self.is_local(node.id):
            self.found.add(node.id)
        return node


class Renamer(Scoped):
    """Renames names of the module; private attributes of a renamed class keep the names they had.

    Python writes `self.__x` in class Model as `_Model__x`, which is a key of state_dict.
    """

    def __init__(self, renames: Mapping[str, str]) -> None:
        super().__init__()
        self.renames = renames
        self.owner: str | None = None

    def _global(self, name: str) -> str:
        return name if self.is_local(name) else self.renames.get(name, name)

    def _private(self, name: str) -> str:
        private = self.owner and name.startswith("__") and not name.endswith("__")
        return f"_{self.owner}{name}" if private else name

    def _member(self, name: str) -> str:
        in_class = bool(self.scopes) and self.scopes[-1][1]
        return self._private(name) if in_class else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._member(self._global(node.id))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._private(node.attr)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._member(self._global(node.name))
        return super().visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, name = self.owner, node.name.lstrip("_")
        node.name = self._global(node.name)
        self.owner = None if node.name.lstrip("_") == name else name
        node = super().visit_ClassDef(node)  # type: ignore[assignment]
        self.owner = outer
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self.renames.get(name, name) for name in node.names]
        return node

    def visit_alias(self, node: ast.alias) -> ast.AST:
        name = node.asname or node.name
        if self._global(name) != name:
            node.asname = self._global(name)
        return node


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name and parameter that occurs, whatever it means there."""
    for node in nodes:
        for child in ast.walk(node):
            match child:
                case ast.Name(id=name) | ast.arg(arg=name):
                    yield name
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.alias(name=name, asname=asname):
                    yield asname or name.split(".")[0]
