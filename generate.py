#!/usr/bin/env python3
"""Reads PyTorch reference models and writes self-contained CUDA files with `class ModelNew`.

Exit status: 0 ok, 1 something could not be generated or was wrong, 2 usage, 3 a stale file.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelnew import __version__
from modelnew.files import replace_file
from modelnew.ir import ModelNewError
from modelnew.measure.child import Json
from modelnew.measure.jobs import GROUPS, Job, cores

if TYPE_CHECKING:
    from rich.progress import Progress

    from modelnew.measure.runner import Executor

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
algebra_option = click.option(
    "--algebra", is_flag=True,
    help="Also rewrites what is the same in real arithmetic, such as a sum of a product as a "
    "product of sums; the file says so, and its results are reported apart.",
)  # fmt: skip
matmul_option = click.option(
    "--matmul", type=click.Choice(["split", "library"]), default="split", show_default=True,
    help="Large products: on tensor cores with what follows them in one kernel, those of float32 "
    "by split float16 products, or PyTorch's.",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What verify and bench have in common: the files, and where and how to measure them."""

    files: list[Path]
    out: Path
    overrides: dict[str, str]
    json_path: Path | None
    resume: bool
    retry: bool
    timeout: float
    builders: int
    per_gpu: int | None
    ray: str | None
    device: str

    def executor(self, todo: Sequence[Job], task: str) -> Executor:
        """Where the jobs run. Raises ModelNewError where they cannot."""
        from modelnew.measure import devices, runner

        if self.ray is not None:
            from modelnew.measure.cluster import Cluster

            return Cluster(self.ray, gpus=self.device == "cuda")
        gpus = [devices.Gpu("", self.device, "", 0)]
        if self.device == "cuda":
            gpus = devices.visible()
        preparing = self.per_gpu or (min(g.preparing for g in gpus) if task == "bench" else 1)
        builders = max(1, min(self.builders, len(todo)))
        environment = runner.environment(gpus, self.builders // builders)
        return runner.Local(gpus, builders, preparing, environment)


MEASURING_OPTIONS = (
    paths_argument,
    out_option,
    set_option,
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path),
        help="Writes a row a reference here, as they come.",
    ),
    click.option(
        "--resume", is_flag=True,
        help="Keeps the rows in --json of the same solutions, measured with the same options.",
    ),
    click.option("--retry", is_flag=True, help="With --resume: not those without an answer."),
    click.option(
        "--timeout", default=600.0, show_default=True, help="Seconds a solution may take."
    ),
    click.option(
        "-j", "--jobs", "builders", default=cores(), type=click.IntRange(1),
        show_default="all cores", help="Builds at a time.",
    ),
    click.option(
        "--per-gpu", type=click.IntRange(1),
        help="Processes that prepare on each GPU at a time, of which one measures  [default: by "
        "its memory up to 8; 1 for verify]",
    ),
    click.option("--ray", metavar="ADDRESS", help="Runs on a Ray cluster (auto: this one)."),
    click.option("--device", default="cuda", hidden=True),
)  # fmt: skip


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of verify and bench, which it gets as one Run."""

    @wraps(command)
    def wrapped(
        paths: Sequence[Path], out: Path, settings: Sequence[str], json_path: Path | None,
        resume: bool, retry: bool, timeout: float, builders: int, per_gpu: int | None,
        ray: str | None, device: str, **own: Any,
    ) -> None:  # fmt: skip
        if resume and json_path is None:
            raise click.UsageError("--resume needs --json FILE, where the rows are")
        run = Run(
            _references(paths), out, _settings(settings), json_path, resume, retry, timeout,
            builders, per_gpu, ray, device,
        )  # fmt: skip
        command(run, **own)

    for option in reversed(MEASURING_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


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
@algebra_option
@matmul_option
def render(
    paths: Sequence[Path], out: Path, settings: Sequence[str], check: bool, diff: bool,
    dtypes: str, target: str, algebra: bool, matmul: str,
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
        make = partial(pipeline.generate, path, overrides, chosen, algebra=algebra,
                       matmul=matmul)  # fmt: skip
        made = _attempt(path, make)
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
@algebra_option
@matmul_option
def explain(paths: Sequence[Path], settings: Sequence[str], algebra: bool, matmul: str) -> None:
    """Shows the plan: a row a region, and what stayed a library call and why."""
    from modelnew import pipeline
    from modelnew.explain import explain as text

    overrides, failed = _settings(settings), 0
    for path in _references(paths):
        make = partial(pipeline.planned, path, overrides, algebra=algebra, matmul=matmul)
        made = _attempt(path, make)
        failed += made is None
        if made is not None:
            click.echo(text(*made))
    sys.exit(1 if failed else 0)


@main.command()
@measuring
@click.option("--seeds", default=3, show_default=True, help="Random inputs a dtype.")
@click.option(
    "--only", multiple=True, type=click.Choice(GROUPS),
    help="Only this group of checks (several times for several); the row is then incomplete.",
)  # fmt: skip
@click.option("--sanitize", is_flag=True, help="Also under compute-sanitizer: reduce by --set.")
@click.option(
    "--kernelbench", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="Also the verdict of the KernelBench checkout in DIR.",
)  # fmt: skip
def verify(
    run: Run, seeds: int, only: Sequence[str], sanitize: bool, kernelbench: Path | None
) -> None:
    """Checks every solution against its reference on a GPU."""
    from modelnew.measure import jobs, ledger

    if sanitize and not jobs.sanitizer_found():
        raise click.UsageError("--sanitize: compute-sanitizer (CUDA toolkit) is not on PATH")
    if kernelbench and run.overrides:
        raise click.UsageError("--kernelbench evaluates a file as it is: leave --set out")
    options = jobs.verify_options(
        seeds=seeds, device=run.device, overrides=run.overrides, groups=only or GROUPS,
        sanitize=sanitize, kernelbench=kernelbench,
    )  # fmt: skip

    def record(row: Json) -> None:  # a solution that fails loses its entry
        if row["task"] == "verify" and not run.overrides and not only:
            ledger.record_verification(run.out / ledger.NAME, row, run.out)

    _measure(run, "verify", options, record, _verified_line)


@main.command()
@measuring
@click.option("--no-compile", is_flag=True, help="Without torch.compile.")
@click.option("--max-autotune", is_flag=True, help="Also torch.compile(mode='max-autotune').")
@click.option("--cuda-graph", is_flag=True, help="Also eager PyTorch replayed as a CUDA graph.")
@click.option("--seconds", default=1.5, show_default=True, help="Of timed calls a candidate.")
def bench(run: Run, no_compile: bool, max_autotune: bool, cuda_graph: bool, seconds: float) -> None:
    """Times every solution beside eager PyTorch and torch.compile on a GPU."""
    from modelnew.measure import jobs, ledger

    options = jobs.bench_options(
        seconds=seconds, device=run.device, overrides=run.overrides, compiled=not no_compile,
        max_autotune=max_autotune, cuda_graph=cuda_graph,
    )  # fmt: skip

    def record(row: Json) -> None:
        if row["status"] == "ok" and not run.overrides:
            ledger.record_speed(run.out / ledger.NAME, row, run.out)

    _measure(run, "bench", options, record, _timed_line)


@main.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path),
    help="The file to write; Markdown without it goes to standard output.",
)  # fmt: skip
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "md", "png"]),
    help="A page, Markdown tables or the headline chart  [default: by the name of --out]",
)
def report(results: Sequence[Path], out: Path | None, form: str | None) -> None:
    """Writes the report of result files of verify and bench."""
    from modelnew.measure import report as reports
    from modelnew.measure.results import load

    form = form or (out.suffix.lstrip(".") if out else "md")
    if form not in ("html", "md", "png"):
        raise click.UsageError(f"{out}: say --format html, md or png")
    if out is None and form != "md":
        raise click.UsageError(f"--format {form}: say where to write it by -o FILE")

    def make() -> bytes:
        rows = load(results)
        if form == "png":
            return reports.headline_png(rows)
        return (reports.html(rows) if form == "html" else reports.markdown(rows)).encode()

    content = _attempt(out or Path("-"), make)
    if content is None:
        sys.exit(1)
    if out is None:
        click.echo(content.decode(), nl=False)
    elif _attempt(out, partial(replace_file, out, content)) is None:
        sys.exit(1)


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
    from modelnew.files import reference_files

    files: list[Path] = _usage(partial(reference_files, paths))
    return files


def _usage(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ModelNewError as error:
        raise click.UsageError(str(error)) from None


def _attempt(path: Path, make: Callable[[], Any]) -> Any:
    """The result of `make`, or None after its error was shown: one file never stops the others."""
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


# --- verify and bench ----------------------------------------------------------------------------


def _measure(
    run: Run, task: str, options: Json, record: Callable[[Json], None], line: Callable[[Json], str]
) -> None:
    """Measures every file; the rows so far are on disk after each, also after Ctrl-C."""
    from modelnew.measure.results import Results, kept
    from modelnew.measure.runner import run as measure

    todo = [Job(task, path, run.out / path.name, options, run.timeout) for path in run.files]
    old: list[Json] = []
    if run.resume and run.json_path is not None:
        old = _usage(partial(kept, run.json_path, todo, retry=run.retry))
    done = {(row["task"], row["reference"]) for row in old}
    left = [job for job in todo if job.key not in done]
    results = Results(run.json_path, todo, old)
    failed = sum(row["status"] != "ok" for row in old)
    with _progress(len(todo), len(todo) - len(left), failed) as bar, _terminated_as_interrupted():

        def deliver(rows: list[Json]) -> None:
            for row in rows:
                record(row)
                _show(bar, row, line(row) if row["task"] == task else f"DISAGREE {row['message']}")
            results.add(*rows)

        try:
            if left:
                measure(left, run.executor(left, task), deliver)
        except ModelNewError as error:
            sys.exit(_fail(str(error)))
        except KeyboardInterrupt:
            kept_in = f"; --resume goes on from {run.json_path}" if run.json_path else ""
            sys.exit(_fail(f"interrupted{kept_in}"))
    sys.exit(1 if bar.tasks[0].fields["failed"] else 0)


def _show(bar: Progress, row: Json, text: str) -> None:
    """A line for a row; a disagreement counts as failed, but not as a task of its own."""
    task = bar.tasks[0]
    bad = task.fields["failed"] + (row["status"] != "ok")
    bar.update(task.id, advance=row["task"] != "disagreement", failed=bad)
    total = f"{task.total:.0f}"
    place = f"{task.completed:{len(total)}.0f}/{total}"
    algebra = "with algebra: " if row.get("algebra") else ""
    text = f"{place} {Path(row['reference']).stem:34} {algebra}{text}"
    if sys.stdout.isatty() and not bar.disable:
        bar.console.print(text, markup=False, highlight=False, soft_wrap=True)  # above the bar
    else:
        click.echo(text)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress(total: int, completed: int, failed: int) -> Progress:
    """A bar on a terminal's standard error; nothing where it would only fill a log."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(), TextColumn("elapsed"), TimeRemainingColumn(), TextColumn("left"),
        console=console, disable=not console.is_terminal, redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip
    bar.add_task("", total=total, completed=completed, failed=failed)
    return bar


def _verified_line(row: dict[str, Any]) -> str:
    if row["status"] in ("ok", "wrong"):
        wrong = [check for check in row["checks"] if check["status"] == "wrong"]
        counts = row["check_counts"]
        text = f"{row['status']:6} {counts.get('ok', 0)} checks, {counts.get('skipped', 0)} skipped"
        ratio = row.get("max_error_ratio")
        text += "" if ratio is None else f", error {ratio:.2g} of the allowed"
        text += f"; degenerate: {row['degenerate'][0]}" if row["degenerate"] else ""
        theirs = row.get("kernelbench")
        if theirs:
            said = {True: "right", False: "wrong"}
            text += f"; KernelBench: {said.get(theirs.get('correct'), theirs['message'])}"
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
    doubts = [f"warning: {text}" for text in row["warnings"]]
    doubts += [f"{name} failed: {why.splitlines()[0]}" for name, why in row["messages"].items()]
    return "\n    ".join(["  ".join(times), *doubts])


if __name__ == "__main__":
    main()
