"""Submodules that forward reads often get a name of their own (modelnew/shortcuts.py)."""

from __future__ import annotations

import pytest

from modelnew.shortcuts import with_shortcuts

VALUES = ["self.net[0].weight", "self.net[0].bias", "self.table"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # A weight and a bias stay as people write them; what costs more is bound before its use.
        (["a = f(x, self.fc.weight, self.fc.bias)"], ["a = f(x, self.fc.weight, self.fc.bias)"]),
        (
            ["a = f(x, self.net[0].weight)", "b = f(a, self.net[0].bias)"],
            ["net_0 = self.net[0]", "a = f(x, net_0.weight)", "b = f(a, net_0.bias)"],
        ),
        (
            ["a = g(x, self.bn.weight, self.bn.bias, self.bn.eps)"],
            ["bn = self.bn", "a = g(x, bn.weight, bn.bias, bn.eps)"],
        ),
        # One name leads on to the next, and each is bound once.
        (
            ["a = f(self.net[0]['k'].w, self.net[0]['k'].b)", "b = f(self.net[1].w, self.net[1].b)",
             "c = f(self.net[2].w, self.net[2].b)"],
            ["net = self.net", "net_0_k = net[0]['k']", "a = f(net_0_k.w, net_0_k.b)",
             "net_1 = net[1]", "b = f(net_1.w, net_1.b)", "net_2 = net[2]",
             "c = f(net_2.w, net_2.b)"],
        ),
        # Names of the lines stay theirs, and a tensor's own attributes are read of the tensor.
        (
            ["bn = g(x, self.bn.weight, self.bn.bias, self.bn.eps)", "return bn"],
            ["bn_ = self.bn", "bn = g(x, bn_.weight, bn_.bias, bn_.eps)", "return bn"],
        ),
        (
            ["a = self.table.view(self.table.shape, self.table.dtype, self.table.device)"],
            ["a = self.table.view(self.table.shape, self.table.dtype, self.table.device)"],
        ),
        (["return myself.a[0].b + myself.a[0].c"], ["return myself.a[0].b + myself.a[0].c"]),
        ([], []),
    ],
)  # fmt: skip
def test_lines(lines: list[str], expected: list[str]) -> None:
    assert with_shortcuts(lines, VALUES) == expected
