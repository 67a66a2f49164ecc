"""The GPU's clock while something is timed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelnew.measure.child import Json

MOVED = 0.03  # share by which the SM clock may differ within one task


@dataclass
class Clocks:
    """The SM clocks read so far, in MHz; none where NVML's Python package is missing."""

    device: torch.device
    sm_mhz: list[int] = field(default_factory=list)
    known: bool = True

    def read(self) -> None:
        """Reads the clock now: right after work, while the GPU has not slowed down to idle."""
        if self.device.type != "cuda" or not self.known:
            return
        try:
            self.sm_mhz.append(int(torch.cuda.clock_rate(self.device)))
        except (ImportError, RuntimeError):
            self.known = False

    def summary(self) -> Json:
        """{"sm_mhz": [lowest, highest]}, empty where the clock is not known."""
        return {"sm_mhz": [min(self.sm_mhz), max(self.sm_mhz)]} if self.sm_mhz else {}

    def warning(self) -> str:
        """A warning when the clock moved, else nothing."""
        if not self.sm_mhz:
            return ""
        low, high = min(self.sm_mhz), max(self.sm_mhz)
        moved = high - low > MOVED * high
        return f"the SM clock moved from {low} to {high} MHz while timing" if moved else ""
