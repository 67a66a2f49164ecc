"""The stages in a row: a reference file to its solution's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from modelnew import invariants
from modelnew.algebra import rewrite
from modelnew.ir import Plan
from modelnew.plan import plan
from modelnew.products import SPLIT
from modelnew.reference import Reference, load
from modelnew.rehearse import rehearse
from modelnew.render import Options, render
from modelnew.trace import trace


@dataclass(frozen=True)
class Generated:
    """A reference with its plan and the text of its solution file."""

    reference: Reference
    plan: Plan
    text: str


def generate(
    path: Path, overrides: Mapping[str, str], options: Options, *, algebra: bool = False,
    matmul: str = SPLIT,
) -> Generated:  # fmt: skip
    """Runs every stage on one file. Raises ModelNewError with what to do when one cannot."""
    reference, made = planned(path, overrides, algebra=algebra, matmul=matmul)
    text = render(reference, made, options)
    rehearse(reference, text)
    return Generated(reference, made, text)


def planned(
    path: Path, overrides: Mapping[str, str], *, algebra: bool = False, matmul: str = SPLIT
) -> tuple[Reference, Plan]:
    """The stages up to the plan, each followed by its invariants; with `algebra` rewritten. For
    `matmul` see plan."""
    reference = load(path, overrides)
    graph = trace(reference)
    invariants.check_graph(graph)
    if algebra:
        graph, lines = rewrite(graph)
        graph = replace(graph, algebra=lines)
        invariants.check_graph(graph)
    made = plan(graph, matmul)
    invariants.check_plan(made)
    return reference, made
