"""Brings a Graph into one form, Graph -> Graph: one name an operator, no aliases, no dead calls.

What is left has the same meaning in fewer kinds of nodes: in-place calls that nobody else can see
make new values, constants without dimensions are numbers, and the bias of a convolution is a step
of its own where a kernel can take it in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from modelnew import ops
from modelnew.ir import Arg, Argument, Graph, Node, Ref, users_of
from modelnew.joins import with_joins_late, with_own_parts
from modelnew.layout import CONVOLUTIONS
from modelnew.names import renamed, with_results
from modelnew.places import with_places
from modelnew.products import taken
from modelnew.views import with_views_early

# Calls that return their operand, or a copy nobody can tell from it unless one is written to.
ALIASES = ("detach", "detach_", "alias", "positive", "lift_fresh", "lift_fresh_copy")

# Operators that ATen knows by two names.
SYNONYMS = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "absolute": "abs",
    "negative": "neg", "clip": "clamp", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin",
    "arcsinh": "asinh", "arctan": "atan", "arctanh": "atanh", "arctan2": "atan2", "fix": "trunc",
    "special_digamma": "digamma", "special_erf": "erf", "special_erfc": "erfc",
    "special_erfinv": "erfinv", "special_exp2": "exp2", "special_expit": "sigmoid",
    "special_expm1": "expm1", "special_gammaln": "lgamma", "special_i0": "i0",
    "special_log1p": "log1p", "special_logit": "logit", "special_polygamma": "polygamma",
    "special_psi": "digamma", "special_sinc": "sinc", "__and__": "bitwise_and",
    "__or__": "bitwise_or", "__xor__": "bitwise_xor",
}  # fmt: skip

# Calls that return their operand when they are not in training.
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")

# Library calls whose result is memory of its own, whatever the arguments: no schema says so of
# a composite operator, and einsum, dropout or type_as may well return their operand.
FRESH = (
    "linear", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "batch_norm", "layer_norm",
    "group_norm", "instance_norm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "sum", "mean", "amax", "amin", "softmax",
    "log_softmax", "cumsum", "cumprod", "embedding",
)  # fmt: skip

EXTREMES = {"aten.max.dim": "aten.amax.default", "aten.min.dim": "aten.amin.default"}

# Library calls that also write to buffers, in training, which their schema does not say.
STATEFUL = ("batch_norm", "instance_norm")


def canonical(graph: Graph, split: bool = False, by_place: bool = True) -> Graph:
    """`graph` in one form; its meaning, results and state are the same.

    With `split` products are ours where that pays, with `by_place` what depends on where an element
    is may be a kernel's step.
    """
    graph = _without_aliases(graph)
    ours = {node.result for node in graph.nodes if split and taken(node, graph)}
    graph = _without_dead(_with_numbers(_functional(graph, ours)))
    graph = with_places(graph, ours) if by_place else graph
    graph = _without_dead(with_joins_late(with_views_early(graph)))
    graph = with_own_parts(with_views_early(graph))
    return with_bias_apart(_counting_at_once(_without_places(graph)))


def _without_aliases(graph: Graph) -> Graph:
    written = {n for node in graph.nodes if node.packet not in ALIASES for n in node.mutates}
    for node in reversed(graph.nodes):
        if node.packet in ALIASES and node.result in written:
            written.update(node.reads)
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = _under_one_name(renamed(node, names))
        copies = node.packet.startswith("lift_fresh") and node.result in written
        idle = node.packet in DROPOUTS and node.value("train") is False
        if idle or (node.packet in ALIASES and not copies):
            names[node.result] = next(iter(node.reads))
        else:
            nodes.append(node)
    return with_results(replace(graph, nodes=tuple(nodes)), names)


def _under_one_name(node: Node) -> Node:
    """The operator under the name that its row has: aten.multiply is aten.mul."""
    namespace, packet, overload = node.op.split(".")
    plain = packet if packet in SYNONYMS else packet.removesuffix("_")
    known = SYNONYMS.get(plain)
    if overload == "other" and plain in ("min", "max"):
        known, overload = f"{plain}imum", "default"
    if known is None:
        return node
    in_place = "_" if packet != plain else ""
    return replace(node, op=f"{namespace}.{known}{in_place}.{overload}")


def _functional(graph: Graph, ours: Collection[str]) -> Graph:
    """In-place calls on a value that nothing else can see, as calls that make a new value.

    That is the result of a call known to return memory of its own, as kernels of ours do, used by
    such calls alone. Any other in-place call stays as it is, and nothing is moved across it.
    """
    apart = {n.result for n in graph.nodes if n.result in ours or _keeps_apart(n)}
    owned = {node.result for node in graph.nodes if node.result in apart and not node.mutates}
    shared = {name for node in graph.nodes if node.result not in apart for name in node.reads}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        written = node.mutates
        node = renamed(node, names)
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
                node = replace(node, outputs=())
        nodes.append(node)
    return with_results(replace(graph, nodes=tuple(nodes)), names)


def _with_numbers(graph: Graph) -> Graph:
    """Constants without dimensions as numbers, where a kernel can take them so.

    A tensor of no dimensions takes no part in type promotion beside one that has some, as a number
    does; in memory it would be copied from the host at every call.
    """

    def number(value: Arg) -> Arg:
        return graph.numbers.get(value.name, value) if isinstance(value, Ref) else value

    nodes = []
    for node in graph.nodes:
        changed = node.with_values(map(number, node.values))
        taken = changed.reads and changed != node and ops.why_not(changed, graph) is None
        nodes.append(changed if taken else node)
    return replace(graph, nodes=tuple(nodes))


def _without_places(graph: Graph) -> Graph:
    """max and min over a dimension as amax and amin where nothing asks for the places.

    PyTorch's kernels that carry the places along read at 3.1 TB/s, amax at 4.1 (H200, [128, 4096,
    4095] over the middle). Both give NaN where there is one.
    """
    reads = Counter(name for node in graph.nodes for name in node.reads)
    pairs = {node.result: node for node in graph.nodes if node.op in EXTREMES}
    nodes = []
    gone = set()
    for node in graph.nodes:
        pair = pairs.get(node.reads[0]) if node.op == "python.getitem.int" else None
        if pair and node.value("index") == 0 and reads[pair.result] == 1:
            gone.add(pair.result)
            operand, dim, keepdim = pair.args
            args = (operand, replace(dim, value=(dim.value,)), keepdim)
            node = replace(node, op=EXTREMES[pair.op], args=args, views=(), source=pair.source)
        nodes.append(node)
    return replace(graph, nodes=tuple(node for node in nodes if node.result not in gone))


def _counting_at_once(graph: Graph) -> Graph:
    """Counters that nothing else reads move in one call, those of batches for the most part.

    An addition to one of them takes the host 12 us and the GPU a kernel: 0.3 of the 1.9 ms that
    MobileNetV1 takes for ten images.
    """
    uses = Counter(name for node in graph.nodes for name in (node.result, *node.reads))
    uses.update(graph.results)
    groups: dict[Arg, list[Node]] = {}
    for node in graph.nodes:
        if _counts(graph, node) and uses[node.reads[0]] == uses[node.result] == 1:
            groups.setdefault(node.value("other"), []).append(node)
    merged = {node.result for group in groups.values() if len(group) > 1 for node in group}
    calls = [_counted(step, group) for step, group in groups.items() if len(group) > 1]
    rest = (node for node in graph.nodes if node.result not in merged)
    return replace(graph, nodes=(*rest, *calls))


def _counts(graph: Graph, node: Node) -> bool:
    """Whether `node` adds an integer to a buffer of one integer."""
    if node.op != "aten.add_.Tensor" or not isinstance(node.value("other"), int):
        return False
    counter = graph.tensors[node.reads[0]]
    is_buffer = graph.bindings.get(counter.name, "").startswith("self.")
    return is_buffer and counter.shape == () and counter.dtype in ops.INTEGERS


def _counted(step: Arg, group: Sequence[Node]) -> Node:
    names = tuple(node.reads[0] for node in group)
    args = (Argument("self", tuple(map(Ref, names))), Argument("scalar", step))
    return Node("aten._foreach_add_.Scalar", group[0].result, args, (), names)


def with_bias_apart(graph: Graph) -> Graph:
    """The bias of a convolution as a step of its own where kernels alone use the result.

    PyTorch adds it in a pass of its own, over all of the result; in a kernel that follows it costs
    nothing.
    """
    users = users_of(graph)
    tensors = dict(graph.tensors)
    names: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = renamed(node, names)
        following = users.get(node.result, [])
        alone = all(ops.why_not(user, graph) is None for user in following)
        if alone and following and node.result not in graph.results and _has_bias(graph, node):
            nodes += (parts := _split_bias(node))
            names[node.result] = parts[1].result
            tensors[parts[1].result] = parts[1].outputs[0]
        else:
            nodes.append(node)
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _has_bias(graph: Graph, node: Node) -> bool:
    """Whether `node` is a convolution of a batch, with a bias."""
    if node.packet not in (*CONVOLUTIONS, "_convolution") or not isinstance(
        node.value("bias"), Ref
    ):
        return False
    ranks = [len(graph.tensors[name].shape) for name in node.reads]
    return ranks[0] == ranks[1]


def _split_bias(node: Node) -> tuple[Node, Node]:
    bias = Argument("other", node.value("bias"))
    args = tuple(
        replace(a, value=None, default=node.packet in CONVOLUTIONS) if a.name == "bias" else a
        for a in node.args
    )
    (made,) = node.outputs
    name = f"{node.result}_biased"
    operands = (Argument("self", Ref(node.result)), bias)
    added = Node("modelnew.channel_bias.default", name, operands, (replace(made, name=name),),
                 source=node.source)  # fmt: skip
    return replace(node, args=args), added


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
    needed = set(graph.results)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        effect = node.mutates or node.random or node.packet in STATEFUL
        if effect or needed.intersection(node.names):
            kept.append(node)
            needed.update(node.reads)
    return replace(graph, nodes=tuple(reversed(kept)))
