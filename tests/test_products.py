"""Matrix products with what follows them (modelnew/products.py, contractions.py): plans, their
results by `interpret` and by the lines of forward, and why products stay PyTorch's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from merged import Inputs, Subject, kernels_of, planned
from references import reference_text
from test_plan import answer_of_the_text
from torch import nn

from generate import main
from modelnew import invariants, products
from modelnew.contractions import bias, triangle
from modelnew.explain import page
from modelnew.interpret import interpret
from modelnew.ir import Contraction, Library, Plan, step_reads
from modelnew.measure.build import kind
from modelnew.measure.nested import tensors
from modelnew.plan import MAX_OPERANDS, plan
from modelnew.products import LIBRARY, Limits, Product, product_of, why_not
from modelnew.reference import load
from modelnew.summary import rows
from modelnew.trace import trace

Cases = Mapping[str, tuple[str, list[str]]]

GIVEN = Inputs(
    {
        "x": "torch.randn(n, 8)",
        "y": "torch.randn(n, 5)",
        "z": "torch.randn(2, 3, n, 8)",
        "a": "torch.randn(3, n, 8)",
        "b": "torch.randn(3, 8, 5)",
        "w": "torch.randn(8, 5)",
        "v": "torch.randn(5, 8)",
        "square": "torch.randn(n, n)",
        "row": "torch.randn(5)",
        "column": "torch.randn(n, 1)",
        "mask": "torch.rand(n, 5) > 0.5",
        "image": "torch.randn(2, 4, 6, 8)",
    },
    """
    self.linear = nn.Linear(8, 5)
    self.second = nn.Linear(8, 5)
    self.back = nn.Linear(5, 8)
    self.bare = nn.Linear(8, 5, bias=False)
    self.norm = nn.LayerNorm(5)
    self.drop = nn.Dropout(0.5)
    self.conv = nn.Conv2d(4, 4, 1)
    self.alpha = 0.75
    self.beta = 1.5
    """,
    n=7,
)
# Each with the steps of its plan that are no views: products in <>, with a + where they write the
# product as well.
LINEAR: Cases = {
    "gelu": ("F.gelu(self.linear(x))", ["<linear_add_gelu>"]),
    "alone": ("self.linear(x)", ["<linear_add>"]),
    "without bias": ("self.bare(x)", ["<linear>"]),
    "without bias, used": ("self.bare(x).relu()", ["<linear_relu>"]),
    "three dimensions": ("torch.tanh(self.linear(a))", ["<linear_add_tanh>"]),
    "four dimensions": ("torch.tanh(self.linear(z))", ["<linear_add_tanh>"]),
    "in place": ("F.relu_(self.linear(x))", ["<linear_add_relu>"]),
    "in place, twice": ("self.linear(x).mul_(2).add_(row)", ["<linear_add_mul_add>"]),
    "two": ("self.back(torch.relu(self.linear(x)))", ["<linear_add_relu>", "<linear_add>"]),
    "two of the same kind": ("torch.relu(self.linear(x)), torch.relu(self.second(x))",
                             ["<linear_add_relu>", "<linear_add_relu>"]),
    "gate": ("torch.sigmoid(self.linear(x)) * self.second(x)",
             ["<linear>", "<linear_add_sigmoid_add_mul>"]),
    "gate of one": ("u, t = self.linear(a).chunk(2, 1)\nreturn u[:, :3] * t.sigmoid()",
                    ["<linear_add>", "sigmoid_mul"]),
    "residual": ("x + self.back(torch.relu(self.linear(x)))",
                 ["<linear_add_relu>", "<linear_add_add>"]),
    "operand of the product": ("torch.addmm(x[:, :5], x[:, :5], square[:5, :5]) * x[:, :5]",
                               ["<mm_add_mul>"]),
    "numbers": ("F.leaky_relu(self.linear(x) * self.alpha, self.beta)",
                ["<linear_add_mul_leaky_relu>"]),
    "long": ("torch.tanh(F.gelu(torch.sigmoid(self.linear(x) + row) * 2) - 1).abs()",
             ["<linear_add_to_abs>"]),
}  # fmt: skip
FORMS: Cases = {
    "mm": ("torch.mm(x, w)", ["<mm>"]),
    "mm, used": ("torch.mm(x, w) * 2", ["<mm_mul>"]),
    "mm of one": ("torch.mm(square, square).exp()", ["<mm_exp>"]),
    "bmm": ("torch.bmm(a, b).relu()", ["<bmm_relu>"]),
    "matmul": ("x @ w + 1", ["<matmul_add>"]),
    "matmul of 3 by 2": ("a @ w + 1", ["<matmul_add>"]),
    "matmul of 4 by 2": ("z @ w + 1", ["<matmul_add>"]),
    "matmul of 3 by 3": ("a @ b + 1", ["<matmul_add>"]),
    "matmul of 4 by 4": ("z @ z.mT + 1", ["<matmul_add>"]),
    "transposed": ("x @ v.T", ["<matmul>"]),
    "transposed operand": ("(w.T @ x.T) * 2", ["<matmul_mul>"]),
    "addmm": ("torch.addmm(row, x, w).relu()", ["<mm_add_relu>"]),
    "addmm, scaled": ("torch.addmm(row, x, w, beta=2, alpha=0.5)", ["<mm_mul_add>"]),
    "addmm, live": ("torch.addmm(column, x, w, beta=self.beta, alpha=self.alpha)",
                    ["<mm_mul_add>"]),
    "addmm of nothing": ("torch.addmm(y / 0, x, w, beta=0)", ["<mm>"]),
    "addmm of nothing, scaled": ("torch.addmm(y / 0, x, w, beta=0, alpha=3)", ["<mm_mul>"]),
    "baddbmm": ("torch.baddbmm(y, a, b, beta=-1)", ["<bmm_add>"]),
    "baddbmm, scaled": ("torch.baddbmm(y, a, b, alpha=self.alpha).tanh()",
                        ["<bmm_mul_add_tanh>"]),
    "einsum": ("torch.einsum('ij,jk->ik', x, w)", ["<matmul>"]),
    "einsum, spaced": ("torch.einsum('b i j l, l k -> b i j k', z, w).relu()", ["<matmul_relu>"]),
    "einsum of batches": ("torch.einsum('bij,bjk->bik', a, b) + 1", ["<matmul_add>"]),
    "einsum of two batches": ("torch.einsum('abij,abjk->abik', z, z.mT)", ["<matmul>"]),
    "matmul in place": ("(x @ w).relu_()", ["<matmul_relu>"]),
    "einsum in place": ("torch.einsum('ij,jk->ik', x, w).mul_(2)", ["<matmul_mul>"]),
}  # fmt: skip
READERS: Cases = {
    "returned too": ("p = x @ w\nreturn p, p.relu()", ["<matmul_relu>+"]),
    "biased, returned too": ("p = self.linear(x)\nreturn p, p.relu()", ["<linear_add_relu>"]),
    "returned twice": ("p = x @ w\nreturn p, p", ["<matmul>"]),
    "a view returned too": ("p = x @ w\nreturn p.T, p.relu()", ["<matmul_relu>+"]),
    "two kernels": ("p = x @ w\nq = p.relu()\nreturn p * q.sum(), q",
                    ["<matmul_relu>+", "[sum]", "mul"]),
    "two shapes": ("p = x @ w\nreturn p.relu(), p + a[:, :, :5]", ["<matmul_relu>+", "add"]),
    "cycle": ("p = x @ w\nreturn p * p.sum()", ["<matmul>", "[sum]", "mul"]),
    "cycle by a norm": ("torch.softmax(x @ w, 1) * (x @ w)",
                        ["<matmul>", "[softmax]", "<matmul_mul>"]),
    "cycle by another product": ("p = x @ w\nreturn p + self.back(p) @ w",
                                 ["<matmul>", "<linear_add>", "<matmul_add>"]),
    "reduction, no cycle": ("p = x @ w\nreturn p * x.sum(), p.amax(1)",
                            ["[sum]", "<matmul_mul>+", "[amax]"]),
    "normalized": ("F.gelu(self.norm(self.linear(x)))", ["<linear_add>", "[layer_norm]", "gelu"]),
    "row and column": ("(x @ w + row) * column", ["<matmul_add_mul>"]),
    "larger than the product": ("x @ w + a[:, :, :5]", ["<matmul>", "add"]),
    "product along a dimension": ("x[:1] @ w + y", ["<matmul>", "add"]),
    "residual": ("x @ w + y", ["<matmul_add>"]),
    "product second": ("y - x @ w", ["<matmul_sub>"]),
    "lies across": ("y.T.clone().T * (x @ w)", ["<matmul_clone_mul>"]),
    "an input that is returned": ("p = x @ w\nreturn p.add_(y), y", ["<matmul_add>"]),
    "comparison": ("(x @ w) > row, x @ w", ["<matmul_gt>", "<matmul>"]),
    "mask": ("(x @ w).masked_fill(mask, -1.0)", ["<matmul_masked_fill>"]),
    "lower triangle": ("torch.tril(square @ square)", ["<matmul_lower_triangle>"]),
    "upper triangle": ("torch.triu(square @ square, 1) * 2", ["<matmul_upper_triangle_mul>"]),
    "triangle of an operand": ("torch.tril(square) @ square", ["[tril]", "<matmul>"]),
    "triangle, batches": ("torch.tril(a @ b) + 1", ["<matmul_lower_triangle_add>"]),
    "flipped": ("(x @ w).flip(1) * 2", ["<matmul>", "mul"]),
    "flipped beside": ("x @ w + y.flip(1)", ["<matmul_add>"]),
    "flipped operand": ("f = x.flip(1)\nreturn f @ (w @ v) + f",
                        ["[flip]", "<matmul>", "<matmul_add>"]),
    "flipped, no operand": ("f = x.flip(1)\nreturn f @ w @ v + f",
                            ["[flip]", "<matmul>", "<matmul_add>"]),
    "dropout": ("self.drop(self.linear(x)) * 2", ["<linear_add>", "[dropout]", "mul"]),
    "random in between": (
        "p = x @ w\nq = F.dropout(p.amax(0), 0.5, True)\nreturn p + F.dropout(y, 0.5, True), q",
        ["<matmul>", "[amax]", "[dropout]", "[dropout]", "add"]),
    "random before": (
        "r = F.dropout(y, 0.5, True)\np = x @ w\nreturn p + r, F.dropout(p, 0.5, True)",
        ["[dropout]", "<matmul_add>+", "[dropout]"]),
    "written in between": (
        "p = x @ w\nt = p[0]\nq = p * 2\nt.mul_(3)\nreturn q + 1, p * 4",
        ["<matmul_mul>+", "[mul_]", "add", "mul"]),
    "read behind a write": ("p = x @ w\nx.mul_(2)\nreturn p * x.sum()",
                            ["<matmul>", "[mul_]", "[sum]", "mul"]),
    "in channels_last": ("self.conv(torch.relu(self.linear(image)))",
                         ["<linear_add_relu>", "[conv2d]"]),
}  # fmt: skip
VIEWED: Cases = {
    "viewed": ("self.linear(a).view(3, -1)", ["<linear_add>"]),
    "viewed, then used": ("torch.relu(self.linear(a)).flatten(1) * 2",
                          ["<linear_add>", "relu_mul"]),
    "transposed": ("torch.relu(self.linear(a)).mT", ["<linear_add_relu>"]),
    "transposed, then used": ("torch.relu(self.linear(a)).mT * 2",
                              ["<linear_add>", "relu_mul"]),
    "heads": ("q, k = self.back(y).view(7, 2, 4).unbind(1)\nreturn torch.softmax(q @ k.T, 1)",
              ["<linear_add>", "<matmul>", "[softmax]"]),
    "part of a concatenation": ("torch.cat([self.linear(x), y])",
                                ["<linear>", "cat(add, clone)"]),
    "used part of one": ("torch.cat([torch.relu(self.linear(x)), y], 1)",
                         ["<linear>", "cat(add_relu, clone)"]),
    "bare part of one": ("torch.cat([x @ w, y * 2], 1)", ["<matmul>", "cat(mul, clone)"]),
    "stacked": ("torch.stack([self.linear(x), self.second(x)]) * 2",
                ["<linear_add>", "<linear_add>", "cat(mul, mul)"]),
    "of a concatenation": ("self.linear(torch.cat([x * 2, x])) + 1",
                           ["cat(mul, clone)", "<linear_add_add>"]),
}  # fmt: skip
VECTORS: Cases = {
    "matmul": ("(x @ w[:, 0]) * 2", ["<matmul_mul>"]),
    "matmul, first": ("torch.relu(x[0] @ w)", ["<matmul_relu>"]),
    "matmul of 3 by 1": ("(a @ w[:, 0]) + 1", ["<matmul_add>"]),
    "matmul of 1 by 3": ("x[0] @ b + 1", ["<matmul_add>"]),
    "matmul of 1 by 4": ("(x[0] @ z.mT).sigmoid()", ["<matmul_sigmoid>"]),
    "linear": ("self.linear(x[0]) * 2", ["<linear_add_mul>"]),
    "linear of one": ("F.linear(x, v[0]) * 2", ["<linear_mul>"]),
    "mv": ("torch.mv(x, v[0]).relu()", ["<mv_relu>"]),
    "mv, alone": ("x.mv(v[0])", ["<mv>"]),
    "addmv": ("torch.addmv(y[:, 0], x, v[0]).relu()", ["<mv_add_relu>"]),
    "addmv, scaled": ("torch.addmv(y[:, 0], x, v[0], beta=2, alpha=0.5)", ["<mv_mul_add>"]),
    "addmv, live": ("torch.addmv(y[:, 0], x, v[0], beta=self.beta, alpha=self.alpha)",
                    ["<mv_mul_add>"]),
    "addmv of nothing": ("torch.addmv(y[:, 0] / 0, x, v[0], beta=0)", ["<mv>"]),
    "of half": ("(x.half() @ w.half()[:, 0]).relu()", ["<matmul_relu>"]),
    "of bfloat16": ("torch.mv(x.bfloat16(), v[0].bfloat16())", ["<mv>"]),
}  # fmt: skip
LEFT: Cases = {
    "double": ("(x.double() @ w.double()).float() * 2", ["[matmul]", "mul"]),
    "two vectors": ("(x[0] @ x[1]) * 2", ["[matmul]", "mul"]),
    "mv times zero": ("torch.addmv(y[:, 0], x, v[0], alpha=0)", ["[addmv]"]),
    "broadcast batches": ("torch.matmul(x, b) * 2", ["[matmul]", "mul"]),
    "einsum, turned": ("torch.einsum('ij,jk->ki', x, w) * 2", ["[einsum]", "mul"]),
    "einsum with a trace": ("torch.einsum('ii,ij->ij', square, square) * 2", ["[einsum]", "mul"]),
    "einsum of vectors": ("torch.einsum('ij,j->i', x, v[0]) * 2", ["[einsum]", "mul"]),
    "einsum of rows": ("torch.einsum('ij,kj->ik', x, v) * 2", ["[einsum]", "mul"]),
    "einsum of other batches": ("torch.einsum('bij,jk->bik', a[:, :, :1], w) * 2",
                                ["[einsum]", "mul"]),
    "einsum with dots": ("torch.einsum('...j,jk->...k', a, w) * 2", ["[einsum]", "mul"]),
    "einsum without a result": ("torch.einsum('ij,jk', x, w) * 2", ["[einsum]", "mul"]),
    "einsum of three": ("torch.einsum('ij,jk,kl->il', x, w, v) * 2", ["[einsum]", "mul"]),
    "einsum of one": ("torch.einsum('ij->ji', x) * 2", ["[einsum]", "mul"]),
    "times zero": ("torch.addmm(y, x, w, alpha=0)", ["[addmm]"]),
}  # fmt: skip
HALVES: Cases = {
    "half": ("(x.half() @ w.half()).float() * 2", ["<matmul>", "mul"]),
    "bfloat16": ("F.relu(F.linear(x.bfloat16(), v.bfloat16())) * 2", ["<linear_relu_mul>"]),
    "both": ("(x.half() @ w.half()).relu(), (x @ w).relu()", ["<matmul_relu>", "<matmul_relu_2>"]),
    "half and a number": ("(x.half() @ w.half()) * row[0]", ["<matmul_mul>"]),
    "half and its own": ("(x.half() @ w.half()) * y.half()", ["<matmul_mul>"]),
    "half and a mask": ("(x.half() @ w.half()) * mask", ["<matmul_mul>"]),
    # Not in memory, it would have to be made a float32 there.
    "half and a float": ("(x.half() @ w.half()) * y", ["<matmul>", "mul"]),
}  # fmt: skip
FAMILIES = {
    "linear": LINEAR, "forms": FORMS, "readers": READERS, "viewed": VIEWED, "vectors": VECTORS,
    "left": LEFT, "halves": HALVES,
}  # fmt: skip
CASES = {
    f"{family}: {name}": case for family in FAMILIES for name, case in FAMILIES[family].items()
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of every size are worth a kernel."""
    limits = Limits(lines=1, depth=1, work=1)
    kinds = {name: replace(kind, limits=limits) for name, kind in products.KINDS.items()}
    monkeypatch.setattr(products, "KINDS", kinds)


def contractions(made: Plan) -> list[Contraction]:
    return [step for step in made.steps if isinstance(step, Contraction)]


@torch.no_grad()
def judge(subject: Subject, answer: Callable[[Plan, nn.Module, dict[str, Any]], Any]) -> None:
    """That `answer` gives what the model does: values, dtypes, shapes, strides, state, inputs."""
    torch.manual_seed(0)
    theirs = subject.ref.namespace["Model"]()
    mine, given = copy.deepcopy(theirs), subject.inputs()
    names = list(inspect.signature(theirs.forward).parameters)
    own = copy.deepcopy(given)
    torch.manual_seed(1)
    expected = tensors(theirs(*given))
    torch.manual_seed(1)
    found = tensors(answer(subject.plan, mine, dict(zip(names, own, strict=True))))
    assert len(found) == len(expected)
    for y, true in zip(found, expected, strict=True):
        torch.testing.assert_close(y, true, equal_nan=True)
        assert y.stride() == true.stride()
    assert all(map(torch.equal, own, given))
    assert mine.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str, small: None, tmp_path: Path) -> None:
    """The steps are those of the table, and give the model's answer, by the text of forward too."""
    body, steps = CASES[name]
    subject = planned(GIVEN.text(body), tmp_path / "reference.py")
    assert kernels_of(subject.plan) == steps
    judge(subject, interpret)
    judge(subject, answer_of_the_text)
    assert page(subject.plan)


@pytest.mark.parametrize("name", CASES)
def test_library(name: str, small: None, tmp_path: Path) -> None:
    """With PyTorch's products the plan has none of ours, and what is theirs is as it was."""
    body, _ = CASES[name]
    path = tmp_path / "reference.py"
    path.write_text(GIVEN.text(body))
    ref = load(path)
    made = plan(trace(ref), LIBRARY)
    invariants.check_plan(made)
    assert not contractions(made)
    judge(Subject(ref, made), interpret)


def test_small_products_stay_as_they_are(tmp_path: Path) -> None:
    """Below the threshold the plan is that of LIBRARY, but for what is said of the products."""
    for number, (body, _) in enumerate(CASES.values()):
        path = tmp_path / f"reference_{number}.py"
        path.write_text(GIVEN.text(body))
        graph = trace(load(path))
        ours, theirs = plan(graph), plan(graph, LIBRARY)
        assert rows(ours) == rows(theirs)
        assert ours.graph == theirs.graph


def worth(shape: str, other: str = "torch.randn(1024, 1024)", body: str = "x @ y") -> str:
    return reference_text(f"def forward(self, x, y):\n    return {body}", f"{shape}, {other}")


# By what is multiplied, why it stays PyTorch's.
WHY = {
    "small": (worth("torch.randn(512, 512)", "torch.randn(512, 512)"), "a small product: "),
    "enough": (worth("torch.randn(1024, 1024)"), None),
    "enough rows": (worth("torch.randn(4, 256, 1024)"), None),
    "enough batches": (worth("torch.randn(64, 256, 256)", "torch.randn(64, 256, 256)"), None),
    "almost": (worth("torch.randn(1023, 1024)"), "a small product: "),
    "padded": (worth("torch.randn(204800, 512)", "torch.randn(512, 32)"), "a product with much "),
    "padded batches": (
        worth("torch.randn(2048, 32, 100)", "torch.randn(2048, 100, 512)"),
        "a product with much ",
    ),
    "thin": (worth("torch.randn(15, 65536)", "torch.randn(65536, 4096)"), "a thin product: "),
    "thinner": (worth("torch.randn(4, 65536)", "torch.randn(65536, 4096)"), None),
    "thin and shallow": (worth("torch.randn(4, 31)", "torch.randn(31, 65536)"),
                         "a thin product: "),
    "thin and small": (worth("torch.randn(4, 256)", "torch.randn(256, 256)"), "a thin product: "),
    "half": (worth("torch.randn(1024, 1024).half()", "torch.randn(1024, 1024).half()"),
             "a small product: "),
    "half enough": (worth("torch.randn(4096, 4096).half()", "torch.randn(4096, 4100).half()"),
                    None),
    "half, its depth": (worth("torch.randn(4096, 4100).half()", "torch.randn(4100, 4096).half()"),
                        None),
    "half, aligned": (worth("torch.randn(4100, 4096).half()", "torch.randn(4096, 4096).half()"),
                      "an aligned product: "),
    "thin half": (worth("torch.randn(8192, 16384).half()", "torch.randn(16384, 63).half()"),
                  "a thin product: "),
    "two half types": (worth("torch.randn(4096, 1024).half()",
                             body="torch.addmm(x.bfloat16(), x.bfloat16(), y.bfloat16(), alpha=0)"),
                       "a product times zero"),
    "thin of half": (worth("torch.randn(4, 4096).half()", "torch.randn(4096, 4096).half()"),
                     "a thin product: "),
    "double": (worth("torch.randn(1024, 1024).double()", "torch.randn(1024, 1024).double()"),
               "a product of float64"),
    "vector": (worth("torch.randn(65536, 1024)", "torch.randn(1024)"), None),
    "small vector": (worth("torch.randn(16383, 1024)", "torch.randn(1024)"), "a thin product: "),
    "vectors": (worth("torch.randn(1 << 20)", "torch.randn(1 << 20)"),
                "a product of two vectors"),
    "batches of one": (worth("torch.randn(1, 1024, 1024)", "torch.randn(4, 1024, 1024)"),
                       "operands that broadcast"),
    "einsum": (worth("torch.randn(1024, 1024)", body="torch.einsum('ij,kj->ik', x, y)"),
               "an einsum that is no plain product"),
    "zero": (worth("torch.randn(1024, 1024)", body="torch.addmm(x, x, y, alpha=0)"),
             "a product times zero"),
    "bias": (worth("torch.randn(1024, 1024)", body="F.linear(x, y, y[:1, 0])"),
             "a bias of another shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
def test_why(name: str, tmp_path: Path) -> None:
    text, why = WHY[name]
    subject = planned(text, tmp_path / "reference.py")
    calls = [s for s in subject.plan.steps if isinstance(s, Library) and not s.node.views]
    assert bool(contractions(subject.plan)) == (why is None)
    assert kind(subject.plan).startswith("product")
    if why is not None:
        (call,) = calls
        assert call.why.startswith(why)
        assert f"PyTorch {call.node.op}: {why}" in page(subject.plan)


def test_sizes(small: None, tmp_path: Path) -> None:
    body = "z @ z.mT, self.linear(z), torch.mm(x, w), a @ w"
    made = planned(GIVEN.text(body), tmp_path / "reference.py").plan
    sizes = [products.sizes(step) for step in contractions(made)]
    assert sizes == [
        "[6, 7, 8] x [6, 8, 7]", "[42, 8] x [8, 5]", "[7, 8] x [8, 5]", "[21, 8] x [8, 5]",
    ]  # fmt: skip
    shown = page(made)
    assert "product linear_add  " in shown
    assert all(text in shown for text in sizes)
    for step in contractions(made):
        product = product_of(step.node, made.graph.tensors)
        assert product == Product(*step.operands, transposed=step.node.packet == "linear")
        assert why_not(step.node, made.graph) is None


def test_sizes_with_vectors(small: None, tmp_path: Path) -> None:
    """A vector is a matrix of one row or column; as left operand, one for each batch."""
    body = "x @ u, a @ u, u @ w, u @ b, torch.mv(x, u), self.linear(u), F.linear(x, u)"
    given = GIVEN.but(u="torch.randn(8)")
    made = planned(given.text(body), tmp_path / "reference.py").plan
    assert [products.sizes(step) for step in contractions(made)] == [
        "[7, 8] x [8, 1]", "[21, 8] x [8, 1]", "[1, 8] x [8, 5]", "[3, 1, 8] x [3, 8, 5]",
        "[7, 8] x [8, 1]", "[1, 8] x [8, 5]", "[7, 8] x [8, 1]",
    ]  # fmt: skip


def test_kernels_of_other_widths_have_other_names(tmp_path: Path) -> None:
    """Those of few rows are made for as many, up to a power of two."""
    given = GIVEN.but(
        x="torch.randn(4096, 1024)", w="torch.randn(1024, 3)", v="torch.randn(1024, 4)",
        b="torch.randn(1024, 2)", y="torch.randn(2, 1024)",
    )  # fmt: skip
    made = planned(given.text("x @ w, x @ v, x @ b, x @ y.mT"), tmp_path / "reference.py").plan
    found = [(step.name, products.width(step)) for step in contractions(made)]
    assert found == [("matmul", 4), ("matmul", 4), ("matmul_2", 2), ("matmul_2", 2)]


def test_bytes_and_reads(small: None, tmp_path: Path) -> None:
    """Operands first, then what the epilogue reads besides; each once."""
    made = planned(GIVEN.text("square @ square * square + column"), tmp_path / "reference.py").plan
    (step,) = contractions(made)
    assert step_reads(step) == ("square", "column")
    assert step.bytes == 4 * (49 + 7 + 49)
    made = planned(GIVEN.text("y * F.gelu(self.linear(x) + row)"), tmp_path / "second.py").plan
    (step,) = contractions(made)
    assert step_reads(step) == ("x", "linear_weight", "y", "linear_bias", "row")
    assert step.bytes == 4 * (56 + 40 + 35 + 5 + 5 + 35)


def test_names_are_those_of_kernels_alike(small: None, tmp_path: Path) -> None:
    """One name for what one kernel does; another kind of product, or other operands, another."""
    body = """
    one = torch.relu(self.linear(x)), torch.relu(self.second(x)), torch.relu(self.linear(a))
    return *one, torch.relu(x @ w), torch.relu(a @ b), square @ square + 1, x @ x.T + 1
    """
    made = planned(GIVEN.text(body), tmp_path / "reference.py").plan
    names = [step.name for step in contractions(made)]
    assert names == [
        "linear_add_relu", "linear_add_relu", "linear_add_relu_2", "matmul_relu", "matmul_relu_2",
        "matmul_add", "matmul_add_2",
    ]  # fmt: skip
    kernels = [kernel.name for kernel in made.kernels]
    assert len(set(kernels)) == len(kernels)
    assert not {*kernels} & {*names}


def test_as_many_operands_as_there_may_be(small: None, tmp_path: Path) -> None:
    """A kernel that would have more is none of the product's."""
    for count, fits in ((MAX_OPERANDS - 5, True), (MAX_OPERANDS - 3, False)):
        body = f"p = x @ w\nfor i in range({count}): p = p + big[i]\nreturn p"
        given = GIVEN.but(big="[torch.randn(5) for _ in range(60)]")
        made = planned(given.text(body), tmp_path / f"reference_{count}.py").plan
        (step,) = contractions(made)
        assert (len(step.reads) > 2) == fits


TAKEN_IN = {
    "F.gelu(self.linear(x))": "linear_bias",
    "torch.sigmoid(self.linear(x)) * 2": "linear_bias",
    "(lambda u: u.sigmoid() + u)(self.linear(x))": "linear_bias",
    "torch.addmm(row, x, w).relu()": "row",
    "(lambda u: u * u.exp())(self.linear(x))": "linear_bias",
    # The reference rounds ahead of such a sum too.
    "(self.linear(x) + row).relu()": None,
    "(y - self.linear(x)).relu()": None,
    # No call of the reference adds these.
    "(self.bare(x) + row).relu()": None,
    "(x @ w + row).relu()": None,
    # Not as they are: scaled, a column, or read again.
    "torch.addmm(row, x, w, beta=2).relu()": None,
    "torch.addmm(row, x, w, alpha=2).relu()": None,
    "torch.addmm(column, x, w).relu()": None,
    "torch.addmm(row, x, w).relu() * row": None,
    "self.bare(x).relu()": None,
}


@pytest.mark.parametrize("body", TAKEN_IN)
def test_bias_of_pytorch_call(body: str, small: None, tmp_path: Path) -> None:
    """Where PyTorch multiplies, its call takes the row in that the reference's call adds."""
    made = planned(GIVEN.text(body), tmp_path / "reference.py").plan
    (step,) = contractions(made)
    assert bias(step) == TAKEN_IN[body]


TRIANGLES = {
    "(square @ square).tril()": (1, 0),
    "torch.triu(square @ square, 2)": (-1, 2),
    "torch.relu((square @ square + 1).tril(-3)) * 2": (1, -3),
    "(lambda u: u.tril() + u.sigmoid().tril())(square @ square)": (1, 0),
    "(lambda u: u.tril() + u.triu())(square @ square)": None,
    "(lambda u: u.tril() + u)(square @ square)": None,
    "(square @ square).relu()": None,
    "square.tril() + square @ square": None,
}


@pytest.mark.parametrize("body", TRIANGLES)
def test_triangle(body: str, small: None, tmp_path: Path) -> None:
    """What of a product matters is known where all that is made of it keeps one triangle."""
    made = planned(GIVEN.text(body), tmp_path / "reference.py").plan
    (step,) = contractions(made)
    assert triangle(step) == TRIANGLES[body]


def test_both_modes(small: None, tmp_path: Path) -> None:
    """In evaluation the dropout is nothing, and in training a call in between."""
    subject = planned(GIVEN.text("self.drop(self.linear(x)).relu()"), tmp_path / "reference.py")
    assert subject.plan.other is not None
    found = {made.graph.training: kernels_of(made) for made in subject.plan.modes}
    assert found == {
        True: ["<linear_add>", "[dropout]", "relu"], False: ["<linear_add_relu>"],
    }  # fmt: skip
    judge(subject, interpret)


def test_command_line(tmp_path: Path) -> None:
    """`explain --matmul library` shows PyTorch's product, `split` ours; no other value is known."""
    path = tmp_path / "reference.py"
    path.write_text(worth("torch.randn(1024, 1024)", body="torch.relu(x @ y)"))
    shown = {}
    for value in ("split", "library", "other"):
        result = CliRunner().invoke(main, ["explain", str(path), "--matmul", value])
        assert result.exit_code == (2 if value == "other" else 0)
        shown[value] = result.output
    assert CliRunner().invoke(main, ["explain", str(path)]).output == shown["split"]
    assert "product matmul_relu" in shown["split"]
    assert "[1024, 1024] x [1024, 1024]" in shown["split"]
    assert "PyTorch aten.matmul.default: " in shown["library"]
    assert "product" not in shown["library"]
