"""Gives submodules that forward reads often a name of their own.

`self.model[0][1]` is two calls of Python functions for the indices and one for the attribute, and a
batch normalization reads six attributes of it: over its 27 layers MobileNetV1 spent more time on
them than on launching kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeAlias

Path: TypeAlias = tuple[str, ...]  # (".model", "[0]", "[1]", ".weight")

_STEP = re.compile(r"\.[A-Za-z_]\w*|\[\d+\]|\['[^']*'\]")
_PATH = re.compile(rf"\bself((?:{_STEP.pattern})+)")
INDEX_COST, ATTRIBUTE_COST = 3, 1  # what a step takes, in units of 0.4 us
WORTH = 2


def with_shortcuts(lines: Sequence[str], values: Collection[str]) -> list[str]:
    """The statements `lines` of forward, with those reads bound that are worth it.

    `values` are the texts of tensors: a statement keeps `conv.weight`, which says what it is.
    """
    names = _names(lines, _worthwhile(lines, values))
    bound: set[Path] = set()
    result = []
    for line in lines:
        needed: list[str] = []

        def shortened(found: re.Match[str], needed: list[str] = needed) -> str:
            return _text(_steps(found), names, bound, needed)

        text = _PATH.sub(shortened, line)
        result += [*needed, text]
    return result


def _steps(found: re.Match[str]) -> Path:
    return tuple(_STEP.findall(found[1]))


def _worthwhile(lines: Sequence[str], values: Collection[str]) -> list[Path]:
    """The paths to name, each after those that it begins with."""
    uses = Counter(_steps(found) for line in lines for found in _PATH.finditer(line))
    prefixes = {path[:length] for path in uses for length in range(1, len(path))}
    chosen = []
    for length in range(max(map(len, uses), default=0), 0, -1):
        for path in [p for p in uses if len(p) == length]:
            cost = sum(INDEX_COST if step.startswith("[") else ATTRIBUTE_COST for step in path)
            worth = path in prefixes and (uses[path] - 1) * cost >= WORTH
            if worth and "self" + "".join(path) not in values:
                chosen.append(path)
                uses[path[:-1]] += 1
            else:
                uses[path[:-1]] += uses[path]
    return chosen[::-1]


def _names(lines: Sequence[str], paths: Sequence[Path]) -> dict[Path, str]:
    taken = {word for line in lines for word in re.findall(r"(?<![\w.])\w+", line)}
    names = {}
    for path in paths:
        name = re.sub(r"\W+", "_", "".join(path)).strip("_")
        while name in taken or not name.isidentifier():
            name = f"_{name}" if name[:1].isdigit() else f"{name}_"
        taken.add(name)
        names[path] = name
    return names


def _text(path: Path, names: dict[Path, str], bound: set[Path], needed: list[str]) -> str:
    """How to read `path` by its longest named part, which `needed` binds where it is not yet."""
    for length in range(len(path), 0, -1):
        part = path[:length]
        if part in names:
            if part not in bound:
                bound.add(part)
                needed.append(f"{names[part]} = {_text(part[:-1], names, bound, needed)}{part[-1]}")
            return names[part] + "".join(path[length:])
    return "self" + "".join(path)
