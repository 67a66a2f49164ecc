"""The accuracy of the operators on a GPU: the committed results, and what judges them.

Results come from tests/accuracy.py on a machine with a GPU; here they must stand for the present
text of every row. The judgement is tried on values with known errors, the rest of the script with
g++ in the place of a GPU.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import accuracy
import numpy as np
import pytest
import test_registry as registry
import torch
from test_registry import Array, Case, cases_of

from modelnew.doctor import find_nvcc
from modelnew.ops import Op

CASES = registry.CASES
NAMES = ("gelu", "leaky_relu", "where", "batch_norm")
SOME = {name: case for name, case in CASES.items() if case.row.name in NAMES}


def test_results_stand_for_the_registry() -> None:
    found = list(accuracy.problems(CASES, accuracy.RESULTS))
    assert not found, "\n".join(found)


# --- the gate ------------------------------------------------------------------------------------


def entry(**changes: Any) -> accuracy.Entry:
    nothing = {part: [0.0, 0.0] for part in accuracy.PARTS}
    return {"case": "x", "faults": [], **nothing, **changes}


@pytest.mark.parametrize("part", accuracy.PARTS)
@pytest.mark.parametrize(
    ("ours", "theirs", "right"),
    [
        (0.5, 0.5, True), (2.0, 0.0, True), (3.0, 0.5, False), (2.9, 1.5, True), (3.1, 1.5, False),
        (2.01, 1.0, False), (1e6, 6e5, True), (float("nan"), 0.5, False),
    ],
)  # fmt: skip
def test_gate(part: str, ours: float, theirs: float, right: bool) -> None:
    wider = 1.0 if part == "overall" else 1.5
    assert (accuracy.gate(entry(**{part: [ours * wider, theirs]})) == []) == right


def test_a_fault_fails_the_gate() -> None:
    assert accuracy.gate(entry(faults=["NaN at 1 points"])) == ["NaN at 1 points"]


def test_the_entry_of_a_row_is_its_worst_and_names_every_fault() -> None:
    cases = [CASES["exp.default"]] * 3
    entries = [
        entry(case="a", overall=[1.9, 0.5]),
        entry(case="b", overall=[9.0, 5.0], slice=[3.5, 0.5]),
        entry(case="c", faults=["NaN"]),
    ]
    row = accuracy.row_entry(cases, entries)
    assert row["case"] == "b"
    assert row["cases"] == 3
    assert row["faults"] == ["c: NaN"]
    assert len(accuracy.gate(row)) == 2


# --- the judgement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "truth", "expected"),
    [
        (1.0, 1.0, 0.0), (1.0 + 2**-23, 1.0, 1.0), (1.0 - 2**-24, 1.0, 0.5), (4.0, 4.0 - 1e-9, 0.0),
        (2**-149, 0.0, 1.0), (3 * 2**-149, 2**-149, 2.0), (0.0, 2**-127, 2.0**22),
        (2**-126, 2**-126 * (1 - 2**-25), 0.25), (np.inf, 1.0, 0.0), (np.nan, 1.0, 0.0),
    ],
)  # fmt: skip
def test_ulps(found: float, truth: float, expected: float) -> None:
    (distance,) = accuracy.ulps(np.array([found]), np.array([truth]))
    assert distance == pytest.approx(expected, abs=1e-2)


def off(values: Array, ulp: int) -> Array:
    """Values that are so many units in the last place further from 0, where that is finite."""
    moved = (values.view(np.int32) + np.int32(ulp)).view(np.float32)
    result: Array = np.where(np.abs(values) < 1e38, moved, values)
    return result


def where(place: Callable[[Array], Array], ulp: int) -> Callable[[Array, Array], Array]:
    return lambda x, exact: np.where(place(x), off(exact, ulp), exact)


def replaced(place: Callable[[Array], Array], value: float) -> Callable[[Array, Array], Array]:
    return lambda x, exact: np.where(place(x), np.float32(value), exact)


# What is done to the right values of exp, and what must be said of it, "" for nothing.
PLANTED: Mapping[str, tuple[Callable[[Array, Array], Array], str]] = {
    "nothing": (lambda x, exact: exact, ""),
    "1 ulp": (where(lambda x: x > 1, 1), ""),
    "3 ulp everywhere": (where(lambda x: (x > 1) & (x < 80), 3), "overall: 3"),
    "3 ulp at one point": (where(lambda x: x == 6.0, 3), "overall: 3"),
    "a lost NaN": (replaced(np.isnan, 1.0), "NaN at "),
    "a NaN of our own": (replaced(lambda x: x == 2.0, np.nan), "NaN at 1 points, x=2: nan"),
    "a lost infinity": (replaced(np.isposinf, 3.4e38), "infinity at "),
    "an early infinity": (replaced(lambda x: x == 88.0, np.inf), "infinity at 1 points, x=88"),
    "flushed results": (replaced(lambda x: x < -87.5, 0.0), "below: "),
    "-0": (replaced(lambda x: x == -np.inf, -0.0), "sign of zero at "),
}


def judged(case: Case, change: Callable[[Array, Array], Array], theirs_off: int = 0) -> list[str]:
    """The verdict where PyTorch is right but for so many ulp at large x, and ours is changed."""
    given = registry.operands(case)
    truth = registry.true(case, given)
    with np.errstate(over="ignore"):
        exact = truth.astype(np.float32)
        x = given[case.tensors[0]]
        cuda = np.where(np.abs(x) > 50, off(exact, theirs_off), exact)
        mine = change(x, exact).astype(np.float32)
    found = accuracy.measured(case, given, mine, cuda.astype(np.float64), truth, truth)
    return accuracy.gate(found)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_values_are_judged(name: str) -> None:
    change, expected = PLANTED[name]
    found = judged(CASES["exp.default"], change)
    assert found == [] if not expected else any(fault.startswith(expected) for fault in found)


def test_a_bad_region_does_not_hide_behind_pytorch_elsewhere() -> None:
    near_zero = where(lambda x: (x > 0.6) & (x < 0.9), 5)
    found = judged(CASES["square.default"], near_zero, theirs_off=4)
    assert len(found) == 1
    assert found[0].startswith("slice: 5")


def test_a_plain_sum_does_not_hide_behind_sums_that_cancel() -> None:
    """PyTorch is off by a million ulp where two terms cancel; ours by 5 where none do."""
    case = CASES["add.Tensor alpha=0.75"]
    given = registry.operands(case)
    truth = registry.true(case, given)
    with np.errstate(all="ignore"):
        exact = truth.astype(np.float32)
        x, y = given["x"].astype(np.float64), given["y"].astype(np.float64)
        cancels = np.abs(truth) < 1e-3 * (np.abs(x) + np.abs(y))
        plain = (x * y > 0) & (np.abs(truth) > 1e-30) & (np.abs(truth) < 1e30)
        cuda = np.where(cancels, truth * (1 + 1e-1), exact)
        mine = np.where(plain, off(exact, 5), exact)
    found = accuracy.gate(accuracy.measured(case, given, mine, cuda, truth, truth))
    assert len(found) == 1
    assert found[0].startswith("slice: 5")


def test_where_pytorch_overflows_either_is_right() -> None:
    case = CASES["square.default"]
    given = registry.operands(case)
    truth = np.where(np.isnan(given["x"]), np.nan, 2.0)
    cuda = np.where(given["x"] > 5, np.inf, truth)
    for mine in (truth, cuda):
        found = accuracy.measured(case, given, mine.astype(np.float32), cuda, truth, truth)
        assert accuracy.gate(found) == []


# --- what an entry stands for --------------------------------------------------------------------


def test_digest_follows_the_code_and_not_its_comments() -> None:
    mine = [case for case in CASES.values() if case.row.name == "mish"]
    right = accuracy.digest(mine)
    text = accuracy.device_text

    def changed(old: str, new: str) -> str:
        assert any(old in text(name) for name in accuracy.functions_of([mine[0].expression]))
        with mock.patch.object(accuracy, "device_text", lambda n: text(n).replace(old, new)):
            return accuracy.digest(mine)

    assert changed("20.0f", "21.0f") != right
    assert changed("rcp.approx.ftz", "rcp.approx") != right
    assert changed("// ", "// So: ") == right
    assert changed("return 1.0f / x;", "return 2.0f / x;") == right  # the host's branch
    assert accuracy.digest(cases_of_row(Op("mish", "x", "x * mishf(x)"))) != right


def cases_of_row(row: Op) -> list[Case]:
    return list({case.name: case for case in cases_of(row)}.values())


# --- the kernels ---------------------------------------------------------------------------------


def test_the_text_has_no_name_of_its_own_that_an_operand_may_have() -> None:
    text = accuracy.cuda_text(list(SOME.values()))
    own = {"i_", "given_", "out_", "count_", "result_"}
    assert not own & {name for case in CASES.values() for name in case.tensors}
    assert not own & {f"{name}_" for case in CASES.values() for name in case.live}
    assert max(len(case.live) for case in CASES.values()) <= accuracy.MOST_LIVE
    assert "torch" not in text
    assert text.isascii()


needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


@needs_nvcc
def test_nvcc_takes_a_case_of_every_row(tmp_path: Path) -> None:
    cases = [mine[0] for mine in accuracy.rows(CASES).values()]
    libraries, errors = accuracy.compiler("cuda", tmp_path, "90").build_all(cases)
    assert not errors
    assert sum(len(library.cases) for library in libraries) == len(cases)


@needs_nvcc
def test_nvcc_builds_what_ctypes_can_call(tmp_path: Path) -> None:
    (wrong,) = cases_of_row(Op("exp", "x", "expf(x) +"))
    right = CASES["gelu.default approximate=none"]
    ((library,), errors) = accuracy.compiler("cuda", tmp_path, "90").build_all([right, wrong])
    assert library.cases == (right,)
    assert list(errors) == ["exp.default"]
    assert "expected an expression" in errors["exp.default"]
    assert hasattr(ctypes.CDLL(str(library.path)), "run_0")


@registry.needs_fma
def test_the_same_text_gives_the_values_of_the_registry(tmp_path: Path) -> None:
    """All operands, live numbers and threads reach the expression."""
    cases = list(SOME.values())
    (tmp_path / "rows").mkdir()
    library = registry.compiled(cases, tmp_path / "rows")
    built, errors = accuracy.compiler("cpu", tmp_path).build_all(cases)
    assert not errors
    for case, mine in ((case, b) for b in built for case in b.cases):
        given = registry.operands(case)
        np.testing.assert_array_equal(mine.run(case, given), library.run(case, given))


# --- the run -------------------------------------------------------------------------------------


def measure(path: Path, *more: str) -> int:
    arguments = ["--json", str(path), "--device", "cpu", "--rows", ",".join(NAMES), *more]
    return accuracy.main(arguments)


@registry.needs_fma
def test_run_on_the_cpu_writes_both_files(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "new" / "accuracy.json"
    measure(path)
    assert re.search(r"^4 rows, \d fail$", capsys.readouterr().out, re.MULTILINE)
    results = json.loads(path.read_text())
    assert sorted(results["rows"]) == sorted(NAMES)
    assert results["rows"]["gelu"]["cases"] == 2
    assert results["rows"]["leaky_relu"]["overall"][0] <= 1.0
    assert path.with_suffix(".md").read_text() == accuracy.table(results)
    stale = [fault for fault in accuracy.problems(SOME, path) if accuracy.COMMAND in fault]
    assert not stale
    text = path.read_text()
    measure(path)
    assert path.read_text() == text


@registry.needs_fma
def test_pytorch_runs_where_ours_does(tmp_path: Path) -> None:
    """The operands of PyTorch's operator go to the GPU; here it is one in name alone."""
    case = CASES["gelu.default approximate=tanh"]
    ((library,), _) = accuracy.compiler("cpu", tmp_path).build_all([case])
    expected = accuracy.measure(case, library)
    moved: list[torch.Tensor] = []

    def cuda(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return tensor

    named = accuracy.Library(library.path, library.cases, "cuda")
    with (
        mock.patch.object(torch.Tensor, "cuda", cuda),
        mock.patch.object(accuracy.Library, "run", lambda _, *given: library_run(library, *given)),
    ):
        assert accuracy.measure(case, named) == expected
    assert [tensor.dtype for tensor in moved] == [torch.float32]


library_run = accuracy.Library.run


@registry.needs_fma
def test_what_fails_is_an_entry(tmp_path: Path) -> None:
    wrong = cases_of_row(Op("exp", "x", "expf(x) +"))
    cases = {case.name: case for case in (*wrong, CASES["log.default"], CASES["sin.default"])}

    def broken(self: accuracy.Library, case: Case, given: Mapping[str, Array]) -> Array:
        if case.row.name == "sin":
            raise RuntimeError("an illegal memory access")
        return library_run(self, case, given)

    with mock.patch.object(accuracy.Library, "run", broken):
        results = accuracy.run(cases, "cpu")
    faults = accuracy.failures(results)
    assert list(faults) == ["exp", "sin"]
    assert "does not compile: " in faults["exp"][0]
    assert faults["sin"] == ["RuntimeError: an illegal memory access"]
    assert "2 fail" in accuracy.summary(results)
    assert accuracy.table(results).count("\n| ") == 2 + 3


# --- the committed file --------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Results as a GPU would give them, all right."""
    entries = {
        name: {**accuracy.failed(mine[0], ""), "faults": [], "cases": len(mine),
               "sha256": accuracy.digest(mine)} for name, mine in accuracy.rows(SOME).items()
    }  # fmt: skip
    path = tmp_path / "accuracy.json"
    results = {"device": "Some GPU", "torch": "2.11.0+cu130", "cuda": "13.0", "rows": entries}
    accuracy.write(results, path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    results = json.loads(path.read_text())
    change(results["rows"])
    accuracy.write(results, path)


def test_right_results_are_accepted(stored: Path) -> None:
    assert list(accuracy.problems(SOME, stored)) == []
    assert stored.read_text().count("\n") == len(NAMES) + 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows.pop("gelu"), "gelu: not measured: on a machine with an NVIDIA GPU, "),
        (lambda rows: rows["gelu"].update(sha256="0"), "gelu: measured with another text: "),
        (lambda rows: rows.update(none=rows["gelu"]), "none: no row has this name"),
        (lambda rows: rows["gelu"].update(slice=[4.0, 0.5]), "gelu: slice: 4 ulp, 3 allowed"),
        (lambda rows: rows["gelu"].update(faults=["NaN"]), "gelu: NaN"),
    ],
)
def test_wrong_results_are_not(
    stored: Path, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    edit(stored, change)
    (problem,) = accuracy.problems(SOME, stored)
    assert problem.startswith(expected)


def test_a_table_that_was_edited_is_seen(stored: Path) -> None:
    table = stored.with_suffix(".md")
    table.write_text(table.read_text().replace("0.00", "0.01", 1))
    (problem,) = accuracy.problems(SOME, stored)
    assert problem == "accuracy.md is not what accuracy.json gives: run the command again"


def test_missing_results_are_told_how_to_make(tmp_path: Path) -> None:
    (problem,) = accuracy.problems(SOME, tmp_path / "accuracy.json")
    assert "is missing: on a machine with an NVIDIA GPU, python tests/accuracy.py" in problem


def test_check_judges_the_committed_file(stored: Path, capsys: Any) -> None:
    with mock.patch.object(accuracy, "RESULTS", stored), mock.patch.object(registry, "CASES", SOME):
        assert accuracy.main(["--check"]) == 0
        edit(stored, lambda rows: rows.pop("where"))
        assert accuracy.main(["--check"]) == 1
    assert "where: not measured" in capsys.readouterr().out
