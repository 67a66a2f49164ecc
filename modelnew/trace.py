"""Traces a reference to a Graph of ATen calls; the only module that imports torch.export."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from modelnew.ir import (
    Arg,
    Argument,
    Graph,
    Literal,
    ModelNewError,
    Node,
    Output,
    Ref,
    Source,
    Tensor,
    refs_in,
)
from modelnew.reference import Reference, attribute_text, user_line
from modelnew.specialize import equal, specialize

# Checks that torch.export adds; they hold by construction and compute nothing.
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")


@dataclass(frozen=True)
class Leaf:
    """One leaf of forward's arguments: the text that reads it and its value."""

    text: str
    value: Any


def trace(ref: Reference) -> Graph:
    """The reference's graph, with live attributes, pinned sizes and guarded arguments.

    Raises ModelNewError when forward cannot be traced or returns something else than tensors.
    """
    leaves = input_leaves(ref)
    base = trace_once(ref, ref.model, leaves)
    graph = specialize(ref, base, lambda model, given: trace_once(ref, model, given), leaves)
    modes = {module: module.training for module in ref.model.modules()}
    built = ref.model.training
    other = trace_once(ref, ref.model.train(not built), leaves)
    for module, mode in modes.items():
        module.training = mode
    return graph if other == base else replace(graph, training=built)


def input_leaves(ref: Reference) -> tuple[Leaf, ...]:
    """forward's arguments by name, containers opened: `x`, `xs[0]`, `state["h"]`."""
    if type(ref.model).forward is torch.nn.Module.forward:
        raise ModelNewError(f"{ref.path}: class Model has no forward: define it")
    here = f"{ref.path}:{_forward_line(ref)}"
    signature = inspect.signature(ref.model.forward)
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ModelNewError(f"{here}: forward takes *{name}: name its arguments")
    try:
        bound = signature.bind(*ref.inputs)
    except TypeError as error:
        raise ModelNewError(f"{here}: get_inputs() does not fit forward: {error}") from None
    bound.apply_defaults()
    leaves: list[Leaf] = []
    for name, value in bound.arguments.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            leaves.append(Leaf(name + pytree.keystr(path), leaf))
    return tuple(leaves)


def trace_once(ref: Reference, model: torch.nn.Module, leaves: Sequence[Leaf]) -> Graph:
    """Exports `model` on the leaves' values and reads the program into a Graph."""
    program = _export(ref, model, leaves)
    return _Reader(ref, model, leaves, program).graph()


def _export(ref: Reference, model: torch.nn.Module, leaves: Sequence[Leaf]) -> Any:
    signature = inspect.signature(type(model).forward)
    names = list(signature.parameters)[1:]
    forward = type(model).forward

    def on_tensors(*tensors: torch.Tensor) -> Any:
        stream = iter(tensors)
        values = [next(stream) if isinstance(v.value, torch.Tensor) else v.value for v in leaves]
        return forward(model, **_rebuild(names, leaves, values, ref))

    tensors = tuple(leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor))
    model.__dict__["forward"] = on_tensors
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # torch's own deprecations, not the user's business
            logging.disable(logging.CRITICAL)  # a refused trace is an answer here, not an event
            return torch.export.export(model, tensors, strict=False)
    except ModelNewError:
        raise
    except Exception as error:
        raise _not_traceable(error, ref) from error
    finally:
        logging.disable(disabled)
        del model.__dict__["forward"]


def _rebuild(
    names: Sequence[str], leaves: Sequence[Leaf], values: Sequence[Any], ref: Reference
) -> dict[str, Any]:
    """Puts leaf values back into the containers that get_inputs() gave."""
    bound = inspect.signature(ref.namespace["Model"].forward).bind(None, *ref.inputs)
    bound.apply_defaults()
    arguments = {name: bound.arguments[name] for name in names}
    spec = pytree.tree_structure(arguments)
    assert spec.num_leaves == len(leaves)
    rebuilt: dict[str, Any] = pytree.tree_unflatten(list(values), spec)
    return rebuilt


def _not_traceable(error: Exception, ref: Reference) -> ModelNewError:
    where, code = user_line(error, ref.path)
    code = f" `{code}`" if code else ""
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error):
        return ModelNewError(
            f"{where}:{code} depends on the values of a tensor, so no fixed sequence of kernels "
            "computes it: write it with torch.where or masks"
        )
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return ModelNewError(
        f"{where}:{code} cannot be traced: {type(error).__name__}: {text.strip()}: "
        "check that forward runs on get_inputs()"
    )


class _Reader:
    """Reads one exported program; holds the names while it does."""

    def __init__(
        self, ref: Reference, model: torch.nn.Module, leaves: Sequence[Leaf], program: Any
    ) -> None:
        self.ref, self.model, self.program = ref, model, program
        self.leaves = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        self.device = f"{self.leaves[0].text}.device" if self.leaves else "torch.device('cuda')"
        self.names: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.bindings: dict[str, str] = {}

    def graph(self) -> Graph:
        inputs = self._placeholders()
        nodes = tuple(self._nodes())
        return Graph(self.tensors, self.bindings, inputs, nodes, self._output())

    def _placeholders(self) -> tuple[str, ...]:
        specs = self.program.graph_signature.input_specs
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        taken = {leaf.text for leaf in self.leaves}
        leaves, inputs = iter(self.leaves), []
        for spec, node in zip(specs, placeholders, strict=True):
            if spec.kind.name == "USER_INPUT":
                leaf = next(leaves)
                text = leaf.text
                name = text if text.isidentifier() else _free(re.sub(r"\W+", "_", text), taken)
                inputs.append(name)
            else:
                name, text = _free(re.sub(r"\W", "_", spec.target), taken), self._state_text(spec)
            self.names[node.name] = name
            self.bindings[name] = text
            self._define(name, node.meta["val"])
            taken.add(name)
        self.taken = taken
        return tuple(inputs)

    def _state_text(self, spec: Any) -> str:
        """The text that reads a parameter, buffer or constant."""
        if spec.kind.name == "CONSTANT_TENSOR" and not _has(self.model, spec.target):
            value = self.program.constants[spec.target]
            if value.numel() > 64:
                raise ModelNewError(
                    f"{self.ref.path}: forward makes a constant of {value.numel()} elements: "
                    "register it as a buffer in __init__"
                )
            numbers = re.sub(r"\b(inf|nan)\b", r'float("\1")', str(value.tolist()))
            return f"torch.tensor({numbers}, dtype={value.dtype}, device={self.device})"
        return attribute_text(spec.target)

    def _define(self, name: str, value: Any) -> tuple[Tensor, ...]:
        if not isinstance(value, torch.Tensor):
            return ()
        tensor = Tensor(name, tuple(int(s) for s in value.shape), str(value.dtype)[6:])
        self.tensors[name] = tensor
        return (tensor,)

    def _nodes(self) -> Iterator[Node]:
        unknown = []
        for node in self.program.graph.nodes:
            if node.op != "call_function" or any(c in str(node.target) for c in CHECKS):
                continue
            name = self.names[node.name] = _free(node.name, self.taken)
            self.taken.add(name)
            source = self._source(node)
            if node.target is operator.getitem:
                args = (Argument("self", self._arg(node.args[0])), Argument("index", node.args[1]))
                outputs = self._define(name, node.meta["val"])
                views = tuple(refs_in(args[0].value))
                yield Node("python.getitem.int", name, args, outputs, views=views, source=source)
            elif isinstance(node.target, torch._ops.OpOverload):
                yield self._call(node, name, source)
            else:
                unknown.append(f"{_at(source)}: {node.target} (higher-order operator)")
        if unknown:
            raise ModelNewError(
                f"{self.ref.path}: operators that cannot be generated:\n  " + "\n  ".join(unknown)
            )

    def _call(self, node: Any, name: str, source: Source | None) -> Node:
        schema = node.target._schema
        args: list[Argument] = []
        mutates: list[str] = []
        views: list[str] = []
        for index, spec in enumerate(schema.arguments):
            given = index < len(node.args) or spec.name in node.kwargs
            raw = node.args[index] if index < len(node.args) else node.kwargs.get(spec.name)
            value = self._arg(raw if given else spec.default_value)
            if spec.name == "cudnn_enabled":  # a setting of the machine, not of the model
                value = Literal("torch.backends.cudnn.enabled")
            # `Tensor? weight` of instance_norm may be None, and must be given all the same.
            is_default = spec.has_default_value() and (not given or equal(raw, spec.default_value))
            args.append(Argument(spec.name, value, is_default, spec.kwarg_only))
            if spec.alias_info is not None and isinstance(value, Ref):
                (mutates if spec.alias_info.is_write else views).append(value.name)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(
            isinstance(s, torch.SymInt) for s in value.shape
        ):
            raise ModelNewError(
                f"{_at(source)}: {node.target} gives a tensor whose size is known only when the "
                "model runs: keep the sizes to what the inputs' shapes give, with masks"
            )
        outputs = self._define(name, value)
        if not outputs and not isinstance(value, tuple | list | None):
            raise ModelNewError(
                f"{_at(source)}: {node.target} gives a {type(value).__name__}, whose value is "
                "known only when the model runs: keep forward to tensors"
            )
        random = torch.Tag.nondeterministic_seeded in node.target.tags or any(
            argument.name == "dropout_p" and argument.value != 0.0 for argument in args
        )
        return Node(
            str(node.target),
            name,
            tuple(args),
            outputs,
            tuple(mutates),
            tuple(views),
            random,
            source,
        )

    def _arg(self, value: Any) -> Arg:
        match value:
            case torch.fx.Node():
                return Ref(self.names[value.name])
            case bool() | int() | float() | str() | None:
                return value
            case list() | tuple():
                return tuple(self._arg(item) for item in value)
            case torch.device():
                # Traced on the CPU; at run time the model lives where its inputs are.
                return Literal(self.device if value.type == "cpu" else f"torch.device({value!s})")
            case torch.dtype() | torch.memory_format() | torch.layout() | complex():
                return Literal(str(value))
        raise ModelNewError(f"{self.ref.path}: an argument of type {type(value).__name__}")

    def _source(self, node: Any) -> Source | None:
        frames = re.findall(
            r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or ""
        )
        own = [frame for frame in frames if frame[0] == str(self.ref.path)]
        if not own:
            inner = (self._source(n) for n in self._inside(node))
            return next((source for source in inner if source), None)
        return Source(own[-1][0], int(own[-1][1]), own[-1][2])

    def _inside(self, node: Any) -> Iterator[Any]:
        """The nodes of the graphs that a higher-order operator is given."""
        for given in node.args:
            if isinstance(given, torch.fx.Node) and given.op == "get_attr":
                module = getattr(self.program.graph_module, str(given.target))
                yield from module.graph.nodes if hasattr(module, "graph") else ()

    def _output(self) -> Ref | Output:
        (node,) = (n for n in self.program.graph.nodes if n.op == "output")
        results = iter(node.args[0])
        specs = self.program.graph_signature.output_specs
        leaves = [self._result(next(results)) for spec in specs if spec.kind.name == "USER_OUTPUT"]
        tree = pytree.tree_unflatten(leaves, self.program.call_spec.out_spec)
        output = self._container(tree)
        if output is None:
            raise self._not_tensors(None)
        return output

    def _result(self, node: Any) -> Ref | None:
        if isinstance(node, torch.fx.Node):
            if isinstance(node.meta["val"], torch.Tensor):
                return Ref(self.names[node.name])
            raise self._not_tensors(node.meta["val"])
        if node is None:
            return None
        raise self._not_tensors(node)

    def _not_tensors(self, value: object) -> ModelNewError:
        line = _forward_line(self.ref)
        return ModelNewError(
            f"{self.ref.path}:{line}: forward returns a {type(value).__name__}: return tensors, "
            "or tuples, lists and dicts of them"
        )

    def _container(self, tree: Any) -> Ref | Output | None:
        match tree:
            case Ref() | None:
                return tree
            case list() | tuple() if type(tree) in (list, tuple):
                items = tuple(self._container(item) for item in tree)
                return Output(type(tree).__name__, items)
            case dict() if type(tree) is dict and all(isinstance(key, str) for key in tree):
                return Output("dict", tuple(map(self._container, tree.values())), tuple(tree))
        raise self._not_tensors(tree)


def _has(model: torch.nn.Module, path: str) -> bool:
    value: Any = model
    for part in path.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def _free(name: str, taken: set[str]) -> str:
    """`name` made a Python identifier that is not taken."""
    name = name if name.isidentifier() else f"v_{name}"
    while name in taken or name in ("self", "torch", "nn"):
        name += "_"
    return name


def _at(source: Source | None) -> str:
    return f"{source.file}:{source.line}" if source else "(inside a library module)"


def _forward_line(ref: Reference) -> int:
    code = ref.namespace["Model"].forward.__code__
    return int(code.co_firstlineno)
