"""Whose turn it is on a GPU: a lock file for each, shared to prepare, exclusive to measure.

While one process measures, no other of these commands touches the GPU, also not one that another
user's shell started; several may prepare at once (draw inputs, compile, warm up). The lock is a
flock: the kernel takes it from a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelnew.measure.child import Report


def lock_file(gpu: str) -> Path:
    """The lock file of the GPU of that UUID, one for all users of the machine."""
    name = re.sub(r"[^\w-]", "_", gpu)
    return Path(tempfile.gettempdir(), f"modelnew-gpu-{name}.lock")


@contextmanager
def hold(lock: str | None, report: Report, *, alone: bool) -> Iterator[None]:
    """Waits for the GPU of that lock file and holds it; the time of waiting is reported."""
    if lock is None:
        yield
        return
    try:
        handle = os.open(lock, os.O_RDONLY)  # another user's may be read, and that is enough
    except FileNotFoundError:
        handle = os.open(lock, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        report({"waiting": True})
        fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        report({"waiting": False})
        yield
    finally:
        os.close(handle)
