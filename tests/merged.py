"""Many small forwards of the same inputs: planned each by itself, run on the CPU as one model.

A file costs g++ a second whatever is in it; kernels of one kind, which many of the forwards have in
common, are built once in a merged one.
"""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cpu
import pytest
import torch
from cpu import unsigned_zeros
from references import reference_text
from test_on_cpu import memory
from torch import Tensor, nn

from modelnew import invariants
from modelnew.interpret import interpret
from modelnew.ir import Contraction, Joined, Library, Plan
from modelnew.measure.gate import compare
from modelnew.measure.nested import cast, map_tensors, tensors
from modelnew.plan import plan
from modelnew.reference import Reference, load
from modelnew.render import render
from modelnew.trace import trace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Inputs:
    """What a family of forwards takes: parameters by name with the text that draws them."""

    drawn: Mapping[str, str]
    init: str = ""
    n: int = 4

    @property
    def parameters(self) -> str:
        return ", ".join(self.drawn)

    def text(self, *bodies: str) -> str:
        """A reference whose forward returns what each of the bodies does: an expression each, or
        statements with a return."""
        methods = [
            f"def case_{i}(self, {self.parameters}):\n{textwrap.indent(_statements(body), '    ')}"
            for i, body in enumerate(bodies)
        ]
        calls = ", ".join(f"self.case_{i}({self.parameters})" for i in range(len(bodies)))
        result = calls if len(bodies) == 1 else f"[{calls}]"
        forward = f"def forward(self, {self.parameters}):\n    return {result}"
        drawn = ", ".join(self.drawn.values())
        return reference_text("\n".join([*methods, forward]), drawn, self.init, self.n)

    def but(self, **drawn: str) -> Inputs:
        return replace(self, drawn={**self.drawn, **drawn})


def _statements(body: str) -> str:
    body = textwrap.dedent(body).strip("\n")
    return body if "return " in body else f"return {body}"


def kernels_of(made: Plan) -> list[str]:
    """All steps but views: kernels by name, concatenations with those of their parts, products in
    angles with a plus where the product is written too, library calls in brackets."""
    found = []
    for step in made.steps:
        match step:
            case Contraction():
                also = step.epilogue.body.statements[0].packet == "clone"
                alone = len(step.epilogue.body.results) == 1
                found.append(f"<{step.name}>{'+' if also and not alone else ''}")
            case Joined():
                found.append(f"cat({', '.join(part.name for part in step.parts)})")
            case Library():
                found += [] if step.node.views else [f"[{step.node.packet}]"]
            case _:
                found.append(step.name)
    return found


@dataclass(frozen=True)
class Subject:
    """A reference with its plan and, where it was built, its solution."""

    ref: Reference
    plan: Plan
    model_new: type[nn.Module] | None = None

    @property
    def kernels(self) -> list[str]:
        return kernels_of(self.plan)

    @property
    def views(self) -> list[Any]:
        """All that decides what each view is."""
        nodes = [step.node for step in self.plan.steps if isinstance(step, Library)]
        return [(node.op, node.values) for node in nodes if node.views]

    def inputs(self, dtype: torch.dtype = torch.float32, n: int | None = None) -> list[Any]:
        space: Any = self.ref.namespace
        own = space["n"]
        space["n"] = own if n is None else n
        torch.manual_seed(1)
        drawn = list(cast(space["get_inputs"](), dtype))
        space["n"] = own
        return drawn

    def models(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        """Ours and the reference's, with the same weights."""
        assert self.model_new is not None
        torch.manual_seed(0)
        theirs = self.ref.namespace["Model"]().to(dtype)
        mine = self.model_new().to(dtype)
        mine.load_state_dict(theirs.state_dict())
        return mine, theirs

    @torch.no_grad()
    def check_plan(self) -> None:
        """That the plan gives what the model does, in value, dtype and shape."""
        torch.manual_seed(0)
        theirs = self.ref.namespace["Model"]()
        mine, given = copy.deepcopy(theirs), self.inputs()
        names = inspect.signature(theirs.forward).parameters
        found = interpret(self.plan, mine, dict(zip(names, copy.deepcopy(given), strict=True)))
        expected = tensors(theirs(*given))
        for y, own in zip(tensors(found), expected, strict=True):
            torch.testing.assert_close(y, own, equal_nan=True)
        state = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
        assert all(torch.equal(y, own) for y, own in state)

    @torch.no_grad()
    def judge(
        self, inputs: Sequence[Any], dtype: torch.dtype = torch.float32, *,
        change: Callable[[nn.Module], object] = lambda model: None, strides: bool = True,
    ) -> None:  # fmt: skip
        """That the solution is right in value, dtype, shape and, if asked for, strides; inputs are
        untouched."""
        mine, theirs = self.models(dtype)
        true = copy.deepcopy(theirs).double()
        for model in (mine, theirs, true):
            change(model)
        own = theirs(*inputs)
        truth = true(*cast(inputs, torch.float64))
        before = memory(inputs)
        found = mine(*inputs)
        assert all(map(torch.equal, memory(inputs), before)), "an input is changed"
        trees = (found, own, truth) if strides else map(_contiguous, (found, own, truth))
        verdict = compare(*map(unsigned_zeros, trees))
        layout = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors(inputs)]
        assert verdict.ok, f"{verdict.message} for {layout}"


def planned(text: str, path: Path) -> Subject:
    path.write_text(text)
    ref = load(path)
    made = plan(trace(ref))
    invariants.check_plan(made)
    return Subject(ref, made)


@dataclass(frozen=True)
class Collection:
    """Subjects with their solutions, all in one extension; those of `address` also run under
    AddressSanitizer."""

    subjects: Mapping[str, Subject]
    texts: Mapping[str, str]
    address: Sequence[str]
    cache: Path

    def check_addresses(self, script: str) -> None:
        texts = [self.texts[name] for name in self.address]
        groups = _groups(self.texts, self.address)
        cpu.check_addresses(script, cpu.build(groups, self.cache, address={0}), texts)


def built(
    texts: Mapping[str, str], folder: Path, config: pytest.Config, address: Sequence[str] = (),
    mistake: tuple[str, str] = ("", ""),
) -> Collection:  # fmt: skip
    """The references of these texts with their solutions.

    `mistake` is a change of the text of the last of `address`, for one more that is called
    "mistake".
    """
    assert config.cache is not None
    cache = config.cache.mkdir("solutions_on_cpu")
    subjects = {name: planned(text, folder / f"{name}.py") for name, text in texts.items()}
    solutions = {name: render(subject.ref, subject.plan) for name, subject in subjects.items()}
    if mistake[0]:
        wrong = solutions[address[-1]]
        assert wrong.count(mistake[0]) == 1, "the text has no place for the mistake"
        solutions["mistake"] = wrong.replace(*mistake)
        address = [*address, "mistake"]
    extension = cpu.build(_groups(solutions, address), cache)
    for name in subjects:
        model_new = cpu.load_on_cpu(solutions[name], cache, extension)["ModelNew"]
        subjects[name] = replace(subjects[name], model_new=model_new)
    return Collection(subjects, solutions, address, cache)


def _groups(texts: Mapping[str, str], address: Sequence[str]) -> list[list[str]]:
    others = [text for name, text in texts.items() if name not in address]
    return [[texts[name] for name in address], others]


def _contiguous(tree: Any) -> Any:
    return map_tensors(Tensor.contiguous, tree)


def moved(inputs: Sequence[Any], layout: Callable[[Tensor], Tensor], places: str = "") -> list[Any]:
    """The inputs laid out otherwise: all, or those whose index `places` has."""
    return [layout(x) if not places or str(i) in places else x for i, x in enumerate(inputs)]
