"""Small references, solutions of them, and the faults planted in the solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelnew.measure import child, jobs, verify

POINTWISE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, slope=0.1, name="leaky"):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return torch.where(x > 0, x, x * self.slope)

rows = 12
columns = 40

def get_inputs():
    return [torch.rand(rows, columns) - 0.5]

def get_init_inputs():
    return [0.2]
"""

LAYERS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features, drop=0.25):
        super().__init__()
        self.linear = nn.Linear(features, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))

def get_inputs():
    return [torch.rand(32, 48)]

def get_init_inputs():
    return [48]
"""

POINTWISE_NEW = """
import os
import time
import torch
from torch import nn

_calls = [0]

class ModelNew(nn.Module):
    def __init__(self, slope=0.1, name="leaky"):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        y = torch.where(x > 0, x, x * self.slope)
        {body}
        return y
"""

LAYERS_NEW = LAYERS.split("def get_inputs")[0].replace("class Model(", "class ModelNew(")


def write(folder: Path, reference: str, solution: str) -> tuple[Path, Path]:
    paths = folder / "reference.py", folder / "solution.py"
    for path, text in zip(paths, (reference, solution), strict=True):
        path.write_text(text)
    return paths


def measured(task: str, paths: tuple[Path, Path], timeout_s: float = 100, **options: Any) -> Any:
    """The row of a child process, on the CPU unless `device` says otherwise."""
    make = {"verify": jobs.verify_options, "bench": jobs.bench_options}[task]
    job = jobs.Job(task, *paths, make(**{"device": "cpu", **options}), timeout_s)
    return jobs.row(job, {}, jobs.measure(job, jobs.Place(), {}))


def examine(
    folder: Path, reference: str, solution: str, *groups: str, device: str = "cpu"
) -> dict[str, Any]:
    """The child's work in this process."""
    paths = write(folder, reference, solution)
    payload = {
        "reference": str(paths[0]),
        "solution": str(paths[1]),
        "seeds": 2,
        "device": device,
        "overrides": {},
        "large": True,
        "groups": list(groups or jobs.GROUPS),
    }
    events: list[Any] = []
    answer = verify.child(payload, events.append)
    job = jobs.Job("verify", *paths, jobs.verify_options())
    row = jobs.row(job, {}, answer)
    json.dumps(child.plain(row), allow_nan=False)
    assert [e["check"] for e in events if "check" in e] == row.get("checks", [])
    return row


def wrong(row: dict[str, Any]) -> set[str]:
    return {f"{c['name']} {c['dtype']}" for c in row["checks"] if c["status"] == "wrong"}


def pointwise(body: str) -> str:
    return POINTWISE_NEW.format(body=body)


# Name: (body after y is computed, group of checks, the check that must find it)
FAULTS: dict[str, tuple[str, str, str]] = {
    "off by a thousandth": ("y = y + 1e-3", "own", "own seed 0 float32"),
    "zeros": ("y = y * 0", "own", "own seed 1 float32"),
    "wrong in one type": (
        "y = y * 1.01 if y.dtype == torch.float16 else y",
        "own",
        "own seed 0 float16",
    ),
    "mutates its input": ("x.add_(1)", "behaviour", "untouched float32"),
    "mutates its own input only": (
        "x.add_(1) if x.shape[1] == 40 else x",
        "own",
        "untouched, own inputs float32",
    ),
    "not repeatable": (
        "_calls[0] += 1; y = y * (1 + 1.2e-7 * (_calls[0] % 2))",
        "behaviour",
        "repeatable float32",
    ),
    "odd sizes": (
        "y = torch.cat([y[..., :-1], y[..., -1:] * 0], -1) if y.dim() and y.shape[-1] % 2 else y",
        "sizes",
        "sizes odd (all), normal values bfloat16",
    ),
    "a prime size": (
        "y = y * (y.numel() != 7 * 53)",
        "sizes",
        "sizes prime (all), normal values float32",
    ),
    "one element": (
        "y = y + 1 if y.numel() == 1 and y.dim() else y",
        "sizes",
        "sizes ones (all), normal values float32",
    ),
    "empty": (
        "y = y[0] if len(y.shape) == 2 and not y.shape[0] else y",
        "sizes",
        "sizes empty (first), normal values float32",
    ),
    "empty inside": (
        "y = y.sum(1) if len(y.shape) == 2 and not y.shape[1] else y",
        "sizes",
        "sizes empty last float32",
    ),
    "0-dim": ("y = y.reshape(1) if not y.dim() else y", "sizes", "sizes 0-dim float32"),
    "dies of 0-dim": ("x.shape[0]", "sizes", "sizes 0-dim float32"),
    "strides": ("y = y.contiguous()", "layouts", "layout transposed float32"),
    "shape": ("y = y.reshape(-1)", "own", "own seed 0 float32"),
    "dtype": ("y = y.float()", "own", "own seed 0 bfloat16"),
    "structure": ("y = [y]", "own", "own seed 0 float32"),
    "reads from the storage's start": (
        "y = y * (1 if x.storage_offset() == 0 else 2)",
        "layouts",
        "layout offset float16",
    ),
    "reads a sliced input as dense": (
        "z = x.as_strided(x.shape, (x.shape[1], 1)) if x.stride() == (512, 2) else x; "
        "y = torch.where(z > 0, z, z * self.slope)",
        "layouts",
        "layout sliced last float32",
    ),
    "ignores stride 0": (
        "y = y * (1 + (x.dim() == 2 and x.stride(0) == 0))",
        "layouts",
        "layout expanded float32",
    ),
    "loses NaN": ("y = torch.where(y != y, 0.0, y)", "values", "values nan in input 0 float32"),
    "loses infinity": (
        "y = y.clamp(max=3e38)",
        "values",
        "values inf in input 0 bfloat16",
    ),
    "sign of infinity": ("y = torch.where(y < -3e38, -y, y)", "values", "values -inf in input 0"),
    "sign of zero": ("y = y + 0.0", "values", "values -0.0 in input 0 float32"),
    "flushes denormals": (
        "y = torch.where(y.abs() < 6e-5, 0.0 * y, y) if y.dtype == torch.float16 else y",
        "values",
        "values tiny float16",
    ),
    "one lane of sixteen": (
        "y.view(-1)[5::16] = y.view(-1)[5::16].nan_to_num(posinf=0.0)",
        "values",
        "values inf in input 0 float32",
    ),
    "cancels near zero": ("y = (y + 1) - 1", "values", "values near zero float32"),
    "only right when small": (
        "y = y.clamp(-100, 100)",
        "values",
        "values magnitudes float32",
    ),
    "unwritten element": (
        "z = torch.empty_like(y); z[1:] = y[1:]; y = z",
        "behaviour",
        "poisoned memory float32",
    ),
    "no gradient": ("y = y.detach()", "behaviour", "backward float32"),
    "baked argument": (
        "y = torch.where(x > 0, x, x * 0.2)",
        "constructor",
        "constructor slope: 0.2 to 0.425",
    ),
}


# Name: (text, its replacement, group of checks, the check that must find it)
LAYER_FAULTS = {
    "other order of construction": (
        "self.linear = nn.Linear(features, 24)",
        "nn.Linear(2, 2); self.linear = nn.Linear(features, 24)",
        "state",
        "state ",
    ),
    "another key": (
        "self.drop = nn.Dropout(drop)",
        "self.drop = nn.Dropout(drop); self.extra = nn.Parameter(torch.zeros(1))",
        "state",
        "state ",
    ),
    "frozen parameter": (
        "self.drop = nn.Dropout(drop)",
        "self.drop = nn.Dropout(drop); self.linear.bias.requires_grad_(False)",
        "state",
        "state ",
    ),
    "ignores the scale": (
        "self.norm(self.linear(x))",
        "(self.norm(self.linear(x)) - self.norm.bias) / self.norm.weight",
        "behaviour",
        "eval() float32",
    ),
    "statistics not updated": (
        "self.norm(self.linear(x))",
        "nn.functional.batch_norm(self.linear(x), self.norm.running_mean.clone(), "
        "self.norm.running_var.clone(), self.norm.weight, self.norm.bias, self.training)",
        "behaviour",
        "train() float32",
    ),
    "always trains": (
        "self.norm(self.linear(x))",
        "self.norm.train()(self.linear(x))",
        "behaviour",
        "eval() float32",
    ),
    "no dropout": ("self.drop(", "(", "own", "own seed 0 float32"),
    "loses the gradient of the weights": (
        "self.linear(x)",
        "nn.functional.linear(x, self.linear.weight.detach(), self.linear.bias)",
        "behaviour",
        "backward float32",
    ),
}
