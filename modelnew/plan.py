"""Groups the graph's nodes into regions: Graph -> Plan.

Every pointwise node whose value something else than a pointwise node needs (a library call, the
result, another region) is a root and is written to memory. A region is a set of roots of one
shape together with all that only they need, down to values that are already in memory: reading is
then as little as it can be, and a value that two regions need is computed in both rather than
written and read back, unless it is a root anyway.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelnew import ops
from modelnew.canonical import canonical, with_bias_apart
from modelnew.ir import (
    Access,
    Arg,
    Body,
    Graph,
    Library,
    Live,
    Node,
    Plan,
    Pointwise,
    Ref,
    Step,
    step_reads,
    step_writes,
)
from modelnew.layout import Layouts, choose
from modelnew.statistics import with_statistics_apart

# A kernel's operands travel as kernel parameters, of which every GPU gives at least 4 KB: 8
# dimensions of 8 bytes, a pointer and an element size are 76 bytes an operand.
MAX_OPERANDS = 48


def plan(graph: Graph) -> Plan:
    """The plan of `graph`: its pointwise nodes in regions, every other node a library call.

    The plan of the other mode's graph is beside it; steps that one kernel can do have its name.
    """
    names: dict[Any, str] = {}
    made = _plan(graph)
    made = replace(made, steps=_named(made.steps, names))
    if graph.other is None:
        return made
    other = _plan(graph.other)
    return replace(made, other=replace(other, steps=_named(other.steps, names)))


def _plan(graph: Graph) -> Plan:
    graph = canonical(graph)
    layouts = choose(graph, _reasons(graph))
    graph = with_bias_apart(with_statistics_apart(layouts.graph))
    reasons = _reasons(graph)
    regions = _Grouping(graph, reasons, layouts.formats).regions()
    steps: list[Step] = [_pointwise(graph, region, layouts) for region in regions]
    for node in graph.nodes:
        if (why := reasons[node.result]) is not None:
            steps.append(Library(node, why))
    return Plan(graph, tuple(_ordered(graph, steps)), condition=layouts.condition)


def _reasons(graph: Graph) -> dict[str, str | None]:
    """Why each node is a library call, None for those of kernels."""
    reasons = {node.result: ops.why_not(node, graph) for node in graph.nodes}
    places = _places(graph, reasons)
    for node in graph.nodes:
        if reasons[node.result] is None and any(
            len(places[name]) > 1 for name in ops.operands(node, "channel")
        ):
            reasons[node.result] = "an operand that is read along other dimensions too"
    return reasons


def _places(graph: Graph, reasons: Mapping[str, str | None]) -> dict[str, set[int]]:
    """By tensor, the dimensions that stand behind its own when a kernel reads it."""
    places: dict[str, set[int]] = {}
    for node in graph.nodes:
        if reasons[node.result] is None:
            channel = ops.operands(node, "channel")
            behind = len(graph.tensors[node.result].shape) - 2
            for name in node.reads:
                places.setdefault(name, set()).add(behind if name in channel else 0)
    return places


# --- grouping -------------------------------------------------------------------------------


@dataclass
class _Region:
    """A region in the making: its roots, all its nodes, and what it reads."""

    roots: list[str]
    members: set[str] = field(default_factory=set)
    leaves: list[str] = field(default_factory=list)


class _Grouping:
    """Finds the regions of one graph."""

    def __init__(
        self, graph: Graph, reasons: Mapping[str, str | None], formats: Mapping[str, str]
    ) -> None:
        self.graph = graph
        self.formats = formats
        self.nodes = {name: node for node in graph.nodes for name in node.names}
        self.order = {node.result: index for index, node in enumerate(graph.nodes)}
        self.fusable = {name for name, reason in reasons.items() if reason is None}
        self.results = set(graph.results)
        self.epoch = self._epochs()
        self.users = self._users()
        self.after = _random_order(graph)
        self.roots = {
            node.result
            for node in graph.nodes
            if node.result in self.fusable and self._is_root(node)
        }

    def regions(self) -> list[_Region]:
        self._bound_operands()
        regions: list[_Region] = []
        for root in sorted(self.roots, key=self.order.__getitem__):
            cone = self._cone(root)
            host = next((r for r in reversed(regions) if self._can_join(r, cone, regions)), None)
            if host is None:
                regions.append(cone)
            else:
                self._join(host, cone)
        return regions

    def _epochs(self) -> dict[str, int]:
        """Calls that write to a tensor in place divide the program: nothing moves across one."""
        epoch, epochs = 0, {}
        for node in self.graph.nodes:
            if node.mutates:
                epoch += 1
            epochs[node.result] = epoch
            if node.mutates:
                epoch += 1
        return epochs

    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = {name: [] for name in self.nodes}
        for node in self.graph.nodes:
            for name in dict.fromkeys(node.reads):
                if name in users:
                    users[name].append(node.result)
        return users

    def _is_root(self, node: Node) -> bool:
        if node.result in self.results:
            return True
        return any(
            user not in self.fusable
            or self.epoch[user] != self.epoch[node.result]
            or node.result in ops.operands(self.nodes[user], "channel")
            for user in self.users[node.result]
        )

    def _cone(self, root: str) -> _Region:
        """The root with every pointwise node below it, down to other roots and library values."""
        region = _Region([root])
        stack = [root]
        while stack:
            name = stack.pop()
            if name in region.members:
                continue
            region.members.add(name)
            for read in self.nodes[name].reads:
                if read in self.fusable and read not in self.roots:
                    stack.append(read)
        region.leaves = self._leaves(region)
        return region

    def _leaves(self, region: _Region) -> list[str]:
        """What the region reads, in the order in which its roots come to need it.

        PyTorch gives a result the strides of its first operand that decides them, so the order
        of the operands is part of the meaning.
        """
        leaves: dict[str, None] = {}
        seen: set[str] = set()
        stack = list(reversed(region.roots))
        while stack:
            name = stack.pop()
            if name not in region.members:
                leaves[name] = None
            elif name not in seen:
                seen.add(name)
                stack.extend(reversed(self.nodes[name].reads))
        return list(leaves)

    def _bound_operands(self) -> None:
        """Makes roots of inner values until no cone reads more than a kernel can be given."""
        pending = list(self.roots)
        while pending:
            root = pending.pop()
            cone = self._cone(root)
            if len(cone.leaves) < MAX_OPERANDS:
                continue
            # The largest part that fits, so that few values go through memory.
            sizes = {m: len(self._cone(m).leaves) for m in cone.members if m != root}
            fitting = [m for m in sizes if sizes[m] < MAX_OPERANDS]
            part = max(fitting, key=lambda m: (sizes[m], -self.order[m]))
            self.roots.add(part)
            pending.append(root)

    def _can_join(self, region: _Region, cone: _Region, regions: Sequence[_Region]) -> bool:
        """Whether one kernel can compute both: same space, something in common, no cycle."""
        first, root = region.roots[0], cone.roots[0]
        shapes = [self.graph.tensors[name].shape for name in (first, root)]
        formats = [self.formats.get(name) for name in (first, root)]
        if shapes[0] != shapes[1] or formats[0] != formats[1]:
            return False
        if self.epoch[first] != self.epoch[root]:
            return False
        shared = set(cone.leaves) & (set(region.leaves) | set(region.roots))
        operands = set(region.leaves) | set(cone.leaves) | set(region.roots) | {root}
        if not shared or len(operands) > MAX_OPERANDS:
            return False
        outside = [leaf for leaf in cone.leaves if leaf not in region.roots]
        return not self._reaches(region, outside, regions)

    def _reaches(self, region: _Region, names: Iterable[str], regions: Sequence[_Region]) -> bool:
        """Whether any of `names` needs a root of `region`, directly or through other steps."""
        owner = {root: r for r in regions for root in r.roots}
        stack, seen = list(names), set()
        while stack:
            name = stack.pop()
            if name in seen or name not in self.nodes:
                continue
            seen.add(name)
            if name in region.roots:
                return True
            # A region runs as a whole: a value of it waits for everything the region reads.
            stack.extend(owner[name].leaves if name in owner else self.nodes[name].reads)
            stack.extend(self.after.get(name, ()))
        return False

    def _join(self, region: _Region, cone: _Region) -> None:
        region.roots += cone.roots
        region.members |= cone.members
        region.leaves = self._leaves(region)


# --- steps ----------------------------------------------------------------------------------


def _pointwise(graph: Graph, region: _Region, layouts: Layouts) -> Pointwise:
    statements = tuple(node for node in graph.nodes if node.result in region.members)
    tensors = graph.tensors
    channel = {name for node in statements for name in ops.operands(node, "channel")}
    behind = len(tensors[region.roots[0]].shape) - 2
    reads = tuple(Access(tensors[name], behind if name in channel else 0) for name in region.leaves)
    live = {
        value.text: value
        for node in statements
        for value in ops.used_values(node)
        if isinstance(value, Live)
    }
    body = Body(statements, tuple(region.roots))
    writes = tuple(tensors[root] for root in region.roots)
    layout = layouts.formats.get(region.roots[0], "")
    like = {name for root in region.roots for name in layouts.origins.get(root, ())}
    ordered = tuple(tensors[name] for name in tensors if name in like)
    return Pointwise("", reads, tuple(live.values()), body, writes, layout, ordered)


def _named(steps: Sequence[Step], names: dict[Any, str]) -> tuple[Step, ...]:
    """Names each kernel after its operators, another one of that name with a number.

    `names` has the kernels that exist already, by what a kernel is but for the names in it.
    """
    named: list[Step] = []
    for step in steps:
        if isinstance(step, Pointwise):
            name = _kernel_name(step.body)
            like_it = sum(re.fullmatch(rf"{name}(_\d+)?", known) is not None
                          for known in names.values())  # fmt: skip
            unique = name if like_it == 0 else f"{name}_{like_it + 1}"
            step = replace(step, name=names.setdefault(_signature(step), unique))
        named.append(step)
    return tuple(named)


def _signature(step: Pointwise) -> Any:
    """All of a kernel but the names of its values, the texts of its numbers and its sizes."""
    names = {access.tensor.name: f"read {i}" for i, access in enumerate(step.reads)}
    numbers = {scalar.text: f"number {i}" for i, scalar in enumerate(step.scalars)}

    def plain(value: Arg) -> Any:
        match value:
            case Ref():
                return names[value.name]
            case Live():
                return numbers.get(value.text)
            case tuple():
                return tuple(map(plain, value))
        return (type(value), value)

    statements = []
    for i, node in enumerate(step.body.statements):
        statements.append((node.op, *(plain(argument.value) for argument in node.args)))
        names[node.result] = f"value {i}"
    shape = step.writes[0].shape
    reads = [(a.tensor.dtype, a.behind, a.tensor.shape == shape) for a in step.reads]
    return (
        tuple(reads),
        tuple(statements),
        tuple((names[tensor.name], tensor.dtype) for tensor in step.writes),
        (step.layout, len(shape) if step.layout else 0),
        tuple(names.get(tensor.name, "other") for tensor in step.like),
    )


def _kernel_name(body: Body) -> str:
    packets = [node.packet.removesuffix("_") for node in body.statements]
    if len(packets) > 6:
        packets = [*packets[:2], "to", packets[-1]]
    return "_".join(packets).strip("_")


def _random_order(graph: Graph) -> dict[str, tuple[str, ...]]:
    """For each random call the one before it, which has to stay before it."""
    names = [node.result for node in graph.nodes if node.random]
    return {after: (before,) for before, after in itertools.pairwise(names)}


def _ordered(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """A running order that keeps library calls as the reference has them, each kernel as early
    as its operands allow; what writes in place keeps its place among everything else."""
    order = {node.result: index for index, node in enumerate(graph.nodes)}
    after = _random_order(graph)

    def position(step: Step) -> int:
        match step:
            case Pointwise():
                return max(order[name] for name in step.body.results)
            case Library():
                return order[step.node.result]

    def waits_for(step: Step) -> tuple[str, ...]:
        extra = after.get(step.node.result, ()) if isinstance(step, Library) else ()
        return (*step_reads(step), *extra)

    # Each step waits for the steps that make what it reads; of those that wait for nothing any
    # more, the one that the reference has first runs first.
    steps = sorted(steps, key=position)
    maker = {name: index for index, step in enumerate(steps) for name in step_writes(step)}
    waits = [{maker[name] for name in waits_for(step) if name in maker} for step in steps]
    followers: list[list[int]] = [[] for _ in steps]
    for index, before in enumerate(waits):
        before.discard(index)
        for earlier in before:
            followers[earlier].append(index)
    ready = [index for index, before in enumerate(waits) if not before]
    heapq.heapify(ready)
    ordered: list[Step] = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(steps[index])
        for follower in followers[index]:
            waits[follower].discard(index)
            if not waits[follower]:
                heapq.heappush(ready, follower)
    return ordered
