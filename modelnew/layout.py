"""Chooses the memory layout that convolutions run in, and where it changes.

cuDNN's float32 kernels are written for channels_last: a convolution over a contiguous tensor is
one transposition in, one kernel, one transposition out. A plan that keeps the tensors between
convolutions in channels_last pays for the transpositions once, at the edges, and where a kernel of
ours writes the value anyway it writes it in the other layout for nothing.

Seen from outside nothing changes: what a model returns has the strides that the reference's has.
All is decided for the sizes of the trace. With others cuDNN may run a contiguous convolution in
float32 that it runs in TF32 in channels_last, so there the layouts stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from modelnew.ir import Arg, Argument, Graph, Literal, Live, Node, Ref, Tensor
from modelnew.names import renamed, with_results
from modelnew.record import CUDNN
from modelnew.sizes import size_text

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"

CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip

# Library calls whose kernels read either layout equally well and give the result in the same.
TRANSPARENT = (
    "max_pool2d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "cat", "dropout",
    "upsample_nearest2d", "upsample_bilinear2d",
)  # fmt: skip

# Reductions that read either layout equally well over all that is behind the channels.
REDUCTIONS = ("sum", "mean")

# Milliseconds a gigabyte on an H200 (cuDNN 9.15, float32), medians over 430 convolutions, those of
# KernelBench and random ones. What channels_last saves, by the bytes of operand and result:
SAVED = 0.5  # kernels of more than one element: 0.37 (5 x 9) to 0.95
SAVED_THIN_TRANSPOSED = 0.7  # fewer than 16 channels on one side
SAVED_DEPTHWISE = 0.85  # 3 x 3 and 5 x 5; others are slower in channels_last (13.2 for 2.3 ms)
# conv_transpose3d of stride 1 runs 3 to 5 times faster with the plan that cuDNN finds by trying
# than with the one it guesses, in either layout (8.9 and 2.2 ms for [8, 48, 64, 64, 64]).
SAVED_BY_TRYING = 4.0
# By the bytes of the operand: batch normalization in training of over 550,000 elements a channel
# (2.21 and 0.86 ms for [64, 64, 254, 254]) and of fewer (0.068 and 0.062 for
# [16, 128, 64, 64]), and softmax over the channels as one over a dense last dimension (2.83 and
# 0.57 ms for [64, 64, 254, 254]).
SAVED_BATCH_NORM, SAVED_SMALL_BATCH_NORM, SAVED_SOFTMAX = 1.2, 0.05, 2.0
# A copy into the other layout by a kernel of ours, by the bytes of the tensor, and what it costs a
# kernel that writes the value anyway.
COPY, COPY_IN_PASSING = 0.57, 0.06
# PyTorch adds the bias of a convolution in a pass of its own; the copy does it in passing.
BIAS_PASS = 0.48
# What a call costs the host. A model of small tensors is bound by that: of MobileNetV1 with ten
# images (1.9 ms, 111 calls) the GPU works half of the time, and in channels_last, where it works a
# third less, all takes longer, as cuDNN's calls do.
LAUNCH_MS = 0.018
# What calls take the GPU, by a byte read or written and at least: 0.98 ms of MobileNetV1 (1.1 by
# these), 1.44 of MobileNetV2 (1.6), 0.53 of ResNet18 (0.45), 7.1 of a ShuffleNet unit (7.1).
TRAFFIC_MS, LEAST_MS = 0.5, 0.004
# What is left of a saving has to be worth a change.
WORTH_MS = 0.002
# In channels_last slower, so that they read a copy: avg_pool2d (1.66 for 0.77 ms), max_pool3d
# (0.23 for 0.15), amin over channels (2.14 for 0.51), logsumexp over channels (3.3 for 1.9),
# group_norm and instance_norm (3.2 for 1.3).

# The variable of forward that says whether the sizes are those of the trace.
AT_TRACED_SIZES = "_traced"

# What a convolution's call reads by itself.
ALLOW_TF32 = Literal("torch.backends.cudnn.allow_tf32")

Formats: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Layouts:
    """A graph with its changes of layout, the layout that kernels write results in, and by result
    the tensors whose layout the reference's result has: contiguous unless one is channels_last.
    `condition` is the Python text of when all that holds, "" for always."""

    graph: Graph
    condition: str = ""
    formats: Formats = field(default_factory=dict)
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def choose(graph: Graph, reasons: Mapping[str, str | None]) -> Layouts:
    """Runs those convolutions in channels_last for which that saves time, by the costs above.

    `reasons` is None for nodes of kernels. A graph for which nothing is saved comes back as it is.
    """
    able = {name: ms for name, ms in _savings(graph).items() if ms > 0.0}
    waits = _waiting(graph)
    if not able or waits < WORTH_MS:
        return Layouts(graph)

    visits = {
        node.result: _visit(graph, node, reasons[node.result] is None) for node in graph.nodes
    }

    def cost(chosen: frozenset[str]) -> float:
        return _Walk(graph, visits, chosen).cost() - sum(able[name] for name in chosen)

    chosen = frozenset(able)
    lowest = cost(chosen)
    for name in able:
        fewer = chosen - {name}
        if (lower := cost(fewer)) <= lowest:
            chosen, lowest = fewer, lower
    if not chosen or lowest >= -WORTH_MS:
        return Layouts(graph)
    return _Walk(graph, visits, chosen).apply()


def _at_traced_sizes(graph: Graph) -> str:
    """The condition that no size but the batch's differs from the traced one, "" where none may."""
    pinned = {guard.text for guard in graph.pins}
    parts = []
    for name in graph.inputs:
        text, shape = graph.bindings[name], graph.tensors[name].shape
        if any(size_text((text, d)) not in pinned for d in range(1, len(shape))):
            parts.append(f"{text}.shape[1:] == {shape[1:]}")
    return " and ".join(parts)


def _waiting(graph: Graph) -> float:
    """Milliseconds that the host would wait for the GPU at the end: no more can be saved there."""
    calls = [node for node in graph.nodes if not node.views]
    moved = sum(graph.tensors[name].bytes for node in calls for name in dict.fromkeys(node.reads))
    moved += sum(made.bytes for node in calls for made in node.outputs)
    device = TRAFFIC_MS * moved / 1e9 + LEAST_MS * len(calls)
    return device - LAUNCH_MS * len(graph.nodes)


# --- what a convolution saves ---------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A convolution's sizes, in the terms that its speed depends on."""

    transposed: bool
    dims: int
    channels: tuple[int, int]
    groups: int
    kernel: tuple[int, ...]
    stride: int
    gigabytes: float

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.channels == (self.groups, self.groups)

    @property
    def wide(self) -> bool:
        """Whether cuDNN runs it in TF32 in both layouts; see _savings."""
        return self.groups == 1 and min(self.channels) >= 16

    @property
    def tries(self) -> bool:
        """Whether the plan that cuDNN guesses is far from its best; see SAVED_BY_TRYING."""
        return self.transposed and self.dims == 3 and self.stride == 1 and self.wide


def convolution(graph: Graph, node: Node) -> Convolution | None:
    """The sizes of a convolution of a batch of images or volumes; None for any other node."""
    if node.packet not in CONVOLUTIONS or len(node.outputs) != 1:
        return None
    x, weight = (graph.tensors[name] for name in node.reads[:2])
    (out,) = node.outputs
    groups, stride = node.value("groups"), node.value("stride")
    dims = len(weight.shape) - 2
    if dims < 2 or len(x.shape) != dims + 2 or not isinstance(groups, int):
        return None
    steps = stride if isinstance(stride, tuple) else (stride,)
    return Convolution(
        "transpose" in node.packet, dims, (x.shape[1], out.shape[1]), groups, weight.shape[2:],
        max(s for s in steps if isinstance(s, int)), (x.bytes + out.bytes) / 1e9,
    )  # fmt: skip


def _savings(graph: Graph) -> dict[str, float]:
    """Milliseconds that channels_last saves each node that can run in it; 0 where it must not.

    With 16 channels and more on both sides cuDNN runs in TF32 in both layouts, as PyTorch lets it
    by default. With fewer it runs some contiguous convolutions in float32, and every one in
    channels_last in TF32 (33 of 430): those stay as they are. So do batch normalizations of what
    no convolution made: in channels_last their sums are ten times less accurate.
    """
    savings: dict[str, float] = {}
    made: set[str] = set()  # by a convolution in TF32, or from what one made
    final = _finally_normalized(graph)
    for node in graph.nodes:
        convolved = any(name in made for name in node.reads)
        if (found := convolution(graph, node)) is not None:
            savings[node.result] = 0.0 if node.result in final else _saving(found)
            convolved |= savings[node.result] > 0.0
        elif _is_choice(graph, node) and (convolved or node.packet != "batch_norm"):
            savings[node.result] = _saving_of_rows(node, graph.tensors[node.reads[0]])
        if convolved:
            made.update(node.names)
    return savings


def _finally_normalized(graph: Graph) -> set[str]:
    """The convolutions behind a normalization over each channel whose result is returned, by itself
    or changed element by element.

    Sums in another order differ by 1e-7 of the whole, a normalization divides by what is left when
    the mean is gone: up to 4e-4 for inputs of 0 to 1, and harnesses compare to 1e-4.
    """
    makers = {node.result: node for node in graph.nodes}
    found = set()
    for name in graph.results:
        node = makers.get(name)
        while node is not None and node.packet not in ("batch_norm", "instance_norm"):
            large = [n for n in dict.fromkeys(node.reads) if has_layout(graph, n)]
            node = makers.get(large[0]) if len(large) == 1 else None
        stack = [] if node is None else [node.result]
        seen: set[str] = set()
        while stack:
            behind = makers.get(stack.pop())
            if behind is not None and behind.result not in seen:
                seen.add(behind.result)
                stack += behind.reads
        found |= {n for n in seen if makers[n].packet in ("conv1d", "conv2d", "conv3d")}
    return found


def _saving_of_rows(node: Node, operand: Tensor) -> float:
    rate = SAVED_SOFTMAX
    if node.packet == "batch_norm":
        a_channel = operand.shape[0] * math.prod(operand.shape[2:])
        rate = SAVED_BATCH_NORM if a_channel > 550_000 else SAVED_SMALL_BATCH_NORM
    return rate * operand.bytes / 1e9


def _saving(c: Convolution) -> float:
    if c.depthwise:
        square = c.kernel in ((3, 3), (5, 5)) and not c.transposed
        return SAVED_DEPTHWISE / c.stride * c.gigabytes if square else 0.0
    if c.groups > 1:
        return 0.0
    if not c.wide:
        # Large transposed ones run in TF32 in both layouts (12 of 12 above 100 MB).
        large = c.transposed and c.gigabytes > 0.1 and c.channels[1] >= 16
        return SAVED_THIN_TRANSPOSED * c.gigabytes if large else 0.0
    if math.prod(c.kernel) == 1:
        return 1e-6  # a product with each element's channels: equally fast in both layouts
    if c.transposed and c.dims == 3 and c.stride > 1 and math.prod(c.kernel) > 100:
        return 0.0  # cuDNN guesses a float32 plan (40 ms for [16, 32, 32, 32, 32]) or not
    return (SAVED_BY_TRYING if c.tries else SAVED) * c.gigabytes


def _is_choice(graph: Graph, node: Node) -> bool:
    """Whether `node` runs in channels_last or not as is chosen, whatever its operand lies in."""
    if not node.reads or not has_layout(graph, node.reads[0]):
        return False
    match node.packet:
        case "batch_norm":
            return node.value("training") is True
        case "softmax":
            return node.value("dim") in (1, 1 - len(graph.tensors[node.reads[0]].shape))
    return node.packet in CONVOLUTIONS


# --- where layouts change -------------------------------------------------------------------


@dataclass(frozen=True)
class _Visit:
    """What a walk has to know of a node: its kind and the operands that have a layout.

    The layout of a result is that of `following`, those operands that are as large as the result.
    """

    name: str
    kind: str  # "kernel", "choice", "transparent", "reduction" or "other"
    operands: tuple[str, ...]
    following: tuple[str, ...]
    small: bool  # one element a channel, which lies alike in both layouts
    biased: bool  # a convolution that adds its bias


def _visit(graph: Graph, node: Node, by_kernel: bool) -> _Visit:
    operands = tuple(name for name in dict.fromkeys(node.reads) if has_layout(graph, name))
    spatial = node.outputs[0].shape[2:] if node.outputs else ()
    following = operands
    kind = "other"
    if by_kernel:
        kind = "kernel"
        following = tuple(n for n in operands if graph.tensors[n].shape[2:] == spatial)
    elif _is_choice(graph, node):
        kind, operands = "choice", operands[:1]
    elif node.packet in TRANSPARENT and (node.packet != "cat" or node.value("dim") == 1):
        kind = "transparent"
    elif node.packet in REDUCTIONS and _over_all_behind(graph, node):
        kind, following = "reduction", ()
    small = node.packet == "adaptive_avg_pool2d" and set(spatial) == {1}
    biased = node.packet in CONVOLUTIONS and node.value("bias") is not None
    return _Visit(node.result, kind, operands, following, small, biased)


def _over_all_behind(graph: Graph, node: Node) -> bool:
    """Whether a reduction runs over all dimensions behind the channels."""
    dims = next((a.value for a in node.args if a.name == "dim"), None)
    rank = len(graph.tensors[node.reads[0]].shape)
    found = {d % rank for d in dims if isinstance(d, int)} if isinstance(dims, tuple) else set()
    return found == set(range(2, rank))


def has_layout(graph: Graph, name: str) -> bool:
    return name in graph.tensors and len(graph.tensors[name].shape) in (4, 5)


class _Walk:
    """One choice of convolutions to run in channels_last, followed through the graph."""

    def __init__(self, graph: Graph, visits: Mapping[str, _Visit], chosen: frozenset[str]) -> None:
        self.graph, self.visits, self.chosen = graph, visits, chosen
        self.condition = _at_traced_sizes(graph)
        self.last: set[str] = set()  # what lies in channels_last by nature
        self.wanted: dict[str, set[str]] = {}
        for visit in visits.values():
            self._follow(visit)
        for name in graph.results:
            if has_layout(graph, name):
                self._want((name,), CONTIGUOUS)

    def cost(self) -> float:
        """Milliseconds that the changes of layout cost."""
        return sum(self._cost_of_change(name) for name in self.wanted)

    def _follow(self, visit: _Visit) -> None:
        last = [name in self.last for name in visit.following]
        match visit.kind:
            case "kernel":
                given = any(last)
            case "choice":
                given = visit.name in self.chosen
                self._want(visit.operands, CHANNELS_LAST if given else CONTIGUOUS)
            case "transparent":
                given = bool(last) and all(last)
                self._want(visit.operands, CHANNELS_LAST if given else CONTIGUOUS)
            case "reduction":
                given = False
            case _:
                given = False
                self._want(visit.operands, CONTIGUOUS)
        if given and not visit.small:
            self.last.add(visit.name)

    def _want(self, names: Sequence[str], layout: str) -> None:
        for name in names:
            self.wanted.setdefault(name, set()).add(layout)

    def _natural(self, name: str) -> str:
        return CHANNELS_LAST if name in self.last else CONTIGUOUS

    # --- what a change costs ----------------------------------------------------------------

    def _written(self, name: str) -> str | None:
        """The layout that a kernel is told to write `name` in, where it is not its natural one."""
        wanted, visit = self.wanted[name], self.visits.get(name)
        by_kernel = visit is not None and visit.kind == "kernel"
        if not by_kernel or len(wanted) != 1 or self._natural(name) in wanted:
            return None
        return next(iter(wanted))

    def _cost_of_change(self, name: str) -> float:
        if self.wanted[name] == {self._natural(name)}:
            return 0.0
        gigabytes = self.graph.tensors[name].bytes / 1e9
        if self._written(name) is not None:
            return COPY_IN_PASSING * gigabytes
        visit = self.visits.get(name)
        biased = visit is not None and visit.biased and self.wanted[name] == {CONTIGUOUS}
        return (COPY - (BIAS_PASS if biased else 0.0)) * gigabytes + LAUNCH_MS

    # --- the graph --------------------------------------------------------------------------

    def apply(self) -> Layouts:
        """The graph with the copies that are left, and the layouts that kernels write."""
        formats = {name: f for name in self.wanted if (f := self._written(name)) is not None}
        copies = {
            (name, layout): f"{name}_{layout}"
            for name, wanted in self.wanted.items()
            for layout in wanted
            if layout != formats.get(name, self._natural(name))
        }
        tensors = dict(self.graph.tensors)
        made: dict[str, list[Node]] = {}
        for (name, layout), new in copies.items():
            tensors[new] = replace(tensors[name], name=new)
            formats[new] = layout
            op = f"modelnew.as_{layout}.default"
            copy = Node(op, new, (Argument("x", Ref(name)),), (tensors[new],))
            made.setdefault(name, []).append(copy)
        nodes = [copy for name in self.graph.bindings for copy in made.get(name, [])]
        for node in self.graph.nodes:
            rewritten = self._rewritten(node, self.visits[node.result], copies)
            if node.packet == "softmax" and node.result in self.chosen:
                parts = _over_the_last(rewritten, tensors)
            else:
                parts = (rewritten,)
            nodes += [*parts, *made.get(node.result, [])]
        graph = replace(self.graph, nodes=tuple(nodes), tensors=tensors)
        back = {name: new for (name, layout), new in copies.items() if layout == CONTIGUOUS}
        origins = self._origins()
        known = {**origins, **{new: origins.get(name, ()) for name, new in back.items()}}
        own = {name: known.get(name, ()) for name, f in formats.items() if f == CONTIGUOUS}
        return Layouts(with_results(graph, back), self.condition, formats, own)

    def _rewritten(self, node: Node, visit: _Visit, copies: Mapping[tuple[str, str], str]) -> Node:
        """`node` reading the copies that are in the layout it needs."""
        if visit.kind == "kernel":
            return node
        last = {"choice": visit.name in self.chosen, "transparent": visit.name in self.last}
        layout = CHANNELS_LAST if last.get(visit.kind, False) else CONTIGUOUS
        names = {name: copies.get((name, layout), name) for name in visit.operands}
        found = convolution(self.graph, node)
        node = renamed(node, names)
        if found is not None and found.tries and node.result in self.chosen:
            return _trying(node, found, Live(AT_TRACED_SIZES, True) if self.condition else True)
        return node

    def _origins(self) -> dict[str, tuple[str, ...]]:
        """By value, what makes the reference's channels_last when it is: inputs and weights."""
        found: dict[str, tuple[str, ...]] = {
            name: (name,) for name in self.graph.bindings if has_layout(self.graph, name)
        }
        for node in self.graph.nodes:
            visit = self.visits[node.result]
            if node.packet == "softmax":
                continue  # its result is contiguous, whatever its operand is
            if visit.kind in ("kernel", "choice", "transparent"):
                weight = node.reads[1:2] if node.packet in CONVOLUTIONS else ()
                names = (*visit.following, *weight)
                inherited = (origin for name in names for origin in found.get(name, ()))
                found[node.result] = tuple(dict.fromkeys(inherited))
        return found


def _over_the_last(node: Node, tensors: dict[str, Tensor]) -> tuple[Node, ...]:
    """softmax over the channels as one over the last dimension of a view, where they are dense."""
    (made,) = node.outputs
    dense = (made.shape[0], *made.shape[2:], made.shape[1])
    moved, result = f"{node.result}_operand", f"{node.result}_moved"
    for name in (moved, result):
        tensors[name] = replace(made, name=name, shape=dense)
    names = {node.reads[0]: moved}
    over_last = tuple(
        replace(a, value=-1) if a.name == "dim" else a for a in renamed(node, names).args
    )
    return (
        _moved_dim(node.reads[0], 1, -1, tensors[moved], node),
        replace(node, result=result, args=over_last, outputs=(tensors[result],)),
        _moved_dim(result, -1, 1, made, node),
    )


def _moved_dim(name: str, source: int, destination: int, made: Tensor, node: Node) -> Node:
    args = (
        Argument("self", Ref(name)),
        Argument("source", source),
        Argument("destination", destination),
    )
    return Node("aten.movedim.int", made.name, args, (made,), views=(name,), source=node.source)


def _trying(node: Node, c: Convolution, when: Arg) -> Node:
    """The convolution with cuDNN's plan found by trying, which it keeps for the sizes, `when` true.

    `deterministic` makes results repeat, and gives the plan a place of its own in PyTorch's table,
    so that a plan chosen elsewhere for these sizes stays as it is, and this one too.
    """
    given = {argument.name: argument.value for argument in node.args}
    values: dict[str, Arg] = {
        "input": given["input"], "weight": given["weight"], "bias": given["bias"],
        "stride": given["stride"], "padding": given["padding"], "dilation": given["dilation"],
        "transposed": c.transposed, "output_padding": given.get("output_padding", (0,) * c.dims),
        "groups": given["groups"], "benchmark": when, "deterministic": when,
        "cudnn_enabled": CUDNN, "allow_tf32": ALLOW_TF32,
    }  # fmt: skip
    args = tuple(Argument(name, value) for name, value in values.items())
    return replace(node, op="aten._convolution.default", args=args)
