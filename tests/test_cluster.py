"""Runs on a Ray cluster: a local one, the build step included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from planted import POINTWISE, pointwise

import generate

pytest.importorskip("ray")

# Compiles a C++ extension, as solutions compile their kernels.
BUILT = """
from torch.utils.cpp_extension import load_inline
_cpp = load_inline(
    name="modelnew_test_NAME", functions=["one"], no_implicit_headers=True,
    cpp_sources='''
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/Exceptions.h>
int one() { return 1; }
''',
)
"""
# Its first run takes the worker down; the mark tells the second one.
LOST = """
import os, signal
if not os.path.exists({mark!r}):
    open({mark!r}, "w").close()
    parent = os.getppid()
    for _ in range(8):  # the fork server, then the worker
        name = open(f"/proc/{{parent}}/cmdline").read()
        if "ray::" in name:
            os.kill(parent, signal.SIGKILL)
        parent = int(open(f"/proc/{{parent}}/stat").read().rsplit(")", 1)[1].split()[1])
    os.kill(os.getppid(), signal.SIGKILL)
"""


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads(path.read_text())
    return {Path(row["reference"]).stem: row for row in rows}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_same_rows_with_and_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    texts = {
        "built": BUILT.replace("NAME", "built") + pointwise(""),
        "broken": BUILT.replace("NAME", "broken").replace("return 1", "retur 1") + pointwise(""),
        "lost": LOST.format(mark=str(tmp_path / "mark")) + pointwise(""),
    }
    for folder in ("r", "s"):
        (tmp_path / folder).mkdir()
    for name, text in texts.items():
        (tmp_path / "r" / f"{name}.py").write_text(POINTWISE)
        (tmp_path / "s" / f"{name}.py").write_text(text)
    arguments = [
        "verify", str(tmp_path / "r"), "-o", str(tmp_path / "s"), "--device", "cpu",
        "--only", "state", "--only", "own", "--seeds", "1", "--json",
    ]  # fmt: skip
    found = []
    for name, extra in (("ray", ["--ray", "local"]), ("here", [])):
        path = tmp_path / f"{name}.json"
        done = CliRunner().invoke(generate.main, [*arguments, str(path), *extra])
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code == 1, done.output
        found.append(rows_of(path))
    with_ray, without = found
    assert (tmp_path / "mark").exists()
    assert list(with_ray) == list(without) == sorted(texts)
    states = {name: row["status"] for name, row in with_ray.items()}
    assert states == {"broken": "error", "built": "ok", "lost": "ok"}
    for name, row in with_ray.items():
        other = without[name]
        assert set(row) == set(other)
        for key in set(row) - {"message", "seconds", "build_seconds", "load_seconds"}:
            assert row[key] == other[key], (name, key)
    # Compiled by the build step, the extension is there when the task is measured. What that step
    # says of its time does not show it: it may be a second try, after a worker was lost.
    assert list((tmp_path / "extensions").rglob("modelnew_test_built*.so"))
    assert with_ray["built"]["load_seconds"] < 5
    assert with_ray["built"]["build_seconds"] > 0


def test_without_a_cluster_the_command_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(POINTWISE)
    arguments = ["verify", str(tmp_path / "model.py"), "-o", str(tmp_path), "--ray", "auto"]
    done = CliRunner().invoke(generate.main, [*arguments, "--device", "cpu"])
    assert done.exit_code == 1
    assert "--ray auto: ConnectionError" in done.stderr
