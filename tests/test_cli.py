"""The command line: what it writes, what it answers, and what it says of files it cannot use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import generate
from modelnew import doctor
from modelnew.doctor import Finding

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "reference_models"

MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.5

    def forward(self, x):
        return x * self.scale


rows = 4


def get_inputs():
    return [torch.randn(rows, 8)]


def get_init_inputs():
    return []
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(generate.main, [str(argument) for argument in arguments])


def files(folder: Path) -> list[str]:
    """Every name in `folder`, temporary and hidden ones too."""
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "scaled.py"
    path.parent.mkdir()
    path.write_text(MODEL)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# --- render --------------------------------------------------------------------------------------


def test_render_of_one_file(out: Path) -> None:
    done = run("render", MODELS / "leaky_relu.py", "-o", out)
    assert done.exit_code == 0, done.output
    assert files(out) == ["leaky_relu.py"]
    text = (out / "leaky_relu.py").read_bytes()
    assert text == (ROOT / "solutions" / "leaky_relu.py").read_bytes()
    assert re.search(r"leaky_relu\.py: 1 kernel, \d", done.stdout)
    assert "1 of 1 references rendered" in done.stderr
    assert (out / "leaky_relu.py").stat().st_mode & 0o777 == 0o644


def test_render_of_a_folder(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("b.py", "a.py", "_private.py", "notes.txt"):
        (folder / name).write_text(MODEL)
    done = run("render", folder, MODELS / "relu.py", "-o", out)
    assert done.exit_code == 0, done.output
    assert files(out) == ["a.py", "b.py", "relu.py"]
    assert [Path(line.split(":")[0]).name for line in done.stdout.splitlines()] == files(out)
    assert "3 of 3 references rendered" in done.stderr


def test_a_folder_without_references_is_an_error(tmp_path: Path, out: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("render", tmp_path / "empty", "-o", out)
    assert done.exit_code != 0, "nothing was rendered, and nobody was told"


def test_render_says_that_no_kernel_was_made(reference: Path, out: Path) -> None:
    reference.write_text(MODEL.replace("x * self.scale", "torch.sort(x)[0]"))
    done = run("render", reference, "-o", out)
    assert done.exit_code == 0, done.output
    assert "no kernel, all PyTorch" in done.stdout
    assert "1 without a kernel" in done.stderr


def test_check_of_a_fresh_a_stale_and_a_missing_file(reference: Path, out: Path) -> None:
    missing = run("render", reference, "-o", out, "--check")
    assert missing.exit_code == generate.STALE == 3
    assert "scaled.py: missing" in missing.stderr
    assert files(out) == [], "--check wrote something"

    assert run("render", reference, "-o", out).exit_code == 0
    fresh = run("render", reference, "-o", out, "--check")
    assert (fresh.exit_code, fresh.stdout) == (0, "")

    solution = out / "scaled.py"
    stale_text = solution.read_text() + "# a later edit\n"
    solution.write_text(stale_text)
    stale = run("render", reference, "-o", out, "--check")
    assert stale.exit_code == 3
    assert "scaled.py: stale" in stale.stderr
    assert solution.read_text() == stale_text, "--check changed the file"


@pytest.mark.parametrize("change", ["line ends", "bytes that are no UTF-8"])
def test_check_compares_bytes(reference: Path, out: Path, change: str) -> None:
    assert run("render", reference, "-o", out).exit_code == 0
    solution = out / "scaled.py"
    text = solution.read_bytes()
    new = text.replace(b"\n", b"\r\n") if change == "line ends" else text + b"# caf\xe9\n"
    solution.write_bytes(new)
    assert run("render", reference, "-o", out, "--check").exit_code == 3


def test_check_fails_rather_than_being_stale(reference: Path, out: Path) -> None:
    """1, could not be generated, weighs more than 3, stale."""
    (reference.parent / "bad.py").write_text("import\n")
    assert run("render", reference.parent, "-o", out, "--check").exit_code == 1


def test_diff_is_unified_and_writes_nothing(reference: Path, out: Path) -> None:
    assert run("render", reference, "-o", out).exit_code == 0
    solution = out / "scaled.py"
    right = solution.read_text()
    solution.write_text(right.replace("import torch\n", "import torch  # an edit\n", 1))
    before = solution.read_text()
    done = run("render", reference, "-o", out, "--diff")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"--- {solution}"
    assert lines[1].startswith(f"+++ {solution}")
    assert lines[2].startswith("@@ ")
    assert "-import torch  # an edit" in lines
    assert "+import torch" in lines
    assert (files(out), solution.read_text()) == (["scaled.py"], before)
    assert run("render", reference, "-o", out, "--diff", "--check").exit_code == 3


def test_set(reference: Path, out: Path) -> None:
    done = run("render", reference, "-o", out, "--set", "rows=17")
    assert done.exit_code == 0, done.output
    text = (out / "scaled.py").read_text()
    assert "float32[17, 8]" in text
    assert "# With rows = 17" in text


@pytest.mark.parametrize(
    ("setting", "status", "message"),
    [
        ("rows", 2, "NAME=VALUE"),
        ("=3", 2, "NAME=VALUE"),
        ("two words=3", 2, "NAME=VALUE"),
        ("columns=3", 1, r"scaled\.py: --set columns: no such module constant \(has: rows\)"),
        ("rows=)(", 1, r"scaled\.py: --set rows=\)\(: not a Python value"),
        ("rows=missing", 1, r"scaled\.py:14: .*NameError.*missing"),
    ],
)
def test_bad_settings(reference: Path, out: Path, setting: str, status: int, message: str) -> None:
    done = run("render", reference, "-o", out, "--set", setting)
    assert done.exit_code == status, done.output
    assert re.search(message, done.stderr), done.stderr
    assert files(out) == []


def test_dtypes(reference: Path, out: Path) -> None:
    done = run("render", reference, "-o", out, "--dtypes", "float16, float32")
    assert done.exit_code == 0, done.output
    text = (out / "scaled.py").read_text()
    assert "ops.dtype == kFloat16" in text
    assert "ops.dtype == kBfloat16" not in text
    assert "ModelNew was generated for float16, float32, not for" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtypes", "float8"), "--dtypes float8: choose among float32, float16, bfloat16"),
        (("--dtypes", "float32,int"), "choose among"),
        (("--dtypes", ","), "choose among"),
        (("--target", "abacus"), "--target abacus: known targets are h200"),
        (("--nonsense",), "No such option"),
    ],
)
def test_usage_errors(reference: Path, out: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("render", reference, "-o", out, *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert files(out) == []


@pytest.mark.parametrize("command", ["render", "explain", "verify", "bench"])
def test_missing_path_and_no_path(tmp_path: Path, command: str) -> None:
    missing = run(command, tmp_path / "missing.py")
    assert missing.exit_code == 2
    assert "missing.py' does not exist" in missing.stderr
    assert run(command).exit_code == 2


def test_two_references_of_one_name(reference: Path, out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / reference.name
    other.parent.mkdir()
    other.write_text(MODEL.replace("0.5", "0.25").replace("x * self.scale", "torch.relu(x)"))
    done = run("render", reference, other, "-o", out)
    assert done.exit_code == 1
    assert f"{other}: another reference of this call has this name: rename one" in done.stderr
    assert files(out) == ["scaled.py"]
    assert "1 of 2 references rendered" in done.stderr
    assert "relu" not in (out / "scaled.py").read_text(), "the second overwrote the first"


def test_output_folder_that_is_a_file(reference: Path, out: Path) -> None:
    out.write_text("keep")
    done = run("render", reference, "-o", out)
    assert done.exit_code in (1, 2)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert str(out) in done.stderr
    assert out.read_text() == "keep"


# --- explain -------------------------------------------------------------------------------------


def test_explain() -> None:
    files = [MODELS / "linear_swish_tanh_gelu_hardtanh.py", MODELS / "leaky_relu.py"]
    done = run("explain", *files, "--matmul", "library")
    assert done.exit_code == 0, done.output
    for part in (
        "PyTorch aten.linear.default: no pointwise operator\n    x = self.linear(x)",
        "kernel add_sigmoid_mul_tanh_gelu_hardtanh",
        "reads linear float32[1024, 8192], add_value float32[8192]",
    ):
        assert part in done.stdout
    done = run("explain", *files)
    assert done.exit_code == 0, done.output
    for part in (
        "product linear_add_to_hardtanh",
        "[1024, 8192] x [8192, 8192]",
        "linear_weight float32[8192, 8192], linear_bias float32[8192], add_value float32[8192]",
        "fixed in constructor: in_features = 8192, out_features = 8192",
        "fixed in forward: x.shape[1] = 8192",
        "live: self.negative_slope",
    ):
        assert part in done.stdout


def test_explain_takes_settings_and_goes_on_after_an_error(reference: Path) -> None:
    (reference.parent / "bad.py").write_text("import\n")
    done = run("explain", reference.parent, "--set", "rows=19")
    assert done.exit_code == 1
    assert "bad.py:1: syntax error" in done.stderr
    assert "float32[19, 8]" in done.stdout


# --- doctor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([Finding("a", True, "1.0")], 0),
        ([Finding("a", True, "1.0"), Finding("b", False, "none", "get b")], 1),
        ([Finding("b", False, "none", "get b", necessary=False)], 0),
    ],
)
def test_doctor(monkeypatch: pytest.MonkeyPatch, findings: list[Finding], status: int) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    done = run("doctor")
    assert done.exit_code == status
    for finding in findings:
        assert f"{'ok  ' if finding.ok else 'MISS'}  {finding.name}: {finding.found}" in done.stdout
        assert finding.advice in done.stdout


# --- bad references ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A reference that cannot be used. Its fault is in the line that says `# here`, if any."""

    text: str | bytes
    message: str

    @property
    def line(self) -> int | None:
        text = self.text if isinstance(self.text, str) else self.text.decode("latin-1")
        lines = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
        return lines[0] if lines else None


def changed(old: str, new: str, text: str = MODEL) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def forward(body: str) -> str:
    return changed("        return x * self.scale", body)


def helper(*lines: str) -> str:
    """A model whose constructor calls a function of the file."""
    text = changed("self.scale = 0.5", "self.scale = chosen()")
    return changed("class Model", "\n".join(["def chosen():", *lines, "", "", "class Model"]), text)


NOT_TENSORS = "return tensors, or tuples, lists and dicts of them"
RETURNS = {
    "float": "1.5",
    "str": "'text'",
    "NoneType": "None",
    "int": "x.shape[0]",
    "Pair": "Pair(x + 1, x * 2)",
}
PAIR = "from collections import namedtuple\n\nPair = namedtuple('Pair', 'first second')\n"
HEAVY = "[float(i) for i in range(100)]"

BAD: Mapping[str, Bad] = {
    "syntax": Bad(changed("def get_inputs():", "def get_inputs(:  # here"), "syntax error"),
    "empty": Bad("", "defines no Model: a reference needs class Model"),
    "no_model": Bad(changed("class Model(", "class Other("), "defines no Model: a reference needs"),
    "no_get_inputs": Bad(
        changed("def get_inputs", "def other"), "defines no get_inputs: a reference needs"
    ),
    "no_forward": Bad(changed("def forward", "def other"), "no forward"),
    "no_module": Bad(
        changed("(nn.Module)", "", changed("        super().__init__()\n", "")),
        r"Model is not a torch\.nn\.Module",
    ),
    "import_fails": Bad(
        changed("from torch import nn", "import no_such_module  # here"),
        "raises ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "exits": Bad(changed("rows = 4", "raise SystemExit(0)  # here"), "raises SystemExit"),
    "get_inputs_raises": Bad(
        changed("return [torch.randn(rows, 8)]", "raise OSError('no data')  # here"),
        r"get_inputs\(\) raises OSError: no data",
    ),
    "get_inputs_is_no_list": Bad(
        changed("return [torch.randn(rows, 8)]", "return torch.randn(rows, 8)"),
        r"get_inputs\(\) returns a \w+: return a list",
    ),
    "get_init_inputs_raises": Bad(
        changed("return []", "return [][0]  # here"), r"get_init_inputs\(\) raises IndexError"
    ),
    "get_init_inputs_is_no_list": Bad(
        changed("return []", "return 3"), r"get_init_inputs\(\) returns an? int: return a list"
    ),
    "constructor_raises": Bad(
        changed("self.scale = 0.5", "self.scale = {}['scale']  # here"),
        r"Model\(\*get_init_inputs\(\)\) raises KeyError: 'scale'",
    ),
    "constructor_wants_more": Bad(
        changed("def __init__(self):", "def __init__(self, width):"),
        r"Model\(\*get_init_inputs\(\)\) raises TypeError: .*'width'",
    ),
    "branches_on_data": Bad(
        forward("        if x.sum() > 0:  # here\n            return x * 2\n        return x"),
        r"depends on the values of a tensor.*torch\.where",
    ),
    "calls_item": Bad(
        forward("        return x * x.max().item()  # here"), "depends on the values of a tensor"
    ),
    "size_by_data": Bad(
        forward("        return torch.nonzero(x)  # here"), r"depends on the values|known only when"
    ),
    "loops": Bad(
        forward("        return self.forward(x)  # here"), "cannot be traced: RecursionError"
    ),
    "forward_raises": Bad(
        forward("        return x + torch.ones(3)  # here"), r"cannot be traced: RuntimeError"
    ),
    "large_constant": Bad(
        forward(f"        return x + torch.tensor({HEAVY})[:8]"),
        "constant of 100 elements: register it as a buffer in __init__",
    ),
    **{
        f"returns_{kind}": Bad(
            PAIR
            + changed("(self, x):", "(self, x):  # here", forward(f"        return {v}")),
            f"forward returns an? {kind}: {NOT_TENSORS}",
        )
        for kind, v in RETURNS.items()
    },
    "variadic": Bad(
        changed("forward(self, x):", "forward(self, *x):  # here", forward("        return x[0]")),
        r"forward takes \*x: name its arguments",
    ),
    "variadic_by_name": Bad(
        changed("forward(self, x):", "forward(self, x, **rest):  # here"),
        r"forward takes \*\*?rest: name its arguments",
    ),
    "too_few_inputs": Bad(
        changed("forward(self, x):", "forward(self, x, y):  # here"),
        r"get_inputs\(\) does not fit forward: missing a required argument: 'y'",
    ),
    "too_many_inputs": Bad(
        changed(
            "forward(self, x):", "forward(self, x):  # here",
            changed("[torch.randn(rows, 8)]", "[torch.randn(rows, 8), 3]"),
        ),
        r"get_inputs\(\) does not fit forward: too many positional arguments",
    ),
    "cond": Bad(
        forward("        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # here"),
        "cannot be generated.*higher-order operator",
    ),
    "identifier": Bad(helper("    größe = 0.5  # here", "    return größe"), "non-ASCII"),
    "literal": Bad(helper("    return {'größe': 0.5}['größe']  # here"), "non-ASCII"),
    "word": Bad(helper("    return {'pass': 0.5}['pass']  # here"), "'pass'.*keep it out of"),
    "try": Bad(
        helper(
            "    try:  # here", "        return 0.5", "    except ValueError:", "        return 1.0"
        ),
        "'try:'.*keep it out of",
    ),
    "latin_1": Bad(
        changed("rows = 4", "rows = 4  # Größe").encode("latin-1"), "cannot be read: .*UTF-8"
    ),
}  # fmt: skip
GOOD = ("aa_good", "zz_good", "statement_pass", "comment")


@dataclass(frozen=True)
class Outcome:
    """What one run over all bad references, and a few good ones, gave."""

    status: int
    stdout: str
    stderr: str
    out: Path
    folder: Path

    def error(self, name: str) -> str:
        """The one message about a file, with its continuation lines."""
        start = f"error: {self.folder / name}.py"
        blocks = re.split(r"^(?=error: )", self.stderr, flags=re.MULTILINE)
        found = [b for b in blocks if b.startswith((f"{start}:", f"{start} "))]
        assert len(found) == 1, f"{len(found)} messages about {name}: {found}"
        return found[0]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A process of its own: what torch writes to standard error by other ways is seen too."""
    folder = tmp_path_factory.mktemp("bad")
    for name, bad in BAD.items():
        text = bad.text.encode() if isinstance(bad.text, str) else bad.text
        (folder / f"{name}.py").write_bytes(text)
    for name in GOOD[:2]:
        (folder / f"{name}.py").write_text(MODEL)
    skipped = helper("    for _ in range(2):", "        pass", "    return 0.5")
    (folder / "statement_pass.py").write_text(skipped)
    noted = changed("self.scale = 0.5", "self.scale = 0.5  # Größe, and pass").encode()
    (folder / "comment.py").write_bytes(noted)
    out = tmp_path_factory.mktemp("solutions")
    command = [sys.executable, str(ROOT / "generate.py"), "render", str(folder), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr, out, folder)


@pytest.mark.parametrize("name", BAD)
def test_bad_reference_has_one_clear_message(name: str, outcome: Outcome) -> None:
    bad, message = BAD[name], outcome.error(name)
    assert re.search(bad.message, message, re.DOTALL | re.IGNORECASE), message
    assert "internal error" not in message
    assert "Traceback" not in message
    assert len(message) < 600, message
    if bad.line is not None:
        assert f"{name}.py:{bad.line}:" in message, f"line {bad.line} is not named: {message}"


def test_bad_references_stop_no_other_and_leave_nothing(outcome: Outcome) -> None:
    assert outcome.status == 1
    assert files(outcome.out) == sorted(f"{name}.py" for name in GOOD)
    total = len(BAD) + len(GOOD)
    assert f"{len(GOOD)} of {total} references rendered" in outcome.stderr
    for name in GOOD:
        compile((outcome.out / f"{name}.py").read_text(), name, "exec")


def test_nothing_but_messages_on_standard_error(outcome: Outcome) -> None:
    """Each line belongs to a message, or is the sum at the end; torch adds nothing of its own."""
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith("error: ")]
    foreign = [line for line in lines[:-1] if not line.startswith("  ") or "torch.ops" in line]
    assert not foreign, "\n".join(foreign)


@pytest.mark.parametrize("name", ["syntax", "calls_item", "literal"])
def test_a_failure_keeps_the_solution_that_was_there(reference: Path, out: Path, name: str) -> None:
    assert run("render", reference, "-o", out).exit_code == 0
    before = (out / "scaled.py").read_bytes()
    text = BAD[name].text
    assert isinstance(text, str)
    reference.write_text(text)
    assert run("render", reference, "-o", out).exit_code == 1
    assert (files(out), (out / "scaled.py").read_bytes()) == (["scaled.py"], before)


# --- interrupted writes --------------------------------------------------------------------------


class Full:
    """A file on a full disk: takes half of the text."""

    def __init__(self, file: Any, error: BaseException) -> None:
        self.file, self.error = file, error

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        raise self.error


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["write", "replace"])
@pytest.mark.parametrize("exists", [True, False], ids=["old", "new"])
def test_interrupted_write(
    reference: Path, out: Path, monkeypatch: pytest.MonkeyPatch, place: str,
    error: BaseException, exists: bool,
) -> None:  # fmt: skip
    if exists:
        assert run("render", reference, "-o", out).exit_code == 0
    before = {name: (out / name).read_bytes() for name in files(out)}
    opened = os.fdopen

    def full(*args: Any, **kwargs: Any) -> Full:
        return Full(opened(*args, **kwargs), error)

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if place == "write":
            patch.setattr(os, "fdopen", full)
        else:
            patch.setattr(os, "replace", refuse)
        done = run("render", reference, "-o", out, "--set", "rows=5")
    assert done.exit_code != 0
    assert {name: (out / name).read_bytes() for name in files(out)} == before
    assert run("render", reference, "-o", out).exit_code == 0
    assert files(out) == ["scaled.py"]


def test_a_disk_error_is_a_message(
    reference: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    done = run("render", reference, "-o", out)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), f"a traceback: {done.exception!r}"
    assert "no space left" in done.stderr


# --- cost ----------------------------------------------------------------------------------------

MEASURED = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
spent = time.perf_counter() - start
print(spent, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def costs(command: list[str], attempts: int) -> Iterator[tuple[float, float]]:
    """Seconds and peak bytes of each attempt; a loaded machine may need a few."""
    for _ in range(attempts):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, check=True
        )
        seconds, peak = map(float, done.stdout.split())
        yield seconds, peak


def test_time_and_memory_of_one_render(out: Path) -> None:
    """The reference's input is 6.4 GB: nothing of that size may be allocated."""
    model = str(MODELS / "leaky_relu.py")
    command = [sys.executable, str(ROOT / "generate.py"), "render", model, "-o", str(out)]
    best = float("inf")
    for seconds, peak in costs(command, 4):
        best = min(best, seconds)
        assert peak < 1.5e9, f"{peak / 1e9:.2f} GB"
        if best < 8:
            break
    assert best < 8, f"{best:.1f} s"
