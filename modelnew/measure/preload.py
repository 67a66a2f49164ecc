"""Imported once by the process that children are forked from; what cannot be imported here fails
where it is used. Nothing of it may open a GPU: a fork could not use it."""

from __future__ import annotations

import importlib
from contextlib import suppress

for name in (
    "torch._inductor.compile_fx", "modelnew.measure.build", "modelnew.measure.verify",
    "modelnew.measure.bench", "modelnew.measure.sanitize", "modelnew.measure.kernelbench",
):  # fmt: skip
    with suppress(Exception):
        importlib.import_module(name)
