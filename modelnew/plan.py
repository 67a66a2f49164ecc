"""Groups the graph's nodes into regions: Graph -> Plan.

Every pointwise node whose value something else than a pointwise node needs (a library call, the
result, another region) is a root and is written to memory. A region is a set of roots of one
shape together with all that only they need, down to values that are already in memory: reading is
then as little as it can be, and a value that two regions need is computed in both rather than
written and read back, unless it is a root anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from modelnew import ops
from modelnew.ir import (
    Access,
    Arg,
    Body,
    Graph,
    Library,
    Live,
    Node,
    Output,
    Plan,
    Pointwise,
    Ref,
    Step,
    refs_in,
    step_reads,
    step_writes,
)

# A kernel's operands travel as kernel parameters, of which every GPU gives at least 4 KB: 8
# dimensions of 8 bytes, a pointer and an element size are 76 bytes an operand.
MAX_OPERANDS = 48

# Calls that return their operand, or a copy nobody can tell from it unless one is written to.
ALIASES = ("detach", "detach_", "alias", "lift_fresh_copy")

# Library calls whose result is memory of its own, whatever the arguments: no schema says so of
# a composite operator, and einsum, dropout or type_as may well return their operand.
FRESH = (
    "linear", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "batch_norm", "layer_norm",
    "group_norm", "instance_norm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "sum", "mean", "amax", "amin", "softmax",
    "log_softmax", "cumsum", "cumprod", "embedding",
)  # fmt: skip

# Library calls that also write to buffers, in training, which their schema does not say.
STATEFUL = ("batch_norm", "instance_norm")


def plan(graph: Graph) -> Plan:
    """The plan of `graph`: its pointwise nodes in regions, every other node a library call."""
    graph = _without_dead(_functional(_without_aliases(graph)))
    reasons = {node.result: ops.why_not(node, graph) for node in graph.nodes}
    regions = _Grouping(graph, reasons).regions()
    steps: list[Step] = [_pointwise(graph, region) for region in regions]
    for node in graph.nodes:
        if (why := reasons[node.result]) is not None:
            steps.append(Library(node, why))
    return Plan(graph, _named(_ordered(graph, steps)))


# --- names ----------------------------------------------------------------------------------


def _renamed(arg: Arg, names: dict[str, str]) -> Arg:
    match arg:
        case Ref():
            return Ref(names.get(arg.name, arg.name))
        case tuple():
            return tuple(_renamed(item, names) for item in arg)
    return arg


def _rename_node(node: Node, names: dict[str, str]) -> Node:
    args = tuple(replace(a, value=_renamed(a.value, names)) for a in node.args)
    mutates = tuple(names.get(name, name) for name in node.mutates)
    views = tuple(names.get(name, name) for name in node.views)
    return replace(node, args=args, mutates=mutates, views=views)


def _rename_output(output: Ref | Output, names: dict[str, str]) -> Ref | Output:
    if isinstance(output, Ref):
        return Ref(names.get(output.name, output.name))
    items = tuple(None if i is None else _rename_output(i, names) for i in output.items)
    return replace(output, items=items)


def _without_aliases(graph: Graph) -> Graph:
    written = {name for node in graph.nodes for name in node.mutates}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = _rename_node(node, names)
        copies = node.packet == "lift_fresh_copy" and node.result in written
        if node.packet in ALIASES and not copies:
            names[node.result] = next(iter(node.reads))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), output=_rename_output(graph.output, names))


def _functional(graph: Graph) -> Graph:
    """In-place calls on a value that nothing else can see, as calls that make a new value.

    That is the result of a call known to return memory of its own, used by such calls alone. Any
    other in-place call stays as it is, and nothing is moved across it.
    """
    owned = {node.result for node in graph.nodes if _keeps_apart(node) and not node.mutates}
    shared = {name for node in graph.nodes if not _keeps_apart(node) for name in node.reads}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        written = node.mutates
        node = _rename_node(node, names)
        if len(written) == 1 and node.packet.endswith("_"):
            root = written[0]
            private = root in owned and root not in shared and node.result not in shared
            if private and _keeps_type(graph, root, node):
                target = names.get(root, root)
                names = {old: node.result if new == target else new for old, new in names.items()}
                names[root] = node.result
                owned.add(node.result)
                op = node.op.replace(f".{node.packet}.", f".{node.packet[:-1]}.")
                node = replace(node, op=op, mutates=())
            else:
                names[node.result] = node.mutates[0]
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), output=_rename_output(graph.output, names))


def _keeps_apart(node: Node) -> bool:
    """Whether the result cannot share memory with an operand, but for one written in place."""
    return not node.views and (ops.find(node) is not None or node.packet in FRESH)


def _keeps_type(graph: Graph, target: str, node: Node) -> bool:
    """Whether the functional call gives the target's own type: in-place never promotes."""
    op, dtype = ops.find(node), graph.tensors[target].dtype
    operands = [graph.tensors[name] for name in node.reads if name in graph.tensors]
    if op is None or (op.result == "bool") != (dtype == "bool"):
        return False
    return all(tensor.dtype in (dtype, "bool") for tensor in operands)


def _without_dead(graph: Graph) -> Graph:
    """Drops the calls whose value nothing needs and that have no effect."""
    needed = set(refs_in(graph.output))
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        made = {node.result, *(tensor.name for tensor in node.outputs)}
        effect = node.mutates or node.random or node.packet in STATEFUL
        if effect or made & needed:
            kept.append(node)
            needed.update(node.reads)
    return replace(graph, nodes=tuple(reversed(kept)))


# --- grouping -------------------------------------------------------------------------------


@dataclass
class _Region:
    """A region in the making: its roots, all its nodes, and what it reads."""

    roots: list[str]
    members: set[str] = field(default_factory=set)
    leaves: list[str] = field(default_factory=list)


class _Grouping:
    """Finds the regions of one graph."""

    def __init__(self, graph: Graph, reasons: dict[str, str | None]) -> None:
        self.graph = graph
        self.nodes = {node.result: node for node in graph.nodes}
        self.order = {node.result: index for index, node in enumerate(graph.nodes)}
        self.fusable = {name for name, reason in reasons.items() if reason is None}
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
        if node.result in set(refs_in(self.graph.output)):
            return True
        return any(
            user not in self.fusable or self.epoch[user] != self.epoch[node.result]
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
        if shapes[0] != shapes[1] or self.epoch[first] != self.epoch[root]:
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


def _pointwise(graph: Graph, region: _Region) -> Pointwise:
    statements = tuple(node for node in graph.nodes if node.result in region.members)
    tensors = graph.tensors
    reads = tuple(Access(tensors[name]) for name in region.leaves)
    live = {
        argument.value.text: argument.value
        for node in statements
        for argument in node.args
        if isinstance(argument.value, Live)
    }
    body = Body(statements, tuple(region.roots))
    writes = tuple(tensors[root] for root in region.roots)
    return Pointwise("", reads, tuple(live.values()), body, writes)


def _named(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Names each kernel after its operators; a second kernel of the same name gets a number."""
    taken: dict[str, int] = {}
    named: list[Step] = []
    for step in steps:
        if isinstance(step, Pointwise):
            name = _kernel_name(step.body)
            taken[name] = taken.get(name, 0) + 1
            count = taken[name]
            step = replace(step, name=name if count == 1 else f"{name}_{count}")
        named.append(step)
    return tuple(named)


def _kernel_name(body: Body) -> str:
    packets = [node.packet.removesuffix("_") for node in body.statements]
    if len(packets) > 6:
        packets = [*packets[:2], "to", packets[-1]]
    return "_".join(packets).strip("_")


def _random_order(graph: Graph) -> dict[str, tuple[str, ...]]:
    """For each random call the one before it, which has to stay before it."""
    names = [node.result for node in graph.nodes if node.random]
    return {after: (before,) for before, after in itertools.pairwise(names)}


def _results(step: Step) -> set[str]:
    names = set(step_writes(step))
    if isinstance(step, Library):
        names.add(step.node.result)
    return names


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

    pending = sorted(steps, key=position)
    produced = {name for step in steps for name in _results(step)}
    done: set[str] = set()
    ordered: list[Step] = []
    while pending:
        step = next(s for s in pending if not (set(waits_for(s)) & produced) - done)
        pending.remove(step)
        ordered.append(step)
        done |= _results(step)
    return ordered
