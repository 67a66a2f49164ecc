"""The report: merging of rows, the numbers by hand, and a page that is safe and self-contained."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from modelnew.ir import ModelNewError
from modelnew.measure import charts, report
from modelnew.measure import results as result_files

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "</script><script>alert(1)</script> & \"'"

Row = dict[str, Any]

charted = pytest.mark.skipif(
    importlib.util.find_spec("vl_convert") is None, reason="needs vl-convert-python"
)


def bench(name: str, ours: float = 1.0, eager: float = 2.0, **changes: Any) -> Row:
    milliseconds = {"solution": ours, "eager": eager, **changes.pop("more", {})}
    return {
        "task": "bench", "reference": f"somewhere/level1/{name}.py", "status": "ok",
        "solution": f"solutions/{name}.py", "sha256": name * 8, "message": "",
        "device": "Some GPU", "torch": "2.11.0", "cuda": "13.0", "kind": "pointwise",
        "kernels": 1, "plan": "one kernel\n    y = x", "milliseconds": milliseconds,
        "spread": {"solution": 0.01}, "roofline_ms": 0.5, "roofline_ratio": 0.5 / (ours or 1),
        "peak_bytes": {"solution": 10**6, "eager": 2 * 10**6}, "bytes_moved": 3 * 10**9,
        "ceilings": {"copy": 4000.0, "TF32 product": 400.0}, "warnings": [], "messages": {},
        **changes,
    }  # fmt: skip


def verify(name: str, status: str = "ok", **changes: Any) -> Row:
    check = {"name": "own", "dtype": "float32", "shape": "2x3", "status": "ok", "ratio": 0.1}
    return {
        "task": "verify", "reference": f"elsewhere/level1/{name}.py", "status": status,
        "sha256": name * 8, "message": "", "device": "Some GPU", "torch": "2.11.0",
        "cuda": "13.0", "checks": [{**check, "error": 0.0, "message": ""}],
        "max_error_ratio": 0.1, "degenerate": [], "truth": {"GPU": 1}, **changes,
    }  # fmt: skip


def results(*rows: Row) -> report.Summary:
    return report.Summary(report.merge(rows))


def five() -> list[Row]:
    """Speed-ups 2, 1 and 0.5 that are right, one of 9 that is wrong, a degenerate one of 9."""
    times = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 2 / 9, "e": 2 / 9}
    rows = [bench(name, ours) for name, ours in times.items()]
    rows += [verify(name) for name in "abc"]
    return [*rows, verify("d", "wrong"), verify("e", degenerate=["the output is constant"])]


# --- merging -------------------------------------------------------------------------------------


def test_rows_of_one_reference_are_one_task_and_the_last_of_a_kind_holds() -> None:
    rows = [
        bench("a", 4.0), verify("a", "wrong"), bench("a", 1.0), verify("a"),
        {"task": "disagreement", "reference": "level1/a.py", "status": "disagree"},
    ]  # fmt: skip
    (task,) = report.merge(rows)
    assert task.name == "level1/a.py"
    assert task.ms["solution"] == 1.0
    assert task.verdict == "right"
    assert task.failures == []
    assert results(*rows).counts["disagreements"] == 1


def test_same_names_of_two_levels_are_two_tasks_in_the_order_of_people() -> None:
    rows = [{"reference": path, "status": "ok", "task": "bench"} for path in (
        "x/level1/10_a.py", "x/level2/2_a.py", r"C:\level1\2_a.py", "a.py",
    )]  # fmt: skip
    names = [task.name for task in report.merge(rows)]
    assert names == ["a.py", "level1/2_a.py", "level1/10_a.py", "level2/2_a.py"]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"milliseconds": {}}, "bench"),
        ({"checks": []}, "verify"),
        ({}, ""),
        ({"task": "verify", "milliseconds": {}}, "verify"),
        ({"task": None, "status": "disagree"}, "disagreement"),
    ],
)
def test_old_rows_tell_what_they_are_by_their_keys(row: Row, kind: str) -> None:
    assert result_files.task_kind({"reference": "a.py", "status": "ok", **row}) == kind


def test_a_verdict_of_another_text_does_not_count() -> None:
    found = results(bench("a"), verify("a", sha256="other"))
    assert found.tasks[0].verdict == "other text verified"
    assert found.fast("eager", 1.0) == 0.0
    assert results(bench("a"), verify("a", sha256=None)).tasks[0].verdict == "right"


def test_a_task_without_verify_row_is_not_verified_among_verified_ones() -> None:
    found = results(bench("a"), bench("b"), verify("b"))
    assert not found.speed_only
    assert [task.verdict for task in found.tasks] == ["not verified", "right"]
    assert found.fast("eager", 1.0) == 0.5


def test_without_any_verify_row_every_task_that_ran_counts_as_right() -> None:
    found = results(bench("a"), bench("b", status="crashed", milliseconds={}))
    assert found.speed_only
    assert [task.verdict for task in found.tasks] == ["not verified", "failed"]
    assert found.fast("eager", 1.0) == 0.5
    assert "no verdicts in these files" in report.markdown([bench("a")])


def test_a_file_may_keep_the_count_of_its_checks_alone() -> None:
    task = results(verify("a")).tasks[0]
    assert task.check_counts == {"ok": 1}
    task = results(verify("a", checks=[], check_counts={"ok": 93, "skipped": 2})).tasks[0]
    assert task.check_counts == {"ok": 93, "skipped": 2}
    assert "93 ok" in report.html([verify("a", checks=[], check_counts={"ok": 93})])


def test_an_error_before_any_measurement_is_a_failure_until_there_is_a_result() -> None:
    bare = {"reference": "x/level1/a.py", "status": "error", "message": "not rendered yet"}
    assert results(bare).tasks[0].failures[0]["message"] == "not rendered yet"
    assert results(bare, bench("a")).failures == []


# --- numbers -------------------------------------------------------------------------------------


def test_fast_p_by_hand() -> None:
    found = results(*five())
    assert len(found.counted) == 4  # the degenerate one proves nothing
    shares = {p: found.fast("eager", p) for p in (0.0, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0)}
    assert shares == {0.0: 0.75, 0.5: 0.5, 0.8: 0.5, 1.0: 0.25, 1.5: 0.25, 2.0: 0.0, 4.0: 0.0}
    assert found.curve("eager") == [(0.0, 0.75), (0.5, 0.5), (1.0, 0.25), (2.0, 0.0), (4.0, 0.0)]
    assert found.geomean("eager") == pytest.approx(1.0)
    assert [task.name for _, task in found.slower] == ["level1/c.py"]
    assert found.baselines == ["eager"]
    assert found.counts == {
        "tasks": 5, "right": 3, "wrong": 1, "failed": 0, "not verified": 0,
        "other text verified": 0, "degenerate": 1, "algebra": 0, "disagreements": 0,
    }  # fmt: skip


def test_the_better_of_eager_and_compile_and_a_missing_compile_time() -> None:
    rows = [
        bench("a", more={"compile": 1.5}), verify("a"),
        bench("b", eager=4.0, messages={"compile": "no"}), verify("b"),
    ]  # fmt: skip
    found = results(*rows)
    assert found.baselines == ["eager", "compile", "best"]
    assert [speedup for speedup, _ in found.speedups("best")] == [1.5, 4.0]
    assert found.fast("compile", 1.0) == 0.5
    assert found.without("compile") == 1
    assert found.tasks[1].warnings == ["compile was not timed: no"]


def test_times_that_are_missing_null_or_no_number_are_no_times() -> None:
    rows = [
        {"task": "bench", "reference": "a.py", "status": "ok"},
        {"task": "bench", "reference": "b.py", "status": "ok", "milliseconds": None},
        bench("c", float("nan")),
        bench("d", 0.0),
        {**bench("e"), "milliseconds": None, "solution_ms": 1.0, "eager_ms": 3.0},
    ]
    found = results(*rows)
    assert [task.speedup("eager") for task in found.tasks] == [None, None, None, None, 3.0]
    assert results().fast("eager", 1.0) == 0.0
    assert results().geomean("eager") is None


def test_machines_and_their_ceilings() -> None:
    rows = [bench("a"), bench("b", ceilings={"copy": 4200.0}), bench("c", device="Other")]
    first, second = results(*rows).machines
    assert (first["device"], first["rows"]) == ("Some GPU", 2)
    assert first["ceilings"] == ["copy 4,100 GB/s", "TF32 product 400 TFLOP/s"]
    assert second["device"] == "Other"


def test_old_rows_are_warned_of_by_their_spread() -> None:
    row = bench("a", spread={"solution": 0.4, "eager": 0.01})
    assert results(row).warnings == []
    del row["warnings"]
    ((_, warning),) = results(row).warnings
    assert warning == "the times of solution spread by 40% of their median"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (report.ms_text(0.01234), "0.0123"),
        (report.ms_text(2.7176), "2.718"),
        (report.ms_text(1234.56), "1234.6"),
        (report.ms_text(None), report.MISSING),
        (report.times_text(1.578), "1.58\u00d7"),
        (report.bytes_text(0), "0 B"),
        (report.bytes_text(1.5e9), "1.5 GB"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


# --- files ---------------------------------------------------------------------------------------


def test_load_reads_several_files_and_gives_bare_rows_the_kind_of_their_file(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    old = {key: value for key, value in bench("a").items() if key != "task"}
    one.write_text(json.dumps([old, {"reference": "b.py", "status": "error"}]))
    two.write_text(json.dumps([verify("a")]))
    assert [row["task"] for row in result_files.load([one, two])] == ["bench", "bench", "verify"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("[", "is not JSON"),
        ('{"reference": "a.py"}', "not a list of rows"),
        ('[{"reference": "a.py"}]', 'entry 0 has no "reference" and "status"'),
        ('[{"reference": "a.py", "status": "ok"}, 7]', "entry 1 has no"),
    ],
)
def test_a_file_that_holds_no_results_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelNewError, match=rf"results\.json: .*{re.escape(message)}"):
        result_files.load([path])


# --- Markdown ------------------------------------------------------------------------------------


def test_markdown() -> None:
    rows = [
        bench("a", more={"compile": 1.5}), verify("a"), bench("b", 4.0, kind=None),
        verify("b", "wrong", checks=[
            {"name": "own", "status": "wrong", "message": "at [0] ```1``` | <b>"}]),
    ]  # fmt: skip
    dash, times = report.MISSING, "\u00d7"
    assert (
        report.markdown(rows)
        == f"""\
# Benchmark report

tasks: 2, right: 1, wrong: 1

Some GPU, PyTorch 2.11.0, CUDA 13.0, copy 4,000 GB/s, TF32 product 400 TFLOP/s

| baseline | fast_0 | fast_0.5 | fast_0.8 | fast_1 | fast_1.5 | fast_2 | geometric mean | tasks |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| eager PyTorch | 50% | 50% | 50% | 50% | 50% | 0% | 2.00{times} | 1 |
| torch.compile | 50% | 50% | 50% | 50% | 0% | 0% | 1.50{times} | 1 |
| the better of both | 50% | 50% | 50% | 50% | 0% | 0% | 1.50{times} | 1 |

Slower than 0.97 of eager: 0.

## Coverage

| folder | tasks | own kernels | right | degenerate | wrong | no verdict \
| right by KernelBench | over eager | over torch.compile | memory of eager |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| level1 | 2 | 2 | 1 | 0 | 1 | 0 | {dash} | 2.00{times} | 1.50{times} | 50% |

## Tasks

| task | kind | verdict | ms | eager | compile | x eager | x compile | roofline |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| level1/a.py | pointwise | right | 1.000 | 2.000 | 1.500 | 2.00{times} | 1.50{times} | 50% |
| level1/b.py | unknown kind | wrong | 4.000 | 2.000 | {dash} | 0.50{times} | {dash} | 12% |

## Failures

level1/b.py, verify: wrong

````
own: at [0] ```1``` | <b>
````
"""
    )


def test_markdown_cells_hold_no_markup() -> None:
    row = {"reference": "x/a|b<i>.py", "status": "ok"}
    assert r"| x/a\|b\<i\>.py | unknown kind |" in report.markdown([row])


def test_without_the_chart_package_markdown_works_and_the_others_say_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    report._bundle.cache_clear()
    monkeypatch.setattr(report.importlib, "import_module", missing)
    assert "level1/a.py" in report.markdown(five())
    for make in (report.html, report.headline_png):
        with pytest.raises(ModelNewError, match="pip install vl-convert-python"):
            make(five())


# --- page and picture ----------------------------------------------------------------------------


def full() -> list[Row]:
    """Every section of the page has something in it, and texts that try to be markup."""
    return [
        *five(),
        bench("f", more={"compile": 1.2, "eager, CUDA graph": 1.9}, kind="product + pointwise",
              warnings=[EVIL], messages={"compile, max-autotune": EVIL}, plan=EVIL,
              flops={"product": 2e9, "convolution": 0}),
        verify("f", kernelbench={"compiled": True, "correct": False, "message": EVIL,
                                 "checker_errors": [], "checker_warnings": [EVIL]}),
        {"task": "disagreement", "reference": "level1/f.py", "status": "disagree",
         "message": EVIL},
        verify(EVIL, "wrong", max_error_ratio=float("inf"), checks=[
            {"name": EVIL, "status": "wrong", "message": EVIL}, {"status": "skipped"}]),
        {"task": "bench", "reference": "level1/g.py", "status": "timeout", "message": EVIL},
        verify("g", "error", plan_message="no plan: an operator",
               kernelbench={"status": "timeout", "message": "no answer"}),
        {"reference": "h.py", "status": "error", "message": None},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("vl_convert")
    return report.html(full())


def test_texts_of_rows_are_no_markup(page: str) -> None:
    assert "alert(1)</script>" not in page
    assert html.escape("<script>alert(1)") in page
    assert page.count("<script") == page.count("</script>") == 3


def test_the_page_fetches_nothing(page: str) -> None:
    bare = page.replace(report._bundle(), "")
    assert len(page) - len(bare) > 500_000, "the libraries are inlined"
    links = re.findall(r"""(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]*)""", bare)
    assert links, "the table links to the details"
    assert {link[:1] for link in links} == {"#"}
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bimport\b|<link|<iframe|fetch\(", bare)


def test_nothing_that_is_known_of_a_failure_is_left_out(page: str) -> None:
    long = "\n".join(f"line {number}" for number in range(500))
    rows = [*full(), verify("z", "crashed", message=long, checks=[])]
    assert long in report.html(rows)
    for title in ("Failures (5)", "Disagreements (1)", "All tasks (9)"):
        assert title in page
    for text in ("No verdict: timeout", "no answer", "no plan: an operator", "(no message)"):
        assert text in page


@charted
def test_links_lead_to_sections(page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    bare = page.replace(report._bundle(), "")
    assert set(re.findall(r'href="#([^"]+)"', bare)) <= set(ids)


@charted
@pytest.mark.parametrize("rows", [[], [{"reference": "a.py", "status": "ok"}]])
def test_a_page_of_almost_nothing(rows: list[Row]) -> None:
    assert "No task of these files was timed" in report.html(rows)
    with pytest.raises(ModelNewError, match="nothing to draw"):
        report.headline_png(rows)


@charted
def test_rows_of_nulls_make_a_page() -> None:
    row = dict.fromkeys(bench("a"))
    nulls = {**row, "task": "bench", "reference": "a.py", "status": "ok"}
    checks = dict.fromkeys(verify("a"))
    page = report.html([nulls, {**checks, "task": "verify", "reference": "a.py", "status": "ok"}])
    assert "None<" not in page.replace("<p>None.</p>", "")


@charted
def test_the_picture_is_a_png_of_the_size_of_a_readme() -> None:
    picture = report.headline_png(full())
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert 1600 <= width <= 2000  # two pixels a CSS pixel
    assert 600 <= height <= 1200


def test_every_kind_has_a_colour_and_a_shape() -> None:
    assert len(charts.KINDS) == len(charts.LIGHT) == len(charts.DARK) == len(charts.SHAPES)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_the_charts_sorts_and_filters(page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    # Errors of scripts, and what a reader would do, leave their marks in the dumped document.
    first = "<script>onerror = text => { document.title = 'bro' + 'ken: ' + text; };</script>"
    last = """<script>
        document.querySelectorAll("#all th button")[6].click();
        const verdict = document.getElementById("filter-verdict");
        verdict.value = "right";
        verdict.dispatchEvent(new Event("input"));
        location.hash = document.querySelector("#all tbody a").hash;
    </script>"""
    before, end, after = page.rpartition("</body>")
    text = before.replace("<head>", f"<head>{first}", 1) + last + end + after
    file.write_text(text, encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "broken: " not in done.stdout
    body = done.stdout[: done.stdout.index('<script type="application/json"')]
    assert "could not be drawn" not in body
    for name in ("fast", "eager", "compile", "roofline"):
        assert re.search(rf'id="chart-{name}"[^>]*data-drawn="yes"[^>]*>.{{0,400}}<svg', body, re.S)
    rows = re.findall(r"<tr data-kind=.*?</tr>", body, re.S)
    shown = [row for row in rows if "hidden" not in row.split(">")[0]]
    names = [re.sub("<[^>]+>", "", row.split("</td>")[0]).strip() for row in shown]
    assert names == ["level1/a.py", "level1/f.py", "level1/b.py", "level1/c.py"]
    assert "4 of 9 tasks" in body
    opened = re.findall(r'<details class="task" id="([^"]+)" open', body)
    assert opened == [re.search(r'href="#([^"]+)"', rows[0])[1]]  # type: ignore[index]


def test_coverage_says_of_how_many_tasks_a_speed_is() -> None:
    summary = results(*map(verify, "ab"), bench("a"), bench("b", more={"compile": 1.5}))
    eager, compiled = report.coverage_table(summary.tasks).splitlines()[2].split(" | ")[8:10]
    assert " of " not in eager
    assert compiled.endswith(" of 1")


def test_memory_is_that_of_right_tasks_beside_eager() -> None:
    peaks = {"solution": 3 * 10**6, "eager": 10**6}
    rows = [bench("a"), bench("b", peak_bytes=peaks), bench("c", peak_bytes={"solution": 4})]
    summary = results(
        *rows, *map(verify, "abc"), bench("d", peak_bytes=peaks), verify("d", "wrong")
    )
    assert summary.memory == pytest.approx((0.5 * 3) ** 0.5)
    assert report.coverage_table(summary.tasks).endswith(" | 122% |")


def test_the_readme_has_the_table_of_the_committed_results() -> None:
    root = Path(__file__).resolve().parent.parent
    files = [root / "benchmarks" / f"kernelbench_{name}.json" for name in ("bench", "verify")]
    rows = [row for path in files for row in json.loads(path.read_text())]
    assert report.coverage_table(report.merge(rows)) in (root / "README.md").read_text()
