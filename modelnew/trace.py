"""Traces a reference to a Graph of ATen calls."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from modelnew.compare import equal, same_calls
from modelnew.ir import Graph, Guard, ModelNewError, Output, Ref
from modelnew.record import Differs, Recorder, free
from modelnew.reference import Reference, attribute_text, user_line
from modelnew.specialize import argument_changes, specialize


@dataclass(frozen=True)
class Leaf:
    """One leaf of forward's arguments: the text that reads it and its value."""

    text: str
    value: Any


def trace(ref: Reference) -> Graph:
    """The reference's graph, with live attributes, pinned sizes and guarded arguments.

    Where train() and eval() differ it is the graph of the mode as built, and holds the other's.
    Raises ModelNewError when forward cannot be traced or returns something else than tensors.
    """
    leaves = input_leaves(ref)
    modes = {path: module.training for path, module in ref.model.named_modules()}

    def as_built(model: torch.nn.Module, given: Sequence[Leaf], base: Graph | None) -> Graph:
        return trace_once(ref, model, given, base)

    def in_other_mode(model: torch.nn.Module, given: Sequence[Leaf], base: Graph | None) -> Graph:
        return trace_once(ref, model.train(not modes[""]), given, base)

    base = as_built(ref.model, leaves, None)
    changes = argument_changes(ref)
    graph = specialize(ref, base, as_built, leaves, changes)
    try:
        other = in_other_mode(ref.model, leaves, None)
        differ = not same_calls(base, other)
        if differ:
            other = specialize(ref, other, in_other_mode, leaves, changes, like=graph)
    finally:
        for path, module in ref.model.named_modules():
            module.training = modes[path]
    if not differ:
        return graph
    frozen = {attribute_text(p): mode for p, mode in modes.items() if mode != modes[""]}
    pins = tuple(Guard(f"{part}.training", str(mode)) for part, mode in frozen.items())
    arguments = dict.fromkeys((*graph.arguments, *other.arguments))
    return replace(
        graph,
        arguments=tuple(arguments),
        pins=graph.pins + pins,
        frozen=tuple(frozen),
        training=modes[""],
        other=replace(other, arguments=(), training=not modes[""]),
    )


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
    seen: set[int] = set()
    for name, value in bound.arguments.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
                leaf = leaf.detach()  # given twice here, it is two tensors at other calls
            seen.add(id(leaf))
            leaves.append(Leaf(name + pytree.keystr(path), leaf))
    return tuple(leaves)


def trace_once(
    ref: Reference, model: torch.nn.Module, leaves: Sequence[Leaf], base: Graph | None = None
) -> Graph:
    """Runs `model` on the leaves' values and records what it calls; the model stays as it was.

    With `base` a trace that makes other calls ends early: ModelNewError.
    """
    state = _State(model)
    try:
        graph = _record(ref, model, leaves, state, base)
        if state.counts():
            again = _record(ref, model, leaves, state, None)
            if not same_calls(graph, again):
                raise ModelNewError(
                    f"{ref.path}:{_forward_line(ref)}: forward changes "
                    f"{', '.join(state.counts())}, and computes something else the next time: "
                    "keep what changes in tensors"
                )
        return graph
    finally:
        state.restore()


def _record(
    ref: Reference,
    model: torch.nn.Module,
    leaves: Sequence[Leaf],
    state: _State,
    base: Graph | None,
) -> Graph:
    tensors = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    taken = {leaf.text for leaf in tensors}
    inputs = []
    for leaf in tensors:
        plain = leaf.text.isidentifier()
        name = leaf.text if plain else free(re.sub(r"\W+", "_", leaf.text), taken)
        taken.add(name)
        inputs.append((name, leaf.text, leaf.value))
    device = f"{tensors[0].text}.device" if tensors else "torch.device('cuda')"
    texts = state.texts()
    recorder = Recorder(str(ref.path), device, inputs, texts, None if base is None else base.nodes)
    forward = type(model).forward
    arguments = _rebuild(ref, leaves)
    with _quiet(), _explained(ref), ref.fake_mode, torch.inference_mode(), torch.enable_grad():
        with recorder:
            result = forward(model, **arguments)
        output = _container(ref, recorder, result)
    if output is None:
        raise _not_tensors(ref, None)
    assigned = tuple((text, Ref(recorder.name_of(t))) for text, t in state.assigned())
    return Graph(
        recorder.tensors,
        recorder.bindings,
        tuple(name for name, _, _ in inputs),
        tuple(recorder.nodes),
        output,
        numbers=recorder.numbers,
        strides={name: value.stride() for name, _, value in inputs if not value.is_contiguous()},
        assigned=assigned,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's own deprecations and logs are not the user's business."""
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _explained(ref: Reference) -> Iterator[None]:
    try:
        yield
    except ModelNewError:
        raise
    except Differs:
        raise ModelNewError("other calls") from None
    except Exception as error:
        raise _not_traceable(error, ref) from error


class _State:
    """What of a model forward can read and change: its tensors and its plain attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        # By module, each dictionary of it with a copy of what it held.
        self.modules = [
            (path, [(held, dict(held)) for held in (vars(m), m._parameters, m._buffers)])
            for path, m in model.named_modules()
        ]

    def texts(self) -> dict[int, str]:
        """The Python text that reads each tensor, by the tensor's id."""
        found: dict[int, str] = {}
        for path, ((_, attributes), (_, parameters), (_, buffers)) in self.modules:
            plain = {k: v for k, v in attributes.items() if not k.startswith("_")}
            for name, value in (*parameters.items(), *buffers.items(), *plain.items()):
                for place, leaf in pytree.tree_flatten_with_path(value)[0]:
                    if isinstance(leaf, torch.Tensor):
                        text = attribute_text(f"{path}.{name}" if path else name)
                        found.setdefault(id(leaf), text + pytree.keystr(place))
        return found

    def _changes(self) -> Iterator[tuple[str, Any, Any]]:
        """(text, old value, new value) of each attribute that is another object now."""
        for path, pairs in self.modules:
            for now, old in pairs:
                for name, value in now.items():
                    if value is not old.get(name):
                        text = attribute_text(f"{path}.{name}" if path else name)
                        yield text, old.get(name), value

    def assigned(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that forward left in attributes."""
        for text, _, value in self._changes():
            if isinstance(value, torch.Tensor):
                yield text, value

    def counts(self) -> list[str]:
        """Attributes that forward gave another value which is no tensor, such as a counter."""
        return [
            text
            for text, old, value in self._changes()
            if not isinstance(value, torch.Tensor) and not equal(old, value)
        ]

    def restore(self) -> None:
        for _, pairs in self.modules:
            for now, old in pairs:
                for name in [name for name in now if name not in old]:
                    del now[name]
                for name in [name for name in old if now.get(name) is not old[name]]:
                    now[name] = old[name]


def _rebuild(ref: Reference, leaves: Sequence[Leaf]) -> dict[str, Any]:
    """Puts leaf values back into the containers that get_inputs() gave."""
    bound = inspect.signature(ref.namespace["Model"].forward).bind(None, *ref.inputs)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    spec = pytree.tree_structure(arguments)
    rebuilt: dict[str, Any] = pytree.tree_unflatten([leaf.value for leaf in leaves], spec)
    return rebuilt


def _not_traceable(error: Exception, ref: Reference) -> ModelNewError:
    where, code = user_line(error, ref.path)
    code = f" `{code}`" if code else ""
    kind = type(error).__name__
    if kind == "DynamicOutputShapeException":
        return ModelNewError(
            f"{where}:{code} gives a tensor whose size is known only when the model runs: keep "
            "the sizes to what the inputs' shapes give, with masks"
        )
    if "DataDependent" in kind or "data-dependent" in str(error):
        return ModelNewError(
            f"{where}:{code} depends on the values of a tensor, so no fixed sequence of kernels "
            "computes it: write it with torch.where or masks"
        )
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return ModelNewError(
        f"{where}:{code} cannot be traced: {kind}: {text.strip()}: "
        "check that forward runs on get_inputs()"
    )


def _container(ref: Reference, recorder: Recorder, value: Any) -> Ref | Output | None:
    def inside(items: Sequence[Any]) -> tuple[Ref | Output | None, ...]:
        return tuple(_container(ref, recorder, item) for item in items)

    match value:
        case torch.Tensor():
            return Ref(recorder.name_of(value))
        case None:
            return None
        case list() | tuple() if type(value) in (list, tuple):
            return Output(type(value).__name__, inside(value))
        case tuple() if type(value).__module__ == "torch.return_types":  # of torch.sort, torch.max
            return Output(f"torch.return_types.{type(value).__name__}", inside(value))
        case dict() if type(value) is dict and all(isinstance(key, str) for key in value):
            return Output("dict", inside(list(value.values())), tuple(value))
    raise _not_tensors(ref, value)


def _not_tensors(ref: Reference, value: object) -> ModelNewError:
    return ModelNewError(
        f"{ref.path}:{_forward_line(ref)}: forward returns a {type(value).__name__}: return "
        "tensors, or tuples, lists and dicts of them"
    )


def _forward_line(ref: Reference) -> int:
    code = ref.namespace["Model"].forward.__code__
    return int(code.co_firstlineno)
