"""Inputs may have any name: none hides what the text of a solution calls or declares with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
import test_solutions as solutions
from contracted import made_of
from references import reference_text

from modelnew.render import Options

# By what is made of the inputs, the text of the result: of the first two, and of all in a sum.
BODIES: Mapping[str, str] = {
    "pointwise": "{all}",
    "across": "{first}.T + {all}",
    "moved": "{first}.flip(0) + F.pad({second}, (1, -1)) + {all}",
    "joined": "torch.cat([{all}, {first} * 2], 1)",
    "product": "torch.addmm({first}, {first}, {second}).relu() + {all}",
    "half product": "(({first}.half() @ {second}.half())[:, :9] * 2).float() + ({all})[:, :9]",
    "thin product": "({first} @ {second}[:, :3]) * 2 + ({all})[:, :3]",
}
# Functions in which values have their names: kernels, epilogues and host code.
FUNCTIONS = (
    r"^\w+_kernel\(const Operands ops[^{]*\{\n.*?^\}",
    r"^struct \w+_epilogue \{\n.*?^\};",
    r"^at::Tensor \w+_forward\([^{;]*\{\n.*?^\}",
)
CALLED = r"(?<![\w.>:])([A-Za-z_]\w*)(?=(?:<[^;(){}=]*>)?\()"
TYPES = r"(?<![\w.>:])([A-Z]\w*)(?=(?:<[^;(){}=]*>)?[ &]+\w)"
DECLARED = r"\b(?:at::Tensor|Factors|float|auto)&? (\w+)(?=[,);]| =)"
# Of C expressions, and what no model calls its inputs.
EXEMPT = r"\w+f|__\w+|\w+_(?:kernel|forward|epilogue)|\w+_(?:launch|part)|[A-Z0-9_]+_CHECK"


def functions(text: str) -> str:
    code = "\n".join(map(str, solutions.asked(text).values()))
    found = [body for one in FUNCTIONS for body in re.findall(one, code, re.M | re.S)]
    assert found
    return re.sub(r'"[^"]*"|//.*', "", "\n".join(found))


def words(text: str) -> set[str]:
    """What the functions call or declare with."""
    found = {name for one in (CALLED, TYPES) for name in re.findall(one, functions(text))}
    return {name for name in found if not re.fullmatch(EXEMPT, name)}


def rendered(body: str, names: list[str]) -> str:
    inputs = {"first": names[0], "second": names[1], "all": " + ".join(names)}
    forward = f"def forward(self, {', '.join(names)}):\n    return {body.format(**inputs)}"
    text = reference_text(forward, "*torch.randn(12, n, n)", n=4100)
    return made_of("model", text, Options().dtypes).text


@pytest.fixture(scope="module")
def candidates() -> list[str]:
    plain = [f"x{i}" for i in range(12)]
    texts = [rendered(body, plain) for body in BODIES.values()]
    texts += [path.read_text() for path in sorted(solutions.SOLUTIONS.glob("*.py"))]
    return sorted(set().union(*map(words, texts)))


def chunks(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), 12):
        yield [*names[start : start + 12], *names][:12]


@pytest.mark.parametrize("body", BODIES)
def test_any_name(body: str, candidates: list[str]) -> None:
    assert {"Pack", "empty_as", "store", "to_float", "workspace_bytes"} <= {*candidates}
    for chunk in chunks(candidates):
        text = rendered(BODIES[body], chunk)
        hidden = words(text).intersection(re.findall(DECLARED, functions(text)))
        assert not hidden, hidden
