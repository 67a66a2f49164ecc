"""Breaks lines of generated code that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from modelnew.formula import WIDTH

OPERATORS = (" + ", " - ", " * ")


def fold(text: str) -> str:
    """Breaks code lines of over 100 columns after commas inside their outermost brackets.

    A statement of C++ without such a comma is broken after its assignment, then before operators.
    """
    return "\n".join(piece for line in text.split("\n") for piece in _folded(line))


def _folded(line: str) -> list[str]:
    indent = len(line) - len(line.lstrip())
    if len(line) <= WIDTH or line.lstrip().startswith(("//", "#")):
        return [line]
    commas = [at for at, depth in _depths(line) if depth and line.startswith(", ", at)]
    if commas:
        # What follows stays inside the brackets, so it may itself be folded at any comma.
        cut = commas[-1] + 1
        return [line[:cut], *_pieces(" " * (indent + 4) + line[cut:].strip(), _last_comma)]
    target, equals, value = line.partition(" = ")
    if equals and line.endswith(";"):
        return [f"{target} =", *_pieces(" " * (indent + 4) + value, _last_operator)]
    return [line]


def _depths(line: str) -> Iterator[tuple[int, int]]:
    """The columns that may end a line, unless in a string, each with the brackets open there."""
    depth, quoted = 0, False
    for column, character in enumerate(line[:WIDTH]):
        quoted ^= character == '"' and line[column - 1] != "\\"
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
            yield column, depth


def _pieces(line: str, last: Callable[[str], int]) -> list[str]:
    """`line` cut at the last place that `last` allows, 0 for none, and so on."""
    cut = last(line) if len(line) > WIDTH else 0
    if not cut:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return [line[:cut], *_pieces(indent + line[cut + 1 :], last)]


def _last_comma(line: str) -> int:
    return max(
        (at + 1 for at, _ in _depths(line[: WIDTH - 1]) if line[at : at + 2] == ", "), default=0
    )


def _last_operator(line: str) -> int:
    outside = (at for at, depth in _depths(line) if not depth)
    return max((at for at in outside if line[at : at + 3] in OPERATORS), default=0)
