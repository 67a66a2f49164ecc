"""Records the ATen calls that a forward makes under fake tensors.

Under inference mode no autograd key stands between a call and a dispatch mode, so the mode sees
each operator as it was called, composite ones (`linear`, `dropout`, `batch_norm`) before they are
decomposed, in-place ones as they are. That is the graph that `torch.export` reads, in a tenth of
its time, and without its bans: what forward assigns to its module is seen as an assignment.
"""

from __future__ import annotations

import builtins
import keyword
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from modelnew.compare import equal, same_call
from modelnew.ir import Arg, Argument, Literal, ModelNewError, Node, Ref, Source, Tensor

# Checks that compute nothing.
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")

# A constant of more elements does not belong into a call.
MAX_CONSTANT = 64


# A setting of the machine, not of the model.
CUDNN = Literal("torch.backends.cudnn.enabled")


class Differs(Exception):
    """A call is not the one that was expected."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns calls into Nodes. `texts` gives the Python text of each tensor that forward can read.

    `device` is the text of the device that the model runs on, `file` the reference's path. With
    `expected` the recording ends with Differs at the first call that is another one.
    """

    supports_higher_order_operators = True  # they come to __torch_dispatch__, and are refused

    def __init__(
        self,
        file: str,
        device: str,
        inputs: Sequence[tuple[str, str, torch.Tensor]],
        texts: Mapping[int, str],
        expected: Sequence[Node] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.file, self.device, self.texts, self.expected = file, device, texts, expected
        self.tensors: dict[str, Tensor] = {}
        self.bindings: dict[str, str] = {}
        self.numbers: dict[str, bool | int | float] = {}
        self.nodes: list[Node] = []
        self.names: dict[int, str] = {}
        self.alive: list[Any] = []  # an id is taken anew once its object is gone
        self.taken = {text for _, text, _ in inputs} | {name for name, _, _ in inputs}
        self.count: dict[str, int] = {}
        for name, text, tensor in inputs:
            self._bind(name, text, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise ModelNewError(
                f"{_at(self._source())}: {func} cannot be generated (higher-order operator)"
            )
        result = run_or_shape(func, args, kwargs)
        ignored = func.namespace == "prim" or func._schema.name[6:] in CHECKS
        if not ignored and (func._schema.is_mutable or _holds_tensor(result)):
            self._record(func, args, kwargs, result)
        return result

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that forward can read, by itself or as a result of a call."""
        if id(tensor) not in self.names:
            self._read_from_outside(tensor)
        return self.names[id(tensor)]

    # --- calls ------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if str(func) == "aten.to.dtype_layout":  # x.to(device) comes with the dtype that x has
            own = {"dtype": args[0].dtype, "layout": args[0].layout}
            kwargs = {name: value for name, value in kwargs.items() if own.get(name) != value}
        given: list[Argument] = []
        mutates: list[str] = []
        views: list[str] = []
        for index, spec in enumerate(func._schema.arguments):
            is_given = index < len(args) or spec.name in kwargs
            raw = args[index] if index < len(args) else kwargs.get(spec.name, spec.default_value)
            value = self._arg(raw)
            if spec.name == "cudnn_enabled":
                value = CUDNN
            # `Tensor? weight` of instance_norm may be None, and must be given all the same.
            default = spec.has_default_value() and (not is_given or equal(raw, spec.default_value))
            given.append(Argument(spec.name, value, default, spec.kwarg_only))
            if spec.alias_info is not None and isinstance(value, Ref):
                (mutates if spec.alias_info.is_write else views).append(value.name)
        name = self._fresh(func._schema.name.split("::")[1])
        node = Node(
            str(func),
            name,
            tuple(given),
            self._outputs(name, result),
            tuple(mutates),
            tuple(views),
            _is_random(func, given),
            self._source(),
        )
        self._append(node)
        if isinstance(result, list | tuple):
            self._items(name, result)

    def _append(self, node: Node) -> None:
        if self.expected is not None:
            place = len(self.nodes)
            if place >= len(self.expected) or not same_call(node, self.expected[place]):
                raise Differs
        self.nodes.append(node)

    def _outputs(self, name: str, value: Any) -> tuple[Tensor, ...]:
        if not isinstance(value, torch.Tensor):
            return ()
        tensor = Tensor(name, tuple(int(s) for s in value.shape), str(value.dtype)[6:])
        self.tensors[name] = tensor
        self.names[id(value)] = name
        self.alive.append(value)
        return (tensor,)

    def _items(self, name: str, values: Sequence[Any]) -> None:
        """One getitem a tensor of a result that is a list or a tuple."""
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                item = self._fresh(f"{name}_{index}")
                args = (Argument("self", Ref(name)), Argument("index", index))
                outputs = self._outputs(item, value)
                source = self.nodes[-1].source
                self._append(
                    Node("python.getitem.int", item, args, outputs, views=(name,), source=source)
                )

    def _arg(self, value: Any) -> Arg:
        match value:
            case torch.Tensor():
                return Ref(self.name_of(value))
            case bool() | int() | float() | str() | None:
                return value
            case list() | tuple():
                return tuple(self._arg(item) for item in value)
            case torch.device():
                # Traced on the CPU; at run time the model lives where its inputs are.
                return Literal(self.device if value.type == "cpu" else f"torch.device({value!s})")
            case torch.dtype() | torch.memory_format() | torch.layout() | complex():
                return Literal(str(value))
        raise ModelNewError(f"{_at(self._source())}: an argument of type {type(value).__name__}")

    def _source(self) -> Source | None:
        """The innermost line of the reference's own file that leads here."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                text = linecache.getline(self.file, frame.f_lineno).strip()
                return Source(self.file, frame.f_lineno, text)
            frame = frame.f_back
        return None

    # --- names ------------------------------------------------------------------------------

    def _bind(self, name: str, text: str, tensor: torch.Tensor) -> None:
        self.bindings[name] = text
        self._outputs(name, tensor)
        self.taken.add(name)

    def _read_from_outside(self, tensor: torch.Tensor) -> None:
        """Binds a parameter, a buffer, an attribute or a constant at its first use."""
        text = self.texts.get(id(tensor))
        if text is not None:
            name = free(re.sub(r"\W+", "_", text.removeprefix("self.")).strip("_"), self.taken)
        else:
            name = free("constant", self.taken)
            text = self._constant(name, tensor)
        self._bind(name, text, tensor)

    def _constant(self, name: str, tensor: torch.Tensor) -> str:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            raise ModelNewError(
                f"{_at(self._source())}: forward reads a tensor that is no part of the model: "
                "register it as a buffer in __init__"
            )
        if tensor.numel() > MAX_CONSTANT:
            raise ModelNewError(
                f"{_at(self._source())}: forward makes a constant of {tensor.numel()} elements: "
                "register it as a buffer in __init__"
            )
        with _disable_current_modes():
            values: Any = tensor.tolist()
        if tensor.dim() == 0 and isinstance(values, int | float):
            self.numbers[name] = values
        numbers = re.sub(r"\b(inf|nan)\b", r'float("\1")', str(values))
        return f"torch.tensor({numbers}, dtype={tensor.dtype}, device={self.device})"

    def _fresh(self, packet: str) -> str:
        """The operator's name, with a number from its second use on: relu, relu_1."""
        count = self.count.get(packet, int(packet in dir(builtins) or keyword.iskeyword(packet)))
        name = f"{packet}_{count}" if count else packet
        self.count[packet] = count + 1
        name = free(name, self.taken)
        self.taken.add(name)
        return name


def free(name: str, taken: set[str]) -> str:
    """`name` made a Python identifier that is not taken."""
    name = name if name.isidentifier() else f"v_{name}"
    while name in taken or name in ("self", "torch", "nn"):
        name += "_"
    return name


def _at(source: Source | None) -> str:
    return f"{source.file}:{source.line}" if source else "(inside a library module)"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _is_random(func: Any, args: Sequence[Argument]) -> bool:
    """Whether the call draws from PyTorch's generator."""
    given = {argument.name: argument.value for argument in args}
    if {"dropout", "train"} <= given.keys():  # a recurrent network
        return given["dropout"] != 0.0 and given["train"] is not False
    drops = given.get("dropout_p", 0.0) != 0.0
    return drops or torch.Tag.nondeterministic_seeded in func.tags


# --- shapes of what takes long to run under fake tensors ------------------------------------------


def run_or_shape(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What `func` gives on tensors without data."""
    shape_only = _SHAPES.get(str(func))
    return shape_only(*args, **kwargs) if shape_only else func(*args, **kwargs)


def _recurrent(
    x: torch.Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The results of lstm, gru and rnn; PyTorch's fake one runs every step of the sequence."""
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    out = x.new_empty((*x.shape[:-1], width))
    return (out, *(torch.empty_like(state) for state in states))


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The result of batch_norm, whose fake one takes 27 ms at each new shape."""
    return torch.empty_like(x)


_SHAPES: dict[str, Callable[..., Any]] = {
    "aten.batch_norm.default": _like,
    **{f"aten.{name}.input": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
