"""The data that the stages hand to each other: frozen dataclasses, no torch import.

A Graph is what `trace` read from the reference: ATen calls in program order. A Plan is what `plan`
made of it: steps in an order that can run, each a region with its own kernel or a library call.
The maths of a region is a Body, straight-line scalar code in SSA form; every kind of region
carries its maths this way, so an operator that is added once works in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Source:
    """Where in the reference a node comes from."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Tensor:
    """A tensor value. `dtype` is PyTorch's name without the prefix: "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPE_BYTES[self.dtype]


DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1, "uint8": 1, "int8": 1,
    "int16": 2, "int32": 4, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """An argument that is a tensor value, by name."""

    name: str


@dataclass(frozen=True)
class Live:
    """A number read at every call, as the Python text that reads it: `self.act.negative_slope`."""

    text: str
    value: float


@dataclass(frozen=True)
class Literal:
    """An argument that is neither tensor nor number, as Python text: `torch.float32`."""

    text: str


Arg: TypeAlias = "Ref | Live | Literal | bool | int | float | str | tuple[Arg, ...] | None"


@dataclass(frozen=True)
class Argument:
    """One schema argument of a call; `default` when its value is the schema's own default."""

    name: str
    value: Arg
    default: bool = False
    keyword: bool = False


@dataclass(frozen=True)
class Node:
    """One ATen call, every schema argument filled in.

    `op` is "aten.leaky_relu.default". `mutates` names the tensors that the call writes to,
    `views` those that an output is a view of, `random` says that it draws from PyTorch's
    generator. `result` is the name of the whole result, which differs from its only output where
    the call returns a list or a tuple.
    """

    op: str
    result: str
    args: tuple[Argument, ...]
    outputs: tuple[Tensor, ...]
    mutates: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    random: bool = False
    source: Source | None = None

    @property
    def packet(self) -> str:
        """The operator without its overload: "leaky_relu" of "aten.leaky_relu.default"."""
        return self.op.split(".")[1]

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(refs_in(self.values))

    @property
    def names(self) -> tuple[str, ...]:
        """The whole result and its tensors, each once."""
        return tuple(dict.fromkeys([self.result, *(tensor.name for tensor in self.outputs)]))

    @property
    def own(self) -> bool:
        """Whether ATen lacks the operator: a row of ours, or a helper in the file."""
        return self.op.startswith("modelnew.")

    @property
    def binds(self) -> bool:
        """Whether its line in forward binds `result`; what is written in place has a name."""
        return bool(self.outputs) or not self.mutates

    @property
    def values(self) -> tuple[Arg, ...]:
        return tuple(argument.value for argument in self.args)

    def with_values(self, values: Iterable[Arg]) -> Node:
        """The same call with other values of its arguments, in their order."""
        pairs = zip(self.args, values, strict=True)
        return replace(self, args=tuple(replace(a, value=value) for a, value in pairs))

    def value(self, name: str) -> Arg:
        return next(argument.value for argument in self.args if argument.name == name)


def refs_in(arg: object) -> Iterator[str]:
    """Yields the tensor names in an argument, in order, nested containers included."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs_in(item)
    elif isinstance(arg, Output):
        for item in arg.items:
            yield from refs_in(item)


@dataclass(frozen=True)
class Output:
    """A container in the reference's return value: kind is "tuple", "list", "dict" or the text of a
    named one of PyTorch's, "torch.return_types.sort"."""

    kind: str
    items: tuple[Ref | Output | None, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guard:
    """A value for which the file was generated and that it checks: `text` reads it at run time."""

    text: str
    value: str

    @property
    def label(self) -> str:
        """The text for a reader: one size of a shape is read as a slice, which any rank has."""
        return re.sub(r"\.shape\[(\d+):\d+\]$", r".shape[\1]", self.text)


@dataclass(frozen=True)
class Graph:
    """The traced reference.

    `bindings` gives, for every input, parameter, buffer and constant, the Python text that reads
    it, `numbers` the values of constants without dimensions. `assigned` are the tensors that
    forward leaves in attributes, by the text of the attribute. `pins` are the sizes that the graph
    depends on, `arguments` the constructor arguments. `training` is the mode it was traced in where
    the other mode has another graph, which is `other` then. `algebra` says what was rewritten,
    `strides` how those inputs lie that are not contiguous.
    """

    tensors: Mapping[str, Tensor]
    bindings: Mapping[str, str]
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    output: Ref | Output
    pins: tuple[Guard, ...] = ()
    arguments: tuple[Guard, ...] = ()
    training: bool | None = None
    other: Graph | None = None
    frozen: tuple[str, ...] = ()
    numbers: Mapping[str, Arg] = field(default_factory=dict)
    assigned: tuple[tuple[str, Ref], ...] = ()
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    algebra: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all that a call returns or leaves behind."""
        left = (ref for _, ref in self.assigned)
        return tuple(dict.fromkeys([*refs_in(self.output), *(ref.name for ref in left)]))


@dataclass(frozen=True)
class Access:
    """A read of a tensor by a region, in the region's iteration space (broadcast by shape).

    `behind` dimensions of size 1 follow the tensor's own: two for one value a channel of an image.
    Where there is a `node`, which only moves elements, the tensor is its result and is read from
    its operand.
    """

    tensor: Tensor
    behind: int = 0
    node: Node | None = None

    @property
    def base(self) -> str:
        """The name of what is read in memory."""
        return self.node.reads[0] if self.node else self.tensor.name


@dataclass(frozen=True)
class Body:
    """Scalar maths in SSA form: each statement is a pointwise Node over names of this Body."""

    statements: tuple[Node, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Pointwise:
    """One kernel: every result element is the Body over the elements at the same index.

    Results are laid out as the reference's own operators would, from the operands' strides, unless
    `layout` names one: "channels_last", or "contiguous", which is channels_last all the same where
    one of the tensors `like` is. `across` names the reads that are dense along another dimension
    than the results.
    """

    name: str
    reads: tuple[Access, ...]
    scalars: tuple[Live, ...]
    body: Body
    writes: tuple[Tensor, ...]
    layout: str = ""
    like: tuple[Tensor, ...] = ()
    across: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Traffic when each operand is read and each result written once, in bytes."""
        return sum(a.tensor.bytes for a in self.reads) + sum(t.bytes for t in self.writes)


@dataclass(frozen=True)
class Joined:
    """Kernels that write next to each other into one tensor: the result of `node`, a concatenation
    of what they make."""

    name: str
    node: Node
    parts: tuple[Pointwise, ...]

    @property
    def reads(self) -> tuple[Access, ...]:
        """What the parts read, each once."""
        return tuple({a.tensor.name: a for part in self.parts for a in part.reads}.values())

    @property
    def scalars(self) -> tuple[Live, ...]:
        return tuple({s.text: s for part in self.parts for s in part.scalars}.values())

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Contraction:
    """A matrix product with what follows it in one kernel: `epilogue` reads the result of `node`
    where it is made, so that it is never in memory unless the epilogue writes it too.

    `operands` are the two tensors that `node` multiplies, in its order; `kind` names the way in
    which kernels do, see products.
    """

    name: str
    kind: str
    node: Node
    operands: tuple[Tensor, Tensor]
    epilogue: Pointwise

    @property
    def reads(self) -> tuple[Access, ...]:
        """The operands, then what the epilogue reads but the product, each once."""
        product = self.node.result
        given = (*map(Access, self.operands), *self.epilogue.reads)
        return tuple({a.tensor.name: a for a in given if a.tensor.name != product}.values())

    @property
    def scalars(self) -> tuple[Live, ...]:
        return self.epilogue.scalars

    @property
    def bytes(self) -> int:
        """Traffic when each operand is read and each result written once, in bytes."""
        return sum(a.tensor.bytes for a in self.reads) + sum(t.bytes for t in self.epilogue.writes)


@dataclass(frozen=True)
class Library:
    """A call of PyTorch's own operator; `why` says what kept it from being a kernel here."""

    node: Node
    why: str


Step: TypeAlias = Pointwise | Joined | Contraction | Library


@dataclass(frozen=True)
class Plan:
    """Steps in running order; `other` is the plan of the other mode where that differs.

    `condition` is the Python text of when results lie in channels_last that are told to, "" for
    always.
    """

    graph: Graph
    steps: tuple[Step, ...]
    other: Plan | None = None
    condition: str = ""

    @property
    def modes(self) -> tuple[Plan, ...]:
        return (self,) if self.other is None else (self, self.other)

    @property
    def kernels(self) -> tuple[Pointwise, ...]:
        """The kernels of both modes, one that both have once."""
        steps = (
            kernel for plan in self.modes for step in plan.steps for kernel in kernels_of(step)
        )
        return tuple({step.name: step for step in steps}.values())

    @property
    def bytes(self) -> int:
        """Bytes that no implementation can do without: inputs and state read, results written."""
        names = {*self.graph.bindings, *refs_in(self.graph.output)}
        return sum(self.graph.tensors[name].bytes for name in names)


def kernels_of(step: Step) -> tuple[Pointwise, ...]:
    match step:
        case Pointwise():
            return (step,)
        case Joined():
            return step.parts
        case Contraction():
            return (step.epilogue,)
        case Library():
            return ()


def users_of(graph: Graph) -> dict[str, list[Node]]:
    """By value, the nodes that read it, each once, in program order."""
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.reads):
            users.setdefault(name, []).append(node)
    return users


def step_reads(step: Step) -> tuple[str, ...]:
    match step:
        case Pointwise() | Joined() | Contraction():
            return tuple(dict.fromkeys(access.base for access in step.reads))
        case Library():
            return step.node.reads


def step_writes(step: Step) -> tuple[str, ...]:
    match step:
        case Pointwise() | Contraction():
            return tuple(tensor.name for tensor in step_made(step))
        case Joined() | Library():
            return step.node.names


def step_made(step: Step) -> tuple[Tensor, ...]:
    """The tensors that a step makes; what a list has in it where a call gives one."""
    match step:
        case Pointwise():
            return step.writes
        case Contraction():
            return step.epilogue.writes
        case Joined() | Library():
            return step.node.outputs


class ModelNewError(Exception):
    """A reference that cannot be generated: the message names file, line and what to do."""
