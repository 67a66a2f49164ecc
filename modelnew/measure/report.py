"""The report of benchmark runs: rows of result files in, a page, Markdown or a picture out."""

from __future__ import annotations

import importlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from modelnew.ir import ModelNewError
from modelnew.measure import charts
from modelnew.measure.child import Json
from modelnew.measure.results import task_kind
from modelnew.render import TEMPLATES

BASELINES = {**charts.BASELINES, "best": "the better of both"}
SHOWN_P = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)  # in the headline; the curves have every p
SLOWER = 0.97  # of eager's speed: below it a task is called slower, above it is noise
NOTABLE_SPREAD = 0.1  # of the median, in rows that carry no warnings of their own
VERDICTS = ("right", "wrong", "failed", "not verified", "other text verified", "degenerate")
MISSING = "\u2013"
ALGEBRA_TEXT = (
    "Rendered with algebra, and counted in this table alone: formulas that are equal in real "
    "arithmetic, with fewer operations than the reference asks for."
)
ADVICE = "the report's charts need a package that is not installed: pip install vl-convert-python"


# --- one task ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """All results of one reference: the last row of each kind of result."""

    name: str
    rows: Mapping[str, Json]

    @property
    def bench(self) -> Json:
        return self.rows.get("bench", {})

    @property
    def verify(self) -> Json:
        return self.rows.get("verify", {})

    @property
    def anchor(self) -> str:
        """The name as an element id that needs no escaping in a link."""
        return "task-" + quote(self.name, safe="").replace("%", "~")

    def first(self, key: str) -> Any:
        """The first value that any row has for a key, timings before verdicts."""
        rows = (self.bench, self.verify, *self.rows.values())
        return next((row[key] for row in rows if row.get(key) not in (None, "")), None)

    @property
    def kind(self) -> str:
        kind = self.first("kind")
        return kind if kind in charts.KINDS else charts.KINDS[-1]

    @property
    def degenerate(self) -> list[str]:
        return _texts(self.verify.get("degenerate"))

    @property
    def algebra(self) -> bool:
        """Whether the solution computes a formula that is equal in real arithmetic alone."""
        return any(row.get("algebra") is True for row in self.rows.values())

    @cached_property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.degenerate:
            return "degenerate"
        if not self.verify:
            failed = "bench" in self.failing_rows if self.bench else bool(self.failing_rows)
            return "failed" if failed else "not verified"
        if not _same_text(self.bench, self.verify):
            return "other text verified"
        return {"ok": "right", "wrong": "wrong"}.get(self.verify["status"], "failed")

    @property
    def failing_rows(self) -> dict[str, Json]:
        """Rows whose status is not ok; a disagreement is no failure, it has a table of its own."""
        return {
            kind: row
            for kind, row in self.rows.items()
            if row["status"] not in ("ok", "skipped") and kind != "disagreement"
        }

    @cached_property
    def ms(self) -> dict[str, float]:
        """Median milliseconds by candidate; empty unless the solution was timed."""
        row = self.bench
        short = {name: row.get(f"{name}_ms") for name in ("solution", "eager", "compile")}
        times = _numbers({**short, **_dict(row.get("milliseconds"))})
        times = {name: time for name, time in times.items() if time > 0}
        return times if row.get("status") == "ok" and "solution" in times else {}

    def speedup(self, baseline: str) -> float | None:
        """The baseline's time over the solution's; "best": the faster of eager and compile."""
        names = ("eager", "compile") if baseline == "best" else (baseline,)
        times = [self.ms[name] for name in names if name in self.ms]
        return min(times) / self.ms["solution"] if times else None

    @property
    def memory(self) -> float | None:
        """What a call of the solution allocates at most, as a multiple of the same for eager."""
        peaks = _numbers(self.bench.get("peak_bytes"))
        ours, eager = peaks.get("solution"), peaks.get("eager")
        return ours / eager if ours and eager else None

    @property
    def roofline(self) -> float | None:
        return _number(self.bench.get("roofline_ratio"))

    @property
    def candidates(self) -> list[Json]:
        """A row a candidate: name, ms, spread, speed-up of the solution, message."""
        spread, messages = _numbers(self.bench.get("spread")), _dict(self.bench.get("messages"))
        mine = self.ms.get("solution")
        return [
            {"name": name, "ms": self.ms.get(name), "spread": spread.get(name),
             "speedup": self.ms[name] / mine if mine and name in self.ms else None,
             "message": messages.get(name)}
            for name in dict.fromkeys([*self.ms, *messages])
        ]  # fmt: skip

    @property
    def checks(self) -> list[Json]:
        """Those of verify, each with every key that the page shows."""
        blank = dict.fromkeys(("name", "dtype", "shape", "status", "ratio", "message"))
        found = _list(self.verify.get("checks"))
        return [{**blank, **check} for check in found if isinstance(check, dict)]

    @property
    def check_counts(self) -> Counter[str]:
        counted = _numbers(self.verify.get("check_counts"))  # a file may keep few of the checks
        found = Counter(str(check["status"]) for check in self.checks)
        return Counter({name: int(count) for name, count in counted.items()}) or found

    @property
    def failures(self) -> list[Json]:
        """What failed, status and the whole message, wrong checks included."""
        found = []
        for kind, row in self.failing_rows.items():
            lines = [str(row.get("message") or "")]
            if kind == "verify":
                bad = [c for c in self.checks if c["status"] not in ("ok", "skipped")]
                lines += [_check_line(check) for check in bad]
            text = "\n".join(line for line in lines if line) or "(no message)"
            found.append({"what": kind or "run", "status": row["status"], "message": text})
        return found

    @property
    def warnings(self) -> list[str]:
        """What to know of the timing: the row's own warnings, or in old rows what they show."""
        row = self.bench
        found = _texts(row.get("warnings"))
        if "warnings" not in row:
            spread = _numbers(row.get("spread"))
            found = [
                f"the times of {name} spread by {spread[name]:.0%} of their median"
                for name in ("solution", "eager")
                if spread.get(name, 0) > NOTABLE_SPREAD
            ]
        messages = _dict(row.get("messages"))
        return found + [f"{name} was not timed: {text}" for name, text in messages.items()]


def _same_text(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are of one solution text, as far as they tell."""
    return len({row["sha256"] for row in (one, other) if row.get("sha256")}) < 2


def _check_line(check: Mapping[str, Any]) -> str:
    words = [str(check[key]) for key in ("name", "dtype", "shape") if check[key]]
    return f"{' '.join(words) or 'check'}: {check['message'] or check['status']}"


# --- all tasks -----------------------------------------------------------------------------------


def merge(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    """One entry a reference, sorted as people count; of rows of one kind the last one holds.

    A reference rendered with algebra too is another entry.
    """
    found: dict[str, dict[str, Json]] = {}
    for row in rows:
        name = "/".join(re.split(r"[/\\]+", str(row["reference"]))[-2:])
        name += " (algebra)" if row.get("algebra") is True else ""
        found.setdefault(name, {})[task_kind(row)] = dict(row)
    for kinds in found.values():
        if "bench" in kinds or "verify" in kinds:
            kinds.pop("", None)  # an error from before there was anything to measure
    by_number = sorted(found, key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(9), name))
    return [Task(name, found[name]) for name in by_number]


@dataclass(frozen=True)
class Summary:
    """The tasks of a report and the numbers of those without algebra, or of those with it."""

    tasks: Sequence[Task]
    algebra: bool = False

    @cached_property
    def speed_only(self) -> bool:
        """Whether no file holds a verdict: then every task that ran counts as if right."""
        return not any(task.verify for task in self.tasks)

    @cached_property
    def counted(self) -> list[Task]:
        """Any answer is right in a degenerate task, so those prove nothing."""
        own = (task for task in self.tasks if task.algebra == self.algebra)
        return [task for task in own if task.verdict != "degenerate"]

    @cached_property
    def with_algebra(self) -> Summary | None:
        """The same tasks, those with algebra counted instead; None where there is none."""
        found = not self.algebra and any(task.algebra for task in self.tasks)
        return Summary(self.tasks, algebra=True) if found else None

    @cached_property
    def right(self) -> list[Task]:
        enough = ("right", "not verified") if self.speed_only else ("right",)
        return [task for task in self.counted if task.verdict in enough]

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many tasks there are of each verdict, and disagreements."""
        verdicts = Counter(task.verdict for task in self.tasks)
        counts = {"tasks": len(self.tasks), **{name: verdicts[name] for name in VERDICTS}}
        disagreements = sum("disagreement" in task.rows for task in self.tasks)
        algebra = sum(task.algebra for task in self.tasks)
        return {**counts, "algebra": algebra, "disagreements": disagreements}

    @cached_property
    def baselines(self) -> list[str]:
        """Eager, and where anything was compiled, compile and the better of both."""
        compiled = any("compile" in task.ms for task in self.tasks)
        timed = any(task.ms for task in self.tasks)
        return list(BASELINES) if compiled else ["eager"] if timed else []

    def speedups(self, baseline: str) -> list[tuple[float, Task]]:
        """Of all right and timed tasks, the slowest first."""
        pairs = [(task.speedup(baseline), task) for task in self.right]
        known = [(speedup, task) for speedup, task in pairs if speedup is not None]
        return sorted(known, key=lambda pair: (pair[0], pair[1].name))

    def fast(self, baseline: str, p: float) -> float:
        """fast_p: the share of all counted tasks that are right and more than p times as fast."""
        fast = sum(speedup > p for speedup, _ in self.speedups(baseline))
        return fast / len(self.counted) if self.counted else 0.0

    def curve(self, baseline: str) -> list[tuple[float, float]]:
        """fast_p where it steps, for p from 0 to the curves' limit."""
        limit = charts.FAST_LIMIT
        steps = {speedup for speedup, _ in self.speedups(baseline) if speedup < limit}
        return [(p, self.fast(baseline, p)) for p in sorted({0.0, *steps, limit})]

    def geomean(self, baseline: str) -> float | None:
        """The geometric mean of the speed-ups, None where there is none."""
        return _geomean([speedup for speedup, _ in self.speedups(baseline)])

    @cached_property
    def memory(self) -> float | None:
        """The geometric mean of what right tasks take of eager's memory."""
        return _geomean([task.memory for task in self.right if task.memory is not None])

    @cached_property
    def slower(self) -> list[tuple[float, Task]]:
        return [pair for pair in self.speedups("eager") if pair[0] < SLOWER]

    def without(self, baseline: str) -> int:
        """Right tasks without a time of the baseline: they count as not faster."""
        return len(self.right) - len(self.speedups(baseline))

    @cached_property
    def failures(self) -> list[tuple[Task, Json]]:
        return [(task, failure) for task in self.tasks for failure in task.failures]

    @cached_property
    def warnings(self) -> list[tuple[Task, str]]:
        return [(task, warning) for task in self.tasks for warning in task.warnings]

    @cached_property
    def machines(self) -> list[Json]:
        """A row a machine and release: device, torch, cuda, rows, medians of the ceilings."""
        groups: dict[tuple[str, ...], list[Json]] = {}
        for row in (row for task in self.tasks for row in task.rows.values()):
            if row.get("device"):
                about = (str(row.get(key) or "") for key in ("device", "torch", "cuda"))
                groups.setdefault(tuple(about), []).append(row)
        return [
            {"device": about[0], "torch": about[1], "cuda": about[2], "rows": len(rows),
             "ceilings": _ceilings(rows)}
            for about, rows in groups.items()
        ]  # fmt: skip


def _ceilings(rows: Iterable[Json]) -> list[str]:
    found: dict[str, list[float]] = {}
    for row in rows:
        values = {"copy": row.get("big_copy_gbps"), **_dict(row.get("ceilings"))}
        for name, value in _numbers(values).items():
            found.setdefault(name, []).append(value)
    return [
        f"{name} {statistics.median(values):,.0f} {'GB/s' if 'copy' in name else 'TFLOP/s'}"
        for name, values in found.items()
    ]


def _geomean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def _numbers(values: object) -> dict[str, float]:
    """Those of a table that are finite numbers."""
    found = {name: _number(value) for name, value in _dict(values).items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: object) -> float | None:
    """The value if it is a finite number: a file may hold null, NaN or a text."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None  # type: ignore[arg-type]


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: object) -> list[str]:
    return [value] if isinstance(value, str) and value else [str(item) for item in _list(value)]


# --- numbers as text -----------------------------------------------------------------------------


def ms_text(value: float | None) -> str:
    """Milliseconds with three or four digits that mean something."""
    if value is None:
        return MISSING
    return f"{value:.{1 if value >= 100 else 2 if value >= 10 else 3 if value >= 0.1 else 4}f}"


def times_text(value: float | None) -> str:
    """A speed-up, such as 1.58x with a multiplication sign."""
    return MISSING if value is None else f"{value:.{1 if value >= 100 else 2}f}\u00d7"


def share_text(value: float | None) -> str:
    """A share in percent."""
    return MISSING if value is None else f"{value:.0%}"


def bytes_text(value: float | None) -> str:
    """Bytes with a decimal prefix."""
    if value is None:
        return MISSING
    step = min(int(math.log10(max(value, 1)) // 3), 4)
    return f"{value / 1000**step:.{0 if step == 0 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[step]}"


# --- the page ------------------------------------------------------------------------------------


def html(rows: Sequence[Json]) -> str:
    """The whole report as one page that needs no network and no server."""
    results = Summary(merge(rows))
    return _environment().get_template("report.html.jinja").render(
        results=results, baselines=BASELINES, shown_p=SHOWN_P, slower=SLOWER, verdicts=VERDICTS,
        kinds=charts.KINDS, specs=charts.specs(results), missing=MISSING, algebra_text=ALGEBRA_TEXT,
        palettes=[charts.LIGHT, charts.DARK], bundle=_bundle(),
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True,
    )  # fmt: skip
    environment.filters.update(
        ms=ms_text, times=times_text, share=share_text, size=bytes_text, number=_number,
        numbers=_numbers, texts=_texts, breakable=_breakable,
    )  # fmt: skip
    return environment


def _breakable(name: str) -> Markup:
    """A long name that may go on in a new line after a slash or an underscore."""
    return Markup(re.sub("([/_]+)", r"\1<wbr>", str(escape(name))))


def _library() -> Any:
    """The chart package: large, and needed by nothing else."""
    try:
        return importlib.import_module("vl_convert")
    except ImportError:
        raise ModelNewError(ADVICE) from None


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that can stand in a page."""
    text = str(_library().javascript_bundle())
    # Inside <script> only these three end or change the script; in JavaScript they occur in
    # strings and patterns alone, where the backslash says the same.
    return re.sub(r"<(?=/script|script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def headline_png(rows: Sequence[Json]) -> bytes:
    """The fast_p curves and the sorted speed-ups as a picture for a README, 900 px wide or so."""
    library, results = _library(), Summary(merge(rows))
    if not results.speedups("eager"):
        raise ModelNewError("no task of these files is right and timed: there is nothing to draw")
    return bytes(library.vegalite_to_png(charts.headline(results), scale=2))


# --- Markdown ------------------------------------------------------------------------------------


def markdown(rows: Sequence[Json]) -> str:
    """The headline, a line a task, and the failures."""
    results = Summary(merge(rows))
    parts = ["# Benchmark report", *_headline_lines(results)]
    parts += ["## Coverage", coverage_table(results.tasks), "## Tasks", _task_table(results)]
    if results.failures:
        parts.append("## Failures")
    for task, failure in results.failures:
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", failure["message"])), 0)
        parts += [
            _cell(f"{task.name}, {failure['what']}: {failure['status']}"),
            f"{fence}\n{failure['message']}\n{fence}",
        ]
    return "\n\n".join(parts) + "\n"


def _headline_lines(results: Summary) -> list[str]:
    parts = [", ".join(f"{name}: {count}" for name, count in results.counts.items() if count)]
    if results.speed_only:
        parts.append("**Speed only: no verdicts in these files**; every task counts as if right.")
    parts += [
        ", ".join([m["device"], f"PyTorch {m['torch']}", f"CUDA {m['cuda']}", *m["ceilings"]])
        for m in results.machines
    ]
    if results.baselines:
        parts += [_speed_table(results)]
        parts += [f"Slower than {SLOWER} of eager: {len(results.slower)}."]
        if results.with_algebra:
            parts += [ALGEBRA_TEXT, _speed_table(results.with_algebra)]
    return parts


def _speed_table(results: Summary) -> str:
    head = ["baseline", *(f"fast_{p:g}" for p in SHOWN_P), "geometric mean", "tasks"]
    body = [
        [BASELINES[name], *(share_text(results.fast(name, p)) for p in SHOWN_P),
         times_text(results.geomean(name)), str(len(results.speedups(name)))]
        for name in results.baselines
    ]  # fmt: skip
    return _table(head, body)


def coverage_table(found: Sequence[Task]) -> str:
    """A line a folder of references: what became of its tasks, what time and memory they take."""
    head = ["folder", "tasks", "own kernels", "right", "degenerate", "wrong", "no verdict",
            "right by KernelBench", "over eager", "over torch.compile",
            "memory of eager"]  # fmt: skip
    folders: dict[str, list[Task]] = {}
    for task in found:
        if not task.algebra:
            folders.setdefault(task.name.rpartition("/")[0] or ".", []).append(task)
    body = []
    for folder, tasks in sorted(folders.items()):
        results = Summary(tasks)
        counts = results.counts
        theirs = [_dict(task.verify.get("kernelbench")) for task in tasks]
        judged = [verdict["correct"] is True for verdict in theirs if "correct" in verdict]
        numbers = [
            len(tasks), sum(bool(task.first("kernels")) for task in tasks), len(results.right),
            counts["degenerate"], counts["wrong"] + counts["failed"],
            counts["not verified"] + counts["other text verified"],
        ]  # fmt: skip
        body.append(
            [folder, *map(str, numbers), f"{sum(judged)} of {len(judged)}" if judged else MISSING,
             *(_speed_of_right(results, name) for name in ("eager", "compile")),
             share_text(results.memory)]
        )  # fmt: skip
    return _table(head, body)


def _speed_of_right(results: Summary, baseline: str) -> str:
    """The mean speed-up, with how many right tasks have one where not all do."""
    text, measured = times_text(results.geomean(baseline)), len(results.speedups(baseline))
    return f"{text} of {measured}" if 0 < measured < len(results.right) else text


def _task_table(results: Summary) -> str:
    head = ["task", "kind", "verdict", "ms", "eager", "compile", "x eager", "x compile", "roofline"]
    body = [
        [task.name, task.kind, task.verdict,
         *(ms_text(task.ms.get(name)) for name in ("solution", "eager", "compile")),
         *(times_text(task.speedup(name)) for name in ("eager", "compile")),
         share_text(task.roofline)]
        for task in results.tasks
    ]  # fmt: skip
    return _table(head, body)


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    """Text that stays in its cell and is no markup."""
    return re.sub(r"([|<>&`*\\])", r"\\\1", " ".join(text.split()))
