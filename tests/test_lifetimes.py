"""forward lets go of what it no longer needs: no more memory than the reference takes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelnew.pipeline import generate
from modelnew.render import Options

# Library calls alone, so that the file runs on the CPU: forward's body, __init__, and whether
# keeping all results would raise the peak.
MODELS = {
    "chain": (
        "for layer in self.layers: x = layer(x)\nreturn x",
        "self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(9))",
        True,
    ),
    "branches": (
        "for _ in range(4): x = F.avg_pool2d(self.a(torch.cat([self.b(x), x], 1)), 1)\nreturn x",
        "self.a, self.b = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 1)",
        True,
    ),
    "kept to the end": (
        "outs = []\nfor _ in range(4):\n    x = self.a(F.max_pool2d(x, 1))\n    outs.append(x)\n"
        "return outs",
        "self.a = nn.Conv2d(8, 8, 1)",
        True,
    ),
    "views": (
        "for _ in range(5):\n    y = x.flatten(2).transpose(1, 2).reshape(16, 16, -1)\n"
        "    x = torch.softmax(y, 1).view(8, 16, 8, 4).permute(1, 0, 2, 3).reshape(x.shape)\n"
        "return x",
        "",
        True,
    ),
    "lists": (
        "for _ in range(5):\n    a, b = torch.cat([x, x], 1).chunk(2, 1)\n"
        "    x = torch.cumsum(torch.cat([b, a], 2), 2)[:, :, 8:]\nreturn x",
        "",
        True,
    ),
    "written in place": (
        "for _ in range(5):\n    x = F.max_pool2d(x, 1)\n    x[:, 0].copy_(x[:, 1])\n"
        "    x = torch.cumsum(x, 1)\nreturn x",
        "",
        True,
    ),
    "lstm": (
        "for _ in range(3): x = self.m(x.flatten(0, 1))[0].view(x.shape)\nreturn x",
        "self.m = nn.LSTM(8, 8)",
        True,
    ),
    "one step": ("return torch.softmax(x, 1)", "", False),
}


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that live in results of ATen calls at once."""

    def __init__(self, given: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.own = {t.untyped_storage().data_ptr() for t in given}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.alive[id(tensor)] = tensor
        storages = [tensor.untyped_storage() for tensor in list(self.alive.values())]
        sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self.own}
        self.bytes = max(self.bytes, sum(sizes.values()))
        return result


def _peak(model: torch.nn.Module, inputs: list[torch.Tensor]) -> int:
    given = [*model.parameters(), *model.buffers(), *inputs]
    with torch.inference_mode(), _Peak(given) as seen:
        model(*inputs)
    return seen.bytes


@pytest.mark.parametrize("name", MODELS)
def test_memory(name: str, tmp_path: Path) -> None:
    forward, init, grows = MODELS[name]
    body = "def forward(self, x):\n" + "\n".join(f"    {line}" for line in forward.splitlines())
    text = references.reference_text(body, "torch.randn(4, 8, n, 8)", init, n=16)
    path = tmp_path / "reference.py"
    path.write_text(text)
    reference = references.namespace(text)
    inputs = reference["get_inputs"]()
    solution = generate(path, {}, Options()).text
    keeping = re.sub(r"^ +del .*\n", "", solution, flags=re.MULTILINE)
    peak: Callable[[Any], int] = lambda model: _peak(model(), inputs)  # noqa: E731
    theirs, ours = peak(reference["Model"]), peak(references.namespace(solution)["ModelNew"])
    assert ours <= 1.06 * theirs
    assert (peak(references.namespace(keeping)["ModelNew"]) > 1.3 * theirs) is grows
    assert ("del " in solution) is grows
