"""The operators in a table for the README: those with rows by group, those without by reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelnew.canonical import SYNONYMS
from modelnew.ops import activations, arithmetic, logic, special, unary
from modelnew.ops.left_out import LEFT_OUT

_GROUPS = {
    "one operand": unary,
    "arithmetic": arithmetic,
    "activations": activations,
    "special functions": special,
    "comparisons, logic, masks": logic,
}


def table() -> str:
    """Markdown: a line a group, and one for those that are left out."""
    lines = ["| what | operators |", "|---|---|"]
    for group, module in _GROUPS.items():
        lines.append(f"| {group} | {_listed(row.name for row in module.ROWS)} |")
    lines.append(f"| other names of these | {_listed(SYNONYMS)} |")
    reasons: dict[str, list[str]] = {}
    for name, reason in LEFT_OUT.items():
        reasons.setdefault(reason, []).append(name)
    lines.append(f"| left out | {_reasons(reasons)} |")
    return "\n".join(lines)


def _listed(names: Iterable[str]) -> str:
    """Names between commas; Markdown would take the underscores of __and__ for bold type."""
    return ", ".join(f"`{name}`" if name.startswith("_") else name for name in names)


def _reasons(reasons: Mapping[str, list[str]]) -> str:
    parts = []
    for reason, names in reasons.items():
        shown = [name.removeprefix("nn.functional.").removeprefix("special.") for name in names]
        parts.append(f"{_listed(shown)} ({reason})")
    return "; ".join(parts)
