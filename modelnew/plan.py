"""Groups the graph's nodes into regions: Graph -> Plan.

Every pointwise node whose value something else than a pointwise node needs (a library call, the
result, another region) is a root and is written to memory. A region is a set of roots of one
shape together with all that only they need, down to values that are already in memory: reading is
then as little as it can be, and a value that two regions need is computed in both rather than
written and read back, unless it is a root anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelnew import ops
from modelnew.canonical import canonical, with_bias_apart
from modelnew.contractions import with_contractions, with_products_apart
from modelnew.ir import (
    Access,
    Body,
    Contraction,
    Graph,
    Joined,
    Library,
    Live,
    Node,
    Plan,
    Pointwise,
    Step,
    step_reads,
    step_writes,
    users_of,
)
from modelnew.joins import parts_of
from modelnew.layout import Layouts, choose
from modelnew.moves import COPIES, moves
from modelnew.names import renamed
from modelnew.naming import named
from modelnew.products import SPLIT
from modelnew.statistics import with_statistics_apart
from modelnew.steps import copy, map_operands, random_order, waits_for
from modelnew.strides import Strides
from modelnew.views import ITEM, RESHAPING, is_view

# A kernel's operands travel as kernel parameters, of which every GPU gives at least 4 KB: 8
# dimensions of 8 bytes, a pointer and an element size are 76 bytes an operand.
MAX_OPERANDS = 48


def plan(graph: Graph, matmul: str = SPLIT) -> Plan:
    """The plan of `graph`: its pointwise nodes in regions, every other node a library call.

    Large products have kernels of ours too, or are PyTorch's with LIBRARY for `matmul`. The plan of
    the other mode's graph is beside it; steps that one kernel can do have its name.
    """
    names: dict[Any, str] = {}
    made = _plan(graph, matmul == SPLIT)
    made = replace(made, steps=named(made.steps, names))
    if graph.other is None:
        return made
    other = _plan(graph.other, matmul == SPLIT)
    return replace(made, other=replace(other, steps=named(other.steps, names)))


def _plan(graph: Graph, split: bool) -> Plan:
    traced, graph = graph, canonical(graph, split)
    layouts = choose(graph, _reasons(graph))
    if layouts.formats and any(map(_is_placed, graph.nodes)):
        graph = canonical(traced, split, by_place=False)  # tiles do not know where an element is
        layouts = choose(graph, _reasons(graph))
    graph = with_bias_apart(with_statistics_apart(layouts.graph))
    graph = with_products_apart(graph) if split else graph
    reasons = _reasons(graph)
    grouping = _Grouping(graph, reasons, layouts.formats)
    kernels = [_pointwise(graph, region, layouts) for region in grouping.regions()]
    kernels = list(map(grouping.placed, kernels))
    joins, joined = _joins(graph, kernels, grouping)
    steps: list[Step] = [*joins.values(), *(k for k in kernels if k not in joined)]
    for node in graph.nodes:
        if (why := reasons[node.result]) is not None and node.result not in joins:
            steps.append(Library(node, _why_library(node, why)))
    steps = _without_moves(graph, steps)
    if split:
        graph, steps = with_contractions(graph, steps, grouping.epoch, MAX_OPERANDS)
    return Plan(graph, tuple(_ordered(graph, steps)), condition=layouts.condition)


def _is_placed(node: Node) -> bool:
    return bool(ops.placed(node))


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


def _why_library(node: Node, why: str) -> str:
    """Why a call is one, of those that compute nothing what they cost."""
    if node.op == ITEM or (is_view(node) and node.views):
        copies = node.packet in RESHAPING
        return "a view" + (", or a copy where memory is not laid out for one" if copies else "")
    return "a copy: it only moves elements" if node.packet in COPIES or moves(node) else why


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
        self.strides = Strides(graph)
        self.destinations = {
            name: join
            for name, join in parts_of(graph).items()
            if name in self.fusable and self.epoch[name] == self.epoch[join]
        }
        self.users = self._users()
        self.after = random_order(graph)
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

    def placed(self, kernel: Pointwise) -> Pointwise:
        """The kernel with what is said of how it reads: moved elements from where they were, and
        what lies across by tiles. Those of a concatenation read what has been moved."""
        first = kernel.body.results[0]
        if first not in self.destinations and not kernel.layout:
            reads = tuple(
                access if access.behind
                else replace(access, node=self._move(access.tensor.name, first))
                for access in kernel.reads
            )  # fmt: skip
            placed = any(map(_is_placed, kernel.body.statements))
            if placed or any(access.node for access in reads):
                return replace(kernel, reads=reads)
        return replace(kernel, across=self.strides.across(kernel, self.destinations.get(first)))

    def _move(self, name: str, root: str) -> Node | None:
        """The operator that moves the elements of what a kernel reads, if it does nothing else."""
        node = self.nodes.get(name)
        alike = node is not None and self.epoch[node.result] == self.epoch[root]
        return node if node and alike and moves(node) else None

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
        users = users_of(self.graph)
        return {name: [user.result for user in users.get(name, ())] for name in self.nodes}

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
            if self._reading(cone) < MAX_OPERANDS:
                continue
            # The largest part that fits, so that few values go through memory.
            sizes = {m: self._reading(self._cone(m)) for m in cone.members if m != root}
            fitting = [m for m in sizes if sizes[m] < MAX_OPERANDS]
            part = max(fitting, key=lambda m: (sizes[m], -self.order[m]))
            self.roots.add(part)
            pending.append(root)

    def _reading(self, *cones: _Region) -> int:
        """How many operands a kernel for all of these reads."""
        leaves = {name for cone in cones for name in cone.leaves}
        members = {name for cone in cones for name in cone.members}
        moved = [self.nodes[name] for name in leaves if name in self.nodes]
        return len(leaves) + map_operands(moved, [self.nodes[name] for name in members])

    def _can_join(self, region: _Region, cone: _Region, regions: Sequence[_Region]) -> bool:
        """Whether one kernel can compute both: same space, something in common, no cycle."""
        first, root = region.roots[0], cone.roots[0]
        shapes = [self.graph.tensors[name].shape for name in (first, root)]
        formats = [self.formats.get(name) for name in (first, root)]
        if shapes[0] != shapes[1] or formats[0] != formats[1]:
            return False
        if self.epoch[first] != self.epoch[root]:
            return False
        if self.destinations.get(first) != self.destinations.get(root):
            return False
        if self.strides.inner(first) != self.strides.inner(root):
            return False
        shared = set(cone.leaves) & (set(region.leaves) | set(region.roots))
        written = {*region.roots, root} - {*region.leaves, *cone.leaves}
        if not shared or self._reading(region, cone) + len(written) > MAX_OPERANDS:
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


def _without_moves(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """The steps but for calls that move elements to where no step reads them."""
    read = {name for step in steps for name in step_reads(step)} | set(graph.results)
    return [
        step
        for step in steps
        if not (isinstance(step, Library) and moves(step.node) and step.node.result not in read)
    ]


def _joins(
    graph: Graph, kernels: Sequence[Pointwise], grouping: _Grouping
) -> tuple[dict[str, Joined], list[Pointwise]]:
    """The concatenations that kernels write, by result, and those kernels."""
    makers: dict[str, list[Pointwise]] = {}
    for kernel in kernels:
        if (join := grouping.destinations.get(kernel.body.results[0])) is not None:
            makers.setdefault(join, []).append(kernel)
    # A layout that kernels are told is that of a whole tensor, not of its parts, and so is a place.
    makers = {
        join: parts
        for join, parts in makers.items()
        if not any(p.layout or any(map(_is_placed, p.body.statements)) for p in parts)
    }
    joins = {}
    for node in graph.nodes:
        if parts := makers.get(node.result):
            made = {name for part in parts for name in part.body.results}
            others = [graph.tensors[name] for name in node.reads if name not in made]
            copies = [copy(t, replace(t, name=f"{t.name}_copy")) for t in others]
            copies = [replace(c, across=grouping.strides.across(c, node.result)) for c in copies]
            names = {c.reads[0].tensor.name: c.writes[0].name for c in copies}
            joins[node.result] = Joined("", renamed(node, names), (*parts, *copies))
    return joins, [part for parts in makers.values() for part in parts]


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


def _ordered(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """A running order that keeps library calls as the reference has them, each kernel as early
    as its operands allow; what writes in place keeps its place among everything else."""
    order = {node.result: index for index, node in enumerate(graph.nodes)}
    after = random_order(graph)

    def position(step: Step) -> int:
        match step:
            case Pointwise():
                return max(order[name] for name in step.body.results)
            case Contraction():
                return max(order[name] for name in step.epilogue.body.results)
            case Joined() | Library():
                return order[step.node.result]

    # Each step waits for the steps that make what it reads; of those that wait for nothing any
    # more, the one that the reference has first runs first.
    steps = sorted(steps, key=position)
    maker = {name: index for index, step in enumerate(steps) for name in step_writes(step)}
    waits = [{maker[name] for name in waits_for(step, after) if name in maker} for step in steps]
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
