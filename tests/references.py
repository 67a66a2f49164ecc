"""Text of small reference models for tests."""

from __future__ import annotations

import textwrap
from typing import Any


def reference_text(forward: str, inputs: str, init: str = "", n: int = 64) -> str:
    """A reference of one `forward`; its inputs are sized by the module constant `n`."""
    body = [
        "import torch",
        "from torch import nn",
        "import torch.nn.functional as F",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in textwrap.dedent(init).strip().splitlines()),
        *(f"    {line}" for line in textwrap.dedent(forward).strip("\n").splitlines()),
        f"n = {n}",
        f"def get_inputs(): return [{inputs}]",
        "def get_init_inputs(): return []",
    ]
    return "\n".join(body) + "\n"


def namespace(text: str) -> dict[str, Any]:
    """The globals of a file, executed as a module of another name than a solution's."""
    space: dict[str, Any] = {"__name__": "reference"}
    exec(compile(text, "model.py", "exec"), space)
    return space
