"""The visible GPUs, asked for in a child so that the asking process never opens one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from modelnew.ir import ModelNewError
from modelnew.measure.child import Json, Limits, Report, run_child

TIMEOUT_S = 120.0
# What a prepared process holds while it waits: its inputs, up to 17 GB in KernelBench but 2 GB in
# most tasks. One that finds no memory is measured again at the end, alone.
MEMORY_EACH = 16 << 30


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. `id` is what CUDA_VISIBLE_DEVICES calls it; memory is in bytes."""

    id: str
    name: str
    capability: str
    memory: int
    uuid: str = ""

    @property
    def preparing(self) -> int:
        """How many processes may prepare on it at a time."""
        return max(1, min(8, self.memory // MEMORY_EACH))


def visible() -> list[Gpu]:
    """The visible GPUs in their order. Raises ModelNewError when there is none."""
    answer = run_child("devices", {}, Limits(TIMEOUT_S))
    if answer["status"] != "ok":
        raise ModelNewError(f"no GPU can be used ({answer['message']}): python generate.py doctor")
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in asked.split(",")] if asked else None
    return [
        Gpu(names[i] if names else str(i), **found) for i, found in enumerate(answer["devices"])
    ]


def child(payload: Json, report: Report) -> Json:
    """Names the GPUs; called in the child process."""
    import torch

    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        return {"status": "error", "message": why}
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"{about.major}.{about.minor}"
        found.append(
            {
                "name": about.name,
                "capability": capability,
                "memory": about.total_memory,
                "uuid": str(getattr(about, "uuid", index)),
            }
        )
    return {"status": "ok", "devices": found}
