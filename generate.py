#!/usr/bin/env python3
"""Reads PyTorch reference models and writes self-contained CUDA files with `class ModelNew`.

Exit status: 0 ok, 1 something could not be generated or was wrong, 2 usage, 3 a stale file.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from modelnew import __version__
from modelnew.files import replace_file

STALE = 3

paths_argument = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
out_option = click.option(
    "-o", "--out", default="solutions", show_default=True, type=click.Path(path_type=Path),
    help="Folder of the solution files.",
)  # fmt: skip
set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="Replaces a module constant of the reference, such as batch_size=16.",
)  # fmt: skip
json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Writes the rows here."
)


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Generates, explains, verifies and times ModelNew files."""


@main.command()
@paths_argument
@out_option
@set_option
@click.option("--check", is_flag=True, help="Writes nothing; fails where a file is stale.")
@click.option("--diff", is_flag=True, help="Writes nothing; shows what would change.")
@click.option("--dtypes", default="float32,float16,bfloat16", show_default=True)
@click.option("--target", default="h200", show_default=True, help="GPU to tune launches for.")
def render(
    paths: Sequence[Path], out: Path, settings: Sequence[str], check: bool, diff: bool,
    dtypes: str, target: str,
) -> None:  # fmt: skip
    """Writes a solution file for every reference model."""
    from modelnew import pipeline
    from modelnew.render import options

    overrides, chosen = _settings(settings), _usage(lambda: options(dtypes, target))
    files, taken = _references(paths), set[str]()
    failed = stale = bare = 0
    for path in files:
        start = time.perf_counter()
        if path.name in taken:
            failed += _fail(f"{path}: another reference of this call has this name: rename one")
            continue
        taken.add(path.name)
        made = _attempt(path, partial(pipeline.generate, path, overrides, chosen))
        if made is None:
            failed += 1
            continue
        kernels = len(made.plan.kernels)
        bare += not kernels
        what = f"{kernels} kernel{'s' * (kernels != 1)}" if kernels else "no kernel, all PyTorch"
        if check or diff:
            stale += _compare(out / path.name, made.text, diff)
            continue
        if _attempt(path, partial(replace_file, out / path.name, made.text)) is None:
            failed += 1
            continue
        click.echo(f"{out / path.name}: {what}, {time.perf_counter() - start:.1f} s")
    rest = f", {bare} without a kernel" if bare else ""
    click.echo(f"{len(files) - failed} of {len(files)} references rendered{rest}", err=True)
    sys.exit(1 if failed else STALE if stale and check else 0)


@main.command()
@paths_argument
@set_option
def explain(paths: Sequence[Path], settings: Sequence[str]) -> None:
    """Shows the plan: a row a region, and what stayed a library call and why."""
    from modelnew import pipeline
    from modelnew.explain import explain as text

    overrides, failed = _settings(settings), 0
    for path in _references(paths):
        made = _attempt(path, partial(pipeline.planned, path, overrides))
        failed += made is None
        if made is not None:
            click.echo(text(*made))
    sys.exit(1 if failed else 0)


@main.command()
@paths_argument
@out_option
@set_option
@json_option
@click.option("--seeds", default=3, show_default=True, help="Random inputs a dtype.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds a solution may take.")
def verify(
    paths: Sequence[Path], out: Path, settings: Sequence[str], json_path: Path | None, seeds: int,
    timeout: float,
) -> None:  # fmt: skip
    """Checks every solution against its reference on a GPU."""
    from modelnew.measure import ledger
    from modelnew.measure.verify import verify as measure

    overrides = _settings(settings)

    def row(path: Path) -> dict[str, Any]:
        solution = out / path.name
        result = measure(path, solution, seeds=seeds, timeout_s=timeout, overrides=overrides)
        if not overrides:  # a solution that fails loses its entry
            ledger.record_verification(out / ledger.NAME, result, out)
        return result

    _measure(_references(paths), out, json_path, row, _verified_line)


@main.command()
@paths_argument
@out_option
@set_option
@json_option
@click.option("--max-autotune", is_flag=True, help="Also torch.compile(mode='max-autotune').")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds a solution may take.")
def bench(
    paths: Sequence[Path], out: Path, settings: Sequence[str], json_path: Path | None,
    max_autotune: bool, timeout: float,
) -> None:  # fmt: skip
    """Times every solution beside eager PyTorch and torch.compile on a GPU."""
    from modelnew import pipeline
    from modelnew.measure import ledger
    from modelnew.measure.bench import bench as measure

    overrides = _settings(settings)

    def row(path: Path) -> dict[str, Any]:
        made = _attempt(path, partial(pipeline.planned, path, overrides))
        if made is None:
            return {"reference": str(path), "status": "error", "message": "cannot be generated"}
        result = measure(
            path, out / path.name, bytes_moved=made[1].bytes, timeout_s=timeout,
            overrides=overrides, max_autotune=max_autotune,
        )  # fmt: skip
        if result["status"] == "ok" and not overrides:
            ledger.record_speed(out / ledger.NAME, result, out)
        return result

    _measure(_references(paths), out, json_path, row, _timed_line)


@main.command()
def doctor() -> None:
    """Says what this machine lacks to build and run a solution, and how to get it."""
    from modelnew.doctor import diagnose

    findings = diagnose()
    for finding in findings:
        click.echo(f"{'ok  ' if finding.ok else 'MISS'}  {finding.name}: {finding.found}")
        if not finding.ok:
            click.echo(f"      {finding.advice}")
    sys.exit(1 if any(finding.necessary and not finding.ok for finding in findings) else 0)


def _settings(settings: Iterable[str]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for name, sign, _ in pairs:
        if not sign or not name.strip().isidentifier():
            raise click.UsageError(f"--set {name}: write it as NAME=VALUE")
    return {name.strip(): value for name, _, value in pairs}


def _references(paths: Sequence[Path]) -> list[Path]:
    from modelnew.pipeline import reference_files

    files: list[Path] = _usage(partial(reference_files, paths))
    return files


def _usage(make: Callable[[], Any]) -> Any:
    from modelnew.ir import ModelNewError

    try:
        return make()
    except ModelNewError as error:
        raise click.UsageError(str(error)) from None


def _attempt(path: Path, make: Callable[[], Any]) -> Any:
    """The result of `make`, or None after its error was shown: one file never stops the others."""
    from modelnew.ir import ModelNewError

    try:
        return make()
    except ModelNewError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{path}: {error}")
    except Exception as error:
        if os.environ.get("MODELNEW_DEBUG"):
            raise
        _fail(
            f"{path}: internal error, please report it: {type(error).__name__}: {error} "
            "(MODELNEW_DEBUG=1 shows where)"
        )
    return None


def _fail(message: str) -> int:
    click.echo(click.style("error: ", fg="red") + message, err=True)
    return 1


def _compare(path: Path, text: str, show: bool) -> int:
    """1 when the file is stale or missing."""
    old = path.read_bytes() if path.exists() else b""
    if old == text.encode():
        return 0
    click.echo(f"{path}: {'stale' if old else 'missing'}", err=True)
    if show:
        before = old.decode(errors="replace").splitlines(True)
        after = text.splitlines(True)
        lines = difflib.unified_diff(before, after, str(path), f"{path} (rendered)")
        click.echo("".join(lines), nl=False)
    return 1


def _measure(
    files: Iterable[Path], out: Path, json_path: Path | None,
    row: Callable[[Path], dict[str, Any]], line: Callable[[dict[str, Any]], str],
) -> None:  # fmt: skip
    """Measures one file after the other; the rows so far are on disk after each."""
    rows: list[dict[str, Any]] = []
    for path in files:
        if not (out / path.name).exists():
            result = {"reference": str(path), "status": "error", "message": "not rendered yet"}
        else:
            result = row(path)
        rows.append(result)
        click.echo(f"{path.stem:34} {line(result)}")
        if json_path is not None:
            replace_file(json_path, json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if any(result["status"] != "ok" for result in rows) else 0)


def _verified_line(row: dict[str, Any]) -> str:
    if row["status"] in ("ok", "wrong"):
        wrong = [check for check in row["checks"] if check["status"] == "wrong"]
        done = sum(check["status"] == "ok" for check in row["checks"])
        skipped = sum(check["status"] == "skipped" for check in row["checks"])
        text = f"{row['status']:6} {done} checks, {skipped} skipped"
        ratio = row.get("max_error_ratio")
        text += "" if ratio is None else f", error {ratio:.2g} of the allowed"
        return "\n".join([text, *(f"    {c['name']}: {c['message']}" for c in wrong)])
    return f"{row['status']}: {row.get('message', '')}"


def _timed_line(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row.get('message', '')}"
    times = [f"{row['solution_ms']:9.4f} ms", f"eager {row['eager_ms']:9.4f}"]
    if row.get("compile_ms"):
        times.append(f"compile {row['compile_ms']:9.4f}")
    if row.get("roofline_ratio"):
        times.append(f"{row['roofline_ratio']:.3f} of the roofline")
    return "  ".join(times)


if __name__ == "__main__":
    main()
