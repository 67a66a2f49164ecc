"""Says where forward lets go of intermediate results, which its names would keep to its end.

The reference frees most as it goes, by binding `x` again; without this, ResNet101 took 17 times its
memory. A `del` after each last use would be a line a step: results are let go of in groups, and
only where they would raise the peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from modelnew.ir import Graph, Library, Pointwise, Step, step_made, step_reads, step_writes

# Calls whose results PyTorch's schemas take for views, and which copy at times.
MAY_COPY = ("contiguous", "flatten", "ravel", "reshape", "reshape_as", "to", "type_as")
SLACK = 1.05  # of the least peak: spares the lines that would free little


def frees(graph: Graph, steps: Sequence[Step]) -> list[list[str]]:
    """The names to delete before each step, for about the least peak at the traced sizes."""
    roots = _roots(graph, steps)
    last = {roots[name]: at for at, step in enumerate(steps) for name in _names(step)}
    last.update((roots[name], len(steps)) for name in (*graph.bindings, *graph.results))
    ending: dict[int, list[str]] = defaultdict(list)
    for root, at in last.items():
        ending[at].append(root)
    made = [_made(step, roots) for step in steps]
    sizes: dict[str, int] = defaultdict(int)
    for new in made:
        for name, size in new.items():
            sizes[roots[name]] += size

    live = peak = 0
    for at, new in enumerate(made):
        live += sum(new.values())
        peak = max(peak, live)
        live -= sum(sizes[root] for root in ending[at])

    result: list[list[str]] = []
    names: dict[str, list[str]] = defaultdict(list)
    waiting: list[str] = []
    held = 0
    for at, (step, new) in enumerate(zip(steps, made, strict=True)):
        held += sum(new.values())
        full = held > SLACK * peak
        result.append([name for root in waiting for name in names[root]] if full else [])
        if full:
            held -= sum(sizes[root] for root in waiting)
            waiting = []
        for name in _bound(step):
            names[roots[name]].append(name)
        waiting += [root for root in ending[at] if sizes[root]]
    return result


def _roots(graph: Graph, steps: Sequence[Step]) -> Mapping[str, str]:
    """The name whose memory each name stands for: a view's is its base's."""
    roots = {name: name for name in graph.bindings}
    for step in steps:
        seen = _seen(step)
        roots.update((name, roots[seen[0]] if seen else name) for name in step_writes(step))
    return roots


def _seen(step: Step) -> tuple[str, ...]:
    """What the results of a step are views of."""
    if not isinstance(step, Library) or step.node.packet in MAY_COPY:
        return ()
    return (*step.node.mutates, *step.node.views)


def _bound(step: Step) -> tuple[str, ...]:
    """The names that the step's line of Python binds."""
    return () if isinstance(step, Library) and not step.node.binds else step_writes(step)


def _names(step: Step) -> tuple[str, ...]:
    like = tuple(t.name for t in step.like) if isinstance(step, Pointwise) else ()
    return (*step_reads(step), *like, *step_writes(step))


def _made(step: Step, roots: Mapping[str, str]) -> dict[str, int]:
    """Bytes of new memory by result; a list's are counted where its items are named."""
    writes = step_made(step)
    seen = _seen(step)
    item = isinstance(step, Library) and step.node.packet == "getitem"
    if seen and not (item and roots[seen[0]] == seen[0]):
        return {}
    return {tensor.name: tensor.bytes for tensor in writes}
