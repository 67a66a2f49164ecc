"""What PyTorch has that is pointwise over floating tensors, beside what the registry has.

PyTorch's own lists are the OpInfos of its tests and the activations of torch.nn.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from opinfo import floating, packet, reached

from modelnew import ops
from modelnew.canonical import ALIASES, SYNONYMS
from modelnew.ops.left_out import LEFT_OUT
from modelnew.ops.table import table


def activations() -> list[str]:
    """torch.nn.functional's function for each activation module, under its full name."""
    modules = {name.lower() for name in torch.nn.modules.activation.__all__}
    functions = [n for n in dir(torch.nn.functional) if n.islower() and n.strip("_") == n]
    return [f"nn.functional.{n}" for n in functions if n.replace("_", "") in modules]


EVERY = sorted({*floating(), *activations()})


def test_pytorch_has_as_many_as_ever() -> None:
    assert len(EVERY) > 150, "PyTorch's lists have moved"
    assert len(activations()) > 25


@pytest.mark.parametrize("name", EVERY)
def test_operator_has_a_row_or_a_reason(name: str) -> None:
    has_row = bool(reached(packet(name))) or packet(name) in ALIASES
    assert has_row != (name in LEFT_OUT), "a row and a reason" if has_row else "neither"


def test_readme_has_the_table() -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    assert len(table().splitlines()) <= 14
    assert table() in readme, "the operators' table in README.md is not that of the registry"


def test_nothing_is_left_out_that_pytorch_does_not_have() -> None:
    assert set(LEFT_OUT) <= set(EVERY)


@pytest.mark.parametrize("name", SYNONYMS)
def test_synonym_is_another_name_of_the_same_operator(name: str) -> None:
    """Both take the same arguments, so that a call may carry the other name."""
    assert name not in ops.REGISTRY
    theirs, mine = (getattr(torch.ops.aten, n) for n in (name, SYNONYMS[name]))
    assert SYNONYMS[name] in ops.REGISTRY
    assert reached(name) == {SYNONYMS[name]}
    for overload in theirs.overloads():
        if overload.endswith("out") or overload in ("int", "float", "bool"):
            continue
        if "Tensor" not in str(getattr(theirs, overload)._schema):
            continue
        assert overload in mine.overloads(), overload
        shapes = [
            [(str(a.type), a.kwarg_only) for a in getattr(p, overload)._schema.arguments]
            for p in (theirs, mine)
        ]
        assert shapes[0] == shapes[1]
