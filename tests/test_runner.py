"""Runs of many jobs: failures of every kind are rows, results survive, nothing is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from planted import POINTWISE, pointwise

import generate
from modelnew.ir import ModelNewError
from modelnew.measure import devices, results, runner
from modelnew.measure.child import Limits, run_child
from modelnew.measure.jobs import Job, Place, bench_options, verify_options
from modelnew.measure.turn import lock_file

ROOT = Path(__file__).resolve().parent.parent
BROKEN = """
from torch.utils.cpp_extension import load_inline
load_inline(
    name="modelnew_test_broken", cpp_sources="int f( {", functions=["f"], no_implicit_headers=True
)
"""
BODIES = {
    "abort": "os.abort()",
    "fine": "",
    "hang": "time.sleep(1000)",
    "memory": "torch.empty(1 << 60)",
    "wrong": "y = y * 1.1",
}


def jobs_of(folder: Path, count: int, task: str = "bench") -> list[Job]:
    """Jobs with a solution file each."""
    options = {"bench": bench_options, "verify": verify_options}[task]()
    folder.mkdir(exist_ok=True)
    made = [Job(task, Path(f"r/{i}.py"), folder / f"{i}.py", options) for i in range(count)]
    for job in made:
        job.solution.write_text(f"# {job.solution}")
    return made


class Fake:
    """A measuring backend without processes: answers by the number in a job's name."""

    def __init__(self, answers: Callable[[int, bool], dict[str, Any]]) -> None:
        self.answers = answers
        self.built: list[int] = []
        self.measured: list[tuple[int, bool]] = []
        self.closed = False

    def build(self, job: Job) -> Future[dict[str, Any]]:
        number = int(job.reference.stem)
        self.built.append(number)
        bad = number % 10 == 3
        return self._ended({"status": "error", "message": "no compiler"} if bad else {
            "status": "ok", "kind": "pointwise", "plan": "a page", "build_seconds": 1.0,
        })  # fmt: skip

    def measure(self, job: Job, built: Any, *, alone: bool) -> Future[dict[str, Any]]:
        number = int(job.reference.stem)
        self.measured.append((number, alone))
        try:
            return self._ended(self.answers(number, alone))
        except RuntimeError as error:
            future: Future[dict[str, Any]] = Future()
            future.set_exception(error)
            return future

    def _ended(self, answer: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result(answer)
        return future

    def close(self) -> None:
        self.closed = True


def test_many_jobs_with_failures_of_every_kind(tmp_path: Path) -> None:
    def answers(number: int, alone: bool) -> dict[str, Any]:
        match number % 10:
            case 4:
                return {"status": "crashed", "message": "SIGSEGV"}
            case 5 if not alone:
                return {"status": "error", "message": "out of memory", "starved": True}
            case 6:
                raise RuntimeError("the worker is gone")
        return {"status": "ok", "message": "", "solution_ms": 1.0}

    todo = jobs_of(tmp_path / "s", 250)
    path = tmp_path / "rows.json"
    kept = results.Results(path, todo)
    fake = Fake(answers)
    sizes = []

    def deliver(rows: list[dict[str, Any]]) -> None:
        kept.add(*rows)
        sizes.append(len(json.loads(path.read_text())))

    runner.run(todo, fake, deliver)
    assert fake.closed
    assert sizes == list(range(1, 251)), "each row is on disk before the next"
    rows = json.loads(path.read_text())
    assert [row["reference"] for row in rows] == [str(job.reference) for job in todo]
    assert len(fake.built) == 250
    assert not any(number % 10 == 3 for number, _ in fake.measured)
    assert sorted(n for n, alone in fake.measured if alone) == list(range(5, 250, 10))
    assert all(alone for _, alone in fake.measured[-25:]), "before the others were done"
    by_kind = {number: rows[number] for number in range(10)}
    assert by_kind[3]["message"] == "no compiler"
    assert by_kind[4]["status"] == "crashed"
    assert by_kind[5]["status"] == "ok"
    assert by_kind[6]["message"] == "not measured: RuntimeError: the worker is gone"
    assert by_kind[0]["plan"] == "a page"
    assert by_kind[0]["build_seconds"] == 1.0
    assert all(set(row) >= {"milliseconds", "spread", "message", "sha256"} for row in rows)


def test_a_disagreement_with_kernelbench_is_a_row_of_its_own(tmp_path: Path) -> None:
    def answers(number: int, alone: bool) -> dict[str, Any]:
        theirs = {"status": "ok", "correct": number != 1, "message": "its words"}
        if number == 2:
            theirs = {"status": "error", "message": "could not be imported"}
        return {"status": "ok", "message": "", "checks": [], "kernelbench": theirs}

    todo = jobs_of(tmp_path / "s", 3, "verify")
    delivered: list[list[dict[str, Any]]] = []
    runner.run(todo, Fake(answers), delivered.append)
    assert sorted(len(rows) for rows in delivered) == [1, 1, 2]
    row = next(rows for rows in delivered if len(rows) == 2)[1]
    assert (row["task"], row["status"], row["reference"]) == ("disagreement", "disagree", "r/1.py")
    assert "ours: right" in row["message"]
    assert "KernelBench: wrong its words" in row["message"]


def test_what_resume_keeps(tmp_path: Path) -> None:
    todo = jobs_of(tmp_path / "s", 6)
    path = tmp_path / "rows.json"
    assert results.kept(path, todo, retry=False) == []
    states = ["ok", "crashed", "timeout", "ok", "ok"]
    first = results.Results(path, todo)
    fake = Fake(lambda number, alone: {"status": states[number], "message": ""})
    runner.run([job for job in todo[:5] if job is not todo[3]], fake, lambda rows: first.add(*rows))
    todo[4].solution.write_text("# another text")

    def numbers(retry: bool) -> list[int]:
        return [int(Path(row["reference"]).stem) for row in results.kept(path, todo, retry=retry)]

    assert numbers(False) == [0, 1, 2]
    assert numbers(True) == [0]
    todo[0].options["seconds"] = 9.0  # the jobs share their options
    assert numbers(False) == []
    path.write_text('{"not": "rows"}')
    with pytest.raises(ModelNewError, match="no result file"):
        results.kept(path, todo, retry=False)


def test_the_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_JOBS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    gpus = [devices.Gpu("0", "a", "9.0", 1 << 37), devices.Gpu("1", "b", "8.0", 24 << 30)]
    found = runner.environment([*gpus, gpus[0]], 2)
    assert found == {"MAX_JOBS": "2", "TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}
    assert [gpu.preparing for gpu in gpus] == [8, 1]
    monkeypatch.setenv("MAX_JOBS", "7")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert runner.environment(gpus, 2) == {}


def test_without_a_gpu_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    solution = ROOT / "solutions"
    done = command("bench", ROOT / "reference_models" / "relu.py", "-o", solution)
    assert done.exit_code == 1
    assert "no GPU can be used" in done.stderr
    assert "doctor" in done.stderr


# --- real processes on the CPU -------------------------------------------------------------------


def command(*arguments: object) -> Result:
    return CliRunner().invoke(generate.main, [str(argument) for argument in arguments])


@pytest.fixture
def planted(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes references and solutions of the given names; returns the command's arguments."""

    def write(*names: str) -> list[str]:
        for folder in ("references", "solutions"):
            (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / "references" / f"{name}.py").write_text(POINTWISE)
            if name != "missing":
                text = BROKEN if name == "broken" else pointwise(BODIES[name])
                (tmp_path / "solutions" / f"{name}.py").write_text(text)
        return [
            str(tmp_path / "references"), "-o", str(tmp_path / "solutions"), "--device", "cpu",
            "--json", str(tmp_path / "rows.json"),
        ]  # fmt: skip

    return write


def rows_of(tmp_path: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads((tmp_path / "rows.json").read_text())
    return {Path(row["reference"]).stem: row for row in rows}


def test_every_kind_of_failure_is_survived(
    planted: Callable[..., list[str]], tmp_path: Path
) -> None:
    names = ("abort", "broken", "fine", "hang", "memory", "missing", "wrong")
    arguments = planted(*names)
    fast = ("--only", "own", "--seeds", 1, "--timeout", 10)
    done = command("verify", *arguments, *fast)
    assert done.exit_code == 1
    rows = rows_of(tmp_path)
    assert list(rows) == sorted(names)
    assert {name: row["status"] for name, row in rows.items()} == {
        "abort": "crashed", "broken": "error", "fine": "ok", "hang": "timeout", "memory": "wrong",
        "missing": "error", "wrong": "wrong",
    }  # fmt: skip
    for name, said in {
        "abort": "SIGABRT", "broken": "expected", "hang": "no answer within 10 s",
        "memory": "allocate", "missing": "not rendered yet", "wrong": "error 0.1, allowed",
    }.items():  # fmt: skip
        assert said in rows[name]["message"], rows[name]["message"]
        assert f"{name:34}" in done.stdout
    assert rows["fine"]["kind"] == "pointwise"
    assert "kernel gt_mul_where" in rows["fine"]["plan"]
    assert rows["fine"]["truth"] == {"CPU": 3}
    assert "7/7" in done.stdout


def alive(marker: str) -> list[int]:
    """Processes whose command line or environment mentions the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if marker.encode() in text and state != "Z":
                found.append(int(entry.name))
    return found


def until(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return holds()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command line in a process that carries a mark, as all its children do."""
    processes = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "generate.py"), *map(str, arguments)],
            env={**os.environ, "MODELNEW_MARK": str(tmp_path)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # A shell without job control starts what runs in the background with SIGINT ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
def test_an_interrupted_run_goes_on(
    planted: Callable[..., list[str]], tmp_path: Path, started: Callable[..., Any]
) -> None:
    arguments = [*planted("fine", "hang"), "--only", "state", "--timeout", 90]
    # "state" copies the solution and never calls it; the hang must be in its constructor.
    hang = tmp_path / "solutions" / "hang.py"
    hang.write_text(hang.read_text().replace("self.slope = slope", "time.sleep(1000)"))
    process = started("verify", *arguments, "-j", 1)  # "fine" is built first, and measured first
    assert until(lambda: (tmp_path / "rows.json").exists()), process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "interrupted" in errors
    assert "--resume" in errors
    assert list(rows_of(tmp_path)) == ["fine"]
    assert until(lambda: not alive(str(tmp_path)), 10), "children outlive the run"

    before = (tmp_path / "rows.json").read_text()
    hang.write_text(pointwise(""))
    done = command("verify", *arguments, "--resume")
    assert done.exit_code == 0, done.output
    assert rows_of(tmp_path)["hang"]["status"] == "ok"
    assert before.splitlines()[1] in (tmp_path / "rows.json").read_text(), "the row was kept"
    assert "2/2 hang" in done.stdout
    assert "fine" not in done.stdout
    again = command("verify", *arguments, "--resume")
    assert (again.exit_code, again.stdout) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end orphans")
def test_a_killed_run_leaves_no_process(
    planted: Callable[..., list[str]], tmp_path: Path, started: Callable[..., Any]
) -> None:
    process = started("verify", *planted("hang"), "--only", "own")
    assert until(lambda: len(alive(str(tmp_path))) > 1)
    process.kill()
    process.communicate()
    assert until(lambda: not alive(str(tmp_path)), 20)


def test_waiting_for_a_gpu_is_not_the_tasks_time(tmp_path: Path) -> None:
    for name, text in (("r.py", POINTWISE), ("s.py", pointwise(""))):
        (tmp_path / name).write_text(text)
    lock = tmp_path / "gpu.lock"
    payload = {
        "reference": str(tmp_path / "r.py"), "solution": str(tmp_path / "s.py"),
        **verify_options(device="cpu", groups=["state"]), "lock": str(lock), "alone": False,
    }  # fmt: skip
    seconds = 8.0  # enough for the task, too little for the task and waiting
    holder = lock.open("w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    command = f"import time; time.sleep({seconds + 4})"
    # The lock goes to a process that ends later: it is inherited, as from a measuring child.
    keeper = subprocess.Popen([sys.executable, "-c", command], pass_fds=[holder.fileno()])
    holder.close()
    begin = time.monotonic()
    answer = run_child("verify", payload, Limits(seconds))
    assert answer["status"] == "ok", answer
    assert time.monotonic() - begin > seconds
    keeper.wait()


def test_lock_files_of_one_gpu_have_one_name() -> None:
    assert lock_file("0") == lock_file("0") != lock_file("1")
    assert "/" not in lock_file("GPU-8f/../x").name
    assert Place().alone
